"""Block-sparse vectors of a static capacity: runs of consecutive elements, such as embedding rows.

Block b holds elements b * block_size to (b + 1) * block_size - 1. Zeros fill up the last block.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxsparse.arrays.settings import static_int

__all__ = ["BlockStream", "from_dense", "non_zero", "to_dense"]  # what users meet


class BlockStream(NamedTuple):
    """Blocks of a vector. An empty slot has zeros, and the number of blocks as its index."""

    indices: Int[Array, " k"]  # int32
    values: Float[Array, "k block_size"]

    @property
    def capacity(self) -> int:
        return self.indices.shape[0]

    @property
    def block_size(self) -> int:
        return self.values.shape[1]


def check_block_size(block_size: int) -> int:
    """The setting as an int. Raises ValueError unless it is at least 1."""
    block_size = static_int("block_size", block_size)
    if block_size < 1:
        raise ValueError(
            f"block_size={block_size} must be at least 1: 256, or the width of an embedding"
        )
    return block_size


def count(size: int, block_size: int) -> int:
    """The number of blocks of a vector of `size` elements. The last block may be shorter."""
    return -(-size // block_size)


def rows(x: Float[Array, " d"], block_size: int) -> Float[Array, "blocks block_size"]:
    """The vector as a matrix with a row for each block. Zeros fill the last row.

    >>> rows(jnp.arange(3.0), 2).tolist()
    [[0.0, 1.0], [2.0, 0.0]]
    """
    return jnp.pad(x, (0, -x.size % block_size)).reshape(-1, block_size)


def non_zero(x: Float[Array, " d"], block_size: int) -> Bool[Array, " blocks"]:
    """The mask of the blocks that have an element other than 0. NaN is not 0."""
    return jnp.any(rows(x, block_size) != 0, axis=1)


def from_dense(x: Float[Array, " d"], indices: Int[Array, " k"], block_size: int) -> BlockStream:
    """The blocks of `x` with these numbers. The number of blocks gives an empty slot, of zeros.

    >>> from_dense(jnp.arange(1.0, 6.0), jnp.array([2, 0, 3]), 2).values.tolist()
    [[5.0, 0.0], [1.0, 2.0], [0.0, 0.0]]
    """
    blocks = rows(x, block_size)
    return BlockStream(indices, blocks.at[indices].get(mode="fill", fill_value=0))


def to_dense(stream: BlockStream, size: int) -> Float[Array, " size"]:
    """The dense vector of a stream. Blocks with equal indices are added up, empty slots ignored.

    >>> to_dense(BlockStream(jnp.array([1, 2]), jnp.ones((2, 2))), 3).tolist()
    [0.0, 0.0, 1.0]
    """
    empty = jnp.zeros_like(stream.values, shape=(count(size, stream.block_size), stream.block_size))
    return empty.at[stream.indices].add(stream.values, mode="drop").reshape(-1)[:size]
