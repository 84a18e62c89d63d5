"""Each worker's own loss and gradients, in a step that stays the trainer's.

Only the gradient has to be a worker's own. So the loss alone is one worker's function, and all
other code of a step is what it is under `jax.jit`: clips, moments, metrics and schedules work on
ordinary arrays.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jax.sharding import Mesh, PartitionSpec
from jax.tree_util import tree_flatten_with_path

from jaxsparse.arrays.layout import check_arrays
from jaxsparse.comm import shard_maps, wire
from jaxsparse.comm.shards import Plain, whole_leaves
from jaxsparse.comm.static_leaves import held, released
from jaxsparse.comm.workers import Workers
from jaxsparse.feedback.front import marked
from jaxsparse.training import bodies, named_axes, one_worker, ranks
from jaxsparse.training.batches import (
    check_argnums,
    check_closed_over,
    numbers_of_batches,
    with_fixed,
)
from jaxsparse.training.fsdp import CutLeaves
from jaxsparse.training.rewriting import rewritten

# A worker's own arrays, and those that are equal on all workers: None, if there are none.
OwnAndEqual = tuple[Any, Any]


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    batch_argnums: int | Sequence[int] | None = None,
    mesh: Mesh | None = None,
    axis_name: str = "data",
    workers: int | None = None,
    specs: Any = None,
    gather: Plain | Literal[False] | None = None,
) -> Callable[..., Any]:
    """`jax.value_and_grad` for each worker: its own values and gradients, a row for each worker.

        @jax.jit
        def step(params, opt_state, batch):
            loss, grads = jaxsparse.value_and_grad(loss_of)(params, batch)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss.mean()

    `fun` is one worker's function. It sees its part of the batch, and all other arguments whole.
    Flags, strings and numbers of Python stay what they are, also beside arrays in a tree.
    Inside, `jax.lax.axis_index(axis_name)` is the worker's number, for keys of its own. Everything
    that comes back has a row for each worker, split over `axis_name`: the value (W,), auxiliary
    output and gradients (W, ...). A chain with an exchange of this library takes the gradients as
    they are, and makes means of them. It refuses what mixes their rows before, as a clip would.
    Take means of all else: `loss.mean()`.

    Other axes of the mesh are left to JAX, as under `jax.jit`: FSDP and tensor parallelism inside
    `fun` need no change. Sharding constraints in `fun`, and specs of a `jax.shard_map`, may name
    `axis_name`; it is taken out, because a worker's rows are whole along it. In the body of a
    `jax.shard_map`, collectives over `axis_name` are those of the workers. What does not run in one
    worker's function is refused, with its place: docs/errors.md, "Parallel programs in a loss".

    On a mesh without other axes `fun` runs under `jax.shard_map`. On others, and where `fun` has an
    operation with a mesh, it is mapped by `jax.vmap`: both branches of a `jax.lax.cond` on a
    worker's own values then run. A `jax.shard_map` in it, and any operation that `vmap` does not
    serve, such as a convolution, runs manually over `axis_name`. XLA may move rows of an embedding
    table that were looked up across workers, if the table's columns are sharded over an axis that
    shares a worker's batch: shard its rows there, or look it up by `jax.nn.one_hot(tokens, n) @
    table`. On Explicit axes `axis_name` alone is made manual for all of `fun`.

    If leaves at `argnums` are cut over the workers' axis (FSDP, ZeRO-3), `fun` sees them whole, and
    gradients are means without rows, cut as the leaves are. So no exchange stands in the optimizer.
    Arrays in `jax.jit` on Auto axes do not tell: give `specs`. See docs/fsdp.md.

    Args:
        fun: function of a scalar loss, as for `jax.value_and_grad`. A Flax nnx module has to be
            given as its state (`nnx.split`). Of an Equinox module at `argnums`, only floating-point
            arrays are differentiated, as by `equinox.filter_value_and_grad`.
        argnums: numbers of the arguments to differentiate, whole on each worker.
        has_aux: whether `fun` returns a pair of the loss and auxiliary output.
        batch_argnums: numbers of the arguments whose arrays are split along their first axis.
            Negative numbers count from the last. None: 1, the second argument. (): none, because
            each worker draws its own. Arguments by name are never split.
        mesh: the mesh, where neither arrays and their types nor `jax.set_mesh` tell it.
        axis_name: the mesh axis of the workers.
        workers: number of workers to simulate on one device, without a mesh. Give the exchange and
            `per_worker` the same number.
        specs: partitions of what is at `argnums`, if leaves of it are cut over the workers, as
            `jaxsparse.fsdp_specs` makes them; or shardings, or arrays that have one.
        gather: how to gather these leaves and to average their gradients: `jaxsparse.Gather("int8",
            "int4")`. None: in their dtype. False: `fun` sees shards, and calls `jaxsparse.gather`.

    Returns:
        A function of the arguments of `fun`. It works inside and outside of `jax.jit`.

    Raises:
        ValueError: at the call: no mesh is known, the axis is bound already, an argument is missing
            or both differentiated and split, the workers don't divide a batch, or it is empty, or
            its arrays have unlike numbers of rows; or an array elsewhere has as many as the batch:
            by name, or if `batch_argnums` was not given in another argument; or the loss closes
            over one and each worker has one row. (An array of more rows over which it closes is
            whole on each worker, whatever it is, and so is what the loss makes of it.)

    Example:
        >>> loss = lambda w, x: jnp.sum(w * x.mean(0))
        >>> batch = jnp.float32([[1, 2], [3, 4]])
        >>> values, grads = value_and_grad(loss, workers=2)(jnp.ones(2), batch)
        >>> values.tolist(), grads.tolist()
        ([3.0, 7.0], [[1.0, 2.0], [3.0, 4.0]])
    """
    argnums = int(argnums) if isinstance(argnums, Integral) else argnums
    check_argnums(argnums)
    differentiate = _differentiated(fun, argnums, has_aux)

    @functools.wraps(fun)
    def rows(*args: Any, **kwargs: Any) -> Any:
        if wire.is_bound(axis_name):
            raise ValueError(
                f"axis_name={axis_name!r} is bound here, so this is one worker's code already: "
                "call jaxsparse.value_and_grad outside of that jax.shard_map or jax.vmap, or "
                "jax.value_and_grad inside"
            )
        given = held(with_fixed(argnums, batch_argnums, args, kwargs))
        check_arrays("argument", given)
        there = Workers.find(given, axis_name, mesh, workers)
        split = numbers_of_batches(batch_argnums, argnums, *given, there.count)
        treedef: Any
        flat, treedef = tree_flatten_with_path(given)
        is_split = [path[0].idx == 0 and path[1].idx in split for path, _ in flat]

        def one(*leaves: Any) -> OwnAndEqual:
            args, kwargs = released(treedef.unflatten(leaves))
            try:
                with whole_leaves(gather is not False):
                    value, grads = differentiate(*args, **kwargs)
            except Exception as error:
                if batch_argnums is None and isinstance(error, TypeError | ValueError):
                    error.add_note(
                        "The loss sees one worker's rows of argument 1, and all else whole, also "
                        "arrays over which it closes. If another argument is the batch, give "
                        "jaxsparse.value_and_grad its number as batch_argnums. (A chain without an "
                        "exchange would have given parameters a row for each worker)"
                    )
                raise
            check_arrays("auxiliary output", value[1] if has_aux else None)
            return (value, grads), None

        def alone(*leaves: Any) -> OwnAndEqual:
            args, kwargs = released(treedef.unflatten(leaves))
            with whole_leaves(gather is not False):
                return (fun(*args, **kwargs), ()), None

        def check(program: Jaxpr) -> None:
            if batch_argnums is None:
                batches = [given[0][i] for i in split]
                check_closed_over(program, batches, there.count, "give batch_argnums=1")

        leaves = [x for _, x in flat]
        cut = CutLeaves.find(flat, given[0], argnums, specs, gather, there)
        if cut is None:
            (value, grads), _ = on_workers(one, there, is_split, is_split, check, alone)(*leaves)
            return value, marked(grads)
        sent, rows_in = cut.entered(leaves, is_split)
        of_batch = [*is_split, *[False] * (len(sent) - len(leaves))]
        whole, alone = (cut.around(f, len(leaves)) for f in (one, alone))
        return cut.returned(*on_workers(whole, there, rows_in, of_batch, check, alone)(*sent))

    return rows


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **options: Any,
) -> Callable[..., Any]:
    """`jax.grad` for each worker: `value_and_grad` without the values. See there.

    Returns:
        A function of the arguments of `fun`. It returns gradients, or with `has_aux` a pair of
        gradients and auxiliary output, with a row for each worker.
    """
    both = value_and_grad(fun, argnums, has_aux, **options)

    @functools.wraps(fun)
    def rows(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return rows


def _differentiated(
    fun: Callable[..., Any], argnums: int | Sequence[int], has_aux: bool
) -> Callable[..., Any]:
    """`jax.value_and_grad`, which leaves out what Equinox' modules have besides floats."""
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    def run(*args: Any, **kwargs: Any) -> Any:
        equinox: Any = sys.modules.get("equinox")  # not imported here
        is_module = lambda node: equinox is not None and isinstance(node, equinox.Module)
        wanted, others = dict[int, Any](), dict[int, Any]()
        for i in numbers:
            wanted[i], others[i] = args[i], None
            if any(map(is_module, jax.tree.leaves(args[i], is_leaf=is_module))):
                wanted[i], others[i] = equinox.partition(args[i], equinox.is_inexact_array)

        def of(*wanted: Any) -> Any:
            whole = list(args)
            for i, own in zip(numbers, wanted):
                whole[i] = own if others[i] is None else equinox.combine(own, others[i])
            return fun(*whole, **kwargs)

        each = jax.value_and_grad(of, tuple(range(len(numbers))), has_aux)
        value, grads = each(*(wanted[i] for i in numbers))
        return value, grads[0] if isinstance(argnums, int) else grads

    return run


def on_workers(
    one: Callable[..., OwnAndEqual],
    workers: Workers,
    is_split: list[bool],
    of_batch: list[bool],
    check: Callable[[Jaxpr], None],
    loss: Callable[..., OwnAndEqual] | None = None,
) -> Callable[..., OwnAndEqual]:
    """`one`, which has a model inside, on all workers. See `run_on`.

    `is_split` tells of each array whether it is cut over the workers, and `of_batch` whether that
    is because it is of a batch. A worker's own state is cut, too.
    `check` is given the program of one worker. If `one` differentiates a loss, `loss` is that: it
    may branch on a worker's own values, and a step with an exchange branches on agreed ones.

    On a mesh without other axes, and without an operation that has a mesh, it runs as it is, and a
    `jax.lax.cond` takes one of its branches. Otherwise it is mapped, so that JAX places all but the
    workers' axis.
    """
    count, mesh, axis_name = workers.count, workers.mesh, workers.axis_name
    assert axis_name is not None
    inner, has_own_branches = workers.inner, loss is not None

    def traced(
        trace: Callable[[Callable[..., Any], Sequence[Any]], ClosedJaxpr], types: Sequence[Any]
    ) -> tuple[ClosedJaxpr, Any]:
        """The program of one worker, which is checked, and the structure of what it returns."""
        trees = list[Any]()

        def flat(function: Callable[..., Any], *leaves: Any) -> list[Any]:
            found, tree = jax.tree.flatten(function(*leaves))
            trees.append(tree)
            return [jnp.asarray(x) for x in found]

        def judge(
            program: Jaxpr, again: Callable[[Sequence[Any]], ClosedJaxpr], is_loss: bool = False
        ) -> None:
            check(program)
            bodies.check_sums(program, axis_name)
            if count > 1:  # else nothing is cut
                bodies.check_traced_before(program, axis_name)
                bodies.check_rules_of_vmap(program, axis_name)
                is_own = is_split if has_own_branches else of_batch
                ranks.check_branches(program, is_own, axis_name)
                ranks.check_unnamed(program, is_split, axis_name)
                bodies.check_inner(program, axis_name, is_loss)
                bodies.check_unnamed_gradients(program, axis_name)
                is_last = is_loss or loss is None
                named_axes.check_named(
                    program, of_batch, axis_name, count, types, again, is_loss, is_last
                )

        own = functools.partial(trace, functools.partial(flat, one))
        program = own(types)
        tree = trees[-1]  # others follow, of more rows
        judge(program.jaxpr, own)
        if loss is not None and shard_maps.calls_in(program.jaxpr):
            # Of an inner gradient JAX drops, in that of the loss, what nothing needs.
            whole = functools.partial(trace, functools.partial(flat, loss))
            if bodies.has_derivatives(of_loss := whole(types).jaxpr):
                judge(of_loss, whole, is_loss=True)
        return program, tree

    def traced_inside(*leaves: Any, closed: Sequence[Any] = ()) -> OwnAndEqual:
        """Traces and runs it. Behind the arguments of `one` stand values that `closed` are here."""
        leaves, inside = leaves[: len(is_split)], leaves[len(is_split) :]
        around = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh

        def trace(flat: Callable[..., Any], types: Sequence[Any]) -> ClosedJaxpr:
            with (
                shard_maps.leave_out(axis_name, count, mesh=around),
                one_worker.told_of_explicit(mesh, axis_name),
            ):
                # JAX's caches of inner functions tell this trace by an axis that nothing uses.
                return jax.make_jaxpr(flat, axis_env=[(f"{one_worker.ROWS}_inside", 1)])(*types)

        program, tree = traced(trace, [*map(jax.typeof, leaves)])
        if workers.is_explicit:
            bodies.check_explicit(program.jaxpr, axis_name)
        program = rewritten(program, axis_name, mesh, count, False, bool(inner))
        known = {id(x): own for x, own in zip(closed, inside)}
        consts = [known.get(id(x), x) for x in program.consts]
        return tree.unflatten(jaxpr_as_fun(ClosedJaxpr(program.jaxpr, consts))(*leaves))

    def run(*leaves: Any) -> OwnAndEqual:
        types = [
            jax.ShapeDtypeStruct(
                (x.shape[0] // count, *x.shape[1:]) if yes else x.shape,
                x.dtype,
                weak_type=x.weak_type,
            )
            for x, yes in zip(map(jax.typeof, leaves), is_split)
        ]
        trace = lambda flat, types: one_worker.trace(
            flat, types, axis_name, count, mesh is not None
        )
        program, tree = traced(trace, types)
        is_mapped = mesh is None or bool(inner) or one_worker.knows_mesh(program.jaxpr)
        in_context = not jax.sharding.get_abstract_mesh().empty
        # An exchange in a step has another form where its axis is manual, and a program has types
        # of the mesh in context: it is traced there. JAX fails there, by an assertion, on
        # jax.ensure_compile_time_eval.
        has_form = not has_own_branches and one_worker.uses(program.jaxpr, axis_name)
        if mesh is not None and not is_mapped and (in_context or has_form):
            with contextlib.suppress(AssertionError):
                again = functools.partial(traced_inside, closed=program.consts)
                return run_on(workers, again, [*leaves, *program.consts], is_split)
            is_mapped = True
        program = rewritten(program, axis_name, mesh, count, is_mapped, is_mapped)

        def as_fun(*leaves: Any) -> OwnAndEqual:
            called = ClosedJaxpr(program.jaxpr, leaves[len(is_split) :])
            return tree.unflatten(jaxpr_as_fun(called)(*leaves[: len(is_split)]))

        mapped = lambda *given: run_on(
            workers, as_fun, given, is_split, one_worker.ROWS if is_mapped else None
        )
        if mesh is None and one_worker.knows_mesh(program.jaxpr):
            mapped = jax.jit(mapped)  # JAX runs no mapped shard_map as it is read
        return mapped(*leaves, *program.consts)

    if workers.is_explicit:
        return lambda *leaves: run_on(workers, traced_inside, leaves, is_split)
    return run


def run_on(
    workers: Workers,
    one: Callable[..., OwnAndEqual],
    given: Sequence[Any],
    is_split: list[bool],
    vmapped_as: str | None = None,
) -> OwnAndEqual:
    """Runs `one` on all workers, and leaves inner axes to JAX.

    Args:
        workers: the workers, W.
        one: function of arrays, which gives the worker's own arrays and those equal on all workers.
        given: the arrays of all workers. Behind them stand values over which `one` closes, whole:
            inside, they would have types of a mesh whose axes are not manual.
        is_split: whether each array is split along its first axis, or whole on each worker.
        vmapped_as: see `Workers.map`.

    Returns:
        Own arrays with a row for each worker, (W, ...), and equal ones.
    """
    split, whole = PartitionSpec(workers.axis_name), PartitionSpec()
    rows = [*is_split, *[False] * (len(given) - len(is_split))]
    specs = tuple(split if yes else whole for yes in rows)
    arrays = tuple(map(jnp.asarray, given))
    auto = frozenset(workers.inner)

    def each(*leaves: Any) -> OwnAndEqual:
        own, equal = one(*leaves)
        return jax.tree.map(lambda x: jnp.asarray(x)[None], own), equal

    with shard_maps.no_casts() if vmapped_as else contextlib.nullcontext():
        return workers.map(each, arrays, specs, (split, whole), auto=auto, vmapped_as=vmapped_as)
