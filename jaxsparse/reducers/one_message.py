"""Reducers whose whole exchange is one message from each worker, which all workers read."""

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jaxsparse.comm import wire
from jaxsparse.reducers.base import Owed, Reduced, Reducer, Total, settled


@dataclasses.dataclass(frozen=True)
class OneMessage(Reducer):
    """A reducer of one message. Derived classes define `message` and `total`.

    Its messages need no collective: whoever has read some workers' messages, in one order, knows
    their mean, bit for bit. (`feedback/by_message.py` hands those of a whole tree around.)

    A worker knows what it owes without waiting for others, with one exception. If the sum of a
    coordinate overflows, then it counts as not sent, and each worker keeps its summand. Only the
    sum shows that.
    """

    @abc.abstractmethod
    def message(
        self, x: Float[Array, " d"], state: Any, rank: Int[Array, ""]
    ) -> tuple[UInt32[Array, " words"], Owed]:
        """A worker's message, and what stays with it.

        Args:
            x: float32, this worker's whole vector.
            state: the reducer's state, from `init` or from the last message.
            rank: int32, a number of this worker's own, for draws that differ between workers.

        Returns:
            The message, whose length depends only on that of `x`, and what the worker keeps if its
            message counts.
        """

    @abc.abstractmethod
    def total(self, messages: UInt32[Array, "workers words"], size: int) -> Total:
        """What messages deliver, added up in their order.

        Args:
            messages: the messages of all workers that count.
            size: number of elements of the vectors, d.
        """

    def words(self, size: int) -> int:
        """The number of words of a message for vectors of `size` elements."""
        x = jax.ShapeDtypeStruct((size,), jnp.float32)
        make = lambda x: self.message(x, self.init(size), jnp.int32(0))[0]
        return jax.eval_shape(make, x).size

    def __call__(self, x: Float[Array, " d"], state: Any, *, axis_name: str | None) -> Reduced:
        """See `Reducer`."""
        message, own = self.message(x, state, wire.axis_index(axis_name))
        return settled(x, own, self.total(wire.all_gather(message, axis_name), x.size))
