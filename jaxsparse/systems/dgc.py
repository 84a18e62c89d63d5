"""Deep Gradient Compression (Lin et al., ICLR 2018)."""

import dataclasses

from jaxtyping import Array

from jaxsparse.arrays.settings import Density
from jaxsparse.feedback.transformations import SystemOptions
from jaxsparse.select.selection import Selection
from jaxsparse.systems.table import system
from jaxsparse.systems.top_k import TopK


@dataclasses.dataclass(frozen=True)
class _DGC(SystemOptions, TopK):
    """Deep Gradient Compression (Lin et al., ICLR 2018): a thousandth of the gradient is enough.

    Each worker estimates a threshold from a sample and sends the entries that reach it, k =
    density d at most. All workers gather and sum them: 2 (W - 1) k words a step in COO.

    `momentum` acts before the exchange (momentum correction, section 3.2), and is masked where this
    worker sent (3.3), with `nesterov=True`, too. Chain an optimizer without momentum behind it,
    such as `optax.sgd(lr)`. To clip each of W workers' gradients before they are accumulated (3.2),
    at W**-0.5 times the threshold of their mean, chain Optax's clipping in front of it:

        tx = optax.chain(optax.clip_by_global_norm(threshold / W**0.5), jaxsparse.dgc(0.001), ...)

    `density=jaxsparse.warm_up(0.001, steps=...)` lowers the density from 25 % (3.3). The paper does
    so over the first four of about 80 epochs.

    Args:
        density: k as a share of each bucket's elements, in (0, 1], or a warm-up.
        codec: wire format. `codecs.COO` is exact; `codecs.Packed()` halves the bytes and keeps the
            rounding in the residual.
        selection: the way in which a worker finds its entries. "sampled" is the paper's, and
            `Sampled(samples=...)` sets the size of the sample. "fast", "exact" and "bisection" are
            those of `top_k`.

    Raises:
        ValueError: settings out of range.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> tx = dgc(0.001, axis_name=None)
        >>> grads = {"kernel": jnp.ones((64, 64)).at[3].set(5.0), "bias": jnp.ones(64)}
        >>> updates, state = jax.jit(tx.update)(grads, tx.init(grads))
        >>> jnp.count_nonzero(updates["kernel"], axis=1)[:5].tolist()
        [0, 0, 0, 5, 0]
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
