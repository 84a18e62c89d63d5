"""Counter-based hashes of 32-bit integers: any element's hash, at any time, with no table stored.

Everything stays in uint32, because JAX without x64 silently narrows uint64 to it. Constants are
NumPy's. JAX's constants are arrays, which take longer to trace than the operations on them.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Int, Integer, Key, UInt32

# 2**32 over the golden ratio: odd, and its multiples spread evenly over 32 bits.
_GOLDEN = 0x9E3779B9
# Number of rounds of `permute`. With half of them, draws from a few elements are measurably uneven.
_ROUNDS = 6


def mix(x: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Mixes the 32 bits of each element by a bijection: each input bit affects all output bits.

    It multiplies and xor-shifts, with constants of low bias that TheIronBorn found
    (https://github.com/skeeto/hash-prospector/issues/19).
    """
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x21F0AAAD)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0xD35A2D97)
    return x ^ (x >> np.uint32(15))


def combine(*words: Integer[Array, "..."] | int) -> UInt32[Array, "..."]:
    """Hashes integers, or integer arrays that broadcast together, modulo 2**32. Order matters.

    >>> bool(combine(1, 2) == combine(2, 1))
    False
    """
    state = jnp.uint32(0)
    for word in words:
        bits = np.uint32(word % 2**32) if isinstance(word, int) else as_uint32(word)
        state = mix(state ^ bits) + np.uint32(_GOLDEN)
    return state


def keyed(
    index: UInt32[Array, "*shape"], key: UInt32[Array, ""] | UInt32[Array, "*shape"]
) -> UInt32[Array, "*shape"]:
    """The hash of a counter under a key, or under a key for each index.

    Keys must be well mixed (from `combine`). The index is multiplied first, so that a run or an
    arithmetic progression of indices does not get the same hashes under two keys.
    """
    return mix((index * np.uint32(_GOLDEN)) ^ key)


def bounded(h: UInt32[Array, "*shape"], n: int) -> UInt32[Array, "*shape"]:
    """Maps a hash to 0 .. n - 1 as floor(h n / 2**32), with a bias below n / 2**32. n < 2**32.

    >>> bounded(jnp.uint32([0, 2**31, 2**32 - 1]), 10).tolist()
    [0, 5, 9]
    """
    half, ones = np.uint32(16), np.uint32(0xFFFF)
    n_low, n_high = np.uint32(n & 0xFFFF), np.uint32(n >> 16)
    h_low, h_high = h & ones, h >> half
    # The high word of the 64-bit product, from 16-bit halves. No sum below exceeds 2**32 - 1.
    cross = h_low * n_high
    middle = h_high * n_low + ((h_low * n_low) >> half) + (cross & ones)
    return h_high * n_high + (cross >> half) + (middle >> half)


def drawn(n: int, *words: Integer[Array, "..."] | int) -> Int[Array, "..."]:
    """A number in 0 .. n - 1, drawn by the hash of words; see `combine`. n < 2**31."""
    return bounded(combine(*words), n).astype(jnp.int32)


def permuted(i: Int[Array, " m"], n: int, key: Key[Array, ""]) -> Int[Array, " m"]:
    """A pseudorandom permutation of 0 .. n - 1, evaluated at `i` only. n <= 2**31.

    `permuted(arange(m), n, key)` draws m indices without replacement in O(m). Bijections of 0 .. p
    - 1, with the next power of two p >= n, mix the indices again and again until they fall below n
    (cycle walking; fewer than two turns on average).

    >>> sorted(permuted(jnp.arange(5), 5, jax.random.key(0)).tolist())
    [0, 1, 2, 3, 4]
    """
    bits = max(1, (n - 1).bit_length())
    words = jax.random.bits(key, (_ROUNDS, 2), jnp.uint32)

    def turn(x):
        for multiplier, increment in words:
            x = x * (multiplier | np.uint32(1)) + increment
            x &= np.uint32(2**bits - 1)
            x ^= x >> np.uint32((bits + 1) // 2)
        return x

    outside = lambda x: x >= np.uint32(n)
    walk = lambda x: jnp.where(outside(x), turn(x), x)
    x = lax.while_loop(lambda x: jnp.any(outside(x)), walk, turn(as_uint32(i)))
    return x.astype(jnp.int32)


def as_uint32(word: Integer[Array, "*shape"] | int) -> UInt32[Array, "*shape"]:
    """The integer or integer array as uint32, modulo 2**32."""
    if isinstance(word, int):
        return jnp.uint32(word % 2**32)
    return lax.convert_element_type(word, jnp.uint32)
