"""The largest magnitude of an array, which NaN exceeds."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def largest_magnitude(x: Float[Array, "..."], axis: int | None = None) -> Array:
    """The largest |x|, or NaN if there is one; 0 of nothing.

    A floating-point maximum does not tell: in XLA's CPU reductions NaN may lose against a number.
    As integers magnitudes have the same order, and NaN comes after infinity.

    Args:
        x: float32 array.
        axis: along which to reduce; None for all.

    Example:
        >>> largest_magnitude(jnp.float32([1.0, -3.0])).item()
        3.0
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0x7FFFFFFF)
    largest = jnp.max(bits, axis=axis, initial=jnp.uint32(0))
    return jax.lax.bitcast_convert_type(largest, jnp.float32)
