"""Positions of the True elements of a mask, without a sort, a long scatter or a long scan.

The mask is packed 32 elements to a word, and bits are counted in blocks of 32 words. So operations
that are slow per element (scans, scatters, gathers) run over a thousandth of the elements, or over
the slots of the result.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Int, Shaped, UInt32

from jaxsparse.arrays.platforms import Key, by_platform
from jaxsparse.arrays.settings import check_vector, static_int

# Number of bits of a word, and of words of a block.
_BITS = 32
_BLOCK = _BITS * _BITS
# Number of elements of a running sum that are summed at once, and the number up to which float32
# holds all integers.
_ALONG = 64
_EXACT = 2**24


def compact(mask: Bool[Array, " n"], capacity: int) -> Int[Array, " capacity"]:
    """Positions of the first `capacity` True elements, in increasing order.

    The result is that of `jnp.nonzero(mask, size=capacity, fill_value=mask.size)[0]`, but about
    thirty times faster on CPU if a hundredth of the mask is True. Slots without an element hold n,
    the index of an empty slot. The capacity may exceed n.

    >>> compact(jnp.array([False, True, True, False]), 3).tolist()
    [1, 2, 4]
    """
    check_vector("mask", mask)
    if mask.dtype != jnp.bool_:
        raise ValueError(f"mask has dtype {mask.dtype}, but must be bool: pass mask != 0")
    if static_int("capacity", capacity) < 0:
        raise ValueError(f"capacity={capacity} must be at least 0: it is the result's static size")
    return _compact(mask, static_int("capacity", capacity))


@functools.partial(jax.jit, static_argnames="capacity")
def _compact(mask: Bool[Array, " n"], capacity: int) -> Int[Array, " capacity"]:
    return compact_ranked(mask, lambda mask, rank: mask, 1, capacity)


def compact_ranked(
    x: Shaped[Array, " n"],
    mask: Callable[[Array, Int[Array, ""] | int], Bool[Array, " n"]],
    ranks: int,
    capacity: int,
    *,
    enough: int | None = None,
    first: Int[Array, ""] | int = 0,
) -> Int[Array, " capacity"]:
    """Positions of the first `capacity` elements of rank 0, increasing, then those of rank 1, ...

    Slots without an element hold n.

    Args:
        x: n elements, n < 2**31.
        mask: function of elements and a rank that says which of them have that rank. No element has
            two.
        ranks: number of ranks, at most 7.
        capacity: number of slots.
        enough: number of elements after which further ranks need not be looked for. A CPU stops
            there. None: the capacity.
        first: number of elements to leave out at the beginning of this order.

    >>> kind = jnp.array([1, 2, 0])
    >>> compact_ranked(kind, lambda kind, rank: kind == rank, 2, 3).tolist()
    [2, 0, 3]
    """
    size = x.size
    if not size or not capacity:
        return jnp.zeros_like(x, jnp.int32, shape=(capacity,))
    words, within, ends, block, always = by_platform(
        x,
        jnp.asarray(first, jnp.int32),
        default=functools.partial(
            _in_turn,
            mask=mask,
            ranks=ranks,
            capacity=capacity,
            enough=capacity if enough is None else enough,
        ),
        gpu=functools.partial(_at_once, mask=mask, ranks=ranks, capacity=capacity),
    )
    slot = lax.iota(jnp.int32, capacity) + first
    rank = slot - _at(ends - within[:, -1], block)
    word, rank = _find_word(within.ravel(), block * _BITS, rank)
    bit = _find_bit(_at(words.ravel(), word), rank)
    # Each rank has words for all elements, one rank after the other. No number is negative.
    position = lax.rem(word, jnp.int32(len(words) // ranks * _BITS)) * _BITS + bit
    found = jnp.where(slot < ends[-1], position, size)
    return lax.cond(always, lambda found: found, jnp.zeros_like, found)


def first_of_ranges(
    x: Shaped[Array, " n"],
    bounds: Sequence[UInt32[Array, ""]],
    capacity: int,
    *,
    key: Key = None,
    enough: int | None = None,
) -> Int[Array, " capacity"]:
    """`compact_ranked` with ranges of keys as ranks, each from its bound to the one before."""
    lower = jnp.stack(bounds)
    length = jnp.concatenate([jnp.uint32([2**31]), lower[:-1]]) - lower

    def mask(x: Array, rank: Array | int) -> Array:
        keys = x if key is None else key(x)
        return keys - lower[rank] < length[rank]  # keys below the range wrap round

    return compact_ranked(x, mask, len(bounds), capacity, enough=enough)


def compact_rows(
    mask: Bool[Array, "n width"], capacity: int
) -> tuple[Int[Array, "n capacity"], Int[Array, " n"]]:
    """Positions of the first `capacity` True elements of each row, and the number of all of them.

    Slots without an element hold any number. The number of True elements may exceed the capacity.

    >>> places, counts = compact_rows(jnp.array([[False, True, True], [True, False, False]]), 2)
    >>> places[0].tolist(), counts.tolist()
    ([1, 2], [2, 1])
    """
    n, width = mask.shape
    # The search needs a power of two of words.
    count = 1 << (-(-width // _BITS) - 1).bit_length()
    words = _words(jnp.pad(mask, ((0, 0), (0, count * _BITS - width))))
    block = min(count, _BITS)
    within = _sums_along(_counts(words).reshape(-1, block)).reshape(n, -1, block)
    ends = jnp.cumsum(within[:, :, -1], axis=1)
    within += jnp.pad(ends[:, :-1], ((0, 0), (1, 0)))[:, :, None]
    slot = lax.broadcasted_iota(jnp.int32, (n, capacity), 1)
    first = count * lax.broadcasted_iota(jnp.int32, (n, capacity), 0)
    word, rank = _find_word(within.ravel(), first, slot, count)
    bit = _find_bit(_at(words.ravel(), word), rank)
    return (word - first) * _BITS + bit, ends[:, -1]


class _Found(NamedTuple):
    """Bits and counts, from which the positions of the elements that have a rank are found."""

    words: UInt32[Array, "ranks*blocks 32"]  # the masks' bits
    within: Int[Array, "ranks*blocks 32"]  # count of a block's elements to the end of each word
    ends: Int[Array, " ranks*blocks"]  # count of all elements to the end of each block
    block: Int[Array, " capacity"]  # the block that holds the element of each slot
    # True, and for GPUs a constant. XLA's CPU backend fuses cheap operations into each operation
    # that uses their results, so that a step of top-k would compute positions five times. It fuses
    # nothing across a branch unless it finds out which side is taken. (Barriers are gone by then.)
    always: Bool[Array, ""]


def _in_turn(
    x: Shaped[Array, " n"],
    first: Int[Array, ""],
    *,
    mask: Callable[..., Array],
    ranks: int,
    capacity: int,
    enough: int,
) -> _Found:
    """The counts as a CPU finds them, one rank after the other."""
    if ranks == 1:
        words = _pack(mask(x, 0))
    else:
        words = _pack_in_turn(x, mask=mask, ranks=ranks, enough=enough)
    within = _sums_along(_counts(words))
    ends, block = _blocks_by_marks(within[:, -1], first, capacity=capacity)
    return _Found(words, within, ends, block, ends[-1] >= 0)


def _at_once(
    x: Shaped[Array, " n"],
    first: Int[Array, ""],
    *,
    mask: Callable[..., Array],
    ranks: int,
    capacity: int,
) -> _Found:
    """The counts as a GPU finds them, all ranks at once."""
    words = _pack(mask(x, 0)) if ranks == 1 else _pack_all(x, mask=mask, ranks=ranks)
    within = _sum_along(_counts(words))
    ends, block = _blocks_by_search(within[:, -1], first, capacity=capacity)
    return _Found(words, within, ends, block, jnp.ones_like(ends[-1], jnp.bool_))


def _counts(words: UInt32[Array, "blocks 32"]) -> Int[Array, "blocks 32"]:
    return lax.population_count(lax.optimization_barrier(words)).astype(jnp.int32)


def _pack_in_turn(
    x: Shaped[Array, " n"], *, mask: Callable[..., Array], ranks: int, enough: int
) -> UInt32[Array, "ranks*blocks 32"]:
    """The masks' bits, rank by rank. Once there are enough elements, further ranks have none.

    It is a loop, because XLA takes five times as long for several masks of one vector at once, and
    longer to compile them.
    """
    blocks = -(-x.size // _BLOCK)
    like = mask(x[:1], 0)

    def is_short(packed: tuple[Array, Array, Array]) -> Array:
        rank, found, _ = packed
        return (rank < ranks) & (found < enough)

    def pack(packed: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        rank, found, words = packed
        # Without the barrier, XLA computes the part of the mask that depends on x alone before the
        # loop, and stores it.
        more = _pack(mask(*lax.optimization_barrier((x, rank))))
        # Sum in lanes first, then across them.
        count = jnp.sum(lax.population_count(more).astype(jnp.int32), axis=0, dtype=jnp.int32)
        words = jnp.where(lax.iota(jnp.int32, ranks)[:, None, None] == rank, more[None], words)
        return rank + 1, found + jnp.sum(count, dtype=jnp.int32), words

    words = jnp.zeros_like(like, jnp.uint32, shape=(ranks, blocks, _BITS))
    none = jnp.int32(0), jnp.zeros_like(like, jnp.int32, shape=())
    return lax.while_loop(is_short, pack, (*none, words))[2].reshape(-1, _BITS)


def _pack_all(
    x: Shaped[Array, " n"], *, mask: Callable[..., Array], ranks: int
) -> UInt32[Array, "ranks*blocks 32"]:
    """`_pack_in_turn` without a loop, and for all ranks."""
    packed = (lax.optimization_barrier(_pack(mask(x, rank))) for rank in range(ranks))
    return jnp.concatenate(list(packed))


@jax.jit  # traced once for all ranks, on CPU and GPU
def _pack(mask: Bool[Array, " n"]) -> UInt32[Array, "blocks 32"]:
    """Bit i of word w of block b is element 1024 b + 32 w + i, or False past the end."""
    # The last block is packed by itself, because XLA takes four times as long for a padded vector.
    whole = mask.size - mask.size % _BLOCK
    rest = jnp.pad(mask[whole:], (0, -mask.size % _BLOCK))
    return jnp.concatenate([_words(mask[:whole]), _words(rest)]).reshape(-1, _BITS)


def _words(mask: Bool[Array, "*rows width"]) -> UInt32[Array, "*rows width/32"]:
    """The bits of the last axis, 32 to a word, beginning with the lowest."""
    # Bytes come first: a CPU adds up eight small numbers in half the time of 32 large ones.
    bits = mask.reshape(*mask.shape[:-1], -1, _BITS // 8, 8).astype(jnp.uint8)
    bits <<= lax.broadcasted_iota(jnp.uint8, bits.shape, bits.ndim - 1)
    return lax.bitcast_convert_type(jnp.sum(bits, axis=-1, dtype=jnp.uint8), jnp.uint32)


def running_sum(x: Int[Array, " n"], *, most: int, total: int) -> Int[Array, " n"]:
    """The sum of all elements up to and including each one. None is negative or above `most`.

    Rows are summed by products with a triangular matrix. CPUs compute these faster, and XLA
    compiles them sooner, than the passes that XLA makes of `jnp.cumsum`. `total` bounds their sum.
    """
    if x.size == 1 or min(most * _ALONG, total) > _EXACT:
        return jnp.cumsum(x)
    row = min(x.size, _ALONG)
    rows = jnp.pad(x, (0, -x.size % row)).reshape(-1, row)
    within = _sums_along(rows)
    if len(rows) > 1:
        sums = running_sum(within[:, -1], most=min(most * row, total), total=total)
        within += jnp.pad(sums[:-1], (1, 0))[:, None]
    return within.ravel()[: x.size]


def _sums_along(rows: Int[Array, "n m"]) -> Int[Array, "n m"]:
    """The running sum along each row. No element is negative, and no row's sum exceeds 2**24."""
    width = rows.shape[1]
    triangle = jnp.asarray(np.triu(np.ones((width, width), np.float32)))
    sums = lax.dot(rows.astype(jnp.float32), triangle, precision=lax.Precision.HIGHEST)
    return sums.astype(jnp.int32)


def _sum_along(rows: Int[Array, "n 32"]) -> Int[Array, "n 32"]:
    """The running sum along each row.

    On a CPU, `_sums_along` multiplies by a triangular matrix instead. There XLA would make a fusion
    of each of these steps, and each fusion would compute the steps before it again.
    """
    for step in (1, 2, 4, 8, 16):
        rows += jnp.pad(rows[:, :-step], ((0, 0), (step, 0)))
    return rows


def _blocks_by_marks(
    counts: Int[Array, " blocks"], first: Int[Array, ""], *, capacity: int
) -> tuple[Int[Array, " blocks"], Int[Array, " capacity"]]:
    """The count of elements to the end of each block, and the block of each slot's element.

    The first slot holds element number `first`. Slots without an element get any block. Each block
    marks the slot where it begins. The number of blocks that have begun up to a slot tells the last
    of them: blocks without elements begin where the next one does.
    """
    ends = running_sum(counts, most=_BLOCK, total=len(counts) * _BLOCK)
    blocks = len(counts)
    starts = jnp.maximum(jnp.pad(ends[:-1], (1, 0)) - first, 0)
    marks = jnp.zeros_like(ends, shape=(capacity,)).at[starts].add(1, mode="drop")
    return ends, running_sum(marks, most=blocks, total=blocks) - 1


def _blocks_by_search(
    counts: Int[Array, " blocks"], first: Int[Array, ""], *, capacity: int
) -> tuple[Int[Array, " blocks"], Int[Array, " capacity"]]:
    """`_blocks_by_marks` without a sum over the slots, which takes a GPU dozens of kernels."""
    ends = jnp.cumsum(counts)
    slot = lax.iota(jnp.int32, capacity) + first
    slot = jnp.minimum(slot, jnp.maximum(ends[-1] - 1, 0))
    block = jnp.searchsorted(ends, slot, side="right", method="scan_unrolled")
    return ends, jnp.where(ends[-1] > 0, block.astype(jnp.int32), 0)


def _find_word(
    within: Int[Array, " words"],
    first: Int[Array, "*slots"],
    rank: Int[Array, "*slots"],
    words: int = _BITS,
) -> tuple[Int[Array, "*slots"], Int[Array, "*slots"]]:
    """For each slot, the word that holds the rank-th element of a block, and its rank in the word.

    A block has `words` words, a power of two, and `first` is the first of them.
    """
    word, before = first, jnp.zeros_like(rank)
    for step in (words >> i for i in range(1, words.bit_length())):
        count = _at(within, word + (step - 1))
        right = count <= rank
        word, before = jnp.where(right, word + step, word), jnp.where(right, count, before)
    return word, rank - before


def _find_bit(word: UInt32[Array, "*slots"], rank: Int[Array, "*slots"]) -> Int[Array, "*slots"]:
    """The place of the rank-th set bit, counted from the lowest."""
    place = jnp.zeros_like(word)
    for step in (16, 8, 4, 2, 1):
        low = (word >> place) & np.uint32(2**step - 1)
        count = lax.population_count(low).astype(jnp.int32)
        right = count <= rank
        place = jnp.where(right, place + np.uint32(step), place)
        rank = jnp.where(right, rank - count, rank)
    return place.astype(jnp.int32)


def _at(x: Shaped[Array, " n"], indices: Int[Array, "*slots"]) -> Shaped[Array, "*slots"]:
    """x[indices]. The indices are in bounds, and checks would take as long as the rest."""
    return x.at[indices].get(mode="promise_in_bounds")
