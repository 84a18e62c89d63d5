"""Entries of few bits: indices in Elias and Fano's code, values that share levels.

An index is cut in two. Its low bits travel as they are. The high bits of all entries, in increasing
order, are one bitmap: for entry i with high bits h, bit h + i is set. (Elias, "Efficient storage
and retrieval by content and address of static files", J. ACM 1974; Fano, 1971.) With k of n
elements that is at most 2 + log2(n / k) bits an index. No code of fixed length has fewer than
log2(binomial(n, k)) / k, which is 0.5 to 0.7 less at an eighth and below: 5 bits at an eighth, 8 at
a 64th, 8.6 at 1 %.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Int, Num, UInt32

from jaxsparse.arrays.bits import field_words, pack_fields, unpack_fields, words
from jaxsparse.arrays.platforms import zeros
from jaxsparse.arrays.settings import static_int
from jaxsparse.arrays.stream import SparseStream
from jaxsparse.codecs.codec import check_message, check_stream, sorter
from jaxsparse.quantize.entries import EntryValues, entry_values
from jaxsparse.select.compaction import running_sum


class _IndexBits(NamedTuple):
    """The parts of a message's indices, in bits."""

    low: int  # bits of an index that travel as they are
    bitmap: int  # bits of the bitmap


@dataclasses.dataclass(frozen=True)
class EliasFano:
    """Any entries: indices in Elias and Fano's code, and values in 2, 4, 8, 16 or 32 bits.

    A message is the bitmap of the indices' high bits, their low bits, the values and their levels.
    It has the entries in the order of the high bits. Empty slots, and zeros that would be rounded,
    come last and decode to empty slots.

    Values of 2, 4 and 8 bits share levels with others of their message. So messages of sums that
    were rounded before need 16 or 32 bits. SparCML's all-reduces except `all_gather` send such
    messages, and so does SparDL with `gather="bruck"`.

    Attributes:
        value_bits: bits of a value: 2, 4, 8, 16 or 32.

    >>> EliasFano().words(512, 4096) * 32 / 512  # 5 bits of index, 2 of value, 1/8 of levels
    7.125
    """

    value_bits: Literal[2, 4, 8, 16, 32] = 2

    def __post_init__(self):
        object.__setattr__(self, "value_bits", static_int("value_bits", self.value_bits))
        _ = self._values  # raises if they are wrong

    @property
    def is_exact(self) -> bool:
        return self._values.is_exact

    @property
    def is_local(self) -> bool:
        return self.value_bits >= 16

    @property
    def _values(self) -> EntryValues:
        return entry_values(self.value_bits)

    def check(self, dtype: DTypeLike) -> None:
        if jnp.dtype(dtype) != jnp.float32:
            raise ValueError(
                f"values have dtype {jnp.dtype(dtype)}: EliasFano sends float32; use codecs.COO, "
                "or convert them first"
            )

    def words(self, capacity: int, size: int) -> int:
        layout = _layout(capacity, size)
        indices = words(layout.bitmap) + field_words(capacity, layout.low)
        return indices + self._values.words(capacity)

    def encode(self, stream: SparseStream, size: int) -> UInt32[Array, " words"]:
        self.check(stream.values.dtype)
        check_stream(stream)
        capacity = stream.capacity
        layout = _layout(capacity, size)
        slots, values, high = self._in_order(stream, size)
        is_entry = high < _highs(layout, size)
        low = stream.indices.at[slots].get(mode="promise_in_bounds").astype(jnp.uint32)
        low = jnp.where(is_entry, low & jnp.uint32((1 << layout.low) - 1), jnp.uint32(0))
        place = jnp.where(is_entry, high + jax.lax.iota(jnp.int32, capacity), layout.bitmap)
        bits = zeros((layout.bitmap,), jnp.uint32, (stream.indices, stream.values))
        bitmap = pack_fields(_placed(bits, place, jnp.ones_like(low)), 1)
        count = jnp.sum(is_entry, dtype=jnp.int32)
        return jnp.concatenate(
            [bitmap, pack_fields(low, layout.low), self._values.encode(values, count)]
        )

    def decode(
        self, message: UInt32[Array, " words"], capacity: int, size: int, dtype: DTypeLike
    ) -> SparseStream:
        check_message(self, message, capacity, size)
        layout = _layout(capacity, size)
        end = words(layout.bitmap)
        values_at = end + field_words(capacity, layout.low)
        place, count = _ones(message[:end], capacity)
        low = unpack_fields(message[end:values_at], layout.low, capacity).astype(jnp.int32)
        slot = jax.lax.iota(jnp.int32, capacity)
        is_entry = slot < count
        high = place - slot
        indices = jnp.where(is_entry, (high << layout.low) | low, size)
        values = self._values.decode(message[values_at:], capacity).astype(dtype)
        return SparseStream(indices, jnp.where(is_entry, values, jnp.zeros_like(values)))

    def rounded(self, stream: SparseStream, size: int) -> Num[Array, " capacity"]:
        """Decodes what it encodes, so that sender and receivers agree."""
        if self.is_exact:
            return stream.values
        capacity = stream.capacity
        if self.is_local:
            encoded = self._values.encode(stream.values, capacity)
            return self._values.decode(jax.lax.optimization_barrier(encoded), capacity)
        slots, values, high = self._in_order(stream, size)
        is_entry = high < _highs(_layout(capacity, size), size)
        encoded = self._values.encode(values, jnp.sum(is_entry, dtype=jnp.int32))
        values = self._values.decode(jax.lax.optimization_barrier(encoded), capacity)
        values = jnp.where(is_entry, values, 0)
        return jnp.zeros_like(values).at[slots].set(values, unique_indices=True)

    def _in_order(
        self, stream: SparseStream, size: int
    ) -> tuple[Int[Array, " capacity"], Num[Array, " capacity"], Int[Array, " capacity"]]:
        """Slots, values and high bits, in their order, empty slots last."""
        layout = _layout(stream.capacity, size)
        highs = _highs(layout, size)
        is_entry = stream.indices < size
        if not self.is_local:
            is_entry &= stream.values != 0
        high = jnp.where(is_entry, stream.indices >> layout.low, highs)
        values = jnp.where(is_entry, stream.values, jnp.zeros_like(stream.values))
        # Slots get the type of a worker's own array, because both branches of a cond need one type.
        slots = jax.lax.iota(jnp.int32, stream.capacity) + zeros((), jnp.int32, (high,))
        return sorter(highs + 1)(slots, values, high)


def _ones(
    bitmap: UInt32[Array, " n"], capacity: int
) -> tuple[Int[Array, " capacity"], Int[Array, ""]]:
    """Places of the bits that are set, in order, and their number.

    `select.compact` searches for each of them in some ten steps, which pays where few bits are set.
    Here a third to a half are. So the places within each word are found for all words at a time,
    one bit after the other, and marks at the first slot of each word tell the word of each slot.
    """
    counts = jax.lax.population_count(bitmap).astype(jnp.int32)
    ends = running_sum(counts, most=32, total=32 * bitmap.size)
    starts = ends - counts

    def lowest(rest: Array, _: None) -> tuple[Array, Array]:
        below = jax.lax.population_count((rest & (~rest + 1)) - 1)
        return rest & (rest - 1), below.astype(jnp.uint8)

    _, within = jax.lax.scan(lowest, bitmap, length=32)
    # Words without a bit have no slot. The others begin at slots of their own.
    turn = running_sum((counts > 0).astype(jnp.int32), most=1, total=bitmap.size) - 1
    turn = jnp.where(counts > 0, turn, bitmap.size)
    word = jax.lax.iota(jnp.int32, bitmap.size)
    used = _placed(jnp.zeros_like(word), turn, word)
    first = jnp.where(counts > 0, starts, 32 * words(capacity))
    mark = jnp.uint32(1) << (first & 31).astype(jnp.uint32)
    marks = _placed(jnp.zeros_like(bitmap, shape=(words(capacity),)), first >> 5, mark)
    marked = jax.lax.population_count(marks).astype(jnp.int32)
    before = running_sum(marked, most=32, total=bitmap.size) - marked
    lanes = jax.lax.iota(jnp.uint32, 32)
    up_to = jax.lax.population_count(marks[:, None] << (31 - lanes)[None]).astype(jnp.int32)
    turn = (before[:, None] + up_to - 1).ravel()[:capacity]
    word = used.at[turn].get(mode="clip")
    bit = jax.lax.iota(jnp.int32, capacity) - starts.at[word].get(mode="clip")
    place = within.ravel().at[(bit & 31) * bitmap.size + word].get(mode="clip")
    return word * 32 + place.astype(jnp.int32), ends[-1]


def _placed(
    x: Num[Array, " n"], places: Int[Array, " k"], values: Num[Array, " k"]
) -> Num[Array, " n"]:
    """`x` with values added at places. Values with places past the end are left out.

    XLA may cut these arrays over several devices. If the devices do not divide them, it pads them,
    and adds the padding at place 0 (tests/test_messages.py). So a spare element stands in front,
    and is cut off afterwards.
    """
    padded = jnp.pad(x, (1, 0))
    return padded.at[places + 1].add(values, mode="drop")[1:]


def _highs(layout: _IndexBits, size: int) -> int:
    """The number of values that high bits have."""
    return -(-size >> layout.low)


def _layout(capacity: int, size: int) -> _IndexBits:
    """The number of low bits with the shortest indices, and of these the one with fewest high bits.

    >>> _layout(512, 4096), _layout(64, 4096), _layout(5, 0)
    (_IndexBits(low=3, bitmap=1024), _IndexBits(low=6, bitmap=128), _IndexBits(low=0, bitmap=5))
    """
    layouts = [_IndexBits(low, capacity + -(-size >> low)) for low in reversed(range(32))]
    return min(layouts, key=lambda one: words(one.bitmap) + field_words(capacity, one.low))
