"""Ok-Topk (Li and Hoefler, PPoPP 2022)."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from jaxsparse import codecs
from jaxsparse.collectives import wire
from jaxsparse.collectives.ok_topk import Regions, ok_topk, start
from jaxsparse.per_worker import PerWorker
from jaxsparse.reducers.base import Laws, Reduced, info
from jaxsparse.reducers.density import check_density, entries
from jaxsparse.settings import static_int


class OkTopkState(NamedTuple):
    """What is reused from step to step."""

    step: UInt32[Array, ""]
    local_threshold: PerWorker  # float32 scalar
    regions: Regions


@dataclasses.dataclass(frozen=True)
class OkTopkReducer:
    """Entries above a threshold, summed by the owners of balanced regions, the largest delivered.

    Attributes:
        density: share of the elements that the thresholds are set for, in (0, 1]. Between
            refreshes the number varies with the gradients, up to `capacity_factor` times it.
        refresh_every: steps after which both thresholds are taken anew, exactly; the paper's tau'.
        rebalance_every: steps after which regions are drawn anew; the paper's tau.
        capacity_factor: room in messages, in multiples of an even share. What finds no room stays
            in residuals and is counted.
        codec: of the messages.
    """

    density: float
    refresh_every: int = 32
    rebalance_every: int = 64
    capacity_factor: float = 2.0
    codec: codecs.Codec = codecs.COO

    def __post_init__(self):
        check_density(self.density)
        for name in ("refresh_every", "rebalance_every"):
            steps = static_int(name, getattr(self, name))
            if steps < 1:
                raise ValueError(f"{name}={steps} must be at least 1 step")
        if not self.capacity_factor >= 1:
            raise ValueError(
                f"capacity_factor={self.capacity_factor} must be at least 1, an even share"
            )

    @property
    def laws(self) -> Laws:
        """Room for everything is there at density 1 and factor W only."""
        return Laws(conserves=True, dense_at_full_budget=False)

    def split(self, sizes: tuple[int, ...], dense_size: int = 0) -> tuple["OkTopkReducer", ...]:
        """The same for each bucket."""
        return (self,) * len(sizes)

    def init(self, size: int) -> OkTopkState:
        """A step counter, thresholds, and how entries are distributed."""
        return OkTopkState(jnp.uint32(0), PerWorker.wrap(jnp.float32(0)), start(size))

    def __call__(
        self, x: Float[Array, " d"], state: OkTopkState, *, axis_name: str | None
    ) -> Reduced:
        """See `Reducer`."""
        result = ok_topk(
            x,
            entries(self.density, x.size),
            PerWorker.unwrap(state.local_threshold),
            state.regions,
            refresh=state.step % jnp.uint32(self.refresh_every) == 0,
            rebalance=state.step % jnp.uint32(self.rebalance_every) == 0,
            axis_name=axis_name,
            codec=self.codec,
            capacity_factor=self.capacity_factor,
        )
        new_state = OkTopkState(
            state.step + jnp.uint32(1), PerWorker.wrap(result.local_threshold), result.regions
        )
        return Reduced(
            result.total / wire.axis_size(axis_name),
            result.residual,
            result.sent,
            new_state,
            info(jnp.count_nonzero(result.total), result.overflow),
        )
