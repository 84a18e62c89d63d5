"""What an exchange costs: bytes, read from the compiled program, and a model of the time."""

from jaxsparse.cost.model import Link as Link
from jaxsparse.cost.model import Traffic as Traffic
from jaxsparse.cost.model import dense_all_reduce as dense_all_reduce
from jaxsparse.cost.report import Collective as Collective
from jaxsparse.cost.report import Conditional as Conditional
from jaxsparse.cost.report import WireBytes as WireBytes
from jaxsparse.cost.traffic import wire_bytes as wire_bytes

__all__ = [
    "Collective",
    "Conditional",
    "Link",
    "Traffic",
    "WireBytes",
    "dense_all_reduce",
    "wire_bytes",
]
