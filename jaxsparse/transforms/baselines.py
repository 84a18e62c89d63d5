"""What the systems are compared with, as Optax transformations."""

from typing import Literal

import optax
from jaxtyping import Array, DTypeLike

from jaxsparse.feedback import error_feedback
from jaxsparse.layout import IsDense
from jaxsparse.reducers.dense import DenseReducer
from jaxsparse.reducers.true_top_k import TrueTopKReducer


def true_top_k(
    k: int,
    *,
    axis_name: str | None = "data",
    dense_axis: str | None = None,
    delay: Literal[0, 1] | None = None,
    accumulator_dtype: DTypeLike | None = None,
    momentum: float | Array | None = None,
    is_dense: IsDense | None = None,
    bucket_size: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The k largest coordinates of the mean gradient, with error feedback: saves no bytes.

    The ceiling for `sketched_sgd` at the same k (its section 4, remark 2): what training is like
    if the heavy coordinates are found for certain.

    Args:
        k: coordinates updated per step, of the whole tree.
        axis_name: see `error_feedback`, as for all that follow.
        dense_axis: the fast axis of a mesh with two levels.
        delay: 1 applies this step what was exchanged before its gradients.
        accumulator_dtype: of residual and momentum: float32 (None), or "bfloat16" for half the
            memory.
        momentum: momentum correction with momentum factor masking.
        is_dense: which leaves are averaged whole.
        bucket_size: upper limit for the elements of a bucket.
    """
    return error_feedback(
        TrueTopKReducer(k),
        axis_name=axis_name,
        dense_axis=dense_axis,
        delay=delay,
        accumulator_dtype=accumulator_dtype,
        momentum=momentum,
        is_dense=is_dense,
        bucket_size=bucket_size,
    )


def dense(
    *,
    axis_name: str | None = "data",
    dense_axis: str | None = None,
    delay: Literal[0, 1] | None = None,
    momentum: float | Array | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The exact mean gradient by all-reduce: the baseline, switched to by changing one word.

    Args:
        axis_name: see `error_feedback`.
        dense_axis: the fast axis of a mesh with two levels.
        delay: 1 applies this step what was exchanged before its gradients.
        momentum: heavy-ball momentum, the same as `optax.trace(momentum)` behind it.
    """
    return error_feedback(
        DenseReducer(),
        axis_name=axis_name,
        dense_axis=dense_axis,
        delay=delay,
        momentum=momentum,
        is_dense=lambda path, shape: True,
    )
