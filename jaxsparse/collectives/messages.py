"""Messages of the sparse all-reduces, and what these return.

A message carries a partial result: as a stream, or as a dense array once that is no longer. A count
rides along in its last word, and so takes no round of its own.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Int, Num, UInt32

from jaxsparse import codecs, operations, select
from jaxsparse.operations import Operation
from jaxsparse.stream import SparseStream, from_dense


class AllReduced(NamedTuple):
    """The entries of all workers' streams over vectors of d elements, combined.

    For sums, `sum over workers of to_dense(stream) == total + sum over workers of residual`.
    """

    total: Num[Array, " d"]  # equal on all workers; the neutral element where nobody has an entry
    residual: Num[Array, " d"]  # this worker's share of what `total` lacks; zeros but for sums
    overflow: Int[Array, ""]  # int32: entries, of all workers, that found no room; equal on all


def left_of(total: Num[Array, " d"], sent: Num[Array, " d"]) -> Num[Array, " d"]:
    """What is left of partial sums for a residual.

    A sum that overflowed and is not sent is cut to what its dtype holds: the values that it is of
    are on other workers, and an inf would stay in the residual for good.
    """
    left = jnp.where(total == sent, jnp.zeros_like(total), total - sent)
    if not jnp.issubdtype(total.dtype, jnp.floating):
        return left
    largest = jnp.finfo(total.dtype).max
    return jnp.clip(left, -largest, largest)


@dataclasses.dataclass(frozen=True)
class MessageFormat:
    """Messages that carry vectors of `size` elements with at most `capacity` entries.

    Entries are the elements other than the operation's neutral one. From the capacity at which a
    stream would be no shorter than a dense array (SparCML's delta), it is a dense array.

    Attributes:
        size: elements of the vector.
        capacity: entries it can have.
        op: by which vectors are combined.
        dtype: of the vector, 4 bytes wide.
        codec: of sparse messages.
    """

    size: int
    capacity: int
    op: Operation
    dtype: DTypeLike
    codec: codecs.Codec

    def __post_init__(self):
        operations.check(self.op, self.dtype)
        codecs.check_codec(self.codec)
        codecs.COO.check(self.dtype)  # dense arrays travel as words, too
        self.codec.check(self.dtype)
        if self.op != "sum" and not self.codec.is_exact:
            raise ValueError(
                f"codec={self.codec} rounds, and op={self.op!r} has no residual to keep the "
                "difference: use codecs.COO"
            )

    @property
    def is_dense(self) -> bool:
        """Whether a dense array travels."""
        return self.codec.words(self.capacity, self.size) >= self.size

    @property
    def words(self) -> int:
        """Words of a message."""
        return self.size if self.is_dense else self.codec.words(self.capacity, self.size)

    @property
    def is_exact(self) -> bool:
        """Whether nothing is rounded away."""
        return self.is_dense or self.codec.is_exact

    def empty(self) -> Num[Array, " size"]:
        """The vector without entries."""
        return jnp.full((self.size,), operations.neutral(self.op, self.dtype), self.dtype)

    def extract(self, x: Num[Array, " size"]) -> SparseStream:
        """The first `capacity` entries of `x`."""
        return from_dense(
            x, select.compact(x != operations.neutral(self.op, x.dtype), self.capacity)
        )

    def rounded(self, x: Num[Array, " size"]) -> Num[Array, " size"]:
        """`x` as it arrives, if it has no more entries than fit."""
        return x if self.is_exact else self.codec.rounded(x)

    def pack(self, x: Num[Array, " size"]) -> UInt32[Array, " words"]:
        """The message."""
        if self.is_dense:
            return codecs.bits(x)
        return self.codec.encode(self.extract(x), self.size)

    def merge(self, x: Num[Array, " size"], message: UInt32[Array, " words"]) -> Array:
        """`x` with the vector of a message combined into it."""
        if self.is_dense:
            return operations.combine(self.op, x, codecs.from_bits(message, self.dtype))
        stream = self.codec.decode(message, self.capacity, self.size, self.dtype)
        return operations.scatter(self.op, x, stream.indices, stream.values)

    def merge_all(self, messages: UInt32[Array, "n words"]) -> Num[Array, " size"]:
        """The vectors of all messages combined, one after the other.

        Within a single scatter, entries with the same index have no order on a GPU.
        """
        total = self.merge(self.empty(), messages[0])
        if len(messages) == 1:
            return total
        step = lambda total, message: (self.merge(total, message), None)
        return jax.lax.scan(step, total, messages[1:])[0]

    def ranges(self, messages: UInt32[Array, "n words"]) -> Num[Array, " n*size"]:
        """The vectors of all messages, end to end."""
        return jax.vmap(lambda words: self.merge(self.empty(), words))(messages).reshape(-1)


def with_count(
    message: UInt32[Array, " words"], count: Int[Array, ""] | None
) -> UInt32[Array, " words+1"]:
    """The message with this worker's count behind it; None adds nothing."""
    if count is None:
        return message
    return jnp.concatenate([message, count.astype(jnp.uint32)[None]])


def split_counts(
    messages: UInt32[Array, "n words+1"], is_counted: bool
) -> tuple[UInt32[Array, "n words"], Int[Array, ""]]:
    """The messages of n workers without their counts, and the sum of these, or 0."""
    if not is_counted:
        return messages, jnp.int32(0)
    return messages[:, :-1], jnp.sum(messages[:, -1]).astype(jnp.int32)
