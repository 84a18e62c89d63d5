"""Top-k SGD with a sparse all-gather: TopkA."""

import dataclasses
from typing import Any

from jaxtyping import Array, Float

from jaxsparse import codecs
from jaxsparse.collectives import wire
from jaxsparse.collectives.all_gather_sum import all_gather_sum
from jaxsparse.reducers.base import Laws, Reduced
from jaxsparse.reducers.density import check_density, entries
from jaxsparse.reducers.residuals import deliver_streams
from jaxsparse.reducers.selection import Selection, check_selection, selector


@dataclasses.dataclass(frozen=True)
class TopKReducer:
    """Each worker's largest entries, gathered by all (Aji and Heafield, EMNLP 2017).

    Attributes:
        density: share of the elements that each worker sends, in (0, 1].
        codec: of the messages.
        selection: how the largest entries are picked; see `Selection`.
    """

    density: float
    codec: codecs.Codec = codecs.COO
    selection: Selection = "fast"

    def __post_init__(self):
        check_density(self.density)
        codecs.check_codec(self.codec)
        check_selection(self.selection)

    @property
    def laws(self) -> Laws:
        """The codec's rounding is fed back, too."""
        return Laws(conserves=True, dense_at_full_budget=True)

    def split(self, sizes: tuple[int, ...], dense_size: int = 0) -> tuple["TopKReducer", ...]:
        """The same for each bucket."""
        return (self,) * len(sizes)

    def init(self, size: int) -> Any:
        """No state."""
        return ()

    def __call__(self, x: Float[Array, " d"], state: Any, *, axis_name: str | None) -> Reduced:
        """See `Reducer`."""
        stream = selector(self.selection)(x, entries(self.density, x.size))
        result = all_gather_sum(
            stream, x.size, axis_name=axis_name, codec=self.codec, distinct=True
        )
        return deliver_streams(x, stream, result, state, wire.axis_size(axis_name))
