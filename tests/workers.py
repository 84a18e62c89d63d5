"""Runs one function on W workers in each of the ways that the library supports."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxsparse import PerWorker
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


def rows(usual, slow):
    """Test parameters that are several values each. The `slow` ones run with --slow."""
    return [*usual, *(pytest.param(*row, marks=pytest.mark.slow) for row in slow)]


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


def feed_back(reducer, gradients, way="vmap"):
    """What goes into each exchange of gradients[step, d] and residuals, and its outcome."""

    def step(carried, gradient):
        state, residual = carried
        x = residual + gradient
        reduced = finished(reducer, x, state)
        if way == "shard_map":
            for leaf in jax.tree.leaves((reduced.mean, reduced.info)):
                assert not wire.is_varying(leaf, "data"), "must be typed replicated"
        return (reduced.state, reduced.residual), (x, reduced)

    is_own = lambda leaf: isinstance(leaf, PerWorker)
    start = reducer.init(gradients.shape[1])
    start = jax.tree.map(
        lambda leaf: wire.varying(leaf, "data") if is_own(leaf) else leaf, start, is_leaf=is_own
    )
    return jax.lax.scan(step, (start, jnp.zeros_like(gradients[0])), gradients)[1]


@functools.cache
def feedback_loop(reducer, workers, way="vmap"):
    """Jits `feed_back` of gradients[worker, step, d]. It stacks by worker and step."""
    return on_workers(lambda gradients: feed_back(reducer, gradients, way), workers, way)


def by_step(results):
    """The results of `feedback_loop`, step by step."""
    steps = jax.tree.leaves(results)[0].shape[1]
    return [jax.tree.map(lambda leaf, i=i: np.asarray(leaf[:, i]), results) for i in range(steps)]
