"""Packs small integers, such as quantised values, into words."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, UInt8, UInt32

from jaxsparse.arrays.bits import field_words, pack_fields
from jaxsparse.arrays.settings import check_size, static_int

_WORD = 32
_MANY, _LANES = 1024, 16  # numbers of words; see `digit_words`
_DIGITS = {2: 32, 3: 20, 4: 16}  # digits in a word, by their base: 3**20 < 2**32


@functools.partial(jax.jit, static_argnames="bits")
def pack(levels: Int[Array, " d"], bits: int) -> UInt32[Array, " words"]:
    """Packs small integers of 2, 4 or 8 bits in two's complement, modulo 2**bits.

    The first takes the lowest bits of a word. Zeros fill the last word.

    >>> [hex(word) for word in pack(jnp.array([1, -1, 7]), 4).tolist()]
    ['0x7f1']
    """
    check_bits(bits)
    if levels.ndim != 1 or not jnp.issubdtype(levels.dtype, jnp.integer):
        raise ValueError(
            f"levels have shape {levels.shape} and dtype {levels.dtype}: pack takes a vector of "
            "int32; pass levels.ravel().astype(jnp.int32)"
        )
    return pack_fields(levels.astype(jnp.uint32) & jnp.uint32(2**bits - 1), bits)


@functools.partial(jax.jit, static_argnames=("bits", "size"))
def unpack(words: UInt32[Array, " words"], bits: int, size: int) -> Int[Array, " size"]:
    """The `size` integers that `pack` packed."""
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


def digit_words(size: int, base: int) -> int:
    """The number of words of 32 bits for `size` digits. 20 digits to base 3 take 1.6 bits each.

    From 1024 words on it is rounded up to a multiple of 16: up to 1.5 % more, and below 0.1 % from
    2**19 digits on. XLA's CPU backend vectorises whole registers alone.
    """
    words = -(-size // _DIGITS[base])
    return words if words < _MANY else -(-words // _LANES) * _LANES


def pack_digits(digits: UInt8[Array, "..."], base: int, size: int) -> UInt32[Array, " words"]:
    """Packs digits to base 2, 3 or 4. Digit j of word w is element j * words + w.

    Neighbours are in neighbouring words, as in `arrays.bits.pack_bits`, which vectorises. A word is
    a fraction of 2**32. Times the base, what overflows is the first digit, and what stays is the
    fraction of the others. So no digit takes a division.

    Pass digits in the shape in which they are computed: in another one, XLA looks for the place of
    each by a division. Those behind the first `size` are left out.
    """
    count, words = _DIGITS[base], digit_words(size, base)
    join = lambda number, plane: number * jnp.uint32(base) + plane.astype(jnp.uint32)

    # XLA's CPU backend stores what a loop reads. Without one it would compute each digit where it
    # is packed, from its position, which takes three times as long.
    def step(j: Array, number: Array) -> Array:
        return join(number, lax.dynamic_slice_in_dim(digits.reshape(-1), j * words, words))

    whole, rest = divmod(size, words)
    start = jnp.zeros_like(digits, jnp.uint32, (words,))
    number = lax.fori_loop(jnp.int32(0), jnp.int32(whole), step, start)
    if rest:
        number = join(number, jnp.pad(digits.reshape(-1)[whole * words : size], (0, words - rest)))
    number *= jnp.uint32(base ** (count - whole - (rest > 0)))  # further digits are 0
    return _fraction_of_trits(number) if base == 3 else number


def unpack_digits(words: UInt32[Array, " words"], base: int, size: int) -> UInt8[Array, " size"]:
    """The digits that `pack_digits` packed.

    >>> unpack_digits(pack_digits(jnp.uint8([1, 2, 0]), 3, 3), 3, 3).tolist()
    [1, 2, 0]
    """
    powers = jnp.asarray([base**j % 2**32 for j in range(_DIGITS[base])], jnp.uint32)
    # The multiples of 2**32 / base, rounded up, that a fraction may reach.
    starts = [jnp.uint32(-(-(digit * 2**32) // base)) for digit in range(1, base)]
    first = lambda fraction: sum((fraction >= start).astype(jnp.uint8) for start in starts)

    # A loop, for the same reason. It carries all planes, where `lax.map` would have the axis of the
    # planes before that of a vmap, and so transpose what is decoded.
    def step(j: Array, digits: Array) -> Array:
        plane = first(words * powers[j])
        return lax.dynamic_update_slice_in_dim(digits, plane, j * words.size, axis=0)

    count = _DIGITS[base]
    digits = jnp.zeros_like(words, jnp.uint8, (count * words.size,))
    return lax.fori_loop(jnp.int32(0), jnp.int32(count), step, digits)[:size]


def _fraction_of_trits(number: UInt32[Array, " words"]) -> UInt32[Array, " words"]:
    """An integer from number * 2**32 / 3**20 on, and below (number + 1) * 2**32 / 3**20.

    It is that multiple of the number, with 1.116 added and rounded down. Up to 1.231 may be added,
    and at least 1. The sum of the two products is off by less than 0.02.
    """
    more = 2**32 / 3**20 - 1
    whole = int(more * 2**16)
    high, low = number >> jnp.uint32(16), number & jnp.uint32(2**16 - 1)
    # Of signed integers, because CPUs convert these in lanes.
    as_float = lambda part: part.astype(jnp.int32).astype(jnp.float32)
    rest = as_float(high) * (more * 2**16 - whole) + as_float(low) * more
    return number + high * jnp.uint32(whole) + (rest + 1.116).astype(jnp.int32).astype(jnp.uint32)


def _shifts(bits: int) -> UInt32[Array, "1 fields"]:
    return jnp.arange(0, _WORD, bits, dtype=jnp.uint32)[None]


def check_bits(bits: int) -> None:
    """Raises ValueError unless bits is 2, 4 or 8."""
    if static_int("bits", bits) not in (2, 4, 8):
        raise ValueError(f"bits={bits} is not supported: use 2, 4 or 8")
