"""The share of a worker in local steps, whose displacements count by the weights of its steps."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxsparse.comm import wire
from jaxsparse.training.means import check_counts

T = TypeVar("T")


def weighted(tree: T, weight: Any, *, axis_name: str | None = "data") -> T:
    """A worker's displacement, scaled so that the mean over workers is the weighted mean.

    Args:
        tree: floating-point arrays.
        weight: what this worker counts, a real scalar, at least 0.
        axis_name: the axis of the workers, bound here. None: a single worker.

    Returns:
        The tree in its shapes and dtypes. All of it is 0 where the weight is 0, and everywhere if
        all weights are 0. It is NaN where a weight is negative or NaN, so that the exchange skips
        the step.
    """
    own = jnp.asarray(weight).astype(jnp.result_type(float))
    mean = wire.psum(wire.varying(own, axis_name), axis_name) / wire.axis_size(axis_name)
    share = jnp.where(own > 0, own / jnp.where(mean > 0, mean, 1), 0)
    share = jnp.where(own >= 0, share, jnp.nan)

    def scaled(x: Any) -> jax.Array:
        x = jnp.asarray(x)
        wide = x.astype(share.dtype) if x.dtype.itemsize < share.dtype.itemsize else x
        return jnp.where(share == 0, 0, wide * share.astype(wide.dtype)).astype(x.dtype)

    return jax.tree.map(scaled, tree)


def check_weight(weight: Any) -> None:
    """Raises ValueError unless the weight is a real scalar, not of 16 bits."""
    shape, dtype = jnp.shape(weight), jnp.result_type(weight)
    is_real = jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating)
    if shape or not is_real:
        raise ValueError(
            f"weight has shape {shape} and dtype {dtype}, but it is one number for a worker: give "
            "its number of tokens, as mask.sum() counts them"
        )
    check_counts("weight", dtype)
