"""QSGD (Alistarh et al., NeurIPS 2017): dense all-reduce in a few bits a value."""

import dataclasses
from typing import Any, Literal, Unpack

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from jaxsparse import quantize
from jaxsparse.collectives import wire
from jaxsparse.collectives.quantized_all_reduce import quantized_all_reduce
from jaxsparse.feedback import error_feedback
from jaxsparse.feedback.options import LeafOptions, exchange_options
from jaxsparse.quantize import Quantizer, check_feedback
from jaxsparse.reducers.base import Conservation, Reduced, SeededReducer, deliver
from jaxsparse.systems.row import Case, System


@dataclasses.dataclass(frozen=True)
class Quantized(SeededReducer):
    """Sends everything at each step, quantised on the way to its owner and on the way back.

    It masks no momentum, as `Dense` masks none. A single worker sends nothing and rounds nothing.

    Attributes:
        quantizer: `quantize.QSGD(...)` or `quantize.Sign(...)`.
        rounding: "stochastic" is unbiased and drops its error, as in the paper (Alistarh et al.,
            2017). "nearest" is deterministic and keeps its error in the residual.

    Raises:
        ValueError: the quantizer has no stochastic rounding, or the residual could grow without
            bound.
    """

    quantizer: Quantizer = quantize.QSGD()  # noqa: RUF009 - frozen
    rounding: Literal["stochastic", "nearest"] = "stochastic"

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.quantizer, Quantizer):
            raise ValueError(
                f"quantizer={self.quantizer!r} is no quantizer: use quantize.QSGD(bits=4) or "
                "quantize.Sign()"
            )
        if self.rounding not in ("stochastic", "nearest"):
            raise ValueError(
                f"rounding={self.rounding!r} is unknown: use 'stochastic' or 'nearest'"
            )
        if self.rounding == "nearest":
            check_feedback(self.quantizer, stochastic=False)
        elif not self.quantizer.takes_key:
            raise ValueError(
                f"rounding='stochastic', but {self.quantizer} is deterministic: use 'nearest'"
            )

    @property
    def conservation(self) -> Conservation:
        """The error of stochastic rounding is dropped."""
        return "to rounding" if self.rounding == "nearest" else "in expectation"

    @property
    def dense_at_full_budget(self) -> bool:
        """There is no budget."""
        return False

    def init(self, size: int) -> Any:
        """The number of exchanges so far, for the keys of stochastic rounding, or no state."""
        return jnp.uint32(0) if self.rounding == "stochastic" else ()

    def __call__(self, x: Float[Array, " d"], state: Any, *, axis_name: str | None) -> Reduced:
        """See `Reducer`. A group with a sum that overflows counts as not sent."""
        key = None
        if self.rounding == "stochastic":
            key = jax.random.fold_in(jax.random.key(self.seed), state)
            state = state + jnp.uint32(1)
        result = quantized_all_reduce(x, self.quantizer, axis_name=axis_name, key=key)
        workers = wire.axis_size(axis_name)
        return deliver(x, result.total, result.residual, None, state, workers)


def quantized(
    bits: Literal[2, 4, 8] = 4,
    group_size: int = 1024,
    scale: Literal["max", "l2"] = "max",
    rounding: Literal["stochastic", "nearest"] = "stochastic",
    seed: int = 0,
) -> Quantized:
    """The reducer of `qsgd`, for the same arguments."""
    return Quantized(quantize.QSGD(bits, group_size, scale), rounding, seed=seed)


@exchange_options()
def qsgd(
    bits: Literal[2, 4, 8] = 4,
    *,
    group_size: int = 1024,
    scale: Literal["max", "l2"] = "max",
    rounding: Literal["stochastic", "nearest"] = "stochastic",
    seed: int = 0,
    **options: Unpack[LeafOptions],
) -> optax.GradientTransformationExtraArgs:
    """QSGD (Alistarh et al., NeurIPS 2017): all values at each step, in 2, 4 or 8 bits.

    A worker receives 2 (W - 1)/W (bits / 32 + 1 / group_size) d words a step: with 4 bits, an
    eighth of a dense all-reduce's. Values are quantised on the way to the owner of their range, and
    sums on the way back. (The paper has an all-gather, (W - 1) times the packed vector.)

    `momentum` is corrected, without masking: everything is sent at each step.

    Args:
        bits: bits of a value on the wire.
        group_size: number of consecutive values that share a scale.
        scale: "max", or the paper's "l2", which has larger errors: see `quantize.QSGD`.
        rounding: "stochastic" is unbiased and drops its error, as in the paper. "nearest" keeps its
            error in the residual.
        seed: seed of stochastic rounding.
        **options: as for all transformations.

    Raises:
        ValueError: settings out of range; or "nearest" under "l2" has too few bits for its
            groups, so that the residual could grow without bound.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> tx = qsgd(8, axis_name=None)  # one worker sends nothing, and nothing is rounded
        >>> grads = {"kernel": jnp.arange(2048.0).reshape(64, 32), "bias": jnp.ones(32)}
        >>> updates, state = jax.jit(tx.update)(grads, tx.init(grads))
        >>> updates["kernel"][-1, -3:].tolist()
        [2045.0, 2046.0, 2047.0]
    """
    return error_feedback(quantized(bits, group_size, scale, rounding, seed), **options)


QSGD = System(
    qsgd,
    quantized,
    summary="[QSGD](https://arxiv.org/abs/1610.02132): all values in 2, 4 or 8 bits",
    received="d (W-1)/W (bits/4 + 8/group_size)",
    cases={
        "": Case({}, {}),
        "nearest": Case(
            {"bits": 4, "group_size": 64, "rounding": "nearest"},
            {"bits": 8, "group_size": 64, "rounding": "nearest"},
        ),
    },
    settings=lambda request: {"bits": 4},
    follows_density=False,
)
