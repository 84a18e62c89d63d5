"""One worker's function, compiled for all workers at once: what `LocalSteps` runs.

`jaxsparse.value_and_grad` does the same for a loss, where everything that comes back has a row for
each worker. Here the state of training comes back, of which only marked arrays have rows.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr
from jax.sharding import AxisType, Mesh
from jax.tree_util import tree_flatten_with_path, tree_map_with_path

from jaxsparse.comm.marks import check_wrapped, is_marked, module_in, warn_of_copies
from jaxsparse.comm.meshes import context_of
from jaxsparse.comm.static_leaves import has_static, held, released
from jaxsparse.comm.workers import Running, Workers, running
from jaxsparse.processes.calls import CheckedStep
from jaxsparse.training.batches import check_batches
from jaxsparse.training.gradients import OwnAndEqual, on_workers, run_on
from jaxsparse.training.watching import checks_of


def run_on_workers(
    step: Callable[..., Any],
    mesh: Mesh | int,
    *,
    axis_name: str = "data",
    batch_argnums: int | Sequence[int] = 1,
    donate_argnums: int | Sequence[int] = (),
    check: Callable[[Jaxpr, Any], None] = lambda program, batches: None,
) -> CheckedStep:
    """Compiles one worker's function for all workers.

    Args:
        step: function of positional arguments. It sees `PerWorker` arrays as (1, ...), batches as
            (batch / W, ...), and all other arrays whole. An output must be equal on all workers, or
            marked `PerWorker`: nothing checks that here.
        mesh: the mesh, or a number of workers to simulate on one device with `jax.vmap`.
        axis_name: the axis of the workers, bound inside `step`.
        batch_argnums: numbers of the arguments whose arrays are split along their first axis.
        donate_argnums: as for `jax.jit`.
        check: is given the program of one worker, and the batches, where there are any.

    Raises:
        ValueError: the mesh has no such axis or no worker. At the call: the workers don't divide a
            batch, a leaf is no array, or per-worker state isn't spread over the workers.
    """
    given = (batch_argnums,) if isinstance(batch_argnums, int) else tuple(batch_argnums)
    workers = Workers.on(mesh, axis_name)
    whole = mesh if isinstance(mesh, Mesh) else None
    inner = frozenset(workers.inner)
    kinds = {} if whole is None else dict(zip(whole.axis_names, whole.axis_types))

    def one(*args: Any) -> Any:
        return held(step(*released(args))) if has_static(args) else step(*args)

    def parallel(*args: Any) -> Any:
        batches = _numbers_of(given, args)
        _check_arguments(args, batches, workers.count)
        if kinds.get(axis_name) == AxisType.Explicit:  # traced arrays tell where they are
            warn_of_copies(axis_name, {f"argument {i}": arg for i, arg in enumerate(args)})
        treedef: Any
        flat, treedef = tree_flatten_with_path(args)
        leaves, is_own = [x for _, x in flat], [is_marked(path) for path, _ in flat]
        is_split = [own or path[0].idx in batches for (path, _), own in zip(flat, is_own)]
        has_model = bool(batches)  # others exchange, and nothing else

        def body(*leaves: Any) -> OwnAndEqual:
            returned = one(*treedef.unflatten(leaves))
            own = tree_map_with_path(lambda path, x: x[0] if is_marked(path) else None, returned)
            return own, tree_map_with_path(lambda p, x: None if is_marked(p) else x, returned)

        # Where axes are left to JAX, partitions are of this mesh, as in a jax.shard_map.
        with running(Running(whole, axis_name)), context_of(whole if inner else None):
            if has_model:
                of_batch = [path[0].idx in batches for path, _ in flat]
                checked = lambda program: check(program, [args[i] for i in batches])
                found = on_workers(body, workers, is_split, of_batch, checked)(*leaves)
            else:
                name = axis_name if inner and not workers.is_explicit else None
                found = run_on(workers, body, leaves, is_split, name)
        either = lambda own, equal: equal if own is None else own
        return jax.tree.map(either, *found, is_leaf=lambda x: x is None)

    run = jax.jit(functools.wraps(step)(parallel), donate_argnums=donate_argnums)
    if whole is None:
        return CheckedStep(run, (), None)
    return checks_of(run, whole, axis_name)


def _numbers_of(given: tuple[int, ...], args: tuple[Any, ...]) -> set[int]:
    """The numbers, from 0, of the batches among a call's arguments."""
    if any(not -len(args) <= i < len(args) for i in given):
        raise ValueError(
            f"batch_argnums={given} names an argument that is missing: the call has "
            f"{len(args)} positional arguments"
        )
    return {i % len(args) for i in given}


def _check_arguments(args: tuple[Any, ...], batches: set[int], workers: int) -> None:
    check_batches({i: args[i] for i in batches}, workers)
    for i, arg in enumerate(args):
        if (module := module_in(arg)) is not None:  # an empty nnx.List is false
            raise ValueError(
                f"argument {i} has a flax.nnx {type(module).__name__}, whose changes inside the "
                "step would be lost: pass the state of nnx.split, and nnx.merge it inside"
            )
        for path, leaf in tree_flatten_with_path(arg)[0]:
            name = f"argument {i}{jax.tree_util.keystr(path)}"
            shape = jnp.shape(leaf)
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
