"""Rotates groups of values at random, so that no value of a group is much larger than the others.

A few bits are enough for normal values, but not for a group with a single large value: the scale
of that value leaves no level for the others. A random rotation makes the values of any group nearly
normal. It is linear, so that sums can stay rotated until the end.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Key

from jaxsparse.arrays.hashing import keyed
from jaxsparse.arrays.settings import static_int

__all__ = ["check_rotation", "rotated", "rotated_back"]


def rotated(x: Float[Array, " d"], size: int, key: Key[Array, ""]) -> Float[Array, " padded"]:
    """H D x / sqrt(n) for each n consecutive values: random signs D, then a Hadamard matrix H.

    From n = 256 on, a matrix of n / 4 to n / 16 rows turns parts of a group, and additions combine
    the parts. For large n that takes less time than the whole matrix, or than additions alone.

    Args:
        x: vector of d elements, float32.
        size: number of values of a group, n, a power of two.
        key: key of the signs, equal on all workers and fresh at each step.

    Returns:
        float32, d rounded up to a multiple of n. Values are rounded to float32, relative to the
        norm of their group. If a value of a group is not finite, no result of the group is.

    Suresh et al. (ICML 2017), section 3, call it the randomised Hadamard transform. SDP4Bit (Jia et
    al., NeurIPS 2024) uses it for gradients.

    >>> rotated(jnp.float32([8, 0, 0, 0]), 4, jax.random.key(0)).tolist()
    [4.0, 4.0, 4.0, 4.0]
    """
    check_rotation(size)
    x = jnp.pad(x, (0, -x.size % size))
    return _turned(_signed(x, key), size)


def rotated_back(
    y: Float[Array, " padded"], size: int, key: Key[Array, ""], original: int
) -> Float[Array, " d"]:
    """The inverse of `rotated` for the same size and key, D H y / sqrt(n), without the padding.

    Args:
        y: rotated values or a sum of such vectors, float32.
        size: as in `rotated`.
        key: as in `rotated`.
        original: number of values before padding, d.
    """
    return _signed(_turned(y, size), key)[:original]


def check_rotation(size: int) -> None:
    """Raises ValueError unless `size` is a power of two from 2 on."""
    size = static_int("group_size", size)
    if size < 2 or size & (size - 1):
        raise ValueError(
            f"group_size={size}, but groups are rotated only if it is a power of two: use "
            f"{2 ** max(5, size.bit_length())}"
        )


def _turned(x: Array, size: int) -> Array:
    """Multiplies each group by Sylvester's matrix over sqrt(size).

    The matrix is a Kronecker product, so a smaller matrix and rounds of additions replace it.
    """
    count = min(16, size // 64) if size >= 256 else 1
    pieces = x.reshape(-1, size // count)
    pieces = jnp.matmul(pieces, _hadamard(size // count, size), precision=lax.Precision.HIGHEST)
    parts = list(jnp.moveaxis(pieces.reshape(-1, count, size // count), 1, 0))
    span = 1
    while span < count:
        parts = [
            parts[i - span] - part if i & span else part + parts[i + span]
            for i, part in enumerate(parts)
        ]
        span *= 2
    return jnp.stack(parts, axis=1).reshape(-1)


def _signed(x: Array, key: Key[Array, ""]) -> Array:
    """The values with random signs: a hashed bit for each."""
    words = keyed(lax.iota(jnp.uint32, x.size), jax.random.bits(key, dtype=jnp.uint32))
    signs = words & jnp.uint32(2**31)
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint32) ^ signs, jnp.float32)


@functools.cache
def _hadamard(size: int, whole: int) -> np.ndarray:
    """Sylvester's matrix of this size, divided by sqrt(whole)."""
    from scipy import linalg  # not at the top, because it takes long to import

    return (linalg.hadamard(size) / np.sqrt(whole)).astype(np.float32)
