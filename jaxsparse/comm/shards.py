"""Leaves that are cut along one dimension over the workers, as FSDP (ZeRO-3) keeps parameters."""

import jax.numpy as jnp
from jaxtyping import Array, Key

from jaxsparse.comm import wire


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


class Plain:
    """Gathers parameters and averages gradients in their own dtype. `Gather` does in few bits."""

    def gathered(
        self, shard: Array, axis: int, axis_name: str | None, key: Key[Array, ""] | None = None
    ) -> Array:
        """The whole leaf, of which each worker has a shard along `axis`; equal on all workers."""
        del key
        return whole_of(wire.all_gather(shard, axis_name), axis)

    def averaged(
        self,
        gradient: Array,
        axis: int,
        axis_name: str | None,
        key: Key[Array, ""] | None = None,
        residual: None = None,
    ) -> tuple[Array, None]:
        """This worker's shard of the mean over workers of gradients of a whole leaf."""
        del key, residual
        workers = wire.axis_size(axis_name)
        total = wire.psum_scatter(rows_of(gradient, axis, workers), axis_name)
        return total / jnp.asarray(workers, total.dtype), None
