"""The contract between a reducer and everything around it.

A reducer makes, from each worker's vector, an estimate of the mean over workers that costs few
bytes, and says what it did not deliver. `sum_w x_w == W * mean + sum_w residual_w` holds it
together: nothing is lost, only late.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxsparse.collectives import wire

_MOST = 2**31 - 1  # that an int32 holds


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


class Laws(NamedTuple):
    """What a reducer promises, and the contract test therefore checks."""

    conserves: bool  # sum_w x_w == W * mean + sum_w residual_w, to rounding
    dense_at_full_budget: bool  # with everything affordable, mean is the dense mean


@runtime_checkable
class Budget(Protocol):
    """Makes the reducers of all buckets from what they may spend together."""

    def split(self, sizes: tuple[int, ...], dense_size: int = 0) -> "tuple[Reducer, ...]":
        """One reducer for each bucket.

        Args:
            sizes: elements of each bucket.
            dense_size: elements that travel uncompressed beside the buckets.

        Raises:
            ValueError: the budget can't be met.
        """
        ...


@runtime_checkable
class Reducer(Budget, Protocol):
    """Exchanges one flat vector. Implementations are frozen dataclasses of static settings.

    As a `Budget`, a reducer whose settings are totals for the whole tree divides them.
    """

    @property
    def laws(self) -> Laws:
        """What it promises with its settings."""
        ...

    def init(self, size: int) -> Any:
        """One worker's initial state for vectors of `size` elements.

        Arrays that will differ between workers are `PerWorker`, all others replicated.
        """
        ...

    def __call__(self, x: Float[Array, " d"], state: Any, *, axis_name: str | None) -> Reduced:
        """Exchanges float32 `x` along `axis_name` (None: among one worker, nothing is sent)."""
        ...


def alignment(budget: Budget) -> int:
    """Elements that buckets must be multiples of: a block of reducers that have blocks."""
    return getattr(budget, "block_size", 1)


def needs_zeros(reducer: Reducer) -> bool:
    """Whether it sends whatever is not zero, so that only gradients, and not momentum, may go in.

    The momentum is then that of the mean, and what rounding to a leaf's dtype takes is forgotten,
    as for dense leaves.
    """
    return getattr(reducer, "needs_zeros", False)


def adapts_messages(reducer: Reducer) -> bool:
    """Whether the shape of its messages follows what was exchanged before.

    So shards that are exchanged side by side may send different ones. For a collective-permute,
    which is one for all devices, they would wait for each other for ever.
    """
    return getattr(reducer, "adapts_messages", False)


def bucket_seeds(seed: int, count: int) -> tuple[int, ...]:
    """Seeds, one for each bucket: equal ones would draw alike in buckets of one size."""
    # Multiples of an odd number are distinct modulo 2**32, and far apart for this one.
    return tuple((seed + bucket * 0x9E3779B9) % 2**32 for bucket in range(count))
