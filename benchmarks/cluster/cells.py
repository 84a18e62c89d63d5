"""Cells of the tables, each of which is one measurement, and the reducers that they measure."""

import dataclasses
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxsparse.contrib.ok_topk import OkTopk
from jaxsparse.quantize import Format
from jaxsparse.reducers import Quantized
from jaxsparse.reducers.base import Reducer
from jaxsparse.reducers.s2_reducer import S2
from jaxsparse.reducers.sketched_sgd import SketchedSGD
from jaxsparse.reducers.sparcml import SparCML
from jaxsparse.reducers.spardl import SparDL

sys.path.append(str(Path(__file__).parents[2] / "tests"))
import at_density

# Systems that make sense on dense gradients. sketched_sgd:40 is sketched_sgd at compression 40.
EVERY = (
    *(name for name in at_density.NAMES if name != "true_top_k"),
    "sketched_sgd:40",
)
# Systems of the research code in results/time.md, also with 4 bytes an entry.
PEERS = (
    *("dense", "spardl", "spardl_packed", "ok_topk", "ok_topk_packed", "ok_topk_packed:1.5"),
    *("top_k", "top_k_packed"),
)
_SPARCML = ("recursive_double", "split_allgather", "dsar_split_allgather", "all_gather", "ring")
# Beside them, all values in 32 and in 4 bits, and as many values drawn at random.
SPARCML = (
    *("dense", "qsgd", "random_k", *(f"sparcml:{name}" for name in _SPARCML)),
    "sparcml:dsar_split_allgather:4",
)


class Cell(NamedTuple):
    """One measurement."""

    what: str  # "exchange", of one vector
    system: str  # one of `at_density.NAMES`, or one with settings after colons
    params: int  # elements
    density: float


def budget(cell: Cell, workers: int) -> Reducer:
    """The reducer of a cell.

    Programs are compiled before any rate is known, so `sparcml` without a setting runs the
    algorithm that suits a `jaxsparse.Link()`. Systems of `SPARCML` name one each.

    Raises:
        ValueError: the system is unknown, or can't be used like this.
    """
    name, *settings = cell.system.split(":")
    if name == "sketched_sgd" and settings:
        return SketchedSGD(float(settings[0]))
    if name in at_density.NAMES:
        usual: Any = at_density.budget_at(name, cell.density, cell.params)
        way, bits = [*settings, ""][:2] if settings else ("", "")
        if not settings:
            return usual
        if isinstance(usual, OkTopk):
            return dataclasses.replace(usual, capacity_factor=float(way))
        if isinstance(usual, Quantized) and name == "quantized":
            return dataclasses.replace(usual, quantizer=Format(way))  # type: ignore[arg-type]
        if isinstance(usual, S2):
            sizing: Any = way
            return dataclasses.replace(usual, sizing=sizing)
        if isinstance(usual, SparCML):
            more: Any = {"algorithm": way, "bits": int(bits) if bits else None}
            return SparCML(usual.k, usual.group_size, **more)
        if isinstance(usual, SparDL):
            gather: Any = bits
            if workers % int(way):
                raise ValueError(f"system {cell.system!r}: {way} teams do not divide {workers}")
            return dataclasses.replace(usual, teams=int(way), gather=gather)
    raise ValueError(
        f"system {cell.system!r} is unknown: only sketched_sgd:COMPRESSION, "
        "ok_topk:CAPACITY_FACTOR, quantized:FORMAT, s2_reducer:SIZING, sparcml:ALGORITHM[:BITS] "
        "and spardl:TEAMS:GATHER have settings in their names"
    )


def teams(workers: int) -> tuple[str, ...]:
    """SparDL with each number of teams that divides the workers, beside what needs no teams."""
    several = [n for n in range(2, workers + 1) if workers % n == 0]
    return (
        *("dense", "random_k", "top_k_packed", "ok_topk_packed:1.5", "spardl_packed"),
        *(f"spardl_packed:{n}:bruck" for n in several),
        *(f"spardl_packed:{n}:recursive" for n in several if n & (n - 1) == 0),
    )


def is_fixed(system: str) -> bool:
    """Whether the system sends the same at all densities."""
    name, _, setting = system.partition(":")
    if name == "sketched_sgd" and setting:
        return True
    some, others = (at_density.settings_at(name, density, 10**6) for density in (0.01, 0.02))
    return some == others


def grid(
    systems: Sequence[str], params: Sequence[int], densities: Sequence[float], workers: int
) -> tuple[list[Cell], dict[str, str]]:
    """The possible combinations, and the reasons why the others are not possible.

    A system that ignores the density is measured once, at the first.
    """
    cells, refused = [], {}
    for size, density, system in itertools.product(params, densities, systems):
        cell = Cell("exchange", system, size, density)
        try:
            budget(cell, workers).split((size,))
        except ValueError as error:
            refused[f"{system}, {size} elements, density {density:g}"] = str(error)
            continue
        if density == densities[0] or not is_fixed(system):
            cells.append(cell)
    return cells, refused
