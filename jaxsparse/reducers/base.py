"""The contract between a reducer and everything around it.

A reducer estimates the mean of all workers' vectors with few bytes, and returns a residual: all
that it did not deliver. The contract is `sum_w x_w == W * mean + sum_w residual_w`: nothing is
lost, only late.

It is one function, and not a pair of compress and decompress, because residuals may arise inside a
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

_MOST = 2**31 - 1  # the largest int32

# How well sum_w x_w == W * mean + sum_w residual_w holds: for all values whose sums and means fit
# float32; up to the rounding of values on the wire; on average over random draws; or not at all.
Conservation = Literal["exact", "to rounding", "in expectation", "leaks"]


class Info(NamedTuple):
    """Counts of one exchange; replicated scalars."""

    delivered: Int[Array, ""]  # int32: number of coordinates that the mean carries
    # int32: number of entries, over all workers, without room in messages. If workers share the
    # room, it counts elements of the union of their entries once.
    overflow: Int[Array, ""]


def info(delivered: Any, overflow: Any = 0) -> Info:
    """An `Info` of int32 scalars. A static number above the largest int32 becomes that."""
    if isinstance(delivered, int):
        delivered = min(delivered, _MOST)
    return Info(jnp.asarray(delivered, jnp.int32), jnp.asarray(overflow, jnp.int32))


class Reduced(NamedTuple):
    """The result of one exchange of vectors of d elements among W workers."""

    mean: Float[Array, " d"]  # float32 estimate of (1/W) sum_w x_w, bitwise equal on all workers
    residual: Float[Array, " d"]  # float32: this worker's share of all that was not delivered
    sent: Bool[Array, " d"] | None  # where to mask momentum; None: nowhere
    state: Any  # the reducer's own state
    info: Info


class Leaf(NamedTuple):
    """One leaf of the gradient, all of whose elements are in a bucket."""

    path: str  # its key path, as `jax.tree_util.keystr` prints it
    shape: tuple[int, ...]


class Matrix(NamedTuple):
    """One leaf's elements as equal matrices, one after the other, each row-major."""

    stack: int  # number of matrices: the layers of a scanned stack, or 1
    rows: int
    columns: int

    @property
    def size(self) -> int:
        """The number of elements of all matrices."""
        return math.prod(self)


class Budget(abc.ABC):
    """Makes the reducers of all buckets from their common budget.

    It is apart from a reducer because a compression holds for the whole tree, dense leaves
    included, and can be divided only once the layout is known.
    """

    @property
    def alignment(self) -> int:
        """Sizes of all buckets but the last must be multiples of this number, such as a block."""
        return 1

    @property
    def whole_leaves(self) -> bool:
        """Whether no leaf may straddle buckets. `with_leaves` then tells reducers their leaves."""
        return False

    @abc.abstractmethod
    def split(self, sizes: tuple[int, ...], dense_size: int = 0) -> "tuple[Reducer, ...]":
        """One reducer for each bucket.

        Args:
            sizes: number of elements of each bucket.
            dense_size: number of uncompressed elements beside the buckets.

        Raises:
            ValueError: the budget can't be met.
        """


@dataclasses.dataclass(frozen=True)
class Reducer(Budget):
    """Exchanges one flat vector. Derived classes are frozen dataclasses of static settings.

    They override the defaults here, and call `super().__post_init__()` before they check settings
    of their own. If a reducer's settings are totals for the whole tree, its `split` divides them
    among buckets.
    """

    def __post_init__(self):
        """Nothing to check here."""

    @property
    def conservation(self) -> Conservation:
        """How well it keeps the contract at the top of this file. A test checks it."""
        return "exact"

    @property
    def dense_at_full_budget(self) -> bool:
        """Whether the mean is the dense mean if the budget covers everything."""
        return True

    @property
    def needs_zeros(self) -> bool:
        """Whether it sends all that is not zero, so that its input must have no momentum.

        With momentum, or with the rounding to a leaf's dtype in the residual, every row that was
        ever touched would stay non-zero for ever. So the momentum is that of the mean, and this
        rounding is dropped, as for dense leaves.
        """
        return False

    @property
    def adapts_messages(self) -> bool:
        """Whether the shapes of its messages depend on earlier exchanges.

        Shards that are exchanged side by side may then send different messages. All devices take
        part in one collective-permute, so they would wait for each other for ever.
        """
        return False

    def split(self, sizes: tuple[int, ...], dense_size: int = 0) -> "tuple[Reducer, ...]":
        """The same reducer for each bucket."""
        return (self,) * len(sizes)

    def with_leaves(self, leaves: tuple[Leaf, ...]) -> "Reducer":
        """The same reducer for a bucket of these leaves, end to end. Used if `whole_leaves`."""
        del leaves
        return self

    def init(self, size: int) -> Any:
        """One worker's initial state for vectors of `size` elements. Default: no state.

        Arrays that will differ between workers are `PerWorker`. All others are replicated.
        """
        del size
        return ()

    @abc.abstractmethod
    def __call__(self, x: Float[Array, " d"], state: Any, *, axis_name: str | None) -> Reduced:
        """Exchanges float32 `x` along `axis_name`. None: a single worker, which sends nothing."""


@dataclasses.dataclass(frozen=True)
class SeededReducer(Reducer):
    """A reducer with random draws. Each bucket has its own seed.

    Attributes:
        seed: seed of the draws, 0 <= seed < 2**32. Draws are fresh at each exchange.
    """

    seed: int = dataclasses.field(default=0, kw_only=True)

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "seed", static_seed("seed", self.seed))

    def split(self, sizes: tuple[int, ...], dense_size: int = 0) -> "tuple[Reducer, ...]":
        """The same reducer with another seed for each bucket."""
        seeds = bucket_seeds(self.seed, len(sizes))
        return tuple(dataclasses.replace(self, seed=seed) for seed in seeds)

    def init(self, size: int) -> Any:
        """The number of exchanges so far, uint32, for fresh draws."""
        del size
        return jnp.uint32(0)


@dataclasses.dataclass(frozen=True)
class MatrixReducer(Reducer):
    """A reducer that sees its vector as the matrices of the leaves, as low-rank methods do.

    Attributes:
        stacked: a regular expression. A leaf whose key path contains it is a stack of matrices
            along its first axis, one for each layer of a scanned model.
        matrices: the matrices of each leaf of the bucket, in order. Error feedback sets them,
            because it knows the layout. None: the vector is one row.
    """

    stacked: str | None = dataclasses.field(default=None, kw_only=True)
    matrices: tuple[Matrix, ...] | None = dataclasses.field(default=None, kw_only=True)

    @property
    def whole_leaves(self) -> bool:
        """Yes: a part of a matrix is no matrix."""
        return True

    def with_leaves(self, leaves: tuple[Leaf, ...]) -> "MatrixReducer":
        """The same reducer for the matrices of these leaves."""
        return dataclasses.replace(self, matrices=tuple(map(self.matrix, leaves)))

    def matrix(self, leaf: Leaf) -> Matrix:
        """A leaf (..., in, out) as rows of `out` elements, which is the layout of Flax kernels.

        A convolution's (3, 3, 16, 32) is one matrix of 144 rows. A stack of (12, 64, 256) is twelve
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
    """A seed for each bucket. With equal seeds, buckets of one size would draw alike."""
    # Multiples of an odd number are distinct modulo 2**32; those of this number are far apart.
    return tuple((seed + bucket * 0x9E3779B9) % 2**32 for bucket in range(count))
