"""DSAR_Split_allgather: sparse in, dense out, perhaps quantised (SparCML, sections 5.3.3 and 6)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from jaxsparse import codecs, quantize
from jaxsparse.collectives import wire
from jaxsparse.collectives.messages import AllReduced, split_counts, with_count
from jaxsparse.collectives.split import own_range, split
from jaxsparse.operations import Operation
from jaxsparse.stream import SparseStream


def dsar_split_allgather(
    stream: SparseStream,
    size: int,
    *,
    axis_name: str | None,
    op: Operation = "sum",
    codec: codecs.Codec = codecs.COO,
    capacity_factor: float | None = None,
    quantizer: quantize.QSGD | None = None,
    key: Key[Array, ""] | None = None,
) -> AllReduced:
    """As `split_allgather`, but owners send their ranges as dense arrays.

    For supports that fill in so much that the sum is dense: (W - 1)/W d words in the second half,
    if it is not quantised.

    Args:
        stream: k entries; an index may repeat.
        size: elements of the vector, d.
        axis_name: whose workers take part.
        op: how entries are combined; only sums can be quantised.
        codec: of the first half's messages.
        capacity_factor: as in `split_allgather`, of the first half.
        quantizer: of the second half; None sends float32.
        key: of stochastic rounding, the same on all workers and fresh at each step: the total is
            then unbiased, and what it lacks is *not* in the residual, as in the paper. None rounds
            to nearest, and the residual keeps the difference: quantizers with which that could
            grow without bound are refused.

    Raises:
        ValueError: the op is unknown, or not for this dtype, codec, capacity or quantizer.
    """
    if quantizer is not None and op != "sum":
        raise ValueError(f"quantizer={quantizer}, but only sums can be quantised, not op={op!r}")
    if quantizer is not None and key is None:
        quantize.check_feedback(quantizer, stochastic=False)
    total, residual, overflow = split(
        stream, size, axis_name=axis_name, op=op, codec=codec, capacity_factor=capacity_factor
    )
    m = total.size
    if quantizer is None:
        message = codecs.bits(total)
    else:
        if key is not None:
            key = jax.random.fold_in(key, wire.axis_index(axis_name))
        quantized = quantize.quantize(total, quantizer, key)
        if key is None:
            arriving = quantize.dequantize(quantized, quantizer, m)
            residual = own_range(residual, axis_name, total - arriving)
        message = jnp.concatenate([quantized.words, codecs.bits(quantized.scales)])
    is_bounded = capacity_factor is not None
    message = with_count(message, overflow if is_bounded else None)
    messages, overflow = split_counts(wire.all_gather(message, axis_name), is_bounded)

    def unpack(words: Array) -> Array:
        if quantizer is None:
            return codecs.from_bits(words, total.dtype)
        scales = -(-m // quantizer.group_size)
        levels, rest = words[: words.size - scales], words[words.size - scales :]
        parts = quantize.Quantized(levels, codecs.from_bits(rest, jnp.float32))
        return quantize.dequantize(parts, quantizer, m)

    ranges = jax.vmap(unpack)(messages)
    return AllReduced(ranges.reshape(-1)[:size], residual[:size], overflow)
