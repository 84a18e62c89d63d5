"""The contract between a reducer and everything around it.

A reducer adds up all workers' vectors with few bytes, `(sums, kept) = reduce(x, ...)`, and each
worker keeps a residual: all that was not delivered. The contract is
`sum_w x_w == sums.total + sum_w kept_w.residual`: nothing is lost, only late. `deliver` finishes an
exchange: it divides by W, and gives sums that overflow back to their summands.

It is one function, and not a pair of compress and decompress, because residuals may arise inside a
collective, and masks may be global. A `Gathered` reducer is such a pair.
"""

import abc
import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxsparse.arrays.platforms import count_where
from jaxsparse.arrays.settings import Seed, check_fields
from jaxsparse.arrays.stream import SparseStream, filled, to_dense
from jaxsparse.collectives.messages import AllReduced
from jaxsparse.comm import wire

_MOST = 2**31 - 1  # the largest int32

# How well the contract holds. "exact": for all values whose sums and means are exact in float32.
# "to rounding": up to the rounding of each value. "to group rounding": up to the rounding of the
# largest value of a group, which shares a scale or a transform. "in expectation": on average over
# random draws. "leaks": not at all.
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


class Sums(NamedTuple):
    """What an exchange delivers; equal on all workers."""

    total: Float[Array, " d"]  # float32. A sum that is not finite counts as not sent
    # Number of coordinates that the mean carries. None: count those that are not 0, in a pass.
    delivered: Int[Array, ""] | int | None = None
    overflow: Int[Array, ""] | int = 0  # see `Info`
    # True once overflow is handled: `total` is finite, and summands of overflowed sums are kept.
    is_settled: bool = False

    def info(self, workers: int) -> Info:
        delivered = self.delivered
        if delivered is None:
            of_finite = lambda total: jnp.where(jnp.isfinite(total), total, 0)
            delivered = count_where(self.total, lambda total: of_finite(total) / workers != 0)
        return info(delivered, self.overflow)


class Kept(NamedTuple):
    """What stays with a worker that has sent its share of a vector of d elements, x.

    A reducer that sends few entries, n of them, may give residual and mask at these alone. Then
    neither takes a vector of d elements.
    """

    residual: Float[Array, " n"]  # float32: its share of all that was not delivered
    sent: Bool[Array, " n"] | None  # where to mask momentum; None: nowhere
    state: Any  # the reducer's own state
    # int32: where `residual` and `sent` are given. Each is in [0, d] and different from all others;
    # only d, an empty slot, may repeat. Elsewhere the residual is x, and nothing was sent. None:
    # `residual` and `sent` have d elements.
    indices: Int[Array, " n"] | None = None

    def whole(self, x: Float[Array, " d"]) -> "Kept":
        """The same with residual and mask as vectors of d elements. `x` is what was exchanged."""
        if self.indices is None:
            return self
        residual = x.at[self.indices].set(self.residual, mode="drop")
        sent = self.sent
        if sent is not None:
            sent = filled(x.size, False, self.indices).at[self.indices].set(sent, mode="drop")
        return Kept(residual, sent, self.state)


class Reduced(NamedTuple):
    """A finished exchange."""

    mean: Float[Array, " d"]  # float32 estimate of (1/W) sum_w x_w, bitwise equal on all workers
    kept: Kept  # all of it finite
    info: Info


class Leaf(NamedTuple):
    """One leaf of the gradient, all of whose elements are in a bucket."""

    path: str  # its key path, as `jax.tree_util.keystr` prints it
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Reducer(abc.ABC):
    """Exchanges one flat vector.

    Derived classes override the defaults here. They are frozen dataclasses of static settings, and
    their fields' types say what values they take (`jaxsparse.arrays.settings.check_fields`). If
    settings are totals for the whole tree, such as a compression ratio, `split` divides them among
    buckets once the layout is known.
    """

    def __post_init__(self):
        check_fields(self)
        self.check()

    def check(self) -> None:  # noqa: B027 - most settings do not
        """Raises ValueError where settings, each in range, contradict each other."""

    @property
    def alignment(self) -> int:
        """Where buckets cut leaves, they do it at multiples of this, such as a block's size."""
        return 1

    @property
    def whole_leaves(self) -> bool:
        """Whether no leaf may straddle buckets. `with_leaves` then tells reducers their leaves."""
        return False

    @property
    def name(self) -> str:
        """The name of what it computes. States of reducers of other names are refused."""
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
    def needs_zeros(self) -> bool:
        """Whether it sends all that is not zero, so that its input must have no momentum.

        With momentum, or with the rounding to a leaf's dtype in the residual, every row that was
        ever touched would stay non-zero for ever. So the momentum is that of the mean, and this
        rounding is dropped, as for dense leaves.
        """
        return False

    def split(self, sizes: tuple[int, ...], dense_size: int = 0) -> "tuple[Reducer, ...]":
        """One reducer for each bucket of these sizes, beside so many dense elements."""
        return (self,) * len(sizes)

    def with_leaves(self, leaves: tuple[Leaf, ...]) -> "Reducer":
        """The same reducer for a bucket of these leaves, end to end. Used if `whole_leaves`."""
        del leaves
        return self

    def init(self, size: int) -> Any:
        """One worker's initial state for vectors of `size` elements. Default: none.

        Arrays that will differ between workers must be marked `PerWorker`. All others are
        replicated.
        """
        del size
        return ()

    def abstract_state(self, size: int) -> Any:
        return jax.eval_shape(functools.partial(self.init, size))

    @abc.abstractmethod
    def reduce(self, x: Float[Array, " d"], state: Any, axis_name: str | None) -> tuple[Sums, Kept]:
        """Exchanges a worker's whole vector, float32, with the other workers.

        `state` is from `init` or from the last exchange. With no `axis_name` there is a single
        worker, which sends nothing.
        """

    def pmean(self, x: Float[Array, " d"], state: Any, axis_name: str | None) -> Reduced:
        """The mean of all workers' vectors, and what stays with this worker, see `reduce`.

        A collective for a `jax.shard_map` or `jax.vmap` of your own: all workers of the axis call
        it.

        >>> import jax, jaxsparse
        >>> def exchange(x):
        ...     mean, kept, _ = jaxsparse.reducers.TopK(0.5).pmean(x, (), "data")
        ...     return mean, kept.whole(x).residual
        >>> of_two = jax.numpy.float32([[4, 1], [2, 3]])
        >>> mean, residual = jax.vmap(exchange, axis_name="data")(of_two)
        >>> mean[0].tolist(), residual.tolist()
        ([2.0, 1.5], [[0.0, 1.0], [2.0, 0.0]])
        """
        return deliver(x, *self.reduce(x, state, axis_name), wire.axis_size(axis_name))


@dataclasses.dataclass(frozen=True)
class SeededReducer(Reducer):
    """A reducer with random draws. Each bucket has its own seed.

    Args:
        seed: seed of the draws, 0 <= seed < 2**32. Draws are fresh at each exchange.
    """

    seed: Seed = dataclasses.field(default=0, kw_only=True)

    def split(self, sizes: tuple[int, ...], dense_size: int = 0) -> "tuple[Reducer, ...]":
        seeds = bucket_seeds(self.seed, len(sizes))
        return tuple(dataclasses.replace(self, seed=seed) for seed in seeds)

    def init(self, size: int) -> Any:
        del size
        return jnp.uint32(0)


def check_reducer(reducer: Any, place: str = "reducer=") -> Reducer:
    """What a user gave for a reducer, at a place for errors.

    Raises:
        ValueError: it is none, or it is not hashable. Leaves are grouped by equal reducers.
    """
    if not isinstance(reducer, Reducer):
        raise ValueError(
            f"{place}{reducer!r} must be a reducer, such as jaxsparse.reducers.TopK(0.01)"
        )
    try:
        hash(reducer)
    except TypeError:
        raise ValueError(
            f"{place}{reducer!r} is not hashable, and leaves are grouped by equal reducers: make "
            "it a frozen dataclass"
        ) from None
    return reducer


def bucket_seeds(seed: int, count: int) -> tuple[int, ...]:
    """A seed for each bucket. With equal seeds, buckets of one size would draw alike."""
    # Multiples of an odd number are distinct modulo 2**32; those of this number are far apart.
    return tuple((seed + bucket * 0x9E3779B9) % 2**32 for bucket in range(count))


@dataclasses.dataclass(frozen=True)
class Gathered(Reducer):
    """A reducer whose exchange is one message from each worker, which all workers read.

    Its messages need no collective: whoever has read some workers' messages, in one order, knows
    their sums, bit for bit. (`feedback/messages.py` hands those of a whole tree around.)
    """

    @abc.abstractmethod
    def encode(
        self, x: Float[Array, " d"], state: Any, rank: Int[Array, ""]
    ) -> tuple[UInt32[Array, " words"], Kept]:
        """A worker's message, and what stays with it if its message counts.

        The length of the message depends only on that of `x`. `rank` is a number of this worker's
        own, for draws that differ between workers.
        """

    @abc.abstractmethod
    def decode(self, messages: UInt32[Array, "workers words"], size: int) -> Sums:
        """What the messages that count deliver, added up in their order; d = `size` elements."""

    def words(self, size: int) -> int:
        x = jax.ShapeDtypeStruct((size,), jnp.float32)
        make = lambda x: self.encode(x, self.init(size), jnp.int32(0))[0]
        return jax.eval_shape(make, x).size

    def reduce(self, x: Float[Array, " d"], state: Any, axis_name: str | None) -> tuple[Sums, Kept]:
        message, kept = self.encode(x, state, wire.axis_index(axis_name))
        return self.decode(wire.all_gather(message, axis_name), x.size), kept


def settle(x: Float[Array, " d"], sums: Sums, kept: Kept) -> tuple[Sums, Kept]:
    """Gives sums that overflow back to their summands: they count as not sent.

    Otherwise an inf in the mean would be applied, and an inf in a residual would stay for ever.
    """
    if sums.is_settled:
        return sums, kept
    at = lambda dense: dense
    if kept.indices is not None:  # entries are few, and dense vectors would cost passes
        at = lambda dense: dense.at[kept.indices].get(mode="fill", fill_value=0)
    finite = jnp.isfinite(at(sums.total))
    # Rounding, or partial sums that this worker dropped, can overflow, too.
    residual = jnp.where(finite, jnp.nan_to_num(kept.residual), at(x))
    sent = None if kept.sent is None else kept.sent & finite
    total = jnp.where(jnp.isfinite(sums.total), sums.total, 0)
    kept = kept._replace(residual=residual, sent=sent)
    return sums._replace(total=total, is_settled=True), kept


def deliver(x: Float[Array, " d"], sums: Sums, kept: Kept, workers: int) -> Reduced:
    """The finished exchange of a worker's vector `x` with W = `workers`."""
    counts = sums.info(workers)
    sums, kept = settle(x, sums, kept)
    return Reduced(sums.total / workers, kept, counts)


# The functions below decide what a worker keeps.


def keep_entries(
    x: Float[Array, " d"], stream: SparseStream, lost: Float[Array, " n"], state: Any
) -> Kept:
    """What a worker keeps that sends the entries `stream` of `x`, with distinct indices.

    Where their values differ from those of `x`, the residual keeps the difference, and `lost`, the
    part of each entry that messages lack.
    """
    values = x.at[stream.indices].get(mode="fill", fill_value=0)
    # Shares of others' entries can overflow float32, and an inf would stay for ever.
    residual = jnp.nan_to_num(values - stream.values + lost)
    return Kept(residual, (residual != values) & (stream.values != 0), state, stream.indices)


def keep_streams(
    x: Float[Array, " d"], stream: SparseStream, result: AllReduced, state: Any
) -> tuple[Sums, Kept]:
    """The exchange of a sparse all-reduce of entries of `x`; see `keep_entries`.

    A worker keeps the entries that it did not select, and its share of the all-reduce's residual.
    If that is given at few entries, they are those of `stream`, in its order.
    """
    sums = Sums(result.total, overflow=result.overflow)
    if result.indices is not None:
        return sums, keep_entries(x, stream, result.residual, state)
    lost = result.residual.at[stream.indices].get(mode="fill", fill_value=0)
    return sums, keep_entries(x, stream, lost, state).whole(x + result.residual)


def keep_merged(
    x: Float[Array, " d"],
    total: Float[Array, " d"],
    discarded: Float[Array, " d"],
    selected: Bool[Array, " d"],
    state: Any,
) -> tuple[Sums, Kept]:
    """The exchange with the sum `total` that drops entries on the way.

    Where a sum arrived, a worker's residual is `discarded`: the entries that it dropped itself.
    Where none did, each worker keeps its own entry, which covers any drops (SparDL, Alg. 1). A sum
    other than 0 counts as arrived. Sums that cancel or overflow do not, and the workers' own
    entries conserve them as well. `selected` are the entries that this worker put forward.
    """
    has_arrived = lambda total: jnp.isfinite(total) & (total != 0)
    arrived = has_arrived(total)
    residual = jnp.where(arrived, discarded, x)
    return Sums(total, count_where(total, has_arrived)), Kept(residual, arrived & selected, state)


def keep_rest(x: Float[Array, " d"], sums: SparseStream, state: Any) -> tuple[Sums, Kept]:
    """The exchange that delivers exact sums at distinct coordinates, and nothing else.

    A coordinate counts as not sent if its sum is zero, as in Sketched-SGD's Alg. 3. The workers'
    values cancel there, so residuals that keep them conserve their sum. A coordinate also counts as
    not sent if its sum overflows.
    """
    values = jnp.where(jnp.isfinite(sums.values), sums.values, 0)
    sent = values != 0
    own = x.at[sums.indices].get(mode="fill", fill_value=0)
    residual = jnp.where(sent, jnp.zeros_like(own), own)
    total = to_dense(SparseStream(sums.indices, values), x.size)
    counted = Sums(total, jnp.count_nonzero(values), is_settled=True)
    return counted, Kept(residual, sent, state, sums.indices)


def mask_of(stream: SparseStream, size: int) -> Bool[Array, " d"]:
    """A mask of the elements at which the stream has an entry other than 0."""
    index = jnp.where(stream.values != 0, stream.indices, size)
    return filled(size, False, index).at[index].set(True, mode="drop")
