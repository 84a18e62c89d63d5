"""Extraction into random slots: an element's place in the result is hashed, not counted.

Elements that share a slot contend for it, and the losers are left out. With a fresh seed at each
step others contend, so none loses for ever.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int, Integer, UInt32

from jaxsparse.hashing import as_uint32, bounded, combine, keyed
from jaxsparse.select.checks import check_seed, check_vector
from jaxsparse.select.compaction import compact
from jaxsparse.select.counting import magnitude_bits
from jaxsparse.settings import static_int
from jaxsparse.stream import SparseStream, from_dense
from jaxsparse.tiles import over_tiles, zeros

__all__ = ["Extraction", "counted_hash_extract", "hash_extract", "hash_slots", "slot_max"]

# Elements that are compacted before they are hashed, for each slot. More pass only where a
# threshold is far off, or where many elements tie with it.
_ROOM = 2
# Elements of a step where more than that pass.
_SCATTERED = 2**16
# Of slot_max: shorter tiles cost more for the step than for the elements.
_MIN_TILE = 2**14
# Starts of tiles are hashed under (seed, number), those of a tile's rows under one word more.
_ROW = 1


class Extraction(NamedTuple):
    """What `hash_extract` keeps, and of how many."""

    stream: SparseStream  # m slots
    passed: Int[Array, ""]  # int32; entries of the stream, and those that lost their slots


def hash_extract(
    x: Float[Array, " d"],
    threshold: Float[Array, ""] | float,
    slots: int,
    *,
    seed: Integer[Array, ""] | int = 0,
) -> SparseStream:
    """Entries of magnitude at least `threshold`, each in the slot that its index hashes to.

    Of those that share a slot the one of largest index stays: the last to write, if all write in
    order. With n that pass a slot is empty with probability (1 - 1/m)^n: n = m fill 63 % of the
    slots, whatever the magnitudes.

    Costs a pass over x, and for 2 m elements a place, a hash and a write. Where more pass, these
    for all of x, several times as long.

    Args:
        x: float vector of d elements. NaN does not pass.
        threshold: t, scalar, compared in float32 (float64 for an `x` in it); may be traced.
        slots: m, 1 <= m <= d.
        seed: integer below 2**32, of the hash; may be traced. Needs to change from step to step,
            or the same entries lose their slots at each.

    Returns:
        m entries in the order of slots: distinct int32 indices, and the values of `x` there, in
        its dtype. Empty slots have index d and value 0.

    Raises:
        ValueError: `x` is not a vector, threshold is not a scalar, slots is out of range, or seed
            is not an integer scalar.

    DRAGONN (Wang et al., 2022), Alg. 1 and section 3.1; share of empty slots: Lemma A.10.

    Example:
        >>> import jax.numpy as jnp
        >>> stream = hash_extract(jnp.array([1.0, -5.0, 3.0]), 4, 2)
        >>> sorted(stream.indices.tolist())
        [1, 3]
    """
    return counted_hash_extract(x, threshold, slots, seed=seed).stream


def counted_hash_extract(
    x: Float[Array, " d"],
    threshold: Float[Array, ""] | float,
    slots: int,
    *,
    seed: Integer[Array, ""] | int = 0,
) -> Extraction:
    """`hash_extract` and how many elements passed, a count that by itself would take longer.

    Args:
        x: as `hash_extract`.
        threshold: as there.
        slots: as there.
        seed: as there.

    Returns:
        The stream, and n as int32: n less the stream's entries have lost their slots.

    Raises:
        ValueError: as there.

    Example:
        >>> import jax.numpy as jnp
        >>> counted_hash_extract(jnp.array([1.0, -5.0, 4.0]), 4, 1).passed.item()
        2
    """
    check_vector("x", x)
    slots = _check_slots(slots, x.size)
    if jnp.ndim(threshold):
        raise ValueError(
            f"threshold has shape {jnp.shape(threshold)}, but must be a scalar: pass one for all"
        )
    dtype = x.dtype if x.dtype == jnp.float64 else jnp.float32
    return _hash_extract(x, jnp.asarray(threshold, dtype), slots, check_seed(seed))


def hash_slots(
    indices: Integer[Array, " n"], slots: int, seed: Integer[Array, ""] | int = 0
) -> Int[Array, " n"]:
    """The slots h(i) that `hash_extract` writes elements i into.

    Args:
        indices: i, integers.
        slots: m, at least 1.
        seed: integer below 2**32; may be traced.

    Returns:
        int32, each below m, uniform to m / 2**32.

    >>> sorted(set(hash_slots(jnp.arange(50), 3).tolist()))
    [0, 1, 2]
    """
    return bounded(keyed(as_uint32(indices), combine(seed)), slots).astype(jnp.int32)


@functools.partial(jax.jit, static_argnames="slots")
def _hash_extract(
    x: Float[Array, " d"], threshold: Float[Array, ""], slots: int, seed: UInt32[Array, ""]
) -> Extraction:
    slot_of = lambda i: hash_slots(i, slots, seed)
    return _extract(x, threshold, slots, slot_of, like=(x, threshold, seed))


def _extract(
    x: Float[Array, " d"],
    threshold: Float[Array, ""],
    slots: int,
    slot_of: Callable[[Int[Array, " n"]], Int[Array, " n"]],
    like: tuple[Array, ...],
) -> Extraction:
    """`counted_hash_extract` with any hash; `like` as in `zeros`."""
    size = x.size

    def write(held, indices, chosen):
        slot = jnp.where(chosen, slot_of(indices), slots)
        return held.at[slot].max(indices, mode="drop")

    positions = compact(_passes(x, threshold), min(_ROOM * slots, size))
    chosen = positions < size
    held = write(zeros((slots,), jnp.int32, like) - 1, positions, chosen)
    passed = jnp.sum(chosen, dtype=jnp.int32)

    if len(positions) < size:
        # More may pass. A loop of no steps rather than a branch, both of which vmap would run.
        # Those that have been written are written again, which changes no maximum.
        tile = min(_SCATTERED, size)
        steps = jnp.where(chosen[-1], -(-size // tile), 0)

        def scatter(b, carry):
            held, passed = carry
            start = jnp.minimum(b * tile, size - tile)
            indices = start + lax.iota(jnp.int32, tile)
            chosen = _passes(lax.dynamic_slice(x, (start,), (tile,)), threshold)
            chosen &= indices >= b * tile
            return write(held, indices, chosen), passed + jnp.sum(chosen, dtype=jnp.int32)

        passed = jnp.where(chosen[-1], 0, passed)
        held, passed = lax.fori_loop(jnp.int32(0), steps, scatter, (held, passed))

    return Extraction(from_dense(x, jnp.where(held < 0, size, held)), passed)


def slot_max(
    x: Float[Array, " d"], slots: int, *, seed: Integer[Array, ""] | int = 0
) -> SparseStream:
    """The largest magnitude of each of `slots` random sets of about d / slots elements.

    Needs no threshold, fills every slot, and costs a pass over x. One of the m largest is kept if
    it meets no larger one: the r-th largest with probability about exp(-r / m). Of m = 1 % of
    cubed normals 85 % of the energy (sum of squares) of the m largest is kept, where
    `hash_extract` keeps 63 % and `fast_top_k`, in about twice the time, 99 %.

    Rows of m elements are laid cyclically around the slots, each from a random one. (Below 2**14
    slots several rows make a tile, which is first laid around itself.) So elements of a row don't
    meet, and any others do with probability 1 / m; heavy regions of two rows meet as a whole.
    Magnitudes are ranked to a relative 2**-22 d / max(m, 2**14), or 2**-22 if that is more: 2**-15
    at a density of 1 % and 2**-12 at 0.1 %. Of equal ones any is kept.

    Args:
        x: float vector of d elements, without NaN. float64 is ranked as float32.
        slots: m, number of entries to keep, 1 <= m <= d.
        seed: integer below 2**32, of the sets; may be traced. Needs to change from step to step,
            or the same elements meet at each.

    Returns:
        m entries in the order of slots: distinct int32 indices, and the values of `x` there, in
        its dtype. No slot is empty, but its value may be 0.

    Raises:
        ValueError: `x` is not a vector, slots is out of range, or seed is not an integer scalar.

    After DRAGONN (Wang et al., 2022), section 3.1, with the largest writer in place of the last.

    Example:
        >>> import jax.numpy as jnp
        >>> slot_max(jnp.array([1.0, -3.0, 2.0]), 1).values.tolist()
        [-3.0]
    """
    check_vector("x", x)
    return _slot_max(x, _check_slots(slots, x.size), check_seed(seed))


@functools.partial(jax.jit, static_argnames="slots")
def _slot_max(x: Float[Array, " d"], slots: int, seed: UInt32[Array, ""]) -> SparseStream:
    # The first tile is a whole one, so that every slot gets an element.
    rows = min(-(-_MIN_TILE // slots), x.size // slots)
    tile = rows * slots
    # A key is a magnitude with its lowest bits replaced by the number of the element's tile, so
    # one unsigned maximum keeps both.
    id_bits = (-(-x.size // tile) - 1).bit_length()

    def start(b):
        return bounded(combine(seed, b), tile).astype(jnp.int32)

    def fold(b, best, length):
        key = magnitude_bits(lax.dynamic_slice(x, (b * tile,), (length,)))
        key &= jnp.uint32(2**31 - 2**id_bits)
        key |= b.astype(jnp.uint32)
        key = jnp.maximum(key, lax.dynamic_slice(best, (start(b),), (length,)))
        return lax.dynamic_update_slice(best, key, (start(b),))

    best = over_tiles(x.size, tile, fold, zeros((2 * tile,), jnp.uint32, (x, seed)))
    best = jnp.maximum(best[:tile], best[tile:])
    b = (best & jnp.uint32(2**id_bits - 1)).astype(jnp.int32)
    indices = b * tile + (lax.iota(jnp.int32, tile) - start(b)) % tile
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
    start = bounded(combine(seed, row, _ROW), slots).astype(jnp.int32)
    entry = row * slots + (slot - start) % slots
    magnitude = magnitude_bits(_at(values.ravel(), entry))
    winner = jnp.argmax(magnitude, axis=0)[None]
    entry = jnp.take_along_axis(entry, winner, axis=0)[0]
    return _at(indices.ravel(), entry), _at(values.ravel(), entry)


def _passes(x: Float[Array, " n"], threshold: Float[Array, ""]) -> Bool[Array, " n"]:
    return jnp.abs(x.astype(threshold.dtype)) >= threshold


def _at(x: Array, indices: Int[Array, "..."]) -> Array:
    """x[indices], of indices in bounds, which are not checked."""
    return x.at[indices].get(mode="promise_in_bounds")


def _check_slots(slots: int, size: int) -> int:
    slots = static_int("slots", slots)
    if not 1 <= slots <= size:
        raise ValueError(
            f"slots={slots} must lie between 1 and the vector's size, {size}: choose "
            "density * size, rounded up"
        )
    return slots
