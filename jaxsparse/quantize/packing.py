"""Packs small integers, such as quantised values, into words."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, UInt8, UInt32

from jaxsparse.arrays.bits import field_words, pack_fields
from jaxsparse.arrays.platforms import by_platform, shaped_as
from jaxsparse.arrays.settings import check_size, static_int

__all__ = ["check_bits", "pack", "pack_trits", "trit_words", "unpack", "unpack_trits"]

_WORD = 32
_TRITS = 20  # in a word: 3**20 < 2**32


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


def trit_words(size: int) -> int:
    """The number of words of 32 bits that hold `size` digits to base 3, 1.6 bits each.

    >>> trit_words(100)
    5
    """
    return -(-size // _TRITS)


@shaped_as(lambda trits: jnp.zeros_like(trits, jnp.uint32, (trit_words(trits.size),)))
def pack_trits(trits: UInt8[Array, " d"]) -> UInt32[Array, " words"]:
    """Packs digits to base 3, 20 in a word. Digit j of word w is element j * words + w.

    Neighbours are in neighbouring words, as in `arrays.bits.pack_bits`. A word is its number over
    3**20, as a fraction of 2**32, rounded up: times 3, the fraction's overflow is the first digit,
    and what stays is the fraction of the others. So no digit takes a division.

    Args:
        trits: uint8[d], each 0, 1 or 2.

    Returns:
        uint32[ceil(d / 20)]. The last digits of the last words are padded with zeros.

    >>> [hex(word) for word in pack_trits(jnp.uint8([1, 2])).tolist()]
    ['0x8e38e38f']
    """
    words = trit_words(trits.size)
    planes = jnp.pad(trits, (0, _TRITS * words - trits.size)).reshape(_TRITS, words)
    places = jnp.asarray([[3 ** (_TRITS - 1 - j)] for j in range(_TRITS)], jnp.uint32)
    number = jnp.sum(planes.astype(jnp.uint32) * places, axis=0, dtype=jnp.uint32)
    # number * (2**32 / 3**20) rounded up, or one more: both are below the next number's fraction.
    # The sum below is off by 0.02 at most, and 1.116 is in the middle of what is allowed.
    ratio = 2**32 / 3**20 - 1
    whole = int(ratio * 2**16)
    high, low = (number >> jnp.uint32(16)), (number & jnp.uint32(2**16 - 1))
    rest = high.astype(jnp.float32) * (ratio * 2**16 - whole) + low.astype(jnp.float32) * ratio
    return number + high * jnp.uint32(whole) + (rest + 1.116).astype(jnp.uint32)


@shaped_as(lambda words, size: jnp.zeros_like(words, jnp.uint8, (size,)))
def unpack_trits(words: UInt32[Array, " words"], size: int) -> UInt8[Array, " size"]:
    """The digits that `pack_trits` packed: uint8[size].

    >>> unpack_trits(pack_trits(jnp.uint8([1, 2, 0])), 3).tolist()
    [1, 2, 0]
    """
    return by_platform(words, default=_in_turn, gpu=_at_once).reshape(-1)[:size]


def _in_turn(words: UInt32[Array, " words"]) -> UInt8[Array, "20 words"]:
    """The digits as a CPU finds them, the first of all words, then the second.

    XLA's CPU backend stores what a loop makes. Without one it would compute each digit where it is
    used, from its position, which takes three times as long.
    """
    return lax.map(lambda power: _first_trit(words * power), _powers())


def _at_once(words: UInt32[Array, " words"]) -> UInt8[Array, "20 words"]:
    """The digits as a GPU finds them."""
    return _first_trit(words[None] * _powers()[:, None])


def _powers() -> UInt32[Array, " 20"]:
    return jnp.asarray([3**j for j in range(_TRITS)], jnp.uint32)


def _first_trit(fractions: UInt32[Array, "*shape"]) -> UInt8[Array, "*shape"]:
    """The thirds of 2**32 that a fraction reaches."""
    thirds = (jnp.uint32(-(-(2**32) // 3)), jnp.uint32(-(-(2**33) // 3)))
    first, second = ((fractions >= third).astype(jnp.uint8) for third in thirds)
    return first + second


def _shifts(bits: int) -> UInt32[Array, "1 fields"]:
    return jnp.arange(0, _WORD, bits, dtype=jnp.uint32)[None]


def check_bits(bits: int) -> None:
    """Raises ValueError unless bits is 2, 4 or 8."""
    if static_int("bits", bits) not in (2, 4, 8):
        raise ValueError(f"bits={bits} is not supported: use 2, 4 or 8")
