"""SparCML (Renggli et al., SC 2019)."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxsparse import codecs, quantize, select
from jaxsparse.arrays.settings import check_size, static_float
from jaxsparse.arrays.stream import SparseStream
from jaxsparse.collectives.messages import AllReduced, MessageFormat
from jaxsparse.collectives.sparcml import (
    all_gather_sum,
    dsar_split_allgather,
    recursive_double,
    sparse_ring,
    split_allgather,
)
from jaxsparse.comm import wire
from jaxsparse.comm.links import Link, rounds
from jaxsparse.feedback.transformations import SystemOptions
from jaxsparse.reducers.base import Conservation, Kept, SeededReducer, Sums, keep_streams
from jaxsparse.reducers.entries import conservation_of
from jaxsparse.select.groups import count_entries, most_entries
from jaxsparse.systems.table import system

Algorithm = Literal[
    "auto",
    "recursive_double",
    "split_allgather",
    "dsar_split_allgather",
    "all_gather",
    "ring",
]
# "auto" chooses from these, the simplest first. The others receive no less than "split_allgather",
# whose sums are dense where that is shorter, and wait for as many messages.
ALGORITHMS: tuple[Algorithm, ...] = ("all_gather", "recursive_double", "split_allgather")
_LINK = Link()


@dataclasses.dataclass(frozen=True)
class SparCML(SeededReducer):
    """SparCML's Top-k SGD (Renggli et al., SC 2019, Alg. 1), with k of every 512 elements (8.3).

    Updates are means of gradients: chain `optax.sgd(lr)` behind it. (The paper accumulates lr *
    gradient and applies sums. For a constant lr, that is `optax.chain(optax.scale(lr * workers),
    sparcml(...), optax.scale(-1))`.)

    Args:
        k: number of entries of each group that a worker sends.
        group_size: number of consecutive elements in a group.
        algorithm: the all-reduce: "recursive_double", "split_allgather" (both SSAR),
            "dsar_split_allgather", "all_gather" or "ring". "auto" takes the fastest one on `link`
            (see `algorithm_for`), or "dsar_split_allgather" where `bits` require it.
        bits: number of bits of a sum in the dense second half of "dsar_split_allgather", quantised
            by QSGD: 2, 4 or 8. None: nothing is quantised.
        bits_group_size: number of consecutive sums that share a scale under `bits`: the paper's
            bucket, of some 1024 (section 6).
        scale: norm of such a group that scales it: "max", or QSGD's "l2", which has larger errors.
            See `quantize.QSGD`.
        rounding: way of rounding under `bits`. "stochastic" is unbiased and drops its error.
            "nearest" keeps its error in the residual, and refuses scale="l2" with too few bits for
            the group size: the residual could grow without bound.
        union_factor: room for the sums of one owner in "split_allgather". 1 suffices nearly always
            if workers select elements at random: it is the expected number of different elements
            (appendix B), and four standard deviations more. Sums without room, the smallest, stay
            in the owner's residual and are counted. None: room for all.
        link: latency and bandwidth for the choice of "auto". The default is 10 Gbit/s and 50 us.
        codec: wire format of sparse messages. `codecs.EliasFano()` sends some 11 bits an entry,
            with algorithm="all_gather"; `EliasFano(value_bits=16)` or 32 goes with all.
        seed: seed of stochastic rounding.
    """

    k: int = 4
    group_size: int = 512
    _: dataclasses.KW_ONLY
    algorithm: Algorithm = "auto"
    bits: Literal[2, 4, 8] | None = None
    bits_group_size: int = 1024
    scale: Literal["max", "l2"] = "max"
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    union_factor: float | None = 1.0
    link: Link = _LINK
    codec: codecs.Codec = codecs.COO

    def check(self) -> None:
        if not isinstance(self.link, Link):
            raise ValueError(
                f"link={self.link!r} must be a jaxsparse.Link(latency=..., bandwidth=...), in "
                "seconds and bytes a second"
            )
        if not 1 <= self.k <= self.group_size:
            raise ValueError(f"k={self.k} must lie between 1 and group_size={self.group_size}")
        codecs.check_codec(self.codec)
        factor = self.union_factor
        if factor is not None and not 0 < static_float("union_factor", factor) < math.inf:
            raise ValueError(
                f"union_factor={factor} must be positive and finite (1 suffices for random "
                "supports), or None for room for all sums"
            )
        if self.bits is not None and self.algorithm not in ("auto", "dsar_split_allgather"):
            raise ValueError(
                f"bits={self.bits} quantise the dense half of 'dsar_split_allgather', which "
                f"algorithm={self.algorithm!r} lacks: use that or 'auto'"
            )
        if self.quantizer is not None:
            if not self._is_random:
                quantize.check_feedback(self.quantizer, stochastic=False)
        elif (self.bits_group_size, self.scale) != (1024, "max"):
            raise ValueError(
                f"bits_group_size={self.bits_group_size} and scale={self.scale!r} are for "
                "quantised sums, but bits=None quantises nothing: give bits=4, for example"
            )

    @property
    def conservation(self) -> Conservation:
        if self._is_random:
            return "in expectation"
        return conservation_of(self.codec) if self.bits is None else "to group rounding"

    def init(self, size: int) -> Any:
        return jnp.uint32(0) if self._is_random else ()

    def reduce(self, x: Float[Array, " d"], state: Any, axis_name: str | None) -> tuple[Sums, Kept]:
        check_size("x.size", x.size)
        stream = select.group_top_k(x, self.k, self.group_size)
        key = None
        if self._is_random:
            key = jax.random.fold_in(jax.random.key(self.seed), state)
            state = state + jnp.uint32(1)
        workers = wire.axis_size(axis_name)
        algorithm = self.algorithm_for(x.size, workers)
        result = self.all_reduce(algorithm, stream, x.size, axis_name, key)
        return keep_streams(x, stream, result, state)

    @property
    def _is_random(self) -> bool:
        return self.bits is not None and self.rounding == "stochastic"

    @property
    def quantizer(self) -> quantize.QSGD | None:
        if self.bits is None:
            return None
        return quantize.QSGD(self.bits, self.bits_group_size, self.scale)

    def algorithm_for(self, size: int, workers: int) -> Algorithm:
        """The all-reduce of vectors of `size` elements: the one set, or the fastest on the link.

        By the paper's model, rounds * alpha + words * beta (section 5.3). A later algorithm of
        `ALGORITHMS` computes more, so it must take a tenth less time than the ones before it.
        """
        if self.algorithm != "auto":
            return self.algorithm
        if self.bits is not None:
            return "dsar_split_allgather"
        if workers == 1:  # which sends nothing
            return "all_gather"
        traffic = self.traffic(size, workers)
        seconds = {name: self.link.seconds(*traffic[name]) for name in ALGORITHMS}
        best = ALGORITHMS[0]
        for name in ALGORITHMS[1:]:
            if seconds[name] < 0.9 * seconds[best]:
                best = name
        return best

    def traffic(self, size: int, workers: int) -> dict[Algorithm, tuple[int, int]]:
        """Messages one after the other and received bytes of a worker, by algorithm.

        Shapes are static, so messages have room for disjoint supports, and in the split ones for
        the fullest range. They are dense where that is shorter.
        """
        W, m, k = workers, -(-size // workers), self.entries(size)
        words = lambda entries, of: MessageFormat(of, entries, "sum", jnp.float32, self.codec).words
        stages = range(W.bit_length() - 1)
        held = [2**t for t in stages]  # workers whose entries a message carries
        if 2 ** len(stages) != W:  # the extra workers send first, and get the result last
            held = [1, *(min(2 ** (t + 1), W) for t in stages), W]
        doubled = [min(size, count * k) for count in held]
        room = min(m, self.capacity(size, W))
        union = self.union_capacity(size, W)
        sums = min(m, W * room) if union is None else min(m, W * room, union)
        first = words(room, m) + 1  # a count of what found no room
        gather = rounds("all-gather", W)
        return {
            "all_gather": (gather, 4 * (W - 1) * words(k, size)),
            "recursive_double": (len(doubled), 4 * sum(words(n, size) for n in doubled)),
            "split_allgather": (2 * gather, 4 * (W - 1) * (first + words(sums, m))),
        }

    def entries(self, size: int) -> int:
        """The number of entries in a worker's stream."""
        return count_entries(size, self.k, self.group_size)

    def capacity(self, size: int, workers: int) -> int:
        """The most entries of a worker's stream in one owner's range of the split algorithms."""
        return most_entries(size, self.k, self.group_size, workers)

    def union_capacity(self, size: int, workers: int) -> int | None:
        """The room for one owner's sums in "split_allgather". None: room for all."""
        if self.union_factor is None:
            return None
        m, k = -(-size // workers), self.k
        # E[K] of appendix B, in one range: the expected number of elements in the union of W random
        # supports. The last group may be shorter, and then has more entries for its size.
        rest = size % self.group_size
        last = min(m, rest)
        absent = (m - last) * (1 - k / self.group_size) ** workers
        if last:
            absent += last * (1 - min(k, rest) / rest) ** workers
        expected = m - absent
        # Its variance is at most that of independent elements, and at most the difference between
        # the most elements and the expected ones.
        spare = max(0.0, workers * self.capacity(size, workers) - expected)
        deviation = math.sqrt(min(expected * absent / m, spare))
        return math.ceil(self.union_factor * min(m, expected + 4 * deviation))

    def all_reduce(
        self, name: str, stream: SparseStream, size: int, axis_name: str | None, key: Array | None
    ) -> AllReduced:
        """Sums the workers' streams by the algorithm of this name; `key` is for rounding."""
        workers = wire.axis_size(axis_name)
        capacity = self.capacity(size, workers)
        algorithms: dict[str, Callable[..., AllReduced]] = {
            "recursive_double": recursive_double,
            "split_allgather": split_allgather,
            "dsar_split_allgather": dsar_split_allgather,
            "all_gather": all_gather_sum,
            "ring": sparse_ring,
        }
        extra: dict[str, dict[str, Any]] = {
            "split_allgather": {
                "capacity": capacity,
                "union_capacity": self.union_capacity(size, workers),
            },
            "dsar_split_allgather": {
                "capacity": capacity,
                "quantizer": self.quantizer,
                "key": key,
            },
            "all_gather": {"distinct": True},
        }
        return algorithms[name](
            stream, size, axis_name=axis_name, codec=self.codec, **extra.get(name, {})
        )


@dataclasses.dataclass(frozen=True)
class _SparCML(SystemOptions, SparCML):
    pass


sparcml = system(
    _SparCML,
    "sparcml",
    summary="[SparCML](https://arxiv.org/abs/1802.08021): k of every 512 elements, exactly summed "
    "by the all-reduce that suits the network",
    received="by algorithm",
)
