"""Draws the pictures of the docs and of README: SVG, on a transparent ground, for light and dark.

    python docs/pictures.py

Colours are those of Okabe and Ito, which the colour-blind tell apart, and styles differ besides.
Widths are five inches, so that words are legible where a phone shows 390 pixels.
"""

import json
import sys
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

HERE = Path(__file__).parent
BENCHMARKS = HERE.parent / "benchmarks"
MEASURED = BENCHMARKS / "results/local_updates"
sys.path.insert(0, str(BENCHMARKS))

from curves import load, over_measured
from frontier import SIZES, Results
from frontier_map import rows, undominated
from recipes import load_ends

from jaxsparse import Link, plan

FOLDER = HERE / "pictures"
INK = "#7a7a7a"  # as far from white as from the site's dark ground
BLUE, ORANGE, GREEN, PINK = "#0072b2", "#d55e00", "#009e73", "#cc79a7"
COMPUTE, EXCHANGE, TIME = 1.0, 2.0, 24.0  # of one step, of one dense exchange, of all pictures

plt.rcParams |= {
    "font.size": 12,
    "font.family": "sans-serif",
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "hatch.linewidth": 1.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "jaxsparse",  # the same file from the same script
}


def save(figure: Figure, name: str) -> None:
    """Writes a figure, with words as words."""
    FOLDER.mkdir(exist_ok=True)
    figure.savefig(FOLDER / f"{name}.svg", transparent=True, metadata={"Date": None})
    plt.close(figure)


def empty(height: float, width: float = 5) -> tuple[Figure, Axes]:
    """A figure without a frame, in units of tenths of an inch."""
    figure = plt.figure(figsize=(width, height))
    ax = figure.add_axes((0, 0, 1, 1), xlim=(0, 10 * width), ylim=(0, 10 * height))
    ax.set_axis_off()
    return figure, ax


def blocks(ax: Axes, starts: list[float], lengths: list[float], y: float, kind: str) -> None:
    """Steps (filled) or exchanges (hatched) of one lane; times begin at the left edge."""
    left, unit = 7.5, 1.62
    for start, length in zip(starts, lengths, strict=True):
        style = {"color": BLUE} if kind == "step" else {"fill": False, "ec": ORANGE, "hatch": "///"}
        ax.add_patch(
            Rectangle((left + unit * start + 0.12, y), unit * length - 0.24, 1.9, lw=1.2, **style)
        )


def lane(ax: Axes, y: float, name: str) -> None:
    """The name of a lane, at its left."""
    ax.text(0.3, y + 0.3, name, fontsize=11)


def timelines() -> None:
    """Steps and exchanges of five ways, in the same time."""
    figure, ax = empty(6.3)
    y = 61.5

    def head(text: str) -> None:
        ax.text(0.3, y, text, weight="bold", va="top")

    def two_lanes(steps: list[float], starts: list[float], lengths: list[float]) -> None:
        lane(ax, y - 5.2, "step")
        blocks(ax, steps, [COMPUTE] * len(steps), y - 5.2, "step")
        lane(ax, y - 7.9, "link")
        blocks(ax, starts, lengths, y - 7.9, "exchange")

    period = COMPUTE + EXCHANGE
    dense = list(np.arange(0, TIME, period))
    head(f"dense: {len(dense)} steps")
    two_lanes(dense, [t + COMPUTE for t in dense], [EXCHANGE] * len(dense))

    y -= 11.4
    delayed = list(np.arange(0, TIME, EXCHANGE))
    head(f"delay=1: {len(delayed)} steps")
    two_lanes(delayed, delayed, [EXCHANGE] * len(delayed))

    y -= 11.4
    rounds = list(np.arange(0, TIME, 4 * COMPUTE + EXCHANGE))
    local = [t + i * COMPUTE for t in rounds for i in range(4)]
    head(f"local steps, 4 at a time: {len(local)} steps")
    two_lanes(local, [t + 4 * COMPUTE for t in rounds], [EXCHANGE] * len(rounds))

    y -= 11.4
    streamed = list(np.arange(0, TIME, COMPUTE))
    head(f"streaming in 2 fragments: {len(streamed)} steps")
    two_lanes(streamed, list(np.arange(2, TIME, 2)), [EXCHANGE / 2] * 11)

    y -= 11.4
    head("islands: one dies, and comes back")
    for row, (name, gone) in enumerate({"A": (), "B": range(9, 16)}.items()):
        at = y - 5.2 - 5.2 * row
        lane(ax, at, name)
        steps = [t for t in np.arange(0, TIME) if t not in gone]
        sent = [t for t in np.arange(4, TIME, 4) if t not in gone and t - 1 not in gone]
        blocks(ax, steps, [COMPUTE] * len(steps), at, "step")
        blocks(ax, sent, [COMPUTE] * len(sent), at - 2.3, "exchange")
        if gone:
            ax.text(7.5 + 1.62 * 12.5, at + 0.3, "killed", color=INK, ha="center", fontsize=11)
    save(figure, "timelines")


def mesh() -> None:
    """Two sites of four devices."""
    figure, ax = empty(4.2)
    columns = (4, 16, 28, 40)
    for number, low in enumerate((28, 9.5)):
        box = FancyBboxPatch(
            (1, low), 48, 12.5, boxstyle="round,pad=0,rounding_size=2", fill=False, ec=INK, lw=1.5
        )
        ax.add_patch(box)
        ax.text(25, low + 9.3, f"site {number}", weight="bold", ha="center")
        ax.plot([7, 43], [low + 4.8] * 2, color=BLUE, lw=3)
        for x in columns:
            ax.add_patch(Rectangle((x, low + 1.8), 6, 6, color=BLUE))
    for x in columns:
        arrow = {"arrowstyle": "<->", "color": ORANGE, "lw": 2.5, "ls": "--"}
        ax.annotate("", (x + 3, 17), (x + 3, 30), arrowprops=arrow)
    ax.plot([1, 5], [6.8, 6.8], color=BLUE, lw=3)
    ax.text(6, 6.8, "FSDP, tensor parallelism: fast links, by JAX", va="center", fontsize=11)
    ax.plot([1, 5], [3.6, 3.6], color=ORANGE, lw=2.5, ls="--")
    ax.text(6, 3.6, "the exchange: each device's own shards,", va="center", fontsize=11)
    ax.text(6, 1.2, "compressed, across the slow link", va="center", fontsize=11)
    save(figure, "mesh")


def chain() -> None:
    """Where things stand in an Optax chain."""
    figure, ax = empty(5.3)
    rows = [
        ("gradients", "own"),
        ("÷ loss scale, stateless scaling", "own"),
        ("per_worker(Adam or trace), if here", "own"),
        ("the exchange (momentum=, if no clip)", "exchange"),
        ("clipping", "equal"),
        ("Adam or momentum, if here", "equal"),
        ("weight decay", "equal"),
        ("learning rate, schedules", "equal"),
        ("apply_updates, then EMA", "equal"),
    ]
    colours = {"own": ORANGE, "exchange": GREEN, "equal": BLUE}
    styles = {"own": "--", "exchange": "-", "equal": "-"}
    for i, (text, kind) in enumerate(rows):
        y = 47.5 - 5.7 * i
        wide = 2.5 if kind == "exchange" else 1.4
        box = FancyBboxPatch(
            (11, y),
            38,
            3.8,
            boxstyle="round,pad=0,rounding_size=1",
            fill=False,
            ec=colours[kind],
            lw=wide,
            ls=styles[kind],
        )
        ax.add_patch(box)
        weight = "bold" if kind == "exchange" else "normal"
        ax.text(30, y + 1.8, text, ha="center", va="center", fontsize=11, weight=weight)
        if i:
            arrow = {"arrowstyle": "->", "color": INK}
            ax.annotate("", (30, y + 3.8), (30, y + 5.7), arrowprops=arrow)
    for text, (low, high), kind in (
        ("each\nworker's\nown", (36.1, 51.3), "own"),
        ("equal\non all\nworkers", (1.9, 28.5), "equal"),
    ):
        ax.plot([10, 10], [low, high], color=colours[kind], ls=styles[kind], lw=2)
        ax.text(9, (low + high) / 2, text, ha="right", va="center", color=INK, fontsize=11)
    save(figure, "chain")


class Line(NamedTuple):
    """A line of a plot, with its label beside it."""

    label: str
    at: tuple[float, float]  # where the label's left edge is, in units of the axes
    colour: str
    style: str


def plot(ax: Axes, x: np.ndarray, y: np.ndarray, line: Line) -> None:
    """Draws a line, and its label in its colour."""
    wide = 2.8 if line.style == ":" else 2.2
    ax.plot(x, y, line.style, color=line.colour, lw=wide)
    ax.text(*line.at, line.label, color=line.colour, fontsize=11, va="center", linespacing=1.1)


def finish(figure: Figure, ax: Axes, ticks: list[float], name: str) -> None:
    """Time on a logarithmic axis, with these ticks."""
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    ax.spines[["top", "right"]].set_visible(False)
    figure.tight_layout(pad=0.4)
    save(figure, name)


def loss_hours() -> None:
    """Loss of a GPT of 10.9M parameters against hours, with exchanges as measured at 10 Mbit/s."""
    lines = {  # what exchanges, and every how many steps
        "dense": ("dense", 1, Line("dense\ngradients", (4.4, 2.36), INK, "-")),
        "gradients, 4 bits": ("qsgd", 1, Line("gradients\nin 4 bits", (2.5, 0.83), GREEN, "-.")),
        "mean H=10": ("dense", 10, Line("10 local steps,\ndense mean", (0.15, 0.83), BLUE, "--")),
        "SparseLoCo H=10 12.5 %": (
            "chunked_top_k",
            10,
            Line("10 local steps,\nSparseLoCo, k = 512", (0.0063, 1.08), ORANGE, ":"),
        ),
    }
    runs = load([MEASURED / "results_10.9m.json"])
    exchanges = {name: (system, every) for name, (system, every, _) in lines.items()}
    path = MEASURED / "exchanges_10.9m.json"
    timed = over_measured({x: runs[x] for x in lines}, exchanges, path, 0.1)["10mbit"]
    figure, ax = plt.subplots(figsize=(5, 4))
    for name, (_, _, line) in lines.items():
        run = timed[name]
        hours = next(iter(run.curves.values())).seconds / 3600
        plot(ax, hours, run.held_out.mean(0), line)
    ax.set(xlabel="hours, links of 10 Mbit/s", ylabel="held-out loss, nats a byte")
    ax.set(xlim=(0.006, 30), ylim=(0.6, 2.8))
    finish(figure, ax, [0.01, 0.1, 1, 10], "loss_hours")


def loss_seconds() -> None:
    """Loss of a small transformer against seconds, as measured on four hosts."""
    lines = {
        "dense": Line("dense\ngradients", (20, 2.62), INK, "-"),
        "gradients, 4 bits": Line("gradients\nin 4 bits", (6.5, 2.06), GREEN, "-."),
        "mean H=10": Line("10 local steps,\ndense mean", (1.45, 2.28), BLUE, "--"),
        "SparseLoCo H=10 12.5 %": Line(
            "10 local steps,\nSparseLoCo, k = 512", (0.42, 2.5), ORANGE, ":"
        ),
    }
    runs = load([MEASURED / "times_4_hosts.json"])
    figure, ax = plt.subplots(figsize=(5, 4))
    for name, line in lines.items():
        (curve,) = runs[name].curves.values()
        plot(ax, curve.seconds, curve.held_out, line)
    ax.set(xlabel="seconds, links of 100 Mbit/s", ylabel="held-out loss, nats a byte")
    ax.set(xlim=(0.4, 60), ylim=(1.9, 3.5))
    finish(figure, ax, [0.5, 1, 2, 5, 10, 20, 50], "loss_seconds")


def accuracy_seconds() -> None:
    """Accuracy of the quickstart's model against seconds, as measured on four hosts."""
    lines = {
        "dense": Line("dense\ngradients", (28, 92.6), INK, "-"),
        "sketched_sgd": Line("sketched\n10x", (9, 88), GREEN, "-."),
        "spardl": Line("SparDL, 1 %", (0.8, 86.5), BLUE, "--"),
        "chunked_top_k, every 10 steps": Line("10 local\nsteps, 1 %", (0.17, 93.5), ORANGE, ":"),
    }
    training = json.loads((HERE.parent / "benchmarks/cluster/results.json").read_text())["training"]
    figure, ax = plt.subplots(figsize=(5, 4))
    for run in training:
        if run["method"] in lines:
            points = [(x["seconds"], 100 * x["accuracy"]) for x in run["points"]]
            plot(ax, *np.array(points).T, lines[run["method"]])
    ax.set(xlabel="seconds, links of 100 Mbit/s", ylabel="test accuracy, %")
    ax.set(xlim=(0.15, 120), ylim=(74, 99))
    finish(figure, ax, [0.2, 0.5, 1, 2, 5, 10, 20, 50], "accuracy_seconds")


MARKERS = {"dense": "o", "int4": "s", "int2": "D", "ternary": "P", "sign": "v"}  # others: ^
OPTIMIZERS = {"muon": (BLUE, "-", "Muon"), "adamw": (ORANGE, "--", "AdamW")}


def best(ax: Axes, optimizer: str, places: list[tuple[str, float, float]]) -> None:
    """Each recipe of an optimizer as a mark of its format, and a line through the undominated.

    The optimizer's name stands at its right end, which is dense.
    """
    colour, style, name = OPTIMIZERS[optimizer]
    for exchange, *place in places:
        ax.plot(*place, MARKERS.get(exchange, "^"), color=colour, ms=5, alpha=0.8)
    found = [(x, y) for _, x, y in places]
    line = [found[i] for i in undominated(found)]
    ax.plot(*zip(*line, strict=True), style, color=colour, lw=1.8)
    ax.text(1.3 * line[-1][0], line[-1][1], name, color=colour, fontsize=11, va="center")


def loss_bytes() -> None:
    """Where recipes end, against the bytes that a worker receives in a run."""
    size = SIZES["136k"]
    figure, ax = plt.subplots(figsize=(5, 4.5))
    for optimizer in OPTIMIZERS:
        places = [
            (row.recipe.exchange, row.usual / 1e6, row.loss)
            for row in rows(Results("136k"), 2000, size)
            if row.recipe.optimizer == optimizer and "random" not in row.recipe.exchange
        ]
        best(ax, optimizer, places)
    ax.set(xlabel="MB received in 2,000 steps", ylabel="held-out loss, nats a byte")
    ax.set(xlim=(0.6, 1.5e4), ylim=(1.36, 1.95))
    finish(figure, ax, [1, 10, 100, 1000], "loss_bytes")


def recipe_hours() -> None:
    """What the planner says of recipes over four links: hours of a run, and nats."""
    ends = load_ends().ends
    links = {
        "8 workers, 10 Mbit/s": (8, 1.25e6),
        "8 workers, 100 Mbit/s": (8, 1.25e7),
        "8 workers, 1 Gbit/s": (8, 1.25e8),
        "2 sites, 1 Gbit/s": (2, 1.25e8),
    }
    figure, panels = plt.subplots(4, 1, figsize=(5, 9.5), sharex=True)
    for ax, (title, (workers, bandwidth)) in zip(panels, links.items(), strict=True):
        for optimizer in OPTIMIZERS:
            found = plan(10**9, workers, Link(1e-3, bandwidth), 1.0, optimizer=optimizer)
            base = fmean(ends[f"{optimizer}, gradients, dense"].losses.values())
            places = [
                (f.recipe.exchange, f.hours, base + f.cost.nats)
                for f in (found.dense, *found.forecasts)
            ]
            best(ax, optimizer, places)
        ax.set(ylabel=title, xlim=(25, 1.2e6), ylim=(1.36, 1.95), xscale="log")
        ax.spines[["top", "right"]].set_visible(False)
    panels[-1].set(xlabel="hours of 100,000 steps of 1 s, 1B parameters")
    finish(figure, panels[-1], [30, 100, 1000, 10_000], "recipe_hours")


def main() -> None:
    """All of them."""
    timelines()
    mesh()
    chain()
    loss_hours()
    loss_seconds()
    accuracy_seconds()
    loss_bytes()
    recipe_hours()


if __name__ == "__main__":
    main()
