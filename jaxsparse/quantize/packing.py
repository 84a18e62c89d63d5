"""Packs small integers, such as quantised values, into words."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, UInt32

from jaxsparse.arrays.bits import field_words, pack_fields
from jaxsparse.arrays.settings import check_size, static_int

__all__ = ["check_bits", "pack", "unpack"]

_WORD = 32


@functools.partial(jax.jit, static_argnames="bits")
def pack(levels: Int[Array, " d"], bits: int) -> UInt32[Array, " words"]:
    """Packs small integers in two's complement. The first takes the lowest bits of a word.

    Args:
        levels: int32[d], each in -2**(bits - 1) .. 2**(bits - 1) - 1. Others are taken modulo
            2**bits.
        bits: bits of an integer: 2, 4 or 8.

    Returns:
        uint32[ceil(d * bits / 32)]. The last word is padded with zeros.

    Raises:
        ValueError: `levels` is not an integer vector, or bits is not 2, 4 or 8.

    >>> [hex(word) for word in pack(jnp.array([1, -1, 7]), 4).tolist()]
    ['0x7f1']
    """
    check_bits(bits)
    if levels.ndim != 1 or not jnp.issubdtype(levels.dtype, jnp.integer):
        raise ValueError(
            f"levels have shape {levels.shape} and dtype {levels.dtype}: pack takes a vector of "
            "int32; pass levels.ravel().astype(jnp.int32)"
        )
    check_size("levels.size", levels.size)
    return pack_fields(levels.astype(jnp.uint32) & jnp.uint32(2**bits - 1), bits)


@functools.partial(jax.jit, static_argnames=("bits", "size"))
def unpack(words: UInt32[Array, " words"], bits: int, size: int) -> Int[Array, " size"]:
    """The integers that `pack` packed.

    Args:
        words: the packed integers, uint32[ceil(size * bits / 32)].
        bits: bits of an integer, as in `pack`.
        size: number of integers.

    Returns:
        int32[size].

    Raises:
        ValueError: bits is not 2, 4 or 8, or `words` does not match bits and size.

    >>> unpack(pack(jnp.array([1, -1, 7]), 4), 4, 3).tolist()
    [1, -1, 7]
    """
    check_bits(bits)
    check_size("size", size)
    if words.shape != (field_words(size, bits),) or words.dtype != jnp.uint32:
        raise ValueError(
            f"words have shape {words.shape} and dtype {words.dtype}, but size={size} with "
            f"bits={bits} takes {field_words(size, bits)} words of uint32: pass the result of pack"
        )
    # The field goes to the top of the word; shifting it back as int32 repeats its sign.
    top = words[:, None] << (jnp.uint32(_WORD - bits) - _shifts(bits))
    fields = lax.bitcast_convert_type(top, jnp.int32) >> jnp.int32(_WORD - bits)
    return fields.reshape(-1)[:size]


def _shifts(bits: int) -> UInt32[Array, "1 fields"]:
    return jnp.arange(0, _WORD, bits, dtype=jnp.uint32)[None]


def check_bits(bits: int) -> None:
    """Raises ValueError unless bits is 2, 4 or 8."""
    if static_int("bits", bits) not in (2, 4, 8):
        raise ValueError(f"bits={bits} is not supported: use 2, 4 or 8")
