"""One island: how it joins, and how a round begins and ends for it."""

import functools
import hashlib
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from jaxsparse.islands.arithmetic import Arithmetic, Shared, has_residual
from jaxsparse.islands.exchange import Exchange, Report
from jaxsparse.islands.lead import check_alike, is_first, led, spread
from jaxsparse.islands.records import BrokenError, ForeignError, from_snapshot, to_snapshot
from jaxsparse.islands.rounds import Rounds
from jaxsparse.islands.store import Objects, UnreachableError, check_name, not_shown

T = TypeVar("T")


class IslandState(NamedTuple):
    """The training state of an island. Save it as it is: with it an island goes on where it was.

    Attributes:
        worker: the island's own training state.
        params: the global parameters at the start of the round, equal on all islands, in float32 or
            wider. Evaluate these.
        outer: the state of the outer optimizer, with this island's residual.
        round: the number of the round, int.
        steps: steps since the round began, int.
        weight: what the steps since its last message that counted weigh, float.
        island: a number made of the island's name, int. What a state owes counts once, so no other
            island may go on from it.
    """

    worker: Any
    params: Any
    outer: Any
    round: int
    steps: int
    weight: float
    island: int


class Tried(Protocol):
    """Calls a function that asks the store. See `Member.join`."""

    def __call__(self, function: Callable[[], T], at: Callable[[], Any] = ...) -> T:
        """What the function returns."""


def _once(function: Callable[[], T], at: Callable[[], Any] = lambda: None) -> T:
    return function()


class Member:
    """An island's name, its arithmetic and its view of the store.

    Args:
        arithmetic: the compiled programs. Members in one process may share them.
        store: the store.
        name: its name.
        quorum: see `Islands`.
        grace: see `Islands`.
        snapshots: see `Islands`.
        weighted: see `Islands`.
        members: see `Islands`.
        clock: seconds, for differences alone. While it goes back, none pass.
        beside: starts a function that writes a snapshot, beside training. None: it is called, and
            waited for.

    Attributes:
        rank: a number made of its name.
        reports: what became of its rounds.
        has_joined: whether this life has begun to train, and has not left.
        is_restored: whether it began from a saved state, and has not dropped what that owed.
        has_counted: whether a message of this life has counted.
        keeps: whether it keeps what has not been sent. If not, its late messages would be zeros.
    """

    def __init__(
        self,
        arithmetic: Arithmetic,
        store: Objects,
        name: str,
        *,
        quorum: int,
        grace: float,
        snapshots: int,
        weighted: bool = False,
        members: Collection[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        beside: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self.arithmetic, self.store, self.clock = arithmetic, store, _Forward(clock)
        self.name = check_name(name)
        self.quorum, self.grace, self.every_snapshot = quorum, grace, snapshots
        self.weighted, self._beside = weighted, beside
        if isinstance(members, str):
            raise ValueError(f"members={members!r} is a text: give a list of names")
        self._members = None if members is None else frozenset(map(check_name, members))
        if self._members is not None and name not in self._members:
            raise ValueError(f"name={name!r} is none of members={sorted(self._members)}: add it")
        if self._members is not None and quorum > len(self._members):
            raise ValueError(
                f"quorum={quorum} is more than the {len(self._members)} members: all would wait "
                "for ever"
            )
        self.rank = zlib.crc32(name.encode()) & 0x7FFFFFFF
        self.reports: list[Report] = []
        self._rounds: Rounds | None = None
        self.settings, self.words = "", 0
        self.has_joined = self.is_restored = self.has_counted = False
        self.keeps = True
        self._began = 0.0  # when the last exchange began, or the first steps

    @property
    def rounds(self) -> Rounds:
        assert self._rounds is not None, "join first"
        return self._rounds

    @property
    def life(self) -> str:
        """The word of this life, or "" before it joins."""
        return "" if self._rounds is None else self._rounds.life

    def join(
        self, state: Any, settings: Mapping[str, Any] = {}, tried: Tried = _once
    ) -> IslandState:
        """The state to go on from: the newest snapshot and decisions since, or the first of all.

        Args:
            state: a training state, or an `IslandState` that this island saved.
            settings: what all processes of this island have in common besides, in JSON's types.
            tried: calls a function that asks the store, and maybe again if it does not answer. It
                is also given a function that tells how far that one has come.

        Raises:
            ValueError: the state is another island's; the store holds another run, or none
                although the state is of one; or see `lead.check_alike`.
            UnreachableError: the store does not answer, or does not show what must be there: the
                snapshot that it was given, one that it lists, or the decision before the state's
                round.
            RuntimeError: see `Exchange.advance`.
        """
        own = state.worker if isinstance(state, IslandState) else state
        if isinstance(state, IslandState) and int(state.island) != self.rank:
            raise ValueError(
                f"the state is another island's than {self.name!r}. What it owes counts once, and "
                "under its own name: give it to that island, or join with state.worker"
            )
        shared = self.arithmetic.start(own)
        self.keeps = has_residual(shared)
        self.is_restored = isinstance(state, IslandState)
        picked = self.arithmetic.own(own)
        self.words, digest = self.arithmetic.described(shared, picked)
        # So that all islands agree on who may take part.
        self.settings = digest if self._members is None else _listed(digest, self._members)
        begins = {"digest of outer and members": self.settings, "round": "", "steps": ""}
        if isinstance(state, IslandState):
            begins |= {"round": f"{int(state.round)}", "steps": f"{int(state.steps)}"}
            picked = [picked, state.params]
        check_alike({**settings, **begins}, picked)
        # What was sent before is of a former life.
        self.has_joined = self.has_counted = False
        self._rounds = Rounds(
            self.store,
            self.name,
            settings=self.settings,
            words=self.words,
            quorum=self.quorum,
            grace=self.grace,
            allowed=self._members,
        )
        joined = self._back(state, tried) if self.is_restored else self._new(own, shared, tried)
        self.has_joined, self._began = True, self.clock()
        return joined._replace(worker=self.arithmetic.copied(joined.worker))

    def _new(self, own: Any, shared: Shared, tried: Tried) -> IslandState:
        """A first state."""
        found = tried(functools.partial(self._origin, shared))
        self._begin_life(tried)
        catching_up = Exchange(self, *found, self.arithmetic.own(own), None)
        tried(catching_up.advance, lambda: catching_up.round)
        shared, round = catching_up.shared, catching_up.round
        worker = self.arithmetic.put_back(own, shared.params)
        return IslandState(worker, *shared, round, 0, 0.0, self.rank)

    def _begin_life(self, tried: Tried) -> None:
        """Takes a number in the store, and tells all processes of this island."""

        def begin() -> str:
            self.rounds.begin_life()
            return self.rounds.life

        self.rounds.life = tried(functools.partial(led, begin))

    def _origin(self, shared: Shared) -> tuple[Shared, int]:
        """The newest snapshot and its round. If there is none, this island writes the first."""
        found = self.newest(shared)
        if found is None and led(self.rounds.decided, 0) is not None:
            # The run has begun, and a second snapshot of its start would stand there for nothing.
            raise not_shown(self.store, "any snapshot of its run")
        if found is None:
            led(self.rounds.keep, 0, self.snapshot(shared, 0))
            # That of another island, if it was first.
            found = self.newest(shared)
        if found is None:
            raise not_shown(self.store, "the snapshot of round 0 that it was given")
        return found

    def _check_run(self, round: int) -> None:
        """Raises unless the store holds the run of a saved state of this round."""
        # A list may come late. Of a run that has decided nothing yet, the first snapshot tells.
        first = lambda: round == 0 and self.rounds.snapshot(0) is not None
        has_snapshots = led(lambda: bool(self.rounds.snapshots()) or first())
        # Decisions stay for ever, so that of the round before the state's tells which run it is.
        is_its_run = round > 0 and led(self.rounds.decided, round - 1) is not None
        if not has_snapshots and not is_its_run:
            raise ValueError(
                f"{self.store} holds no run, but the state is of its round {round}: give the URL "
                "of that run, or join with state.worker to begin another one"
            )
        if not has_snapshots:
            raise not_shown(self.store, "any snapshot of its run")
        if round and not is_its_run:
            raise UnreachableError(
                f"{self.store} does not show the decision of round {round - 1}, but the state is "
                f"of round {round}: it shows an old state, or holds another run. Then give the "
                "URL of the state's run, or join with state.worker"
            )

    def _back(self, state: IslandState, tried: Tried) -> IslandState:
        """A saved state, after the rounds that have passed since."""
        round = int(state.round)
        tried(functools.partial(self._check_run, round))
        self._begin_life(tried)
        shared = Shared(state.params, state.outer)
        own = self.arithmetic.own(state.worker)
        catching_up = Exchange(self, shared, round, own, None)
        begun = catching_up.idle()
        tried(catching_up.advance, lambda: catching_up.round)
        shared = catching_up.shared
        if catching_up.was_sent:
            # Its former life sent more than this state knows of.
            worker = self.arithmetic.put_back(state.worker, shared.params)
            return IslandState(worker, *shared, catching_up.round, 0, 0.0, self.rank)
        worker, finite = self.arithmetic.go_on(state.worker, begun, shared.params)
        # Checkpoints make arrays of numbers.
        steps, weight = int(state.steps), float(state.weight)
        if not bool(finite):
            self._tell_not_finite(catching_up.round)
            steps, weight = 0, 0.0
        return IslandState(worker, *shared, catching_up.round, steps, weight, self.rank)

    def begin(
        self, state: IslandState, loss: float | None = None
    ) -> tuple[IslandState, Exchange | None]:
        """Ends the local steps of a round: the state to go on from, and the exchange to advance.

        `loss` is the mean loss of these steps, for those who watch.
        If parameters are not finite, there is no exchange: the island starts the round anew.
        """
        shared = Shared(state.params, state.outer)
        own = self.arithmetic.own(state.worker)
        begun = self.arithmetic.begin(own, shared, self.rank)
        if not bool(begun.finite):
            self._tell_not_finite(state.round)
            self._began = self.clock()
            worker = self.arithmetic.put_back(state.worker, state.params)
            return state._replace(worker=worker, steps=0, weight=0.0), None
        took, self._began = self.clock() - self._began, self.clock()
        weight = state.weight if self.weighted else 1.0
        exchange = Exchange(
            self, shared, state.round, own, begun, weight=weight, took=took, loss=loss
        )
        return state._replace(steps=0), exchange

    def finish(self, state: IslandState, exchange: Exchange) -> IslandState:
        """The state after an exchange, with the moves that the island made meanwhile."""
        if exchange.begun is None or not exchange.is_done:
            raise RuntimeError(f"the exchange of round {exchange.round} is not at its end")
        shared = exchange.shared
        worker, finite = self.arithmetic.go_on(state.worker, exchange.begun, shared.params)
        # What the steps beside the exchange weigh goes with what they moved.
        beside = state.weight - exchange.weight if self.weighted else 0.0
        if not bool(finite):
            self._tell_not_finite(exchange.round)
            state, beside = state._replace(steps=0), 0.0
        if self.weighted:
            state = state._replace(weight=max(beside, 0.0) + exchange.owed)
        return state._replace(
            worker=worker, params=shared.params, outer=shared.outer, round=exchange.round
        )

    def _tell_not_finite(self, round: int) -> None:
        warnings.warn(
            f"parameters of {self.name} are not finite in round {round}, or moved too far for "
            "float32: it starts the round anew from the global ones, and sends nothing of these "
            "steps",
            stacklevel=4,
        )

    def newest(self, shared: Shared, after: int = -1) -> tuple[Shared, int] | None:
        """The newest snapshot that can be read, of a round past `after`, and this round.

        None: the store lists none.

        Raises:
            UnreachableError: it lists some, and shows none that can be read.
            ValueError: it lists some, and all are another run's.
        """
        like, arrays = list(self.arithmetic.like(shared)), list[np.ndarray]()

        def read() -> int | None:
            trouble = foreign = None
            for round in reversed(self.rounds.snapshots()):
                if round <= after:
                    break
                data = self.rounds.snapshot(round)
                if data is None:
                    trouble = not_shown(self.store, f"the snapshot of round {round} that it lists")
                    continue
                try:
                    arrays.extend(from_snapshot(data, round, self.settings, like))
                    return round
                except BrokenError as error:
                    text = f"the snapshot of round {round} is left out: {error}"
                    warnings.warn(text, stacklevel=2)
                    if isinstance(error, ForeignError):
                        foreign = error
                    else:
                        trouble = UnreachableError(f"{self.store} shows no whole snapshot: {text}")
            if trouble is not None:
                raise trouble
            if foreign is not None:
                raise ValueError(
                    f"{self.store} holds no snapshot of this run: {foreign}. Give a run a prefix "
                    "of its own, and the same settings to all of its islands"
                )
            return None

        round = led(read)
        if round is None:
            return None
        found = spread(arrays, [(shape, dtype) for _, shape, dtype in like])
        return self.arithmetic.from_arrays(found, shared), round

    def keep(self, round: int, snapshot: bytes) -> None:
        """Writes a snapshot, and deletes what is not needed any more."""
        write = functools.partial(self.rounds.keep, round, snapshot)
        if self._beside is None:
            led(write)
        elif is_first():
            self._beside(write)

    def snapshot(self, shared: Shared, round: int) -> bytes:
        """What `newest` reads, of the start of a round. Only the first process has it."""
        arrays = self.arithmetic.arrays(shared)
        if is_first():
            return to_snapshot(round, self.settings, arrays)
        for _ in arrays:  # each is gathered from all processes
            pass
        return b""


class _Forward:
    """A clock that does not go back: while the one that it reads does, it stands still.

    Else an island whose clock went back by an hour would wait an hour for others.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._lock = clock, threading.Lock()  # of training, and of an exchange beside
        self._last, self._behind = clock(), 0.0

    def __call__(self) -> float:
        with self._lock:
            now = self._clock()
            self._behind += max(0.0, self._last - now)
            self._last = now
            return now + self._behind


def _listed(settings: str, members: Collection[str]) -> str:
    """Digest of settings and of who may take part."""
    text = " ".join([settings, *sorted(members)])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
