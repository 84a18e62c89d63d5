"""The interface of codecs, the papers' coordinate format, and what others share."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Int, Num, UInt32

from jaxsparse.arrays.stream import SparseStream


@runtime_checkable
class Codec(Protocol):
    """Turns streams of `capacity` slots over vectors of `size` elements into messages.

    Both numbers are static, and the same for sender and receivers. So is the length of a message.
    """

    def check(self, dtype: DTypeLike) -> None:
        """Raises ValueError unless values of `dtype` can be sent."""
        ...

    def words(self, capacity: int, size: int) -> int:
        """The number of uint32 words of a message."""
        ...

    def encode(self, stream: SparseStream, size: int) -> UInt32[Array, " words"]:
        """The message of a stream over a vector of `size` elements."""
        ...

    def decode(
        self, message: UInt32[Array, " words"], capacity: int, size: int, dtype: DTypeLike
    ) -> SparseStream:
        """The stream of a message, with `rounded` values of `dtype`, possibly in another order.

        Raises:
            ValueError: the message has another length or dtype than `encode` gives for these sizes.
        """
        ...

    def rounded(self, stream: SparseStream, size: int) -> Num[Array, " capacity"]:
        """The values that receivers of `encode(stream)` see, in the stream's order and dtype."""
        ...

    @property
    def is_exact(self) -> bool:
        """Whether `rounded` is the identity."""
        ...

    @property
    def is_local(self) -> bool:
        """Whether `rounded` depends on nothing but an entry's own value."""
        ...


@dataclasses.dataclass(frozen=True)
class Coo:
    """The papers' coordinate format: a 32-bit index and a 32-bit value, 8 bytes an entry."""

    is_exact = True
    is_local = True

    def check(self, dtype: DTypeLike) -> None:
        if jnp.dtype(dtype).itemsize != 4:
            raise ValueError(
                f"values have dtype {jnp.dtype(dtype)}: Coo sends dtypes of 4 bytes (float32, "
                "int32, uint32); convert them first"
            )

    def words(self, capacity: int, size: int) -> int:
        del size
        return 2 * capacity

    def encode(self, stream: SparseStream, size: int) -> UInt32[Array, " words"]:
        del size
        self.check(stream.values.dtype)
        check_stream(stream)
        return jnp.concatenate([bits(stream.indices), bits(stream.values)])

    def decode(
        self, message: UInt32[Array, " words"], capacity: int, size: int, dtype: DTypeLike
    ) -> SparseStream:
        check_message(self, message, capacity, size)
        return SparseStream(
            jax.lax.bitcast_convert_type(message[:capacity], jnp.int32),
            jax.lax.bitcast_convert_type(message[capacity:], dtype),
        )

    def rounded(self, stream: SparseStream, size: int) -> Num[Array, " capacity"]:
        del size
        return stream.values


COO: Coo = Coo()


def check_codec(codec: Codec) -> None:
    """Raises ValueError if a setting is no codec, or the class of one."""
    if isinstance(codec, type) or not isinstance(codec, Codec):
        raise ValueError(
            f"codec={codec!r} is not a codec: use codecs.COO, codecs.Packed() or codecs.EliasFano()"
        )


def check_stream(stream: SparseStream) -> None:
    """Raises ValueError unless a stream has as many indices as values."""
    indices, values = map(jnp.shape, stream)
    if indices != values or len(indices) != 1:
        raise ValueError(
            f"the stream has indices of shape {indices} and values of shape {values}: give one of "
            "each a slot. Several streams are encoded by jax.vmap"
        )


def check_message(codec: Codec, message: Array, capacity: int, size: int) -> None:
    """Raises ValueError unless `codec.encode` gives such a message for these sizes."""
    shape, words = jnp.shape(message), codec.words(capacity, size)
    if shape != (words,) or message.dtype != jnp.uint32:
        raise ValueError(
            f"message is {message.dtype}{list(shape)}, but {codec} sends uint32[{words}] for "
            f"capacity={capacity} and size={size}: give the sizes that it was encoded with, and "
            "one message. Several are decoded by jax.vmap"
        )


def check_local(codec: Codec, user: str) -> None:
    """Raises ValueError if a codec rounds entries together, which `user` sends on."""
    if not codec.is_local:
        raise ValueError(
            f"codec={codec} rounds the entries of a message together, but {user} sends rounded "
            "entries on in other messages: use EliasFano(value_bits=16) or 32, codecs.Packed() or "
            "codecs.COO"
        )


def bits(x: Num[Array, " n"]) -> UInt32[Array, " n"]:
    """The bits of an array of a 4-byte dtype (float32, int32 or uint32) as words.

    >>> [hex(word) for word in bits(jnp.float32([1, -2])).tolist()]
    ['0x3f800000', '0xc0000000']
    """
    return jax.lax.bitcast_convert_type(x, jnp.uint32)


def from_bits(words: UInt32[Array, " n"], dtype: DTypeLike) -> Num[Array, " n"]:
    """The inverse of `bits`: words read as another 4-byte dtype.

    >>> from_bits(bits(jnp.float32([1, -2])), jnp.float32).tolist()
    [1.0, -2.0]
    """
    return jax.lax.bitcast_convert_type(words, dtype)


def left_of(total: Num[Array, " d"], sent: Num[Array, " d"]) -> Num[Array, " d"]:
    """The part of partial sums that is not sent, for a residual.

    A sum that overflowed and is not sent is clipped to its dtype's range. Its summands are on other
    workers, and an inf would stay in the residual for ever. So would NaN, which becomes 0: opposite
    sums overflowed.
    """
    return jnp.nan_to_num(jnp.where(total == sent, jnp.zeros_like(total), total - sent))


@functools.cache
def sorter(count: int) -> Callable[..., tuple[Array, Array, Array]]:
    """A function that sorts arrays along their last axis, by the last array's ints < `count`."""

    @jax.custom_batching.custom_vmap
    def in_order(*arrays: Array) -> tuple[Array, ...]:
        ranges = arrays[-1]

        def sort() -> tuple[Array, ...]:
            order = order_of(ranges, count)
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


def order_of(ranges: Int[Array, "*rows k"], count: int) -> Int[Array, "*rows k"]:
    """The slots in the order of their ranges, which are numbers below `count`."""
    slots = jax.lax.broadcasted_iota(jnp.uint32, ranges.shape, ranges.ndim - 1)
    slot_bits = (ranges.shape[-1] - 1).bit_length()
    if (count - 1).bit_length() + slot_bits > 32:
        return jax.lax.sort((ranges, slots.astype(jnp.int32)), num_keys=1)[1]
    # XLA on CPU sorts one array 9 times faster than two.
    keys = (ranges.astype(jnp.uint32) << jnp.uint32(slot_bits)) | slots
    mask = jnp.uint32((1 << slot_bits) - 1)
    return (jax.lax.sort(keys, is_stable=False) & mask).astype(jnp.int32)
