"""S2 Reducer: sketches of sparse blocks (Ge et al., 2021)."""

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxsparse.arrays import blocks
from jaxsparse.arrays.hashing import combine
from jaxsparse.arrays.settings import Density, static_float
from jaxsparse.comm import wire
from jaxsparse.reducers.base import Conservation, Kept, SeededReducer, Sums
from jaxsparse.reducers.block_sparse import OmniReduce
from jaxsparse.reducers.blocks import (
    BlockReducer,
    Room,
    agree_on_blocks,
    check_bounded,
    select_blocks,
    selected_count,
    union_capacity,
)
from jaxsparse.reducers.dense import Dense
from jaxsparse.select.compaction import compact
from jaxsparse.sketch.codec import decode_blocks, encode_blocks
from jaxsparse.sketch.tiles import SketchSpec


class SketchSizes(NamedTuple):
    """Static sizes of one exchange."""

    selected: int  # number of blocks that a worker may select
    capacity: int  # number of blocks of the union that there is room for
    cols: int | None  # number of columns of the sketch; None: values travel exactly


@dataclasses.dataclass(frozen=True)
class S2(BlockReducer, SeededReducer):
    """S2 Reducer (Ge et al., 2021): count sketches of sparse blocks, summed by all-reduce.

    For dense models, each worker selects its blocks of largest norm. The others stay in its
    residual. If gradients are sparse already, as those of embeddings are, pass `density=None`, the
    embedding's width as `block_size`, and as `union_density` the share of the rows that a step
    touches on any worker. All blocks that are not zero are then sent. Leaves are laid end to end:
    compress embeddings of one width only, or rows shift across blocks.

    A step finds the union of supports, by an all-to-all and an all-gather of 2 (W - 1)/W bits a
    block. It then psums a table, of sketch_ratio times the elements of the blocks that W random
    supports would cover, or that `union_density` has room for. `omni_reduce` with the same settings
    sends at least 1 / sketch_ratio times as much. The price is noise. The mean is the sketch's
    estimate in the union's blocks and exactly 0 elsewhere. The estimates are unbiased, but the
    energy of their error is 1 / sketch_ratio times the energy of the sum with one row (2 at 0.5),
    and 2.5 and 2.7 times with 3 and 5 rows. It moves elements without gradients, too, if others of
    their blocks have some. Hashes are fresh at each step, so the noise averages out over steps,
    better at a lower learning rate. Error feedback does not correct it: the
    residual keeps blocks that were not selected or had no room, never the sketch's error.

    If the table would be no smaller than the blocks that there is room for, these are summed
    exactly. With `union_density`, that is so from a ratio of 1 on. A single worker sketches
    nothing. On a GPU replicas stay equal, but a repeated run may differ in the last bits: see
    `sketch.encode`.

    With a `density`, momentum is masked where this worker sent, though the sketch delivers
    estimates: what it sent does not wait. Blocks without room wait, and keep their momentum. (With
    a density of 1 no block waits, and nothing is masked.) Without a density, it is the momentum of
    the mean, because gradients with momentum would be zero nowhere.

    Args:
        block_size: number of consecutive elements that are selected and hashed together.
        rows: number of rows of the sketch.
        sketch_ratio: words of the sketch over elements of non-zero blocks, the paper's lambda. With
            momentum, on images of digits, 0.1 to 0.25 trains as well as 0.5 at half the rate.
        sizing: the blocks that `sketch_ratio` refers to: "union" of all workers' blocks, or "local"
            for one worker's, as we read the paper. The words of "union" grow with the number of
            workers W, to sketch_ratio times those of the vector. Those of "local" do not, but it
            has up to W times the noise, and diverges at learning rates at which "union" does not:
            halve the rate (`benchmarks/s2_reducer.py`).
        union_density: share of the blocks that there is room for, on all workers together. Blocks
            without room wait in the residual, and the state's `info.overflow` counts their
            elements. None: room for all that `density` can select. Without a `density` it is
            required.

    Example:
        >>> from jaxsparse import s2_reducer
        >>> import jax, jax.numpy as jnp
        >>> tx = s2_reducer(None, block_size=32, union_density=0.25, axis_name=None)
        >>> grads = {"embedding": jnp.zeros((64, 32)).at[jnp.array([3, 40])].set(1.0)}
        >>> updates, state = jax.jit(tx.update)(grads, tx.init(grads))
        >>> jnp.flatnonzero(jnp.any(updates["embedding"] != 0, axis=1)).tolist()
        [3, 40]
    """

    density: Density | None = 1 / 32
    _: dataclasses.KW_ONLY
    rows: int = 1
    sketch_ratio: float = 0.5
    sizing: Literal["union", "local"] = "union"
    union_density: Room | None = None

    def check(self) -> None:
        check_bounded(self.density, "union_density", self.union_density)
        if not 0 < static_float("sketch_ratio", self.sketch_ratio) < math.inf:
            raise ValueError(
                f"sketch_ratio={self.sketch_ratio} must be above 0 and finite: 0.5 halves the "
                "words of the blocks"
            )
        if self.sizing == "local" and self.density is None:
            raise ValueError(
                "sizing='local' needs a density, because the number of non-zero blocks is unknown "
                "before the step: use sizing='union' with a union_density"
            )
        SketchSpec(self.rows, self.block_size, self.seed)  # raises where these are wrong

    @property
    def conservation(self) -> Conservation:
        return "in expectation"

    def plan(self, size: int, workers: int) -> SketchSizes:
        """The sizes of an exchange of `size` elements among `workers`."""
        count = blocks.count(size, self.block_size)
        capacity = union_capacity(size, self.block_size, self.density, self.union_density, workers)
        selected = capacity
        if self.density is not None:
            selected = selected_count(size, self.block_size, self.density)
        selected_by_any: float = capacity
        if self.sizing == "local":
            selected_by_any = selected
        elif self.union_density is None:
            selected_by_any = count * (1 - (1 - selected / count) ** workers)
        words = self.sketch_ratio * selected_by_any * self.block_size
        cols = max(self.block_size, math.ceil(words / self.rows * (1 - 1e-12)))
        exact = self.rows * cols >= capacity * self.block_size
        return SketchSizes(selected, capacity, None if exact else cols)

    def words(self, size: int, workers: int) -> int:
        """The words that an exchange of `size` elements psums, beside the union of supports."""
        plan = self.plan(size, workers)
        if plan.cols is None:
            return min(size, plan.capacity * self.block_size)
        return min(size, self.rows * plan.cols)

    def reduce(self, x: Float[Array, " d"], state: Any, axis_name: str | None) -> tuple[Sums, Kept]:
        workers = wire.axis_size(axis_name)
        if self.words(x.size, workers) == x.size:
            return Dense().reduce(x, state + jnp.uint32(1), axis_name)
        plan = self.plan(x.size, workers)
        if plan.cols is None or workers == 1:
            exact = OmniReduce(
                self.density, block_size=self.block_size, union_density=self.union_density
            )
            return exact.reduce(x, state, axis_name)

        selected = select_blocks(x, self.block_size, self.density)
        kept = agree_on_blocks(selected, plan.capacity, self.block_size, state, axis_name)
        own_indices = compact(selected & _marked(kept.indices, selected.size), plan.selected)
        own = blocks.from_dense(x, own_indices, self.block_size)

        spec = SketchSpec(self.rows, plan.cols, self.seed, tile_size=self.block_size)
        seed = combine(self.seed, state)
        table = wire.psum(encode_blocks(own, spec, seed=seed), axis_name)
        total = decode_blocks(table, spec, kept.indices, count=selected.size, seed=seed)

        # A block counts as not sent if its sum overflows.
        finite = jnp.all(jnp.isfinite(total.values), axis=1)
        total = total._replace(indices=jnp.where(finite, total.indices, selected.size))
        arrived = (
            _marked(total.indices, selected.size).at[own.indices].get(mode="fill", fill_value=False)
        )
        left = jnp.where(arrived, own.indices, selected.size)
        rows = blocks.rows(x, self.block_size).at[left].set(0, mode="drop")
        sums = blocks.to_dense(total, x.size)
        residual = rows.reshape(-1)[: x.size]
        # Momentum is masked where a block left this worker's residual, however noisy its estimate.
        all_leave = self.density is None or plan.selected == plan.capacity == selected.size
        sent = None if all_leave else residual != x
        delivered = Sums(sums, jnp.count_nonzero(sums), kept.overflow, is_settled=True)
        return delivered, Kept(residual, sent, state + jnp.uint32(1))


def _marked(indices: Int[Array, " capacity"], count: int) -> Bool[Array, " {count}"]:
    """A mask of the blocks, out of `count`, that the indices name."""
    return jnp.zeros_like(indices, jnp.bool_, shape=(count,)).at[indices].set(True, mode="drop")
