"""Deep Gradient Compression (Lin et al., ICLR 2018)."""

import math
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from jaxsparse import codecs
from jaxsparse.collectives import wire
from jaxsparse.feedback import ErrorFeedbackState
from jaxsparse.feedback.options import LeafOptions, exchange_options
from jaxsparse.layout import narrow
from jaxsparse.magnitude import largest_magnitude
from jaxsparse.reducers.stages import Stages
from jaxsparse.select.selection import Selection
from jaxsparse.settings import static_float
from jaxsparse.systems.row import Case, System
from jaxsparse.systems.top_k import TopK, top_k


def sampled(
    density: float = 0.001,
    clip_norm: float | None = None,
    codec: codecs.Codec = codecs.COO,
    selection: Selection = "sampled",
) -> TopK:
    """The reducer of `dgc`, for the same arguments. `dgc` itself clips the gradients."""
    del clip_norm
    return TopK(density, codec=codec, selection=selection)


@exchange_options(momentum=0.9)
def dgc(
    density: float | Stages[float] = 0.001,
    *,
    clip_norm: float | None = None,
    codec: codecs.Codec = codecs.COO,
    selection: Selection = "sampled",
    **options: Unpack[LeafOptions],
) -> optax.GradientTransformationExtraArgs:
    """Deep Gradient Compression (Lin et al., ICLR 2018): a thousandth of the gradient is enough.

    Each worker estimates a threshold from a sample and sends the entries that reach it, k =
    density d at most. All workers gather and sum them: 2 (W - 1) k words a step in COO.

    `momentum` acts before the exchange (momentum correction, section 3.2), and is masked where this
    worker sent (3.3), with `nesterov=True`, too. Chain an optimizer without momentum behind it,
    such as `optax.sgd(lr)`. `clip_norm` clips gradients before they are accumulated (3.2).
    `density=jaxsparse.warm_up(0.001, steps=...)` lowers the density from 25 % (3.3). The paper does
    so over the first four of about 80 epochs.

    With Adam, chain `jaxsparse.per_worker(optax.scale_by_adam())` before it. Adam behind it has
    moments of sparse gradients, and trains worse (`jaxsparse.per_worker` says why).

    Args:
        density: k as a share of each bucket's elements, in (0, 1], or a warm-up.
        clip_norm: largest norm of the sum of the workers' gradients if these are orthogonal. Each
            worker's whole gradient, dense leaves included, is scaled to a norm of at most
            clip_norm / sqrt(W). The residual does not keep the clipped part. None: no clipping.
        codec: wire format. `codecs.COO` is exact; `codecs.Packed()` halves the bytes and keeps the
            rounding in the residual.
        selection: the way in which a worker finds its entries. "sampled" is the paper's, and
            `Sampled(samples=...)` sets the size of the sample. "fast", "exact" and "bisection" are
            those of `top_k`.
        **options: as for all transformations.

    Raises:
        ValueError: settings out of range.

    Example:
        >>> tx = dgc(0.001, axis_name=None, clip_norm=1.0)
        >>> grads = {"kernel": jnp.ones((64, 64)).at[3].set(5.0), "bias": jnp.ones(64)}
        >>> updates, state = jax.jit(tx.update)(grads, tx.init(grads))
        >>> jnp.count_nonzero(updates["kernel"], axis=1)[:5].tolist()
        [0, 0, 0, 5, 0]
    """
    feedback = top_k(density, codec=codec, selection=selection, **options)
    if clip_norm is None:
        return feedback
    axis_name = options.get("axis_name", "data")
    limit = static_float("clip_norm", clip_norm)
    if not 0 < limit < math.inf:
        raise ValueError(f"clip_norm={clip_norm} must be positive and finite; None doesn't clip")

    def update(
        updates: Any, state: ErrorFeedbackState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, ErrorFeedbackState]:
        if _all_local(updates, axis_name):  # or `feedback` raises an error
            updates = _clipped(updates, limit / math.sqrt(wire.axis_size(axis_name)))
        return feedback.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(feedback.init, update)


def _all_local(tree: Any, axis_name: str | None) -> bool:
    if axis_name is None or not wire.tracks_replication(axis_name):
        return True
    return all(wire.is_varying(x, axis_name) for x in jax.tree.leaves(tree) if x.size)


def _clipped(tree: Any, limit: float) -> Any:
    """Scales the tree to a norm of at most `limit`, unless its norm is not finite."""
    leaves = [x.astype(jnp.float32) for x in jax.tree.leaves(tree) if x.size]
    if not leaves:
        return tree
    # The norm is unit * length. As one number it may overflow, and its squares may underflow.
    largest = largest_magnitude(jnp.stack([largest_magnitude(x) for x in leaves]))
    # Clipped, because reciprocals of the largest floats would be subnormal, which CPUs flush to 0.
    unit = jnp.clip(largest, 2.0**-125, 2.0**125)
    to_unit = 1 / unit
    length = jnp.sqrt(jnp.stack([jnp.sum(jnp.square(x * to_unit)) for x in leaves]).sum())
    exceeds = (length > limit / unit) & jnp.isfinite(length)
    scale = limit / jnp.where(exceeds, length, 1)
    return jax.tree.map(
        lambda x: jnp.where(exceeds, narrow(x.astype(jnp.float32) * to_unit * scale, x.dtype), x),
        tree,
    )


DGC = System(
    dgc,
    sampled,
    summary="[DGC](https://arxiv.org/abs/1712.01887): TopkA by a sampled threshold, momentum "
    "corrected, gradients clipped",
    received="8 k (W-1)",
    cases={"": Case({"density": 0.03}, {"density": 1.0})},
)
