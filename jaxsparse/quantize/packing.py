"""Packs small integers, such as quantised values, into words."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, UInt8, UInt32

from jaxsparse.arrays.bits import field_words
from jaxsparse.arrays.platforms import by_platform, stored_if_long

_WORD = 32
_MANY, _LANES = 1024, 16  # numbers of words; see `digit_words`
_DIGITS = {2: 32, 3: 20, 4: 16}  # digits in a word, by their base: 3**20 < 2**32


@functools.partial(jax.jit, static_argnames=("bits", "size"))
def pack(fields: Int[Array, " n"], bits: int, size: int) -> UInt32[Array, " words"]:
    """Packs the first `size` integers, modulo 2**bits. Field j of word w is element j * words + w.

    The first field takes the lowest bits. Neighbours are in neighbouring words, as in
    `arrays.bits.pack_bits`: of an array with a word's fields in its rows, XLA:TPU would fill each
    row up to 128. Zeros fill what is left.

    Args:
        fields: integers, at least `size` of them. Others must be 0.
        bits: of a field: 2, 4, 8 or 16.
        size: the number of fields.

    >>> [hex(word) for word in pack(jnp.array([1, -1, 7]), 4, 3).tolist()]
    ['0x7f1']
    """
    count, words = _WORD // bits, field_words(size, bits)
    dtype = jnp.uint8 if bits <= 8 else jnp.uint16
    small = (fields & jnp.asarray(2**bits - 1, fields.dtype)).astype(dtype)
    # Else XLA's CPU backend would compute each field where it is packed, from its position, which
    # takes five times as long.
    small = stored_if_long(small).astype(jnp.uint32)
    small = jnp.pad(small, (0, max(0, count * words - small.size)))
    planes = (small[j * words : (j + 1) * words] << jnp.uint32(j * bits) for j in range(count))
    return functools.reduce(jnp.bitwise_or, planes)


@functools.partial(jax.jit, static_argnames=("bits", "size"))
def unpack(words: UInt32[Array, " words"], bits: int, size: int) -> Int[Array, " size"]:
    """The `size` integers that `pack` packed, in two's complement."""
    count, dtype = _WORD // bits, jnp.uint8 if bits <= 8 else jnp.uint16
    if words.shape != (field_words(size, bits),) or words.dtype != jnp.uint32:
        raise ValueError(
            f"words have shape {words.shape} and dtype {words.dtype}, but size={size} with "
            f"bits={bits} takes {field_words(size, bits)} words of uint32: pass the result of pack"
        )

    # A loop, because XLA's CPU backend takes twice as long for all planes at once. Others copy what
    # a loop carries.
    def in_turn(words: Array) -> Array:
        def step(j: Array, found: Array) -> Array:
            plane = (words >> (j * bits).astype(jnp.uint32)).astype(dtype)
            return lax.dynamic_update_slice_in_dim(found, plane, j * words.size, axis=0)

        start = jnp.zeros_like(words, dtype, (count * words.size,))
        return lax.fori_loop(jnp.int32(0), jnp.int32(count), step, start).astype(jnp.uint32)

    at_once = lambda words: jnp.concatenate([words >> jnp.uint32(j * bits) for j in range(count)])
    fields = by_platform(words, default=in_turn, gpu=at_once, tpu=at_once)[:size]
    # The field goes to the top of the word; shifting it back as int32 repeats its sign.
    top = jnp.uint32(_WORD - bits)
    return lax.bitcast_convert_type(fields << top, jnp.int32) >> jnp.int32(_WORD - bits)


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
