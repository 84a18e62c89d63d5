"""QSGD quantisation (Alistarh et al., 2017), packed into words, and back.

Values are cut into buckets with one scale each. A value v becomes the integer level s v / scale,
rounded into -s .. s with s = 2**(bits - 1) - 1: stochastically, so that E[Q(v)] = v, or to
nearest without a key.
"""

import dataclasses
import functools
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key, UInt32

from jaxsparse.hashing import keyed
from jaxsparse.magnitude import largest_magnitude
from jaxsparse.settings import static_int

__all__ = ["QSGD", "Quantized", "check_feedback", "dequantize", "pack", "quantize", "unpack"]

_WORD = 32


@dataclasses.dataclass(frozen=True)
class QSGD:
    """Settings of the quantiser.

    Attributes:
        bits: per value on the wire: 2, 4 or 8.
        bucket_size: values that share a scale, the paper's d of a bucket; B below.
        scale: "max", the largest magnitude of the bucket, which is sent without error; no other
            error exceeds max / s. "l2", the norm of the bucket, QSGD's own: more zeros, and larger
            errors.

    Raises:
        ValueError: bits is not 2, 4 or 8, bucket_size is below 1, or scale is unknown.
    """

    bits: Literal[2, 4, 8] = 4
    bucket_size: int = 1024
    scale: Literal["max", "l2"] = "max"

    def __post_init__(self):
        _check_bits(self.bits)
        if static_int("bucket_size", self.bucket_size) < 1:
            raise ValueError(f"bucket_size={self.bucket_size} must be at least 1")
        if self.scale not in ("max", "l2"):
            raise ValueError(f"scale={self.scale!r} is unknown: use 'max' or 'l2'")

    @property
    def levels(self) -> int:
        """Levels above zero, the paper's s: 1, 7 or 127."""
        return 2 ** (self.bits - 1) - 1

    def words(self, size: int) -> int:
        """Words of 32 bits on the wire for `size` values: packed levels and a scale per bucket.

        >>> QSGD(bits=4).words(10_000)
        1260
        """
        return _packed(size, self.bits) + self._buckets(size)

    def error_bound(self, *, stochastic: bool = True) -> float:
        """The factor f in E||Q(x) - x||^2 <= f ||x||^2, for any x.

        With D = scale / s, a value v in the first cell has error variance v (D - v), one in a
        further cell the same as that of its remainder, and never more than D^2 / 4; to nearest
        the squared error is at most min(v^2, D^2 / 4). Maximising the sum over the bucket gives

                    stochastic                              to nearest
            max     (sqrt(1 + (B - 1) / s^2) - 1) / 2       (B - 1) / (B - 1 + 4 s^2)
            l2      sqrt(B) / s - 1, B / (4 s^2) below 1    min(1, B / (4 s^2))

        Under "max" the largest value has no error and the worst case of the others is attained.
        QSGD's Lemma 3.1, min(B / s^2, sqrt(B) / s) for l2, is looser.

        Args:
            stochastic: whether `quantize` gets a key.

        >>> QSGD(bits=8, scale="l2").error_bound() < 0.016
        True
        """
        B, s = self.bucket_size, self.levels
        if self.scale == "max":
            others = (B - 1) / s**2
            return (math.sqrt(1 + others) - 1) / 2 if stochastic else others / (others + 4)
        if 4 * s**2 > B:
            return B / (4 * s**2)
        return math.sqrt(B) / s - 1 if stochastic else 1.0

    def bounded_feedback(self, *, stochastic: bool = True) -> bool:
        """Whether feeding the error of each step back keeps the residual bounded, for any data.

        Either of two contractions shows it. Under "max" no residual exceeds r max|x| with
        r = 1 / s, or 1 / (2 s) to nearest; x being gradient plus residual, r < 1 keeps all of them
        below r / (1 - r) times the largest gradient of the bucket. Otherwise `error_bound` must be
        below 1. This holds for all settings but "max" with 2 bits, a key and B > 8 (at B = 1024 the
        residual of normal gradients grows to some 12 times their norm), and "l2" with B >= 4 s^2:
        with a key the residual grows exponentially, and to nearest equal values are never sent.

        Args:
            stochastic: whether `quantize` gets a key.

        EF-SGD (Karimireddy et al., 2019), Lemma 3, for the second contraction.

        >>> QSGD(bits=4).bounded_feedback(), QSGD(bits=4, scale="l2").bounded_feedback()
        (True, False)
        """
        below_largest = self.scale == "max" and (self.levels > 1 or not stochastic)
        return below_largest or self.error_bound(stochastic=stochastic) < 1

    def _buckets(self, size: int) -> int:
        return -(-size // self.bucket_size)


class Quantized(NamedTuple):
    """A quantised vector: `words` and `scales` are all that travels."""

    words: UInt32[Array, " words"]  # ceil(d * bits / 32), the levels as `pack` lays them out
    scales: Float[Array, " buckets"]  # float32, ceil(d / bucket_size)


def check_feedback(spec: QSGD, *, stochastic: bool) -> None:
    """Refuses settings whose error must not be fed back: see `QSGD.bounded_feedback`.

    Args:
        spec: settings.
        stochastic: whether `quantize` gets a key.

    Raises:
        ValueError: the residual could grow without bound; names the settings that would do.

    >>> check_feedback(QSGD(bits=4), stochastic=True)
    """
    if spec.bounded_feedback(stochastic=stochastic):
        return
    largest = 8 * spec.levels**2 if spec.scale == "max" else 4 * spec.levels**2 - 1
    candidates = {
        "scale='max'": dataclasses.replace(spec, scale="max"),
        "bits=4": dataclasses.replace(spec, bits=4),
        "bits=8": dataclasses.replace(spec, bits=8),
        f"bucket_size={largest}": dataclasses.replace(spec, bucket_size=largest),
    }
    fixes = [
        fix for fix, other in candidates.items() if other.bounded_feedback(stochastic=stochastic)
    ]
    if spec.bounded_feedback(stochastic=False):
        fixes.insert(0, "rounding to nearest (no key)")
    rounding = "stochastic rounding" if stochastic else "rounding to nearest"
    raise ValueError(
        f"scale={spec.scale!r} with bits={spec.bits}, bucket_size={spec.bucket_size} and {rounding}"
        f": the error can have {spec.error_bound(stochastic=stochastic):.3g} times the energy of "
        f"what is quantised, and fed back it grows from step to step. Use {' or '.join(fixes)}, or "
        "no error feedback"
    )


@functools.partial(jax.jit, static_argnames="spec")
def quantize(x: Float[Array, " d"], spec: QSGD, key: Key[Array, ""] | None) -> Quantized:
    """Quantises a vector.

    A bucket whose magnitudes are all below 2.3e-38, twice float32's least normal number, counts as
    zero. One with a value that is not finite comes back with none that is.

    Args:
        x: float32, bfloat16 or float16[d], 1 <= d < 2**31; quantised as float32.
        spec: settings.
        key: of the stochastic rounding, which is unbiased (to float32's rounding of s v / scale): a
            fresh one for each call and worker. None rounds to nearest, ties to even: biased, with
            |v - Q(v)| <= |v| for every value.

    Returns:
        The packed levels and the scales.

    Raises:
        ValueError: `x` is not such a vector.

    QSGD (Alistarh et al., 2017), sections 3.1 and 3.3; SparCML, section 6.

    >>> x = jnp.float32([1.0, -7.0, 0.2, 3.9])
    >>> dequantize(quantize(x, QSGD(bits=4), None), QSGD(bits=4), 4).tolist()
    [1.0, -7.0, 0.0, 4.0]
    """
    if x.ndim != 1:
        raise ValueError(f"x has shape {x.shape}: quantize takes a vector; pass x.ravel()")
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize > 4:
        raise ValueError(f"x has dtype {x.dtype}: pass x.astype(jnp.float32)")
    _check_size("x.size", x.size)
    buckets = _in_buckets(x.astype(jnp.float32), spec)
    limits = jnp.finfo(jnp.float32)
    largest = largest_magnitude(buckets, axis=1)
    empty = largest < 2 * limits.tiny  # false for NaN, which must not vanish
    largest = jnp.where(empty, 1, largest)
    scales = largest
    if spec.scale == "l2":
        # Of values scaled to at most 1: their squares neither overflow nor vanish. A norm beyond
        # float32 is cut: any scale that no value exceeds is unbiased, and less has less error.
        norms = jnp.sqrt(jnp.sum(jnp.square(_shares(buckets, largest)), axis=1))
        scales = jnp.minimum(largest * norms, limits.max)
    position = jnp.abs(_shares(buckets, scales)) * spec.levels
    position = position.reshape(-1)[: x.size]
    if key is None:
        level = jnp.round(position)
    else:
        level = jnp.floor(position)
        random = keyed(lax.iota(jnp.uint32, x.size), jax.random.bits(key, dtype=jnp.uint32))
        # The remainder is exact, so that a value on a level stays there.
        up = (random >> jnp.uint32(8)).astype(jnp.float32) * 2.0**-24 < position - level
        level += up.astype(jnp.float32)
    level = jnp.minimum(level, spec.levels).astype(jnp.int32)
    return Quantized(pack(jnp.where(x < 0, -level, level), spec.bits), jnp.where(empty, 0, scales))


@functools.partial(jax.jit, static_argnames=("spec", "size"))
def dequantize(quantized: Quantized, spec: QSGD, size: int) -> Float[Array, " size"]:
    """The values that a quantised vector stands for: scale * level / s.

    Args:
        quantized: from `quantize`.
        spec: the one it was quantised with.
        size: d, of the vector that was quantised.

    Returns:
        float32[size].

    Raises:
        ValueError: `quantized` does not match `spec` and `size`.

    >>> spec = QSGD(bits=2, scale="l2")
    >>> dequantize(quantize(jnp.float32([0.0, 5.0]), spec, None), spec, 2).tolist()
    [0.0, 5.0]
    """
    _check_size("size", size)
    if quantized.scales.shape != (spec._buckets(size),):
        raise ValueError(
            f"scales have shape {quantized.scales.shape}, but size={size} in buckets of "
            f"{spec.bucket_size} has {spec._buckets(size)}: pass the spec and size of quantize"
        )
    levels = unpack(quantized.words, spec.bits, size).astype(jnp.float32)
    shares = _in_buckets(levels / spec.levels, spec)  # at most 1: the product does not overflow
    return (shares * quantized.scales[:, None]).reshape(-1)[:size]


@functools.partial(jax.jit, static_argnames="bits")
def pack(levels: Int[Array, " d"], bits: int) -> UInt32[Array, " words"]:
    """Packs small integers, in two's complement, the first into the lowest bits of a word.

    Args:
        levels: int32[d], each in -2**(bits - 1) .. 2**(bits - 1) - 1; others are cut to it
            modulo 2**bits.
        bits: 2, 4 or 8.

    Returns:
        uint32[ceil(d * bits / 32)]; the last is padded with zeros.

    Raises:
        ValueError: `levels` is not an integer vector, or bits is not 2, 4 or 8.

    >>> [hex(word) for word in pack(jnp.array([1, -1, 7]), 4).tolist()]
    ['0x7f1']
    """
    _check_bits(bits)
    if levels.ndim != 1 or not jnp.issubdtype(levels.dtype, jnp.integer):
        raise ValueError(
            f"levels have shape {levels.shape} and dtype {levels.dtype}: pack takes a vector of "
            "int32; pass levels.ravel().astype(jnp.int32)"
        )
    _check_size("levels.size", levels.size)
    fields = levels.astype(jnp.uint32) & jnp.uint32(2**bits - 1)
    fields = jnp.pad(fields, (0, -levels.size % (_WORD // bits))).reshape(-1, _WORD // bits)
    return jnp.sum(fields << _shifts(bits), axis=1, dtype=jnp.uint32)  # no carries: disjoint bits


@functools.partial(jax.jit, static_argnames=("bits", "size"))
def unpack(words: UInt32[Array, " words"], bits: int, size: int) -> Int[Array, " size"]:
    """What `pack` packed.

    Args:
        words: uint32[ceil(size * bits / 32)].
        bits: those it was packed with.
        size: how many integers there are.

    Returns:
        int32[size].

    Raises:
        ValueError: bits is not 2, 4 or 8, or `words` does not match bits and size.

    >>> unpack(pack(jnp.array([1, -1, 7]), 4), 4, 3).tolist()
    [1, -1, 7]
    """
    _check_bits(bits)
    _check_size("size", size)
    if words.shape != (_packed(size, bits),) or words.dtype != jnp.uint32:
        raise ValueError(
            f"words have shape {words.shape} and dtype {words.dtype}, but size={size} with "
            f"bits={bits} is packed into {_packed(size, bits)} of uint32: pass those of pack"
        )
    # The field goes to the top of the word; shifting it back as int32 repeats its sign.
    top = words[:, None] << (jnp.uint32(_WORD - bits) - _shifts(bits))
    fields = lax.bitcast_convert_type(top, jnp.int32) >> jnp.int32(_WORD - bits)
    return fields.reshape(-1)[:size]


def _shifts(bits: int) -> UInt32[Array, "1 fields"]:
    return jnp.arange(0, _WORD, bits, dtype=jnp.uint32)[None]


def _packed(size: int, bits: int) -> int:
    return -(-size * bits // _WORD)


def _in_buckets(x: Float[Array, " d"], spec: QSGD) -> Float[Array, "buckets values"]:
    width = min(spec.bucket_size, x.size)
    return jnp.pad(x, (0, -x.size % width)).reshape(-1, width)


def _shares(
    buckets: Float[Array, "buckets values"], scales: Float[Array, " buckets"]
) -> Float[Array, "buckets values"]:
    """Values by their scale: 4 / scale is a normal number for all scales that `quantize` lets pass.

    XLA multiplies by 1 / scale when asked to divide, which is subnormal, so zero, from 2**126 on.
    """
    return buckets * (4 / scales)[:, None] * 0.25


def _check_bits(bits: int) -> None:
    if bits not in (2, 4, 8):
        raise ValueError(f"bits={bits} is not supported: use 2, 4 or 8")


def _check_size(name: str, size: int) -> None:
    if not 1 <= size < 2**31:
        raise ValueError(f"{name}={size} must lie between 1 and 2**31 - 1: split or skip it")
