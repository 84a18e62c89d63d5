"""The result of `plan_islands`: rounds by exchange, and a choice. It prints as tables."""

import dataclasses
import math
from typing import Any, NamedTuple

from jaxsparse.arrays.printing import aligned
from jaxsparse.planner import requests
from jaxsparse.planner.losses import ABOUT_AS_FAST, Loss, Losses, trained_first
from jaxsparse.planner.recipes import Recipe


class IslandRound(NamedTuple):
    """A round with one exchange. Bytes and requests are those of one island, in the mean.

    Attributes:
        exchange: its name in recipes.
        overlap: steps beside an exchange.
        grace: seconds that others wait for an island that has died.
        message: bytes of an island's message, without its header.
        sizes: bytes of objects in the store. The snapshot is that of an outer optimizer without
            momentum, which adds as many bytes as parameters have.
        seconds: seconds from a message to the next global parameters.
        waited: seconds of a round in which training stands still.
        goodput: share of the seconds of a live island that are steps which count.
        items: the requests of a round, by kind.
        asked: their sum, with HTTP's headers.
        join: what joining asks for, as coming back does: a snapshot, and the decisions and messages
            since: half of the rounds between snapshots, in the mean, and those that others make
            meanwhile.
        start: what joining asks for as a run begins.
        join_seconds: seconds of `join` on the link.
        loss: what the recipe with as many local steps costs without failures. None: not measured.
    """

    exchange: str
    overlap: int
    grace: float
    message: int
    sizes: requests.Objects
    seconds: float
    waited: float
    goodput: float
    items: tuple[requests.Item, ...]
    asked: requests.Asked
    join: requests.Asked
    start: requests.Asked
    join_seconds: float
    loss: Loss | None

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            **self._asdict(),
            "sizes": self.sizes._asdict(),
            "items": [item._asdict() for item in self.items],
            "asked": self.asked._asdict(),
            "join": self.join._asdict(),
            "start": self.start._asdict(),
            "loss": self.loss and self.loss._asdict(),
        }


@dataclasses.dataclass(frozen=True)
class IslandsPlan:
    """Rounds of islands by exchange. Printed, it is a table.

    Attributes:
        params: number of parameters.
        islands: number of islands, N.
        step_seconds: seconds of a step.
        every: steps of a round, H.
        failures: failures of an island in an hour of life.
        snapshots: rounds from one snapshot to the next.
        rounds: the rounds.
        poll: seconds from one look at the store to the next.
        nats: what the chosen recipe may cost at most.
        steps: steps of the whole run, or None.
        optimizer: inside, "adamw" or "muon".
    """

    params: int
    islands: int
    step_seconds: float
    every: int
    failures: float
    snapshots: int
    poll: float
    nats: float
    rounds: tuple[IslandRound, ...]
    steps: int | None = None
    optimizer: str = "adamw"

    @property
    def best(self) -> IslandRound | None:
        """Of those measured to cost at most `nats`, with their ±, the one that wastes least time.

        Of those that take at most 5 % more, the one that ends lowest. Recipes that were trained
        come before those that only the law predicts. None if there is none.
        """
        most = Losses.shipped().most
        cheap = trained_first([one for one in self.rounds if most(one.loss) <= self.nats])
        best = max((one.goodput for one in cheap), default=0.0)
        fast = [one for one in cheap if best <= ABOUT_AS_FAST * one.goodput]
        return min(fast, key=excess, default=None)

    def hours(self, one: IslandRound) -> float | None:
        """Hours of a live island until so many of its steps count."""
        if self.steps is None:
            return None
        return self.steps * self.step_seconds / one.goodput / 3600

    def of_the_run(self, one: IslandRound) -> requests.Asked | None:
        """What a live island asks for in the whole run, with joining after each failure."""
        if self.steps is None:
            return None
        rounds = math.ceil(self.steps / self.every)
        joins = 1 + self.failures * self.steps * self.step_seconds / one.goodput / 3600
        pairs = zip(one.asked, one.join)
        return requests.Asked(*(rounds * each + joins * join for each, join in pairs))

    def __str__(self) -> str:
        run = [] if self.steps is None else self._run(self.steps)
        return "\n".join([*self._rounds(), *self._joins(), *run, "", *self._answer()])

    def _answer(self) -> list[str]:
        """One recipe, as Python."""
        source = [
            f"Nats are {self.optimizer}'s with {self.every} local steps, without failures, above "
            "dense gradients by the",
            f"same optimizer, {Losses.shipped().setup} They are nats a byte.",
            "For --nats what is behind ± counts, too: the standard deviation over seeds, or the",
            f"error of a formula; {Losses.shipped().usual_spread:.3f} if there was one seed.",
        ]
        if self.optimizer == "adamw":
            source.append("--optimizer muon ended lower there, and loses less by local steps.")
        if self.best is None:
            least = min((excess(one) for one in self.rounds), default=math.inf)
            known = f"the least is {least:+.3f}" if least < math.inf else "nothing was measured"
            fewest = min(r.every for r in Losses.shipped().recipes if r.is_local)
            advice = "Fewer steps a round cost less (--every), " if self.every > fewest else ""
            return [
                f"best: none. Nothing with {self.every} local steps of {self.optimizer} is known "
                f"to cost {self.nats:g} nats or less, with its ±:",
                f"{known}. {advice}--nats allows more.",
                "",
                *source,
            ]
        assert self.best.loss is not None
        recipe = Recipe(self.optimizer, "local", self.every, self.best.exchange)
        hours = "" if self.steps is None else f"{self.hours(self.best):,.2f} hours, "
        settings = {
            **{"overlap": self.best.overlap, "grace": self.best.grace},
            # Of two, one goes on alone. Of more, one waits for another.
            **{"quorum": 2 if self.islands > 2 else 1, "alone": self.every, "patience": 3600.0},
            **{"snapshots": self.snapshots, "poll": self.poll},
        }
        return [
            f"best within {self.nats:g} nats: {recipe}: {hours}{self.best.loss} nats "
            f"({self.best.loss.source})",
            "",
            *(f"    {line}" for line in recipe.on_islands(settings)),
            "",
            *source,
        ]

    def _run(self, steps: int) -> list[str]:
        """The lines of a whole run."""
        cells: list[tuple[str, ...]] = [("exchange", "hours", "read GB", "sent GB", "requests")]
        for one in self.rounds:
            asked = self.of_the_run(one)
            assert asked is not None
            cells.append(
                (
                    one.exchange,
                    f"{self.hours(one):,.2f}",
                    f"{asked.received / 1e9:,.1f}",
                    f"{asked.sent / 1e9:,.1f}",
                    f"{asked.requests:,.0f}",
                )
            )
        return [
            "",
            f"{steps:,} steps that count of each island, which joins again after each failure",
            f"(all together read and send {self.islands} times as much):",
            "",
            *aligned(cells, right=range(1, 5)),
        ]

    def _rounds(self) -> list[str]:
        """The lines of a round."""
        heads = ("exchange", "message MB", "overlap", "grace s", "round s", "waits s", "that count")
        cells = [(*heads, "read MB", "sent MB", "requests", "nats above dense")]
        for one in self.rounds:
            cells.append(
                (
                    one.exchange,
                    f"{one.message / 1e6:,.2f}",
                    f"{one.overlap}",
                    f"{one.grace:g}",
                    f"{self.every * self.step_seconds + one.waited:,.2f}",
                    f"{one.waited:,.2f}",
                    f"{100 * one.goodput:.1f} %",
                    f"{one.asked.received / 1e6:,.2f}",
                    f"{one.asked.sent / 1e6:,.2f}",
                    f"{one.asked.requests:.1f}",
                    "not measured" if one.loss is None else str(one.loss),
                )
            )
        return [
            f"{self.islands} islands, {self.params:,} parameters, {self.every} steps of "
            f"{self.step_seconds:g} s a round, {self.failures:g} failures of an island an hour:",
            "",
            *aligned(cells, right=range(1, len(cells[0]))),
            "",
            "Predicted by formula. That count: steps, as a share of the time of live islands,",
            "which falls while they wait, too. Read MB, sent MB and requests: of one island in a",
            "round, with snapshots, deleting and HTTP's headers. What residuals of sparse",
            "exchanges held is lost with a process, and not counted here. A store must have a",
            "message before others read it, so an exchange takes longer than one in which all send",
            "and receive at once, as with --workers. What steps beside an exchange (overlap) cost",
            "in loss was not measured.",
        ]

    def _joins(self) -> list[str]:
        """The lines of joining and coming back."""
        snapshot = self.rounds[0].sizes.snapshot
        cells: list[tuple[str, ...]] = [("exchange", "seconds", "read MB", "requests")]
        for one in self.rounds:
            cells.append(
                (
                    one.exchange,
                    f"{one.join_seconds:,.2f}",
                    f"{one.join.received / 1e6:,.2f}",
                    f"{one.join.requests:.1f}",
                )
            )
        return [
            "",
            f"To join or to come back: a snapshot, of {snapshot / 1e6:,.2f} MB without an outer",
            f"momentum, and decisions and messages since: of {(self.snapshots - 1) / 2:g} rounds,",
            "and of those that others make meanwhile:",
            "",
            *aligned(cells, right=range(1, 4)),
            "",
            "Seconds: of the link. Starting a process and compiling come on top.",
        ]


def excess(one: IslandRound) -> float:
    """Nats above dense gradients, infinite if that was not measured."""
    return math.inf if one.loss is None else one.loss.excess
