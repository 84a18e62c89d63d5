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
        raise ValueError(
            f"{name}={value!r} must be an int: it is static (list it in static_args under "
            "optax.inject_hyperparams)"
        )
    return operator.index(value)


def static_float(name: str, value: Any) -> float:
    """The setting `value` as a float; ints and NumPy's numbers count as such.

    Raises:
        ValueError: it is a bool, an array, a string, NaN or anything else.
    """
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or math.isnan(value):
        raise ValueError(
            f"{name}={value!r} must be a number: it is static (list it in static_args under "
            "optax.inject_hyperparams)"
        )
    return float(value)
