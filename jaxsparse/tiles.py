"""Loops over a vector tile by tile: what does not fit into a cache at once."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int

__all__ = ["over_tiles", "zeros"]

Carry = TypeVar("Carry")


def over_tiles(
    size: int, tile: int, step: Callable[[Int[Array, ""], Carry, int], Carry], carry: Carry
) -> Carry:
    """Folds `step(number, carry, length)` over all tiles; the length is static."""
    full, rest = divmod(size, tile)
    if full:
        carry = lax.fori_loop(
            jnp.int32(0), jnp.int32(full), lambda b, carry: step(b, carry, tile), carry
        )
    return step(jnp.int32(full), carry, rest) if rest else carry


def zeros(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, like: tuple[Array, ...]) -> Array:
    """Zeros with the replication type of all of `like` together, to start a loop's carry."""
    total = jnp.zeros(shape, dtype)
    for x in like:
        total += jnp.zeros_like(x, shape=shape, dtype=dtype)
    return total
