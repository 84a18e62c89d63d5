"""True top-k: the largest coordinates of the exact mean, the ceiling of what a sketch can find."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxsparse import select
from jaxsparse.collectives import wire
from jaxsparse.layout import split_evenly
from jaxsparse.reducers.base import Laws, Reduced, info
from jaxsparse.settings import static_int
from jaxsparse.stream import SparseStream, to_dense


@dataclasses.dataclass(frozen=True)
class TrueTopKReducer:
    """The k largest coordinates of the dense mean (Sketched-SGD, section 4, remark 2).

    It saves no byte: the whole vector is summed and most of the sum is thrown away. It shows how
    well training goes when the right coordinates are found for certain.

    Attributes:
        k: coordinates delivered, over all buckets.
    """

    k: int
    laws: ClassVar[Laws] = Laws(conserves=True, dense_at_full_budget=True)

    def __post_init__(self):
        object.__setattr__(self, "k", static_int("k", self.k))

    def split(self, sizes: tuple[int, ...], dense_size: int = 0) -> tuple["TrueTopKReducer", ...]:
        """The k is split in proportion to the buckets' sizes, each receiving at least 1."""
        if not sizes:
            return ()
        select.check_k(self.k, sum(sizes))
        return tuple(TrueTopKReducer(max(1, k)) for k in split_evenly(self.k, sizes))

    def init(self, size: int) -> Any:
        """No state."""
        select.check_k(self.k, size)
        return ()

    def __call__(self, x: Float[Array, " d"], state: Any, *, axis_name: str | None) -> Reduced:
        """See `Reducer`."""
        mean = wire.psum(x, axis_name) / wire.axis_size(axis_name)
        return deliver(x, select.threshold_top_k(mean, self.k), state)


def deliver(x: Float[Array, " d"], kept: SparseStream, state: Any) -> Reduced:
    """The outcome of delivering exact means, `kept`, at distinct coordinates.

    A coordinate whose exact mean is zero counts as not sent, as in Alg. 3: the workers' values
    there cancel, and keeping them conserves their sum. So does one whose sum overflows.
    """
    kept = kept._replace(values=jnp.where(jnp.isfinite(kept.values), kept.values, 0))
    mean = to_dense(kept, x.size)
    sent = mean != 0
    residual = jnp.where(sent, jnp.zeros_like(x), x)
    return Reduced(mean, residual, sent, state, info(jnp.count_nonzero(kept.values)))
