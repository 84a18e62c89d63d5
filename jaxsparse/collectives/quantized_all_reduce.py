"""All-reduce of dense vectors in a few bits a value. Ranges are quantised twice.

An owner does not round its own part of its range, which never travels. With that rounding, the
second contraction on top of the first doubled the residual.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from jaxsparse.collectives import wire
from jaxsparse.collectives.messages import AllReduced
from jaxsparse.quantize import (
    Quantizer,
    check_feedback,
    dequantize,
    from_message,
    quantize,
    to_message,
)
from jaxsparse.quantize.packing import check_size


def quantized_all_reduce(
    x: Float[Array, " d"],
    quantizer: Quantizer,
    *,
    axis_name: str | None,
    key: Key[Array, ""] | None = None,
) -> AllReduced:
    """Sums quantised vectors. Worker w owns the range of elements w m to (w + 1) m - 1.

    m is ceil(d / W). Each worker quantises its part of each range and sends it to the owner (an
    all-to-all). The owner adds its own part, unquantised, to the parts that arrive, quantises the
    sum and sends it to all (an all-gather). A single worker sends nothing and rounds nothing.

    Quantising twice is dist-EF-blockSGD's two-way compression (Zheng et al., NeurIPS 2019, Alg. 2),
    with a parameter server for each range.

    Args:
        x: float32.
        quantizer: quantiser of both halves. Its groups begin anew in each range.
        axis_name: the axis of the workers.
        key: key of stochastic rounding, the same on all workers and fresh at each step. The total
            is then unbiased, and the residual does *not* keep the error. None rounds
            deterministically, and the residual keeps the error: that of this worker's parts, and
            that of its own range's sum. Quantisers are refused if the residual could grow without
            bound. With the others it does not, because an owner's error skips the first rounding
            when it is fed back: each error goes through one contraction.

    Returns:
        The total, equal on all workers, the residual, and no overflow. If a sum overflows, no sum
        of its group is finite.

    Raises:
        ValueError: the quantiser takes no key, or needs one, or indices of `x` do not fit int32.
    """
    check_size("x.size", x.size)
    if key is None:
        check_feedback(quantizer, stochastic=False)
    workers, rank = wire.axis_size(axis_name), wire.axis_index(axis_name)
    size, none = x.size, jnp.int32(0)
    if workers == 1:
        return AllReduced(wire.replicated(x, axis_name), jnp.zeros_like(x), none)
    m = -(-size // workers)
    rows = jnp.pad(x, (0, workers * m - size)).reshape(workers, m)
    ranks = jnp.arange(workers, dtype=jnp.int32)
    counts = jnp.clip(size - m * ranks, 0, m)  # elements of each range before its padding
    own = (ranks == rank)[:, None]
    keys = last_key = None
    if key is not None:
        drawn = jax.random.split(jax.random.fold_in(key, rank), workers + 1)
        keys, last_key = drawn[:-1], drawn[-1]

    def pack(row: Array, key: Array | None, count: Array) -> Array:
        row = jnp.where(jnp.arange(m, dtype=jnp.int32) < count, row, 0)
        return to_message(quantize(row, quantizer, key, count), quantizer)

    def unpack(message: Array) -> Array:
        return dequantize(from_message(message, quantizer, m), quantizer, m)

    def add(total: Array, worker: tuple[Array, Array, Array]) -> tuple[Array, None]:
        message, row, is_own = worker
        return total + jnp.where(is_own, row, unpack(message)), None

    messages = jax.vmap(pack)(rows, keys, counts)
    arrived = wire.all_to_all(messages, axis_name)
    # One after the other: XLA's CPU backend takes twice the time to decode all and sum columns.
    total = jax.lax.scan(add, jnp.zeros_like(rows[0]), (arrived, rows, own))[0]
    message = pack(total, last_key, jnp.clip(size - m * rank, 0, m))
    sums = jax.vmap(unpack)(wire.all_gather(message, axis_name)).reshape(-1)[:size]
    if key is not None:
        return AllReduced(sums, jnp.zeros_like(x), none)
    lost = jnp.where(own, (total - unpack(message))[None], rows - jax.vmap(unpack)(messages))
    return AllReduced(sums, lost.reshape(-1)[:size], none)
