"""Runs one function on W workers in each of the ways that the library supports."""

import functools
import math
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


def some(values, usual):
    """Test parameters. The `usual` ones always run, all others with --slow."""
    values = list(values)
    assert all(value in values for value in usual), (values, usual)
    slow = lambda value: pytest.param(value, marks=pytest.mark.slow)
    return [value if value in usual else slow(value) for value in values]


def rows(usual, slow):
    """Test parameters that are several values each. The `slow` ones run with --slow."""
    return [*usual, *(pytest.param(*row, marks=pytest.mark.slow) for row in slow)]


@functools.cache
def mesh(sizes, kind=AxisType.Auto, names=("data", "fsdp", "tp")) -> Mesh:
    """A mesh of so many workers, or of several sizes, whose axes have the first of these names."""
    sizes = (sizes,) if isinstance(sizes, int) else sizes
    kinds, devices = (kind,) * len(sizes), jax.devices()[: math.prod(sizes)]
    return jax.make_mesh(sizes, names[: len(sizes)], axis_types=kinds, devices=devices)


class Finished(NamedTuple):
    """An exchange with residual and mask as whole vectors, and where they were given."""

    mean: Any
    residual: Any
    sent: Any
    state: Any
    info: Any
    indices: Any


def finished(reducer, x, state, axis_name="data"):
    reduced = reducer.pmean(x, state, axis_name)
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
    results = jax.tree.map(np.asarray, results)  # JAX would compile a program for each slice
    steps = jax.tree.leaves(results)[0].shape[1]
    return [jax.tree.map(lambda leaf, i=i: leaf[:, i], results) for i in range(steps)]
