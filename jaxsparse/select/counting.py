"""Sums and maxima over a vector that run at memory speed on CPU, too."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped, UInt32

from jaxsparse.platforms import by_platform
from jaxsparse.tiles import over_tiles, zeros

__all__ = ["count_reaching", "folded", "magnitude_bits", "to_bits"]

# Of what is reduced at once; larger or smaller ones are slower (measured at d = 2^24 on CPU).
_TILE = 2**20
_ROWS = 8

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


def magnitude_bits(x: Float[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Ordered as abs(x) is, but as integers below 2**31."""
    return to_bits(x) & jnp.uint32(2**31 - 1)


def to_bits(x: Float[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """The bits of a float32."""
    return jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
