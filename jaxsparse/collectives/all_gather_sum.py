"""Sparse all-gather, summed by each worker for itself (TopkA; SparCML, section 5.3)."""

import jax.numpy as jnp

from jaxsparse import codecs
from jaxsparse.collectives import wire
from jaxsparse.collectives.messages import AllReduced, MessageFormat
from jaxsparse.operations import Operation
from jaxsparse.stream import SparseStream, merge_duplicates, to_dense


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

    One all-gather of (W - 1) 2k words in COO: the simplest, and the dearest for many workers.

    Args:
        stream: k entries.
        size: elements of the vector, d.
        axis_name: whose workers take part.
        op: how entries are combined. Only sums may be rounded by the codec.
        codec: of sparse messages.
        distinct: whether no index repeats in a stream, as after a top-k; saves a sort.

    Raises:
        ValueError: the op is unknown, not defined for the dtype, or not for this codec.
    """
    message_format = MessageFormat(size, stream.capacity, op, stream.values.dtype, codec)
    residual = jnp.zeros_like(stream.values, shape=(size,))
    if message_format.is_dense:
        message = message_format.pack(to_dense(stream, size, op))
    else:
        if not distinct:  # on a GPU equal indices within a scatter have no order: replicas drift
            stream = merge_duplicates(stream, size, op)
        rounded = codec.rounded(stream.values)
        if not message_format.is_exact:
            residual = residual.at[stream.indices].add(stream.values - rounded, mode="drop")
        message = codec.encode(stream._replace(values=rounded), size)
    messages = wire.all_gather(message, axis_name)
    return AllReduced(message_format.merge_all(messages), residual, jnp.int32(0))
