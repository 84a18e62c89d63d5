"""Dense all-reduce, with which every other reducer is compared."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jaxsparse.codecs.codec import bits, from_bits
from jaxsparse.comm import wire
from jaxsparse.reducers.base import Gathered, Kept, Sums


@dataclasses.dataclass(frozen=True)
class Dense(Gathered):
    """The exact mean gradient by all-reduce. Changing one word switches to this baseline.

    All leaves travel in one message. If `is_dense` or `bucket_size` is given, the leaves that
    `is_dense` does not pick (by default matrices) travel in buckets, and their residual stays zero.
    Sums are of float32, and travel as such. `quantized("bfloat16")` is the same in 16 bits.

    `momentum` is heavy-ball momentum, as of `optax.trace(momentum)` behind it. It is not masked,
    because every step sends everything, and a mask would leave no momentum at all.
    """

    def reduce(self, x: Float[Array, " d"], state: Any, axis_name: str | None) -> tuple[Sums, Kept]:
        """An all-reduce takes fewer bytes than messages."""
        return Sums(wire.psum(x, axis_name), x.size), Kept(jnp.zeros_like(x), None, state)

    def encode(
        self, x: Float[Array, " d"], state: Any, rank: Int[Array, ""]
    ) -> tuple[UInt32[Array, " d"], Kept]:
        return bits(x), Kept(jnp.zeros_like(x), None, state)

    def decode(self, messages: UInt32[Array, "workers d"], size: int) -> Sums:
        return Sums(jnp.sum(from_bits(messages, jnp.float32), axis=0), size)
