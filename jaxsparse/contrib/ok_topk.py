"""Ok-Topk (Li and Hoefler, PPoPP 2022)."""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from jaxsparse.arrays.settings import Count, check_size, entries, static_float
from jaxsparse.arrays.stream import add_to
from jaxsparse.contrib.ok_topk_sum import Agreed, about_top_k, ok_topk_sum as ok_topk_all_reduce
from jaxsparse.reducers.base import Kept, Sums
from jaxsparse.reducers.entries import EntryReducer
from jaxsparse.select.top_k import SELECTORS


class OkTopkState(NamedTuple):
    """The step, and the regions and threshold that steps reuse."""

    step: UInt32[Array, ""]
    agreed: Agreed


@dataclasses.dataclass(frozen=True)
class OkTopk(EntryReducer):
    """Ok-Topk (Li and Hoefler, PPoPP 2022): entries above thresholds, summed in balanced regions.

    Each worker sends about its k = density d largest entries to the owners of W regions, which hold
    about equally many. The owners add them up and deliver the sums above a threshold. Regions and
    threshold are reused for many steps. They are taken anew earlier if needed: the regions if
    entries found no room in messages, the threshold if more sums passed it than there is room for,
    or fewer than k / 2.

    A step receives 6 C (W - 1) words in COO, with C = capacity_factor k / W, in four collectives.
    This is up to capacity_factor times the paper's words, because shapes are static and empty room
    is sent, too. New thresholds take four rounds of 256 counts, new regions an all-reduce of 1024.
    Entries without room stay in residuals, and the state's `info.overflow` counts them. Momentum is
    masked where a worker's own entry was delivered.

    Args:
        refresh_every: largest number of steps between exact new thresholds.
        rebalance_every: largest number of steps between new regions.
        capacity_factor: room in messages, in multiples of an even share.
        selection: selection from each worker's own vector. "fast" takes the entries that reach a
            sampled threshold, k on average. Others take k at most.
    """

    _: dataclasses.KW_ONLY
    refresh_every: Count = 32
    rebalance_every: Count = 64
    capacity_factor: float = 2.0

    def check(self) -> None:
        super().check()
        if not 1 <= static_float("capacity_factor", self.capacity_factor) < math.inf:
            raise ValueError(
                f"capacity_factor={self.capacity_factor} must be finite and at least 1, an even "
                "share"
            )

    def init(self, size: int) -> OkTopkState:
        return OkTopkState(jnp.uint32(0), Agreed.start(size))

    def reduce(
        self, x: Float[Array, " d"], state: OkTopkState, axis_name: str | None
    ) -> tuple[Sums, Kept]:
        check_size("x.size", x.size)
        result = ok_topk_all_reduce(
            x,
            entries(self.density, x.size),
            state.agreed,
            refresh=state.step % jnp.uint32(self.refresh_every) == 0,
            rebalance=state.step % jnp.uint32(self.rebalance_every) == 0,
            axis_name=axis_name,
            codec=self.codec,
            capacity_factor=self.capacity_factor,
            top_k=about_top_k if self.selection == "fast" else SELECTORS[self.selection],
        )
        new_state = OkTopkState(state.step + jnp.uint32(1), result.agreed)
        sums = Sums(result.total, result.delivered, result.overflow)
        kept = Kept(result.own.values, result.sent, new_state, result.own.indices)
        if result.lost:  # at any indices, own entries' among them
            kept = kept.whole(x)
        return sums, kept._replace(residual=functools.reduce(add_to, result.lost, kept.residual))
