"""A round of one island, step by step. It blocks for the store alone, and waits for nobody.

An exchange posts, looks whether there is a decision, reads the messages that count, and works out
the next global parameters. Each of its steps can be tried again if the store does not answer.

All processes of an island do the same, and the first of them asks the store: see `lead`.

An island that is late follows the decisions that it missed, and sends what it owes in the round
that is open then. Else one that is slower than the others would always be late, and never count.
"""

import contextlib
import logging
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxsparse.arrays.layout import narrow
from jaxsparse.islands.arithmetic import Begun, Shared, merged, own_leaves, placed
from jaxsparse.islands.lead import gathered, led, spread
from jaxsparse.islands.records import WEIGHTS, Decision
from jaxsparse.islands.rounds import GoneError
from jaxsparse.islands.store import UnreachableError, not_shown

if TYPE_CHECKING:
    from jaxsparse.islands.member import Member

_LOG = logging.getLogger("jaxsparse.islands")  # a line for each round


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

    def __str__(self) -> str:
        when = "replayed" if self.waited is None else f"decided after {self.waited:.1f} s"
        without = "" if self.counted or self.waited is None else ", without this island"
        return (
            f"round {self.round} of {', '.join(self.members)}: {when}{without}, "
            f"{self.sent / 1e6:.2f} MB sent, {self.received / 1e6:.2f} MB received"
        )


class Exchange:
    """A round of one island, as far as it has come, and the rounds after it if it was late.

    Args:
        member: the island.
        shared: what islands share as the round begins.
        round: the round.
        own: the island's own parameters. Their dtypes count alone.
        begun: its half of the exchange, or None to replay rounds only.
        weight: what its message weighs.
        took: seconds that its own steps took.
        loss: mean loss of these steps, for those who watch.

    Attributes:
        is_done: whether it is at an end.
        shared: what islands share now, with what is this island's own.
        round: the next round.
        counted: whether a message of it counted.
        half: its message: that of `begun`, or what it owes, if it was late.
        was_sent: whether a former life of it sent messages that counted.
    """

    def __init__(
        self,
        member: "Member",
        shared: Shared,
        round: int,
        own: Any,
        begun: Begun | None,
        *,
        weight: float = 1.0,
        took: float = 0.0,
        loss: float | None = None,
    ) -> None:
        self._member, self._took, self._loss = member, took, loss
        self.weight = weight
        self._dtypes = jax.tree.map(jnp.result_type, own)
        self.shared, self.round, self.begun, self.half = shared, round, begun, begun
        self.counted = self.was_sent = self.is_done = False
        self._words: np.ndarray | None = None  # of its message, on the host
        self._posted_at: float | None = None
        self._post_after = 0.0  # so many seconds, it posts again if the store does not show it
        # What this process has seen of the round, if it asks the store.
        self._seen: tuple[Decision, float | None] | None = None
        self._read: tuple[int, list[np.ndarray]] | None = None  # of a round, messages that count
        self._is_settled = begun is None  # whether the round of its own message is over
        self._is_late = begun is None  # whether there will be no other message
        self._snapshot: tuple[int, bytes] | None = None  # one that the store did not take yet
        self._digest: str | None = None
        self._first = round  # rounds before it are replayed if the island has drifted
        self._drifted_in = -1  # the last round in which it found that it had drifted

    def advance(self) -> bool:
        """Goes on as far as it can without waiting for others. Returns whether it is done.

        Raises:
            UnreachableError: the store did not answer, or does not show what must be there: this
                island's own message after the grace, its decision, the one before that, or a
                message that counts and no snapshot after it. Call it again.
            RuntimeError: a later life of this island takes part, so that this one is at an end.
        """
        if self._snapshot is not None:
            self._keep()
        while not self.is_done:
            if not self._is_settled:
                self.prepare()
                seen = led(self._looked)
                if seen is None:
                    return False
                self._absorb(seen[0], self.half, seen[1])
            while (decision := led(self._member.rounds.decided, self.round)) is not None:
                self._absorb(decision, None, None)
            if self.counted or self._is_late or self.was_sent or not self._member.keeps:
                self.is_done = True
            else:
                self.half, self._words, self._posted_at = self.idle(), None, None
                self._is_late, self._is_settled = True, False
        return True

    def prepare(self) -> None:
        """Computes what `look` needs of devices, in all processes."""
        assert self.half is not None
        if self._words is None:
            self._words = gathered(self.half.words)
        self._digest_now()

    def look(self) -> bool:
        """The part of `advance` that is the store's alone. Returns whether the rest can go on.

        The first process may call it in a thread, after `prepare` in all of them.
        """
        if self._is_settled:
            return True
        if self._seen is None:
            self._seen = self._decided()
        if self._seen is None:
            return False
        with contextlib.suppress(GoneError):  # `advance` meets it again
            self._read_messages(self._seen[0])
        return True

    def _looked(self) -> tuple[Decision, float | None] | None:
        self.look()
        return self._seen

    def _decided(self) -> tuple[Decision, float | None] | None:
        """The decision on its own message, and how long that took. It posts, unless it is late."""
        rounds, clock = self._member.rounds, self._member.clock
        if self._posted_at is None:
            if (decision := rounds.decided(self.round)) is not None:
                return decision, None
            self._post()
            self._posted_at, self._post_after = clock(), rounds.grace
        waited = clock() - self._posted_at
        # What is late stands at the start of a round: others have their steps before them, and are
        # given the time that its own took.
        own_steps = self._took if self._is_late else 0.0
        decision = rounds.advance(self.round, waited - own_steps, self._took)
        if decision is not None:
            return decision, waited
        if waited < rounds.grace or rounds.is_listed:
            return None
        if waited >= self._post_after:
            self._post_after = 2 * waited + 1.0  # messages are large: a few times, and not always
            self._post()
        raise not_shown(self._member.store, f"the message of round {self.round} that it was given")

    def _post(self) -> None:
        assert self._words is not None
        self._member.rounds.post(
            self.round,
            self._words,
            # Of too many steps, or too few after rounding: others would leave the message out.
            weight=min(max(self.weight, WEIGHTS[0]), WEIGHTS[1]),
            digest=self._digest_now(),
            late=self._is_late,
            loss=self._loss,
        )

    def _read_messages(self, decision: Decision) -> None:
        if self._read is None or self._read[0] != decision.round:
            self._read = decision.round, self._member.rounds.read(decision)

    def idle(self) -> Begun:
        """An exchange that began right from the global parameters."""
        own = jax.tree.map(narrow, self.shared.params, self._dtypes)
        return self._member.arithmetic.begin(own, self.shared, self._member.rank)

    def _absorb(self, decision: Decision, begun: Begun | None, waited: float | None) -> None:
        """Goes over to the next round. If the store fails on the way, nothing has changed."""
        member, before = self._member, self.shared
        self._check_life(decision)
        try:
            led(self._read_messages, decision)
        except GoneError:
            self._jump(decision, begun)
            return
        like = [((member.words,), np.uint32)] * len(decision.members)
        messages = list(spread(self._read[1] if self._read else (), like))
        half = self.idle() if begun is None else begun
        counts = decision.lives.get(member.name) == member.life
        weights = None
        if member.weighted:
            weights = np.array([each.weight for each in decision.members], np.float32)
        after, applied = member.arithmetic.shared(np.stack(messages), weights, half, before)
        if begun is None or not counts:
            after = merged(after, member.arithmetic.owed(half, before))
        if was_sent := self._was_sent_in(decision):
            after = member.arithmetic.without_debts(after)
        if decision.digest != self._digest_now():
            found = self._reloaded(decision, after)
            if found is not None:
                self._go_to(*found, counts, begun, was_sent)
                return
        self._go_to(_placed(after, before), decision.round + 1, counts, begun, was_sent)
        report = Report(
            decision.round,
            tuple(decision.lives),
            counts,
            waited,
            sum(4 * len(each) for each in messages),
            0 if waited is None else 4 * member.words,
            bool(applied),
            self._digest_now(),
        )
        member.reports.append(report)
        _LOG.info("%s: %s", member.name, report)
        if begun is not None:
            self._take_turn(tuple(decision.lives))

    @property
    def lacks(self) -> str | None:
        """Whom it waits for after the grace, in words."""
        return self._member.rounds.lacks

    @property
    def owed(self) -> float:
        """What of the weight of its steps its next message has."""
        has_nothing = self.counted or self.was_sent or not self._member.keeps
        return 0.0 if has_nothing else self.weight

    def _go_to(
        self, shared: Shared, round: int, counts: bool, begun: Begun | None, was_sent: bool
    ) -> None:
        """Begins a round. Notes what became of its own message, if the last one was its round."""
        self.shared, self.round, self._digest = shared, round, None
        self._seen = self._read = None
        if was_sent:
            self.was_sent, self._member.is_restored = True, False
        if begun is not None:
            self.counted, self._is_settled = counts, True
            self._member.has_counted |= counts

    def _check_life(self, decision: Decision) -> None:
        """Raises RuntimeError if a later life counts: what this one owes may be that one's, too."""
        member = self._member
        if decision.lives.get(member.name, "") > member.life:
            raise RuntimeError(
                f"a process that joined as {member.name} after this one counts in round "
                f"{decision.round}. So this one stops, and sends nothing more: it was paused and "
                "replaced, or two processes have one name. Give each island a name of its own, or "
                "join again, which ends the other one"
            )

    def _was_sent_in(self, decision: Decision) -> bool:
        """Whether a former life has sent in this round what the saved state owes."""
        member = self._member
        # Rounds are replayed, if the island had drifted, that were over when its state was saved.
        is_accounted = self.was_sent or decision.round < self._first
        is_former = decision.lives.get(member.name, member.life) < member.life
        if is_accounted or not is_former or not self._may_be_former():
            return False
        warnings.warn(
            f"a message that {member.name} sent in round {decision.round}, after its state was "
            "saved, counted. So what the saved state owes, and had moved, is dropped: part of it "
            "was sent",
            stacklevel=2,
        )
        return True

    def _may_be_former(self) -> bool:
        """Whether an earlier life that counts may have sent what the saved state owes.

        It ends as it sees that this one counts, so it can't count after that.
        """
        return self._member.is_restored and not self._member.has_counted

    def _reloaded(self, decision: Decision, after: Shared) -> tuple[Shared, int] | None:
        """A snapshot to go back to, and its round, because this island has drifted from most."""
        member = self._member
        if decision.round <= self._drifted_in:
            return None  # what differs again will go on to differ
        found = member.newest(after)
        warnings.warn(
            f"in round {decision.round} {member.name} began from other parameters than most: "
            "another kind of device or another compiler, or an error of memory. It reloads "
            f"the snapshot of round {found[1] if found else '?'}, and replays",
            stacklevel=2,
        )
        self._drifted_in = decision.round
        if found is None or found[1] > decision.round:
            return None
        return merged(found[0], own_leaves(after.outer)), found[1]

    def _jump(self, decision: Decision, begun: Begun | None) -> None:
        """Goes on from a snapshot, because messages on the way are gone. Decisions are not."""
        member = self._member
        found = member.newest(self.shared, after=self.round)
        if found is None:
            raise UnreachableError(
                f"messages of round {self.round} are gone from {member.store}, and there is no "
                "later snapshot: it shows an old state, or somebody deletes objects of this run"
            )
        shared, round = found
        counts = begun is not None and decision.lives.get(member.name) == member.life
        # All are read before anything changes: the store may fail at any of them.
        passed = []
        for each in range(self.round, round):
            between = led(member.rounds.decided, each)
            if between is None:
                raise not_shown(member.store, f"the decision of round {each}")
            self._check_life(between)
            passed.append(between)
        if begun is not None:
            keep = member.arithmetic.sent if counts else member.arithmetic.owed
            shared = merged(shared, keep(begun, self.shared))
        if was_sent := not counts and any(map(self._was_sent_in, passed)):
            shared = member.arithmetic.without_debts(shared)
        self._go_to(shared, round, counts, begun, was_sent)

    def _take_turn(self, members: tuple[str, ...]) -> None:
        """Prepares a snapshot if it is this island's turn, or if the one before missed its own.

        Then one island writes one, too. If all did, an upload that takes long would make it so.
        """
        every, member = self._member.every_snapshot, self._member
        if self.round % every or member.name not in members:
            return
        turn, own = self.round // every % len(members), members.index(member.name)
        is_next = own == (turn + 1) % len(members)
        if own == turn or (is_next and self.round - self._newest() > every):
            self._snapshot = self.round, member.snapshot(self.shared, self.round)
            self._keep()

    def _newest(self) -> int:
        """The round of the newest snapshot up to now."""
        return max((r for r in led(self._member.rounds.snapshots) if r <= self.round), default=0)

    def _keep(self) -> None:
        assert self._snapshot is not None
        self._member.keep(*self._snapshot)
        self._snapshot = None

    def _digest_now(self) -> str:
        if self._digest is None:
            low, high = gathered(self._member.arithmetic.digest(self.shared)).tolist()
            self._digest = f"{high:08x}{low:08x}"
        return self._digest


def _placed(shared: Shared, like: Shared) -> Shared:
    """`shared`, its arrays spread over the devices as those of `like`."""

    def place(x: Any, old: Any) -> Any:
        old = jnp.asarray(old)
        return x if x.sharding == old.sharding else placed(x, old)

    return jax.tree.map(place, shared, like)
