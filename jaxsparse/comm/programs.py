"""What a traced program computes: to compare it with another one, and two questions."""

import itertools
from collections.abc import Container, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Var

from jaxsparse.comm import compat


def written(program: ClosedJaxpr, identities: Container[str]) -> list[Any]:
    """What a program computes, to be compared. Operations named in `identities` are left out.

    Types of values, which `jax.shard_map` checks, are none of it.
    """
    return _written(program.jaxpr, program.consts, identities)


def _written(program: Jaxpr, constants: Sequence[Any], identities: Container[str]) -> list[Any]:
    counted = itertools.count()
    numbers = dict[Any, Any](zip(program.constvars, map(_value, constants)))

    def number(x: Any) -> Any:
        if not isinstance(x, Var):
            return _value(x.val)
        if x not in numbers:
            numbers[x] = next(counted)
        return numbers[x]

    written = list[Any]([number(x) for x in program.invars])
    for equation in program.eqns:
        name, params = equation.primitive.name, equation.params
        if name in identities:
            numbers.update(zip(equation.outvars, map(number, equation.invars)))
            continue
        settings = {key: str(x) for key, x in params.items() if _is_plain(x)}
        if name in compat.OPCODES:  # with types and without, it has other names and settings
            name = name.removesuffix("_invariant")
            settings = {"over": str(compat.axes_of(params)), "perm": str(params.get("perm"))}
        made = [(number(x), _type_of(x.aval)) for x in equation.outvars]
        inside = [_written(inner, (), identities) for inner in compat.inner_programs(params)]
        written.append((name, [*map(number, equation.invars)], settings, made, inside))
    return [*written, [number(x) for x in program.outvars]]


def _is_plain(x: Any) -> bool:
    """Whether a setting is a number, a name, or a tuple of these."""
    is_one = isinstance(x, str | int | float | None)
    return is_one or (isinstance(x, tuple) and all(map(_is_plain, x)))


def _type_of(aval: Any) -> str:
    return f"{getattr(aval, 'dtype', aval)}{getattr(aval, 'shape', '')}"


def _value(x: Any) -> Any:
    """What tells a constant from others. Both programs close over the same traced values."""
    if not hasattr(x, "dtype"):
        return str(x)
    if isinstance(x, jax.core.Tracer) or not getattr(x, "is_fully_addressable", True):
        return id(x)
    is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)
    return str(x.dtype), np.asarray(jax.random.key_data(x) if is_key else x).tobytes()


def has_gradient(program: Jaxpr) -> bool:
    """Whether a program takes a gradient. A solve has a transposed one inside, which is none."""
    return any(
        "transpose(" in compat.name_stack(equation)
        or (
            equation.primitive.name != "custom_linear_solve"
            and any(map(has_gradient, compat.inner_programs(equation.params)))
        )
        for equation in program.eqns
    )


def communicates(program: Jaxpr, axis_name: str) -> bool:
    """Whether an operation anywhere in the program communicates over the axis."""
    return any(_is_over(equation, axis_name) for equation, _ in compat.scoped(program))


def _is_over(equation: Any, axis_name: str) -> bool:
    is_sent = equation.primitive.name in compat.OPCODES
    return is_sent and axis_name in compat.axes_of(equation.params)
