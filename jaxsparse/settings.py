"""Checks of static settings, and of arguments that all selections have."""

import math
import numbers
import operator
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Integer, UInt32


def static_int(name: str, value: Any) -> int:
    """The setting `value` as an int. It may be one of NumPy's integers.

    Raises:
        ValueError: it is a bool, a float, an array or anything else.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name}={value!r} must be an int: {_static(value)}")
    return operator.index(value)


def static_count(name: str, value: Any, least: int = 1) -> int:
    """The setting `value` as an int of at least `least`.

    Raises:
        ValueError: it is no int, or smaller.
    """
    number = static_int(name, value)
    if number < least:
        raise ValueError(f"{name}={number} must be at least {least}")
    return number


def static_seed(name: str, value: Any) -> int:
    """The setting `value` as a seed, 0 <= seed < 2**32.

    Raises:
        ValueError: it is no int, or out of that range. Seeds beyond it would repeat.
    """
    seed = static_int(name, value)
    if not 0 <= seed < 2**32:
        raise ValueError(
            f"{name}={seed} must be in 0 .. {2**32 - 1}: seeds are 32 bits, pass {name} % 2**32"
        )
    return seed


def static_float(name: str, value: Any) -> float:
    """The setting `value` as a float. It may be an int or one of NumPy's numbers.

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
    """Number of entries of each of `parts` parts: density * size / parts, rounded up, at least 1.

    Example:
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


def check_k(k: int, size: int, limit: str | None = None) -> int:
    """The number of elements to keep as an int. Raises ValueError unless it is one in 1 .. size.

    Call it outside `jax.jit`, which takes k=True for k=1 once it has seen k=1.

    Args:
        k: number of elements to keep, a Python or NumPy int.
        size: largest k.
        limit: name of `size` in the error. None: the vector's size.
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
    return "it is static, pass a Python or NumPy one"
