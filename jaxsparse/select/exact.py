"""The k largest elements, by XLA's sort."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxsparse.select.checks import check_k, check_vector
from jaxsparse.stream import SparseStream

__all__ = ["top_k"]


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
    return _top_k(x, check_k(k, x.size))


@functools.partial(jax.jit, static_argnames="k")
def _top_k(x: Float[Array, " d"], k: int) -> SparseStream:
    _, indices = jax.lax.top_k(jnp.abs(x), k)
    return SparseStream(indices, x[indices])
