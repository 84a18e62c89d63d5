"""Extraction into random slots: an element's place in the result is hashed.

DRAGONN (section 3.1) hashes places because a running count of what passes is slow. A GPU does so
here. A CPU first compacts what passes and hashes only that, because a write that is dropped takes
it as long as any other. Elements that share a slot contend for it, and the losers are left out.
With a fresh seed at each step, other elements contend, so that none loses for ever.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int, Integer, UInt32

from jaxsparse.arrays.hashing import as_uint32, bounded, combine, keyed
from jaxsparse.arrays.platforms import by_platform, zeros
from jaxsparse.arrays.settings import check_seed, check_slots, check_vector, static_int
from jaxsparse.arrays.stream import SparseStream, from_dense
from jaxsparse.select.compaction import compact

# Number of elements that are compacted before they are hashed, for each that is expected to pass.
# More pass only if a threshold is far off, or if many elements tie with it.
_ROOM = 2
# Number of elements of a step if more than that pass.
_SCATTERED = 2**16


def hash_extract(
    x: Float[Array, " d"],
    threshold: Float[Array, ""] | float,
    slots: int,
    *,
    seed: Integer[Array, ""] | int = 0,
    expected: int | None = None,
) -> SparseStream:
    """Entries of magnitude at least `threshold`, each in the slot that its index hashes to.

    If entries share a slot, the one of largest index stays: the last to write, if all write in
    order. If n entries pass, a slot is empty with probability (1 - 1/m)^n. So n = m entries fill 63
    % of the slots, whatever their magnitudes. DRAGONN (Wang et al., 2022), Alg. 1, section 3.2;
    share of empty slots: Lemma A.10.

    Args:
        x: float vector of d elements. NaN does not pass.
        threshold: least magnitude of an entry, t, a scalar. It is compared in float32, or in
            float64 if `x` is float64. It may be traced.
        slots: number of slots, m, 1 <= m <= d.
        seed: seed of the hash. It needs to change from step to step, or the same entries lose their
            slots at each.
        expected: number of elements that are expected to pass, 1 to d. It changes only the time: if
            more than twice as many pass, a CPU takes several times as long. None: m.

    >>> stream = hash_extract(jnp.array([1.0, -5.0, 3.0]), 4, 2)
    >>> sorted(stream.indices.tolist())
    [1, 3]
    """
    check_vector("x", x)
    slots = check_slots(slots, x.size)
    if jnp.ndim(threshold):
        raise ValueError(
            f"threshold has shape {jnp.shape(threshold)}, but must be a scalar: pass one for all"
        )
    dtype = x.dtype if x.dtype == jnp.float64 else jnp.float32
    expected = slots if expected is None else static_int("expected", expected)
    if not 1 <= expected <= x.size:
        raise ValueError(f"expected={expected} must lie between 1 and the vector's size, {x.size}")
    room = min(_ROOM * expected, x.size)
    return _hash_extract(x, jnp.asarray(threshold, dtype), slots, check_seed(seed), room=room)


def hash_slots(
    indices: Integer[Array, " n"], slots: int, seed: Integer[Array, ""] | int = 0
) -> Int[Array, " n"]:
    """The slot h(i) below `slots` that `hash_extract` writes element i into, for each index i."""
    return bounded(keyed(as_uint32(indices), combine(check_seed(seed))), slots).astype(jnp.int32)


@functools.partial(jax.jit, static_argnames=("slots", "room"))
def _hash_extract(
    x: Float[Array, " d"],
    threshold: Float[Array, ""],
    slots: int,
    seed: UInt32[Array, ""],
    *,
    room: int,
) -> SparseStream:
    slot_of = lambda i: hash_slots(i, slots, seed)
    return _extract(x, threshold, slots, slot_of, like=(x, threshold, seed), room=room)


def _extract(
    x: Float[Array, " d"],
    threshold: Float[Array, ""],
    slots: int,
    slot_of: Callable[[Int[Array, " n"]], Int[Array, " n"]],
    like: tuple[Array, ...],
    room: int,
) -> SparseStream:
    """`hash_extract` with any hash, `slot_of`. A CPU hashes `room` elements at most."""

    def write(held: Array, indices: Array, chosen: Array) -> Array:
        slot = jnp.where(chosen, slot_of(indices), slots)
        return held.at[slot].max(indices, mode="drop")

    empty = zeros((slots,), jnp.int32, like) - 1
    held = by_platform(
        x,
        threshold,
        empty,
        default=functools.partial(_write_compacted, write=write, room=room),
        gpu=functools.partial(_write_all, write=write),
    )
    return from_dense(x, jnp.where(held < 0, x.size, held))


_Write = Callable[[Array, Array, Array], Array]  # writes the chosen ones of indices into `held`


def _write_all(
    x: Float[Array, " d"], threshold: Float[Array, ""], held: Int[Array, " m"], *, write: _Write
) -> Int[Array, " m"]:
    """One write per element. Nearly all are dropped, and their order does not change a maximum."""
    return write(held, lax.iota(jnp.int32, x.size), _passes(x, threshold))


def _write_compacted(
    x: Float[Array, " d"],
    threshold: Float[Array, ""],
    held: Int[Array, " m"],
    *,
    write: _Write,
    room: int,
) -> Int[Array, " m"]:
    """`_write_all` after a compaction, because dropped writes cost a CPU as much as others."""
    size = x.size
    positions = compact(_passes(x, threshold), room)
    chosen = positions < size
    held = write(held, positions, chosen)
    if len(positions) < size:
        # More may pass. If not, the loop has no steps. (Of a branch, vmap would run both sides.)
        # Elements that have been written are written again, which changes no maximum.
        tile = min(_SCATTERED, size)
        steps = jnp.where(chosen[-1], -(-size // tile), 0)

        def scatter(b, held):
            start = jnp.minimum(b * tile, size - tile)
            indices = start + lax.iota(jnp.int32, tile)
            chosen = _passes(lax.dynamic_slice(x, (start,), (tile,)), threshold)
            chosen &= indices >= b * tile
            return write(held, indices, chosen)

        held = lax.fori_loop(jnp.int32(0), steps, scatter, held)
    return held


def _passes(x: Float[Array, " n"], threshold: Float[Array, ""]) -> Bool[Array, " n"]:
    return jnp.abs(x.astype(threshold.dtype)) >= threshold
