"""SSAR_Split_allgather: sparse all-reduce by ranges (SparCML, section 5.3.2)."""

import math

import jax.numpy as jnp
from jaxtyping import DTypeLike

from jaxsparse import codecs, select
from jaxsparse.codecs.codec import left_of
from jaxsparse.collectives import wire
from jaxsparse.collectives.messages import (
    AllReduced,
    MessageFormat,
    split_counts,
    with_count,
)
from jaxsparse.collectives.split import capacity_of, check_factor, own_range, split
from jaxsparse.stream import Operation, SparseStream, to_dense


def split_allgather(
    stream: SparseStream,
    size: int,
    *,
    axis_name: str | None,
    op: Operation = "sum",
    codec: codecs.Codec = codecs.COO,
    capacity_factor: float | None = None,
    union_factor: float | None = None,
) -> AllReduced:
    """Sends entries to the owners of their ranges, which send the sums to all.

    Unless a factor bounds them, messages have room for all possible entries. They are dense arrays
    from SparCML's delta on. The paper's words (section 5.3.2) are between 2 (W - 1)/W 2k, if all
    supports are equal, and W 2k, if they are disjoint. Without factors this function takes more
    than the latter, because all k entries of a worker may have one owner.

    Args:
        stream: k entries; an index may repeat.
        size: number of elements of the vector, d.
        axis_name: the axis of the workers.
        op: operation that combines entries. Only for sums may the codec round or the capacity be
            bounded.
        codec: wire format of sparse messages.
        capacity_factor: room for one owner's entries, in multiples of an even share, k / W. None:
            room for all k. Entries without room, the stream's last ones for an owner, stay in the
            residual and are counted.
        union_factor: room for one owner's sums, in multiples of k / W. 1 suffices if all workers
            have the same indices. None: room for all possible sums. Sums without room, the smallest
            ones, stay in the owner's residual and are counted.

    Raises:
        ValueError: the op is unknown, or does not go with this dtype, codec or capacity.
    """
    workers = wire.axis_size(axis_name)
    total, residual, overflow, _ = split(
        stream, size, axis_name=axis_name, op=op, codec=codec, capacity_factor=capacity_factor
    )
    message_format = _gather_format(
        stream.capacity, size, workers, op, total.dtype, codec, capacity_factor, union_factor
    )
    m = message_format.size
    is_bounded = capacity_factor is not None or union_factor is not None
    if union_factor is not None and not message_format.is_dense:
        kept = to_dense(select.top_k(total, message_format.capacity), m)
        overflow += jnp.count_nonzero(total != kept).astype(jnp.int32)
        residual, total = own_range(residual, axis_name, left_of(total, kept)), kept
    if not message_format.is_exact:
        rounded = message_format.rounded(total)
        residual, total = own_range(residual, axis_name, left_of(total, rounded)), rounded
    message = with_count(message_format.pack(total), overflow if is_bounded else None)
    messages, overflow = split_counts(wire.all_gather(message, axis_name), is_bounded)
    return AllReduced(message_format.ranges(messages)[:size], residual[:size], overflow)


def _gather_format(
    k: int,
    size: int,
    workers: int,
    op: Operation,
    dtype: DTypeLike,
    codec: codecs.Codec,
    capacity_factor: float | None,
    union_factor: float | None,
) -> MessageFormat:
    check_factor("union_factor", union_factor, op)
    m = -(-size // workers)
    arriving = workers * capacity_of(k, workers, capacity_factor)
    room = arriving if union_factor is None else math.ceil(union_factor * k / workers)
    return MessageFormat(m, min(m, arriving, room), op, dtype, codec)
