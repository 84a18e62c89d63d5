"""A partial result on its way: as a stream, or as a dense array once that is no longer."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Num, UInt32

from jaxsparse import codecs, operations, select
from jaxsparse.operations import Operation
from jaxsparse.stream import SparseStream, from_dense


@dataclasses.dataclass(frozen=True)
class Parcel:
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
