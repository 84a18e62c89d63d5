"""The parts of a model that Streaming DiLoCo exchanges in turn (Douillard et al., 2025)."""

import dataclasses
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

from jaxsparse.arrays.settings import static_float, static_int

_NUMBER = re.compile(r"\d+")


@dataclasses.dataclass(frozen=True)
class Streaming:
    """Exchanges the model in fragments, one after the other (Streaming DiLoCo, arXiv 2501.18512).

    In H steps each fragment is exchanged once, at steps spread evenly, so the largest message is
    about 1 / `fragments` of the whole. With an overlap, a fragment's exchange runs beside the next
    step. After `overlap` steps, each worker mixes its own values with the global ones,

        theta_w = mixing * theta_w + (1 - mixing) * theta_global

    Attributes:
        fragments: number of fragments, P, from 1 to H.
        overlap: number of steps that a worker makes before the result of an exchange arrives, tau,
            from 0 to H - 1. The paper finds training robust below 5.
        mixing: the weight of a worker's own values, alpha in [0, 1). 0 throws away what the worker
            did during the overlap. None: 0.5 with an overlap and 0 without.
        split: rule that assigns leaves to fragments. "strided" deals layers out in turn, so that a
            fragment has layers of all depths. "sequential" gives each fragment consecutive layers.
            A leaf's layer is the first whole number in its key path, after the beginning that all
            paths share. Leaves without a number (embedding, head, norms) are fragment 0, and the
            other fragments share the layers. If all leaves have a number, all fragments do. Or a
            function of the key path, as `jax.tree_util.keystr` prints it, that returns the
            fragment, from 0 to `fragments` - 1.

    A leaf that holds all layers, stacked, is not cut: it belongs to one fragment.

    The paper sends displacements in 4 bits, as powers of two, without error feedback:
    `diloco(exchange=jaxsparse.quantized("e3m0", decay=0))`. Any other exchange serves as well.
    """

    fragments: int = 4
    overlap: int = 1
    mixing: float | None = None
    split: Literal["strided", "sequential"] | Callable[[str], int] = "strided"

    def __post_init__(self):
        for name in ("fragments", "overlap"):
            object.__setattr__(self, name, static_int(name, getattr(self, name)))
        usual = 0.5 if self.overlap else 0.0
        mixing = usual if self.mixing is None else static_float("mixing", self.mixing)
        object.__setattr__(self, "mixing", mixing)
        if self.fragments < 1:
            raise ValueError(f"fragments={self.fragments} must be at least 1")
        if self.overlap < 0:
            raise ValueError(f"overlap={self.overlap} must not be negative: 0 waits at once")
        if not 0 <= mixing < 1:
            raise ValueError(
                f"mixing={mixing} must lie in [0, 1): it is the weight of a worker's own "
                "values, and at 1 nothing would ever arrive"
            )
        if not callable(self.split) and self.split not in ("strided", "sequential"):
            raise ValueError(
                f"split={self.split!r} is unknown: use 'strided', 'sequential' or a function of "
                "a leaf's key path"
            )

    def of(self, paths: Sequence[str]) -> list[int]:
        """The fragment of each leaf.

        Raises:
            ValueError: a fragment is left without a leaf, or the function returns none.
        """
        found = self._chosen(paths) if callable(self.split) else self._of_layers(paths)
        if empty := sorted(set(range(self.fragments)) - set(found)):
            raise ValueError(
                f"fragments={self.fragments}, but no leaf is left for fragment {empty[0]}: use "
                f"fewer, or give split= a function of a leaf's key path. The paths are {paths}"
            )
        return found

    def _chosen(self, paths: Sequence[str]) -> list[int]:
        choose: Any = self.split
        found = [choose(path) for path in paths]
        for path, fragment in zip(paths, found):
            if isinstance(fragment, bool) or fragment not in range(self.fragments):
                raise ValueError(
                    f"split gives {fragment!r} for leaf{path}: give a whole number from 0 to "
                    f"{self.fragments - 1}"
                )
        return [int(fragment) for fragment in found]

    def _of_layers(self, paths: Sequence[str]) -> list[int]:
        pairs = zip(min(paths), max(paths))
        common = "".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        start = len(common.rstrip("0123456789"))
        numbers = [_NUMBER.search(path, start) for path in paths]
        layers = [None if number is None else int(number[0]) for number in numbers]
        first = 1 if None in layers and self.fragments > 1 else 0
        places = {n: i for i, n in enumerate(sorted({n for n in layers if n is not None}))}
        others = self.fragments - first

        def fragment(layer: int | None) -> int:
            if layer is None:
                return 0
            place = places[layer]
            if self.split == "sequential":
                return first + place * others // len(places)
            return first + place % others

        return [fragment(layer) for layer in layers]
