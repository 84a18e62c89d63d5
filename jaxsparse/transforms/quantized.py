"""Dense all-reduce in a few bits a value, as Optax transformations."""

from typing import Literal

import optax
from jaxtyping import Array, DTypeLike

from jaxsparse.feedback import error_feedback
from jaxsparse.layout import IsDense
from jaxsparse.quantize import QSGD, Sign
from jaxsparse.reducers.quantized import QuantizedReducer


def qsgd(
    bits: Literal[2, 4, 8] = 4,
    *,
    bucket_size: int = 1024,
    scale: Literal["max", "l2"] = "max",
    rounding: Literal["stochastic", "nearest"] = "stochastic",
    seed: int = 0,
    axis_name: str | None = "data",
    dense_axis: str | None = None,
    delay: Literal[0, 1] | None = None,
    accumulator_dtype: DTypeLike | None = None,
    momentum: float | Array | None = None,
    is_dense: IsDense | None = None,
    layout_bucket_size: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """QSGD (Alistarh et al., NeurIPS 2017): all values at each step, in 2, 4 or 8 bits.

    Per step a worker receives 2 (W - 1)/W (bits / 32 + 1 / bucket_size) d words: with 4 bits an
    eighth of a dense all-reduce's. Values are quantised on the way to the owner of their range, and
    their sum on the way back. (Published: an all-gather, (W - 1) times the packed vector.)

    Args:
        bits: per value on the wire.
        bucket_size: consecutive values that share a scale (the buckets of the layout are something
            else).
        scale: "max", or QSGD's own "l2", which has larger errors: see `quantize.QSGD`.
        rounding: "stochastic", unbiased and its error forgotten, as published, or "nearest", its
            error fed back.
        seed: of stochastic rounding.
        axis_name: see `error_feedback`, as for all that follow.
        dense_axis: the fast axis of a mesh with two levels.
        delay: 1 applies this step what was exchanged before its gradients.
        accumulator_dtype: of residual and momentum: float32 (None), or "bfloat16" for half the
            memory.
        momentum: before quantising, without masking: with "stochastic" what momentum behind the
            transformation is, but smoother input to quantise.
        is_dense: which leaves travel uncompressed.
        layout_bucket_size: upper limit for the elements of a bucket of the layout.

    Raises:
        ValueError: settings out of range, or rounding to nearest under "l2" with so few bits for
            so large a bucket that the residual could grow without bound.

    Example:
        >>> import jax.numpy as jnp
        >>> tx = qsgd(8, axis_name=None)  # one worker sends nothing, and nothing is rounded
        >>> grads = {"kernel": jnp.arange(2048.0).reshape(64, 32), "bias": jnp.ones(32)}
        >>> updates, state = tx.update(grads, tx.init(grads))
        >>> updates["kernel"][-1, -3:].tolist()
        [2045.0, 2046.0, 2047.0]
    """
    return error_feedback(
        QuantizedReducer(QSGD(bits, bucket_size, scale), rounding, seed),
        axis_name=axis_name,
        dense_axis=dense_axis,
        delay=delay,
        accumulator_dtype=accumulator_dtype,
        momentum=momentum,
        is_dense=is_dense,
        bucket_size=layout_bucket_size,
    )


def sign_sgd(
    *,
    bucket_size: int = 1024,
    axis_name: str | None = "data",
    dense_axis: str | None = None,
    delay: Literal[0, 1] | None = None,
    accumulator_dtype: DTypeLike | None = None,
    momentum: float | Array | None = None,
    is_dense: IsDense | None = None,
    layout_bucket_size: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """EF-signSGD (Karimireddy et al., ICML 2019): a bit a value, and error feedback.

    Each value becomes plus or minus the mean magnitude of its bucket, and so does each sum on its
    way back, as in dist-EF-blockSGD (Zheng et al., NeurIPS 2019). Per step a worker receives
    2 (W - 1)/W (1 / 32 + 1 / bucket_size) d words: a 31st of a dense all-reduce's.

    Args:
        bucket_size: consecutive values that share a scale (the buckets of the layout are something
            else).
        axis_name: see `error_feedback`, as for all that follow.
        dense_axis: the fast axis of a mesh with two levels.
        delay: 1 applies this step what was exchanged before its gradients.
        accumulator_dtype: of residual and momentum: float32 (None), or "bfloat16" for half the
            memory.
        momentum: momentum correction without masking.
        is_dense: which leaves travel uncompressed.
        layout_bucket_size: upper limit for the elements of a bucket of the layout.

    Raises:
        ValueError: settings out of range.
    """
    return error_feedback(
        QuantizedReducer(Sign(bucket_size), "nearest"),
        axis_name=axis_name,
        dense_axis=dense_axis,
        delay=delay,
        accumulator_dtype=accumulator_dtype,
        momentum=momentum,
        is_dense=is_dense,
        bucket_size=layout_bucket_size,
    )
