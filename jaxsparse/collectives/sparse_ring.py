"""The ring all-reduce on sparse ranges: a baseline (SparCML, section 8.1, figure 3)."""

import jax.numpy as jnp
from jaxtyping import DTypeLike

from jaxsparse import codecs
from jaxsparse.arrays.stream import Operation, SparseStream, to_dense
from jaxsparse.collectives.messages import (
    AllReduced,
    MessageFormat,
    split_counts,
    with_count,
)
from jaxsparse.collectives.split import room_in
from jaxsparse.comm import wire
from jaxsparse.comm.wire import Group


def sparse_ring(
    stream: SparseStream,
    size: int,
    *,
    axis_name: str | None,
    op: Operation = "sum",
    codec: codecs.Codec = codecs.COO,
    capacity: int | None = None,
) -> AllReduced:
    """Sends partial sums of W ranges round a ring, and then the sums round it once more.

    It takes 2 (W - 1) rounds.

    Args:
        stream: k entries; an index may repeat.
        size: number of elements of the vector, d.
        axis_name: the axis of the workers.
        op: operation that combines entries, by name or as a `stream.Combination`. Only for sums
            may the codec round or the capacity be bounded.
        codec: wire format of sparse messages.
        capacity: room in messages, in entries. None: room for all. If a partial sum has more
            entries, the smallest stay in the sender's residual and are counted.

    Raises:
        ValueError: the op is unknown, or does not go with this dtype, codec or capacity.
    """
    ring = Group.whole(axis_name)
    n, rank, dtype = ring.size, ring.rank, stream.values.dtype
    formats = _formats(stream.capacity, size, n, op, dtype, codec, capacity)
    m = formats[-1].size
    rows = to_dense(stream, n * m, op).reshape(n, m)
    residual, overflow = jnp.zeros_like(rows), jnp.int32(0)
    is_bounded = capacity is not None

    for step in range(n - 1):
        message_format, row = formats[step], (rank - step) % n
        sent, lost, cut = message_format.fit(rows[row], is_bounded)
        residual, overflow = residual.at[row].add(lost), overflow + cut
        message = ring.shift(message_format.pack(sent), 1)
        arrived = (rank - step - 1) % n
        rows = rows.at[arrived].set(message_format.merge(rows[arrived], message))
    own = (rank + 1) % n
    message_format = formats[-1]
    sent, lost, cut = message_format.fit(rows[own], is_bounded)
    residual, overflow = residual.at[own].add(lost), overflow + cut

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
    capacity: int | None,
) -> list[MessageFormat]:
    """The formats of the first lap's steps, and of the second lap."""
    m = -(-size // workers)
    rooms = [room_in("capacity", capacity, min(m, (step + 1) * k), op) for step in range(workers)]
    return [MessageFormat(m, room, op, dtype, codec) for room in rooms]
