"""Operations by which entries of sparse vectors are combined: sum, max, min, or.

All are commutative and associative, and an absent entry counts as the operation's neutral element:
max(-2, absent) is -2, not 0.
"""

from typing import Literal, get_args

import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Num

Operation = Literal["sum", "max", "min", "or"]


def check(op: Operation, dtype: DTypeLike) -> None:
    """Raises ValueError unless `op` is known and defined for `dtype`."""
    if op not in get_args(Operation):
        raise ValueError(f"op={op!r} is unknown: use one of {get_args(Operation)}")
    if op == "or" and not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(
            f"op='or' combines the bits of integers, values have dtype {jnp.dtype(dtype)}: "
            "pass them as uint32"
        )


def neutral(op: Operation, dtype: DTypeLike) -> Num[Array, ""]:
    """The element e with combine(op, e, x) == x, in `dtype`.

    Example:
        >>> neutral("max", "float32").item()
        -inf
    """
    check(op, dtype)
    if op in ("sum", "or"):
        return jnp.zeros((), dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.array(-jnp.inf if op == "max" else jnp.inf, dtype)
    limits = jnp.iinfo(dtype)
    return jnp.array(limits.min if op == "max" else limits.max, dtype)


def combine(op: Operation, a: Num[Array, "*shape"], b: Num[Array, "*shape"]) -> Array:
    """`a` and `b` combined element by element."""
    functions = {"sum": jnp.add, "max": jnp.maximum, "min": jnp.minimum, "or": jnp.bitwise_or}
    return functions[op](a, b)


def scatter(op: Operation, dense: Num[Array, " d"], indices: Array, values: Array) -> Array:
    """`dense` with `values` combined into it at `indices`; out-of-range indices are ignored.

    An index may repeat, but for "or".
    """
    at = dense.at[indices]
    if op == "sum":
        return at.add(values, mode="drop")
    if op == "max":
        return at.max(values, mode="drop")
    if op == "min":
        return at.min(values, mode="drop")
    return at.set(at.get(mode="fill", fill_value=0) | values, mode="drop")
