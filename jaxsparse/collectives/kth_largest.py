"""The k-th largest magnitude of all workers' vectors, digit by digit (Ok-Topk's threshold)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxsparse import select
from jaxsparse.collectives import wire
from jaxsparse.stream import from_dense

# Of a magnitude, settled in each round.
_BITS = 8


def kth_largest(
    sums: Float[Array, " m"], k: int, capacity: int, axis_name: str | None
) -> Float[Array, ""]:
    """The k-th largest magnitude of all workers' sums; 0 if there are fewer than k.

    Args:
        sums: of which this worker has at most `capacity` that are not 0.
        k: the rank.
        capacity: for as many words memory is read again and again.
        axis_name: whose workers take part.
    """
    entries = from_dense(sums, select.compact(sums != 0, capacity))
    magnitude = jax.lax.bitcast_convert_type(jnp.abs(entries.values), jnp.uint32)
    bins = 2**_BITS

    def settle(i: Array, search: tuple[Array, Array]) -> tuple[Array, Array]:
        found, wanted = search
        shift = jnp.uint32(32 - _BITS) - _BITS * i.astype(jnp.uint32)
        # Count the magnitudes whose leading digits match those found so far. (A shift by 32 bits,
        # for the first digit, has no result; two shifts have.)
        known = (magnitude ^ found) >> shift >> jnp.uint32(_BITS) == 0
        digit = (magnitude >> shift).astype(jnp.int32) & (bins - 1)
        counts = jnp.zeros((bins,), jnp.int32).at[jnp.where(known, digit, bins)].add(1, mode="drop")
        from_here = jnp.cumsum(wire.psum(counts, axis_name)[::-1])[::-1]  # falls
        best = jnp.maximum(jnp.sum(from_here >= wanted, dtype=jnp.int32) - 1, 0)
        wanted -= jnp.where(best + 1 < bins, from_here[jnp.minimum(best + 1, bins - 1)], 0)
        return found | best.astype(jnp.uint32) << shift, wanted

    digits = 32 // _BITS
    found, _ = jax.lax.fori_loop(0, digits, settle, (jnp.uint32(0), jnp.int32(k)))
    return jax.lax.bitcast_convert_type(found, jnp.float32)
