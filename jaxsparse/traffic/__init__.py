"""Bytes that programs move between workers, read from compiled and from traced programs."""

from jaxsparse.traffic.compiled import wire_bytes as wire_bytes
from jaxsparse.traffic.report import Collective as Collective
from jaxsparse.traffic.report import Conditional as Conditional
from jaxsparse.traffic.report import WireBytes as WireBytes
from jaxsparse.traffic.traced import traced_bytes as traced_bytes
