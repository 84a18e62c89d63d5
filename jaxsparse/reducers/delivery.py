"""Which worker keeps what an exchange did not deliver."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxsparse.collectives.messages import AllReduced
from jaxsparse.reducers.base import Reduced, info
from jaxsparse.select.counting import count_where
from jaxsparse.stream import SparseStream


def finite_sums(total: Array) -> tuple[Array, Bool[Array, "..."]]:
    """Sums with zeros where they overflow, and where they do not.

    Sums that overflow count as not sent: whoever had a part in them keeps it. An inf in the mean
    would otherwise be applied, and one in a residual would never leave.
    """
    finite = jnp.isfinite(total)
    return jnp.where(finite, total, 0), finite


def deliver(
    x: Float[Array, " d"],
    total: Float[Array, " d"],
    residual: Float[Array, " d"] | float,
    sent: Bool[Array, " d"] | None,
    state: Any,
    workers: int,
    *,
    delivered: Any = None,
    overflow: Any = 0,
) -> Reduced:
    """The outcome of an exchange that summed `total`; sums that overflow count as not sent.

    Args:
        x: float32, what this worker wanted to be summed.
        total: float32, what was, equal on all workers.
        residual: float32, this worker's share of what `total` lacks.
        sent: where momentum is to be masked, unless the sum overflows; None: nowhere.
        state: the reducer's.
        workers: their number, W.
        delivered: coordinates that the mean carries; None counts those that are not 0.
        overflow: entries kept back for want of capacity.
    """
    if delivered is None:
        delivered = count_where(total, lambda total: finite_sums(total)[0] / workers != 0)
    total, finite = finite_sums(total)
    mean = total / workers
    sent = None if sent is None else sent & finite
    return Reduced(mean, jnp.where(finite, residual, x), sent, state, info(delivered, overflow))


def deliver_merged(
    x: Float[Array, " d"],
    total: Float[Array, " d"],
    discarded: Float[Array, " d"],
    selected: Bool[Array, " d"],
    state: Any,
    workers: int,
) -> Reduced:
    """The outcome if each worker `discarded` its part of the mass that `total` lacks.

    Where something arrived, a worker feeds back what it has itself discarded on the way; where
    nothing did, all workers have their own copies, which cover any such discards (SparDL, Alg. 1).
    What arrived is told by a sum other than 0, not by a list of selected indices: sums that cancel,
    or overflow, count as not arrived, and the copies conserve them as well.

    Args:
        x: float32, what this worker wanted to be summed.
        total: float32, what was, equal on all workers.
        discarded: float32, this worker's share; read only where `total` is not 0.
        selected: what this worker put forward.
        state: the reducer's.
        workers: their number, W.
    """
    arrived = finite_sums(total)[0] != 0
    residual = jnp.where(arrived, discarded, x)
    delivered = count_where(total, lambda total: finite_sums(total)[0] != 0)
    return deliver(x, total, residual, arrived & selected, state, workers, delivered=delivered)


def deliver_streams(
    x: Float[Array, " d"], stream: SparseStream, result: AllReduced, state: Any, workers: int
) -> Reduced:
    """The outcome of a sparse all-reduce of entries of `x`.

    A worker keeps what it did not select, and its share of what the all-reduce left.

    Args:
        x: float32, what this worker wanted to be summed.
        stream: the entries of `x` that it put forward, with distinct indices.
        result: of the all-reduce.
        state: the reducer's.
        workers: their number, W.
    """
    largest = jnp.finfo(x.dtype).max
    at = lambda dense: dense.at[stream.indices].get(mode="fill", fill_value=0)
    # Shares of what others put forward can be more than float32 holds; an inf would never leave.
    cut = lambda residual: jnp.clip(residual, -largest, largest)
    # Entries are few: a second dense vector, of their values, would take passes and memory.
    kept = cut(at(x) - stream.values + at(result.residual))
    residual = cut(x + result.residual).at[stream.indices].set(kept, mode="drop")
    sent = marked(stream._replace(values=jnp.where(kept != at(x), stream.values, 0)), x.size)
    return deliver(x, result.total, residual, sent, state, workers, overflow=result.overflow)


def marked(stream: SparseStream, size: int) -> Bool[Array, " d"]:
    """Where the stream has entries other than 0."""
    index = jnp.where(stream.values != 0, stream.indices, size)
    return jnp.zeros_like(stream.values, jnp.bool_, shape=(size,)).at[index].set(True, mode="drop")
