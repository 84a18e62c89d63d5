"""What rounds of islands take: seconds, bytes, requests, and the steps that failures cost.

The model is that of `jaxsparse.islands`: an island sends its message, looks at the store every
`poll` seconds, reads the messages of all, its own with them, one after the other, and waits `grace`
seconds for one that has died. `tests/test_planner_islands.py` compares it with
`jaxsparse.islands.simulate`, which runs the protocol itself.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxsparse import outer
from jaxsparse.arrays.printing import aligned
from jaxsparse.arrays.settings import static_count, static_float
from jaxsparse.feedback.by_message import message_words
from jaxsparse.planner.losses import Loss, Losses
from jaxsparse.planner.network import Link
from jaxsparse.planner.recipes import OPTIMIZERS, Recipe
from jaxsparse.systems import quantized

# Requests of a round besides messages, one after the other: a list, two looks for a decision, its
# creation, and a look at what stands there. The simulation gives these no time.
_REQUESTS = 5

Make = Callable[[], optax.GradientTransformation]


def _gathered(bits: str) -> optax.GradientTransformation:
    return quantized(bits, gather=True, axis_name=None, is_dense=lambda *_: False)  # type: ignore[arg-type]


def _chunks(k: int) -> optax.GradientTransformation:
    return outer.sparse_loco(k=k, axis_name=None, is_dense=lambda *_: False)


# Exchanges of one message, and what recipes call them where they were trained.
EXCHANGES: dict[str, tuple[Make, str | None]] = {
    'quantized("bfloat16", gather=True)': (lambda: _gathered("bfloat16"), None),
    'quantized("int4", gather=True)': (lambda: _gathered("int4"), "int4"),
    'quantized("sign", gather=True)': (lambda: _gathered("sign"), "sign"),
    "sparse_loco()": (lambda: _chunks(512), "top 1/8"),
    "sparse_loco(k=64)": (lambda: _chunks(64), "top 1/64"),
}


class IslandRound(NamedTuple):
    """A round with one exchange.

    Attributes:
        exchange: how it is written.
        message: bytes of an island's message.
        seconds: seconds from a message to the next global parameters.
        waited: seconds of these in which training stands still.
        goodput: share of the seconds of a live island that are steps which count.
        requests: requests of an island in a round, if all are equally fast. Waiting for others
            takes two more for each `poll`.
        loss: what the recipe with as many local steps costs without failures. None: not measured.
    """

    exchange: str
    message: int
    seconds: float
    waited: float
    goodput: float
    requests: int
    loss: Loss | None


@dataclasses.dataclass(frozen=True)
class IslandsPlan:
    """Rounds of islands by exchange. Printed, it is a table.

    Attributes:
        params: number of parameters.
        islands: number of islands, N.
        step_seconds: seconds of a step.
        every: steps of a round, H.
        overlap: steps beside an exchange.
        failures: failures of an island in an hour of life.
        grace: seconds that others wait for an island that has died.
        rounds: the rounds.
        steps: steps of the whole run, or None.
        optimizer: inside, "adamw" or "muon".
    """

    params: int
    islands: int
    step_seconds: float
    every: int
    overlap: int
    failures: float
    grace: float
    rounds: tuple[IslandRound, ...]
    steps: int | None = None
    optimizer: str = "adamw"

    def hours(self, one: IslandRound) -> float | None:
        """Hours of a live island until so many of its steps count."""
        if self.steps is None:
            return None
        return self.steps * self.step_seconds / one.goodput / 3600

    def __str__(self) -> str:
        return "\n".join([*self._rounds(), *([] if self.steps is None else self._run(self.steps))])

    def _run(self, steps: int) -> list[str]:
        """The lines of a whole run."""
        cells: list[tuple[str, ...]] = [
            ("exchange", "hours", "read GB", "sent GB", "requests", "nats above dense", "")
        ]
        count = math.ceil(steps / self.every)
        for one in self.rounds:
            cells.append(
                (
                    one.exchange,
                    f"{self.hours(one):,.2f}",
                    f"{count * self.islands * one.message / 1e9:,.1f}",
                    f"{count * one.message / 1e9:,.1f}",
                    f"{count * one.requests:,}",
                    "" if one.loss is None else str(one.loss),
                    "not measured" if one.loss is None else one.loss.source,
                )
            )
        return [
            "",
            f"{steps:,} steps that count, of one live island; snapshots and joining come on top:",
            "",
            *aligned(cells, right=range(1, 6)),
            "",
            f"Nats: {self.optimizer}, {self.every} local steps, without failures, above dense "
            "gradients by the same optimizer,",
            Losses.shipped().setup,
        ]

    def _rounds(self) -> list[str]:
        """The lines of a round."""
        heads = ("exchange", "message MB", "round s", "waits s", "steps that count", "read MB")
        cells: list[tuple[str, ...]] = [(*heads, "requests")]
        for one in self.rounds:
            cells.append(
                (
                    one.exchange,
                    f"{one.message / 1e6:,.2f}",
                    f"{self.every * self.step_seconds + one.waited:,.2f}",
                    f"{one.waited:,.2f}",
                    f"{100 * one.goodput:.1f} %",
                    f"{self.islands * one.message / 1e6:,.2f}",
                    f"{one.requests}",
                )
            )
        return [
            f"{self.islands} islands, {self.params:,} parameters, {self.every} steps of "
            f"{self.step_seconds:g} s a round, {self.overlap} of them beside an exchange,",
            f"{self.failures:g} failures of an island an hour, each waited for {self.grace:g} s:",
            "",
            *aligned(cells, right=range(1, len(cells[0]))),
            "",
            "Predicted by formula. Steps that count: share of the time of live islands, which",
            "falls while they wait, too. Read MB and requests: of one island in a round. What",
            "residuals of sparse exchanges held is lost with a process, and is not counted here.",
        ]


def plan_islands(
    params: int,
    islands: int,
    *,
    link: Link,
    step_seconds: float,
    every: int = 30,
    overlap: int = 0,
    failures: float = 0.0,
    grace: float = 60.0,
    poll: float = 0.2,
    steps: int | None = None,
    optimizer: str = "adamw",
) -> IslandsPlan:
    """Predicts what rounds of islands take, see `jaxsparse.islands.Islands`.

    With S seconds a step, H steps a round, messages of m bytes, bandwidth B, latency L and N
    islands, an exchange takes E = (L + m / B) + poll + N (L + m / B) + 5 L, and training waits
    for w = max(0, E - overlap S) in a round of H S + w. An island that dies loses the steps since
    its last message, H / 2 on average, and all others wait for it once, for max(0, grace -
    overlap S). When it comes back it is out of step with them: its first message waits half a round
    for a decision, less what overlaps. With f failures a second, steps that count take a share of

        H S / (H S + w) * (1 - f H S / 2)
            / (1 + f max(0, H S / 2 - overlap S) + (N - 1) f max(0, grace - overlap S))

    of the time of live islands. How long one is away costs its own steps alone. Computing of
    messages is left out, and so is reading snapshots, 4 bytes a parameter and more, when an island
    joins.

    Args:
        params: number of parameters, in one vector.
        islands: number of islands.
        link: latency and bandwidth between an island and the store, each way.
        step_seconds: seconds of a step.
        every: see `Islands`.
        overlap: see `Islands`.
        failures: failures of an island in an hour of life.
        grace: see `Islands`.
        poll: see `Islands`.
        steps: of the whole run, whose hours, bytes and requests are printed, too. None: of a round.
        optimizer: inside, "adamw" or "muon": of which the losses are printed.

    Raises:
        ValueError: numbers are out of range, or failures so frequent that nothing counts.
    """
    params = static_count("params", params)
    islands = static_count("islands", islands)
    every = static_count("every", every)
    if not 0 <= overlap < every:
        raise ValueError(f"overlap={overlap} must be at least 0 and less than every={every}")
    if not static_float("step_seconds", step_seconds) > 0:
        raise ValueError(f"step_seconds={step_seconds} must be above 0: give the time of a step")
    for name, value in (("failures", failures), ("grace", grace), ("poll", poll)):
        if not static_float(name, value) >= 0:
            raise ValueError(f"{name}={value} must be at least 0")
    if steps is not None:
        steps = static_count("steps", steps)
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer={optimizer!r} is unknown: use one of {', '.join(OPTIMIZERS)}")
    busy, beside, rate = every * step_seconds, overlap * step_seconds, failures / 3600
    if rate * busy / 2 >= 1:
        raise ValueError(
            f"failures={failures} an hour leave no round of {busy:g} s: take fewer steps a round "
            f"than every={every}"
        )
    vector = {"w": jax.ShapeDtypeStruct((params,), jnp.float32)}
    found = []
    for name, (make, trained) in EXCHANGES.items():
        tx = make()
        message = 4 * message_words(tx, vector, jax.eval_shape(tx.init, vector))
        one = link.latency + message / link.bandwidth
        seconds = one + poll + islands * one + _REQUESTS * link.latency
        waited = max(0.0, seconds - beside)
        stalls = max(0.0, busy / 2 - beside) + (islands - 1) * max(0.0, grace - beside)
        goodput = busy / (busy + waited) * (1 - rate * busy / 2) / (1 + rate * stalls)
        requests = 1 + islands + _REQUESTS
        recipe = None if trained is None else Recipe(optimizer, "local", every, trained)
        loss = None if recipe is None else Losses.shipped().of(recipe)
        found.append(IslandRound(name, message, seconds, waited, goodput, requests, loss))
    return IslandsPlan(
        params,
        islands,
        step_seconds,
        every,
        overlap,
        failures,
        grace,
        tuple(found),
        steps,
        optimizer,
    )
