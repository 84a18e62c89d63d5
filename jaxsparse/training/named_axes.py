"""What a loss may do with the workers' axis: what specs may cut over it, and what it may sum.

Code for `jax.jit` sees the rows of all workers, and a spec that names the workers' axis gives each
device its part. One worker's function sees its own rows, and the axis has left that spec. Both are
the same if what was cut are rows of the batch, in their order. So the program is read from the
batch to each `jax.shard_map`, and what is not known to be right is refused.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxsparse.comm import compat, shard_maps
from jaxsparse.feedback.axes import (
    ALONG,
    ELEMENTWISE,
    MOVES,
    TRUSTED,
    Call,
    Known,
    RowAxis,
    RowsReading,
    place_in_source,
)
from jaxsparse.training import ranks
from jaxsparse.training.bodies import INNER, RANK, SUMMED, use_of


class _Alike(NamedTuple):
    """What holds nothing of a batch, and along these axes is equal, or drawn from one key."""

    axes: frozenset[int]


Found = Known | _Alike


def check_named(
    program: Jaxpr,
    of_batch: Sequence[bool],
    axis_name: str,
    workers: int,
    types: Sequence[Any],
    trace: Callable[[list[Any]], ClosedJaxpr],
    is_loss: bool = False,
    is_last: bool = True,
) -> None:
    """Raises ValueError if a `shard_map` cuts over workers what is not a worker's rows.

    A body would take all of it for a part: of weights, of keys, of a sequence. A result may be a
    device's own sum. It is right where

    - rows of the batch are followed to it, in their order (a part of them, if the body does not
      tell workers apart), or they can't be followed, and the body does not tell workers apart; or
      it is equal for all rows, or drawn for each; and
    - what is cut grows as the batch does, in a trace with the rows of all workers, which is what
      the loss was written for. Whatever a body does by the size of its part, it then does here as
      on a device.

    Args:
        program: what `one_worker.trace` returned.
        of_batch: of each argument, whether it is of a batch.
        axis_name: the axis of the workers.
        workers: their number.
        types: the types of the arguments.
        trace: traces the function with other types.
        is_loss: whether it is a loss without its gradient, so that a backward pass is its own.
        is_last: whether no other program tells what is left out of this one.
    """
    calls = {mark.params["call"] for mark in _marks(program)}
    if not any(call.is_named or use_of(call, axis_name) == RANK for call in calls):
        return
    growing, few = set[int](), dict[int, list[Any]]()
    if any(of_batch):
        times = lambda x, n: x.update(shape=(n * x.shape[0], *x.shape[1:]))
        with_rows = lambda n: trace([times(x, n) if yes else x for x, yes in zip(types, of_batch)])
        try:
            # JAX writes other operations for a single row, of a batch or of its parts.
            for least in (1, 2):
                few.clear()
                own = program if least == 1 else with_rows(least).jaxpr
                if _pair(own, many := with_rows(least * workers).jaxpr, few):
                    break
            program = many
        except Exception as error:
            cut = [m for m in _marks(program) if m.params["dim"] is not None]
            if cut:
                raise ValueError(
                    f"{_cut(cut[0], axis_name)} and whether these are a worker's rows can't be "
                    f"told. The function was traced with the rows of all {workers} workers, and "
                    f"that raised {type(error).__name__}: {error}. Take the numbers of rows from "
                    f"shapes, or leave {axis_name!r} out of that spec"
                ) from error
            few.clear()
            _pair(program, program, few)
        growing = {id(m) for m in _marks(program) if _grows(m, few.get(id(m), []), workers)}
    # A call in another one's body stands twice, and is judged in that body as it was written.
    is_in_body = lambda scopes: shard_maps.CUT in scopes or shard_maps.WHOLE in scopes
    named = {
        mark.params["call"]
        for mark, scopes in compat.scoped(program)
        if mark.primitive.name == shard_maps.MARK and not is_in_body(scopes)
        if mark.params["call"].is_named
    }
    late = set[Any]()
    # JAX may drop a forward pass whose values nothing needs. Such calls are judged, in a second
    # reading, where a backward pass computes them again.
    for _ in range(2):
        reading = _RowsOfBatch(axis_name, growing, few, is_loss, late, workers)
        reading.program(program, [RowAxis(0, 1) if yes else None for yes in of_batch])
        reading.refuse_unread(e for e, _ in compat.scoped(program))
        late = named - reading.judged
        if reading.refusals or not (late and is_last):
            break
    if is_last:
        reading.refuse_lost(late, _marks(program))
    if reading.refusals:
        raise ValueError(reading.refusals[0])


_ORDER = (
    ". The body tells workers apart, or has no rows one after the other: give it all of a worker's "
    "rows in their order, and cut or move them behind it. A jax.shard_map on the way keeps their "
    "order if its specs name the workers' axis, too"
)


def _refusal(mark: Any, axis_name: str, why: str) -> str:
    """The error that tells what is wrong with a marked value, and what to write."""
    params, axis = mark.params, repr(axis_name)
    if params["dim"] is None:
        fix = "" if params["verb"] == "makes" else "pass all rows as an argument, "
        return (
            f"{_what(mark)} that {why or 'grows with the batch'}, beside others that specs cut "
            f"over the workers' axis {axis}. Under jax.jit it is of all workers' rows, and here of "
            f"one worker's: {fix}name {axis} in its spec (jax.lax.all_gather(x, {axis}, "
            "tiled=True) inside gives those of all workers)"
        )
    if why:
        return f"{_cut(mark, axis_name)} and these {why}"
    fix = (
        "What a device makes may be a W-th of all, or all: return an entry for each row, or "
        f"jax.lax.pmean(x, {axis}) and leave the axis out of that spec"
        if params["verb"] == "makes"
        else "Each worker has all of it: leave the axis out of that spec, and out of sums inside. "
        f"A worker's own part is x[jax.lax.axis_index({axis})], and rows of a batch can be made "
        "inside"
    )
    return f"{_cut(mark, axis_name)} and these are no rows of a batch. {fix}"


def _what(mark: Any) -> str:
    """A marked value in words."""
    shape, params = getattr(mark.outvars[0].aval, "shape", ()), mark.params
    return f"the jax.shard_map at {params['call'].place} {params['verb']} a value of shape {shape}"


def _cut(mark: Any, axis_name: str) -> str:
    rows = _rows(mark)
    return f"{_what(mark)}, whose {rows} entries a spec cuts over the workers' axis {axis_name!r},"


def _marks(program: Jaxpr) -> list[Any]:
    """Marks of what shard_maps take and make, with those in their bodies as they were written."""
    found, seen = list[Any](), set[Any]()
    for mark in (e for e, _ in compat.scoped(program) if e.primitive.name == shard_maps.MARK):
        found.append(mark)
        if (call := mark.params["call"]) not in seen:
            seen.add(call)
            found += _marks(call.body.jaxpr)
    return found


def _pair(few: Jaxpr, many: Jaxpr, pairs: dict[int, list[Any]]) -> bool:
    """Pairs the equations of a program of more rows, by id, with those of fewer.

    One of an inner function, whose program JAX keeps for all calls with as many rows, has a partner
    for each of these calls.

    It stops where they differ, as where a loop over rows was unrolled, or Python branched on their
    number: what comes behind does not count as growing. Returns whether all are alike.
    """
    for own, other in zip(few.eqns, many.eqns):
        if own.primitive is not other.primitive:
            return False
        pairs.setdefault(id(other), []).append(own)
        programs = [[*compat.inner_programs(e.params)] for e in (own, other)]
        if own.primitive.name == shard_maps.MARK:
            programs = [[e.params["call"].body.jaxpr] for e in (own, other)]
        if not all(_pair(less, more, pairs) for less, more in zip(*programs)):
            return False
    return len(few.eqns) == len(many.eqns)


def _cut_dim(mark: Any) -> int | None:
    """The dimension that a spec cuts, without what a `vmap` adds."""
    call, number = mark.params["call"], mark.params["number"]
    cuts = call.makes if mark.params["verb"] == "makes" else call.takes
    return cuts[number].dim


def _rows(mark: Any) -> int:
    """The number of elements along what a spec cuts, or of all."""
    shape, dim = mark.params["shape"], _cut_dim(mark)
    return math.prod(shape) if dim is None else int(shape[dim])


def _is_grown(few: tuple[int, ...], many: tuple[int, ...], dim: int | None, times: int) -> bool:
    """Whether a shape grows as rows do along what a spec cuts, and nowhere else."""
    grown = few if dim is None else (*few[:dim], times * few[dim], *few[dim + 1 :])
    return many == grown


def _grows(mark: Any, few: list[Any], times: int) -> bool:
    """Whether what is cut grows as rows do in all calls. What is not cut has to stay as it is."""
    if not few:  # a body may close over other values than with fewer rows
        return bool(mark.params["verb"] == "closes over")
    dim, shape = _cut_dim(mark), mark.params["shape"]
    if dim is not None and mark.params["verb"] == "makes":  # it may have gathered all rows beside
        alike = [shape[dim] == times * x.params["shape"][dim] for x in few]
    else:
        alike = [_is_grown(x.params["shape"], shape, dim, times) for x in few]
    return not all(alike) if dim is None else all(alike) and _rows(mark) > 0


class _RowsOfBatch(RowsReading):
    """Follows rows of a batch to each `shard_map`. A string is where their order may be lost.

    Attributes:
        refusals: what is wrong, as errors.
    """

    def __init__(
        self,
        axis_name: str,
        growing: set[int],
        few: dict[int, list[Any]],
        is_loss: bool,
        late: set[Any],
        workers: int,
    ) -> None:
        super().__init__()
        self._is_loss, self._late, self._workers = is_loss, late, workers
        self.judged = set[Any]()  # calls
        self._few = few  # equations of one worker's rows, by those of all
        self.refusals = list[str]()
        self._axis_name, self._growing = axis_name, growing
        self._taken = dict[Any, dict[int, tuple[Any, Found]]]()  # by call, and number
        self._results = dict[Any, Found]()  # of functions with a derivative of their own
        self._read = set[int]()  # marks, by id
        self._is_silent = False  # what JAX made of a `shard_map` was judged as it was written

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
        return max(known, key=lambda x: ("all", "grouped", "part", "again").index(x.order))

    def sliced(self, value: Any, equation: Any) -> Any:
        if isinstance(value, RowAxis) and value.axis == 0 and value.order == "grouped":
            return RowAxis(0, 1, "part")
        return _moved(value, -1) if isinstance(value, _Alike) else super().sliced(value, equation)

    def stacked(self, value: Any) -> Any:
        return _moved(value, 1) if isinstance(value, _Alike) else super().stacked(value)

    def operation(self, equation: Any, inputs: list[Any]) -> list[Any]:
        name = equation.primitive.name
        if name == shard_maps.MARK:
            return [self._mark(equation, inputs[0])]
        if name == shard_maps.TAG:
            number, known = equation.params["number"], inputs[0]
            result = self._results.get(number, known)
            if equation.params["verb"] == "takes":  # a cotangent has rows where the result has them
                return [result]
            # JAX keeps a function's program for other calls, of rows and of weights.
            is_other = (known is None) != (result is None)
            here = place_in_source(self.around or equation)
            self._results[number] = here if is_other else self.join((known, result))
            return inputs
        if name == "shard_map":  # or what JAX made of it
            before, self._is_silent = self._is_silent, True
            made = self.program(equation.params["jaxpr"], inputs)
            self._is_silent = before
            return made
        every = lambda value: [value] * len(equation.outvars)
        is_of_batch = [isinstance(x, RowAxis | str) for x in inputs]
        if not any(is_of_batch):
            return [_alike(equation, inputs, _shape_of(x)) for x in equation.outvars]
        where = place_in_source(self.around or equation)
        inputs = [x if yes else None for x, yes in zip(inputs, is_of_batch)]
        is_sum = name in SUMMED and not compat.numbered_axes_of(equation.params)
        is_map = is_sum or name in ELEMENTWISE or compat.is_elementwise(equation)
        if is_map or any(isinstance(x, str) for x in inputs):
            return every(self.join(inputs))
        if _is_statistic(equation, inputs):
            return every(None)
        is_grouped = lambda x: isinstance(x, RowAxis) and x.order == "grouped"
        inputs = [x._replace(order="all") if is_grouped(x) else x for x in inputs]
        rows = next(x for x in inputs if isinstance(x, RowAxis))
        if name == "concatenate" and equation.params["dimension"] == rows.axis:
            return every(where)
        found = super().operation(equation, inputs)
        is_slice = name in ("slice", "dynamic_slice") and isinstance(found[0], str)
        if is_slice and not set(equation.params.get("strides") or ()) - {1}:
            return [rows._replace(order="part")]
        if name == "reshape":
            shape, few = equation.outvars[0].aval.shape, self._few.get(id(equation), [])
            shapes = {x.outvars[0].aval.shape for x in few} or {shape}
            grow = lambda less: [i for i, (n, m) in enumerate(zip(shape, less)) if n != m]
            growing = [] if len(shapes) > 1 else grow(*shapes)
            found = [_regrouped(found[0], shape, growing) or where]
        return [where if x == TRUSTED else x for x in found]

    def _mark(self, mark: Any, known: Any) -> Any:
        """Judges what a `shard_map` takes and makes, as far as its specs name the axis."""
        params = mark.params
        call, number = params["call"], params["number"]
        is_all = self._is_loss or call in self._late
        is_judged = not self._is_silent and (is_all or ranks.is_judged(self.scopes))
        self._read.add(id(mark))
        if shard_maps.RETURNS in params["derived"]:
            is_alone = params["derived"].startswith(shard_maps.RETURNS) and call.is_named
            is_rank = is_alone and use_of(call, self._axis_name) in (RANK, INNER)
            if is_rank and params["dim"] is not None:
                self._say(
                    f"the jax.shard_map at {call.place} tells workers apart, and is given tangents "
                    "by a jax.custom_jvp or a jax.linear_transpose. Whether these are a worker's "
                    "rows can't be told: write the derivative with jax.custom_vjp"
                )
            return known
        if params["verb"] != "makes":
            taken = self._taken.setdefault(call, {})
            if not params["derived"] or number not in taken:  # a tangent has no place of its own
                taken[number] = mark, known
            if is_judged and call.is_named:
                self._judge(mark, known)
            return known
        taken = self._taken.get(call, {})
        if is_judged and call.is_named:
            self.judged.add(call)
            for closed, rows in taken.values():
                if closed.params["verb"] == "closes over":
                    self._judge(closed, rows)  # it stands inside, where nothing is judged
            # JAX drops the mark of what a body takes for its shape.
            self._judge_sizes(mark, {*range(len(call.takes))} - {*taken})
        silent, self._is_silent = self._is_silent, not is_judged
        own = self._read_body(call, taken)[number]
        self._is_silent = silent
        if not call.is_named:
            return self._stacked_by_axes(call, taken, number, own)
        dim, grows = params["dim"], id(mark) in self._growing
        if dim is None:
            self._refuse(mark, grows and is_judged)
            return None
        self._refuse(mark, is_judged and not grows)
        return self._rows_of(mark, [x for x in taken.values() if x[0].params["dim"] is not None])

    def _stacked_by_axes(self, call: Any, taken: Any, number: int, own: Found) -> Found:
        """Where a result has rows that specs without the workers' axis put together."""
        others = call.makes[number].others
        if isinstance(own, _Alike):  # each part is equal along these, and not all of them
            return _Alike(own.axes - others)
        if not isinstance(own, RowAxis) or own.axis not in others:
            return own
        cut = [
            x
            for m, x in taken.values()
            if isinstance(x, RowAxis) and x.axis in call.takes[m.params["number"]].others
        ]
        # Rows that the same axes have cut, or those of each of their devices, one after the other.
        return own._replace(order=cut[0].order if cut and own.order == "again" else "again")

    def _rows_of(self, mark: Any, taken: list[tuple[Any, Found]]) -> Found:
        """Where a result that a spec cuts has rows: each of its parts is made of one of theirs."""
        rows = [(m, x) for m, x in taken if isinstance(x, RowAxis)]
        lost = [x for _, x in taken if isinstance(x, str)]
        if lost or not rows:
            return self.join(lost)
        count = {_rows(m) // x.block for m, x in rows}
        size, where = _rows(mark), f"the jax.shard_map at {mark.params['call'].place}"
        if len(count) > 1 or size % min(count):
            return where
        found = self.join(x._replace(axis=0, block=1) for _, x in rows)
        assert isinstance(found, RowAxis)
        call, beside = mark.params["call"], lambda cut: (cut.before, cut.behind)
        given = {beside(call.takes[m.params["number"]]) for m, _ in rows}
        is_same = given == {beside(call.makes[mark.params["number"]])}
        order: Any = found.order if is_same else "again"
        return RowAxis(mark.params["dim"], size // min(count), order)

    def _read_body(self, call: Any, taken: Any) -> Sequence[Found]:
        """What a body makes, as it was written."""
        body = call.body.jaxpr
        if any(m.params["is_mapped"] for m, _ in taken.values()):
            if any(inner.is_named for inner in shard_maps.calls_in(body)):
                self._say(
                    f"the jax.shard_map at {call.place} is in a jax.vmap, and has another one "
                    f"inside whose specs name the workers' axis {self._axis_name!r}: what that "
                    "cuts can't be told. Leave the axis out of those specs, or map inside"
                )
            known = self.join(x for _, x in taken.values())
            lost = "a jax.vmap" if isinstance(known, RowAxis) else known
            return [lost if isinstance(lost, str) else None] * len(body.outvars)
        given = enumerate((*body.invars, *body.constvars))
        within = lambda i: self._cut_inside(*taken[i]) if i in taken else None
        inputs: dict[Any, Any] = {x: within(i) for i, x in given}
        found = self.read(body.eqns, inputs)
        return [self.of(found, x) for x in body.outvars]

    def _cut_inside(self, mark: Any, known: Found) -> Found:
        """Where a body has rows. Where another axis cuts them, that of workers comes after it."""
        cut = mark.params["call"].takes[mark.params["number"]]
        if isinstance(known, RowAxis) and known.axis in cut.others:
            return known._replace(order="again")
        return known

    def _judge(self, mark: Any, known: Found) -> None:
        """Judges an argument of a `shard_map` whose specs name the axis."""
        call, dim, rows = mark.params["call"], mark.params["dim"], _rows(mark)
        grows = id(mark) in self._growing
        if dim is None:
            picked = isinstance(known, RowAxis) or (isinstance(known, str) and rows > 1)
            why = "" if grows else "is, or may be, a fixed number of rows of the batch"
            self._refuse(mark, grows or picked, why)
            return
        use = use_of(call, self._axis_name)
        if use == INNER:
            before = sorted({axis for cut in call.takes for axis in cut.before})
            self._refuse(mark, True, f"are cut over {before} first: name the workers' axis first")
        elif grows and isinstance(known, RowAxis) and known.axis == dim:
            is_part = known.order in ("part", "again")
            self._refuse(mark, is_part and use == RANK, f"are not all rows of a worker{_ORDER}")
            is_again = known.order == "again"
            self._refuse(mark, is_again, f"are those of several rows by turns{_ORDER}")
        elif grows and isinstance(known, str):
            self._refuse(mark, use == RANK, f"may be in another order behind {known}{_ORDER}")
        else:
            is_alike = isinstance(known, _Alike) and dim in known.axes
            is_part = isinstance(known, RowAxis) and known.axis == dim
            why = "are of a fixed size: cut a batch into a fixed number of parts" if is_part else ""
            self._refuse(mark, not (is_alike and grows), why)

    def _judge_sizes(self, mark: Any, numbers: Iterable[int]) -> None:
        """Judges arguments of which nothing is known but their sizes, which a body may go by."""
        call = mark.params["call"]
        fewer = [x.params["call"] for x in self._few.get(id(mark), [])]
        for i in numbers:
            dim, now = call.takes[i].dim, call.shapes[i]
            own = [x.shapes[i] for x in fewer if i < len(x.shapes)]
            is_right = all(_is_grown(shape, now, dim, self._workers) for shape in own)
            if not is_right or (dim is not None and not own):
                is_cut = "no spec cuts over" if dim is None else "a spec cuts over"
                self._say(
                    f"the jax.shard_map at {call.place} takes for its size a value of shape {now}, "
                    f"which {is_cut} the workers' axis {self._axis_name!r}. Under jax.jit a device "
                    "has another size of it. Let specs cut rows of a batch alone, and count rows "
                    f"by jax.lax.psum(len(rows), {self._axis_name!r})"
                )

    def refuse_lost(self, calls: Iterable[Any], marks: Iterable[Any]) -> None:
        """Refuses calls of which JAX has left no result, as far as their bodies may go by order."""
        left = {mark.params["call"]: mark for mark in marks}
        for call in calls:
            self._judge_sizes(left[call], range(len(call.takes)))
            if use_of(call, self._axis_name) in (RANK, INNER):
                self._say(
                    f"the jax.shard_map at {call.place} tells workers apart, and whether it is "
                    "given a worker's rows in their order can't be told, because JAX drops what a "
                    "gradient does not need. Of a step, take jax.value_and_grad and return the "
                    "value, too, and put a gradient inside a loss into the body"
                )

    def refuse_unread(self, equations: Iterable[Any]) -> None:
        """Refuses what stands in programs of operations that are not followed."""
        for mark in equations:
            if mark.primitive.name == shard_maps.MARK and id(mark) not in self._read:
                why = (
                    "are in an operation that is not followed, such as a linear solve: leave the "
                    "axis out of that spec, or write the operation without it"
                )
                self._refuse(mark, mark.params["dim"] is not None, why)

    def _refuse(self, mark: Any, is_wrong: bool, why: str = "") -> None:
        if is_wrong:
            self._say(_refusal(self._few.get(id(mark), [mark])[0], self._axis_name, why))

    def _say(self, text: str) -> None:
        if not self._is_silent:
            self.refusals.append(text)


def _regrouped(rows: Known, shape: tuple[int, ...], growing: list[int]) -> RowAxis | None:
    """Where rows are in another shape. The axis that grows with them tells, and no equal sizes."""
    if not isinstance(rows, RowAxis) or len(growing) != 1:
        return None
    if rows.axis >= 0:
        return rows if growing == [rows.axis] else None
    inner = 1
    for last in reversed(range(len(shape))):  # rows are along the axes up to this one
        if inner == rows.block and shape[last] > 1:
            break
        inner *= shape[last]
    else:
        return None
    if growing == [0]:  # groups of rows, or micro-batches of a fixed size
        is_group = last == 1 and rows.order == "all"
        return RowAxis(0, 1, "grouped" if is_group else rows.order)
    order: Any = "again" if rows.order == "again" else "part"  # micro-batches
    return RowAxis(last, 1, order) if growing == [last] else None


def _shape_of(x: Any) -> tuple[int, ...]:
    return getattr(x.aval, "shape", ())  # a token has none


def _alike(equation: Any, inputs: list[Any], made: tuple[int, ...]) -> Found:
    """Along which axes a value that holds nothing of a batch is equal, or drawn."""
    name, every = equation.primitive.name, frozenset(range(len(made)))
    shapes = list(map(_shape_of, compat.inputs_of(equation)))
    own = [x.axes if isinstance(x, _Alike) else frozenset[int]() for x in inputs]
    if name in ("random_bits", "random_split"):  # of several keys, along these
        return _Alike(own[0] | {i for i in every if i >= len(shapes[0])})
    if name in ("random_seed", "random_wrap", "random_unwrap", "random_fold_in"):
        of_each = (x for x, shape in zip(own, shapes) if shape)
        return _Alike(every.intersection(*of_each))
    if name == "iota":
        return _Alike(every - {equation.params["dimension"]})
    if name == "broadcast_in_dim":
        to = equation.params["broadcast_dimensions"]
        return _Alike(every - {i for j, i in enumerate(to) if j not in own[0] and shapes[0][j] > 1})
    if name in ("slice", "dynamic_slice", "tile"):
        return _Alike(own[0] | {i for i, n in enumerate(shapes[0]) if n == 1})
    if name == "concatenate":
        return _Alike(frozenset.intersection(*own) - {equation.params["dimension"]})
    if name == "pad":
        config = equation.params["padding_config"]
        return _Alike(own[0] - {i for i, one in enumerate(config) if any(one)})
    if name == "reshape":
        whole = lambda shape: [(i, n) for i, n in enumerate(shape) if n > 1]
        pairs = list(zip(whole(shapes[0]), whole(made)))
        same = itertools.takewhile(lambda pair: pair[0][1] == pair[1][1], pairs)
        return _Alike(frozenset(new for (old, _), (new, _) in same if old in own[0]))
    if name in ELEMENTWISE or compat.is_elementwise(equation):
        return _Alike(every.intersection(*(x for x, shape in zip(own, shapes) if shape)))
    return _alike_along(equation, shapes, own)


def _alike_along(equation: Any, shapes: list[Any], own: list[frozenset[int]]) -> Found:
    """The same of an operation along other axes, as a product with weights, or a row of a table."""
    name, params = equation.primitive.name, equation.params
    rule = MOVES.get(name) or ALONG.get(name)
    if rule is None or (len(own) > 1 and name not in ("dot_general", "gather")):
        return None
    if name == "gather" and params["dimension_numbers"].operand_batching_dims:
        return None
    moved = set[int | None]()
    for side, axis in ((i, axis) for i, axes in enumerate(own) for axis in axes):
        rows: list[int | None] = [axis if i == side else None for i in range(len(own))]
        if name == "dot_general" and axis in (batch := params["dimension_numbers"][1])[side]:
            other = batch[1 - side][batch[side].index(axis)]
            if other not in own[1 - side]:
                continue
            rows[1 - side] = other
        moved.add(rule(Call(params, shapes, rows, axis, shapes[side])))
    return _Alike(frozenset(i for i in moved if i is not None))


def _moved(value: _Alike, by: int) -> _Alike:
    return _Alike(frozenset(i + by for i in value.axes if i + by >= 0))


def _is_statistic(equation: Any, inputs: list[Any]) -> bool:
    """Whether rows are summed, each with itself, so that their order does not matter."""
    name = equation.primitive.name
    axes = [x.axis if isinstance(x, RowAxis) else None for x in inputs]
    if name == "dot_general":
        ((left, right), _) = equation.params["dimension_numbers"]
        return None not in axes and any(tuple(axes) == pair for pair in zip(left, right))
    is_sum = name.startswith("reduce_") or name in SUMMED
    return is_sum and axes[0] in compat.numbered_axes_of(equation.params)
