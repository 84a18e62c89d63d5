"""What stands between gradients and their exchange keeps each worker's row its own, or is refused.

`jaxsparse.value_and_grad` gives each worker's gradients a row. Code that does not know rows, such
as most of Optax, takes them for one gradient: a clip would scale them by a norm of all rows, and an
index would take a worker in the place of an element. While a step is traced, JAX's values know
what made them. So an exchange reads the program from the gradients that `value_and_grad` has marked
to those that it is given. It is told of operations that are known to keep rows apart, and refuses
all others. A compiled step has none of it.

It reads no more than it sees: gradients of another trace, code in `jax.vmap` or a `jax.shard_map`,
which was written for rows, and what calls a program of another kind are trusted.
"""

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Jaxpr, Literal
from jax.tree_util import keystr, tree_leaves_with_path

from jaxsparse.comm import compat, meshes
from jaxsparse.comm.flow import Reading
from jaxsparse.feedback.mixtures import (
    GRADIENT,
    MEANS,
    MEANS_OF_MOMENTUM,
    PARAMETERS,
    STATE,
    Mixtures,
)

# What is known of a value: the number of its axis of rows, or one of these; or None, if no gradient
# is in it. A string is the place of an operation that has mixed rows.
_FLAT, _TRUSTED = -1, -2  # rows laid end to end; rows somewhere, by code that is not followed
Rows = int | str | None


def marked(gradients: Any) -> Any:
    """Gradients with a row for each worker, marked as such while a step is traced."""
    return jax.tree.map(lambda x: checkpoint_name(x, GRADIENT), gradients)


def means_in_check(updates: Any, has_momentum: bool = False) -> Any:
    """What stands for the means of an exchange in the program of a check."""
    name = MEANS_OF_MOMENTUM if has_momentum else MEANS
    with jax.named_scope(meshes.SCOPE):
        return jax.tree.map(lambda x: checkpoint_name(x[0], name), updates)


def check_front(updates: Any, params: Any = None) -> None:
    """Raises ValueError if rows of gradients do not reach this place as they were marked.

    It warns where a state that fades, in the shape of a parameter, is added to all rows.
    """
    leaves = tree_leaves_with_path(updates)
    equations = compat.made_by([x for _, x in leaves], _is_mark)
    found = _Front()
    known = found.read(equations, {})
    for path, x in leaves:
        if isinstance(place := found.of(known, compat.variable(x)), str):
            raise ValueError(refusal(place, f"gradient{keystr(path)}"))
    if params is None:
        return
    own = jax.tree.leaves(params)
    given = {*map(compat.variable, own), *_first_inputs(compat.made_by(own, _is_mark))}
    shapes = {jnp.shape(x) for x in own} - {jnp.shape(x) for _, x in leaves} - {()}
    mixtures = Mixtures(GRADIENT)
    mixtures.read(
        equations,
        {
            x: PARAMETERS if x in given else STATE if x.aval.shape in shapes else 0
            for x in _first_inputs(equations)
        },
    )
    if mixtures.fading:
        warnings.warn(
            f"in front of the exchange, {mixtures.fading} adds a state of one worker, such as a "
            "momentum, to gradients with a row for each worker, so that the state gets rows, too: "
            "put it behind the exchange, or in jaxsparse.per_worker to have it on each worker. To "
            'leave it, filter this warning: warnings.filterwarnings("ignore", "in front of the '
            'exchange")',
            stacklevel=5,
        )


def _first_inputs(equations: Iterable[Any]) -> set[Any]:
    """The variables that equations read, and that none of them makes."""
    made = {x for equation in equations for x in equation.outvars}
    read = (x for e in equations if not _is_mark(e) for x in compat.inputs_of(e))
    return {x for x in read if not isinstance(x, Literal)} - made


def mixed_in(program: Jaxpr) -> list[str]:
    """The places in the program of a check that mix rows in front of an exchange."""
    found = _Front(only_elements=True)
    kept = found.program(program, [None] * len(program.invars))
    return [*dict.fromkeys(x for x in (*found.places, *kept) if isinstance(x, str))]


def refusal(place: str, name: str = "gradients") -> str:
    """The error that names what mixes rows."""
    return (
        f"In front of the exchange, {place} combines elements of arrays with a row for each "
        f"worker, or picks or moves rows, as if {name} were one worker's. Put it behind the "
        "exchange, where gradients are ordinary means, as in optax.chain(exchange, "
        "optax.clip_by_global_norm(1.0), optimizer). To have it on each worker's own gradients, "
        "put a transformation in jaxsparse.per_worker, and other code in jax.vmap"
    )


def _is_mark(equation: Any) -> bool:
    return equation.primitive.name == "name" and equation.params["name"] == GRADIENT


class _Front(Reading[Rows]):
    """Where gradients have their rows.

    Args:
        only_elements: whether operations along other axes than that of rows are refused, too. A
            transformation that does not know rows would count axes from the wrong one.
    """

    nothing = None

    def __init__(self, only_elements: bool = False) -> None:
        super().__init__()
        self.only_elements = only_elements
        self.places = list[Rows]()  # what reached an exchange

    def join(self, values: Iterable[Rows]) -> Rows:
        found = {x for x in values if x is not None}
        if mixed := [x for x in found if isinstance(x, str)]:
            return min(mixed)
        return _TRUSTED if len(found) > 1 else next(iter(found), None)

    def sliced(self, value: Rows) -> Rows:
        return _shifted(value, -1) if value != 0 else _TRUSTED  # a worker's at a time

    def stacked(self, value: Rows) -> Rows:
        return _shifted(value, 1)

    def equation(self, equation: Any, inputs: list[Rows]) -> list[Rows]:
        scopes = self.scopes + compat.name_stack(equation)
        if meshes.SCOPE in scopes or meshes.OWN_SCOPE in scopes:
            self.places += inputs
            return [None] * len(equation.outvars)
        return super().equation(equation, inputs)

    def _is_mapped(self) -> bool:
        """Whether the code is in `jax.vmap`."""
        return "vmap(" in self.scopes

    def operation(self, equation: Any, inputs: list[Rows]) -> list[Rows]:
        name, given = equation.primitive.name, compat.inputs_of(equation)
        every = lambda value: [value] * len(equation.outvars)
        if _is_mark(equation):
            return every(_TRUSTED if self._is_mapped() else 0)
        joined = self.join(inputs)
        if isinstance(joined, str):  # whether anything is finite may be asked of all rows
            is_nan = name in ("eq", "ne") and given[0] is given[1]
            return every(None if is_nan or name == "is_finite" else joined)
        if joined is None or joined == _TRUSTED:
            return every(joined)
        if name in _ONE_BY_ONE:
            return inputs
        if name in _ELEMENTWISE or compat.is_elementwise(equation):
            return every(joined)
        rule = _MOVES.get(name) or _ALONG.get(name)
        if rule is None and (name in _OTHERS or any(compat.inner_programs(equation.params))):
            return every(_TRUSTED)
        shapes = [x.aval.shape for x in given]
        axis, shape = next((x, s) for x, s in zip(inputs, shapes) if isinstance(x, int))
        found: Rows = None
        if joined == _FLAT and name in _MOVES:
            found = _FLAT
        elif joined == _FLAT:
            is_part = len(shape) > 1 and equation.outvars[0].aval.shape
            found = _TRUSTED if is_part else None
        elif rule is not None and not (self.only_elements and name in _ALONG):
            moved = rule(_Call(equation.params, shapes, inputs, axis, shape))
            found = None if moved is None else int(moved)  # and no integer of NumPy
        if found is None:
            if name in ("reduce_and", "reduce_or"):
                return every(None)
            place = compat.place_and_call(self.around or equation)
            found = _TRUSTED if self._is_mapped() else f"the {name} at {place}"
        return every(found)


def _shifted(value: Rows, by: int) -> Rows:
    return value + by if isinstance(value, int) and value >= 0 else value


class _Call(NamedTuple):
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


def _reshaped(call: _Call) -> int:
    size, before = call.shape[call.axis], math.prod(call.shape[: call.axis])
    new = call.params["new_sizes"]
    places = (i for i, n in enumerate(new) if n == size and math.prod(new[:i]) == before)
    return next(places, _FLAT)


def _sliced(call: _Call) -> int | None:
    starts, ends, strides = (
        call.params[name] for name in ("start_indices", "limit_indices", "strides")
    )
    of_rows = starts[call.axis], ends[call.axis], strides[call.axis] if strides else 1
    return call.if_whole(of_rows == (0, call.shape[call.axis], 1))


def _gathered(call: _Call) -> int | None:
    numbers, axis = call.params["dimension_numbers"], call.axis
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    if call.rows[0] is None or axis in numbers.operand_batching_dims:
        return _TRUSTED
    if axis in gone or call.params["slice_sizes"][axis] != call.shape[axis]:
        return None
    return numbers.offset_dims[sum(a not in gone for a in range(axis))]


def _scattered(call: _Call) -> int | None:
    numbers = call.params["dimension_numbers"]
    indexed = {*numbers.inserted_window_dims, *numbers.scatter_dims_to_operand_dims}
    return _TRUSTED if call.rows[0] is None else call.beside(indexed)


def _multiplied(call: _Call) -> int | None:
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


_Rule = Callable[[_Call], int | None]

# What is allowed. JAX says which operations are elementwise, and these are besides.
_ELEMENTWISE = {
    "add_any", "clamp", "convert_element_type", "layout_constraint", "mesh_cast", "name", "pcast",
    "pvary", "reshard", "select_n", "sharding_constraint", "stop_gradient",
}  # fmt: skip
_ONE_BY_ONE = {"device_put", "optimization_barrier"}  # on several arrays
# What moves elements, and where it leaves the axis of rows.
_MOVES: dict[str, _Rule] = {
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
_ALONG: dict[str, _Rule] = {
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
_OTHERS = {"conv_general_dilated", "ffi_call", "io_callback", "pure_callback", "random_gamma"}
