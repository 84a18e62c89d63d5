"""Magnitudes near the ends of a float's range: the largest, shares of it, norms, and clipping."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, DTypeLike, Float

LARGEST = float(np.finfo(np.float32).max)
# Twice the least normal number. The reciprocal of a smaller number may be infinite, and XLA's CPU
# backend takes subnormal numbers for 0.
SMALLEST = 2 * float(np.finfo(np.float32).tiny)

# Number of elements. Rows whose length is a multiple of it are reduced in two steps.
_LANES = 64


def largest_magnitude(x: Float[Array, "..."], axis: int | None = None) -> Array:
    """The largest |x| along an axis, or of all. It is NaN if any element is NaN, and 0 of none.

    A floating-point maximum may miss NaN, which can lose against a number in XLA's CPU reductions.
    The bits of magnitudes, as integers, have the same order, and NaN comes after infinity.

    >>> largest_magnitude(jnp.float32([1.0, -3.0])).item()
    3.0
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0x7FFFFFFF)
    if axis == 1 and x.ndim == 2 and x.shape[1] % _LANES == 0:
        # XLA's CPU backend reduces a row element by element, in 12 times the time of a pass over x.
        # With maxima of lanes first it takes one pass. The barrier keeps the two steps apart.
        lanes = jnp.max(bits.reshape(-1, 16, x.shape[1] // 16), axis=1, initial=jnp.uint32(0))
        bits = jax.lax.optimization_barrier(lanes)
    largest = jnp.max(bits, axis=axis, initial=jnp.uint32(0))
    return jax.lax.bitcast_convert_type(largest, jnp.float32)


def shares_of(x: Float[Array, "*shape"], scales: Float[Array, "..."]) -> Float[Array, "*shape"]:
    """Values divided by the scale of their group. They are right where 4 / scale is normal.

    XLA turns a division into a product with 1 / scale. Above 2**126 that is subnormal, so zero.

    >>> shares_of(jnp.float32([[1, -2**127]]), jnp.float32([2**127])).tolist()[0][1]
    -1.0
    """
    return x * jnp.expand_dims(4 / scales, tuple(range(scales.ndim, x.ndim))) * 0.25


def scaled(x: Float[Array, "..."], axis: int | None = 1) -> tuple[Array, Array]:
    """Shares of at most 1 and the scale of each row: its largest magnitude, or SMALLEST if more.

    Squares of shares do not overflow, and those of the largest do not vanish. If a value of a row
    is not finite, neither is its scale, and an infinite value has a share of NaN. A row lies along
    `axis`, the last one. None: all of `x` is one row.

    >>> shares, scales = scaled(jnp.float32([[2**101, -2**102]]))
    >>> shares.tolist(), scales.tolist() == [2**102]
    ([[0.5, -1.0]], True)
    """
    scales = jnp.maximum(largest_magnitude(x, axis), SMALLEST)
    return shares_of(x, scales), scales


def norms(
    x: Float[Array, "..."], axis: int | None = 1, reduce: Callable[..., Array] = jnp.sum
) -> Array:
    """The l2 norm of each row. It is infinite beyond float32, and NaN if a value is not finite.

    With `jnp.mean` to reduce the squares, it is the root mean square, which does not overflow.

    >>> [f"{norm:.3}" for norm in norms(jnp.float32([[3e30, -4e30], [0, 1e-30]])).tolist()]
    ['5e+30', '1e-30']
    """
    shares, scales = scaled(x, axis)
    return scales * jnp.sqrt(reduce(jnp.square(shares), axis=axis))


def clipped(x: Float[Array, "..."], dtype: DTypeLike = jnp.float32, summands: int = 1) -> Array:
    """`x` within the finite numbers of a float dtype. Infinities become its ends; NaN stays NaN.

    The sum of so many `summands` does not overflow in that dtype. The result keeps the dtype of
    `x`.
    """
    limit = float(jnp.finfo(dtype).max)
    if summands > 1:
        # Powers of two add up without rounding. Rounding could make the last sum overflow.
        limit = 2.0 ** math.floor(math.log2(limit / summands))
    return jnp.clip(x, -limit, limit)


def all_finite(arrays: Iterable[Any]) -> Bool[Array, ""]:
    """Whether all floating-point values of all arrays are finite."""
    floats = [x for x in arrays if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in floats]))


def within(x: Float[Array, "*shape"], dtype: DTypeLike) -> Float[Array, "*shape"]:
    """`x` with finite values clipped so that they stay finite in a float dtype.

    Infinities and NaN stay, so that an overflow does not look like a number.
    """
    return jnp.where(jnp.isfinite(x), clipped(x, dtype), x)


def rounded(x: Float[Array, "*shape"], dtype: DTypeLike) -> Float[Array, "*shape"]:
    """`within(x, dtype)`, rounded to the nearest number of a narrower float dtype, in x's dtype.

    Subnormal numbers of float16 become 0. XLA may remove a conversion there and back, but not this
    operation.

    >>> rounded(jnp.float32([1.001, 1e9]), jnp.float16).tolist()
    [1.0009765625, 65504.0]
    """
    info = jnp.finfo(dtype)
    return jax.lax.reduce_precision(within(x, dtype), info.nexp, info.nmant)
