"""Islands in one process, in virtual time: what failures cost, without machines that fail.

Parameters, messages and decisions are real, and so is all of the code of a round. Seconds are not:
steps take as long as they are said to take, and links too. Hours of a run take seconds, and a
script of failures gives the same history each time.
"""

import collections
import contextlib
import functools
import heapq
import itertools
import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from reference_islands import Memory

from jaxsparse.islands.life import Report
from jaxsparse.islands.member import IslandState, Member
from jaxsparse.islands.protocol import decision_key, list_rounds
from jaxsparse.islands.records import Decision
from jaxsparse.islands.store import UnreachableError


class Event(NamedTuple):
    """Something that happens to an island, or to its way to the store.

    "kill" ends its process, and "start" has it join. "stop" suspends it until "go". "cut" keeps it
    from the store until "mend".
    """

    seconds: float
    island: str
    what: Literal["kill", "start", "stop", "go", "cut", "mend"]


class Told(NamedTuple):
    """What became of an island."""

    state: IslandState | None  # its last one, or None if it is dead
    steps: int  # that it made, in all of its lives
    counted: int  # those of them that are in the global parameters
    waited: float  # seconds in which it waited for an exchange
    rounds: tuple[Report, ...]
    # How often it asked the store, and bytes of objects that it read or wrote, by operation and
    # kind of object, such as ("get", "messages"). Lists have no bytes.
    requests: Mapping[tuple[str, str], int]
    bytes: Mapping[tuple[str, str], int]


class VirtualStore(Memory):
    """Messages are seen some time after they were sent, and all other objects at once."""

    def __init__(self, latency, now):
        super().__init__()
        self._latency, self._now, self._seen_at = latency, now, {}

    def create(self, key, data):
        is_new = super().create(key, data)
        if is_new:
            self._seen_at[key] = self._now() + self._latency * key.startswith("messages/")
        return is_new

    def get(self, key):
        return super().get(key) if self._seen_at.get(key, math.inf) <= self._now() else None

    def names(self, folder):
        now = self._now()
        names = super().names(folder)
        return [name for name in names if self._seen_at[f"{folder}/{name}"] <= now]


class _Link:
    """An island's way to the store, and what goes that way: see `Told`."""

    def __init__(self, store, name):
        self._store, self._name, self.is_cut = store, name, False
        self.requests, self.bytes = collections.Counter(), collections.Counter()

    def create(self, key, data):
        self._count("create", key, len(data))
        return self._store.create(key, data)

    def get(self, key):
        found = self._store.get(key)
        self._count("get", key, len(found or b""))
        return found

    def names(self, folder):
        self._count("names", folder)
        return self._store.names(folder)

    def delete(self, keys):
        self._count("delete", keys[0] if keys else "")  # all of them in one request
        self._store.delete(keys)

    def _count(self, operation, key, bytes=0):
        if self.is_cut:
            raise UnreachableError(f"{self._name} is cut off")
        kind = operation, key.partition("/")[0]
        self.requests[kind] += 1
        self.bytes[kind] += bytes


class _Island:
    """An island, dead or alive.

    Args:
        make: makes its member. It is given what writes snapshots beside training.
        first: the training state from which it starts.
    """

    def __init__(self, make, first):
        self._make, self._first = make, first
        self._member = self._exchange = self.state = None
        self._writing = None  # a snapshot that is not there yet
        self._reports = ()  # of former lives
        # Steps that no message that counted has, and how many of them the present message has.
        self._owed = self._sent = 0
        # Messages that it did not see counted when it died: life, first possible round, steps.
        self.left = []
        self.steps = self.counted = 0
        self.waited, self.is_stopped = 0.0, False

    @property
    def is_alive(self):
        return self._member is not None

    @property
    def reports(self):
        """Of all its lives."""
        return (*self._reports, *(self._member.reports if self._member else ()))

    def start(self):
        self._member, self.is_stopped = self._make(self._write), False

    def kill(self):
        if self._member is not None and self._exchange is not None:
            if self._exchange.counted:
                self.counted += self._sent
            else:
                self.left.append((self._member.rounds.life, self._exchange.round, self._sent))
        self._reports = self.reports
        self._member = self.state = self._exchange = self._writing = None
        self._owed = 0

    def act(self, step, batch, every, overlap):
        """Does what is next: a "step", a "wait", or to "begin" an exchange."""
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
                    self._finish()
        except UnreachableError:
            if self.state is None or self.state.steps >= overlap:
                return "wait"
        if self._exchange is None and self.state.steps >= every:
            self.state, self._exchange = self._member.begin(self.state)
            self._sent = self._owed
            return "begin"
        worker, _ = step(self.state.worker, batch(self.steps))
        self.state = self.state._replace(worker=worker, steps=self.state.steps + 1)
        self.steps, self._owed = self.steps + 1, self._owed + 1
        return "step"

    def _write(self, write):
        """Writes a snapshot. It tries again later, and lets nobody wait for that, as `Writer`."""
        self._writing = self._writing or write
        with contextlib.suppress(UnreachableError):
            self._writing()
            self._writing = None

    def _finish(self):
        if self._exchange.counted:
            self.counted, self._owed = self.counted + self._sent, self._owed - self._sent
        self.state, self._exchange = self._member.finish(self.state, self._exchange), None


def simulate(
    step: Any,
    arithmetic: Any,
    state: Any,
    batches: Mapping[str, Any],
    *,
    seconds: float,
    step_seconds: Mapping[str, float] | float,
    every: int,
    events: Any = (),
    grace: float = 60.0,
    overlap: int = 0,
    poll: float = 0.2,
    latency: float = 0.0,
) -> dict[str, Told]:
    """Trains on islands for some virtual seconds, and tells what became of each, by name.

    Settings that `Islands` has are as there. An island's batch of a step is `batches[name](t)`,
    with t the number of steps that it has made. A step takes `step_seconds`, for all islands or by
    name, and a message takes `latency` until it is seen. Islands start at 0, unless "start" is the
    first of the `events` of one. One that is killed keeps nothing.
    """
    if not isinstance(step_seconds, Mapping):
        step_seconds = dict.fromkeys(batches, step_seconds)
    now = 0.0
    store = VirtualStore(latency, lambda: now)
    links = {name: _Link(store, name) for name in batches}

    def member(name, beside):
        settings = {"quorum": 1, "grace": grace, "snapshots": 10, "clock": lambda: now}
        return Member(arithmetic, links[name], name, beside=beside, **settings)

    islands = {name: _Island(functools.partial(member, name), state) for name in batches}
    turns = dict.fromkeys(batches, 0)  # the number of each one's next action; others are off
    numbers = itertools.count()  # of things at one time, the first that was planned comes first
    queue = []

    def plan(seconds, name, event=None):
        """An event, or the next action of an island in place of the one that was planned."""
        if event is None:
            turns[name] += 1
        heapq.heappush(queue, (seconds, next(numbers), name, event or turns[name]))

    events = sorted(events)
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
                    plan(now, name)
            case Event(what="kill"):
                one.kill()
            case Event(what="stop"):
                one.is_stopped = True
            case Event(what="go"):
                if one.is_stopped:
                    one.is_stopped = False
                    plan(now, name)
            case Event():
                links[name].is_cut = next_.what == "cut"
            case int() if next_ == turns[name] and one.is_alive and not one.is_stopped:
                did = one.act(step, batches[name], every, overlap)
                one.waited += poll if did == "wait" else 0.0
                plan(now + takes(name)[did], name)
    for round in list_rounds(store, "decisions"):
        lives = Decision.from_bytes(store.get(decision_key(round)) or b"", round)[0].lives
        for name, one in islands.items():
            for left in [x for x in one.left if round >= x[1] and lives.get(name) == x[0]]:
                one.counted += left[2]
                one.left.remove(left)
    found = {}
    for name, one in islands.items():
        of_store = links[name].requests, links[name].bytes
        found[name] = Told(one.state, one.steps, one.counted, one.waited, one.reports, *of_store)
    return found
