"""The first half of the split all-reduces, in which each worker adds up one range of the vector.

SparCML, section 5.3.2: the split phase of SSAR_Split_allgather and DSAR_Split_allgather.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Int

from jaxsparse import codecs
from jaxsparse.arrays.settings import static_count
from jaxsparse.arrays.stream import (
    Operation,
    SparseStream,
    merge_duplicates,
    neutral,
    takes_duplicates,
    to_dense,
)
from jaxsparse.codecs.codec import left_of
from jaxsparse.collectives.messages import AllReduced, MessageFormat
from jaxsparse.comm import wire


def room_in(name: str, capacity: int | None, most: int, op: Operation) -> int:
    """The room in a message, in entries: `capacity`, but no more than `most`. None: `most`.

    Raises:
        ValueError: `capacity` is no int, is below 1, or bounds messages that do not carry sums.
    """
    if capacity is None:
        return most
    if op != "sum":
        raise ValueError(
            f"{name}={capacity}, but op={op!r} has no residual for entries that find no room: "
            "leave it None"
        )
    return min(static_count(name, capacity), most)


def split_format(
    k: int,
    size: int,
    workers: int,
    op: Operation,
    dtype: DTypeLike,
    codec: codecs.Codec,
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
    codec: codecs.Codec,
    capacity: int | None,
) -> AllReduced:
    """Sends each entry to the owner of its range, which combines the arriving entries.

    Worker w owns elements w m to (w + 1) m - 1 with m = ceil(d / W). Last workers may own fewer.
    (The paper gives the last worker the remainder of d / W, which would make all messages longer.)

    It is one all-to-all. A worker receives (W - 1) messages with room for k entries, or for
    `capacity`. Neutral values (zeros, for sums) are no entries, and take no room.

    Returns:
        The total of this worker's own range, of m elements. The residual of W m elements: entries
        that this worker could not send, and their rounding. The number of its entries without
        room.
    """
    workers = wire.axis_size(axis_name)
    k, dtype = stream.capacity, stream.values.dtype
    message_format = split_format(k, size, workers, op, dtype, codec, capacity)
    m = message_format.size
    zeros = jnp.zeros_like(stream.values, shape=(workers * m,))
    if message_format.is_dense:
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
        codecs.check_local(codec, "this all-reduce")
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
    """Sorts entries by owner.

    Args:
        stream: k entries.
        owner: the owner of each entry, or `bins` for entries without one.
        bins: number of owners.
        capacity: room in an owner's bin, in entries. The first ones in the stream's order get it.
        empty: index of an empty slot of a bin.

    Returns:
        Streams of shape (bins, capacity), and a mask of the entries that they contain.
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
