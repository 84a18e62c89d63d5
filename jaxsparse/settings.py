"""What static settings have in common."""

import math
import numbers
import operator
from typing import Any


def static_int(name: str, value: Any) -> int:
    """The setting `value` as an int; NumPy's integers count as such.

    Raises:
        ValueError: it is a bool, a float, an array or anything else.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name}={value!r} must be an int: {_static(value)}")
    return operator.index(value)


def static_seed(name: str, value: Any) -> int:
    """The setting `value` as a seed, 0 <= seed < 2**32.

    Raises:
        ValueError: it is no int, or out of that range, beyond which seeds would repeat.
    """
    seed = static_int(name, value)
    if not 0 <= seed < 2**32:
        raise ValueError(
            f"{name}={seed} must be in 0 .. {2**32 - 1}: seeds are 32 bits, pass {name} % 2**32"
        )
    return seed


def static_float(name: str, value: Any) -> float:
    """The setting `value` as a float; ints and NumPy's numbers count as such.

    Raises:
        ValueError: it is a bool, an array, a string, NaN or anything else.
    """
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number:
        raise ValueError(f"{name}={value!r} must be a number: {_static(value)}")
    if math.isnan(value):
        raise ValueError(f"{name}={value} is not a number (NaN): pass a number")
    return float(value)


def check_density(density: float) -> None:
    """Raises ValueError unless 0 < density <= 1."""
    if not 0 < static_float("density", density) <= 1:
        raise ValueError(f"density={density} must lie in (0, 1]: 0.01 sends 1 % of the elements")


def entries(density: float, size: int, parts: int = 1) -> int:
    """Entries of each of `parts` equal parts of `size` elements, rounded up, at least 1.

    Example:
        >>> entries(0.01, 1000), entries(0.01, 1000, parts=3), entries(0.01, 10)
        (10, 4, 1)
    """
    # Less a hair, for 0.01 * 1000 must not round up to 11.
    return max(1, math.ceil(density * size / parts * (1 - 1e-12)))


def _static(value: Any) -> str:
    if hasattr(value, "dtype"):  # an array or tracer, as injected settings are
        return "it is static (list it in static_args under optax.inject_hyperparams)"
    return "it is static, pass a Python or NumPy one"
