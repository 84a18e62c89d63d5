"""SparDL as an Optax transformation."""

from typing import Literal

import optax
from jaxtyping import Array, DTypeLike

from jaxsparse import codecs
from jaxsparse.feedback import error_feedback
from jaxsparse.layout import IsDense
from jaxsparse.reducers.selection import Selection
from jaxsparse.reducers.spardl import SparDLReducer
from jaxsparse.reducers.staged import staged
from jaxsparse.stages import Stages


def spardl(
    density: float | Stages[float],
    *,
    teams: int = 1,
    gather: Literal["recursive", "bruck"] = "recursive",
    residuals: Literal["global", "partial", "local"] = "global",
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
    """SparDL (Zhao et al., ICDE 2024): a sparse all-reduce that never exceeds its budget.

    With one team, 2 ceil(log2 W) exchanges and 4 k (W - 1) / W words in COO, for any number of
    workers and whatever their supports; k = density d, rounded up to a multiple of W. With T teams
    2 ceil(log2(W / T)) + ceil(log2 T) exchanges and 4 k (W - T) / W words, and between teams
    2 k log2(T) T / W ("recursive") or between 2 k (T - 1) / W and T times that ("bruck", in four
    steps that follow what it adapts).

    Args:
        density: share of each bucket's elements that is delivered, in (0, 1], or `Stages` of it,
            as `jaxsparse.warm_up` makes them.
        teams: into how many teams the workers divide: fewer rounds, more words. To be chosen by
            `jaxsparse.autotune`.
        gather: how teams add up their blocks: "recursive" for a power of two of teams, "bruck",
            which adapts what it sends, for any number, but not beside a `dense_axis`.
        residuals: "global" loses nothing; "partial" and "local" leak, and are here for comparison.
        codec: of the messages: `codecs.COO` is exact, `codecs.Packed()` halves the bytes and feeds
            the rounding back.
        selection: "fast" keeps nearly the largest entries of a block, "exact" the largest.
        axis_name: see `error_feedback`, as for all that follow.
        dense_axis: the fast axis of a mesh with two levels.
        delay: 1 applies this step what was exchanged before its gradients.
        accumulator_dtype: of residual and momentum: float32 (None), or "bfloat16" for half the
            memory.
        momentum: momentum correction with masking where a worker put forward what was delivered.
        is_dense: which leaves travel uncompressed.
        bucket_size: upper limit for the elements of a bucket.

    Raises:
        ValueError: settings out of range; from `update`: `teams` does not divide the workers, or
            is no power of two for gather="recursive".
    """

    def make(density: float) -> SparDLReducer:
        return SparDLReducer(density, teams, gather, residuals, codec, selection)

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
