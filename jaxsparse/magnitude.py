"""The largest magnitude of an array, and shares of it. NaN counts as the largest."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# Number of elements. Rows whose length is a multiple of it are reduced in two steps.
_LANES = 64


def largest_magnitude(x: Float[Array, "..."], axis: int | None = None) -> Array:
    """The largest |x|. It is NaN if any element is NaN, and 0 if there are no elements.

    A floating-point maximum may miss NaN, which can lose against a number in XLA's CPU reductions.
    The bits of magnitudes, as integers, have the same order, and NaN comes after infinity.

    Args:
        x: float32 array.
        axis: axis to reduce. None: all axes.

    Example:
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


def shares_of(
    rows: Float[Array, "groups values"], scales: Float[Array, " groups"]
) -> Float[Array, "groups values"]:
    """Values divided by the scale of their row. They are right where 4 / scale is a normal number.

    XLA turns a division into a product with 1 / scale. Above 2**126 that is subnormal, so zero.

    >>> shares_of(jnp.float32([[1, -2**127]]), jnp.float32([2**127])).tolist()[0][1]
    -1.0
    """
    return rows * (4 / scales)[:, None] * 0.25
