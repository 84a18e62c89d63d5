"""Islands in one process, in virtual time: what failures cost, without machines that fail.

Parameters, messages and decisions are real, and so is all of the code of a round. Seconds are not:
steps take as long as they are said to take, and links too. Hours of a run take seconds, and a
script of failures gives the same history each time. So do failures that are drawn from a seed.
"""

import collections
import contextlib
import functools
import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import jax
import optax

from jaxsparse.arrays.settings import static_float
from jaxsparse.islands.arithmetic import Arithmetic
from jaxsparse.islands.exchange import Exchange, Report
from jaxsparse.islands.member import IslandState, Member
from jaxsparse.islands.records import Decision
from jaxsparse.islands.rounds import decision_key, rounds_in
from jaxsparse.islands.store import UnreachableError
from jaxsparse.outer.local_steps import params_of
from jaxsparse.outer.worker import Select, Step

What = Literal[
    "kill", "start", "stop", "go", "jump",
    "cut", "deafen", "delay", "repeat", "lose", "stale", "mend",
]  # fmt: skip
# What begins, and what ends it. A clock that has jumped stays so.
_ENDS: dict[What, What | None] = {
    "kill": "start", "stop": "go", "cut": "mend", "deafen": "mend", "delay": "mend",
    "repeat": "mend", "lose": "mend", "stale": "mend", "jump": None,
}  # fmt: skip
_TAKE_SECONDS = ("delay", "repeat", "jump")


T = TypeVar("T")
Beside = Callable[[Callable[[], None]], None]


class Event(NamedTuple):
    """Something that happens to an island, to its way to the store, or to its clock.

    What an island writes are its messages, decisions and snapshots, and what it deletes. Whatever
    "cut" to "stale" have begun lasts until "mend", which ends all of it.

    Attributes:
        seconds: when.
        island: its name.
        what:
            "kill": its process ends. "start": it joins, and begins if it was not there yet.
            "stop": its process is suspended. "go": it goes on.
            "cut": it does not reach the store. For a network that is split, cut off all islands of
            one side.
            "deafen": the store does what it writes, and it hears an error.
            "delay": the same, but the store does it `by` seconds later.
            "repeat": what it writes arrives again, `by` seconds later.
            "lose": the store says that it has what it writes, and has it not.
            "stale": what it reads is as it was now, and what it has written itself since.
            "mend": its way to the store is as it was at first. What is on the way still arrives.
            "jump": its clock goes forward by `by` seconds, or back if that is below 0.
        by: seconds, see `what`. Others than "delay", "repeat" and "jump" have none.
    """

    seconds: float
    island: str
    what: What
    by: float = 0.0


def random_events(
    islands: Iterable[str],
    seconds: float,
    failures: Mapping[What, float],
    *,
    away: float = 60.0,
    by: float = 30.0,
    seed: int = 0,
) -> list[Event]:
    """Draws events for `simulate`: failures at random, and what ends them.

    Each kind of failure comes to each island by itself, in a Poisson process that pauses while the
    failure lasts. So several of them may meet. Then the first "mend" ends all that it can end.

    Args:
        islands: their names.
        seconds: of the simulation. Later events are left out.
        failures: how often in an hour each kind comes to an island, such as `{"kill": 0.5, "jump":
            0.1}`. Kinds are those of `Event.what` that begin something.
        away: mean seconds until "start", "go" or "mend" ends one.
        by: mean of `Event.by`. A clock jumps forward and back equally often.
        seed: of the draws. An island's events of a kind do not depend on what else is drawn.

    Raises:
        ValueError: a kind is unknown or ends something, or a number is negative or not finite.

    Example:
        >>> events = random_events(["oslo"], 1000.0, {"cut": 2.0}, seed=1)
        >>> [(round(event.seconds), event.what) for event in events]
        [(224, 'cut'), (278, 'mend'), (743, 'cut'), (853, 'mend')]
    """
    for label, value, least in (
        ("seconds", seconds, 0.0), ("away", away, 1e-9), ("by", by, 1e-9),
        *((f"failures[{what!r}]", rate, 0.0) for what, rate in failures.items()),
    ):  # fmt: skip
        if not least <= static_float(label, value) < math.inf:
            raise ValueError(f"{label}={value} must be finite and at least {least:g}")
    if unknown := [what for what in failures if what not in _ENDS]:
        raise ValueError(f"failures has {unknown[0]!r}: use {', '.join(_ENDS)}")
    found = []
    for name in islands:
        for what, rate in failures.items():
            draw = random.Random(f"{seed} {name} {what}")
            now = draw.expovariate(rate / 3600) if rate else math.inf
            while now < seconds:
                late = draw.expovariate(1 / by) if what in _TAKE_SECONDS else 0.0
                late *= draw.choice((1, -1)) if what == "jump" else 1
                found.append(Event(now, name, what, late))
                if (end := _ENDS[what]) is not None:
                    now += draw.expovariate(1 / away)
                    found.append(Event(now, name, end))
                now += draw.expovariate(rate / 3600)
    return sorted(event for event in found if event.seconds < seconds)


class Told(NamedTuple):
    """What became of an island.

    Attributes:
        state: its last state, or None if it is dead.
        steps: the steps that it made, in all of its lives.
        counted: those of them that are in the global parameters.
        waited: seconds in which it waited for an exchange.
        rounds: reports of its rounds.
        requests: how often it asked the store, by operation and kind of object, such as
            ("get", "messages"). Operations are those of `store.Objects`.
        bytes: bytes of objects that it read or wrote, in the same way. Listings have none.
    """

    state: IslandState | None
    steps: int
    counted: int
    waited: float
    rounds: tuple[Report, ...]
    requests: Mapping[tuple[str, str], int]
    bytes: Mapping[tuple[str, str], int]


class VirtualStore:
    """Messages are seen some time after they were sent, and all other objects at once.

    Args:
        latency: seconds until a message of no bytes is seen.
        bandwidth: bytes a second from an island to the store.
        now: the time.
    """

    def __init__(self, latency: float, bandwidth: float, now: Callable[[], float]) -> None:
        self._latency, self._bandwidth, self._now = latency, bandwidth, now
        # By folder, so that a listing takes no longer in a longer run.
        self._folders: dict[str, dict[str, tuple[float, bytes]]] = {}
        # Writes on the way: when they arrive, their number, and what they do then.
        self._coming: list[tuple[float, int, Callable[[float], Any]]] = []
        self._numbers = itertools.count()

    def create(self, key: str, data: bytes) -> bool:
        return self.created(self.now(), key, data)

    def get(self, key: str) -> bytes | None:
        now = self.now()
        objects, name = self._place(key)
        seen_at, data = objects.get(name, (math.inf, b""))
        return data if seen_at <= now else None

    def names(self, folder: str) -> list[str]:
        now, objects = self.now(), self._folders.get(folder, {})
        return sorted(name for name, (seen_at, _) in objects.items() if seen_at <= now)

    def delete(self, keys: list[str]) -> None:
        self.deleted(self.now(), keys)

    def created(self, now: float, key: str, data: bytes) -> bool:
        """`create`, as a request that has arrived at this time."""
        objects, name = self._place(key)
        if name in objects:
            return False
        delay = self._latency + len(data) / self._bandwidth if key.startswith("messages/") else 0.0
        objects[name] = now + delay, data
        return True

    def deleted(self, now: float, keys: list[str]) -> None:
        """`delete`, as a request that has arrived at this time."""
        del now
        for key in keys:
            objects, name = self._place(key)
            objects.pop(name, None)

    def later(self, seconds: float, write: Callable[[float], Any]) -> None:
        """Has a request arrive so many seconds later. `write` is given the time then."""
        at = self.now() + seconds
        heapq.heappush(self._coming, (at, next(self._numbers), write))

    def is_coming(self, key: str) -> bool:
        """Whether an object has been sent, and is not seen yet."""
        objects, name = self._place(key)
        return name in objects and objects[name][0] > self.now()

    def now(self) -> float:
        """The time. Requests that should have arrived until then have."""
        now = self._now()
        while self._coming and self._coming[0][0] <= now:
            at, _, write = heapq.heappop(self._coming)
            write(at)
        return now

    def as_now(self) -> "VirtualStore":
        """A store that shows for ever what this one shows now, and what is created in it."""
        now = self.now()
        found = VirtualStore(0.0, math.inf, lambda: now)
        found._folders = {folder: dict(objects) for folder, objects in self._folders.items()}
        return found

    def _place(self, key: str) -> tuple[dict[str, tuple[float, bytes]], str]:
        folder, _, name = key.rpartition("/")
        return self._folders.setdefault(folder, {}), name


class _Link:
    """An island's way to the store, and what goes that way: see `Told`."""

    def __init__(self, store: VirtualStore, name: str) -> None:
        self._store, self._name = store, name
        self._faults: dict[What, float] = {}  # with their seconds
        self._shown: VirtualStore | None = None  # if it reads an old state
        self.requests: collections.Counter[tuple[str, str]] = collections.Counter()
        self.bytes: collections.Counter[tuple[str, str]] = collections.Counter()

    def happens(self, what: What, by: float) -> None:
        """One of the events from "cut" to "mend"."""
        if what == "mend":
            self._faults, self._shown = {}, None
            return
        self._faults[what] = by
        if what == "stale":
            self._shown = self._store.as_now()

    def create(self, key: str, data: bytes) -> bool:
        # As long as a message is on its way, an island still sends it, and asks for nothing more.
        is_new = not self._store.is_coming(key)
        self._count("create", key, len(data) * is_new, requests=int(is_new))

        def write(now: float) -> bool:
            is_created = self._store.created(now, key, data)
            if is_created and self._shown is not None:
                self._shown.create(key, data)
            return is_created

        return self._write(write, True)

    def get(self, key: str) -> bytes | None:
        found = (self._shown or self._store).get(key)
        self._count("get", key, len(found or b""))
        return found

    def names(self, folder: str) -> list[str]:
        self._count("names", folder)
        return (self._shown or self._store).names(folder)

    def delete(self, keys: list[str]) -> None:
        self._count("delete", keys[0] if keys else "")  # all of them in one request
        self._write(lambda now: self._store.deleted(now, keys), None)

    def _write(self, write: Callable[[float], T], if_lost: T) -> T:
        """What the store answers to a write, or what it says if it loses that."""
        faults, store = self._faults, self._store
        if "lose" in faults:
            return if_lost
        for what in ("repeat", "delay"):
            if what in faults:
                store.later(faults[what], write)
        found = if_lost if "delay" in faults else write(store.now())
        if "delay" in faults or "deafen" in faults:
            raise UnreachableError(f"{self._name} does not hear what became of its request")
        return found

    def _count(self, operation: str, key: str, bytes: int = 0, requests: int = 1) -> None:
        if "cut" in self._faults:
            raise UnreachableError(f"{self._name} is cut off")
        kind = operation, key.partition("/")[0]
        self.requests[kind] += requests
        self.bytes[kind] += bytes


class _Island:
    """An island of the simulation, dead or alive.

    Args:
        make: makes its member. It is given what writes snapshots beside training.
        first: the training state from which it starts.
    """

    def __init__(self, make: Callable[[Beside], Member], first: Any) -> None:
        self._make, self._first = make, first
        self._member: Member | None = None
        self._exchange: Exchange | None = None
        self._writing: Callable[[], None] | None = None  # of a snapshot that is not there yet
        self._reports: list[Report] = []  # of former lives
        # Steps that no message that counted has, and how many of them the present message has.
        self._owed = self._sent = 0
        # Messages that it did not see counted when it died: life, first possible round, steps.
        self.left: list[tuple[str, int, int]] = []
        self.state: IslandState | None = None
        self.steps = self.counted = 0
        self.waited = 0.0
        self.is_stopped = False

    @property
    def is_alive(self) -> bool:
        return self._member is not None

    @property
    def reports(self) -> tuple[Report, ...]:
        """Of all its lives."""
        return (*self._reports, *(self._member.reports if self._member else ()))

    def start(self) -> None:
        self._member, self.is_stopped = self._make(self._write), False

    def kill(self) -> None:
        if self._member is not None and self._exchange is not None:
            if self._exchange.counted:
                self.counted += self._sent
            else:
                self.left.append((self._member.life, self._exchange.round, self._sent))
        self._reports = list(self.reports)
        self._member = self.state = self._exchange = self._writing = None
        self._owed = 0

    def act(
        self, step: Step, batch: Callable[[int], Any], every: int, overlap: int
    ) -> Literal["step", "wait", "begin"]:
        """Does what is next."""
        assert self._member is not None
        if self._writing is not None:
            self._write(self._writing)
        try:
            if self.state is None:
                self.state = self._member.join(self._first)
            is_due = self.state.steps >= overlap
            if self._exchange is not None:
                is_done = self._exchange.is_done or self._exchange.advance()
                if is_due and not is_done:
                    return "wait"
                if is_due:
                    self._finish(self._member, self.state, self._exchange)
        except UnreachableError:
            if self.state is None or self.state.steps >= overlap:
                return "wait"
        if self._exchange is None and self._member.is_over(self.state.steps, every):
            self.state, self._exchange = self._member.begin(self.state)
            self._sent = self._owed
            return "begin"
        worker, _ = step(self.state.worker, batch(self.steps))
        self.state = self.state._replace(worker=worker, steps=self.state.steps + 1)
        self.steps, self._owed = self.steps + 1, self._owed + 1
        return "step"

    def _write(self, write: Callable[[], None]) -> None:
        """Writes a snapshot. It tries again later, and lets nobody wait for that, as `Writer`."""
        self._writing = self._writing or write
        with contextlib.suppress(UnreachableError):
            self._writing()
            self._writing = None

    def _finish(self, member: Member, state: IslandState, exchange: Exchange) -> None:
        if exchange.counted:
            self.counted, self._owed = self.counted + self._sent, self._owed - self._sent
        self.state, self._exchange = member.finish(state, exchange), None


def simulate(
    step: Step,
    outer: optax.GradientTransformation,
    state: Any,
    batches: Mapping[str, Callable[[int], Any]],
    *,
    seconds: float,
    step_seconds: Mapping[str, float] | float,
    every: int,
    events: Iterable[Event] = (),
    quorum: int = 1,
    grace: float = 60.0,
    overlap: int = 0,
    mixing: float | None = None,
    snapshots: int = 10,
    round_seconds: float | None = None,
    late_decay: float = 1.0,
    poll: float = 0.2,
    latency: float = 0.0,
    bandwidth: float = math.inf,
    start_seconds: float = 0.0,
    params: Select | None = None,
) -> dict[str, Told]:
    """Trains on islands for some virtual seconds.

    Args:
        step: see `Islands`.
        outer: see `Islands`.
        state: the training state from which islands start.
        batches: for each island, by name, its batch of a step: `batches[name](t)`, with t the
            number of steps that it has made.
        seconds: when the simulation ends.
        step_seconds: seconds of a step, for all islands or by name.
        every: see `Islands`.
        events: what happens to islands, from a script, or from `random_events`. They start at 0,
            unless "start" is what happens to them first. One that is killed keeps nothing.
        quorum: see `Islands`.
        grace: see `Islands`.
        overlap: see `Islands`.
        mixing: see `Islands`.
        snapshots: see `Islands`.
        round_seconds: see `Islands`.
        late_decay: see `Islands`.
        poll: see `Islands`.
        latency: seconds until a message of no bytes is seen.
        bandwidth: bytes of messages a second from an island to the store. Reading takes no time.
        start_seconds: seconds from an island's start to its first step.
        params: see `Islands`.

    Returns:
        What became of each island, by name.

    Raises:
        ValueError: an event of an island without batches, before time 0, of an unknown kind, or
            with a `by` that it has no use for; or several processes of `jax.distributed`.

    Example:
        >>> import jax, jax.numpy as jnp, optax, jaxsparse
        >>> step = jax.jit(lambda state, x: ((state[0] - 0.1 * (state[0] - x),), None))
        >>> outer = jaxsparse.outer.mean(axis_name=None)
        >>> batch = lambda t: jnp.ones(3)
        >>> told = simulate(step, outer, (jnp.zeros(3),), {"a": batch, "b": batch}, seconds=60,
        ...     step_seconds=1.0, every=5, grace=3.0, events=[Event(31.0, "b", "kill")])
        >>> [(name, one.steps, one.counted) for name, one in told.items()]
        [('a', 54, 50), ('b', 28, 25)]
    """
    if jax.process_count() > 1:
        raise ValueError(
            f"simulate has islands in one process, but this job has {jax.process_count()}: run it "
            "in a program of its own"
        )
    events = sorted(events)
    for event in events:
        if event.island not in batches or event.seconds < 0:
            raise ValueError(f"{event} is of no island in batches, or before time 0")
        if event.what not in get_args(What):
            raise ValueError(f"{event}: what happens must be one of {', '.join(get_args(What))}")
        if event.what not in _TAKE_SECONDS and event.by:
            raise ValueError(f"{event}: by is for {', '.join(_TAKE_SECONDS)}, so leave it out")
        if not math.isfinite(event.by) or (event.what != "jump" and event.by < 0):
            raise ValueError(f"{event}: by must be finite, and at least 0 unless a clock jumps")
    if not isinstance(step_seconds, Mapping):
        step_seconds = dict.fromkeys(batches, step_seconds)
    now = 0.0
    store = VirtualStore(latency, bandwidth, lambda: now)
    arithmetic = Arithmetic(outer, params or params_of, mixing)
    ahead = dict.fromkeys(batches, 0.0)  # by so much, clocks are
    links = {name: _Link(store, name) for name in batches}

    def member(name: str, beside: Beside) -> Member:
        return Member(
            arithmetic,
            links[name],
            name,
            quorum=quorum,
            grace=grace,
            snapshots=snapshots,
            round_seconds=round_seconds,
            late_decay=late_decay,
            clock=lambda: now + ahead[name],
            beside=beside,
        )

    islands = {name: _Island(functools.partial(member, name), state) for name in batches}
    turns = dict.fromkeys(batches, 0)  # the number of each one's next action; others are off
    numbers = itertools.count()  # of things at one time, the first that was planned comes first
    queue: list[tuple[float, int, str, Event | int]] = []

    def plan(seconds: float, name: str, event: Event | None = None) -> None:
        """An event, or the next action of an island in place of the one that was planned."""
        if event is None:
            turns[name] += 1
        heapq.heappush(queue, (seconds, next(numbers), name, event or turns[name]))

    first = {event.island: event.what for event in reversed(events)}
    for name in batches:
        if first.get(name) != "start":
            plan(0.0, name, Event(0.0, name, "start"))
    for event in events:
        plan(event.seconds, event.island, event)
    takes = lambda name: {"step": step_seconds[name], "wait": poll, "begin": 0.0}
    while queue and queue[0][0] <= seconds:
        now, _, name, next_ = heapq.heappop(queue)
        one = islands[name]
        match next_:
            case Event(what="start"):
                if not one.is_alive:
                    one.start()
                    plan(now + start_seconds, name)
            case Event(what="kill"):
                one.kill()
            case Event(what="stop"):
                one.is_stopped = True
            case Event(what="go"):
                if one.is_stopped:
                    one.is_stopped = False
                    plan(now, name)
            case Event(what="jump"):
                ahead[name] += next_.by
            case Event():
                links[name].happens(next_.what, next_.by)
            case int() if next_ == turns[name] and one.is_alive and not one.is_stopped:
                did = one.act(step, batches[name], every, overlap)
                one.waited += poll if did == "wait" else 0.0
                plan(now + takes(name)[did], name)
    decisions = [
        Decision.from_bytes(store.get(decision_key(round)) or b"", round)[0]
        for round in rounds_in(store, "decisions")
    ]
    for name, one in islands.items():
        for life, round, steps in one.left:
            if any(d.round >= round and d.lives.get(name) == life for d in decisions):
                one.counted += steps
    return {
        name: Told(
            one.state,
            one.steps,
            one.counted,
            one.waited,
            one.reports,
            links[name].requests,
            links[name].bytes,
        )
        for name, one in islands.items()
    }
