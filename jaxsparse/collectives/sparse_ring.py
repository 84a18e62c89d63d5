"""The ring all-reduce on sparse ranges: a baseline (SparCML, section 5.3, figure 3)."""

import jax.numpy as jnp
from jaxtyping import Array, DTypeLike

from jaxsparse import codecs, select
from jaxsparse.codecs.codec import left_of
from jaxsparse.collectives import wire
from jaxsparse.collectives.messages import (
    AllReduced,
    MessageFormat,
    split_counts,
    with_count,
)
from jaxsparse.collectives.split import capacity_of, check_factor
from jaxsparse.collectives.wire import Group
from jaxsparse.stream import Operation, SparseStream, to_dense


def sparse_ring(
    stream: SparseStream,
    size: int,
    *,
    axis_name: str | None,
    op: Operation = "sum",
    codec: codecs.Codec = codecs.COO,
    capacity_factor: float | None = None,
) -> AllReduced:
    """Sends partial sums of W ranges round a ring, and then the sums round it once more.

    It takes 2 (W - 1) rounds.

    Args:
        stream: k entries; an index may repeat.
        size: number of elements of the vector, d.
        axis_name: the axis of the workers.
        op: operation that combines entries. Only for sums may the codec round or the capacity be
            bounded.
        codec: wire format of sparse messages.
        capacity_factor: room in messages, in multiples of k / W entries. None: room for all. If a
            partial sum has more entries, the smallest stay in the sender's residual and are
            counted.

    Raises:
        ValueError: the op is unknown, or does not go with this dtype, codec or capacity.
    """
    ring = Group.whole(axis_name)
    n, rank, dtype = ring.size, ring.rank, stream.values.dtype
    formats = _formats(stream.capacity, size, n, op, dtype, codec, capacity_factor)
    m = formats[-1].size
    rows = to_dense(stream, n * m, op).reshape(n, m)
    residual, overflow = jnp.zeros_like(rows), jnp.int32(0)

    for step in range(n - 1):
        message_format, row = formats[step], (rank - step) % n
        sent, lost, cut = _fit(rows[row], message_format, capacity_factor is not None)
        residual, overflow = residual.at[row].add(lost), overflow + cut
        message = ring.shift(message_format.pack(sent), 1)
        arrived = (rank - step - 1) % n
        rows = rows.at[arrived].set(message_format.merge(rows[arrived], message))
    own = (rank + 1) % n
    message_format = formats[-1]
    sent, lost, cut = _fit(rows[own], message_format, capacity_factor is not None)
    residual, overflow = residual.at[own].add(lost), overflow + cut

    is_bounded = capacity_factor is not None
    messages = [with_count(message_format.pack(sent), overflow if is_bounded else None)]
    for _ in range(n - 1):
        messages.append(ring.shift(messages[-1], 1))
    # Message i started at rank - i, whose range is number rank - i + 1.
    stacked = jnp.stack(messages)[(rank + 1 - jnp.arange(n)) % n]
    stacked, overflow = split_counts(stacked, is_bounded)
    total = wire.replicated(message_format.ranges(stacked)[:size], axis_name)
    overflow = wire.replicated(overflow, axis_name)
    return AllReduced(total, residual.reshape(-1)[:size], overflow)


def _formats(
    k: int,
    size: int,
    workers: int,
    op: Operation,
    dtype: DTypeLike,
    codec: codecs.Codec,
    capacity_factor: float | None,
) -> list[MessageFormat]:
    """The formats of the first lap's steps, and of the second lap."""
    check_factor("capacity_factor", capacity_factor, op)
    m = -(-size // workers)
    capacities = [
        (step + 1) * k if capacity_factor is None else capacity_of(k, workers, capacity_factor)
        for step in range(workers)
    ]
    return [MessageFormat(m, min(m, capacity), op, dtype, codec) for capacity in capacities]


def _fit(x: Array, message_format: MessageFormat, is_bounded: bool) -> tuple[Array, Array, Array]:
    """The part of `x` that is sent, the rest of `x`, and the number of entries without room."""
    if message_format.op != "sum" or message_format.is_dense:
        return x, jnp.zeros_like(x), jnp.int32(0)
    kept = to_dense(select.top_k(x, message_format.capacity), x.size) if is_bounded else x
    sent = message_format.rounded(kept)
    return sent, left_of(x, sent), jnp.count_nonzero(x != kept).astype(jnp.int32)
