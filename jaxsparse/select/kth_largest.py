"""The k-th largest of many integers, by counting how many reach trial values."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped, UInt32

from jaxsparse.platforms import by_platform
from jaxsparse.select.counting import count_reaching
from jaxsparse.tiles import zeros

__all__ = ["kth_largest"]

# Of a digit. More mean fewer passes, but each counts for 2**bits - 1 trials.
_DIGIT_BITS = 4

Key = Callable[[Array], UInt32[Array, " n"]]


def kth_largest(
    x: Shaped[Array, " n"], k: int, *, bits: int, key: Key = lambda x: x
) -> UInt32[Array, ""]:
    """The largest t that key(x) >= t for at least k elements, of keys below 2**bits.

    Args:
        x: n elements.
        k: 1 <= k <= n.
        bits: of keys, at most 31.
        key: what is compared, uint32 of each element.
    """
    find = functools.partial(_by_bits, k=k, bits=bits, key=key)
    return by_platform(x, default=find, gpu=functools.partial(_by_digits, k=k, bits=bits, key=key))


def _by_bits(x: Shaped[Array, " n"], *, k: int, bits: int, key: Key) -> UInt32[Array, ""]:
    """Pass by pass one bit, the highest first."""

    def set_bit(i: Array, t: Array) -> Array:
        trial = t | (jnp.uint32(1) << (bits - 1 - i).astype(jnp.uint32))
        return jnp.where(count_reaching(x, trial, key) >= jnp.uint32(k), trial, t)

    return jax.lax.fori_loop(0, bits, set_bit, zeros((), jnp.uint32, (x,)))


def _by_digits(x: Shaped[Array, " n"], *, k: int, bits: int, key: Key) -> UInt32[Array, ""]:
    """Pass by pass a digit, by one sum for all of its trials, which reads the array once."""
    digits = -(-bits // _DIGIT_BITS)
    several = 2**_DIGIT_BITS - 1
    add = lambda a, b: tuple(map(jnp.add, a, b))

    def set_digit(i: Array, t: Array) -> Array:
        unit = jnp.uint32(1) << (_DIGIT_BITS * (digits - 1 - i)).astype(jnp.uint32)
        keys, trials = key(x), (t + unit * np.uint32(digit + 1) for digit in range(several))
        reaches = tuple((keys >= trial).astype(jnp.uint32) for trial in trials)
        counts = jax.lax.reduce(reaches, (jnp.uint32(0),) * several, add, (0,))
        # The larger the trial, the fewer reach it.
        reached = jnp.stack(counts) >= jnp.uint32(k)
        return t + unit * jnp.sum(reached, dtype=jnp.uint32)

    return jax.lax.fori_loop(0, digits, set_digit, zeros((), jnp.uint32, (x,)))
