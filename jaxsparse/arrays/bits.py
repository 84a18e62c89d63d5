"""Packs masks, signs, and integers and floats of a few bits into words of 32 bits."""

import functools
import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, DTypeLike, Float, UInt32

_BITS = 32


def words(size: int) -> int:
    """The number of uint32 words that hold `size` bits."""
    return -(-size // _BITS)


def pack_bits(mask: Bool[Array, "*batch n"]) -> UInt32[Array, "*batch words"]:
    """Packs each vector. Bit b of word w is element b * words(n) + w, or 0 past the end.

    Neighbours are in neighbouring words, not in one word. Whole runs of elements are then shifted
    alike, which vectorises.

    >>> pack_bits(jnp.array([True, False, True])).tolist()
    [5]
    """
    size = words(mask.shape[-1])
    padding = [(0, 0)] * (mask.ndim - 1) + [(0, size * _BITS - mask.shape[-1])]
    planes = jnp.pad(mask, padding).reshape(*mask.shape[:-1], _BITS, size)
    # In an OR of 32 shifted planes, XLA would compute the mask again for each plane.
    return jnp.sum(planes.astype(jnp.uint32) << _shifts(mask.ndim), axis=-2, dtype=jnp.uint32)


def unpack_bits(packed: UInt32[Array, "*batch words"], size: int) -> Bool[Array, "*batch n"]:
    """The vectors of `size` elements that `pack_bits` packed."""
    _check_words(packed, words(size))
    planes = (packed[..., None, :] >> _shifts(packed.ndim)) & jnp.uint32(1)
    return planes.reshape(*packed.shape[:-1], -1)[..., :size] != 0


def field_words(size: int, bits: int) -> int:
    """The number of words that hold `size` fields of `bits` bits, end to end."""
    return words(size * bits)


def pack_fields(fields: UInt32[Array, "*batch n"], bits: int) -> UInt32[Array, "*batch words"]:
    """Packs integers below 2**bits end to end. The first takes the lowest bits of a word.

    A field may straddle two words, so that 8 fields of 12 bits take 3 words. (Two fields of 12 bits
    are the three bytes of SparseLoCo's packing, lowest byte first.) Zeros fill the last word.

    >>> [hex(word) for word in pack_fields(jnp.uint32([3000, 77]), 12).tolist()]
    ['0x4dbb8']
    """
    *batch, size = fields.shape
    count, length = _period(bits)
    padding = [(0, 0)] * len(batch) + [(0, -size % count)]
    runs = jnp.pad(fields, padding).reshape(*batch, -1, count)
    if length == 1:  # no carries: disjoint bits
        shifts = jnp.arange(0, _BITS, bits, dtype=jnp.uint32)
        shifted = runs << jnp.expand_dims(shifts, tuple(range(runs.ndim - 1)))
        return jnp.sum(shifted, axis=-1, dtype=jnp.uint32)
    made = []
    for word in range(length):
        parts = []
        for field in range(count):
            shift = field * bits - word * _BITS
            if 0 <= shift < _BITS:
                parts.append(runs[..., field] << jnp.uint32(shift))
            elif -bits < shift < 0:
                parts.append(runs[..., field] >> jnp.uint32(-shift))
        made.append(functools.reduce(jnp.bitwise_or, parts))
    packed = jnp.stack(made, axis=-1) if made else jnp.zeros((*runs.shape[:-1], 0), jnp.uint32)
    return packed.reshape(*batch, -1)[..., : field_words(size, bits)]


def unpack_fields(
    packed: UInt32[Array, "*batch words"], bits: int, size: int
) -> UInt32[Array, "*batch n"]:
    """The `size` fields that `pack_fields` packed."""
    _check_words(packed, field_words(size, bits))
    *batch, found = packed.shape
    count, length = _period(bits)
    if not bits:
        return jnp.zeros_like(packed, shape=(*batch, size))
    if length == 1:  # vectorises, and a stack of fields does not
        shifts = jnp.arange(0, _BITS, bits, dtype=jnp.uint32)
        shifted = packed[..., None] >> jnp.expand_dims(shifts, tuple(range(packed.ndim)))
        return (shifted & jnp.uint32(2**bits - 1)).reshape(*batch, -1)[..., :size]
    padding = [(0, 0)] * len(batch) + [(0, -found % length)]
    runs = jnp.pad(packed, padding).reshape(*batch, -1, length)
    fields = []
    for field in range(count):
        word, shift = divmod(field * bits, _BITS)
        value = runs[..., word] >> jnp.uint32(shift)
        if shift + bits > _BITS:
            value |= runs[..., word + 1] << jnp.uint32(_BITS - shift)
        fields.append(value & jnp.uint32(2**bits - 1))
    return jnp.stack(fields, axis=-1).reshape(*batch, -1)[..., :size]


def float_bits(x: Float[Array, "*shape"], dtype: DTypeLike) -> UInt32[Array, "*shape"]:
    """The bits of `x` in a float dtype of 8 or 16 bits, to which it is rounded.

    Numbers beyond its range may become infinite or NaN: call `magnitude.within` before.
    """
    return lax.bitcast_convert_type(x.astype(dtype), _unsigned(dtype)).astype(jnp.uint32)


def from_float_bits(fields: UInt32[Array, "*shape"], dtype: DTypeLike) -> Float[Array, "*shape"]:
    """The inverse of `float_bits`, in float32. It ignores the upper bits of a word."""
    return lax.bitcast_convert_type(fields.astype(_unsigned(dtype)), dtype).astype(jnp.float32)


def _unsigned(dtype: DTypeLike) -> DTypeLike:
    return jnp.uint8 if jnp.dtype(dtype).itemsize == 1 else jnp.uint16


def _check_words(packed: UInt32[Array, "*batch words"], expected: int) -> None:
    # Too few words would give too few elements. Too many words of bits would give other elements.
    if packed.shape[-1] != expected:
        raise ValueError(
            f"packed has {packed.shape[-1]} words a vector, but `size` elements take {expected}: "
            "give the words that packing returned, and the number of elements that were packed"
        )


def _period(bits: int) -> tuple[int, int]:
    """The least number of fields that fill whole words, and the number of these words."""
    common = math.gcd(bits, _BITS)
    return _BITS // common, bits // common


def _shifts(ndim: int) -> UInt32[Array, "..."]:
    shifts = jnp.arange(_BITS, dtype=jnp.uint32)[:, None]
    return jnp.expand_dims(shifts, tuple(range(ndim - 1)))
