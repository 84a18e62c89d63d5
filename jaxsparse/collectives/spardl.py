"""SparDL's collectives (Zhao et al., ICDE 2024), which never exceed a budget of k entries a block.

Spar-Reduce-Scatter (section III-B) cuts each block before it is sent. Spar-All-Gather (III-D) sums
blocks over teams: R-SAG for a power of two of teams, B-SAG for any number.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxsparse.arrays.stream import SparseStream, add, add_to, to_dense
from jaxsparse.codecs.codec import Codec, check_local, left_of
from jaxsparse.collectives.messages import ladder
from jaxsparse.comm.wire import Group, bruck_all_gather
from jaxsparse.select.top_k import Select


class Scattered(NamedTuple):
    """The result of Spar-Reduce-Scatter on one of n workers, for blocks of m elements."""

    block: SparseStream  # the k largest sums of its own block; indices are within the block
    discarded: Float[Array, "n m"]  # the parts that this worker cut off or rounded away
    selected: Bool[Array, "n m"]  # where it sent an entry, or kept one of its own block


def spar_reduce_scatter(
    rows: Float[Array, "n m"], k: int, group: Group, *, select: Select, codec: Codec
) -> Scattered:
    """Member i of each group receives the sum of row i. Nobody sends more than k entries of a row.

    Blocks are numbered from the worker's own block, 0. Let D = 2^(l - i) at step i of l = ceil(log2
    n). A worker sends blocks D to min(2D, n) - 1 to the member D further on, where they are blocks
    0, 1, ... So all n workers work at each step, for any n, and each block is sent once. `select`
    cuts a block to its k largest entries just before it is sent, and not after each addition (the
    paper's "optimization for SRS"). The own block is cut last, and not rounded by the codec.

    Rounds: ceil(log2 n). Words received: (n - 1) codec.words(k, m), in COO 2 k (n - 1).
    """
    n, m = rows.shape
    # Nothing is added to a block that has been sent, so `sums` ends as the parts discarded.
    sums, rank = rows, group.rank
    selected = jnp.zeros_like(rows, jnp.bool_)
    encode = functools.partial(codec.encode, size=m)
    decode = functools.partial(codec.decode, capacity=k, size=m, dtype=rows.dtype)
    distance = 1
    while 2 * distance < n:
        distance *= 2
    while distance >= 1 and n > 1:
        count = min(2 * distance, n) - distance
        leaving = (rank + distance + jnp.arange(count)) % n
        cut: SparseStream = jax.lax.map(lambda i, sums=sums: select(sums[i], k), leaving)
        rounded = jax.vmap(functools.partial(codec.rounded, size=m))(cut)
        messages = jax.vmap(encode)(cut)
        arrived = jax.vmap(decode)(group.shift(messages, distance))
        # Not a difference, which would be NaN where the sum has overflowed.
        left = left_of(cut.values, rounded)
        sums = sums.at[leaving[:, None], cut.indices].set(left, mode="drop")
        # No row gets two entries with the same index. A GPU would add those in any order.
        arriving = (rank + jnp.arange(count)) % n
        sums = sums.at[arriving[:, None], arrived.indices].add(arrived.values, mode="drop")
        selected = selected.at[leaving[:, None], cut.indices].set(True, mode="drop")
        distance //= 2
    own = select(sums[rank], k)
    sums = sums.at[rank, own.indices].set(0, mode="drop")
    return Scattered(own, sums, selected.at[rank, own.indices].set(True, mode="drop"))


def largest(stream: SparseStream, k: int) -> tuple[SparseStream, SparseStream]:
    """The k entries of largest magnitude, the largest first, and the stream without them."""
    k = min(k, stream.capacity)
    _, slots = jax.lax.top_k(jnp.abs(stream.values), k)
    kept = SparseStream(stream.indices[slots], stream.values[slots])
    return kept, stream._replace(values=stream.values.at[slots].set(0, unique_indices=True))


def largest_sums(
    a: SparseStream, b: SparseStream, size: int, k: int, holders: int
) -> tuple[SparseStream, SparseStream]:
    """The k largest sums of two streams, and each of `holders` workers' share of the other sums.

    Each stream has distinct indices. A sum that overflows is among the largest. Where it finds no
    room, it is clipped, because an inf would stay in the residual for ever.
    """
    kept, cut = largest(add(a, b, size), k)
    return kept, cut._replace(values=jnp.nan_to_num(cut.values) / holders)


def recursive(
    block: SparseStream, size: int, k: int, across: Group, *, codec: Codec
) -> tuple[SparseStream, Float[Array, " m"]]:
    """R-SAG: recursive doubling over teams. After each exchange the sum is cut to its k largest.

    After exchange t, 2^(t+1) workers hold the same sum and cut the same entries. Each keeps
    2^-(t+1) of these, and of rounding. (The paper's "half" is right for two teams. With more teams
    it would feed back more than was lost.) `across` are the workers of equal rank in all teams, a
    power of two.

    Rounds: log2(teams). Words received: log2(teams) codec.words(k, size).
    """
    if across.size & (across.size - 1):
        raise ValueError(
            f"teams={across.size} is not a power of two, which gather='recursive' needs: use "
            "gather='bruck'"
        )
    discarded = jnp.zeros_like(block.values, shape=(size,))
    holders = 1
    while holders < across.size:
        rounded = codec.rounded(block, size)
        lost = block._replace(values=(block.values - rounded) / holders)
        discarded = add_to(discarded, lost)
        message = across.exchange(codec.encode(block, size), holders)
        block = block._replace(values=rounded)
        arrived = codec.decode(message, block.capacity, size, block.values.dtype)
        holders *= 2
        block, lost = largest_sums(block, arrived, size, k, holders)
        discarded = add_to(discarded, lost)
    return block, discarded


class Adaptation(NamedTuple):
    """B-SAG's state, which adapts the number of entries to send. Equal on all workers."""

    h: Float[Array, ""]  # float32: number of entries that a worker sends, before rounding
    step: Float[Array, ""]  # float32: signed step of h
    flag: Bool[Array, ""]  # the next adjustment doubles the step if it keeps the direction

    @classmethod
    def start(cls, k: int, teams: int) -> "Adaptation":
        """The state with which Alg. 2 begins, for k entries wanted after the gather."""
        h = max(1, k / teams)
        return cls(jnp.float32(h), jnp.float32(0.01 * (k - k / teams)), jnp.bool_(False))

    def adapt(self, entries: Float[Array, ""], k: int, teams: int) -> "Adaptation":
        """Alg. 2: moves h so that `entries`, the number of entries after the gather, approaches k.

        The step doubles at every second adjustment in the same direction. If the direction is
        wrong, the step is halved and reversed. (This is the paper's listing. Its text has the signs
        reversed.)

        h stays between k / teams, which is right if the teams' entries do not overlap, and k, which
        is right if they coincide. A step is never shorter than the first one, or it would shrink to
        nothing while h is right. It is never longer than the range of h, or it would grow without
        limit while h is at a bound.
        """
        onward = (entries > k) != (self.step > 0)
        step = jnp.where(onward, jnp.where(self.flag, 2 * self.step, self.step), -self.step / 2)
        step = Adaptation(self.h, step, onward & ~self.flag).within(k, teams).step
        return Adaptation(self.h + step, step, onward & ~self.flag).within(k, teams)

    def within(self, k: int, teams: int) -> "Adaptation":
        shortest = 0.01 * (k - k / teams)
        length = jnp.clip(jnp.abs(self.step), shortest, k - k / teams)
        step = jnp.where(self.step > 0, length, -length)
        return Adaptation(jnp.clip(self.h, max(1, k / teams), k), step, self.flag)


def bruck(
    block: SparseStream,
    size: int,
    k: int,
    across: Group,
    state: Adaptation,
    *,
    select: Select,
    codec: Codec,
) -> tuple[SparseStream, Float[Array, " m"], Int[Array, ""]]:
    """B-SAG: each worker sends its h largest entries to all teams, and the sum is cut to k.

    Messages have one of the capacities of `ladder`, the smallest that holds h entries. It is chosen
    at run time, so a message has room for at most 1.1 h entries, rounded up. `across` are the
    workers of equal rank in all teams. Besides the results of `recursive`, it returns the number of
    entries of the sum before the cut.

    Rounds: ceil(log2(teams)). Words received: (teams - 1) codec.words(capacity, size).
    """
    rungs = ladder(k / across.size, k)
    h = jnp.round(state.h).astype(jnp.int32)
    sorted_block, _ = largest(block, block.capacity)
    is_sent = jnp.arange(block.capacity) < h
    check_local(codec, "gather='bruck'")
    rounded = codec.rounded(sorted_block, size)
    unsent = sorted_block.values - jnp.where(is_sent, rounded, 0)
    discarded = to_dense(sorted_block._replace(values=unsent), size)
    leaving = SparseStream(
        jnp.where(is_sent, sorted_block.indices, size), jnp.where(is_sent, rounded, 0)
    )

    def gather(capacity: int) -> Array:
        message = codec.encode(SparseStream(*(x[:capacity] for x in leaving)), size)
        messages = bruck_all_gather(message, across)
        decode = lambda words: codec.decode(words, capacity, size, block.values.dtype)
        arrived = jax.vmap(decode)(messages)
        # Add one message after another: within one scatter, duplicates have no order.
        add_next = lambda i, total: add_to(total, jax.tree.map(lambda x: x[i], arrived))
        nothing = jnp.zeros_like(block.values, shape=(size,))
        return jax.lax.fori_loop(0, across.size, add_next, nothing)

    branches = [functools.partial(gather, capacity) for capacity in rungs]
    rung = jnp.sum(h > jnp.array(rungs[:-1], jnp.int32)) if len(rungs) > 1 else 0
    total = jax.lax.switch(rung, branches)
    kept = select(total, k)
    cut = total.at[kept.indices].set(0, mode="drop")
    entries = jnp.count_nonzero(total).astype(jnp.int32)
    return kept, discarded + cut / across.size, entries
