"""The largest elements of each of many short runs."""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int, Int32

from jaxsparse.settings import check_k, check_vector, static_int
from jaxsparse.stream import SparseStream

__all__ = ["group_top_k"]

# A group is a grid of at most this many rows: what a round reads again of each group.
_ROWS = 16
# Columns are a multiple of this, so that their maxima vectorise.
_VECTOR = 8
# From here on a sort of each group is faster than rounds.
_MAX_ROUNDS = 16


def group_top_k(x: Float[Array, " d"], k: int = 4, group_size: int = 512) -> SparseStream:
    """The k entries of largest magnitude of every `group_size` consecutive elements, exactly.

    Of equal magnitudes the lower index comes first. A last group that is shorter gives
    min(k, its length) entries, so no slot is empty.

    Args:
        x: float vector of d elements, without NaN.
        k: entries to keep of a group, 1 <= k <= group_size.
        group_size: elements a group, at least 1.

    Returns:
        k (d // group_size) + min(k, d % group_size) entries, group by group, in order of
        falling magnitude within a group: distinct int32 indices, and values in x's dtype.

    Raises:
        ValueError: `x` is not a vector, or k or group_size is no int or out of range.

    SparCML (Renggli et al., 2019), Alg. 2 and the experiments that follow: 8 or 16 of 512 for
    vision, 2 or 4 of 512 for text and speech.

    Example:
        >>> import jax.numpy as jnp
        >>> group_top_k(jnp.array([1.0, -3.0, 2.0, 0.0, 5.0]), 1, 2).indices.tolist()
        [1, 2, 4]
    """
    check_vector("x", x)
    group_size = static_int("group_size", group_size)
    if group_size < 1:
        raise ValueError(f"group_size={group_size} must be at least 1: 512 is usual")
    return _group_top_k(x, check_k(k, group_size, f"group_size={group_size}"), group_size)


@functools.partial(jax.jit, static_argnames=("k", "group_size"))
def _group_top_k(x: Float[Array, " d"], k: int, group_size: int) -> SparseStream:
    rest = x.size % group_size
    whole = x.size - rest
    indices = []
    for start, stop, width in (0, whole, group_size), (whole, x.size, rest):
        if start < stop:
            rows = x[start:stop].reshape(-1, width)
            first = jnp.arange(start, stop, width, dtype=jnp.int32)
            indices.append((_top_k_of_rows(rows, min(k, width)) + first[:, None]).ravel())
    kept = jnp.concatenate(indices) if indices else jnp.zeros_like(x, jnp.int32)
    return SparseStream(kept, x[kept])


def _top_k_of_rows(x: Float[Array, "n width"], k: int) -> Int[Array, "n k"]:
    """`lax.top_k(abs(x), k)[1]`, in one pass over `x` and k rounds over a sixteenth of it.

    A row is laid out as a grid. The first pass finds each column's maximum; a round then takes the
    largest of these and reads only its column again, for the next one there.
    """
    if k > _MAX_ROUNDS:
        return lax.top_k(jnp.abs(x), k)[1]
    n, width = x.shape
    cols = min(width, _VECTOR * -(-width // (_VECTOR * _ROWS)))
    rows = -(-width // cols)
    key = _magnitude(x)
    if rows * cols > width:
        key = jnp.pad(key, ((0, 0), (0, rows * cols - width)), constant_values=-1)
        key = lax.optimization_barrier(key)
    key = key.reshape(n, rows, cols)
    # Of each column: the largest element that is left (-1 for none), and the first row that has it.
    largest = jnp.max(key, axis=1)
    row = _first_equal(key, largest, axis=1)
    # Without barriers XLA fuses reductions into what reads them, and no longer vectorises them.
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
            # Elements leave a column in order, so those left are the ones that come after.
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


def _magnitude(x: Float[Array, "..."]) -> Int32[Array, "..."]:
    """Ordered as abs(x) is, but as integers, whose maximum vectorises."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    return bits & jnp.int32(2**31 - 1)


def _first_equal(x: Int[Array, "..."], value: Int[Array, "..."], axis: int) -> Int[Array, "..."]:
    """The lowest index along `axis` at which x is `value`, which occurs there."""
    number = lax.broadcasted_iota(jnp.int32, x.shape, axis)
    equal = x == jnp.expand_dims(value, axis)
    return jnp.min(jnp.where(equal, number, x.shape[axis]), axis=axis)
