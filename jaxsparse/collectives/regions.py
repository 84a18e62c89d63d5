"""Regions of a vector, one for each worker to add up, with about equally many entries (Ok-Topk).

Regions come from a histogram of the selected indices in 1024 bins, summed over workers. (The paper
averages the workers' own boundaries.) So the state's shape does not depend on W, and regions are
balanced for the sum. Bins are dealt to owners, heaviest first. An owner gets at most 3/2 of an even
number of bins. So a region, and the vector that its owner adds up, has 3/2 d / W elements for any
gradients.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxsparse.arrays.platforms import zeros

# Number of bins of equal length that a vector is cut into. Their counts balance the regions.
_BINS = 1024


def bin_count(size: int) -> int:
    """The number of bins that a vector of `size` elements is cut into."""
    return min(size, _BINS)


@dataclasses.dataclass(frozen=True)
class Regions:
    """Regions of W workers, with equally many places for bins from anywhere in the vector.

    (The paper's regions are intervals, and one of them may be nearly all of the vector. With
    regions of one length, each worker adds up 3/2 d / W elements for any gradients.) There are 3/2
    as many places as bins, so that the owner of a heavy bin need own no others, if there are 3
    workers or more. Positions count elements in the order of places, region after region.

    Attributes:
        size: number of elements of the vector, d.
        workers: number of workers, W.
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
        """The number of elements of a bin."""
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
        """The number of positions of one region."""
        return self.places * self.bin_size

    @property
    def positions(self) -> int:
        """The number of positions of all regions, at least that of elements."""
        return self.workers * self.length

    def draw(self, counts: Int[Array, " bins"]) -> Int[Array, " bins"]:
        """Deals a place to each bin, heaviest first, at the owner with the fewest entries so far.

        Args:
            counts: number of entries in each bin.
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
    """Sorts positions into a row for each owner.

    Args:
        positions: k positions in any order. `regions.positions` marks an empty slot.
        regions: the regions of the owners.
        room: number of slots in a row. An owner's first positions get them.

    Returns:
        Rows of increasing positions, which end with empty slots. The number of positions that are
        not in them.
    """
    positions = jax.lax.sort(positions, is_stable=False)
    bounds = jnp.arange(regions.workers + 1, dtype=jnp.int32) * regions.length
    starts = jnp.searchsorted(positions, bounds).astype(jnp.int32)
    slots = starts[:-1, None] + jnp.arange(room, dtype=jnp.int32)[None]
    rows = positions.at[slots].get(mode="fill", fill_value=regions.positions)
    rows = jnp.where(slots < starts[1:, None], rows, regions.positions)
    crowded_out = jnp.maximum(starts[1:] - starts[:-1] - room, 0)
    return rows, jnp.sum(crowded_out, dtype=jnp.int32)
