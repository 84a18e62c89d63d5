"""Ok-Topk (Li and Hoefler, PPoPP 2022)."""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from jaxsparse import codecs
from jaxsparse.collectives.offers import about_top_k
from jaxsparse.collectives.ok_topk import Agreed, ok_topk
from jaxsparse.reducers.base import Laws, Reduced, info
from jaxsparse.reducers.density import check_density, entries
from jaxsparse.reducers.selection import Selection, check_selection, selector
from jaxsparse.settings import static_float, static_int


class OkTopkState(NamedTuple):
    """What is reused from step to step."""

    step: UInt32[Array, ""]
    agreed: Agreed


@dataclasses.dataclass(frozen=True)
class OkTopkReducer:
    """Entries above a threshold, summed by the owners of balanced regions, the largest delivered.

    Attributes:
        density: share of the elements that each worker offers and that the threshold is set for,
            in (0, 1]. Between refreshes the number delivered varies with the gradients, up to
            `capacity_factor` times it.
        refresh_every: steps after which the threshold is taken anew; the paper's tau'. It is after
            any step in which fewer than half as many sums passed, or more than there is room for.
        rebalance_every: steps after which regions are drawn anew; the paper's tau. They are after
            any step in which an offer found no room.
        capacity_factor: room in messages, in multiples of an even share. What finds no room stays
            in residuals and is counted.
        codec: of the messages.
        selection: of each worker's own vector: "fast" offers what reaches a sampled threshold, on
            average so many; others as many at most.
    """

    density: float
    refresh_every: int = 32
    rebalance_every: int = 64
    capacity_factor: float = 2.0
    codec: codecs.Codec = codecs.COO
    selection: Selection = "fast"

    def __post_init__(self):
        check_density(self.density)
        codecs.check_codec(self.codec)
        for name in ("refresh_every", "rebalance_every"):
            steps = static_int(name, getattr(self, name))
            if steps < 1:
                raise ValueError(f"{name}={steps} must be at least 1 step")
        check_selection(self.selection)
        if not 1 <= static_float("capacity_factor", self.capacity_factor) < math.inf:
            raise ValueError(
                f"capacity_factor={self.capacity_factor} must be finite and at least 1, an even "
                "share"
            )

    @property
    def laws(self) -> Laws:
        """Between refreshes sums below the old threshold stay behind, whatever the density."""
        return Laws(conserves=True, dense_at_full_budget=False)

    def split(self, sizes: tuple[int, ...], dense_size: int = 0) -> tuple["OkTopkReducer", ...]:
        """The same for each bucket."""
        return (self,) * len(sizes)

    def init(self, size: int) -> OkTopkState:
        """A step counter, and regions yet to be drawn."""
        return OkTopkState(jnp.uint32(0), Agreed.start(size))

    def __call__(
        self, x: Float[Array, " d"], state: OkTopkState, *, axis_name: str | None
    ) -> Reduced:
        """See `Reducer`."""
        result = ok_topk(
            x,
            entries(self.density, x.size),
            state.agreed,
            refresh=state.step % jnp.uint32(self.refresh_every) == 0,
            rebalance=state.step % jnp.uint32(self.rebalance_every) == 0,
            axis_name=axis_name,
            codec=self.codec,
            capacity_factor=self.capacity_factor,
            top_k=about_top_k if self.selection == "fast" else selector(self.selection),
        )
        new_state = OkTopkState(state.step + jnp.uint32(1), result.agreed)
        return Reduced(
            result.mean,
            result.residual,
            result.sent,
            new_state,
            info(result.delivered, result.overflow),
        )
