"""Ok-Topk: sums of balanced regions above reused thresholds (Li and Hoefler, PPoPP 2022)."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxsparse import codecs, network, select
from jaxsparse.collectives import wire
from jaxsparse.collectives.spar_all_gather import largest
from jaxsparse.collectives.spar_reduce_scatter import Select
from jaxsparse.collectives.split import into_bins
from jaxsparse.stream import SparseStream, from_dense

# Regions end at multiples of 1 / _BUCKETS of the vector, by whose counts they are balanced.
_BUCKETS = 1024
# Of a magnitude, settled in each round of the search for the threshold of the sums.
_BITS = 8


class Regions(NamedTuple):
    """What workers agree on for many steps. Equal on all workers."""

    counts: Int[Array, " buckets"]  # int32: offers of all workers, by place
    threshold: Float[Array, ""]  # of the sums' magnitudes
    is_crowded: Bool[Array, ""]  # offers found no room: draw new regions
    is_stale: Bool[Array, ""]  # too many or too few sums passed: take a new threshold

    @classmethod
    def start(cls, size: int) -> "Regions":
        """Before the first step, which draws regions and takes a threshold."""
        counts = jnp.zeros((min(size, _BUCKETS),), jnp.int32)
        return cls(counts, jnp.float32(0), jnp.bool_(True), jnp.bool_(True))


class OkTopk(NamedTuple):
    """Outcome of `ok_topk`."""

    total: Float[Array, " d"]  # equal on all workers
    residual: Float[Array, " d"]  # what this worker has to feed back
    sent: Bool[Array, " d"]  # entries of its own that `total` contains
    overflow: Int[Array, ""]  # int32: entries, of all workers, that found no room
    regions: Regions


def ok_topk(
    x: Float[Array, " d"],
    k: int,
    regions: Regions,
    *,
    refresh: Bool[Array, ""] | bool,
    rebalance: Bool[Array, ""] | bool,
    axis_name: str | None,
    codec: codecs.Codec = codecs.COO,
    capacity_factor: float = 2.0,
    top_k: Select = select.fast_top_k,
) -> OkTopk:
    """Sums of workers' k largest entries, as far as they are above a threshold.

    Workers offer their entries to the owners of W regions that hold about equally many; owners add
    them up, hand on the large sums so that all workers have equally many, and these are gathered.
    The threshold is that of the k largest sums when it is taken, and is reused then. (The paper
    reuses workers' own thresholds, too; here selecting k entries takes no longer than comparing
    with one, and offers never exceed k.)

    Each message has room for C = ceil(capacity_factor k / W) entries. Offers that find none stay
    with their workers; if too many sums pass the threshold, each owner delivers its share of what
    there is room for, the largest ones. Both are counted. Rounds and words: see
    `ok_topk_traffic`.

    Args:
        x: float32.
        k: entries offered by each worker, and wanted in the result.
        regions: from the step before.
        refresh: whether to take a new threshold even if the old one served; equal on all workers.
        rebalance: whether to draw new regions even if the old ones served; equal on all workers.
        axis_name: whose workers take part.
        codec: of the messages.
        capacity_factor: room in messages. The smaller, the fewer words and the more overflow.
        top_k: picks the entries.
    """
    workers, size = wire.axis_size(axis_name), x.size
    room = min(size, math.ceil(capacity_factor * k / workers))
    offers = top_k(x, k)
    offers = offers._replace(indices=jnp.where(offers.values != 0, offers.indices, size))
    counts = jax.lax.cond(
        regions.is_crowded | rebalance,
        lambda: wire.psum(_histogram(offers.indices, size), axis_name),
        lambda: regions.counts,
    )

    # To the owners.
    owner = _owners(counts, workers)[_bucket(offers, size)]
    owner = jnp.where(offers.indices < size, owner, workers)
    bins, fits = into_bins(offers, owner, workers, room, empty=size)
    arrived = _exchange(bins, size, axis_name, codec)
    sums = jnp.zeros_like(x).at[arrived.indices.ravel()].add(arrived.values.ravel(), mode="drop")
    threshold = jax.lax.cond(
        regions.is_stale | refresh,
        lambda: _kth_largest(sums, k, min(size, workers * room), axis_name),
        lambda: regions.threshold,
    )

    # From the owners, evenly to all: the sum at position p of all goes to worker p // room.
    is_large = (jnp.abs(sums) >= threshold) & (sums != 0)
    count = jnp.count_nonzero(is_large).astype(jnp.int32)
    all_counts = wire.all_gather(count, axis_name)
    passing, limit = jnp.sum(all_counts), workers * room
    share = jnp.minimum(1.0, limit / jnp.maximum(passing, 1).astype(jnp.float32))
    quotas = jnp.floor(all_counts.astype(jnp.float32) * share).astype(jnp.int32)
    quotas = jnp.where(passing <= limit, all_counts, quotas)
    large = _largest(sums, is_large, min(size, limit), passing > limit)
    mine = wire.axis_index(axis_name)
    rank = jnp.arange(large.capacity, dtype=jnp.int32)
    position = (jnp.cumsum(quotas) - quotas)[mine] + rank
    is_held = (large.indices < size) & (rank < quotas[mine]) & (position < limit)
    slot = jnp.where(is_held, position, limit)
    rounded = codec.rounded(large.values)
    spread = SparseStream(
        jnp.full((limit,), size, jnp.int32).at[slot].set(large.indices, mode="drop"),
        jnp.zeros((limit,), x.dtype).at[slot].set(rounded, mode="drop"),
    )
    spread = SparseStream(*(part.reshape(workers, room) for part in spread))
    held = _exchange(spread, size, axis_name, codec)
    # A slot is filled by one worker, if any; but the codec may have moved it.
    held = _front(SparseStream(held.indices.ravel(), held.values.ravel()), room, size)

    crowded_out = jnp.sum(~fits & (offers.indices < size), dtype=jnp.int32)
    left_out = count - jnp.count_nonzero(is_held).astype(jnp.int32)
    report = jnp.stack([crowded_out, left_out]).astype(jnp.uint32)
    messages = jnp.concatenate([codec.encode(held, size), report])
    messages = wire.all_gather(messages, axis_name)
    crowded_out, left_out = jnp.sum(messages[:, -2:], axis=0).astype(jnp.int32)
    decode = lambda words: codec.decode(words[:-2], room, size, x.dtype)
    streams = jax.vmap(decode)(messages)
    total = jnp.zeros((size,), x.dtype)
    total = total.at[streams.indices.ravel()].add(streams.values.ravel(), mode="drop")
    total = jnp.where(jnp.isfinite(total), total, 0)

    delivered = total != 0
    offered_here = jnp.where(fits, offers.indices, size)
    sent = delivered & jnp.zeros_like(delivered).at[offered_here].set(True, mode="drop")
    residual = jnp.where(sent, 0, x)
    if not codec.is_exact:
        lost = offers.values - codec.rounded(offers.values)
        lost = jnp.zeros_like(x).at[offered_here].add(lost, mode="drop")
        lost = lost.at[large.indices].add(large.values - rounded, mode="drop")
        residual = jnp.where(delivered, residual + lost, residual)
    is_stale = (passing > limit) | (2 * passing < k)
    return OkTopk(
        total,
        residual,
        sent,
        crowded_out + left_out,
        Regions(counts, threshold, crowded_out > 0, is_stale),
    )


def _largest(sums: Array, is_large: Array, capacity: int, too_many: Array) -> SparseStream:
    """Those that are large, or nearly the largest of them in falling order if they are too many."""

    def those() -> SparseStream:
        return from_dense(sums, select.compact(is_large, capacity))

    def the_largest() -> SparseStream:
        stream = select.fast_top_k(jnp.where(is_large, sums, 0), capacity)
        index = jnp.where(stream.values != 0, stream.indices, sums.size)
        return largest(SparseStream(index, stream.values), capacity)[0]

    return jax.lax.cond(too_many, the_largest, those)


def ok_topk_traffic(
    k: int,
    size: int,
    workers: int,
    codec: codecs.Codec = codecs.COO,
    capacity_factor: float = 2.0,
) -> network.Traffic:
    """Of a step with old regions and threshold: 6 C (W - 1) words in COO, and 3 (W - 1) of counts.

    In 2 (W - 1) + 2 ceil(log2 W) rounds.

    With C = capacity_factor k / W that is capacity_factor times the published 6 k (W - 1) / W,
    which holds as long as regions and counts are balanced; here it is a bound, not an average.
    """
    room = min(size, math.ceil(capacity_factor * k / workers))
    words = (workers - 1) * (3 * codec.words(room, size) + 3)
    return network.Traffic(2 * (workers - 1) + 2 * (workers - 1).bit_length(), words)


def _bucket(stream: SparseStream, size: int) -> Array:
    return jnp.minimum(stream.indices, size - 1) // -(-size // min(size, _BUCKETS))


def _histogram(indices: Array, size: int) -> Array:
    buckets = min(size, _BUCKETS)
    number = jnp.where(indices < size, indices // -(-size // buckets), buckets)
    return jnp.zeros((buckets,), jnp.int32).at[number].add(1, mode="drop")


def _owners(counts: Array, workers: int) -> Array:
    """Of each bucket, so that owners' buckets are consecutive and hold about as many entries."""
    weights = jnp.where(jnp.any(counts > 0), counts, 1).astype(jnp.float32)
    middle = jnp.cumsum(weights) - weights / 2
    share = jnp.maximum(jnp.sum(weights), 1) / workers
    return jnp.minimum(middle / share, workers - 1).astype(jnp.int32)


def _exchange(
    rows: SparseStream, size: int, axis_name: str | None, codec: codecs.Codec
) -> SparseStream:
    capacity = rows.indices.shape[1]
    messages = jax.vmap(lambda row: codec.encode(row, size))(rows)
    messages = wire.all_to_all(messages, axis_name)
    return jax.vmap(lambda words: codec.decode(words, capacity, size, rows.values.dtype))(messages)


def _front(stream: SparseStream, capacity: int, size: int) -> SparseStream:
    """The entries, of which there are at most `capacity`, without the empty slots between them."""
    slots = select.compact(stream.indices < size, capacity)
    return SparseStream(
        stream.indices.at[slots].get(mode="fill", fill_value=size),
        stream.values.at[slots].get(mode="fill", fill_value=0),
    )


def _kth_largest(sums: Array, k: int, capacity: int, axis_name: str | None) -> Array:
    """The k-th largest magnitude of all workers' sums; 0 if there are fewer than k.

    Args:
        sums: of which this worker has at most `capacity` that are not 0.
        k: the rank.
        capacity: for as many words memory is read again and again.
        axis_name: whose workers take part.
    """
    entries = from_dense(sums, select.compact(sums != 0, capacity))
    magnitude = jax.lax.bitcast_convert_type(jnp.abs(entries.values), jnp.uint32)
    bins = 2**_BITS
    found, wanted = jnp.uint32(0), jnp.int32(k)
    for shift in range(32 - _BITS, -1, -_BITS):
        # Counted are those that begin like the one sought, as far as it is known.
        above = jnp.uint32(shift + _BITS)
        known = (magnitude >> above) == (found >> above) if shift + _BITS < 32 else magnitude >= 0
        digit = (magnitude >> jnp.uint32(shift)).astype(jnp.int32) % bins
        counts = jnp.zeros((bins,), jnp.int32).at[jnp.where(known, digit, bins)].add(1, mode="drop")
        from_here = jnp.cumsum(wire.psum(counts, axis_name)[::-1])[::-1]  # falls
        best = jnp.maximum(jnp.sum(from_here >= wanted, dtype=jnp.int32) - 1, 0)
        wanted -= jnp.where(best + 1 < bins, from_here[jnp.minimum(best + 1, bins - 1)], 0)
        found |= best.astype(jnp.uint32) << jnp.uint32(shift)
    return jax.lax.bitcast_convert_type(found, jnp.float32)
