"""gTop-k: top-k of sums of top-k, in log2 W exchanges (Shi et al., ICDCS 2019)."""

import jax.numpy as jnp
from jaxtyping import Array

from jaxsparse import codecs
from jaxsparse.collectives import wire
from jaxsparse.collectives.messages import AllReduced
from jaxsparse.collectives.spardl import largest
from jaxsparse.stream import SparseStream, add, add_to, to_dense


def gtopk(
    stream: SparseStream,
    size: int,
    *,
    axis_name: str | None,
    codec: codecs.Codec = codecs.COO,
) -> AllReduced:
    """Pairs of workers at distance 1, 2, 4, ... swap k entries, add them, and keep the k largest.

    The paper merges up a tree and broadcasts the result down it, 2 log2 W rounds and 4 k log2 W
    words (of the root's children). Swapping takes half of both and ends with the result everywhere.
    If W is not a power of two, P < W, the W - P last workers first give their entries to the first
    ones, and are sent the result at the end.

    After the exchange at distance 2^t, 2^(t+1) workers cut the same entries: each keeps 2^-(t+1)
    of them, so that nothing is lost. The paper forgets them where the index is delivered in part.

    Args:
        stream: float32, k entries with distinct indices.
        size: elements of the vector, d.
        axis_name: whose workers take part.
        codec: of the messages.

    Returns:
        The sum of the streams, of at most k entries; the residual is this worker's share of what
        was cut off or rounded away; there is room for all that is sent.
    """
    workers = wire.axis_size(axis_name)
    power = 1 << (workers.bit_length() - 1)
    extra, rank, k = workers - power, wire.axis_index(axis_name), stream.capacity
    discarded = jnp.zeros_like(stream.values, shape=(size,))
    is_main = rank < power

    def leave(stream: SparseStream, holds: Array, holders: int) -> tuple[SparseStream, Array]:
        """The stream as those workers send it that hold it, and the new discards."""
        if codec.is_exact:
            return stream, discarded
        sent = jnp.where(holds, codec.rounded(stream.values), stream.values)
        lost = stream._replace(values=(stream.values - sent) / holders)
        return stream._replace(values=sent), add_to(discarded, lost)

    def swap(pairs: list[tuple[int, int]]) -> SparseStream:
        message = wire.permute(codec.encode(stream, size), axis_name, pairs)
        return codec.decode(message, k, size, stream.values.dtype)

    def merge(arrived: SparseStream, takes_part: Array, holders: int) -> tuple[SparseStream, Array]:
        arrived = SparseStream(
            jnp.where(takes_part, arrived.indices, size), jnp.where(takes_part, arrived.values, 0)
        )
        kept, cut = largest(add(stream, arrived, size), k)
        return kept, add_to(discarded, cut._replace(values=cut.values / holders))

    if extra:
        stream, discarded = leave(stream, ~is_main, 1)
        arrived = swap([(power + i, i) for i in range(extra)])
        stream, discarded = merge(arrived, rank < extra, 1)
    distance = 1
    while distance < power:
        stream, discarded = leave(stream, is_main, distance)
        arrived = swap([(i, i ^ distance) for i in range(power)])
        stream, discarded = merge(arrived, is_main, 2 * distance)
        distance *= 2
    if extra:
        stream, discarded = leave(stream, is_main, power)
        arrived = swap([(i, power + i) for i in range(extra)])
        stream = SparseStream(*(jnp.where(is_main, a, b) for a, b in zip(stream, arrived)))
    total = wire.replicated(to_dense(stream, size), axis_name)
    return AllReduced(total, discarded, jnp.int32(0))
