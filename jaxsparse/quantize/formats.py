"""Values in a number format of 1 to 16 bits, relative to scales that a group of values shares.

These are the formats of today's all-reduces (torchft, INTELLECT-1's prime, ZeRO++, Streaming
DiLoCo). They are deterministic, so that a residual can keep the error, and their scales are short,
too. `QSGD` has stochastic rounding and the norm as a scale.
"""

import dataclasses
from typing import ClassVar, Literal, NamedTuple, get_args

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Int, Key, UInt32

from jaxsparse.arrays.bits import (
    field_words,
    float_bits,
    from_float_bits,
)
from jaxsparse.arrays.magnitude import LARGEST, SMALLEST, largest_magnitude, within
from jaxsparse.quantize import means
from jaxsparse.quantize.packing import digit_words, pack, pack_digits, unpack, unpack_digits
from jaxsparse.quantize.quantizer import (
    SCALE_SHIFTS,
    QuantizedVector,
    check_group_size,
    in_groups,
    repeated,
)

FormatName = Literal[
    "int8",
    "int4",
    "int2",
    "ternary",
    "sign",
    "e3m0",
    "float8_e4m3fn",
    "float8_e5m2",
    "bfloat16",
    "float16",
]
Scale = Literal["float32", "bfloat16", "e8m0"]


class _NumberFormat(NamedTuple):
    bits: float
    largest: int | None  # None: values need no scale, or their scales are means
    dtype: DTypeLike | None = None  # dtype of floats, if JAX has one


_VALUES = {
    "int8": _NumberFormat(8, 127),
    "int4": _NumberFormat(4, 7),
    "int2": _NumberFormat(2, None),
    "ternary": _NumberFormat(1.6, None),
    "sign": _NumberFormat(1, None),
    "e3m0": _NumberFormat(4, 64),
    "float8_e4m3fn": _NumberFormat(8, 448, jnp.float8_e4m3fn),
    "float8_e5m2": _NumberFormat(8, 57344, jnp.float8_e5m2),
    "bfloat16": _NumberFormat(16, None, jnp.bfloat16),
    "float16": _NumberFormat(16, 65504, jnp.float16),
}
_SCALE_BITS = {"float32": 32, "bfloat16": 16, "e8m0": 8}
_INFINITY = 0x7F800000  # bits of float32


@dataclasses.dataclass(frozen=True)
class Format:
    """Values as numbers of a format times the scale of their group.

    Formats of 4 to 16 bits round each value to the nearest number. The scale is the largest
    magnitude of the group over the format's largest number. It is rounded *up* to its own few bits,
    so that the largest magnitude does not clip. (From 2**127 on it may.) Ties of integers and
    floats go to even, those of "e3m0" up. No error is larger than its value, and the error of a
    group's largest value is at most a third of that value.

    Formats of 1 to 2 bits have means of magnitudes for scales, with squared errors near the least:
    see `jaxsparse.quantize.means`. A scale is rounded to the nearest of its own few bits. With n
    values of the scale s in place of x, and scales off by at most d of themselves, 2**-8 for
    "bfloat16" and 1/3 for "e8m0" (1/2 from 1.5 * 2**127 on),

        ||C(x) - x||^2 = ||x||^2 - (1 - d^2) sum of n s^2 over the scales.

    So every format is a contraction, and a residual that is fed back stays bounded for any data.
    The sum of n s^2 is at least ||x||^2 / B for "sign", which a single value other than 0 attains,
    and ||x||^2 / sqrt(8 B) for "ternary" and "int2". (Scales below 2.3e-38 become 0: then C(x) = 0.
    Sums are rounded to 2**-22 of the largest magnitude for each value of a group.)

    Attributes:
        name: "int8" (-127 .. 127), "int4" (-7 .. 7), "float8_e4m3fn" (largest 448), "float8_e5m2"
            (57344), "float16" (65504), or "e3m0": a sign and three bits for 0 or a power of two, 1
            to 64 (the "FP4" of Streaming DiLoCo, arXiv 2501.18512; its scale is not published, this
            one is ours). "bfloat16" has the range of float32 and no scales. "int2" is a sign and
            one of two scales, "ternary" a scale, 0 or minus the scale in 1.6 bits, "sign"
            (EF-signSGD, Karimireddy et al., ICML 2019, section 4) plus or minus a scale. "sign" and
            "int2" have no zero: it counts as positive, and arrives as a number.
        group_size: number of consecutive values that share a scale, B. The last group may have
            fewer.
        scale: format of the scales on the wire: "bfloat16", "float32", or "e8m0" for powers of two
            in 8 bits, as in the OCP formats (here its byte 0 stands for zero). Scales add 16 / B,
            32 / B or 8 / B bits a value, and twice as many for "int2".

    >>> from jaxsparse.quantize.quantizer import dequantize, quantize
    >>> spec = Format("int4", scale="e8m0")
    >>> dequantize(quantize(jnp.float32([1.0, -7.0, 0.2, 3.9]), spec, None), spec, 4).tolist()
    [1.0, -7.0, 0.0, 4.0]
    """

    name: FormatName = "int8"
    group_size: int = 256
    scale: Scale = "bfloat16"

    takes_key: ClassVar[bool] = False

    def __post_init__(self):
        check_group_size(self.group_size)
        for argument, value, known in (
            ("format", self.name, get_args(FormatName)),
            ("scale", self.scale, get_args(Scale)),
        ):
            if value not in known:
                raise ValueError(f"{argument}={value!r} is unknown: use one of {', '.join(known)}")

    @property
    def bits(self) -> float:
        """Bits of a value on the wire: an integer, but 1.6 for "ternary"."""
        return _VALUES[self.name].bits

    @property
    def scale_bits(self) -> int:
        return 0 if self.name == "bfloat16" else _SCALE_BITS[self.scale]

    @property
    def scales_per_group(self) -> int:
        return means.LEVELS.get(self.name, 1)

    def words(self, size: int) -> int:
        """Words of 32 bits on the wire for `size` values."""
        scales = self.scales_per_group * -(-size // self.group_size)
        if self.name in means.BASES:
            words = digit_words(size, means.BASES[self.name])
        else:
            words = field_words(size, int(self.bits))
        return words + field_words(scales, self.scale_bits)

    def bounded_feedback(self, *, stochastic: bool = False) -> bool:
        """Always true: every format is a contraction. See the class."""
        return True

    def refusal(self, *, stochastic: bool) -> str:
        return ""

    def quantize(
        self, x: Float[Array, " d"], key: Key[Array, ""] | None, count: Int[Array, ""], size: int
    ) -> QuantizedVector:
        del key
        if self.name in means.BASES:
            codes, levels = means.encoded(in_groups(x, self.group_size), self.name, count)
            scales = self._as_scales(levels.reshape(-1), up=False, highest=LARGEST)
            return QuantizedVector(pack_digits(codes, means.BASES[self.name], size), scales)
        bits, scales = int(self.bits), self._scales_of(x)  # padding with zeros changes no maximum
        if self._is_integer:
            limit = _VALUES[self.name].largest
            assert limit is not None
            # Clipped as integers, because what a NaN becomes depends on the backend.
            integers = jnp.round(self._relative(x, scales)).astype(jnp.int32)
            fields = jnp.clip(integers, -limit, limit)
        elif self.name == "e3m0":
            fields = _powers(self._relative(x, scales))
        else:
            values = x if not self.scale_bits else self._relative(x, scales)
            fields = float_bits(within(values, self._dtype), self._dtype)
        return QuantizedVector(pack(fields, bits, size), scales)

    def dequantize(self, quantized: QuantizedVector, size: int) -> Float[Array, " size"]:
        words, bits = quantized.words, int(self.bits)
        if self.name in means.BASES:
            codes = unpack_digits(words, means.BASES[self.name], size)
            levels = quantized.scales.reshape(self.scales_per_group, -1)
            return means.decoded(codes, levels, self.name, self.group_size)
        fields = unpack(words, bits, size)
        if self._is_integer:
            values = fields.astype(jnp.float32)
        elif self.name == "e3m0":
            values = _from_powers(lax.bitcast_convert_type(fields, jnp.uint32))
        else:
            values = from_float_bits(lax.bitcast_convert_type(fields, jnp.uint32), self._dtype)
        return self._scaled(values, quantized.scales) if self.scale_bits else values

    def _scales_of(self, x: Float[Array, " d"]) -> Float[Array, " groups"]:
        """The scales of a vector's groups, as they travel. Infinite if a value is not finite.

        A group has scale 0 if its values are so small that the scale would be no normal number.
        Not for formats whose scales are means.
        """
        largest = _VALUES[self.name].largest
        if largest is None:
            return jnp.ones(-(-x.size // self.group_size), jnp.float32)
        top = largest_magnitude(in_groups(x, self.group_size), axis=1)
        # At the end of float32's range, scales are rounded down: no decoded value is infinite.
        return self._as_scales(top / largest, up=True, highest=LARGEST / largest)

    def _scaled(self, values: Float[Array, " d"], scales: Float[Array, " groups"]) -> Array:
        return values * repeated(scales, self.group_size, values.size)

    def _as_scales(self, x: Float[Array, " n"], *, up: bool, highest: float) -> Array:
        """Numbers of few bits, rounded up or to nearest, at most `highest`. 0 below SMALLEST."""
        dropped = 2 ** SCALE_SHIFTS[self.scale_bits] - 1
        kept = 2**32 - 1 - dropped
        bits = lax.bitcast_convert_type(x, jnp.uint32)
        bits = (bits + jnp.uint32(dropped if up else (dropped + 1) // 2)) & jnp.uint32(kept)
        most = int(np.float32(highest).view(np.uint32)) & kept
        bits = jnp.minimum(bits, jnp.uint32(most))
        bits = jnp.where(jnp.isfinite(x), bits, jnp.uint32(_INFINITY))
        return lax.bitcast_convert_type(jnp.where(x < SMALLEST, jnp.uint32(0), bits), jnp.float32)

    @property
    def _is_integer(self) -> bool:
        return self.name in ("int8", "int4")

    @property
    def _dtype(self) -> DTypeLike:
        dtype = _VALUES[self.name].dtype
        assert dtype is not None
        return dtype

    def _relative(self, x: Float[Array, " d"], scales: Float[Array, " groups"]) -> Array:
        """Values over the scales of their groups. 0 or NaN where a scale is 0 or not finite."""
        usual = (scales > 0) & jnp.isfinite(scales)
        return self._scaled(x, jnp.where(usual, 1 / jnp.where(usual, scales, 1), 0))


def _powers(x: Float[Array, " d"]) -> UInt32[Array, " d"]:
    """E3M0: a sign bit, and 0 for zero or c for 2**(c - 1), the nearest to |x| <= 64."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    sign, magnitude = bits >> jnp.uint32(31), bits & jnp.uint32(0x7FFFFFFF)
    # Half a unit of the exponent: from 1.5 times a power of two on, the next power is nearer.
    exponent = ((magnitude + jnp.uint32(2**22)) >> jnp.uint32(23)).astype(jnp.int32) - 127
    code = jnp.clip(exponent + 1, 1, 7).astype(jnp.uint32)
    code = jnp.where(jnp.abs(x) < 0.5, jnp.uint32(0), code)
    return code | sign << jnp.uint32(3)


def _from_powers(fields: UInt32[Array, " d"]) -> Float[Array, " d"]:
    code, sign = fields & jnp.uint32(7), fields >> jnp.uint32(31)  # the sign was repeated
    power = (code + jnp.uint32(126)) << jnp.uint32(23)
    bits = jnp.where(code == 0, jnp.uint32(0), power) | sign << jnp.uint32(31)
    return lax.bitcast_convert_type(bits, jnp.float32)
