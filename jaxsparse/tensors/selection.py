"""Efficiency-aware tensor selection: compress a tensor only where that is faster."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxsparse import codecs, layout as layouts, network
from jaxsparse.collectives.parcel import Parcel
from jaxsparse.reducers.density import check_density, entries
from jaxsparse.settings import static_int
from jaxsparse.tensors.profiles import Profile


class TensorTimes(NamedTuple):
    """What one leaf is predicted to take, in seconds."""

    path: str  # as jax.tree_util.keystr prints it
    shape: tuple[int, ...]
    dense: float  # T_full: exchanged by ring all-reduce
    exchange: float  # T_spr: compressed, exchanged by ring all-gather
    codec: float  # T_comp: encoding its message and decoding those of all workers
    may_compress: bool = True  # or whether it travels dense in any case

    @property
    def elements(self) -> int:
        """Of the leaf, d."""
        return math.prod(self.shape)

    @property
    def compressed(self) -> float:
        """All that compressing takes."""
        return self.exchange + self.codec

    @property
    def saving(self) -> float:
        """By compressing; negative where that is slower."""
        return self.dense - self.compressed

    @property
    def is_compressed(self) -> bool:
        """Whether it may be and it pays: T_comp < T_full - T_spr, eq. (1)."""
        return self.may_compress and self.codec < self.dense - self.exchange

    @property
    def selected(self) -> float:
        """As it travels."""
        return self.compressed if self.is_compressed else self.dense


@dataclasses.dataclass(frozen=True)
class TensorSelection:
    """Outcome of `select_tensors`; prints as a table.

    Attributes:
        tensors: one a leaf, in the order of `jax.tree.leaves`, without empty ones.
        conditions: what was assumed, in words.
    """

    tensors: tuple[TensorTimes, ...]
    conditions: str = ""

    def is_dense(self, path: str, shape: tuple[int, ...]) -> bool:
        """Whether the leaf travels uncompressed: pass this method as a transformation's `is_dense`.

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
        """With all leaves dense."""
        return math.fsum(tensor.dense for tensor in self.tensors)

    @property
    def compressed_seconds(self) -> float:
        """With all leaves compressed that may be."""
        return math.fsum(t.compressed if t.may_compress else t.dense for t in self.tensors)

    @property
    def seconds(self) -> float:
        """As selected."""
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
        widths = [max(map(len, column)) for column in zip(header, *rows)]
        lines = [
            "  ".join(
                text.ljust(width) if i in (0, len(widths) - 1) else text.rjust(width)
                for i, (text, width) in enumerate(zip(row, widths))
            ).rstrip()
            for row in (header, *rows)
        ]
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
    profile: Profile,
    codec: codecs.Codec = codecs.COO,
    is_dense: layouts.IsDense | None = None,
) -> TensorSelection:
    """Decides by a model of the times which leaves are worth compressing.

    A tensor of d elements is compressed if T_comp(d) < T_full(d) - T_spr(d), with

        T_full = 2 (W - 1) (alpha + 4 d / (W B))    ring all-reduce
        T_spr = (W - 1) (alpha + gamma 4 d / B)     ring all-gather of compressed messages

    gamma the bytes of a message over those of the tensor (2 * density in COO) and T_comp from the
    profile. Exchanging then saves (W - 1) (alpha + (2 / W - gamma) 4 d / B), the most for about
    sqrt(2 / gamma) workers: beyond them the all-gather's bytes, which grow with W, catch up. (The
    paper prints 1 / W.)

    Each tensor is taken by itself, as in the paper. In this library all dense leaves travel in one
    message, and the compressed ones in one for each bucket, so that latencies and the fixed costs
    of encoding are paid once and not for each: totals are upper bounds as far as these go. The
    equation alone, to which an all-gather has half the latencies, would compress small leaves on a
    slow link, though in one message with others they cost next to nothing dense: hence `is_dense`.

    Args:
        params: tree of arrays or of `jax.ShapeDtypeStruct`s like the gradients.
        workers: W.
        link: of each worker: latency alpha and bandwidth B.
        density: entries of a message as a share of the elements, in (0, 1].
        profile: of the device, from `jaxsparse.tensors.profile` or `Profile.load`, and of this
            density and codec unless it doesn't say.
        codec: of sparse messages.
        is_dense: given a leaf's key path and shape, whether it travels dense in any case. By
            default vectors, scalars and anything below 1024 elements do; `lambda path, shape:
            False` leaves it all to the equation.

    Returns:
        The decisions; `TensorSelection.is_dense` is the argument of any transformation.

    Raises:
        ValueError: settings out of range, the profile is of another density or codec, or see
            `jaxsparse.layout.plan`.

    DRAGONN (Wang et al., ICML 2022), section 4.2, eq. (1).

    Example:
        >>> from jaxsparse.tensors import Point, Profile
        >>> params = {"bias": jnp.zeros(100), "kernel": jnp.zeros((1000, 1000))}
        >>> profile = Profile((Point(10**6, 1e-3, 1e-3, 1e-8),))
        >>> link = network.Link(latency=50e-6, bandwidth=1.25e9)
        >>> print(select_tensors(params, workers=8, link=link, density=0.001, profile=profile))
        leaf         elements  dense ms  exchange ms  codec ms  saving ms  travels
        ['bias']          100     0.701        0.350     2.000     -1.650  dense
        ['kernel']  1,000,000     6.300        0.395     2.080      3.825  compressed
        all dense 7.001 ms, all compressed 3.175 ms, selected 3.175 ms (1 of 2 compressed)
        8 workers, 5e-05 s, 1.25e+09 bytes/s, density 0.001; codec: unknown, jax unknown, unknown
    """
    workers = static_int("workers", workers)
    if workers < 1:
        raise ValueError(f"workers={workers} must be at least 1")
    check_density(density)
    codecs.check_codec(codec)
    if not isinstance(profile, Profile):
        raise ValueError(
            f"profile={profile!r} must be a Profile: measure one by jaxsparse.tensors.profile(), "
            "or Profile.load a saved one"
        )
    if not isinstance(link, network.Link):
        raise ValueError(
            f"link={link!r} must be a Link: give jaxsparse.cost.Link(latency=..., bandwidth=...) "
            "in seconds and bytes a second"
        )
    _check_measured(profile, density, codec)
    layouts.plan(params)  # raises where the transformation would
    rule = layouts.small_or_vector if is_dense is None else is_dense
    tensors = []
    for key_path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        path, shape = jax.tree_util.keystr(key_path), jnp.shape(leaf)
        if size := math.prod(shape):
            k = entries(density, size)
            words = Parcel(size, k, "sum", jnp.float32, codec).words
            all_gather = network.Traffic(workers - 1, (workers - 1) * words)
            encode = profile.encode_seconds(size)
            tensors.append(
                TensorTimes(
                    path,
                    shape,
                    dense=link.seconds(network.dense_all_reduce(size, workers)),
                    exchange=link.seconds(all_gather),
                    codec=encode + profile.decode_seconds(size, workers * k),
                    may_compress=not rule(path, shape),
                )
            )
    conditions = (
        f"{workers} workers, {link.latency:g} s, {link.bandwidth:g} bytes/s, density {density:g}; "
        f"codec: {_measured(profile)}"
    )
    return TensorSelection(tuple(tensors), conditions)


def _check_measured(profile: Profile, density: float, codec: codecs.Codec) -> None:
    """Times of another density or codec would not be those of the messages."""
    measured = profile.density
    # Not !=, as one may have been rounded to float32.
    if measured is not None and not math.isclose(measured, density, rel_tol=1e-6):
        raise ValueError(
            f"density={density} differs from the profile's, {measured}: select with that one, or "
            f"measure by jaxsparse.tensors.profile(density={density})"
        )
    if profile.codec is not None and profile.codec != repr(codec):
        raise ValueError(
            f"codec={codec!r} differs from the profile's, {profile.codec}: select with that one, "
            "or measure this one by jaxsparse.tensors.profile(codec=...)"
        )


def _measured(profile: Profile) -> str:
    words = [profile.device, f"jax {profile.jax}", profile.date]
    if profile.density is not None:
        words.append(f"density {profile.density:g}")
    if profile.codec is not None:
        words.append(profile.codec)
    if profile.settings != "unknown":
        words.append(profile.settings)
    return ", ".join(words)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.3f}"
