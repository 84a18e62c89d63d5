"""What a loss may do with the workers' axis: what specs may cut over it, and what it may sum.

Code for `jax.jit` sees the rows of all workers, and a spec that names the workers' axis gives each
device its part. One worker's function sees its own rows, and the axis has left that spec. Both are
the same if what was cut are rows of the batch, in their order. So the program is read from the
batch to each `jax.shard_map`, and what is not known to be right is refused.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from jaxsparse.comm import compat, shard_maps
from jaxsparse.comm.flow import Reading
from jaxsparse.feedback.axes import ELEMENTWISE, TRUSTED, Known, RowAxis, RowsReading, place


class _Alike(NamedTuple):
    """What holds nothing of a batch, and along these axes is equal, or drawn from one key."""

    axes: frozenset[int]


Found = Known | _Alike
# How a body uses the axis of workers. "sums" are equal in whatever order workers come.
_ELEMENTS, _NONE, _SUMS, _RANK = "elements", "none", "sums", "rank"
_SUMMED = {"psum", "psum_invariant", "pmax", "pmin", "enter_worker", "leave_worker", *compat.CASTS}


def check_named(
    program: Jaxpr,
    of_batch: Sequence[bool],
    axis_name: str,
    types: Sequence[Any],
    trace: Callable[[list[Any]], ClosedJaxpr],
) -> None:
    """Raises ValueError if a `shard_map` cuts over workers what is not a worker's rows.

    A body would take all of it for a part: of weights, of keys, of a sequence. A result may be a
    device's own sum. It is right where

    - the body maps elements, or
    - rows of the batch are followed to it, in their order (a part of them, if the body does not
      tell workers apart), or
    - they can't be followed, the body does not tell workers apart, and what is cut grows with the
      batch. So the function is traced with twice the rows, too. What is equal for all rows, or
      drawn for each, has to grow as well.

    Args:
        program: what `one_worker.trace` returned.
        of_batch: of each argument, whether it is of a batch.
        axis_name: the axis of the workers.
        types: the types of the arguments.
        trace: traces the function with other types.
    """
    equations = [e for e, _ in compat.scoped(program)]
    if not any(e.primitive.name == "shard_map" for e in equations):
        return
    marks, more = _marks(equations), list[Any]()
    if marks and any(of_batch):
        first = next((m for m in marks if m.params["dim"] is not None), marks[0])
        twice = lambda x: x.update(shape=(2 * x.shape[0], *x.shape[1:]))
        try:
            again = trace([twice(x) if yes else x for x, yes in zip(types, of_batch)]).jaxpr
        except Exception as error:
            raise ValueError(
                f"{_cut(first, axis_name)} and whether these are a worker's rows can't be "
                "told. The function was traced with twice the rows of the batch, and that raised "
                f"{type(error).__name__}: {error}. Take the numbers of rows from shapes, or leave "
                f"{axis_name!r} out of that spec"
            ) from error
        more = _marks([e for e, _ in compat.scoped(again)])
    reading = _RowsOfBatch(axis_name, _growing(marks, more))
    reading.program(program, [RowAxis(0, 1) if yes else None for yes in of_batch])
    reading.judge_others(marks)
    if reading.refusals:
        raise ValueError(reading.refusals[0])


def _refusal(mark: Any, axis_name: str, why: str) -> str:
    """The error that tells what is wrong with a marked value, and what to write."""
    shape, params, axis = getattr(mark.outvars[0].aval, "shape", ()), mark.params, repr(axis_name)
    what = f"the jax.shard_map at {params['place']} {params['verb']} a value of shape {shape}"
    if params["dim"] is None:
        return (
            f"{what} that grows with the batch, beside others that specs cut over the workers' "
            f"axis {axis}. Under jax.jit it is of all workers' rows, and here of one worker's: "
            f"name {axis} in its spec (jax.lax.all_gather(x, {axis}, tiled=True) inside gives that "
            "of all workers)"
        )
    if why:
        return (
            f"{_cut(mark, axis_name)} and these {why}. Its body tells workers apart, so it has "
            "to be given all rows in their order: cut or move them behind it; if they went through "
            f"a jax.shard_map, name {axis} in its specs, too"
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


def _marks(equations: Iterable[Any]) -> list[Any]:
    """Marks of what shard_maps whose specs name the workers' axis take and make."""
    return [e for e in equations if e.primitive.name == shard_maps.MARK]


def _growing(marks: list[Any], more: list[Any]) -> set[int]:
    """The marks, by id, of what is larger in a program of more rows."""
    size = lambda mark: mark.params["rows"]
    if len(marks) == len(more):
        return {id(m) for m, other in zip(marks, more) if size(m) < size(other)}
    found = set[int]()  # a loop over rows was unrolled
    kind = lambda mark: tuple(mark.params[name] for name in ("place", "verb", "dim"))
    for mark in marks:
        few, many = ({size(m) for m in all if kind(m) == kind(mark)} for all in (marks, more))
        grows = few != many if mark.params["dim"] is None else min(many, default=0) > max(few)
        if grows:
            found.add(id(mark))
    return found


def _use(body: Jaxpr, axis_name: str) -> str:
    """How a body uses the axis of workers."""
    if _maps_elements(body, axis_name):
        return _ELEMENTS
    users = {e.primitive.name for e, _ in compat.scoped(body) if axis_name in _axes_of(e)}
    return _RANK if users - _SUMMED else _SUMS if users else _NONE


def _axes_of(equation: Any) -> tuple[str, ...]:
    return compat.axes_of(equation.params)


def _maps_elements(body: Jaxpr, axis_name: str) -> bool:
    def is_map(e: Any) -> bool:
        name = e.primitive.name
        if name in ("jit", "pjit", "custom_jvp_call", "custom_vjp_call"):
            return all(_maps_elements(x, axis_name) for x in compat.inner_programs(e.params))
        is_sum = name in _SUMMED and axis_name not in _axes_of(e)
        return name in ELEMENTWISE or compat.is_elementwise(e) or is_sum

    return all(map(is_map, body.eqns))


class _RowsOfBatch(RowsReading):
    """Follows rows of a batch to each `shard_map`. A string is where their order may be lost.

    Attributes:
        refusals: what is wrong, as errors.
    """

    def __init__(self, axis_name: str, growing: set[int]) -> None:
        super().__init__()
        self.refusals = list[str]()
        self._axis_name, self._growing = axis_name, growing
        self._taken = dict[Any, Any]()  # marks of arguments, by what they make
        self._judged = set[int]()  # of these, by id
        self._made = dict[Any, tuple[str, Known, int, Found]]()  # by result, see `_mapped`
        self._by_rank = set[int]()  # operations that take a part by the worker's number

    def join(self, values: Iterable[Any]) -> Any:
        given = [*values]
        of_batch = [x for x in given if isinstance(x, RowAxis | str)]
        if not of_batch:
            alike = [x.axes for x in given if isinstance(x, _Alike)]
            is_alike = alike and len(alike) == len(given)
            return _Alike(frozenset.intersection(*alike)) if is_alike else None
        lost = [x for x in of_batch if isinstance(x, str)]
        known = {x for x in of_batch if isinstance(x, RowAxis)}
        if lost or len({x[:2] for x in known}) > 1:
            return min(lost, default="code that lays rows along two axes")
        return max(known, key=lambda x: x.is_part)

    def sliced(self, value: Any) -> Any:
        return _moved(value, -1) if isinstance(value, _Alike) else super().sliced(value)

    def stacked(self, value: Any) -> Any:
        return _moved(value, 1) if isinstance(value, _Alike) else super().stacked(value)

    def carried(self, value: Any) -> Any:
        found = super().carried(value)
        return "a loop over rows" if found == TRUSTED else found

    def operation(self, equation: Any, inputs: list[Any]) -> list[Any]:
        name = equation.primitive.name
        if name == shard_maps.MARK:
            return [self._mark(equation, inputs[0])]
        if name == "shard_map":
            return self._mapped(equation, inputs)
        every = lambda value: [value] * len(equation.outvars)
        is_of_batch = [isinstance(x, RowAxis | str) for x in inputs]
        if not any(is_of_batch):
            return [_alike(equation, inputs, x.aval.shape) for x in equation.outvars]
        where = place(self.around or equation)
        if id(equation) in self._by_rank and is_of_batch[0]:
            self.refusals.append(
                f"{where} takes a part of one worker's rows by the worker's number, in a "
                f"jax.shard_map whose specs do not name the workers' axis {self._axis_name!r}. It "
                "has this worker's rows alone, whole: name the axis in in_specs, or take all rows"
            )
        inputs = [x if yes else None for x, yes in zip(inputs, is_of_batch)]
        is_map = name in ELEMENTWISE or name in _SUMMED or compat.is_elementwise(equation)
        if is_map or any(isinstance(x, str) for x in inputs):
            return every(self.join(inputs))
        if _is_statistic(equation, inputs):
            return every(None)
        rows = next(x for x in inputs if isinstance(x, RowAxis))
        if name == "concatenate" and equation.params["dimension"] == rows.axis:
            return every(where)
        found = super().operation(equation, inputs)
        is_slice = name in ("slice", "dynamic_slice") and isinstance(found[0], str)
        if is_slice and not set(equation.params.get("strides") or ()) - {1}:
            return [rows._replace(is_part=True)]
        if name == "reshape" and isinstance(found[0], RowAxis) and found[0].axis < 0:
            # Micro-batches: rows are along the last of several axes.
            shape, inner = equation.outvars[0].aval.shape, 1
            for i in reversed(range(len(shape))):
                if inner == found[0].block and shape[i] > 1:
                    return [RowAxis(i, 1, is_part=True)]
                inner *= shape[i]
            return [where]
        return [where if x == TRUSTED else x for x in found]

    def _mapped(self, equation: Any, inputs: list[Any]) -> list[Any]:
        """Reads a `shard_map`.

        Of results of one whose specs name the axis, it notes how the body uses the axis, what the
        arguments are at most, how many rows they have (0: not known), and what the body makes.
        """
        body, where = equation.params["jaxpr"], compat.place_of(equation)
        read = [(None if isinstance(x, Literal) else x) for x in equation.invars]
        marks = [self._taken.get(x) for x in read]
        use = _use(body, self._axis_name)
        if not any(marks):
            if use == _RANK:
                ranks = _Ranks(self._axis_name)
                ranks.program(body, [False] * len(inputs))
                self._by_rank |= ranks.indexed
            return self.program(body, inputs)
        # A derivative of one's own is given what its function's `shard_map` was judged by.
        if use == _RANK and f"{shard_maps.SCOPE}_backward" in self.scopes:
            use = _SUMS
        # A backward pass has cotangents, and what was kept for it, beside arguments.
        is_written = (
            "transpose(" not in self.scopes or f"{shard_maps.SCOPE}_backward" in self.scopes
        )
        worst, counts = list[Found](), set[int]()
        for mark, known, x in zip(marks, inputs, equation.invars):
            if mark is None:
                if is_written and isinstance(known, RowAxis | str) and x.aval.shape:
                    self.refusals.append(
                        f"the body of the jax.shard_map at {where}, whose specs name the workers' "
                        f"axis {self._axis_name!r}, closes over a value of shape {x.aval.shape} "
                        "that is made of a batch. Under jax.jit it is of all workers' rows, and "
                        "here of one worker's: pass it as an argument, with the axis in its spec"
                    )
                continue
            self._judge(mark, known, use)
            if mark.params["dim"] is not None and isinstance(known, RowAxis | str):
                worst.append(known if isinstance(known, str) else known._replace(axis=0, block=1))
            if mark.params["dim"] is not None and isinstance(known, RowAxis):
                counts.add(mark.params["rows"] // known.block)
        found = self.join(worst), counts.pop() if len(counts) == 1 else 0
        made = self.program(body, inputs)
        self._made |= {x: (use, *found, own) for x, own in zip(equation.outvars, made)}
        return made

    def _mark(self, mark: Any, known: Any) -> Any:
        """Of an argument, remembers the mark. Judges a result, and says where its rows are."""
        dim, rows, grows = mark.params["dim"], mark.params["rows"], id(mark) in self._growing
        if mark.params["verb"] == "takes":
            self._taken[mark.outvars[0]] = mark
            return known
        use, worst, count, own = self._made.get(mark.invars[0], (_RANK, None, 0, None))
        if dim is None:
            self._refuse(mark, grows)
            return None
        is_along = isinstance(own, RowAxis) and own.axis == dim
        self._refuse(mark, not (grows or is_along or use == _ELEMENTS))
        if not isinstance(worst, RowAxis):
            return worst
        if count and rows % count == 0:
            return worst._replace(axis=dim, block=rows // count)
        return f"the jax.shard_map at {mark.params['place']}"

    def _judge(self, mark: Any, known: Found, use: str) -> None:
        """Judges an argument of a `shard_map`."""
        self._judged.add(id(mark))
        dim, grows = mark.params["dim"], id(mark) in self._growing
        if dim is None:
            self._refuse(mark, grows or isinstance(known, RowAxis))
        elif isinstance(known, RowAxis) and known.axis == dim:
            self._refuse(mark, known.is_part and use == _RANK, "are not all rows of a worker")
        elif isinstance(known, str) and grows:
            self._refuse(mark, use == _RANK, f"may be in another order behind {known}")
        elif use != _ELEMENTS:
            is_alike = isinstance(known, _Alike) and dim in known.axes
            self._refuse(mark, not (is_alike and grows))

    def judge_others(self, marks: Iterable[Any]) -> None:
        """Refuses what was marked, and not met again as an argument."""
        for mark in marks:
            if mark.params["verb"] == "takes" and id(mark) not in self._judged:
                self._refuse(mark, True)

    def _refuse(self, mark: Any, is_wrong: bool, why: str = "") -> None:
        if is_wrong:
            self.refusals.append(_refusal(mark, self._axis_name, why))


class _Ranks(Reading[bool]):
    """Finds what takes a part of an array by the worker's number.

    Attributes:
        indexed: these operations, by id.
    """

    nothing = False

    def __init__(self, axis_name: str) -> None:
        super().__init__()
        self.indexed = set[int]()
        self._axis_name = axis_name

    def join(self, values: Iterable[bool]) -> bool:
        return any(values)

    def operation(self, equation: Any, inputs: list[bool]) -> list[bool]:
        name = equation.primitive.name
        if name == "shard_map":
            return self.program(equation.params["jaxpr"], inputs)
        is_indexing = name.startswith(("dynamic_slice", "gather", "scatter", "dynamic_update"))
        first = 2 if name == "dynamic_update_slice" else 1
        if is_indexing and any(inputs[first : None if name.startswith("dyn") else 2]):
            self.indexed.add(id(equation))
        is_rank = name == "axis_index" and self._axis_name in _axes_of(equation)
        is_key = name.startswith(_DRAWN)
        made = inputs[0] if is_indexing else any(inputs)
        return [is_rank or (made and not is_key)] * len(equation.outvars)


_DRAWN = ("random_", "threefry")


def _alike(equation: Any, inputs: list[Any], made: tuple[int, ...]) -> Found:
    """Along which axes a value that holds nothing of a batch is equal, or drawn."""
    name, every = equation.primitive.name, frozenset(range(len(made)))
    shapes = [x.aval.shape for x in compat.inputs_of(equation)]
    own = [x.axes if isinstance(x, _Alike) else frozenset[int]() for x in inputs]
    if name.startswith(_DRAWN):
        return _Alike(every)
    if name == "iota":
        return _Alike(every - {equation.params["dimension"]})
    if name == "broadcast_in_dim":
        to = equation.params["broadcast_dimensions"]
        return _Alike(every - {i for j, i in enumerate(to) if j not in own[0] and shapes[0][j] > 1})
    if name in ("slice", "dynamic_slice"):
        return _Alike(own[0])
    if name in ELEMENTWISE or compat.is_elementwise(equation):
        return _Alike(every.intersection(*(x for x, shape in zip(own, shapes) if shape)))
    return None


def _moved(value: _Alike, by: int) -> _Alike:
    return _Alike(frozenset(i + by for i in value.axes if i + by >= 0))


def _is_statistic(equation: Any, inputs: list[Any]) -> bool:
    """Whether rows are summed, each with itself, so that their order does not matter."""
    name = equation.primitive.name
    axes = [x.axis if isinstance(x, RowAxis) else None for x in inputs]
    if name == "dot_general":
        ((left, right), _) = equation.params["dimension_numbers"]
        return None not in axes and any(tuple(axes) == pair for pair in zip(left, right))
    return name.startswith("reduce_") and axes[0] in equation.params.get("axes", ())


_RULE = re.compile(shard_maps.SCOPE + r"_(forward|backward)_(\d+)")


def check_sums(program: Jaxpr, axis_name: str) -> None:
    """Raises ValueError if a custom derivative communicates between workers, and its function not.

    Under `jax.jit` it sums gradients over the batch's axes by hand. Here each worker's are its own.
    """
    forward, backward = set[str](), dict[str, Any]()
    for equation, scopes in compat.scoped(program):
        name = equation.primitive.name
        if name == "linear_call" and shard_maps.communicates(
            equation.params["callee"].jaxpr, axis_name
        ):
            raise ValueError(
                f"the linear_call at {compat.place_of(equation)} communicates over the workers' "
                f"axis {axis_name!r}, and whether its derivative does so by hand can't be told: "
                "use jax.custom_vjp"
            )
        if axis_name not in _axes_of(equation):
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
