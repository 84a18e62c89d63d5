"""Islands: training programs that come and go, and exchange through an object store."""

from importlib.util import find_spec

if missing := [name for name in ("msgspec", "obstore", "safetensors") if find_spec(name) is None]:
    raise ModuleNotFoundError(
        f"islands need {', '.join(missing)}: pip install 'jaxsparse[islands]'", name=missing[0]
    )

from jaxsparse.islands.life import Report as Report
from jaxsparse.islands.member import IslandState as IslandState
from jaxsparse.islands.store import Store as Store, UnreachableError as UnreachableError
from jaxsparse.islands.train import Islands as Islands, Status as Status
