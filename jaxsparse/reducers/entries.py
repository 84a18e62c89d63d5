"""What reducers share that select entries by size and send them through a codec."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from jaxsparse.arrays.settings import Density
from jaxsparse.arrays.stream import SparseStream
from jaxsparse.codecs.codec import COO, Codec, check_codec
from jaxsparse.collectives.messages import MessageFormat
from jaxsparse.reducers.base import Conservation, Kept, Reducer, Sums, keep_entries
from jaxsparse.select.top_k import Selection, check_selection


@dataclasses.dataclass(frozen=True)
class EntryReducer(Reducer):
    """A reducer of entries.

    Args:
        density: k, the number of entries, as a share of each bucket's elements, in (0, 1].
        codec: wire format. `codecs.COO` is exact; `codecs.Packed()` halves the bytes and keeps the
            rounding in the residual. `codecs.EliasFano()` sends about 11 bits an entry.
        selection: the way in which a worker finds its entries. "fast" keeps nearly the largest
            entries, "exact" the largest. "sampled" (DGC's) and "bisection" (MSTopk's) estimate a
            threshold.
    """

    density: Density
    codec: Codec = dataclasses.field(default=COO, kw_only=True)
    selection: Selection = dataclasses.field(default="fast", kw_only=True)

    def check(self) -> None:
        check_codec(self.codec)
        check_selection(self.selection)

    @property
    def conservation(self) -> Conservation:
        return conservation_of(self.codec)


def conservation_of(codec: Codec) -> Conservation:
    """How well sums are conserved if the residual keeps what the codec rounds."""
    if codec.is_exact:
        return "exact"
    return "to rounding" if codec.is_local else "to group rounding"


def encode_entries(
    x: Float[Array, " d"], stream: SparseStream, codec: Codec, state: Any
) -> tuple[UInt32[Array, " words"], Kept]:
    """The message of the entries `stream` of `x`, and what stays; see `Gathered.encode`."""
    message, lost = _format(stream.capacity, x.size, codec).pack_entries(stream)
    return message, keep_entries(x, stream, lost, state)


def decode_entries(
    messages: UInt32[Array, "workers words"], capacity: int, size: int, codec: Codec
) -> Sums:
    """The sums of the vectors of such messages, of `capacity` entries each."""
    return Sums(_format(capacity, size, codec).merge_all(messages))


def _format(capacity: int, size: int, codec: Codec) -> MessageFormat:
    return MessageFormat(size, capacity, "sum", jnp.float32, codec)
