"""Codecs: the wire formats of sparse vectors.

Index and value travel in one message, so that a sparse exchange takes one round and not two.

    COO          32-bit indices and values, exact
    Packed()     16-bit indices and values
    EliasFano()  indices near their entropy, values in 2 to 32 bits
"""

from jaxsparse.codecs.codec import (
    COO as COO,
    Codec as Codec,
    Coo as Coo,
    bits as bits,
    check_codec as check_codec,
    check_local as check_local,
    from_bits as from_bits,
)
from jaxsparse.codecs.elias_fano import EliasFano as EliasFano
from jaxsparse.codecs.packed import Packed as Packed

__all__ = [
    "COO",
    "Codec",
    "Coo",
    "EliasFano",
    "Packed",
    "bits",
    "check_codec",
    "check_local",
    "from_bits",
]
