"""The exchanges of this package by name, see `jaxsparse.exchanges`."""

from typing import Literal, Unpack

from jaxsparse.codecs.codec import COO, Codec
from jaxsparse.contrib.demo import DeMo, ValueBits
from jaxsparse.contrib.gtopk import GTopK
from jaxsparse.contrib.ok_topk import OkTopk
from jaxsparse.feedback.options import Options
from jaxsparse.feedback.transformations import Exchange, exchange
from jaxsparse.quantize.formats import Format
from jaxsparse.reducers.matrices import SCANNED, Matrix
from jaxsparse.reducers.quantized import Quantized
from jaxsparse.reducers.top_k import TopK
from jaxsparse.select.thresholds import DEFAULT_PASSES
from jaxsparse.select.top_k import Bisection, Selection

_DEMO_DECAY = 0.999


def demo(
    k: int = 32,
    chunk: int = 64,
    *,
    value_bits: ValueBits = 16,
    stacked: str | None = SCANNED,
    matrices: tuple[Matrix, ...] | None = None,
    **options: Unpack[Options],
) -> Exchange:
    """DeMo (Peng et al., 2024): momenta of the workers' own, whose largest coefficients are sent.

    `decay` is 0.999 if it is not given. See `DeMo`.
    """
    options.setdefault("decay", _DEMO_DECAY)
    reducer = DeMo(k, chunk, value_bits=value_bits, stacked=stacked, matrices=matrices)
    return exchange(reducer, **options)


def gtopk(
    density: float,
    *,
    residuals: Literal["global", "published"] = "global",
    codec: Codec = COO,
    selection: Selection = "fast",
    **options: Unpack[Options],
) -> Exchange:
    """gTop-k (Shi et al., ICDCS 2019): k entries are left of each sum of two workers'.

    See `GTopK`.
    """
    reducer = GTopK(density, residuals=residuals, codec=codec, selection=selection)
    return exchange(reducer, **options)


def ok_topk(
    density: float,
    *,
    refresh_every: int = 32,
    rebalance_every: int = 64,
    capacity_factor: float = 2.0,
    codec: Codec = COO,
    selection: Selection = "fast",
    **options: Unpack[Options],
) -> Exchange:
    """Ok-Topk (Li and Hoefler, PPoPP 2022): thresholds that are reused, balanced regions.

    See `OkTopk`.
    """
    reducer = OkTopk(
        density,
        refresh_every=refresh_every,
        rebalance_every=rebalance_every,
        capacity_factor=capacity_factor,
        codec=codec,
        selection=selection,
    )
    return exchange(reducer, **options)


def ms_topk(
    density: float, *, passes: int = DEFAULT_PASSES, codec: Codec = COO, **options: Unpack[Options]
) -> Exchange:
    """MSTopk (Shi et al., MLSys 2021): `top_k` with a threshold found by bisection.

    A fixed number of passes brackets a threshold. All workers gather k = density d entries of each
    worker that lie above it, or nearly so. A worker receives 2 (W - 1) k words a step in COO, as
    with `top_k`. (The paper gathers within hosts first and then between them. Here axes within a
    host are JAX's own, which sums exactly over them: see `jaxsparse.value_and_grad`.)

    Args:
        density: k as a share of each bucket's elements, in (0, 1].
        passes: number of trial thresholds; see `jaxsparse.select.bisection_top_k`.
        codec: wire format of the messages.
    """
    return exchange(TopK(density, codec=codec, selection=Bisection(passes)), **options)


def sign_sgd(*, group_size: int = 1024, **options: Unpack[Options]) -> Exchange:
    """EF-signSGD (Karimireddy et al., ICML 2019): one bit a value, and error feedback.

    Each value becomes plus or minus the mean magnitude of its group, and so does each sum on its
    way back, as in dist-EF-blockSGD (Zheng et al., NeurIPS 2019). A worker receives 2 (W - 1)/W (1
    / 32 + 1 / group_size) d words a step: a 31st of a dense all-reduce's. It is `quantized("sign",
    group_size=1024, scale="float32")` by another name. A sign is never 0, so elements without
    gradients move, too, such as the rows of tokens that never come.

    No momentum is masked, because everything is sent at each step. 1-bit Adam (Tang et al., ICML
    2021), which divides signs of momenta by a second moment that is frozen after a warm-up, is not
    provided: where coordinates have unlike scales, the mean magnitude of a group divided by small
    second moments makes large steps.

    Args:
        group_size: number of consecutive values that share a scale.
    """
    return exchange(Quantized(Format("sign", group_size, "float32"), "nearest"), **options)
