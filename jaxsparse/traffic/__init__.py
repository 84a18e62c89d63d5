"""Bytes that programs move between workers, read from compiled and from traced programs."""

from jaxsparse.traffic.compiled import crossing as crossing, wire_bytes as wire_bytes
from jaxsparse.traffic.report import (
    Collective as Collective,
    Conditional as Conditional,
    WireBytes as WireBytes,
)
from jaxsparse.traffic.traced import traced_bytes as traced_bytes
