"""Programs that compute as one of several workers, and send nothing."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from jaxsparse.comm import wire


@contextlib.contextmanager
def dry_run(workers: int) -> Iterator[None]:
    """Inside it, traced programs compute as the first of `workers` workers.

    This worker's own messages replace those that would arrive, as if all workers held the same
    data. So one device can time the computations of an exchange for any number of workers. The axis
    need not be bound. A program that was traced before is not traced anew: make a new function.
    """
    # Without the barrier XLA would optimise across the exchange, and remove work on either side.
    stand_in = jax.lax.optimization_barrier

    def psum(x: Any, axis_name: Any) -> Any:
        if axis_name is None or axis_name == ():
            return x
        axes = 1 if isinstance(axis_name, str) else len(axis_name)
        return stand_in(x) * jnp.asarray(workers**axes, x.dtype)

    def permute(x: Any, axis_name: Any, pairs: Any) -> Any:
        arrives = 0 in [destination for _, destination in pairs]
        return stand_in(x) if arrives else jnp.zeros_like(x)

    with mock.patch.multiple(
        wire,
        axis_size=lambda axis_name: 1 if axis_name is None else workers,
        axis_index=lambda axis_name: stand_in(jnp.int32(0)),
        _in_shard_map=lambda axis_name: False,
        replicated=lambda x, axis_name: x,
        psum=psum,
        pmax=lambda x, axis_name: stand_in(x),
        all_gather=lambda x, axis_name: stand_in(jnp.broadcast_to(x, (workers, *x.shape))),
        permute=permute,
        all_to_all=lambda x, axis_name: stand_in(jnp.broadcast_to(x[:1], x.shape)),
    ):
        yield
