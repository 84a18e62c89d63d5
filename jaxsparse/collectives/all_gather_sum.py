"""Sparse all-gather, after which each worker sums all messages (TopkA; SparCML, section 5.3)."""

import jax.numpy as jnp

from jaxsparse import codecs
from jaxsparse.arrays.stream import Operation, SparseStream, merge_duplicates
from jaxsparse.collectives.messages import AllReduced, MessageFormat
from jaxsparse.comm import wire


def all_gather_sum(
    stream: SparseStream,
    size: int,
    *,
    axis_name: str | None,
    op: Operation = "sum",
    codec: codecs.Codec = codecs.COO,
    distinct: bool = False,
) -> AllReduced:
    """Every worker receives every worker's entries and combines them, in order of rank.

    It is one all-gather, of (W - 1) 2k words in COO. It is the simplest all-reduce, and the most
    expensive one for many workers.

    Args:
        stream: k entries.
        size: number of elements of the vector, d.
        axis_name: the axis of the workers.
        op: operation that combines entries, by name or as a `stream.Combination`. Only for sums
            may the codec round.
        codec: wire format of sparse messages.
        distinct: whether no index repeats in a stream, as after a top-k. This saves a sort.

    Returns:
        The combined entries. The residual is the rounding error of each of this worker's entries,
        in the stream's order if `distinct`, or else in increasing order of indices. The overflow
        is 0.

    Raises:
        ValueError: the op is unknown, or does not go with this dtype or codec.
    """
    message_format = MessageFormat(size, stream.capacity, op, stream.values.dtype, codec)
    if not distinct:  # a GPU scatters equal indices in any order, and replicas would drift
        stream = merge_duplicates(stream, size, op)
    message, lost = message_format.pack_entries(stream)
    messages = wire.all_gather(message, axis_name)
    return AllReduced(message_format.merge_all(messages), lost, jnp.int32(0), stream.indices)
