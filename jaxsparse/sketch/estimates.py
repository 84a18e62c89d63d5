"""What a count sketch says of single elements, tile by tile or anywhere."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int, Integer, UInt32

from jaxsparse.hashing import as_uint32
from jaxsparse.sketch.tiles import SketchSpec, flip, places, tile_index

__all__ = ["estimates_at", "median", "tile_estimates"]


def tile_estimates(
    table: Float[Array, "rows cols"], spec: SketchSpec, seed: UInt32[Array, ""]
) -> Callable[[Int[Array, ""], int], Float[Array, " n"]]:
    """A function of tile number and length that decodes this tile."""
    # A tile that starts near the end of a row reads on from its beginning.
    table = jnp.concatenate([table, table[:, : spec.tile]], axis=1)

    def estimates(tile: Array, length: int) -> Array:
        rows = []
        for row, bucket, sign in places(spec, seed, tile, tile_index(spec, tile, length)):
            rows.append(
                flip(lax.dynamic_slice(table, (jnp.int32(row), bucket), (1, length))[0], sign)
            )
        return median(rows)

    return estimates


def estimates_at(
    table: Float[Array, "rows cols"],
    spec: SketchSpec,
    seed: UInt32[Array, ""],
    tile: Integer[Array, "..."],
    within: Integer[Array, "..."],
) -> Float[Array, "..."]:
    """Decodes elements anywhere, bitwise as `tile_estimates` does.

    Args:
        table: the sketch.
        spec: its rows, cols and tile.
        seed: of all hashes.
        tile: numbers of tiles.
        within: places of elements in their tiles, of a shape that broadcasts with that of `tile`.
    """
    index = as_uint32(tile) * jnp.uint32(spec.tile) + as_uint32(within)
    rows = []
    for row, bucket, sign in places(spec, seed, tile, index):
        if bucket.size < index.size:
            bucket = lax.optimization_barrier(bucket)  # or it is hashed once an element
        col = bucket + within.astype(jnp.int32)
        col = jnp.where(col < spec.cols, col, col - spec.cols)
        rows.append(flip(table.at[row, col].get(mode="promise_in_bounds"), sign))
    return median(rows)


def median(rows):
    """Elementwise median, by dropping the smallest and the largest again and again.

    The smallest of n // 2 + 2 elements has more than half of all n above it, so it can go before
    the others are looked at; likewise the largest.
    """
    n = len(rows)
    window, later = rows[: n // 2 + 2], rows[n // 2 + 2 :]
    for _ in range((n - 1) // 2):
        for i in range(len(window) - 1):
            window[i], window[i + 1] = _ordered(window[i], window[i + 1])
        window.pop()
        for i in reversed(range(len(window) - 1)):
            window[i], window[i + 1] = _ordered(window[i], window[i + 1])
        window = window[1:] + later[:1]
        later = later[1:]
    return window[0] if n % 2 else 0.5 * window[0] + 0.5 * window[1]


def _ordered(a, b):
    # One instruction each, where jnp.minimum takes three to propagate NaN: a bucket lost to NaN is
    # an outlier like others, and a coordinate that is NaN is so in all rows.
    less = a < b
    return jnp.where(less, a, b), jnp.where(less, b, a)
