"""Messages and results of the sparse all-reduces.

A message carries a partial result, as a stream or as a dense array, whichever is shorter. Its last
word may be a count, so that counts need no round of their own.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Int, Num, UInt32

from jaxsparse.arrays.stream import (
    Operation,
    SparseStream,
    check_operation,
    combine_entries,
    filled,
    from_dense,
    neutral,
    scatter,
    to_dense,
)
from jaxsparse.codecs.codec import COO, Codec, bits, check_codec, check_local, from_bits, left_of
from jaxsparse.select.compaction import compact
from jaxsparse.select.top_k import top_k

T = TypeVar("T")
Arrived = Array | SparseStream  # a vector, or its entries

# Largest ratio between neighbouring message capacities. Each room is a branch of the program,
# and 10 % more words cost less than the time to compile many more branches.
_RATIO = 1.1
# Spare room for sums that have a few entries more than in the exchange before.
_SPARE = 50  # one in 50
MOST_STAGES = 32  # for 2^32 workers


class AllReduced(NamedTuple):
    """The entries of all workers' streams over vectors of d elements, combined.

    For sums, `sum over workers of to_dense(stream) == total + sum over workers of residual`. If a
    worker's residual has only parts of its own n entries, an all-reduce may give it at these alone.
    """

    total: Num[Array, " d"]  # equal on all workers; the neutral element where there are no entries
    residual: Num[Array, " n"]  # this worker's share of all that `total` lacks; 0 unless op="sum"
    overflow: Int[Array, ""]  # int32: number of entries without room on all workers; equal on all
    # int32: where `residual` is given. Each is in [0, d], and only d, an empty slot, may repeat.
    # Elsewhere the residual is 0. None: `residual` has d elements.
    indices: Int[Array, " n"] | None = None
    # int32: the most entries that a worker had to send in each stage; equal on all workers. None:
    # rooms do not follow them.
    needs: Int[Array, "32"] | None = None

    def whole(self) -> "AllReduced":
        if self.indices is None:
            return self
        residual = to_dense(SparseStream(self.indices, self.residual), self.total.size)
        return self._replace(residual=residual, indices=None)


@dataclasses.dataclass(frozen=True)
class MessageFormat:
    """Messages that carry vectors of `size` elements with at most `capacity` entries.

    Entries are the elements that differ from the operation's neutral element. A message is a dense
    array if a stream of this capacity would be no shorter (SparCML's delta). Values have 4 bytes.
    """

    size: int
    capacity: int
    op: Operation
    dtype: DTypeLike
    codec: Codec

    def __post_init__(self):
        check_operation(self.op, self.dtype)
        check_codec(self.codec)
        COO.check(self.dtype)  # dense arrays travel as words, too
        self.codec.check(self.dtype)
        if self.op != "sum" and not self.codec.is_exact:
            raise ValueError(
                f"codec={self.codec} rounds, and op={self.op!r} has no residual to keep the "
                "difference: use codecs.COO"
            )

    @property
    def is_array(self) -> bool:
        return self.codec.words(self.capacity, self.size) >= self.size

    @property
    def words(self) -> int:
        return self.size if self.is_array else self.codec.words(self.capacity, self.size)

    @property
    def is_exact(self) -> bool:
        return self.is_array or self.codec.is_exact

    def extract(self, x: Num[Array, " size"]) -> SparseStream:
        """The first `capacity` entries of `x`."""
        return from_dense(x, compact(x != neutral(self.op, x.dtype), self.capacity))

    def rounded(self, x: Num[Array, " size"]) -> Num[Array, " size"]:
        """`x` as it arrives, if all its entries fit."""
        if self.is_exact:
            return x
        check_local(self.codec, "this all-reduce")
        whole = SparseStream(jnp.arange(self.size, dtype=jnp.int32), x)
        rounded = self.codec.rounded(whole, self.size)
        # A value that rounds to -0 is no entry, and arrives as +0. A sender that kept -0 would
        # differ from the receivers.
        return jnp.where(rounded == 0, jnp.zeros_like(rounded), rounded)

    def fit(
        self, x: Num[Array, " size"], is_bounded: bool
    ) -> tuple[Num[Array, " size"], Num[Array, " size"], Int[Array, ""]]:
        """What arrives of partial sums `x`, what does not, and the number of sums without room.

        If there are more than `capacity`, the largest get the room. `is_bounded` is False if there
        can't be, which saves counting them.
        """
        count = jnp.int32(0)
        if self.op != "sum" or self.is_array:
            return x, jnp.zeros_like(x), count
        kept = x
        if is_bounded:
            kept, entries = self.cut(x, self.capacity)
            count = jnp.maximum(entries - self.capacity, 0)
        sent = self.rounded(kept)
        return sent, left_of(x, sent), count

    def cut(
        self, x: Num[Array, " size"], room: Int[Array, ""] | int
    ) -> tuple[Num[Array, " size"], Int[Array, ""]]:
        """The `room` largest of partial sums, at most `capacity`, and the number of all of them."""
        # NaN differs from itself, so entries are counted, not differences.
        entries = jnp.count_nonzero(x).astype(jnp.int32)

        def largest(x: Array) -> Array:
            found = top_k(x, self.capacity)
            has_room = jnp.arange(self.capacity) < room
            indices = jnp.where(has_room, found.indices, self.size)
            return to_dense(found._replace(indices=indices), self.size)

        # A sort takes more time than all else, and is rarely needed.
        return jax.lax.cond(entries > room, largest, lambda x: x, x), entries

    def pack(self, x: Num[Array, " size"]) -> UInt32[Array, " words"]:
        if self.is_array:
            return bits(x)
        return self.codec.encode(self.extract(x), self.size)

    def pack_entries(
        self, stream: SparseStream
    ) -> tuple[UInt32[Array, " words"], Num[Array, " capacity"]]:
        """The message of a stream with distinct indices, and the rounding error of each entry."""
        none = jnp.zeros_like(stream.values)
        if self.is_array:
            return self.pack(to_dense(stream, self.size, self.op)), none
        lost = none if self.is_exact else stream.values - self.codec.rounded(stream, self.size)
        return self.codec.encode(stream, self.size), lost

    def merge(self, x: Num[Array, " size"], message: UInt32[Array, " words"]) -> Array:
        return self.combine(x, self.unpack(message))

    def vector(self, message: UInt32[Array, " words"]) -> Num[Array, " size"]:
        return self.spread(self.unpack(message))

    def unpack(self, message: UInt32[Array, " words"]) -> Arrived:
        if self.is_array:
            return from_bits(message, self.dtype)
        return self.codec.decode(message, self.capacity, self.size, self.dtype)

    def combine(self, x: Num[Array, " size"], arrived: Arrived) -> Array:
        if isinstance(arrived, SparseStream):
            return scatter(self.op, x, *arrived)
        return combine_entries(self.op, x, arrived)

    def spread(self, arrived: Arrived) -> Num[Array, " size"]:
        """The vector of what arrived."""
        if not isinstance(arrived, SparseStream):
            return arrived
        empty = filled(self.size, neutral(self.op, self.dtype), arrived.indices)
        return scatter(self.op, empty, *arrived)

    def merge_all(self, messages: UInt32[Array, "n words"]) -> Num[Array, " size"]:
        """Combines the vectors of all messages, one after the other.

        A single scatter would combine entries with equal indices in any order on a GPU.
        """
        total = self.vector(messages[0])
        if len(messages) == 1:
            return total
        step = lambda total, message: (self.merge(total, message), None)
        return jax.lax.scan(step, total, messages[1:])[0]

    def ranges(self, messages: UInt32[Array, "n words"]) -> Num[Array, " n*size"]:
        return jax.vmap(self.vector)(messages).reshape(-1)


def ladder(least: float, most: int) -> list[int]:
    """Rooms from `least` to `most` entries, each at most 1.1 times the last, rounded up."""
    steps = max(1, math.ceil(math.log(most / least) / math.log(_RATIO)))
    ratio = least / most
    return sorted({math.ceil(most * ratio ** (i / steps) * (1 - 1e-12)) for i in range(steps + 1)})


class Rooms:
    """The rooms that one message may have. A program takes one of them when it runs.

    They go from `least` entries up to those of the widest format, which alone may be dense.

    Attributes:
        room: int32 scalar, the number of entries that the message has room for now.
    """

    def __init__(self, widest: MessageFormat, least: int, need: Int[Array, ""]):
        """Takes the narrowest room for `need` entries and a few more. 0: unknown, so the widest.

        The need must be equal on all devices, because all must take the same branch.
        """
        self.formats: list[MessageFormat] = []
        rooms = ladder(min(least, widest.capacity), widest.capacity)
        for room in rooms:
            self.formats.append(dataclasses.replace(widest, capacity=room))
            if self.formats[-1].is_array:
                rooms[len(self.formats) - 1 :] = [widest.size]
                break
        bounds = jnp.array(rooms, jnp.int32)
        spare = jnp.minimum(need // _SPARE, rooms[-1] - need)  # their sum may not overflow
        need = jnp.where(need > 0, need + spare, rooms[-1])
        self._rung = jnp.sum(need > bounds[:-1])
        self.room = bounds[self._rung]

    def exchange(
        self,
        x: Num[Array, " size"],
        counts: Int[Array, " n"],
        send: Callable[[UInt32[Array, " words"]], UInt32[Array, "*workers words"]],
        receive: Callable[[Arrived], T],
    ) -> tuple[T, Num[Array, " size"], Int[Array, "*workers n"]]:
        """Sends x and counts by a collective.

        Returns:
            What `receive` makes of the vector or the entries that arrive; x as others see it; the
            counts that arrive.
        """

        def split(words: Array) -> tuple[Array, Array]:
            message, arrived = jnp.split(words, [words.shape[-1] - counts.size], axis=-1)
            return message, arrived.astype(jnp.int32)

        def in_full() -> Any:
            message, arrived = split(send(jnp.concatenate([bits(x), tail])))
            return receive(from_bits(message, x.dtype)), x, arrived

        def in_entries() -> Any:
            most = sparse[-1].capacity
            seen = sparse[-1].rounded(x)
            entries = sparse[-1].extract(seen)

            # Branches do nothing but send, so that they compile fast.
            def at(of: MessageFormat) -> Any:
                stream = SparseStream(*(leaf[: of.capacity] for leaf in entries))
                words = jnp.concatenate([of.codec.encode(stream, of.size), tail])
                message, arrived = split(send(words))
                decode = functools.partial(
                    of.codec.decode, capacity=of.capacity, size=of.size, dtype=x.dtype
                )
                found = (jax.vmap(decode) if message.ndim > 1 else decode)(message)
                missing = [(0, 0)] * (message.ndim - 1) + [(0, most - of.capacity)]
                indices = jnp.pad(found.indices, missing, constant_values=of.size)
                return SparseStream(indices, jnp.pad(found.values, missing)), arrived

            branches = [functools.partial(at, of) for of in sparse]
            found, arrived = jax.lax.switch(self._rung, branches) if branches[1:] else branches[0]()
            return receive(found), seen, arrived

        tail = counts.astype(jnp.uint32)
        sparse = [of for of in self.formats if not of.is_array]
        if len(sparse) == len(self.formats):
            return in_entries()
        return jax.lax.cond(self._rung == len(sparse), in_full, in_entries) if sparse else in_full()


def with_count(
    message: UInt32[Array, " words"], count: Int[Array, ""] | None
) -> UInt32[Array, " words+1"]:
    """The message followed by this worker's count. None: without a count."""
    if count is None:
        return message
    return jnp.concatenate([message, count.astype(jnp.uint32)[None]])


def split_counts(
    messages: UInt32[Array, "n words+1"], is_counted: bool
) -> tuple[UInt32[Array, "n words"], Int[Array, ""]]:
    """The messages of n workers without their counts, and the sum of the counts, or 0."""
    if not is_counted:
        return messages, jnp.int32(0)
    return messages[:, :-1], jnp.sum(messages[:, -1]).astype(jnp.int32)
