"""The contract between a reducer and everything around it.

A reducer makes, from each worker's vector, an estimate of the mean over workers that costs few
bytes, and says what it did not deliver. `sum_w x_w == W * mean + sum_w residual_w` holds it
together: nothing is lost, only late.

It is a reducer, and not a pair of compress and decompress, because residuals may arise inside a
collective, and masks may be global.
"""

import abc
import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxsparse.collectives import wire
from jaxsparse.settings import static_seed

_MOST = 2**31 - 1  # that an int32 holds

# How well sum_w x_w == W * mean + sum_w residual_w holds: for values whose sums and means float32
# holds; but for the rounding of values on the wire; on average over random draws; or not at all.
Conservation = Literal["exact", "to rounding", "in expectation", "leaks"]


class Info(NamedTuple):
    """What one exchange did; replicated scalars."""

    delivered: Int[Array, ""]  # int32: coordinates that the mean carries
    # int32: entries, of all workers, kept back for want of capacity; where workers share the room,
    # elements of the union of what they have, each counted once
    overflow: Int[Array, ""]


def info(delivered: Any, overflow: Any = 0) -> Info:
    """An `Info` of int32 scalars."""
    return Info(jnp.asarray(delivered, jnp.int32), jnp.asarray(overflow, jnp.int32))


def count(elements: int) -> Int[Array, ""]:
    """A static number of elements as an int32, or the largest one if it is larger."""
    return jnp.int32(min(elements, _MOST))


def saturating_sum(counts: Int[Array, "n *k"], axis_name: str | None = None) -> Int[Array, " *k"]:
    """The sum of counts over their first axis and over workers; 2**31 - 1 if it is more.

    Args:
        counts: int32, not negative; at most 2**15 of all workers.
        axis_name: the axis of workers; None for these alone.
    """
    # Sums of halves don't overflow.
    halves = jnp.stack([counts >> 16, counts & 0xFFFF]).sum(axis=1, dtype=jnp.int32)
    upper, lower = wire.psum(wire.varying(halves, axis_name), axis_name)
    upper += lower >> 16
    return jnp.where(upper > _MOST >> 16, jnp.int32(_MOST), (upper << 16) | (lower & 0xFFFF))


class Reduced(NamedTuple):
    """The outcome of one exchange of vectors of d elements among W workers."""

    mean: Float[Array, " d"]  # float32 estimate of (1/W) sum_w x_w, bitwise equal on all workers
    residual: Float[Array, " d"]  # float32: this worker's share of what was not delivered
    sent: Bool[Array, " d"] | None  # where momentum is to be masked; None: nowhere
    state: Any  # the reducer's own carried state
    info: Info


class Matrix(NamedTuple):
    """How one leaf's elements lie as equal matrices, one after the other, each row-major."""

    stack: int  # how many there are: the layers of a scanned stack, or 1
    rows: int
    columns: int

    @property
    def size(self) -> int:
        """Elements of all of them."""
        return math.prod(self)


class Budget(abc.ABC):
    """Makes the reducers of all buckets from what they may spend together.

    A budget is apart from a reducer because a wanted compression is met by the whole tree, dense
    leaves included, and can be divided only once the layout is known.
    """

    @property
    def alignment(self) -> int:
        """Elements that buckets must be multiples of, but for the last: a block, if it has any."""
        return 1

    @property
    def takes_matrices(self) -> bool:
        """Whether buckets must hold whole leaves, whose shapes it is told: see `MatrixReducer`."""
        return False

    @abc.abstractmethod
    def split(self, sizes: tuple[int, ...], dense_size: int = 0) -> "tuple[Reducer, ...]":
        """One reducer for each bucket.

        Args:
            sizes: elements of each bucket.
            dense_size: elements that travel uncompressed beside the buckets.

        Raises:
            ValueError: the budget can't be met.
        """


@dataclasses.dataclass(frozen=True)
class Reducer(Budget):
    """Exchanges one flat vector. Derived classes are frozen dataclasses of static settings.

    They override what differs from the defaults here. A reducer whose settings are totals for the
    whole tree divides them in `split`, as a `Budget`.
    """

    @property
    def conservation(self) -> Conservation:
        """How well it keeps the law at the top of this file; the contract test checks that."""
        return "exact"

    @property
    def dense_at_full_budget(self) -> bool:
        """Whether the mean is the dense mean if everything is affordable."""
        return True

    @property
    def needs_zeros(self) -> bool:
        """Whether it sends whatever is not zero, so that no momentum may go in.

        Momentum, or what rounding to a leaf's dtype takes, would make every row that was ever
        touched non-zero for ever. So the momentum is that of the mean, and such rounding is
        forgotten, as for dense leaves.
        """
        return False

    @property
    def adapts_messages(self) -> bool:
        """Whether the shape of its messages follows what was exchanged before.

        So shards that are exchanged side by side may send different ones. For a collective-permute,
        which is one for all devices, they would wait for each other for ever.
        """
        return False

    def split(self, sizes: tuple[int, ...], dense_size: int = 0) -> "tuple[Reducer, ...]":
        """The same for each bucket."""
        return (self,) * len(sizes)

    def with_matrices(self, matrices: "tuple[Matrix, ...]") -> "Reducer":
        """If it `takes_matrices`: the same for a bucket of whole leaves that lie as these."""
        del matrices
        return self

    def init(self, size: int) -> Any:
        """One worker's initial state for vectors of `size` elements; by default none.

        Arrays that will differ between workers are `PerWorker`, all others replicated.
        """
        del size
        return ()

    @abc.abstractmethod
    def __call__(self, x: Float[Array, " d"], state: Any, *, axis_name: str | None) -> Reduced:
        """Exchanges float32 `x` along `axis_name` (None: among one worker, nothing is sent)."""


@dataclasses.dataclass(frozen=True)
class SeededReducer(Reducer):
    """A reducer that draws at random: each bucket has a seed of its own.

    Attributes:
        seed: 0 <= seed < 2**32, of the draws, which are fresh at each exchange.
    """

    seed: int = dataclasses.field(default=0, kw_only=True)

    def __post_init__(self):
        object.__setattr__(self, "seed", static_seed("seed", self.seed))

    def split(self, sizes: tuple[int, ...], dense_size: int = 0) -> "tuple[Reducer, ...]":
        """The same for each bucket, but for the seed."""
        seeds = bucket_seeds(self.seed, len(sizes))
        return tuple(dataclasses.replace(self, seed=seed) for seed in seeds)

    def init(self, size: int) -> Any:
        """The number of exchanges so far, uint32, for fresh draws."""
        del size
        return jnp.uint32(0)


@dataclasses.dataclass(frozen=True)
class MatrixReducer(Reducer):
    """A reducer that sees the matrices of its leaves in its vector.

    Error feedback calls `with_matrices` once the layout is known, and lets no leaf straddle
    buckets. Called without, as on a bare vector, the reducer sees one row.

    Attributes:
        matrices: of each leaf of the bucket, in order; their sizes add up to the vector's.
    """

    matrices: tuple[Matrix, ...] = dataclasses.field(default=(), kw_only=True)

    @property
    def takes_matrices(self) -> bool:
        """Yes."""
        return True

    def with_matrices(self, matrices: tuple[Matrix, ...]) -> "MatrixReducer":
        """The same for a bucket of these matrices."""
        return dataclasses.replace(self, matrices=matrices)

    def cut(self, x: Float[Array, " d"]) -> list[Float[Array, "stack rows columns"]]:
        """The matrices of each leaf. `jnp.concatenate([m.ravel() for m in ...])` is the inverse."""
        parts, start = [], 0
        for matrix in self.matrices or (Matrix(1, 1, x.size),):
            part = jax.lax.slice(x, (start,), (start + matrix.size,))
            parts.append(part.reshape(matrix))
            start += matrix.size
        return parts


def bucket_seeds(seed: int, count: int) -> tuple[int, ...]:
    """Seeds, one for each bucket: equal ones would draw alike in buckets of one size."""
    # Multiples of an odd number are distinct modulo 2**32, and far apart for this one.
    return tuple((seed + bucket * 0x9E3779B9) % 2**32 for bucket in range(count))
