"""Carries a training state over to another number of workers."""

import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath, keystr, tree_map_with_path

from jaxsparse.training.marks import (
    AxisName,
    check_wrapped,
    is_marked,
    shards_of,
    unpacked,
)
from jaxsparse.training.sharding import count_workers, shard

T = TypeVar("T")


def reshard(tree: T, mesh: Mesh | int, axis_name: AxisName = "data") -> T:
    """Carries the state of W workers over to W' workers, and keeps the mean of the residuals.

    The update of a step is a mean over workers, so residuals v_w still owe (1/W) sum_w v_w to the
    updates. The new residuals are v' = A v, where A[j, i] is W' times the overlap of
    [j/W', (j+1)/W') and [i/W, (i+1)/W). Columns of A sum to W'/W, hence

        (1/W') sum_j v'_j == (1/W) sum_w v_w

    and rows sum to 1, so the new residuals are averages of old ones and as large. Twice as many
    workers get copies; half as many get means of two. All `PerWorker` arrays change this way:
    residuals, momenta, delayed gradients. Replicated arrays, such as parameters, optimizer states
    and reducers' counters, stay as they are. Reducers adapt again to the new number of workers.

    Averages are taken in float64 and rounded to nearest in each array's dtype. This keeps means
    over workers to about half a unit in the last place of the largest row, and to the bit if W' is
    a multiple of W.

    On a mesh with two levels, only the number of hosts can change; the size of the fast axis must
    stay the same. Each shard is averaged over hosts, at its own position along the fast axis.

    Args:
        tree: an Optax state, a `TrainState`, an nnx state, a restored checkpoint, or any other tree
            with `PerWorker` arrays of shape (W, ...). They are NumPy or JAX arrays that this
            process can read whole.
        mesh: the mesh of the W' workers, or W' to simulate them on one device.
        axis_name: the mesh axis of the workers, or both axes of a mesh with two levels, the fast
            one last.

    Returns:
        The same tree for W' workers, placed as by `jaxsparse.shard`. Each of several processes
        computes and holds only the rows of its own devices.

    Raises:
        ValueError: see `jaxsparse.shard`. Or arrays hold different numbers of workers, a number
            that the fast axis does not divide, or another number of shards than the fast axis has.
            Or an array has no mean: it holds keys, or integers or flags that differ between
            workers. Or an array is spread over other processes, too.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxsparse.training.marks import PerWorker
        >>> state = {"residual": PerWorker(jnp.float32([[0, 3], [3, 3], [6, 0]]))}
        >>> reshard(state, 2)["residual"].value.tolist()
        [[1.0, 3.0], [5.0, 1.0]]
    """
    axis_name = unpacked(axis_name)
    workers = count_workers(mesh, axis_name)
    places = 1  # along the fast axis
    if not isinstance(axis_name, str):
        assert isinstance(mesh, Mesh)  # no number of workers has several axes
        places = mesh.shape[axis_name[-1]]
    leaves: list[tuple[KeyPath, Any]]
    treedef: Any
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    for path, leaf in leaves:
        if is_marked(path):
            _check(f"leaf{keystr(path)}", leaf, workers, places, shards_of(path))
    _check_equal_counts({f"leaf{keystr(p)}": x.shape[0] for p, x in leaves if is_marked(p)})

    others = tree_map_with_path(lambda path, x: None if is_marked(path) else x, tree)
    placed = treedef.flatten_up_to(shard(others, mesh, axis_name))

    def carry(x: Any) -> jax.Array:
        rows = functools.partial(_average, np.asarray(x), workers, places)
        if not isinstance(mesh, Mesh):
            return jnp.asarray(rows(range(workers)))

        def of_device(index: Any) -> np.ndarray:
            return rows(range(*index[0].indices(workers)))

        sharding = NamedSharding(mesh, PartitionSpec(axis_name))
        return jax.make_array_from_callback((workers, *x.shape[1:]), sharding, of_device)

    return treedef.unflatten(
        carry(leaf) if is_marked(path) else other for (path, leaf), other in zip(leaves, placed)
    )


def _average(x: np.ndarray, workers: int, places: int, wanted: range) -> np.ndarray:
    """Rows `wanted` of A x (see `reshard`), for each place along the fast axis by itself."""
    before, after = len(x) // places, workers // places
    result = np.empty((len(wanted), *x.shape[1:]), x.dtype)
    for row, worker in enumerate(wanted):
        j, place = divmod(worker, places)
        # In units of 1 / (before * after): worker i has [i * after, (i + 1) * after).
        start, stop = j * before, (j + 1) * before
        sources = range(start // after, -(-stop // after))
        if len(sources) == 1 or not jnp.issubdtype(x.dtype, jnp.inexact):
            result[row] = x[sources[0] * places + place]
            continue
        wide = np.complex128 if jnp.issubdtype(x.dtype, jnp.complexfloating) else np.float64
        total = np.zeros(x.shape[1:], wide)
        for i in sources:
            overlap = min(stop, (i + 1) * after) - max(start, i * after)
            total += overlap * x[i * places + place].astype(wide)
        result[row] = total / before
    return result


def _check(name: str, x: Any, workers: int, places: int, shards: int | None) -> None:
    check_wrapped(name, x)
    if shards is not None and shards != places:
        raise ValueError(
            f"{name} is of {shards} shards along the fast axis of a mesh with two levels, but here "
            f"there are {places}. Only the number of hosts can change: pass a mesh with {shards} "
            "devices along its fast axis, and both axes, as in reshard(state, mesh, "
            '("hosts", "local"))'
        )
    if x.shape[0] % places:
        raise ValueError(
            f"{name} has shape {x.shape}, for {x.shape[0]} workers, which is no multiple of the "
            f"{places} devices along the fast axis: only the number of hosts can change"
        )
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        raise ValueError(
            f"{name} is spread over other processes, too: restore the checkpoint to host memory "
            "(NumPy arrays) in each process, and reshard these arrays"
        )
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        raise ValueError(
            f"{name} holds keys, one a worker, which have no mean: keep one key for all workers, "
            "and fold in the worker's number where you use it, as in "
            "jax.random.fold_in(key, jax.lax.axis_index(axis_name))"
        )
    if x.shape[0] == workers or jnp.issubdtype(x.dtype, jnp.inexact):
        return
    rows = np.asarray(x).reshape(-1, places, *x.shape[1:])
    if (rows != rows[:1]).any():
        raise ValueError(
            f"{name} is {x.dtype} and differs between workers, so there is no mean to carry over: "
            "take it out of the tree and make it anew for the new workers"
        )


def _check_equal_counts(counts: dict[str, int]) -> None:
    if len(set(counts.values())) > 1:
        raise ValueError(
            f"the tree holds PerWorker arrays of different numbers of workers, {counts}: reshard "
            "states of one training run, all of them together"
        )
