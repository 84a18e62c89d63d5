"""Counter-based hashes of 32-bit integers: any element's hash, at any time, with no table stored.

Everything stays in uint32, because JAX without x64 silently narrows uint64 to it.
"""

import jax.numpy as jnp
from jax import Array
from jaxtyping import ArrayLike, UInt32

__all__ = ["bounded", "combine", "mix"]


def mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Mixes the 32 bits of each element: a bijection in which every input bit moves every output.

    Two multiply and xor-shift rounds with the constants of C. Wellons' search for the least bias
    (https://github.com/skeeto/hash-prospector, ``lowbias32``).

    Args:
      x: uint32 of any shape.

    Returns:
      uint32 of the same shape.

    >>> import jax.numpy as jnp
    >>> mix(jnp.uint32([1, 2])).dtype
    dtype('uint32')
    """
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x21F0AAAD)
    x = (x ^ (x >> jnp.uint32(15))) * jnp.uint32(0xD35A2D97)
    return x ^ (x >> jnp.uint32(15))


def combine(*words: ArrayLike) -> UInt32[Array, "..."]:
    """Hashes a tuple of words, in order, into one: ``combine(a, b) != combine(b, a)``.

    Args:
      *words: integers or integer arrays that broadcast together; taken modulo 2**32.

    Returns:
      uint32 of the broadcast shape.

    >>> int(combine(1, 2)) == int(combine(2, 1))
    False
    """
    state = jnp.uint32(0x9E3779B9)
    for word in words:
        state = mix(state ^ as_uint32(word)) + jnp.uint32(0x9E3779B9)
    return state


def bounded(h: UInt32[Array, "..."], n: int) -> UInt32[Array, "..."]:
    """Maps hashes to ``0 .. n - 1`` as ``floor(h n / 2**32)``, whose bias is below ``n / 2**32``.

    Args:
      h: uint32 of any shape, well mixed in its high bits.
      n: static, 1 <= n < 2**32.

    Returns:
      uint32 of the same shape, each below ``n``.

    >>> import jax.numpy as jnp
    >>> bounded(jnp.uint32([0, 2**31, 2**32 - 1]), 10).tolist()
    [0, 5, 9]
    """
    low, high = jnp.uint32(n & 0xFFFF), jnp.uint32(n >> 16)
    a, b = h & jnp.uint32(0xFFFF), h >> jnp.uint32(16)
    # The high word of the 64-bit product, from 16-bit halves.
    middle = a * high
    carry = ((a * low) >> jnp.uint32(16)) + (middle & jnp.uint32(0xFFFF)) + b * low
    # b * low < 2**32 - 2**17 + 1, so the sum above cannot wrap.
    return b * high + (middle >> jnp.uint32(16)) + (carry >> jnp.uint32(16))


def as_uint32(word: ArrayLike) -> UInt32[Array, "..."]:
    """Python integers and integer arrays as uint32, modulo 2**32."""
    if isinstance(word, int):
        return jnp.uint32(word & 0xFFFFFFFF)
    return jnp.asarray(word).astype(jnp.uint32)
