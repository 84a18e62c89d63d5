"""SSAR_Split_allgather: sparse all-reduce by ranges (SparCML, section 5.3.2)."""

from jaxtyping import DTypeLike

from jaxsparse import codecs
from jaxsparse.arrays.stream import Operation, SparseStream
from jaxsparse.collectives.messages import (
    AllReduced,
    MessageFormat,
    split_counts,
    with_count,
)
from jaxsparse.collectives.split import own_range, room_in, split
from jaxsparse.comm import wire


def split_allgather(
    stream: SparseStream,
    size: int,
    *,
    axis_name: str | None,
    op: Operation = "sum",
    codec: codecs.Codec = codecs.COO,
    capacity: int | None = None,
    union_capacity: int | None = None,
) -> AllReduced:
    """Sends entries to the owners of their ranges, which send the sums to all.

    Unless a capacity bounds them, messages have room for all possible entries. They are dense
    arrays from SparCML's delta on. The paper's words (section 5.3.2) are between 2 (W - 1)/W 2k, if
    all supports are equal, and W 2k, if they are disjoint. Without capacities this function takes
    more than the latter, because all k entries of a worker may have one owner.

    Args:
        stream: k entries; an index may repeat.
        size: number of elements of the vector, d.
        axis_name: the axis of the workers.
        op: operation that combines entries, by name or as a `stream.Combination`. Only for sums
            may the codec round or the capacity be bounded.
        codec: wire format of sparse messages.
        capacity: room for a worker's entries in one owner's range. An even share is k / W. None:
            room for all k. Entries without room, the stream's last ones for an owner, stay in the
            residual and are counted. Zeros take no room.
        union_capacity: room for the sums of one owner. k / W suffices if all workers have the same
            indices and these are spread evenly. None: room for all possible sums. Sums without
            room, the smallest ones, stay in the owner's residual and are counted.

    Raises:
        ValueError: the op is unknown, or does not go with this dtype, codec or capacity.
    """
    workers = wire.axis_size(axis_name)
    total, residual, overflow, _ = split(
        stream, size, axis_name=axis_name, op=op, codec=codec, capacity=capacity
    )
    message_format, is_cut = _gather_format(
        stream.capacity, size, workers, op, total.dtype, codec, capacity, union_capacity
    )
    if is_cut or not message_format.is_exact:
        total, lost, cut = message_format.fit(total, is_cut)
        residual, overflow = own_range(residual, axis_name, lost), overflow + cut
    is_bounded = capacity is not None or is_cut
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
    capacity: int | None,
    union_capacity: int | None,
) -> tuple[MessageFormat, bool]:
    """The messages of the second half, and whether an owner may have more sums than fit."""
    m = -(-size // workers)
    arriving = min(m, workers * room_in("capacity", capacity, k, op))
    room = room_in("union_capacity", union_capacity, arriving, op)
    message_format = MessageFormat(m, room, op, dtype, codec)
    return message_format, room < arriving and not message_format.is_dense
