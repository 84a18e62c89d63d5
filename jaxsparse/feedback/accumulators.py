"""Residuals and momenta kept in fewer bits than they are computed in."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, DTypeLike, Float, UInt32

from jaxsparse import hashing
from jaxsparse.collectives import wire

_SIGN = 0x80000000
_DROPPED = 0x0000FFFF  # the bits of a float32 that a bfloat16 does not have
_LARGEST = 0x7F7F0000  # of the largest finite bfloat16


def check_dtype(dtype: DTypeLike | None) -> Any:
    """The dtype to keep accumulators in.

    Raises:
        ValueError: it is neither float32 (or None) nor bfloat16.
    """
    try:
        known = jnp.dtype("float32" if dtype is None else dtype)
    except TypeError:
        known = None
    if known not in (jnp.float32, jnp.bfloat16):
        raise ValueError(
            f"accumulator_dtype={dtype!r} must be 'float32' (or None) or 'bfloat16'; float16 could "
            "not hold what residuals grow to"
        )
    return known


def rounded(x: Float[Array, " d"], key: UInt32[Array, ""]) -> BFloat16[Array, " d"]:
    """Float32 `x` as bfloat16, up or down at random so that the result is `x` on average.

    Rounded to the nearest, small gradients added to a large residual would be lost at each step.
    What bfloat16 holds exactly is returned as it is; beyond its range it is clipped.

    Args:
        x: float32, finite.
        key: well mixed (from `hashing.combine`), a fresh one for each call.
    """
    sign, dropped, largest = map(jnp.uint32, (_SIGN, _DROPPED, _LARGEST))
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    noise = hashing.keyed(jax.lax.iota(jnp.uint32, x.size), key) & dropped
    magnitude = jnp.minimum(((bits & ~sign) + noise) & ~dropped, largest)
    value = jax.lax.bitcast_convert_type((bits & sign) | magnitude, jnp.float32)
    return value.astype(jnp.bfloat16)


def key_of(round_: UInt32[Array, ""], number: int, axes: Sequence[str]) -> UInt32[Array, ""]:
    """A key for the `number`-th buffer of a round, apart for each worker along `axes`."""
    return hashing.combine(round_, number, *(wire.axis_index(axis) for axis in axes))
