"""DRAGONN: large entries, extracted by hashing."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jaxsparse.arrays import hashing
from jaxsparse.arrays.settings import Density, entries
from jaxsparse.arrays.stream import SparseStream
from jaxsparse.codecs.codec import COO, Codec, check_codec
from jaxsparse.reducers.base import Conservation, Gathered, Kept, SeededReducer, Sums
from jaxsparse.reducers.entries import conservation_of, decode_entries, encode_entries
from jaxsparse.select.fast import slot_max
from jaxsparse.select.slots import hash_extract
from jaxsparse.select.thresholds import check_samples, sampled_threshold

Extract = Literal["hash", "slot_max"]
# A function of a vector, the number of slots and a seed that fills the slots.
Extractor = Callable[[Float[Array, " d"], int, UInt32[Array, ""]], SparseStream]


def extractor(name: Extract, samples: int | None = None, passing: float = 1.0) -> Extractor:
    """The function that fills slots. For the settings see `dragonn`."""
    if name == "slot_max":
        return lambda x, slots, seed: slot_max(x, slots, seed=seed)

    def hashed(x: Array, slots: int, seed: Array) -> SparseStream:
        expected = min(math.ceil(passing * slots), x.size)
        threshold = sampled_threshold(x, expected, samples=samples, seed=seed)
        # Zeros must not pass if there are fewer non-zero elements than slots.
        threshold = jnp.maximum(threshold, jnp.finfo(jnp.float32).tiny)
        # Another seed, so that slots are independent of the sample's positions.
        own_seed = hashing.combine(seed, 1)
        return hash_extract(x, threshold, slots, seed=own_seed, expected=expected)

    return hashed


@dataclasses.dataclass(frozen=True)
class Dragonn(Gathered, SeededReducer):
    """DRAGONN (Wang et al., ICML 2022): large entries, in slots that are hashed.

    Each worker hashes its d elements into m = density d random slots, and sends the largest element
    of each slot ("slot_max"), without a sort, a threshold or a running count. All workers decode
    all messages into one dense vector. A bucket, by default all compressed leaves together, has one
    set of slots; the paper compresses each tensor by itself.

    The paper's own form is "hash": of the elements that reach a threshold, which n = passing m do
    in a sample, one of each slot is sent, and about 63 % of the slots are filled. In as many bytes
    "slot_max" keeps 85 % of the energy of the m largest, and "hash" 63 %. It trains as well, and
    takes a third of the time on an H100 (`benchmarks/results/time.md`, `accuracy.md`).

    A worker receives 2 m (W - 1) words a step in COO, as with `top_k`. The received bytes grow with
    the number of workers, so it suits few workers (up to about sqrt(1 / density)), large tensors
    and slow links. With `is_dense=jaxsparse.planner.select_tensors(...).is_dense` it compresses
    only the tensors that save more time on the network than selection and decoding cost.

    Of entries that share a slot, the worker sends one. The others stay in the residual, and
    `info.overflow` does not count them: they lose by chance, and not for want of room. Hashes
    differ at each exchange and between workers, so no entry loses for ever, or everywhere.

    Args:
        density: m as a share of each bucket's elements, in (0, 1].
        extract: the way in which slots are filled, "slot_max" or the published "hash".
        passing: number of elements that "hash" lets pass, n, as a multiple of m. More fill more of
            the slots: 1 - exp(-passing), 86 % with 2 (the paper's m = 512, n = 1,024 in A.2.2). But
            which of those that share a slot is sent is left to chance, so that smaller ones take
            the place of larger ones.
        samples: number of elements from which "hash" estimates its threshold. None: the default of
            `jaxsparse.select.sampled_top_k`.
        codec: wire format. `codecs.COO` is exact; `codecs.Packed()` halves the bytes and keeps the
            rounding in the residual.
    """

    density: Density = 0.001
    _: dataclasses.KW_ONLY
    extract: Extract = "slot_max"
    passing: float = 1.0
    samples: int | None = None
    codec: Codec = COO

    def check(self) -> None:
        passing = float(self.passing)
        if not 0 < passing < math.inf:
            raise ValueError(f"passing={passing} must be positive and finite: 1 or 2 are usual")
        if passing != 1 and self.extract != "hash":
            raise ValueError(
                f"passing={passing} is for the threshold of extract='hash', which "
                f"{self.extract!r} lacks: give extract='hash', too, or leave it out"
            )
        if self.samples is not None:
            check_samples(self.samples)
            if self.extract != "hash":
                raise ValueError(
                    f"samples={self.samples} are for the threshold of extract='hash', which "
                    f"{self.extract!r} lacks: give extract='hash', too, or leave them out"
                )
        check_codec(self.codec)

    @property
    def conservation(self) -> Conservation:
        return conservation_of(self.codec)

    def hash_seed(self, step: UInt32[Array, ""], rank: Array | int) -> UInt32[Array, ""]:
        """The seed of one worker's slots at one exchange."""
        return hashing.combine(self.seed, step, rank)

    def encode(
        self, x: Float[Array, " d"], state: Any, rank: Int[Array, ""]
    ) -> tuple[UInt32[Array, " words"], Kept]:
        slots, seed = entries(self.density, x.size), self.hash_seed(state, rank)
        stream = extractor(self.extract, self.samples, self.passing)(x, slots, seed)
        return encode_entries(x, stream, self.codec, state + jnp.uint32(1))

    def decode(self, messages: UInt32[Array, "workers words"], size: int) -> Sums:
        return decode_entries(messages, entries(self.density, size), size, self.codec)
