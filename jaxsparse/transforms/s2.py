"""S2 Reducer as an Optax transformation."""

from typing import Literal

import optax
from jaxtyping import Array, DTypeLike

from jaxsparse.feedback import error_feedback
from jaxsparse.layout import IsDense
from jaxsparse.reducers.s2 import S2Reducer
from jaxsparse.reducers.staged import staged
from jaxsparse.stages import Stages


def s2_reducer(
    density: float | Stages[float] | None = 1 / 32,
    *,
    block_size: int = 256,
    rows: int = 1,
    sketch_ratio: float = 0.5,
    sizing: Literal["union", "local"] = "union",
    union_density: float | None = None,
    seed: int = 0,
    axis_name: str | None = "data",
    dense_axis: str | None = None,
    delay: Literal[0, 1] | None = None,
    accumulator_dtype: DTypeLike | None = None,
    momentum: float | Array | None = None,
    is_dense: IsDense | None = None,
    bucket_size: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """S2 Reducer (Ge et al., 2021): count sketches of sparse blocks, summed by all-reduce.

    For dense models each worker selects its blocks of largest norm; what it did not select is fed
    back. For gradients that are sparse by nature, such as those of embeddings, give
    `density=None`, the embedding's width for `block_size`, and in `union_density` the share of the
    rows that a step touches on any worker: all blocks that are not zero are sent.

    Per step: the union of supports, an all-to-all and an all-gather of 2 (W - 1)/W bits a block;
    and a psum of sketch_ratio times the elements of the blocks that W random supports would cover,
    or of `union_density`. That is 1 / sketch_ratio less than `omni_reduce` with the same settings
    sends, and the price is noise: the sketch's estimates are unbiased, but the energy of their
    error is 1 / sketch_ratio times the energy of the sum for one row (2 at 0.5), and 2.5 and 2.7
    for 3 and 5. It averages out over steps, the better the lower the learning rate is, and
    error feedback can't take it back. (The paper's Theorem 2, a contraction, does not hold at such
    ratios.) From a ratio of 1 on with `union_density`, or wherever the table would be no smaller
    than the blocks there is room for, these are summed exactly.

    On a GPU replicas stay equal, but a run that is repeated may differ in the last bits: see
    `sketch.encode`.

    Args:
        density: share of the blocks that each worker selects, in (0, 1], or `Stages` of it; None
            for all that are not zero.
        block_size: consecutive elements that are selected and hashed together.
        rows: of the sketch.
        sketch_ratio: the paper's lambda, words of the sketch over elements of non-zero blocks.
        sizing: of which blocks: "union" of all workers' or, as in the paper, one worker's "local"
            ones, which has up to W times the noise, and diverges at learning rates at which the
            other does not (`benchmarks/s2_reducer.py`).
        union_density: share of the blocks there is room for, on all workers together. What
            exceeds it waits in the residual, and is counted in the state's `info.overflow`.
        seed: of the hashes, which are fresh at each step.
        axis_name: see `error_feedback`, as for all that follow.
        dense_axis: the fast axis of a mesh with two levels.
        delay: 1 applies this step what was exchanged before its gradients.
        accumulator_dtype: of residual and momentum: float32 (None), or "bfloat16" for half the
            memory.
        momentum: with a density momentum correction, without masking; without, that of the mean:
            gradients with momentum would be zero nowhere.
        is_dense: which leaves travel uncompressed. Leaves are laid end to end, and blocks run on
            from one to the next: compress embeddings of one width only, or their rows shift.
        bucket_size: upper limit for the elements of a bucket.

    Raises:
        ValueError: settings out of range.

    Example:
        >>> import jax.numpy as jnp
        >>> tx = s2_reducer(None, block_size=32, union_density=0.25, axis_name=None)
        >>> grads = {"embedding": jnp.zeros((64, 32)).at[jnp.array([3, 40])].set(1.0)}
        >>> updates, state = tx.update(grads, tx.init(grads))
        >>> jnp.flatnonzero(jnp.any(updates["embedding"] != 0, axis=1)).tolist()
        [3, 40]
    """

    def make(density: float | None) -> S2Reducer:
        return S2Reducer(block_size, density, rows, sketch_ratio, sizing, union_density, seed)

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
