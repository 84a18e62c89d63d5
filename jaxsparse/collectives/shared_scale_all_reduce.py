"""All-reduce of integers of a few bits under scales that all workers share: sums need no decoding.

Workers agree on scales first, by a maximum. The integers then add up as they are, in the network's
own all-reduce. They are rounded once, by their senders. (Global-QSGD, Xin et al., 2023; THC, Li et
al., NSDI 2024, which adds a table of levels.)
"""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxsparse.arrays.bits import pack_fields, unpack_fields
from jaxsparse.arrays.settings import check_size
from jaxsparse.collectives.messages import AllReduced
from jaxsparse.comm import wire
from jaxsparse.quantize import Format
from jaxsparse.quantize.quantizer import cut, padded, sent_size


def shared_scale_all_reduce(
    x: Float[Array, " d"], quantizer: Format, *, axis_name: str | None
) -> AllReduced:
    """Sums integers of b bits in words of 32 bits. No sum is too large for its b bits.

    A worker's integers are -s .. s with s = (2^b - 1) // (2 W), plus s. So a sum of W of them is at
    most 2^b - 1. More workers leave fewer levels to each. With "int8", s is 63 for 2 workers, 15
    for 8 and 1 for 64 to 127. With "int4", it is 3 for 2 workers and 1 for 4 to 7. (Sums in
    `quantized_all_reduce` round twice, but have all levels.)

    A worker receives 2 (W - 1)/W d (b / 32 + 1 / group_size) words, or up to a 64th more
    (`quantizer.sent_size`). Scales travel as float32, because not all backends take a maximum of
    shorter numbers.

    All workers' values in a group are rounded as one group of W * group_size values would be. So
    the error is a contraction of them all, and their residuals stay bounded.

    Args:
        x: this worker's vector of d elements, float32.
        quantizer: `Format("int8")` or `Format("int4")`. Its `scale` is not used.
        axis_name: the axis of the workers.

    Returns:
        The total, equal on all workers, the residual, which is this worker's rounding error, and no
        overflow.

    Raises:
        ValueError: the format is not of integers, there are too many workers for a level, or
            indices of `x` do not fit int32.
    """
    check_size("x.size", x.size)
    workers, none = wire.axis_size(axis_name), jnp.int32(0)
    check_format(quantizer)
    if workers == 1:
        return AllReduced(wire.replicated(x, axis_name), jnp.zeros_like(x), none)
    bits = int(quantizer.bits)
    levels = (2**bits - 1) // (2 * workers)
    if levels < 1:
        wider = "format='int8', or " if quantizer.name == "int4" else ""
        raise ValueError(
            f"format={quantizer.name!r} with shared_scale=True leaves no level to each of the "
            f"{workers} workers of axis {axis_name!r}, since sums must fit {bits} bits: use "
            f"{wider}shared_scale=False, or at most {2 ** (bits - 1) - 1} workers"
        )
    quantizer = dataclasses.replace(quantizer, scale="float32")
    size, x = x.size, padded(x, sent_size(x.size, quantizer))
    # The bits of scales, as integers, have the same order, and infinity is the largest.
    own = lax.bitcast_convert_type(quantizer.scales_of(x, levels), jnp.uint32)
    scales = lax.bitcast_convert_type(wire.pmax(own, axis_name), jnp.float32)
    integers = quantizer.integers(x, scales, levels)
    fields = (integers + levels).astype(jnp.uint32)
    summed = wire.psum(pack_fields(fields, bits), axis_name)
    sums = unpack_fields(summed, bits, x.size).astype(jnp.int32) - workers * levels
    total = quantizer.scaled(sums.astype(jnp.float32), scales)
    sent = quantizer.scaled(integers.astype(jnp.float32), scales)
    return AllReduced(cut(total, size), cut(x - sent, size), none)


def check_format(quantizer: object) -> None:
    """Raises ValueError unless it is a format of integers."""
    if not isinstance(quantizer, Format) or not quantizer.is_integer:
        raise ValueError(
            f"shared_scale=True with {quantizer}: only integers can be summed as they are; use "
            "format='int8' or 'int4'"
        )
