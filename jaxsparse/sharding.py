"""What a trainer needs around `jax.shard_map`: per-worker state, its sharding, the parallel step.

Parameters and most optimizer state are equal on all workers; residuals are not. `PerWorker` marks
the arrays that differ, and everything here goes by that mark, so that one pair of functions serves
an Optax state, a linen `TrainState` and an nnx state alike.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import GetAttrKey, KeyPath, keystr

from jaxsparse.collectives import wire

T = TypeVar("T")

# The key under which a PerWorker's array appears in key paths. Frameworks that flatten a tree and
# forget its node types (nnx.split, Orbax) still keep the path.
_KEY = "jaxsparse_per_worker"


@jax.tree_util.register_pytree_with_keys_class
class PerWorker:
    """Marks an array that differs from worker to worker.

    Attributes:
        value: the array with a leading worker axis: (1, ...) as one worker sees it, (W, ...) as
            the trainer sees it outside the parallel step.

    Example:
        >>> import jax.numpy as jnp
        >>> PerWorker.wrap(jnp.zeros(3)).value.shape
        (1, 3)
    """

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __repr__(self) -> str:
        return f"PerWorker({self.value!r})"

    def tree_flatten_with_keys(self):
        return ((GetAttrKey(_KEY), self.value),), None

    def tree_flatten(self):
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(children[0])

    @classmethod
    def wrap(cls, tree: Any) -> Any:
        """Marks each array of one worker's `tree` as per-worker."""
        return jax.tree.map(lambda x: cls(jnp.asarray(x)[None]), tree)

    @classmethod
    def unwrap(cls, tree: Any) -> Any:
        """This worker's arrays out of a tree made by `wrap`.

        Raises:
            ValueError: an array holds several workers' values: the state was passed whole.
        """

        def one(node: PerWorker) -> Any:
            if node.value.shape[0] != 1:
                raise ValueError(
                    f"a PerWorker array of shape {node.value.shape} holds {node.value.shape[0]} "
                    "workers' values where one worker's, of shape (1, ...), was expected. Run the "
                    "step through jaxsparse.data_parallel, or give jax.shard_map the in_specs "
                    "jaxsparse.specs(state)"
                )
            return node.value[0]

        return jax.tree.map(one, tree, is_leaf=_is_per_worker)


def _is_per_worker(node: Any) -> bool:
    return isinstance(node, PerWorker)


def _marked(path: KeyPath) -> bool:
    return any(getattr(k, "name", getattr(k, "key", None)) == _KEY for k in path)


def _map_marked(f: Callable[[Any, bool], Any], tree: T) -> T:
    """Maps f(leaf, whether it is per-worker) over the leaves of `tree`."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: f(leaf, _marked(path)), tree)


def specs(tree: Any, axis_name: str = "data") -> Any:
    """Partition specs of `tree`, in its own structure, for `jax.shard_map` and `NamedSharding`.

    Args:
        tree: any pytree; `PerWorker` arrays are found by their key path, so a state that
            `nnx.split` took apart works too.
        axis_name: the mesh axis of the workers.

    Returns:
        `PartitionSpec(axis_name)` in place of each per-worker array, `PartitionSpec()` elsewhere.
    """
    return _map_marked(
        lambda _, marked: PartitionSpec(axis_name) if marked else PartitionSpec(), tree
    )


def _check_axis(mesh: Mesh, axis_name: str) -> None:
    if axis_name not in mesh.axis_names:
        raise ValueError(
            f"axis_name={axis_name!r} is not an axis of the mesh, whose axes are "
            f"{mesh.axis_names}: pass one of them, or make the mesh with "
            f"jax.make_mesh((workers,), ({axis_name!r},))"
        )


def shard(tree: T, mesh: Mesh | int, axis_name: str = "data") -> T:
    """Spreads one worker's `tree`, as `tx.init` made it, over all workers.

    Args:
        tree: an Optax state, a `TrainState`, an nnx state: any tree with `PerWorker` arrays of
            shape (1, ...), or (W, ...) if it was spread before.
        mesh: the mesh, or the number of workers to simulate on one device.
        axis_name: the mesh axis of the workers.

    Returns:
        The same tree with per-worker arrays of shape (W, ...), each worker holding a copy of the
        initial value, and (given a mesh) all arrays placed on it: per-worker ones split over
        `axis_name`, all others replicated. Arrays are copied, so donating them is safe.

    Raises:
        ValueError: the mesh has no such axis, or the tree is already spread over another number
            of workers.
    """
    if isinstance(mesh, Mesh):
        _check_axis(mesh, axis_name)
        workers = mesh.shape[axis_name]
    else:
        workers = mesh

    def spread(x: Any, marked: bool) -> Any:
        x = _copy(x)
        if not marked or x.shape[0] == workers:
            return x
        if x.shape[0] != 1:
            raise ValueError(
                f"a PerWorker array of shape {x.shape} is already spread over {x.shape[0]} "
                f"workers and cannot be spread over {workers}: start from tx.init(params)"
            )
        return jnp.broadcast_to(x, (workers, *x.shape[1:]))

    spread_all = functools.partial(_map_marked, spread)
    if not isinstance(mesh, Mesh):
        return spread_all(tree)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs(tree, axis_name))
    # Arrays may be committed to other devices: bring them here, whole unless they are spread.
    whole = NamedSharding(mesh, PartitionSpec())
    is_spread = lambda x: jnp.ndim(x) > 0 and x.shape[0] == workers
    here = jax.tree.map(lambda x, s: s if is_spread(x) else whole, tree, shardings)
    return jax.jit(spread_all, out_shardings=shardings)(jax.device_put(tree, here))


def _copy(x: Any) -> jax.Array:
    if not jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
        return jnp.array(x)
    return jax.random.wrap_key_data(jnp.array(jax.random.key_data(x)), impl=jax.random.key_impl(x))


def local(tree: T, axis_name: str | None = "data") -> T:
    """The parameters as this worker's own, so that gradients with respect to them stay local.

    Under `jax.shard_map(check_vma=True)` the gradient with respect to a *replicated* value is
    summed over the workers by JAX itself, uncompressed. Differentiate `local(params)` instead:
    `jax.grad(loss)(jaxsparse.local(params), batch)`. Apply the updates to the original `params`,
    not to these. It moves no data, and elsewhere (vmap, `check_vma=False`) it does nothing.
    """
    return wire.varying(tree, axis_name)


def data_parallel(
    step: Callable[..., Any],
    mesh: Mesh | int,
    *,
    axis_name: str = "data",
    batch_argnums: int | Sequence[int] = 1,
    donate_argnums: int | Sequence[int] = (),
    check_vma: bool = True,
) -> jax.stages.Wrapped:
    """Compiles `step` to run on all workers at once, each with its share of the batch.

    Args:
        step: function of positional arguments, written for one worker. It sees `PerWorker`
            arrays as (1, ...), batches as (batch / W, ...), and everything else whole. What it
            returns must be equal on all workers (average metrics with
            `jax.lax.pmean(x, axis_name)`) or marked `PerWorker`.
        mesh: a mesh of Auto or Explicit axes, or a number of workers to simulate on one device
            with `jax.vmap`: the same numbers, no devices needed.
        axis_name: the mesh axis of the workers, bound inside `step`.
        batch_argnums: arguments whose arrays are split along their first axis; negative ones
            count from the last.
        donate_argnums: as for `jax.jit`; donate the training state.
        check_vma: let JAX check that replicated outputs are so. Without it an already summed
            gradient can't be told from a local one.

    On emulated CPU devices wait for each step (`jax.block_until_ready`, or read the loss): steps
    queued behind each other can starve a collective of threads until it times out.

    Returns:
        The compiled function, with the `lower` of `jax.jit`. `step` is traced once for each set
        of shapes.

    Raises:
        ValueError: at the call: the workers don't divide a batch, per-worker state isn't spread
            over the workers (`shard`), or an output differs between workers.
    """
    given = (batch_argnums,) if isinstance(batch_argnums, int) else tuple(batch_argnums)
    if isinstance(mesh, Mesh):
        _check_axis(mesh, axis_name)
        workers = mesh.shape[axis_name]
    else:
        workers = mesh
    if workers < 1:
        raise ValueError(f"mesh={mesh} gives no worker: pass a mesh, or a number of at least 1")

    def in_specs(args: tuple[Any, ...], batches: set[int]) -> tuple[Any, ...]:
        split = PartitionSpec(axis_name)
        return tuple(
            jax.tree.map(lambda _: split, arg) if i in batches else specs(arg, axis_name)
            for i, arg in enumerate(args)
        )

    def parallel(*args: Any) -> Any:
        if any(not -len(args) <= i < len(args) for i in given):
            raise ValueError(
                f"batch_argnums={batch_argnums} names an argument that the call with {len(args)} "
                "positional arguments does not have"
            )
        batches = {i % len(args) for i in given}
        _check_arguments(args, batches, workers)
        structure: list[Any] = []  # of the outputs, known once step has been traced

        def body(*args: Any) -> tuple[list[Any], list[Any]]:
            outputs = step(*args)
            paths, treedef = jax.tree_util.tree_flatten_with_path(outputs)
            marks = [_marked(path) for path, _ in paths]
            structure[:] = [treedef, marks]
            _check_outputs(paths, axis_name)
            return (
                [leaf for (_, leaf), marked in zip(paths, marks) if marked],
                [leaf for (_, leaf), marked in zip(paths, marks) if not marked],
            )

        if isinstance(mesh, Mesh):
            per_worker, replicated = _over_mesh(
                body, mesh, axis_name, check_vma, in_specs(args, batches)
            )(*args)
        else:
            per_worker, replicated = _simulated(body, workers, axis_name, in_specs(args, batches))(
                *args
            )
        treedef, marks = structure
        per_worker, replicated = iter(per_worker), iter(replicated)
        return treedef.unflatten([next(per_worker if marked else replicated) for marked in marks])

    return jax.jit(functools.wraps(step)(parallel), donate_argnums=donate_argnums)


def _over_mesh(body, mesh, axis_name, check_vma, in_specs):
    outputs = (PartitionSpec(axis_name), PartitionSpec())
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=in_specs, out_specs=outputs, check_vma=check_vma
    )
    if mesh.axis_types[mesh.axis_names.index(axis_name)] != AxisType.Explicit:
        return mapped
    # Explicit axes refuse arguments that are not typed as laid out so yet.
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), in_specs)
    return lambda *args: mapped(*jax.reshard(args, shardings))


def _simulated(body, workers, axis_name, in_specs):
    """`body` over `workers` simulated workers, with the shapes that a mesh would give it."""
    split = PartitionSpec(axis_name)
    is_split = jax.tree.map(lambda spec: spec == split, in_specs)
    axes = jax.tree.map(lambda yes: 0 if yes else None, is_split)
    mapped = jax.vmap(
        body, in_axes=axes, out_axes=(0, None), axis_name=axis_name, axis_size=workers
    )

    def run(*args):
        rows = jax.tree.map(
            lambda x, yes: x.reshape(workers, x.shape[0] // workers, *x.shape[1:]) if yes else x,
            args,
            is_split,
        )
        try:
            per_worker, replicated = mapped(*rows)
        except ValueError as error:
            if "out_axes is None" not in str(error):
                raise
            raise ValueError(_differs("an output of the step", axis_name)) from error
        return [x.reshape(workers * x.shape[1], *x.shape[2:]) for x in per_worker], replicated

    return run


def _check_arguments(args: tuple[Any, ...], batches: set[int], workers: int) -> None:
    for i, arg in enumerate(args):
        for path, leaf in jax.tree_util.tree_flatten_with_path(arg)[0]:
            name = f"argument {i}{keystr(path)}"
            shape = jnp.shape(leaf)
            if i in batches and (not shape or shape[0] % workers):
                raise ValueError(
                    f"{name} is a batch of shape {shape}, whose first axis {workers} workers "
                    "cannot share equally: change the batch size, or leave the argument out of "
                    "batch_argnums to give it whole to every worker"
                )
            if i not in batches and _marked(path) and shape[0] != workers:
                raise ValueError(
                    f"{name} is per-worker state for {shape[0]} workers, but there are {workers}: "
                    "spread it once before the first step with jaxsparse.shard(state, mesh)"
                )


def _check_outputs(paths: list[tuple[KeyPath, Any]], axis_name: str) -> None:
    if not wire.tracks_replication(axis_name):
        return
    for path, leaf in paths:
        if not _marked(path) and wire.is_varying(leaf, axis_name):
            raise ValueError(_differs(f"the step's output{keystr(path)}", axis_name))


def _differs(what: str, axis_name: str) -> str:
    return (
        f"{what} differs between workers: average it with jax.lax.pmean(x, {axis_name!r}), mark "
        "it with jaxsparse.PerWorker.wrap(x), or, if these are the parameters, apply the updates "
        "to the original params and not to local(params)"
    )
