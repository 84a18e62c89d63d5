"""Dense all-reduce in a few bits a value: QSGD and EF-signSGD."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxsparse.collectives import wire
from jaxsparse.collectives.quantized_all_reduce import quantized_all_reduce
from jaxsparse.quantize import QSGD, Quantizer, check_feedback
from jaxsparse.reducers.base import Laws, Reduced, bucket_seeds, info
from jaxsparse.settings import static_seed


@dataclasses.dataclass(frozen=True)
class QuantizedReducer:
    """Everything is sent at each step, quantised on the way to its owner and on the way back.

    No momentum is masked, as none is in the dense reducer. One worker sends nothing, and nothing
    is rounded then.

    Attributes:
        quantizer: `quantize.QSGD(...)` or `quantize.Sign(...)`.
        rounding: "stochastic" is unbiased, and its error is forgotten, as QSGD is published
            (Alistarh et al., 2017); "nearest" is deterministic, and its error is fed back.
        seed: 0 <= seed < 2**32, of stochastic rounding.

    Raises:
        ValueError: the quantizer has no stochastic rounding, or its error, fed back, could grow
            without bound.
    """

    quantizer: Quantizer = QSGD()  # noqa: RUF009 - frozen
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    seed: int = 0

    def __post_init__(self):
        object.__setattr__(self, "seed", static_seed("seed", self.seed))
        if not isinstance(self.quantizer, Quantizer):
            raise ValueError(
                f"quantizer={self.quantizer!r} is none: use quantize.QSGD(bits=4) or "
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
    def laws(self) -> Laws:
        """Stochastic rounding conserves in expectation only."""
        return Laws(conserves=self.rounding == "nearest", dense_at_full_budget=False)

    def split(self, sizes: tuple[int, ...], dense_size: int = 0) -> tuple["QuantizedReducer", ...]:
        """The same for each bucket of the layout, but for the seed."""
        seeds = bucket_seeds(self.seed, len(sizes))
        return tuple(dataclasses.replace(self, seed=seed) for seed in seeds)

    def init(self, size: int) -> Any:
        """The number of exchanges so far, for the keys of stochastic rounding; else no state."""
        return jnp.uint32(0) if self.rounding == "stochastic" else ()

    def __call__(self, x: Float[Array, " d"], state: Any, *, axis_name: str | None) -> Reduced:
        """See `Reducer`. Buckets with a sum that overflows count as not sent."""
        key = None
        if self.rounding == "stochastic":
            key = jax.random.fold_in(jax.random.key(self.seed), state)
            state = state + jnp.uint32(1)
        result = quantized_all_reduce(x, self.quantizer, axis_name=axis_name, key=key)
        finite = jnp.isfinite(result.total)
        mean = jnp.where(finite, result.total, 0) / wire.axis_size(axis_name)
        residual = jnp.where(finite, result.residual, x)
        return Reduced(mean, residual, None, state, info(jnp.count_nonzero(mean)))
