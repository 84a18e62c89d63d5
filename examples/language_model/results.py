"""Perplexities and bytes of the methods: a table, a figure, JSON and a sentence for each."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import EngFormatter, ScalarFormatter
from rich import box
from rich.table import Table


class Run(NamedTuple):
    """One method, trained once for each seed."""

    steps: np.ndarray  # int[points]: steps at which the curves were measured
    perplexity: np.ndarray  # float[seeds, points], of the validation text
    received: float  # bytes that a worker receives in one step
    embedding: float  # the part of `received` that is for the embedding's gradient
    overflow: int  # elements that found no room in messages, over all steps and seeds
    seconds: float  # median time of a step
    factor: float  # of the learning rates


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
    for head in ("perplexity", "rates", "received B", "embedding B", "overflow", "s/step"):
        result.add_column(head, justify="right")
    for name, run in runs.items():
        result.add_row(
            name,
            _mean_and_spread(run.perplexity[:, -1]),
            f"{run.factor:g}x",
            f"{run.received:,.0f}",
            f"{run.embedding:,.0f}",
            f"{run.overflow:,}",
            f"{run.seconds:.3f}",
        )
    return result


def _mean_and_spread(values: np.ndarray) -> str:
    mean = f"{values.mean():.1f}"
    return mean if len(values) == 1 else f"{mean} ± {values.std(ddof=1):.1f}"


def summary(runs: dict[str, Run]) -> str:
    """A sentence for each method, which compares it with dense."""
    dense = runs["dense"]
    lines = []
    for name, run in runs.items():
        if name != "dense":
            reached, wanted = (x.perplexity[:, -1].mean() for x in (run, dense))
            lines.append(
                f"{name}: perplexity {reached:.1f} vs dense {wanted:.1f}; of dense's bytes "
                f"{run.received / dense.received:.1%}, for the embedding "
                f"{run.embedding / dense.embedding:.1%}"
            )
    return "\n".join(lines)


def save_json(runs: dict[str, Run], settings: dict[str, Any], path: Path) -> None:
    methods = {
        name: {
            "perplexity": run.perplexity[:, -1].tolist(),
            "received_bytes": run.received,
            "embedding_bytes": run.embedding,
            "overflow": run.overflow,
            "seconds_per_step": run.seconds,
            "factor": run.factor,
            "curves": {"steps": run.steps.tolist(), "perplexity": run.perplexity.tolist()},
        }
        for name, run in runs.items()
    }
    path.write_text(json.dumps({"settings": settings, "methods": methods}, indent=2, default=str))


def save_figure(runs: dict[str, Run], title: str, path: Path) -> None:
    figure, (by_step, by_bytes) = plt.subplots(
        1, 2, figsize=(10, 4), sharey=True, layout="constrained"
    )
    figure.suptitle(title)
    for name, run in runs.items():
        for ax, x in ((by_step, run.steps), (by_bytes, run.steps * run.received)):
            (line,) = ax.plot(x, run.perplexity.mean(axis=0), label=name)
            low, high = run.perplexity.min(axis=0), run.perplexity.max(axis=0)
            ax.fill_between(x, low, high, alpha=0.2, color=line.get_color())
    by_step.set(xlabel="steps", ylabel="validation perplexity", yscale="log")
    by_step.yaxis.set_major_formatter(ScalarFormatter())
    by_step.yaxis.set_minor_formatter(ScalarFormatter())
    by_step.legend()
    by_bytes.set(xlabel="received by each worker so far", xscale="log")
    by_bytes.xaxis.set_major_formatter(EngFormatter("B"))
    for ax in (by_step, by_bytes):
        ax.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    plt.close(figure)
