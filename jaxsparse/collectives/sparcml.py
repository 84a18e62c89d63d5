"""SparCML's sparse all-reduces, and two that it compares with (Renggli et al., SC 2019).

Sections 5.3.1 (recursive doubling), 5.3.2 and 5.3.3 (split and all-gather, sparse and dense, with
the quantised second half of section 6). A gather of all messages (TopkA) and the ring of section
8.1, figure 3, are the baselines.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Int, Key

from jaxsparse.arrays.settings import static_count
from jaxsparse.arrays.stream import (
    Operation,
    SparseStream,
    merge_duplicates,
    neutral,
    takes_duplicates,
    to_dense,
)
from jaxsparse.codecs.codec import COO, Codec, bits, check_local, from_bits, left_of
from jaxsparse.collectives.messages import (
    AllReduced,
    Arrived,
    MessageFormat,
    Rooms,
    split_counts,
    with_count,
)
from jaxsparse.comm import wire
from jaxsparse.comm.wire import Group
from jaxsparse.quantize.qsgd import QSGD
from jaxsparse.quantize.quantizer import (
    check_feedback,
    dequantize,
    from_message,
    quantize,
    to_message,
)

# A vector with what arrived in a format combined into it.
Receive = Callable[[MessageFormat, Array, Arrived], Array]


def room_in(name: str, capacity: int | None, most: int, op: Operation) -> int:
    """The room in a message, in entries: `capacity`, but no more than `most`. None: `most`."""
    if capacity is None:
        return most
    if op != "sum":
        raise ValueError(
            f"{name}={capacity}, but op={op!r} has no residual for entries that find no room: "
            "leave it None"
        )
    return min(static_count(name, capacity), most)


class Deal(NamedTuple):
    """Deals a vector's blocks to W workers in turn, so that their ranges are alike.

    Ranges of consecutive elements are not: a whole one may lie in an embedding whose rows no batch
    has, and all messages are as long as that of the fullest range.
    """

    size: int
    workers: int
    block: int  # elements

    @property
    def range_size(self) -> int:
        """The number of elements of a worker's range, m."""
        return -(-self.size // (self.block * self.workers)) * self.block

    def deal(self, stream: SparseStream) -> SparseStream:
        """The stream over a vector of W m elements in which each worker's blocks lie together."""
        turn, inside = stream.indices // self.block, stream.indices % self.block
        place = turn % self.workers * self.range_size + turn // self.workers * self.block + inside
        is_empty = stream.indices >= self.size
        return stream._replace(indices=jnp.where(is_empty, self.workers * self.range_size, place))

    def undo(self, x: Array) -> Array:
        """The vector of which `x`, with W m elements, is the dealt one."""
        blocks = x.reshape(self.workers, self.range_size // self.block, self.block)
        return blocks.swapaxes(0, 1).reshape(-1)[: self.size]


def split_format(
    k: int,
    size: int,
    workers: int,
    op: Operation,
    dtype: DTypeLike,
    codec: Codec,
    capacity: int | None,
) -> MessageFormat:
    """The messages of the split phase."""
    room = room_in("capacity", capacity, k, op)
    return MessageFormat(-(-size // workers), room, op, dtype, codec)


def split(
    stream: SparseStream,
    size: int,
    *,
    axis_name: str | None,
    op: Operation,
    codec: Codec,
    capacity: int | None,
) -> AllReduced:
    """Sends each entry to the owner of its range, which combines the arriving entries.

    Worker w owns elements w m to (w + 1) m - 1 with m = ceil(d / W). Last workers may own fewer.
    (The paper gives the last worker the remainder of d / W, which would make all messages longer.)
    It is one all-to-all. A worker receives (W - 1) messages with room for k entries, or for
    `capacity`. Neutral values (zeros, for sums) are no entries, and take no room.

    The total is that of this worker's own range, of m elements. The residual, of W m elements, has
    the entries that it could not send, and their rounding. The overflow counts its entries without
    room.
    """
    workers = wire.axis_size(axis_name)
    k, dtype = stream.capacity, stream.values.dtype
    message_format = split_format(k, size, workers, op, dtype, codec, capacity)
    m = message_format.size
    zeros = jnp.zeros_like(stream.values, shape=(workers * m,))
    if message_format.is_array:
        rows = to_dense(stream, workers * m, op).reshape(workers, m)
        messages = wire.all_to_all(jax.vmap(message_format.pack)(rows), axis_name)
        residual, overflow = zeros, jnp.int32(0)
    else:
        if not takes_duplicates(op):
            stream = merge_duplicates(stream, size, op)
        is_entry = (stream.indices < size) & (stream.values != neutral(op, dtype))
        owner = jnp.where(is_entry, stream.indices // m, workers)
        local = stream._replace(indices=stream.indices % m)
        bins, fits = into_bins(local, owner, workers, message_format.capacity, empty=m)
        check_local(codec, "this all-reduce")
        residual = zeros
        if not message_format.is_exact or capacity is not None:
            lost = left_of(stream.values, codec.rounded(stream, size))
            lost = jnp.where(fits, lost, stream.values)
            residual = zeros.at[stream.indices].add(lost, mode="drop")
        overflow = jnp.sum(is_entry & ~fits, dtype=jnp.int32)
        encode = lambda bin: codec.encode(bin, m)
        messages = wire.all_to_all(jax.vmap(encode)(bins), axis_name)
    return AllReduced(message_format.merge_all(messages), residual, overflow)


def into_bins(
    stream: SparseStream, owner: Int[Array, " k"], bins: int, capacity: int, empty: int
) -> tuple[SparseStream, Bool[Array, " k"]]:
    """Sorts entries by owner into streams of shape (bins, capacity).

    An owner of `bins` means none. An owner's first entries in the stream's order get the room, and
    empty slots have the index `empty`. The mask tells which entries have room.
    """
    order = jnp.argsort(owner, stable=True)
    sorted_owner = owner[order]
    starts = jnp.searchsorted(sorted_owner, jnp.arange(bins + 1, dtype=owner.dtype))
    rank = jnp.arange(owner.size, dtype=jnp.int32) - starts[sorted_owner].astype(jnp.int32)
    position = jnp.zeros_like(owner, jnp.int32).at[order].set(rank, unique_indices=True)
    fits = (position < capacity) & (owner < bins)
    slot = jnp.where(fits, owner * capacity + position, bins * capacity)
    slots = (bins * capacity,)
    indices = jnp.full_like(stream.indices, empty, shape=slots)
    values = jnp.zeros_like(stream.values, shape=slots)
    indices = indices.at[slot].set(stream.indices, mode="drop")
    values = values.at[slot].set(stream.values, mode="drop")
    shape = (bins, capacity)
    return SparseStream(indices.reshape(shape), values.reshape(shape)), fits


def own_range(x: Array, axis_name: str | None, part: Array) -> Array:
    """Adds `part` to this worker's range of m elements of `x`, which has W * m."""
    rows = x.reshape(wire.axis_size(axis_name), part.size)
    return rows.at[wire.axis_index(axis_name)].add(part).reshape(-1)


def split_allgather(
    stream: SparseStream,
    size: int,
    *,
    axis_name: str | None,
    op: Operation = "sum",
    codec: Codec = COO,
    capacity: int | None = None,
    union_capacity: int | None = None,
    needs: Int[Array, "32"] | None = None,
) -> AllReduced:
    """Sends entries to the owners of their ranges, which send the sums to all.

    Unless a capacity bounds them, messages have room for all possible entries. They are dense
    arrays from SparCML's delta on. The paper's words (section 5.3.2) are between 2 (W - 1)/W 2k, if
    all supports are equal, and W 2k, if they are disjoint. Without capacities this function takes
    more than the latter, because all k entries of a worker may have one owner. With `needs`, the
    sums have the room that they took in the last exchange.

    Args:
        stream: k entries; an index may repeat.
        size: number of elements of the vector, d.
        axis_name: the axis of the workers.
        op: operation that combines entries.
        codec: wire format of sparse messages.
        capacity: room for a worker's entries in one owner's range. An even share is k / W. None:
            room for all k. Entries without room, the stream's last ones for an owner, stay in the
            residual and are counted. Zeros take no room.
        union_capacity: room for the sums of one owner. k / W suffices if all workers have the same
            indices and these are spread evenly. None: room for all possible sums. Sums without
            room, the smallest ones, stay in the owner's residual and are counted.
        needs: those that the last exchange returned, see `recursive_double`.
    """
    workers = wire.axis_size(axis_name)
    _check_needs(needs, op)
    total, residual, overflow, *_ = split(
        stream, size, axis_name=axis_name, op=op, codec=codec, capacity=capacity
    )
    message_format, is_cut = _gather_format(
        stream.capacity, size, workers, op, total.dtype, codec, capacity, union_capacity
    )
    if needs is None:
        if is_cut or not message_format.is_exact:
            total, lost, cut = message_format.fit(total, is_cut)
            residual, overflow = own_range(residual, axis_name, lost), overflow + cut
        is_bounded = capacity is not None or is_cut
        message = with_count(message_format.pack(total), overflow if is_bounded else None)
        messages, overflow = split_counts(wire.all_gather(message, axis_name), is_bounded)
        return AllReduced(message_format.ranges(messages)[:size], residual[:size], overflow)

    rooms = Rooms(message_format, -(-stream.capacity // (2 * workers)), needs[0])
    kept, entries = message_format.cut(total, rooms.room)
    counts = jnp.stack([entries, overflow + jnp.maximum(entries - rooms.room, 0)])
    ranges, seen, counts = rooms.exchange(
        kept,
        counts,
        lambda words: wire.all_gather(words, axis_name),
        lambda arrived: jax.vmap(message_format.spread)(arrived),
    )
    entries = wire.most_of_devices(jnp.max(counts[:, 0]), axis_name)
    residual = own_range(residual, axis_name, left_of(total, seen))[:size]
    overflow = jnp.sum(counts[:, 1])
    return AllReduced(ranges.reshape(-1)[:size], residual, overflow, needs=needs.at[0].set(entries))


def _check_needs(needs: Array | None, op: Operation) -> None:
    if needs is not None and op != "sum":
        raise ValueError(
            f"needs={needs}, but op={op!r} has no residual for entries that find no room: leave it "
            "None"
        )


def _gather_format(
    k: int,
    size: int,
    workers: int,
    op: Operation,
    dtype: DTypeLike,
    codec: Codec,
    capacity: int | None,
    union_capacity: int | None,
) -> tuple[MessageFormat, bool]:
    """The messages of the second half, and whether an owner may have more sums than fit."""
    m = -(-size // workers)
    arriving = min(m, workers * room_in("capacity", capacity, k, op))
    room = room_in("union_capacity", union_capacity, arriving, op)
    message_format = MessageFormat(m, room, op, dtype, codec)
    return message_format, room < arriving and not message_format.is_array


def dsar_split_allgather(
    stream: SparseStream,
    size: int,
    *,
    axis_name: str | None,
    op: Operation = "sum",
    codec: Codec = COO,
    capacity: int | None = None,
    quantizer: QSGD | None = None,
    key: Key[Array, ""] | None = None,
) -> AllReduced:
    """As `split_allgather`, but owners send their ranges as dense arrays.

    Use it if the supports fill in so much that the sum is dense. The second half receives (W - 1)/W
    d words, or fewer if a `quantizer` rounds sums, which alone can be quantised. Codec and capacity
    are those of the first half.

    With a key for stochastic rounding, the same on all workers and fresh at each step, the total is
    unbiased, and the residual does *not* keep the error, as in the paper. Without one, it rounds to
    nearest, and the residual keeps the error. Quantisers are then refused if the residual could
    grow without bound.
    """
    if quantizer is not None and op != "sum":
        raise ValueError(f"quantizer={quantizer}, but only sums can be quantised, not op={op!r}")
    if quantizer is not None and key is None:
        check_feedback(quantizer, stochastic=False)
    total, residual, overflow, *_ = split(
        stream, size, axis_name=axis_name, op=op, codec=codec, capacity=capacity
    )
    m = total.size
    if quantizer is None:
        message = bits(total)
    else:
        if key is not None:
            key = jax.random.fold_in(key, wire.axis_index(axis_name))
        quantized = quantize(total, quantizer, key)
        if key is None:
            arriving = dequantize(quantized, quantizer, m)
            residual = own_range(residual, axis_name, total - arriving)
        message = to_message(quantized, quantizer)
    is_bounded = capacity is not None
    message = with_count(message, overflow if is_bounded else None)
    messages, overflow = split_counts(wire.all_gather(message, axis_name), is_bounded)

    def unpack(words: Array) -> Array:
        if quantizer is None:
            return from_bits(words, total.dtype)
        return dequantize(from_message(words, quantizer, m), quantizer, m)

    ranges = jax.vmap(unpack)(messages)
    return AllReduced(ranges.reshape(-1)[:size], residual[:size], overflow)


def recursive_double(
    stream: SparseStream,
    size: int,
    *,
    axis_name: str | None,
    op: Operation = "sum",
    codec: Codec = COO,
    needs: Int[Array, "32"] | None = None,
) -> AllReduced:
    """Workers at distance 1, 2, 4, ... swap their partial sums. It has the least latency.

    Messages have room for all possible entries, 2^t k at stage t. They are dense arrays from
    SparCML's delta on. If W is not a power of two, let P be the largest one below W. The last W - P
    workers first send their entries to the first ones, and receive the result at the end. Workers
    that hold the same partial sum share the codec's rounding of it.

    It takes log2 W rounds, and 2 more if W is no power of two. The paper's words (section 5.3.1)
    are between log2(W) 2k, if all supports are equal, and (W - 1) 2k, if they are disjoint. With
    static shapes it is always the latter. With `needs`, a message is at most 1.13 times as long as
    the last exchange needed, but has room for k / 2 entries at least, and carries a few counts.

    Args:
        stream: k entries; an index may repeat.
        size: number of elements of the vector, d.
        axis_name: the axis of the workers.
        op: operation that combines entries.
        codec: wire format of sparse messages.
        needs: the entries that each stage had to send in the last exchange, as that returned them.
            0: unknown, so that there is room for all. Of more sums than have room, the largest are
            sent. The others stay in the residuals of the workers that hold them, and are counted.
    """
    workers = wire.axis_size(axis_name)
    power, k = _power(workers), stream.capacity
    extra, rank = workers - power, wire.axis_index(axis_name)
    MessageFormat(size, k, op, stream.values.dtype, codec)  # raises for a single worker, too
    _check_needs(needs, op)
    formats = [
        MessageFormat(size, capacity, op, stream.values.dtype, codec)
        for capacity in _capacities(k, size, workers)
    ]
    x = to_dense(stream, size, op)
    residual = jnp.zeros_like(x)
    # The needs of all stages and the overflow, of the workers whose entries are in x.
    counts = jnp.zeros(0 if needs is None else len(formats) + 1, jnp.int32)

    def exchange(
        stage: int, pairs: list[tuple[int, int]], holds: Array, holders: int, receive: Receive
    ) -> tuple[Array, Array, Array]:
        """x, residual and counts after a stage, in which `holds` tells who sends x.

        `holders` workers have the same x, and each keeps its share of what does not arrive.
        """
        of = formats[stage]
        send = lambda words: wire.permute(words, axis_name, pairs)
        if needs is None:
            if of.is_exact:
                return receive(of, x, of.unpack(send(of.pack(x)))), residual, counts
            sent = jnp.where(holds, of.rounded(x), x)
            left = residual + left_of(x, sent) / holders
            return receive(of, sent, of.unpack(send(of.pack(sent)))), left, counts
        rooms = Rooms(of, -(-k // 2), needs[stage])
        kept, entries = of.cut(x, rooms.room)
        over = jnp.maximum(entries - rooms.room, 0)
        known = jnp.where(holds, counts.at[stage].set(entries).at[-1].add(over), counts)
        arrived, seen, others = rooms.exchange(kept, known, send, of.spread)
        sent = jnp.where(holds, seen, x)
        known = jnp.concatenate([jnp.maximum(known, others)[:-1], (known + others)[-1:]])
        return receive(of, sent, arrived), residual + left_of(x, sent) / holders, known

    if extra:
        pairs = [(power + i, i) for i in range(extra)]
        fold = lambda of, x, arrived: jnp.where(rank < extra, of.combine(x, arrived), x)
        x, residual, counts = exchange(0, pairs, rank >= power, 1, fold)
        counts = jnp.where(rank < power, counts, 0)  # they count with those that they are added to
    distance, stage = 1, int(extra > 0)
    while distance < power:
        pairs = [(i, i ^ distance) for i in range(power)]
        x, residual, counts = exchange(stage, pairs, rank < power, distance, MessageFormat.combine)
        distance, stage = 2 * distance, stage + 1
    if extra:
        pairs = [(i, power + i) for i in range(extra)]
        unfold = lambda of, x, arrived: jnp.where(rank >= power, of.spread(arrived), x)
        x, residual, counts = exchange(stage, pairs, rank < power, power, unfold)
    # CPUs take subnormal numbers for zeros, which sparse messages leave out. So where one worker
    # adds up -0 and -0, another may have 0 and -0: they would differ by the sign.
    x = wire.replicated(jnp.where(x == 0, jnp.zeros_like(x), x), axis_name)
    if needs is None or not formats:
        return AllReduced(x, residual, jnp.int32(0), needs=needs)
    counts = wire.replicated(counts, axis_name)
    found = wire.most_of_devices(counts[:-1], axis_name)
    return AllReduced(x, residual, counts[-1], needs=needs.at[: found.size].set(found))


def _power(workers: int) -> int:
    return 1 << (workers.bit_length() - 1)


def _capacities(k: int, size: int, workers: int) -> list[int]:
    """The most entries of each exchange."""
    power = _power(workers)
    stages = range(power.bit_length() - 1)
    if workers == power:
        sources = [2**t for t in stages]
    else:
        sources = [1, *(min(2 ** (t + 1), workers) for t in stages), workers]
    return [min(size, k * count) for count in sources]


def all_gather_sum(
    stream: SparseStream,
    size: int,
    *,
    axis_name: str | None,
    op: Operation = "sum",
    codec: Codec = COO,
    distinct: bool = False,
) -> AllReduced:
    """Every worker receives every worker's entries and combines them, in order of rank.

    It is one all-gather, of (W - 1) 2k words in COO: the simplest all-reduce, and the most
    expensive one for many workers. The residual is the rounding error of each of this worker's
    entries, in the stream's order if they are `distinct`, or else in increasing order of indices.
    `distinct` says that no index repeats in a stream, as after a top-k, which saves a sort.
    """
    message_format = MessageFormat(size, stream.capacity, op, stream.values.dtype, codec)
    if not distinct:  # a GPU scatters equal indices in any order, and replicas would drift
        stream = merge_duplicates(stream, size, op)
    message, lost = message_format.pack_entries(stream)
    messages = wire.all_gather(message, axis_name)
    return AllReduced(message_format.merge_all(messages), lost, jnp.int32(0), stream.indices)


def sparse_ring(
    stream: SparseStream,
    size: int,
    *,
    axis_name: str | None,
    op: Operation = "sum",
    codec: Codec = COO,
    capacity: int | None = None,
) -> AllReduced:
    """Sends partial sums of W ranges round a ring, and then the sums round it once more.

    It takes 2 (W - 1) rounds. `capacity` is the room in messages, in entries. None: room for all.
    If a partial sum has more entries, the smallest stay in the sender's residual and are counted.
    """
    ring = Group.whole(axis_name)
    n, rank, dtype = ring.size, ring.rank, stream.values.dtype
    formats = _formats(stream.capacity, size, n, op, dtype, codec, capacity)
    m = formats[-1].size
    rows = to_dense(stream, n * m, op).reshape(n, m)
    residual, overflow = jnp.zeros_like(rows), jnp.int32(0)
    is_bounded = capacity is not None

    for step in range(n - 1):
        message_format, row = formats[step], (rank - step) % n
        sent, lost, cut = message_format.fit(rows[row], is_bounded)
        residual, overflow = residual.at[row].add(lost), overflow + cut
        message = ring.shift(message_format.pack(sent), 1)
        arrived = (rank - step - 1) % n
        rows = rows.at[arrived].set(message_format.merge(rows[arrived], message))
    own = (rank + 1) % n
    message_format = formats[-1]
    sent, lost, cut = message_format.fit(rows[own], is_bounded)
    residual, overflow = residual.at[own].add(lost), overflow + cut

    messages = [with_count(message_format.pack(sent), overflow if is_bounded else None)]
    for _ in range(n - 1):
        messages.append(ring.shift(messages[-1], 1))
    # Message i started at rank - i, whose range is number rank - i + 1.
    stacked = jnp.stack(messages)[(rank + 1 - jnp.arange(n)) % n]
    stacked, overflow = split_counts(stacked, is_bounded)
    total = wire.replicated(message_format.ranges(stacked)[:size], axis_name)
    overflow = wire.replicated(overflow, axis_name)
    return AllReduced(total, residual.reshape(-1)[:size], overflow)


def _formats(
    k: int,
    size: int,
    workers: int,
    op: Operation,
    dtype: DTypeLike,
    codec: Codec,
    capacity: int | None,
) -> list[MessageFormat]:
    """The formats of the first lap's steps, and of the second lap."""
    m = -(-size // workers)
    rooms = [room_in("capacity", capacity, min(m, (step + 1) * k), op) for step in range(workers)]
    return [MessageFormat(m, room, op, dtype, codec) for room in rooms]
