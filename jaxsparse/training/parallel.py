"""The parallel step: one worker's function, run on all workers at once."""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.extend.core import Jaxpr
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath, keystr, tree_flatten_with_path

from jaxsparse import traffic
from jaxsparse.comm import wire
from jaxsparse.comm.marks import check_wrapped, is_marked, module_in
from jaxsparse.comm.meshes import (
    RUNNING,
    SCOPE,
    Running,
    WorkersError,
    context_of,
    inner_axes,
    restricted,
    running,
)
from jaxsparse.comm.static_leaves import has_static, held, released
from jaxsparse.processes.agreement import compare as compare_calls
from jaxsparse.processes.calls import Step
from jaxsparse.processes.group import group_of
from jaxsparse.training.chains import warn_of_chains
from jaxsparse.training.constraints import constrains, without_axis
from jaxsparse.training.gradients import Way, run_manually, run_mapped, serves_vmap
from jaxsparse.training.sharding import count_workers, warn_of_copies, warn_of_placed

Kind = Literal["mean", "sum", "max", "own"]


class Kinds:
    """The kind of each output of a step.

    Args:
        given: see `outputs` of `jaxsparse.data_parallel`.

    Raises:
        ValueError: it holds something else than a kind.
    """

    def __init__(self, given: Any) -> None:
        leaves = tree_flatten_with_path(given)[0]
        for path, kind in leaves:
            if not callable(kind):
                _check(keystr(path), kind)
        self._given = {_keys(path): (path, kind) for path, kind in leaves}

    def of(self, outputs: Any) -> list[Kind | None]:
        """The kind of each output in a tree; None where it must be equal on all workers.

        Raises:
            ValueError: an entry names no part of the tree.
        """
        found, unused = list[Kind | None](), dict(self._given)
        # A part without arrays, such as the metrics of a step that shows none, may have a kind.
        for path, part in tree_flatten_with_path(outputs, is_leaf=_is_empty)[0]:
            keys = _keys(path)
            ends = [keys[:n] for n in range(len(keys) + 1) if keys[:n] in self._given]
            if not _is_empty(part):
                found.append(_kind(self._given[ends[-1]][1], path) if ends else None)
            for end in ends:
                unused.pop(end, None)
        if unused:
            path, kind = next(iter(unused.values()))
            names = ", ".join(keystr(path) for path, _ in tree_flatten_with_path(outputs)[0])
            raise ValueError(
                f"outputs{keystr(path)}={kind!r} names no output of the step, which has "
                f"{names[:500] or 'none'}: give a tree like that of the outputs, in which those "
                "that are equal on all workers are left out or None"
            )
        return found


def _is_empty(node: Any) -> bool:
    """Whether a part of a tree has no arrays and no parts, such as None and {}."""
    structure: Any = jax.tree.structure(node)
    return structure.num_nodes == 1 and structure.num_leaves == 0


def _kind(given: Kind | Callable[[str], Kind | None], path: KeyPath) -> Kind | None:
    """The kind of an output at this path, by what is given for it or for what it is in."""
    if not callable(given):
        return given
    kind = given(keystr(path))
    if kind is not None:
        _check(keystr(path), kind)
    return kind


def _check(path: str, kind: Any) -> None:
    """Raises ValueError if this is no kind."""
    if kind not in get_args(Kind):
        raise ValueError(
            f"outputs{path}={kind!r} is unknown: give 'mean', 'sum', 'max' or 'own' for an output, "
            "and leave out those that are equal on all workers"
        )


def _keys(path: KeyPath) -> tuple[str, ...]:
    """A path's keys in words: a dictionary may name the fields of a class."""
    named = lambda key: getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))
    return tuple(str(named(key)) for key in path)


def over_workers(name: str, x: Any, kind: Kind, axis_name: str) -> jax.Array:
    """The mean, the sum or the maximum of an output over workers.

    Raises:
        ValueError: its dtype has none.
    """
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.inexact if kind == "mean" else jnp.number):
        raise ValueError(
            f"{name} has dtype {x.dtype}, which has no {kind}: give 'own' for each worker's, or "
            "return numbers" + (" of floats" if kind == "mean" else "")
        )
    if kind == "sum":
        return wire.psum(x, axis_name)
    if kind == "max":
        return wire.pmax(x, axis_name)
    # A sum of float16 could overflow where its mean does not.
    wide = x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
    return (wire.psum(wide, axis_name) / wire.axis_size(axis_name)).astype(x.dtype)


# Below _FEW_BYTES there is no warning, because metrics may cross the axis. A warning names the
# _NAMED largest collectives.
_FEW_BYTES, _NAMED = 1024, 4


def warn_of_strays(step: jax.stages.Wrapped, mesh: Mesh, axis_name: str, args: Any) -> None:
    """Warns of collectives besides the exchange that cross the axis, beyond a few metrics."""
    program = step.lower(*args).compile()  # JAX keeps it: the call does not compile again
    try:
        strays = traffic.crossing(program, axis_name=axis_name, mesh=mesh, outside=SCOPE)
    except ValueError as error:
        warnings.warn(
            f"data_parallel could not read what crosses {axis_name!r}: {error}", stacklevel=4
        )
        return
    received = sum(stray.received_bytes for stray in strays)
    if received < _FEW_BYTES:
        return
    largest = sorted(strays, key=lambda stray: -stray.received_bytes)[:_NAMED]
    warnings.warn(
        f"besides the exchange, {len(strays)} collectives of the step cross {axis_name!r}, and a "
        f"device receives {received:,.0f} bytes by them: {'; '.join(map(str, largest))}. Is a "
        f"batch not split over {axis_name!r}, or a gradient or activation averaged over it? XLA "
        "moves some lookups in sharded tables across all axes, and vmap convolutions: see "
        "data_parallel.",
        stacklevel=4,
    )


_CHECK = "jaxsparse_check"


def data_parallel(
    step: Callable[..., Any],
    mesh: Mesh | int,
    *,
    axis_name: str = "data",
    batch_argnums: int | Sequence[int] = 1,
    donate_argnums: int | Sequence[int] = (),
    outputs: Any = None,
    check: bool = True,
    via: Way | None = None,
    compare: bool = True,
) -> jax.stages.Wrapped:
    """Compiles a whole training step as one worker's function, run on all workers at once.

    It is for a trainer whose step can't be edited. Elsewhere take `jaxsparse.value_and_grad`: there
    the loss alone is one worker's, and metrics, clips and moments are what they were.

    Gradients that `step` computes are each worker's own. Other axes of the mesh, constraints that
    name `axis_name`, and `via` are as in `value_and_grad`. Under "shard_map", JAX takes no
    `jax.shard_map` of the whole mesh inside, and on Explicit axes no sharding of it: give
    `PartitionSpec`s without `axis_name`, and a model that holds a mesh
    `Mesh(mesh.devices, mesh.axis_names, axis_types=jax.sharding.get_abstract_mesh().axis_types)`.

    Args:
        step: function of positional arguments, written for one worker. It sees `PerWorker`
            arrays as (1, ...), batches as (batch / W, ...), and all other arrays whole. An output
            must be equal on all workers (average metrics with `jax.lax.pmean(x, axis_name)`),
            marked `PerWorker`, or among `outputs`. Flax nnx modules are lifted as for `jax.jit`:
            `merge_inputs` inside and `split_inputs` outside (`flax.nnx.transforms.general`).
        mesh: a mesh of Auto or Explicit axes, or a number of workers to simulate on one device
            with `jax.vmap`, which gives the same numbers, but for rounding.
        axis_name: the mesh axis of the workers, bound inside `step`.
        batch_argnums: numbers of the arguments whose arrays are split along their first axis.
            Negative numbers count from the last argument.
        donate_argnums: numbers of donated arguments, as for `jax.jit`. Donate the training state.
        outputs: what outputs are that differ between workers: a tree in the outputs' structure,
            such as `(None, {"loss": "mean", "tokens": "sum", "norm": "own"})`. "mean", "sum" and
            "max" go over workers, all alike (`jaxsparse.weighted` changes that), and keep shape and
            dtype; "own" gives an array (W, ...) of each worker's. A kind counts for all arrays
            below it, and dictionaries may leave out entries and name fields of classes. A function
            of an array's path, as `jax.tree_util.keystr` writes it, may stand for a kind. What is
            None or left out must be equal on all workers. A sum of what the step has summed already
            would count it W times.
        check: whether to trace `step` once more, without its exchange, to see that outputs are
            equal on all workers and that gradients have not been averaged, and to warn of what
            trains otherwise than it reads, as `jaxsparse.check` does.
        via: how to run on a mesh with other axes.
        compare: whether several processes compare the step before its first call: versions, mesh,
            shapes, program, constants, and the values of arguments that are equal on all workers.
            Of large arrays they compare a sample. All processes must call the same steps in the
            same order. They wait for each other for the limit of `jaxsparse.fail_at_once`.

    The first call with given shapes warns of collectives other than the exchange's that cross
    `axis_name` (on a mesh with other axes, from 1 KiB a device on), of arrays besides batches that
    are split over `axis_name`, which come back whole, and of per-worker state of which each device
    holds all rows. Inside an outer `jax.jit` nothing is compared or read.

    On emulated CPU devices, wait for each step (`jax.block_until_ready`, or read the loss). Queued
    steps can starve a collective of threads until it times out.

    Returns:
        The compiled function, with the `lower` of `jax.jit`. `step` is traced once for each set
        of shapes, and once more for the check, or to choose `via`.

    Raises:
        ValueError: the mesh has no such axis or no worker, or `via` or a kind of `outputs` is
            unknown. At the call: `outputs` names no output, or one of a dtype without a mean, the
            workers don't divide a batch, or its class refuses a share, a leaf is no array,
            per-worker state isn't spread over the workers (`shard`), an output differs between
            workers, or gradients have been averaged already.
        RuntimeError: at the call: processes differ, or one does not come.
    """
    given = (batch_argnums,) if isinstance(batch_argnums, int) else tuple(batch_argnums)
    workers = count_workers(mesh, axis_name)
    if via not in (None, "vmap", "shard_map"):
        raise ValueError(f"via={via!r} is unknown: use 'vmap', 'shard_map' or None")
    output_kinds = Kinds(outputs)
    whole = mesh if isinstance(mesh, Mesh) else None
    inner = dict(inner_axes(whole, axis_name)) if whole is not None else {}

    kinds = {} if whole is None else dict(zip(whole.axis_names, whole.axis_types))
    is_typed = kinds.get(axis_name) == AxisType.Explicit  # traced arrays tell where they are

    def one(*args: Any) -> Any:
        return held(step(*released(args))) if has_static(args) else step(*args)

    def parallel(*args: Any, **named: Any) -> Any:
        batches = _batches_of(given, args, named)
        _check_arguments(args, batches, workers)
        if check and workers > 1:
            _warn_of_whole_batches(args, batches)
        if is_typed:
            warn_of_copies(axis_name, args)
        treedef: Any
        flat, treedef = tree_flatten_with_path(args)
        leaves = [x for _, x in flat]
        is_split = [path[0].idx in batches or is_marked(path) for path, _ in flat]
        body = _Worker(one, treedef, axis_name, output_kinds)
        program, problem, chosen = None, None, via
        if inner and whole is not None and AxisType.Explicit in whole.axis_types:
            chosen = chosen or "shard_map"
        if check or inner:
            shares = (args, treedef.unflatten(is_split))
            program, problem = _traced(body, workers, whole, axis_name, *shares, check)
            if isinstance(problem, WorkersError) and check:
                raise problem
            serves = program is not None and serves_vmap(program, axis_name)
            chosen = chosen or ("vmap" if serves else "shard_map")
        if whole is not None and (program is None or constrains(program, axis_name)):
            rewritten = without_axis(one, axis_name, is_manual=not inner)
            body = _Worker(rewritten, treedef, axis_name, output_kinds)
        with running(Running(whole, axis_name)):
            if whole is None or (inner and chosen == "vmap"):
                with context_of(whole):  # as jax.shard_map has one
                    outputs = run_mapped(body, workers, whole, axis_name, is_split)(*leaves)
            else:
                outputs = run_manually(body, whole, axis_name, is_split, set(inner))(*leaves)
        if check and problem is not None:
            warnings.warn(
                f"data_parallel could not check that the step's outputs are equal on all workers: "
                f"{problem}. If you know that they are, give check=False",
                stacklevel=2,
            )
        return body.joined(*outputs)

    run = jax.jit(functools.wraps(step)(parallel), donate_argnums=donate_argnums)
    before: list[Callable[[Any], None]] = []
    if whole is not None:
        before.append(functools.partial(warn_of_placed, axis_name, given))
    if whole is not None and not is_typed:
        before.append(functools.partial(warn_of_copies, axis_name))
    group = None if whole is None else group_of(whole)
    if whole is not None and group is not None and compare:
        before.append(functools.partial(compare_calls, group, run, whole, given))
    if whole is not None and inner:
        before.append(functools.partial(warn_of_strays, run, whole, axis_name))
    return Step(run, before, group)


class _Worker:
    """One worker's step, with its outputs in two lists: per-worker arrays, and those equal on all.

    Only tracing tells what a step returns, so a call remembers the outputs' tree for `joined`.
    """

    def __init__(
        self, step: Callable[..., Any], arguments: Any, axis_name: str, kinds: Kinds
    ) -> None:
        self._step, self._arguments = step, arguments
        self._axis_name, self._kinds = axis_name, kinds
        self._marks: list[bool] = []
        self._treedef: Any = None

    def __call__(self, *leaves: Any) -> tuple[list[Any], list[Any]]:
        axis = self._axis_name
        returned = self._step(*self._arguments.unflatten(leaves))
        outputs, self._treedef = tree_flatten_with_path(returned)
        kinds = self._kinds.of(returned)
        self._marks = [is_marked(path) or kind == "own" for (path, _), kind in zip(outputs, kinds)]
        own, others, names = list[Any](), list[Any](), list[str]()
        for (path, leaf), kind in zip(outputs, kinds):
            name = f"the step's output{keystr(path)}"
            if is_marked(path):
                check_wrapped(name, leaf)
                own.append(leaf[0])
                if kind is not None:
                    raise ValueError(
                        f"{name} is per-worker state, but outputs says {kind!r}: leave it out"
                    )
            elif kind == "own":
                own.append(jnp.asarray(leaf))
            else:
                others.append(leaf if kind is None else over_workers(name, leaf, kind, axis))
                names.append(name)
        return own, _equal_on_all(others, names, axis)

    def joined(self, own: list[Any], others: list[Any]) -> Any:
        """What the step returned when it was called last, made of these arrays."""
        lists = {True: iter(own), False: iter(others)}
        return self._treedef.unflatten([next(lists[mark]) for mark in self._marks])


def _traced(
    body: "_Worker",
    workers: int,
    mesh: Mesh | None,
    axis_name: str,
    args: tuple[Any, ...],
    is_split: tuple[Any, ...],
    check: bool,
) -> tuple[Jaxpr | None, Exception | None]:
    """The program of `body` over simulated workers, without exchanges, and its problem, or None.

    The program is None if the step raises an error, or uses an operation without a rule for vmap.
    """
    flags = jax.tree.leaves(is_split)
    axes = [0 if yes else None for yes in flags]
    mapped = jax.vmap(body, axes, (0, None), axis_name=axis_name, axis_size=workers)
    kinds = {} if mesh is None else dict(zip(mesh.axis_names, mesh.axis_types))
    inner = [a for a, k in kinds.items() if k == AxisType.Explicit and a != axis_name]

    def described(x: Any, yes: bool) -> jax.ShapeDtypeStruct:
        shape, sharding = jnp.shape(x), None
        spec = restricted(jax.typeof(x).sharding.spec, inner) if inner else PartitionSpec()
        if yes:
            shape = (workers, shape[0] // workers, *shape[1:])
            spec = PartitionSpec(None, *spec)
        if inner and mesh is not None:  # the step reads them in types
            sharding = NamedSharding(mesh.abstract_mesh, spec)
        return jax.ShapeDtypeStruct(shape, jnp.result_type(x), sharding=sharding)

    shapes = list(map(described, jax.tree.leaves(args), flags))

    # JAX keeps the traces of functions that are jitted, or looped over, inside the step. The check
    # has an axis of its own, so that a later trace, with exchanges, does not take these.
    def apart(*args: Any) -> Any:
        once = jax.vmap(lambda _: mapped(*args), axis_name=_CHECK, out_axes=None)
        return once(jnp.zeros(1))

    how = Running(mesh, axis_name, is_check=True)
    context = context_of(mesh)
    if inner and mesh is not None:
        context = jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
    try:
        with running(how), context:
            program = jax.make_jaxpr(apart)(*shapes).jaxpr
    except Exception as error:  # the step has an error, which it will show; or vmap lacks a rule
        return None, error
    if how.differing:
        return None, WorkersError(next(iter(how.differing.values())))
    if check and workers > 1:
        warn_of_chains(program, args, is_split, bool(how.clips_own))
    return program, next((p for p in how.problems.values() if p is not None), None)


def _equal_on_all(outputs: list[Any], names: list[str], axis_name: str) -> list[Any]:
    """`outputs`, after a check under vmap that it holds one of each for all workers.

    Raises:
        WorkersError: an output differs between workers.
    """
    if axis_name in jax.sharding.get_abstract_mesh().manual_axes:
        return outputs

    @custom_vmap
    def checked(outputs: list[Any], worker: jax.Array) -> list[Any]:
        return outputs

    @checked.def_vmap
    def rule(workers: int, batched: Any, outputs: list[Any], worker: jax.Array) -> Any:
        how = RUNNING.get()
        check = how if how is not None and how.is_check else None
        found = dict[int, str]()
        for i, (name, differs) in enumerate(zip(names, batched[0])):
            if differs and check is not None and not check.problems:
                found[i] = (
                    f"{name} differs between workers, and no exchange of jaxsparse ran in this "
                    "step: chain one in front of the optimizer, as in optax.chain("
                    "jaxsparse.qsgd(4), optax.adamw(lr)), or behind jaxsparse.per_worker. A metric "
                    f"is averaged with jax.lax.pmean(x, {axis_name!r}), or by "
                    "data_parallel(outputs=)"
                )
            elif differs:
                found[i] = (
                    f"{name} differs between workers: average a metric with jax.lax.pmean(x, "
                    f"{axis_name!r}), or say by data_parallel(outputs=) what it is; mark what is a "
                    "worker's own with jaxsparse.PerWorker.wrap(x); chain what works on means, "
                    "such as optax.scale_by_adam, behind the exchange, or in jaxsparse.per_worker "
                    "in front of it; accumulate inside the step, without optax.MultiSteps"
                )
        if found and check is None:
            raise WorkersError(next(iter(found.values())))
        if check is not None:
            check.differing.update(found)
        return [x[0] if b else x for x, b in zip(outputs, batched[0])], [False] * len(outputs)

    # The worker's number differs along the workers' axis, so JAX applies the rule there. It leaves
    # no call to which an outer vmap, whose rows may differ, would apply it again.
    return checked(outputs, jax.lax.axis_index(axis_name))


def _batches_of(given: tuple[int, ...], args: tuple[Any, ...], named: dict[str, Any]) -> set[int]:
    """The numbers, from 0, of the batches among a call's arguments."""
    if named:
        raise ValueError(
            f"data_parallel takes positional arguments only, but got {', '.join(named)} by name: "
            "pass them by position, by which it knows batches"
        )
    if any(not -len(args) <= i < len(args) for i in given):
        numbers = given[0] if len(given) == 1 else given
        raise ValueError(
            f"batch_argnums={numbers} names an argument that is missing: the call has "
            f"{len(args)} positional arguments"
        )
    return {i % len(args) for i in given}


def _check_arguments(args: tuple[Any, ...], batches: set[int], workers: int) -> None:
    for i, arg in enumerate(args):
        if (module := module_in(arg)) is not None:  # an empty nnx.List is false
            raise ValueError(
                f"argument {i} has a flax.nnx {type(module).__name__}, whose changes inside the "
                "step would be lost: pass the state of nnx.split, and nnx.merge it inside; or lift "
                "the step with merge_inputs and split_inputs of flax.nnx.transforms.general"
            )
        leaves = tree_flatten_with_path(arg)[0]
        if i in batches and any(is_marked(path) for path, _ in leaves):
            raise ValueError(
                f"argument {i} is split as a batch, but holds the state of a jaxsparse "
                f"transformation: say which arguments are batches, as in batch_argnums="
                f"{max(j for j in range(len(args)) if j != i) if len(args) > 1 else ()}"
            )
        for path, leaf in leaves:
            name = f"argument {i}{keystr(path)}"
            shape = jnp.shape(leaf)
            if i in batches and not shape:
                raise ValueError(
                    f"{name} is a scalar in a batch, which can't be split: pass it as an argument "
                    "of its own, which all workers get whole"
                )
            if i in batches and shape[0] % workers:
                raise ValueError(
                    f"{name} is a batch of shape {shape}, whose first axis {workers} workers "
                    "cannot share equally: change the batch size, or leave the argument out of "
                    "batch_argnums to give it whole to every worker"
                )
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
        if i in batches:
            _check_share(i, arg, workers)


def _check_share(i: int, batch: Any, workers: int) -> None:
    """Raises ValueError if a class of a batch takes all of its rows, but no worker's share.

    Arrays with named axes, such as those of haliax, keep the axes' sizes beside the array.
    """
    treedef: Any
    leaves, treedef = jax.tree.flatten(batch)
    rows = lambda x: (jnp.shape(x)[0] // workers, *jnp.shape(x)[1:])
    shares = [jax.ShapeDtypeStruct(rows(x), jnp.result_type(x)) for x in leaves]
    try:
        jax.eval_shape(lambda shares: jax.tree.leaves(treedef.unflatten(shares)), shares)
    except Exception as error:
        raise ValueError(
            f"argument {i} is a batch of a class that refuses a worker's share of its rows "
            f"({error}): give its arrays to data_parallel, and make it of them inside the step"
        ) from error


def _warn_of_whole_batches(args: tuple[Any, ...], batches: set[int]) -> None:
    """Warns of arguments behind the first batch that look like a part of it, but are not split."""
    rows = {x.shape[0] for i in batches for x in jax.tree.leaves(args[i])}

    def looks_so(arg: Any) -> bool:
        leaves = tree_flatten_with_path(arg)[0]
        return bool(leaves) and all(
            jnp.ndim(x) and jnp.shape(x)[0] in rows and not is_marked(path) for path, x in leaves
        )

    behind = range(min(batches, default=len(args)), len(args))
    if found := [i for i in behind if i not in batches and looks_so(args[i])]:
        warnings.warn(
            f"arguments {found} have as many rows as the batch, but every worker gets all of them: "
            f"give batch_argnums={tuple(sorted({*batches, *found}))} if they belong to the batch, "
            "and check=False if not",
            stacklevel=3,
        )
