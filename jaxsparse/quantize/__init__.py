"""Quantises vectors to a few bits a value, packed into words, and back.

A quantiser is a frozen dataclass of settings: `Format` (integers, floats, powers of two, and means
of magnitudes in 1 to 2 bits) or `QSGD` (its paper's roundings and scales). `entry_values` packs the
values of sparse entries, whose indices travel beside them.
"""

from jaxsparse.quantize.entries import (
    EntryValues as EntryValues,
    entry_values as entry_values,
)
from jaxsparse.quantize.formats import (
    Format as Format,
    FormatName as FormatName,
    Scale as Scale,
)
from jaxsparse.quantize.packing import pack as pack, unpack as unpack
from jaxsparse.quantize.qsgd import QSGD as QSGD
from jaxsparse.quantize.quantizer import (
    QuantizedVector as QuantizedVector,
    Quantizer as Quantizer,
    check_feedback as check_feedback,
    dequantize as dequantize,
    from_message as from_message,
    quantize as quantize,
    to_message as to_message,
)

__all__ = [
    "QSGD",
    "EntryValues",
    "Format",
    "FormatName",
    "QuantizedVector",
    "Quantizer",
    "Scale",
    "check_feedback",
    "dequantize",
    "entry_values",
    "from_message",
    "pack",
    "quantize",
    "to_message",
    "unpack",
]
