"""Dense all-reduce, with which every other system is compared."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, UInt32

from jaxsparse.arrays import layout as layouts
from jaxsparse.codecs.codec import bits, from_bits
from jaxsparse.comm import wire
from jaxsparse.feedback.transformations import SystemOptions
from jaxsparse.reducers.base import Gathered, Kept, Sums
from jaxsparse.systems.table import system


@dataclasses.dataclass(frozen=True)
class Dense(Gathered):
    """The exact mean gradient by all-reduce. Changing one word switches to this baseline.

    All leaves travel in one message. If `is_dense` or `bucket_size` is given, the leaves that
    `is_dense` does not pick (by default matrices) travel in buckets, and their residual stays zero.
    Sums are of float32, and travel as such. `quantized("bfloat16")` is the same in 16 bits.

    `momentum` is heavy-ball momentum, as of `optax.trace(momentum)` behind it. It is not masked,
    because every step sends everything, and a mask would leave no momentum at all.

    Example:
        >>> import jax.numpy as jnp
        >>> tx = dense(axis_name=None, momentum=0.5)
        >>> state = tx.init(jnp.zeros(2))
        >>> for _ in range(2):
        ...     updates, state = tx.update(jnp.ones(2), state)
        >>> updates.tolist()
        [1.5, 1.5]
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


@dataclasses.dataclass(frozen=True)
class _Dense(SystemOptions, Dense):
    def transformation(self) -> optax.GradientTransformationExtraArgs:
        settings = self
        if self.is_dense is None and self.bucket_size is None:
            settings = dataclasses.replace(self, is_dense=layouts.everything)
        return SystemOptions.transformation(settings)


dense = system(_Dense, "dense", summary="exact mean by all-reduce", received="8 d (W-1)/W")
