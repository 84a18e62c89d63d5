"""Top-k SGD with a sparse all-gather: TopkA, and by a threshold DGC and MSTopk."""

import dataclasses
from typing import Any

from jaxtyping import Array, Float, Int, UInt32

from jaxsparse.arrays.settings import entries
from jaxsparse.reducers.base import Gathered, Kept, Sums
from jaxsparse.reducers.entries import EntryReducer, decode_entries, encode_entries
from jaxsparse.select.top_k import SELECTORS


@dataclasses.dataclass(frozen=True)
class TopK(Gathered, EntryReducer):
    """Top-k SGD (TopkA): each worker's k largest entries, gathered and summed by all.

    In a step, a worker sends k = density d entries and receives (W - 1) k, which are 2 (W - 1) k
    words in COO and grow with the number of workers. This is the baseline of gTop-k, Ok-Topk and
    SparDL.
    """

    def encode(
        self, x: Float[Array, " d"], state: Any, rank: Int[Array, ""]
    ) -> tuple[UInt32[Array, " words"], Kept]:
        stream = SELECTORS[self.selection](x, entries(self.density, x.size))
        return encode_entries(x, stream, self.codec, state)

    def decode(self, messages: UInt32[Array, "workers words"], size: int) -> Sums:
        return decode_entries(messages, entries(self.density, size), size, self.codec)
