"""Choosing heavy coordinates of a vector that is computed tile by tile and never stored.

A full sort of d elements costs a hundred passes over them. Here every tile is folded into an array
of slots by an elementwise maximum as it is computed, on a GPU all at once; then a threshold and a
compaction pick k of the slots.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int, UInt32

from jaxsparse.hashing import bounded, combine
from jaxsparse.platforms import by_platform
from jaxsparse.select.compaction import first_of_ranges
from jaxsparse.select.kth_largest import kth_largest
from jaxsparse.tiles import laid_around, over_tiles, zeros

__all__ = ["streaming_top_k"]

# Two of the k largest that share a slot cost the smaller one: with 8 slots per kept element that
# loses one in sixteen, and the energy lost is less, for the next largest takes its place.
_SLOTS_PER_K = 8
# A key is a magnitude with its lowest bits replaced by the element's place among those of its
# slot, so one unsigned maximum keeps both. The 23 bits left rank to a relative 2**-15.
_ID_BITS = 8
_MAX_PER_SLOT = 2**_ID_BITS - 1


class Values(NamedTuple):
    """Two ways to the same float32 values of a vector, which need not be stored."""

    of_tile: Callable[[Int[Array, ""], int], Float[Array, " n"]]
    """Of a tile's first n elements, from its number and n; must not see past the vector's end."""
    anywhere: Callable[[Int[Array, "..."], Int[Array, "*shape"]], Float[Array, "*shape"]]
    """Of elements anywhere, from the numbers of their tiles, which may broadcast, and their places
    within these; of the last tile also places past the vector's end, with any value."""

    @classmethod
    def of_vector(cls, x: Float[Array, " d"], tile: int) -> "Values":
        """Of a vector that is stored."""

        def of_tile(number: Array, length: int) -> Array:
            return lax.dynamic_slice(x, (number * tile,), (length,)).astype(jnp.float32)

        def anywhere(number: Array, within: Array) -> Array:
            indices = jnp.minimum(within, x.size - 1 - number * tile) + number * tile
            return x.at[indices].get(mode="promise_in_bounds").astype(jnp.float32)

        return cls(of_tile, anywhere)


def streaming_top_k(
    values: Values,
    size: int,
    tile: int,
    k: int,
    *,
    seed: UInt32[Array, ""],
    like: tuple[Array, ...],
) -> Int[Array, " k"]:
    """Indices of nearly the k largest magnitudes: the k largest of at least 8 k slots' maxima.

    The tiles b = g, g + groups, g + 2 groups, ... share the slots of group g, each laid around
    them cyclically from its own random slot. So a run of heavy elements meets itself neither
    within a tile nor in those around it, and an arithmetic progression, such as a column of a
    weight matrix, meets its part in another tile with probability 1 / stride. With fewer than two
    candidates a slot (16 k > size) each element has its own and the answer is exact.

    Args:
        values: of the vector.
        size: number of elements, d.
        tile: elements a tile; the last one may be shorter.
        k: 1 <= k <= size.
        seed: of the offsets.
        like: arrays that `values` reads, for the replication type of the loop's carry.

    Returns:
        int32, distinct, in no particular order.
    """
    grid = _Grid.of(size, tile, k)
    shared = grid.per_group > 1
    id_bits = _ID_BITS if shared else 0
    slots = by_platform(
        seed,
        default=functools.partial(_fold, values, grid, like),
        gpu=functools.partial(_gather, values, grid),
    ).ravel()
    if not shared:
        slots = slots[:size]

    # At least k slots are taken: each element has its own, or every group a whole tile.
    magnitude = slots >> jnp.uint32(id_bits)
    threshold = kth_largest(magnitude, k, bits=31 - id_bits)
    above = (threshold + jnp.uint32(1)) << jnp.uint32(id_bits)
    equal = jnp.maximum(threshold << jnp.uint32(id_bits), jnp.uint32(shared))  # 0: an empty slot
    winners = first_of_ranges(slots, lambda slots: slots, (above, equal), k)
    if not shared:
        return winners

    place = (slots[winners] & jnp.uint32(2**id_bits - 1)).astype(jnp.int32) - 1
    # None is negative, which `//` and `%` would take further operations for.
    tile_ = jnp.int32(tile)
    b = place * grid.groups + lax.div(winners, tile_)
    within = lax.rem(winners, tile_) - grid.start(seed, b)
    return b * tile + jnp.where(within < 0, within + tile, within)


class _Grid(NamedTuple):
    """Which tiles share slots."""

    size: int  # elements, d
    tile: int  # elements of one
    groups: int  # tile b is in group b % groups
    per_group: int  # tiles; with one each element has a slot of its own

    @classmethod
    def of(cls, size: int, tile: int, k: int) -> "_Grid":
        tiles = -(-size // tile)
        per_group = min(max(size // (_SLOTS_PER_K * k), 1), _MAX_PER_SLOT, tiles)
        return cls(size, tile, -(-tiles // per_group), per_group)

    def start(self, seed: UInt32[Array, ""], b: Int[Array, "*tiles"]) -> Int[Array, "*tiles"]:
        """The slot, of its group, of the first element of tile b."""
        if self.per_group == 1:
            return zeros(b.shape, jnp.int32, (b, seed))  # as varying over devices as hashes
        return bounded(combine(seed, b), self.tile).astype(jnp.int32)

    def key(self, value: Float[Array, "*shape"], b: Int[Array, "..."]) -> UInt32[Array, "*shape"]:
        """A magnitude and which tile of its group it is from; not 0, which marks an empty slot."""
        bits = lax.bitcast_convert_type(value, jnp.uint32)
        if self.per_group == 1:
            return bits & jnp.uint32(2**31 - 1)
        place = (b // self.groups + 1).astype(jnp.uint32)
        return (bits & jnp.uint32(2**31 - 2**_ID_BITS)) | place


def _fold(
    values: Values, grid: _Grid, like: tuple[Array, ...], seed: UInt32[Array, ""]
) -> UInt32[Array, "groups tile"]:
    """The largest key of each slot, tile by tile."""
    shared = grid.per_group > 1
    around = grid.tile if shared else 0  # slots past a group's end, folded onto its beginning

    def fold(b: Array, slots: Array, length: int) -> Array:
        key = grid.key(values.of_tile(b, length), b)
        corner = (b % grid.groups, grid.start(seed, b))
        if shared:
            key = jnp.maximum(key, lax.dynamic_slice(slots, corner, (1, length))[0])
        return lax.dynamic_update_slice(slots, key[None], corner)

    slots = zeros((grid.groups, grid.tile + around), jnp.uint32, (*like, seed))
    slots = over_tiles(grid.size, grid.tile, fold, slots)
    return jnp.maximum(slots[:, : grid.tile], slots[:, grid.tile :]) if shared else slots


def _gather(values: Values, grid: _Grid, seed: UInt32[Array, ""]) -> UInt32[Array, "groups tile"]:
    """`_fold` as the maximum along one axis of an array that is never stored."""
    shape = grid.per_group, grid.groups
    b = lax.iota(jnp.int32, grid.per_group * grid.groups).reshape(*shape, 1)
    exists = b < -(-grid.size // grid.tile)
    b = jnp.where(exists, b, 0)
    length = jnp.where(exists, jnp.minimum(grid.size - b * grid.tile, grid.tile), 0)
    # Else the offset of a tile would be hashed once an element.
    start, length = lax.optimization_barrier((grid.start(seed, b), length))
    within = laid_around(start, grid.tile)
    key = grid.key(values.anywhere(b, within), b)
    return jnp.max(jnp.where(within < length, key, 0), axis=0)
