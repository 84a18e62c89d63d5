"""Which worker adds up which part of a vector, so that all have about as much to do (Ok-Topk)."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxsparse.stream import SparseStream
from jaxsparse.tiles import zeros

# The vector is cut into as many, of equal length, by whose counts regions are balanced.
_BINS = 1024


def bin_count(size: int) -> int:
    """Bins that a vector of `size` elements is cut into."""
    return min(size, _BINS)


@dataclasses.dataclass(frozen=True)
class Regions:
    """Regions of W workers: of as many places for bins, wherever these lie in the vector.

    (The paper's are intervals, of which one may be nearly all of the vector; regions of one length
    make what a worker adds up 3/2 d / W elements long, whatever the gradients.) There are half as
    many places again as bins, so that who owns a heavy bin need own no others. Positions are
    elements in the order of places, region after region.

    Attributes:
        size: elements of the vector, d.
        workers: W.
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
        """Their number; the last ones may be shorter or empty."""
        return bin_count(self.size)

    @property
    def bin_size(self) -> int:
        """Elements of one."""
        return -(-self.size // self.bins)

    @property
    def places(self) -> int:
        """Of one region, for its bins; some are empty."""
        even = -(-self.bins // self.workers)
        roomy = -(-3 * self.bins // (2 * self.workers))
        fits = self.workers * roomy * self.bin_size < 2**31
        return roomy if fits and self.workers > 1 else even

    @property
    def length(self) -> int:
        """Positions of one region."""
        return self.places * self.bin_size

    @property
    def positions(self) -> int:
        """Of all regions; there are at least as many as elements."""
        return self.workers * self.length

    def draw(self, counts: Int[Array, " bins"]) -> Int[Array, " bins"]:
        """A place for each bin: the heaviest first, to the owner with the least so far.

        Args:
            counts: entries in each.
        """
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

    def bin_of(self, indices: Int[Array, " n"]) -> Int[Array, " n"]:
        """The bin of each element; the last one of what lies past the end."""
        return jnp.minimum(indices, self.size - 1) // self.bin_size

    def starts(self, indices: Int[Array, " k"]) -> Int[Array, " bins+1"]:
        """Which of increasing indices is the first of each bin; the end of the last."""
        bounds = jnp.arange(self.bins + 1, dtype=jnp.int32) * self.bin_size
        bounds = jnp.minimum(bounds, self.size)
        # Unrolled, the search is one pass.
        return jnp.searchsorted(indices, bounds, method="scan_unrolled").astype(jnp.int32)

    def elements(self, place: Int[Array, " bins"], positions: Int[Array, " n"]) -> Int[Array, " n"]:
        """The index of each position; `size` of those past the end."""
        bin_at = jnp.full((self.workers * self.places,), self.bins, jnp.int32)
        bin_at = bin_at.at[place].set(jnp.arange(self.bins, dtype=jnp.int32))
        is_entry = positions < self.positions
        at = jnp.where(is_entry, positions // self.bin_size, 0)
        found = bin_at.at[at].get(mode="promise_in_bounds")
        return jnp.where(is_entry, found * self.bin_size + positions % self.bin_size, self.size)


def into_regions(
    stream: SparseStream,
    starts: Int[Array, " bins+1"],
    place: Int[Array, " bins"],
    regions: Regions,
    room: int,
) -> tuple[SparseStream, Array, Array]:
    """Entries by owner, in the order of their positions, without a sort.

    Args:
        stream: entries in increasing order of their indices.
        starts: of bins in it.
        place: of each bin.
        regions: the owners'.
        room: for as many entries of an owner; the first ones.

    Returns:
        Streams of shape (W, room), of positions within regions; which entries are in them; and how
        many are not.
    """
    counts = starts[1:] - starts[:-1]
    by_owner = jnp.zeros((regions.workers * regions.places,), jnp.int32).at[place].set(counts)
    by_owner = by_owner.reshape(regions.workers, regions.places)
    ends = jnp.cumsum(by_owner, axis=1)
    # What is to be added to a slot's number to make its rank among its owner's entries, and to an
    # index to make it a position.
    to_rank = (ends - by_owner).ravel()[place] - starts[:-1]
    number = jnp.arange(regions.bins, dtype=jnp.int32)
    owner = place // regions.places
    to_position = (place % regions.places - number) * regions.bin_size

    owned = regions.bin_of(stream.indices)
    at = lambda table: table.at[owned].get(mode="promise_in_bounds")
    rank = jnp.arange(stream.capacity, dtype=jnp.int32) + at(to_rank)
    fits = (stream.indices < regions.size) & (rank < room)
    slots = regions.workers * room
    slot = jnp.where(fits, at(owner) * room + rank, slots)
    indices = jnp.full((slots,), regions.length, jnp.int32)
    indices = indices.at[slot].set(stream.indices + at(to_position), mode="drop")
    values = jnp.zeros((slots,), stream.values.dtype)
    values = values.at[slot].set(stream.values, mode="drop")
    shape = (regions.workers, room)
    left = jnp.sum(jnp.maximum(ends[:, -1] - room, 0), dtype=jnp.int32)
    return SparseStream(indices.reshape(shape), values.reshape(shape)), fits, left
