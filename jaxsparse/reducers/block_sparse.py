"""Systems that send the blocks that are not zero: OmniReduce, and an all-gather of them."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from jaxsparse.arrays import blocks
from jaxsparse.arrays.blocks import BlockStream
from jaxsparse.arrays.settings import entries
from jaxsparse.codecs.codec import bits, from_bits
from jaxsparse.collectives.messages import split_counts, with_count
from jaxsparse.comm import wire
from jaxsparse.reducers.base import Kept, Sums
from jaxsparse.reducers.blocks import (
    BlockReducer,
    Room,
    agree_on_blocks,
    block_residual,
    check_bounded,
    contribution,
    select_blocks,
    selected_count,
    take,
    union_capacity,
)
from jaxsparse.reducers.dense import Dense


@dataclasses.dataclass(frozen=True)
class OmniReduce(BlockReducer):
    """OmniReduce (Fei et al., SIGCOMM 2021): only blocks that are non-zero on some worker are sent.

    If gradients are sparse already, as those of embeddings are, set `block_size` to the embedding's
    width, so that a block is a row, and `union_density` to the share of rows that a step touches on
    all workers together. The mean is then exact, and nothing is selected. For dense gradients,
    `density` selects each worker's largest blocks, with error feedback. Leaves are laid end to end:
    compress embeddings of one width only, or rows shift across blocks.

    A step finds a union of bit masks, with 2 (W - 1)/W words for every 32 blocks, and psums the
    union's slots: a payload of 4 union_density d bytes, or 4 min(1, W density) d if that is less.
    The slots are static, and empty ones are sent, too. Blocks without a slot take turns and wait in
    the residual, for ceil(1 / union_density) steps at most, and the state's `info.overflow` counts
    their elements. If the slots would hold all d elements, the vector is summed densely.
    `omni_reduce` is better than `sparse_all_gather` if supports overlap or there are many workers.

    With a `density`, momentum is masked where this worker sent. Without one, it is the momentum of
    the mean, because gradients with momentum would be zero nowhere.

    Args:
        union_density: share of the blocks that there is room for, in (0, 1]. None: room for all
            that `density` can select. Without a `density` it is required.
    """

    _: dataclasses.KW_ONLY
    union_density: Room | None = None

    def check(self) -> None:
        check_bounded(self.density, "union_density", self.union_density)

    def reduce(
        self, x: Float[Array, " d"], state: UInt32[Array, ""], axis_name: str | None
    ) -> tuple[Sums, Kept]:
        workers = wire.axis_size(axis_name)
        capacity = self._capacity(x.size, workers)
        next_state = state + jnp.uint32(1)
        if self._is_dense(capacity, x.size):
            return Dense().reduce(x, next_state, axis_name)

        selected = select_blocks(x, self.block_size, self.density)
        kept = agree_on_blocks(selected, capacity, self.block_size, state, axis_name)
        own = contribution(x, selected, kept.indices, self.block_size)
        total = wire.psum(own.values, axis_name)

        residual = block_residual(x, own, total)
        total = jnp.where(jnp.isfinite(total), total, 0)
        sums = blocks.to_dense(BlockStream(kept.indices, total), x.size)
        sent = None if self.density is None else residual != x
        delivered = Sums(sums, jnp.count_nonzero(total), kept.overflow, is_settled=True)
        return delivered, Kept(residual, sent, next_state)

    def _capacity(self, size: int, workers: int) -> int:
        return union_capacity(size, self.block_size, self.density, self.union_density, workers)

    def _is_dense(self, capacity: int, size: int) -> bool:
        return capacity * self.block_size >= size


@dataclasses.dataclass(frozen=True)
class SparseAllGather(BlockReducer):
    """All-gather of each worker's non-zero blocks, summed by all.

    Parallax (Kim et al., EuroSys 2019) with all-reduce, Horovod and TensorFlow do this with sparse
    gradients (rows of embeddings as IndexedSlices). Settings go as in `omni_reduce`, but
    `capacity_density` is the share of rows that a single worker touches in a step. Momentum is
    masked as there.

    A step has one all-gather: each worker sends capacity_density d (1 + 1 / block_size) words, and
    receives W - 1 times as many. It suits few workers, or supports that hardly overlap. The room is
    static, and empty slots are sent, too. Blocks without room take turns and wait in the residual,
    for ceil(1 / capacity_density) steps at most, and the state's `info.overflow` counts their
    elements. If all messages together would be no fewer words than a dense all-reduce, the vector
    is summed densely instead.

    Args:
        capacity_density: share of the blocks that a worker's message has room for, in (0, 1]. None:
            `density`. Without a `density` it is required.
    """

    _: dataclasses.KW_ONLY
    capacity_density: Room | None = None

    def check(self) -> None:
        check_bounded(self.density, "capacity_density", self.capacity_density)

    def reduce(
        self, x: Float[Array, " d"], state: UInt32[Array, ""], axis_name: str | None
    ) -> tuple[Sums, Kept]:
        workers = wire.axis_size(axis_name)
        next_state = state + jnp.uint32(1)
        if self._is_dense(x.size, workers):
            return Dense().reduce(x, next_state, axis_name)

        capacity = self._capacity(x.size)
        selected = select_blocks(x, self.block_size, self.density)
        own = blocks.from_dense(x, take(selected, capacity, state), self.block_size)
        surplus = jnp.maximum(jnp.sum(selected, dtype=jnp.int32) - jnp.int32(capacity), 0)
        overflow = surplus * jnp.int32(self.block_size) if self._is_bounded(x.size) else None
        message = jnp.concatenate([bits(own.indices), bits(own.values.reshape(-1))])
        messages, overflow = split_counts(
            wire.all_gather(with_count(message, overflow), axis_name), overflow is not None
        )
        total = self._sum(messages, x.size)

        residual = block_residual(
            x, own, blocks.from_dense(total, own.indices, self.block_size).values
        )
        total = jnp.where(jnp.isfinite(total), total, 0)
        sent = None if self.density is None else residual != x
        sums = Sums(total, jnp.count_nonzero(total), overflow, is_settled=True)
        return sums, Kept(residual, sent, next_state)

    def _sum(self, messages: UInt32[Array, "n words"], size: int) -> Float[Array, " d"]:
        """Sums the messages' blocks, one message after the other.

        A single scatter would add blocks with equal numbers in any order on a GPU.
        """
        capacity = self._capacity(size)

        def add(total: Array, message: Array) -> tuple[Array, None]:
            indices = from_bits(message[:capacity], jnp.int32)
            values = from_bits(message[capacity:], jnp.float32)
            rows = values.reshape(capacity, self.block_size)
            return total.at[indices].add(rows, mode="drop"), None

        number = blocks.count(size, self.block_size)
        zeros = jnp.zeros_like(messages, jnp.float32, shape=(number, self.block_size))
        return jax.lax.scan(add, zeros, messages)[0].reshape(-1)[:size]

    def _selected(self, size: int) -> int:
        """The most blocks that a worker can select."""
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
        """The words of a message: block numbers, values, and a count if they may not all fit."""
        return self._capacity(size) * (1 + self.block_size) + self._is_bounded(size)

    def _is_dense(self, size: int, workers: int) -> bool:
        return workers * self._words(size) >= 2 * size
