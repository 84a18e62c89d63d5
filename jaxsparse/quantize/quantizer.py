"""The interface of quantisers, and the messages that carry quantised vectors."""

import functools
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key, Shaped, UInt32

from jaxsparse.arrays.bits import field_words, pack_fields, unpack_fields
from jaxsparse.arrays.platforms import stored, stored_if_long
from jaxsparse.arrays.settings import check_size, static_int


class QuantizedVector(NamedTuple):
    """A quantised vector. Only `words` and `scales` travel."""

    words: UInt32[Array, " words"]  # all values, a few bits each
    scales: Float[Array, " scales"]  # float32, `scales_per_group` each; exact in `scale_bits`


@runtime_checkable
class Quantizer(Protocol):
    """Static settings of a quantiser. The functions below call it, and check their input."""

    @property
    def group_size(self) -> int:
        """The number of consecutive values that share a scale."""
        ...

    @property
    def scale_bits(self) -> int:
        """Bits of a scale on the wire: 32, 16 or 8 (see `to_message`), or 0 for no scales."""
        ...

    @property
    def scales_per_group(self) -> int:
        """The number of scales of a group. The first ones of all groups come first."""
        ...

    @property
    def takes_key(self) -> bool:
        """Whether it can round stochastically: E[Q(x)] = x over keys."""
        ...

    def words(self, size: int) -> int:
        """Words of 32 bits on the wire for `size` values."""
        ...

    def quantize(
        self, x: Float[Array, " d"], key: Key[Array, ""] | None, count: Int[Array, ""], size: int
    ) -> QuantizedVector:
        """See the function `quantize`. `x` is float32 and checked.

        If it is longer than a group, it has whole groups, with zeros behind its first `size`
        elements, which alone are packed.
        """
        ...

    def dequantize(self, quantized: QuantizedVector, size: int) -> Float[Array, " size"]:
        """See the function `dequantize`. The shape of the scales is checked."""
        ...

    def bounded_feedback(self, *, stochastic: bool = True) -> bool:
        """Whether the residual stays bounded for any data if each step's error is fed back."""
        ...

    def refusal(self, *, stochastic: bool) -> str:
        """The error text for settings without bounded feedback: the reason and the fix."""
        ...


def check_feedback(spec: Quantizer, *, stochastic: bool) -> None:
    """Refuses settings whose error must not be fed back, because the residual could grow for ever.

    The error names settings without this problem. See `QSGD.bounded_feedback`.
    """
    if not spec.bounded_feedback(stochastic=stochastic):
        raise ValueError(spec.refusal(stochastic=stochastic))


@functools.partial(jax.jit, static_argnames="spec")
def quantize(
    x: Float[Array, " d"],
    spec: Quantizer,
    key: Key[Array, ""] | None,
    count: Int[Array, ""] | None = None,
) -> QuantizedVector:
    """Quantises a vector. QSGD (Alistarh et al., 2017), sections 3.1 and 3.3; SparCML, section 6.

    A group counts as zero if all its magnitudes are below 2.3e-38, twice float32's least normal
    number. If a value of a group is not finite, no dequantised value of the group is.

    Args:
        x: float32, bfloat16 or float16[d], 1 <= d < 2**31; quantised as float32.
        spec: the quantiser.
        key: key of the stochastic rounding, which is unbiased (to float32's rounding). Use a fresh
            key for each call and worker. None rounds deterministically, and is biased.
        count: number of elements before the padding with zeros. None: all. Only means depend on it.

    >>> from jaxsparse.quantize.qsgd import QSGD
    >>> x = jnp.float32([1.0, -7.0, 0.2, 3.9])
    >>> dequantize(quantize(x, QSGD(bits=4), None), QSGD(bits=4), 4).tolist()
    [1.0, -7.0, 0.0, 4.0]
    """
    if x.ndim != 1:
        raise ValueError(f"x has shape {x.shape}: quantize takes a vector; pass x.ravel()")
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize > 4:
        raise ValueError(f"x has dtype {x.dtype}: pass x.astype(jnp.float32)")
    check_size("x.size", x.size)
    if key is not None and not spec.takes_key:
        raise ValueError(f"key={key}, but {spec} rounds without one: pass key=None")
    count = jnp.int32(x.size) if count is None else count
    padding = -x.size % min(spec.group_size, x.size)
    whole = padded(x.astype(jnp.float32), x.size + padding)
    return spec.quantize(whole, key, count, x.size)


@functools.partial(jax.jit, static_argnames=("spec", "size"))
def dequantize(quantized: QuantizedVector, spec: Quantizer, size: int) -> Float[Array, " size"]:
    """The `size` values that a quantised vector stands for, with the `spec` of `quantize`."""
    check_size("size", size)
    scales = _scale_count(spec, size)
    if quantized.scales.shape != (scales,):
        raise ValueError(
            f"scales have shape {quantized.scales.shape}, but size={size} in groups of "
            f"{spec.group_size} has {scales}: pass the spec and size of quantize"
        )
    return spec.dequantize(quantized, size)


# Position of a scale's lowest bit in a float32, for scales of 32 bits, 16 (bfloat16) and 8 (the
# exponent, E8M0).
SCALE_SHIFTS = {32: 0, 16: 16, 8: 23}


def to_message(quantized: QuantizedVector, spec: Quantizer) -> UInt32[Array, " words"]:
    """Packed values and their scales in one array, as they travel: `spec.words(size)` words."""
    if not spec.scale_bits:
        return quantized.words
    scales = lax.bitcast_convert_type(quantized.scales, jnp.uint32)
    scales = pack_fields(scales >> jnp.uint32(SCALE_SHIFTS[spec.scale_bits]), spec.scale_bits)
    return jnp.concatenate([stored_if_long(quantized.words), scales])


def from_message(message: UInt32[Array, " words"], spec: Quantizer, size: int) -> QuantizedVector:
    """The inverse of `to_message`, for a vector of `size` values.

    >>> from jaxsparse.quantize import Format
    >>> spec = Format("int8", group_size=4)
    >>> message = to_message(quantize(jnp.float32([-127, 0, 1, 127]), spec, None), spec)
    >>> dequantize(from_message(message, spec, 4), spec, 4).tolist()
    [-127.0, 0.0, 1.0, 127.0]
    """
    count = _scale_count(spec, size)
    if not spec.scale_bits:
        return QuantizedVector(message, jnp.ones(count, jnp.float32))
    words = message.size - field_words(count, spec.scale_bits)
    scales = unpack_fields(message[words:], spec.scale_bits, count)
    scales <<= jnp.uint32(SCALE_SHIFTS[spec.scale_bits])
    return QuantizedVector(message[:words], stored(lax.bitcast_convert_type(scales, jnp.float32)))


def _scale_count(spec: Quantizer, size: int) -> int:
    return spec.scales_per_group * -(-size // spec.group_size)


def check_group_size(group_size: int) -> None:
    """Raises ValueError unless it is an int of at least 1."""
    if static_int("group_size", group_size) < 1:
        raise ValueError(f"group_size={group_size} must be at least 1")


def sent_size(size: int, spec: Quantizer) -> int:
    """How many values to send for `size` values: whole groups, if they are at most a 64th more.

    Otherwise it is `size`. XLA's CPU backend does not vectorise what fills or cuts the last group
    of a vector. (Values of "bfloat16" need no scales, and are sent in groups all the same.)
    """
    padding = -size % spec.group_size
    return size + padding if 64 * padding <= size <= 2**31 - 1 - padding else size


def padded(x: Float[Array, " d"], size: int) -> Float[Array, " size"]:
    """The vector with zeros behind it, up to `size`.

    It is stored if it is long, as in `first_of`. Then it is no part of the loops that make or read
    it, and XLA's CPU backend vectorises these.
    """
    return x if x.size == size else stored_if_long(jnp.pad(x, (0, size - x.size)))


def first_of(x: Shaped[Array, " n"], size: int) -> Shaped[Array, " size"]:
    """The first `size` elements. See `padded`."""
    return x if x.size == size else stored_if_long(x)[:size]


def in_groups(x: Float[Array, " d"], group_size: int) -> Float[Array, "groups values"]:
    """The vector as rows, one for each group. Zeros fill the last row."""
    width = min(group_size, x.size)
    return jnp.pad(x, (0, -x.size % width)).reshape(-1, width)


def repeated(scales: Float[Array, " groups"], group_size: int, size: int) -> Float[Array, " size"]:
    """The scale of each value, from those of the groups."""
    width = min(group_size, size)
    return jnp.broadcast_to(scales[:, None], (scales.size, width)).reshape(-1)[:size]
