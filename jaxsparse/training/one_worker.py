"""One worker's function as a program.

Code for `jax.jit` names all axes that share a batch: in constraints, `PartitionSpec(("hosts",
"fsdp"))`, and in the specs of a `jax.shard_map` around a kernel. A function of one worker sees its
part alone, so that "hosts" says nothing there. A `shard_map` loses the axis while it is traced, and
constraints lose it in the program (`rewriting`).

A gradient is traced as a whole, and mapped over workers afterwards, so that JAX differentiates a
`shard_map` as it would on one worker's own devices.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import AxisType, NamedSharding

from jaxsparse.comm import compat, shard_maps
from jaxsparse.comm.meshes import AnyMesh
from jaxsparse.comm.shard_maps import names

# What `jax.vmap` calls the workers' axis. In the body of a shard_map, where it is manual, the axis
# keeps the mesh's name.
ROWS = "jaxsparse_rows"

# Parameters of operations that say how values are sharded: of constraints, and of inner jax.jit.
_OF_JIT = ("in_shardings", "out_shardings")
SHARDINGS: dict[str, tuple[str, ...]] = {
    "sharding_constraint": ("sharding",),
    "jit": _OF_JIT,
    "pjit": _OF_JIT,
}
_SPECS = ("in_specs", "out_specs")


def trace(
    one: Callable[..., list[Any]],
    shapes: Sequence[Any],
    axis_name: str,
    workers: int,
    is_on_mesh: bool,
) -> ClosedJaxpr:
    """The program of one worker's function.

    Args:
        one: function of arrays, which returns a list of arrays.
        shapes: the shapes and dtypes of its arguments.
        axis_name: the axis of the workers, bound inside.
        workers: number of workers, W.
        is_on_mesh: whether the axis is one of the mesh. If not, workers are simulated, and a mesh
            that the function has is each worker's own.

    Raises:
        ValueError: a `shard_map` inside can't run on one worker's values.
    """
    if not is_on_mesh:
        with shard_maps.leave_out(axis_name, workers, is_simulated=True):
            simulated = _trace(one, shapes, axis_name, workers, None)
        _check_simulated(simulated.jaxpr, axis_name, workers)
        return simulated
    # Types of the workers' axis are given where a body uses it. Else they would be in the way: of a
    # value with that type JAX keeps, for the backward pass, an array that is cut over workers.
    with shard_maps.leave_out(axis_name, workers) as tracing:
        try:
            program = _trace(one, shapes, axis_name, workers, axis_name)
        except Exception:
            if not tracing.has_named:
                raise
            program = None
    if not shard_maps.can_leave_out():
        assert program is not None
        _check_names(program.jaxpr, axis_name)
    if program is not None and not _untyped(program.jaxpr, axis_name):
        return program
    # JAX keeps what it traced of an inner jit, and calls no shard_map in it again.
    calls = [] if program is None else shard_maps.calls_in(program.jaxpr)
    if tracing.has_named or any(call.is_named and call.is_checked for call in calls):
        with shard_maps.leave_out(axis_name, workers, "named"):
            program = _trace(one, shapes, axis_name, workers, axis_name, "named")
    assert program is not None
    if not (untyped := _untyped(program.jaxpr, axis_name)):
        return program
    try:
        with shard_maps.leave_out(axis_name, workers, "all"):
            return _trace(one, shapes, axis_name, workers, axis_name, "all")
    except Exception as error:
        raise ValueError(
            f"the jax.shard_map at {compat.place_of(untyped[0])} uses the axis {axis_name!r} "
            "inside, and its types do not allow that on one worker's values: give it "
            f"check_vma=False, or name {axis_name!r} in its in_specs"
        ) from error


def _trace(
    one: Callable[..., Any],
    shapes: Sequence[Any],
    axis_name: str,
    workers: int,
    spmd: str | None,
    typed: shard_maps.Typed = "none",
) -> ClosedJaxpr:
    programs = list[ClosedJaxpr]()

    def inside(_: Any) -> None:
        programs.append(jax.make_jaxpr(one)(*shapes))

    # Under vmap JAX knows that the axis is mapped, and does not sum a shard_map's cotangents over
    # it. The second axis tells JAX's caches of inner jax.jit how this worker's code is traced.
    each = jax.vmap(inside, axis_name=axis_name, spmd_axis_name=spmd)
    one_row = jax.vmap(each, in_axes=None, axis_name=f"{ROWS}_{typed}", axis_size=1)
    try:
        jax.eval_shape(one_row, jax.ShapeDtypeStruct((workers,), jnp.float32))
    except ValueError as error:
        if type(error).__name__ != "IndivisibleError" or f"'{axis_name}'" not in str(error):
            raise
        raise ValueError(
            f"the code at {compat.place_of_error(error)} has shardings that cut one worker's rows "
            f"over the workers' axis {axis_name!r} once more: leave it out of the in_shardings and "
            "out_shardings of an inner jax.jit"
        ) from error
    return programs[-1]


_ONE_AXIS = {"all_gather", "all_gather_invariant", "reduce_scatter", "ppermute"}


def _check_simulated(program: Jaxpr, axis_name: str, workers: int) -> None:
    """Raises ValueError if JAX does not simulate a collective of the program."""
    for equation, _ in compat.scoped(program):
        params = equation.params
        if axis_name not in compat.axes_of(params):
            continue
        is_part = (
            params.get("axis_index_groups") is not None or len(params.get("perm", ())) % workers
        )
        is_joint = equation.primitive.name in _ONE_AXIS and len(compat.axes_of(params)) > 1
        if is_part or is_joint:
            raise ValueError(
                f"the {equation.primitive.name} at {compat.place_of(equation)} does not run with "
                "simulated workers: JAX simulates no groups of them, permutations of all alone "
                f"(their number is jax.lax.axis_size({axis_name!r}), and not that of a mesh in the "
                "loss), and no gather over other axes at once. Take a mesh of as many devices"
            )


@contextlib.contextmanager
def told_of_explicit(mesh: AnyMesh | None, axis_name: str) -> Iterator[None]:
    """Tells what a function for Explicit axes has to leave out where the workers' axis is manual.

    Raises:
        ValueError: JAX refused the function for the axis' sake.
    """
    try:
        yield
    except Exception as error:  # JAX's error of shardings is of no other kind
        words = str(error) or repr(axis_name)  # JAX asserts without words
        is_of_axis = any(
            word in words
            for word in (repr(axis_name), f": {axis_name} ", "`Manual`", "{V:", "cotangent type")
        )
        is_ours = words.startswith(shard_maps.OURS)
        if mesh is None or AxisType.Explicit not in mesh.axis_types or not is_of_axis or is_ours:
            raise
        raise ValueError(
            f"the code at {compat.place_of_error(error)} does not run in one worker's function on "
            f"Explicit axes, where the workers' axis {axis_name!r} is manual: pass arrays over "
            f"which it closes as arguments, leave {axis_name!r} out of PartitionSpecs, write them "
            "without the mesh, give jax.shard_map its in_specs, and check_vma=False if its body "
            "uses the axis, use neither auto_axes nor explicit_axes nor "
            "jax.ensure_compile_time_eval; or make "
            "the mesh with axis_types=(jax.sharding.AxisType.Auto,) * n"
        ) from error


def _equations(program: Jaxpr) -> Iterator[Any]:
    """All equations of a program and of those inside it, but of bodies of shard_maps."""
    for equation in program.eqns:
        yield equation
        if equation.primitive.name != "shard_map":
            for inner in compat.inner_programs(equation.params):
                yield from _equations(inner)


def uses(program: Jaxpr, axis_name: str) -> bool:
    """Whether an equation anywhere in the program names the axis, as collectives do."""
    return any(axis_name in compat.axes_of(e.params) for e, _ in compat.scoped(program))


def _untyped(program: Jaxpr, axis_name: str) -> list[Any]:
    """The shard_maps with checked types whose bodies use the axis, and have no value of its type.

    There JAX would take what is reduced over the axis for equal on all workers.
    """
    return [
        equation
        for equation in _equations(program)
        if equation.primitive.name == "shard_map"
        and equation.params["check_vma"]
        and uses(equation.params["jaxpr"], axis_name)
        and not _enters(equation.params["jaxpr"])
    ]


def _check_names(program: Jaxpr, axis_name: str) -> None:
    for equation in _equations(program):
        if equation.primitive.name != "shard_map":
            continue
        if any(names(s, axis_name) for key in _SPECS for s in equation.params[key]):
            raise ValueError(
                f"from this release of JAX the library can't take an axis out of specs, and the "
                f"jax.shard_map at {compat.place_of(equation)} names the workers' axis "
                f"{axis_name!r}: leave it out of in_specs and out_specs there"
            )


def _enters(program: Jaxpr) -> bool:
    return any(e.primitive.name in shard_maps.ENTERING for e in program.eqns)


def knows_mesh(program: Jaxpr) -> bool:
    """Whether an operation has a mesh: a constraint, a `shard_map`, an inner jit with shardings."""
    return any(
        equation.primitive.name == "shard_map"
        or any(
            isinstance(x, NamedSharding)
            for name in SHARDINGS.get(equation.primitive.name, ())
            for x in jax.tree.leaves(equation.params[name])
        )
        for equation in _equations(program)
    )
