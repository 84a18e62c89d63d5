"""Nearly the k largest elements of a vector in memory, or of one that is computed tile by tile.

A full sort of d elements costs a hundred passes over them. Here each tile is folded into an array
of slots by an elementwise maximum as it is computed. (On a GPU, all tiles are folded at once.) Then
a threshold and a compaction pick k of the slots.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int, Integer, UInt32

from jaxsparse.arrays.hashing import drawn
from jaxsparse.arrays.platforms import (
    by_platform,
    kth_largest,
    laid_around,
    over_tiles,
    zeros,
)
from jaxsparse.arrays.settings import check_k, check_seed, check_vector
from jaxsparse.arrays.stream import SparseStream
from jaxsparse.select.compaction import first_of_ranges

__all__ = ["Values", "fast_top_k", "streaming_top_k"]

# Number of tiles: enough to spread regions of heavy elements over all slots. Tiles are not so small
# that a step's overhead counts, nor so large that they exceed the caches. They fill registers: with
# one element less, XLA's CPU backend takes six times as long to copy a tile.
_TILES = 64
_MIN_TILE, _MAX_TILE = 2**10, 2**18
_LANES = 16
# Number of slots per kept element. If two of the k largest share a slot, the smaller one is lost.
# With 8 slots, one in sixteen is lost. The energy lost is less, because the next largest takes its
# place.
_SLOTS_PER_K = 8
# Number of bits for an element's place among those of its slot. They replace the lowest bits of its
# magnitude in a key, so that one unsigned maximum keeps both. The 23 bits that are left rank
# magnitudes to a relative 2**-15.
_ID_BITS = 8
_MAX_PER_SLOT = 2**_ID_BITS - 1


def fast_top_k(
    x: Float[Array, " d"], k: int, *, seed: Integer[Array, ""] | int = 0
) -> SparseStream:
    """Nearly the k entries of largest magnitude, in no order, without a sort.

    Elements pass through at least 8 k slots, and each slot keeps its largest. So one of the k
    largest can lose its place to a larger one in its slot. On average over seeds about 6 % of them
    do, however they are arranged, and the next largest replace them. With k = 1 % of normal data,
    99.5 % of the energy (sum of squares) of the k largest is kept; with cubed normals, 98.9 %.

    Regions of heavy elements that meet do so as a whole, so one seed can lose more of them than
    another. Elements a stride apart meet with probability 1 / stride, and long runs in proportion
    to their length. Magnitudes within a relative 2**-15 of each other rank as equal.

    If 16 k > d, the k largest are found exactly. Of equal magnitudes, the lower indices are kept.
    On CPU that is hardly faster than the sort in `top_k`.

    >>> sorted(fast_top_k(jnp.array([1.0, -3.0, 2.0]), 2).indices.tolist())
    [1, 2]
    """
    check_vector("x", x)
    return _fast_top_k(x, check_k(k, x.size), check_seed(seed))


@functools.partial(jax.jit, static_argnames="k")
def _fast_top_k(x: Float[Array, " d"], k: int, seed: UInt32[Array, ""]) -> SparseStream:
    tile = min(max(-(-x.size // _TILES), _MIN_TILE), _MAX_TILE)
    tile = min(-(-tile // _LANES) * _LANES, x.size)
    values = Values.of_vector(x, tile)
    indices = streaming_top_k(values, x.size, tile, k, seed=seed, like=(x,))
    return SparseStream(indices, x[indices])


class Values(NamedTuple):
    """Two ways to the same float32 values of a vector, which need not be stored."""

    of_tile: Callable[[Int[Array, ""], int], Float[Array, " n"]]
    """The values of a tile's first n elements, given its number and n. It must not read past the
    vector's end."""
    anywhere: Callable[[Int[Array, "..."], Int[Array, "*shape"]], Float[Array, "*shape"]]
    """The values of elements anywhere, given the numbers of their tiles, which may broadcast, and
    their places in these. Places in the last tile may lie past the vector's end, with any value."""

    @classmethod
    def of_vector(cls, x: Float[Array, " d"], tile: int) -> "Values":
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

    The tiles b = g, g + groups, g + 2 groups, ... share the slots of group g. Each is laid around
    them cyclically from its own random slot. So a run of heavy elements does not meet itself within
    a tile, nor in neighbouring tiles unless there is only one group. An arithmetic progression,
    such as a column of a weight matrix, meets its part in another tile with probability 1 / stride.
    With fewer than two candidates per slot (16 k > size), each element has its own slot, and the
    answer is exact.

    `like` has the arrays that `values` reads, for the replication type of the loop's carry.
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

    # At least k slots are taken: each element has its own, or each group has a whole tile.
    magnitude = slots >> jnp.uint32(id_bits)
    threshold = kth_largest(magnitude, k, bits=31 - id_bits)
    above = (threshold + jnp.uint32(1)) << jnp.uint32(id_bits)
    equal = jnp.maximum(threshold << jnp.uint32(id_bits), jnp.uint32(shared))  # 0: an empty slot
    winners = first_of_ranges(slots, (above, equal), k)
    if not shared:
        return winners

    place = (slots[winners] & jnp.uint32(2**id_bits - 1)).astype(jnp.int32) - 1
    # No number is negative here. `//` and `%` would take further operations for those that are.
    tile_ = jnp.int32(tile)
    b = place * grid.groups + lax.div(winners, tile_)
    within = lax.rem(winners, tile_) - grid.start(seed, b)
    return b * tile + jnp.where(within < 0, within + tile, within)


class _Grid(NamedTuple):
    """Which tiles share slots."""

    size: int  # number of elements, d
    tile: int  # number of elements of a tile
    groups: int  # tile b is in group b % groups
    per_group: int  # largest number of tiles of a group; if 1, each element has its own slot

    @classmethod
    def of(cls, size: int, tile: int, k: int) -> "_Grid":
        tiles = -(-size // tile)
        per_group = min(max(size // (_SLOTS_PER_K * k), 1), _MAX_PER_SLOT, tiles)
        return cls(size, tile, -(-tiles // per_group), per_group)

    def start(self, seed: UInt32[Array, ""], b: Int[Array, "*tiles"]) -> Int[Array, "*tiles"]:
        """The slot, in its group, of the first element of tile b."""
        if self.per_group == 1:
            return zeros(b.shape, jnp.int32, (b, seed))  # with the replication type of hashes
        return drawn(self.tile, seed, b)

    def key(self, value: Float[Array, "*shape"], b: Int[Array, "..."]) -> UInt32[Array, "*shape"]:
        """A magnitude. With shared slots it names the tile too, and only empty slots are 0."""
        bits = lax.bitcast_convert_type(value, jnp.uint32)
        if self.per_group == 1:
            return bits & jnp.uint32(2**31 - 1)
        place = (b // self.groups + 1).astype(jnp.uint32)
        return (bits & jnp.uint32(2**31 - 2**_ID_BITS)) | place


def _fold(
    values: Values, grid: _Grid, like: tuple[Array, ...], seed: UInt32[Array, ""]
) -> UInt32[Array, "groups tile"]:
    """The largest key of each slot, computed tile by tile."""
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
    # Without a barrier, the offset of a tile would be hashed once for each element.
    start, length = lax.optimization_barrier((grid.start(seed, b), length))
    within = laid_around(start, grid.tile)
    key = grid.key(values.anywhere(b, within), b)
    return jnp.max(jnp.where(within < length, key, 0), axis=0)
