"""Adding tiles of a vector to a count sketch: one after the other, or all at once."""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int, UInt32

from jaxsparse.sketch.tiles import SketchSpec, all_places, flip, places, tile_index
from jaxsparse.tiles import zeros

__all__ = ["add_all", "add_one", "empty", "wrapped"]

Seed = UInt32[Array, ""]


def empty(spec: SketchSpec, like: tuple[Array, ...]) -> Float[Array, "rows cols+tile"]:
    """A table of zeros, in which tiles that start near the end of a row run on past it.

    Args:
        spec: its rows, cols and tile.
        like: arrays that will be added, for the replication type.
    """
    return zeros((spec.rows, spec.cols + spec.tile), jnp.float32, like)


def wrapped(table: Float[Array, "rows cols+tile"], spec: SketchSpec) -> Float[Array, "rows cols"]:
    """The sketch: what runs on past the end belongs to the beginning."""
    return table[:, : spec.cols].at[:, : spec.tile].add(table[:, spec.cols :])


def add_one(
    table: Float[Array, "rows cols+tile"],
    values: Float[Array, " n"],
    tile: Int[Array, ""],
    spec: SketchSpec,
    seed: Seed,
) -> Float[Array, "rows cols+tile"]:
    """Adds the first n elements of a tile, given its number."""
    values = values.astype(jnp.float32)
    for row, bucket, sign in places(spec, seed, tile, tile_index(spec, tile, values.size)):
        window = lax.dynamic_slice(table, (jnp.int32(row), bucket), (1, values.size))
        window += flip(values, sign)[None]
        table = lax.dynamic_update_slice(table, window, (jnp.int32(row), bucket))
    return table


def add_all(
    values: Float[Array, "n tile"], tiles: Int[Array, " n"], spec: SketchSpec, seed: Seed
) -> Float[Array, "rows cols"]:
    """The sketch of whole tiles, given their numbers, in one scatter.

    The order of sums is any, and may be another at the next run: to rounding, what `add_one`
    makes of one tile after the other. So workers may send such sums to each other, but must not
    rely on finding the same ones for themselves.
    """
    index = tile_index(spec, tiles[:, None], spec.tile)
    # Row within tile, so that a tile is read from memory for the first row alone.
    buckets, signs = all_places(spec, seed, tiles, index)
    updates = flip(values.astype(jnp.float32)[:, None], signs)
    rows = jnp.broadcast_to(lax.iota(jnp.int32, spec.rows)[None], buckets.shape)
    # Else the offset of a tile would be hashed once an element.
    corners = lax.optimization_barrier(jnp.stack([rows, buckets], axis=2))
    table = lax.scatter_add(
        empty(spec, (values, tiles, seed)),
        corners,
        updates,
        lax.ScatterDimensionNumbers(
            update_window_dims=(2,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
        ),
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )
    return wrapped(table, spec)
