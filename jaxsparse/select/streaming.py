"""Choosing heavy coordinates of a vector that is computed tile by tile and never stored.

A full sort of d elements costs a hundred passes over them. Here every tile is folded into an array
of slots by an elementwise maximum as it is computed; then a threshold, found bit by bit, and a
compaction pick k of the slots.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int, UInt32

from jaxsparse.hashing import bounded, combine
from jaxsparse.select.compaction import compact_ranked
from jaxsparse.select.counting import count_reaching
from jaxsparse.tiles import over_tiles, zeros

__all__ = ["streaming_top_k"]

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
        tile_values: float32, of tile number (int32) and static length; must not see past `size`.
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
    shared = per_group > 1

    around = tile if shared else 0  # slots past a group's end, folded onto its beginning
    id_bits = _ID_BITS if shared else 0

    def start(b):
        return bounded(combine(seed, b), max(around, 1)).astype(jnp.int32)

    def fold(b, slots, length):
        key = lax.bitcast_convert_type(tile_values(b, length), jnp.uint32)
        key &= jnp.uint32(2**31 - 2**id_bits)
        corner = (b % groups, start(b))
        if shared:
            key |= (b // groups + 1).astype(jnp.uint32)  # not 0, which marks an empty slot
            key = jnp.maximum(key, lax.dynamic_slice(slots, corner, (1, length))[0])
        return lax.dynamic_update_slice(slots, key[None], corner)

    slots = zeros((groups, tile + around), jnp.uint32, (*like, seed))
    slots = over_tiles(size, tile, fold, slots)
    if shared:
        slots = jnp.maximum(slots[:, :tile], slots[:, tile:])
    slots = slots.ravel()
    if not shared:
        slots = slots[:size]

    # At least k slots are taken: each element has its own, or every group a whole tile.
    magnitude = slots >> jnp.uint32(id_bits)
    threshold = _kth_largest(magnitude, k, bits=31 - id_bits)
    above, equal = magnitude > threshold, magnitude == threshold
    if shared:
        equal &= slots > 0
    winners = compact_ranked([above, equal], k)
    if not shared:
        return winners

    place = (slots[winners] & jnp.uint32(2**id_bits - 1)).astype(jnp.int32) - 1
    b = place * groups + winners // tile
    return b * tile + (winners % tile - start(b)) % tile


def _kth_largest(x: UInt32[Array, " n"], k: int, *, bits: int) -> UInt32[Array, ""]:
    """The largest t with at least k elements >= t, of elements below 2**bits, bits < 32."""

    def set_bit(i, t):
        trial = t | (jnp.uint32(1) << (bits - 1 - i).astype(jnp.uint32))
        return jnp.where(count_reaching(x, trial) >= jnp.uint32(k), trial, t)

    return lax.fori_loop(0, bits, set_bit, zeros((), jnp.uint32, (x,)))
