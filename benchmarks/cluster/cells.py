"""Cells of the tables, each of which is one measurement, and the reducers that they measure."""

import dataclasses
import importlib
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxsparse.quantize import Format
from jaxsparse.reducers.base import Reducer
from jaxsparse.systems import Quantized
from jaxsparse.systems.ok_topk import OkTopk
from jaxsparse.systems.sketched_sgd import SketchedSGD
from jaxsparse.systems.sparcml import SparCML
from jaxsparse.systems.spardl import SparDL

sys.path.append(str(Path(__file__).parents[2] / "tests"))
at_density: Any = importlib.import_module("at_density")

# Systems that make sense on dense gradients. sketched_sgd:40 is sketched_sgd at compression 40.
EVERY = (
    *(name for name in at_density.NAMES if name != "true_top_k"),
    "sketched_sgd:40",
)
# Systems of the research code in summary.PEERS, also with 4 bytes an entry.
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

    what: str  # "exchange" of one vector, or "step" of a training run
    system: str  # one of `at_density.NAMES`, or one with settings after colons
    params: int  # elements, or parameters of the model
    density: float


def budget(cell: Cell, workers: int) -> Reducer:
    """The reducer of a cell, or the budget that makes the reducers of a whole tree.

    Programs are compiled before any rate is known, so `sparcml` without a setting runs the
    algorithm that suits a `jaxsparse.Link()`. Systems of `SPARCML` name one each.

    Raises:
        ValueError: the system is unknown, or can't be used like this.
    """
    name, *settings = cell.system.split(":")
    if name == "sketched_sgd" and settings:
        return SketchedSGD(_number(cell, settings))
    if name in at_density.NAMES:
        usual = at_density.budget_at(name, cell.density, cell.params)
        if not settings:
            return usual
        if isinstance(usual, OkTopk):
            return dataclasses.replace(usual, capacity_factor=_number(cell, settings))
        if isinstance(usual, Quantized) and name == "quantized":
            try:
                return dataclasses.replace(usual, quantizer=Format(":".join(settings)))  # type: ignore[arg-type]
            except ValueError as error:
                raise ValueError(f"system {cell.system!r}: {error}") from None
        # The names of ways are checked by the reducers.
        if isinstance(usual, SparCML):
            way, bits = [*settings, ""][:2]
            return SparCML(
                usual.k,
                usual.group_size,
                algorithm=way,  # type: ignore[arg-type]
                bits=int(bits) if bits else None,  # type: ignore[arg-type]
            )
        if isinstance(usual, SparDL):
            teams, way = [*settings, ""][:2]
            if not teams.isdecimal() or not int(teams) or workers % int(teams):
                raise ValueError(
                    f"system {cell.system!r}: {teams!r} is no number of teams that divides "
                    f"{workers} hosts"
                )
            return dataclasses.replace(usual, teams=int(teams), gather=way)  # type: ignore[arg-type]
    raise ValueError(
        f"system {cell.system!r} is unknown: only sketched_sgd:COMPRESSION, "
        "ok_topk:CAPACITY_FACTOR, quantized:FORMAT, sparcml:ALGORITHM[:BITS] and "
        "spardl:TEAMS:GATHER have settings in their names"
    )


def _number(cell: Cell, settings: Sequence[str]) -> float:
    text = ":".join(settings)
    try:
        return float(text)
    except ValueError:
        raise ValueError(
            f"system {cell.system!r}: {text!r} is no number; write sketched_sgd:25 for a "
            "compression, ok_topk:1 for a capacity_factor"
        ) from None


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
    return name in at_density.FIXED or (name == "sketched_sgd" and bool(setting))


def grid(
    what: Sequence[str],
    systems: Sequence[str],
    params: Sequence[int],
    densities: Sequence[float],
    workers: int,
) -> tuple[list[Cell], dict[str, str]]:
    """The possible combinations, and the reasons why the others are not possible.

    A system that ignores the density is measured once, at the first.
    """
    cells, refused = [], {}
    for kind, size, density in itertools.product(what, params, densities):
        for system in systems:
            cell = Cell(kind, system, size, density)
            try:
                budget(cell, workers).split((size,))
            except ValueError as error:
                refused[f"{system}, {size} parameters, density {density:g}"] = str(error)
                continue
            if density == densities[0] or not is_fixed(system):
                cells.append(cell)
    return cells, refused
