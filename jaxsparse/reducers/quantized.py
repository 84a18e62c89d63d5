"""Dense all-reduce in 1 to 16 bits a value: with error feedback, QSGD, and signs."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jaxsparse.collectives.quantized_all_reduce import quantized_all_reduce
from jaxsparse.quantize.qsgd import QSGD
from jaxsparse.quantize.quantizer import (
    Quantizer,
    check_feedback,
    dequantize,
    first_of,
    from_message,
    padded,
    quantize,
    sent_size,
    to_message,
)
from jaxsparse.reducers.base import Conservation, Gathered, Kept, SeededReducer, Sums


@dataclasses.dataclass(frozen=True)
class Quantized(SeededReducer):
    """Sends everything at each step, quantised on the way to its owner and on the way back.

    It masks no momentum, as `Dense` masks none. A single worker sends nothing and rounds nothing.

    Attributes:
        quantizer: `quantize.Format(...)` or `quantize.QSGD(...)`.
        rounding: "stochastic" is unbiased and drops its error. "nearest" is deterministic and keeps
            its errors in the residual: those of this worker's values, and of the sums that it owns.
            It refuses quantisers whose residual could grow without bound.
    """

    quantizer: Quantizer = QSGD()  # noqa: RUF009 - frozen
    rounding: Literal["stochastic", "nearest"] = "stochastic"

    def check(self) -> None:
        super().check()
        if not isinstance(self.quantizer, Quantizer):
            raise ValueError(
                f"quantizer={self.quantizer!r} is no quantizer: use quantize.Format('int8') or "
                "quantize.QSGD(bits=4)"
            )
        if self.rounding == "nearest":
            check_feedback(self.quantizer, stochastic=False)
        elif not self.quantizer.takes_key:
            raise ValueError(
                f"rounding='stochastic', but {self.quantizer} is deterministic: use 'nearest'"
            )

    @property
    def conservation(self) -> Conservation:
        return "to group rounding" if self.rounding == "nearest" else "in expectation"

    def init(self, size: int) -> Any:
        return jnp.uint32(0) if self.rounding == "stochastic" else ()

    def reduce(self, x: Float[Array, " d"], state: Any, axis_name: str | None) -> tuple[Sums, Kept]:
        """A group with a sum that overflows counts as not sent."""
        key = None
        if self.rounding == "stochastic":
            key = jax.random.fold_in(jax.random.key(self.seed), state)
            state = state + jnp.uint32(1)
        result = quantized_all_reduce(x, self.quantizer, axis_name=axis_name, key=key)
        return Sums(result.total), Kept(result.residual, None, state)


@dataclasses.dataclass(frozen=True)
class GatheredQuantized(Gathered, Quantized):
    """As `Quantized`, but sends everything to all, quantised once. All add up the decoded vectors.

    That is one message, as in QSGD (Alistarh et al., 2017) and EF-signSGD. A single worker rounds,
    too: it sends what others would read.
    """

    def encode(
        self, x: Float[Array, " d"], state: Any, rank: Int[Array, ""]
    ) -> tuple[UInt32[Array, " words"], Kept]:
        key, is_random = None, self.rounding == "stochastic"
        if is_random:
            key = jax.random.fold_in(jax.random.key(self.seed), state)
            key, state = jax.random.fold_in(key, rank), state + jnp.uint32(1)
        values = padded(x, sent_size(x.size, self.quantizer))
        found = quantize(values, self.quantizer, key, jnp.int32(x.size))
        message = to_message(found, self.quantizer)
        arrives = lambda: first_of(self._decoded(message, x.size), x.size)
        return message, Kept(jnp.zeros_like(x) if is_random else x - arrives(), None, state)

    def decode(self, messages: UInt32[Array, "workers words"], size: int) -> Sums:
        add = lambda total, message: (total + self._decoded(message, size), None)
        first = self._decoded(messages[0], size)
        return Sums(first_of(jax.lax.scan(add, first, messages[1:])[0], size))

    def _decoded(self, message: UInt32[Array, " words"], size: int) -> Float[Array, " sent"]:
        """What a message says. Behind the first `size` values, numbers mean nothing."""
        size = sent_size(size, self.quantizer)
        found = from_message(message, self.quantizer, size)
        return dequantize(found, self.quantizer, size)
