"""Seconds until a held-out loss is reached over slow links, by recipes of `frontier.py`.

Runs are planned for 1,500 steps, and end once the loss of 1.4 nats a byte is reached, or once they
are longer than one of another rate that has reached it. A recipe's rate is tuned by the rule of all
benchmarks, for the fewest steps, on the first seed. Runs are lines of `time_to_loss.jsonl`, and
none is done twice. Several can share the file, if each has recipes of its own.

The table takes exchanges as `cluster/run.py` measured them among emulated hosts, and does not
overlap them. A step's computing counts 0.1 s, and one of Muon 0.17, a little more than it took
beside AdamW's on two cores.

    python benchmarks/time_to_loss.py --recipes "muon, local 10, sign"
    python benchmarks/time_to_loss.py --show
"""

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np
import timing
from curves import Curve, Run, over_measured, times
from frontier import SIZES, Trainer
from rates import tuned
from recipes import EXCHANGES, Recipe

from jaxsparse.traffic import traced_bytes

FOLDER = Path(__file__).parent
FILE = FOLDER / "time_to_loss.jsonl"
MEASURED = FOLDER / "results/local_updates/exchanges_10.9m.json"
UNTIL, STEPS, EVAL_EVERY = 1.4, 1500, 20
SETTING = {"size": "10.9m", "until": UNTIL, "planned": STEPS, "eval_every": EVAL_EVERY}
SIZE = SIZES["10.9m"]
SECONDS = {"adamw": 0.1, "muon": 0.17}  # of a step's computing


def train(recipe: Recipe, args: argparse.Namespace) -> None:
    """Finds the rate that reaches the loss in the fewest steps, then runs all seeds.

    Raises:
        ValueError: the recipe has a warm start, whose exchanges would not be counted.
    """
    if recipe.warm:
        raise ValueError(f"recipe {recipe}: warm starts are not counted here, so take one without")
    trainer = Trainer(recipe, SIZE)

    def run(rate: float, seed: int, limit: float) -> float:
        """Steps to the loss. Infinite: not reached, or not in so many steps."""
        key = {"recipe": str(recipe), **SETTING, "rate": rate, "seed": seed}
        for line in timing.lines_in(FILE):
            if key.items() <= line.items():
                return line["steps"][-1] if line["held_out"][-1] <= UNTIL else math.inf

        def stops(done: int, held_out: float) -> bool:
            print(f"{recipe}: rate {rate:g}, seed {seed}: {held_out:.4f} after {done}", flush=True)
            return held_out <= UNTIL or done >= limit or math.isnan(held_out)

        curve = trainer.run(rate, seed, STEPS, EVAL_EVERY, stops)
        timing.add_line(FILE, **key, **curve._asdict())
        return curve.steps[-1] if curve.held_out[-1] <= UNTIL else math.inf

    first, *others = args.seeds
    fewest = math.inf

    def steps_to(rate: float) -> float:
        nonlocal fewest
        found = run(rate, first, fewest)
        fewest = min(fewest, found)
        return found

    steps_to(args.rate)  # before those beside it, because it limits them
    best = tuned(steps_to, args.rate)
    for seed in others:
        run(best, seed, math.inf)


def reached() -> tuple[dict[str, Any], dict[str, tuple[str, int]]]:
    """For each recipe all runs at the rate that is the first to reach the loss on the first seed.

    The second part has what exchanges, and how often.
    """
    curves: dict[str, dict[float, dict[int, Any]]] = {}
    for line in timing.lines_in(FILE):
        if SETTING.items() <= line.items():
            steps, losses = np.array(line["steps"]), np.array(line["held_out"])
            by_seed = curves.setdefault(line["recipe"], {}).setdefault(line["rate"], {})
            by_seed[line["seed"]] = Curve(steps, np.zeros(len(steps)), losses)
    runs, exchanges = {}, {}
    for name, by_rate in curves.items():
        firsts = {rate: next(iter(by_seed.values())) for rate, by_seed in by_rate.items()}
        ends = {rate: x.steps[-1] for rate, x in firsts.items() if x.held_out[-1] <= UNTIL}
        if not ends:
            continue
        rate = min(ends, key=ends.__getitem__)
        recipe = Recipe.parsed(name)
        exchange = EXCHANGES[recipe.exchange]
        moved = traced_bytes(exchange.transformation(), SIZE.shapes, SIZE.workers)
        sent, received = (x / recipe.every for x in (moved.payload, moved.received))
        runs[name] = Run(by_rate[rate], f"{rate:g}", sent, received)
        format_ = exchange.settings.get("format")
        system = exchange.system if format_ is None else f"{exchange.system}:{format_}"
        exchanges[name] = system, recipe.every
    return runs, exchanges


def show() -> None:
    """Prints steps and seconds of all recipes that reached the loss."""
    runs, exchanges = reached()
    dense = traced_bytes(EXCHANGES["dense"].transformation(), SIZE.shapes, SIZE.workers)
    for name, run in runs.items():
        sent, received = dense.payload / run.payload, dense.received / run.received
        print(f"{name}: rate {run.rates}, {sent:.0f}x fewer bytes sent, {received:.0f}x received")
    for optimizer, seconds in SECONDS.items():
        some = {name: run for name, run in runs.items() if name.startswith(optimizer)}
        for rate, timed in over_measured(some, exchanges, MEASURED, seconds).items():
            if timed:
                print(f"\nExchanges as measured at {rate}, {seconds:g} s a step:")
                print(times(timed, UNTIL))


def main() -> None:
    parser = timing.parser_of(__doc__)
    add = parser.add_argument
    add("--recipes", nargs="+", default=[], help="names, as in frontier.py")
    add("--rate", type=float, default=0.002, help="where the search begins")
    add("--seeds", type=int, nargs="+", default=[0])
    add("--show", action="store_true", help="print the table of runs that reached the loss")
    args = parser.parse_args()
    for name in args.recipes:
        train(Recipe.parsed(name), args)
    if args.show:
        show()


if __name__ == "__main__":
    main()
