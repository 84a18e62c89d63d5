"""Islands in one process, in virtual time: what failures cost, without machines that fail.

Parameters, messages and decisions are real, and so is all of the code of a round. Seconds are not:
steps take as long as they are said to take, and links too. Hours of a run take seconds, and a
script of failures gives the same history each time.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import optax

from jaxsparse.islands.arithmetic import Arithmetic
from jaxsparse.islands.member import Exchange, IslandState, Member, Report
from jaxsparse.islands.store import UnreachableError
from jaxsparse.outer.local_steps import params_of
from jaxsparse.outer.worker import Select, Step

What = Literal["kill", "start", "cut", "mend", "stop", "go"]


class Event(NamedTuple):
    """Something that happens to an island.

    Attributes:
        seconds: when.
        island: its name.
        what: "kill": its process ends. "start": it joins, and begins if it was not there yet.
            "cut": it does not reach the store. "mend": it does again. "stop": its process is
            suspended. "go": it goes on.
    """

    seconds: float
    island: str
    what: What


class Told(NamedTuple):
    """What became of an island.

    Attributes:
        state: its last state, or None if it is dead.
        steps: the steps that it made, in all of its lives.
        counted: those of them that are in the global parameters.
        waited: seconds in which it waited for an exchange.
        rounds: reports of its rounds.
    """

    state: IslandState | None
    steps: int
    counted: int
    waited: float
    rounds: tuple[Report, ...]


class VirtualStore:
    """Messages are seen some time after they were sent, and all other objects at once.

    Args:
        latency: seconds until a message of no bytes is seen.
        bandwidth: bytes a second from an island to the store.
        now: the time.
    """

    def __init__(self, latency: float, bandwidth: float, now: Callable[[], float]) -> None:
        self._latency, self._bandwidth, self._now = latency, bandwidth, now
        self._objects: dict[str, tuple[float, bytes]] = {}
        self.cut: set[str] = set()
        self.requests = self.stored = 0

    def create(self, key: str, data: bytes) -> bool:
        self.requests += 1
        if key in self._objects:
            return False
        self.stored += len(data)
        delay = self._latency + len(data) / self._bandwidth if key.startswith("messages/") else 0.0
        self._objects[key] = self._now() + delay, data
        return True

    def get(self, key: str) -> bytes | None:
        self.requests += 1
        seen_at, data = self._objects.get(key, (math.inf, b""))
        return data if seen_at <= self._now() else None

    def names(self, folder: str) -> list[str]:
        self.requests += 1
        split = (key.rpartition("/") for key in self._objects if self._seen(key))
        return sorted(name for place, _, name in split if place == folder)

    def delete(self, keys: list[str]) -> None:
        self.requests += len(keys)
        for key in keys:
            self._objects.pop(key, None)

    def _seen(self, key: str) -> bool:
        return self._objects[key][0] <= self._now()


class _Link:
    """An island's way to the store."""

    def __init__(self, store: VirtualStore, name: str) -> None:
        self._store, self._name = store, name

    def __getattr__(self, operation: str) -> Any:
        if self._name in self._store.cut:
            raise UnreachableError(f"{self._name} is cut off")
        return getattr(self._store, operation)


class _Island:
    """An island of the simulation, dead or alive."""

    def __init__(self) -> None:
        self.member: Member | None = None
        self.state: IslandState | None = None
        self.exchange: Exchange | None = None
        self.lives = self.steps = self.counted = 0
        self.waited = 0.0
        self.is_stopped = False
        self.turn = 0  # of its next action; others in the queue are not its own any more
        self.reports: list[Report] = []


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
        events: what happens to islands. They start at 0, unless "start" is what happens to them
            first. One that is killed keeps nothing.
        quorum: see `Islands`.
        grace: see `Islands`.
        overlap: see `Islands`.
        mixing: see `Islands`.
        snapshots: see `Islands`.
        poll: see `Islands`.
        latency: seconds until a message of no bytes is seen.
        bandwidth: bytes of messages a second from an island to the store. Reading takes no time.
        start_seconds: seconds from an island's start to its first step.
        params: see `Islands`.

    Returns:
        What became of each island, by name.

    Raises:
        ValueError: an event of an island without batches, before time 0, or of an unknown kind.

    Example:
        >>> import jax, jax.numpy as jnp, optax, jaxsparse
        >>> step = jax.jit(lambda state, x: ((state[0] - 0.1 * (state[0] - x),), None))
        >>> outer = jaxsparse.outer.diloco(1.0, 0.0, axis_name=None)
        >>> batch = lambda t: jnp.ones(3)
        >>> told = simulate(step, outer, (jnp.zeros(3),), {"a": batch, "b": batch}, seconds=60,
        ...     step_seconds=1.0, every=5, grace=3.0, events=[Event(31.0, "b", "kill")])
        >>> [(name, one.steps, one.counted) for name, one in told.items()]
        [('a', 54, 50), ('b', 28, 25)]
    """
    events = sorted(events)
    for event in events:
        if event.island not in batches or event.seconds < 0:
            raise ValueError(f"{event} is of no island in batches, or before time 0")
        if event.what not in get_args(What):
            raise ValueError(f"{event}: what happens must be one of {', '.join(get_args(What))}")
    now = [0.0]
    clock = lambda: now[0]
    store = VirtualStore(latency, bandwidth, clock)
    arithmetic = Arithmetic(outer, params or params_of, mixing)
    settings: dict[str, Any] = {
        "quorum": quorum,
        "grace": grace,
        "snapshots": snapshots,
        "clock": clock,
    }
    islands = {name: _Island() for name in batches}
    takes = (
        step_seconds if isinstance(step_seconds, Mapping) else dict.fromkeys(batches, step_seconds)
    )
    queue: list[tuple[float, int, str, Any]] = []
    numbers = iter(range(2**63))
    plan = lambda at, name, what: heapq.heappush(queue, (at, next(numbers), name, what))
    for name in batches:
        first = next((event.what for event in events if event.island == name), None)
        if first != "start":
            plan(0.0, name, "start")
    for event in events:
        plan(event.seconds, event.island, event.what)
    while queue and queue[0][0] <= seconds:
        now[0], _, name, what = heapq.heappop(queue)
        one = islands[name]
        if isinstance(what, str):
            if what == "start" and one.member is None:
                one.lives += 1
                life = f"{one.lives:06d}"
                one.member = Member(arithmetic, _Link(store, name), name, life, **settings)
                one.is_stopped = False
                one.turn += 1
                plan(now[0] + start_seconds, name, one.turn)
            _happen(one, what, name, store)
            if what == "go" and one.member is not None:
                one.turn += 1
                plan(now[0], name, one.turn)
        elif what == one.turn and one.member is not None and not one.is_stopped:
            wait = _act(one, step, batches[name], every, overlap, takes[name], poll, state)
            one.turn += 1
            plan(now[0] + wait, name, one.turn)
    return {
        name: Told(one.state, one.steps, one.counted, one.waited, (*one.reports, *_reports(one)))
        for name, one in islands.items()
    }


def _reports(one: _Island) -> Sequence[Report]:
    return one.member.reports if one.member is not None else ()


def _happen(one: _Island, what: str, name: str, store: VirtualStore) -> None:
    if what == "kill":
        one.reports += _reports(one)
        one.member = one.state = one.exchange = None
    elif what == "cut":
        store.cut.add(name)
    elif what == "mend":
        store.cut.discard(name)
    elif what in ("stop", "go"):
        one.is_stopped = what == "stop"


def _act(
    one: _Island,
    step: Step,
    batch: Callable[[int], Any],
    every: int,
    overlap: int,
    takes: float,
    poll: float,
    first: Any,
) -> float:
    """What an island does next, and the seconds that it takes."""
    assert one.member is not None
    try:
        if one.state is None:
            one.state = one.member.join(first)
        if one.exchange is not None:
            is_done = one.exchange.is_done or one.exchange.advance()
            if is_done and one.state.steps >= overlap:
                one.counted += one.exchange.steps if one.exchange.counted else 0
                one.state, one.exchange = one.member.finish(one.state, one.exchange), None
            elif one.state.steps >= overlap:
                one.waited += poll
                return poll
    except UnreachableError:
        if one.state is None or one.state.steps >= overlap:
            one.waited += poll
            return poll
    if one.state.steps >= every and one.exchange is None:
        one.state, one.exchange = one.member.begin(one.state)
        return 0.0
    worker, _ = step(one.state.worker, batch(one.steps))
    one.steps += 1
    state = one.state
    one.state = state._replace(
        worker=worker, steps=state.steps + 1, owed_steps=state.owed_steps + 1
    )
    return takes
