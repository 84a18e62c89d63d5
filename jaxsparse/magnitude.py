"""The largest magnitude of an array. NaN counts as the largest."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def largest_magnitude(x: Float[Array, "..."], axis: int | None = None) -> Array:
    """The largest |x|; NaN if any element is NaN, 0 if there are no elements.

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
    largest = jnp.max(bits, axis=axis, initial=jnp.uint32(0))
    return jax.lax.bitcast_convert_type(largest, jnp.float32)
