"""The base class of reducers that select entries by size and send them through a codec."""

import dataclasses

from jaxsparse import codecs
from jaxsparse.reducers.base import Conservation, Reducer
from jaxsparse.select.selection import Selection, check_selection
from jaxsparse.settings import check_density


@dataclasses.dataclass(frozen=True)
class EntryReducer(Reducer):
    """A reducer of entries.

    Attributes:
        density: k, the number of entries, as a share of the elements, in (0, 1].
        codec: wire format of the messages.
        selection: the way in which a worker finds the largest entries of its own vector.
    """

    density: float
    codec: codecs.Codec = dataclasses.field(default=codecs.COO, kw_only=True)
    selection: Selection = dataclasses.field(default="fast", kw_only=True)

    def __post_init__(self):
        super().__post_init__()
        check_density(self.density)
        codecs.check_codec(self.codec)
        check_selection(self.selection)

    @property
    def conservation(self) -> Conservation:
        """The conservation of the codec."""
        return conservation_of(self.codec)


def conservation_of(codec: codecs.Codec) -> Conservation:
    """How well sums are conserved if the residual keeps what the codec rounds."""
    if codec.is_exact:
        return "exact"
    return "to rounding" if codec.is_local else "to group rounding"
