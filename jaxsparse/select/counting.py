"""Sums and maxima over a vector that run at memory speed on CPU, too."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt32

from jaxsparse.platforms import by_platform
from jaxsparse.tiles import over_tiles, zeros

__all__ = [
    "count_reaching",
    "count_where",
    "folded",
    "magnitude_bits",
    "running_sum",
    "sums_along",
    "to_bits",
]

# Of what is reduced at once; larger or smaller ones are slower (measured at d = 2^24 on CPU).
_TILE = 2**20
_ROWS = 8
# Of a running sum, summed at once; the largest sum that float32 holds with all below it.
_ALONG = 64
_EXACT = 2**24

# Of the same dtype with x64, too.
_sum = functools.partial(jnp.sum, dtype=jnp.uint32)


def count_reaching(
    x: Shaped[Array, " d"],
    trial: UInt32[Array, ""],
    key: Callable[[Array], UInt32[Array, " n"]] = lambda x: x,
) -> UInt32[Array, ""]:
    """The number of elements with key(x) >= trial, of keys and trials below 2**31."""

    # The sign bit of trial - 1 - key, which is summed faster than a comparison.
    def reaches(part: Array) -> Array:
        return (trial - jnp.uint32(1) - key(part)) >> jnp.uint32(31)

    return folded(_sum, jnp.add, reaches, x)


def count_where(
    x: Shaped[Array, " d"], is_counted: Callable[[Array], Bool[Array, " n"]]
) -> Int[Array, ""]:
    """The number of elements that `is_counted` is true of, as an int32."""
    counted = lambda part: is_counted(part).astype(jnp.uint32)
    return folded(_sum, jnp.add, counted, x).astype(jnp.int32)


def folded(
    reduce: Callable[..., Array],
    join: Callable[[Array, Array], Array],
    value: Callable[[Array], UInt32[Array, " n"]],
    x: Shaped[Array, " d"],
) -> UInt32[Array, ""]:
    """reduce(value(x)), of which 0 is neutral; on CPU ten times faster."""
    if _tile(x.size) < _ROWS * _ROWS:
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
    """XLA's CPU backend reduces a vector element by element, but the rows of a matrix in lanes."""
    tile = _tile(x.size)

    def step(b: Array, lanes: Array, length: int) -> Array:
        part = value(jax.lax.dynamic_slice(x, (b * tile,), (length,)))
        if length == tile:
            return join(lanes, reduce(part.reshape(_ROWS, -1), axis=0))
        return lanes.at[0].set(join(lanes[0], reduce(part)))

    start = zeros((tile // _ROWS,), jnp.uint32, (value(x[:1]),))
    return reduce(over_tiles(x.size, tile, step, start))


def _tile(size: int) -> int:
    return size // -(-size // _TILE) // _ROWS * _ROWS


def running_sum(x: Int[Array, " n"], *, most: int, total: int) -> Int[Array, " n"]:
    """The sums of elements up to and with each one.

    Of rows as products with a triangle, which CPUs compute faster, and XLA compiles sooner, than
    the passes that it makes of `jnp.cumsum`.

    Args:
        x: int32, none negative.
        most: that an element can be.
        total: that their sum can be.
    """
    if x.size == 1 or min(most * _ALONG, total) > _EXACT:
        return jnp.cumsum(x)
    row = min(x.size, _ALONG)
    rows = jnp.pad(x, (0, -x.size % row)).reshape(-1, row)
    within = sums_along(rows)
    if len(rows) > 1:
        sums = running_sum(within[:, -1], most=min(most * row, total), total=total)
        within += jnp.pad(sums[:-1], (1, 0))[:, None]
    return within.ravel()[: x.size]


def sums_along(rows: Int[Array, "n m"]) -> Int[Array, "n m"]:
    """The running sum along each row of at most 2**24 in all, none negative."""
    width = rows.shape[1]
    triangle = jnp.asarray(np.triu(np.ones((width, width), np.float32)))
    sums = jax.lax.dot(rows.astype(jnp.float32), triangle, precision=jax.lax.Precision.HIGHEST)
    return sums.astype(jnp.int32)


def magnitude_bits(x: Float[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Ordered as abs(x) is, but as integers below 2**31."""
    return to_bits(x) & jnp.uint32(2**31 - 1)


def to_bits(x: Float[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """The bits of a float32."""
    return jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
