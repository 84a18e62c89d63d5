"""MSTopk (Shi et al., MLSys 2021): top-k by bisection."""

import dataclasses

from jaxsparse import codecs
from jaxsparse.arrays.settings import Density
from jaxsparse.feedback.transformations import SystemOptions
from jaxsparse.select.selection import Bisection
from jaxsparse.select.thresholds import DEFAULT_PASSES
from jaxsparse.systems.table import system
from jaxsparse.systems.top_k import TopK


@dataclasses.dataclass(frozen=True)
class _MSTopK(SystemOptions):
    """MSTopk (Shi et al., MLSys 2021): `top_k` with a threshold found by bisection.

    A fixed number of passes brackets a threshold. All workers gather k = density d entries of each
    worker that lie above it, or nearly so. A worker receives 2 (W - 1) k words a step in COO, as
    with `top_k`. (The paper gathers within hosts first and then between them. Here axes within a
    host are JAX's own, which sums exactly over them: see `jaxsparse.data_parallel`.)

    `momentum` acts before the exchange (momentum correction), and is masked where this worker sent.

    Args:
        density: k as a share of each bucket's elements, in (0, 1], or a warm-up.
        passes: number of trial thresholds; see `jaxsparse.select.bisection_threshold`.
        codec: wire format of the messages.

    Raises:
        ValueError: settings out of range.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> tx = ms_topk(0.001, axis_name=None)
        >>> grads = {"kernel": jnp.arange(2048.0).reshape(64, 32), "bias": jnp.ones(32)}
        >>> updates, state = jax.jit(tx.update)(grads, tx.init(grads))
        >>> updates["kernel"][-1, -3:].tolist()
        [2045.0, 2046.0, 2047.0]
    """

    density: Density
    passes: int = dataclasses.field(default=DEFAULT_PASSES, kw_only=True)
    codec: codecs.Codec = dataclasses.field(default=codecs.COO, kw_only=True)

    def made(self) -> TopK:
        return TopK(self.density, codec=self.codec, selection=Bisection(self.passes))


ms_topk = system(
    _MSTopK, "ms_topk", summary="MSTopk (MLSys 2021): TopkA by bisection", received="8 k (W-1)"
)
