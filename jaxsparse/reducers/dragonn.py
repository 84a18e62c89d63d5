"""DRAGONN: entries above a sampled threshold, extracted by hashing."""

import dataclasses
from collections.abc import Callable
from typing import Literal, get_args

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from jaxsparse import codecs, hashing
from jaxsparse.collectives import wire
from jaxsparse.collectives.all_gather_sum import all_gather_sum
from jaxsparse.reducers.base import Laws, Reduced, bucket_seeds
from jaxsparse.reducers.density import check_density, entries
from jaxsparse.reducers.residuals import deliver_streams
from jaxsparse.select.maxima import slot_max
from jaxsparse.select.slots import hash_extract
from jaxsparse.select.thresholds import check_samples, sampled_threshold
from jaxsparse.settings import static_seed
from jaxsparse.stream import SparseStream

Extract = Literal["hash", "slot_max"]
# Of a vector, the number of slots and a seed.
Extractor = Callable[[Float[Array, " d"], int, UInt32[Array, ""]], SparseStream]


def extractor(name: Extract, samples: int | None = None) -> Extractor:
    """The function that fills slots.

    Args:
        name: see `DragonnReducer.extract`.
        samples: see `DragonnReducer.samples`.
    """
    if name == "slot_max":
        return lambda x, slots, seed: slot_max(x, slots, seed=seed)

    def hashed(x: Array, slots: int, seed: Array) -> SparseStream:
        threshold = sampled_threshold(x, slots, samples=samples, seed=seed)
        # Zeros must not pass, where fewer elements than slots are other than 0.
        threshold = jnp.maximum(threshold, jnp.finfo(jnp.float32).tiny)
        # Another seed: places in the sample have nothing to do with slots.
        return hash_extract(x, threshold, slots, seed=hashing.combine(seed, 1))

    return hashed


@dataclasses.dataclass(frozen=True)
class DragonnReducer:
    """Each worker's entries above a sampled threshold, in hashed slots, gathered by all.

    DRAGONN (Wang et al., ICML 2022), section 3.2, Alg. 1, with its sparse decoding (section 4.3).
    Of the entries that pass the threshold and share a slot one is sent. The others are unsent like
    any below the threshold: they stay in the residual and are not counted in `info.overflow`, for
    adding that up over workers would take an exchange. Hashes are fresh at each exchange and
    differ between workers, so that none loses for ever, or everywhere.

    Attributes:
        density: slots as a share of the elements, in (0, 1]; rounded up.
        extract: what fills the slots: "hash" as published, where about 63 % are filled, or
            "slot_max", the largest of the elements that share a slot, without a threshold.
        samples: for the threshold of "hash"; None for the default of `select.sampled_threshold`.
        codec: of the messages.
        seed: 0 <= seed < 2**32, of the hashes.
    """

    density: float = 0.001
    extract: Extract = "hash"
    samples: int | None = None
    codec: codecs.Codec = codecs.COO
    seed: int = 0

    def __post_init__(self):
        check_density(self.density)
        if self.extract not in get_args(Extract):
            raise ValueError(f"extract={self.extract!r} is unknown: use one of {get_args(Extract)}")
        if self.samples is not None:
            object.__setattr__(self, "samples", check_samples(self.samples))
            if self.extract != "hash":
                raise ValueError(
                    f"samples={self.samples} are for the threshold of extract='hash', which "
                    f"{self.extract!r} lacks: leave them out"
                )
        codecs.check_codec(self.codec)
        object.__setattr__(self, "seed", static_seed("seed", self.seed))

    @property
    def laws(self) -> Laws:
        """Slots collide at any density, so that some entries always wait."""
        return Laws(conserves=True, dense_at_full_budget=False)

    def split(self, sizes: tuple[int, ...], dense_size: int = 0) -> tuple["DragonnReducer", ...]:
        """The same for each bucket, but for the seed."""
        seeds = bucket_seeds(self.seed, len(sizes))
        return tuple(dataclasses.replace(self, seed=seed) for seed in seeds)

    def init(self, size: int) -> UInt32[Array, ""]:
        """The number of exchanges so far, for fresh hashes."""
        return jnp.uint32(0)

    def hash_seed(self, step: UInt32[Array, ""], rank: Array | int) -> UInt32[Array, ""]:
        """Of one worker's slots at one exchange."""
        return hashing.combine(self.seed, step, rank)

    def __call__(
        self, x: Float[Array, " d"], state: UInt32[Array, ""], *, axis_name: str | None
    ) -> Reduced:
        """See `Reducer`."""
        seed = self.hash_seed(state, wire.axis_index(axis_name))
        slots = entries(self.density, x.size)
        stream = extractor(self.extract, self.samples)(x, slots, seed)
        result = all_gather_sum(
            stream, x.size, axis_name=axis_name, codec=self.codec, distinct=True
        )
        return deliver_streams(x, stream, result, state + jnp.uint32(1), wire.axis_size(axis_name))
