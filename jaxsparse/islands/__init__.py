"""Islands: training programs that come and go, and exchange through an object store."""

from jaxsparse.islands.exchange import Report as Report
from jaxsparse.islands.islands import Islands as Islands, Status as Status
from jaxsparse.islands.member import IslandState as IslandState
from jaxsparse.islands.store import Store as Store, UnreachableError as UnreachableError
