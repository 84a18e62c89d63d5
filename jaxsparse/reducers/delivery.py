"""The residuals after an exchange: which worker keeps which part."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxsparse.collectives.messages import AllReduced
from jaxsparse.reducers.base import Reduced, info
from jaxsparse.select.counting import count_where
from jaxsparse.stream import SparseStream


def finite_sums(total: Array) -> tuple[Array, Bool[Array, "..."]]:
    """The sums with zeros where they overflow, and a mask of the finite ones.

    A sum that overflows counts as not sent: each worker keeps its summand. Otherwise an inf in the
    mean would be applied, and an inf in a residual would stay for ever.
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
    """The result of an exchange with the sum `total`. A sum that overflows counts as not sent.

    Args:
        x: float32, this worker's whole vector.
        total: float32, the delivered sum, equal on all workers.
        residual: float32, this worker's share of the part that `total` lacks.
        sent: where to mask momentum, unless the sum overflows. None: nowhere.
        state: the reducer's new state.
        workers: number of workers, W.
        delivered: number of coordinates that the mean carries. None: count those that are not 0.
        overflow: number of entries without room in messages.
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
    """The result of an exchange that drops entries on the way.

    Where a sum arrived, a worker's residual is `discarded`: the entries that it dropped itself.
    Where none did, each worker keeps its own entry, which covers any drops (SparDL, Alg. 1). A sum
    other than 0 counts as arrived. Sums that cancel or overflow do not, and the workers' own
    entries conserve them as well.

    Args:
        x: float32, this worker's whole vector.
        total: float32, the delivered sum, equal on all workers.
        discarded: float32, the entries that this worker dropped; unused where `total` is 0.
        selected: where this worker put entries forward.
        state: the reducer's new state.
        workers: number of workers, W.
    """
    arrived = finite_sums(total)[0] != 0
    residual = jnp.where(arrived, discarded, x)
    delivered = count_where(total, lambda total: finite_sums(total)[0] != 0)
    return deliver(x, total, residual, arrived & selected, state, workers, delivered=delivered)


def deliver_streams(
    x: Float[Array, " d"], stream: SparseStream, result: AllReduced, state: Any, workers: int
) -> Reduced:
    """The result of a sparse all-reduce of entries of `x`.

    A worker's residual has the entries that it did not select, and its share of the all-reduce's
    residual.

    Args:
        x: float32, this worker's whole vector.
        stream: the entries of `x` that it put forward, with distinct indices.
        result: the result of the all-reduce.
        state: the reducer's new state.
        workers: number of workers, W.
    """
    largest = jnp.finfo(x.dtype).max
    at = lambda dense: dense.at[stream.indices].get(mode="fill", fill_value=0)
    # Shares of others' entries can overflow float32, and an inf would stay for ever.
    cut = lambda residual: jnp.clip(residual, -largest, largest)
    # Entries are few. A second dense vector for their values would cost passes and memory.
    kept = cut(at(x) - stream.values + at(result.residual))
    residual = cut(x + result.residual).at[stream.indices].set(kept, mode="drop")
    sent = marked(stream._replace(values=jnp.where(kept != at(x), stream.values, 0)), x.size)
    return deliver(x, result.total, residual, sent, state, workers, overflow=result.overflow)


def marked(stream: SparseStream, size: int) -> Bool[Array, " d"]:
    """Where the stream has entries other than 0."""
    index = jnp.where(stream.values != 0, stream.indices, size)
    return jnp.zeros_like(stream.values, jnp.bool_, shape=(size,)).at[index].set(True, mode="drop")
