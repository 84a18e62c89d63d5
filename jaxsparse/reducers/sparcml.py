"""SparCML (Renggli et al., SC 2019)."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxsparse import codecs, network, quantize, select
from jaxsparse.collectives import wire
from jaxsparse.collectives.all_gather_sum import all_gather_sum
from jaxsparse.collectives.dsar_split_allgather import dsar_split_allgather
from jaxsparse.collectives.outcome import AllReduced
from jaxsparse.collectives.recursive_double import recursive_double
from jaxsparse.collectives.sparse_ring import sparse_ring
from jaxsparse.collectives.split import check_factor
from jaxsparse.collectives.split_allgather import split_allgather
from jaxsparse.profiles import SystemProfile
from jaxsparse.reducers.base import Laws, Reduced, bucket_seeds
from jaxsparse.reducers.residuals import deliver_streams
from jaxsparse.settings import static_int, static_seed
from jaxsparse.stream import SparseStream
from jaxsparse.traffic import WireBytes, traced_bytes

Algorithm = Literal[
    "auto",
    "recursive_double",
    "split_allgather",
    "dsar_split_allgather",
    "all_gather",
    "ring",
]
# That "auto" chooses from, in order of simplicity. A ring receives no less than "split_allgather",
# and waits for as many messages.
ALGORITHMS: tuple[Algorithm, ...] = (
    "all_gather",
    "recursive_double",
    "split_allgather",
    "dsar_split_allgather",
)


@dataclasses.dataclass(frozen=True)
class SparCMLReducer:
    """Top-k of every bucket of consecutive elements, summed by one of several all-reduces.

    Attributes:
        k: entries of each bucket that a worker sends.
        bucket_size: consecutive elements in a bucket (of the selection; not of the layout).
        algorithm: of the all-reduce; "auto" takes the one that is fastest on `link` as the planner
            predicts it (see `choose`), or "dsar_split_allgather" where `bits` ask for it.
        bits: 2, 4 or 8 quantise, by QSGD; None does not.
        quantized: what is quantised: the "sums" in the second half of the dense algorithm, which
            saves bytes (section 6), or each worker's "entries" before they are summed (Alg. 1),
            which in this library travel as they are without and save none.
        rounding: "stochastic" is unbiased, and its error is forgotten, as in the paper; "nearest"
            is not, and its error is fed back.
        capacity_factor: room in messages of the split phase, in multiples of an even share. Buckets
            spread entries evenly, so that 2 leaves nothing behind unless they are few.
        union_factor: room for the sums of an owner in "split_allgather", in multiples of k / W;
            None for all there can be.
        link: the network that "auto" reckons with.
        codec: of sparse messages.
        seed: 0 <= seed < 2**32, of stochastic rounding.
    """

    k: int = 4
    bucket_size: int = 512
    algorithm: Algorithm = "auto"
    bits: Literal[2, 4, 8] | None = None
    quantized: Literal["sums", "entries"] = "sums"
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    capacity_factor: float | None = 2.0
    union_factor: float | None = None
    link: network.Link = network.Link()  # noqa: RUF009 - frozen
    codec: codecs.Codec = codecs.COO
    seed: int = 0

    def __post_init__(self):
        for name in ("k", "bucket_size"):
            object.__setattr__(self, name, static_int(name, getattr(self, name)))
        object.__setattr__(self, "seed", static_seed("seed", self.seed))
        if not 1 <= self.k <= self.bucket_size:
            raise ValueError(f"k={self.k} must lie between 1 and bucket_size={self.bucket_size}")
        for name, known in (
            ("algorithm", get_args(Algorithm)),
            ("quantized", ("sums", "entries")),
            ("rounding", ("stochastic", "nearest")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown: use one of {known}")
        codecs.check_codec(self.codec)
        for name in ("capacity_factor", "union_factor"):
            check_factor(name, getattr(self, name), "sum")
        if self.bits is not None:
            object.__setattr__(self, "bits", static_int("bits", self.bits))
            quantize.QSGD(self.bits)  # raises where it is wrong
            if self.quantized == "sums" and self.algorithm not in ("auto", "dsar_split_allgather"):
                raise ValueError(
                    f"bits={self.bits} quantise the dense half of 'dsar_split_allgather', which "
                    f"algorithm={self.algorithm!r} lacks: use that or 'auto', or "
                    "quantized='entries'"
                )

    @property
    def laws(self) -> Laws:
        """Stochastic rounding conserves in expectation only."""
        conserves = self.bits is None or self.rounding == "nearest"
        whole = self.bits is None and self.codec.is_exact and self.capacity_factor is None
        return Laws(conserves, dense_at_full_budget=whole and self.union_factor is None)

    def split(self, sizes: tuple[int, ...], dense_size: int = 0) -> tuple["SparCMLReducer", ...]:
        """The same for each bucket of the layout, but for the seed."""
        seeds = bucket_seeds(self.seed, len(sizes))
        return tuple(dataclasses.replace(self, seed=seed) for seed in seeds)

    def init(self, size: int) -> Any:
        """The number of exchanges so far, for the keys of stochastic rounding; else no state."""
        return jnp.uint32(0) if self._is_random else ()

    def __call__(self, x: Float[Array, " d"], state: Any, *, axis_name: str | None) -> Reduced:
        """See `Reducer`."""
        stream = select.bucket_top_k(x, self.k, self.bucket_size)
        key = None
        if self._is_random:
            key = jax.random.fold_in(jax.random.key(self.seed), state)
            state = state + jnp.uint32(1)
        sent = stream
        if self.bits is not None and self.quantized == "entries":
            own = None if key is None else jax.random.fold_in(key, wire.axis_index(axis_name))
            spec = quantize.QSGD(self.bits)
            levels = quantize.quantize(stream.values, spec, own)
            sent = stream._replace(values=quantize.dequantize(levels, spec, stream.capacity))
        workers = wire.axis_size(axis_name)
        name = self.choose(x.size, workers)
        result = self._run(name, sent, x.size, axis_name, key)
        # What stochastic rounding takes from entries is forgotten, what rounding to nearest is not.
        delivered = sent if self.rounding == "nearest" else stream
        return deliver_streams(x, delivered, result, state, workers)

    @property
    def _is_random(self) -> bool:
        return self.bits is not None and self.rounding == "stochastic"

    @property
    def _quantizer(self) -> quantize.QSGD | None:
        wanted = self.bits is not None and self.quantized == "sums"
        return quantize.QSGD(self.bits) if wanted and self.bits is not None else None

    def choose(
        self,
        size: int,
        workers: int,
        *,
        measured: network.Network | None = None,
        profile: SystemProfile | None = None,
    ) -> Algorithm:
        """The algorithm for vectors of `size` elements: as set, or the fastest as predicted.

        The prediction is the planner's: the messages of the traced program, in the rounds that
        `jaxsparse.network.rounds` has for each collective, at the network's latency and bandwidth;
        and what a worker computes, measured. On a device that is unlike the profile's, name the
        algorithm where computing decides: `jaxsparse.planner.plan` tells it for a profile of yours.
        "ring" is never chosen.

        On 8 emulated hosts at 100 Mbit/s, of a million elements at 0.1, 1 and 10 %, this took the
        fastest, all_gather, at 1 %; at 0.1 % it lost 6 % by recursive_double, at 10 % 11 % by
        dsar_split_allgather. With the network's links for each collective, and computing four times
        as slow, as eight processes on two cores are, it takes the fastest of all three. (The model
        without computing took recursive_double of all three: 6, 75 and 107 % slower.)

        Args:
            size: elements of the vector.
            workers: W.
            measured: the network; None for one of `link` alone.
            profile: of the device; None for the shipped one, of a CPU. Algorithms that it lacks are
                not chosen, if it has any.
        """
        if self.algorithm != "auto":
            return self.algorithm
        if self._quantizer is not None:
            return "dsar_split_allgather"
        if workers == 1:  # which sends nothing
            return "all_gather"
        where = network.Network(self.link) if measured is None else measured
        known = SystemProfile.shipped() if profile is None else profile
        density = self._entries(size) / size
        # Neither changes the messages.
        reducer = dataclasses.replace(self, link=network.Link(), seed=0)

        def seconds(name: str) -> float:
            on_network = where.seconds(_messages(reducer, name, size, workers))
            if not timed:
                return on_network
            return on_network + known.seconds(f"sparcml:{name}", size, workers, density)

        timed = [name for name in ALGORITHMS if f"sparcml:{name}" in known.systems]
        return min(timed or ALGORITHMS, key=seconds)

    def _entries(self, size: int) -> int:
        """Of a worker's stream."""
        return self.k * (size // self.bucket_size) + min(self.k, size % self.bucket_size)

    def _run(
        self, name: str, stream: SparseStream, size: int, axis_name: str | None, key: Array | None
    ) -> AllReduced:
        algorithms: dict[str, Callable[..., AllReduced]] = {
            "recursive_double": recursive_double,
            "split_allgather": split_allgather,
            "dsar_split_allgather": dsar_split_allgather,
            "all_gather": all_gather_sum,
            "ring": sparse_ring,
        }
        extra: dict[str, dict[str, Any]] = {
            "split_allgather": {
                "capacity_factor": self.capacity_factor,
                "union_factor": self.union_factor,
            },
            "dsar_split_allgather": {
                "capacity_factor": self.capacity_factor,
                "quantizer": self._quantizer,
                "key": key,
            },
            "all_gather": {"distinct": True},
        }
        return algorithms[name](
            stream, size, axis_name=axis_name, codec=self.codec, **extra.get(name, {})
        )


@functools.lru_cache(maxsize=1024)
def _messages(reducer: SparCMLReducer, name: str, size: int, workers: int) -> WireBytes:
    """What an algorithm moves; traced once: all four take some 0.4 s of a CPU."""
    entries = reducer._entries(size)
    stream = jax.eval_shape(
        lambda: SparseStream(jnp.zeros(entries, jnp.int32), jnp.zeros(entries, jnp.float32))
    )
    run = lambda stream: reducer._run(name, stream, size, "data", None)
    return traced_bytes(run, stream, workers)
