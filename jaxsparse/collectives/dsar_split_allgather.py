"""DSAR_Split_allgather: sparse to dense, optionally quantised (SparCML, sections 5.3.3 and 6)."""

import jax
from jaxtyping import Array, Key

from jaxsparse import codecs, quantize
from jaxsparse.arrays.stream import Operation, SparseStream
from jaxsparse.collectives.messages import AllReduced, split_counts, with_count
from jaxsparse.collectives.split import own_range, split
from jaxsparse.comm import wire


def dsar_split_allgather(
    stream: SparseStream,
    size: int,
    *,
    axis_name: str | None,
    op: Operation = "sum",
    codec: codecs.Codec = codecs.COO,
    capacity: int | None = None,
    quantizer: quantize.QSGD | None = None,
    key: Key[Array, ""] | None = None,
) -> AllReduced:
    """As `split_allgather`, but owners send their ranges as dense arrays.

    Use it if the supports fill in so much that the sum is dense. The second half receives
    (W - 1)/W d words, or fewer if it is quantised.

    Args:
        stream: k entries; an index may repeat.
        size: number of elements of the vector, d.
        axis_name: the axis of the workers.
        op: operation that combines entries, by name or as a `stream.Combination`. Only sums can
            be quantised.
        codec: wire format of the first half.
        capacity: as in `split_allgather`, for the first half.
        quantizer: quantiser of the second half. None: float32.
        key: key of stochastic rounding, the same on all workers and fresh at each step. The total
            is then unbiased, and the residual does *not* keep the error, as in the paper. None
            rounds to nearest, and the residual keeps the error. Quantisers are refused if the
            residual could grow without bound.

    Raises:
        ValueError: the op is unknown, or does not go with this dtype, codec, capacity or quantiser.
    """
    if quantizer is not None and op != "sum":
        raise ValueError(f"quantizer={quantizer}, but only sums can be quantised, not op={op!r}")
    if quantizer is not None and key is None:
        quantize.check_feedback(quantizer, stochastic=False)
    total, residual, overflow, _ = split(
        stream, size, axis_name=axis_name, op=op, codec=codec, capacity=capacity
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
        message = quantize.to_message(quantized, quantizer)
    is_bounded = capacity is not None
    message = with_count(message, overflow if is_bounded else None)
    messages, overflow = split_counts(wire.all_gather(message, axis_name), is_bounded)

    def unpack(words: Array) -> Array:
        if quantizer is None:
            return codecs.from_bits(words, total.dtype)
        return quantize.dequantize(quantize.from_message(words, quantizer, m), quantizer, m)

    ranges = jax.vmap(unpack)(messages)
    return AllReduced(ranges.reshape(-1)[:size], residual[:size], overflow)
