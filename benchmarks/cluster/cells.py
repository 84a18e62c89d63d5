"""Cells of the tables, each of which is one measurement, and the reducers that they measure."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from jaxsparse.reducers.base import Budget
from jaxsparse.systems import WITH_VARIANTS, choose
from jaxsparse.systems.ok_topk import OkTopk
from jaxsparse.systems.sketched_sgd import SketchedSGD
from jaxsparse.systems.sparcml import SparCML

# Systems that make sense on dense gradients. sketched_sgd:40 is sketched_sgd at compression 40.
EVERY = (
    *(name for name in WITH_VARIANTS if name != "true_top_k"),
    "sketched_sgd:40",
)
# Systems of the research code in summary.PEERS, also with 4 bytes an entry.
PEERS = (
    *("dense", "spardl", "spardl_packed", "ok_topk", "ok_topk_packed", "ok_topk_packed:1.5"),
    *("top_k", "top_k_packed"),
)
_SPARCML = ("recursive_double", "split_allgather", "dsar_split_allgather", "all_gather", "ring")
SPARCML = ("dense", *(f"sparcml:{name}" for name in _SPARCML))


class Cell(NamedTuple):
    """One measurement."""

    what: str  # "exchange" of one vector, or "step" of a training run
    system: str  # a key of `systems.WITH_VARIANTS`, or one with a setting after a colon
    params: int  # elements, or parameters of the model
    density: float


def budget(cell: Cell, workers: int) -> Budget:
    """The reducer of a cell, or the budget that makes the reducers of a whole tree.

    Programs are compiled before any rate is known, so `sparcml` without a setting runs the
    algorithm that suits a `planner.Link()`, whatever the rate. Systems of `SPARCML` name one each.

    Raises:
        ValueError: the system is unknown, or can't be used like this.
    """
    name, _, setting = cell.system.partition(":")
    if not setting:
        return choose(name, cell.density, size=cell.params, workers=workers).budget
    if name == "sparcml":
        usual = choose("sparcml", cell.density, size=cell.params, workers=workers).budget
        assert isinstance(usual, SparCML)
        # The names are checked by the reducer.
        return SparCML(usual.k, usual.group_size, algorithm=setting)  # type: ignore[arg-type]
    if name in ("sketched_sgd", "ok_topk", "ok_topk_packed"):
        try:
            number = float(setting)
        except ValueError:
            raise ValueError(
                f"system {cell.system!r}: {setting!r} is no number; write sketched_sgd:25 for a "
                "compression, ok_topk:1 for a capacity_factor"
            ) from None
        if name == "sketched_sgd":
            return SketchedSGD(number)
        usual = choose(name, cell.density, size=cell.params, workers=workers).budget
        assert isinstance(usual, OkTopk)
        return dataclasses.replace(usual, capacity_factor=number)
    raise ValueError(
        f"system {cell.system!r} is unknown: only sketched_sgd:COMPRESSION, "
        "ok_topk:CAPACITY_FACTOR and sparcml:ALGORITHM have a setting in their names"
    )


def is_fixed(system: str) -> bool:
    """Whether the system sends the same at all densities."""
    name, _, setting = system.partition(":")
    return not WITH_VARIANTS[name].follows_density or (name == "sketched_sgd" and bool(setting))


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
