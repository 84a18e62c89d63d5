"""Curves of training runs, read from JSON, and their seconds over links."""

import itertools
import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxsparse.arrays.printing import aligned


class Curve(NamedTuple):
    """The curve of one training. Its arrays have a value for each point that was measured."""

    steps: np.ndarray  # int[points]
    seconds: np.ndarray  # float[points]: training, without compiling and evaluating
    held_out: np.ndarray  # float[points]: loss in nats a byte


class Run(NamedTuple):
    """One method, trained once for each seed."""

    curves: dict[int, Curve]  # by seed
    rates: str  # the best of the learning rates that were tried
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


def times(runs: dict[str, Run], goal: float) -> str:
    """A table of seconds and steps to a held-out loss: means over seeds, if all reach it."""
    rows: list[tuple[str, ...]] = [("method", f"s to {goal:g}", "steps")]
    for name, run in runs.items():
        curves = run.curves.values()
        points = [np.flatnonzero(curve.held_out <= goal) for curve in curves]
        cells = ["-", "-"]
        if all(map(len, points)):
            first = [(c.seconds[p[0]], c.steps[p[0]]) for c, p in zip(curves, points, strict=True)]
            cells = [f"{x:.0f}" for x in np.mean(first, axis=0)]
        rows.append((name, *cells))
    return "\n".join(aligned(rows, right=(1, 2)))


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
                found["payload_bytes_a_step"],
                found["received_bytes_a_step"],
            )
    return runs
