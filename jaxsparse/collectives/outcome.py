"""What a sparse all-reduce returns."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int, Num


class AllReduced(NamedTuple):
    """The entries of all workers' streams over vectors of d elements, combined.

    For sums, `sum over workers of to_dense(stream) == total + sum over workers of residual`.
    """

    total: Num[Array, " d"]  # equal on all workers; the neutral element where nobody has an entry
    residual: Num[Array, " d"]  # this worker's share of what `total` lacks; zeros but for sums
    overflow: Int[Array, ""]  # int32: entries, of all workers, that found no room; equal on all


def left_of(total: Num[Array, " d"], sent: Num[Array, " d"]) -> Num[Array, " d"]:
    """What is left of partial sums for a residual.

    A sum that overflowed and is not sent is cut to what its dtype holds: the values that it is of
    are on other workers, and an inf would stay in the residual for good.
    """
    left = jnp.where(total == sent, jnp.zeros_like(total), total - sent)
    if not jnp.issubdtype(total.dtype, jnp.floating):
        return left
    largest = jnp.finfo(total.dtype).max
    return jnp.clip(left, -largest, largest)
