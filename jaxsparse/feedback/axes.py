"""Where a program leaves the axis of rows: by operations that are known to keep rows apart.

A rule finds the axis again, or refuses. Rows of a batch are so followed through a loss, and rows of
gradients in front of an exchange, where less is allowed (`jaxsparse.feedback.front`).
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

from jaxsparse.comm import compat
from jaxsparse.comm.flow import Reading


class RowAxis(NamedTuple):
    """The axis along which an array has rows, each of them a block of so many entries.

    Blocks are longer than 1 where an axis was joined with others, as by `x.reshape(-1, n)`. There
    may be groups of rows, each along the next axis, a part of the rows, or all of them again and
    again, as in tokens by time (`order`).

    In front of an exchange the order tells what an entry says of the gradient that it is made of. A
    "gradient" entry is finite where that is, but for overflow. A "scaled" entry has a factor, which
    may be 0 or infinite, so that it may be NaN where the gradient is finite. A "finite" entry tells
    whether the gradient is finite.
    """

    axis: int
    block: int
    order: Literal["all", "grouped", "part", "again", "gradient", "scaled", "finite"] = "all"


# What is known of a value: its axis of rows, or None, if nothing with rows is in it. A string is
# the place of an operation that has mixed rows.
Known = RowAxis | str | None
# In the place of an axis: rows are laid end to end, over several axes; they are somewhere, by code
# that is not followed; the value is of a single row, in a loop over rows of this depth (as block).
_SPREAD, TRUSTED, _SINGLE = -1, RowAxis(-2, 1), -3


class Call(NamedTuple):
    """An operation: its parameters, its operands' shapes and axes of rows, and the first of these.

    Rules give the axis of rows of its results, or None if it does not keep rows apart.
    """

    params: dict[str, Any]
    shapes: list[tuple[int, ...]]
    rows: list[int | None]
    axis: int
    shape: tuple[int, ...]

    def without(self, axes: Iterable[int]) -> int | None:
        """The rule of an operation that drops axes."""
        gone = [*axes]
        return None if self.axis in gone else self.axis - sum(a < self.axis for a in gone)

    def beside(self, axes: Iterable[int]) -> int | None:
        """The rule of an operation along axes that it keeps."""
        return None if self.axis in axes else self.axis

    def if_whole(self, is_whole: bool) -> int | None:
        """The rule of an operation that takes or leaves all along the axis of rows."""
        return self.axis if is_whole else None


def reshaped(rows: RowAxis, shape: tuple[int, ...], new: tuple[int, ...]) -> RowAxis:
    """Where rows of one shape are in another one."""
    size = rows.block
    count = math.prod(shape) // max(size, 1)
    if rows.axis != _SPREAD:
        size, count = size * math.prod(shape[rows.axis + 1 :]), shape[rows.axis] // size
    for i, n in enumerate(new):
        inner = math.prod(new[i + 1 :])
        if inner and size % inner == 0 and n * inner % max(count * size, 1) == 0:
            order = rows.order if n * inner == count * size else "again"
            return RowAxis(i, size // inner, order)
    is_inner = rows.axis != _SPREAD and math.prod(shape[: rows.axis]) > 1
    return RowAxis(_SPREAD, size, "again" if is_inner else rows.order)


def _sliced(call: Call) -> int | None:
    starts, ends, strides = (
        call.params[name] for name in ("start_indices", "limit_indices", "strides")
    )
    of_rows = starts[call.axis], ends[call.axis], strides[call.axis] if strides else 1
    return call.if_whole(of_rows == (0, call.shape[call.axis], 1))


def _gathered(call: Call) -> int | None:
    numbers, axis = call.params["dimension_numbers"], call.axis
    if call.rows[0] is None and axis < len(call.shape) - 1:  # that of the indices, as in a table
        rank = len(numbers.offset_dims) + len(call.shape) - 1
        return [i for i in range(rank) if i not in numbers.offset_dims][axis]
    if axis in numbers.operand_batching_dims:
        at = numbers.operand_batching_dims.index(axis)
        rank = len(numbers.offset_dims) + len(call.shapes[1]) - 1
        of_indices = numbers.start_indices_batching_dims[at]
        if call.rows[1] not in (None, of_indices):
            return None
        return [i for i in range(rank) if i not in numbers.offset_dims][of_indices]
    if call.rows[0] is None or call.rows[1] is not None:
        return None  # rows are numbers of elements: of which rows is not known
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    if axis in gone or call.params["slice_sizes"][axis] != call.shape[axis]:
        return None
    return numbers.offset_dims[sum(a not in gone for a in range(axis))]


def _scattered(call: Call) -> int | None:
    numbers, (of_operand, of_indices, of_updates) = call.params["dimension_numbers"], call.rows
    batching, at_once = numbers.operand_batching_dims, numbers.update_window_dims
    gone = {*numbers.inserted_window_dims, *batching}
    window = [i for i in range(len(call.shapes[0])) if i not in gone]
    is_indexed = lambda axis: axis in numbers.scatter_dims_to_operand_dims
    if of_operand is None and of_indices is None and of_updates in at_once:
        axis = window[at_once.index(call.axis)]
        is_whole = call.shapes[0][axis] == call.shapes[2][call.axis]
        return axis if is_whole and not is_indexed(axis) else None
    if of_operand is None:
        rest = [i for i in range(len(call.shapes[2])) if i not in at_once]
        of_indices = rest.index(call.axis) if of_indices is None else of_indices
        mapped = numbers.scatter_indices_batching_dims
        return batching[mapped.index(of_indices)] if of_indices in mapped else None
    if call.axis in batching:
        at = numbers.scatter_indices_batching_dims[batching.index(call.axis)]
        rest = [i for i in range(len(call.shapes[2])) if i not in at_once]
        is_same = of_indices in (None, at) and of_updates in (None, rest[at])
        return call.axis if is_same else None
    if of_indices is not None or call.axis not in window or is_indexed(call.axis):
        return None
    same = at_once[window.index(call.axis)]
    return call.axis if of_updates in (None, same) else None


def _multiplied(call: Call) -> int | None:
    contracted, batch = call.params["dimension_numbers"]
    side = 0 if call.rows[0] is not None else 1
    axis, other = call.axis, call.rows[1 - side]
    if axis in batch[side]:
        at = batch[side].index(axis)
        return at if other in (None, batch[1 - side][at]) else None
    if axis in contracted[side] or other is not None:
        return None
    used = [{*c, *b} for c, b in zip(contracted, batch)]
    before = len(batch[0]) + (len(call.shapes[0]) - len(used[0]) if side else 0)
    return before + sum(a not in used[side] for a in range(axis))


def _convolved(call: Call) -> int | None:
    numbers, is_left = call.params["dimension_numbers"], call.rows[0] is not None
    spec = numbers.lhs_spec if is_left else numbers.rhs_spec
    if call.params["feature_group_count"] > 1 or call.params["batch_group_count"] > 1:
        return None  # jax.vmap makes groups, too, and of which axis is not known
    return numbers.out_spec[0 if is_left else 1] if call.axis == spec[0] else None


Rule = Callable[[Call], int | None]

# What is allowed. JAX says which operations are elementwise, and these are besides.
ELEMENTWISE = {
    "add_any", "clamp", "convert_element_type", "layout_constraint", "mesh_cast", "name", "pcast",
    "pvary", "reshard", "select_n", "sharding_constraint", "stop_gradient",
}  # fmt: skip
ONE_BY_ONE = {"device_put", "optimization_barrier"}  # on several arrays
# What moves elements, and where it leaves the axis of rows, besides `reshaped`.
MOVES: dict[str, Rule] = {
    "broadcast_in_dim": lambda call: call.params["broadcast_dimensions"][call.axis],
    "concatenate": lambda call: call.if_whole(
        call.params["dimension"] != call.axis or None not in call.rows
    ),
    "dynamic_slice": lambda call: call.if_whole(
        call.params["slice_sizes"][call.axis] == call.shape[call.axis]
    ),
    "dynamic_update_slice": lambda call: call.if_whole(
        call.shapes[0][call.axis] == call.shapes[1][call.axis]
    ),
    "gather": _gathered,
    "pad": lambda call: call.if_whole(not any(call.params["padding_config"][call.axis])),
    "rev": lambda call: call.beside(call.params["dimensions"]),
    "slice": _sliced,
    "split": lambda call: call.beside([call.params["axis"]]),
    "squeeze": lambda call: call.without(call.params["dimensions"]),
    "stack": lambda call: call.axis + (call.params["axis"] <= call.axis),
    "tile": lambda call: call.if_whole(call.params["reps"][call.axis] == 1),
    "transpose": lambda call: call.params["permutation"].index(call.axis),
    "unstack": lambda call: call.without([call.params["axis"]]),
    **{f"scatter{x}": _scattered for x in ("", "-add", "-max", "-min", "-mul", "-sub")},
}
_reduced: Rule = lambda call: call.without(call.params["axes"])
_summed: Rule = lambda call: call.beside([call.params["axis"]])
_windowed: Rule = lambda call: call.if_whole(
    call.params["window_dimensions"][call.axis] == call.params["window_strides"][call.axis] == 1
)
_of_matrix: Rule = lambda call: call.beside(range(len(call.shape))[-2:])


def _solved(call: Call) -> int | None:
    """As `jax.vmap` makes it of one matrix and many right-hand sides, which are columns."""
    side = len(call.shape) - (1 if call.params["left_side"] else 2)
    is_column = call.rows[0] is None and call.axis == side
    return call.axis if is_column else _of_matrix(call)


# What combines elements along axes.
ALONG: dict[str, Rule] = {
    **{f"reduce_{x}": _reduced for x in ("and", "max", "min", "or", "prod", "sum", "xor")},
    **dict.fromkeys(("argmax", "argmin"), _reduced),
    # Under `jax.vmap(axis_name=)`, which numbers its axis.
    **dict.fromkeys(
        ("psum", "pmax", "pmin"), lambda call: call.without(compat.numbered_axes_of(call.params))
    ),
    "reduce": lambda call: call.without(call.params["dimensions"]),
    **{f"cum{x}": _summed for x in ("logsumexp", "max", "min", "prod", "sum")},
    "conv_general_dilated": _convolved,
    "dot_general": _multiplied,
    "fft": lambda call: call.beside(range(len(call.shape))[-len(call.params["fft_lengths"]) :]),
    **{f"reduce_window{x}": _windowed for x in ("", "_max", "_min", "_sum")},
    "approx_top_k": lambda call: call.beside([call.params["reduction_dimension"]]),
    "sort": lambda call: call.beside([call.params["dimension"]]),
    "top_k": lambda call: call.beside([call.params.get("axis", len(call.shape) - 1)]),
    **dict.fromkeys(("cholesky", "eigh", "lu", "qr", "svd"), _of_matrix),
    "triangular_solve": _solved,
}
# What takes operands whose rows are along other axes.
OF_SEVERAL = {"dot_general", "gather", *(name for name in MOVES if name.startswith("scatter"))}
# What may do anything inside, and is trusted.
OTHERS = {"ffi_call", "io_callback", "pure_callback", "random_gamma"}
TRUSTED_CALLS = OTHERS | compat.KERNELS | {"custom_partitioning", "shard_map"}


class RowsReading(Reading[Known]):
    """Follows axes of rows through a program."""

    nothing = None

    def join(self, values: Iterable[Known]) -> Known:
        found = {x for x in values if x is not None}
        if mixed := [x for x in found if isinstance(x, str)]:
            return min(mixed)
        if len({x for x in found if isinstance(x, RowAxis) and x.axis > TRUSTED.axis}) > 1:
            return "code that lays rows along two axes"
        return TRUSTED if len(found) > 1 else next(iter(found), None)

    def sliced(self, value: Known, equation: Any) -> Known:
        if not isinstance(value, RowAxis) or value.axis > 0 or value.axis in (TRUSTED[0], _SINGLE):
            return _shifted(value, -1)
        if value.axis == _SPREAD or value.block > 1:
            return place_in_source(self.around or equation)
        return RowAxis(_SINGLE, self.depth)

    def stacked(self, value: Known) -> Known:
        if value == RowAxis(_SINGLE, self.depth):
            return RowAxis(0, 1)
        return _shifted(value, 1)

    def carried(self, value: Known, equation: Any) -> Known:
        # It meets the other rows.
        is_of_row = equation.primitive.name == "scan" and value == RowAxis(_SINGLE, self.depth)
        return place_in_source(self.around or equation) if is_of_row else value

    def operation(self, equation: Any, inputs: list[Known]) -> list[Known]:
        name = equation.primitive.name
        every = lambda value: [value] * len(equation.outvars)
        is_mixed = any(isinstance(x, str) for x in inputs)
        is_single = all(x is None or x[0] == _SINGLE for x in inputs)
        if TRUSTED in inputs or is_single or is_mixed:
            return every(self.join(inputs))
        if name in ONE_BY_ONE:
            return inputs
        found = self._moved(equation, inputs)
        return every(place_in_source(self.around or equation) if found is None else found)

    def is_allowed(self, name: str, rule: Rule, call: Call) -> bool:
        """Whether an operation may move or combine elements by its rule."""
        return True

    def _moved(self, equation: Any, inputs: list[Known]) -> Known:
        """Where an operation leaves rows, None where it does not keep them apart."""
        name, given = equation.primitive.name, compat.inputs_of(equation)
        shapes = [x.aval.shape for x in given]
        rows, shape = next((x, s) for x, s in zip(inputs, shapes) if isinstance(x, RowAxis))
        is_one = {*inputs} <= {rows, None}
        if name in ELEMENTWISE or compat.is_elementwise(equation):
            return rows if is_one else None
        if name == "reshape":
            return reshaped(rows, shape, equation.outvars[0].aval.shape)
        rule = MOVES.get(name) or ALONG.get(name)
        if rule is None:
            return TRUSTED if name in TRUSTED_CALLS else None
        if rows.axis < 0 or not (is_one or name in OF_SEVERAL):
            return None
        of_each = [x.axis if isinstance(x, RowAxis) else None for x in inputs]
        call = Call(equation.params, shapes, of_each, rows.axis, shape)
        moved = rule(call) if self.is_allowed(name, rule, call) else None
        return None if moved is None else rows._replace(axis=int(moved))  # no integer of NumPy


def place_in_source(equation: Any) -> str:
    """An equation in an error's words."""
    return f"the {equation.primitive.name} at {compat.place_and_call(equation)}"


def _shifted(value: Known, by: int) -> Known:
    if not isinstance(value, RowAxis) or value.axis < 0:
        return value
    return value._replace(axis=value.axis + by)
