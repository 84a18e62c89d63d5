"""Ok-Topk: sums of balanced regions above reused thresholds (Li and Hoefler, PPoPP 2022)."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxsparse import codecs, select
from jaxsparse.collectives import wire
from jaxsparse.collectives.kth_largest import kth_largest
from jaxsparse.collectives.offers import about_top_k
from jaxsparse.collectives.regions import Regions, bucket_count, into_regions
from jaxsparse.collectives.spardl import Select, largest
from jaxsparse.select.compaction import compact_ranked
from jaxsparse.select.counting import count_where
from jaxsparse.stream import SparseStream, add_to, from_dense
from jaxsparse.tiles import zeros


class Agreed(NamedTuple):
    """What workers agree on for many steps. Equal on all workers."""

    place: Int[Array, " buckets"]  # int32: of each bucket in the regions of so many
    workers: Int[Array, ""]  # int32
    threshold: Float[Array, ""]  # of the sums' magnitudes
    is_crowded: Bool[Array, ""]  # offers found no room: draw new regions
    is_stale: Bool[Array, ""]  # too many or too few sums passed: take a new threshold

    @classmethod
    def start(cls, size: int) -> "Agreed":
        """Before the first step, which draws regions and takes a threshold."""
        place = jnp.arange(bucket_count(size), dtype=jnp.int32)
        return cls(place, jnp.int32(0), jnp.float32(0), jnp.bool_(True), jnp.bool_(True))


class OkTopk(NamedTuple):
    """Outcome of `ok_topk`."""

    mean: Float[Array, " d"]  # of the sums that were delivered; equal on all workers
    residual: Float[Array, " d"]  # what this worker has to feed back
    sent: Bool[Array, " d"]  # entries of its own that `mean` contains
    delivered: Int[Array, ""]  # int32: elements of `mean` other than 0
    overflow: Int[Array, ""]  # int32: entries, of all workers, that found no room
    agreed: Agreed


def ok_topk(
    x: Float[Array, " d"],
    k: int,
    agreed: Agreed,
    *,
    refresh: Bool[Array, ""] | bool,
    rebalance: Bool[Array, ""] | bool,
    axis_name: str | None,
    codec: codecs.Codec = codecs.COO,
    capacity_factor: float = 2.0,
    top_k: Select = about_top_k,
) -> OkTopk:
    """Means of workers' k largest entries, as far as their sums are above a threshold.

    Workers offer their entries to the owners of W regions that hold about equally many; owners add
    them up, hand on the large sums so that all workers have equally many, and these are gathered.
    The threshold is that of the k largest sums when it is taken, and is reused then. (The paper
    reuses workers' own thresholds, too, for a step in which selecting is a pass over x; here they
    are taken anew from samples, which takes less than that pass.)

    Each message has room for C = ceil(capacity_factor k / W) entries, or those of a region if they
    are fewer. Offers that find none stay with their workers; if too many sums pass the threshold,
    each owner delivers its share of what there is room for, the largest ones. Both are counted.
    A step with old regions and threshold takes 6 C (W - 1) words in COO: capacity_factor times the
    published 6 k (W - 1) / W.

    Args:
        x: float32.
        k: entries offered by each worker, more or less as `top_k` does it, and wanted in the
            result.
        agreed: from the step before.
        refresh: whether to take a new threshold even if the old one served; equal on all workers.
        rebalance: whether to draw new regions even if the old ones served; equal on all workers.
        axis_name: whose workers take part.
        codec: of the messages.
        capacity_factor: room in messages. The smaller, the fewer words and the more overflow; with
            a factor of 1 offers of more than k entries never fit.
        top_k: picks the entries.
    """
    workers, size = wire.axis_size(axis_name), x.size
    regions = Regions(size, workers)
    room = _room(k, regions, capacity_factor)
    limit = workers * room
    offers = _in_order(x, top_k(x, k))
    starts = regions.starts(offers.indices)
    place = jax.lax.cond(
        agreed.is_crowded | rebalance | (agreed.workers != workers),
        lambda: regions.draw(wire.psum(starts[1:] - starts[:-1], axis_name)),
        lambda: agreed.place,
    )

    # To the owners.
    bins, fits, crowded_out = into_regions(offers, starts, place, regions, room)
    arrived = _exchange(bins, regions.length, axis_name, codec)
    sums = _added(jnp.zeros_like(x, shape=(regions.length,)), arrived)
    threshold = jax.lax.cond(
        agreed.is_stale | refresh,
        lambda: kth_largest(sums, k, min(regions.length, limit), axis_name),
        lambda: agreed.threshold,
    )

    # From the owners, evenly to all: the sum at place p of all goes to worker p // room.
    count = _count_large(sums, threshold)
    all_counts = wire.all_gather(count, axis_name)
    passing = jnp.sum(all_counts)
    share = jnp.minimum(1.0, limit / jnp.maximum(passing, 1).astype(jnp.float32))
    # A little more than the share: rounded down, equal counts could all become 0. What then comes
    # to lie past the limit is not held.
    share = all_counts.astype(jnp.float32) * share * (1 + 2.0**-20)
    quotas = jnp.floor(share).astype(jnp.int32)
    quotas = jnp.where(passing <= limit, all_counts, quotas)
    large = _large(sums, threshold, count, room, limit, passing > limit)
    mine = wire.axis_index(axis_name)
    first = jnp.minimum((jnp.cumsum(quotas) - quotas)[mine], limit)
    rank = jnp.arange(limit, dtype=jnp.int32)
    is_held = (large.indices < regions.length) & (rank < quotas[mine]) & (first + rank < limit)
    positions = jnp.where(is_held, mine * regions.length + large.indices, regions.positions)
    rounded = codec.rounded(large.values)
    spread = SparseStream(
        _shifted(positions, first, regions.positions),
        _shifted(jnp.where(is_held, rounded, 0), first, 0),
    )
    spread = SparseStream(*(part.reshape(workers, room) for part in spread))
    held = _exchange(spread, regions.positions, axis_name, codec)
    # A slot is filled by one worker, if any; but the codec may have moved it.
    held = _front(SparseStream(held.indices.ravel(), held.values.ravel()), room, regions.positions)

    left_out = count - jnp.count_nonzero(is_held).astype(jnp.int32)
    report = jnp.stack([crowded_out, left_out]).astype(jnp.uint32)
    messages = jnp.concatenate([codec.encode(held, regions.positions), report])
    messages = wire.all_gather(messages, axis_name)
    crowded_out, left_out = jnp.sum(messages[:, -2:], axis=0).astype(jnp.int32)
    decode = lambda words: codec.decode(words[:-2], room, regions.positions, x.dtype)
    streams = jax.vmap(decode)(messages)
    means = streams.values.ravel() / workers
    means = jnp.where(jnp.isfinite(means), means, 0)
    elements = regions.elements(place, streams.indices.ravel())
    mean = jnp.zeros((size,), x.dtype).at[elements].set(means, mode="drop")
    delivered = jnp.sum((means != 0) & (elements < size), dtype=jnp.int32)

    # All that differs from x is where entries are: no pass over all of it.
    arrives = lambda indices: mean.at[indices].get(mode="fill", fill_value=0) != 0
    index = jnp.where(fits & arrives(offers.indices), offers.indices, size)
    residual = x.at[index].set(offers.values - codec.rounded(offers.values), mode="drop")
    sent = jnp.zeros_like(x, jnp.bool_).at[index].set(True, mode="drop")
    if not codec.is_exact:
        index = regions.elements(place, positions)
        lost = jnp.where(arrives(index), large.values - rounded, 0)
        residual = residual.at[index].add(lost, mode="drop")
    is_stale = (passing > limit) | (2 * passing < k)
    many = zeros((), jnp.int32, (agreed.workers,)) + workers
    return OkTopk(
        mean,
        residual,
        sent,
        delivered,
        crowded_out + left_out,
        Agreed(place, many, threshold, crowded_out > 0, is_stale),
    )


def _added(sums: Array, arrived: SparseStream) -> Array:
    """One worker's entries after the other's: within one scatter a GPU would add in any order."""

    def add(sums: Array, row: SparseStream) -> tuple[Array, None]:
        return add_to(sums, row), None

    return jax.lax.scan(add, sums, arrived)[0]


def _room(k: int, regions: Regions, capacity_factor: float) -> int:
    return min(regions.length, math.ceil(capacity_factor * k / regions.workers))


def _in_order(x: Array, stream: SparseStream) -> SparseStream:
    """The entries of `x` other than 0 in increasing order of their indices."""
    indices = jnp.where(stream.values != 0, stream.indices, x.size)
    is_sorted = jnp.all(indices[1:] >= indices[:-1])
    # XLA on CPU sorts indices alone 9 times faster than with values.
    return jax.lax.cond(
        is_sorted,
        lambda: SparseStream(indices, stream.values),
        lambda: from_dense(x, jnp.sort(indices)),
    )


def _is_large(sums: Array, threshold: Array) -> Array:
    return (jnp.abs(sums) >= threshold) & (sums != 0)


def _count_large(sums: Array, threshold: Array) -> Array:
    return count_where(sums, lambda sums: _is_large(sums, threshold))


def _large(
    sums: Array, threshold: Array, count: Array, room: int, limit: int, too_many: Array
) -> SparseStream:
    """Sums that reach the threshold, in `limit` slots.

    In increasing order of their indices; or nearly the largest of them, in falling order, if of all
    workers' there are too many.
    """

    # A pass over all slots takes longer than over the sums, and few owners fill more than `room`.
    def reaching() -> SparseStream:
        def more(i: Array, indices: Array) -> Array:
            # Together, or XLA takes the mask out of the loop, and stores it.
            again, turn = jax.lax.optimization_barrier((sums, i))
            mask = lambda sums, _: _is_large(sums, threshold)
            found = compact_ranked(again, mask, 1, room, first=turn * room)
            return jnp.where(jnp.arange(limit // room)[:, None] == i, found[None], indices)

        empty = zeros((limit // room, room), jnp.int32, (sums, count)) + sums.size
        turns = jnp.minimum(-(-count // room), limit // room)
        return from_dense(sums, jax.lax.fori_loop(0, turns, more, empty).ravel())

    def the_largest() -> SparseStream:
        capacity = min(sums.size, limit)
        stream = select.fast_top_k(jnp.where(_is_large(sums, threshold), sums, 0), capacity)
        index = jnp.where(stream.values != 0, stream.indices, sums.size)
        stream = largest(SparseStream(index, stream.values), capacity)[0]
        empty = limit - capacity
        indices = jnp.pad(stream.indices, (0, empty), constant_values=sums.size)
        return SparseStream(indices, jnp.pad(stream.values, (0, empty)))

    return jax.lax.cond(too_many, the_largest, reaching)


def _shifted(x: Array, by: Array, empty: int) -> Array:
    """`x` moved up by so many slots, of which what is moved past the end is empty."""
    filled = jnp.full((2 * x.size,), empty, x.dtype)
    return jax.lax.dynamic_update_slice(filled, x, (by,))[: x.size]


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
