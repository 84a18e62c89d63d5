"""Where operations leave the axis of rows: those that are known to keep rows apart.

An operation that stands here is allowed in front of an exchange if its rule finds the axis again.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

# In the place of the number of an axis: rows are laid end to end; they are somewhere, by code that
# is not followed.
FLAT, TRUSTED = -1, -2


class Call(NamedTuple):
    """An operation: its parameters, its operands' shapes and axes of rows, and the first of these.

    Rules give the axis of rows of its results, or None if it does not keep rows apart.
    """

    params: dict[str, Any]
    shapes: list[tuple[int, ...]]
    rows: list[Any]
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


def _reshaped(call: Call) -> int:
    size, before = call.shape[call.axis], math.prod(call.shape[: call.axis])
    new = call.params["new_sizes"]
    places = (i for i, n in enumerate(new) if n == size and math.prod(new[:i]) == before)
    return next(places, FLAT)


def _sliced(call: Call) -> int | None:
    starts, ends, strides = (
        call.params[name] for name in ("start_indices", "limit_indices", "strides")
    )
    of_rows = starts[call.axis], ends[call.axis], strides[call.axis] if strides else 1
    return call.if_whole(of_rows == (0, call.shape[call.axis], 1))


def _has_pairs(call: Call, indexed: Sequence[int]) -> bool:
    """Whether rows are told by an index, or paired with indices into other axes, one by one.

    Code that knows rows has such pairs, as those of `jnp.take_along_axis`.
    """
    return call.rows[0] is None or (len(indexed) > 1 and len(call.shapes[1]) > 1)


def _gathered(call: Call) -> int | None:
    numbers, axis = call.params["dimension_numbers"], call.axis
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    if axis in numbers.operand_batching_dims or _has_pairs(call, numbers.start_index_map):
        return TRUSTED
    if axis in gone or call.params["slice_sizes"][axis] != call.shape[axis]:
        return None
    return numbers.offset_dims[sum(a not in gone for a in range(axis))]


def _scattered(call: Call) -> int | None:
    numbers = call.params["dimension_numbers"]
    indexed = {*numbers.inserted_window_dims, *numbers.scatter_dims_to_operand_dims}
    is_trusted = _has_pairs(call, numbers.scatter_dims_to_operand_dims)
    return TRUSTED if is_trusted else call.beside(indexed)


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


_Rule = Callable[[Call], int | None]

# What is allowed. JAX says which operations are elementwise, and these are besides.
ELEMENTWISE = {
    "add_any", "clamp", "convert_element_type", "layout_constraint", "mesh_cast", "name", "pcast",
    "pvary", "reshard", "select_n", "sharding_constraint", "stop_gradient",
}  # fmt: skip
ONE_BY_ONE = {"device_put", "optimization_barrier"}  # on several arrays
# What moves elements, and where it leaves the axis of rows.
MOVES: dict[str, _Rule] = {
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
    "reshape": _reshaped,
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
_reduced: _Rule = lambda call: call.without(call.params["axes"])
_summed: _Rule = lambda call: call.beside([call.params["axis"]])
_of_matrix: _Rule = lambda call: call.beside(range(len(call.shape))[-2:])
# What combines elements along axes.
ALONG: dict[str, _Rule] = {
    **{f"reduce_{x}": _reduced for x in ("and", "max", "min", "or", "prod", "sum", "xor")},
    **dict.fromkeys(("argmax", "argmin"), _reduced),
    **{f"cum{x}": _summed for x in ("logsumexp", "max", "min", "prod", "sum")},
    "dot_general": _multiplied,
    "fft": lambda call: call.beside(range(len(call.shape))[-len(call.params["fft_lengths"]) :]),
    "sort": lambda call: call.beside([call.params["dimension"]]),
    "top_k": lambda call: call.beside([len(call.shape) - 1]),
    **dict.fromkeys(("cholesky", "eigh", "lu", "qr", "svd", "triangular_solve"), _of_matrix),
}
# What is trusted, as all that has another kind of program inside is.
OTHERS = {"conv_general_dilated", "ffi_call", "io_callback", "pure_callback", "random_gamma"}
