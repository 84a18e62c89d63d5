"""Small trees on meshes with inner axes, for the tests and for processes of their own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import workers
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from training import stepped

import jaxsparse
from jaxsparse import shard

# Kernels are cut over both inner axes, over one, or over none; no axis cuts "odd".
SHAPES = {"both": (16, 24), "one": (8, 24), "none": (12, 8), "odd": (3, 7), "bias": (8,)}
SPECS = {"both": P("fsdp", "tp"), "one": P(None, "tp"), "none": P(), "odd": P(), "bias": P("tp")}
MESHES = ((2, 2, 2), (4, 1, 2), (2, 4), (1, 8), (8,))
NAMES = ("hosts", "fsdp", "tp")


def mesh(shape=(2, 2, 2), kind=AxisType.Auto):
    return workers.mesh(shape, kind, NAMES if len(shape) == 3 else ("hosts", "tp"))


def on(where, spec):
    """The part of a partition that the mesh has axes for."""
    return P(*(part if part in where.axis_names else None for part in spec))


def put(where, tree, *lead):
    return {
        name: jax.device_put(x, NamedSharding(where, P(*lead, *on(where, SPECS[name]))))
        for name, x in tree.items()
    }


def gradients(workers, seed=0):
    """Integers times W, [W, *shape]. Their means are exact."""
    rng = np.random.default_rng(seed)
    draw = lambda shape: np.round(rng.standard_t(2, (workers, *shape)) * 3).clip(-200, 200)
    return {name: (draw(s) * workers).astype(np.float32) for name, s in SHAPES.items()}


def is_bias(path, shape):
    return "bias" in path


@functools.cache
def stepper(reducer, where, way="rows", **settings):
    """An exchange of gradients with rows, the first state, and the parameters.

    Its way is by "rows", or one worker's code: "mapped", or "manual" over the workers' axis.
    """
    tx = jaxsparse.exchange(reducer, axis_name="hosts", is_dense=is_bias, **settings)

    params = put(where, {name: jnp.zeros(shape) for name, shape in SHAPES.items()})
    if way == "rows":
        return (
            jax.jit(lambda grads, state: tx.update(grads, state, params)),
            tx.init(params),
            params,
        )

    return (
        stepped(tx, where, "hosts", way == "manual"),
        shard(tx.init(params), where, "hosts"),
        params,
    )
