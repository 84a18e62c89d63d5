"""Packs masks and signs into words of 32 bits."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, UInt32

__all__ = ["pack_bits", "unpack_bits", "words"]

_BITS = 32


def words(size: int) -> int:
    """The number of uint32 words that hold `size` bits.

    >>> words(33)
    2
    """
    return -(-size // _BITS)


def pack_bits(mask: Bool[Array, "*batch n"]) -> UInt32[Array, "*batch words"]:
    """Packs each vector. Bit b of word w is element b * words(n) + w, or 0 past the end.

    Neighbours are in neighbouring words, not in one word. Whole runs of elements are then shifted
    alike, which vectorises.

    Args:
        mask: bool, vectors along the last axis.

    Returns:
        uint32, with words(n) along the last axis.

    >>> pack_bits(jnp.array([True, False, True])).tolist()
    [5]
    """
    size = words(mask.shape[-1])
    padding = [(0, 0)] * (mask.ndim - 1) + [(0, size * _BITS - mask.shape[-1])]
    planes = jnp.pad(mask, padding).reshape(*mask.shape[:-1], _BITS, size)
    # In an OR of 32 shifted planes, XLA would compute the mask again for each plane.
    return jnp.sum(planes.astype(jnp.uint32) << _shifts(mask.ndim), axis=-2, dtype=jnp.uint32)


def unpack_bits(packed: UInt32[Array, "*batch words"], size: int) -> Bool[Array, "*batch n"]:
    """The vectors of `size` elements that `pack_bits` packed.

    >>> unpack_bits(jnp.uint32([5]), 3).tolist()
    [True, False, True]
    """
    planes = (packed[..., None, :] >> _shifts(packed.ndim)) & jnp.uint32(1)
    return planes.reshape(*packed.shape[:-1], -1)[..., :size] != 0


def _shifts(ndim: int) -> UInt32[Array, "..."]:
    shifts = jnp.arange(_BITS, dtype=jnp.uint32)[:, None]
    return jnp.expand_dims(shifts, tuple(range(ndim - 1)))
