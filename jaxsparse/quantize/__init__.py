"""Quantises vectors to a few bits a value, packed into words, and back.

A quantiser is a frozen dataclass of settings, `QSGD` or `Sign`. `quantize` and `dequantize` take
either. `check_feedback` refuses settings whose error must not be fed back. `entry_values` packs the
values of sparse entries, whose indices travel beside them.
"""

from jaxsparse.quantize.entries import (
    EntryValues as EntryValues,
    ValueQuantizer as ValueQuantizer,
    entry_values as entry_values,
)
from jaxsparse.quantize.packing import pack as pack, unpack as unpack
from jaxsparse.quantize.qsgd import QSGD as QSGD
from jaxsparse.quantize.quantizer import (
    Quantized as Quantized,
    Quantizer as Quantizer,
    check_feedback as check_feedback,
    dequantize as dequantize,
    from_message as from_message,
    quantize as quantize,
    to_message as to_message,
)
from jaxsparse.quantize.sign import Sign as Sign

__all__ = [
    "QSGD",
    "EntryValues",
    "Quantized",
    "Quantizer",
    "Sign",
    "ValueQuantizer",
    "check_feedback",
    "dequantize",
    "entry_values",
    "from_message",
    "pack",
    "quantize",
    "to_message",
    "unpack",
]
