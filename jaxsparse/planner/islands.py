"""What rounds of islands take: seconds, bytes, requests, and the steps that failures cost.

The model is that of `jaxsparse.islands`: an island sends its message, looks at the store every
`poll` seconds, reads the messages of the others one after the other, and waits `grace` seconds for
one that has died. `tests/test_planner_islands.py` compares it with `jaxsparse.islands.simulate`,
which runs the protocol itself. `planner.requests` has the requests, item by item.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import optax

from jaxsparse.arrays.settings import static_count, static_float
from jaxsparse.feedback.by_message import message_words
from jaxsparse.planner import requests
from jaxsparse.planner.island_plans import IslandRound, IslandsPlan, excess
from jaxsparse.planner.losses import ABOUT_AS_FAST, Losses
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
        (excess(one), plan)
        for plan, one in found
        if one is not None and best <= ABOUT_AS_FAST * one.goodput
    ]
    # If none is cheap enough, the one that comes nearest.
    near = [(min(map(excess, plan.rounds)), plan) for plan in plans]
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
        overlap: see `Islands`. None: as many steps as an exchange takes, and `grace` if islands
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
            covered = seconds + (patience if failures else 0.0)
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
