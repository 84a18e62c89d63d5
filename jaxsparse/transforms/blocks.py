"""All-reduce and all-gather of sparse blocks, as Optax transformations."""

from typing import Literal

import optax
from jaxtyping import Array, DTypeLike

from jaxsparse.feedback import error_feedback
from jaxsparse.layout import IsDense
from jaxsparse.reducers.block_gather import BlockGatherReducer
from jaxsparse.reducers.omni_reduce import OmniReduceReducer
from jaxsparse.reducers.staged import staged
from jaxsparse.stages import Stages


def omni_reduce(
    density: float | Stages[float] | None = None,
    *,
    block_size: int = 256,
    union_density: float | None = None,
    axis_name: str | None = "data",
    dense_axis: str | None = None,
    delay: Literal[0, 1] | None = None,
    accumulator_dtype: DTypeLike | None = None,
    momentum: float | Array | None = None,
    is_dense: IsDense | None = None,
    bucket_size: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """OmniReduce (Fei et al., SIGCOMM 2021): only blocks that are non-zero on some worker are sent.

    For gradients that are sparse by nature, such as those of embeddings: set `block_size` to the
    embedding's width, so that a block is a row, and `union_density` to the share of rows that a
    step touches on all workers together. The mean is then exact, and nothing is selected. For dense
    gradients `density` selects each worker's largest blocks, with error feedback.

    Per step a union of bit masks, 2 (W - 1)/W words for every 32 blocks, and a psum of the union's
    slots: payload 4 union_density d bytes, or 4 min(1, W density) d where that is less. Slots are
    static, and paid for whether they are filled or not. What finds none waits in the residual, for
    ceil(1 / union_density) steps at most, and is counted in the state's `info.overflow`. Where the
    slots would hold all of d, all of it is summed densely. Compared with `sparse_all_gather` it
    pays where supports overlap, or workers are many.

    Args:
        density: share of its blocks that each worker selects, those of largest l2 norm, in (0, 1],
            or `Stages` of it; None for all that are not zero.
        block_size: elements of a block.
        union_density: share of the blocks that there is room for, in (0, 1]. None for all that
            `density` can select; required without it.
        axis_name: see `error_feedback`, as for all that follow.
        dense_axis: the fast axis of a mesh with two levels.
        delay: 1 applies this step what was exchanged before its gradients.
        accumulator_dtype: of residual and momentum: float32 (None), or "bfloat16" for half the
            memory.
        momentum: with a density momentum correction, masked where this worker sent; without, that
            of the mean: gradients with momentum would be zero nowhere.
        is_dense: which leaves travel uncompressed. Leaves are laid end to end: those before an
            embedding that are no multiple of its width would shift its rows across blocks, so
            compress embeddings of one width only.
        bucket_size: upper limit for the elements of a bucket. Blocks start anew in each.

    Raises:
        ValueError: settings out of range, or neither `density` nor `union_density` is given.

    Example:
        >>> import jax.numpy as jnp
        >>> tx = omni_reduce(block_size=32, union_density=0.1, axis_name=None)
        >>> grads = {"embedding": jnp.zeros((64, 32)).at[jnp.array([3, 50])].set(1.0)}
        >>> updates, state = tx.update(grads, tx.init(grads))
        >>> bool((updates["embedding"] == grads["embedding"]).all()), int(state.info.delivered)
        (True, 64)
    """

    def make(density: float | None) -> OmniReduceReducer:
        return OmniReduceReducer(block_size, density, union_density)

    return error_feedback(
        make(None) if density is None else staged(make, density),
        axis_name=axis_name,
        dense_axis=dense_axis,
        delay=delay,
        accumulator_dtype=accumulator_dtype,
        momentum=momentum,
        is_dense=is_dense,
        bucket_size=bucket_size,
    )


def sparse_all_gather(
    density: float | Stages[float] | None = None,
    *,
    block_size: int = 256,
    capacity_density: float | None = None,
    axis_name: str | None = "data",
    dense_axis: str | None = None,
    delay: Literal[0, 1] | None = None,
    accumulator_dtype: DTypeLike | None = None,
    momentum: float | Array | None = None,
    is_dense: IsDense | None = None,
    bucket_size: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """All-gather of each worker's non-zero blocks, summed by all.

    What Parallax (Kim et al., EuroSys 2019) with all-reduce, Horovod and TensorFlow do with sparse
    gradients (rows of embeddings as IndexedSlices); dense leaves beside them are summed by an
    all-reduce. Set `block_size` to the embedding's width and `capacity_density` to the share of
    rows that a worker touches in a step: the mean is then exact, and nothing is selected. For dense
    gradients `density` selects each worker's largest blocks, with error feedback.

    Per step one all-gather of capacity_density d (1 + 1 / block_size) words, of which a worker
    receives W - 1: for few workers, or supports that hardly overlap; `omni_reduce` otherwise. Room
    is static, and paid for whether it is filled or not. What finds none waits in the residual, for
    ceil(1 / capacity_density) steps at most, and is counted in the state's `info.overflow`. Where
    all messages together would be no less than a dense all-reduce, that is done.

    Args:
        density: share of its blocks that each worker selects, those of largest l2 norm, in (0, 1],
            or `Stages` of it; None for all that are not zero.
        block_size: elements of a block.
        capacity_density: share of the blocks that a worker's message has room for, in (0, 1]. None
            for `density`; required without it.
        axis_name: see `error_feedback`, as for all that follow.
        dense_axis: the fast axis of a mesh with two levels.
        delay: 1 applies this step what was exchanged before its gradients.
        accumulator_dtype: of residual and momentum: float32 (None), or "bfloat16" for half the
            memory.
        momentum: with a density momentum correction, masked where this worker sent; without, that
            of the mean: gradients with momentum would be zero nowhere.
        is_dense: which leaves travel uncompressed. See `omni_reduce` for how blocks lie.
        bucket_size: upper limit for the elements of a bucket. Blocks start anew in each.

    Raises:
        ValueError: settings out of range, or neither `density` nor `capacity_density` is given.
    """

    def make(density: float | None) -> BlockGatherReducer:
        return BlockGatherReducer(block_size, density, capacity_density)

    return error_feedback(
        make(None) if density is None else staged(make, density),
        axis_name=axis_name,
        dense_axis=dense_axis,
        delay=delay,
        accumulator_dtype=accumulator_dtype,
        momentum=momentum,
        is_dense=is_dense,
        bucket_size=bucket_size,
    )
