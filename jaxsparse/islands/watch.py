"""A run as its store shows it: `python -m jaxsparse islands URL`. It reads, and changes nothing."""

import collections
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxsparse.arrays.printing import aligned
from jaxsparse.islands.protocol import decision_key, list_posted, list_rounds
from jaxsparse.islands.records import BrokenError, Decision
from jaxsparse.islands.store import Objects


class Seen(NamedTuple):
    """A round, as the store shows it."""

    round: int
    decision: Decision | None
    others: tuple[str, ...]  # who have posted, but do not count: late, broken, or not decided yet
    trouble: str  # why the decision can't be read

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


def read_history(store: Objects, last: int = 20) -> tuple[list[Seen], list[int]]:
    """The last rounds of a run, so many and the one that is open, and those with a snapshot."""
    decided, snapshots = (list_rounds(store, each) for each in ("decisions", "snapshots"))
    if not snapshots:
        raise ValueError(f"{store} holds no run: the first island to join one writes a snapshot")
    newest = max(decided, default=-1) + 1
    return [_see(store, round) for round in range(max(0, newest - last), newest + 1)], snapshots


def _see(store: Objects, round: int) -> Seen:
    decision, trouble = None, ""
    if (data := store.get(decision_key(round))) is not None:
        try:
            decision = Decision.from_bytes(data, round)[0]
        except BrokenError as error:
            trouble = str(error)
    there = {name for name, _ in list_posted(store, round)}
    others = there.difference(decision.lives if decision else ())
    return Seen(round, decision, tuple(sorted(others)), trouble)


def to_text(history: Sequence[Seen], snapshots: Sequence[int]) -> str:
    """A history as two tables: the islands, and the rounds."""
    last: dict[str, int] = {}
    losses: dict[str, float] = {}
    counted: collections.Counter[str] = collections.Counter()
    rounds = [["round", "decided by", "waited", "bytes", "loss", "members", "not among them"]]
    for seen in history:
        counted.update(seen.members)
        last |= dict.fromkeys((*seen.members, *seen.others), seen.round)
        losses |= seen.losses
        others = ", ".join(seen.others) or "-"
        if (decision := seen.decision) is None:
            why = f"can't be read: {seen.trouble}" if seen.trouble else "open"
            rounds.append([str(seen.round), *"----", why, others])
            continue
        told = seen.losses.values()
        loss = f"{sum(told) / len(told):.4g}" if told else "-"
        row = [decision.by, f"{decision.waited:.1f} s", f"{seen.received:,}", loss]
        rounds.append([str(seen.round), *row, ", ".join(seen.members), others])
    closed = sum(seen.decision is not None for seen in history)
    islands = [["island", "last message", f"counted of {closed}", "loss"]]
    for name in sorted(last):
        loss = f"{losses[name]:.4g}" if name in losses else "-"
        islands.append([name, f"round {last[name]}", str(counted[name]), loss])
    kept = f"snapshots at the start of rounds: {', '.join(map(str, snapshots))}"
    tables = ("\n".join(aligned(table, right=())) for table in (islands, rounds))
    return "\n\n".join((*tables, kept))


def show(
    store: Objects, last: int, every: float | None, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Prints a run once, or every so many seconds until it is interrupted."""
    try:
        print(to_text(*read_history(store, last)))
        while every is not None:
            sleep(every)
            print("\n" + to_text(*read_history(store, last)), flush=True)
    except KeyboardInterrupt:
        if every is None:
            raise
