"""Positions of the True elements of a mask, without a sort, a long scatter or a long scan.

The mask is packed 32 elements to a word and the words are counted in blocks of 32, so anything
that is slow per element (scans, scatters, gathers) runs over a thousandth of the elements, or over
the slots of the result.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Int, Shaped, UInt32

from jaxsparse.platforms import by_platform
from jaxsparse.select.checks import check_vector
from jaxsparse.tiles import zeros

__all__ = ["compact", "compact_ranked"]

# Bits a word; also words a block, so that a block is a square of bits.
_BITS = 32
_BLOCK = _BITS * _BITS


@functools.partial(jax.jit, static_argnames="capacity")
def compact(mask: Bool[Array, " n"], capacity: int) -> Int[Array, " capacity"]:
    """Positions of the first `capacity` True elements, in increasing order.

    The same as `jnp.nonzero(mask, size=capacity, fill_value=mask.size)[0]`, but some thirty
    times faster on CPU where a hundredth is True. The work is one pass over the mask, a few over
    its n / 32 words, and a running maximum and seven gathers for each slot.

    Args:
        mask: bool[n], n < 2**31.
        capacity: slots, at least 0; more than n are allowed.

    Returns:
        int32[capacity]; slots without an element hold n, the index of an empty slot.

    Raises:
        ValueError: mask is not a bool vector, or capacity is not an int of at least 0.

    Example:
        >>> import jax.numpy as jnp
        >>> compact(jnp.array([False, True, True, False]), 3).tolist()
        [1, 2, 4]
    """
    check_vector("mask", mask)
    if mask.dtype != jnp.bool_:
        raise ValueError(f"mask has dtype {mask.dtype}, but must be bool: pass mask != 0")
    if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 0:
        raise ValueError(
            f"capacity={capacity!r} must be an int of at least 0: it is the result's static size"
        )
    return compact_ranked([mask], capacity)


def compact_ranked(masks: Sequence[Bool[Array, " n"]], capacity: int) -> Int[Array, " capacity"]:
    """Positions of the first `capacity` True elements of several masks, one mask after another.

    Args:
        masks: bool[n] each, n < 2**31; no element True in two of them.
        capacity: slots.

    Returns:
        int32[capacity]: first all of the first mask, increasing, then those of the second, and so
        on; slots without an element hold n.

    >>> masks = [jnp.array([False, False, True]), jnp.array([True, False, False])]
    >>> compact_ranked(masks, 3).tolist()
    [2, 0, 3]
    """
    size = masks[0].size
    if not size or not capacity:
        return zeros((capacity,), jnp.int32, tuple(masks))
    # Apart: packing several masks of one vector at once takes XLA five times as long.
    words = jnp.concatenate([lax.optimization_barrier(_pack(mask)) for mask in masks])
    blocks = words.shape[0] // len(masks)  # of each mask

    counts = lax.population_count(words).astype(jnp.int32)
    # Elements up to and with each word of its block.
    within = by_platform(
        counts,
        default=functools.partial(_running_sum, barrier=lax.optimization_barrier),
        gpu=functools.partial(_running_sum, barrier=lambda rows: rows),
    )
    in_block = within[:, -1]
    ends = jnp.cumsum(in_block)
    block = by_platform(
        ends,
        default=functools.partial(_blocks_by_maximum, capacity=capacity),
        gpu=functools.partial(_blocks_by_search, capacity=capacity),
    )

    slot = lax.iota(jnp.int32, capacity)
    rank = slot - _at(ends - in_block, block)
    word, rank = _find_word(within.ravel(), block * _BITS, rank)
    bit = _find_bit(_at(words.ravel(), word), rank)
    position = (block % blocks * _BITS + word % _BITS) * _BITS + bit
    return jnp.where(slot < ends[-1], position, size)


def _pack(mask: Bool[Array, " n"]) -> UInt32[Array, "blocks 32"]:
    """Bit i of word w of block b is element 1024 b + 32 w + i; False past the end."""
    square = jnp.pad(mask, (0, -mask.size % _BLOCK)).reshape(-1, _BITS, _BITS)
    # Words are made of columns, which vectorises, as a sum along the last axis does not; then
    # every block of bits is transposed.
    words = square[:, 0].astype(jnp.uint32)
    for row in range(1, _BITS):
        words |= square[:, row].astype(jnp.uint32) << np.uint32(row)
    return _transpose(words)


def _transpose(words: UInt32[Array, "blocks 32"]) -> UInt32[Array, "blocks 32"]:
    """Transposes 32 x 32 bits, by swaps of ever smaller squares (Hacker's Delight, 7-3)."""
    for half, low_bits in (
        (16, 0x0000FFFF),
        (8, 0x00FF00FF),
        (4, 0x0F0F0F0F),
        (2, 0x33333333),
        (1, 0x55555555),
    ):
        pairs = words.reshape(-1, _BITS // (2 * half), 2, half)
        top, bottom = pairs[:, :, 0], pairs[:, :, 1]
        swap = ((top >> np.uint32(half)) ^ bottom) & np.uint32(low_bits)
        top, bottom = top ^ (swap << np.uint32(half)), bottom ^ swap
        words = jnp.stack([top, bottom], axis=2).reshape(-1, _BITS)
    return words


def _running_sum(
    rows: Int[Array, "n 32"], *, barrier: Callable[[Array], Array]
) -> Int[Array, "n 32"]:
    """The running sum along each row.

    Without barriers XLA fuses the steps, each of which then computes the one before twice: on a
    CPU too much work, on a GPU less than it takes to start four further kernels.
    """
    for step in (1, 2, 4, 8, 16):
        before = jnp.pad(rows[:, :-step], ((0, 0), (step, 0)))
        rows = barrier(rows + before)
    return rows


def _blocks_by_maximum(ends: Int[Array, " blocks"], *, capacity: int) -> Int[Array, " capacity"]:
    """The block that holds the element of each slot, from elements up to and with each block.

    Of slots without an element the last one that has any, or 0. A block's number goes to its first
    slot, and from there to the slots after it.
    """
    starts = jnp.pad(ends[:-1], (1, 0))
    first_slot = jnp.where(ends > starts, starts, capacity)
    numbers = lax.iota(jnp.int32, len(ends))
    block = zeros((capacity,), jnp.int32, (ends,))
    return lax.cummax(block.at[first_slot].max(numbers, mode="drop"))


def _blocks_by_search(ends: Int[Array, " blocks"], *, capacity: int) -> Int[Array, " capacity"]:
    """`_blocks_by_maximum` with no scan over the slots, which takes a GPU dozens of kernels."""
    slot = jnp.minimum(lax.iota(jnp.int32, capacity), jnp.maximum(ends[-1] - 1, 0))
    block = jnp.searchsorted(ends, slot, side="right", method="scan_unrolled")
    return jnp.where(ends[-1] > 0, block.astype(jnp.int32), 0)


def _find_word(
    within: Int[Array, " words"], first: Int[Array, " k"], rank: Int[Array, " k"]
) -> tuple[Int[Array, " k"], Int[Array, " k"]]:
    """The words that hold the rank-th elements of blocks, and their ranks in these words."""
    word, before = first, jnp.zeros_like(rank)
    for step in (16, 8, 4, 2, 1):
        count = _at(within, word + (step - 1))
        right = count <= rank
        word, before = jnp.where(right, word + step, word), jnp.where(right, count, before)
    return word, rank - before


def _find_bit(word: UInt32[Array, " k"], rank: Int[Array, " k"]) -> Int[Array, " k"]:
    """The place of the rank-th set bit, counted from the lowest."""
    place = jnp.zeros_like(word)
    for step in (16, 8, 4, 2, 1):
        low = (word >> place) & np.uint32(2**step - 1)
        count = lax.population_count(low).astype(jnp.int32)
        right = count <= rank
        place = jnp.where(right, place + np.uint32(step), place)
        rank = jnp.where(right, rank - count, rank)
    return place.astype(jnp.int32)


def _at(x: Shaped[Array, " n"], indices: Int[Array, " k"]) -> Shaped[Array, " k"]:
    """x[indices], of indices in bounds: the checks would take as long as the rest."""
    return x.at[indices].get(mode="promise_in_bounds")
