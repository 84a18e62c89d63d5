"""Passes over a vector in the form that suits the device: loops over tiles, or all of it at once.

Loops over tiles suit a CPU, because a tile's working set fits into a cache. A GPU has threads for a
whole vector at once, but in a loop it starts at least one kernel a turn, some microseconds each.
`by_platform` takes two forms of one function. The device that it is compiled for decides.

`pytest --gpu-forms` runs any test with the forms for GPUs.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int, Shaped, UInt32

# A name in this module, so that tests and benchmarks can replace it to choose the form.
platform_dependent = lax.platform_dependent

# Number of elements that are reduced at once, and number of rows that they are laid in. Larger and
# smaller tiles are slower (measured at d = 2^24 on CPU). Rows fill registers: rows of other lengths
# take three times as long.
_TILE = 2**20
_ROWS = 8
_LANES = 16
_LONG = 2**14  # elements, from which on storing a vector is worth the time to compile it
_LANES_OF_TPU = 128  # of a vector register, to which XLA pads the last axis of an array
# Bits that a pass of the search for a k-th largest finds on a GPU. More bits mean fewer passes, but
# each pass counts for 2**bits - 1 trials.
_DIGIT_BITS = 4

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Carry = TypeVar("Carry")

# A function that gives the uint32 key of each element, by which elements are compared. None: the
# elements are the keys.
Key = Callable[[Array], UInt32[Array, " n"]] | None
_Number = int | Int[Array, ""]

# A sum that stays uint32 with x64, too.
_sum = functools.partial(jnp.sum, dtype=jnp.uint32)


def by_platform(
    *operands: Array,
    default: Callable[..., Result],
    gpu: Callable[..., Result],
    tpu: Callable[..., Result] | None = None,
) -> Result:
    """`gpu(*operands)` on GPUs, `tpu(*operands)` on TPUs if it is given, else `default(*operands)`.

    All are traced, and one is compiled. They must return the same bits, unless the caller tells
    its own callers otherwise. Tests compare them on CPU.
    """
    tpu = default if tpu is None else tpu
    return platform_dependent(*operands, default=default, cuda=gpu, rocm=gpu, tpu=tpu)


def kept_flat(x: Array, shape: tuple[int, ...]) -> Array:
    """A flat piece of a vector, which has or gets this shape, kept apart from the vector on TPUs.

    XLA:TPU moves a reshape across the slice or the concatenation beside it. A shape with few
    columns then pads the whole vector to 128 lanes: one leaf (512, 4) took 30 times its bytes.
    """
    if len(shape) < 2 or shape[-1] % _LANES_OF_TPU == 0:
        return x
    return platform_dependent(x, default=lambda x: x, tpu=lax.optimization_barrier)


def over_tiles(
    size: int, tile: int, step: Callable[[Int[Array, ""], Carry, int], Carry], carry: Carry
) -> Carry:
    """Folds `step(number, carry, length)` over all tiles. The length of each tile is static."""
    full, rest = divmod(size, tile)
    if full:
        carry = lax.fori_loop(
            jnp.int32(0), jnp.int32(full), lambda b, carry: step(b, carry, tile), carry
        )
    return step(jnp.int32(full), carry, rest) if rest else carry


def laid_around(start: Int[Array, "*tiles 1"], tile: int) -> Int[Array, "*tiles tile"]:
    """The element of a tile at each of `tile` slots, if its first element is at slot `start`."""
    shape = (1,) * (start.ndim - 1) + (tile,)
    within = lax.broadcasted_iota(jnp.int32, shape, start.ndim - 1) - start
    return jnp.where(within < 0, within + tile, within)


def stored(x: Shaped[Array, " n"]) -> Shaped[Array, " n"]:
    """`x` in memory, so that what reads it does not compute it anew for each of its elements.

    XLA's CPU backend fuses a short array into a long one that repeats it, and a padded one into all
    that reads it, and takes barriers out before. It stores what a loop carries.
    """
    return by_platform(x, default=_written, gpu=lambda x: x, tpu=lambda x: x)


def stored_if_long(x: Shaped[Array, " n"]) -> Shaped[Array, " n"]:
    """`stored`, if the vector is worth the time to compile it."""
    return stored(x) if x.size >= _LONG else x


def _written(x: Shaped[Array, " n"]) -> Shaped[Array, " n"]:
    # Writes two elements over themselves. XLA takes a loop of one turn apart.
    def write(i: Array, kept: Array) -> Array:
        one = lax.dynamic_slice_in_dim(kept, i, 1)
        return lax.dynamic_update_slice_in_dim(kept, one, i, axis=0)

    return lax.fori_loop(jnp.int32(0), jnp.int32(2), write, x)


def zeros(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, like: tuple[Array, ...]) -> Array:
    """Zeros with the replication type of all of `like` together, to start a loop's carry."""
    total = jnp.zeros(shape, dtype)
    for x in like:
        total += jnp.zeros_like(x, shape=shape, dtype=dtype)
    return total


def count_reaching(
    x: Shaped[Array, " d"],
    trial: UInt32[Array, ""],
    key: Key = None,
) -> UInt32[Array, ""]:
    """The number of elements with key(x) >= trial. Keys and trials are below 2**31."""

    # The sign bit of trial - 1 - key. XLA sums it faster than a comparison.
    def reaches(part: Array) -> Array:
        return (trial - jnp.uint32(1) - (part if key is None else key(part))) >> jnp.uint32(31)

    return folded(_sum, jnp.add, reaches, x)


def count_where(
    x: Shaped[Array, " d"], is_counted: Callable[[Array], Bool[Array, " n"]]
) -> Int[Array, ""]:
    """The number of elements for which `is_counted` is true, as an int32."""
    counted = lambda part: is_counted(part).astype(jnp.uint32)
    return folded(_sum, jnp.add, counted, x).astype(jnp.int32)


def folded(
    reduce: Callable[..., Array],
    join: Callable[[Array, Array], Array],
    value: Callable[[Array], UInt32[Array, " n"]],
    x: Shaped[Array, " d"],
) -> UInt32[Array, ""]:
    """reduce(value(x)), but ten times faster on CPU. 0 is the neutral element of the reduction."""
    if not _tile(x.size):
        return reduce(value(x))
    return by_platform(
        x,
        default=functools.partial(_in_lanes, reduce, join, value),
        gpu=lambda x: reduce(value(x)),
    )


def _in_lanes(
    reduce: Callable[..., Array],
    join: Callable[[Array, Array], Array],
    value: Callable[[Array], UInt32[Array, " n"]],
    x: Shaped[Array, " d"],
) -> UInt32[Array, ""]:
    """`folded` for CPUs. XLA reduces rows of a matrix in lanes, but a vector by elements."""
    tile = _tile(x.size)

    def step(b: Array, lanes: Array, length: int) -> Array:
        part = value(lax.dynamic_slice(x, (b * tile,), (length,)))
        if length == tile:
            return join(lanes, reduce(part.reshape(_ROWS, -1), axis=0))
        return lanes.at[0].set(join(lanes[0], reduce(part)))

    start = jnp.zeros_like(value(x[:1]), shape=(tile // _ROWS,))
    return reduce(over_tiles(x.size, tile, step, start))


def _tile(size: int) -> int:
    whole = _ROWS * _LANES
    return size // -(-size // _TILE) // whole * whole


def kth_largest(
    x: Shaped[Array, " n"], k: _Number, *, bits: int, key: Key = None
) -> UInt32[Array, ""]:
    """The largest t that the keys of at least k elements reach. Keys are below 2**bits <= 2**31."""
    find = functools.partial(_by_bits, k=k, bits=bits, key=key)
    return by_platform(x, default=find, gpu=functools.partial(_by_digits, k=k, bits=bits, key=key))


def _by_bits(x: Shaped[Array, " n"], *, k: _Number, bits: int, key: Key) -> UInt32[Array, ""]:
    """`kth_largest` with one pass for each bit, the highest first."""

    def set_bit(found: Array, shift: Array) -> Array:
        trial = found | jnp.uint32(1) << shift
        return jnp.where(count_reaching(x, trial, key) >= jnp.uint32(k), trial, found)

    return by_digits(set_bit, bits, 1, jnp.zeros_like(x, jnp.uint32, shape=()))


def _by_digits(x: Shaped[Array, " n"], *, k: _Number, bits: int, key: Key) -> UInt32[Array, ""]:
    """`kth_largest` with one pass for each digit: one sum for all trials reads the array once."""
    several = 2**_DIGIT_BITS - 1
    add = lambda a, b: tuple(map(jnp.add, a, b))

    def set_digit(found: Array, shift: Array) -> Array:
        keys = x if key is None else key(x)
        trials = [found | jnp.uint32(digit + 1) << shift for digit in range(several)]
        reaches = tuple((keys >= trial).astype(jnp.uint32) for trial in trials)
        counts = lax.reduce(reaches, (jnp.uint32(0),) * several, add, (0,))
        # Fewer elements reach a larger trial, so the digit is the number of trials that k reach.
        reached = jnp.stack(counts) >= jnp.uint32(k)
        return found | jnp.sum(reached, dtype=jnp.uint32) << shift

    return by_digits(set_digit, bits, _DIGIT_BITS, jnp.zeros_like(x, jnp.uint32, shape=()))


def by_digits(
    set_digit: Callable[[Array, Array], Int[Array, "*shape"]],
    bits: int,
    digit_bits: int,
    start: Int[Array, "*shape"],
) -> Int[Array, "*shape"]:
    """Numbers of so many bits, found digit by digit, the highest first.

    `set_digit` takes the digits found so far, with zeros behind them, and the position of the next
    digit's lowest bit. It returns the number with that digit. `start` is zeros.
    """
    digits = -(-bits // digit_bits)

    def turn(i: Array, found: Array) -> Array:
        return set_digit(found, (digit_bits * (digits - 1 - i)).astype(start.dtype))

    return lax.fori_loop(0, digits, turn, start)


def magnitude_bits(x: Float[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """The bits of abs(x), which are integers below 2**31 in the same order."""
    return to_bits(x) & jnp.uint32(2**31 - 1)


def to_bits(x: Float[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """The bits of a float32."""
    return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
