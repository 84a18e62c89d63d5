"""Top-k SGD with a sparse all-gather: TopkA, and by a threshold DGC and MSTopk."""

import dataclasses
from typing import Any

from jaxtyping import Array, Float, Int, UInt32

from jaxsparse.arrays.settings import Density, entries
from jaxsparse.codecs.codec import COO, Codec
from jaxsparse.feedback.transformations import SystemOptions
from jaxsparse.reducers.base import Gathered, Kept, Sums
from jaxsparse.reducers.entries import EntryReducer, decode_entries, encode_entries
from jaxsparse.select.thresholds import DEFAULT_PASSES
from jaxsparse.select.top_k import SELECTORS, Bisection, Selection
from jaxsparse.systems.table import system


@dataclasses.dataclass(frozen=True)
class TopK(Gathered, EntryReducer):
    """Top-k SGD (TopkA): each worker's k largest entries, gathered and summed by all.

    In a step, a worker sends k = density d entries and receives (W - 1) k, which are 2 (W - 1) k
    words in COO and grow with the number of workers. This is the baseline of gTop-k, Ok-Topk and
    SparDL.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> tx = top_k(0.001, axis_name=None)
        >>> grads = {"kernel": jnp.arange(2048.0).reshape(64, 32), "bias": jnp.ones(32)}
        >>> updates, state = jax.jit(tx.update)(grads, tx.init(grads))
        >>> updates["kernel"][-1, -3:].tolist()
        [2045.0, 2046.0, 2047.0]
    """

    def encode(
        self, x: Float[Array, " d"], state: Any, rank: Int[Array, ""]
    ) -> tuple[UInt32[Array, " words"], Kept]:
        stream = SELECTORS[self.selection](x, entries(self.density, x.size))
        return encode_entries(x, stream, self.codec, state)

    def decode(self, messages: UInt32[Array, "workers words"], size: int) -> Sums:
        return decode_entries(messages, entries(self.density, size), size, self.codec)


@dataclasses.dataclass(frozen=True)
class _TopK(SystemOptions, TopK):
    pass


top_k = system(_TopK, "top_k", summary="local top-k, all-gathered (TopkA)", received="8 k (W-1)")


@dataclasses.dataclass(frozen=True)
class _DGC(SystemOptions, TopK):
    """Deep Gradient Compression (Lin et al., ICLR 2018): a thousandth of the gradient is enough.

    Each worker estimates a threshold from a sample and sends the entries that reach it, k = density
    d at most. All workers gather and sum them: 2 (W - 1) k words a step in COO.

    `momentum` acts before the exchange (momentum correction, section 3.2), and is masked where this
    worker sent (3.3). Chain an optimizer without momentum behind it, such as `optax.sgd(lr)`, or
    give `momentum=None`. The paper clips each of W workers' gradients before they are accumulated
    (3.2), at W**-0.5 times the threshold for their mean:

        clip = jaxsparse.per_worker(optax.clip_by_global_norm(threshold / W**0.5))
        tx = optax.chain(clip, jaxsparse.dgc(0.001), ...)

    The paper lowers the density from 25 % over the first four of about 80 epochs (3.3):

        last = jaxsparse.systems.TopK(0.001, selection="sampled")
        tx = jaxsparse.error_feedback(jaxsparse.warm_up(last, steps=...), momentum=0.9)

    Args:
        selection: see `top_k`. "sampled" is the paper's, and
            `jaxsparse.select.Sampled(samples=...)` sets the size of the sample.
    """

    density: Density = 0.001
    selection: Selection = dataclasses.field(default="sampled", kw_only=True)
    momentum: float | Array | None = dataclasses.field(default=0.9, kw_only=True)


dgc = system(
    _DGC,
    "dgc",
    summary="[DGC](https://arxiv.org/abs/1712.01887): TopkA by a sampled threshold, momentum "
    "corrected",
    received="8 k (W-1)",
)


@dataclasses.dataclass(frozen=True)
class _MSTopK(SystemOptions):
    """MSTopk (Shi et al., MLSys 2021): `top_k` with a threshold found by bisection.

    A fixed number of passes brackets a threshold. All workers gather k = density d entries of each
    worker that lie above it, or nearly so. A worker receives 2 (W - 1) k words a step in COO, as
    with `top_k`. (The paper gathers within hosts first and then between them. Here axes within a
    host are JAX's own, which sums exactly over them: see `jaxsparse.value_and_grad`.)

    Args:
        density: k as a share of each bucket's elements, in (0, 1].
        passes: number of trial thresholds; see `jaxsparse.select.bisection_threshold`.
        codec: wire format of the messages.
    """

    density: Density
    passes: int = dataclasses.field(default=DEFAULT_PASSES, kw_only=True)
    codec: Codec = dataclasses.field(default=COO, kw_only=True)

    @property
    def tree_reducer(self) -> TopK:
        return TopK(self.density, codec=self.codec, selection=Bisection(self.passes))


ms_topk = system(
    _MSTopK, "ms_topk", summary="MSTopk (MLSys 2021): TopkA by bisection", received="8 k (W-1)"
)
