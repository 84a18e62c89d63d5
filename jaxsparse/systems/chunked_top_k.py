"""Top-k of every chunk in entries of few bits: SparseLoCo's exchange (Sarfi et al., 2025)."""

import dataclasses
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jaxsparse import codecs, select
from jaxsparse.arrays.magnitude import norms
from jaxsparse.arrays.platforms import count_where
from jaxsparse.arrays.settings import Stages, at_least, check_k, check_size, current
from jaxsparse.arrays.stream import SparseStream, add_to, filled
from jaxsparse.feedback.options import transformation
from jaxsparse.feedback.transformations import SystemOptions
from jaxsparse.reducers.base import Conservation, Owed, Total, finite_sums, info, owed, summed
from jaxsparse.reducers.entries import conservation_of, entries_message, entries_total
from jaxsparse.reducers.one_message import OneMessage
from jaxsparse.select.groups import count_entries
from jaxsparse.systems.row import Case, System


@dataclasses.dataclass(frozen=True)
class ChunkedTopK(OneMessage):
    """SparseLoCo's exchange (Sarfi et al., 2025): k of every 4096 elements, in 7 to 10 bits each.

    In a step, a worker receives W - 1 messages of 10 bits an entry, 0.02 d bytes each, with the
    defaults, and of 7 with k = 512: 2 for the value, the rest for the index (`codecs.EliasFano`;
    the published code has 12). One word for every 256 entries travels beside them. The residual
    keeps all that the receivers do not decode: unsent entries and the rounding. Zeros are no
    entries.

    `momentum` acts before the exchange (momentum correction), and is masked where this worker sent.

    Args:
        k: number of entries of each chunk that a worker sends, or a warm-up (`jaxsparse.Stages`).
            Ties go to the lower index. A shorter last chunk sends k entries, too, or all.
        chunk_size: number of consecutive elements in a chunk.
        value_bits: number of bits of a value: 2, 4, 8, 16 (bfloat16) or 32 (exact).
        aggregate: "mean" divides sums by the number of workers, as in the paper.
            "mean_of_senders" divides each by the number of workers that sent the coordinate, as in
            the published code. Updates are then up to W times as large, and sums are not conserved.
        clip: "median" scales larger messages down to the median of all messages' norms, as the
            published code does (of an even number, to the lower middle). The residual does not keep
            what it cuts. The norm is that of a bucket, not of a leaf. None: no clipping.

    Raises:
        ValueError: settings out of range.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> tx = chunked_top_k(2, 1024, axis_name=None)
        >>> grads = {"kernel": jnp.arange(2048.0).reshape(64, 32)}
        >>> updates, state = jax.jit(tx.update)(grads, tx.init(grads))
        >>> jnp.flatnonzero(updates["kernel"]).tolist()
        [1022, 1023, 2046, 2047]
    """

    changes_few = True
    k: int | Stages[int] = 64
    chunk_size: Annotated[int, at_least(1)] = 4096
    _: dataclasses.KW_ONLY
    value_bits: Literal[2, 4, 8, 16, 32] = 2
    aggregate: Literal["mean", "mean_of_senders"] = "mean"
    clip: Literal["median"] | None = None

    def check(self) -> None:
        _ = self.codec  # raises where it is wrong
        check_k(current(self.k), self.chunk_size, f"chunk_size={self.chunk_size}")

    @property
    def codec(self) -> codecs.EliasFano:
        """The wire format."""
        return codecs.EliasFano(self.value_bits)

    @property
    def conservation(self) -> Conservation:
        """Only the mean over all workers, unclipped, conserves what workers sent."""
        return conservation_of(self.codec) if self._is_sum else "leaks"

    @property
    def _is_sum(self) -> bool:
        """Whether messages are summed as they are."""
        return self.aggregate == "mean" and self.clip is None

    @property
    def dense_at_full_budget(self) -> bool:
        """Yes, if nothing is rounded or clipped."""
        return self.codec.is_exact and self.clip is None

    def message(
        self, x: Float[Array, " d"], state: Any, rank: Int[Array, ""]
    ) -> tuple[UInt32[Array, " words"], Owed]:
        """See `OneMessage`."""
        check_size("x.size", x.size)
        stream, codec = select.group_top_k(x, current(self.k), self.chunk_size), self.codec
        if self._is_sum:
            return entries_message(x, stream, codec, state)
        # Entries, even where a dense array would be shorter: receivers count and scale them.
        lost = stream.values - codec.rounded(stream, x.size)
        return codec.encode(stream, x.size), owed(x, stream, lost, state)

    def total(self, messages: UInt32[Array, "workers words"], size: int) -> Total:
        """See `OneMessage`."""
        codec = self.codec
        capacity = count_entries(size, current(self.k), self.chunk_size)
        if self._is_sum:
            return entries_total(messages, capacity, size, codec)
        sums, senders = self._combined(messages, capacity, size)
        if self.aggregate == "mean":
            return summed(sums, len(messages))
        mean = finite_sums(sums)[0] / jnp.maximum(senders, 1).astype(jnp.float32)
        return Total(mean, sums, info(count_where(mean, lambda mean: mean != 0)))

    def _combined(
        self, messages: UInt32[Array, "n words"], capacity: int, size: int
    ) -> tuple[Float[Array, " d"], Int[Array, " d"]]:
        """The sum of all messages, in order, and the number of senders of each coordinate."""
        decode = lambda message: self.codec.decode(message, capacity, size, jnp.float32)
        streams = jax.vmap(decode)(messages)
        if self.clip is not None:
            streams = streams._replace(values=_clipped(streams.values))

        def add(
            carry: tuple[Array, Array], stream: SparseStream
        ) -> tuple[tuple[Array, Array], None]:
            total, senders = carry
            return (add_to(total, stream), senders.at[stream.indices].add(1, mode="drop")), None

        start = filled(size, jnp.float32(0), streams.indices[0])
        none = filled(size, jnp.int32(0), streams.indices[0])
        return jax.lax.scan(add, (start, none), streams)[0]


def _clipped(values: Float[Array, "workers n"]) -> Float[Array, "workers n"]:
    """The workers' values, scaled down to the lower median of their norms."""
    lengths = norms(values)
    median = jnp.sort(lengths)[(len(lengths) - 1) // 2]
    return values * jnp.minimum(1, median / (lengths + 1e-8))[:, None]


@dataclasses.dataclass(frozen=True)
class _ChunkedTopK(SystemOptions, ChunkedTopK):
    pass


chunked_top_k = transformation(_ChunkedTopK, "chunked_top_k")


CHUNKED_TOP_K = System(
    chunked_top_k,
    summary="[SparseLoCo](https://arxiv.org/abs/2508.15706)'s exchange: k of every 4096 elements, "
    "7 to 10 bits an entry",
    received="1.34 k (W-1)",
    cases={
        "": Case({"k": 2, "chunk_size": 64}, {"k": 64, "chunk_size": 64, "value_bits": 32}),
        "published": Case(
            {
                "k": 2,
                "chunk_size": 64,
                "aggregate": "mean_of_senders",
                "clip": "median",
            },
            {"k": 64, "chunk_size": 64, "value_bits": 32, "aggregate": "mean_of_senders"},
        ),
    },
)
