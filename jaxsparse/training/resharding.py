"""Carries a training state over to another number of workers, or another mesh."""

import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath, keystr, tree_flatten_with_path

from jaxsparse.comm.marks import check_wrapped, is_marked
from jaxsparse.comm.meshes import kind_of, names_of
from jaxsparse.comm.shards import Residual
from jaxsparse.comm.static_leaves import held, released
from jaxsparse.comm.workers import Workers
from jaxsparse.training.sharding import has_owners, shard, spec_of

T = TypeVar("T")


def reshard(tree: T, mesh: Mesh | int, axis_name: str = "data", *, like: T | None = None) -> T:
    """Carries the state of W workers over to W' workers, and keeps the mean of the residuals.

    The update of a step is a mean over workers, so residuals v_w still owe (1/W) sum_w v_w to the
    updates. The new residuals are v' = A v, where A[j, i] is W' times the overlap of
    [j/W', (j+1)/W') and [i/W, (i+1)/W). Columns of A sum to W'/W, hence

        (1/W') sum_j v'_j == (1/W) sum_w v_w

    and rows sum to 1, so the new residuals are averages of old ones and as large. Twice as many
    workers get copies; half as many get means of two. All `PerWorker` arrays change this way:
    residuals, momenta, delayed gradients. Replicated arrays, such as parameters, optimizer states
    and reducers' counters, stay as they are. Reducers that adapt their messages adapt them to the
    new number of workers in the next steps.

    Averages are taken in float64 and rounded to nearest in each array's dtype. This keeps means
    over workers to about half a unit in the last place of the largest row, and to the bit if W' is
    a multiple of W.

    The other axes of a mesh may change, too. Residuals and momenta have their leaves' shapes, so
    that only their partition changes. If a worker has another number of devices then, arrays that a
    reducer keeps for each device's shards start again. Counters, which are equal on all devices, go
    on.

    Args:
        tree: an Optax state, a `TrainState`, an nnx state, a restored checkpoint, or any other tree
            with `PerWorker` arrays of shape (W, ...). They are NumPy or JAX arrays that this
            process can read whole.
        mesh: the mesh of the W' workers, or W' to simulate them on one device.
        axis_name: the mesh axis of the workers.
        like: the same tree as it starts on this mesh, made from parameters on it: `tx.init(params)`
            for an optimizer's state. The result is placed as this tree is, and has its structure.
            Leaves are matched by name, so `tree` may have dicts in the place of tuples, as a
            checkpoint that Orbax restores without a target. None: arrays keep their partition over
            the other axes. So on a mesh with such axes it is needed if these change, or for arrays
            that have no partition, because they are in host memory or on one device.

    Returns:
        The same tree for W' workers, placed as by `jaxsparse.shard`. Each of several processes
        computes and holds only the rows of its own devices.

    Raises:
        ValueError: arrays hold different numbers of workers; or they have no mean, because they are
            keys, integers or flags that differ between workers; or an array is spread over other
            processes, too; or `like` is another tree, or is needed; or see `jaxsparse.shard`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxsparse.comm.marks import PerWorker
        >>> state = {"residual": PerWorker(jnp.float32([[0, 3], [3, 3], [6, 0]]))}
        >>> reshard(state, 2)["residual"].value.tolist()
        [[1.0, 3.0], [5.0, 1.0]]
    """
    there = Workers.on(mesh, axis_name)
    workers = there.count
    tree, like = held(tree), held(like)
    leaves: list[tuple[KeyPath, Any]]
    treedef: Any
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    targets: list[Any] = [leaf for _, leaf in leaves]
    if like is not None:
        _check_systems(tree, like)
        leaves, targets, treedef = _matched(leaves, like)
    for path, leaf in leaves:
        if is_marked(path):
            _check(f"leaf{keystr(path)}", leaf, workers)
    _check_equal_counts({f"leaf{keystr(p)}": x.shape[0] for p, x in leaves if is_marked(p)})
    for node in jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, Residual)):
        if isinstance(node, Residual) and node.has_scale and node.rows != workers:
            raise ValueError(
                f"a residual of gradients has values of {node.dtype}, whose scales differ between "
                "workers, so that they have no mean: make it anew by jaxsparse.gather_residual("
                "params, specs, dtype), or keep it in bfloat16"
            )
    is_cut = bool(there.inner)
    may_be_owned = has_owners(like)

    def carry(path: KeyPath, x: Any, target: Any) -> jax.Array:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = carry(path, jax.random.key_data(x), jax.random.key_data(target))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        name = f"leaf{keystr(path)}"
        if x.shape[1:] != target.shape[1:]:
            x = _of_devices(path, x, target)
        rows = functools.partial(_average, np.asarray(x), workers)
        if not isinstance(mesh, Mesh):
            there = target.sharding if kind_of(target) else None
            return jnp.asarray(rows(range(workers)), device=there)
        if like is not None:
            parts = spec_of(name, target, mesh, axis_name, True)[1:]
        else:
            parts = _kept(name, x, mesh, True)[1:] if is_cut else ()

        def of_device(index: Any) -> np.ndarray:
            return rows(range(*index[0].indices(workers)))[:, *index[1:]]

        spec = PartitionSpec(axis_name, *parts)
        sharding = NamedSharding(mesh, spec, memory_kind=kind_of(target))
        return jax.make_array_from_callback((workers, *x.shape[1:]), sharding, of_device)

    def others(path: KeyPath, x: Any, target: Any) -> Any:
        name = f"leaf{keystr(path)}"
        if is_marked(path):
            return None
        if like is None:
            if is_cut and not isinstance(x, jax.Array):
                _kept(name, x, mesh, False)
            return x
        if jnp.shape(x) != jnp.shape(target):
            x = _of_devices(path, x, target)
        if not isinstance(mesh, Mesh) or jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
            return x
        spec = spec_of(name, target, mesh, axis_name, may_be_owned=may_be_owned)
        return jax.device_put(x, NamedSharding(mesh, spec, memory_kind=kind_of(target)))

    each = [(path, x, target) for (path, x), target in zip(leaves, targets)]
    spread = shard(treedef.unflatten([others(*one) for one in each]), mesh, axis_name)
    placed = treedef.flatten_up_to(held(spread))
    carried = [
        carry(path, x, target) if is_marked(path) else other
        for (path, x, target), other in zip(each, placed)
    ]
    return released(treedef.unflatten(carried))


def _matched(
    leaves: list[tuple[KeyPath, Any]], like: Any
) -> tuple[list[tuple[KeyPath, Any]], list[Any], Any]:
    """Both trees' leaves, matched by name and in the order of `like`, and its structure.

    Raises:
        ValueError: it has other leaves than the tree.
    """
    targets, treedef = jax.tree_util.tree_flatten_with_path(like)
    # Checkpoints restored by name have dicts where a state has tuples, whose fields have an order.
    names = lambda path: tuple(keystr((key,), simple=True) for key in path)
    before, after = (
        {names(path): (path, leaf) for path, leaf in part} for part in (leaves, targets)
    )
    if before.keys() != after.keys():
        missing = [".".join(name) for name in before if name not in after]
        new = [".".join(name) for name in after if name not in before]
        raise ValueError(
            f"like is another tree: it lacks the leaves {missing} and has {new} besides. Make it "
            "with the same transformation. (A leaf that the new mesh can't cut over its other axes "
            "goes uncompressed there, and what its residual owes would be lost)"
        )
    return [before[name] for name in after], [leaf for _, leaf in after.values()], treedef


def _check_systems(tree: Any, like: Any) -> None:
    """Raises ValueError if a state was made for another reducer. Many have no arrays of their own.

    A checkpoint may lack what has no array.
    """

    def systems(tree: Any) -> set[str]:
        is_empty = lambda node: isinstance(node, dict | tuple) and not node
        paths = [path for path, _ in tree_flatten_with_path(tree, is_leaf=is_empty)[0]]
        names = [[keystr((key,), simple=True) for key in path] for path in paths]
        below = [name[name.index("reducers") + 1] for name in names if "reducers" in name[:-1]]
        return {name.partition("_")[2] for name in below}

    before, after = systems(tree), systems(like)
    if others := sorted(before - after):
        raise ValueError(
            f"the state was made for other settings: it is of {', '.join(others)}, and like is of "
            f"{', '.join(sorted(after))}. What waits for one reducer's exchange is nothing for "
            "another: make like with the same transformation"
        )


def _of_devices(path: KeyPath, x: Any, target: Any) -> Any:
    """A reducer's array with a row for each of a worker's devices, for another number of devices.

    Counters, which are equal on all devices, go on. All else starts as in `target`.
    """
    if "reducers" not in keystr(path, simple=True, separator=" ").split():
        raise ValueError(
            f"leaf{keystr(path)} has shape {jnp.shape(x)}, and that of like {jnp.shape(target)}: "
            "only the number of workers, and what reducers keep for each device, may differ"
        )
    x, target = np.asarray(x), np.asarray(target)
    axis = 1 if is_marked(path) else 0  # the axis of devices, which a worker of one device lacks
    rows = np.expand_dims(x, axis) if x.ndim < target.ndim else x
    first = rows.take([0], axis)
    if (rows == first).all():
        is_one = x.ndim > target.ndim
        kept = first.squeeze(axis) if is_one else first.repeat(target.shape[axis], axis)
        if kept.shape[axis:] == target.shape[axis:]:
            return kept
    # All workers of the target start alike, however many they are.
    return np.broadcast_to(target[:1], (len(x), *target.shape[1:])) if axis else target


def _average(x: np.ndarray, workers: int, wanted: range) -> np.ndarray:
    """Rows `wanted` of A x (see `reshard`)."""
    result = np.empty((len(wanted), *x.shape[1:]), x.dtype)
    for row, j in enumerate(wanted):
        result[row] = _average_row(x, workers, j)
    return result


def _average_row(x: np.ndarray, workers: int, j: int) -> np.ndarray:
    """Row j of A x: the mean of x's rows, weighed by how much of new worker j they are."""
    # In units of 1 / (len(x) * workers), row i is [i * workers, (i + 1) * workers).
    start, stop = j * len(x), (j + 1) * len(x)
    first, last = start // workers, (stop - 1) // workers
    if first == last or not jnp.issubdtype(x.dtype, jnp.inexact):
        return x[first]
    wide = np.complex128 if jnp.issubdtype(x.dtype, jnp.complexfloating) else np.float64
    total = np.zeros(x.shape[1:], wide)
    for i in range(first, last + 1):
        overlap = min(stop, (i + 1) * workers) - max(start, i * workers)
        total += overlap * x[i].astype(wide)
    return total / len(x)


def _check(name: str, x: Any, workers: int) -> None:
    check_wrapped(name, x)
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        raise ValueError(
            f"{name} is spread over other processes, too: restore the checkpoint to host memory "
            "(NumPy arrays) in each process, and reshard these arrays"
        )
    if x.shape[0] == workers:
        return
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        rows = np.asarray(jax.random.key_data(x))
        if (rows != rows[:1]).any():
            raise ValueError(
                f"{name} holds keys that differ between workers, which have no mean: keep one key "
                "for all workers, and fold in the worker's number where you use it, as in "
                "jax.random.fold_in(key, jax.lax.axis_index(axis_name))"
            )
        return
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return
    rows = np.asarray(x)
    if (rows != rows[:1]).any():
        raise ValueError(
            f"{name} is {x.dtype} and differs between workers, so there is no mean to carry over: "
            "take it out of the tree and make it anew for the new workers"
        )


def _kept(name: str, x: Any, mesh: Any, is_own: bool) -> PartitionSpec:
    """The partition of an array, to be kept on a mesh with other axes than that of the workers.

    Raises:
        ValueError: it has none, or one of other axes.
    """
    sharding = getattr(x, "sharding", None)
    if isinstance(sharding, NamedSharding):
        names = {n for part in sharding.spec[1:] for n in names_of(part)}
        if all(mesh.shape.get(n) == sharding.mesh.shape[n] for n in names):
            return sharding.spec
        problem = f"is cut by {sharding.spec} on {dict(sharding.mesh.shape)}"
    elif jnp.ndim(x) == is_own:
        return PartitionSpec()
    else:
        problem = "is in host memory" if sharding is None else f"lies on {sharding}"
    raise ValueError(
        f"{name} {problem}, which does not say how to cut it on this mesh, {dict(mesh.shape)}, and "
        "each device would hold all of a worker's: give like=, the same tree as it starts on this "
        "mesh, made from parameters on it, such as tx.init(params)"
    )


def _check_equal_counts(counts: dict[str, int]) -> None:
    if len(set(counts.values())) > 1:
        raise ValueError(
            f"the tree holds PerWorker arrays of different numbers of workers, {counts}: reshard "
            "states of one training run, all of them together"
        )
