"""Random-k SGD as an Optax transformation."""

from typing import Literal

import optax
from jaxtyping import Array, DTypeLike

from jaxsparse.feedback import error_feedback
from jaxsparse.layout import IsDense
from jaxsparse.reducers.random_k import RandomKReducer
from jaxsparse.reducers.staged import staged
from jaxsparse.stages import Stages


def random_k(
    density: float | Stages[float],
    *,
    seed: int = 0,
    axis_name: str | None = "data",
    dense_axis: str | None = None,
    delay: Literal[0, 1] | None = None,
    accumulator_dtype: DTypeLike | None = None,
    momentum: float | Array | None = None,
    is_dense: IsDense | None = None,
    bucket_size: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Random-k SGD (Stich et al., NeurIPS 2018): k random coordinates, the same on all workers.

    Per step one all-reduce of k = density d words, with no indices, for any number of workers. It
    selects blindly: a coordinate waits for 1 / density steps on average, and to train as well as
    with top-k takes a far higher density.

    Args:
        density: k as a share of each bucket's elements, in (0, 1], or `Stages` of it, as
            `jaxsparse.warm_up` makes them.
        seed: of the draws.
        axis_name: see `error_feedback`, as for all that follow.
        dense_axis: the fast axis of a mesh with two levels.
        delay: 1 applies this step what was exchanged before its gradients.
        accumulator_dtype: of residual and momentum: float32 (None), or "bfloat16" for half the
            memory.
        momentum: momentum correction with momentum factor masking at the chosen coordinates.
        is_dense: which leaves travel uncompressed.
        bucket_size: upper limit for the elements of a bucket.

    Raises:
        ValueError: settings out of range.

    Example:
        >>> import jax.numpy as jnp
        >>> tx = random_k(0.25, axis_name=None)
        >>> grads = {"kernel": jnp.ones((64, 32))}
        >>> updates, state = tx.update(grads, tx.init(grads))
        >>> updates["kernel"].sum().item()
        512.0
    """
    return error_feedback(
        staged(lambda density: RandomKReducer(density, seed), density),
        axis_name=axis_name,
        dense_axis=dense_axis,
        delay=delay,
        accumulator_dtype=accumulator_dtype,
        momentum=momentum,
        is_dense=is_dense,
        bucket_size=bucket_size,
    )
