"""QSGD quantisation (Alistarh et al., 2017).

A value v becomes the integer level s v / scale, rounded into -s .. s with s = 2**(bits - 1) - 1.
With a key the rounding is stochastic, so that E[Q(v)] = v; without one it is to nearest.
"""

import dataclasses
import math
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key

from jaxsparse.arrays.bits import field_words
from jaxsparse.arrays.hashing import keyed
from jaxsparse.arrays.magnitude import LARGEST, SMALLEST, largest_magnitude, norms, shares_of
from jaxsparse.arrays.settings import static_int
from jaxsparse.quantize.packing import pack, unpack
from jaxsparse.quantize.quantizer import (
    QuantizedVector,
    check_group_size,
    in_groups,
    repeated,
)


@dataclasses.dataclass(frozen=True)
class QSGD:
    """Settings of the quantiser.

    Attributes:
        bits: bits of a value on the wire: 2, 4 or 8.
        group_size: number of values that share a scale, the paper's d of a group; B below.
        scale: "max" is the largest magnitude of the group. That value has no error, and no other
            error exceeds max / s. "l2" is the norm of the group, as in the paper. It makes more
            zeros and larger errors.
    """

    bits: Literal[2, 4, 8] = 4
    group_size: int = 1024
    scale: Literal["max", "l2"] = "max"

    scale_bits: ClassVar[int] = 32
    scales_per_group: ClassVar[int] = 1
    takes_key: ClassVar[bool] = True

    def __post_init__(self):
        if static_int("bits", self.bits) not in (2, 4, 8):
            raise ValueError(f"bits={self.bits} is not supported: use 2, 4 or 8")
        check_group_size(self.group_size)
        if self.scale not in ("max", "l2"):
            raise ValueError(f"scale={self.scale!r} is unknown: use 'max' or 'l2'")

    @property
    def levels(self) -> int:
        """The number of levels above zero, the paper's s: 1, 7 or 127."""
        return 2 ** (self.bits - 1) - 1

    def words(self, size: int) -> int:
        """Words of 32 bits on the wire for `size` values: packed levels and a scale per group."""
        return field_words(size, self.bits) + -(-size // self.group_size)

    def error_bound(self, *, stochastic: bool = True) -> float:
        """The factor f in E||Q(x) - x||^2 <= f ||x||^2, for any x.

        Let D = scale / s. With stochastic rounding, a value v in the first cell has error variance
        v (D - v), and one in a further cell D^2 / 4 at most. With rounding to nearest, the squared
        error is at most min(v^2, D^2 / 4). The maxima of the sums over a group are

                    stochastic                              to nearest
            max     (sqrt(1 + (B - 1) / s^2) - 1) / 2       (B - 1) / (B - 1 + 4 s^2)
            l2      sqrt(B) / s - 1, B / (4 s^2) below 1    min(1, B / (4 s^2))

        Under "max" the largest value has no error. QSGD's Lemma 3.1, min(B / s^2, sqrt(B) / s) for
        l2, is looser.

        >>> QSGD(bits=8, scale="l2").error_bound() < 0.016
        True
        """
        B, s = self.group_size, self.levels
        if self.scale == "max":
            others = (B - 1) / s**2
            return (math.sqrt(1 + others) - 1) / 2 if stochastic else others / (others + 4)
        if 4 * s**2 > B:
            return B / (4 * s**2)
        return math.sqrt(B) / s - 1 if stochastic else 1.0

    def bounded_feedback(self, *, stochastic: bool = True) -> bool:
        """Whether the residual stays bounded for any data if each step's error is fed back.

        Either of two contractions proves it. The first: under "max" no residual exceeds r max|x|
        with r = 1 / s, or 1 / (2 s) to nearest, where x is gradient plus residual. So r < 1 keeps
        all residuals below r / (1 - r) times the largest gradient of the group. The second:
        `error_bound` is below 1 (Lemma 3 of EF-SGD, Karimireddy et al., 2019). One of them holds
        for all settings but two. One is "max" with 2 bits, a key and B > 8: at B = 1024 the
        residual of normal gradients grows to some 12 times their norm. The other is "l2" with B >=
        4 s^2: with a key the residual grows exponentially, and to nearest equal values are never
        sent.

        >>> QSGD(bits=4).bounded_feedback(), QSGD(bits=4, scale="l2").bounded_feedback()
        (True, False)
        """
        below_largest = self.scale == "max" and (self.levels > 1 or not stochastic)
        return below_largest or self.error_bound(stochastic=stochastic) < 1

    def refusal(self, *, stochastic: bool) -> str:
        largest = 8 * self.levels**2 if self.scale == "max" else 4 * self.levels**2 - 1
        candidates = {
            "scale='max'": dataclasses.replace(self, scale="max"),
            "bits=4": dataclasses.replace(self, bits=4),
            "bits=8": dataclasses.replace(self, bits=8),
            f"group_size={largest}": dataclasses.replace(self, group_size=largest),
        }
        fixes = [
            fix
            for fix, other in candidates.items()
            if other.bounded_feedback(stochastic=stochastic)
        ]
        if self.bounded_feedback(stochastic=False):
            fixes.insert(0, "rounding to nearest (no key)")
        rounding = "stochastic rounding" if stochastic else "rounding to nearest"
        return (
            f"scale={self.scale!r} with bits={self.bits}, group_size={self.group_size} and "
            f"{rounding}: the error can have {self.error_bound(stochastic=stochastic):.3g} times "
            "the energy of what is quantised, and fed back it grows from step to step. Use "
            f"{' or '.join(fixes)}, or no error feedback"
        )

    def quantize(
        self, x: Float[Array, " d"], key: Key[Array, ""] | None, count: Int[Array, ""], size: int
    ) -> QuantizedVector:
        """To nearest, ties go to even, and |v - Q(v)| <= |v| for every value."""
        del count  # padding with zeros changes neither maximum nor norm
        groups = in_groups(x, self.group_size)
        largest = largest_magnitude(groups, axis=1)
        # XLA may divide the scale by s before it multiplies by the level, in one program and not in
        # another. Both are equal if the quotient is a normal number. False for NaN, which must not
        # vanish.
        empty = largest < SMALLEST * self.levels
        scales = largest
        if self.scale == "l2":
            # A norm beyond float32 is clipped: each scale that no value exceeds is unbiased, and a
            # smaller scale has less error.
            scales = jnp.minimum(norms(groups), LARGEST)
        scales = jnp.where(empty, 1, scales)
        position = (jnp.abs(shares_of(groups, scales)) * self.levels).reshape(-1)
        if key is None:
            level = jnp.round(position)
        else:
            level = jnp.floor(position)
            random = keyed(lax.iota(jnp.uint32, x.size), jax.random.bits(key, dtype=jnp.uint32))
            # The remainder is exact, so a value on a level stays there.
            up = (random >> jnp.uint32(8)).astype(jnp.float32) * 2.0**-24 < position - level
            level += up.astype(jnp.float32)
        level = jnp.minimum(level, self.levels).astype(jnp.int32)
        packed = pack(jnp.where(x < 0, -level, level), self.bits, size)
        return QuantizedVector(packed, jnp.where(empty, 0, scales))

    def dequantize(self, quantized: QuantizedVector, size: int) -> Float[Array, " size"]:
        levels = unpack(quantized.words, self.bits, size).astype(jnp.float32)
        # Shares are at most 1, so the product does not overflow.
        return levels / self.levels * repeated(quantized.scales, self.group_size, size)
