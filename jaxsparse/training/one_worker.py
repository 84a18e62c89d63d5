"""One worker's function as a program: traced, and checked.

Code for `jax.jit` names all axes that share a batch: in constraints, `PartitionSpec(("hosts",
"fsdp"))`, and in the specs of a `jax.shard_map` around a kernel. A function of one worker sees its
part alone, so that "hosts" says nothing there. A `shard_map` loses the axis while it is traced, and
constraints lose it in the program (`rewriting`).

A gradient is traced as a whole, and mapped over workers afterwards, so that JAX differentiates a
`shard_map` as it would on one worker's own devices.
"""

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.sharding import AxisType, NamedSharding

from jaxsparse.comm import compat, shard_maps
from jaxsparse.comm.meshes import AnyMesh
from jaxsparse.comm.shard_maps import names
from jaxsparse.feedback.axes import (
    ALONG,
    ELEMENTWISE,
    MOVES,
    TRUSTED,
    Known,
    RowAxis,
    RowsReading,
    place,
)

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
            return _trace(one, shapes, axis_name, workers, None)
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
    if tracing.has_named:
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


@contextlib.contextmanager
def told_of_explicit(mesh: AnyMesh | None, axis_name: str) -> Iterator[None]:
    """Tells what a function for Explicit axes has to leave out where the workers' axis is manual.

    Raises:
        ValueError: JAX refused the function for the axis' sake.
    """
    try:
        yield
    except (AssertionError, TypeError, ValueError, NotImplementedError) as error:
        words = str(error) or repr(axis_name)  # JAX asserts without words
        is_of_axis = any(
            word in words for word in (repr(axis_name), f": {axis_name} ", "`Manual`", "{V:")
        )
        if mesh is None or AxisType.Explicit not in mesh.axis_types or not is_of_axis:
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
    return any(e.primitive.name in ("enter_worker", "leave_worker") for e in program.eqns)


def check_named(
    program: Jaxpr,
    of_batch: Sequence[bool],
    axis_name: str,
    types: Sequence[Any],
    trace: Callable[[list[Any]], ClosedJaxpr],
) -> None:
    """Raises ValueError if a `shard_map` cuts over workers what is not a worker's rows.

    A body would take all of it for a part: of weights, of keys, of a sequence. A result may be a
    device's own sum. Rows are what grows with the batch, so the function is traced with twice the
    rows, too. Where it is known how rows lie, they have to lie one after the other. Where nothing
    is of a batch, a body may cut what it maps element by element.

    Args:
        program: what `trace` returned.
        of_batch: of each argument, whether it is of a batch.
        axis_name: the axis of the workers.
        types: the types of the arguments.
        trace: traces the function with other types.
    """
    if not (marks := _marks(program)):
        return
    if not any(of_batch):
        maps = [e for e, _ in compat.scoped(program) if e.primitive.name == "shard_map"]
        is_map = lambda e: _maps_elements(e.params["jaxpr"], axis_name)
        others = {compat.place_of(e) for e in maps if not is_map(e)}
        others.add("")  # an inner jit keeps no place
        is_cut = [m for m in marks if m.params["dim"] is not None]
        wrong = [m for m in is_cut if m.params["place"] in others]
    else:
        first = next((m for m in marks if m.params["dim"] is not None), marks[0])
        twice = lambda x: x.update(shape=(2 * x.shape[0], *x.shape[1:]))
        try:
            more = _marks(trace([twice(x) if yes else x for x, yes in zip(types, of_batch)]).jaxpr)
        except Exception as error:
            raise ValueError(
                f"{_cut(first, axis_name)} and whether these are a worker's rows can't be "
                "told. The function was traced with twice the rows of the batch, and that raised "
                f"{type(error).__name__}: {error}. Take the numbers of rows from shapes, or leave "
                f"{axis_name!r} out of that spec"
            ) from error
        if len(more) != len(marks):  # of an unrolled loop over rows
            more = marks
        counts = {x.shape[0] for x, yes in zip(types, of_batch) if yes}
        reading = _RowsOfBatch(counts, axis_name)
        reading.program(program, [RowAxis(0, 1) if yes else None for yes in of_batch])
        grows = lambda m, other: m.params["rows"] < other.params["rows"]
        wrong = [m for m, other in zip(marks, more) if reading.refuses(m, grows(m, other))]
    if wrong:
        raise ValueError(_refusal(wrong[0], axis_name))


def _refusal(mark: Any, axis_name: str) -> str:
    """The error that tells what is wrong with a marked value, and what to write."""
    shape, params, axis = getattr(mark.outvars[0].aval, "shape", ()), mark.params, repr(axis_name)
    what = f"the jax.shard_map at {params['place']} {params['verb']} a value of shape {shape}"
    if params["dim"] is None:
        fix = f"jax.lax.all_gather(x, {axis}, tiled=True) inside gives that of all workers"
        return (
            f"{what} that grows with the batch, beside others that specs cut over the workers' "
            f"axis {axis}. Under jax.jit it is of all workers' rows, and here of one worker's: "
            f"name {axis} in its spec ({fix})"
        )
    fix = (
        "What a device makes may be a W-th of all, or all: return an entry for each row, or "
        f"jax.lax.pmean(x, {axis}) and leave the axis out of that spec"
        if params["verb"] == "makes"
        else "Each worker has all of it: leave the axis out of that spec, and out of sums inside. "
        f"A worker's own part is x[jax.lax.axis_index({axis})], and rows of a batch can be made "
        "inside"
    )
    return f"{_cut(mark, axis_name)} and these are no rows of a batch. {fix}"


def _cut(mark: Any, axis_name: str) -> str:
    shape, params = getattr(mark.outvars[0].aval, "shape", ()), mark.params
    return (
        f"the jax.shard_map at {params['place']} {params['verb']} a value of shape {shape}, whose "
        f"{params['rows']} entries a spec cuts over the workers' axis {axis_name!r},"
    )


def _marks(program: Jaxpr) -> list[Any]:
    """Marks of what shard_maps whose specs name the workers' axis take, in the program's order."""
    return [e for e, _ in compat.scoped(program) if e.primitive.name == shard_maps.MARK]


def _maps_elements(program: Jaxpr, axis_name: str) -> bool:
    sums = ("psum", "psum_invariant")
    is_sum = lambda e: e.primitive.name in sums and axis_name not in compat.axes_of(e.params)
    return all(
        e.primitive.name in ELEMENTWISE or compat.is_elementwise(e) or is_sum(e)
        for e in program.eqns
    )


class _RowsOfBatch(RowsReading):
    """Where a batch has its rows, as far as that is known, and which bodies use the axis."""

    is_strict = False

    def __init__(self, counts: set[int], axis_name: str) -> None:
        super().__init__()
        self._counts, self._axis_name = counts, axis_name
        self._users = set[int]()  # marks, by id, of bodies that use the axis
        # Marks of dimensions: whether they have rows in order, all or a part, at each call of an
        # inner function; and those that have not, where rows were mixed, or come again and again.
        self._ordered, self._astray = dict[int, bool](), set[int]()
        self._of_bodies = dict[Any, tuple[bool, set[int]]]()  # by result: use, and sizes of rows
        self._taken = dict[Any, Any]()  # marks of arguments, by what they make

    def refuses(self, mark: Any, grows: bool) -> bool:
        """Whether it is no worker's rows that are cut, or all workers' that are not."""
        if mark.params["dim"] is None:
            return grows
        if id(mark) in self._users:
            return not grows or id(mark) in self._astray
        return not grows and not self._ordered.get(id(mark), False)

    def operation(self, equation: Any, inputs: list[Known]) -> list[Known]:
        name = equation.primitive.name
        if name == shard_maps.MARK:
            return [self._mark(equation, inputs[0])]
        if name == "shard_map":
            read = {x for x in equation.invars if not isinstance(x, Literal)}
            marks = [self._taken[x] for x in self._taken if x in read]
            is_user = uses(equation.params["jaxpr"], self._axis_name)
            self._users |= {id(m) for m in marks} if is_user else set()
            sizes = {m.params["rows"] for m in marks if self._ordered.get(id(m), False)}
            self._of_bodies |= dict.fromkeys(equation.outvars, (is_user, sizes))
        if name == "iota":  # positions, which are those of all workers' rows under jax.jit
            return [place(equation)]
        # What was mixed and is added to a row, as a mean of the batch is, moves no row.
        if any(isinstance(x, RowAxis) for x in inputs):
            inputs = [None if isinstance(x, str) else x for x in inputs]
        if TRUSTED in inputs and (name in MOVES or name in ALONG):  # most have rows in front
            given = zip(inputs, compat.inputs_of(equation))
            first = [RowAxis(0, 1) if x == TRUSTED and v.aval.shape else x for x, v in given]
            mixed = super().operation(equation, first)[0] if TRUSTED not in first else TRUSTED
            return [mixed if isinstance(mixed, str) else TRUSTED] * len(equation.outvars)
        found = super().operation(equation, inputs)
        if not isinstance(inputs[0] if inputs else None, RowAxis):
            return found
        if name in ("dynamic_slice", "pad", "slice") and isinstance(found[0], str):
            return [inputs[0]]  # a part of the rows, in their order
        if name == "reshape" and isinstance(found[0], RowAxis) and found[0].axis < 0:
            # Micro-batches: rows are along the last of several axes.
            shape = equation.outvars[0].aval.shape
            inner = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
            if found[0].block in inner:
                return [RowAxis(inner.index(found[0].block), 1)]
        return found

    def _mark(self, mark: Any, rows: Known) -> Known:
        (x,), dim = mark.invars, mark.params["dim"]
        if not isinstance(x, Literal) and x in self._of_bodies:
            is_user, sizes = self._of_bodies[x]
            if is_user:
                self._users.add(id(mark))
            self._order(mark, not is_user and mark.params["rows"] in sizes)
            is_known = dim is not None and mark.params["rows"] in self._counts | sizes
            return RowAxis(dim, 1) if is_known else rows
        self._taken[mark.outvars[0]] = mark
        is_along = (
            isinstance(rows, RowAxis) and rows != TRUSTED and (rows.axis == dim or rows.axis < 0)
        )
        self._order(mark, is_along)
        if isinstance(rows, str):
            self._astray.add(id(mark))
        elif rows is not None and rows.axis >= 0:
            size = mark.params["rows"]  # of all rows, or of micro-batches
            is_part = size > 0 and any(n * rows.block % size == 0 for n in self._counts)
            if not (is_along and is_part):
                self._astray.add(id(mark))
        return rows

    def _order(self, mark: Any, is_ordered: bool) -> None:
        self._ordered[id(mark)] = is_ordered and self._ordered.get(id(mark), True)


_RULE = re.compile(shard_maps.SCOPE + r"_(forward|backward)_(\d+)")


def check_sums(program: Jaxpr, axis_name: str) -> None:
    """Raises ValueError if a custom derivative communicates between workers, and its function not.

    Under `jax.jit` it sums gradients over the batch's axes by hand. Here each worker's are its own.
    """
    forward, backward = set[str](), dict[str, Any]()
    for equation, scopes in compat.scoped(program):
        name = equation.primitive.name
        if axis_name not in compat.axes_of(equation.params):
            continue
        for kind, call in _RULE.findall(scopes):
            # A cast to varying has a sum for its derivative.
            if kind == "forward" and (name in compat.OPCODES or name in compat.CASTS):
                forward.add(call)
            elif kind == "backward" and name in compat.OPCODES:
                backward.setdefault(call, equation)
    for call, equation in backward.items():
        if call not in forward:
            raise ValueError(
                f"the custom derivative of what is called at {compat.place_of(equation)} "
                f"communicates over the workers' axis {axis_name!r} by {equation.primitive.name}, "
                "and its function does not: each worker's gradient is its own here, so leave that "
                "out of the derivative"
            )


def branches_on(program: Jaxpr, axis_name: str) -> bool:
    """Whether a branch or a loop uses the axis: workers that take others would wait for ever."""
    return any(
        equation.primitive.name in ("cond", "while")
        and any(uses(inner, axis_name) for inner in compat.inner_programs(equation.params))
        for equation in _equations(program)
    )


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
