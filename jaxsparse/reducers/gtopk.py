"""gTop-k SGD (Shi et al., ICDCS 2019)."""

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxsparse import codecs
from jaxsparse.collectives import wire
from jaxsparse.collectives.gtopk import gtopk
from jaxsparse.reducers.base import Laws, Reduced
from jaxsparse.reducers.density import check_density, entries
from jaxsparse.reducers.residuals import marked, settle
from jaxsparse.reducers.selection import Selection, check_selection, selector
from jaxsparse.stream import to_dense


@dataclasses.dataclass(frozen=True)
class GTopKReducer:
    """The k largest entries of sums of pairs of sums of ... of each worker's k largest.

    Attributes:
        density: k as a share of the elements, in (0, 1].
        residuals: "global" feeds back all that is not delivered; "published" forgets, as the paper
            does, what is cut on the way of an entry that is delivered in part. It leaks, and is
            here for comparison.
        codec: of the messages.
        selection: "fast" or "exact" top-k of each worker's own vector.
    """

    density: float
    residuals: Literal["global", "published"] = "global"
    codec: codecs.Codec = codecs.COO
    selection: Selection = "fast"

    def __post_init__(self):
        check_density(self.density)
        codecs.check_codec(self.codec)
        check_selection(self.selection)
        if self.residuals not in ("global", "published"):
            raise ValueError(
                f"residuals={self.residuals!r} is unknown: use 'global' or 'published'"
            )

    @property
    def laws(self) -> Laws:
        """As published it leaks."""
        return Laws(conserves=self.residuals == "global", dense_at_full_budget=self.codec.is_exact)

    def split(self, sizes: tuple[int, ...], dense_size: int = 0) -> tuple["GTopKReducer", ...]:
        """The same for each bucket."""
        return (self,) * len(sizes)

    def init(self, size: int) -> Any:
        """No state."""
        return ()

    def __call__(self, x: Float[Array, " d"], state: Any, *, axis_name: str | None) -> Reduced:
        """See `Reducer`."""
        stream = selector(self.selection)(x, entries(self.density, x.size))
        total, discarded = gtopk(stream, x.size, axis_name=axis_name, codec=self.codec)
        unselected = x - to_dense(stream, x.size)
        if self.residuals == "published":
            discarded = jnp.zeros_like(x)
        selected = marked(stream, x.size)
        workers = wire.axis_size(axis_name)
        return settle(x, total, unselected + discarded, selected, state, workers)
