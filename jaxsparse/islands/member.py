"""One island in its rounds, without threads and without waiting.

A round is an `Exchange`: it posts, looks whether there is a decision, reads messages that count,
and works out the next global parameters. Each of its steps can be tried again if the store does not
answer. An island that is late follows the decisions that it missed, and sends what it owes in the
round that is open then. Else one that is slower than the others would always be late, and never
count.
"""

import time
import warnings
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse.arrays.layout import narrow
from jaxsparse.islands.arithmetic import Arithmetic, Begun, Shared, merged, own_leaves
from jaxsparse.islands.records import BrokenError, Decision, from_snapshot, to_snapshot
from jaxsparse.islands.rounds import GoneError, Rounds
from jaxsparse.islands.store import Objects, check_name


class IslandState(NamedTuple):
    """The training state of an island. Save it as it is: with it an island goes on where it was.

    Attributes:
        worker: the island's own training state.
        params: the global parameters at the start of the round, equal on all islands, in float32 or
            wider. Evaluate these.
        outer: the state of the outer optimizer, with this island's residual.
        round: the number of the round, int.
        steps: steps since the round began, int.
        weight: what this island has to say since its last message that counted, float.
        owed_steps: the steps behind that, int.
    """

    worker: Any
    params: Any
    outer: Any
    round: int
    steps: int
    weight: float
    owed_steps: int


class Report(NamedTuple):
    """What became of a round, seen from an island.

    Attributes:
        round: its number.
        members: the islands whose messages counted.
        counted: whether this island's did.
        waited: seconds from its message to the decision, or None if it sent none in this round.
        received: bytes of messages that it read.
        sent: bytes of its own message.
        applied: whether the sum was applied. It is not, if it overflows.
        digest: digest of what islands share as the next round begins.
    """

    round: int
    members: tuple[str, ...]
    counted: bool
    waited: float | None
    received: int
    sent: int
    applied: bool
    digest: str


class Member:
    """An island's name, its arithmetic and its view of the store.

    Args:
        arithmetic: the compiled programs. Members in one process may share them.
        store: the store.
        name: its name.
        life: a random number of this process.
        quorum: see `Islands`.
        grace: see `Islands`.
        snapshots: see `Islands`.
        weighted: see `Islands`.
        clock: seconds, for differences alone.
    """

    def __init__(
        self,
        arithmetic: Arithmetic,
        store: Objects,
        name: str,
        life: str,
        *,
        quorum: int,
        grace: float,
        snapshots: int,
        weighted: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.arithmetic, self.store, self.clock = arithmetic, store, clock
        self.name, self.life = check_name(name), life
        self.quorum, self.grace, self.every_snapshot = quorum, grace, snapshots
        self.weighted = weighted
        self.rank = zlib.crc32(name.encode()) & 0x7FFFFFFF
        self.reports: list[Report] = []
        self._rounds: Rounds | None = None
        self.settings, self.words = "", 0
        # The round in which this life began to train, and whether it began from a saved state.
        self.joined_in: int | None = None
        self.is_restored = False
        self._began = 0.0  # when the last exchange began, or the first steps

    @property
    def rounds(self) -> Rounds:
        if self._rounds is None:
            raise ValueError(f"{self.name} has not joined: go on with the state that join returns")
        return self._rounds

    def join(self, state: Any) -> IslandState:
        """The state to go on from: the newest snapshot and decisions since, or the first of all.

        Args:
            state: a training state, or an `IslandState` that this island saved.

        Raises:
            ValueError: the store holds another run, or none although the state is of a later round.
            UnreachableError: the store does not answer.
        """
        own = state.worker if isinstance(state, IslandState) else state
        shared = self.arithmetic.start(own)
        self._prepare(shared, own)
        self.joined_in, self.is_restored = None, isinstance(state, IslandState)
        joined = self._back(state) if isinstance(state, IslandState) else self._new(own, shared)
        self.joined_in, self._began = joined.round, self.clock()
        return joined._replace(worker=self.arithmetic.copied(joined.worker))

    def _new(self, own: Any, shared: Shared) -> IslandState:
        """A first state."""
        found = self._newest(shared)
        if found is None:
            self.rounds.keep(0, self._snapshot(shared, 0))
            # That of another island, if it was first.
            found = self._newest(shared)
        if found is None:
            raise ValueError(
                f"{self.store} holds no snapshot that this run can read (see the warnings): give a "
                "run a prefix of its own, and the same settings to all of its islands"
            )
        catching_up = Exchange(self, *found, self.arithmetic.own(own), None)
        while not catching_up.advance():
            pass
        shared, round = catching_up.shared, catching_up.round
        worker = self.arithmetic.put_back(own, shared.params)
        return IslandState(worker, *shared, round, 0, 0.0, 0)

    def _back(self, state: IslandState) -> IslandState:
        """A saved state, after the rounds that have passed since."""
        if not self.rounds.snapshots():
            raise ValueError(
                f"{self.store} holds no run, but the state is of its round {state.round}: give the "
                "URL of that run, or join with state.worker to begin another one"
            )
        shared = Shared(state.params, state.outer)
        own = self.arithmetic.own(state.worker)
        catching_up = Exchange(self, shared, int(state.round), own, None)
        begun = catching_up.idle()
        while not catching_up.advance():
            pass
        shared = catching_up.shared
        if catching_up.was_sent:
            # Its former life sent more than this state knows of.
            worker = self.arithmetic.put_back(state.worker, shared.params)
            return IslandState(worker, *shared, catching_up.round, 0, 0.0, 0)
        # All that it moved is its own, whatever `mixing` does with moves beside an exchange.
        worker, _ = self.arithmetic.carry_on(state.worker, begun, shared.params)
        # Checkpoints make arrays of numbers.
        steps, weight, owed = int(state.steps), float(state.weight), int(state.owed_steps)
        return IslandState(worker, *shared, catching_up.round, steps, weight, owed)

    def begin(self, state: IslandState) -> tuple[IslandState, "Exchange | None"]:
        """Ends the local steps of a round: the state to go on from, and the exchange to advance.

        If parameters are not finite, there is no exchange: the island starts the round anew.
        """
        shared = Shared(state.params, state.outer)
        own = self.arithmetic.own(state.worker)
        begun = self.arithmetic.begin(own, shared, self.rank)
        if not bool(begun.finite):
            self._tell_not_finite(state.round)
            worker = self.arithmetic.put_back(state.worker, state.params)
            return state._replace(worker=worker, steps=0, weight=0.0, owed_steps=0), None
        exchange = Exchange(self, shared, state.round, own, begun)
        exchange.took, self._began = self.clock() - self._began, self.clock()
        exchange.weight = state.weight if self.weighted else 1.0
        exchange.steps = state.owed_steps
        return state._replace(steps=0), exchange

    def finish(self, state: IslandState, exchange: "Exchange") -> IslandState:
        """The state after an exchange, with the moves that the island made meanwhile."""
        assert exchange.begun is not None
        assert exchange.is_done
        shared = exchange.shared
        worker, finite = self.arithmetic.go_on(state.worker, exchange.begun, shared.params)
        if exchange.counted:
            state = state._replace(
                weight=max(state.weight - exchange.weight, 0.0) if self.weighted else 0.0,
                owed_steps=state.owed_steps - exchange.steps,
            )
        if not bool(finite):
            self._tell_not_finite(exchange.round)
            state = state._replace(steps=0)
        return state._replace(
            worker=worker, params=shared.params, outer=shared.outer, round=exchange.round
        )

    def _tell_not_finite(self, round: int) -> None:
        warnings.warn(
            f"parameters of {self.name} are not finite in round {round}: it starts the round anew "
            "from the global ones, and sends nothing of these steps",
            stacklevel=4,
        )

    def _prepare(self, shared: Shared, own: Any) -> None:
        self.words, self.settings = self.arithmetic.described(shared, self.arithmetic.own(own))
        self._rounds = Rounds(
            self.store,
            self.name,
            self.life,
            settings=self.settings,
            words=self.words,
            quorum=self.quorum,
            grace=self.grace,
        )

    def _newest(self, shared: Shared, after: int = -1) -> tuple[Shared, int] | None:
        """The newest snapshot that can be read, of a round past `after`, and this round."""
        for round in reversed(self.rounds.snapshots()):
            if round <= after:
                return None
            data = self.rounds.snapshot(round)
            if data is None:
                continue
            try:
                like = self.arithmetic.like(shared)
                arrays = from_snapshot(data, round, self.settings, like)
            except BrokenError as error:
                warnings.warn(f"the snapshot of round {round} is left out: {error}", stacklevel=2)
                continue
            return self.arithmetic.from_arrays(arrays, shared), round
        return None

    def _snapshot(self, shared: Shared, round: int) -> bytes:
        return to_snapshot(round, self.settings, self.arithmetic.arrays(shared))


class Exchange:
    """A round of one island, as far as it has come, and the rounds after it if it was late.

    Args:
        member: the island.
        shared: what islands share as the round begins.
        round: the round.
        own: the island's own parameters, for their dtypes.
        begun: its half of the exchange, or None to replay rounds only.

    Attributes:
        is_done: whether it is at an end.
        shared: what islands share now, with what is this island's own.
        round: the next round.
        counted: whether a message of it counted.
        half: its message: that of `begun`, or what it owes, if it was late.
        was_sent: whether a former life of it sent messages that counted.
    """

    def __init__(
        self, member: Member, shared: Shared, round: int, own: Any, begun: Begun | None
    ) -> None:
        self._member, self._own = member, own
        self.shared, self.round, self.begun, self.half = shared, round, begun, begun
        self.weight, self.steps, self.took = 1.0, 0, 0.0
        self.counted = self.was_sent = self.is_done = False
        self._posted_at: float | None = None
        self._is_settled = begun is None  # whether the round of its own message is over
        self._is_late = begun is None  # whether there will be no other message
        self._snapshot: tuple[int, bytes] | None = None
        self._digest: str | None = None
        self._reloaded = -1  # the last round in which it found that it had drifted

    def advance(self) -> bool:
        """Goes on as far as it can without waiting for others. Returns whether it is done.

        Raises:
            UnreachableError: the store did not answer. Call it again.
            GoneError: a message that counts is not to be had, and no snapshot after it either.
        """
        if self._snapshot is not None:
            self._keep()
        while not self.is_done:
            if not self._is_settled:
                decision, waited = self._decided()
                if decision is None:
                    return False
                self._absorb(decision, self.half, waited)
            while (decision := self._member.rounds.decided(self.round)) is not None:
                self._absorb(decision, None, None)
            if self.counted or self._is_late:
                self.is_done = True
            else:
                self.half, self._posted_at = self.idle(), None
                self._is_late, self._is_settled = True, False
        return True

    def _decided(self) -> tuple[Decision | None, float | None]:
        """The decision on its own message, and how long that took. It posts, unless it is late."""
        rounds, clock = self._member.rounds, self._member.clock
        assert self.half is not None
        if self._posted_at is None:
            if (decision := rounds.decided(self.round)) is not None:
                return decision, None
            words = np.asarray(self.half.words)
            rounds.post(
                self.round,
                words,
                weight=self.weight,
                steps=self.steps,
                digest=self._digest_now(),
                late=self._is_late,
            )
            self._posted_at = clock()
        waited = clock() - self._posted_at
        # What is late stands at the start of a round: others have their steps before them, and are
        # given the time that its own took.
        own_steps = self.took if self._is_late else 0.0
        return rounds.advance(self.round, waited - own_steps), waited

    def idle(self) -> Begun:
        """An exchange that began right from the global parameters."""
        own = jax.tree.map(lambda g, w: narrow(g, w.dtype), self.shared.params, self._own)
        return self._member.arithmetic.begin(own, self.shared, self._member.rank)

    def _absorb(self, decision: Decision, begun: Begun | None, waited: float | None) -> None:
        """Goes over to the next round. It changes nothing if the store fails on the way."""
        member, arithmetic = self._member, self._member.arithmetic
        try:
            messages = member.rounds.read(decision)
        except GoneError:
            self._jump(decision, begun)
            return
        drifted = bool(decision.members) and decision.digest != self._digest_now()
        lives = {each.name: each.life for each in decision.members}
        counts = lives.get(member.name) == member.life
        is_former = member.name in lives and not counts
        half = self.idle() if begun is None else begun
        before, applied = self.shared, False
        if messages:
            weights = None
            if member.weighted:
                weights = np.array([each.weight for each in decision.members], np.float32)
            after, ok = arithmetic.shared(np.stack(messages), weights, half, before)
            applied = bool(ok)
        else:
            after = before
        if begun is None or not counts:
            after = merged(after, arithmetic.owed(half, before))
        if is_former and (member.joined_in is None or decision.round <= member.joined_in):
            # A former life sent this. What a saved state owes may be in it.
            self.was_sent = True
            if member.is_restored:
                self._tell_dropped(decision.round)
                after = arithmetic.without_debts(after)
        elif is_former:
            warnings.warn(
                f"another process posts as {member.name}: give each island a name of its own",
                stacklevel=2,
            )
        if drifted and decision.round > self._reloaded:
            found = member._newest(after)
            warnings.warn(
                f"in round {decision.round} {member.name} began from other parameters than most: "
                "another kind of device or another compiler, or an error of memory. It reloads "
                f"the snapshot of round {found[1] if found else '?'}, and replays",
                stacklevel=2,
            )
            self._reloaded = decision.round  # once: what differs again will go on to differ
            if found is not None and found[1] <= decision.round:
                self.shared, self.round = merged(found[0], own_leaves(after.outer)), found[1]
                self._digest = None
                self._settle(counts, begun)
                return
        self.shared, self.round = _placed(after, before), decision.round + 1
        self._digest = None
        self._settle(counts, begun)
        member.reports.append(
            Report(
                decision.round,
                tuple(lives),
                counts,
                waited,
                sum(4 * len(each) for each in messages),
                0 if waited is None else 4 * member.words,
                applied,
                self._digest_now(),
            )
        )
        if begun is not None:
            self._take_turn(tuple(lives))

    def _settle(self, counts: bool, begun: Begun | None) -> None:
        """Notes what became of its own message, if the round was that of its message."""
        if begun is not None:
            self.counted, self._is_settled = counts, True

    def _tell_dropped(self, round: int) -> None:
        warnings.warn(
            f"a message that {self._member.name} sent in round {round}, after its state was saved, "
            "counted. So what the saved state owes, and had moved, is dropped: part of it was sent",
            stacklevel=2,
        )

    def _jump(self, decision: Decision, begun: Begun | None) -> None:
        """Goes on from a snapshot, because messages on the way are gone. Decisions are there."""
        member = self._member
        lives = {each.name: each.life for each in decision.members}
        counts = begun is not None and lives.get(member.name) == member.life
        found = member._newest(self.shared, after=self.round)
        if found is None:
            raise GoneError(
                f"messages of round {self.round} are gone from {member.store}, and there is no "
                "later snapshot: somebody deletes objects of this run"
            )
        shared, round = found
        if member.joined_in is None and member.is_restored:
            for each in range(self.round, round):
                passed = member.rounds.decided(each)
                if passed and any(one.name == member.name for one in passed.members):
                    self._tell_dropped(each)
                    self.was_sent = True
                    shared = member.arithmetic.without_debts(shared)
                    break
        if begun is not None:
            keep = member.arithmetic.sent if counts else member.arithmetic.owed
            shared = merged(shared, keep(begun, self.shared))
        self.shared, self.round, self._digest = shared, round, None
        self._settle(counts, begun)

    def _take_turn(self, members: tuple[str, ...]) -> None:
        """Prepares a snapshot if it is this island's turn, or if those before missed theirs."""
        every, member = self._member.every_snapshot, self._member
        if self.round % every or not members:
            return
        is_ours = members[self.round // every % len(members)] == member.name
        newest = max((r for r in member.rounds.snapshots() if r <= self.round), default=0)
        if is_ours or self.round - newest > every:
            self._snapshot = self.round, member._snapshot(self.shared, self.round)
            self._keep()

    def _keep(self) -> None:
        assert self._snapshot is not None
        self._member.rounds.keep(*self._snapshot)
        self._snapshot = None

    def _digest_now(self) -> str:
        if self._digest is None:
            low, high = np.asarray(self._member.arithmetic.digest(self.shared)).tolist()
            self._digest = f"{high:08x}{low:08x}"
        return self._digest


def _placed(shared: Shared, like: Shared) -> Shared:
    """`shared`, its arrays spread over the devices as those of `like`."""

    def place(x: Any, old: Any) -> Any:
        old = jnp.asarray(old)
        return x if x.sharding == old.sharding else jax.device_put(x, old.sharding)

    return jax.tree.map(place, shared, like)
