"""Ok-Topk: sums of balanced regions above reused thresholds (Li and Hoefler, PPoPP 2022)."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxsparse import codecs, select
from jaxsparse.collectives import wire
from jaxsparse.collectives.regions import Regions, bin_count, by_owner
from jaxsparse.collectives.spardl import Select, largest
from jaxsparse.platforms import magnitude_bits, to_bits, zeros
from jaxsparse.select.compaction import first_of_ranges, running_sum
from jaxsparse.select.thresholds import EXACT_PASSES, bisection, sample_size
from jaxsparse.stream import SparseStream, add_to, from_dense, to_dense

# Slots for each of the k wanted entries, so that more than they hold reach a sampled threshold in
# one of some thousand samples only.
_SLOTS_PER_K = 1.5
# Samples are read once for each bit of a magnitude, which takes a while from this size on.
_READS = 32
_LARGE = 2**17
# Bits of a magnitude that each round of the search for a threshold settles.
_DIGIT_BITS = 8


class Agreed(NamedTuple):
    """What workers agree on for many steps. Equal on all workers."""

    place: Int[Array, " bins"]  # int32: of each bin in the regions of so many
    workers: Int[Array, ""]  # int32
    threshold: Float[Array, ""]  # of the sums' magnitudes
    is_crowded: Bool[Array, ""]  # entries found no room: draw new regions
    is_stale: Bool[Array, ""]  # too many or too few sums passed: take a new threshold

    @classmethod
    def start(cls, size: int) -> "Agreed":
        """Before the first step, which draws regions and takes a threshold."""
        place = jnp.arange(bin_count(size), dtype=jnp.int32)
        return cls(place, jnp.int32(0), jnp.float32(0), jnp.bool_(True), jnp.bool_(True))


class OkTopk(NamedTuple):
    """Outcome of `ok_topk`."""

    mean: Float[Array, " d"]  # of the sums that were delivered; equal on all workers
    own: SparseStream  # where it selected, what this worker has to feed back; elsewhere that is x
    sent: Bool[Array, " n"]  # which of these entries `mean` contains
    lost: tuple[SparseStream, ...]  # what its rounding took from sums, to feed back as well
    delivered: Int[Array, ""]  # int32: elements of `mean` other than 0
    overflow: Int[Array, ""]  # int32: entries, of all workers, that found no room
    agreed: Agreed


class _Search(NamedTuple):
    turn: Int[Array, ""]  # int32
    is_done: Bool[Array, ""]
    indices: Int[Array, " room"]


def about_top_k(x: Float[Array, " d"], k: int) -> SparseStream:
    """The elements that reach a sampled threshold: on average k of them, k / 2 to 3 k / 2 + 1.

    Where more or fewer do, as among many that are equal, those above the k-th largest itself; if
    they are fewer than k / 2, those at it as well, until there are k. Where sampling a large vector
    would take longer, as for k below 2000, `select.fast_top_k` takes k. Slots without an entry have
    index d and value 0.

    Args:
        x: float32, without NaN.
        k: 1 <= k <= d.
    """
    if x.size >= _LARGE and _READS * sample_size(x.size, k) > x.size:
        return select.fast_top_k(x, k)
    capacity = min(int(_SLOTS_PER_K * k) + 1, x.size)
    sampled = to_bits(select.sampled_threshold(x, k))

    # A loop, so that either threshold's entries are found by the same code, compiled once.
    def search(last: _Search) -> _Search:
        is_exact = last.turn > 0
        threshold = jax.lax.cond(
            is_exact, lambda: bisection(x, k, EXACT_PASSES)[0], lambda: sampled
        )
        at = jnp.maximum(threshold, jnp.uint32(1))  # without zeros
        above = jnp.where(is_exact, threshold + jnp.uint32(1), at)
        indices = first_of_ranges(
            x, (above, at), capacity + 1, key=magnitude_bits, enough=(k + 1) // 2
        )
        too_few = (indices[(k - 1) // 2] == x.size) & (threshold > 0)
        too_many = indices[capacity] < x.size
        # More than k reach the exact threshold only if several are at it.
        is_over = is_exact & (jnp.arange(capacity) >= k)
        indices = jnp.where(is_over, x.size, indices[:capacity])
        return _Search(last.turn + 1, ~(too_few | too_many), indices)

    none = zeros((capacity,), jnp.int32, (x, sampled))
    start = _Search(jnp.int32(0), zeros((), jnp.bool_, (x, sampled)), none)
    found = jax.lax.while_loop(lambda last: ~last.is_done & (last.turn < 2), search, start)
    return from_dense(x, found.indices)


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

    Workers send their entries to the owners of W regions that hold about equally many; owners add
    them up, hand on the large sums so that all workers have equally many, and these are gathered.
    The threshold is that of the k largest sums when it is taken, and is reused then. (The paper
    reuses workers' own thresholds, too, for a step in which selecting is a pass over x; here they
    are taken anew from samples, which takes less than that pass.)

    Each message has room for C = ceil(capacity_factor k / W) entries, or those of a region if they
    are fewer. Entries that find none stay with their workers; if too many sums pass the threshold,
    each owner delivers its share of what there is room for, the largest ones. Both are counted.
    A step with old regions and threshold takes 6 C (W - 1) words in COO: capacity_factor times the
    published 6 k (W - 1) / W.

    Args:
        x: float32.
        k: entries that each worker sends, more or less as `top_k` does it, and wanted in the
            result.
        agreed: from the step before.
        refresh: whether to take a new threshold even if the old one served; equal on all workers.
        rebalance: whether to draw new regions even if the old ones served; equal on all workers.
        axis_name: whose workers take part.
        codec: of the messages. If its values share levels, as those of `codecs.Chunked` in few
            bits do, the messages between owners have 32 bits a value.
        capacity_factor: room in messages. The smaller, the fewer words and the more overflow; with
            a factor of 1 more than k entries never fit.
        top_k: picks the entries.
    """
    # Sums are handed on before they are gathered. Rounded twice, those of codecs whose values share
    # levels would differ from what their senders noted.
    between = codec if codec.is_local else codecs.Chunked(value_bits=32)
    workers, size = wire.axis_size(axis_name), x.size
    regions = Regions(size, workers)
    room = _room(k, regions, capacity_factor)
    limit = workers * room
    selected = top_k(x, k)
    indices = jnp.where(selected.values != 0, selected.indices, size)
    place = jax.lax.cond(
        agreed.is_crowded | rebalance | (agreed.workers != workers),
        lambda: regions.draw(wire.psum(regions.counts(indices), axis_name)),
        lambda: agreed.place,
    )

    # To the owners.
    rows, crowded_out = by_owner(regions.positions_of(place, indices), regions, room)
    entries = from_dense(x, regions.elements(place, rows.ravel()))
    within = jnp.where(rows < regions.positions, rows % regions.length, regions.length)
    leaving = SparseStream(within, entries.values.reshape(rows.shape))
    arrived = _exchange(leaving, regions.length, axis_name, codec)
    sums = _sums(arrived, regions.length)
    magnitude = jnp.abs(sums.values)
    threshold = jax.lax.cond(
        agreed.is_stale | refresh,
        lambda: _kth_largest(magnitude, k, axis_name),
        lambda: agreed.threshold,
    )

    # From the owners, evenly to all: the sum at place p of all goes to worker p // room.
    number = _numbered((magnitude >= threshold) & (magnitude > 0))
    count = number[-1]
    all_counts = wire.all_gather(count, axis_name)
    passing = jnp.sum(all_counts)
    share = jnp.minimum(1.0, limit / jnp.maximum(passing, 1).astype(jnp.float32))
    # A little more than the share: rounded down, equal counts could all become 0. What then comes
    # to lie past the limit is not held.
    share = all_counts.astype(jnp.float32) * share * (1 + 2.0**-20)
    quotas = jnp.floor(share).astype(jnp.int32)
    quotas = jnp.where(passing <= limit, all_counts, quotas)
    mine = wire.axis_index(axis_name)
    first = jnp.sum(jnp.where(jnp.arange(workers) < mine, quotas, 0), dtype=jnp.int32)
    room_left = jnp.maximum(limit - first, 0)
    delivers = jnp.minimum(jnp.minimum(quotas[mine], count), room_left)
    too_many = passing > limit
    sums = jax.lax.cond(too_many, lambda: largest(sums, limit)[0], lambda: sums)
    number = jnp.where(too_many, jnp.arange(1, limit + 1, dtype=jnp.int32), number)
    is_large = (jnp.abs(sums.values) >= threshold) & (sums.values != 0)
    is_held = is_large & (number <= delivers)
    positions = jnp.where(is_held, mine * regions.length + sums.indices, regions.positions)
    rounded = between.rounded(sums, regions.length)
    slots = jnp.where(is_held, first + number - 1, limit)
    spread = _in_slots(SparseStream(positions, rounded), slots, limit, regions.positions)
    spread = SparseStream(*(part.reshape(workers, room) for part in spread))
    held = _exchange(spread, regions.positions, axis_name, between)
    # Without the empty slots. (A slot is filled by one worker, if any, but codecs may move it.)
    held = SparseStream(held.indices.ravel(), held.values.ravel())
    is_entry = held.indices < regions.positions
    slots = jnp.where(is_entry, _numbered(is_entry) - 1, room)
    held = _in_slots(held, slots, room, regions.positions)

    report = jnp.stack([crowded_out, count - delivers]).astype(jnp.uint32)
    messages = jnp.concatenate([codec.encode(held, regions.positions), report])
    messages = wire.all_gather(messages, axis_name)
    crowded_out, left_out = jnp.sum(messages[:, -2:], axis=0).astype(jnp.int32)
    decode = lambda words: codec.decode(words[:-2], room, regions.positions, x.dtype)
    streams = jax.vmap(decode)(messages)
    means = streams.values.ravel() / workers
    means = jnp.where(jnp.isfinite(means), means, 0)
    elements = regions.elements(place, streams.indices.ravel())
    mean = to_dense(SparseStream(elements, means), size)
    delivered = jnp.sum((means != 0) & (elements < size), dtype=jnp.int32)

    # All that differs from x is where entries are: no pass over all of it.
    arrives = lambda indices: mean.at[indices].get(mode="fill", fill_value=0) != 0
    sent = arrives(entries.indices)
    arriving = jax.vmap(lambda row: codec.rounded(row, regions.length))(leaving)
    left = jnp.where(sent, entries.values - arriving.ravel(), entries.values)
    lost: tuple[SparseStream, ...] = ()
    if not between.is_exact:
        index = regions.elements(place, positions)
        lost += (SparseStream(index, jnp.where(arrives(index), sums.values - rounded, 0)),)
    if not codec.is_local:
        index = regions.elements(place, held.indices)
        more = held.values - codec.rounded(held, regions.positions)
        lost += (SparseStream(index, jnp.where(arrives(index), more, 0)),)
    is_stale = too_many | (2 * passing < k)
    many = zeros((), jnp.int32, (agreed.workers,)) + workers
    return OkTopk(
        mean,
        SparseStream(entries.indices, left),
        sent,
        lost,
        delivered,
        crowded_out + left_out,
        Agreed(place, many, threshold, crowded_out > 0, is_stale),
    )


def _room(k: int, regions: Regions, capacity_factor: float) -> int:
    return min(regions.length, math.ceil(capacity_factor * k / regions.workers))


def _sums(arrived: SparseStream, length: int) -> SparseStream:
    """The sums of all workers' entries of one region, in as many slots, by their indices."""

    # One worker's after the other's: within one scatter a GPU would add in any order.
    def add(total: Array, row: SparseStream) -> tuple[Array, None]:
        return add_to(total, row), None

    start = jnp.zeros_like(arrived.values, shape=(length,))
    total, _ = jax.lax.scan(add, start, arrived)
    indices = jax.lax.sort(arrived.indices.ravel(), is_stable=False)
    is_again = jnp.pad(indices[1:] == indices[:-1], (1, 0))
    return from_dense(total, jnp.where(is_again, length, indices))


def _kth_largest(magnitudes: Float[Array, " n"], k: int, axis_name: str | None) -> Float[Array, ""]:
    """The k-th largest of all workers' magnitudes, digit by digit; 0 if there are fewer than k."""
    keys, values = to_bits(magnitudes), 2**_DIGIT_BITS

    def settle(i: Array, search: tuple[Array, Array]) -> tuple[Array, Array]:
        found, wanted = search
        shift = jnp.uint32(32 - _DIGIT_BITS) - _DIGIT_BITS * i.astype(jnp.uint32)
        # Count the magnitudes whose leading digits match those found so far. (A shift by 32 bits,
        # for the first digit, has no result; two shifts have.)
        known = (keys ^ found) >> shift >> jnp.uint32(_DIGIT_BITS) == 0
        digit = (keys >> shift).astype(jnp.int32) & (values - 1)
        counts = jnp.zeros((values,), jnp.int32)
        counts = counts.at[jnp.where(known, digit, values)].add(1, mode="drop")
        from_here = jax.lax.cumsum(wire.psum(counts, axis_name), reverse=True)  # falls
        best = jnp.maximum(jnp.sum(from_here >= wanted, dtype=jnp.int32) - 1, 0)
        beyond = from_here[jnp.minimum(best + 1, values - 1)]
        wanted -= jnp.where(best + 1 < values, beyond, 0)
        return found | best.astype(jnp.uint32) << shift, wanted

    start = wire.varying_as((jnp.uint32(0), jnp.int32(k)), keys, axis_name)
    found, _ = jax.lax.fori_loop(0, 32 // _DIGIT_BITS, settle, start)
    return jax.lax.bitcast_convert_type(found, jnp.float32)


def _numbered(mask: Bool[Array, " n"]) -> Int[Array, " n"]:
    """Of each element which of the True ones it is, from 1 on; between these that of the last."""
    return running_sum(mask.astype(jnp.int32), most=1, total=mask.size)


def _in_slots(
    stream: SparseStream, slots: Int[Array, " n"], capacity: int, size: int
) -> SparseStream:
    """The stream's entries in slots of their own; those past the capacity are left out."""
    indices = jnp.full((capacity,), size, jnp.int32)
    values = jnp.zeros((capacity,), stream.values.dtype)
    return SparseStream(
        indices.at[slots].set(stream.indices, mode="drop"),
        values.at[slots].set(stream.values, mode="drop"),
    )


def _exchange(
    rows: SparseStream, size: int, axis_name: str | None, codec: codecs.Codec
) -> SparseStream:
    capacity = rows.indices.shape[1]
    messages = jax.vmap(lambda row: codec.encode(row, size))(rows)
    messages = wire.all_to_all(messages, axis_name)
    return jax.vmap(lambda words: codec.decode(words, capacity, size, rows.values.dtype))(messages)
