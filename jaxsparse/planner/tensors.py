"""Chooses the tensors to compress, from measured costs of compressing and predicted savings."""

import dataclasses
import functools
import math
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxsparse import codecs
from jaxsparse.arrays import layout as layouts
from jaxsparse.arrays.printing import aligned, milliseconds
from jaxsparse.arrays.settings import check_density, entries, static_count, static_float, static_int
from jaxsparse.collectives.messages import MessageFormat
from jaxsparse.planner import network
from jaxsparse.planner.profiles import Measured

_ms = functools.partial(milliseconds, digits=3)


class TensorPoint(NamedTuple):
    """The costs of tensors of one size."""

    elements: int  # float32 elements, d
    encode: float  # seconds
    decode: float  # seconds, for any number of entries
    decode_per_entry: float  # seconds for each of the W m entries of all workers' messages


@dataclasses.dataclass(frozen=True)
class TensorProfile(Measured):
    """Costs of encoding and decoding at some sizes of a tensor, with straight lines between them.

    Beyond the largest size, times grow in proportion to the elements. Below the smallest, they are
    those of the smallest. (A single line, `fixed + per_element d`, fits worse once tensors outgrow
    caches or the memory that the allocator keeps.)

    Attributes:
        points: costs at each size, at least one, in increasing order of size.
        density: entries of a message as a share of the elements, in (0, 1]. None: unknown.
        codec: wire format of the messages, as its `repr`. None: unknown.

    Raises:
        ValueError: there is no point, one is not a `TensorPoint`, sizes do not increase, a time is
            negative or not finite, or the density or codec is neither None nor as above.

    Example:
        >>> points = TensorPoint(1000, 1e-5, 1e-5, 1e-9), TensorPoint(3000, 5e-5, 3e-5, 1e-9)
        >>> profile = TensorProfile(points)
        >>> round(profile.encode_seconds(2000), 9)
        3e-05
        >>> round(profile.decode_seconds(6000, entries=1000), 9)
        6.1e-05
    """

    kind: ClassVar[str] = "tensors"
    units: ClassVar[dict[str, str]] = {
        "points": "float32 elements of a tensor; seconds to encode it; seconds to decode messages "
        "into it, for any number of entries; seconds more for each entry of all messages"
    }
    how: ClassVar[str] = "jaxsparse.planner.profile_tensors(), and save() it"

    points: tuple[TensorPoint, ...]
    density: float | None = None
    codec: str | None = None

    def __post_init__(self):
        points = tuple(map(_checked, _fields("points", self.points)))
        sizes = [point.elements for point in points]
        if not points or sizes[0] < 1 or sorted(set(sizes)) != sizes:
            raise ValueError(
                f"points have elements={sizes}: give at least one size, all at least 1 and in "
                "increasing order"
            )
        object.__setattr__(self, "points", points)
        if self.density is not None:
            check_density(self.density)
            object.__setattr__(self, "density", float(self.density))
        if self.codec is not None and not isinstance(self.codec, str):
            raise ValueError(f"codec={self.codec!r} must be a text: pass repr(codec), or None")

    def __str__(self) -> str:
        words = [super().__str__()]
        if self.density is not None:
            words.append(f"density {self.density:g}")
        if self.codec is not None:
            words.append(self.codec)
        return ", ".join(words)

    def encode_seconds(self, elements: int) -> float:
        """Seconds to encode a tensor of `elements`."""
        return self._between("encode", static_count("elements", elements))

    def decode_seconds(self, elements: int, entries: int) -> float:
        """Seconds to decode messages of `entries`, together, into a tensor of `elements`.

        Decoding is sparse (DRAGONN, section 4.3): it takes a d + b W m, with no term W d.
        """
        elements, entries = static_count("elements", elements), static_count("entries", entries, 0)
        # The time of one entry does not grow beyond the largest size.
        largest = self.points[-1].elements
        per_entry = self._between("decode_per_entry", min(elements, largest))
        return self._between("decode", elements) + per_entry * entries

    def _between(self, name: str, elements: int) -> float:
        sizes = [point.elements for point in self.points]
        times = [getattr(point, name) for point in self.points]
        beyond = max(1.0, elements / sizes[-1])
        return beyond * float(np.interp(elements, sizes, times))


def _fields(name: str, value: Any) -> tuple[Any, ...]:
    try:
        return tuple(value)
    except TypeError:
        raise ValueError(
            f"{name}={value!r} is no sequence: give "
            f"TensorProfile((TensorPoint({', '.join(TensorPoint._fields)}), ...))"
        ) from None


def _checked(point: Any) -> TensorPoint:
    values = _fields("point", point)
    if len(values) != len(TensorPoint._fields):
        raise ValueError(
            f"point={point!r} must have {len(TensorPoint._fields)} values: give "
            f"TensorPoint({', '.join(TensorPoint._fields)})"
        )
    elements, *times = values
    seconds = [static_float(name, time) for name, time in zip(TensorPoint._fields[1:], times)]
    for name, time in zip(TensorPoint._fields[1:], seconds):
        if not 0 <= time < math.inf:
            raise ValueError(f"{name}={time} at elements={elements} must be finite and at least 0")
    return TensorPoint(static_int("elements", elements), *seconds)


class TensorTimes(NamedTuple):
    """Predicted times of one leaf, in seconds."""

    path: str  # as jax.tree_util.keystr prints it
    shape: tuple[int, ...]
    dense: float  # T_full: exchanged by ring all-reduce
    exchange: float  # T_spr: compressed, exchanged by ring all-gather
    codec: float  # T_comp: encoding its message and decoding those of all workers
    may_compress: bool = True  # False: it travels dense in any case

    @property
    def elements(self) -> int:
        """The number of elements of the leaf, d."""
        return math.prod(self.shape)

    @property
    def compressed(self) -> float:
        """The time of the compressed exchange."""
        return self.exchange + self.codec

    @property
    def saving(self) -> float:
        """The time that compression saves; negative if it is slower."""
        return self.dense - self.compressed

    @property
    def is_compressed(self) -> bool:
        """Whether it may be compressed and that pays: T_comp < T_full - T_spr, eq. (1)."""
        return self.may_compress and self.codec < self.dense - self.exchange

    @property
    def selected(self) -> float:
        """The time of the selected way."""
        return self.compressed if self.is_compressed else self.dense


@dataclasses.dataclass(frozen=True)
class TensorSelection:
    """The result of `select_tensors`. It prints as a table.

    Attributes:
        tensors: times of each leaf that is not empty, in the order of `jax.tree.leaves`.
        conditions: the assumptions, in words.
    """

    tensors: tuple[TensorTimes, ...]
    conditions: str = ""

    def is_dense(self, path: str, shape: tuple[int, ...]) -> bool:
        """Whether the leaf travels uncompressed. Pass this method as `is_dense`.

        Raises:
            ValueError: the tree has no such leaf.
        """
        if 0 in shape:  # nothing to select
            return True
        tensor = self._by_path.get(path)
        if tensor is None or tensor.shape != tuple(shape):
            was = "no such leaf" if tensor is None else f"it had shape {tensor.shape}"
            raise ValueError(
                f"leaf{path} of shape {tuple(shape)} was not selected among ({was}): call "
                "select_tensors with the tree that is trained"
            )
        return not tensor.is_compressed

    @property
    def dense_seconds(self) -> float:
        """The time with all leaves dense."""
        return math.fsum(tensor.dense for tensor in self.tensors)

    @property
    def compressed_seconds(self) -> float:
        """The time with all leaves compressed that may be compressed."""
        return math.fsum(t.compressed if t.may_compress else t.dense for t in self.tensors)

    @property
    def seconds(self) -> float:
        """The time of the selection."""
        return math.fsum(tensor.selected for tensor in self.tensors)

    def __str__(self) -> str:
        header = ("leaf", "elements", "dense ms", "exchange ms", "codec ms", "saving ms", "travels")
        rows = [
            (
                tensor.path,
                f"{tensor.elements:,}",
                *map(_ms, (tensor.dense, tensor.exchange, tensor.codec, tensor.saving)),
                "compressed" if tensor.is_compressed else "dense",
            )
            for tensor in self.tensors
        ]
        lines = aligned([header, *rows], right=range(1, len(header) - 1))
        count = sum(tensor.is_compressed for tensor in self.tensors)
        totals = (
            f"all dense {_ms(self.dense_seconds)} ms, "
            f"all compressed {_ms(self.compressed_seconds)} ms, "
            f"selected {_ms(self.seconds)} ms ({count} of {len(self.tensors)} compressed)"
        )
        return "\n".join([*lines, totals, *([self.conditions] if self.conditions else [])])

    @functools.cached_property
    def _by_path(self) -> dict[str, TensorTimes]:
        return {tensor.path: tensor for tensor in self.tensors}


def select_tensors(
    params: Any,
    *,
    workers: int,
    link: network.Link,
    density: float,
    profile: TensorProfile,
    codec: codecs.Codec = codecs.COO,
    is_dense: layouts.IsDense | None = None,
) -> TensorSelection:
    """Decides which leaves are worth compressing, from a model of times.

    A tensor of d elements is compressed if T_comp(d) < T_full(d) - T_spr(d), with

        T_full = 2 (W - 1) (alpha + 4 d / (W B))    ring all-reduce
        T_spr = (W - 1) (alpha + gamma 4 d / B)     ring all-gather of compressed messages

    gamma is the bytes of a message over those of the tensor (2 * density in COO), and T_comp comes
    from the profile. The exchange then saves (W - 1) (alpha + (2 / W - gamma) 4 d / B). (The paper
    prints 1 / W for 2 / W.) The saving is largest for about sqrt(2 / gamma) workers. With more, the
    all-gather's bytes, which grow with W, catch up.

    The model looks at each tensor by itself, as in the paper. In this library, all dense leaves
    travel in one message, and the compressed leaves in one message a bucket. They pay latencies and
    the fixed costs of encoding once, so the totals are upper bounds in this respect. An all-gather
    has half the latencies, so by the equation alone, small leaves on a slow link would be
    compressed. Dense, in one message with others, they cost next to nothing. This is why `is_dense`
    excludes them by default.

    Args:
        params: tree of arrays or of `jax.ShapeDtypeStruct`s like the gradients.
        workers: number of workers, W.
        link: each worker's link, with latency alpha and bandwidth B.
        density: entries of a message as a share of the elements, in (0, 1].
        profile: profile of the device, from `jaxsparse.planner.profile_tensors` or
            `TensorProfile.load`. Its density and codec, if known, must be the ones given here.
        codec: wire format of sparse messages.
        is_dense: function of a leaf's key path and shape: whether the leaf travels dense in any
            case. By default vectors, scalars and leaves below 1024 elements do. With
            `lambda path, shape: False` the equation decides for all leaves.

    Returns:
        The decisions. Pass `TensorSelection.is_dense` to any transformation.

    Raises:
        ValueError: settings out of range, the profile has another density or codec, or see
            `jaxsparse.layout.plan`.

    DRAGONN (Wang et al., ICML 2022), section 4.2, eq. (1).

    Example:
        >>> from jaxsparse.planner import TensorPoint, TensorProfile
        >>> params = {"bias": jnp.zeros(100), "kernel": jnp.zeros((1000, 1000))}
        >>> profile = TensorProfile((TensorPoint(10**6, 1e-3, 1e-3, 1e-8),))
        >>> link = network.Link(latency=50e-6, bandwidth=1.25e9)
        >>> print(select_tensors(params, workers=8, link=link, density=0.001, profile=profile))
        leaf         elements  dense ms  exchange ms  codec ms  saving ms  travels
        ['bias']          100     0.701        0.350     2.000     -1.650  dense
        ['kernel']  1,000,000     6.300        0.395     2.080      3.825  compressed
        all dense 7.001 ms, all compressed 3.175 ms, selected 3.175 ms (1 of 2 compressed)
        8 workers, 5e-05 s, 1.25e+09 bytes/s, density 0.001; codec: unknown
    """
    workers = static_count("workers", workers)
    check_density(density)
    codecs.check_codec(codec)
    if not isinstance(profile, TensorProfile):
        raise ValueError(
            f"profile={profile!r} must be a TensorProfile: measure one by "
            "jaxsparse.planner.profile_tensors(), or TensorProfile.load a saved one"
        )
    if not isinstance(link, network.Link):
        raise ValueError(
            f"link={link!r} must be a Link: give jaxsparse.planner.Link(latency=..., "
            "bandwidth=...) in seconds and bytes a second"
        )
    _check_measured(profile, density, codec)
    rule = layouts.small_or_vector if is_dense is None else is_dense
    tensors, others = [], workers - 1
    for path, shape in layouts.named_leaves(params):
        if size := math.prod(shape):
            k = entries(density, size)
            words = MessageFormat(size, k, "sum", jnp.float32, codec).words
            encode = profile.encode_seconds(size)
            tensors.append(
                TensorTimes(
                    path,
                    shape,
                    dense=link.seconds(2 * others, 2 * others / workers * 4 * size),
                    exchange=link.seconds(others, others * 4 * words),
                    codec=encode + profile.decode_seconds(size, workers * k),
                    may_compress=not rule(path, shape),
                )
            )
    conditions = (
        f"{workers} workers, {link.latency:g} s, {link.bandwidth:g} bytes/s, density {density:g}; "
        f"codec: {profile}"
    )
    return TensorSelection(tuple(tensors), conditions)


def _check_measured(profile: TensorProfile, density: float, codec: codecs.Codec) -> None:
    """Raises ValueError if the profile has another density or codec than the messages."""
    measured = profile.density
    # Not !=, because one may have been rounded to float32.
    if measured is not None and not math.isclose(measured, density, rel_tol=1e-6):
        raise ValueError(
            f"density={density} differs from the profile's, {measured}: select with that one, or "
            f"measure by jaxsparse.planner.profile_tensors(density={density})"
        )
    if profile.codec is not None and profile.codec != repr(codec):
        raise ValueError(
            f"codec={codec!r} differs from the profile's, {profile.codec}: select with that one, "
            "or measure this one by jaxsparse.planner.profile_tensors(codec=...)"
        )
