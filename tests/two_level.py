"""A mesh with a slow axis and a fast one, and error feedback on it."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse import PerWorker, data_parallel
from jaxsparse.feedback import error_feedback

AXES = ("hosts", "local")
H, L, STEPS = 2, 4, 3
W = H * L
P = jax.sharding.PartitionSpec


@functools.cache
def grid():
    return jax.make_mesh((H, L), AXES, axis_types=(jax.sharding.AxisType.Auto,) * 2)


def on_grid(step, **settings):
    return data_parallel(step, grid(), axis_name=AXES, **settings)


class Tree(NamedTuple):
    """Shapes of a gradient; "bias" goes dense."""

    shapes: dict
    bucket_size: int | None = None


TREES = {
    601: Tree({"kernel": (25, 24), "scale": (), "bias": (7,)}),
    1030: Tree({"kernel": (515, 2), "bias": (1,)}, 400),
    3: Tree({"kernel": (3,), "bias": ()}),
}


def gradients(tree, seed=0):
    """Integers of all workers and steps, whose means are integers."""
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(W * rng.integers(-50, 51, (W, STEPS, *shape)), jnp.float32)
        for name, shape in tree.shapes.items()
    }


def zeros(tree):
    return {name: jnp.zeros(shape) for name, shape in tree.shapes.items()}


def is_bias(path, shape):
    return "bias" in path


@functools.cache
def runner(reducer, size, momentum, check_vma=True, delay=0):
    """The first state, and what runs some steps from a state on; updates come from each device."""
    tree = TREES[size]
    tx = error_feedback(
        reducer,
        axis_name="hosts",
        dense_axis="local",
        momentum=momentum,
        delay=delay,
        is_dense=is_bias,
        bucket_size=tree.bucket_size,
    )

    def step(state, gradients):
        own = jax.tree.map(lambda g: g[0], gradients)
        state, updates = jax.lax.scan(lambda s, g: tx.update(g, s)[::-1], state, own)
        return PerWorker.wrap(updates), updates, state

    state = on_grid(tx.init, batch_argnums=())(zeros(tree))
    return state, on_grid(step, check_vma=check_vma)


def run(reducer, size=601, momentum=None, check_vma=True, grads=None):
    state, steps = runner(reducer, size, momentum, check_vma)
    grads = gradients(TREES[size]) if grads is None else grads
    each, updates, state = jax.device_get(steps(state, grads))
    for name, marked in each.items():
        np.testing.assert_array_equal(
            marked.value, np.broadcast_to(updates[name], marked.value.shape)
        )
    return grads, updates, state


def flat(tree, lead):
    """All compressed leaves end to end, behind `lead` axes."""
    names = sorted(name for name in tree if name != "bias")
    return np.concatenate(
        [np.asarray(tree[n], np.float64).reshape(*tree[n].shape[:lead], -1) for n in names], lead
    )


def whole(shards, size):
    """Rows of shards by host and device as one vector a host."""
    return np.asarray(shards, np.float64).reshape(H, -1)[:, :size]


def bucket_sizes(size):
    limit = TREES[size].bucket_size or size
    count = -(-size // limit)
    return [size // count + (i < size % count) for i in range(count)]


def check_conservation(grads, updates, state, size, exact=True):
    total = flat(grads, 2).sum((0, 1))
    kept = [whole(node.value, d).sum(0) for node, d in zip(state.residual, bucket_sizes(size))]
    delivered = W * flat(updates, 1).sum(0) + L * np.concatenate(kept)
    if exact:
        np.testing.assert_array_equal(total, delivered)
    else:
        np.testing.assert_allclose(total, delivered, atol=0.1)
    np.testing.assert_array_equal(np.asarray(grads["bias"]).mean(0), np.asarray(updates["bias"]))
