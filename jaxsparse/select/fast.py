"""Nearly the k largest elements of a vector in memory, or of one that is computed tile by tile.

A full sort of d elements costs a hundred passes over them. Here each tile is folded into an array
of slots by an elementwise maximum as it is computed. (On a GPU, all tiles are folded at once.) Then
a threshold and a compaction pick k of the slots. `slot_max` takes all of them.
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
    magnitude_bits,
    over_tiles,
    zeros,
)
from jaxsparse.arrays.settings import check_k, check_seed, check_slots, check_vector
from jaxsparse.arrays.stream import SparseStream
from jaxsparse.select.compaction import first_of_ranges

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
# Least size of a tile of `slot_max`. Shorter ones cost more for the step than for the elements.
_MIN_ROWS = 2**14
# Extra word in the hash for a row's start. A tile's start is hashed under (seed, number) alone.
_ROW = 1


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
    shared, id_bits = grid.is_shared, grid.id_bits
    slots = _largest_keys(values, grid, like, seed)
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
    per_group: int  # largest number of tiles of a group
    id_bits: int  # lowest bits of a key, which number the tiles of a group
    first_id: int  # the number of the first one. 1: only empty slots are 0
    is_shared: bool = True  # if not, each element has its own slot

    @classmethod
    def of(cls, size: int, tile: int, k: int) -> "_Grid":
        tiles = -(-size // tile)
        per_group = min(max(size // (_SLOTS_PER_K * k), 1), _MAX_PER_SLOT, tiles)
        is_shared = per_group > 1
        id_bits = _ID_BITS if is_shared else 0
        return cls(size, tile, -(-tiles // per_group), per_group, id_bits, 1, is_shared)

    def start(self, seed: UInt32[Array, ""], b: Int[Array, "*tiles"]) -> Int[Array, "*tiles"]:
        """The slot, in its group, of the first element of tile b."""
        if not self.is_shared:
            return zeros(b.shape, jnp.int32, (b, seed))  # with the replication type of hashes
        return drawn(self.tile, seed, b)

    def key(self, value: Float[Array, "*shape"], b: Int[Array, "..."]) -> UInt32[Array, "*shape"]:
        """A magnitude, whose lowest bits name the tile if slots are shared.

        So one unsigned maximum keeps both.
        """
        bits = lax.bitcast_convert_type(value, jnp.uint32)
        if not self.is_shared:
            return bits & jnp.uint32(2**31 - 1)
        place = b if self.groups == 1 else b // self.groups
        place = (place + self.first_id if self.first_id else place).astype(jnp.uint32)
        return (bits & jnp.uint32(2**31 - 2**self.id_bits)) | place


def _largest_keys(
    values: Values, grid: _Grid, like: tuple[Array, ...], seed: UInt32[Array, ""]
) -> UInt32[Array, " slots"]:
    """The largest key of each slot."""
    return by_platform(
        seed,
        default=functools.partial(_fold, values, grid, like),
        gpu=functools.partial(_gather, values, grid),
    )


def _fold(
    values: Values, grid: _Grid, like: tuple[Array, ...], seed: UInt32[Array, ""]
) -> UInt32[Array, " slots"]:
    """`_largest_keys`, tile by tile."""
    shared = grid.is_shared
    width = 2 * grid.tile if shared else grid.tile  # slots past a group's end are its first ones

    def fold(b: Array, slots: Array, length: int) -> Array:
        key = grid.key(values.of_tile(b, length), b)
        start = grid.start(seed, b)
        if grid.groups > 1:
            start += b % grid.groups * width
        if shared:
            key = jnp.maximum(key, lax.dynamic_slice(slots, (start,), (length,)))
        return lax.dynamic_update_slice(slots, key, (start,))

    slots = zeros((grid.groups * width,), jnp.uint32, (*like, seed))
    slots = over_tiles(grid.size, grid.tile, fold, slots)
    if not shared:
        return slots
    if grid.groups > 1:
        slots = slots.reshape(grid.groups, width)
    return jnp.maximum(slots[..., : grid.tile], slots[..., grid.tile :]).ravel()


def _gather(values: Values, grid: _Grid, seed: UInt32[Array, ""]) -> UInt32[Array, " slots"]:
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
    return jnp.max(jnp.where(within < length, key, 0), axis=0).ravel()


def slot_max(
    x: Float[Array, " d"], slots: int, *, seed: Integer[Array, ""] | int = 0
) -> SparseStream:
    """The largest magnitude of each of m = `slots` random sets of about d / m elements.

    It needs no threshold, fills every slot (maybe with a 0), and takes a pass over x. One of the m
    largest is kept if it meets no larger one. The r-th largest is kept with probability about
    exp(-r / m). With m = 1 % of cubed normals, 85 % of the energy (sum of squares) of the m largest
    is kept. `hash_extract` keeps 63 %, and `fast_top_k` keeps 99 % in about twice the time. After
    DRAGONN (Wang et al., 2022), section 3.2, with the largest writer in place of the last. The seed
    needs to change from step to step, or the same elements meet at each.

    Rows of m elements are laid cyclically around the slots, each from a random slot. (Below 2**14
    slots, several rows make a tile, which is first laid around itself.) So elements of a row don't
    meet, and any others meet with probability 1 / m. Heavy regions of two rows meet as a whole.
    Magnitudes are ranked to a relative 2**-22 d / max(m, 2**14), or 2**-22 if that is more: 2**-15
    at a density of 1 % and 2**-12 at 0.1 %. Any of equal magnitudes may be kept.

    >>> slot_max(jnp.array([1.0, -3.0, 2.0]), 1).values.tolist()
    [-3.0]
    """
    check_vector("x", x)
    return _slot_max(x, check_slots(slots, x.size), check_seed(seed))


@functools.partial(jax.jit, static_argnames="slots")
def _slot_max(x: Float[Array, " d"], slots: int, seed: UInt32[Array, ""]) -> SparseStream:
    # The first tile is a whole one, so that every slot gets an element.
    rows = min(-(-_MIN_ROWS // slots), x.size // slots)
    tile = rows * slots
    tiles = -(-x.size // tile)
    id_bits = (tiles - 1).bit_length()
    grid = _Grid(x.size, tile, 1, tiles, id_bits, 0)
    best = _largest_keys(Values.of_vector(x, tile), grid, (x,), seed)
    b = (best & jnp.uint32(2**id_bits - 1)).astype(jnp.int32)
    indices = b * tile + (lax.iota(jnp.int32, tile) - grid.start(seed, b)) % tile
    values = _at(x, indices)
    if rows > 1:
        indices, values = _largest_of_rows(
            indices.reshape(rows, slots), values.reshape(rows, slots), seed
        )
    return SparseStream(indices, values)


def _largest_of_rows(
    indices: Int[Array, "rows m"], values: Float[Array, "rows m"], seed: UInt32[Array, ""]
) -> tuple[Int[Array, " m"], Float[Array, " m"]]:
    """The entry of largest magnitude of each column, after each row is turned at random."""
    rows, slots = indices.shape
    row = lax.broadcasted_iota(jnp.int32, (rows, slots), 0)
    slot = lax.broadcasted_iota(jnp.int32, (rows, slots), 1)
    start = drawn(slots, seed, row, _ROW)
    entry = row * slots + (slot - start) % slots
    magnitude = magnitude_bits(_at(values.ravel(), entry))
    winner = jnp.argmax(magnitude, axis=0)[None]
    entry = jnp.take_along_axis(entry, winner, axis=0)[0]
    return _at(indices.ravel(), entry), _at(values.ravel(), entry)


def _at(x: Array, indices: Int[Array, "..."]) -> Array:
    """x[indices]. The indices are in bounds, and are not checked."""
    return x.at[indices].get(mode="promise_in_bounds")
