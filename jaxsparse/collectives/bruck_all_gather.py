"""All-gather in ceil(log2 n) rounds for any n (Bruck et al., 1997; SparDL, section II)."""

import jax.numpy as jnp
from jaxtyping import Array

from jaxsparse.collectives.group import Group


def bruck_all_gather(x: Array, group: Group) -> Array:
    """Every member's `x`, stacked in order of rank.

    Rounds: ceil(log2 n). Words received: (n - 1) times those of `x`.

    Args:
        x: any array, of the same shape on all workers.
        group: whom to gather from, n members.

    Returns:
        Array of shape (n, *x.shape), equal on all members. In absolute order, so that sums over
        its rows round alike everywhere.
    """
    n = group.size
    blocks = x[None]  # of members rank, rank + 1, ...
    while (held := blocks.shape[0]) < n:
        arriving = group.shift(blocks[: n - held], -held)
        blocks = jnp.concatenate([blocks, arriving])
    return blocks[(jnp.arange(n) - group.rank) % n]
