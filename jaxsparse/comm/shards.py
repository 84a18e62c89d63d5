"""Leaves that are cut along one dimension over the workers, as FSDP (ZeRO-3) keeps parameters."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float

from jaxsparse.comm import wire

# Whether a loss is traced whose leaves are whole, so that it has nothing to gather.
HAS_WHOLE_LEAVES: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "jaxsparse_whole_leaves", default=False
)


@contextlib.contextmanager
def whole_leaves(are_whole: bool) -> Iterator[None]:
    """A context in which a loss is traced whose leaves are whole, or not."""
    token = HAS_WHOLE_LEAVES.set(are_whole)
    try:
        yield
    finally:
        HAS_WHOLE_LEAVES.reset(token)


def rows_of(whole: Array, axis: int, workers: int) -> Array:
    """Each worker's shard: (..., W n, ...) to (W, ..., n, ...)."""
    shape = whole.shape
    cut = whole.reshape(*shape[:axis], workers, shape[axis] // workers, *shape[axis + 1 :])
    return jnp.moveaxis(cut, axis, 0)


def whole_of(rows: Array, axis: int) -> Array:
    """The inverse of `rows_of`."""
    workers, *shape = rows.shape
    shape[axis] *= workers
    return jnp.moveaxis(rows, 0, axis).reshape(shape)


class Residual(NamedTuple):
    """What rounding left of a worker's gradients of a whole leaf: values times a scale.

    Dtypes with a narrower range than float32's have the largest magnitude at the end of theirs.
    """

    values: Any  # Float[Array, "*shape"]; `value_and_grad` has all workers' in a PerWorker
    scale: Any  # float32, of one worker

    @classmethod
    def zeros(cls, shape: tuple[int, ...], dtype: DTypeLike = jnp.bfloat16) -> Self:
        """An empty residual of one worker, in 8, 16 or 32 bits a value, for a whole leaf.

        Raises:
            ValueError: the dtype is no float.
        """
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(
                f"dtype={dtype!r} is no float: give 'bfloat16', or 'float8_e4m3fn' for 8 bits"
            )
        return cls(jnp.zeros(shape, dtype), jnp.float32(1))

    @property
    def dtype(self) -> Any:
        return jax.tree.leaves(self.values)[0].dtype

    @property
    def rows(self) -> int:
        """The number of workers, of all workers' residuals."""
        return jax.tree.leaves(self.values)[0].shape[0]

    @property
    def has_scale(self) -> bool:
        """Whether the dtype's range is narrower than float32's."""
        return jnp.finfo(self.dtype).maxexp < jnp.finfo(jnp.float32).maxexp

    @property
    def whole(self) -> Float[Array, "*shape"]:
        return self.values.astype(jnp.float32) * self.scale

    def updated(self, x: Float[Array, "*shape"]) -> Self:
        """The residual that holds `x`. A value that is not finite would stay for ever."""
        x = jnp.where(jnp.isfinite(x), x, self.whole)
        scale = self.scale
        if self.has_scale:
            top = jnp.max(jnp.abs(x), initial=0) / float(jnp.finfo(self.dtype).max)
            scale = jnp.maximum(top, jnp.finfo(jnp.float32).tiny)
        return type(self)((x / scale).astype(self.values.dtype), scale)


class Plain:
    """Gathers parameters and averages gradients in their own dtype. `Gather` does in few bits."""

    key: Any = None
    residual: Any = None

    def gathered(self, shard: Array, axis: int, axis_name: str | None, key: Any = None) -> Array:
        """The whole leaf, of which each worker has a shard along `axis`; equal on all workers."""
        del key
        return whole_of(wire.all_gather(shard, axis_name), axis)

    def averaged(
        self,
        gradient: Array,
        axis: int,
        axis_name: str | None,
        key: Any = None,
        residual: Any = None,
    ) -> tuple[Array, Any]:
        """This worker's shard of the mean over workers of gradients, and the new residual."""
        del key
        workers = wire.axis_size(axis_name)
        count = jnp.asarray(workers, gradient.dtype)
        is_short = gradient.dtype == jnp.float16  # whose range a sum may leave
        rows = rows_of(gradient / count if is_short else gradient, axis, workers)
        total = wire.psum_scatter(rows, axis_name)
        return total if is_short else total / count, residual
