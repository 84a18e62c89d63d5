"""The selection of blocks, and their room, for reducers of block-sparse vectors."""

import dataclasses
from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxsparse.arrays import blocks
from jaxsparse.arrays.blocks import BlockStream
from jaxsparse.arrays.settings import Density, check_vector, entries, static_float
from jaxsparse.collectives.union import union
from jaxsparse.reducers.base import Reducer
from jaxsparse.select.compaction import compact_ranked
from jaxsparse.select.groups import block_top_k


def check_room(name: str, value: Any) -> float:
    """The setting, a share of the blocks. Raises ValueError unless it lies in (0, 1]."""
    if not 0 < static_float(name, value) <= 1:
        raise ValueError(
            f"{name}={value} must lie in (0, 1]: 0.1 makes room for 10 % of the blocks"
        )
    return value


# A share of the blocks that there is room for.
Room = Annotated[float, check_room]
# A number of elements in a block.
BlockSize = Annotated[int, lambda _, value: blocks.check_block_size(value)]


@dataclasses.dataclass(frozen=True)
class BlockReducer(Reducer):
    """A reducer of blocks.

    Args:
        density: share of its blocks that each worker selects, in (0, 1]. The selected
            blocks have the largest l2 norms. None: all blocks that are not zero.
        block_size: number of elements in a block.
    """

    density: Density | None = None
    _: dataclasses.KW_ONLY
    block_size: BlockSize = 256

    @property
    def alignment(self) -> int:
        return self.block_size

    @property
    def needs_zeros(self) -> bool:
        """Yes without a density, because it then sends all blocks that are not zero."""
        return self.density is None

    def init(self, size: int) -> UInt32[Array, ""]:
        """A count of steps, which decides whose turn it is if there is too little room."""
        del size
        return jnp.uint32(0)


class AgreedBlocks(NamedTuple):
    """Blocks of the union of all workers' supports; equal on all workers."""

    indices: Int[Array, " capacity"]  # int32, distinct; the number of blocks marks an empty slot
    overflow: Int[Array, ""]  # int32: number of elements of the union's blocks without room


def check_bounded(density: Density | None, name: str, room: float | None) -> None:
    """Raises ValueError if both `density` and the setting `room` are None."""
    if density is None and room is None:
        raise ValueError(
            f"density=None and {name}=None leave no bound for the blocks of a message, and shapes "
            f"are static: give {name}, the share of the blocks that there is room for (0.1 for "
            "10 %), or density, the share that each worker selects"
        )


def selected_count(size: int, block_size: int, density: Density) -> int:
    """The k of a worker's block top-k: ceil(density times the number of blocks), at least 1."""
    return entries(density, blocks.count(size, block_size))


def union_capacity(
    size: int, block_size: int, density: Density | None, union_density: float | None, workers: int
) -> int:
    """The number of blocks of the union that there is room for.

    A `union_density` is the share of the blocks that there is room for. None: all that W workers
    can select.
    """
    number = blocks.count(size, block_size)
    most = number
    if density is not None:
        most = min(number, workers * selected_count(size, block_size, density))
    return most if union_density is None else min(most, entries(union_density, number))


def select_blocks(
    x: Float[Array, " d"], block_size: int, density: Density | None
) -> Bool[Array, " blocks"]:
    """The blocks that this worker selects, see `BlockReducer`; never a block of zeros."""
    check_vector("x", x)  # counts of elements must fit an int32, too
    number = blocks.count(x.size, block_size)
    if density is None or (k := selected_count(x.size, block_size, density)) == number:
        return blocks.non_zero(x, block_size)
    stream = block_top_k(x, k, block_size)
    indices = jnp.where(jnp.any(stream.values != 0, axis=1), stream.indices, number)
    return jnp.zeros_like(x, jnp.bool_, shape=(number,)).at[indices].set(True, mode="drop")


def take(
    mask: Bool[Array, " blocks"], capacity: int, step: UInt32[Array, ""]
) -> Int[Array, " capacity"]:
    """The first `capacity` blocks of a mask, counted from a start that moves with `step`.

    The start moves by `capacity` blocks a step and wraps around. So a block that stays in the mask
    is taken within ceil(blocks / capacity) steps, however many others are in the mask. Empty slots,
    behind the distinct block numbers, hold the number of blocks.

    >>> mask = jnp.array([True, True, False, True, True])
    >>> [take(mask, 2, jnp.uint32(step)).tolist() for step in range(3)]
    [[0, 1], [3, 4], [4, 0]]
    """
    turns = -(-mask.size // capacity)
    start = ((step % jnp.uint32(turns)) * jnp.uint32(capacity)).astype(jnp.int32)
    ahead = jnp.arange(mask.size, dtype=jnp.int32) >= start
    rank = jnp.where(mask, jnp.where(ahead, jnp.int32(0), jnp.int32(1)), jnp.int32(2))
    return compact_ranked(rank, jnp.equal, 2, capacity)


def agree_on_blocks(
    selected: Bool[Array, " blocks"],
    capacity: int,
    block_size: int,
    step: UInt32[Array, ""],
    axis_name: str | None,
) -> AgreedBlocks:
    """The blocks that any worker selected, as many as there is room for.

    `step`, a count of steps that is equal on all workers, decides which blocks wait if there is too
    little room; none waits for ever (see `take`). `overflow` counts the last block as whole.
    """
    wanted = union(selected, axis_name)
    surplus = jnp.maximum(jnp.sum(wanted, dtype=jnp.int32) - jnp.int32(capacity), 0)
    return AgreedBlocks(take(wanted, capacity, step), surplus * jnp.int32(block_size))


def contribution(
    x: Float[Array, " d"],
    selected: Bool[Array, " blocks"],
    indices: Int[Array, " capacity"],
    block_size: int,
) -> BlockStream:
    """The blocks at `indices` that this worker selected. Others are zeros, without an index."""
    own = selected.at[indices].get(mode="fill", fill_value=False)
    return blocks.from_dense(x, jnp.where(own, indices, selected.size), block_size)


def block_residual(
    x: Float[Array, " d"], own: BlockStream, total: Float[Array, "k block_size"]
) -> Float[Array, " d"]:
    """The residual: `x` without its delivered blocks. A sum that overflows counts as not sent.

    `own` has the blocks of `x` that it sent, and `total` the sums over workers in the same slots.
    """
    left = jnp.where(jnp.isfinite(total), 0, own.values)
    # Subtracting the blocks as a dense vector would take twice as long.
    rows = blocks.rows(x, own.block_size).at[own.indices].set(left, mode="drop")
    return rows.reshape(-1)[: x.size]
