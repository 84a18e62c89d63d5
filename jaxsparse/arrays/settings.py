"""Static settings: their checks, values by steps, and arguments that selections share."""

import bisect
import dataclasses
import functools
import inspect
import math
import numbers
import operator
import types
from collections.abc import Callable
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Integer, UInt32

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Stages(Generic[T]):
    """Values of a static setting, each for a range of steps.

    Attributes:
        values: one value for each stage.
        boundaries: the steps at which all stages but the first begin, in increasing order.

    >>> stages = Stages(values=(1, 30), boundaries=(100,))
    >>> stages.at(99), stages.at(100)
    (1, 30)
    """

    values: tuple[T, ...]
    boundaries: tuple[int, ...]

    def __post_init__(self):
        object.__setattr__(self, "values", tuple(self.values))
        steps = tuple(static_int("boundaries", step) for step in self.boundaries)
        object.__setattr__(self, "boundaries", steps)
        if len(self.values) != len(steps) + 1:
            raise ValueError(
                f"boundaries={steps} divide training into {len(steps) + 1} stages, but there are "
                f"{len(self.values)} values={self.values}: give one for each stage"
            )
        if any(step < 1 for step in steps) or list(steps) != sorted(set(steps)):
            raise ValueError(f"boundaries={steps} must be increasing steps, from 1 on")

    def at(self, step: int) -> T:
        """The value at a step."""
        return self.values[bisect.bisect_right(self.boundaries, step)]


def check_fields(settings: Any) -> None:
    """Checks each field of a frozen dataclass against its type, or raises ValueError.

    An int is stored as an int of Python. A float must be a number, and a value of a Literal one of
    its values. The metadata of `Annotated` types are functions of a field's name and value, which
    return the value to store or raise ValueError. None passes where the type names it.
    """
    kind: Any = type(settings)
    for name, checks in _checks(kind):
        value = given = getattr(settings, name)
        for check in checks:
            value = check(name, value)
        if value is not given:
            object.__setattr__(settings, name, value)


Check = Callable[[str, Any], Any]


@functools.cache
def _checks(kind: Any) -> list[tuple[str, list[Check]]]:
    hints = get_type_hints(kind, include_extras=True)
    return [(f.name, _checks_of(hints[f.name])) for f in dataclasses.fields(kind)]


def _checks_of(hint: Any) -> list[Check]:
    parts = get_args(hint)
    if get_origin(hint) is Annotated:
        return _checks_of(parts[0]) + [check for check in parts[1:] if callable(check)]
    if get_origin(hint) in (Union, types.UnionType):
        # Values of the other types, such as None, pass.
        kinds = [get_origin(part) or part for part in parts]
        others = tuple(k for k in kinds if isinstance(k, type) and k not in (int, float, bool))
        return [_unless(others, check) for part in parts for check in _checks_of(part)]
    if get_origin(hint) is Literal:
        return [functools.partial(_check_choice, parts)]
    check = {bool: static_bool, int: static_int, float: _check_float}.get(hint)
    return [] if check is None else [check]


def _unless(kinds: tuple[type, ...], check: Check) -> Check:
    """The check, for all values but those of these types."""
    return lambda name, value: value if isinstance(value, kinds) else check(name, value)


def _check_float(name: str, value: Any) -> Any:
    static_float(name, value)
    return value  # as it was given, for the errors of other checks


def _check_choice(known: tuple[Any, ...], name: str, value: Any) -> Any:
    if all(isinstance(choice, int) for choice in known):
        value = static_int(name, value)
    if value not in known:
        *most, last = map(repr, known)
        usable = f"{', '.join(most)} or {last}" if most else last
        raise ValueError(f"{name}={value!r} is unknown: use {usable}")
    return value


def at_least(least: int, hint: str = "") -> Check:
    """The check of a number that has a lower bound."""

    def check(name: str, value: Any) -> Any:
        if static_float(name, value) < least:
            raise ValueError(f"{name}={value} must be at least {least}{hint and f': {hint}'}")
        return value

    return check


def static_int(name: str, value: Any) -> int:
    """The setting `value` as an int. It may be one of NumPy's integers, but no bool."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        # As in k=0.01, for 1 %.
        is_share = isinstance(value, float) and 0 < value < 1
        why = "give a number, not a share" if is_share else _static(value)
        raise ValueError(f"{name}={value!r} must be an int: {why}")
    return operator.index(value)


def static_bool(name: str, value: Any) -> bool:
    """The setting `value`. Raises ValueError unless it is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False: {_static(value)}")
    return value


def static_count(name: str, value: Any, least: int = 1) -> int:
    """The setting `value` as an int of at least `least`."""
    number = static_int(name, value)
    if number < least:
        raise ValueError(f"{name}={number} must be at least {least}")
    return number


def static_seed(name: str, value: Any) -> int:
    """The setting `value` as a seed, 0 <= seed < 2**32. Seeds beyond would repeat."""
    seed = static_int(name, value)
    if not 0 <= seed < 2**32:
        raise ValueError(
            f"{name}={seed} must be in 0 .. {2**32 - 1}: seeds are 32 bits, pass {name} % 2**32"
        )
    return seed


def static_float(name: str, value: Any) -> float:
    """The setting `value` as a float. It may be an int or one of NumPy's numbers, but not NaN."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number:
        raise ValueError(f"{name}={value!r} must be a number: {_static(value)}")
    if math.isnan(value):
        raise ValueError(f"{name}={value} is not a number (NaN): pass a number")
    return float(value)


def check_function(name: str, value: Any, *arguments: str) -> None:
    """Raises ValueError unless it is a function that takes these arguments."""
    try:
        inspect.signature(value).bind_partial(*arguments)
    except TypeError as error:
        raise ValueError(
            f"{name}={value!r} must be a function of {' and '.join(arguments)}: write "
            f"{name}=lambda {', '.join(arguments)}: ... ({error})"
        ) from None
    except ValueError:
        pass  # of C, which tells no arguments


def check_density(density: float) -> None:
    """Raises ValueError unless 0 < density <= 1."""
    _check_share("density", density)


def _check_share(name: str, value: Any) -> float:
    if isinstance(value, numbers.Integral) and value == 1 and value is not True:
        raise ValueError(f"{name}={value} is 100 %: write 1.0 to send all, or 0.01 to send 1 %")
    if not 0 < static_float(name, value) <= 1:
        raise ValueError(f"{name}={value} must lie in (0, 1]: 0.01 sends 1 % of the elements")
    return value


# A share of the elements, in (0, 1].
Density = Annotated[float, _check_share]
# A number of things, at least 1.
Count = Annotated[int, at_least(1)]
# A seed, 0 <= seed < 2**32.
Seed = Annotated[int, static_seed]


def entries(density: float, size: int, parts: int = 1) -> int:
    """Number of entries of each of `parts` parts: density * size / parts, rounded up, at least 1.

    >>> entries(0.01, 1000), entries(0.01, 1000, parts=3), entries(0.01, 10)
    (10, 4, 1)
    """
    # A hair less, because 0.07 * 100, which is 7.000000000000001, must not round up to 8.
    return max(1, math.ceil(density * size / parts * (1 - 1e-12)))


def check_vector(name: str, x: Array) -> None:
    """Raises ValueError unless `x` is a vector whose indices, and its size, fit into int32."""
    if x.ndim != 1:
        raise ValueError(f"{name} has shape {x.shape}, but must be a vector: pass {name}.ravel()")
    if x.size >= 2**31:
        raise ValueError(
            f"{name} has {x.size} elements, but indices are int32: split it into vectors of less "
            "than 2**31 (bucket_size of a transformation does)"
        )


def check_size(name: str, size: int) -> None:
    """Raises ValueError unless `size` is at least 1 and fits an int32."""
    if not 1 <= size < 2**31:
        raise ValueError(
            f"{name}={size} must lie between 1 and 2**31 - 1: skip a vector that is empty, split a "
            "longer one (bucket_size of a transformation does)"
        )


def check_k(k: int, size: int, limit: str | None = None) -> int:
    """The number of elements to keep as an int. Raises ValueError unless it is in 1 .. size.

    Call it outside `jax.jit`, which takes k=True for k=1 once it has seen k=1. `limit` names `size`
    in the error.
    """
    k = static_int("k", k)
    if not 1 <= k <= size:
        limit = limit or f"the vector's size, {size}"
        raise ValueError(f"k={k} must lie between 1 and {limit}: choose it there")
    return k


def check_seed(seed: Integer[Array, ""] | int) -> UInt32[Array, ""]:
    """The seed as uint32. Raises ValueError unless it is an int or an integer scalar."""
    if type(seed) is int:
        return jnp.uint32(seed % 2**32)
    dtype = getattr(seed, "dtype", None)
    if dtype is None or jnp.ndim(seed) or not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(f"seed={seed!r} must be an integer scalar: pass an int or a uint32")
    return lax.convert_element_type(seed, jnp.uint32)


def check_slots(slots: int, size: int) -> int:
    """The number of slots as an int. Raises ValueError unless it is an int from 1 to `size`."""
    slots = static_int("slots", slots)
    if not 1 <= slots <= size:
        raise ValueError(
            f"slots={slots} must lie between 1 and the vector's size, {size}: choose "
            "density * size, rounded up"
        )
    return slots


def _static(value: Any) -> str:
    if hasattr(value, "dtype"):  # an array or tracer, as injected settings are
        return "it is static (list it in static_args under optax.inject_hyperparams)"
    if dataclasses.is_dataclass(value):  # stages, or a reducer
        return "for stages, give jaxsparse.exchange a reducer of stages"
    return "it is static, pass a Python or NumPy one"
