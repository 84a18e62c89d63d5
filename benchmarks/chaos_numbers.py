"""Numbers of a run of islands under failures, from what islands, store and proxies recorded.

Islands tell each step: the round that they are in, and how many steps they have made since their
last message. Decisions say in which rounds a message of a life counted. (A life is a process of an
island: one that was killed and started again has had two.) A message holds all steps that its life
made before it, because what was late or not sent stands in the residual. So the steps of a life up
to its last message that counted have counted, and those after it have not.
"""

import bisect
import collections
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Points = list[tuple[float, float]]  # tokens that counted, held-out loss


class Step(NamedTuple):
    """A step that an island has made.

    Attributes:
        name: the island.
        life: its process.
        round: the round that it was in then.
        steps: steps since its last message: 0 if it sent one after this step.
        seconds: the time that the call of the training step took.
        time: when it ended, seconds.
    """

    name: str
    life: str
    round: int
    steps: int
    seconds: float
    time: float


class Struck(NamedTuple):
    """An island that could not go on for a time, such as one that was suspended."""

    name: str
    start: float
    end: float


class Stall(NamedTuple):
    """The longest call of a training step, less the usual one."""

    seconds: float
    name: str
    time: float


def by_life(steps: Iterable[Step]) -> dict[str, list[Step]]:
    lives: dict[str, list[Step]] = collections.defaultdict(list)
    for step in steps:
        lives[step.life].append(step)
    return lives


def counted_by_round(
    steps: Iterable[Step], decisions: Mapping[int, Mapping[str, str]]
) -> dict[int, int]:
    """How many steps counted for the first time in each round.

    Args:
        steps: the steps of each life in their order.
        decisions: for each round the members whose messages counted, with their lives.
    """
    counted = dict.fromkeys(sorted(decisions), 0)
    for life, own in by_life(steps).items():
        sent = [(step.round, made) for made, step in enumerate(own, 1) if step.steps == 0]
        rounds, held, before = [round for round, _ in sent], [made for _, made in sent], 0
        for round in counted:
            # A late message is sent in a later round than the one at whose end it was made.
            last = bisect.bisect_right(rounds, round)
            if decisions[round].get(own[0].name) == life and last:
                counted[round] += held[last - 1] - before
                before = held[last - 1]
    return counted


def longest_stall(steps: Iterable[Step], struck: Sequence[Struck] = ()) -> Stall:
    """The longest stall of islands that no failure struck.

    The first round of each life is left out, with its end: programs are compiled then. So is the
    time in which an island is struck, up to the end of the round in which it goes on.
    """
    kept: dict[str, list[Step]] = collections.defaultdict(list)
    for own in by_life(steps).values():
        first, blows = own[0].round, [one for one in struck if one.name == own[0].name]
        waits_in: int | None = first  # the round whose end it has to see
        for step in own:
            if any(b.start <= step.time and step.time - step.seconds <= b.end for b in blows):
                waits_in = step.round
            elif waits_in is None:
                kept[step.name].append(step)
            elif step.round > waits_in:
                waits_in = None
    stalls = [
        Stall(max(step.seconds - usual, 0.0), name, step.time)
        for name, own in kept.items()
        for usual in [float(np.median([step.seconds for step in own]))]
        for step in own
    ]
    return max(stalls, default=Stall(float("nan"), "", 0.0))


def curve(events: Iterable[Mapping[str, Any]], counted: Mapping[int, int], tokens: int) -> Points:
    """Held-out losses after rounds, over the tokens that have counted by then.

    Args:
        events: what islands told of rounds, with the loss at the start of round `at`.
        counted: steps by round, see `counted_by_round`.
        tokens: of a step.
    """
    losses = {e["at"] - 1: e["held_out"] for e in events}
    total = dict(zip(counted, itertools.accumulate(counted.values())))
    return [(tokens * total[round], losses[round]) for round in total if round in losses]


def thinned(points: Points, most: int = 60) -> Points:
    """Means of `most` groups of neighbours, or all points if there are fewer."""
    if not points:
        return []
    parts = np.array_split(np.asarray(points), min(most, len(points)))
    return [(float(part[:, 0].mean()), float(part[:, 1].mean())) for part in parts]


def above(points: Points, calm: Points) -> float | None:
    """How far the last loss is above the calm run's at as many tokens, or None if it has fewer."""
    if not points or not calm or not calm[0][0] <= points[-1][0] <= calm[-1][0]:
        return None
    tokens, loss = points[-1]
    return loss - float(np.interp(tokens, *np.transpose(calm)))


def mean_above(points: Points, calm: Points) -> float | None:
    """As `above`, but the mean of all losses of the second half that the calm run can show."""
    found = [above(points[: i + 1], calm) for i in range(len(points) // 2, len(points))]
    known = [x for x in found if x is not None]
    return float(np.mean(known)) if known else None


HEADS = (
    "story",
    "seed",
    "minutes",
    "load",
    "failures",
    "rounds",
    "longest stall",
    "steps that count",
    "of calm's a second",
    "equal",
    "held-out loss",
    "above calm",
    "second half",
    "M tokens",
    "MB",
    "requests",
    "ended",
)


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Runs as Markdown. The calm run to compare with has the same settings and the same seed."""
    rows = [HEADS, ("---",) * len(HEADS)]
    for line in lines:
        calm = [
            one
            for one in lines
            if one["story"] == "calm"
            and _job(one) == _job(line)
            and all(one[key] == line[key] for key in ("seed", "settings", "rate", "pause"))
        ]
        curves: list[Points] = [one["curve"] for one in calm if one["curve"]]
        most: Points = max(curves, key=lambda points: points[-1][0], default=[])
        longest = max(calm, key=lambda one: one["seconds"], default=None)
        is_calm = line["story"] == "calm"
        differences = [
            None if is_calm else found(line["curve"], most) for found in (above, mean_above)
        ]
        rows.append(
            (
                line["story"] + (", synchronous" if _job(line) == "synchronous" else ""),
                f"{line['seed']}",
                f"{line['seconds'] / 60:.1f}",
                f"{line['load']:.1f} on {line['cores']}",
                f"{line['failures']}",
                f"{line['rounds']}",
                f"{line['stall']:.1f} s",
                f"{100 * line['counted'] / line['made']:.1f} %",
                "" if longest is None else f"{100 * _rate(line) / _rate(longest):.1f} %",
                "yes" if not line["unlike"] else f"not in {line['unlike']}",
                f"{line['curve'][-1][1]:.3f}" if line["curve"] else "",
                *("" if x is None else f"{x:+.3f}" for x in differences),
                f"{line['tokens'] / 1e6:.3f}",
                "" if line["megabytes"] is None else f"{line['megabytes']:.3f}",
                "" if line["requests"] is None else f"{line['requests']:.1f}",
                ", ".join(line["ended"]) or "well",
            )
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def items(line: Mapping[str, Any]) -> str:
    """Requests and bytes of an island in a round by kind, as Markdown."""
    rows = [("request", "requests", "bytes sent", "bytes read"), ("---",) * 4]
    for kind, (sent, received, requests) in line["items"].items():
        rows.append((kind, f"{requests:,.2f}", f"{sent:,.0f}", f"{received:,.0f}"))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _job(line: Mapping[str, Any]) -> str:
    return str(line.get("job", "islands"))


def _rate(line: Mapping[str, Any]) -> float:
    """Steps that count a second, of all islands together."""
    return float(line["counted"] / line["seconds"])
