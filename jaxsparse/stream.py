"""Sparse vectors of a static capacity (SparCML, section 5.1)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Num

from jaxsparse import operations
from jaxsparse.operations import Operation


class SparseStream(NamedTuple):
    """Entries of a sparse vector: `to_dense(stream, size)[indices] == values`.

    An index equal to the vector's size marks an empty slot, whose value is 0. (Not -1: JAX wraps
    negative indices even in the scatter mode that drops those out of bounds.)
    """

    indices: Int[Array, " k"]  # int32
    values: Num[Array, " k"]

    @property
    def capacity(self) -> int:
        """Number of slots, k."""
        return self.indices.shape[0]


def from_dense(x: Num[Array, " d"], indices: Int[Array, " k"]) -> SparseStream:
    """The entries of `x` at `indices`; out-of-range indices give empty slots."""
    return SparseStream(indices, x.at[indices].get(mode="fill", fill_value=0))


def to_dense(stream: SparseStream, size: int, op: Operation = "sum") -> Num[Array, " d"]:
    """The dense vector of length `size`; entries with the same index are combined.

    Args:
        stream: its entries.
        size: of the vector, d.
        op: how entries with the same index are combined; absent ones are its neutral element.

    Example:
        >>> import jax.numpy as jnp
        >>> stream = SparseStream(jnp.array([2, 0, 4]), jnp.array([5.0, 1.0, 0.0]))
        >>> to_dense(stream, 4).tolist()
        [1.0, 0.0, 5.0, 0.0]
    """
    dtype = stream.values.dtype
    if op == "or":  # whose scatter wants distinct indices
        stream = merge_duplicates(stream, size, op)
    empty = jnp.full((size,), operations.neutral(op, dtype), dtype)
    return operations.scatter(op, empty, stream.indices, stream.values)


def add_to(x: Num[Array, " d"], stream: SparseStream) -> Num[Array, " d"]:
    """The sum `x + to_dense(stream, x.size)`, without a second dense vector.

    Args:
        x: vector of d elements.
        stream: entries of such a vector; those of one index are added in any order, on a GPU in
            another one at each run.

    Example:
        >>> import jax.numpy as jnp
        >>> stream = SparseStream(jnp.array([2, 0, 4]), jnp.array([5.0, 1.0, 0.0]))
        >>> add_to(jnp.ones(4), stream).tolist()
        [2.0, 1.0, 6.0, 1.0]
    """
    return operations.scatter("sum", x, stream.indices, stream.values)


def merge_duplicates(stream: SparseStream, size: int, op: Operation = "sum") -> SparseStream:
    """One entry for each index, in increasing order of indices, then empty slots between them.

    Args:
        stream: k entries, in any order.
        size: of the vector, d.
        op: how entries with the same index are combined.

    Returns:
        Of the same capacity k. The combined entry is in the last slot of those it came from; the
        others are empty, so that indices other than d increase from slot to slot.

    Example:
        >>> import jax.numpy as jnp
        >>> stream = SparseStream(jnp.array([2, 0, 2]), jnp.array([5.0, 1.0, 3.0]))
        >>> [x.tolist() for x in merge_duplicates(stream, 4)]
        [[0, 4, 2], [1.0, 0.0, 8.0]]
    """
    operations.check(op, stream.values.dtype)
    indices, values = jax.lax.sort((stream.indices, stream.values), num_keys=1)
    is_first = _differs(indices, -1)
    starts, combined = is_first, values

    # Inclusive scan within runs of equal indices: a run's start absorbs nothing from before it.
    def join(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
        started, value = left
        starts, more = right
        return started | starts, jnp.where(starts, more, operations.combine(op, value, more))

    _, combined = jax.lax.associative_scan(join, (starts, combined))
    return _last_of_runs(indices, combined, size)


def _last_of_runs(indices: Int[Array, " k"], values: Num[Array, " k"], size: int) -> SparseStream:
    """The last entry of each run of equal indices; the others' slots are empty."""
    valid = _differs(indices, 1) & (indices < size)
    return SparseStream(
        jnp.where(valid, indices, size), jnp.where(valid, values, jnp.zeros_like(values))
    )


def _differs(indices: Int[Array, " k"], offset: int) -> Bool[Array, " k"]:
    """Whether an index differs from the one `offset` slots on; True at that end."""
    if indices.shape[0] == 0:
        return jnp.zeros((0,), jnp.bool_)
    different = indices[1:] != indices[:-1]
    end = jnp.ones_like(indices[:1], jnp.bool_)
    return jnp.concatenate([end, different] if offset < 0 else [different, end])


def add(a: SparseStream, b: SparseStream, size: int, op: Operation = "sum") -> SparseStream:
    """The entries of both, those with the same index combined; capacity is that of both together.

    Args:
        a: entries of a vector of `size` elements, with distinct indices.
        b: entries of another, with distinct indices, too.
        size: of the vectors, d.
        op: how entries with the same index are combined.

    Returns:
        As `merge_duplicates`.
    """
    both = SparseStream(*(jnp.concatenate(pair) for pair in zip(a, b)))
    operations.check(op, both.values.dtype)
    indices, values = jax.lax.sort((both.indices, both.values), num_keys=1)
    # A run is a pair at most, which needs no scan: that would take twenty times as long to compile.
    pairs = operations.combine(op, jnp.roll(values, 1), values)
    return _last_of_runs(indices, jnp.where(_differs(indices, -1), values, pairs), size)


def delta(size: int, entry_bytes: float = 8, dense_bytes: float = 4) -> int:
    """The number of entries up to which a sparse message is no longer than a dense one.

    Args:
        size: of the vector, d.
        entry_bytes: of one entry on the wire: 8 for an int32 index and a float32 value.
        dense_bytes: of one element of the dense vector.

    SparCML, section 5.1: size * dense_bytes / entry_bytes.

    Example:
        >>> delta(1000)
        500
    """
    return int(size * dense_bytes / entry_bytes)
