"""A run as its store shows it: `python -m jaxsparse islands URL`. It reads, and changes nothing."""

import collections
import html
import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jaxsparse.islands.records import BrokenError, Decision
from jaxsparse.islands.rounds import decision_key, posted, rounds_in
from jaxsparse.islands.store import Objects


class Seen(NamedTuple):
    """A round, as the store shows it.

    Attributes:
        round: its number.
        decision: whose messages count. None: there is none yet, or it can't be read.
        others: islands that have posted, but do not count: late, broken, or not decided yet.
        trouble: why the decision can't be read, or "".
    """

    round: int
    decision: Decision | None
    others: tuple[str, ...]
    trouble: str

    @property
    def members(self) -> tuple[str, ...]:
        """The islands whose messages count, in order."""
        return () if self.decision is None else tuple(self.decision.lives)

    @property
    def received(self) -> int:
        """Bytes of the messages that count, all of which each island reads."""
        return 0 if self.decision is None else 4 * self.decision.words * len(self.members)

    @property
    def losses(self) -> dict[str, float]:
        """The mean losses that members told."""
        members = () if self.decision is None else self.decision.members
        return {member.name: member.loss for member in members if member.loss is not None}


class History(NamedTuple):
    """A run. Attributes: the last rounds, the oldest first; the rounds that have a snapshot."""

    rounds: tuple[Seen, ...]
    snapshots: tuple[int, ...]

    @property
    def islands(self) -> list[str]:
        """The names of all islands of these rounds, sorted."""
        return sorted({name for seen in self.rounds for name in (*seen.members, *seen.others)})


def history(store: Objects, last: int = 20) -> History:
    """The last rounds of a run, the one that is open with them.

    Args:
        store: the run's store.
        last: number of rounds.

    Raises:
        ValueError: the store holds no run.
        UnreachableError: the store does not answer.
    """
    decided, snapshots = (rounds_in(store, each) for each in ("decisions", "snapshots"))
    if not snapshots:
        raise ValueError(f"{store} holds no run: the first island to join one writes a snapshot")
    newest = max(decided, default=-1) + 1
    rounds = [_seen(store, round) for round in range(max(0, newest - last), newest + 1)]
    return History(tuple(rounds), tuple(snapshots))


def _seen(store: Objects, round: int) -> Seen:
    there = sorted({name for name, _ in posted(store, round)})
    data = store.get(decision_key(round))
    if data is None:
        return Seen(round, None, tuple(there), "")
    try:
        decision = Decision.from_bytes(data, round)[0]
    except BrokenError as error:
        return Seen(round, None, tuple(there), str(error))
    return Seen(round, decision, tuple(name for name in there if name not in decision.lives), "")


def table(found: History) -> Any:
    """A history as tables of rich: the islands, and the rounds."""
    from rich import box
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table

    last: dict[str, int] = {}
    losses: dict[str, float] = {}
    counted: collections.Counter[str] = collections.Counter()
    for seen in found.rounds:
        counted.update(seen.members)
        last |= dict.fromkeys((*seen.members, *seen.others), seen.round)
        losses |= seen.losses
    closed = sum(seen.decision is not None for seen in found.rounds)
    islands = Table("island", "last message", f"counted of {closed}", "loss", box=box.SIMPLE)
    for name in found.islands:
        loss = f"{losses[name]:.4g}" if name in losses else "-"
        islands.add_row(name, f"round {last[name]}", str(counted[name]), loss)
    heads = ("round", "members", "not among them", "decided by", "waited", "bytes", "loss")
    rounds = Table(*heads, box=box.SIMPLE)
    for seen in found.rounds:
        others = ", ".join(seen.others) or "-"
        if seen.trouble:
            rounds.add_row(str(seen.round), escape(f"can't be read: {seen.trouble}"), others)
        elif seen.decision is None:
            rounds.add_row(str(seen.round), "open", others)
        else:
            told = list(seen.losses.values())
            rounds.add_row(
                str(seen.round),
                ", ".join(seen.members),
                others,
                seen.decision.by,
                f"{seen.decision.waited:.1f} s",
                f"{seen.received:,}",
                f"{sum(told) / len(told):.4g}" if told else "-",
            )
    kept = ", ".join(map(str, found.snapshots)) or "none"
    return Group(islands, rounds, f" snapshots at the start of rounds: {kept}")


def page(found: History, title: str) -> str:
    """A history as one HTML page, with its figures in it: who counted, losses, waits and bytes.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "figures are matplotlib's: pip install matplotlib, or leave out --html"
        ) from error
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    decided = [seen for seen in found.rounds if seen.decision is not None]
    names, rounds = found.islands, [seen.round for seen in decided]
    figure = Figure(figsize=(10, 7.5 + 0.25 * len(names)), layout="constrained")
    heights = [1 + 0.25 * len(names), 2.5, 1.5, 1.5]
    timeline, losses, waits, received = figure.subplots(
        4, sharex=True, gridspec_kw={"height_ratios": heights}
    )
    marks = {"counts": ("s", "tab:blue"), "late or owed": ("D", "tab:orange")}
    marks |= {"sent, does not count": ("x", "tab:red")}
    for kind, (marker, color) in marks.items():
        points = [
            (seen.round, name)
            for seen in found.rounds
            for name in names
            if _kind(seen, name) == kind
        ]
        x, y = zip(*points) if points else ((), ())
        timeline.plot(x, y, marker, color=color, label=kind, markersize=4, linestyle="none")
    timeline.set(title="whose messages counted", yticks=range(len(names)), yticklabels=names)
    timeline.legend(fontsize="small", ncols=3, loc="lower left", bbox_to_anchor=(0, 1.08))
    styles = ("-", "--", "-.", ":")
    for i, name in enumerate(names):
        told = [(seen.round, seen.losses[name]) for seen in decided if name in seen.losses]
        if told:
            losses.plot(*zip(*told), styles[i % 4], label=name)
    losses.set(ylabel="mean loss")
    if losses.lines:
        losses.legend(fontsize="small", ncols=4)
    waits.plot(rounds, [s.decision.waited for s in decided if s.decision is not None], ".-")
    waits.set(ylabel="s from message\nto decision", ylim=(0, None))
    received.plot(rounds, [seen.received for seen in decided], ".-")
    received.set(ylabel="bytes of messages", xlabel="round", ylim=(0, None))
    for axes in (timeline, losses, waits, received):
        axes.grid(alpha=0.3)
        axes.patch.set_alpha(0)
    figure.patch.set_alpha(0)
    drawn = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        FigureCanvasSVG(figure).print_svg(drawn)
    svg = drawn.getvalue()
    svg = svg[svg.index("<svg") :]
    troubles = "".join(
        f"<li>round {seen.round}: {html.escape(seen.trouble)}</li>"
        for seen in found.rounds
        if seen.trouble
    )
    broken = f"<h2>Decisions that can't be read</h2><ul>{troubles}</ul>" if troubles else ""
    name = html.escape(title)
    return _PAGE.format(
        title=name,
        svg=svg,
        broken=broken,
        rounds=len(decided),
        islands=len(names),
        snapshots=", ".join(map(str, found.snapshots)) or "none",
    )


def _kind(seen: Seen, name: str) -> str:
    if seen.decision is not None:
        for member in seen.decision.members:
            if member.name == name:
                return "late or owed" if member.late else "counts"
    return "sent, does not count" if name in seen.others else ""


# It loads nothing from elsewhere. A figure keeps its white ground where a browser is dark.
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Islands: {title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 1rem auto; padding: 0 1rem;
  color: #222; background: #fff; }}
svg {{ width: 100%; height: auto; font-family: system-ui, sans-serif; }}
h1 {{ font-size: 1.4rem; overflow-wrap: anywhere; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{islands} islands, {rounds} decided rounds. Snapshots at the start of rounds {snapshots}.</p>
{svg}
{broken}
</body>
</html>
"""


def show(
    store: Objects,
    last: int,
    every: float | None,
    sleep: Callable[[float], None] = time.sleep,
    *,
    write: Path | None = None,
) -> None:
    """Prints a run once, or shows it until it is interrupted.

    Args:
        store: the run's store.
        last: number of rounds.
        every: seconds from one look to the next. None: looks once.
        sleep: how to wait.
        write: a file for the run as a page of HTML, written at each look.
    """
    from rich.console import Console
    from rich.live import Live

    def look() -> Any:
        found = history(store, last)
        if write is not None:
            write.write_text(page(found, str(store)), encoding="utf-8")
        return table(found)

    if every is None:
        Console().print(look())
        return
    with Live(look(), auto_refresh=False) as live:
        while True:
            try:
                sleep(every)
                live.update(look(), refresh=True)
            except KeyboardInterrupt:
                return
