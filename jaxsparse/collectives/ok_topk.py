"""Ok-Topk: sums of balanced regions above reused thresholds (Li and Hoefler, PPoPP 2022)."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxsparse import codecs, cost, select
from jaxsparse.collectives import wire
from jaxsparse.collectives.split import into_bins
from jaxsparse.stream import SparseStream, from_dense

# Regions end at multiples of 1 / _BUCKETS of the vector, by whose counts they are balanced.
_BUCKETS = 1024
# Of a magnitude, settled in each round of the search for the threshold of the sums.
_BITS = 4


class Regions(NamedTuple):
    """What workers agree on for many steps. Equal on all workers."""

    counts: Int[Array, " buckets"]  # int32: selected entries of all workers
    threshold: Float[Array, ""]  # of the sums' magnitudes


class OkTopk(NamedTuple):
    """Outcome of `ok_topk`."""

    total: Float[Array, " d"]  # equal on all workers
    residual: Float[Array, " d"]  # what this worker has to feed back
    sent: Bool[Array, " d"]  # entries of its own that `total` contains
    overflow: Int[Array, ""]  # int32: entries, of all workers, that found no room
    local_threshold: Float[Array, ""]
    regions: Regions


def ok_topk(
    x: Float[Array, " d"],
    k: int,
    local_threshold: Float[Array, ""],
    regions: Regions,
    *,
    refresh: Bool[Array, ""],
    rebalance: Bool[Array, ""],
    axis_name: str | None,
    codec: codecs.Codec = codecs.COO,
    capacity_factor: float = 2.0,
) -> OkTopk:
    """Sums of the entries above a local threshold, if the sum is above a global one.

    Workers send their entries to the owners of W regions that hold about equally many; owners add
    them up, hand on the large sums so that all workers have equally many, and these are gathered.
    Thresholds are those of the k largest, taken exactly when `refresh` and reused otherwise.

    Each message has room for C = ceil(capacity_factor k / W) entries. Entries that find none, at
    any stage, stay in the residuals of those who have them, and are counted. Rounds and words: see
    `ok_topk_traffic`.

    Args:
        x: float32.
        k: entries wanted in the result.
        local_threshold: this worker's, from the step before.
        regions: from the step before.
        refresh: whether to take new thresholds; equal on all workers.
        rebalance: whether to draw new regions; equal on all workers.
        axis_name: whose workers take part.
        codec: of the messages.
        capacity_factor: room in messages. The smaller, the fewer words and the more overflow.
    """
    workers, size = wire.axis_size(axis_name), x.size
    room = min(size, math.ceil(capacity_factor * k / workers))
    magnitude = jnp.abs(x)
    local_threshold = wire.varying(local_threshold, axis_name)
    local_threshold = jax.lax.cond(
        refresh, lambda: jax.lax.top_k(magnitude, k)[0][-1], lambda: local_threshold
    )
    is_chosen = (magnitude >= local_threshold) & (x != 0)
    chosen = from_dense(x, select.compact(is_chosen, min(size, workers * room)))
    counts = jax.lax.cond(
        rebalance,
        lambda: wire.psum(_histogram(chosen.indices, size), axis_name),
        lambda: regions.counts,
    )

    # To the owners.
    owner = _owners(counts, workers)[_bucket(chosen, size)]
    owner = jnp.where(chosen.indices < size, owner, workers)
    bins, fits = into_bins(chosen, owner, workers, room, empty=size)
    offered = _exchange(bins, size, axis_name, codec)
    sums = jnp.zeros_like(x).at[offered.indices.ravel()].add(offered.values.ravel(), mode="drop")
    threshold = jax.lax.cond(
        refresh, lambda: _kth_largest(sums, k, axis_name), lambda: regions.threshold
    )

    # From the owners, evenly to all: the sum at position p of all goes to worker p // room.
    is_large = (jnp.abs(sums) >= threshold) & (sums != 0)
    report = jnp.stack(
        [
            jnp.count_nonzero(is_large).astype(jnp.uint32),
            (jnp.count_nonzero(is_chosen) - jnp.count_nonzero(fits)).astype(jnp.uint32),
        ]
    )
    reports = wire.all_gather(report, axis_name).astype(jnp.int32)
    large = from_dense(sums, select.compact(is_large, min(size, workers * room)))
    before = jnp.cumsum(reports[:, 0]) - reports[:, 0]
    position = before[wire.axis_index(axis_name)] + jnp.arange(large.capacity, dtype=jnp.int32)
    is_held = (large.indices < size) & (position < workers * room)
    slot = jnp.where(is_held, position, workers * room)
    rounded = codec.rounded(large.values)
    spread = SparseStream(
        jnp.full((workers * room,), size, jnp.int32).at[slot].set(large.indices, mode="drop"),
        jnp.zeros((workers * room,), x.dtype).at[slot].set(rounded, mode="drop"),
    )
    spread = SparseStream(*(part.reshape(workers, room) for part in spread))
    held = _exchange(spread, size, axis_name, codec)
    # A slot is filled by one worker, if any; but the codec may have moved it.
    held = _front(SparseStream(held.indices.ravel(), held.values.ravel()), room, size)

    messages = wire.all_gather(codec.encode(held, size), axis_name)
    decode = lambda words: codec.decode(words, room, size, x.dtype)
    streams = jax.vmap(decode)(messages)
    total = jnp.zeros((size,), x.dtype)
    total = total.at[streams.indices.ravel()].add(streams.values.ravel(), mode="drop")
    total = jnp.where(jnp.isfinite(total), total, 0)

    arrived = total != 0
    offered_here = jnp.where(fits, chosen.indices, size)
    sent = arrived & jnp.zeros_like(arrived).at[offered_here].set(True, mode="drop")
    residual = jnp.where(sent, 0, x)
    if not codec.is_exact:
        lost = (
            jnp.zeros_like(x)
            .at[offered_here]
            .add(chosen.values - codec.rounded(chosen.values), mode="drop")
        )
        lost = lost.at[large.indices].add(large.values - rounded, mode="drop")
        residual += jnp.where(arrived, lost, 0)
    surplus = jnp.maximum(jnp.sum(reports[:, 0]) - workers * room, 0)
    overflow = (jnp.sum(reports[:, 1]) + surplus).astype(jnp.int32)
    return OkTopk(total, residual, sent, overflow, local_threshold, Regions(counts, threshold))


def ok_topk_traffic(
    k: int,
    size: int,
    workers: int,
    codec: codecs.Codec = codecs.COO,
    capacity_factor: float = 2.0,
) -> cost.Traffic:
    """Of a step between refreshes: 2 (W - 1) + 2 ceil(log2 W) rounds, 6 C (W - 1) words in COO.

    With C = capacity_factor k / W that is capacity_factor times the published 6 k (W - 1) / W,
    which holds as long as regions and counts are balanced; here it is a bound, not an average.
    """
    room = min(size, math.ceil(capacity_factor * k / workers))
    words = (workers - 1) * (3 * codec.words(room, size) + 2)
    return cost.Traffic(2 * (workers - 1) + 2 * (workers - 1).bit_length(), words)


def start(size: int) -> Regions:
    """Before the first step, which refreshes and rebalances."""
    return Regions(jnp.zeros((min(size, _BUCKETS),), jnp.int32), jnp.float32(0))


def _bucket(stream: SparseStream, size: int) -> Array:
    return jnp.minimum(stream.indices, size - 1) // -(-size // min(size, _BUCKETS))


def _histogram(indices: Array, size: int) -> Array:
    buckets = min(size, _BUCKETS)
    number = jnp.where(indices < size, indices // -(-size // buckets), buckets)
    return jnp.zeros((buckets,), jnp.int32).at[number].add(1, mode="drop")


def _owners(counts: Array, workers: int) -> Array:
    """Of each bucket, so that owners' buckets are consecutive and hold about as many entries."""
    weights = counts.astype(jnp.float32)
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


def _kth_largest(sums: Array, k: int, axis_name: str | None) -> Array:
    """The k-th largest magnitude of all workers' sums; 0 if there are fewer than k."""
    magnitude = jax.lax.bitcast_convert_type(jnp.abs(sums), jnp.uint32)
    steps = jnp.arange(1, 2**_BITS, dtype=jnp.uint32)

    def settle(i, found):
        shift = (32 - _BITS * (i + 1)).astype(jnp.uint32)
        trials = found | (steps << shift)
        count = lambda trial: jnp.sum(magnitude >= trial, dtype=jnp.int32)
        counts = wire.psum(jax.lax.map(count, trials), axis_name)
        best = jnp.sum(counts >= k).astype(jnp.uint32)  # counts fall from trial to trial
        return found | (best << shift)

    found = jax.lax.fori_loop(0, 32 // _BITS, settle, jnp.uint32(0))
    return jax.lax.bitcast_convert_type(found, jnp.float32)
