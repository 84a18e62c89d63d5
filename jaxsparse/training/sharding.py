"""The placement of a training state: spread over workers, or local to one worker."""

import functools
import math
import numbers
import operator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath, keystr

from jaxsparse.collectives import wire
from jaxsparse.training.marks import (
    AxisName,
    check_wrapped,
    fast_axis,
    is_marked,
    is_sharded,
    map_marked,
    specs,
    unpacked,
)

T = TypeVar("T")


def count_workers(mesh: Mesh | int, axis_name: AxisName) -> int:
    """The number of workers that `mesh` provides or simulates.

    Raises:
        ValueError: the mesh has no such axis or no devices, an axis is named twice, or `mesh` is a
            number that is not a positive int or stands for several axes.
    """
    axes = (axis_name,) if isinstance(axis_name, str) else axis_name
    if not isinstance(axes, tuple) or not axes or len(set(axes)) < len(axes):
        raise ValueError(
            f"axis_name={axis_name!r} must be the name of a mesh axis, or a tuple of distinct "
            'ones, the fast one last, as in ("hosts", "local")'
        )
    if isinstance(mesh, Mesh):
        for axis in axes:
            if axis not in mesh.axis_names:
                raise ValueError(
                    f"axis_name={axis!r} is not an axis of the mesh, whose axes are "
                    f"{mesh.axis_names}: pass one of them, or make the mesh with "
                    f"jax.make_mesh((workers,), ({axis!r},))"
                )
        workers: Any = math.prod(mesh.shape[axis] for axis in axes)
    elif len(axes) > 1:
        raise ValueError(
            f"mesh={mesh!r} cannot stand for the axes {axes}: only workers along one axis can be "
            "simulated. Pass a mesh, of emulated devices if there are no others "
            '(jax.config.update("jax_num_cpu_devices", 8))'
        )
    else:
        workers = mesh
    if isinstance(workers, bool) or not isinstance(workers, numbers.Integral):
        raise ValueError(
            f"mesh={mesh!r} must be a jax.sharding.Mesh of devices, as "
            f"jax.make_mesh((workers,), ({axis_name!r},)) makes it, or a number of workers to "
            "simulate, as an int"
        )
    if workers < 1:
        raise ValueError(f"mesh={mesh} gives no worker: pass a mesh, or a number of at least 1")
    return operator.index(workers)


def shard(tree: T, mesh: Mesh | int, axis_name: AxisName = "data") -> T:
    """Spreads one worker's `tree`, as `tx.init` made it, over all workers.

    Args:
        tree: an Optax state, a `TrainState`, an nnx state, or any other tree with `PerWorker`
            arrays. Their shape is (1, ...), or (W, ...) if the tree is already spread.
        mesh: the mesh, or the number of workers to simulate on one device.
        axis_name: the mesh axis of the workers, or both axes of a mesh with two levels, the fast
            one last.

    Returns:
        The same tree with per-worker arrays of shape (W, ...); each worker has a copy of the
        initial value. Given a mesh, all arrays are placed on it: per-worker arrays are split over
        `axis_name`, `Sharded` arrays over the fast axis, and all others are replicated. Arrays are
        copied, so donating them is safe.

    Raises:
        ValueError: the mesh has no such axis or no worker, a leaf is partitioned over devices
            without a mark, a `Sharded` leaf can't be cut evenly, or the tree is already spread over
            another number of workers.
    """
    axis_name = unpacked(axis_name)
    workers = count_workers(mesh, axis_name)
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = f"leaf{keystr(path)}"
        if is_marked(path):
            check_wrapped(name, leaf)
        elif is_sharded(path):
            check_even(name, jnp.shape(leaf), mesh, fast_axis(name, axis_name))
        else:
            _check_whole(name, leaf)

    def spread(x: Any, marked: bool) -> Any:
        x = _copy(x)
        if not marked or x.shape[0] == workers:
            return x
        if x.shape[0] != 1:
            raise ValueError(
                f"a PerWorker array of shape {x.shape} is already spread over {x.shape[0]} "
                f"workers and cannot be spread over {workers}: carry the state over to another "
                "number of workers with jaxsparse.reshard(state, mesh), or start from "
                "tx.init(params)"
            )
        return jnp.broadcast_to(x, (workers, *x.shape[1:]))

    spread_all = functools.partial(map_marked, spread)
    if not isinstance(mesh, Mesh):
        return spread_all(tree)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs(tree, axis_name))
    # Arrays may be committed to other devices. Bring them here, whole unless they are spread.
    whole = NamedSharding(mesh, PartitionSpec())

    def now(path: KeyPath, x: Any, target: NamedSharding) -> NamedSharding:
        is_spread = jnp.ndim(x) > 0 and x.shape[0] == workers
        return target if is_spread or is_sharded(path) else whole

    here = jax.tree_util.tree_map_with_path(now, tree, shardings)
    return jax.jit(spread_all, out_shardings=shardings)(jax.device_put(tree, here))


def _check_whole(name: str, x: Any) -> None:
    sharding = getattr(x, "sharding", None)
    if sharding is not None and not sharding.is_fully_replicated:
        raise ValueError(
            f"{name} is partitioned over devices by {sharding}, but shard would put all of it on "
            "each device: sharded parameters without the mark jaxsparse.Sharded (for meshes with "
            "two levels) are not supported. If each device can hold it, replicate it first with "
            "jax.device_put(x, NamedSharding(mesh, PartitionSpec()))"
        )


def check_even(name: str, shape: tuple[int, ...], mesh: Mesh | int, axis: str) -> None:
    """Raises ValueError unless an array of `shape` can be cut over `axis` of the mesh."""
    assert isinstance(mesh, Mesh)  # no number of workers has a fast axis
    if not shape or shape[0] % mesh.shape[axis]:
        raise ValueError(
            f"{name} is marked Sharded and has shape {shape}, whose first axis the "
            f"{mesh.shape[axis]} devices along {axis!r} cannot share equally: remove the mark, so "
            "that it is replicated, or put another axis first"
        )


def _copy(x: Any) -> jax.Array:
    if not jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
        return jnp.array(x)
    return jax.random.wrap_key_data(jnp.array(jax.random.key_data(x)), impl=jax.random.key_impl(x))


def local(tree: T, axis_name: AxisName | None = "data") -> T:
    """Types parameters as this worker's own, so that gradients with respect to them stay local.

    Under `jax.shard_map(check_vma=True)` JAX itself sums the gradient with respect to a
    *replicated* value over the workers, uncompressed. Differentiate with respect to
    `local(params)` instead: `jax.grad(loss)(jaxsparse.local(params), batch)`. Apply the updates to
    the original `params`. `local` moves no data. Under vmap and `check_vma=False` it does nothing.

    On a mesh with two levels, pass both axes, ("hosts", "local"). If parameters are sharded over
    the fast axis, pass the slow axis alone: JAX must sum over the fast one.
    """
    for axis in (axis_name,) if axis_name is None or isinstance(axis_name, str) else axis_name:
        tree = wire.varying(tree, axis)
    return tree
