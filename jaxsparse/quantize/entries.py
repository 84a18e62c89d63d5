"""Values of sparse entries in 2 to 32 bits, for messages whose indices travel beside them.

In 2 to 8 bits, entries share a few levels, which travel with them. In 16 or 32 bits, values are
floats.
"""

import dataclasses
from typing import ClassVar, Literal, Protocol

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from jaxsparse.arrays.bits import (
    field_words,
    float_bits,
    from_float_bits,
    pack_fields,
    unpack_fields,
)
from jaxsparse.arrays.magnitude import (
    SMALLEST,
    largest_magnitude,
    rounded,
    shares_of,
    within,
)
from jaxsparse.arrays.settings import static_int
from jaxsparse.quantize.quantizer import in_groups

# Number of consecutive entries that share two levels, as many as 4 chunks with 64 entries have. See
# `SignMagnitude`.
_GROUP = 256
# The widest range of the levels of 4 and 8 bits, in octaves. Neighbours are at most 1 octave apart.
_OCTAVES = 16


class EntryValues(Protocol):
    """A way to send values of entries."""

    @property
    def is_exact(self) -> bool:
        """Whether all values arrive as they are."""
        ...

    def words(self, size: int) -> int:
        """The number of words of 32 bits for `size` values, levels included."""
        ...

    def encode(
        self, values: Float[Array, " n"], count: Int[Array, ""] | int
    ) -> UInt32[Array, " words"]:
        """The words of float32 values, the first `count` of which share levels.

        If a value is not finite, values that share its levels may decode to values that are not.
        """
        ...

    def decode(self, words: UInt32[Array, " words"], size: int) -> Float[Array, " n"]:
        """The values that all workers receive, float32."""
        ...


@dataclasses.dataclass(frozen=True)
class Floats:
    """float32 values, or bfloat16 values, to whose range finite values are clipped."""

    bits: Literal[16, 32]

    @property
    def is_exact(self) -> bool:
        return self.bits == 32

    def words(self, size: int) -> int:
        return field_words(size, self.bits)

    def encode(
        self, values: Float[Array, " n"], count: Int[Array, ""] | int
    ) -> UInt32[Array, " words"]:
        del count
        if self.is_exact:
            return lax.bitcast_convert_type(values, jnp.uint32)
        return pack_fields(_to_half(values), 16)

    def decode(self, words: UInt32[Array, " words"], size: int) -> Float[Array, " n"]:
        if self.is_exact:
            return lax.bitcast_convert_type(words, jnp.float32)
        return _from_half(unpack_fields(words, 16, size))


@dataclasses.dataclass(frozen=True)
class SignMagnitude:
    """A sign, and a magnitude that is one of 2, 8 or 128 levels of the entry's group.

    Two bits: magnitudes above the group's mean have one level, and the others have another. Each
    level is the mean of its half. The error is at right angles to what is sent, so it is always
    smaller than the values, and error feedback stays bounded. If a group has zeros, these are the
    lower half, so that zeros stay zeros.

    4 and 8 bits: level 0 is zero. The others are evenly spaced in the logarithm between the least
    magnitude above zero and the largest, but at most one octave apart, and 16 octaves in all.

    Two levels of a group, low and high, travel as two bfloat16 in one word: an eighth of a bit an
    entry. Each group has its own levels because one vector holds leaves of unlike magnitudes. With
    levels for the whole vector, entries of a leaf with small values would decode to the levels of a
    leaf with large ones.
    """

    bits: Literal[2, 4, 8]

    is_exact: ClassVar[bool] = False

    def words(self, size: int) -> int:
        return field_words(size, self.bits) + -(-size // _GROUP)

    def encode(
        self, values: Float[Array, " n"], count: Int[Array, ""] | int
    ) -> UInt32[Array, " words"]:
        groups = in_groups(values, _GROUP)
        is_value = in_groups(lax.iota(jnp.int32, values.size) < count, _GROUP)
        magnitudes = jnp.abs(groups)
        largest = largest_magnitude(groups, axis=1)
        empty = largest < SMALLEST  # false for NaN, which must not vanish
        largest = jnp.where(empty, 1, largest)
        if self.bits == 2:
            share = shares_of(magnitudes, largest)  # so that no sum overflows
            is_high = share > _mean(share, is_value)[:, None]
            has_zeros = jnp.any(is_value & (groups == 0), axis=1)[:, None]
            is_high = jnp.where(has_zeros, groups != 0, is_high)
            low = _mean(share, is_value & ~is_high) * largest
            high = _mean(share, is_high) * largest
            code = is_high.astype(jnp.uint32)
        else:
            steps = 2 ** (self.bits - 1) - 2
            least = jnp.where(groups != 0, magnitudes, largest[:, None])
            least = jnp.min(least, axis=1)
            high = _half(largest)
            lowest = jnp.maximum(high * 2.0 ** -min(steps, _OCTAVES), jnp.finfo(jnp.float32).tiny)
            low = jnp.minimum(_half(jnp.maximum(least, lowest)), high)
            low = jnp.where(jnp.isfinite(largest), low, largest)  # so that no value vanishes
            code = _nearest(magnitudes, low, high, steps)
        low, high = (jnp.where(empty, 0, level) for level in (low, high))
        sign = (groups < 0).astype(jnp.uint32) << jnp.uint32(self.bits - 1)
        codes = (code | sign).reshape(-1)[: values.size]
        levels = _to_half(low) | (_to_half(high) << jnp.uint32(16))
        return jnp.concatenate([pack_fields(codes, self.bits), levels])

    def decode(self, words: UInt32[Array, " words"], size: int) -> Float[Array, " n"]:
        packed = field_words(size, self.bits)
        low, high = (_from_half(words[packed:] >> jnp.uint32(shift)) for shift in (0, 16))
        low, high = low[:, None], high[:, None]
        codes = unpack_fields(words[:packed], self.bits, size)
        codes = in_groups(codes, _GROUP)
        is_negative = codes >> jnp.uint32(self.bits - 1) == 1
        code = codes & jnp.uint32(2 ** (self.bits - 1) - 1)
        if self.bits == 2:
            magnitudes = jnp.where(code == 1, high, low)
        else:
            steps = 2 ** (self.bits - 1) - 2
            below = (steps + 1 - code.astype(jnp.float32)) / steps  # from 0 at `high` to 1 at `low`
            magnitudes = high * jnp.exp2(-below * _octaves(low, high))
            magnitudes = jnp.where((code == 0) & jnp.isfinite(high), 0, magnitudes)
        values = jnp.where(is_negative, -magnitudes, magnitudes)
        return values.reshape(-1)[:size]


def entry_values(bits: int) -> EntryValues:
    """The way to send the values of sparse entries in 2, 4, 8, 16 or 32 bits each."""
    match static_int("value_bits", bits):
        case 16 | 32 as floats:
            return Floats(floats)
        case 2 | 4 | 8 as few:
            return SignMagnitude(few)
    raise ValueError(f"value_bits={bits} is not supported: use 2, 4, 8, 16 or 32")


def _mean(rows: Float[Array, "n m"], mask: Array) -> Float[Array, " n"]:
    """The mean of each row where the mask is true, or 0 if it is nowhere true."""
    count = jnp.sum(mask, axis=1, dtype=jnp.int32).astype(jnp.float32)
    return jnp.sum(jnp.where(mask, rows, 0), axis=1) / jnp.maximum(count, 1)


def _octaves(low: Float[Array, "*n"], high: Float[Array, "*n"]) -> Float[Array, "*n"]:
    # Exponents apart from mantissas: the last bit of log2(1e38) changes levels by some millionths,
    # and may differ between sender and receivers.
    (a, i), (b, j) = jnp.frexp(low), jnp.frexp(high)
    return (j - i).astype(jnp.float32) + (jnp.log2(b) - jnp.log2(a))


def _nearest(
    magnitudes: Float[Array, "n m"], low: Float[Array, " n"], high: Float[Array, " n"], steps: int
) -> UInt32[Array, "n m"]:
    """The nearest level: 0 below half of `low`, then 1 at `low` to steps + 1 at `high`."""
    low, high = low[:, None], high[:, None]
    spacing = jnp.maximum(_octaves(low, high), 2.0**-20) / steps
    level = 1 + jnp.round((jnp.log2(magnitudes) - jnp.log2(low)) / spacing)
    level = jnp.clip(level, 1, steps + 1).astype(jnp.uint32)
    is_small = (magnitudes == 0) | (magnitudes < low / 2)  # low / 2 may be flushed to zero
    return jnp.where(is_small, jnp.uint32(0), level)


def _half(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    return rounded(x, jnp.bfloat16)


def _to_half(x: Float[Array, "*n"]) -> UInt32[Array, "*n"]:
    """The bits of the nearest bfloat16. Finite values stay finite."""
    return float_bits(within(x, jnp.bfloat16), jnp.bfloat16)


def _from_half(bits: UInt32[Array, "*n"]) -> Float[Array, "*n"]:
    return from_float_bits(bits, jnp.bfloat16)
