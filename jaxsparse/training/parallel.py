"""The parallel step: one worker's function, run on all workers at once."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath, keystr

from jaxsparse.collectives import wire
from jaxsparse.training.marks import (
    AxisName,
    check_wrapped,
    fast_axis,
    is_marked,
    is_sharded,
    specs,
    unpacked,
)
from jaxsparse.training.sharding import check_even, count_workers


def data_parallel(
    step: Callable[..., Any],
    mesh: Mesh | int,
    *,
    axis_name: AxisName = "data",
    batch_argnums: int | Sequence[int] = 1,
    donate_argnums: int | Sequence[int] = (),
    check_vma: bool = True,
) -> jax.stages.Wrapped:
    """Compiles `step` to run on all workers at once, each with its share of the batch.

    Args:
        step: function of positional arguments, written for one worker. It sees `PerWorker`
            arrays as (1, ...), batches as (batch / W, ...), `Sharded` arrays as (n / L, ...), and
            all other arrays whole. An output must be equal on all workers (average metrics with
            `jax.lax.pmean(x, axis_name)`), or marked `PerWorker`, or marked `Sharded` and equal
            along the slow axis.
        mesh: a mesh of Auto or Explicit axes, or a number of workers to simulate on one device
            with `jax.vmap`, which gives the same numbers.
        axis_name: the mesh axis of the workers, bound inside `step`. On a mesh with two levels,
            both axes, the fast one last: ("hosts", "local").
        batch_argnums: arguments whose arrays are split along their first axis. Negative numbers
            count from the last argument.
        donate_argnums: as for `jax.jit`. Donate the training state.
        check_vma: let JAX check that replicated outputs are replicated. Without the check,
            jaxsparse can't tell a summed gradient from a local one.

    On emulated CPU devices, wait for each step (`jax.block_until_ready`, or read the loss). Queued
    steps can starve a collective of threads until it times out.

    Returns:
        The compiled function, with the `lower` of `jax.jit`. `step` is traced once for each set
        of shapes.

    Raises:
        ValueError: the mesh has no such axis or no worker. At the call: the workers don't divide a
            batch, per-worker state isn't spread over the workers (`shard`), or an output differs
            between workers.
    """
    given = (batch_argnums,) if isinstance(batch_argnums, int) else tuple(batch_argnums)
    axis_name = unpacked(axis_name)
    workers = count_workers(mesh, axis_name)

    def in_specs(args: tuple[Any, ...], batches: set[int]) -> tuple[Any, ...]:
        split = PartitionSpec(axis_name)
        return tuple(
            jax.tree.map(lambda _: split, arg) if i in batches else specs(arg, axis_name)
            for i, arg in enumerate(args)
        )

    def parallel(*args: Any) -> Any:
        if any(not -len(args) <= i < len(args) for i in given):
            raise ValueError(
                f"batch_argnums={batch_argnums} names an argument that is missing: the call has "
                f"{len(args)} positional arguments"
            )
        batches = {i % len(args) for i in given}
        _check_arguments(args, batches, workers, mesh, axis_name)
        structure: list[Any] = []  # treedef and kinds of the outputs, once step has been traced

        def body(*args: Any) -> tuple[list[Any], ...]:
            outputs = step(*args)
            paths, treedef = jax.tree_util.tree_flatten_with_path(outputs)
            kinds = [_kind(path) for path, _ in paths]
            structure[:] = [treedef, kinds]
            _check_outputs(paths, axis_name)
            return tuple(
                [leaf for (_, leaf), own in zip(paths, kinds) if own == kind] for kind in range(3)
            )

        specs_in = in_specs(args, batches)
        if isinstance(mesh, Mesh):
            outputs = _over_mesh(body, mesh, axis_name, check_vma, specs_in)(*args)
        else:
            outputs = _simulated(body, workers, axis_name, specs_in)(*args)
        treedef, kinds = structure
        remaining = list(map(iter, outputs))
        return treedef.unflatten([next(remaining[kind]) for kind in kinds])

    return jax.jit(functools.wraps(step)(parallel), donate_argnums=donate_argnums)


def _kind(path: KeyPath) -> int:
    """The kind of an output: 0 if it is per-worker, 1 if replicated, 2 if sharded."""
    return 0 if is_marked(path) else 2 if is_sharded(path) else 1


def _over_mesh(body, mesh, axis_name, check_vma, in_specs):
    axes = (axis_name,) if isinstance(axis_name, str) else axis_name
    outputs = (PartitionSpec(axis_name), PartitionSpec(), PartitionSpec(axes[-1]))
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=in_specs, out_specs=outputs, check_vma=check_vma
    )
    if all(mesh.axis_types[mesh.axis_names.index(a)] != AxisType.Explicit for a in axes):
        return mapped
    # Explicit axes refuse arguments whose types have another sharding.
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), in_specs)
    return lambda *args: mapped(*jax.reshard(args, shardings))


def _simulated(body, workers, axis_name, in_specs):
    """`body` over `workers` simulated workers, with the shapes that a mesh would give it."""
    split = PartitionSpec(axis_name)
    is_split = jax.tree.map(lambda spec: spec == split, in_specs)
    axes = jax.tree.map(lambda yes: 0 if yes else None, is_split)
    mapped = jax.vmap(
        body, in_axes=axes, out_axes=(0, None, None), axis_name=axis_name, axis_size=workers
    )

    def run(*args):
        rows = jax.tree.map(
            lambda x, yes: x.reshape(workers, x.shape[0] // workers, *x.shape[1:]) if yes else x,
            args,
            is_split,
        )
        try:
            per_worker, replicated, _ = mapped(*rows)
        except ValueError as error:
            if "out_axes is None" not in str(error):
                raise
            raise ValueError(_differs("an output of the step", axis_name)) from error
        stacked = [x.reshape(workers * x.shape[1], *x.shape[2:]) for x in per_worker]
        return stacked, replicated, []

    return run


def _check_arguments(
    args: tuple[Any, ...],
    batches: set[int],
    workers: int,
    mesh: Mesh | int,
    axis_name: AxisName,
) -> None:
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
            if i not in batches and is_sharded(path):
                check_even(name, shape, mesh, fast_axis(name, axis_name))
            if i in batches or not is_marked(path):
                continue
            check_wrapped(name, leaf)
            if shape[0] != workers:
                raise ValueError(
                    f"{name} is per-worker state for {shape[0]} workers, but there are {workers}: "
                    "spread it once before the first step with jaxsparse.shard(state, mesh), or "
                    "carry it over from another number of workers with "
                    "jaxsparse.reshard(state, mesh)"
                )


def _check_outputs(paths: list[tuple[KeyPath, Any]], axis_name: AxisName) -> None:
    axes = (axis_name,) if isinstance(axis_name, str) else axis_name
    tracked = [axis for axis in axes if wire.tracks_replication(axis)]
    for path, leaf in paths:
        name = f"the step's output{keystr(path)}"
        if is_marked(path):
            check_wrapped(name, leaf)
            continue
        if is_sharded(path):
            fast = fast_axis(name, axis_name)
            if any(wire.is_varying(leaf, axis) for axis in tracked if axis != fast):
                raise ValueError(_differs(name, tuple(a for a in axes if a != fast)))
        elif any(wire.is_varying(leaf, axis) for axis in tracked):
            raise ValueError(_differs(name, axis_name))


def _differs(what: str, axis_name: AxisName) -> str:
    return (
        f"{what} differs between workers: average it with jax.lax.pmean(x, {axis_name!r}), mark "
        "it with jaxsparse.PerWorker.wrap(x), or, if these are the parameters, apply the updates "
        "to the original params and not to local(params)"
    )
