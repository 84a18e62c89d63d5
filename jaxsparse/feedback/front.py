"""What stands between gradients and their exchange keeps each worker's row its own, or is refused.

`jaxsparse.value_and_grad` gives each worker's gradients a row. Code that does not know rows, such
as most of Optax, takes them for one gradient: a clip would scale them by a norm of all rows, and an
index would take a worker in the place of an element. While a step is traced, JAX's values know
what made them. So an exchange reads the program from the gradients that `value_and_grad` has marked
to those that it is given. Code there may work element by element, and along axes in front of that
of rows, as those of micro-batches. All else is refused, also what would keep rows apart: code that
counts axes takes rows for another one, a scope of `jax.vmap` does not tell over what it maps, and
`jaxsparse.per_worker` has room for everything. A compiled step has none of it.

It reads no more than it sees. It trusts gradients of another trace, callbacks, kernels, and code in
a `jax.shard_map`, which was written for rows.
"""

import warnings
from collections.abc import Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Jaxpr, Literal
from jax.interpreters import ad
from jax.tree_util import keystr, tree_leaves_with_path

from jaxsparse.comm import compat, meshes, shard_maps
from jaxsparse.feedback.axes import (
    ONE_BY_ONE,
    TRUSTED,
    Call,
    Known,
    RowAxis,
    RowsReading,
    Rule,
    place_in_source,
)
from jaxsparse.feedback.mixtures import (
    GRADIENT,
    LAYERS,
    MEANS,
    MEANS_OF_MOMENTUM,
    PARAMETERS,
    STATE,
    Mixtures,
)

T = TypeVar("T")
# Where rows are as `value_and_grad` makes them, and an exchange takes them.
_FIRST = RowAxis(0, 1)


# Marks gradients, with their axis of rows, which another one precedes where a step is mapped.
_mark = shard_maps.identity(GRADIENT, lambda aval, **_: aval)
ad.deflinear2(_mark, lambda ct, _, **params: [_mark.bind(ct, **params)])


def _batched_mark(args: Any, dims: Any, *, of_rows: int, order: str, spmd_axes: Any) -> Any:
    return _mark.bind(args[0], of_rows=of_rows + (dims[0] <= of_rows), order=order), dims[0]


compat.set_rule_of_vmap(_mark, _batched_mark)
# Marks what goes into an exchange and comes out of it. Nothing is looked at in front of that.
_unread = shard_maps.identity(UNREAD := "jaxsparse_unread", lambda aval, **_: aval)
ad.deflinear2(_unread, lambda ct, _: [ct])


def marked(rows: Any, order: str = "gradient") -> Any:
    """Arrays with a row for each worker, such as gradients, marked while a step is traced."""
    return jax.tree.map(lambda x: _mark.bind(x, of_rows=_FIRST.axis, order=order), rows)


def unread(tree: T) -> T:
    """What goes into an exchange, and comes out of it, marked.

    An exchange's own program moves rows. A later one under the same `jax.jit` must not read that.
    """
    is_known = lambda x: (
        isinstance(x, jax.core.Tracer) and not jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)
    )
    return jax.tree.map(lambda x: _unread.bind(x) if is_known(x) else x, tree)


def means_in_check(updates: Any, has_momentum: bool = False) -> Any:
    """What stands for the means of an exchange in the program of a check."""
    name = MEANS_OF_MOMENTUM if has_momentum else MEANS
    with jax.named_scope(meshes.SCOPE):
        return jax.tree.map(lambda x: checkpoint_name(x[0], name), updates)


def check_front(updates: Any, params: Any = None, state: Any = None) -> None:
    """Raises ValueError if rows of gradients do not reach this place as they were marked.

    Nor may parameters and states hold what mixes rows. It warns where a state that fades, in the
    shape of a parameter, is added to all rows.
    """
    leaves = tree_leaves_with_path(updates)
    # Where a whole step is mapped or differentiated, rows have another axis.
    under = [compat.under(x, _FIRST.axis) for _, x in leaves]
    equations = compat.made_by([x for x, _ in under], _is_mark)
    found = _Front()
    known = found.read(equations, {})
    made = {x: equation for equation in equations for x in equation.outvars}
    for (path, _), (x, first) in zip(leaves, under):
        rows = found.of(known, compat.variable(x))
        is_first = isinstance(rows, RowAxis) and rows[:2] == (first, 1)
        if isinstance(rows, RowAxis) and rows != TRUSTED and not is_first:
            rows = place_in_source(made[compat.variable(x)])
        if isinstance(rows, str):
            raise ValueError(refusal(rows, f"gradient{keystr(path)}"))
    beside = [compat.under(x, 0)[0] for x in jax.tree.leaves((params, state))]
    of_others = _Front(reads_references=False)
    known = of_others.read(compat.made_by(beside, _is_mark), {})
    mixed = [of_others.of(known, compat.variable(x)) for x in beside]
    if places := [x for x in (*found.places, *of_others.places, *mixed) if isinstance(x, str)]:
        raise ValueError(refusal(min(places), "parameters or a state of them"))
    if params is None:
        return
    own = [compat.under(x, 0)[0] for x in jax.tree.leaves(params)]
    bits = dict.fromkeys(_first_inputs(compat.made_by(own, _is_mark)), PARAMETERS)
    bits |= dict.fromkeys(map(compat.variable, own), PARAMETERS | LAYERS)
    shapes = {jnp.shape(x) for x in own} - {jnp.shape(x) for x, _ in under} - {()}
    mixtures = Mixtures(GRADIENT)
    of_shape = lambda x: STATE if x.aval.shape in shapes else 0
    mixtures.read(equations, {x: bits.get(x, of_shape(x)) for x in _first_inputs(equations)})
    if mixtures.layered is not None:
        raise ValueError(
            f"In front of the exchange, {place_in_source(mixtures.layered)} combines each worker's "
            "row with a layer of parameters, as a jax.vmap over layers does: gradients have a row "
            "for each worker in front of their layers. Write it without jax.vmap, or put it in "
            "jaxsparse.per_worker(optax.stateless(lambda grads, params: ...))"
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
    found = _Front()
    kept = found.program(program, [None] * len(program.invars))
    return [*dict.fromkeys(x for x in (*found.places, *kept) if isinstance(x, str))]


def refusal(what: str, name: str = "gradients") -> str:
    """The error that names what mixes rows."""
    return (
        f"In front of the exchange, {what} combines elements of arrays with a row for each "
        f"worker, or picks or moves rows, as if {name} were one worker's. Put it behind the "
        "exchange, where gradients are ordinary means, as in optax.chain(exchange, "
        "optax.clip_by_global_norm(1.0), optimizer). To have it on each worker's own gradients, "
        "put it in jaxsparse.per_worker, code as optax.stateless(lambda grads, params: ...)"
    )


def _is_mark(equation: Any) -> bool:
    """Whether nothing is looked at in front of an equation."""
    name = equation.primitive.name
    return name == UNREAD or (name == GRADIENT and equation.params["order"] == "gradient")


def _is_joined(known: Known) -> bool:
    """Whether rows share their axis with others."""
    if not isinstance(known, RowAxis) or known == TRUSTED:
        return False
    return known.axis < 0 or known.block > 1 or known.order in ("grouped", "part", "again")


# The result is finite where the gradients among the operands are. A select_n has to pick by other
# values than gradients.
_AS_FINITE = {
    "abs", "add", "add_any", "broadcast_in_dim", "clamp", "concatenate", "copy", "max", "min",
    "name", "neg", "pvary", "reduce_sum", "reshape", "select_n", "sharding_constraint", "squeeze",
    "stack", "sub", "transpose", *ONE_BY_ONE,
}  # fmt: skip


def _order_of(equation: Any, inputs: list[Known]) -> Any:
    """What an operation leaves of an order, see `RowAxis`."""
    name, given = equation.primitive.name, compat.inputs_of(equation)
    orders = {x.order for x in inputs if isinstance(x, RowAxis)}
    if orders == {"finite"}:
        return "finite"
    if not orders <= {"gradient", "scaled"} or (name == "select_n" and inputs[0] is not None):
        return "all"
    order = "scaled" if "scaled" in orders else "gradient"
    if name in _AS_FINITE:
        return "all" if order == "scaled" and name in ("clamp", "max", "min") else order
    if name == "convert_element_type":
        most = lambda x: float(jnp.finfo(x.aval.dtype).max)
        types = [x.aval.dtype for x in (*given, *equation.outvars)]
        is_float = all(jnp.issubdtype(each, jnp.floating) for each in types)
        is_as_wide = is_float and most(equation.outvars[0]) >= 0.99 * most(given[0])  # or bfloat16
        return order if is_as_wide else "all"
    # A factor that is 0 or not finite makes NaN of some entries.
    is_scaled = name == "mul" or (name == "div" and inputs[1] is None)
    return "scaled" if is_scaled and None in inputs else "all"


class _Front(RowsReading):
    """Where gradients have their rows."""

    def __init__(self, reads_references: bool = True) -> None:
        super().__init__()
        self._reads_references = reads_references
        self.places = list[str]()  # of what mixes, in front of an exchange
        self.workers = 0

    def equation(self, equation: Any, inputs: list[Known]) -> list[Known]:
        scopes = self.scopes + compat.name_stack(equation)
        if meshes.SCOPE in scopes or meshes.OWN_SCOPE in scopes:
            self.places += [x for x in inputs if isinstance(x, str)]
            return [None] * len(equation.outvars)
        return super().equation(equation, inputs)

    def join(self, values: Iterable[Known]) -> Known:
        found = {x for x in values if x is not None}
        if len({x.order for x in found if isinstance(x, RowAxis)}) > 1:
            found = {x._replace(order="all") if isinstance(x, RowAxis) else x for x in found}
        return super().join(found)

    def sliced(self, value: Known, equation: Any) -> Known:
        if isinstance(value, RowAxis) and value.axis == 0:  # it may have been meant for layers
            return place_in_source(self.around or equation)
        return super().sliced(value, equation)

    def is_allowed(self, name: str, rule: Rule, call: Call) -> bool:
        """Whether all axes from that of rows on stay as they are, and behind each other."""
        if name == "concatenate":  # all operands may have rows
            return bool(call.params["dimension"] < call.axis)
        shifted = lambda n: [x if x is None else x + n for x in call.rows]
        behind = range(len(call.shape) - call.axis)
        at = [rule(call._replace(axis=call.axis + n, rows=shifted(n))) for n in behind]
        return at[0] is not None and at == [at[0] + n for n in behind]

    def operation(self, equation: Any, inputs: list[Known]) -> list[Known]:
        place, made = place_in_source(self.around or equation), equation.outvars
        if equation.primitive.name == UNREAD:
            return [None]
        if any(map(compat.is_reference, equation.invars)):
            # What wrote to it need not be among the equations that made its value.
            return [place if self._reads_references else None] * len(made)
        if equation.primitive.name == GRADIENT:
            (x,), axis = compat.inputs_of(equation), equation.params["of_rows"]
            self.workers = x.aval.shape[axis]
            return [TRUSTED if self.workers == 1 else RowAxis(axis, 1, equation.params["order"])]
        orders = {x.order for x in inputs if isinstance(x, RowAxis)}
        if self._asks(equation, orders):
            return [x._replace(order="finite") for x in inputs[:1] if isinstance(x, RowAxis)]
        if orders == {"finite"} and self._asks_of_all(equation, inputs[0]):
            return [None]
        before = [x._replace(order="all") if isinstance(x, RowAxis) else x for x in inputs]
        found = super().operation(equation, before)
        if TRUSTED in found and TRUSTED not in before:
            return self._left(equation, before, place)
        order = _order_of(equation, inputs)
        kept = lambda x: x._replace(order=order) if isinstance(x, RowAxis) and x != TRUSTED else x
        return [place if _is_joined(x) else kept(x) for x in found]

    def _asks(self, equation: Any, orders: set[Any]) -> bool:
        """Whether it tells of each entry whether it is finite, or, of gradients, a number."""
        name, given = equation.primitive.name, compat.inputs_of(equation)
        if name == "is_finite":
            return bool(orders) and orders <= {"gradient", "scaled"}
        is_infinite = lambda x: isinstance(x, Literal) and np.isinf(x.val).all()
        is_asked = name in ("eq", "ne") and (given[0] is given[1] or is_infinite(given[1]))
        return is_asked and orders == {"gradient"}

    def _asks_of_all(self, equation: Any, known: Known) -> bool:
        """Whether it tells of all rows whether all are finite. A number of entries would not do."""
        if equation.primitive.name not in ("reduce_and", "reduce_or"):
            return False
        (x,) = compat.inputs_of(equation)
        assert isinstance(known, RowAxis)
        behind = {*range(known.axis, len(x.aval.shape))}
        return x.aval.dtype == bool and behind <= {*equation.params["axes"]}

    def _left(self, equation: Any, inputs: list[Known], place: str) -> list[Known]:
        """Where trusted code leaves rows: in front, if it has as many as there are workers.

        It has to be given them there. A shard_map has to cut them, and to leave them there, if any.
        """
        made, specs = equation.outvars, equation.params.get("out_specs")
        if any(isinstance(x, RowAxis) and x != _FIRST for x in inputs):
            return [place] * len(made)  # micro-batches, or the axis of a jax.vmap, stand in front
        is_first = [getattr(x.aval, "shape", ())[:1] == (self.workers,) for x in made]
        if specs is None:
            return [_FIRST if yes else None for yes in is_first]
        cuts_rows = lambda spec: bool(spec) and spec[0] is not None
        given = zip(inputs, equation.params["in_specs"])
        if not all(cuts_rows(spec) for x, spec in given if isinstance(x, RowAxis)):
            return [place] * len(made)
        where = lambda yes, spec: (
            (_FIRST if yes else place) if cuts_rows(spec) else place if any(spec) else None
        )
        return [where(yes, spec) for yes, spec in zip(is_first, specs)]
