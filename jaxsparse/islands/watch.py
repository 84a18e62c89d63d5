"""A run as its store shows it: `python -m jaxsparse islands URL`. It reads, and changes nothing."""

import collections
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxsparse.islands.records import BrokenError, Decision
from jaxsparse.islands.rounds import decision_key, posted, rounds_in
from jaxsparse.islands.store import Objects


class Seen(NamedTuple):
    """A round, as the store shows it.

    Attributes:
        round: its number.
        members: the islands whose messages count, in order. Empty as long as there is no decision.
        others: islands that have posted, but do not count: late, broken, or not decided yet.
        by: the island that decided; "" as long as there is no decision.
        trouble: why the decision can't be read, or "".
    """

    round: int
    members: tuple[str, ...]
    others: tuple[str, ...]
    by: str
    trouble: str


class History(NamedTuple):
    """A run. Attributes: the last rounds, the oldest first; the rounds that have a snapshot."""

    rounds: tuple[Seen, ...]
    snapshots: tuple[int, ...]


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
        return Seen(round, (), tuple(there), "", "")
    try:
        decision = Decision.from_bytes(data, round)[0]
    except BrokenError as error:
        return Seen(round, (), tuple(there), "", str(error))
    members = tuple(member.name for member in decision.members)
    others = tuple(name for name in there if name not in members)
    return Seen(round, members, others, decision.by, "")


def table(found: History) -> Any:
    """A history as tables of rich: the islands, and the rounds."""
    from rich import box
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table

    last: dict[str, int] = {}
    counted: collections.Counter[str] = collections.Counter()
    for seen in found.rounds:
        counted.update(seen.members)
        last |= dict.fromkeys((*seen.members, *seen.others), seen.round)
    closed = sum(bool(seen.by) for seen in found.rounds)
    islands = Table("island", "last message", f"counted of {closed}", box=box.SIMPLE)
    for name in sorted(last):
        islands.add_row(name, f"round {last[name]}", str(counted[name]))
    rounds = Table("round", "members", "not among them", "decided by", box=box.SIMPLE)
    for seen in found.rounds:
        others = ", ".join(seen.others) or "-"
        if seen.trouble:
            rounds.add_row(str(seen.round), escape(f"can't be read: {seen.trouble}"), others, "")
        elif seen.by:
            rounds.add_row(str(seen.round), ", ".join(seen.members), others, seen.by)
        else:
            rounds.add_row(str(seen.round), "open", others, "")
    kept = ", ".join(map(str, found.snapshots)) or "none"
    return Group(islands, rounds, f" snapshots at the start of rounds: {kept}")


def show(
    store: Objects, last: int, every: float | None, sleep: Callable[[float], None] = time.sleep
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

    if every is None:
        Console().print(table(history(store, last)))
        return
    with Live(table(history(store, last)), auto_refresh=False) as live:
        while True:
            try:
                sleep(every)
                live.update(table(history(store, last)), refresh=True)
            except KeyboardInterrupt:
                return
