"""Top-k of every chunk in entries of few bits: SparseLoCo's exchange (Sarfi et al., 2025)."""

import dataclasses
from typing import Annotated, Any, Literal

from jaxtyping import Array, Float, Int, UInt32

from jaxsparse.arrays.settings import at_least, check_k, check_size
from jaxsparse.codecs.elias_fano import EliasFano
from jaxsparse.reducers.base import Conservation, Gathered, Kept, Sums
from jaxsparse.reducers.entries import conservation_of, decode_entries, encode_entries
from jaxsparse.select.groups import count_entries, group_top_k


@dataclasses.dataclass(frozen=True)
class ChunkedTopK(Gathered):
    """SparseLoCo's exchange (Sarfi et al., 2025): k of every 4096 elements, in 7 to 10 bits each.

    In a step, a worker receives W - 1 messages of 10 bits an entry, 0.02 d bytes each, with the
    defaults, and of 7 with k = 512: 2 for the value, the rest for the index (`codecs.EliasFano`;
    the published code has 12). One word for every 256 entries travels beside them. The residual
    keeps all that the receivers do not decode: unsent entries and the rounding. Zeros are no
    entries. SparseLoCo itself is `chunked_top_k(decay=0.95)` in `jaxsparse.LocalSteps`. Its code
    (templar) differs from the paper: it divides a sum by the number of workers that sent the
    coordinate, clips messages to the median norm, and rounds to levels of a whole vector, of which
    its largest entries use only two of four in two bits.

    Args:
        k: number of entries of each chunk that a worker sends.
            Ties go to the lower index. A shorter last chunk sends k entries, too, or all.
        chunk_size: number of consecutive elements in a chunk.
        value_bits: number of bits of a value: 2, 4, 8, 16 (bfloat16) or 32 (exact).
    """

    k: int = 64
    chunk_size: Annotated[int, at_least(1)] = 4096
    _: dataclasses.KW_ONLY
    value_bits: Literal[2, 4, 8, 16, 32] = 2

    def check(self) -> None:
        _ = self.codec  # raises where it is wrong
        check_k(self.k, self.chunk_size, f"chunk_size={self.chunk_size}")

    @property
    def codec(self) -> EliasFano:
        return EliasFano(self.value_bits)

    @property
    def conservation(self) -> Conservation:
        return conservation_of(self.codec)

    def encode(
        self, x: Float[Array, " d"], state: Any, rank: Int[Array, ""]
    ) -> tuple[UInt32[Array, " words"], Kept]:
        check_size("x.size", x.size)
        stream = group_top_k(x, self.k, self.chunk_size)
        return encode_entries(x, stream, self.codec, state)

    def decode(self, messages: UInt32[Array, "workers words"], size: int) -> Sums:
        capacity = count_entries(size, self.k, self.chunk_size)
        return decode_entries(messages, capacity, size, self.codec)
