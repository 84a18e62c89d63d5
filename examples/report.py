"""The quickstart's results: curves of each method, as a table, a figure, JSON and one sentence."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import EngFormatter, PercentFormatter
from rich import box
from rich.table import Table


class Run(NamedTuple):
    """One method, trained once for each seed."""

    steps: np.ndarray  # int[points]: steps at which the curves were measured
    train_loss: np.ndarray  # float[seeds, points]: mean over the steps since the last point
    test_accuracy: np.ndarray  # float[seeds, points]
    received: float  # bytes that a device receives in a step, mean over steps
    seconds: float  # median time of a step


def compression(runs: dict[str, Run], name: str) -> float:
    return runs["dense"].received / runs[name].received


def table(runs: dict[str, Run], caption: str) -> Table:
    result = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
        caption=caption,
        caption_justify="left",
    )
    result.add_column("method", no_wrap=True)
    for head in ("train loss", "test accuracy", "received B", "compression", "s/step"):
        result.add_column(head, justify="right")
    for name, run in runs.items():
        result.add_row(
            name,
            _mean_and_spread(run.train_loss[:, -1], ".4f"),
            _mean_and_spread(100 * run.test_accuracy[:, -1], ".2f") + " %",
            f"{run.received:,.0f}",
            f"{compression(runs, name):.2f}x",
            f"{run.seconds:.3f}",
        )
    return result


def _mean_and_spread(values: np.ndarray, form: str) -> str:
    mean = format(values.mean(), form)
    return mean if len(values) == 1 else f"{mean} ± {values.std(ddof=1):{form}}"


def summary(runs: dict[str, Run]) -> str:
    """Each method's accuracy and bytes beside those of dense, in words."""

    def accuracy(name: str) -> str:
        return f"{100 * runs[name].test_accuracy[:, -1].mean():.1f} %"

    def bytes_saved(name: str) -> str:
        ratio = compression(runs, name)
        return f"{ratio:.2f}x fewer bytes" if ratio > 1.005 else "no fewer bytes"

    return "; ".join(
        f"{name}: {accuracy(name)} vs dense {accuracy('dense')}, {bytes_saved(name)}"
        for name in runs
        if name != "dense"
    )


def save_json(runs: dict[str, Run], settings: dict[str, Any], path: Path) -> None:
    methods = {
        name: {
            "train_loss": run.train_loss[:, -1].tolist(),
            "test_accuracy": run.test_accuracy[:, -1].tolist(),
            "received_bytes": run.received,
            "compression": compression(runs, name),
            "seconds_per_step": run.seconds,
            "curves": {
                "steps": run.steps.tolist(),
                "train_loss": run.train_loss.tolist(),
                "test_accuracy": run.test_accuracy.tolist(),
            },
        }
        for name, run in runs.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"settings": settings, "methods": methods}, indent=2, default=str))


def save_figure(runs: dict[str, Run], title: str, path: Path) -> None:
    figure, axes = plt.subplots(
        2, 2, figsize=(10, 7), sharex="col", sharey="row", layout="constrained"
    )
    figure.suptitle(title)
    (accuracy_by_step, accuracy_by_bytes), (loss_by_step, loss_by_bytes) = axes
    for name, run in runs.items():
        for axis, x in ((0, run.steps), (1, run.steps * run.received)):
            for axes_row, y in ((0, run.test_accuracy), (1, run.train_loss)):
                ax = axes[axes_row, axis]
                (line,) = ax.plot(x, y.mean(axis=0), label=name)
                ax.fill_between(x, y.min(axis=0), y.max(axis=0), alpha=0.2, color=line.get_color())
    accuracy_by_step.set_ylabel("test accuracy")
    accuracy_by_step.yaxis.set_major_formatter(PercentFormatter(1))
    accuracy_by_bytes.legend(loc="lower right")
    loss_by_step.set(xlabel="steps", ylabel="train loss", yscale="log")
    loss_by_bytes.set(xlabel="bytes that each device has received so far", xscale="log")
    loss_by_bytes.xaxis.set_major_formatter(EngFormatter("B"))
    for ax in axes.flat:
        ax.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
