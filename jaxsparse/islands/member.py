"""One island: how it joins, and how a round begins, goes on and ends for it.

All of this blocks for the store alone, and waits for nobody. Each step of an exchange can be tried
again if the store does not answer. All processes of an island do the same, and the first of them
asks the store: see `processes`.
"""

import contextlib
import dataclasses
import enum
import functools
import logging
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse.arrays.layout import narrow
from jaxsparse.islands.arithmetic import (
    Arithmetic,
    Begun,
    Shared,
    has_residual,
    own_leaves,
    place_as,
    shared_leaves,
    with_own,
)
from jaxsparse.islands.processes import check_alike, gather, is_first, lead, spread
from jaxsparse.islands.protocol import GoneError, Rounds
from jaxsparse.islands.records import (
    WEIGHTS,
    BrokenError,
    Decision,
    ForeignError,
    from_snapshot,
    to_snapshot,
)
from jaxsparse.islands.store import Objects, UnreachableError, check_name, not_shown

_LOG = logging.getLogger("jaxsparse.islands")  # a line for each round
_KEPT = 1000  # reports


class IslandState(NamedTuple):
    """The training state of an island. Save it as it is: with it an island goes on where it was."""

    worker: Any  #: the island's own training state
    #: the global parameters at the start of the round, equal on all islands, in float32 or wider
    #: Evaluate these.
    params: Any
    outer: Any  #: the states of the exchange, with this island's residual, and of the optimizer
    round: int  #: the number of the round, int
    steps: int  #: steps since the round began, int
    weight: float  #: what the steps since its last message that counted weigh, float
    #: a number made of the island's name, int. What a state owes counts once, so no other island
    #: may go on from it.
    island: int


class Report(NamedTuple):
    """What became of a round, seen from an island."""

    round: int  #: its number
    members: tuple[str, ...]  #: the islands whose messages counted
    counted: bool  #: whether this island's did
    #: seconds from its message to the decision, or None if it sent none in this round
    waited: float | None
    received: int  #: bytes of messages that it read
    sent: int  #: bytes of its own message
    applied: bool  #: whether the sum was applied. It is not, if it overflows.
    digest: str  #: digest of what islands share as the next round begins

    def __str__(self) -> str:
        when = "replayed" if self.waited is None else f"decided after {self.waited:.1f} s"
        without = "" if self.counted or self.waited is None else ", without this island"
        return (
            f"round {self.round} of {', '.join(self.members)}: {when}{without}, "
            f"{self.sent / 1e6:.2f} MB sent, {self.received / 1e6:.2f} MB received"
        )


# Calls a function that asks the store, and maybe again if that does not answer. It is also given a
# function that tells how far the first one has come.
Tries = Callable[..., Any]


class Member:
    """An island's settings, see `Islands`, and what it knows in this life.

    Members in one process may share `arithmetic`. `clock` tells seconds, for differences alone.
    `beside` starts a function that writes a snapshot, beside training. Without it, training waits.
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
        clock: Callable[[], float] = time.monotonic,
        beside: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self.arithmetic, self.store, self.clock = arithmetic, store, _Forward(clock)
        self.name = check_name(name)
        self.every_snapshot, self.weighted, self._beside = snapshots, weighted, beside
        self.rank = zlib.crc32(name.encode()) & 0x7FFFFFFF
        self.reports: list[Report] = []  # of the last rounds
        self.totals = 0, 0, 0, 0  # rounds in which it counted, and sent; bytes sent, and received
        # Of this life, see `join`.
        self.rounds = Rounds(store, name, settings="", words=0, quorum=quorum, grace=grace)
        self.dtypes: Any = None
        self.has_joined = False  # whether this life has begun to train, and has not left
        self.is_restored = False  # whether it began from a saved state, whose debts stand
        self.has_counted = False  # whether a message of this life has counted
        self._began = 0.0  # when the last exchange began, or the first steps

    @property
    def life(self) -> str:
        """The word of this life, or "" before it joins."""
        return self.rounds.life

    def join(
        self,
        state: Any,
        settings: Mapping[str, Any] = {},
        tries: Tries = lambda function, at=None: function(),
    ) -> IslandState:
        """The state to go on from: the newest snapshot and decisions since, or the first of all.

        `settings` are what all processes of this island have in common besides, in JSON's types.
        For errors see `Islands`.
        """
        own = state.worker if isinstance(state, IslandState) else state
        if isinstance(state, IslandState) and int(state.island) != self.rank:
            raise ValueError(
                f"the state is another island's than {self.name!r}. What it owes counts once, and "
                "under its own name: give it to that island, or join with state.worker"
            )
        shared = self.arithmetic.start(own)
        picked = self.arithmetic.pick(own)
        self.dtypes = jax.tree.map(jnp.result_type, picked)
        words, digest = self.arithmetic.describe(shared, picked)
        self.is_restored = isinstance(state, IslandState)
        begins = {"digest of exchange and optimizer": digest, "round": "", "steps": ""}
        if isinstance(state, IslandState):
            begins |= {"round": f"{int(state.round)}", "steps": f"{int(state.steps)}"}
            picked = [picked, state.params]
        check_alike({**settings, **begins}, picked)
        # What was sent before is of a former life.
        self.has_joined = self.has_counted = False
        self.rounds = Rounds(
            self.store,
            self.name,
            settings=digest,
            words=words,
            quorum=self.rounds.quorum,
            grace=self.rounds.grace,
        )
        if isinstance(state, IslandState):
            joined = self._come_back(state, tries)
        else:
            joined = self._come(own, shared, tries)
        self.has_joined, self._began = True, self.clock()
        return joined._replace(worker=self.arithmetic.copy(joined.worker))

    def _come(self, own: Any, shared: Shared, tries: Tries) -> IslandState:
        """A first state."""
        shared, round = tries(functools.partial(self._find_origin, shared))
        self._begin_life(tries)
        exchange = Exchange(self, shared, round)
        tries(exchange.advance, lambda: exchange.round)
        worker = self.arithmetic.put_back(own, exchange.shared.params)
        return IslandState(worker, *exchange.shared, exchange.round, 0, 0.0, self.rank)

    def _come_back(self, state: IslandState, tries: Tries) -> IslandState:
        """A saved state, after the rounds that have passed since."""
        # Checkpoints make arrays of numbers.
        round, steps, weight = int(state.round), int(state.steps), float(state.weight)
        tries(functools.partial(self._check_run, round))
        self._begin_life(tries)
        exchange = Exchange(self, Shared(state.params, state.outer), round)
        begun = exchange.begin_idle()
        tries(exchange.advance, lambda: exchange.round)
        shared, round = exchange.shared, exchange.round
        if exchange.was_sent:
            # Its former life sent more than this state knows of.
            worker = self.arithmetic.put_back(state.worker, shared.params)
            return IslandState(worker, *shared, round, 0, 0.0, self.rank)
        worker, finite = self.arithmetic.go_on(state.worker, begun, shared.params)
        if not bool(finite):
            self._tell_not_finite(round)
            steps, weight = 0, 0.0
        return IslandState(worker, *shared, round, steps, weight, self.rank)

    def _begin_life(self, tries: Tries) -> None:
        """Takes a number in the store, and tells all processes of this island."""
        self.rounds.life = tries(functools.partial(lead, self.rounds.begin_life))

    def _find_origin(self, shared: Shared) -> tuple[Shared, int]:
        """The newest snapshot and its round. If there is none, this island writes the first."""
        found = self.read_newest(shared)
        if found is None and lead(self.rounds.decided, 0) is not None:
            # The run has begun, and a second snapshot of its start would stand there for nothing.
            raise not_shown(self.store, "any snapshot of its run")
        if found is None:
            lead(self.rounds.keep, 0, self.snapshot(shared, 0))
            found = self.read_newest(shared)  # that of another island, if it was first
        if found is None:
            raise not_shown(self.store, "the snapshot of round 0 that it was given")
        return found

    def _check_run(self, round: int) -> None:
        """Raises unless the store holds the run of a saved state of this round."""
        # A list may come late. Of a run that has decided nothing yet, the first snapshot tells.
        first = lambda: round == 0 and self.rounds.snapshot(0) is not None
        has_snapshots = lead(lambda: bool(self.rounds.snapshots()) or first())
        # Decisions stay for ever, so that of the round before the state's tells which run it is.
        is_its_run = round > 0 and lead(self.rounds.decided, round - 1) is not None
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

    def begin(
        self, state: IslandState, loss: float | None = None
    ) -> tuple[IslandState, "Exchange | None"]:
        """Ends the local steps of a round: the state to go on from, and the exchange to advance.

        If parameters are not finite, there is no exchange: the island starts the round anew.
        """
        shared = Shared(state.params, state.outer)
        own = self.arithmetic.pick(state.worker)
        begun = self.arithmetic.begin(own, shared, self.rank)
        took, self._began = self.clock() - self._began, self.clock()
        if not bool(begun.finite):
            self._tell_not_finite(state.round)
            worker = self.arithmetic.put_back(state.worker, state.params)
            return state._replace(worker=worker, steps=0, weight=0.0), None
        weight = state.weight if self.weighted else 1.0
        exchange = Exchange(self, shared, state.round, begun, weight, took, loss)
        return state._replace(steps=0), exchange

    def finish(self, state: IslandState, exchange: "Exchange") -> IslandState:
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
            state = state._replace(weight=max(beside, 0.0) + exchange.owed_weight)
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

    def report(self, report: Report) -> None:
        """Keeps a report, and of older ones their numbers: a long run would fill the memory."""
        _LOG.info("%s: %s", self.name, report)
        counted, posted, sent, received = self.totals
        if report.sent:
            counted, posted, sent = counted + report.counted, posted + 1, sent + report.sent
        self.totals = counted, posted, sent, received + report.received
        self.reports.append(report)
        del self.reports[:-_KEPT]

    def read_newest(self, shared: Shared, after: int = -1) -> tuple[Shared, int] | None:
        """The newest snapshot that can be read, of a round past `after`, and this round.

        None: the store lists none. It raises UnreachableError if the store lists some and shows
        none that can be read, and ValueError if all are another run's.
        """
        like, arrays = shared_leaves(shared), list[np.ndarray]()

        def read() -> int | None:
            trouble: Exception | None = None
            for round in reversed(self.rounds.snapshots()):
                if round <= after:
                    break
                data = self.rounds.snapshot(round)
                if data is None:
                    trouble = not_shown(self.store, f"the snapshot of round {round} that it lists")
                    continue
                try:
                    arrays.extend(from_snapshot(data, round, self.rounds.settings, like))
                    return round
                except BrokenError as error:
                    text = f"the snapshot of round {round} is left out: {error}"
                    warnings.warn(text, stacklevel=2)
                    if not isinstance(error, ForeignError):
                        trouble = UnreachableError(f"{self.store} shows no whole snapshot: {text}")
                    elif trouble is None:
                        trouble = ValueError(
                            f"{self.store} holds no snapshot of this run: {error}. Give a run a "
                            "prefix of its own, and the same settings to all of its islands"
                        )
            if trouble is not None:
                raise trouble
            return None

        round = lead(read)
        if round is None:
            return None
        return self.arithmetic.from_arrays(spread(arrays, [x for _, x in like]), shared), round

    def keep(self, round: int, snapshot: bytes) -> None:
        write = functools.partial(self.rounds.keep, round, snapshot)
        if self._beside is None:
            lead(write)
        elif is_first():
            self._beside(write)

    def snapshot(self, shared: Shared, round: int) -> bytes:
        """What `read_newest` reads, of the start of a round. Only the first process has it."""
        arrays = [(path, gather(x)) for path, x in shared_leaves(shared)]  # in all processes
        return to_snapshot(round, self.rounds.settings, arrays) if is_first() else b""


class Phase(enum.IntEnum):
    """What an exchange does now. In `OWN` and `OWED` it has a message, and waits for a decision."""

    OWN = 0  # its message of this round
    LATE = 1  # it goes by decisions that stand, and then sends what it owes if it was late
    OWED = 2  # what it owes, in the round that is open now
    LAST = 3  # it goes by decisions that stand, and is at its end then
    DONE = 4


@dataclasses.dataclass(eq=False)
class Exchange:
    """A round of one island, as far as it has come, and the rounds after it if it was late.

    An island that is late follows the decisions that it missed, and sends what it owes in the round
    that is open then. Else one that is slower than the others would never count.
    """

    member: Member
    shared: Shared  # what islands share as the round begins, with what is this island's own
    round: int
    begun: Begun | None = None  # its half of the exchange, or None to replay rounds only
    weight: float = 1.0  # of its message
    took: float = 0.0  # seconds of its own steps
    loss: float | None = None  # their mean, for those who watch
    phase: Phase = Phase.OWN
    half: Begun | None = None  # its message: that of `begun`, or what it owes, if it was late
    counted: bool = False  # whether a message of it counted
    was_sent: bool = False  # whether a former life of it sent messages that counted
    posted_at: float | None = None
    post_after: float = 0.0  # so many seconds, it posts again if the store does not show it
    drifted_in: int = -1  # the last round in which it found that it had drifted
    words: np.ndarray | None = None  # of its message, on the host
    digest: str | None = None  # of `shared`
    snapshot: tuple[int, bytes] | None = None  # one that the store did not take yet
    # What this process has seen of the round, if it asks the store: the decision and seconds until
    # it, and the messages that count.
    seen: tuple[Decision, float | None] | None = None
    messages: list[np.ndarray] | None = None

    def __post_init__(self) -> None:
        self._first = self.round  # rounds before it are replayed if the island has drifted
        self.half = self.begun
        if self.begun is None:
            self.phase = Phase.LAST

    @property
    def is_done(self) -> bool:
        return self.phase is Phase.DONE

    @property
    def _has_message(self) -> bool:
        return self.phase in (Phase.OWN, Phase.OWED)

    @property
    def owed_weight(self) -> float:
        """The part of the weight of its steps that its next message still has."""
        return self.weight if self._owes else 0.0

    @property
    def _owes(self) -> bool:
        """Whether something of its message is still to be sent: it was late, and kept it."""
        return not (self.counted or self.was_sent) and has_residual(self.shared)

    def advance(self) -> bool:
        """Goes on as far as it can without waiting for others. Returns whether it is done.

        It raises UnreachableError if the store does not answer, or does not show what must be
        there: this island's own message after the grace, its decision, the one before that, or a
        message that counts and no snapshot after it. Call it again. RuntimeError: a later life of
        this island takes part, so that this one is at an end.
        """
        if self.snapshot is not None:
            self._keep()
        while not self.is_done:
            if self._has_message:
                self.prepare()
                seen = lead(lambda: self.look() and self.seen)
                if not seen:
                    return False
                self._absorb(seen[0], self.half, seen[1])
            while (decision := lead(self.member.rounds.decided, self.round)) is not None:
                self._absorb(decision, None, None)
            if self.phase is Phase.LATE and self._owes:
                self.half, self.words, self.posted_at = self.begin_idle(), None, None
                self.phase = Phase.OWED
            else:
                self.phase = Phase.DONE
        return True

    def prepare(self) -> None:
        """Computes what `look` needs of devices, in all processes."""
        assert self.half is not None
        if self.words is None:
            self.words = gather(self.half.words)
        self._digest_now()

    def look(self) -> bool:
        """The part of `advance` that is the store's alone. Returns whether the rest can go on.

        The first process may call it in a thread, after `prepare` in all of them.
        """
        if not self._has_message:
            return True
        if self.seen is None:
            self.seen = self._await_decision()
        if self.seen is None:
            return False
        with contextlib.suppress(GoneError):  # `advance` meets it again
            self._read(self.seen[0])
        return True

    def _await_decision(self) -> tuple[Decision, float | None] | None:
        """The decision on its message, and how long that took. It posts, unless it is late."""
        rounds, clock = self.member.rounds, self.member.clock
        if self.posted_at is None:
            if (decision := rounds.decided(self.round)) is not None:
                return decision, None
            self._post()
            self.posted_at, self.post_after = clock(), rounds.grace
        waited = clock() - self.posted_at
        decision = rounds.decide(self.round, waited - self.before_grace, self.took)
        if decision is not None:
            return decision, waited
        if waited < rounds.grace or rounds.is_listed:
            return None
        if waited >= self.post_after:
            self.post_after = 2 * waited + 1.0  # messages are large: a few times, and not always
            self._post()
        raise not_shown(self.member.store, f"the message of round {self.round} that it was given")

    @property
    def before_grace(self) -> float:
        """Seconds before the grace begins. What is owed is sent as others' steps begin."""
        return self.took if self.phase is Phase.OWED else 0.0

    def _post(self) -> None:
        assert self.words is not None
        self.member.rounds.post(
            self.round,
            self.words,
            # Of too many steps, or too few after rounding: others would leave the message out.
            weight=min(max(self.weight, WEIGHTS[0]), WEIGHTS[1]),
            digest=self._digest_now(),
            late=self.phase is Phase.OWED,
            loss=self.loss,
        )

    def _read(self, decision: Decision) -> None:
        if self.messages is None:
            self.messages = self.member.rounds.read(decision)

    def begin_idle(self) -> Begun:
        """An exchange that began right from the global parameters."""
        own = jax.tree.map(narrow, self.shared.params, self.member.dtypes)
        return self.member.arithmetic.begin(own, self.shared, self.member.rank)

    def _absorb(self, decision: Decision, begun: Begun | None, waited: float | None) -> None:
        """Goes over to the next round. If the store fails on the way, nothing has changed."""
        member, before = self.member, self.shared
        self._check_life(decision)
        try:
            lead(self._read, decision)
        except GoneError:
            self._jump(decision, begun)
            return
        like = [np.empty(member.rounds.words, np.uint32)] * len(decision.members)
        messages = np.stack(list(spread(self.messages or (), like)))
        half = self.begin_idle() if begun is None else begun
        counts = decision.lives.get(member.name) == member.life
        weights = None
        if member.weighted:
            weights = np.array([each.weight for each in decision.members], np.float32)
        after, applied = member.arithmetic.outer_step(messages, weights, half, before)
        if begun is None or not counts:
            after = with_own(after, member.arithmetic.owed(half, before))
        if was_sent := self._was_sent_in(decision):
            after = member.arithmetic.without_debts(after)
        if decision.digest != self._digest_now():
            found = self._reload(decision, after)
            if found is not None:
                self._go_to(*found, counts, begun, was_sent)
                return
        round = decision.round + 1
        self._go_to(jax.tree.map(place_as, after, before), round, counts, begun, was_sent)
        sent = 0 if waited is None else 4 * member.rounds.words
        told = tuple(decision.lives), counts, waited, messages.nbytes, sent, bool(applied)
        member.report(Report(decision.round, *told, self._digest_now()))
        if begun is not None:
            self._take_turn(tuple(decision.lives))

    def _go_to(
        self, shared: Shared, round: int, counts: bool, begun: Begun | None, was_sent: bool
    ) -> None:
        """Begins a round. Notes what became of its own message, if the last one was its round."""
        self.shared, self.round, self.digest = shared, round, None
        self.seen = self.messages = None
        if was_sent:
            self.was_sent, self.member.is_restored = True, False
        if begun is not None:
            self.counted, self.phase = counts, Phase(self.phase + 1)
            self.member.has_counted |= counts

    def _check_life(self, decision: Decision) -> None:
        """Raises RuntimeError if a later life counts: what this one owes may be that one's, too."""
        member = self.member
        if decision.lives.get(member.name, "") > member.life:
            raise RuntimeError(
                f"a process that joined as {member.name} after this one counts in round "
                f"{decision.round}. So this one stops, and sends nothing more: it was paused and "
                "replaced, or two processes have one name. Give each island a name of its own, or "
                "join again, which ends the other one"
            )

    def _was_sent_in(self, decision: Decision) -> bool:
        """Whether a former life has sent in this round what the saved state owes."""
        member = self.member
        # Rounds are replayed, if the island had drifted, that were over when its state was saved.
        is_accounted = self.was_sent or decision.round < self._first
        is_former = decision.lives.get(member.name, member.life) < member.life
        # A former life ends as it sees that this one counts, so it can't count after that.
        may_be = member.is_restored and not member.has_counted
        if is_accounted or not is_former or not may_be:
            return False
        warnings.warn(
            f"a message that {member.name} sent in round {decision.round}, after its state was "
            "saved, counted. So what the saved state owes, and had moved, is dropped: part of it "
            "was sent",
            stacklevel=2,
        )
        return True

    def _reload(self, decision: Decision, after: Shared) -> tuple[Shared, int] | None:
        """A snapshot to go back to, and its round, because this island has drifted from most."""
        member = self.member
        if decision.round <= self.drifted_in:
            return None  # what differs again will go on to differ
        found = member.read_newest(after)
        warnings.warn(
            f"in round {decision.round} {member.name} began from other parameters than most: "
            "another kind of device or another compiler, or an error of memory. It reloads "
            f"the snapshot of round {found[1] if found else '?'}, and replays",
            stacklevel=2,
        )
        self.drifted_in = decision.round
        if found is None or found[1] > decision.round:
            return None
        return with_own(found[0], own_leaves(after.outer)), found[1]

    def _jump(self, decision: Decision, begun: Begun | None) -> None:
        """Goes on from a snapshot, because messages on the way are gone. Decisions are not."""
        member = self.member
        found = member.read_newest(self.shared, after=self.round)
        if found is None:
            raise UnreachableError(
                f"messages of round {self.round} are gone from {member.store}, and there is no "
                "later snapshot: it shows an old state, or somebody deletes objects of this run"
            )
        shared, round = found
        counts = begun is not None and decision.lives.get(member.name) == member.life
        # All are read before anything changes: the store may fail at any of them.
        passed: list[Decision] = []
        for each in range(self.round, round):
            if (between := lead(member.rounds.decided, each)) is None:
                raise not_shown(member.store, f"the decision of round {each}")
            self._check_life(between)
            passed.append(between)
        if begun is not None:
            keep = member.arithmetic.sent if counts else member.arithmetic.owed
            shared = with_own(shared, keep(begun, self.shared))
        if was_sent := not counts and any(map(self._was_sent_in, passed)):
            shared = member.arithmetic.without_debts(shared)
        self._go_to(shared, round, counts, begun, was_sent)

    def _take_turn(self, members: tuple[str, ...]) -> None:
        """Prepares a snapshot if it is this island's turn, or if the one before missed its own.

        Then one island writes one, too. If all did, an upload that takes long would make it so.
        """
        every, member = self.member.every_snapshot, self.member
        if self.round % every or member.name not in members:
            return
        turn, own = self.round // every % len(members), members.index(member.name)
        is_next = own == (turn + 1) % len(members)
        if is_next and own != turn:
            there = [round for round in lead(member.rounds.snapshots) if round <= self.round]
            is_next = self.round - max(there, default=0) > every
        if own == turn or is_next:
            self.snapshot = self.round, member.snapshot(self.shared, self.round)
            self._keep()

    def _keep(self) -> None:
        assert self.snapshot is not None
        self.member.keep(*self.snapshot)
        self.snapshot = None

    def _digest_now(self) -> str:
        if self.digest is None:
            low, high = gather(self.member.arithmetic.digest(self.shared)).tolist()
            self.digest = f"{high:08x}{low:08x}"
        return self.digest


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
