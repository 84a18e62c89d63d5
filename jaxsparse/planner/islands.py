"""What rounds of islands take: seconds, bytes, requests, and the steps that failures cost.

The model is that of `jaxsparse.islands`: an island sends its message, looks at the store every
`poll` seconds, reads the messages of the others one after the other, and waits `grace` seconds for
one that has died. `tests/test_planner_islands.py` compares it with `jaxsparse.islands.simulate`,
which runs the protocol itself. `planner.requests` has the requests, item by item.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxsparse.arrays.printing import aligned
from jaxsparse.arrays.settings import static_count, static_float
from jaxsparse.feedback.by_message import message_words
from jaxsparse.planner import requests
from jaxsparse.planner.losses import ABOUT_AS_FAST, Loss, Losses
from jaxsparse.planner.network import Link
from jaxsparse.planner.recipes import EXCHANGES, OPTIMIZERS, Recipe, island_options

# Requests of a round besides messages, one after the other: two looks for a decision with a list
# between them, one more look or the decision, and a look whether the others are ahead. The
# simulation gives these no time.
_IN_TURN = 5

# What islands may exchange in one message, by its name in recipes.
NAMES = ("dense", "int8", "int4", "int2", "ternary", "sign", "top 1/8", "top 1/64")


def exchange(name: str) -> optax.GradientTransformation:
    """The transformation as islands need it."""
    options = {option: value for option, (_, value) in island_options(name).items()}
    return EXCHANGES[name].transformation(**options)


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

        Of those that take at most 5 % more, the one that ends lowest. None if there is none.
        """
        most = Losses.shipped().most
        cheap = [one for one in self.rounds if most(one.loss) <= self.nats]
        best = max((one.goodput for one in cheap), default=0.0)
        fast = [one for one in cheap if best <= ABOUT_AS_FAST * one.goodput]
        return min(fast, key=_excess, default=None)

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
            least = min((_excess(one) for one in self.rounds), default=math.inf)
            known = f"the least is {least:+.3f}" if least < math.inf else "nothing was measured"
            return [
                f"best: none. Nothing with {self.every} local steps of {self.optimizer} is known "
                f"to cost {self.nats:g} nats or less:",
                f"{known}. Fewer steps a round cost less (--every), --nats allows more.",
                "",
                *source,
            ]
        recipe = Recipe(self.optimizer, "local", self.every, self.best.exchange)
        settings = {
            **{"overlap": self.best.overlap, "grace": self.best.grace},
            # Of two, one goes on alone. Of more, one waits for another.
            **{"quorum": 2 if self.islands > 2 else 1, "alone": self.every, "patience": 3600.0},
            **{"snapshots": self.snapshots, "poll": self.poll},
        }
        return [
            f"best within {self.nats:g} nats: {recipe}, {self.best.loss}",
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
            f"{steps:,} steps that count, of a live island, which joins again after each failure",
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


def _excess(one: IslandRound) -> float:
    return math.inf if one.loss is None else one.loss.excess


def _least_waste(numbers: Sequence[int], plan: Callable[[int], IslandsPlan]) -> IslandsPlan:
    """Of plans for these numbers of local steps, the one with the best recipe."""
    plans, errors = [], []
    for every in numbers:
        try:
            plans.append(plan(every))
        except ValueError as error:  # such as failures that leave no round of so many steps
            errors.append(error)
    if not plans:
        raise errors[0]
    found = [(plan, plan.best) for plan in plans]
    best = max((one.goodput for _, one in found if one is not None), default=0.0)
    fast = [
        (_excess(one), plan)
        for plan, one in found
        if one is not None and best <= ABOUT_AS_FAST * one.goodput
    ]
    # If none is cheap enough, the one that comes nearest.
    near = [(min(map(_excess, plan.rounds)), plan) for plan in plans]
    return min(fast or near, key=lambda pair: pair[0])[1]


def _join(
    link: Link, islands: int, sizes: requests.Objects, rounds: float, round_seconds: float
) -> requests.Asked:
    """What joining asks for, with the rounds that others make meanwhile."""

    def asked(rounds: float) -> requests.Asked:
        return requests.added(requests.to_join(islands, sizes, rounds))

    at_once, one_more = (
        link.seconds(each.requests, each.received) for each in (asked(rounds), asked(rounds + 1))
    )
    share = (one_more - at_once) / round_seconds
    seconds = at_once / (1 - share) if share < 1 else math.inf  # others are faster
    return asked(rounds + seconds / round_seconds)


def plan_islands(
    params: int,
    islands: int,
    *,
    link: Link,
    step_seconds: float,
    every: int | None = None,
    overlap: int | None = None,
    failures: float = 0.0,
    grace: float | None = None,
    poll: float = 0.2,
    snapshots: int = 10,
    decided_after: float | None = None,
    steps: int | None = None,
    optimizer: str = "adamw",
    nats: float = 0.1,
) -> IslandsPlan:
    """Predicts what rounds of islands take, see `jaxsparse.islands.Islands`.

    With S seconds a step, H steps a round, messages of m bytes, bandwidth B, latency L and N
    islands, which have D seconds from their message to the decision, an exchange takes E = D +
    N (L + m / B) + 5 L: the island's message, those of the others, and requests one after the
    other. Training waits for w = max(0, E - overlap S) in a round of H S + w. (Snapshots, of c
    bytes, are written beside it.) An island that dies loses the steps since its last message, H / 2
    on average, and all others wait for it once, for max(0, grace - overlap S). When it comes back
    it is out of step with them: its first message waits half a round for a decision, less what
    overlaps. With f failures a second, steps that count take a share of

        H S / (H S + w) * (1 - f H S / 2)
            / (1 + f max(0, H S / 2 - overlap S) + (N - 1) f max(0, grace - overlap S))

    of the time of live islands. How long one is away costs its own steps alone. Computing of
    messages is left out, and so is the time in which an island joins. It then reads a snapshot, and
    decisions and messages of R = (`snapshots` - 1) / 2 + T / (H S + w) rounds, which takes T =
    (c + R N m) / B + (3 + R + R N) L.

    An island looks D / (poll + 2 L) times in vain for a decision, and each time lists messages.
    `planner.requests` has the other requests of a round.

    Args:
        params: number of parameters, in one vector.
        islands: number of islands.
        link: latency and bandwidth between an island and the store, each way.
        step_seconds: seconds of a step.
        every: see `Islands`. None: that of the numbers that were measured of which some exchange
            wastes the least time within `nats`.
        overlap: see `Islands`. None: as many steps as an exchange takes, with `grace` if islands
            fail, but less than `every`.
        failures: failures of an island in an hour of life.
        grace: see `Islands`. None: the time to send a message, a tenth of a round's steps, in which
            islands of one speed may differ, and a second.
        poll: see `Islands`.
        snapshots: see `Islands`.
        decided_after: D, the mean of `waited` in `Islands.status().rounds`. Islands of unlike speed
            wait longer. None: all are equally fast, and all but the one that decides look once
            more.
        steps: of the whole run, whose hours, bytes and requests are printed, too. None: of a round.
        optimizer: inside, "adamw" or "muon": of which the losses are printed.
        nats: what the chosen recipe may cost at most, above dense gradients.

    Raises:
        ValueError: numbers are out of range, or failures so frequent that nothing counts.
    """
    if every is None:
        given = {k: v for k, v in locals().items() if k not in ("params", "islands", "every")}
        numbers = sorted({r.every for r in Losses.shipped().recipes if r.is_local})
        return _least_waste(
            numbers, lambda every: plan_islands(params, islands, every=every, **given)
        )
    params = static_count("params", params)
    islands = static_count("islands", islands)
    every = static_count("every", every)
    if overlap is not None and not 0 <= overlap < every:
        raise ValueError(f"overlap={overlap} must be at least 0 and less than every={every}")
    if not static_float("step_seconds", step_seconds) > 0:
        raise ValueError(f"step_seconds={step_seconds} must be above 0: give the time of a step")
    snapshots = static_count("snapshots", snapshots)
    wait = (islands - 1) / islands * poll if decided_after is None else decided_after
    for name, value in (
        ("failures", failures),
        ("grace", grace or 0.0),
        ("poll", poll),
        ("decided_after", wait),
        ("nats", nats),
    ):
        if not static_float(name, value) >= 0:
            raise ValueError(f"{name}={value} must be at least 0")
    if steps is not None:
        steps = static_count("steps", steps)
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer={optimizer!r} is unknown: use one of {', '.join(OPTIMIZERS)}")
    busy, rate = every * step_seconds, failures / 3600
    if rate * busy / 2 >= 1:
        raise ValueError(
            f"failures={failures} an hour leave no round of {busy:g} s: take fewer steps a round "
            f"than every={every}"
        )
    vector = {"w": jax.ShapeDtypeStruct((params,), jnp.float32)}
    looks = (islands - 1) / islands
    if decided_after is not None:
        looks = decided_after / (poll + 2 * link.latency)
    found = []
    for name in NAMES:
        tx = exchange(name)
        state = jax.eval_shape(tx.init, vector)
        words = message_words(tx, vector, state)
        sizes = requests.objects(words, islands, vector, state)
        items = requests.of_a_round(islands, sizes, snapshots=snapshots, looks=looks)
        message = 4 * words
        seconds = wait + islands * link.seconds(1, message) + link.seconds(_IN_TURN, 0)
        patience = grace
        if patience is None:
            patience = math.ceil(link.seconds(1, message) + busy / 10 + 1)
        steps_beside = overlap
        if steps_beside is None:
            covered = max(seconds, patience if failures else 0.0)
            steps_beside = min(every - 1, math.ceil(covered / step_seconds))
        beside = steps_beside * step_seconds
        waited = max(0.0, seconds - beside)
        join = _join(link, islands, sizes, (snapshots - 1) / 2, busy + waited)
        stalls = max(0.0, busy / 2 - beside) + (islands - 1) * max(0.0, patience - beside)
        goodput = busy / (busy + waited) * (1 - rate * busy / 2) / (1 + rate * stalls)
        loss = Losses.shipped().of(Recipe(optimizer, "local", every, name))
        found.append(
            IslandRound(
                name,
                steps_beside,
                patience,
                message,
                sizes,
                seconds,
                waited,
                goodput,
                items,
                requests.added(items),
                join,
                requests.added(requests.at_start(islands, sizes)),
                link.seconds(join.requests, join.received),
                loss,
            )
        )
    return IslandsPlan(
        params,
        islands,
        step_seconds,
        every,
        failures,
        snapshots,
        poll,
        nats,
        tuple(found),
        steps,
        optimizer,
    )
