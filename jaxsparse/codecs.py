"""Codecs: the wire formats of sparse vectors.

Index and value travel in one message, so that a sparse exchange takes one round and not two.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Int, Num, UInt32

from jaxsparse.stream import SparseStream

# Entries in a range of this many elements have equal upper bits of their indices.
_RANGE = 2**16


@runtime_checkable
class Codec(Protocol):
    """Turns streams of `capacity` slots over vectors of `size` elements into messages."""

    def check(self, dtype: DTypeLike) -> None:
        """Raises ValueError unless values of `dtype` can be sent."""
        ...

    def words(self, capacity: int, size: int) -> int:
        """The number of uint32 words of a message."""
        ...

    def encode(self, stream: SparseStream, size: int) -> UInt32[Array, " words"]:
        """The message."""
        ...

    def decode(
        self, message: UInt32[Array, " words"], capacity: int, size: int, dtype: DTypeLike
    ) -> SparseStream:
        """The stream of a message, with `rounded` values, possibly in another order."""
        ...

    def rounded(self, values: Num[Array, "*shape"]) -> Num[Array, "*shape"]:
        """The values that the receiver will see, in the same dtype."""
        ...

    @property
    def is_exact(self) -> bool:
        """Whether `rounded` is the identity."""
        ...


@dataclasses.dataclass(frozen=True)
class Coo:
    """The papers' coordinate format: a 32-bit index and a 32-bit value, 8 bytes an entry."""

    is_exact = True

    def check(self, dtype: DTypeLike) -> None:
        """Raises ValueError unless the dtype has 4 bytes."""
        if jnp.dtype(dtype).itemsize != 4:
            raise ValueError(
                f"values have dtype {jnp.dtype(dtype)}: Coo sends dtypes of 4 bytes (float32, "
                "int32, uint32); convert them first"
            )

    def words(self, capacity: int, size: int) -> int:
        """Two words a slot."""
        del size
        return 2 * capacity

    def encode(self, stream: SparseStream, size: int) -> UInt32[Array, " words"]:
        """Indices, then values of any dtype of 4 bytes."""
        del size
        self.check(stream.values.dtype)
        return jnp.concatenate([bits(stream.indices), bits(stream.values)])

    def decode(
        self, message: UInt32[Array, " words"], capacity: int, size: int, dtype: DTypeLike
    ) -> SparseStream:
        """The stream, in the same order."""
        del size
        return SparseStream(
            jax.lax.bitcast_convert_type(message[:capacity], jnp.int32),
            jax.lax.bitcast_convert_type(message[capacity:], dtype),
        )

    def rounded(self, values: Num[Array, "*shape"]) -> Num[Array, "*shape"]:
        """The values themselves."""
        return values


COO: Coo = Coo()


@dataclasses.dataclass(frozen=True)
class Packed:
    """A 16-bit index and a 16-bit value in one word, 4 bytes an entry. For sums of floats only.

    A vector of more than 65,536 elements is cut into ranges of that size. Entries are in the order
    of their ranges. A message begins with one word a range, the number of entries below the range's
    end: 0.006 % of a dense vector's words. Magnitudes beyond the dtype's largest are clipped to it.

    Attributes:
        dtype: dtype of the values. bfloat16 has float32's range and 8 bits of precision; float16
            has 11 bits and ends at 65,504.
    """

    dtype: DTypeLike = jnp.bfloat16
    is_exact = False

    def __post_init__(self):
        if jnp.dtype(self.dtype) not in (jnp.bfloat16, jnp.float16):
            raise ValueError(f"dtype={self.dtype} is not of 16 bits: use bfloat16 or float16")
        # One of the dtype's spellings, so that equal codecs compare and print alike.
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))

    def check(self, dtype: DTypeLike) -> None:
        """Raises ValueError unless the dtype is float32."""
        if jnp.dtype(dtype) != jnp.float32:
            raise ValueError(
                f"values have dtype {jnp.dtype(dtype)}: Packed rounds float32 to 16 bits; use "
                "codecs.COO, or convert them first"
            )

    def words(self, capacity: int, size: int) -> int:
        """One word a slot, and one a range if there are several ranges."""
        return capacity + _header(size)

    def encode(self, stream: SparseStream, size: int) -> UInt32[Array, " words"]:
        """The message. An empty slot is the word 0, a value of +0 that changes no sum."""
        self.check(stream.values.dtype)
        indices, values = stream
        ends = jnp.zeros((0,), jnp.uint32)
        if _header(size):
            indices, values, ranges = _by_range(indices, values, size)
            following = jnp.arange(1, _header(size) + 1, dtype=jnp.int32)
            ends = jnp.searchsorted(ranges, following).astype(jnp.uint32)
        low = indices.astype(jnp.uint32) % jnp.uint32(_RANGE)
        narrow = self.rounded(values).astype(self.dtype)
        narrow = jax.lax.bitcast_convert_type(narrow, jnp.uint16).astype(jnp.uint32)
        words = (low << jnp.uint32(16)) | narrow
        return jnp.concatenate([ends, jnp.where(indices < size, words, jnp.uint32(0))])

    def decode(
        self, message: UInt32[Array, " words"], capacity: int, size: int, dtype: DTypeLike
    ) -> SparseStream:
        """The stream, in the order of ranges if the vector has several."""
        header = _header(size)
        ends, words = message[:header], message[header:]
        indices = (words >> jnp.uint32(16)).astype(jnp.int32)
        if header:
            slots = jnp.arange(capacity, dtype=jnp.uint32)
            # Unrolled, the search is one pass, and 3 times faster on a CPU.
            place = jnp.searchsorted(ends, slots, side="right", method="scan_unrolled")
            place = place.astype(jnp.int32)
            indices = jnp.where(place < header, place * _RANGE + indices, size)
        indices = jnp.where(words == 0, size, indices)
        bits = (words & jnp.uint32(0xFFFF)).astype(jnp.uint16)
        return SparseStream(indices, jax.lax.bitcast_convert_type(bits, self.dtype).astype(dtype))

    def rounded(self, values: Num[Array, "*shape"]) -> Num[Array, "*shape"]:
        """The values, rounded to `dtype` and back. Subnormal float16 numbers become 0.

        A value that is not finite does not change. Clipped, an overflow would look like a sum.
        """
        # XLA may remove a conversion there and back, but not this.
        info = jnp.finfo(self.dtype)
        limit = float(info.max)
        rounded = jax.lax.reduce_precision(jnp.clip(values, -limit, limit), info.nexp, info.nmant)
        return jnp.where(jnp.isfinite(values), rounded, values)


def _by_range(
    indices: Int[Array, " k"], values: Num[Array, " k"], size: int
) -> tuple[Int[Array, " k"], Num[Array, " k"], Int[Array, " k"]]:
    """Indices, values and ranges, in the order of the ranges.

    Empty slots (index `size`) before the first entry become zeros at index 0, in the first range.
    All other empty slots come last, in a range behind the last.
    """
    valid = indices < size
    is_leading = jnp.arange(indices.size) < jnp.argmax(valid)
    empty = jnp.where(is_leading, 0, _header(size))
    ranges = jnp.where(valid, indices // _RANGE, empty)
    indices = jnp.where(valid | ~is_leading, indices, 0)
    values = jnp.where(valid, values, jnp.zeros_like(values))
    return _sorter(_header(size) + 1)(indices, values, ranges)


@functools.cache
def _sorter(count: int) -> Callable[..., tuple[Array, Array, Array]]:
    """A function that sorts arrays along their last axis, by the last array, of ints < `count`."""

    @jax.custom_batching.custom_vmap
    def in_order(*arrays: Array) -> tuple[Array, ...]:
        ranges = arrays[-1]

        def sort() -> tuple[Array, ...]:
            order = _order(ranges, count)
            take = lambda x: jnp.take_along_axis(x, order, axis=-1, mode="promise_in_bounds")
            return tuple(map(take, arrays))

        # Many selections are already sorted.
        is_sorted = jnp.all(ranges[..., 1:] >= ranges[..., :-1])
        return jax.lax.cond(is_sorted, lambda: arrays, sort)

    @in_order.def_vmap
    def rows_in_order(axis_size, in_batched, *arrays):
        # Under vmap, a cond for each row would become a select and sort all rows.
        spread = lambda x, yes: x if yes else jnp.broadcast_to(x, (axis_size, *x.shape))
        return in_order(*map(spread, arrays, in_batched)), (True,) * len(arrays)

    return in_order


def _order(ranges: Int[Array, "*rows k"], count: int) -> Int[Array, "*rows k"]:
    """The slots in the order of their ranges, which are numbers below `count`."""
    slots = jax.lax.broadcasted_iota(jnp.uint32, ranges.shape, ranges.ndim - 1)
    slot_bits = (ranges.shape[-1] - 1).bit_length()
    if (count - 1).bit_length() + slot_bits > 32:
        return jax.lax.sort((ranges, slots.astype(jnp.int32)), num_keys=1)[1]
    # XLA on CPU sorts one array 9 times faster than two.
    keys = (ranges.astype(jnp.uint32) << jnp.uint32(slot_bits)) | slots
    mask = jnp.uint32((1 << slot_bits) - 1)
    return (jax.lax.sort(keys, is_stable=False) & mask).astype(jnp.int32)


def check_codec(codec: Codec) -> None:
    """Raises ValueError unless `codec` is a codec."""
    if isinstance(codec, type) or not isinstance(codec, Codec):
        raise ValueError(f"codec={codec!r} is not a codec: use codecs.COO or codecs.Packed()")


def _header(size: int) -> int:
    return -(-size // _RANGE) if size > _RANGE else 0


def bits(x: Num[Array, " n"]) -> UInt32[Array, " n"]:
    """An array of a 4-byte dtype as words."""
    return jax.lax.bitcast_convert_type(x, jnp.uint32)


def from_bits(words: UInt32[Array, " n"], dtype: DTypeLike) -> Num[Array, " n"]:
    """The inverse of `bits`."""
    return jax.lax.bitcast_convert_type(words, dtype)
