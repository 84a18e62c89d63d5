"""The k largest elements, by XLA's sort."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxsparse.select.checks import check_vector
from jaxsparse.stream import SparseStream

__all__ = ["check_k", "top_k"]


def check_k(k: int, size: int) -> None:
    """Raises ValueError unless k is an int, 1 <= k <= size."""
    if not isinstance(k, int):
        raise ValueError(
            f"k={k!r} must be an int: it is static (list it in static_args under "
            "optax.inject_hyperparams)"
        )
    if not 1 <= k <= size:
        raise ValueError(f"k={k} must lie between 1 and the vector's size, {size}")


@functools.partial(jax.jit, static_argnames="k")
def top_k(x: Float[Array, " d"], k: int) -> SparseStream:
    """The k entries of largest magnitude, exactly, in order of falling magnitude.

    Of equal magnitudes the lower index comes first. On CPU it sorts the whole vector.

    Args:
        x: float vector of d elements.
        k: number of entries to keep, 1 <= k <= d.

    Returns:
        Distinct int32 indices and the values of `x` there, in its dtype.

    Raises:
        ValueError: `x` is not a vector, or k is out of range.

    Example:
        >>> import jax.numpy as jnp
        >>> top_k(jnp.array([1.0, -3.0, 2.0]), 2).indices.tolist()
        [1, 2]
    """
    check_vector("x", x)
    check_k(k, x.size)
    _, indices = jax.lax.top_k(jnp.abs(x), k)
    return SparseStream(indices, x[indices])
