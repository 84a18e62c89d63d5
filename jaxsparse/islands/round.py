"""A round of one island, from its message to the parameters of the next round.

It blocks for the store alone, and waits for nobody: if others are not there yet, or the store does
not answer, it can be advanced again. All processes of an island do the same, and the first of them
asks the store: see `processes`.
"""

import dataclasses
import functools
import warnings

import jax
import numpy as np

from jaxsparse.islands import snapshots
from jaxsparse.islands.arithmetic import Begun, Shared, has_residual, place_as, with_own
from jaxsparse.islands.life import Life, Report
from jaxsparse.islands.processes import broadcast, gather, is_first, lead
from jaxsparse.islands.records import WEIGHTS, Decision
from jaxsparse.islands.store import UnreachableError, not_shown


@dataclasses.dataclass(eq=False)
class Round:
    """A round of one island, as far as it has come, and the rounds after it if it was late.

    An island that is late follows the decisions that it missed, and sends what it owes in the round
    that is open then. Otherwise a slow island would never count. A joining island only follows
    decisions.
    """

    member: Life
    shared: Shared  # what islands share as the round begins, with what is this island's own
    round: int
    begun: Begun  # its half, from which on its own moves are kept
    message: Begun | None = None  # the half that it sends, until there is a decision on it
    weight: float = 0.0  # of its message
    owed: float = 0.0  # the weight of what is in the residual
    took: float = 0.0  # seconds of its own steps
    loss: float | None = None  # their mean, for those who watch
    is_late: bool = True  # whether its message is what it owes, or it has none
    is_done: bool = False
    counted: bool = False  # whether a message of it counted
    # Whether what it owed is dropped: a former life had sent it, or it is beyond a bound.
    is_dropped: bool = False
    posted_at: float | None = None
    post_after: float = 0.0  # so many seconds, it posts again if the store does not show it
    drifted_in: int = -1  # the last round in which it found that it had drifted
    words: np.ndarray | None = None  # of its message, on the host
    digest: str | None = None  # of `shared`
    # What this process has seen of the round, if it asks the store: the decision and seconds until
    # it, and the messages that count.
    seen: tuple[Decision, float | None] | None = None
    messages: list[np.ndarray] | None = None

    def __post_init__(self) -> None:
        self._first = self.round  # rounds before it are replayed if the island has drifted

    @property
    def owed_weight(self) -> float:
        """The part of the weight of its steps that its next message still has."""
        return self.owed if has_residual(self.shared) else 0.0

    @property
    def _owes(self) -> bool:
        """Whether something of its message is still to be sent: it was late, and kept it."""
        return not (self.counted or self.is_dropped) and has_residual(self.shared)

    def advance(self) -> bool:
        """Goes on as far as it can without waiting for others. Returns whether it is done.

        It raises UnreachableError if the store does not answer, or does not show what must be
        there: this island's own message after the grace, its decision, the one before that, or a
        message that counts and no snapshot after it. Call it again. RuntimeError: a later life of
        this island has begun, so that this one is at an end.
        """
        while not self.is_done:
            if self.message is not None:
                self.prepare()
                seen = lead(lambda: self.look() and self.seen)
                if not seen:
                    return False
                self._absorb(*seen)
            while (decision := lead(self.member.rounds.decided, self.round)) is not None:
                self._absorb(decision)
            self._drop_if_old()
            self.is_done = self.is_late or not self._owes or not self._begin_late()
        return True

    def _drop_if_old(self) -> None:
        """Drops what it owes, and has moved, if that is of a round too long ago."""
        bound, age = self.member.age_bound, self.round - self._first
        if bound is None or age <= bound or not (self.owed > 0 or self.member.is_restored):
            return
        warnings.warn(
            f"what {self.member.name} owes is of round {self._first}, {age} rounds ago, and "
            f"age_bound is {bound}: it is dropped, and the island goes on from the global "
            "parameters",
            stacklevel=2,
        )
        self.shared = self.member.arithmetic.without_debts(self.shared)
        self.begun = self.member.arithmetic.without_moves(self.begun)
        self.is_dropped, self.owed, self.digest = True, 0.0, None

    def _begin_late(self) -> bool:
        """Begins a message of what it owes. Returns whether that is finite."""
        late = self.member.begin_late(self.shared, self.round, self.begun)
        if is_finite := bool(late.finite):
            self.message = self.begun = late
            self.is_late, self.words, self.posted_at = True, None, None
        return is_finite

    def prepare(self) -> None:
        """Computes what `look` needs of devices, in all processes."""
        assert self.message is not None
        if self.words is None:
            self.words = gather(self.message.words)
        self._digest_now()

    def look(self) -> bool:
        """The part of `advance` that is the store's alone. Returns whether the rest can go on.

        The first process may call it in a thread, after `prepare` in all of them.
        """
        if self.message is None:
            return True
        self.seen = self.seen or self._await_decision()
        if self.seen is None:
            return False
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
        raise not_shown(rounds.store, f"the message of round {self.round} that it was given")

    @property
    def before_grace(self) -> float:
        """Seconds before the grace begins. What is owed is sent as others' steps begin."""
        return self.took if self.is_late else 0.0

    def _post(self) -> None:
        assert self.words is not None
        if self.member.rounds.has_later_life():
            raise self._replaced(f"has begun by round {self.round}")
        self.member.rounds.post(
            self.round,
            self.words,
            # Of too many steps, or too few after rounding: others would leave the message out.
            weight=min(max(self.weight, WEIGHTS[0]), WEIGHTS[1]),
            digest=self._digest_now(),
            late=self.is_late,
            loss=self.loss,
        )

    def _read(self, decision: Decision) -> bool:
        """Reads the messages that count. Returns whether all are there."""
        if self.messages is None:
            self.messages = self.member.rounds.read(decision)
        return self.messages is not None

    def _absorb(self, decision: Decision, waited: float | None = None) -> None:
        """Goes over to the next round. If the store fails on the way, nothing has changed."""
        member, before, is_own = self.member, self.shared, self.message is not None
        self._check_life(decision)
        if not lead(self._read, decision):
            self._jump(decision)
            return
        part = member.rounds.part(self.round)
        like = [np.empty(member.rounds.words[part], np.uint32)] * len(decision.members)
        messages = np.stack(list(broadcast(self.messages or (), like)))
        weights = None
        if member.arithmetic.is_weighted:
            weights = np.array([each.weight for each in decision.members], np.float32)
        half = self.message or member.begin_idle(before, self.round)
        after, applied, within = member.arithmetic.outer_step(
            messages, weights, half, before, part=part
        )
        counts = self._counts_in(decision)
        names = tuple(decision.lives)
        beyond = tuple(name for name, one in zip(names, within.tolist()) if not one)
        if not (is_own and counts):
            # It has sent nothing in a round that it only follows: what it owes stays as it is.
            own = member.arithmetic.owed(half, before, part=part) if is_own else before.outer
            after = with_own(after, own)
        if is_dropped := self._was_sent_in(decision) or self._is_beyond(decision, beyond):
            after = member.arithmetic.without_debts(after)
        if decision.digest != self._digest_now() and (found := self._reload(decision, after)):
            self._go_to(*found, counts, is_dropped, bool(applied))
            return
        after = jax.tree.map(place_as, after, before)
        self._go_to(after, decision.round + 1, counts, is_dropped, bool(applied))
        sent = 0 if waited is None else 4 * member.rounds.words[part]
        if not applied:
            warnings.warn(
                f"the sum of round {decision.round} is not applied on any island, and its moves "
                "are dropped, because it or what optimizer makes of it is not finite: islands "
                "moved too far, or optimizer overflows",
                stacklevel=2,
            )
        told = names, counts, waited, messages.nbytes, sent, bool(applied), self._digest_now()
        member.report(Report(decision.round, *told, beyond))
        if is_own:
            self._take_turn(names)

    def _go_to(
        self, shared: Shared, round: int, counts: bool, is_dropped: bool, applied: bool = True
    ) -> None:
        """Begins a round. Notes what became of its own message, if the last one was its round."""
        self.shared, self.round, self.digest = shared, round, None
        self.seen = self.messages = None
        self.is_dropped |= is_dropped
        if is_dropped:  # what it had moved was sent as well, or will be in another fragment's round
            self.begun = self.member.arithmetic.without_moves(self.begun)
        # A former life ends as it sees that this one counts, so it can't count after that.
        self.member.is_restored &= not (counts or is_dropped)
        if self.message is not None:
            # Where a sum is not applied, the residual stays as it was before the message.
            left = 0.0 if applied else self.owed
            self.owed = left if counts else self.weight
            self.counted, self.message = counts, None
        self.owed = 0.0 if is_dropped else self.owed

    def _counts_in(self, decision: Decision) -> bool:
        """Whether a message of this life counts."""
        return decision.lives.get(self.member.name) == self.member.rounds.life

    def _check_life(self, decision: Decision) -> None:
        """Raises RuntimeError if a later life counts: what this one owes may be that one's, too."""
        member = self.member
        if decision.lives.get(member.name, "") > member.rounds.life:
            raise self._replaced(f"counts in round {decision.round}")

    def _replaced(self, how: str) -> RuntimeError:
        return RuntimeError(
            f"a process that joined as {self.member.name} after this one {how}. So this one stops, "
            "and sends nothing more: it was paused and replaced, or two processes have one name. "
            "Give each island a name of its own, or join again, which ends the other one"
        )

    def _was_sent_in(self, decision: Decision) -> bool:
        """Whether a former life has sent in this round what the saved state owes."""
        member = self.member
        life = member.rounds.life
        is_former = decision.lives.get(member.name, life) < life
        # Rounds before the first were over when its state was saved.
        if not (is_former and member.is_restored and decision.round >= self._first):
            return False
        warnings.warn(
            f"a message that {member.name} sent in round {decision.round}, after its state was "
            "saved, counted. So what the saved state owes, and had moved, is dropped: part of it "
            "was sent",
            stacklevel=2,
        )
        return True

    def _is_beyond(self, decision: Decision, beyond: tuple[str, ...]) -> bool:
        """Whether a message of this life was left out, because it is too large."""
        if not (self.member.name in beyond and self._counts_in(decision)):
            return False
        warnings.warn(
            f"the message of {self.member.name} in round {decision.round} was larger than "
            "norm_bound times the median of all, so that it was left out on all islands: what this "
            "one had moved and owed is dropped, and it goes on from the global parameters",
            stacklevel=2,
        )
        return True

    def _reload(self, decision: Decision, after: Shared) -> tuple[Shared, int] | None:
        """A snapshot to go back to, and its round, because this island has drifted from most."""
        if decision.round <= self.drifted_in:
            return None  # what differs again will go on to differ
        found = snapshots.read_newest(self.member.rounds, after)
        warnings.warn(
            f"in round {decision.round} {self.member.name} began from other parameters than most: "
            "another kind of device or another compiler, or an error of memory. It reloads "
            f"the snapshot of round {found[1] if found else '?'}, and replays",
            stacklevel=2,
        )
        self.drifted_in = decision.round
        if found is None or found[1] > decision.round:
            return None
        return with_own(found[0], after.outer), found[1]

    def _jump(self, decision: Decision) -> None:
        """Goes on from a snapshot, because messages on the way are gone. Decisions are not."""
        arithmetic, rounds = self.member.arithmetic, self.member.rounds
        found = snapshots.read_newest(rounds, self.shared, after=self.round)
        if found is None:
            raise UnreachableError(
                f"messages of round {self.round} are gone from {rounds.store}, and there is no "
                "later snapshot: it shows an old state, or somebody deletes objects of this run"
            )
        shared, round = found
        # All are read before anything changes: the store may fail at any of them.
        passed: list[Decision] = []
        for each in range(self.round, round):
            if (between := lead(rounds.decided, each)) is None:
                raise not_shown(rounds.store, f"the decision of round {each}")
            self._check_life(between)
            passed.append(between)
        counts = self.message is not None and self._counts_in(decision)
        if self.message is not None:
            keep = arithmetic.sent if counts else arithmetic.owed
            part = rounds.part(self.round)
            shared = with_own(shared, keep(self.message, self.shared, part=part))
        if was_sent := not counts and any(map(self._was_sent_in, passed)):
            shared = arithmetic.without_debts(shared)
        self._go_to(shared, round, counts, was_sent)

    def _take_turn(self, members: tuple[str, ...]) -> None:
        """Has a snapshot written, if it is this island's turn."""
        every, member = self.member.every_snapshot, self.member
        if self.round % every or members[self.round // every % len(members)] != member.name:
            return
        data = snapshots.make(member.rounds, self.shared, self.round)  # in all processes
        if is_first():
            member.beside(functools.partial(member.rounds.keep, self.round, data))

    def _digest_now(self) -> str:
        if self.digest is None:
            low, high = gather(self.member.arithmetic.digest(self.shared)).tolist()
            self.digest = f"{high:08x}{low:08x}"
        return self.digest
