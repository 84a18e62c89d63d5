"""What an exchange costs: bytes on the wire, read from the compiled program."""

from jaxsparse.cost.report import Collective as Collective
from jaxsparse.cost.report import Conditional as Conditional
from jaxsparse.cost.report import WireBytes as WireBytes
from jaxsparse.cost.traffic import wire_bytes as wire_bytes

__all__ = ["Collective", "Conditional", "WireBytes", "wire_bytes"]
