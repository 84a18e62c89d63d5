"""Top-k SGD by three sparse all-reduces, as Optax transformations."""

from typing import Literal

import optax
from jaxtyping import Array, DTypeLike

from jaxsparse import codecs
from jaxsparse.feedback import error_feedback
from jaxsparse.layout import IsDense
from jaxsparse.reducers.gtopk import GTopKReducer
from jaxsparse.reducers.ok_topk import OkTopkReducer
from jaxsparse.reducers.selection import Selection
from jaxsparse.reducers.staged import staged
from jaxsparse.reducers.top_k import TopKReducer
from jaxsparse.stages import Stages


def top_k(
    density: float | Stages[float],
    *,
    codec: codecs.Codec = codecs.COO,
    selection: Selection = "fast",
    axis_name: str | None = "data",
    dense_axis: str | None = None,
    delay: Literal[0, 1] | None = None,
    accumulator_dtype: DTypeLike | None = None,
    momentum: float | Array | None = None,
    is_dense: IsDense | None = None,
    bucket_size: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Top-k SGD (TopkA): each worker's k largest entries, gathered and summed by all.

    Per step a worker sends k = density d entries and receives (W - 1) k: 2 (W - 1) k words in COO,
    which grows with the number of workers. The baseline of gTop-k, Ok-Topk and SparDL.

    Args:
        density: k as a share of each bucket's elements, in (0, 1], or `Stages` of it, as
            `jaxsparse.warm_up` makes them.
        codec: of the messages: `codecs.COO` is exact, `codecs.Packed()` halves the bytes and feeds
            the rounding back.
        selection: "fast" keeps nearly the largest entries, "exact" the largest (a sort).
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
        >>> tx = top_k(0.001, axis_name=None)
        >>> grads = {"kernel": jnp.arange(2048.0).reshape(64, 32), "bias": jnp.ones(32)}
        >>> updates, state = tx.update(grads, tx.init(grads))
        >>> updates["kernel"][-1, -3:].tolist()
        [2045.0, 2046.0, 2047.0]
    """
    return error_feedback(
        staged(lambda density: TopKReducer(density, codec, selection), density),
        axis_name=axis_name,
        dense_axis=dense_axis,
        delay=delay,
        accumulator_dtype=accumulator_dtype,
        momentum=momentum,
        is_dense=is_dense,
        bucket_size=bucket_size,
    )


def gtopk(
    density: float | Stages[float],
    *,
    residuals: Literal["global", "published"] = "global",
    codec: codecs.Codec = codecs.COO,
    selection: Selection = "fast",
    axis_name: str | None = "data",
    dense_axis: str | None = None,
    delay: Literal[0, 1] | None = None,
    accumulator_dtype: DTypeLike | None = None,
    momentum: float | Array | None = None,
    is_dense: IsDense | None = None,
    bucket_size: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """gTop-k SGD (Shi et al., ICDCS 2019): k entries are left after each addition of two workers'.

    Per step log2 W exchanges of k = density d entries, 2 k words each in COO; if W is no power of
    two, floor(log2 W) + 2 of them. (Published: a tree and a broadcast, twice that.)

    Args:
        density: k as a share of each bucket's elements, in (0, 1], or `Stages` of it.
        residuals: "global" loses nothing; "published" is the paper's rule, which leaks.
        codec: of the messages.
        selection: "fast" or "exact" top-k of each worker's own vector.
        axis_name: see `error_feedback`, as for all that follow.
        dense_axis: the fast axis of a mesh with two levels.
        delay: 1 applies this step what was exchanged before its gradients.
        accumulator_dtype: of residual and momentum: float32 (None), or "bfloat16" for half the
            memory.
        momentum: momentum correction with masking where a worker's own entry was delivered.
        is_dense: which leaves travel uncompressed.
        bucket_size: upper limit for the elements of a bucket.

    Raises:
        ValueError: settings out of range.
    """
    return error_feedback(
        staged(lambda density: GTopKReducer(density, residuals, codec, selection), density),
        axis_name=axis_name,
        dense_axis=dense_axis,
        delay=delay,
        accumulator_dtype=accumulator_dtype,
        momentum=momentum,
        is_dense=is_dense,
        bucket_size=bucket_size,
    )


def ok_topk(
    density: float | Stages[float],
    *,
    refresh_every: int = 32,
    rebalance_every: int = 64,
    capacity_factor: float = 2.0,
    codec: codecs.Codec = codecs.COO,
    selection: Selection = "fast",
    axis_name: str | None = "data",
    dense_axis: str | None = None,
    delay: Literal[0, 1] | None = None,
    accumulator_dtype: DTypeLike | None = None,
    momentum: float | Array | None = None,
    is_dense: IsDense | None = None,
    bucket_size: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Ok-Topk (Li and Hoefler, PPoPP 2022): entries above thresholds, summed in balanced regions.

    Each worker offers about its k = density d largest entries; owners of W regions, which hold
    about as many offers, add them up; sums above a threshold are delivered. Regions and threshold
    are reused for many steps, and taken anew earlier after a step in which they did not serve: too
    many sums for the room in messages, or fewer than k / 2.

    Per step 6 C (W - 1) words in COO, with C = capacity_factor k / W, in four collectives: up to
    capacity_factor times what is published, since shapes are static and room is paid for whether it
    is filled or not. New thresholds take four rounds of 256 counts, new regions an all-reduce of
    1024. What finds no room stays in residuals and is counted in the state's `info.overflow`.

    Args:
        density: k as a share of each bucket's elements, in (0, 1], or `Stages` of it.
        refresh_every: steps after which the threshold is taken anew, exactly, at the latest.
        rebalance_every: steps after which regions are drawn anew, at the latest.
        capacity_factor: room in messages, in multiples of an even share.
        codec: of the messages.
        selection: of each worker's own vector: "fast" offers what reaches a sampled threshold, on
            average k; others offer k at most.
        axis_name: see `error_feedback`, as for all that follow.
        dense_axis: the fast axis of a mesh with two levels.
        delay: 1 applies this step what was exchanged before its gradients.
        accumulator_dtype: of residual and momentum: float32 (None), or "bfloat16" for half the
            memory.
        momentum: momentum correction with masking where a worker's own entry was delivered.
        is_dense: which leaves travel uncompressed.
        bucket_size: upper limit for the elements of a bucket.

    Raises:
        ValueError: settings out of range.
    """

    def make(density: float) -> OkTopkReducer:
        return OkTopkReducer(
            density, refresh_every, rebalance_every, capacity_factor, codec, selection
        )

    return error_feedback(
        staged(make, density),
        axis_name=axis_name,
        dense_axis=dense_axis,
        delay=delay,
        accumulator_dtype=accumulator_dtype,
        momentum=momentum,
        is_dense=is_dense,
        bucket_size=bucket_size,
    )
