"""S2 Reducer: sketches of sparse blocks (Ge et al., 2021)."""

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxsparse import blocks
from jaxsparse.collectives import wire
from jaxsparse.hashing import combine
from jaxsparse.reducers.base import Laws, Reduced, bucket_seeds, info
from jaxsparse.reducers.blocks import (
    agree,
    check_densities,
    select_blocks,
    selected_count,
    union_capacity,
)
from jaxsparse.reducers.dense import DenseReducer
from jaxsparse.reducers.omni_reduce import OmniReduceReducer
from jaxsparse.select.compaction import compact
from jaxsparse.settings import static_float, static_int, static_seed
from jaxsparse.sketch.blocks import decode_blocks, encode_blocks
from jaxsparse.sketch.tiles import SketchSpec


class Plan(NamedTuple):
    """Static sizes of one exchange."""

    selected: int  # blocks that a worker may select
    capacity: int  # blocks of the union that there is room for
    cols: int | None  # of the sketch; None: values travel exactly


@dataclasses.dataclass(frozen=True)
class S2Reducer:
    """Sums count sketches of each worker's blocks, and reads the blocks of any worker from them.

    Per exchange: the union of the workers' supports, one bit a block, then a psum of the rows x
    cols table. The mean is the sketch's estimate in the union's blocks and exactly 0 elsewhere. The
    estimate is unbiased but noisy, with hashes that are fresh at each exchange, and is no
    contraction: with rows = 1 the energy of its error is 1 / sketch_ratio times that of the sum. So
    the residual is what was not selected (or found no room), never the sketch's error.

    Where a table would be no smaller than the blocks that there is room for, these are psummed
    exactly (`OmniReduceReducer`); where they would be no smaller than the vector, all of it is. One
    worker sends nothing, and nothing is sketched.

    Attributes:
        block_size: elements of a block.
        density: share of the blocks that each worker selects, those of largest l2 norm, in (0, 1].
            None: all that are not zero.
        rows: of the sketch. For a given number of words, 1 has the least error energy; with more,
            the median protects small elements against a few large ones.
        sketch_ratio: the paper's lambda: rows * cols over non-zero elements.
        sizing: of which non-zero elements: "union", of all workers' blocks, as expected for
            supports at random, or union_density if that is given; "local", the paper's, of one
            worker's: with W disjoint supports the energy of the error is W times that of "union".
        union_density: share of the blocks for which there is room in the union; what exceeds it
            stays in the residual. None: W density, which always suffices. density=None needs it.
        seed: 0 <= seed < 2**32, of the hashes.

    Raises:
        ValueError: a setting is out of range, or union_density is missing.
    """

    block_size: int = 256
    density: float | None = 1 / 32
    rows: int = 1
    sketch_ratio: float = 0.5
    sizing: Literal["union", "local"] = "union"
    union_density: float | None = None
    seed: int = 0

    def __post_init__(self):
        for name in ("block_size", "rows"):
            object.__setattr__(self, name, static_int(name, getattr(self, name)))
        object.__setattr__(self, "seed", static_seed("seed", self.seed))
        blocks.check_block_size(self.block_size)
        check_densities(self.density, "union_density", self.union_density)
        if not 0 < static_float("sketch_ratio", self.sketch_ratio) < math.inf:
            raise ValueError(
                f"sketch_ratio={self.sketch_ratio} must be above 0 and finite: 0.5 halves the "
                "words of the blocks"
            )
        if self.sizing not in ("union", "local"):
            raise ValueError(f"sizing={self.sizing!r} is unknown: use 'union' or 'local'")
        if self.sizing == "local" and self.density is None:
            raise ValueError(
                "sizing='local' needs a density: how many blocks are not zero is unknown "
                "beforehand; use sizing='union', of union_density"
            )
        SketchSpec(self.rows, self.block_size, self.seed)  # raises where these are wrong

    @property
    def laws(self) -> Laws:
        """Sums are conserved in expectation; all blocks fit a table of ratio 1, which is exact."""
        return Laws(conserves=False, dense_at_full_budget=self.sketch_ratio >= 1)

    @property
    def needs_zeros(self) -> bool:
        """Without a density, blocks are sent because they are not zero."""
        return self.density is None

    def split(self, sizes: tuple[int, ...], dense_size: int = 0) -> tuple["S2Reducer", ...]:
        """The same for each bucket, but for the seed."""
        seeds = bucket_seeds(self.seed, len(sizes))
        return tuple(dataclasses.replace(self, seed=seed) for seed in seeds)

    def init(self, size: int) -> UInt32[Array, ""]:
        """The number of exchanges so far, from which hashes are derived."""
        return jnp.uint32(0)

    def plan(self, size: int, workers: int) -> Plan:
        """The sizes of an exchange of `size` elements among `workers`.

        >>> S2Reducer(block_size=8, density=0.25).plan(800, workers=2)
        Plan(selected=25, capacity=50, cols=175)
        """
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
        return Plan(selected, capacity, None if exact else cols)

    def words(self, size: int, workers: int) -> int:
        """Words psummed in an exchange of `size` elements, beside the union of supports."""
        plan = self.plan(size, workers)
        if plan.cols is None:
            return min(size, plan.capacity * self.block_size)
        return min(size, self.rows * plan.cols)

    def __call__(self, x: Float[Array, " d"], state: Any, *, axis_name: str | None) -> Reduced:
        """See `Reducer`."""
        workers = wire.axis_size(axis_name)
        if self.words(x.size, workers) == x.size:
            return DenseReducer()(x, state + jnp.uint32(1), axis_name=axis_name)
        plan = self.plan(x.size, workers)
        if plan.cols is None or workers == 1:
            exact = OmniReduceReducer(self.block_size, self.density, self.union_density)
            return exact(x, state, axis_name=axis_name)._replace(sent=None)

        selected = select_blocks(x, self.block_size, self.density)
        kept = agree(selected, plan.capacity, self.block_size, state, axis_name)
        own_indices = compact(selected & _marked(kept.indices, selected.size), plan.selected)
        own = blocks.from_dense(x, own_indices, self.block_size)

        spec = SketchSpec(self.rows, plan.cols, self.seed, tile_size=self.block_size)
        seed = combine(self.seed, state)
        table = wire.psum(encode_blocks(own, spec, seed=seed), axis_name)
        total = decode_blocks(table, spec, kept.indices, count=selected.size, seed=seed)

        # Blocks whose sums overflow count as not sent.
        finite = jnp.all(jnp.isfinite(total.values), axis=1)
        total = total._replace(indices=jnp.where(finite, total.indices, selected.size))
        arrived = (
            _marked(total.indices, selected.size).at[own.indices].get(mode="fill", fill_value=False)
        )
        delivered = jnp.where(arrived, own.indices, selected.size)
        rows = blocks.rows(x, self.block_size).at[delivered].set(0, mode="drop")
        mean = blocks.to_dense(total, x.size) / workers
        outcome = info(jnp.count_nonzero(mean), kept.overflow)
        residual = rows.reshape(-1)[: x.size]
        return Reduced(mean, residual, None, state + jnp.uint32(1), outcome)


def _marked(indices: Int[Array, " capacity"], count: int) -> Bool[Array, " {count}"]:
    """Which of `count` blocks the indices name."""
    return jnp.zeros_like(indices, jnp.bool_, shape=(count,)).at[indices].set(True, mode="drop")
