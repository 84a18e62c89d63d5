"""Which worker adds up which part of a vector, so that all have about as much to do (Ok-Topk).

Regions come from a histogram of the selected indices in 1024 bins, summed over workers, instead of
an average of each worker's own boundaries: the state's shape does not depend on W then, and the
balance is that of the sum. Bins are dealt to owners, heaviest first, to each at most 3/2 of an even
number: a region is 3/2 d / W long whatever the gradients, and so is all that an owner adds up.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxsparse.platforms import zeros

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

    def counts(self, indices: Int[Array, " k"]) -> Int[Array, " bins"]:
        """Of each bin how many of the elements it has; indices past the end count for none."""
        number = jnp.where(indices < self.size, indices // self.bin_size, self.bins)
        return jnp.zeros((self.bins,), jnp.int32).at[number].add(1, mode="drop")

    def positions_of(
        self, place: Int[Array, " bins"], indices: Int[Array, " k"]
    ) -> Int[Array, " k"]:
        """The position of each element; `positions` of those past the end."""
        at = place.at[indices // self.bin_size].get(mode="clip")
        position = at * self.bin_size + indices % self.bin_size
        return jnp.where(indices < self.size, position, self.positions)

    def elements(self, place: Int[Array, " bins"], positions: Int[Array, " n"]) -> Int[Array, " n"]:
        """The index of each position; `size` of those past the end."""
        bin_at = jnp.full((self.workers * self.places,), self.bins, jnp.int32)
        bin_at = bin_at.at[place].set(jnp.arange(self.bins, dtype=jnp.int32))
        is_entry = positions < self.positions
        at = jnp.where(is_entry, positions // self.bin_size, 0)
        found = bin_at.at[at].get(mode="promise_in_bounds")
        return jnp.where(is_entry, found * self.bin_size + positions % self.bin_size, self.size)


def by_owner(
    positions: Int[Array, " k"], regions: Regions, room: int
) -> tuple[Int[Array, "workers room"], Int[Array, ""]]:
    """Positions in the rows of their owners, increasing.

    Args:
        positions: in any order; `regions.positions` of empty slots.
        regions: the owners'.
        room: for as many positions of an owner; the first ones.

    Returns:
        Rows, which end with empty slots; and how many positions are not in them.
    """
    positions = jax.lax.sort(positions, is_stable=False)
    bounds = jnp.arange(regions.workers + 1, dtype=jnp.int32) * regions.length
    starts = jnp.searchsorted(positions, bounds).astype(jnp.int32)
    slots = starts[:-1, None] + jnp.arange(room, dtype=jnp.int32)[None]
    rows = positions.at[slots].get(mode="fill", fill_value=regions.positions)
    rows = jnp.where(slots < starts[1:, None], rows, regions.positions)
    crowded_out = jnp.maximum(starts[1:] - starts[:-1] - room, 0)
    return rows, jnp.sum(crowded_out, dtype=jnp.int32)
