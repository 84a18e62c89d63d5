"""The placement of a training state: spread over workers, or local to one worker."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath, keystr, tree_leaves_with_path

from jaxsparse.arrays.layout import check_arrays
from jaxsparse.comm import wire
from jaxsparse.comm.marks import check_wrapped, is_marked, key_name
from jaxsparse.comm.meshes import kind_of, names_of
from jaxsparse.comm.static_leaves import held, released
from jaxsparse.comm.workers import Workers
from jaxsparse.processes.agreement import compare_texts
from jaxsparse.processes.digest import value_texts
from jaxsparse.processes.group import group_of

T = TypeVar("T")


def shard(tree: T, mesh: Mesh | int, axis_name: str = "data") -> T:
    """Spreads one worker's `tree`, as `tx.init` made it, over all workers.

    Args:
        tree: an Optax state, a `TrainState`, an nnx state, an Equinox module, or any other tree
            with `PerWorker` arrays. Their shape is (1, ...), or (W, ...) if the tree is already
            spread. Leaves of Equinox modules that are no arrays stay as they are.
        mesh: the mesh, or the number of workers to simulate on one device.
        axis_name: the mesh axis of the workers.

    Returns:
        The same tree with per-worker arrays of shape (W, ...); each worker has a copy of the
        initial value. Given a mesh, all arrays are placed on it: per-worker arrays are split over
        `axis_name`. Along other axes of the mesh, arrays keep their partition; without one they
        are replicated. Arrays of another memory ("pinned_host") stay in it. Arrays are copied, so
        donating them is safe.

    Raises:
        ValueError: the mesh has no such axis or no worker, a leaf is no array, or is partitioned
            over `axis_name` or over another mesh, or is traced on a mesh with other axes, or the
            tree is already spread over another number of workers.
        RuntimeError: several processes start from different values, as by another seed.
    """
    there = Workers.on(mesh, axis_name)
    workers = there.count
    tree = held(tree)
    check_arrays("leaf", tree)
    traced = [
        path
        for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]
        if isinstance(x, jax.core.Tracer)
    ]
    if traced and (inner := there.inner):
        raise ValueError(
            f"leaf{keystr(traced[0])} is traced, so its partition over the axes {inner} is "
            "not known: call shard outside of jax.jit, or give the transformation mesh= and "
            "specs=, with which init returns a state that is already spread"
        )
    if isinstance(mesh, Mesh) and not traced and (group := group_of(mesh)) is not None:
        named = [(f"leaf{keystr(path)}", x) for path, x in tree_leaves_with_path(tree)]
        compare_texts(group, "shard", (text for leaf in named for text in value_texts(*leaf)))

    may_be_owned = has_owners(tree)

    def spread(x: Any, marked: bool) -> Any:
        x = _copy(x)
        if not marked or x.shape[0] == workers:
            return x
        return jnp.broadcast_to(x, (workers, *x.shape[1:]))

    def current(path: KeyPath, x: Any) -> PartitionSpec:
        name, marked = f"leaf{keystr(path)}", is_marked(path)
        if marked:
            check_wrapped(name, x)
            if x.shape[0] not in (1, workers):
                raise ValueError(
                    f"{name} of shape {x.shape} is already spread over {x.shape[0]} workers and "
                    f"cannot be spread over {workers}: carry the state over to another number of "
                    "workers with jaxsparse.reshard(state, mesh), or start from tx.init(params)"
                )
        return spec_of(name, x, mesh, axis_name, marked, may_be_owned)

    treedef: Any
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    arrays, marks = [x for _, x in leaves], [is_marked(path) for path, _ in leaves]
    before = [current(path, x) for path, x in leaves]
    if not isinstance(mesh, Mesh):
        return released(treedef.unflatten(map(spread, arrays, marks)))
    after = [
        PartitionSpec(axis_name, *spec[1:]) if marked else spec
        for spec, marked in zip(before, marks)
    ]
    kinds = list(map(kind_of, arrays))
    found = dict[int, Any]()

    def place(group: list[int]) -> None:
        # Arrays may be committed to other devices. Bring them here, as they are partitioned now.
        here, there = ([NamedSharding(mesh, specs[i]) for i in group] for specs in (before, after))
        spread_all = lambda group_of: [spread(x, marks[i]) for i, x in zip(group, group_of)]
        # JAX moves no copies to both fewer devices and another memory at once.
        first = [NamedSharding(mesh, before[i], memory_kind=kinds[i]) for i in group]
        given = jax.device_put(jax.device_put([arrays[i] for i in group], first), here)
        found.update(zip(group, jax.jit(spread_all, out_shardings=there)(given)))

    place([i for i, kind in enumerate(kinds) if kind is None])
    for i, kind in enumerate(kinds):
        if kind is not None:  # one by one, because devices may have no room for all
            place([i])
            found[i] = jax.device_put(found[i], found[i].sharding.with_memory_kind(kind))
    return released(treedef.unflatten([found[i] for i in range(len(arrays))]))


def spec_of(
    name: str,
    x: Any,
    mesh: Mesh | int,
    axis_name: str,
    is_own: bool = False,
    may_be_owned: bool = False,
) -> PartitionSpec:
    """An array's partition on the mesh. An array that is whole on each device has an empty one.

    Args:
        name: name of the array, for errors.
        x: the array.
        mesh: the mesh, or a number of simulated workers.
        axis_name: the axis of the workers.
        is_own: whether the array's first axis is that of the workers.
        may_be_owned: whether it may lie over the workers, each of which owns a part of it.

    Raises:
        ValueError: the array is partitioned over another mesh, or over `axis_name` in another
            dimension than that of the workers.
    """
    sharding = getattr(x, "sharding", None)
    if sharding is None or sharding.is_fully_replicated:
        return PartitionSpec()
    spec = sharding.spec if isinstance(sharding, NamedSharding) else None
    if not isinstance(mesh, Mesh):
        raise ValueError(
            f"{name} is partitioned over devices by {sharding}, but simulated workers share one: "
            "make the state from parameters on one device"
        )
    if spec is None or dict(sharding.mesh.shape) != dict(mesh.shape):
        raise ValueError(
            f"{name} is partitioned over devices by {sharding}, and not on this mesh, {mesh}: put "
            "the parameters on the mesh of the workers, with "
            "jax.device_put(x, NamedSharding(mesh, spec)), before the state is made, or give "
            "jaxsparse.reshard like=tx.init(params)"
        )
    is_cut = any(axis_name in names_of(part) for part in (spec[1:] if is_own else spec))
    if is_cut and (is_own or not may_be_owned):
        raise ValueError(
            f"{name} is partitioned by {spec} over {axis_name!r}, the axis of the workers, but "
            "each worker needs all of it: shard it over other axes of the mesh, and replicate it "
            "over this one. (Moments lie over it in jaxsparse.zero1)"
        )
    return spec


def has_owners(tree: Any) -> bool:
    """Whether the tree holds a state of `zero1`, whose moments lie over the workers."""
    return any("owed" in map(key_name, path) for path, _ in tree_leaves_with_path(tree))


def _copy(x: Any) -> jax.Array:
    if not jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
        return jnp.array(x)
    return jax.random.wrap_key_data(jnp.array(jax.random.key_data(x)), impl=jax.random.key_impl(x))


def local(tree: T, axis_name: str | None = "data") -> T:
    """Types parameters as this worker's own, so that gradients with respect to them stay local.

    A `jax.shard_map` of your own needs it; `jaxsparse.value_and_grad` does not. With
    `check_vma=True` JAX itself sums the gradient with respect to a *replicated* value over the
    workers, uncompressed. Differentiate with respect to `local(params)` instead:
    `jax.grad(loss)(jaxsparse.local(params), batch)`. Apply the updates to the original `params`.
    `local` moves no data. Outside of such a `jax.shard_map` it does nothing.

    A loss that is averaged *inside* the differentiated function, as in
    `jax.lax.pmean(loss, axis_name)` or `psum(loss_sum) / psum(tokens)`, then has gradients W times
    too small, since JAX's transposed sum counts a replicated loss once. Average the loss behind
    `jax.value_and_grad`, or scale each worker's loss so that their mean is the whole loss, or give
    `check_vma=False`. There a loss may be averaged inside, too.

    Args:
        tree: parameters, arrays of any shapes and dtypes, equal on all workers.
        axis_name: name of the axis of workers. None: there is none.

    Returns:
        The same arrays. Their types say that they differ between workers.
    """
    return wire.varying(tree, axis_name)
