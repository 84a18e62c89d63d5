"""Sparse all-gather of blocks: what Parallax (Kim et al., EuroSys 2019) does with sparse leaves."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from jaxsparse import blocks, codecs
from jaxsparse.collectives import wire
from jaxsparse.collectives.tally import split_counts, with_count
from jaxsparse.reducers.base import Laws, Reduced, info
from jaxsparse.reducers.blocks import (
    check_densities,
    kept_back,
    select_blocks,
    selected_count,
    take,
)
from jaxsparse.reducers.dense import DenseReducer
from jaxsparse.reducers.density import entries


@dataclasses.dataclass(frozen=True)
class BlockGatherReducer:
    """Each worker's blocks in one message, gathered by all and summed in order of rank.

    A message has room for a static number of blocks. Blocks beyond it stay in the residual, in
    turns, and are counted. Where all messages together are no fewer words than a dense all-reduce,
    the vector is summed densely instead, and nothing is selected or kept back.

    Momentum is masked as in `OmniReduceReducer`.

    Attributes:
        block_size: elements of a block: the width of an embedding.
        density: share of the blocks that each worker selects, those of largest l2 norm, in (0, 1];
            None for all that are not zero.
        capacity_density: share of the blocks that a message has room for, in (0, 1]. None for all
            that are selected; without `density` it is required.
    """

    block_size: int = 256
    density: float | None = None
    capacity_density: float | None = None
    laws: ClassVar[Laws] = Laws(conserves=True, dense_at_full_budget=True)

    def __post_init__(self):
        object.__setattr__(self, "block_size", blocks.check_block_size(self.block_size))
        check_densities(self.density, "capacity_density", self.capacity_density)

    @property
    def needs_zeros(self) -> bool:
        """Without a density, blocks are sent because they are not zero."""
        return self.density is None

    def split(
        self, sizes: tuple[int, ...], dense_size: int = 0
    ) -> tuple["BlockGatherReducer", ...]:
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
        next_state = state + jnp.uint32(1)
        if self._is_dense(x.size, workers):
            return DenseReducer()(x, next_state, axis_name=axis_name)

        capacity = self._capacity(x.size)
        selected = select_blocks(x, self.block_size, self.density)
        own = blocks.from_dense(x, take(selected, capacity, state), self.block_size)
        surplus = jnp.maximum(jnp.sum(selected, dtype=jnp.int32) - jnp.int32(capacity), 0)
        overflow = surplus * jnp.int32(self.block_size) if self._is_bounded(x.size) else None
        message = jnp.concatenate([codecs.bits(own.indices), codecs.bits(own.values.reshape(-1))])
        messages, overflow = split_counts(
            wire.all_gather(with_count(message, overflow), axis_name), overflow is not None
        )
        total = self._sum(messages, x.size)

        residual = kept_back(x, own, blocks.from_dense(total, own.indices, self.block_size).values)
        total = jnp.where(jnp.isfinite(total), total, 0)
        sent = None if self.density is None else residual != x
        outcome = info(jnp.count_nonzero(total), overflow)
        return Reduced(total / workers, residual, sent, next_state, outcome)

    def _sum(self, messages: UInt32[Array, "n words"], size: int) -> Float[Array, " d"]:
        """The sum of the messages' blocks, one message after the other.

        Within a single scatter, blocks with the same number have no order on a GPU.
        """
        capacity = self._capacity(size)

        def add(total: Array, message: Array) -> tuple[Array, None]:
            indices = codecs.from_bits(message[:capacity], jnp.int32)
            values = codecs.from_bits(message[capacity:], jnp.float32)
            rows = values.reshape(capacity, self.block_size)
            return total.at[indices].add(rows, mode="drop"), None

        number = blocks.count(size, self.block_size)
        zeros = jnp.zeros_like(messages, jnp.float32, shape=(number, self.block_size))
        return jax.lax.scan(add, zeros, messages)[0].reshape(-1)[:size]

    def _selected(self, size: int) -> int:
        """The most blocks that a worker can want to send."""
        if self.density is None:
            return blocks.count(size, self.block_size)
        return selected_count(size, self.block_size, self.density)

    def _capacity(self, size: int) -> int:
        selected = self._selected(size)
        if self.capacity_density is None:
            return selected
        return min(selected, entries(self.capacity_density, blocks.count(size, self.block_size)))

    def _is_bounded(self, size: int) -> bool:
        """Whether there may be more blocks than room."""
        return self._capacity(size) < self._selected(size)

    def _words(self, size: int) -> int:
        """Of a message: block numbers and values, and a count where they may not all fit."""
        return self._capacity(size) * (1 + self.block_size) + self._is_bounded(size)

    def _is_dense(self, size: int, workers: int) -> bool:
        return workers * self._words(size) >= 2 * size
