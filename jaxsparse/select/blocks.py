"""The k blocks of largest norm."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxsparse.arrays import blocks
from jaxsparse.arrays.blocks import BlockStream
from jaxsparse.arrays.magnitude import norms
from jaxsparse.arrays.settings import check_k, check_vector

__all__ = ["block_top_k"]


def block_top_k(x: Float[Array, " d"], k: int, block_size: int) -> BlockStream:
    """The k blocks of largest l2 norm, exactly, in order of falling norm.

    Of equal norms the lower block comes first. The last block may be shorter than `block_size`.
    Only the norms are sorted: d / block_size numbers. S2 Reducer (Ge et al., 2021), section 2.2.

    >>> block_top_k(jnp.float32([3, 3, 0, 4, 0, 0, -5]), 2, 2).indices.tolist()
    [3, 0]
    """
    check_vector("x", x)
    block_size = blocks.check_block_size(block_size)
    count = blocks.count(x.size, block_size)
    limit = f"{count}, the number of blocks of {block_size} in {x.size} elements"
    return _block_top_k(x, check_k(k, count, limit), block_size)


@functools.partial(jax.jit, static_argnames=("k", "block_size"))
def _block_top_k(x: Float[Array, " d"], k: int, block_size: int) -> BlockStream:
    rows = blocks.rows(x.astype(jnp.float32), block_size)
    # Root mean squares have the order of norms, and do not overflow.
    _, indices = jax.lax.top_k(norms(rows, reduce=jnp.mean), k)
    return blocks.from_dense(x, indices, block_size)
