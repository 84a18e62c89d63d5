"""SSAR_Recursive_double: sparse all-reduce in log2 W exchanges (SparCML, section 5.3.1)."""

import jax.numpy as jnp
from jaxtyping import Array

from jaxsparse import codecs
from jaxsparse.arrays.stream import Operation, SparseStream, to_dense
from jaxsparse.collectives.messages import AllReduced, MessageFormat
from jaxsparse.comm import wire


def recursive_double(
    stream: SparseStream,
    size: int,
    *,
    axis_name: str | None,
    op: Operation = "sum",
    codec: codecs.Codec = codecs.COO,
) -> AllReduced:
    """Workers at distance 1, 2, 4, ... swap their partial sums. It has the least latency.

    Messages have room for all possible entries, 2^t k at stage t. They are dense arrays from
    SparCML's delta on. If W is not a power of two, let P be the largest one below W. The last W - P
    workers first send their entries to the first ones, and receive the result at the end.

    It takes log2 W rounds, and 2 more if W is no power of two. The paper's words (section 5.3.1)
    are between log2(W) 2k, if all supports are equal, and (W - 1) 2k, if they are disjoint. With
    static shapes it is always the latter.

    Args:
        stream: k entries; an index may repeat.
        size: number of elements of the vector, d.
        axis_name: the axis of the workers.
        op: operation that combines entries, by name or as a `stream.Combination`. Only for sums
            may the codec round.
        codec: wire format of sparse messages.

    Returns:
        The total and the residual. Workers that hold the same partial sum share the codec's
        rounding of it.

    Raises:
        ValueError: the op is unknown, or does not go with this dtype or codec.
    """
    workers = wire.axis_size(axis_name)
    power, k = _power(workers), stream.capacity
    extra, rank = workers - power, wire.axis_index(axis_name)
    MessageFormat(size, k, op, stream.values.dtype, codec)  # raises for a single worker, too
    formats = [
        MessageFormat(size, capacity, op, stream.values.dtype, codec)
        for capacity in _capacities(k, size, workers)
    ]
    x = to_dense(stream, size, op)
    residual = jnp.zeros_like(x)

    def prepare(holds: Array, holders: int) -> tuple[MessageFormat, Array, Array]:
        """The next format, x as its holders send it, and the new residual."""
        message_format = formats.pop(0)
        if message_format.is_exact:
            return message_format, x, residual
        sent = jnp.where(holds, message_format.rounded(x), x)
        return message_format, sent, residual + (x - sent) / holders

    if extra:
        message_format, x, residual = prepare(rank >= power, 1)
        pairs = [(power + i, i) for i in range(extra)]
        message = wire.permute(message_format.pack(x), axis_name, pairs)
        x = jnp.where(rank < extra, message_format.merge(x, message), x)
    distance = 1
    while distance < power:
        message_format, x, residual = prepare(rank < power, distance)
        pairs = [(i, i ^ distance) for i in range(power)]
        x = message_format.merge(x, wire.permute(message_format.pack(x), axis_name, pairs))
        distance *= 2
    if extra:
        message_format, x, residual = prepare(rank < power, power)
        pairs = [(i, power + i) for i in range(extra)]
        message = wire.permute(message_format.pack(x), axis_name, pairs)
        x = jnp.where(rank >= power, message_format.vector(message), x)
    # CPUs take subnormal numbers for zeros, which sparse messages leave out. So where one worker
    # adds up -0 and -0, another may have 0 and -0: they would differ by the sign.
    x = jnp.where(x == 0, jnp.zeros_like(x), x)
    return AllReduced(wire.replicated(x, axis_name), residual, jnp.int32(0))


def _power(workers: int) -> int:
    return 1 << (workers.bit_length() - 1)


def _capacities(k: int, size: int, workers: int) -> list[int]:
    """The most entries of each exchange."""
    power = _power(workers)
    stages = range(power.bit_length() - 1)
    if workers == power:
        sources = [2**t for t in stages]
    else:
        sources = [1, *(min(2 ** (t + 1), workers) for t in stages), workers]
    return [min(size, k * count) for count in sources]
