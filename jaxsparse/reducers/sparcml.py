"""SparCML (Renggli et al., SC 2019)."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxsparse.arrays.settings import check_size
from jaxsparse.arrays.stream import SparseStream
from jaxsparse.codecs.codec import COO, Codec, check_codec
from jaxsparse.collectives.messages import MOST_STAGES, AllReduced, MessageFormat
from jaxsparse.collectives.sparcml import (
    Deal,
    all_gather_sum,
    dsar_split_allgather,
    recursive_double,
    sparse_ring,
    split_allgather,
)
from jaxsparse.comm import wire
from jaxsparse.comm.links import Link, rounds
from jaxsparse.quantize.qsgd import QSGD
from jaxsparse.quantize.quantizer import check_feedback
from jaxsparse.reducers.base import Conservation, Kept, SeededReducer, Sums, keep_streams
from jaxsparse.reducers.entries import conservation_of
from jaxsparse.select.groups import count_entries, group_top_k, most_entries

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
LINK = Link()


@dataclasses.dataclass(frozen=True)
class SparCML(SeededReducer):
    """SparCML's Top-k SGD (Renggli et al., SC 2019, Alg. 1), with k of every 512 elements (8.3).

    Updates are means of gradients: chain `optax.sgd(lr)` behind it. (The paper accumulates lr *
    gradient and applies sums. For a constant lr, that is `optax.chain(optax.scale(lr * workers),
    sparcml(...), optax.scale(-1))`.)

    "recursive_double" and "split_allgather" give sums the room that they needed in the last
    exchange. If a sum has more entries, its smallest stay in residuals and are counted, and the
    next exchange has room for as many. The first exchange has room for all. Each room is a branch
    of the program, so these two take longer to compile.

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
    link: Link = LINK
    codec: Codec = COO

    def check(self) -> None:
        if not isinstance(self.link, Link):
            raise ValueError(
                f"link={self.link!r} must be a jaxsparse.Link(latency=..., bandwidth=...), in "
                "seconds and bytes a second"
            )
        if not 1 <= self.k <= self.group_size:
            raise ValueError(f"k={self.k} must lie between 1 and group_size={self.group_size}")
        check_codec(self.codec)
        if self.bits is not None and self.algorithm not in ("auto", "dsar_split_allgather"):
            raise ValueError(
                f"bits={self.bits} quantise the dense half of 'dsar_split_allgather', which "
                f"algorithm={self.algorithm!r} lacks: use that or 'auto'"
            )
        if self.quantizer is not None:
            if not self._is_random:
                check_feedback(self.quantizer, stochastic=False)
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
        """The number of the step where sums are rounded at random, or else what sums needed."""
        if self._is_random:
            return jnp.uint32(0)
        has_sums = self.algorithm in ("auto", "recursive_double", "split_allgather")
        return jnp.zeros(MOST_STAGES, jnp.int32) if has_sums and self.bits is None else ()

    def reduce(self, x: Float[Array, " d"], state: Any, axis_name: str | None) -> tuple[Sums, Kept]:
        check_size("x.size", x.size)
        stream = group_top_k(x, self.k, self.group_size)
        key = None
        if self._is_random:
            key = jax.random.fold_in(jax.random.key(self.seed), state)
            state = state + jnp.uint32(1)
        workers = wire.axis_size(axis_name)
        algorithm = self.algorithm_for(x.size, workers)
        result = self.all_reduce(algorithm, stream, x.size, axis_name, key, state)
        state = state if result.needs is None else result.needs
        return keep_streams(x, stream, result, state)

    @property
    def _is_random(self) -> bool:
        return self.bits is not None and self.rounding == "stochastic"

    @property
    def quantizer(self) -> QSGD | None:
        if self.bits is None:
            return None
        return QSGD(self.bits, self.bits_group_size, self.scale)

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

        Sums are those of random supports. Those of gradients overlap more, and messages are then
        shorter. They are dense arrays where that is shorter still.
        """
        W, m, k = workers, self.deal(size, workers).range_size, self.entries(size)
        union = lambda n: math.ceil(self.expected(size, n) - 1e-6)  # less what floats round
        words = lambda entries, of: MessageFormat(of, entries, "sum", jnp.float32, self.codec).words
        stages = range(W.bit_length() - 1)
        held = [2**t for t in stages]  # workers whose entries a message carries
        if 2 ** len(stages) != W:  # the extra workers send first, and get the result last
            held = [1, *(min(2 ** (t + 1), W) for t in stages), W]
        counts = len(held) + 1  # what each stage needs, and what found no room
        doubled = [words(union(n), size) + counts for n in held]
        first = words(self.capacity(size, W), m)
        second = words(-(-union(W) // W), m) + 2
        gather = rounds("all-gather", W)
        return {
            "all_gather": (gather, 4 * (W - 1) * words(k, size)),
            "recursive_double": (len(doubled), 4 * sum(doubled)),
            "split_allgather": (2 * gather, 4 * (W - 1) * (first + second)),
        }

    def entries(self, size: int) -> int:
        """The number of entries in a worker's stream."""
        return count_entries(size, self.k, self.group_size)

    def expected(self, size: int, workers: int) -> float:
        """E[K], the average number of entries in a sum of random supports (appendix B)."""
        return size * (1 - (1 - self.entries(size) / size) ** workers)

    def deal(self, size: int, workers: int) -> Deal:
        """Who owns which elements in "split_allgather": groups in turn, if there are enough."""
        even = -(-size // workers)
        in_turn = Deal(size, workers, self.group_size)
        fits = workers * in_turn.range_size < 2**31  # its indices are int32
        return in_turn if fits and even >= 16 * self.group_size else Deal(size, workers, even)

    def capacity(self, size: int, workers: int) -> int:
        """The most entries of a worker's stream in one owner's range of "split_allgather"."""
        deal = self.deal(size, workers)
        if deal.block == self.group_size:
            return deal.range_size // deal.block * self.k
        return most_entries(size, self.k, self.group_size, workers)

    def all_reduce(
        self,
        name: str,
        stream: SparseStream,
        size: int,
        axis_name: str | None,
        key: Array | None,
        needs: Array,
    ) -> AllReduced:
        """Sums the workers' streams by the algorithm of this name; `key` is for rounding."""
        workers = wire.axis_size(axis_name)
        algorithms: dict[str, Callable[..., AllReduced]] = {
            "recursive_double": recursive_double,
            "split_allgather": split_allgather,
            "dsar_split_allgather": dsar_split_allgather,
            "all_gather": all_gather_sum,
            "ring": sparse_ring,
        }
        extra: dict[str, dict[str, Any]] = {
            "recursive_double": {"needs": needs},
            "split_allgather": {"capacity": self.capacity(size, workers), "needs": needs},
            "dsar_split_allgather": {
                "capacity": most_entries(size, self.k, self.group_size, workers),
                "quantizer": self.quantizer,
                "key": key,
            },
            "all_gather": {"distinct": True},
        }
        run = functools.partial(
            algorithms[name], axis_name=axis_name, codec=self.codec, **extra.get(name, {})
        )
        if name != "split_allgather":
            return run(stream, size)
        deal = self.deal(size, workers)
        result = run(deal.deal(stream), workers * deal.range_size)
        total, residual = deal.undo(result.total), deal.undo(result.residual)
        return result._replace(total=total, residual=residual)
