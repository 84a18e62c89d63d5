"""Entries of few bits: indices within chunks of the vector, values that share levels.

The format of SparseLoCo (Sarfi et al., 2025): chunks of 4096, 12 bits an index, 2 bits a value.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Int, Num, UInt32

from jaxsparse import quantize
from jaxsparse.arrays.bits import field_words, pack_fields, unpack_fields
from jaxsparse.arrays.platforms import shaped_as, zeros
from jaxsparse.arrays.settings import check_k, static_int
from jaxsparse.arrays.stream import SparseStream
from jaxsparse.codecs.codec import shaped_entries, shaped_message
from jaxsparse.codecs.ranges import sorter

_LARGEST_CHUNK = 2**16


@dataclasses.dataclass(frozen=True)
class Chunked:
    """Indices in as many bits as a chunk needs, and values in 2, 4, 8, 16 or 32 bits.

    With `k`, slot j of a stream belongs to chunk j // k: `select.group_top_k(x, k, chunk_size)`
    gives such streams. A message is the packed indices, the packed values and their levels. Zeros
    are entries like any others.

    Without `k`, a message begins with the number of entries of each chunk, and travels in the
    chunks' order. Empty slots, and zeros that would be rounded, come last and decode to empty
    slots. It takes any stream.

    Values of 2, 4 and 8 bits share levels with others of their message. So messages of sums that
    were rounded before need 16 or 32 bits. SparCML's all-reduces except `all_gather` send such
    messages, and so does SparDL with `gather="bruck"`.

    Attributes:
        k: number of entries of each chunk, from 1 to chunk_size. None: any number.
        chunk_size: number of elements of a chunk, at most 65,536. None: 4096 with a `k`, and
            without one the power of two with the shortest messages.
        value_bits: bits of a value: 2, 4, 8, 16 or 32.
        quantizer: quantiser of values in 2, 4 and 8 bits: "sign_magnitude", or "published", which
            is SparseLoCo's.
    """

    k: int | None = None
    chunk_size: int | None = None
    value_bits: Literal[2, 4, 8, 16, 32] = 2
    quantizer: quantize.ValueQuantizer = "sign_magnitude"

    def __post_init__(self):
        chunk_size = self.chunk_size
        if chunk_size is None and self.k is not None:
            chunk_size = 4096
        if chunk_size is not None:
            chunk_size = static_int("chunk_size", chunk_size)
            if not 1 <= chunk_size <= _LARGEST_CHUNK:
                raise ValueError(
                    f"chunk_size={chunk_size} must lie between 1 and {_LARGEST_CHUNK}: 4096 is "
                    "usual"
                )
            object.__setattr__(self, "chunk_size", chunk_size)
            if self.k is not None:
                k = check_k(self.k, chunk_size, f"chunk_size={chunk_size}")
                object.__setattr__(self, "k", k)
        object.__setattr__(self, "value_bits", static_int("value_bits", self.value_bits))
        _ = self._values  # raises if a setting is wrong

    @property
    def is_exact(self) -> bool:
        """Whether values have 32 bits."""
        return self._values.is_exact

    @property
    def is_local(self) -> bool:
        """Whether values have 16 or 32 bits."""
        return self.value_bits >= 16

    @property
    def _values(self) -> quantize.EntryValues:
        return quantize.entry_values(self.value_bits, self.quantizer)

    def check(self, dtype: DTypeLike) -> None:
        """Raises ValueError unless the dtype is float32."""
        if jnp.dtype(dtype) != jnp.float32:
            raise ValueError(
                f"values have dtype {jnp.dtype(dtype)}: Chunked sends float32; use codecs.COO, or "
                "convert them first"
            )

    def count(self, size: int) -> int:
        """The number of entries of a vector of `size` elements.

        It is k for each chunk. A last chunk with fewer than k elements has all of them.

        Raises:
            ValueError: there is no `k`.
        """
        if self.k is None or self.chunk_size is None:
            raise ValueError("k=None, so chunks have any number of entries: set k")
        return self.k * (size // self.chunk_size) + min(self.k, size % self.chunk_size)

    def words(self, capacity: int, size: int) -> int:
        """The number of words of the counts (without `k`), indices, values and levels."""
        chunk = self._chunk(capacity, size)
        indices = field_words(capacity, _index_bits(chunk))
        return self._header(chunk, size) + indices + self._values.words(capacity)

    @shaped_as(shaped_message)
    def encode(self, stream: SparseStream, size: int) -> UInt32[Array, " words"]:
        """The message."""
        self.check(stream.values.dtype)
        chunk = self._chunk(stream.capacity, size)
        if self.k is not None:
            local = stream.indices - self._first(stream.capacity, size)
            parts = [_packed(local, chunk)]
            return jnp.concatenate([*parts, self._values.encode(stream.values, stream.capacity)])
        slots, values, chunks = self._in_order(stream, size)
        chunk_count = -(-size // chunk)
        ends = jnp.searchsorted(chunks, jnp.arange(1, chunk_count + 1, dtype=jnp.int32))
        ends = ends.astype(jnp.int32)
        counts = jnp.diff(ends, prepend=jnp.zeros_like(ends[:1])).astype(jnp.uint32)
        local = stream.indices.at[slots].get(mode="promise_in_bounds") % chunk
        header = pack_fields(counts, chunk.bit_length())
        return jnp.concatenate(
            [header, _packed(local, chunk), self._values.encode(values, ends[-1])]
        )

    @shaped_as(shaped_entries)
    def decode(
        self, message: UInt32[Array, " words"], capacity: int, size: int, dtype: DTypeLike
    ) -> SparseStream:
        """The stream, in the same order with a `k`, and in the order of the chunks without one."""
        chunk = self._chunk(capacity, size)
        header = self._header(chunk, size)
        end = header + field_words(capacity, _index_bits(chunk))
        local = unpack_fields(message[header:end], _index_bits(chunk), capacity).astype(jnp.int32)
        values = self._values.decode(message[end:], capacity).astype(dtype)
        if self.k is not None:
            return SparseStream(local + self._first(capacity, size), values)
        chunk_count = -(-size // chunk)
        counts = unpack_fields(message[:header], chunk.bit_length(), chunk_count)
        ends = jnp.cumsum(counts.astype(jnp.int32))
        slots = jnp.arange(capacity, dtype=jnp.int32)
        place = jnp.searchsorted(ends, slots, side="right", method="scan_unrolled")
        is_entry = slots < ends[-1]
        indices = jnp.where(is_entry, place.astype(jnp.int32) * chunk + local, size)
        return SparseStream(indices, jnp.where(is_entry, values, jnp.zeros_like(values)))

    @shaped_as(lambda codec, stream, size: stream.values)
    def rounded(self, stream: SparseStream, size: int) -> Num[Array, " capacity"]:
        """See `Codec`. It decodes what it encodes, so that sender and receivers agree."""
        if self.is_exact:
            return stream.values
        capacity = stream.capacity
        if self.k is not None or self.is_local:
            words = self._values.encode(stream.values, capacity)
            return self._values.decode(jax.lax.optimization_barrier(words), capacity)
        slots, values, chunks = self._in_order(stream, size)
        is_entry = chunks < -(-size // self._chunk(capacity, size))
        words = self._values.encode(values, jnp.sum(is_entry, dtype=jnp.int32))
        values = self._values.decode(jax.lax.optimization_barrier(words), capacity)
        values = jnp.where(is_entry, values, 0)
        return jnp.zeros_like(values).at[slots].set(values, unique_indices=True)

    def _in_order(
        self, stream: SparseStream, size: int
    ) -> tuple[Int[Array, " capacity"], Num[Array, " capacity"], Int[Array, " capacity"]]:
        """Slots, values and chunks in the order of the chunks, empty slots last."""
        chunk = self._chunk(stream.capacity, size)
        chunk_count = -(-size // chunk)
        is_entry = stream.indices < size
        if not self.is_local:
            is_entry &= stream.values != 0
        chunks = jnp.where(is_entry, stream.indices // chunk, chunk_count)
        values = jnp.where(is_entry, stream.values, jnp.zeros_like(stream.values))
        # Slots get the type of a worker's own array, because both branches of a cond need one type.
        slots = jax.lax.iota(jnp.int32, stream.capacity) + zeros((), jnp.int32, (chunks,))
        return sorter(chunk_count + 1)(slots, values, chunks)

    def _chunk(self, capacity: int, size: int) -> int:
        """The number of elements of a chunk, at most that of the vector."""
        if self.k is not None and capacity != self.count(size):
            raise ValueError(
                f"a stream of {capacity} entries, but k={self.k} of every {self.chunk_size} of "
                f"{size} elements are {self.count(size)}: leave k=None for other streams"
            )
        if self.chunk_size is not None:
            return max(1, min(self.chunk_size, size))
        most = min(_LARGEST_CHUNK, 1 << max(0, size - 1).bit_length())
        candidates = [1 << i for i in range(most.bit_length())]
        cost = lambda chunk: self._header(chunk, size) + field_words(capacity, _index_bits(chunk))
        return min(candidates, key=cost)

    def _header(self, chunk: int, size: int) -> int:
        return 0 if self.k is not None else field_words(-(-size // chunk), chunk.bit_length())

    def _first(self, capacity: int, size: int) -> Int[Array, " capacity"]:
        """The first element of the chunk of each slot."""
        assert self.k is not None
        assert self.chunk_size is not None
        return jax.lax.iota(jnp.int32, capacity) // self.k * min(self.chunk_size, max(1, size))


def _index_bits(chunk: int) -> int:
    return (chunk - 1).bit_length()


def _packed(local: Int[Array, " n"], chunk: int) -> UInt32[Array, " words"]:
    return pack_fields(local.astype(jnp.uint32), _index_bits(chunk))
