"""What the methods reached and sent: a table, a figure and JSON."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import EngFormatter
from rich import box
from rich.table import Table


class Run(NamedTuple):
    """One method, trained once for each seed."""

    steps: np.ndarray  # int[points]: when the curves were measured
    held_out: np.ndarray  # float[seeds, points], nats a byte
    rate: float  # of those that were tried
    tried: dict[str, float]  # the first seed's last loss, by rate
    payload: float  # bytes that a worker hands over, mean over steps
    received: float  # and that it receives
    seconds: float  # median over steps


def table(runs: dict[str, Run], workers: int) -> Table:
    steps = max(run.steps[-1] for run in runs.values())
    result = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
        caption=f"Held-out loss in nats a byte after {steps} steps, {workers} workers. "
        "\nBytes: what a worker hands over and receives, mean over steps, as traced.",
        caption_justify="left",
    )
    result.add_column("method", no_wrap=True)
    for head in ("loss", "rate", "sent B", "less", "received B"):
        result.add_column(head, justify="right", no_wrap=True)
    dense = runs.get("dense")
    for name, run in runs.items():
        losses = run.held_out[:, -1]
        spread = f" ±{losses.std(ddof=1):.3f}" if len(losses) > 1 else ""
        result.add_row(
            name,
            f"{losses.mean():.3f}{spread}",
            f"{run.rate:g}",
            f"{run.payload:,.0f}",
            f"{dense.payload / run.payload:,.0f}x" if dense else "",
            f"{run.received:,.0f}",
        )
    return result


def save_json(runs: dict[str, Run], settings: dict[str, Any], path: Path) -> None:
    methods = {
        name: {
            "steps": run.steps.tolist(),
            "held_out": run.held_out.tolist(),
            "rate": run.rate,
            "tried": run.tried,
            "payload_bytes_a_step": run.payload,
            "received_bytes_a_step": run.received,
            "seconds_a_step": run.seconds,
        }
        for name, run in runs.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"settings": settings, "methods": methods}, indent=1, default=str))


def load(paths: list[Path]) -> dict[str, Run]:
    """The runs that `save_json` wrote."""
    return {
        name: Run(
            np.array(found["steps"]),
            np.array(found["held_out"]),
            found["rate"],
            found["tried"],
            found["payload_bytes_a_step"],
            found["received_bytes_a_step"],
            found["seconds_a_step"],
        )
        for path in paths
        for name, found in json.loads(path.read_text())["methods"].items()
    }


def save_figure(runs: dict[str, Run], path: Path) -> None:
    figure, (by_step, by_bytes) = plt.subplots(1, 2, figsize=(11, 5), sharey=True)
    styles = ("-", "--", ":", "-.")
    for i, (name, run) in enumerate(runs.items()):
        for ax, x in ((by_step, run.steps), (by_bytes, run.steps * run.received)):
            mean, low, high = (f(run.held_out, axis=0) for f in (np.mean, np.min, np.max))
            (line,) = ax.plot(x, mean, styles[i // 10 % 4], label=name)
            ax.fill_between(x, low, high, alpha=0.2, color=line.get_color())
    by_step.set(xlabel="steps", ylabel="held-out loss, nats a byte")
    by_bytes.set(xlabel="bytes that each worker has received", xscale="log")
    by_bytes.xaxis.set_major_formatter(EngFormatter("B"))
    for ax in (by_step, by_bytes):
        ax.grid(alpha=0.3)
    by_bytes.legend(fontsize="x-small")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
