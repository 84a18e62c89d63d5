"""Dense all-reduce: what every other reducer is compared with."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxsparse.collectives import wire
from jaxsparse.reducers.base import Laws, Reduced, count, info


@dataclasses.dataclass(frozen=True)
class DenseReducer:
    """The exact mean by one psum of all d words. Sums that overflow stay in the residuals.

    It masks no momentum: everything is sent at each step, and a momentum that is zeroed wherever
    something was sent would not be one.
    """

    laws: ClassVar[Laws] = Laws(conserves=True, dense_at_full_budget=True)

    def split(self, sizes: tuple[int, ...], dense_size: int = 0) -> tuple["DenseReducer", ...]:
        """The same for each bucket."""
        return (self,) * len(sizes)

    def init(self, size: int) -> Any:
        """No state."""
        return ()

    def __call__(self, x: Float[Array, " d"], state: Any, *, axis_name: str | None) -> Reduced:
        """See `Reducer`."""
        total = wire.psum(x, axis_name)
        finite = jnp.isfinite(total)
        mean = jnp.where(finite, total, 0) / wire.axis_size(axis_name)
        residual = jnp.where(finite, 0, x)
        return Reduced(mean, residual, None, state, info(count(x.size)))
