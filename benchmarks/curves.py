"""Curves of training runs, read from JSON, their seconds over links, and tables of both."""

import itertools
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich import box
from rich.table import Table


class Curve(NamedTuple):
    """The curve of one training. Its arrays have a value for each point that was measured."""

    steps: np.ndarray  # int[points]
    seconds: np.ndarray  # float[points]: training, without compiling and evaluating
    held_out: np.ndarray  # float[points]: loss in nats a byte


class Run(NamedTuple):
    """One method, trained once for each seed."""

    curves: dict[int, Curve]  # by seed
    rates: str  # the best of the learning rates that were tried
    tried: dict[str, float]  # the last loss of the first seed, by learning rates
    payload: float  # bytes that a worker hands to collectives, mean over steps
    received: float  # bytes that a worker receives, mean over steps

    @property
    def ends(self) -> np.ndarray:
        """The last losses in nats a byte, float[seeds]."""
        return np.array([curve.held_out[-1] for curve in self.curves.values()])

    @property
    def held_out(self) -> np.ndarray:
        """The losses in nats a byte of curves with equal steps, float[seeds, points]."""
        return np.array([curve.held_out for curve in self.curves.values()])

    @property
    def steps(self) -> np.ndarray:
        """The steps at which all seeds were measured, int[points]."""
        return next(iter(self.curves.values())).steps


def over_measured(
    runs: dict[str, Run], exchanges: dict[str, tuple[str, int]], path: Path, step_seconds: float
) -> dict[str, dict[str, Run]]:
    """The runs, timed with measured exchanges. The network's part grows in proportion to bytes.

    Args:
        runs: runs of any workers, simulated ones included.
        exchanges: for each run, the system that exchanges, and the steps between exchanges.
        path: JSON file of benchmarks/cluster/run.py, with exchanges of one vector. If it has
            several of one system (at several densities), the one closest in bytes counts.
        step_seconds: seconds of computing in one step, without the exchange.

    Returns:
        The runs whose system was measured, by rate of the links.
    """
    rows = json.loads(path.read_text())["rows"]
    found: dict[str, dict[str, Run]] = {rate: {} for rate in dict.fromkeys(r["rate"] for r in rows)}
    for rate, (name, run) in itertools.product(found, runs.items()):
        system, every = exchanges[name]
        moved = every * run.received
        known = [row for row in rows if (row["rate"], row["system"]) == (rate, system)]
        if known:
            row = min(known, key=lambda row: abs(math.log(row["received_bytes"] / moved)))
            computing = min(row["computing_seconds"], row["seconds"])
            network = (row["seconds"] - computing) * moved / row["received_bytes"]
            found[rate][name] = _timed(run, step_seconds + (computing + network) / every)
    return found


def _timed(run: Run, step_seconds: float) -> Run:
    return run._replace(
        curves={s: c._replace(seconds=c.steps * step_seconds) for s, c in run.curves.items()}
    )


def _table(heads: tuple[str, ...], caption: str) -> Table:
    style: Any = {"box": box.SIMPLE_HEAD, "show_edge": False, "pad_edge": False}
    result = Table(**style, collapse_padding=True, caption=caption, caption_justify="left")
    result.add_column("method", no_wrap=True)
    for head in heads:
        result.add_column(head, justify="right", no_wrap=True)
    return result


def table(runs: dict[str, Run], workers: int) -> Table:
    steps = max(curve.steps[-1] for run in runs.values() for curve in run.curves.values())
    result = _table(
        ("loss", "rate", "sent B", "less", "received B"),
        f"Held-out loss in nats a byte after {steps} steps, {workers} workers. "
        "\nBytes: what a worker hands over and receives, mean over steps, as traced.",
    )
    dense = runs.get("dense")
    for name, run in runs.items():
        losses = run.ends
        spread = f" ±{losses.std(ddof=1):.3f}" if len(losses) > 1 else ""
        result.add_row(
            name,
            f"{losses.mean():.3f}{spread}",
            run.rates,
            f"{run.payload:,.0f}",
            f"{dense.payload / run.payload:,.0f}x" if dense else "",
            f"{run.received:,.0f}",
        )
    return result


def times(runs: dict[str, Run], goals: list[float]) -> Table:
    """A table of seconds and steps to held-out losses: means over seeds, if all reach them."""
    result = _table(
        (*map(str, goals), "end"),
        "Seconds of training until the held-out loss is so low, and (steps); "
        "the last column is of all steps.",
    )
    for name, run in runs.items():
        cells = []
        for goal in goals:
            curves = run.curves.values()
            points = [np.flatnonzero(curve.held_out <= goal) for curve in curves]
            if all(map(len, points)):
                first = [p[0] for p in points]
                seconds = np.mean([c.seconds[i] for c, i in zip(curves, first, strict=True)])
                steps = np.mean([c.steps[i] for c, i in zip(curves, first, strict=True)])
                cells.append(f"{seconds:.0f} ({steps:.0f})")
            else:
                cells.append("-")
        end = np.mean([curve.seconds[-1] for curve in run.curves.values()])
        result.add_row(name, *cells, f"{end:.0f} ({run.ends.mean():.2f} nats)")
    return result


def load(paths: list[Path]) -> dict[str, Run]:
    """The runs in files. The seeds of several files are put together."""
    runs: dict[str, Run] = {}
    for path in paths:
        for name, found in json.loads(path.read_text())["methods"].items():
            curves = {
                int(seed): Curve(**{key: np.array(x) for key, x in curve.items()})
                for seed, curve in found["seeds"].items()
            }
            earlier = runs.get(name)
            runs[name] = Run(
                curves | (earlier.curves if earlier else {}),
                found["rates"],
                (earlier.tried if earlier else {}) | found["tried"],
                found["payload_bytes_a_step"],
                found["received_bytes_a_step"],
            )
    return runs
