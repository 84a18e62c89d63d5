"""The k largest elements, by a sort or, in no order, by a threshold; and all selections by name.

Exact top-k takes two thresholds. One from a sample lets about 7/5 k candidates pass. The other is
exact, and is found bit by bit among these. A count tells when the sample was off.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer, UInt32

from jaxsparse.arrays.platforms import magnitude_bits, to_bits, zeros
from jaxsparse.arrays.settings import check_k, check_seed, check_vector
from jaxsparse.arrays.stream import SparseStream, from_dense
from jaxsparse.select.compaction import first_of_ranges
from jaxsparse.select.fast import fast_top_k
from jaxsparse.select.thresholds import (
    DEFAULT_PASSES,
    EXACT_PASSES,
    bisection,
    check_passes,
    check_samples,
    sampled_threshold,
)

# Largest number of elements to sort. Sorting them takes less time than compiling anything else.
_SORTED = 2**14


def top_k(x: Float[Array, " d"], k: int) -> SparseStream:
    """The k entries of largest magnitude, exactly, in order of falling magnitude.

    Of equal magnitudes the lower index comes first. On CPU it sorts the whole vector.

    >>> top_k(jnp.array([1.0, -3.0, 2.0]), 2).indices.tolist()
    [1, 2]
    """
    check_vector("x", x)
    return _top_k(x, check_k(k, x.size))


@functools.partial(jax.jit, static_argnames="k")
def _top_k(x: Float[Array, " d"], k: int) -> SparseStream:
    _, indices = jax.lax.top_k(jnp.abs(x), k)
    return SparseStream(indices, x[indices])


def sampled_top_k(
    x: Float[Array, " d"],
    k: int,
    *,
    samples: int | None = None,
    seed: Integer[Array, ""] | int = 0,
) -> SparseStream:
    """At most k entries of large magnitude, in no order, by a sampled threshold (DGC's selection).

    About 5/4 k elements reach the threshold. With the default sample, at least k nearly always do.
    The k largest of these are kept (the "hierarchical" step), but never a zero. There is room for 2
    k of them. It goes first to those above the threshold, and then to those at it.

    If the `samples` of `sampled_threshold` are all of `x`, the result is the k largest. Of equal
    magnitudes, the lower indices are kept.

    >>> sampled_top_k(jnp.array([1.0, -3.0, 0.0]), 3).indices.tolist()
    [0, 1, 3]
    """
    check_vector("x", x)
    k = check_k(k, x.size)
    aim = min(-(-5 * k // 4), x.size)
    threshold = sampled_threshold(x, aim, samples=samples, seed=seed)
    return _largest_reaching(x, k, threshold)


def threshold_top_k(
    x: Float[Array, " d"], k: int, *, seed: Integer[Array, ""] | int = 0
) -> SparseStream:
    """The k entries of largest magnitude, exactly and in no order, without sorting the vector.

    Zeros are never selected. Of equal magnitudes, the lower indices are kept. The seed has no
    influence on the result.

    A sampled threshold picks somewhat more than k candidates, and bisection finds the k-th largest
    of these. A count tells if the sample was off: fewer than k candidates, or more than 2 k. With
    random data that is about 1 in 100 samples. The whole vector is then bisected, which is four
    times the work. Under `vmap` all vectors are bisected whether or not their samples were off.
    Vectors of up to 16,384 elements are sorted, and those of up to 4 k bisected at once.

    >>> sorted(threshold_top_k(jnp.array([1.0, -3.0, 2.0]), 2).indices.tolist())
    [1, 2]
    """
    check_vector("x", x)
    k, seed = check_k(k, x.size), check_seed(seed)
    if x.size <= _SORTED:
        return _without_zeros(_top_k(x, k), x.size)
    if 4 * k >= x.size:  # candidates would be half of all
        return _without_zeros(_bisection_top_k(x, k, EXACT_PASSES), x.size)
    aim = min(-(-7 * k // 5), x.size)  # as far from k as from 2 k, in ratio
    return _threshold_top_k(x, k, sampled_threshold(x, aim, seed=seed))


@functools.partial(jax.jit, static_argnames="k")
def _threshold_top_k(x: Float[Array, " d"], k: int, threshold: Float[Array, ""]) -> SparseStream:
    def candidates(threshold: Array, is_exact: Array) -> tuple[Array, Array]:
        del is_exact
        found = _reaching(x, k, threshold)
        enough = (found[k - 1] < x.size) | (threshold == 0)
        # If the last candidate is above the threshold, others may have found no room.
        last_one = x.at[found[-1]].get(mode="fill", fill_value=0)
        return found, enough & (magnitude_bits(last_one) <= threshold)

    found = sampled_else_exact(x, k, threshold, min(2 * k, x.size), candidates)
    return _largest_of(from_dense(x, found), k)


class _Search(NamedTuple):
    turn: Int[Array, ""]  # int32
    is_done: Bool[Array, ""]
    indices: Int[Array, " room"]


def sampled_else_exact(
    x: Float[Array, " d"],
    k: int,
    sampled: Float[Array, ""],
    room: int,
    find: Callable[[Array, Array], tuple[Int[Array, " room"], Bool[Array, ""]]],
) -> Int[Array, " room"]:
    """Indices found with a sampled threshold or, if they do not serve, with the k-th magnitude.

    `find` takes a threshold's bits (uint32) and whether it is exact. It returns `room` indices, and
    whether they serve. It is compiled once for both thresholds.
    """

    def search(last: _Search) -> _Search:
        is_exact = last.turn > 0
        threshold = jax.lax.cond(
            is_exact, lambda: bisection(x, k, EXACT_PASSES)[0], lambda: to_bits(sampled)
        )
        indices, is_done = find(threshold, is_exact)
        return _Search(last.turn + 1, is_done, indices)

    like = (x, sampled)
    start = _Search(jnp.int32(0), zeros((), jnp.bool_, like), zeros((room,), jnp.int32, like))
    is_open = lambda last: ~last.is_done & (last.turn < 2)
    return jax.lax.while_loop(is_open, search, start).indices


@functools.partial(jax.jit, static_argnames="k")
def _largest_reaching(x: Float[Array, " d"], k: int, threshold: Float[Array, ""]) -> SparseStream:
    return _largest_of(from_dense(x, _reaching(x, k, to_bits(threshold))), k)


def _reaching(x: Float[Array, " d"], k: int, threshold: UInt32[Array, ""]) -> Int[Array, " room"]:
    """Positions of up to 2 k elements, none of them 0.

    Those above the threshold come first, then those at it, which a CPU looks for only if needed.
    """
    at = jnp.maximum(threshold, jnp.uint32(1))
    room = min(2 * k, x.size)
    bounds = threshold + jnp.uint32(1), at
    return first_of_ranges(x, bounds, room, key=magnitude_bits, enough=k)


def _largest_of(stream: SparseStream, k: int) -> SparseStream:
    slots = _bisection_top_k(stream.values, k, EXACT_PASSES).indices
    return SparseStream(stream.indices[slots], stream.values[slots])


def _without_zeros(stream: SparseStream, size: int) -> SparseStream:
    is_entry = magnitude_bits(stream.values) > 0  # XLA may take subnormal values for 0
    return stream._replace(indices=jnp.where(is_entry, stream.indices, size))


def bisection_top_k(x: Float[Array, " d"], k: int, *, passes: int = DEFAULT_PASSES) -> SparseStream:
    """Nearly the k entries of largest magnitude, by a bracket around the k-th (MSTopk).

    It keeps all entries that reach the upper end of `bisection_threshold`. The remaining slots go
    to entries that reach only the lower end, lowest indices first. Entries that are left out are
    larger than these by a factor of at most upper / lower. With 32 `passes` or more, the result is
    exactly the k largest, of equal ones the lower indices. No slot is empty.

    >>> bisection_top_k(jnp.array([1.0, -3.0, 2.0]), 2).indices.tolist()
    [1, 2]
    """
    check_vector("x", x)
    k = check_k(k, x.size)
    return _bisection_top_k(x, k, check_passes(passes))


@functools.partial(jax.jit, static_argnames=("k", "passes"))
def _bisection_top_k(x: Float[Array, " d"], k: int, passes: int) -> SparseStream:
    low, high = bisection(x, k, passes)
    return from_dense(x, first_of_ranges(x, (high, low), k, key=magnitude_bits))


@dataclasses.dataclass(frozen=True)
class Sampled:
    """DGC's: `select.sampled_top_k` with so many samples. None: enough for the size and k."""

    samples: int | None = None

    def __post_init__(self):
        if self.samples is not None:
            check_samples(self.samples)

    def __call__(self, x: Float[Array, " m"], k: int) -> SparseStream:
        return sampled_top_k(x, k, samples=self.samples)


@dataclasses.dataclass(frozen=True)
class Bisection:
    """MSTopk's: `select.bisection_top_k` with so many passes."""

    passes: int = DEFAULT_PASSES

    def __post_init__(self):
        check_passes(self.passes)

    def __call__(self, x: Float[Array, " m"], k: int) -> SparseStream:
        return bisection_top_k(x, k, passes=self.passes)


# "fast" keeps nearly the largest entries, and its time does not depend on the data. The others find
# a threshold. "exact" finds the right one. "sampled" and "bisection" are `Sampled()` and
# `Bisection()`.
Selection = Literal["fast", "exact", "sampled", "bisection"] | Sampled | Bisection

Select = Callable[[Float[Array, " m"], int], SparseStream]


class _Selectors(dict[Selection, Select]):
    """Selection functions by name. Settings are such functions themselves."""

    def __missing__(self, selection: Selection) -> Select:
        assert not isinstance(selection, str)
        return selection


# Functions of a vector and k. They return at most k entries with distinct indices, in k slots. A
# slot without an entry has the vector's size as its index, and value 0.
SELECTORS = _Selectors(
    fast=fast_top_k, exact=threshold_top_k, sampled=Sampled(), bisection=Bisection()
)


def check_selection(selection: Selection) -> None:
    """Raises ValueError unless `selection` is a known name or settings."""
    if isinstance(selection, (Sampled, Bisection)):
        return
    if not isinstance(selection, str) or selection not in SELECTORS:
        raise ValueError(
            f"selection={selection!r} is unknown: use one of {tuple(SELECTORS)}, or Sampled(...) "
            "or Bisection(...)"
        )
