"""How reducers pick the largest entries, by name or with settings."""

import dataclasses
from collections.abc import Callable
from typing import Literal

from jaxtyping import Array, Float

from jaxsparse.arrays.stream import SparseStream
from jaxsparse.select.fast import fast_top_k
from jaxsparse.select.thresholds import DEFAULT_PASSES, check_passes, check_samples
from jaxsparse.select.top_k import bisection_top_k, sampled_top_k, threshold_top_k


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
