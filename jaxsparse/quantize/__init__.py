"""Quantises vectors to a few bits a value, packed into words, and back.

A quantiser is a frozen dataclass of settings: `Format` (integers, floats, powers of two, and means
of magnitudes in 1 to 2 bits) or `QSGD` (its paper's roundings and scales).
"""

from jaxsparse.quantize.formats import Format as Format
from jaxsparse.quantize.qsgd import QSGD as QSGD
from jaxsparse.quantize.quantizer import (
    Quantizer as Quantizer,
    dequantize as dequantize,
    from_message as from_message,
    quantize as quantize,
    to_message as to_message,
)
