"""Spar-Reduce-Scatter: a reduce-scatter that cuts each block before it is sent (SparDL, III-B)."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxsparse import codecs
from jaxsparse.collectives.group import Group
from jaxsparse.stream import SparseStream

# Of a vector and k: k of its entries, with distinct indices.
Select = Callable[[Float[Array, " m"], int], SparseStream]


class Scattered(NamedTuple):
    """What a worker holds after Spar-Reduce-Scatter among n workers, in blocks of m elements."""

    block: SparseStream  # the largest of the sums of its own block; indices within the block
    discarded: Float[Array, "n m"]  # what it itself cut off or rounded away, at any stage
    selected: Bool[Array, "n m"]  # entries that it sent, or kept of its own block


def spar_reduce_scatter(
    rows: Float[Array, "n m"], k: int, group: Group, *, select: Select, codec: codecs.Codec
) -> Scattered:
    """Member i of each group receives the sum of row i, of which nobody ever sends more than k.

    Blocks are numbered from the worker's own, 0. With D = 2^(l - i) at step i of
    l = ceil(log2 n), blocks D to min(2D, n) - 1 go to the member D further on, where they are its
    blocks 0, 1, ... So all n work, for any n, and each block is sent once. A block is cut to its k
    largest entries when it is about to be sent, and not after each addition (the paper's
    "optimization for SRS"); the own block last of all.

    Rounds: ceil(log2 n). Words received: (n - 1) codec.words(k, m), in COO 2 k (n - 1).

    Args:
        rows: float32, one block for each member.
        k: entries of a block that are sent, 1 <= k <= m.
        group: the workers that take part, n of them.
        select: picks the k largest entries, or nearly so.
        codec: of the messages.

    Returns:
        The own block, not yet rounded by the codec, and what was left behind on the way.
    """
    n, m = rows.shape
    # Nothing is added to a block that has left, so `sums` ends as what was left behind of each.
    sums, rank = rows, group.rank
    selected = jnp.zeros_like(rows, jnp.bool_)
    distance = 1
    while 2 * distance < n:
        distance *= 2
    while distance >= 1 and n > 1:
        count = min(2 * distance, n) - distance
        leaving = (rank + distance + jnp.arange(count)) % n
        cut: SparseStream = jax.lax.map(lambda i, sums=sums: select(sums[i], k), leaving)
        sums = _add(sums, leaving, cut.indices, -codec.rounded(cut.values))
        selected = selected.at[leaving[:, None], cut.indices].set(True)
        messages = jax.vmap(lambda s: codec.encode(s, m))(cut)
        messages = group.shift(messages, distance)
        arrived = jax.vmap(lambda w: codec.decode(w, k, m, rows.dtype))(messages)
        sums = _add(sums, (rank + jnp.arange(count)) % n, *arrived)
        distance //= 2
    own = select(sums[rank], k)
    sums = sums.at[rank, own.indices].add(-own.values, mode="drop")
    return Scattered(own, sums, selected.at[rank, own.indices].set(True))


def _add(
    rows: Float[Array, "n m"],
    numbers: Int[Array, " c"],
    indices: Int[Array, "c k"],
    values: Float[Array, "c k"],
) -> Float[Array, "n m"]:
    """Adds entries to some of the rows, whose numbers are given; empty slots are left out.

    No row has two entries of one index, which a GPU would add in any order.
    """
    return rows.at[numbers[:, None], indices].add(values, mode="drop")
