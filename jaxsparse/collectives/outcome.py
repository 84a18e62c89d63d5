"""What a sparse all-reduce returns."""

from typing import NamedTuple

from jaxtyping import Array, Int, Num


class AllReduced(NamedTuple):
    """The entries of all workers' streams over vectors of d elements, combined.

    For sums, `sum over workers of to_dense(stream) == total + sum over workers of residual`.
    """

    total: Num[Array, " d"]  # equal on all workers; the neutral element where nobody has an entry
    residual: Num[Array, " d"]  # this worker's share of what `total` lacks; zeros but for sums
    overflow: Int[Array, ""]  # int32: entries, of all workers, that found no room; equal on all
