"""A vector tile by tile: loops, for what does not fit into a cache, and tiles laid around slots."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int

__all__ = ["laid_around", "over_tiles", "zeros"]

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


def laid_around(start: Int[Array, "*tiles 1"], tile: int) -> Int[Array, "*tiles tile"]:
    """Which element of a tile lies at each of `tile` slots, if its first one lies at slot `start`.

    >>> laid_around(jnp.array([[0], [2]]), 3).tolist()
    [[0, 1, 2], [1, 2, 0]]
    """
    shape = (1,) * (start.ndim - 1) + (tile,)
    within = lax.broadcasted_iota(jnp.int32, shape, start.ndim - 1) - start
    return jnp.where(within < 0, within + tile, within)


def zeros(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, like: tuple[Array, ...]) -> Array:
    """Zeros with the replication type of all of `like` together, to start a loop's carry."""
    total = jnp.zeros(shape, dtype)
    for x in like:
        total += jnp.zeros_like(x, shape=shape, dtype=dtype)
    return total
