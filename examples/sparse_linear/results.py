"""Results as a table for the terminal, as Markdown, as JSON and as a figure."""

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
    """One model trained with one exchange."""

    model: str
    exchange: str
    steps: np.ndarray  # int[points]: steps at which the curves were measured
    loss: np.ndarray  # float[points]: mean over the steps since the last point
    accuracy: float  # on the test set, at the end
    payload: int  # bytes that a worker hands to collectives in one step
    received: float  # bytes that arrive at a worker in one step
    seconds: float  # median time of a step. Devices that share a processor say nothing by it
    weights: np.ndarray  # float32[d], at the end


HEAD = ("model", "exchange", "loss", "test", "payload kB", "received kB", "of dense", "max Δw")
TIMED = (*HEAD, "ms a step")


def rows(runs: list[Run], head: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The table's rows below `HEAD` or `TIMED`. "of dense" and "Δw" are against the dense run."""
    dense = {run.model: run for run in runs if run.exchange == "dense"}
    found: list[tuple[str, ...]] = []
    for run in runs:
        base = dense.get(run.model)
        share = f"{run.received / base.received:.3f}" if base and base.received else "-"
        differs = f"{np.abs(run.weights - base.weights).max():.0e}" if base else "-"
        found.append(
            (
                run.model,
                run.exchange,
                f"{run.loss[-1]:.3f}",
                f"{100 * run.accuracy:.1f} %",
                f"{run.payload / 1000:,.0f}",
                f"{run.received / 1000:,.0f}",
                share,
                differs,
                f"{1000 * run.seconds:.1f}",
            )[: len(head)]
        )
    return found


def table(runs: list[Run], head: tuple[str, ...]) -> Table:
    result = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for i, column in enumerate(head):
        result.add_column(column, justify="left" if i < 2 else "right", no_wrap=i < 2)
    for row in rows(runs, head):
        result.add_row(*row)
    return result


def markdown(runs: list[Run], head: tuple[str, ...]) -> str:
    lines = [head, ("---",) * 2 + ("---:",) * (len(head) - 2), *rows(runs, head)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def save(
    runs: list[Run],
    head: tuple[str, ...],
    title: str,
    caption: str,
    settings: dict[str, Any],
    folder: Path,
) -> None:
    """Writes results.md, results.json and loss.png."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.md").write_text(f"{title}\n\n{markdown(runs, head)}\n\n{caption}\n")
    numbers = [
        {
            "model": run.model,
            "exchange": run.exchange,
            "steps": run.steps.tolist(),
            "loss": run.loss.tolist(),
            "test_accuracy": run.accuracy,
            "payload_bytes": run.payload,
            "received_bytes": run.received,
            "seconds_per_step": run.seconds,
        }
        for run in runs
    ]
    content = json.dumps({"settings": settings, "runs": numbers}, indent=2, default=str)
    (folder / "results.json").write_text(content)
    _save_figure(runs, folder / "loss.png")


def _save_figure(runs: list[Run], path: Path) -> None:
    models = list(dict.fromkeys(run.model for run in runs))
    figure, axes = plt.subplots(
        1, len(models), figsize=(5 * len(models), 4), squeeze=False, layout="constrained"
    )
    for ax, model in zip(axes[0], models):
        shown = [run for run in runs if run.model == model]
        # Curves of equal bytes lie on top of each other, so later ones are thinner.
        for run, width in zip(shown, np.linspace(6, 1, len(shown))):
            # On average workers send as many bytes as they receive, so the label can say "sent".
            ax.plot(run.steps * run.received, run.loss, label=run.exchange, linewidth=width)
        ax.set(title=model, xlabel="sent by each worker so far", ylabel="train loss")
        if all(run.received for run in runs):
            ax.set_xscale("log")
        ax.xaxis.set_major_formatter(EngFormatter("B"))
        ax.grid(alpha=0.3)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.savefig(path, dpi=110)
    plt.close(figure)
