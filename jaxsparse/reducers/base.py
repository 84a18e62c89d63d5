"""The contract between a reducer and everything around it.

A reducer makes, from each worker's vector, an estimate of the mean over workers that costs few
bytes, and says what it did not deliver. `sum_w x_w == W * mean + sum_w residual_w` holds it
together: nothing is lost, only late.

It is a reducer, and not a pair of compress and decompress, because residuals may arise inside a
collective, and masks may be global.
"""

import abc
import dataclasses
import itertools
import math
import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

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
    """An `Info` of int32 scalars; a static number that is too large for one is cut."""
    if isinstance(delivered, int):
        delivered = min(delivered, _MOST)
    return Info(jnp.asarray(delivered, jnp.int32), jnp.asarray(overflow, jnp.int32))


class Reduced(NamedTuple):
    """The outcome of one exchange of vectors of d elements among W workers."""

    mean: Float[Array, " d"]  # float32 estimate of (1/W) sum_w x_w, bitwise equal on all workers
    residual: Float[Array, " d"]  # float32: this worker's share of what was not delivered
    sent: Bool[Array, " d"] | None  # where momentum is to be masked; None: nowhere
    state: Any  # the reducer's own carried state
    info: Info


class Leaf(NamedTuple):
    """One leaf of the gradient, all of whose elements are in a bucket."""

    path: str  # its key path, as `jax.tree_util.keystr` prints it
    shape: tuple[int, ...]


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
    def whole_leaves(self) -> bool:
        """Whether no leaf may straddle buckets: reducers are told leaves by `with_leaves`."""
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

    def with_leaves(self, leaves: tuple[Leaf, ...]) -> "Reducer":
        """The same for a bucket of these leaves, end to end; called if `whole_leaves`."""
        del leaves
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
    """A reducer that sees its vector as the matrices that the leaves are, as low-rank methods do.

    Attributes:
        stacked: a regular expression; the leaves in whose key path it is found are stacks of
            matrices, one for each layer of a scanned model, along their first axis.
        matrices: of each leaf of the bucket, in order: set by error feedback, which knows the
            layout. None, as for a bare vector, makes it one row.
    """

    stacked: str | None = dataclasses.field(default=None, kw_only=True)
    matrices: tuple[Matrix, ...] | None = dataclasses.field(default=None, kw_only=True)

    @property
    def whole_leaves(self) -> bool:
        """Part of a matrix is none."""
        return True

    def with_leaves(self, leaves: tuple[Leaf, ...]) -> "MatrixReducer":
        """The same for the matrices of these leaves."""
        return dataclasses.replace(self, matrices=tuple(map(self.matrix, leaves)))

    def matrix(self, leaf: Leaf) -> Matrix:
        """How a leaf is seen: (..., in, out) as rows of `out` elements, the layout of Flax kernels.

        A convolution's (3, 3, 16, 32) is one matrix of 144 rows, a stack of (12, 64, 256) twelve
        matrices of 64 rows.
        """
        is_stack = self.stacked is not None and re.search(self.stacked, leaf.path) is not None
        stack, shape = (leaf.shape[0], leaf.shape[1:]) if is_stack else (1, leaf.shape)
        columns = shape[-1] if shape else 1
        return Matrix(stack, math.prod(shape[:-1]), columns)

    def cut(self, x: Float[Array, " d"]) -> list[Float[Array, "stack rows columns"]]:
        """The matrices of each leaf."""
        matrices = (Matrix(1, 1, x.size),) if self.matrices is None else self.matrices
        ends = itertools.accumulate(matrix.size for matrix in matrices)
        return [
            jax.lax.slice(x, (end - matrix.size,), (end,)).reshape(matrix)
            for matrix, end in zip(matrices, ends)
        ]

    def joined(self, parts: Sequence[Float[Array, "stack rows columns"]]) -> Float[Array, " d"]:
        """The inverse of `cut`."""
        return jnp.concatenate([part.reshape(-1) for part in parts])


def bucket_seeds(seed: int, count: int) -> tuple[int, ...]:
    """Seeds, one for each bucket: equal ones would draw alike in buckets of one size."""
    # Multiples of an odd number are distinct modulo 2**32, and far apart for this one.
    return tuple((seed + bucket * 0x9E3779B9) % 2**32 for bucket in range(count))
