"""Runs one function on W workers in each of the ways that the library supports."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxsparse.comm import wire

MESH_SIZES = (1, 2, 3, 5, 8)  # numbers of workers that the emulated devices allow
WAYS = ("shard_map", "shard_map_unchecked", "vmap")


def some(values, usual, slow=None):
    """Test parameters. The `usual` ones always run, `slow` ones (None: all others) with --slow.

    The rest runs with --thorough.
    """
    values, marked = list(values), []
    assert all(value in values for value in (*usual, *(slow or ()))), (values, usual, slow)
    for value in values:
        mark = pytest.mark.slow if slow is None or value in slow else pytest.mark.thorough
        marked.append(value if value in usual else pytest.param(value, marks=mark))
    return marked


def few(values, usual):
    """Test parameters. Those that are not `usual` run only with --thorough."""
    return some(values, usual, slow=())


@functools.cache
def mesh(workers: int, axis_type: AxisType = AxisType.Auto) -> Mesh:
    return jax.make_mesh(
        (workers,), ("data",), axis_types=(axis_type,), devices=jax.devices()[:workers]
    )


class Finished(NamedTuple):
    """An exchange with residual and mask as whole vectors, and where they were given."""

    mean: Any
    residual: Any
    sent: Any
    state: Any
    info: Any
    indices: Any


def finished(reducer, x, state, axis_name="data"):
    reduced = reducer(x, state, axis_name=axis_name)
    kept = reduced.kept.whole(x)
    whole = reduced.mean, kept.residual, kept.sent, kept.state, reduced.info
    return Finished(*whole, reduced.kept.indices)


def on_workers(f, workers: int, way: str = "shard_map"):
    """Jits f(*args) over the leading axis of all arguments; stacks each worker's outputs."""
    if way == "vmap":
        return jax.jit(jax.vmap(f, axis_name="data", axis_size=workers))

    def body(*args):
        outputs = f(*jax.tree.map(lambda x: x[0], args))
        return jax.tree.map(lambda x: x[None], wire.varying(outputs, "data"))

    spec = PartitionSpec("data")
    checked = way == "shard_map"
    return jax.jit(
        jax.shard_map(body, mesh=mesh(workers), in_specs=spec, out_specs=spec, check_vma=checked)
    )


@functools.cache
def feedback_loop(reducer, workers, way="vmap"):
    """Jits a function of gradients[worker, step, d] that feeds residuals back.

    It returns what went into each exchange, and the outcome, stacked by worker and step.
    """

    def step(carried, gradient):
        state, residual = carried
        x = residual + gradient
        reduced = finished(reducer, x, state)
        return (reduced.state, reduced.residual), (x, reduced)

    def run(gradients):
        start = reducer.init(gradients.shape[1]), jnp.zeros_like(gradients[0])
        return jax.lax.scan(step, start, gradients)[1]

    return on_workers(run, workers, way)
