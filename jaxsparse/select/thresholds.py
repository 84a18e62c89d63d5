"""Magnitudes that about k elements reach, estimated from a sample or bracketed.

DGC samples (Lin et al., ICLR 2018), MSTopk bisects (Shi et al., MLSys 2021).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Integer, UInt32

from jaxsparse.arrays.hashing import bounded, combine, keyed
from jaxsparse.arrays.platforms import (
    count_reaching,
    folded,
    kth_largest,
    magnitude_bits,
    to_bits,
    zeros,
)
from jaxsparse.arrays.settings import check_k, check_seed, check_vector, static_int

# Least expected number of the k largest in the sample. With 64 of them, the number of elements that
# reach the threshold has a standard deviation of about k / 8.
_LARGE_SAMPLES = 64
# Least size of the sample. So few cost less than a pass over the vector.
_MIN_SAMPLES = 2**14
_MAX_SHARE = 1000  # the sample is at least d over this
# Number of passes. After the one at the mean, nine narrow six octaves to a hundredth of one.
DEFAULT_PASSES = 10
# Number of passes that find the k-th largest itself: one at the mean, and 31 that each halve a
# range of 31 bits.
EXACT_PASSES = 32


class Bracket(NamedTuple):
    """Two magnitudes around the k-th largest; float32 scalars."""

    lower: Float[Array, ""]  # at least k elements reach it
    upper: Float[Array, ""]  # fewer than k do, unless it is infinite


def sampled_threshold(
    x: Float[Array, " d"],
    k: int,
    *,
    samples: int | None = None,
    seed: Integer[Array, ""] | int = 0,
) -> Float[Array, ""]:
    """A magnitude that about k elements reach, from a random sample of `x`; 0 if k = d.

    It is the r-th largest of a sample of n, with r = k n / d (Deep Gradient Compression, Lin et
    al., ICLR 2018, section 3.1, "hierarchical" selection). One element is drawn at random from each
    of n runs of equal length, so that none is drawn twice. The number of elements that reach the
    threshold has a standard deviation of at most about k / sqrt(r).

    Up to twice as many `samples` are taken, so that runs have equal lengths. If that is all of `x`,
    the threshold is exactly the k-th largest magnitude. None: d / 1000 samples, but at least 16,384
    and enough for r = 64.

    >>> sampled_threshold(jnp.array([1.0, -3.0, 2.0]), 2).item()
    2.0
    """
    check_vector("x", x)
    k = check_k(k, x.size)
    if samples is None:
        samples = sample_size(x.size, k)
    samples = check_samples(samples)
    return _sampled_threshold(x, k, min(samples, x.size), check_seed(seed))


def sample_size(size: int, k: int) -> int:
    """The number of elements that `sampled_threshold` samples by default."""
    return max(_MIN_SAMPLES, size // _MAX_SHARE, _LARGE_SAMPLES * size // k)


def check_samples(samples: int) -> int:
    """The setting as an int. Raises ValueError unless it is at least 1."""
    samples = static_int("samples", samples)
    if samples < 1:
        raise ValueError(f"samples={samples} must be at least 1: None takes d / 1000 or more")
    return samples


@functools.partial(jax.jit, static_argnames=("k", "samples"))
def _sampled_threshold(
    x: Float[Array, " d"], k: int, samples: int, seed: UInt32[Array, ""]
) -> Float[Array, ""]:
    if k == x.size:
        return jnp.zeros_like(x, jnp.float32, shape=())
    run = x.size // samples
    if run > 1:
        first = jnp.arange(0, x.size, run, dtype=jnp.int32)
        offset = bounded(keyed(first.astype(jnp.uint32), combine(seed)), run).astype(jnp.int32)
        # The last run may be shorter.
        x_sample = x[jnp.minimum(first + offset, x.size - 1)]
    else:
        x_sample = x
    low, _ = bisection(x_sample, max(1, round(k * x_sample.size / x.size)), EXACT_PASSES)
    return jax.lax.bitcast_convert_type(low, jnp.float32)


def bisection_threshold(x: Float[Array, " d"], k: int, *, passes: int = DEFAULT_PASSES) -> Bracket:
    """Magnitudes around the k-th largest, by counting the elements that reach trial thresholds.

    MSTopk (Shi et al., MLSys 2021, "Towards Scalable Distributed Training of Deep Learning on
    Public Cloud Clusters", Alg. 1) halves the range between mean and maximum in a fixed number of
    passes. Here the first trial is the mean magnitude. Further trials halve the range of the
    floats' bits, and so halve approximately the logarithm of upper / lower.

    Each of the `passes` over x is a trial; two more find mean and maximum. From 32 on, `lower` is
    the k-th largest magnitude, in 31 passes (8 on a GPU), and `upper` is the next float.

    >>> bracket = bisection_threshold(jnp.array([1.0, -3.0, 2.0, 0.0]), 1, passes=3)
    >>> bool(2 < bracket.lower <= 3 < bracket.upper)
    True
    """
    check_vector("x", x)
    k = check_k(k, x.size)
    low, high = bisection(x, k, check_passes(passes))
    # The bits after those of infinity would be NaN.
    infinity = jnp.uint32(0x7F800000)
    as_float = lambda bits: jax.lax.bitcast_convert_type(bits, jnp.float32)
    return Bracket(as_float(low), as_float(jnp.minimum(high, infinity)))


def check_passes(passes: int) -> int:
    """The setting as an int. Raises ValueError unless it is at least 0."""
    passes = static_int("passes", passes)
    if passes < 0:
        raise ValueError(f"passes={passes} must be at least 0: 10 are usual, 32 are exact")
    return passes


@functools.partial(jax.jit, static_argnames=("k", "passes"))
def bisection(
    x: Float[Array, " d"], k: int, passes: int
) -> tuple[UInt32[Array, ""], UInt32[Array, ""]]:
    """Bits of magnitudes low < high: at least k elements reach low, fewer reach high."""
    if passes >= EXACT_PASSES:
        low = kth_largest(x, k, bits=31, key=magnitude_bits)
        return low, low + jnp.uint32(1)
    # If the sum overflows, the mean is infinite, which few elements reach.
    mean = jnp.sum(jnp.abs(x.astype(jnp.float32))) * jnp.float32(1 / x.size)
    return _bisect(x, k, to_bits(mean), passes)


def _bisect(
    x: Float[Array, " d"], k: int, first: UInt32[Array, ""], passes: int
) -> tuple[UInt32[Array, ""], UInt32[Array, ""]]:
    """`bisection` with `first` as its first trial, unless it exceeds the maximum."""
    low = zeros((), jnp.uint32, (x, first))
    high = folded(jnp.max, jnp.maximum, magnitude_bits, x) + jnp.uint32(1)

    def halve(i: Int[Array, ""], ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = low + ((high - low) >> jnp.uint32(1))
        trial = jnp.where((i == 0) & (first < high), first, middle)

        is_reached = count_reaching(x, trial, magnitude_bits) >= jnp.uint32(k)
        return jnp.where(is_reached, trial, low), jnp.where(is_reached, high, trial)

    return jax.lax.fori_loop(0, passes, halve, (low, high))
