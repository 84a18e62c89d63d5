"""SparDL's collectives (Zhao et al., ICDE 2024), which never exceed a budget of k entries a block.

Spar-Reduce-Scatter (section III-B) cuts each block before it is sent. Spar-All-Gather (III-D) sums
blocks over teams: R-SAG for a power of two of teams, B-SAG for any number.

Spar-Reduce-Scatter works in one buffer: nothing is added to a block that has left, so the sums end
as what was left behind of each, and what arrives is added entry by entry. B-SAG's step never gets
shorter than its first: halved at each turn it would end at nothing while h is right.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxsparse import codecs
from jaxsparse.collectives.wire import Group, bruck_all_gather
from jaxsparse.stream import SparseStream, add, add_to, to_dense

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
        sums = _add(sums, leaving, cut.indices, -rounded)
        sums = _add(sums, (rank + jnp.arange(count)) % n, *arrived)
        selected = selected.at[leaving[:, None], cut.indices].set(True)
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


# B-SAG's messages have one of this many capacities, evenly spaced on a logarithmic scale.
_RUNGS = 4


def largest(stream: SparseStream, k: int) -> tuple[SparseStream, SparseStream]:
    """The k entries of largest magnitude, in falling order, and the stream without them."""
    k = min(k, stream.capacity)
    _, slots = jax.lax.top_k(jnp.abs(stream.values), k)
    kept = SparseStream(stream.indices[slots], stream.values[slots])
    return kept, stream._replace(values=stream.values.at[slots].set(0, unique_indices=True))


def recursive(
    block: SparseStream, size: int, k: int, teams: Group, *, codec: codecs.Codec
) -> tuple[SparseStream, Float[Array, " m"]]:
    """R-SAG: recursive doubling over teams, cutting to the k largest after each exchange.

    After exchange t, 2^(t+1) workers hold the same sum and cut the same entries: each keeps
    2^-(t+1) of these. (The paper's "half" is right for two teams; with more of them it would feed
    back more than was lost.)

    Rounds: log2(teams). Words received: log2(teams) codec.words(k, size).

    Args:
        block: this team's sum, at most k entries.
        size: of the block, m.
        k: entries kept at each stage.
        teams: the workers of equal rank in each team.
        codec: of the messages.

    Returns:
        The sum over teams, cut, equal on the workers of equal rank in all teams; and this worker's
        share of what was cut off and rounded away.

    Raises:
        ValueError: the number of teams is not a power of two.
    """
    if teams.size & (teams.size - 1):
        raise ValueError(
            f"teams={teams.size} is not a power of two, which gather='recursive' needs: use "
            "gather='bruck'"
        )
    discarded = jnp.zeros_like(block.values, shape=(size,))
    holders = 1
    while holders < teams.size:
        rounded = codec.rounded(block, size)
        lost = block._replace(values=(block.values - rounded) / holders)
        discarded = add_to(discarded, lost)
        message = teams.exchange(codec.encode(block, size), holders)
        block = block._replace(values=rounded)
        arrived = codec.decode(message, block.capacity, size, block.values.dtype)
        block, cut = largest(add(block, arrived, size), k)
        discarded = add_to(discarded, cut._replace(values=cut.values / (2 * holders)))
        holders *= 2
    return block, discarded


class Adaptation(NamedTuple):
    """B-SAG's state: how many entries a worker sends. Equal on all workers."""

    h: Float[Array, ""]
    step: Float[Array, ""]
    flag: Bool[Array, ""]  # the last adjustment kept its direction

    @classmethod
    def start(cls, k: int, teams: int) -> "Adaptation":
        """As Alg. 2 begins, for k entries wanted after the gather."""
        h = max(1, k / teams)
        return cls(jnp.float32(h), jnp.float32(0.01 * (k - k / teams)), jnp.bool_(False))

    def adapt(self, entries: Float[Array, ""], k: int, teams: int) -> "Adaptation":
        """Alg. 2: moves h so that `entries`, those after the gather, approach k.

        The step doubles at every second adjustment in the same direction and is halved and turned
        when the direction is wrong. (The listing is followed; the text has the signs reversed.)
        h is kept between k / teams and k, at which teams overlap not at all or wholly. So are steps
        between the first one, or they would halve to nothing while h is right, and that range, or
        they would grow without limit while h is at its end.
        """
        onward = (entries > k) != (self.step > 0)
        step = jnp.where(onward, jnp.where(self.flag, 2 * self.step, self.step), -self.step / 2)
        step = Adaptation(self.h, step, onward & ~self.flag).within(k, teams).step
        return Adaptation(self.h + step, step, onward & ~self.flag).within(k, teams)

    def within(self, k: int, teams: int) -> "Adaptation":
        """With h and the length of the step kept between their bounds, see `adapt`."""
        shortest = 0.01 * (k - k / teams)
        length = jnp.clip(jnp.abs(self.step), shortest, k - k / teams)
        step = jnp.where(self.step > 0, length, -length)
        return Adaptation(jnp.clip(self.h, max(1, k / teams), k), step, self.flag)


def bruck(
    block: SparseStream,
    size: int,
    k: int,
    teams: Group,
    state: Adaptation,
    *,
    select: Select,
    codec: codecs.Codec,
) -> tuple[SparseStream, Float[Array, " m"], Int[Array, ""]]:
    """B-SAG: each worker sends its h largest entries to all teams, and the sum is cut to k.

    The messages' capacity is the lowest of a ladder of 4 between k / teams and k that holds h
    entries, chosen at run time, so the words that travel follow h.

    Rounds: ceil(log2(teams)). Words received: (teams - 1) codec.words(capacity, size).

    Args:
        block: this team's sum, at most k entries.
        size: of the block, m.
        k: entries kept of the sum over teams.
        teams: the workers of equal rank in each team.
        state: h, equal on all workers.
        select: picks the k largest entries of the sum.
        codec: of the messages.

    Returns:
        As `recursive`, and int32: how many entries the sum had before it was cut.
    """
    rungs = ladder(k, teams.size)
    h = jnp.round(state.h).astype(jnp.int32)
    sorted_block, _ = largest(block, block.capacity)
    is_sent = jnp.arange(block.capacity) < h
    codecs.check_local(codec, "gather='bruck'")
    rounded = codec.rounded(sorted_block, size)
    unsent = sorted_block.values - jnp.where(is_sent, rounded, 0)
    discarded = to_dense(sorted_block._replace(values=unsent), size)
    leaving = SparseStream(
        jnp.where(is_sent, sorted_block.indices, size), jnp.where(is_sent, rounded, 0)
    )

    def gather(capacity: int) -> Array:
        message = codec.encode(SparseStream(*(x[:capacity] for x in leaving)), size)
        messages = bruck_all_gather(message, teams)
        decode = lambda words: codec.decode(words, capacity, size, block.values.dtype)
        total = to_dense(decode(messages[0]), size)
        # One after the other: within one scatter, duplicates have no order.
        for i in range(1, teams.size):
            total = add_to(total, decode(messages[i]))
        return total

    branches = [lambda capacity=capacity: gather(capacity) for capacity in rungs]
    rung = jnp.sum(h > jnp.array(rungs[:-1], jnp.int32)) if len(rungs) > 1 else 0
    total = jax.lax.switch(rung, branches)
    kept = select(total, k)
    cut = total.at[kept.indices].set(0, mode="drop")
    entries = jnp.count_nonzero(total).astype(jnp.int32)
    return kept, discarded + cut / teams.size, entries


def ladder(k: int, teams: int) -> list[int]:
    """Capacities of B-SAG's messages, from k / teams to k."""
    exponents = [1 - i / (_RUNGS - 1) for i in range(_RUNGS)]
    return sorted({math.ceil(k * teams**-e * (1 - 1e-12)) for e in exponents})
