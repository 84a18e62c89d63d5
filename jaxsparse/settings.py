"""What static settings have in common."""

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
