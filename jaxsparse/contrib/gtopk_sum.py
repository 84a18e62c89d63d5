"""gTop-k: top-k of sums of top-k, in log2 W exchanges (Shi et al., ICDCS 2019)."""

import jax.numpy as jnp
from jaxtyping import Array

from jaxsparse.arrays.stream import SparseStream, add_to, to_dense
from jaxsparse.codecs.codec import COO, Codec
from jaxsparse.collectives.messages import AllReduced
from jaxsparse.collectives.spardl import largest_sums
from jaxsparse.comm import wire


def gtopk_sum(
    stream: SparseStream,
    size: int,
    *,
    axis_name: str | None,
    codec: Codec = COO,
) -> AllReduced:
    """Workers at distance 1, 2, 4, ... swap k entries, add them, and keep the k largest.

    The paper merges up a tree and broadcasts the result down it, in 2 log2 W rounds with 4 k log2 W
    words (for the root's children). Swapping takes half of both and ends with the result on all
    workers. If W is not a power of two, let P be the largest one below W. The last W - P workers
    first send their entries to the first ones, and receive the result at the end.

    After the exchange at distance 2^t, 2^(t+1) workers drop the same entries. The residual of each
    keeps 2^-(t+1) of them. The paper loses them where the index is delivered in part.

    The stream has k distinct indices.
    """
    workers = wire.axis_size(axis_name)
    power = 1 << (workers.bit_length() - 1)
    extra, rank, k = workers - power, wire.axis_index(axis_name), stream.capacity
    residual = jnp.zeros_like(stream.values, shape=(size,))
    is_main = rank < power

    def swap(
        holds: Array, holders: int, pairs: list[tuple[int, int]]
    ) -> tuple[SparseStream, SparseStream, Array]:
        """What arrives, the stream as its holders sent it, and the new residual."""
        message = wire.permute(codec.encode(stream, size), axis_name, pairs)
        arrived = codec.decode(message, k, size, stream.values.dtype)
        if codec.is_exact:
            return arrived, stream, residual
        sent = jnp.where(holds, codec.rounded(stream, size), stream.values)
        lost = stream._replace(values=(stream.values - sent) / holders)
        return arrived, stream._replace(values=sent), add_to(residual, lost)

    def merge(arrived: SparseStream, takes_part: Array, holders: int) -> tuple[SparseStream, Array]:
        arrived = SparseStream(
            jnp.where(takes_part, arrived.indices, size), jnp.where(takes_part, arrived.values, 0)
        )
        kept, lost = largest_sums(stream, arrived, size, k, holders)
        return kept, add_to(residual, lost)

    if extra:
        pairs = [(power + i, i) for i in range(extra)]
        arrived, stream, residual = swap(~is_main, 1, pairs)
        stream, residual = merge(arrived, rank < extra, 1)
    distance = 1
    while distance < power:
        pairs = [(i, i ^ distance) for i in range(power)]
        arrived, stream, residual = swap(is_main, distance, pairs)
        stream, residual = merge(arrived, is_main, 2 * distance)
        distance *= 2
    if extra:
        pairs = [(i, power + i) for i in range(extra)]
        arrived, stream, residual = swap(is_main, power, pairs)
        stream = SparseStream(*(jnp.where(is_main, a, b) for a, b in zip(stream, arrived)))
    total = wire.replicated(to_dense(stream, size), axis_name)
    return AllReduced(total, residual, jnp.int32(0))
