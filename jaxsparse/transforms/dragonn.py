"""DRAGONN as an Optax transformation."""

from typing import Literal

import optax
from jaxtyping import Array, DTypeLike

from jaxsparse import codecs
from jaxsparse.feedback import error_feedback
from jaxsparse.layout import IsDense
from jaxsparse.reducers.dragonn import DragonnReducer, Extract
from jaxsparse.reducers.staged import staged
from jaxsparse.stages import Stages


def dragonn(
    density: float | Stages[float] = 0.001,
    *,
    extract: Extract = "hash",
    samples: int | None = None,
    codec: codecs.Codec = codecs.COO,
    seed: int = 0,
    axis_name: str | None = "data",
    dense_axis: str | None = None,
    delay: Literal[0, 1] | None = None,
    accumulator_dtype: DTypeLike | None = None,
    momentum: float | Array | None = None,
    is_dense: IsDense | None = None,
    bucket_size: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """DRAGONN (Wang et al., ICML 2022): large entries, extracted by hashing instead of counting.

    Each worker estimates from a sample the magnitude that m = density d elements reach, writes the
    elements that do into m random slots, and sends these; all decode the messages of all into one
    dense vector. Momentum correction and masking are those of Deep Gradient Compression.

    Per step 2 m (W - 1) words in COO, as `top_k`, which it resembles but for the cost of selecting:
    one pass, with no running count of what was selected. With "hash" about 63 % of the slots are
    filled. The bytes that a worker receives grow with the number of workers: for few of them (up
    to about sqrt(1 / density)), large tensors and slow links. Which tensors are worth it can be
    decided by what selecting and decoding take on the device at hand, against what the network
    would: `is_dense=jaxsparse.select_tensors(...).is_dense`.

    Args:
        density: m as a share of each bucket's elements, in (0, 1], or `Stages` of it, as
            `jaxsparse.warm_up` makes them.
        extract: "hash" as published, or "slot_max", which sends the largest of the elements that
            share a slot, fills nearly all slots, and needs no threshold.
        samples: elements from which "hash" estimates its threshold; None for the default of
            `jaxsparse.select.sampled_threshold`.
        codec: of the messages: `codecs.COO` is exact, `codecs.Packed()` halves the bytes and feeds
            the rounding back.
        seed: of the hashes.
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
        >>> tx = dragonn(0.001, axis_name=None)
        >>> grads = {"kernel": jnp.arange(2048.0).reshape(64, 32), "bias": jnp.ones(32)}
        >>> updates, state = tx.update(grads, tx.init(grads))
        >>> bool(1 <= (updates["kernel"] != 0).sum() <= 3)
        True
    """

    def make(density: float) -> DragonnReducer:
        return DragonnReducer(density, extract, samples, codec, seed)

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
