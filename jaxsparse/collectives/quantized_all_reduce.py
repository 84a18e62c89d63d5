"""All-reduce of dense vectors in a few bits a value.

An owner does not round its own part of its range, which never travels. With that rounding, the
second contraction on top of the first doubled the residual.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, UInt32

from jaxsparse.arrays.settings import check_size
from jaxsparse.collectives.messages import AllReduced
from jaxsparse.comm import wire
from jaxsparse.quantize import (
    Quantizer,
    check_feedback,
    dequantize,
    from_message,
    quantize,
    to_message,
)
from jaxsparse.quantize.quantizer import cut, padded, sent_size


def quantized_all_reduce(
    x: Float[Array, " d"],
    quantizer: Quantizer,
    *,
    axis_name: str | None,
    key: Key[Array, ""] | None = None,
) -> AllReduced:
    """Sums quantised vectors. Worker w owns the range of elements w m to (w + 1) m - 1.

    m is ceil(d / W), or up to a 64th more (`quantizer.sent_size`). Each worker quantises its part
    of each range and sends it to the owner (an all-to-all). The owner adds its own part,
    unquantised, to the parts that arrive, quantises the sum and sends it to all (an all-gather). A
    single worker sends nothing and rounds nothing. Last workers may own fewer elements, or none.
    Quantising twice is dist-EF-blockSGD's two-way compression (Zheng et al., NeurIPS 2019, Alg. 2),
    with a parameter server for each range.

    Args:
        x: this worker's vector of d elements, float32.
        quantizer: quantiser of both halves. Its groups begin anew in each range.
        axis_name: the axis of the workers.
        key: key of stochastic rounding, the same on all workers and fresh at each step. The total
            is then unbiased, and the residual does *not* keep the error. None rounds
            deterministically, and the residual keeps the errors of this worker's parts and of its
            own range's sum. Quantisers are refused if the residual could grow without bound. With
            the others it does not: an owner's error skips the first rounding when it is fed back,
            so each error goes through one contraction.

    Returns:
        The total, the residual, and no overflow. If a sum overflows, no sum of its group is finite.
    """
    check_size("x.size", x.size)
    if key is None:
        check_feedback(quantizer, stochastic=False)
    workers, size, none = wire.axis_size(axis_name), x.size, jnp.int32(0)
    if workers == 1:
        return AllReduced(wire.replicated(x, axis_name), jnp.zeros_like(x), none)
    rank, m = wire.axis_index(axis_name), sent_size(-(-size // workers), quantizer)
    rows = padded(x, workers * m).reshape(workers, m)
    ranges = jnp.arange(workers, dtype=jnp.int32)
    own = (ranges == rank)[:, None]
    counts = jnp.clip(size - m * ranges, 0, m)  # elements before the padding
    row_keys = sum_key = None
    if key is not None:
        drawn = jax.random.split(jax.random.fold_in(key, rank), workers + 1)
        row_keys, sum_key = drawn[:workers], drawn[workers]
    messages = jax.vmap(lambda row, key, count: _pack(row, key, count, quantizer))(
        rows, row_keys, counts
    )

    def add(total: Array, member: tuple[Array, Array, Array]) -> tuple[Array, None]:
        message, row, is_own = member
        return total + jnp.where(is_own, row, _unpack(message, quantizer, m)), None

    # One row after the other: XLA's CPU backend takes twice as long to decode all and sum columns.
    arrived = wire.all_to_all(messages, axis_name)
    total = jax.lax.scan(add, jnp.zeros_like(rows[0]), (arrived, rows, own))[0]
    # Zeros may have been rounded to other numbers. Masked here, a whole vector is not stored anew.
    total = jnp.where(jnp.arange(m, dtype=jnp.int32) < counts[rank], total, 0)
    message = _pack(total, sum_key, counts[rank], quantizer)
    decoded = jax.vmap(lambda one: _unpack(one, quantizer, m))
    sums = cut(decoded(wire.all_gather(message, axis_name)).reshape(-1), size)
    if key is not None:
        return AllReduced(sums, jnp.zeros_like(x), none)
    # The own part is not rounded, but the sum in its place is.
    parts, messages = jnp.where(own, total, rows), jnp.where(own, message, messages)
    return AllReduced(sums, cut((parts - decoded(messages)).reshape(-1), size), none)


def _pack(
    row: Array, key: Array | None, count: Int[Array, ""], quantizer: Quantizer
) -> UInt32[Array, " words"]:
    return to_message(quantize(row, quantizer, key, count), quantizer)


def _unpack(message: Array, quantizer: Quantizer, size: int) -> Array:
    return dequantize(from_message(message, quantizer, size), quantizer, size)
