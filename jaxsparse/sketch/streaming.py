"""Choosing heavy coordinates of a vector that is computed tile by tile and never stored.

A full sort of d elements costs a hundred passes over them. Here every tile is folded into an array
of slots by an elementwise maximum as it is computed; then a threshold, found bit by bit, and one
scatter pick k of the slots.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int, Key, UInt8, UInt32

from jaxsparse.hashing import bounded, combine, permute
from jaxsparse.sketch.tiles import over_tiles, zeros

__all__ = ["first_k", "mix_in_random", "streaming_top_k"]

# Two of the k largest that share a slot cost the smaller one: with 8 slots per kept element that
# loses one in sixteen, and the energy lost is less, for the next largest takes its place.
_SLOTS_PER_K = 8
# A key is a magnitude with its lowest bits replaced by the element's place among those of its
# slot, so one unsigned maximum keeps both. The 23 bits left rank to a relative 2**-15.
_ID_BITS = 8
_MAX_PER_SLOT = 2**_ID_BITS - 1


def streaming_top_k(
    tile_values: Callable[[Int[Array, ""], int], Float[Array, " n"]],
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
        tile_values: of tile number (int32) and static length; must not see past `size`.
        size: number of elements, d.
        tile: elements a tile; the last one may be shorter.
        k: 1 <= k <= size.
        seed: of the offsets.
        like: arrays that `tile_values` reads, for the replication type of the loop's carry.

    Returns:
        int32, distinct, in no particular order.
    """
    tiles = -(-size // tile)
    per_group = min(max(size // (_SLOTS_PER_K * k), 1), _MAX_PER_SLOT, tiles)
    groups = -(-tiles // per_group)

    around = tile if per_group > 1 else 0  # slots past a group's end, folded onto its beginning

    def start(b):
        return bounded(combine(seed, b), max(around, 1)).astype(jnp.int32)

    def fold(b, slots, length):
        values = lax.bitcast_convert_type(tile_values(b, length), jnp.uint32)
        place = (b // groups + 1).astype(jnp.uint32)  # not 0, which marks an empty slot
        key = (values & jnp.uint32(2**31 - 2**_ID_BITS)) | place
        corner = (b % groups, start(b))
        key = jnp.maximum(key, lax.dynamic_slice(slots, corner, (1, length))[0])
        return lax.dynamic_update_slice(slots, key[None], corner)

    slots = zeros((groups, tile + around), jnp.uint32, (*like, seed))
    slots = over_tiles(size, tile, fold, slots)
    if around:
        slots = jnp.maximum(slots[:, :tile], slots[:, tile:])
    slots = slots.ravel()

    # At least k slots are taken: each element has its own, or every group a whole tile.
    magnitude = slots >> jnp.uint32(_ID_BITS)
    threshold = _kth_largest(magnitude, k, bits=31 - _ID_BITS)
    above, equal = magnitude > threshold, (magnitude == threshold) & (slots > 0)
    winners = first_k(jnp.where(above, 0, jnp.where(equal, 1, 2)).astype(jnp.uint8), 2, k)

    place = (slots[winners] & jnp.uint32(2**_ID_BITS - 1)).astype(jnp.int32) - 1
    b = place * groups + winners // tile
    return b * tile + (winners % tile - start(b)) % tile


def mix_in_random(
    indices: Int[Array, " k"],
    heavy: Bool[Array, " k"],
    size: int,
    is_heavy: Callable[[Int[Array, " m"]], Bool[Array, " m"]],
    *,
    key: Key[Array, ""],
) -> Int[Array, " k"]:
    """Keeps the heavy ones of k indices and replaces the others by random non-heavy ones.

    They are drawn from the first 2 k of a pseudorandom permutation of all indices. Only if
    `indices` lacks more than k heavy ones can these hold too few that are not heavy: then heavy
    ones take the places left.

    Args:
        indices: distinct, each below `size`.
        heavy: which of them to keep.
        size: number of elements, d.
        is_heavy: tells whether elements are heavy.
        key: of the permutation.

    Returns:
        int32, distinct, each below `size`.
    """
    k = indices.shape[0]
    drawn = permute(jnp.arange(min(2 * k, size), dtype=jnp.int32), size, key)
    kept = zeros((size,), jnp.bool_, (indices, heavy)).at[indices].set(heavy)
    rank_drawn = jnp.where(kept[drawn], 3, jnp.where(is_heavy(drawn), 2, 1))
    rank = jnp.concatenate([jnp.where(heavy, 0, 3), rank_drawn]).astype(jnp.uint8)
    return jnp.concatenate([indices, drawn])[first_k(rank, 3, k)]


def first_k(rank: UInt8[Array, " n"], ranks: int, k: int) -> Int[Array, " k"]:
    """Positions of k elements of the lowest ranks, without a sort.

    Args:
        rank: per element; one of `ranks` or more is never taken.
        ranks: number of ranks, a few.
        k: at most the number of elements that may be taken.

    Returns:
        int32, lower ranks first, in no particular order within a rank.

    >>> first_k(jnp.uint8([1, 2, 0, 1, 0]), 2, 4).tolist()
    [2, 4, 0, 3]
    """
    # Positions are counted along the columns of a grid, which vectorises; a cumulative sum along
    # the vector would take longer than all the rest.
    width = min(rank.size, 4096)
    grid = jnp.pad(rank, (0, -rank.size % width), constant_values=ranks).reshape(-1, width)
    count = jnp.stack([jnp.sum(grid == r, axis=0, dtype=jnp.int32) for r in range(ranks)])
    ends = jnp.cumsum(count.ravel()).reshape(count.shape)

    def place(i, carry):
        position, taken = carry
        here = grid[i][None] == jnp.arange(ranks, dtype=jnp.uint8)[:, None]
        target = jnp.min(jnp.where(here, position, k), axis=0)
        element = i * width + lax.iota(jnp.int32, width)
        return position + here.astype(jnp.int32), taken.at[target].set(element, mode="drop")

    taken = zeros((k,), jnp.int32, (rank,))
    return lax.fori_loop(0, grid.shape[0], place, (ends - count, taken))[1]


def _kth_largest(x: UInt32[Array, " n"], k: int, *, bits: int) -> UInt32[Array, ""]:
    """The largest t with at least k elements >= t, of elements below 2**bits, bits < 32."""

    def set_bit(i, t):
        trial = t | (jnp.uint32(1) << (bits - 1 - i).astype(jnp.uint32))
        # The sign bit of trial - 1 - x, which is summed three times faster than a comparison.
        count = jnp.sum(((trial - jnp.uint32(1) - x) >> jnp.uint32(31)).astype(jnp.int32))
        return jnp.where(count >= k, trial, t)

    return lax.fori_loop(0, bits, set_bit, zeros((), jnp.uint32, (x,)))
