"""QSGD (Alistarh et al., NeurIPS 2017): dense all-reduce in a few bits a value."""

import dataclasses
from typing import Literal

from jaxsparse import quantize
from jaxsparse.feedback.transformations import SystemOptions
from jaxsparse.systems.quantized import Quantized
from jaxsparse.systems.table import system


@dataclasses.dataclass(frozen=True)
class _QSGD(SystemOptions):
    """QSGD (Alistarh et al., NeurIPS 2017): all values at each step, in 2, 4 or 8 bits.

    A worker receives 2 (W - 1)/W (bits / 32 + 1 / group_size) d words a step: with 4 bits, an
    eighth of a dense all-reduce's. Values are quantised on the way to the owner of their range, and
    sums on the way back. The last group of a range is filled if that adds at most a 64th. (The
    paper has an all-gather, (W - 1) times the packed vector.) `quantized` has other formats,
    shorter scales and error feedback by default.

    `momentum` acts before the exchange (momentum correction), without masking, because everything
    is sent at each step.

    Args:
        bits: number of bits of a value on the wire.
        group_size: number of consecutive values that share a scale.
        scale: norm of a group that scales it: "max", or the paper's "l2", which has larger errors.
            See `quantize.QSGD`.
        rounding: way of rounding. "stochastic" is unbiased and drops its error, as in the paper.
            "nearest" keeps its error in the residual.
        seed: seed of stochastic rounding.

    Raises:
        ValueError: settings out of range, or rounding="nearest" with scale="l2" and too few bits
            for the group size, so that the residual could grow without bound.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> tx = qsgd(8, axis_name=None)  # one worker sends nothing, and nothing is rounded
        >>> grads = {"kernel": jnp.arange(2048.0).reshape(64, 32), "bias": jnp.ones(32)}
        >>> updates, state = jax.jit(tx.update)(grads, tx.init(grads))
        >>> updates["kernel"][-1, -3:].tolist()
        [2045.0, 2046.0, 2047.0]
    """

    bits: Literal[2, 4, 8] = 4
    _: dataclasses.KW_ONLY
    group_size: int = 1024
    scale: Literal["max", "l2"] = "max"
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    seed: int = 0

    def made(self) -> Quantized:
        quantizer = quantize.QSGD(self.bits, self.group_size, self.scale)
        return Quantized(quantizer, self.rounding, seed=self.seed)


qsgd = system(
    _QSGD,
    "qsgd",
    summary="[QSGD](https://arxiv.org/abs/1610.02132): all values in 2, 4 or 8 bits",
    received="d (W-1)/W (bits/4 + 8/group_size)",
)
