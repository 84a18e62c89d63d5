"""Sparse vectors of a static capacity."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class SparseStream(NamedTuple):
    """Entries of a sparse vector: `to_dense(stream, size)[indices] == values`.

    An index equal to the vector's size marks an empty slot, whose value is 0. (Not -1: JAX wraps
    negative indices even in the scatter mode that drops those out of bounds.)
    """

    indices: Int[Array, " k"]  # int32
    values: Float[Array, " k"]


def from_dense(x: Float[Array, " d"], indices: Int[Array, " k"]) -> SparseStream:
    """The entries of `x` at `indices`; out-of-range indices give empty slots."""
    return SparseStream(indices, x.at[indices].get(mode="fill", fill_value=0))


def to_dense(stream: SparseStream, size: int) -> Float[Array, " d"]:
    """The dense vector of length `size`; entries with the same index are added up.

    Example:
        >>> import jax.numpy as jnp
        >>> stream = SparseStream(jnp.array([2, 0, 4]), jnp.array([5.0, 1.0, 0.0]))
        >>> to_dense(stream, 4).tolist()
        [1.0, 0.0, 5.0, 0.0]
    """
    zeros = jnp.zeros((size,), stream.values.dtype)
    return zeros.at[stream.indices].add(stream.values, mode="drop")
