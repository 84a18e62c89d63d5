"""The map of what `frontier.py` trained: losses, bytes, and what dominates what.

Bytes are those of each exchange's collectives, traced for 2, 4, 8 and 20 workers. `--export FILE`
writes how runs ended: the costs of `jaxsparse.planner.recipes.RECIPES` are from there.

    python benchmarks/frontier_map.py
    python benchmarks/frontier_map.py --steps 600
    python benchmarks/frontier_map.py --export benchmarks/results/recipes.json
    python benchmarks/frontier_map.py --outer
"""

import argparse
import functools
from pathlib import Path
from typing import NamedTuple

import numpy as np
import timing
from frontier import SIZES, Results, Size
from recipes import EXCHANGES, NESTEROV, End, Recipe

from jaxsparse.traffic import traced_bytes

COUNTED = (2, 4, 8, 20)  # workers
SHORT = 600  # steps of the shorter runs that are exported, too


class Row(NamedTuple):
    """A recipe's rate, whether that was tuned, losses by seed, and bytes of a run."""

    recipe: Recipe
    rate: float
    is_tuned: bool
    losses: dict[int, float]
    sent: float
    received: list[float]  # for each of COUNTED
    usual: float  # the same for as many workers as trained

    @property
    def loss(self) -> float:
        return float(np.mean(list(self.losses.values())))


@functools.cache
def moved(exchange: str, size: Size) -> tuple[float, list[float]]:
    """Payload of one exchange, and received bytes for each of COUNTED, of a worker."""
    tx = EXCHANGES[exchange].transformation()
    found = {w: traced_bytes(tx, size.shapes, w) for w in COUNTED}
    return found[size.workers].payload, [x.received for x in found.values()]


def rows(results: Results, steps: int, size: Size) -> list[Row]:
    """All recipes with runs of so many steps."""
    found = []
    for name in dict.fromkeys(line["recipe"] for line in results.lines()):
        recipe = Recipe.parsed(name)
        runs = results.runs(recipe, steps)
        if not runs:
            continue
        # Where none was tuned, a rate with one seed says less than one with all.
        ends: dict[float, list[float]] = {}
        for (rate, _), losses in runs.items():
            ends.setdefault(rate, []).append(losses[-1])
        most = min(ends, key=lambda rate: (-len(ends[rate]), np.mean(ends[rate])))
        tuned = results.tuned_rate(recipe, steps)
        is_tuned = tuned in ends
        best = tuned if tuned in ends else most
        turns, (sent, received) = recipe.exchanges(steps), moved(recipe.exchange, size)
        found.append(
            Row(
                recipe,
                best,
                is_tuned,
                {seed: x[-1] for (rate, seed), x in sorted(runs.items()) if rate == best},
                turns * sent,
                [turns * x for x in received],
                turns * received[COUNTED.index(size.workers)],
            )
        )
    return found


def above(row: Row, other: Row) -> tuple[float, str]:
    """The mean difference of two recipes on equal seeds, and its spread in words."""
    mean, spread = End(row.rate, row.losses).above(End(other.rate, other.losses))
    return mean, "" if spread is None else f" ± {spread:.3f}"


def undominated(points: list[tuple[float, float]]) -> list[int]:
    """The points than which none has both numbers smaller, in the order of the first number."""
    found: list[int] = []
    for i in sorted(range(len(points)), key=lambda i: points[i]):
        if not found or points[i][1] < points[found[-1]][1]:
            found.append(i)
    return found


def dense_of(found: list[Row]) -> Row:
    """The row that all others are compared with."""
    return next(row for row in found if str(row.recipe) == "adamw, gradients, dense")


def export(found: list[Row], short: list[Row], args: argparse.Namespace) -> None:
    """Writes how recipes ended whose rates were tuned.

    Of shorter runs, it takes recipes that `found` has, too.
    """
    base, seeds = dense_of(found).loss, {len(row.losses) for row in found}
    counted = f"{min(seeds)} to {max(seeds)} seeds" if len(seeds) > 1 else f"{max(seeds)} seed"
    size = SIZES[args.size]
    setup = (
        "as benchmarks/frontier.py measured them: a byte-level transformer of "
        f"{size.parameters:,} parameters, {size.workers} workers, {args.steps:,} steps, "
        f"{counted}. Dense AdamW ends at {base:.3f}. Learning rates were tuned for each recipe, or "
        "for the same one in four bits."
    )
    known = {row.recipe for row in found}
    by_name = lambda some: {
        str(row.recipe): (row.rate, row.losses) for row in sorted(some, key=lambda x: str(x.recipe))
    }
    content = {"setup": setup, "steps": args.steps, "ends": by_name(found)}
    shorter = by_name(row for row in short if row.recipe in known)
    timing.save({**content, "shorter_steps": SHORT, "shorter": shorter}, args.export)


def show(found: list[Row]) -> None:
    dense = dense_of(found)
    heads = "loss", "above dense", "rate", "sent", "received W = 2, 4, 8, 20", "dominated by"
    print(timing.head("recipe", *heads))
    for row in sorted(found, key=lambda row: row.usual):
        more, spread = above(row, dense)
        better = [other for other in found if other.loss < row.loss and other.usual <= row.usual]
        by = min(better, key=lambda other: other.loss) if better else None
        note = "" if row.is_tuned else " (not tuned)"
        fewer = ", ".join(f"{a / b:.0f}x" for a, b in zip(dense.received, row.received))
        loss, above_dense = f"{row.loss:.3f} ({len(row.losses)})", f"{more:+.3f}{spread}"
        sent = f"{dense.sent / row.sent:.0f}x"
        cells = row.recipe, loss, above_dense, f"{row.rate:g}{note}", sent, fewer
        print(timing.row(*cells, by.recipe if by else ""))


def show_outer(size: str, steps: int) -> None:
    """What the rate and the momentum outside make of recipes, by their losses on seed 0."""
    path = Results(size, outer=(0.0, 0.0)).path  # of all others
    keys = {(line["recipe"], *line["outer"]) for line in timing.lines_in(path)}
    recipes = {recipe for recipe, *_ in keys}
    keys |= {(recipe, *NESTEROV) for recipe in recipes}
    print(timing.head("recipe", "outer rate", "momentum", "the best loss", "at rate", "others"))
    for recipe, *outer in sorted(keys):
        tried = Results(size, outer=tuple(outer)).tried(Recipe.parsed(recipe), steps)
        (best, loss), *more = sorted(tried.items(), key=lambda item: item[1])
        others = ", ".join(f"{x:.3f} at {rate:g}" for rate, x in sorted(more))
        numbers = (f"{x:g}" for x in outer)
        print(timing.row(recipe, *numbers, f"{loss:.3f}", f"{best:g}", others))


def main() -> None:
    parser = timing.parser_of(__doc__)
    add = parser.add_argument
    add("--size", choices=SIZES, default="136k", help="number of parameters")
    add("--steps", type=int, default=2000)
    add("--export", type=Path, help="write how recipes ended here")
    add("--outer", action="store_true", help="show what rate and momentum outside make, and end")
    args = parser.parse_args()
    if args.outer:
        show_outer(args.size, args.steps)
        return
    results = Results(args.size)
    found, short = (rows(results, steps, SIZES[args.size]) for steps in (args.steps, SHORT))
    show(found)
    if args.export is not None:
        tuned, of_short = ([row for row in some if row.is_tuned] for some in (found, short))
        export(tuned, of_short, args)


if __name__ == "__main__":
    main()
