"""The parts of a model that Streaming DiLoCo exchanges in turn (Douillard et al., 2025)."""

import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from jaxsparse.arrays.layout import SCANNED, is_stack
from jaxsparse.arrays.settings import static_float, static_int

_NUMBER = re.compile(r"\d+")

# Which rows of a leaf belong to a fragment. None: all.
Rows: TypeAlias = slice | np.ndarray | None


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
            did during the overlap. None: 0.5 for what ran beside steps, and 0 for what did not.
        split: function of a leaf's key path, as `jax.tree_util.keystr` prints it, that returns the
            fragment, from 0 to `fragments` - 1. None deals layers out in turn, so that a fragment
            has layers of all depths. A leaf's layer is the first whole number in its key path,
            after the beginning that all paths share. Leaves without a number (embedding, head,
            norms) are fragment 0, and the other fragments share the layers. If all leaves have a
            number, all fragments do.
        stacked: a regular expression, by default that of `jaxsparse.powersgd`. A leaf of three or
            more dimensions whose key path contains a match holds layers along its first axis, and
            is cut there: its rows are dealt out as leaves of single layers are. So is a vector of
            each layer beside it. A function as `split` sees each row's path, which is the leaf's
            with "[0]", "[1]", ... behind. None: leaves are not cut.

    The paper sends displacements in 4 bits, as powers of two, without error feedback:
    `jaxsparse.quantized("e3m0", decay=0)`. Any other exchange serves as well.
    """

    fragments: int = 4
    overlap: int = 1
    mixing: float | None = None
    split: Callable[[str], int] | None = None
    stacked: str | None = SCANNED

    def __post_init__(self):
        for name in ("fragments", "overlap"):
            object.__setattr__(self, name, static_int(name, getattr(self, name)))
        if self.mixing is not None:
            object.__setattr__(self, "mixing", static_float("mixing", self.mixing))
        if self.fragments < 1:
            raise ValueError(f"fragments={self.fragments} must be at least 1")
        if self.overlap < 0:
            raise ValueError(f"overlap={self.overlap} must not be negative: 0 waits at once")
        if self.mixing is not None and not 0 <= self.mixing < 1:
            raise ValueError(
                f"mixing={self.mixing} must lie in [0, 1): it is the weight of a worker's own "
                "values, and at 1 nothing would ever arrive"
            )
        if not (self.split is None or callable(self.split)):
            raise ValueError(
                f"split={self.split!r} must be a function of a leaf's key path, or None"
            )

    def mixes(self, at_once: bool) -> float:
        """The weight of a worker's own values as an exchange arrives, at once or after steps."""
        usual = 0.0 if at_once else 0.5
        return usual if self.mixing is None else self.mixing

    def of(self, leaves: Mapping[str, tuple[int, ...]]) -> list[dict[str, Rows]]:
        """The leaves of each fragment, and the rows that it has of them.

        Args:
            leaves: the shape of each leaf, by its key path.

        Raises:
            ValueError: a fragment is left without a leaf, the function returns none, or a pattern
                of the user's own matches no stack.
        """
        stacks = self._stacks(leaves)
        rows_of = lambda path: range(stacks[path]) if path in stacks else (None,)
        units = [(path, row) for path in leaves for row in rows_of(path)]
        found = self._of_layers(units) if self.split is None else self._chosen(units)
        if empty := sorted(set(range(self.fragments)) - set(found)):
            raise ValueError(
                f"fragments={self.fragments}, but no leaf is left for fragment {empty[0]}: use "
                "fewer, or give Streaming split= a function of a leaf's key path, or stacked= a "
                "pattern of leaves that hold layers along their first axis (islands take neither). "
                f"The paths are {[*leaves]}"
            )
        of_rows: dict[str, list[int]] = {path: [] for path in leaves}
        for (path, _), fragment in zip(units, found):
            of_rows[path].append(fragment)
        result: list[dict[str, Rows]] = [{} for _ in range(self.fragments)]
        for path, own in of_rows.items():
            for fragment in {*own}:
                rows = np.flatnonzero(np.equal(own, fragment))
                result[fragment][path] = _as_slice(rows) if len(rows) < len(own) else None
        return result

    def places(self, params: Any, without: str | None = None) -> list[dict[int, Rows]]:
        """The places of each fragment's leaves among those of a tree, and its rows of each.

        Leaves whose key path contains `without` belong to none.
        """
        shapes = {keystr(path): jnp.shape(x) for path, x in tree_flatten_with_path(params)[0]}
        of = {path: shape for path, shape in shapes.items() if not (without and without in path)}
        return [{i: own[p] for i, p in enumerate(shapes) if p in own} for own in self.of(of)]

    def _stacks(self, leaves: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """The number of rows of each stacked leaf."""
        pattern = self.stacked
        heights = {shape[0] for path, shape in leaves.items() if is_stack(path, shape, pattern)}
        if pattern not in (None, SCANNED) and not heights:
            raise ValueError(
                f"stacked={pattern!r} matches no leaf of three or more dimensions: the leaves are "
                f"{dict(leaves)}"
            )
        # A stack of matrices has a scale or bias for each layer beside it.
        return {
            path: shape[0]
            for path, shape in leaves.items()
            if pattern is not None
            and shape[:1]
            and shape[0] in heights
            and re.search(pattern, path)
        }

    def _chosen(self, units: Sequence[tuple[str, int | None]]) -> list[int]:
        choose: Any = self.split
        paths = [path if row is None else f"{path}[{row}]" for path, row in units]
        found = [choose(path) for path in paths]
        for path, fragment in zip(paths, found):
            if isinstance(fragment, bool) or fragment not in range(self.fragments):
                raise ValueError(
                    f"split gives {fragment!r} for leaf{path}: give a whole number from 0 to "
                    f"{self.fragments - 1}"
                )
        return [int(fragment) for fragment in found]

    def _of_layers(self, units: Sequence[tuple[str, int | None]]) -> list[int]:
        paths = [path for path, _ in units]
        pairs = zip(min(paths), max(paths))
        common = "".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        start = len(common.rstrip("0123456789"))
        # A row's layer is the row, within the number of its path if that has one.
        numbers = [_NUMBER.search(path, start) for path in paths]
        layers = [
            tuple(n for n in (number and int(number[0]), row) if n is not None)
            for number, (_, row) in zip(numbers, units)
        ]
        first = 1 if () in layers and self.fragments > 1 else 0
        dealt = {
            layer: first + i % (self.fragments - first)
            for i, layer in enumerate(sorted({*layers} - {()}))
        }
        return [dealt.get(layer, 0) for layer in layers]


def _as_slice(rows: np.ndarray) -> slice | np.ndarray:
    """Rows as a slice, if they are evenly spaced."""
    steps = np.unique(np.diff(rows))
    if len(steps) > 1:
        return rows
    return slice(int(rows[0]), int(rows[-1]) + 1, int(steps[0]) if len(steps) else 1)
