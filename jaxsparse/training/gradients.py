"""Each worker's own loss and gradients, in a step that stays the trainer's.

Only the gradient has to be a worker's own. So the loss alone is one worker's function, and all
other code of a step is what it is under `jax.jit`: clips, moments, metrics and schedules work on
ordinary arrays.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, jaxpr_as_fun
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_flatten_with_path

from jaxsparse.arrays.layout import check_arrays
from jaxsparse.comm import compat, wire
from jaxsparse.comm.marks import is_marked, module_in
from jaxsparse.comm.meshes import AnyMesh, find_workers, inner_axes, names_of, restricted
from jaxsparse.comm.static_leaves import held, released
from jaxsparse.training.constraints import constrains, rewritten

Way = Literal["vmap", "shard_map"]
# vmap's weight gradients of convolutions gather across workers; of a ragged product it has no rule.
_NOT_MAPPED = {"conv_general_dilated", "ragged_dot_general"}
# A worker's own arrays, and those equal on all workers: `LocalSteps` has some, gradients none.
OwnAndEqual = tuple[list[Any], list[Any]]


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    batch_argnums: int | Sequence[int] | None = None,
    mesh: Mesh | None = None,
    axis_name: str = "data",
    workers: int | None = None,
    via: Way | None = None,
) -> Callable[..., Any]:
    """`jax.value_and_grad` for each worker: its own values and gradients, a row for each worker.

        @jax.jit
        def step(params, opt_state, batch):
            loss, grads = jaxsparse.value_and_grad(loss_of)(params, batch)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss.mean()

    `fun` is one worker's function. It sees its part of the batch, and all other arguments whole.
    Inside, `jax.lax.axis_index(axis_name)` is the worker's number, for keys of its own. Everything
    that comes back has a row for each worker, split over `axis_name`: the value (W,), auxiliary
    output and gradients (W, ...). A chain with an exchange of this library takes the gradients as
    they are, and makes means of them. Take means of all else: `loss.mean()`.

    Other axes of the mesh are left to JAX, as under `jax.jit`: FSDP and tensor parallelism inside
    `fun` need no change. Sharding constraints in `fun` may name `axis_name`; it is taken out. (With
    a convolution beside it, only a `NamedSharding` may, and not a `PartitionSpec` or logical axes.)

    On a mesh without other axes `fun` runs under `jax.shard_map` (by vmap, if a constraint names
    `axis_name`). With other axes there are two ways. `via="vmap"` maps over the rows. It does not
    serve convolutions, whose weight gradients JAX would gather across workers, nor a
    `jax.shard_map` of some axes inside `fun`, nor Explicit axes. XLA may move an embedding table
    across workers if its columns are sharded over an axis that shares a worker's batch: shard its
    rows there. `via="shard_map"` makes `axis_name` alone manual. With two or more other axes XLA
    (jaxlib 0.10 to 0.12, on CPU) then ends the process on a lookup `table[tokens]` in a table whose
    columns are sharded: look it up by `jax.nn.one_hot(tokens, n) @ table`. The default is
    "shard_map" where "vmap" does not serve.

    Args:
        fun: function of a scalar loss, as for `jax.value_and_grad`. A Flax nnx module has to be
            given as its state (`nnx.split`). Of an Equinox module at `argnums`, only floating-point
            arrays are differentiated, as by `equinox.filter_value_and_grad`.
        argnums: numbers of the arguments to differentiate, whole on each worker.
        has_aux: whether `fun` returns a pair of the loss and auxiliary output.
        batch_argnums: numbers of the arguments whose arrays are split along their first axis.
            Negative numbers count from the last. None: 1, the second argument.
        mesh: the mesh, where neither arrays and their types nor `jax.set_mesh` tell it.
        axis_name: the mesh axis of the workers.
        workers: number of workers to simulate on one device, without a mesh. Give the exchange and
            `per_worker` the same number.
        via: how to run on a mesh with other axes. None: see above.

    Returns:
        A function of the arguments of `fun`. It works inside and outside of `jax.jit`.

    Raises:
        ValueError: at the call: no mesh is known, the axis is bound already, an argument is missing
            or both differentiated and split, another argument has as many rows as the batch and
            `batch_argnums` was not given, or the workers don't divide a batch.

    Example:
        >>> loss = lambda w, x: jnp.sum(w * x.mean(0))
        >>> batch = jnp.float32([[1, 2], [3, 4]])
        >>> values, grads = value_and_grad(loss, workers=2)(jnp.ones(2), batch)
        >>> values.tolist(), grads.tolist()
        ([3.0, 7.0], [[1.0, 2.0], [3.0, 4.0]])
    """
    check_way(via)
    differentiate = _differentiated(fun, argnums, has_aux)

    @functools.wraps(fun)
    def rows(*args: Any, **kwargs: Any) -> Any:
        if wire.is_bound(axis_name):
            raise ValueError(
                f"axis_name={axis_name!r} is bound here, so this is one worker's code already: "
                "call jaxsparse.value_and_grad outside of that jax.shard_map or jax.vmap, or "
                "jax.value_and_grad inside"
            )
        given = held((args, kwargs))
        check_arrays("argument", given)
        count, found = find_workers(given, axis_name, mesh, workers)
        split = _numbers_of_batches(batch_argnums, argnums, args, count)
        treedef: Any
        flat, treedef = tree_flatten_with_path(given)
        is_split = [path[0].idx == 0 and path[1].idx in split for path, _ in flat]
        outputs: Any = None

        def one(*leaves: Any) -> OwnAndEqual:
            nonlocal outputs
            args, kwargs = released(treedef.unflatten(leaves))
            try:
                found, outputs = jax.tree.flatten(differentiate(*args, **kwargs))
            except Exception as error:
                if batch_argnums is None and len(args) > 2:
                    error.add_note(
                        "The loss sees one worker's rows of argument 1, and all else whole. If "
                        "another argument is the batch, give jaxsparse.value_and_grad its number "
                        "as batch_argnums"
                    )
                raise
            return [jnp.asarray(x) for x in found], []

        each = _on_workers(one, count, found, axis_name, is_split, via)
        made, _ = each(*(x for _, x in flat))
        return outputs.unflatten(made)

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


def _on_workers(
    one: Callable[..., OwnAndEqual],
    workers: int,
    mesh: AnyMesh | None,
    axis_name: str,
    is_split: list[bool],
    via: Way | None,
) -> Callable[..., OwnAndEqual]:
    """`one` on all workers. Its results have a row for each worker."""
    if mesh is None:
        return run_mapped(one, workers, None, axis_name, is_split)
    inner = {name for name, _ in inner_axes(mesh, axis_name)}
    if AxisType.Explicit in mesh.axis_types:  # types inside are those of the manual mesh
        return _manually(one, mesh, axis_name, is_split, inner)

    def run(*leaves: Any) -> OwnAndEqual:
        shapes = [
            jax.ShapeDtypeStruct(
                (x.shape[0] // workers, *x.shape[1:]) if yes else x.shape,
                x.dtype,
                weak_type=x.weak_type,
            )
            for x, yes in zip(map(jax.typeof, leaves), is_split)
        ]
        # Traced outside, where constraints may name all axes.
        program = jax.make_jaxpr(one, axis_env=[(axis_name, workers)])(*shapes)
        flat = jaxpr_as_fun(rewritten(program, axis_name, is_manual=not inner))

        def as_fun(*leaves: Any) -> OwnAndEqual:
            return flat(*leaves), []

        constrained = constrains(program.jaxpr, axis_name)
        serves = via == "vmap" or (via is None and serves_vmap(program.jaxpr, axis_name))
        if serves and (inner or constrained):
            return run_mapped(as_fun, workers, mesh, axis_name, is_split)(*leaves)
        # What knows a mesh, or takes the one in context, has to be traced where its axis is manual.
        # Beside inner axes that is even `jax.lax.axis_index`, whose lowering asks for the mesh.
        in_context = not jax.sharding.get_abstract_mesh().empty
        needs_mesh = constrained or in_context or inner
        return _manually(one if needs_mesh else as_fun, mesh, axis_name, is_split, inner)(*leaves)

    return run


def _manually(
    one: Callable[..., OwnAndEqual],
    mesh: AnyMesh,
    axis_name: str,
    is_split: list[bool],
    inner: set[str],
) -> Callable[..., OwnAndEqual]:
    """`one` by `run_manually`, with constraints for a mesh whose axis is manual."""

    def body(*leaves: Any) -> OwnAndEqual:
        program = rewritten(jax.make_jaxpr(one)(*leaves), axis_name, is_manual=not inner)
        return jaxpr_as_fun(program)(*leaves), []

    return run_manually(body, mesh, axis_name, is_split, inner)


def run_mapped(
    one: Callable[..., OwnAndEqual],
    workers: int,
    mesh: AnyMesh | None,
    axis_name: str,
    is_split: list[bool],
) -> Callable[..., OwnAndEqual]:
    """`one` mapped over the workers by vmap.

    Args:
        one: function of arrays, which gives the worker's own arrays and those equal on all workers.
        workers: number of workers, W.
        mesh: the mesh. None: workers are simulated.
        axis_name: the axis of the workers.
        is_split: whether each array is split along its first axis, or whole on each worker.

    Returns:
        A function of the arrays of all workers. Of own ones it gives rows, (W, ...).
    """

    def rows(x: Any) -> Any:
        """An array whose first axis is that of the workers. XLA may copy it over them if told less.

        Along its other axes it may be sharded in any way.
        """
        if mesh is None:
            return x
        free = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)
        sharding = NamedSharding(mesh, PartitionSpec(axis_name, *free))
        return jax.lax.with_sharding_constraint(x, sharding)

    def run(*leaves: Any) -> OwnAndEqual:
        given = [
            rows(x.reshape(workers, x.shape[0] // workers, *x.shape[1:])) if yes else x
            for x, yes in zip(map(jnp.asarray, leaves), is_split)
        ]
        mapped = jax.vmap(
            one,
            in_axes=[0 if yes else None for yes in is_split],
            out_axes=(0, None),
            axis_name=axis_name,
            axis_size=workers,
            spmd_axis_name=None if mesh is None else axis_name,
        )
        own, equal = mapped(*given)
        return [rows(x) for x in own], equal

    return run


def run_manually(
    one: Callable[..., OwnAndEqual],
    mesh: AnyMesh,
    axis_name: str,
    is_split: list[bool],
    inner: set[str],
) -> Callable[..., OwnAndEqual]:
    """`one` with the axis of the workers manual, and all axes but `inner`. See `run_mapped`."""
    split, kinds = PartitionSpec(axis_name), dict(zip(mesh.axis_names, mesh.axis_types))

    def body(*leaves: Any) -> OwnAndEqual:
        own, equal = one(*leaves)
        return [jnp.asarray(x)[None] for x in own], equal

    def typed(x: Any, yes: bool) -> Any:
        """Explicit axes refuse arguments whose types have another sharding."""
        wanted = restricted(jax.typeof(x).sharding.spec, inner)
        if yes and kinds[axis_name] == AxisType.Explicit:
            first = names_of(wanted[0]) if len(wanted) else ()
            wanted = PartitionSpec((axis_name, *first), *wanted[1:])
        return jax.reshard(x, NamedSharding(mesh, wanted))

    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=tuple(split if yes else PartitionSpec() for yes in is_split),
        out_specs=(split, PartitionSpec()),
        axis_names=set(mesh.axis_names) - inner,
        check_vma=False,
    )
    if AxisType.Explicit not in mesh.axis_types:
        return mapped
    return lambda *leaves: mapped(*map(typed, leaves, is_split))


def check_way(via: Any) -> None:
    """Raises ValueError if this is no way to run on a mesh with other axes."""
    if via not in (None, "vmap", "shard_map"):
        raise ValueError(f"via={via!r} is unknown: use 'vmap', 'shard_map' or None")


def serves_vmap(program: Jaxpr, axis_name: str) -> bool:
    """Whether a program has no operation that `jax.vmap` does not serve (see `value_and_grad`)."""

    def serves(equation: Any) -> bool:
        if equation.primitive.name == "shard_map":
            return axis_name in compat.manual_axes_of(equation.params)
        return equation.primitive.name not in _NOT_MAPPED

    return all(
        serves(equation)
        and all(serves_vmap(p, axis_name) for p in compat.inner_programs(equation.params))
        for equation in program.eqns
    )


def _numbers_of_batches(
    given: int | Sequence[int] | None,
    argnums: int | Sequence[int],
    args: tuple[Any, ...],
    workers: int,
) -> set[int]:
    """The numbers, from 0, of the batches among a call's arguments, which are checked."""
    as_tuple = lambda numbers: (numbers,) if isinstance(numbers, int) else tuple(numbers)
    for name, numbers in (("argnums", argnums), ("batch_argnums", 1 if given is None else given)):
        if any(not -len(args) <= i < len(args) for i in as_tuple(numbers)):
            raise ValueError(
                f"{name}={numbers} names an argument that is missing: the call has {len(args)} "
                "positional arguments. A loss that closes over its batch has to take it as an "
                "argument, or each worker computes all of it"
            )
    split, whole = (
        {i % len(args) for i in as_tuple(numbers)}
        for numbers in (1 if given is None else given, argnums)
    )
    if both := sorted(split & whole):
        raise ValueError(
            f"argument {both[0]} is differentiated (argnums={argnums}) and split over the workers: "
            "give batch_argnums= the numbers of the batches"
        )
    for i, arg in enumerate(args):
        if (module := module_in(arg)) is not None:  # an empty nnx.List is false
            raise ValueError(
                f"argument {i} has a flax.nnx {type(module).__name__}: differentiate its state, as "
                "in graph, params = nnx.split(model), and nnx.merge(graph, params) in the loss"
            )
    leaves = [tree_flatten_with_path(arg)[0] for arg in args]
    for i in split:
        for path, x in leaves[i]:
            name, shape = f"argument {i}{keystr(path)}", jnp.shape(x)
            if not shape:
                raise ValueError(
                    f"{name} is a scalar in a batch, which can't be split: pass it as an argument "
                    "of its own, which all workers get whole"
                )
            if shape[0] % workers:
                raise ValueError(
                    f"{name} is a batch of shape {shape}, whose first axis {workers} workers "
                    "cannot share equally: change the batch size, or leave the argument out of "
                    "batch_argnums to give it whole to every worker"
                )
            if is_marked(path):
                raise ValueError(
                    f"{name} is the state of an exchange, in a batch: give batch_argnums= the "
                    "numbers of the batches"
                )
    counts = {jnp.shape(x)[0] for i in split for _, x in leaves[i]}
    looks_so = [
        i
        for i in range(len(args))
        if given is None
        and i not in split | whole
        and leaves[i]
        and all(jnp.ndim(x) and jnp.shape(x)[0] in counts for _, x in leaves[i])
    ]
    if looks_so:
        raise ValueError(
            f"arguments {looks_so} have as many rows as the batch: give "
            f"batch_argnums={tuple(sorted({*split, *looks_so}))} if they belong to the batch, and "
            "batch_argnums=1 if each worker is to see them whole"
        )
    return split
