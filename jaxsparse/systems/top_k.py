"""Top-k SGD with a sparse all-gather: TopkA."""

import dataclasses
from typing import Any

from jaxtyping import Array, Float, Int, UInt32

from jaxsparse.arrays.settings import entries
from jaxsparse.feedback.transformations import SystemOptions
from jaxsparse.reducers.base import Gathered, Kept, Sums
from jaxsparse.reducers.entries import EntryReducer, decode_entries, encode_entries
from jaxsparse.select.selection import SELECTORS
from jaxsparse.systems.table import system


@dataclasses.dataclass(frozen=True)
class TopK(Gathered, EntryReducer):
    """Top-k SGD (TopkA): each worker's k largest entries, gathered and summed by all.

    In a step, a worker sends k = density d entries and receives (W - 1) k, which are 2 (W - 1) k
    words in COO and grow with the number of workers. This is the baseline of gTop-k, Ok-Topk and
    SparDL.

    `momentum` acts before the exchange (momentum correction), and is masked where this worker sent.

    Args:
        density: k as a share of each bucket's elements, in (0, 1], or a warm-up
            (`jaxsparse.warm_up`).
        codec: wire format. `codecs.COO` is exact; `codecs.Packed()` halves the bytes and keeps the
            rounding in the residual. `codecs.EliasFano()` sends about 11 bits an entry.
        selection: the way in which a worker finds its entries. "fast" keeps nearly the largest
            entries, "exact" the largest. "sampled" (DGC's) and "bisection" (MSTopk's) estimate a
            threshold.

    Raises:
        ValueError: settings out of range.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> tx = top_k(0.001, axis_name=None)
        >>> grads = {"kernel": jnp.arange(2048.0).reshape(64, 32), "bias": jnp.ones(32)}
        >>> updates, state = jax.jit(tx.update)(grads, tx.init(grads))
        >>> updates["kernel"][-1, -3:].tolist()
        [2045.0, 2046.0, 2047.0]
    """

    changes_few = True

    def encode(
        self, x: Float[Array, " d"], state: Any, rank: Int[Array, ""]
    ) -> tuple[UInt32[Array, " words"], Kept]:
        """See `Gathered`."""
        stream = SELECTORS[self.selection](x, entries(self.density, x.size))
        return encode_entries(x, stream, self.codec, state)

    def decode(self, messages: UInt32[Array, "workers words"], size: int) -> Sums:
        """See `Gathered`."""
        return decode_entries(messages, entries(self.density, size), size, self.codec)


@dataclasses.dataclass(frozen=True)
class _TopK(SystemOptions, TopK):
    pass


top_k = system(_TopK, "top_k", summary="local top-k, all-gathered (TopkA)", received="8 k (W-1)")
