"""Formats of 1 to 2 bits: signs, and one or two levels of magnitude, which are means of a group.

A mean has the least squared error of all levels for the values that it stands for, and this error
is at right angles to what is sent. "sign" has one level, the mean of all magnitudes. "ternary" has
one level and zero, "int2" two levels. Magnitudes above a threshold have the upper level.

Lloyd's rule for the best levels puts a threshold in the middle of two levels, and takes several
passes. A multiple of w = sum x^2 / sum |x|, the mean of the magnitudes weighted by themselves, is
as good after one: w / 2 for "ternary" is Lloyd's fixed point for exponentially distributed
magnitudes, 0.8 w for "int2" is near it. For normal and Laplace's values the errors are within 0.3 %
of the least, for Student's t(3) within 5 and 8 % (`python benchmarks/formats.py`). One value far
above all others moves w, and stays alone above the threshold.

Sums of 16 values are of integers, in units of 2**-21 or less of the group's largest magnitude. They
do not overflow, and XLA's CPU backend vectorises them, which it does not do for sums of floats.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt8, UInt32

from jaxsparse.arrays.magnitude import largest_magnitude
from jaxsparse.arrays.platforms import to_bits
from jaxsparse.quantize.quantizer import repeated

# The formats, their numbers of codes, and of levels that are not zero.
BASES = {"sign": 2, "ternary": 3, "int2": 4}
LEVELS = {"sign": 1, "ternary": 1, "int2": 2}
# Thresholds as multiples of w.
_THRESHOLDS = {"ternary": 0.5, "int2": 0.8}

# Number of values whose sum and whose count fit one integer of 32 bits: 16 * 2**22 < 2**27.
_SUMMANDS = 16
_COUNT_SHIFT = 27
# Units are 2**-20 of a value below 4. Added to 2**23, a float has them in its lowest bits.
_UNITS = 2.0**20
_MAGIC = 2.0**23


def encoded(
    groups: Float[Array, "groups values"], name: str, count: Int[Array, ""]
) -> tuple[UInt8[Array, "groups values"], Float[Array, "levels groups"]]:
    """A code for each value, and the levels of each group.

    `count` is the number of elements before the padding with zeros, which does not count in a mean.
    Codes: "sign" 1 for negative values and 0 for others, "ternary" 0 to 2 for -1 to 1, "int2" one
    bit for the upper level, and above it one for negative values. Levels, the lower one first, not
    above the group's largest magnitude. They are infinite if one of its values is not finite.
    """
    number, width = groups.shape
    no_padding = jnp.clip(count - width * lax.iota(jnp.int32, number), 1, width)
    inside = no_padding.astype(jnp.float32)  # how many values of a group
    largest = largest_magnitude(groups, axis=1)
    # Magnitudes times a power of two: exact, the largest from 2 to 4. (2 and 254 are the exponents'
    # ends, SMALLEST's and LARGEST's, so that no factor is subnormal or infinite.)
    exponent = jnp.clip(to_bits(largest) >> jnp.uint32(23), jnp.uint32(2), jnp.uint32(254))
    y = jnp.abs(groups) * _power(jnp.uint32(255) - exponent)[:, None]
    negative = groups < 0
    if name == "sign":
        (sums,) = _sums(_units(y))
        codes, means = negative.astype(jnp.uint8), [_total(sums) / inside]
    else:
        sums, squares = _sums(_units(y), _units(y * y * 0.25))
        w = 4 * _total(squares) / jnp.maximum(_total(sums), 1 / _UNITS)
        # As integers, which have the same order. XLA's CPU backend would store the floats of all
        # thresholds, one for each value.
        upper = to_bits(y) > to_bits(_THRESHOLDS[name] * w)[:, None]
        one = jnp.uint32(1 << _COUNT_SHIFT)
        (both,) = _sums(jnp.where(upper, _units(y) + one, jnp.uint32(0)))
        upper_sums = both & (one - jnp.uint32(1))
        upper_count = jnp.sum(both >> jnp.uint32(_COUNT_SHIFT), axis=1, dtype=jnp.uint32)
        upper_count = upper_count.astype(jnp.float32)
        high = _total(upper_sums) / jnp.maximum(upper_count, 1)
        if name == "ternary":
            digits = upper.astype(jnp.uint8)
            codes, means = jnp.where(negative, 1 - digits, 1 + digits), [high]
        else:
            low = _total(sums - upper_sums) / jnp.maximum(inside - upper_count, 1)
            codes = upper.astype(jnp.uint8) | negative.astype(jnp.uint8) << jnp.uint8(1)
            means = [low, high]
    levels = jnp.stack(means) * _power(exponent - jnp.uint32(1))[None]
    # Units are rounded, so a mean may exceed all magnitudes by half a unit.
    largest = largest[None]
    return codes, jnp.where(jnp.isfinite(largest), jnp.minimum(levels, largest), jnp.inf)


def decoded(
    codes: UInt8[Array, " d"],
    levels: Float[Array, "levels groups"],
    name: str,
    group_size: int,
) -> Float[Array, " d"]:
    """The values of codes. None in a group with infinite levels is finite."""
    # No selections, because XLA's CPU backend does not vectorise them here.
    low, high = (repeated(level, group_size, codes.size) for level in (levels[0], levels[-1]))
    if name == "ternary":
        # A product: zero times an infinite level is NaN, so no value of such a group is finite.
        return (codes.astype(jnp.float32) - 1) * low
    # A level's bits, with a sign.
    negative, bits = codes.astype(jnp.uint32), to_bits(low)
    if name == "int2":
        upper = jnp.uint32(0) - (negative & jnp.uint32(1))  # all bits, or none
        bits ^= (bits ^ to_bits(high)) & upper
        negative >>= jnp.uint32(1)
    return lax.bitcast_convert_type(bits ^ negative << jnp.uint32(31), jnp.float32)


def _units(y: Float[Array, "n values"]) -> UInt32[Array, "n values"]:
    """The nearest integers to y * 2**20, for 0 <= y <= 4."""
    return to_bits(y * _UNITS + _MAGIC) - to_bits(jnp.float32(_MAGIC))


def _sums(*units: UInt32[Array, "n values"]) -> tuple[UInt32[Array, "n sixteenths"], ...]:
    """Sums of at most 16 integers of each row, for each array. One pass reads all arrays."""
    n, width = units[0].shape
    padded = (jnp.pad(x, ((0, 0), (0, -width % _SUMMANDS))) for x in units)
    lanes = tuple(x.reshape(n, _SUMMANDS, x.shape[1] // _SUMMANDS) for x in padded)
    add = lambda a, b: tuple(map(jnp.add, a, b))
    sums = lax.reduce(lanes, (jnp.uint32(0),) * len(lanes), add, (1,))
    # The barrier keeps these sums apart from the next ones, which are then much shorter.
    return tuple(map(lax.optimization_barrier, sums))


def _total(sums: UInt32[Array, "n sixteenths"]) -> Float[Array, " n"]:
    return jnp.sum(sums.astype(jnp.float32), axis=1) / _UNITS


def _power(exponent: UInt32[Array, " n"]) -> Float[Array, " n"]:
    """2**(exponent - 127)."""
    return lax.bitcast_convert_type(exponent << jnp.uint32(23), jnp.float32)
