"""Which worker keeps what a sparse all-reduce did not deliver."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxsparse.collectives.outcome import AllReduced
from jaxsparse.reducers.base import Reduced, info
from jaxsparse.stream import SparseStream, to_dense


def settle(
    x: Float[Array, " d"],
    total: Float[Array, " d"],
    discarded: Float[Array, " d"],
    selected: Bool[Array, " d"],
    state: object,
    workers: int,
) -> Reduced:
    """The outcome if each worker `discarded` its part of the mass that `total` lacks.

    Where something arrived, a worker feeds back what it has itself discarded on the way; where
    nothing did, all workers have their own copies, which cover any such discards (SparDL, Alg. 1).
    Sums that cancel to 0, or overflow, count as not arrived: the copies conserve them as well.

    Args:
        x: float32, what this worker wanted to be summed.
        total: float32, what was, equal on all workers.
        discarded: float32, this worker's share; read only where `total` is not 0.
        selected: what this worker put forward.
        state: the reducer's.
        workers: their number, W.
    """
    total = jnp.where(jnp.isfinite(total), total, 0)
    arrived = total != 0
    residual = jnp.where(arrived, discarded, x)
    return Reduced(
        total / workers, residual, arrived & selected, state, info(jnp.count_nonzero(arrived))
    )


def deliver_streams(
    x: Float[Array, " d"], stream: SparseStream, result: AllReduced, state: object, workers: int
) -> Reduced:
    """The outcome of a sparse all-reduce of entries of `x`.

    A worker keeps what it did not select, and its share of what the all-reduce left. Sums that
    overflow count as not sent.

    Args:
        x: float32, what this worker wanted to be summed.
        stream: the entries of `x` that it put forward, with distinct indices.
        result: of the all-reduce.
        state: the reducer's.
        workers: their number, W.
    """
    finite = jnp.isfinite(result.total)
    mean = jnp.where(finite, result.total, 0) / workers
    # Shares of what others put forward can be more than float32 holds; an inf would never leave.
    largest = jnp.finfo(x.dtype).max
    residual = jnp.clip(x - to_dense(stream, x.size) + result.residual, -largest, largest)
    residual = jnp.where(finite, residual, x)
    sent = marked(stream, x.size) & (residual != x)
    return Reduced(mean, residual, sent, state, info(jnp.count_nonzero(mean), result.overflow))


def marked(stream: SparseStream, size: int) -> Bool[Array, " d"]:
    """Where the stream has entries other than 0."""
    index = jnp.where(stream.values != 0, stream.indices, size)
    return jnp.zeros_like(stream.values, jnp.bool_, shape=(size,)).at[index].set(True, mode="drop")
