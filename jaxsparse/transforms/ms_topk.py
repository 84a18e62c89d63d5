"""MSTopk as an Optax transformation."""

from typing import Literal

import optax
from jaxtyping import Array, DTypeLike

from jaxsparse import codecs
from jaxsparse.layout import IsDense
from jaxsparse.reducers.selection import Bisection
from jaxsparse.select.thresholds import DEFAULT_PASSES
from jaxsparse.stages import Stages
from jaxsparse.transforms.sparse import top_k


def ms_topk(
    density: float | Stages[float],
    *,
    passes: int = DEFAULT_PASSES,
    codec: codecs.Codec = codecs.COO,
    axis_name: str | None = "data",
    dense_axis: str | None = None,
    delay: Literal[0, 1] | None = None,
    accumulator_dtype: DTypeLike | None = None,
    momentum: float | Array | None = None,
    is_dense: IsDense | None = None,
    bucket_size: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """MSTopk (Shi et al., MLSys 2021): `top_k` by bisection instead of a sort.

    A threshold is bracketed in a fixed number of passes; k = density d entries above it or nearly
    so are gathered by all. Per step and worker as `top_k`: 2 (W - 1) k words in COO. (The paper
    gathers within hosts first, and then between them; here there is one level.)

    Args:
        density: k as a share of each bucket's elements, in (0, 1], or `Stages` of it.
        passes: trial thresholds; see `jaxsparse.select.bisection_threshold`.
        codec: of the messages.
        axis_name: see `error_feedback`, as for all that follow.
        dense_axis: the fast axis of a mesh with two levels.
        delay: 1 applies this step what was exchanged before its gradients.
        accumulator_dtype: of residual and momentum: float32 (None), or "bfloat16" for half the
            memory.
        momentum: momentum correction with momentum factor masking where this worker sent.
        is_dense: which leaves travel uncompressed.
        bucket_size: upper limit for the elements of a bucket.

    Raises:
        ValueError: settings out of range.

    Example:
        >>> import jax.numpy as jnp
        >>> tx = ms_topk(0.001, axis_name=None)
        >>> grads = {"kernel": jnp.arange(2048.0).reshape(64, 32), "bias": jnp.ones(32)}
        >>> updates, state = tx.update(grads, tx.init(grads))
        >>> updates["kernel"][-1, -3:].tolist()
        [2045.0, 2046.0, 2047.0]
    """
    return top_k(
        density,
        codec=codec,
        selection=Bisection(passes),
        axis_name=axis_name,
        dense_axis=dense_axis,
        delay=delay,
        accumulator_dtype=accumulator_dtype,
        momentum=momentum,
        is_dense=is_dense,
        bucket_size=bucket_size,
    )
