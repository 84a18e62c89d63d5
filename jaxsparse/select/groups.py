"""The largest elements of each of many short runs, and the largest of these runs."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int, Int32

from jaxsparse.arrays import blocks
from jaxsparse.arrays.blocks import BlockStream
from jaxsparse.arrays.magnitude import norms
from jaxsparse.arrays.platforms import by_digits
from jaxsparse.arrays.settings import check_k, check_vector, static_int
from jaxsparse.arrays.stream import SparseStream
from jaxsparse.select.compaction import compact, compact_rows

# Largest number of rows of a group's grid. A round reads so many elements of the group again.
_ROWS = 16
# The number of columns is a multiple of this, so that their maxima vectorise.
_VECTOR = 8
# Largest k that is found by rounds. Beyond it, candidates are faster.
_MAX_ROUNDS = 16
# Largest number of elements to sort. Sorting them takes less time than compiling anything else.
_SORTED = 2**14
# Number of maxima, and of slots for the candidates that they let pass, for each of k entries. With
# random data 1.15 k pass. A group with more than fit, as among equal magnitudes, is sorted.
_MAXIMA, _ROOM = 4, 1.5
# Number of bits of a magnitude, and of its highest bits, which set the bound for candidates.
_KEY_BITS, _COARSE_BITS = 31, 16
# Number of bits that a pass determines, by one sum for all of its trials.
_DIGIT_BITS = 2


def group_top_k(x: Float[Array, " d"], k: int = 4, group_size: int = 512) -> SparseStream:
    """The k entries of largest magnitude of every `group_size` consecutive elements, exactly.

    Of equal magnitudes the lower index comes first. A last group that is shorter gives min(k, its
    length) entries, so no slot is empty. Entries come group by group. Within a group they are in
    order of falling magnitude if k is at most 16, else of rising indices.

    SparCML (Renggli et al., 2019), sections 8.3 and 8.4: 8 or 16 of 512 for small images, 1 of 512
    for wide networks on ImageNet, 2 or 4 of 512 for text and speech.

    >>> group_top_k(jnp.array([1.0, -3.0, 2.0, 0.0, 5.0]), 1, 2).indices.tolist()
    [1, 2, 4]
    """
    check_vector("x", x)
    group_size = static_int("group_size", group_size)
    if group_size < 1:
        raise ValueError(f"group_size={group_size} must be at least 1: 512 is usual")
    return _group_top_k(x, check_k(k, group_size, f"group_size={group_size}"), group_size)


def count_entries(size: int, k: int, group_size: int) -> int:
    """The number of entries that `group_top_k` selects from `size` elements."""
    return k * (size // group_size) + min(k, size % group_size)


def most_entries(size: int, k: int, group_size: int, parts: int) -> int:
    """The most entries of a `group_top_k` in one of `parts` equal ranges of the vector.

    Ranges have ceil(size / parts) elements, and the last ones may have fewer. A group gives at most
    k entries to a range, and no more than it has elements there.

    >>> most_entries(1024, 4, 512, 8), most_entries(2**20, 4, 512, 8)
    (4, 1024)
    """
    length = -(-size // parts)
    # Ranges begin at the same places of groups again after so many.
    period = group_size // math.gcd(length, group_size)
    start = length * np.arange(min(parts, period), dtype=np.int64)
    elements = np.clip(size - start, 0, length)
    first = np.minimum(elements, -start % group_size)  # of the group that began before
    whole, last = np.divmod(elements - first, group_size)
    return int(np.max(np.minimum(k, first) + k * whole + np.minimum(k, last)))


def block_top_k(x: Float[Array, " d"], k: int, block_size: int) -> BlockStream:
    """The k blocks of largest l2 norm, exactly, in order of falling norm.

    Of equal norms the lower block comes first. The last block may be shorter than `block_size`.
    Only the norms are sorted: d / block_size numbers. S2 Reducer (Ge et al., 2021), section 2.2.

    >>> block_top_k(jnp.float32([3, 3, 0, 4, 0, 0, -5]), 2, 2).indices.tolist()
    [3, 0]
    """
    check_vector("x", x)
    block_size = blocks.check_block_size(block_size)
    count = blocks.count(x.size, block_size)
    limit = f"{count}, the number of blocks of {block_size} in {x.size} elements"
    return _block_top_k(x, check_k(k, count, limit), block_size)


@functools.partial(jax.jit, static_argnames=("k", "block_size"))
def _block_top_k(x: Float[Array, " d"], k: int, block_size: int) -> BlockStream:
    rows = blocks.rows(x.astype(jnp.float32), block_size)
    # Root mean squares have the order of norms, and do not overflow.
    _, indices = lax.top_k(norms(rows, reduce=jnp.mean), k)
    return blocks.from_dense(x, indices, block_size)


@functools.partial(jax.jit, static_argnames=("k", "group_size"))
def _group_top_k(x: Float[Array, " d"], k: int, group_size: int) -> SparseStream:
    rest = x.size % group_size
    whole = x.size - rest
    indices = []
    for start, stop, width in (0, whole, group_size), (whole, x.size, rest):
        if start < stop:
            rows = x[start:stop].reshape(-1, width)
            first = jnp.arange(start, stop, width, dtype=jnp.int32)
            kept = _top_k_of_rows(rows, min(k, width))
            if k > _MAX_ROUNDS >= width:  # a short last group, in the others' order
                kept = jnp.sort(kept, axis=1)
            indices.append((kept + first[:, None]).ravel())
    kept = jnp.concatenate(indices) if indices else jnp.zeros_like(x, jnp.int32)
    return SparseStream(kept, x.at[kept].get(mode="promise_in_bounds"))


def _top_k_of_rows(x: Float[Array, "n width"], k: int) -> Int[Array, "n k"]:
    if k <= _MAX_ROUNDS:
        return _by_rounds(x, k)
    n, width = x.shape
    if n * width <= _SORTED or width < 2 * _MAXIMA * k:
        return jnp.sort(lax.top_k(jnp.abs(x), k)[1], axis=1)
    return _by_candidates(x, k)


def _by_rounds(x: Float[Array, "n width"], k: int) -> Int[Array, "n k"]:
    """`lax.top_k(abs(x), k)[1]`, in one pass over `x` and k rounds over a sixteenth of it.

    A row is laid out as a grid. The first pass finds each column's maximum. A round then takes the
    largest of these, and reads only its column again to find the next largest there.
    """
    n, width = x.shape
    cols = min(width, _VECTOR * -(-width // (_VECTOR * _ROWS)))
    rows = -(-width // cols)
    key = _magnitude(x)
    if rows * cols > width:
        key = jnp.pad(key, ((0, 0), (0, rows * cols - width)), constant_values=-1)
        key = lax.optimization_barrier(key)
    key = key.reshape(n, rows, cols)
    # The largest element that is left in each column (-1 for none), and the first row that has it.
    largest = jnp.max(key, axis=1)
    row = _first_equal(key, largest, axis=1)
    # Without barriers XLA fuses reductions into their users, and no longer vectorises them.
    largest, row = lax.optimization_barrier((largest, row))

    column = lax.iota(jnp.int32, cols)[None]
    in_column = cols * lax.iota(jnp.int32, rows)[None]
    chosen = []
    for left in reversed(range(k)):
        best = jnp.max(largest, axis=1, keepdims=True)
        place = jnp.where(largest == best, row * cols + column, width)
        place = jnp.min(place, axis=1, keepdims=True)
        best, place = lax.optimization_barrier((best, place))
        chosen.append(place)
        if left:
            # Elements leave a column in order, so those after the last one taken are left.
            at = place % cols + in_column
            key = _magnitude(jnp.take_along_axis(x, jnp.minimum(at, width - 1), axis=1))
            after = (key < best) | ((key == best) & (at > place))
            key = jnp.where(after & (at < width), key, -1)
            here = column == place % cols
            next_largest = jnp.max(key, axis=1)
            next_row = _first_equal(key, next_largest, axis=1)
            largest = jnp.where(here, next_largest[:, None], largest)
            row = jnp.where(here, next_row[:, None], row)
            largest, row = lax.optimization_barrier((largest, row))
    return jnp.concatenate(chosen, axis=1)


def _by_candidates(x: Float[Array, "n width"], k: int) -> Int[Array, "n k"]:
    """The places of `lax.top_k(abs(x), k)`, in another order, in some nine passes.

    A row is folded into 4 k maxima. The k-th largest of these is a bound that k elements reach, and
    rarely more than 1.5 k. These candidates are brought together, and the k largest of them are
    found bit by bit. Rows with more than 1.5 k candidates are sorted.
    """
    width = x.shape[1]
    bound = _reached(_maxima(x, _MAXIMA * k) >> (_KEY_BITS - _COARSE_BITS), k, _COARSE_BITS)
    bound = bound << (_KEY_BITS - _COARSE_BITS)
    # If zeros are among the k largest, the first k places have enough of them.
    place = lax.broadcasted_iota(jnp.int32, (1, width), 1)
    is_candidate = _magnitude(x) >= jnp.maximum(bound, 1)[:, None]
    is_candidate |= (bound == 0)[:, None] & (place < k)
    room = math.ceil(_ROOM * k)
    places, counts = compact_rows(is_candidate, room)
    is_there = lax.broadcasted_iota(jnp.int32, places.shape, 1) < counts[:, None]
    places = jnp.where(is_there, places, width)
    first = width * lax.broadcasted_iota(jnp.int32, places.shape, 0)
    values = x.ravel().at[first + jnp.minimum(places, width - 1)].get(mode="promise_in_bounds")
    keys = jnp.where(is_there, _magnitude(values), 0)
    kept, _ = compact_rows(_largest(keys, places, width, k), k)

    kept = jnp.take_along_axis(places, kept, axis=1, mode="promise_in_bounds")

    # Rows with too many candidates are sorted one at a time, because a branch would copy all of x.
    crowded = counts > room
    rows = compact(crowded, len(x))

    def sort(turn: Array, kept: Array) -> Array:
        row = lax.dynamic_slice_in_dim(x, rows[turn], 1)
        largest = jnp.sort(lax.top_k(jnp.abs(row), k)[1], axis=1)
        return lax.dynamic_update_slice_in_dim(kept, largest, rows[turn], 0)

    return lax.fori_loop(0, jnp.sum(crowded, dtype=jnp.int32), sort, kept)


def _maxima(x: Float[Array, "n width"], least: int) -> Int32[Array, "n cols"]:
    """The largest magnitudes of the columns of each row's grid, which has at least `least` columns.

    The number of columns is no power of two. Otherwise the columns of a weight matrix, a power of
    two apart in x, would meet in few columns of the grid.
    """
    width = x.shape[1]
    cols = least // _VECTOR * _VECTOR + _VECTOR
    cols += _VECTOR * (cols & (cols - 1) == 0)
    rest = width % cols
    key = _magnitude(x)
    largest = jnp.max(key[:, : width - rest].reshape(len(x), -1, cols), axis=1)
    if rest:
        last = jnp.pad(key[:, width - rest :], ((0, 0), (0, cols - rest)))
        largest = jnp.maximum(largest, last)
    return lax.optimization_barrier(largest)


def _largest(
    keys: Int32[Array, "n m"], places: Int32[Array, "n m"], width: int, k: int
) -> Bool[Array, "n m"]:
    """A mask of the k largest keys of each row. Equal keys rank by places, the lowest first.

    Places are from 0 to `width`, which stands for an empty slot and is never in the mask.
    """
    bound = _reached(keys, k, _KEY_BITS)[:, None]
    above = keys > bound
    needed = k - jnp.sum(above, axis=1, dtype=jnp.int32)
    before = jnp.where(keys == bound, width - places, 0)
    reached = jnp.maximum(_reached(before, needed, width.bit_length()), 1)
    return above | (before >= reached[:, None])


def _reached(
    keys: Int32[Array, "n m"], k: Int32[Array, " n"] | int, bits: int
) -> Int32[Array, " n"]:
    """The largest number in each row that at least k keys reach, below 2**bits; 0 if none is."""
    n, m = keys.shape
    lanes = math.gcd(m, 2 * _VECTOR)
    keys = lax.optimization_barrier(keys)
    add = lambda a, b: tuple(map(jnp.add, a, b))

    def set_digit(found: Array, shift: Array) -> Array:
        bounds = [found | jnp.int32(trial) << shift for trial in range(1, 2**_DIGIT_BITS)]
        reaches = tuple(
            (keys >= bound[:, None]).astype(jnp.int32).reshape(n, -1, lanes) for bound in bounds
        )
        # One reduction of several arrays reads the keys once, and in lanes it vectorises.
        counts = lax.reduce(reaches, (jnp.int32(0),) * len(bounds), add, (1,))
        for bound, count in zip(bounds, counts):  # the bounds rise, unless they overflow
            is_reached = (jnp.sum(count, axis=1, dtype=jnp.int32) >= k) & (bound > 0)
            found = jnp.where(is_reached, bound, found)
        return found

    return by_digits(set_digit, bits, _DIGIT_BITS, jnp.zeros_like(keys, shape=(n,)))


def _magnitude(x: Float[Array, "..."]) -> Int32[Array, "..."]:
    """Integers in the order of abs(x). Their maximum vectorises."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    return bits & jnp.int32(2**31 - 1)


def _first_equal(x: Int[Array, "..."], value: Int[Array, "..."], axis: int) -> Int[Array, "..."]:
    """The lowest index along `axis` at which x equals `value`, which must occur."""
    number = lax.broadcasted_iota(jnp.int32, x.shape, axis)
    equal = x == jnp.expand_dims(value, axis)
    return jnp.min(jnp.where(equal, number, x.shape[axis]), axis=axis)
