"""True top-k: the largest coordinates of the exact mean, the ceiling for sketches."""

import dataclasses
from typing import Any

from jaxtyping import Array, Float

from jaxsparse.arrays.layout import split_evenly
from jaxsparse.arrays.settings import Count, check_k
from jaxsparse.comm import wire
from jaxsparse.reducers.base import Kept, Reducer, Sums, keep_rest
from jaxsparse.select.top_k import threshold_top_k


@dataclasses.dataclass(frozen=True)
class TrueTopK(Reducer):
    """The k largest coordinates of the mean gradient, with error feedback. It saves no bytes.

    It sums the whole vector, and delivers k coordinates of the sum. This is the ceiling for
    `sketched_sgd` at the same k (its section 4, remark 2): how training goes if the heavy
    coordinates are found for certain. Momentum is masked at the coordinates that the update
    changes.

    Args:
        k: number of coordinates of the whole tree that a step updates.
    """

    k: Count

    def split(self, sizes: tuple[int, ...], dense_size: int = 0) -> tuple[Reducer, ...]:
        """Splits k in proportion to the buckets' sizes; each bucket gets at least 1."""
        if not sizes:
            return ()
        check_k(self.k, sum(sizes))
        return tuple(TrueTopK(max(1, k)) for k in split_evenly(self.k, sizes))

    def init(self, size: int) -> Any:
        check_k(self.k, size)
        return ()

    def reduce(self, x: Float[Array, " d"], state: Any, axis_name: str | None) -> tuple[Sums, Kept]:
        return keep_rest(x, threshold_top_k(wire.psum(x, axis_name), self.k), state)
