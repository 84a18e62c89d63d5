"""Ok-Topk: balanced regions, and sums above reused thresholds (Li and Hoefler, PPoPP 2022).

Each worker adds up one region of the vector. Regions have about equally many entries. They come
from a histogram of the selected indices in 1024 bins, summed over workers. (The paper averages the
workers' own boundaries.) So the state's shape does not depend on W, and regions are balanced for
the sum. Bins are dealt to owners, heaviest first. An owner gets at most 3/2 of an even number of
bins. So a region, and the vector that its owner adds up, has 3/2 d / W elements for any gradients.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxsparse.arrays.platforms import by_digits, magnitude_bits, to_bits, zeros
from jaxsparse.arrays.stream import SparseStream, add_to, from_dense, to_dense
from jaxsparse.codecs.codec import COO, Codec
from jaxsparse.codecs.elias_fano import EliasFano
from jaxsparse.collectives.spardl import Select, largest
from jaxsparse.comm import wire
from jaxsparse.select.compaction import first_of_ranges, running_sum
from jaxsparse.select.fast import fast_top_k
from jaxsparse.select.thresholds import sample_size, sampled_threshold
from jaxsparse.select.top_k import sampled_else_exact

# Number of bins of equal length that a vector is cut into. Their counts balance the regions.
_BINS = 1024


def bin_count(size: int) -> int:
    """The number of bins that a vector of `size` elements is cut into."""
    return min(size, _BINS)


@dataclasses.dataclass(frozen=True)
class Regions:
    """Regions of W workers, with equally many places for bins from anywhere in the vector.

    (The paper's regions are intervals, and one of them may be nearly all of the vector.) There are
    3/2 as many places as bins, so that the owner of a heavy bin need own no others, if there are 3
    workers or more. Positions count elements in the order of places, region after region.
    """

    size: int
    workers: int

    def __post_init__(self):
        if self.positions >= 2**31:
            raise ValueError(
                f"a vector of {self.size} elements takes {self.positions} positions in the regions "
                f"of {self.workers} workers, but indices are int32: split it (bucket_size of "
                "the transformation does)"
            )

    @property
    def bins(self) -> int:
        """The number of bins. The last ones may be shorter or empty."""
        return bin_count(self.size)

    @property
    def bin_size(self) -> int:
        return -(-self.size // self.bins)

    @property
    def places(self) -> int:
        """The number of places for bins in one region. Some stay empty."""
        even = -(-self.bins // self.workers)
        roomy = -(-3 * self.bins // (2 * self.workers))
        fits = self.workers * roomy * self.bin_size < 2**31
        return roomy if fits and self.workers > 1 else even

    @property
    def length(self) -> int:
        return self.places * self.bin_size

    @property
    def positions(self) -> int:
        """The number of positions of all regions, at least that of elements."""
        return self.workers * self.length

    def draw(self, counts: Int[Array, " bins"]) -> Int[Array, " bins"]:
        """Deals a place to each bin, heaviest first, at the owner with the fewest entries yet."""
        order = jnp.argsort(-counts)
        most = jnp.int32(2**31 - 1)

        def deal(i: Array, dealt: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            place, loads, used = dealt
            owner = jnp.argmin(jnp.where(used < self.places, loads, most)).astype(jnp.int32)
            place = place.at[order[i]].set(owner * self.places + used[owner])
            return place, loads.at[owner].add(counts[order[i]]), used.at[owner].add(1)

        place = zeros((self.bins,), jnp.int32, (counts,))
        none = zeros((self.workers,), jnp.int32, (counts,))
        return jax.lax.fori_loop(0, self.bins, deal, (place, none, none))[0]

    def counts(self, indices: Int[Array, " k"]) -> Int[Array, " bins"]:
        """The number of indices in each bin. Indices past the end count for none."""
        number = jnp.where(indices < self.size, indices // self.bin_size, self.bins)
        return jnp.zeros((self.bins,), jnp.int32).at[number].add(1, mode="drop")

    def positions_of(
        self, place: Int[Array, " bins"], indices: Int[Array, " k"]
    ) -> Int[Array, " k"]:
        """The position of each index, or `positions` for an index past the end."""
        at = place.at[indices // self.bin_size].get(mode="clip")
        position = at * self.bin_size + indices % self.bin_size
        return jnp.where(indices < self.size, position, self.positions)

    def elements(self, place: Int[Array, " bins"], positions: Int[Array, " n"]) -> Int[Array, " n"]:
        """The index at each position, or `size` for a position past the end."""
        bin_at = jnp.full((self.workers * self.places,), self.bins, jnp.int32)
        bin_at = bin_at.at[place].set(jnp.arange(self.bins, dtype=jnp.int32))
        is_entry = positions < self.positions
        at = jnp.where(is_entry, positions // self.bin_size, 0)
        found = bin_at.at[at].get(mode="promise_in_bounds")
        return jnp.where(is_entry, found * self.bin_size + positions % self.bin_size, self.size)


def by_owner(
    positions: Int[Array, " k"], regions: Regions, room: int
) -> tuple[Int[Array, "workers room"], Int[Array, ""]]:
    """Sorts positions, in any order, into a row of `room` slots for each owner.

    An owner's first positions get the room. Rows increase, and end with empty slots,
    `regions.positions`. The result has the number of positions without room, too.
    """
    positions = jax.lax.sort(positions, is_stable=False)
    bounds = jnp.arange(regions.workers + 1, dtype=jnp.int32) * regions.length
    starts = jnp.searchsorted(positions, bounds).astype(jnp.int32)
    slots = starts[:-1, None] + jnp.arange(room, dtype=jnp.int32)[None]
    rows = positions.at[slots].get(mode="fill", fill_value=regions.positions)
    rows = jnp.where(slots < starts[1:, None], rows, regions.positions)
    crowded_out = jnp.maximum(starts[1:] - starts[:-1] - room, 0)
    return rows, jnp.sum(crowded_out, dtype=jnp.int32)


# Slots for each of the k wanted entries. With so many, a sampled threshold lets more entries pass
# than there are slots in only one of some thousand samples.
_SLOTS_PER_K = 1.5
# Number of times that a sample is read, once for each bit of a magnitude. With vectors of _LARGE
# elements or more, this takes a while.
_READS = 32
_LARGE = 2**17
# Number of bits of a magnitude that each round of the search for a threshold finds.
_DIGIT_BITS = 8


class Agreed(NamedTuple):
    """Regions and threshold, which are reused for many steps. Equal on all workers."""

    place: Int[Array, " bins"]  # int32: the place of each bin in the regions
    workers: Int[Array, ""]  # int32: number of workers that the regions are for
    threshold: Float[Array, ""]  # float32: the magnitude that a sum must reach
    is_crowded: Bool[Array, ""]  # entries had no room: draw new regions
    is_stale: Bool[Array, ""]  # too many or too few sums passed: take a new threshold

    @classmethod
    def start(cls, size: int) -> "Agreed":
        """The state before the first step, which draws regions and takes a threshold."""
        place = jnp.arange(bin_count(size), dtype=jnp.int32)
        return cls(place, jnp.int32(0), jnp.float32(0), jnp.bool_(True), jnp.bool_(True))


class BalancedSums(NamedTuple):
    """The result of `ok_topk`."""

    total: Float[Array, " d"]  # the sums that were delivered; equal on all workers
    own: SparseStream  # the residual at the entries that had room; elsewhere the residual is x
    sent: Bool[Array, " n"]  # which of these entries `total` contains
    lost: tuple[SparseStream, ...]  # this worker's rounding of sums, to add to the residual
    delivered: Int[Array, ""]  # int32: number of elements of `total` other than 0
    overflow: Int[Array, ""]  # int32: number of entries and sums without room, over all workers
    agreed: Agreed


def about_top_k(x: Float[Array, " d"], k: int) -> SparseStream:
    """The elements that reach a sampled threshold: on average k of them, k / 2 to 3 k / 2 + 1.

    If more or fewer reach it, as among many equal elements, this selects the elements above the
    k-th largest magnitude. On a GPU, or if these are fewer than k / 2, it adds elements of exactly
    that magnitude until there are k. It never selects zeros. If sampling a large vector would take
    longer, as for k below 2000, `select.fast_top_k` selects k elements instead. Slots without an
    entry have index d and value 0.
    """
    if x.size >= _LARGE and _READS * sample_size(x.size, k) > x.size:
        return fast_top_k(x, k)
    capacity = min(int(_SLOTS_PER_K * k) + 1, x.size)

    def entries(threshold: Array, is_exact: Array) -> tuple[Array, Array]:
        at = jnp.maximum(threshold, jnp.uint32(1))  # leaves out zeros
        above = jnp.where(is_exact, threshold + jnp.uint32(1), at)
        indices = first_of_ranges(
            x, (above, at), capacity + 1, key=magnitude_bits, enough=(k + 1) // 2
        )
        too_few = (indices[(k - 1) // 2] == x.size) & (threshold > 0)
        too_many = indices[capacity] < x.size
        # More than k reach the exact threshold only if several are at it.
        is_over = is_exact & (jnp.arange(capacity) >= k)
        indices = jnp.where(is_over, x.size, indices[:capacity])
        return indices, ~(too_few | too_many)

    sampled = sampled_threshold(x, k)
    return from_dense(x, sampled_else_exact(x, k, sampled, capacity, entries))


def ok_topk_sum(
    x: Float[Array, " d"],
    k: int,
    agreed: Agreed,
    *,
    refresh: Bool[Array, ""] | bool,
    rebalance: Bool[Array, ""] | bool,
    axis_name: str | None,
    codec: Codec = COO,
    capacity_factor: float = 2.0,
    top_k: Select = about_top_k,
) -> BalancedSums:
    """Means of the workers' k largest entries, where the sum of these reaches a threshold.

    The vector is divided into W regions that hold about equally many entries. Workers send their
    entries to the owners of the regions, and owners add them up. Owners hand on the large sums so
    that all workers have equally many. Then all workers gather these sums. The threshold is the
    k-th largest sum at the step that takes it, and later steps reuse it. (The paper also reuses
    each worker's own threshold. Here a sample gives a new one at each step, which takes less than
    the pass over x that it would save.)

    Each message has room for C = ceil(capacity_factor k / W) entries, or for all entries of a
    region if they are fewer. Entries without room stay with their workers. If too many sums pass
    the threshold, each owner delivers its share of the room, its largest sums. Entries and sums
    without room are counted. A step with old regions and threshold takes 6 C (W - 1) words in COO:
    capacity_factor times the published 6 k (W - 1) / W.

    Args:
        x: this worker's vector of d elements, float32.
        k: number of entries wanted from each worker and in the result.
        agreed: the `Agreed` of the step before.
        refresh: whether to take a new threshold even if the old one served; equal on all workers.
        rebalance: whether to draw new regions even if the old ones served; equal on all workers.
        axis_name: the axis of the workers.
        codec: wire format. If its values share levels, as those of `codecs.EliasFano` in few bits
            do, the messages between owners have 32 bits a value.
        capacity_factor: room in messages, in multiples of k / W entries. With 1, more than k
            entries never fit.
        top_k: function that selects the entries, maybe more or fewer than k.
    """
    regions = Regions(x.size, wire.axis_size(axis_name))
    room = _room(k, regions, capacity_factor)
    # Sums are handed on before they are gathered. If a codec rounds values that share levels, a
    # second rounding would give other numbers than those that the senders subtracted.
    between = codec if codec.is_local else EliasFano(value_bits=32)
    how = _Messages(regions, room, codec, between, axis_name)
    selected = top_k(x, k)
    indices = jnp.where(selected.values != 0, selected.indices, x.size)
    place = jax.lax.cond(
        agreed.is_crowded | rebalance | (agreed.workers != regions.workers),
        lambda: regions.draw(wire.psum(regions.counts(indices), axis_name)),
        lambda: agreed.place,
    )
    to_owners = how.to_owners(x, place, indices)
    threshold = jax.lax.cond(
        agreed.is_stale | refresh,
        lambda: _kth_largest(jnp.abs(to_owners.sums.values), k, axis_name),
        lambda: agreed.threshold,
    )
    evened = how.evened(to_owners.sums, threshold)
    held = evened.held
    gathered, (crowded_out, left_out) = how.gathered(
        held, jnp.stack([to_owners.crowded_out, evened.left_out])
    )
    elements = regions.elements(place, gathered.indices)
    total = to_dense(SparseStream(elements, gathered.values), x.size)

    # The residual differs from x only at entries, so it needs no pass over the whole vector.
    arrives = lambda indices: total.at[indices].get(mode="fill", fill_value=0) != 0

    def where_it_arrives(positions: Array, lost: Array) -> SparseStream:
        index = regions.elements(place, positions)
        return SparseStream(index, jnp.where(arrives(index), lost, 0))

    entries = to_owners.entries
    sent = arrives(entries.indices)
    left = jnp.where(sent, entries.values - to_owners.rounded, entries.values)
    lost: tuple[SparseStream, ...] = ()
    if not between.is_exact:
        lost += (where_it_arrives(*evened.lost),)
    if not codec.is_local:
        more = held.values - codec.rounded(held, regions.positions)
        lost += (where_it_arrives(held.indices, more),)
    is_stale = (evened.passing > how.limit) | (2 * evened.passing < k)
    workers = zeros((), jnp.int32, (agreed.workers,)) + regions.workers
    return BalancedSums(
        total,
        SparseStream(entries.indices, left),
        sent,
        lost,
        delivered=jnp.sum((gathered.values != 0) & (elements < x.size), dtype=jnp.int32),
        overflow=crowded_out + left_out,
        agreed=Agreed(place, workers, threshold, crowded_out > 0, is_stale),
    )


class _ToOwners(NamedTuple):
    """What a worker sends to the owners of regions, and what it gets as an owner."""

    entries: SparseStream  # the entries that had room, with indices into x
    rounded: Float[Array, " n"]  # their values as the owners receive them
    crowded_out: Int[Array, ""]  # int32: number of entries without room
    sums: SparseStream  # the sums of this worker's region, sorted by places in it


class _Evened(NamedTuple):
    """The large sums, as many on each worker. Indices are positions in all regions."""

    held: SparseStream  # the sums that this worker holds now, in front
    lost: SparseStream  # the rounding of those that it handed on
    passing: Int[Array, ""]  # int32: number of sums that reach the threshold, over all workers
    left_out: Int[Array, ""]  # int32: number of this owner's sums among them without room


class _Messages(NamedTuple):
    """The three rounds of messages of a step, in order."""

    regions: Regions
    room: int  # slots of a message
    codec: Codec
    between: Codec  # wire format of messages between owners
    axis_name: str | None

    @property
    def limit(self) -> int:
        return self.regions.workers * self.room

    def to_owners(self, x: Array, place: Array, indices: Array) -> _ToOwners:
        """Sends each entry to the owner of its region, who adds up what arrives."""
        regions, length = self.regions, self.regions.length
        rows, crowded_out = by_owner(regions.positions_of(place, indices), regions, self.room)
        entries = from_dense(x, regions.elements(place, rows.ravel()))
        within = jnp.where(rows < regions.positions, rows % length, length)
        leaving = SparseStream(within, entries.values.reshape(rows.shape))
        rounded = jax.vmap(lambda row: self.codec.rounded(row, length))(leaving).ravel()
        arrived = _exchange(leaving, length, self.axis_name, self.codec)
        return _ToOwners(entries, rounded, crowded_out, _sums(arrived, length))

    def evened(self, sums: SparseStream, threshold: Array) -> _Evened:
        """Hands on the large sums. That in slot s of all slots goes to worker s // room."""
        regions, limit = self.regions, self.limit
        reaches = lambda values: (jnp.abs(values) >= threshold) & (values != 0)
        number = _numbered(reaches(sums.values))
        count = number[-1]
        counts = wire.all_gather(count, self.axis_name)
        passing = jnp.sum(counts)
        quotas = _quotas(counts, passing, limit)
        mine = wire.axis_index(self.axis_name)
        first = jnp.sum(jnp.where(jnp.arange(len(quotas)) < mine, quotas, 0), dtype=jnp.int32)
        delivers = jnp.minimum(jnp.minimum(quotas[mine], count), jnp.maximum(limit - first, 0))

        too_many = passing > limit
        sums = jax.lax.cond(too_many, lambda: largest(sums, limit)[0], lambda: sums)
        number = jnp.where(too_many, jnp.arange(1, limit + 1, dtype=jnp.int32), number)
        is_handed_on = reaches(sums.values) & (number <= delivers)
        positions = mine * regions.length + sums.indices
        positions = jnp.where(is_handed_on, positions, regions.positions)
        rounded = self.between.rounded(sums, regions.length)
        slots = jnp.where(is_handed_on, first + number - 1, limit)
        spread = _in_slots(SparseStream(positions, rounded), slots, limit, regions.positions)
        spread = SparseStream(*(part.reshape(-1, self.room) for part in spread))
        held = _exchange(spread, regions.positions, self.axis_name, self.between)

        # Drop the empty slots. (At most one worker fills a slot, but codecs may move its entry.)
        held = SparseStream(held.indices.ravel(), held.values.ravel())
        is_entry = held.indices < regions.positions
        slots = jnp.where(is_entry, _numbered(is_entry) - 1, self.room)
        held = _in_slots(held, slots, self.room, regions.positions)
        lost = SparseStream(positions, sums.values - rounded)
        return _Evened(held, lost, passing, count - delivers)

    def gathered(
        self, held: SparseStream, counts: Int[Array, " n"]
    ) -> tuple[SparseStream, Int[Array, " n"]]:
        """The sums that all workers hold, and the counts summed over workers."""
        message = self.codec.encode(held, self.regions.positions)
        messages = jnp.concatenate([message, counts.astype(jnp.uint32)])
        messages = wire.all_gather(messages, self.axis_name)
        counts = jnp.sum(messages[:, -len(counts) :], axis=0).astype(jnp.int32)
        decode = lambda words: self.codec.decode(
            words, self.room, self.regions.positions, held.values.dtype
        )
        streams = jax.vmap(decode)(messages[:, : message.size])
        return SparseStream(streams.indices.ravel(), streams.values.ravel()), counts


def _quotas(counts: Int[Array, " workers"], passing: Array, limit: int) -> Int[Array, " workers"]:
    """How many of the limit's sums each owner may hand on: all, or in proportion to its own."""
    share = jnp.minimum(1.0, limit / jnp.maximum(passing, 1).astype(jnp.float32))
    # Scale up by 2^-20 so that floor() does not turn equal counts into 0. Sums that then lie past
    # the limit are not delivered.
    share = counts.astype(jnp.float32) * share * (1 + 2.0**-20)
    return jnp.where(passing <= limit, counts, jnp.floor(share).astype(jnp.int32))


def _room(k: int, regions: Regions, capacity_factor: float) -> int:
    return min(regions.length, math.ceil(capacity_factor * k / regions.workers))


def _sums(arrived: SparseStream, length: int) -> SparseStream:
    """Sums a region's entries over workers, sorted by index, in as many slots as `arrived` has.

    A sum that overflows becomes 0 and so counts as not sent: each worker keeps its summand.
    """

    # Add one worker's entries after another's: within one scatter a GPU would add in any order.
    def add(total: Array, row: SparseStream) -> tuple[Array, None]:
        return add_to(total, row), None

    start = jnp.zeros_like(arrived.values, shape=(length,))
    total, _ = jax.lax.scan(add, start, arrived)
    total = jnp.where(jnp.isfinite(total), total, 0)
    indices = jax.lax.sort(arrived.indices.ravel(), is_stable=False)
    is_again = jnp.pad(indices[1:] == indices[:-1], (1, 0))
    return from_dense(total, jnp.where(is_again, length, indices))


def _kth_largest(magnitudes: Float[Array, " n"], k: int, axis_name: str | None) -> Float[Array, ""]:
    """The k-th largest of all workers' magnitudes, found digit by digit. 0 if there are fewer."""
    keys, values = to_bits(magnitudes), 2**_DIGIT_BITS

    def set_digit(found: Array, shift: Array) -> Array:
        digit = jnp.minimum((keys - found) >> shift, values - 1).astype(jnp.int32)
        counts = jnp.zeros((values,), jnp.int32)
        counts = counts.at[jnp.where(keys >= found, digit, values)].add(1, mode="drop")
        reached = jax.lax.cumsum(wire.psum(counts, axis_name), reverse=True)[1:] >= k
        return found | jnp.sum(reached, dtype=jnp.uint32) << shift

    start = wire.varying_as(jnp.uint32(0), keys, axis_name)
    found = by_digits(set_digit, 32, _DIGIT_BITS, start)
    return jax.lax.bitcast_convert_type(found, jnp.float32)


def _numbered(mask: Bool[Array, " n"]) -> Int[Array, " n"]:
    """The number of True elements up to and with each element."""
    return running_sum(mask.astype(jnp.int32), most=1, total=mask.size)


def _in_slots(
    stream: SparseStream, slots: Int[Array, " n"], capacity: int, size: int
) -> SparseStream:
    """The stream's entries in the given slots. Those in slots past the capacity are left out."""
    indices = jnp.full((capacity,), size, jnp.int32)
    values = jnp.zeros((capacity,), stream.values.dtype)
    return SparseStream(
        indices.at[slots].set(stream.indices, mode="drop"),
        values.at[slots].set(stream.values, mode="drop"),
    )


def _exchange(rows: SparseStream, size: int, axis_name: str | None, codec: Codec) -> SparseStream:
    capacity = rows.indices.shape[1]
    messages = jax.vmap(lambda row: codec.encode(row, size))(rows)
    messages = wire.all_to_all(messages, axis_name)
    return jax.vmap(lambda words: codec.decode(words, capacity, size, rows.values.dtype))(messages)
