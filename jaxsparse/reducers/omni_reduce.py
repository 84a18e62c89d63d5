"""OmniReduce (Fei et al., SIGCOMM 2021): all-reduce of the blocks that are not zero everywhere."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from jaxsparse import blocks
from jaxsparse.blocks import BlockStream
from jaxsparse.collectives import wire
from jaxsparse.reducers.base import Laws, Reduced, info
from jaxsparse.reducers.blocks import (
    agree,
    check_densities,
    contribution,
    kept_back,
    select_blocks,
    union_capacity,
)
from jaxsparse.reducers.dense import DenseReducer


@dataclasses.dataclass(frozen=True)
class OmniReduceReducer:
    """Workers agree on the union of their blocks, then one psum sums the values of these.

    The paper's aggregators stream the blocks that any worker has, and skip the others; here the
    union is found first, as bits, and travels in a static number of slots. Blocks beyond these stay
    in the residuals of those who have them, in turns, and are counted. Where the slots would hold
    the whole vector, it is summed densely instead, and nothing is selected or kept back.

    Momentum is masked where this worker sent if `density` is given, as for top-k; without, it is
    that of the mean.

    Attributes:
        block_size: elements of a block: 256 in the paper, or the width of an embedding.
        density: share of the blocks that each worker selects, those of largest l2 norm (the paper's
            block top-k), in (0, 1]; None for all that are not zero.
        union_density: share of the blocks that there is room for, in (0, 1]. None for all that the
            workers can select; without `density` it is required.
    """

    block_size: int = 256
    density: float | None = None
    union_density: float | None = None
    laws: ClassVar[Laws] = Laws(conserves=True, dense_at_full_budget=True)

    def __post_init__(self):
        object.__setattr__(self, "block_size", blocks.check_block_size(self.block_size))
        check_densities(self.density, "union_density", self.union_density)

    @property
    def needs_zeros(self) -> bool:
        """Without a density, blocks are sent because they are not zero."""
        return self.density is None

    def split(self, sizes: tuple[int, ...], dense_size: int = 0) -> tuple["OmniReduceReducer", ...]:
        """The same for each bucket."""
        return (self,) * len(sizes)

    def init(self, size: int) -> UInt32[Array, ""]:
        """A count of steps, by which blocks without room take turns."""
        return jnp.uint32(0)

    def __call__(
        self, x: Float[Array, " d"], state: UInt32[Array, ""], *, axis_name: str | None
    ) -> Reduced:
        """See `Reducer`."""
        workers = wire.axis_size(axis_name)
        capacity = self._capacity(x.size, workers)
        next_state = state + jnp.uint32(1)
        if self._is_dense(capacity, x.size):
            return DenseReducer()(x, next_state, axis_name=axis_name)

        selected = select_blocks(x, self.block_size, self.density)
        kept = agree(selected, capacity, self.block_size, state, axis_name)
        own = contribution(x, selected, kept.indices, self.block_size)
        total = wire.psum(own.values, axis_name)

        residual = kept_back(x, own, total)
        total = jnp.where(jnp.isfinite(total), total, 0)
        mean = blocks.to_dense(BlockStream(kept.indices, total / workers), x.size)
        sent = None if self.density is None else residual != x
        outcome = info(jnp.count_nonzero(total), kept.overflow)
        return Reduced(mean, residual, sent, next_state, outcome)

    def _capacity(self, size: int, workers: int) -> int:
        return union_capacity(size, self.block_size, self.density, self.union_density, workers)

    def _is_dense(self, capacity: int, size: int) -> bool:
        return capacity * self.block_size >= size
