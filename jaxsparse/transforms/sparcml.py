"""SparCML as an Optax transformation."""

from typing import Literal

import optax
from jaxtyping import Array, DTypeLike

from jaxsparse import codecs, network
from jaxsparse.feedback import error_feedback
from jaxsparse.layout import IsDense
from jaxsparse.reducers.sparcml import Algorithm, SparCMLReducer
from jaxsparse.reducers.staged import staged
from jaxsparse.stages import Stages


def sparcml(
    k: int | Stages[int] = 4,
    bucket_size: int = 512,
    *,
    algorithm: Algorithm = "auto",
    bits: Literal[2, 4, 8] | None = None,
    quantized: Literal["sums", "entries"] = "sums",
    rounding: Literal["stochastic", "nearest"] = "stochastic",
    capacity_factor: float | None = 2.0,
    union_factor: float | None = None,
    link: network.Link | None = None,
    codec: codecs.Codec = codecs.COO,
    seed: int = 0,
    axis_name: str | None = "data",
    dense_axis: str | None = None,
    delay: Literal[0, 1] | None = None,
    accumulator_dtype: DTypeLike | None = None,
    momentum: float | Array | None = None,
    is_dense: IsDense | None = None,
    layout_bucket_size: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """SparCML's Top-k SGD (Renggli et al., SC 2019, Alg. 1): k of every 512 elements, summed.

    In units of gradients and means: chain `optax.sgd(lr)` behind it. (The paper accumulates
    lr * gradient and applies sums; `optax.chain(optax.scale(lr * workers), sparcml(...),
    optax.scale(-1))` is that, for a constant lr.)

    Args:
        k: entries of each bucket that a worker sends, or `Stages` of it.
        bucket_size: consecutive elements in such a bucket (of the selection: the buckets of the
            layout are something else).
        algorithm: "recursive_double", "split_allgather" (both SSAR), "dsar_split_allgather",
            "all_gather", "ring", or the one of them that is fastest on `link` by the model.
        bits: 2, 4 or 8 quantise by QSGD; None does not.
        quantized: "sums", in the dense second half of "dsar_split_allgather", which saves bytes, or
            "entries", before they are summed, which saves none here.
        rounding: "stochastic", unbiased and its error forgotten, or "nearest", its error fed back.
        capacity_factor: room for entries for one owner, in multiples of an even share; what finds
            none stays in the residual and is counted. None makes room for all.
        union_factor: room for sums of one owner in "split_allgather"; None makes room for all.
        link: the network that "auto" reckons with; None for `jaxsparse.planner.Link()`.
        codec: of sparse messages.
        seed: of stochastic rounding.
        axis_name: see `error_feedback`, as for all that follow.
        dense_axis: the fast axis of a mesh with two levels.
        delay: 1 applies this step what was exchanged before its gradients.
        accumulator_dtype: of residual and momentum: float32 (None), or "bfloat16" for half the
            memory.
        momentum: momentum correction with masking where this worker sent.
        is_dense: which leaves travel uncompressed.
        layout_bucket_size: upper limit for the elements of a bucket of the layout.

    Raises:
        ValueError: settings out of range, or `bits` with an algorithm that has no dense half.
    """

    def make(k: int) -> SparCMLReducer:
        return SparCMLReducer(
            k=k,
            bucket_size=bucket_size,
            algorithm=algorithm,
            bits=bits,
            quantized=quantized,
            rounding=rounding,
            capacity_factor=capacity_factor,
            union_factor=union_factor,
            link=network.Link() if link is None else link,
            codec=codec,
            seed=seed,
        )

    return error_feedback(
        staged(make, k),
        axis_name=axis_name,
        dense_axis=dense_axis,
        delay=delay,
        accumulator_dtype=accumulator_dtype,
        momentum=momentum,
        is_dense=is_dense,
        bucket_size=layout_bucket_size,
    )
