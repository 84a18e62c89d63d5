"""The contract between a reducer and everything around it.

A reducer estimates the mean of all workers' vectors with few bytes, and returns a residual: all
that it did not deliver. The contract is `sum_w x_w == W * mean + sum_w residual_w`: nothing is
lost, only late.

It is one function, and not a pair of compress and decompress, because residuals may arise inside a
collective, and masks may be global.
"""

import abc
import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxsparse.arrays.platforms import count_where
from jaxsparse.arrays.settings import Seed, Stages, check_fields
from jaxsparse.arrays.stream import SparseStream, filled, to_dense
from jaxsparse.collectives.messages import AllReduced

_MOST = 2**31 - 1  # the largest int32

# How well sum_w x_w == W * mean + sum_w residual_w holds. "exact": for all values whose sums and
# means are exact in float32. "to rounding": up to the rounding of each value. "to group rounding":
# up to the rounding of the largest value of a group, which shares a scale or a transform. "in
# expectation": on average over random draws. "leaks": not at all.
Conservation = Literal["exact", "to rounding", "to group rounding", "in expectation", "leaks"]


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
    """The result of one exchange of vectors of d elements among W workers.

    A reducer that sends few entries, n of them, may give residual and mask at these alone. Then
    neither takes a vector of d elements.
    """

    mean: Float[Array, " d"]  # float32 estimate of (1/W) sum_w x_w, bitwise equal on all workers
    residual: Float[Array, " n"]  # float32: this worker's share of all that was not delivered
    sent: Bool[Array, " n"] | None  # where to mask momentum; None: nowhere
    state: Any  # the reducer's own state
    info: Info
    # int32: where `residual` and `sent` are given. Each is in [0, d] and different from all others;
    # only d, an empty slot, may repeat. Elsewhere the residual is x, and nothing was sent. None:
    # `residual` and `sent` have d elements.
    indices: Int[Array, " n"] | None = None

    def whole(self, x: Float[Array, " d"]) -> "Reduced":
        """The same result with residual and mask as vectors of d elements.

        Args:
            x: the vector that was exchanged. It is the residual at all other elements.
        """
        if self.indices is None:
            return self
        residual = x.at[self.indices].set(self.residual, mode="drop")
        sent = self.sent
        if sent is not None:
            sent = filled(x.size, False, self.indices).at[self.indices].set(sent, mode="drop")
        return self._replace(residual=residual, sent=sent, indices=None)


class Leaf(NamedTuple):
    """One leaf of the gradient, all of whose elements are in a bucket."""

    path: str  # its key path, as `jax.tree_util.keystr` prints it
    shape: tuple[int, ...]


class Budget(abc.ABC):
    """Makes the reducers of all buckets from their common budget.

    It is not the reducer itself, because a compression ratio is for the whole tree, dense leaves
    included. It can be divided only once the layout is known.

    Derived classes are frozen dataclasses of static settings. Their fields' types say what values
    they take (`jaxsparse.arrays.settings.check_fields`).
    """

    def __post_init__(self):
        has_stages = self.has_stages
        check_fields(self)
        if not has_stages:
            self.check()

    @property
    def has_stages(self) -> bool:
        """Whether a setting is `Stages`. It then only stands for a reducer that changes."""
        return any(isinstance(value, Stages) for value in vars(self).values())

    def check(self) -> None:  # noqa: B027 - most settings do not
        """Raises ValueError where settings, each in range, contradict each other."""

    @property
    def alignment(self) -> int:
        """Sizes of all buckets but the last must be multiples of this, such as a block's size."""
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
    """Exchanges one flat vector.

    Derived classes override the defaults here. If a reducer's settings are totals for the whole
    tree, its `split` divides them among buckets.
    """

    # Whether residuals are given at few entries. The exchange then adds up in the leaves' shapes,
    # to write residuals over the old ones. It is a hint, on which no result depends.
    changes_few = False

    @property
    def system(self) -> str:
        """The name of what it computes. States of other systems are refused."""
        return type(self).__name__

    @property
    def conservation(self) -> Conservation:
        """How well it keeps the contract at the top of this file. Tests check it."""
        return "exact"

    @property
    def conserves(self) -> bool:
        """Whether each exchange conserves sums, at least up to rounding."""
        return self.conservation in ("exact", "to rounding", "to group rounding")

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

        Arrays that will differ between workers must be marked `PerWorker`. All others are
        replicated.
        """
        del size
        return ()

    def abstract_state(self, size: int) -> Any:
        """Shapes and dtypes of the state that `init` makes."""
        return jax.eval_shape(functools.partial(self.init, size))

    @abc.abstractmethod
    def __call__(self, x: Float[Array, " d"], state: Any, *, axis_name: str | None) -> Reduced:
        """Exchanges one vector with the other workers.

        Args:
            x: float32, this worker's whole vector.
            state: the reducer's state, from `init` or from the last exchange.
            axis_name: the axis of the workers. None: a single worker, which sends nothing.

        Returns:
            The mean, this worker's residual, and the new state.
        """


@dataclasses.dataclass(frozen=True)
class SeededReducer(Reducer):
    """A reducer with random draws. Each bucket has its own seed.

    Attributes:
        seed: seed of the draws, 0 <= seed < 2**32. Draws are fresh at each exchange.
    """

    seed: Seed = dataclasses.field(default=0, kw_only=True)

    def split(self, sizes: tuple[int, ...], dense_size: int = 0) -> "tuple[Reducer, ...]":
        """The same reducer with another seed for each bucket."""
        seeds = bucket_seeds(self.seed, len(sizes))
        return tuple(dataclasses.replace(self, seed=seed) for seed in seeds)

    def init(self, size: int) -> Any:
        """The number of exchanges so far, uint32, for fresh draws."""
        del size
        return jnp.uint32(0)


def bucket_seeds(seed: int, count: int) -> tuple[int, ...]:
    """A seed for each bucket. With equal seeds, buckets of one size would draw alike."""
    # Multiples of an odd number are distinct modulo 2**32; those of this number are far apart.
    return tuple((seed + bucket * 0x9E3779B9) % 2**32 for bucket in range(count))


# The functions below decide which worker keeps the parts that an exchange did not deliver.


def finite_sums(total: Array) -> tuple[Array, Bool[Array, "..."]]:
    """The sums with zeros where they overflow, and a mask of the finite ones.

    A sum that overflows counts as not sent: each worker keeps its summand. Otherwise an inf in the
    mean would be applied, and an inf in a residual would stay for ever.
    """
    finite = jnp.isfinite(total)
    return jnp.where(finite, total, 0), finite


class Total(NamedTuple):
    """What an exchange delivers; equal on all workers."""

    mean: Float[Array, " d"]  # float32
    sums: Float[Array, " d"] | None  # not finite where a sum overflows; None: none can overflow
    info: Info


class Owed(NamedTuple):
    """What stays with a worker that has sent its share, if no sum overflows; see `Reduced`."""

    residual: Float[Array, " n"]  # finite
    sent: Bool[Array, " n"] | None
    state: Any
    indices: Int[Array, " n"] | None = None


def summed(
    sums: Float[Array, " d"], workers: int, *, delivered: Any = None, overflow: Any = 0
) -> Total:
    """The mean that sums deliver.

    Args:
        sums: float32, equal on all workers. A sum that overflows counts as not sent.
        workers: number of workers, W.
        delivered: number of coordinates that the mean carries. None: count those that are not 0.
        overflow: number of entries without room in messages.
    """
    if delivered is None:
        delivered = count_where(sums, lambda sums: finite_sums(sums)[0] / workers != 0)
    return Total(finite_sums(sums)[0] / workers, sums, info(delivered, overflow))


def settled(x: Float[Array, " d"], own: Owed, total: Total) -> Reduced:
    """The result of an exchange: what arrived, and what a worker keeps of its vector `x`."""
    residual, sent = own.residual, own.sent
    if total.sums is not None:
        at = lambda dense: dense
        if own.indices is not None:  # entries are few, and dense vectors would cost passes
            at = lambda dense: dense.at[own.indices].get(mode="fill", fill_value=0)
        finite = jnp.isfinite(at(total.sums))
        residual = jnp.where(finite, residual, at(x))
        sent = None if sent is None else sent & finite
    return Reduced(total.mean, residual, sent, own.state, total.info, own.indices)


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
    """The result of an exchange with the sum `total`. A sum that overflows counts as not sent.

    Args:
        x: float32, this worker's whole vector.
        total: float32, the delivered sum, equal on all workers.
        residual: float32, this worker's share of the part that `total` lacks.
        sent: mask of the coordinates whose momentum becomes 0, unless their sum overflows. None: no
            coordinates.
        state: the reducer's new state.
        workers: number of workers, W.
        delivered: number of coordinates that the mean carries. None: count those that are not 0.
        overflow: number of entries without room in messages.
    """
    # Rounding, or partial sums that this worker dropped, can overflow, and would stay so for ever.
    own = Owed(jnp.nan_to_num(jnp.asarray(residual, x.dtype)), sent, state)
    return settled(x, own, summed(total, workers, delivered=delivered, overflow=overflow))


def deliver_merged(
    x: Float[Array, " d"],
    total: Float[Array, " d"],
    discarded: Float[Array, " d"],
    selected: Bool[Array, " d"],
    state: Any,
    workers: int,
) -> Reduced:
    """The result of an exchange that drops entries on the way.

    Where a sum arrived, a worker's residual is `discarded`: the entries that it dropped itself.
    Where none did, each worker keeps its own entry, which covers any drops (SparDL, Alg. 1). A sum
    other than 0 counts as arrived. Sums that cancel or overflow do not, and the workers' own
    entries conserve them as well.

    Args:
        x: float32, this worker's whole vector.
        total: float32, the delivered sum, equal on all workers.
        discarded: float32, the entries that this worker dropped; unused where `total` is 0.
        selected: mask of the entries that this worker put forward.
        state: the reducer's new state.
        workers: number of workers, W.
    """
    arrived = finite_sums(total)[0] != 0
    residual = jnp.where(arrived, discarded, x)
    delivered = count_where(total, lambda total: finite_sums(total)[0] != 0)
    return deliver(x, total, residual, arrived & selected, state, workers, delivered=delivered)


def deliver_streams(
    x: Float[Array, " d"],
    stream: SparseStream,
    result: AllReduced,
    state: Any,
    workers: int,
) -> Reduced:
    """The result of a sparse all-reduce of entries of `x`.

    A worker's residual has the entries that it did not select, and its share of the all-reduce's
    residual.

    Args:
        x: float32, this worker's whole vector.
        stream: the entries that it put forward, with distinct indices. Where their values differ
            from those of `x`, the residual keeps the difference.
        result: the result of the all-reduce. If its residual is given at few entries, they are
            those of `stream`, in its order.
        state: the reducer's new state.
        workers: number of workers, W.
    """
    is_few = result.indices is not None
    lost = result.residual
    if not is_few:
        lost = lost.at[stream.indices].get(mode="fill", fill_value=0)
    total = summed(result.total, workers, overflow=result.overflow)
    reduced = settled(x, owed(x, stream, lost, state), total)
    if is_few:
        return reduced
    elsewhere = jnp.where(jnp.isfinite(result.total), jnp.nan_to_num(x + result.residual), x)
    return reduced.whole(elsewhere)


def owed(x: Float[Array, " d"], stream: SparseStream, lost: Float[Array, " n"], state: Any) -> Owed:
    """What stays with a worker that sends the entries `stream` of `x`.

    Args:
        x: float32, this worker's whole vector.
        stream: see `deliver_streams`.
        lost: float32, the part of each entry that messages lack.
        state: the reducer's new state.
    """
    values = x.at[stream.indices].get(mode="fill", fill_value=0)
    # Shares of others' entries can overflow float32, and an inf would stay for ever.
    kept = jnp.nan_to_num(values - stream.values + lost)
    return Owed(kept, (kept != values) & (stream.values != 0), state, stream.indices)


def deliver_means(x: Float[Array, " d"], kept: SparseStream, state: Any) -> Reduced:
    """Delivers exact means, `kept`, at distinct coordinates.

    A coordinate counts as not sent if its exact mean is zero, as in Sketched-SGD's Alg. 3. The
    workers' values cancel there, so residuals that keep them conserve their sum. A coordinate also
    counts as not sent if its sum overflows.
    """
    kept = kept._replace(values=finite_sums(kept.values)[0])
    sent = kept.values != 0
    own = x.at[kept.indices].get(mode="fill", fill_value=0)
    residual = jnp.where(sent, jnp.zeros_like(own), own)
    counts = info(jnp.count_nonzero(kept.values))
    return Reduced(to_dense(kept, x.size), residual, sent, state, counts, kept.indices)


def marked(stream: SparseStream, size: int) -> Bool[Array, " d"]:
    """A mask of the elements at which the stream has an entry other than 0."""
    index = jnp.where(stream.values != 0, stream.indices, size)
    return filled(size, False, index).at[index].set(True, mode="drop")
