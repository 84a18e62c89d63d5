"""Sketched-SGD as an Optax transformation."""

from typing import Literal

import optax
from jaxtyping import Array, DTypeLike

from jaxsparse.feedback import error_feedback
from jaxsparse.layout import IsDense
from jaxsparse.reducers.sketched import SketchedBudget, SketchedReducer


def sketched_sgd(
    compression: float | None = None,
    *,
    k: int | None = None,
    rows: int = 5,
    cols: int | None = None,
    oversampling: int | None = None,
    selection: Literal["top_k", "heavymix"] = "top_k",
    seed: int = 0,
    table_dtype: DTypeLike = "float32",
    axis_name: str | None = "data",
    dense_axis: str | None = None,
    delay: Literal[0, 1] | None = None,
    accumulator_dtype: DTypeLike | None = None,
    momentum: float | Array | None = None,
    is_dense: IsDense | None = None,
    bucket_size: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Sketched-SGD (Ivkin et al., NeurIPS 2019, Alg. 3): heavy coordinates of the mean gradient.

    Workers psum a count sketch of momentum-corrected, error-corrected gradients, agree on
    oversampling * k candidates, psum those exactly, and apply the k largest. Per step and worker
    this psums rows * cols + oversampling * k words, plus the dense leaves and one more, whatever
    the number of workers. Update and residual are means and in gradient units: where the paper
    sums, we average. On a GPU replicas stay equal, but a run that is repeated may differ in the
    last bits: see `sketch.encode`.

    Args:
        compression: wanted ratio of *payload words*: the words of all gradient leaves over the
            words psummed in a step, dense leaves counted in both. (The paper counts what a server
            sends back, too: 2d / (|S| + Pk + k), about twice this number.) It chooses whichever of
            `k` and `cols` is not given; with both given it must be None.
        k: coordinates updated per step, of the whole tree.
        rows: rows of the sketch.
        cols: columns of the sketch, of the whole tree.
        oversampling: candidates fetched exactly per coordinate updated, the paper's P (16 to 36
            there). Default 4, and 1 with "heavymix", which has none.
        selection: "top_k" takes the largest estimates (Alg. 3); "heavymix" those above the norm's
            1/sqrt(k), filled up at random (Alg. 1).
        seed: of the hash functions, which are fresh at each step.
        table_dtype: bfloat16 or float16 halve the table (section 6) where the backend can sum
            them; XLA on CPU widens them to float32 on the wire. Exact values stay float32.
        axis_name: see `error_feedback`, as for all that follow.
        dense_axis: the fast axis of a mesh with two levels.
        delay: 1 applies this step what was exchanged before its gradients.
        accumulator_dtype: of residual and momentum: float32 (None), or "bfloat16" for half the
            memory.
        momentum: momentum correction with momentum factor masking. It belongs here, not in the
            optimizer that follows.
        is_dense: which leaves travel uncompressed.
        bucket_size: upper limit for the elements of a bucket.

    Returns:
        The transformation; chain an optimizer after it.

    Raises:
        ValueError: settings out of range, or too many or too few of `compression`, `k`, `cols`.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> tx = optax.chain(
        ...     sketched_sgd(k=2, cols=16, rows=3, axis_name=None, momentum=0.9), optax.sgd(0.1)
        ... )
        >>> params = {"kernel": jnp.ones((64, 32)), "bias": jnp.ones(32)}
        >>> state = tx.init(params)
        >>> updates, state = jax.jit(tx.update)(params, state)
        >>> int(jnp.count_nonzero(updates["kernel"])), int(jnp.count_nonzero(updates["bias"]))
        (2, 32)
    """
    if oversampling is None:
        oversampling = 4 if selection == "top_k" else 1
    settings = SketchedReducer(
        k=1 if k is None else k,
        cols=1 if cols is None else cols,
        rows=rows,
        oversampling=oversampling,
        selection=selection,
        seed=seed,
        table_dtype=table_dtype,
    )
    if compression is None and (k is None or cols is None):
        raise ValueError(f"k={k} and cols={cols}: give both, or a compression that sets the rest")
    return error_feedback(
        settings if compression is None else SketchedBudget(compression, settings, k, cols),
        axis_name=axis_name,
        dense_axis=dense_axis,
        delay=delay,
        accumulator_dtype=accumulator_dtype,
        momentum=momentum,
        is_dense=is_dense,
        bucket_size=bucket_size,
    )
