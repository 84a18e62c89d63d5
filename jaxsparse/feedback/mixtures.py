"""What updates are mixed with: states that fade, parameters, bounds.

Whether an operation is a momentum, a weight decay or a clip is read from what it computes, so that
it does not matter who wrote it.
"""

import math
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Literal

from jaxsparse.comm import compat, meshes
from jaxsparse.comm.flow import Reading

# Marks of values: gradients with a row for each worker, and in the program of a check what an
# exchange delivers, without and with momentum.
GRADIENT, MEANS, MEANS_OF_MOMENTUM = (
    f"jaxsparse_{name}" for name in ("gradient", "means", "means_of_momentum")
)

# What a value is made of, as bits. Numbers are a state's counters, rates and keys. A state that
# fades and a share of the parameters are scaled. A power and a norm are those of updates; a bound
# is a norm beside a constant. Layers are a parameter's first axis, where it is the first one still.
# The bits above are one for each array that exchanges deliver.
PARAMETERS, STATE, NUMBER, _SCALED, _UPDATE, _POWER, _NORM, _BOUND, LAYERS = (
    1 << i for i in range(9)
)
DELIVERED = 9


class Mixtures(Reading[int]):
    """Follows marked values, and finds what is added to them and what clips them.

    Args:
        source: their mark.

    Attributes:
        fading: where a state that fades is added to them: a momentum, or a first moment. "" if
            nowhere.
        clips: whether they are clipped, by value or by norm.
        decays: whether a share of the parameters is added to them.
        layered: an operation that combines layers of parameters with rows of workers, if any.
        delivered: the size of each array that exchanges deliver in the program of a check, and the
            equation that makes it.
    """

    nothing = 0

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.fading = ""
        self.clips = self.decays = False
        self.layered: Any = None
        self.delivered = list[tuple[int, Any]]()

    def join(self, values: Iterable[int]) -> int:
        made = 0
        for value in values:
            made |= value
        return made

    def sliced(self, value: int, equation: Any) -> int:
        return value & ~LAYERS

    def stacked(self, value: int) -> int:
        return value & ~LAYERS

    def operation(self, equation: Any, inputs: list[int]) -> list[int]:
        name, made = equation.primitive.name, self.join(inputs) & ~LAYERS
        given = zip(inputs, compat.inputs_of(equation))
        if any(x & LAYERS and _keeps_first(equation, variable) for x, variable in given):
            made |= LAYERS
        label = str(equation.params.get("name")) if name == "name" else name
        if label.startswith(MEANS):
            made = made >> DELIVERED << DELIVERED | 1 << DELIVERED + self._number(equation)
        if label == self.source:
            made |= _UPDATE
        elif name == "is_finite" or _is_off(equation):
            made = 0
        elif name.startswith("reduce_") and made & (_UPDATE | _POWER):
            made = made & ~(_UPDATE | _POWER) | _NORM
        else:
            self._look_at(equation, inputs)
            is_product = name in ("mul", "div") and all(x & _UPDATE for x in inputs)
            if is_product or name == "square" or equation.params.get("y", 1) != 1:
                made = made & ~_UPDATE | _POWER
            if equation.outvars[0].aval.dtype == bool:
                made &= ~_UPDATE
            if name in ("mul", "div") and made & (STATE | PARAMETERS):
                made |= _SCALED
            if name in ("max", "min") and made & _NORM and 0 in inputs:
                made |= _BOUND
        return [made] * len(equation.outvars)

    def _number(self, equation: Any) -> int:
        """The number of an array that an exchange delivers."""
        if not any(e is equation for _, e in self.delivered):  # in a loop it comes again
            self.delivered.append((math.prod(equation.outvars[0].aval.shape), equation))
        return [e is equation for _, e in self.delivered].index(True)

    def _look_at(self, equation: Any, inputs: list[int]) -> None:
        name = equation.primitive.name
        # Parameters that an update was added to are no update any more.
        is_update = [bool(x & _UPDATE and not x & (STATE | PARAMETERS)) for x in inputs]
        if not any(is_update):
            return
        others = [x for x, yes in zip(inputs, is_update) if not yes]
        if any(x & LAYERS for x in others) and compat.is_elementwise(equation):
            self.layered = self.layered or self.around or equation
        scaled = self.join(x for x in others if x & _SCALED and not x & _UPDATE)
        if name in ("add", "add_any", "sub") and scaled:
            self.decays |= bool(scaled & PARAMETERS)
            call = self.around or equation
            # In front of an exchange, states are known by their shape alone. A trainer's step may
            # add any array of that shape, such as a control variate, and Optax' transformations
            # their state.
            is_state = self.source != GRADIENT or compat.is_called_by_optax(call)
            if not scaled & PARAMETERS and is_state:
                self.fading = compat.place_and_call(call)
        by_value = name in ("clamp", "max", "min") and not any(others)
        by_norm = name == "select_n" and bool(inputs[0] & _NORM) and all(is_update[1:])
        by_bound = name in ("mul", "div") and any(x & _BOUND for x in others)
        self.clips |= by_value or by_norm or by_bound


def _keeps_first(equation: Any, given: Any) -> bool:
    """Whether the first axis of what an operation is given is the first of its result, too."""
    name, shape = equation.primitive.name, given.aval.shape[:1]
    if name == "broadcast_in_dim":
        return equation.params["broadcast_dimensions"][:1] == (0,)
    if name == "transpose":
        return equation.params["permutation"][:1] == (0,)
    if math.prod(shape) == 1:  # one element is laid along nothing
        return False
    is_gone = name.startswith("reduce_") and 0 in equation.params.get("axes", ())
    return not is_gone and equation.outvars[0].aval.shape[:1] == shape


def _is_off(equation: Any) -> bool:
    """Whether it multiplies by the constant 0, as a weight decay that is off."""
    is_zero = lambda x: isinstance(x, Literal) and jnp.ndim(x.val) == 0 and x.val == 0
    return equation.primitive.name == "mul" and any(map(is_zero, compat.inputs_of(equation)))


Made = frozenset[tuple[int, str]] | None


class Operations(Reading[Made]):
    """Finds the elementwise operations on gradients in front of an exchange, outside of per_worker.

    Attributes:
        delivered: of each array that exchanges deliver, its shape and the names of these.
    """

    nothing = None

    def __init__(self) -> None:
        super().__init__()
        self.delivered = list[tuple[tuple[int, ...], list[str]]]()

    def join(self, values: Iterable[Made]) -> Made:
        known = [value for value in values if value is not None]
        return frozenset().union(*known) if known else None

    def operation(self, equation: Any, inputs: list[Made]) -> list[Made]:
        name, made = equation.primitive.name, self.join(inputs)
        label = str(equation.params.get("name")) if name == "name" else ""
        is_own = meshes.OWN_SCOPE in self.scopes + compat.name_stack(equation)
        if name == GRADIENT:
            made = made or frozenset()
        elif label.startswith(MEANS):
            if made is not None:
                names = sorted(name for _, name in made)
                self.delivered.append((equation.outvars[0].aval.shape, names))
            made = None
        elif made is not None and not is_own and compat.is_elementwise(equation):
            made |= {(id(equation), name)}
        return [made] * len(equation.outvars)
