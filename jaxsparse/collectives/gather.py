"""Gathers leaves that are cut over the workers, in few bits, with gradients in few bits.

Weights in 8 bits on the way out, and gradients in 4 bits by an all-to-all on the way back, are
ZeRO++'s (arXiv 2306.10209). A residual of gradients in 8 bits is LoCo's (arXiv 2407.04480). Here a
worker's own part of a gradient, which does not travel, is not rounded.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from jaxsparse.collectives.quantized_all_reduce import (
    quantized_all_gather,
    quantized_reduce_scatter,
)
from jaxsparse.comm import meshes, wire
from jaxsparse.comm.shards import HAS_WHOLE_LEAVES, Plain, Residual, rows_of, whole_of
from jaxsparse.quantize.formats import Format
from jaxsparse.quantize.quantizer import Quantizer, check_feedback


@dataclasses.dataclass(frozen=True)
class Gather(Plain):
    """How `value_and_grad` gathers parameters that are cut over the workers, and their gradients.

    Attributes:
        weights: `quantize.Format(...)`, its name, or `quantize.QSGD(...)`. None: in their dtype.
        gradients: the same of gradients.
        key: key of stochastic rounding (`QSGD`), the same on all workers and fresh at each step.
            Each worker and leaf has its own draw.
        residual: what rounding left of gradients, as `gather_residual` makes it. `value_and_grad`
            returns gradients and the new residual, as a pair. None: it is dropped.

    >>> Gather("int8", "int4").gradients
    Format(name='int4', group_size=256, scale='bfloat16')
    """

    weights: Quantizer | Any = None
    gradients: Quantizer | Any = None
    key: Key[Array, ""] | None = None
    residual: Any = None

    def __post_init__(self):
        for name in ("weights", "gradients"):
            given = getattr(self, name)
            spec = Format(given) if isinstance(given, str) else given  # type: ignore[arg-type]
            object.__setattr__(self, name, spec)
            if spec is not None and not isinstance(spec, Quantizer):
                raise ValueError(
                    f"{name}={given!r} is no quantizer: use {name}='int8', quantize.Format('int4') "
                    "or quantize.QSGD(bits=4)"
                )
            if spec is not None and spec.takes_key and self.key is None:
                raise ValueError(
                    f"{name}={spec} rounds stochastically, and has no key: give "
                    "key=jax.random.fold_in(jax.random.key(seed), step), the same on all workers, "
                    f"or round to nearest by {name}='int4'"
                )
        if self.key is not None and not isinstance(self.key, jax.Array):
            raise ValueError(
                f"key={self.key!r} is no key: give jax.random.fold_in(jax.random.key(seed), step)"
            )
        if self.residual is not None:
            if self.gradients is None:
                raise ValueError(
                    "residual= keeps what rounding leaves of gradients, and gradients=None rounds "
                    "nothing: give gradients='int4', or leave out the residual"
                )
            check_feedback(self.gradients, stochastic=self.gradients.takes_key)

    def gathered(self, shard: Array, axis: int, axis_name: str | None, key: Any = None) -> Array:
        if self.weights is None or not shard.size:
            return super().gathered(shard, axis, axis_name)
        key = jax.random.fold_in(key, 0) if self.weights.takes_key else None
        x = shard.reshape(-1).astype(jnp.float32)
        rows, _ = quantized_all_gather(x, self.weights, axis_name=axis_name, key=key)
        return whole_of(rows.reshape(-1, *shard.shape).astype(shard.dtype), axis)

    def averaged(
        self,
        gradient: Array,
        axis: int,
        axis_name: str | None,
        key: Any = None,
        residual: Any = None,
    ) -> tuple[Array, Any]:
        if self.gradients is None or not gradient.size:
            return super().averaged(gradient, axis, axis_name)[0], residual
        key = jax.random.fold_in(key, 1) if self.gradients.takes_key else None
        x, workers = gradient.astype(jnp.float32), wire.axis_size(axis_name)
        x = x if residual is None else x + residual.whole
        rows = rows_of(x, axis, workers)
        total, lost = quantized_reduce_scatter(
            rows.reshape(workers, -1), self.gradients, axis_name=axis_name, key=key
        )
        if residual is not None:
            residual = residual.updated(whole_of(lost.reshape(rows.shape), axis))
        return (total / workers).reshape(rows.shape[1:]).astype(gradient.dtype), residual


def gather(
    shard: Array,
    axis: int = 0,
    *,
    axis_name: str | None = "data",
    weights: Quantizer | str | None = None,
    gradients: Quantizer | str | None = None,
    key: Key[Array, ""] | None = None,
    residual: Residual | None = None,
) -> Array:
    """The whole of a leaf that is cut over the workers, and in the backward pass its mean gradient.

    For one worker's code, in `jax.shard_map` or `jax.vmap`. The derivative by `shard` is this
    worker's part of the *mean* of all workers' gradients, cut as `shard` is: no exchange and no
    `pmean` stands behind it. It communicates where it is called. In a layer of a `jax.lax.scan`,
    under `jax.checkpoint`, it gathers when the layer runs, and again in the backward pass. A leaf
    that is used twice is to be gathered once.

    Args:
        shard: this worker's part, of a float dtype.
        axis: the dimension along which the W workers cut the leaf equally. Not negative.
        axis_name: the axis of the workers.
        weights: see `Gather`. All workers get the same bits, also a shard's own worker.
        gradients: see `Gather`.
        key: see `Gather`. Fold in the number of the leaf and of the layer.
        residual: what rounding left of this worker's gradients, added to the next ones. Its
            "gradient" is the new residual, so use it in one `gather` alone.

    Returns:
        The whole leaf in the shard's dtype, with the same bits on all workers.

    Raises:
        ValueError: the shard is equal on all workers or no float, `axis` is not one of its, the
            residual has another shape, or settings are refused: see `Gather`.

    Example:
        >>> loss = lambda shard: jnp.sum(gather(shard) ** 2)
        >>> jax.vmap(jax.grad(loss), axis_name="data")(jnp.float32([[1, 2], [3, 4]])).tolist()
        [[2.0, 4.0], [6.0, 8.0]]
    """
    if HAS_WHOLE_LEAVES.get():
        raise ValueError(
            "jaxsparse.value_and_grad gives this loss whole leaves, so that it has nothing to "
            "gather: give gather=False there, or leave out jaxsparse.gather"
        )
    how = Gather(weights, gradients, key, residual)
    workers, shape = wire.axis_size(axis_name), list(jnp.shape(shard))
    if not jnp.issubdtype(jnp.result_type(shard), jnp.floating):
        raise ValueError(f"shard has dtype {shard.dtype}: give parameters, of a float dtype")
    if not 0 <= axis < len(shape):
        raise ValueError(
            f"axis={axis} is no dimension of a shard of shape {tuple(shape)}: give the one along "
            f"which it is cut, 0 to {len(shape) - 1}, and leave leaves whole that none can cut"
        )
    if wire.tracks_replication(axis_name) and not wire.is_varying(shard, str(axis_name)):
        raise ValueError(
            f"shard is equal on all workers of {axis_name!r}, so there is nothing to gather: give "
            f"jax.shard_map an in_spec that cuts it over {axis_name!r} along its axis {axis}"
        )
    shape[axis] *= workers
    if residual is not None and residual.values.shape != tuple(shape):
        raise ValueError(
            f"residual has shape {residual.values.shape}, and the whole leaf {tuple(shape)}: make "
            f"it by jaxsparse.collectives.Residual.zeros({tuple(shape)})"
        )
    return _gather((how.weights, how.gradients), axis, axis_name, shard, key, residual)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gather(
    formats: Any, axis: int, axis_name: str | None, shard: Array, key: Any, residual: Any
) -> Array:
    with jax.named_scope(meshes.SCOPE):
        whole = Gather(formats[0], formats[1], key).gathered(shard, axis, axis_name, key)
    return wire.varying(whole, axis_name)  # or JAX would sum its cotangents over workers itself


def _forward(
    formats: Any, axis: int, axis_name: str | None, shard: Array, key: Any, residual: Any
) -> tuple[Array, Any]:
    return _gather(formats, axis, axis_name, shard, key, residual), (key, residual)


def _backward(
    formats: Any, axis: int, axis_name: str | None, kept: Any, gradient: Array
) -> tuple[Array, None, Any]:
    key, residual = kept
    how = Gather(formats[0], formats[1], key)
    with jax.named_scope(meshes.SCOPE):
        mean, new = how.averaged(gradient, axis, axis_name, key, residual)
    return wire.varying(mean, axis_name), None, wire.varying(new, axis_name)


_gather.defvjp(_forward, _backward)
