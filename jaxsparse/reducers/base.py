"""The contract between a reducer and everything around it.

A reducer makes, from each worker's vector, an estimate of the mean over workers that costs few
bytes, and says what it did not deliver. `sum_w x_w == W * mean + sum_w residual_w` holds it
together: nothing is lost, only late.

It is a reducer, and not a pair of compress and decompress, because residuals may arise inside a
collective, and masks may be global.
"""

import abc
import dataclasses
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxsparse.collectives.messages import AllReduced
from jaxsparse.platforms import count_where
from jaxsparse.settings import static_seed
from jaxsparse.stream import SparseStream, to_dense

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


def bucket_seeds(seed: int, count: int) -> tuple[int, ...]:
    """Seeds, one for each bucket: equal ones would draw alike in buckets of one size."""
    # Multiples of an odd number are distinct modulo 2**32, and far apart for this one.
    return tuple((seed + bucket * 0x9E3779B9) % 2**32 for bucket in range(count))


# Which worker keeps what an exchange did not deliver.


def finite_sums(total: Array) -> tuple[Array, Bool[Array, "..."]]:
    """Sums with zeros where they overflow, and where they do not.

    Sums that overflow count as not sent: whoever had a part in them keeps it. An inf in the mean
    would otherwise be applied, and one in a residual would never leave.
    """
    finite = jnp.isfinite(total)
    return jnp.where(finite, total, 0), finite


def deliver(
    x: Float[Array, " d"],
    total: Float[Array, " d"],
    residual: Float[Array, " d"] | float,
    sent: Bool[Array, " d"] | None,
    state: Any,
    workers: int,
    *,
    delivered: Any = None,
    overflow: Any = 0,
) -> Reduced:
    """The outcome of an exchange that summed `total`; sums that overflow count as not sent.

    Args:
        x: float32, what this worker wanted to be summed.
        total: float32, what was, equal on all workers.
        residual: float32, this worker's share of what `total` lacks.
        sent: where momentum is to be masked, unless the sum overflows; None: nowhere.
        state: the reducer's.
        workers: their number, W.
        delivered: coordinates that the mean carries; None counts those that are not 0.
        overflow: entries kept back for want of capacity.
    """
    if delivered is None:
        delivered = count_where(total, lambda total: finite_sums(total)[0] / workers != 0)
    total, finite = finite_sums(total)
    mean = total / workers
    sent = None if sent is None else sent & finite
    return Reduced(mean, jnp.where(finite, residual, x), sent, state, info(delivered, overflow))


def deliver_merged(
    x: Float[Array, " d"],
    total: Float[Array, " d"],
    discarded: Float[Array, " d"],
    selected: Bool[Array, " d"],
    state: Any,
    workers: int,
) -> Reduced:
    """The outcome if each worker `discarded` its part of the mass that `total` lacks.

    Where something arrived, a worker feeds back what it has itself discarded on the way; where
    nothing did, all workers have their own copies, which cover any such discards (SparDL, Alg. 1).
    What arrived is told by a sum other than 0, not by a list of selected indices: sums that cancel,
    or overflow, count as not arrived, and the copies conserve them as well.

    Args:
        x: float32, what this worker wanted to be summed.
        total: float32, what was, equal on all workers.
        discarded: float32, this worker's share; read only where `total` is not 0.
        selected: what this worker put forward.
        state: the reducer's.
        workers: their number, W.
    """
    arrived = finite_sums(total)[0] != 0
    residual = jnp.where(arrived, discarded, x)
    delivered = count_where(total, lambda total: finite_sums(total)[0] != 0)
    return deliver(x, total, residual, arrived & selected, state, workers, delivered=delivered)


def deliver_streams(
    x: Float[Array, " d"], stream: SparseStream, result: AllReduced, state: Any, workers: int
) -> Reduced:
    """The outcome of a sparse all-reduce of entries of `x`.

    A worker keeps what it did not select, and its share of what the all-reduce left.

    Args:
        x: float32, what this worker wanted to be summed.
        stream: the entries of `x` that it put forward, with distinct indices.
        result: of the all-reduce.
        state: the reducer's.
        workers: their number, W.
    """
    largest = jnp.finfo(x.dtype).max
    at = lambda dense: dense.at[stream.indices].get(mode="fill", fill_value=0)
    # Shares of what others put forward can be more than float32 holds; an inf would never leave.
    cut = lambda residual: jnp.clip(residual, -largest, largest)
    # Entries are few: a second dense vector, of their values, would take passes and memory.
    kept = cut(at(x) - stream.values + at(result.residual))
    residual = cut(x + result.residual).at[stream.indices].set(kept, mode="drop")
    sent = marked(stream._replace(values=jnp.where(kept != at(x), stream.values, 0)), x.size)
    return deliver(x, result.total, residual, sent, state, workers, overflow=result.overflow)


def deliver_means(x: Float[Array, " d"], kept: SparseStream, state: Any) -> Reduced:
    """The outcome of delivering exact means, `kept`, at distinct coordinates.

    A coordinate whose exact mean is zero counts as not sent, as in Alg. 3: the workers' values
    there cancel, and keeping them conserves their sum. So does one whose sum overflows.
    """
    kept = kept._replace(values=finite_sums(kept.values)[0])
    mean = to_dense(kept, x.size)
    sent = mean != 0
    residual = jnp.where(sent, jnp.zeros_like(x), x)
    return Reduced(mean, residual, sent, state, info(jnp.count_nonzero(kept.values)))


def marked(stream: SparseStream, size: int) -> Bool[Array, " d"]:
    """Where the stream has entries other than 0."""
    index = jnp.where(stream.values != 0, stream.indices, size)
    return jnp.zeros_like(stream.values, jnp.bool_, shape=(size,)).at[index].set(True, mode="drop")
