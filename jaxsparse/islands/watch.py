"""A run as its store shows it: `python -m jaxsparse islands URL`. It reads, and changes nothing."""

import collections
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxsparse.islands.protocol import decision_key, list_posted, list_rounds
from jaxsparse.islands.records import BrokenError, Decision
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
    decided, snapshots = (list_rounds(store, each) for each in ("decisions", "snapshots"))
    if not snapshots:
        raise ValueError(f"{store} holds no run: the first island to join one writes a snapshot")
    newest = max(decided, default=-1) + 1
    rounds = [_seen(store, round) for round in range(max(0, newest - last), newest + 1)]
    return History(tuple(rounds), tuple(snapshots))


def _seen(store: Objects, round: int) -> Seen:
    there = sorted({name for name, _ in list_posted(store, round)})
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


def show(
    store: Objects,
    last: int,
    every: float | None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Prints a run once, or shows it until it is interrupted.

    Args:
        store: the run's store.
        last: number of rounds.
        every: seconds from one look to the next. None: looks once.
        sleep: how to wait.
    """
    from rich.console import Console
    from rich.live import Live

    look = lambda: table(history(store, last))
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
