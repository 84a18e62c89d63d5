"""Sparse vectors of a static capacity (SparCML, section 5.1), and operations that combine entries.

Four operations have names: sum, max, min and or. A `Combination` is any other one. All are
commutative and associative. An absent entry counts as the operation's neutral element: max(-2,
absent) is -2, not 0. Values that travel have 4 bytes; collectives refuse float64.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, DTypeLike, Int, Num, Shaped

__all__ = ["SparseStream", "from_dense", "to_dense"]  # what users meet

Named = Literal["sum", "max", "min", "or"]


@dataclasses.dataclass(frozen=True)
class Combination:
    """A commutative and associative operation of your own (SparCML, section 5.2).

    Attributes:
        function: function of two arrays of one shape and dtype, element by element. It must be
            commutative and associative: workers combine values in any order. Pass the same function
            each time, since another one compiles the step again.
        neutral: the number e for which function(e, x) is x. Entries that equal it count as absent.

    >>> stream = SparseStream(jnp.array([2, 0, 2]), jnp.array([5.0, 1.0, 3.0]))
    >>> to_dense(stream, 4, Combination(jnp.multiply, 1)).tolist()
    [1.0, 1.0, 15.0, 1.0]
    """

    function: Callable[[Array, Array], Array]
    neutral: float


Operation = Named | Combination


class SparseStream(NamedTuple):
    """Entries of a sparse vector: `to_dense(stream, size)[indices] == values`.

    An index equal to the vector's size marks an empty slot, whose value is 0. (Not -1: JAX wraps
    negative indices even in the scatter mode that drops those out of bounds.)
    """

    indices: Int[Array, " k"]  # int32
    values: Num[Array, " k"]

    @property
    def capacity(self) -> int:
        return self.indices.shape[0]


def from_dense(x: Num[Array, " d"], indices: Int[Array, " k"]) -> SparseStream:
    """The entries of `x` at `indices`. The size of `x` gives an empty slot, whose value is 0.

    >>> from_dense(jnp.float32([5, 6, 7]), jnp.array([2, 3])).values.tolist()
    [7.0, 0.0]
    """
    return SparseStream(indices, x.at[indices].get(mode="fill", fill_value=0))


def to_dense(stream: SparseStream, size: int, op: Operation = "sum") -> Num[Array, " d"]:
    """The dense vector of `size` elements. `op` combines entries with the same index.

    >>> stream = SparseStream(jnp.array([2, 0, 4]), jnp.array([5.0, 1.0, 0.0]))
    >>> to_dense(stream, 4).tolist()
    [1.0, 0.0, 5.0, 0.0]
    """
    dtype = stream.values.dtype
    if not takes_duplicates(op):
        stream = merge_duplicates(stream, size, op)
    empty = filled(size, neutral(op, dtype), stream.indices)
    return scatter(op, empty, stream.indices, stream.values)


def filled(
    size: int, value: Shaped[ArrayLike, ""], indices: Int[Array, " k"]
) -> Shaped[Array, " size"]:
    """A vector of one value to scatter into. XLA makes it only once `indices` are there.

    Otherwise XLA's CPU backend would make it when the program begins, and keep it until the
    scatter, beside all that is computed before.
    """
    # This is always zero, but XLA does not find that out.
    zero = (jnp.min(indices[:1], initial=0) & 1) >> 1
    return jnp.full((size,), value + zero.astype(jnp.result_type(value)))


def add_to(x: Num[Array, " d"], stream: SparseStream) -> Num[Array, " d"]:
    """The sum `x + to_dense(stream, x.size)`, without a second dense vector.

    Entries with the same index are added in any order, which on a GPU may change from run to run.
    """
    return scatter("sum", x, stream.indices, stream.values)


def merge_duplicates(stream: SparseStream, size: int, op: Operation = "sum") -> SparseStream:
    """One entry for each index, in increasing order of indices, with empty slots between them.

    The stream keeps its capacity. Entries are sorted, and each combined entry is in the last slot
    of those that it came from. The other slots are empty, so indices other than `size` increase
    from slot to slot.

    >>> stream = SparseStream(jnp.array([2, 0, 2]), jnp.array([5.0, 1.0, 3.0]))
    >>> [x.tolist() for x in merge_duplicates(stream, 4)]
    [[0, 4, 2], [1.0, 0.0, 8.0]]
    """
    check_operation(op, stream.values.dtype)
    indices, values = jax.lax.sort((stream.indices, stream.values), num_keys=1)
    is_first = _differs(indices, -1)
    starts, combined = is_first, values

    # Inclusive scan within runs of equal indices: a run's start absorbs nothing from before it.
    def join(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
        started, value = left
        starts, more = right
        return started | starts, jnp.where(starts, more, combine_entries(op, value, more))

    _, combined = jax.lax.associative_scan(join, (starts, combined))
    return _last_of_runs(indices, combined, size)


def _last_of_runs(indices: Int[Array, " k"], values: Num[Array, " k"], size: int) -> SparseStream:
    """The last entry of each run of equal indices. The slots of the others are empty."""
    valid = _differs(indices, 1) & (indices < size)
    return SparseStream(
        jnp.where(valid, indices, size), jnp.where(valid, values, jnp.zeros_like(values))
    )


def _differs(indices: Int[Array, " k"], offset: int) -> Bool[Array, " k"]:
    """Whether an index differs from the one `offset` slots on. True where there is none."""
    if indices.shape[0] == 0:
        return jnp.zeros((0,), jnp.bool_)
    different = indices[1:] != indices[:-1]
    end = jnp.ones_like(indices[:1], jnp.bool_)
    return jnp.concatenate([end, different] if offset < 0 else [different, end])


def add(a: SparseStream, b: SparseStream, size: int, op: Operation = "sum") -> SparseStream:
    """The entries of both streams of distinct indices, combined as by `merge_duplicates`."""
    both = SparseStream(*(jnp.concatenate(pair) for pair in zip(a, b)))
    check_operation(op, both.values.dtype)
    indices, values = jax.lax.sort((both.indices, both.values), num_keys=1)
    # A run is a pair at most and needs no scan, which would take twenty times as long to compile.
    pairs = combine_entries(op, jnp.roll(values, 1), values)
    return _last_of_runs(indices, jnp.where(_differs(indices, -1), values, pairs), size)


def delta(size: int, entry_bytes: float = 8, dense_bytes: float = 4) -> int:
    """The number of entries up to which a sparse message is no longer than a dense one.

    An entry has 8 bytes if it is an int32 index and a float32 value. SparCML, section 5.1.

    >>> delta(1000)
    500
    """
    return int(size * dense_bytes / entry_bytes)


def check_operation(op: Operation, dtype: DTypeLike) -> None:
    """Raises ValueError unless an operation is known, and defined for values of a dtype.

    The function of a `Combination` is tried: it must be commutative, keep shape and dtype, and have
    that neutral number.
    """
    if isinstance(op, Combination):
        return _check_combination(op, dtype)
    if op not in get_args(Named):
        raise ValueError(
            f"op={op!r} is unknown: use one of {get_args(Named)}, or a stream.Combination"
        )
    if op == "or" and not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(
            f"op='or' combines the bits of integers, values have dtype {jnp.dtype(dtype)}: "
            "pass them as uint32"
        )


def _check_combination(op: Combination, dtype: DTypeLike) -> None:
    dtype = np.dtype(dtype)
    neutral = np.array(op.neutral)
    with np.errstate(all="ignore"):
        fits = neutral.ndim == 0 and neutral.astype(dtype) == neutral
    if not fits:
        raise ValueError(
            f"neutral={op.neutral!r} is no number that {dtype} can hold: give the element e with "
            "function(e, x) == x for all x"
        )
    some = np.array([op.neutral, 1, 2, 3], dtype)
    with jax.ensure_compile_time_eval():
        pairs = ((some, np.full_like(some, op.neutral)), (some[1:], some[:0:-1]))
        (right, left), (one, other) = (
            (
                op.function(jnp.asarray(a), jnp.asarray(b)),
                op.function(jnp.asarray(b), jnp.asarray(a)),
            )
            for a, b in pairs
        )
        if right.shape != some.shape or right.dtype != dtype:
            raise ValueError(
                f"function={op.function} of arrays of {dtype} and shape {some.shape} returns "
                f"{right.dtype} and shape {right.shape}: it must keep both"
            )
        if not (np.array_equal(right, some) and np.array_equal(left, some)):
            raise ValueError(
                f"neutral={op.neutral!r} is not neutral: function({op.neutral!r}, x) for x = "
                f"{some.tolist()} is {left.tolist()}"
            )
        if not np.array_equal(one, other):
            raise ValueError(
                f"function={op.function} is not commutative: for x = {pairs[1][0].tolist()} and y "
                f"= {pairs[1][1].tolist()}, f(x, y) is {one.tolist()} and f(y, x) {other.tolist()}"
            )


def takes_duplicates(op: Operation) -> bool:
    """Whether `scatter` combines values whose indices are equal."""
    return op in ("sum", "max", "min")


def neutral(op: Operation, dtype: DTypeLike) -> Num[Array, ""]:
    """The element e with combine(op, e, x) == x.

    >>> neutral("max", "float32").item()
    -inf
    """
    check_operation(op, dtype)
    if isinstance(op, Combination):
        return jnp.array(op.neutral, dtype)
    if op in ("sum", "or"):
        return jnp.zeros((), dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.array(-jnp.inf if op == "max" else jnp.inf, dtype)
    limits = jnp.iinfo(dtype)
    return jnp.array(limits.min if op == "max" else limits.max, dtype)


def combine_entries(op: Operation, a: Num[Array, "*shape"], b: Num[Array, "*shape"]) -> Array:
    """Two arrays of one shape and dtype combined element by element."""
    if isinstance(op, Combination):
        return op.function(a, b)
    functions = {"sum": jnp.add, "max": jnp.maximum, "min": jnp.minimum, "or": jnp.bitwise_or}
    return functions[op](a, b)


def scatter(op: Operation, dense: Num[Array, " d"], indices: Array, values: Array) -> Array:
    """`dense` with `values` combined into it at `indices`. Those out of range are ignored.

    An index may repeat if the operation `takes_duplicates`.
    """
    at = dense.at[indices]
    if op == "sum":
        return at.add(values, mode="drop")
    if op == "max":
        return at.max(values, mode="drop")
    if op == "min":
        return at.min(values, mode="drop")
    return at.set(combine_entries(op, at.get(mode="fill", fill_value=0), values), mode="drop")
