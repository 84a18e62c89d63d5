"""Agreement by an object store: what counts in a round is what the first decision says.

    messages/RRRRRRRR/NAME.LIFE    what an island sends in a round
    decisions/RRRRRRRR             whose messages count, in order: created once, by whoever is first
    snapshots/RRRRRRRR             parameters and outer state as a round begins, now and then
    lives/NAME.NNNNNNNN            whose the n-th life of an island is: created once, as it joins

Two islands that cannot see each other may both propose, but one decision alone can be created. All
read the one that stands, whoever made it: a request may fail after it was carried out, or arrive
twice. So members need no clock in common, no leader and no list of members.

A read may be damaged, though the object is whole. So what can't be read is read again, and nobody
acts on it. A store may be another one for a while, such as the empty folder where a share was
mounted. So an island believes a decision of its own only if the store still has the one before.

Decisions are kept for ever. If old ones were deleted, an island that slept for long could decide
such a round a second time. Messages and older snapshots go once two newer snapshots stand.
"""

import collections
import math
import re
import secrets
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxsparse.islands.records import (
    BrokenError,
    CountedMessage,
    Decision,
    ForeignError,
    Message,
    checksum,
    words_of,
)
from jaxsparse.islands.store import (
    NAME,
    Objects,
    UnreachableError,
    not_shown,
    of_another_run,
)

_KEPT = 2  # snapshots
_ROUND = re.compile("[0-9]{8,15}")
_PAIR = re.compile(rf"({NAME.pattern})\.({NAME.pattern})")


class Read(NamedTuple):
    """A message that was read and found good."""

    member: CountedMessage  # what a decision says of it
    digest: str
    words: np.ndarray


class Rounds:
    """An island's view of the rounds. It blocks for the store alone, and never waits for others.

    Attributes:
        life: the word of this island's life, see `begin_life`. Later lives have greater words.
        words: the number of words of a message, of each fragment.
        is_listed: whether the last list of a round's messages had this island's own.
        lacks: whom a quorum still needs after the grace, in words, or None.
    """

    def __init__(
        self,
        store: Objects,
        name: str,
        *,
        settings: str,
        words: Sequence[int],
        quorum: int,
        grace: float,
    ) -> None:
        self.store, self.name, self.life = store, name, ""
        self.settings, self.words = settings, words
        self.quorum, self.grace = quorum, grace
        self._good: dict[str, Read] = {}  # by key, of the round that is awaited
        # How often one was looked at that is not good, and why it is not.
        self._bad: dict[str, tuple[int, str]] = {}
        # In how many rounds members were late, since they were last in time.
        self._late: collections.Counter[str] = collections.Counter()
        self._decisions: dict[int, Decision] = {}  # the last ones that were read, by round
        self.is_listed = False
        self.lacks: str | None = None

    def part(self, round: int) -> int:
        """The fragment that a round exchanges.

        Each cycle begins with another one. Else an island that is in time in each second round
        would send half of an even number of fragments alone.
        """
        return (round + round // len(self.words)) % len(self.words)

    def begin_life(self) -> str:
        """Takes the next number among this island's lives, so that later lives are known as such.

        Clocks don't tell: that of a machine that took over may be behind.
        """
        word = secrets.token_hex(4)
        listed = (pair for pair in _list_pairs(self.store, "lives") if pair[0] == self.name)
        number = max((int(n) + 1 for _, n in listed if _ROUND.fullmatch(n)), default=0)
        key = f"lives/{self.name}.{number:08d}"
        # A store that shows a new object late is believed that it took it: another try would make
        # another object. An answer may be that of a second request, so "no" is looked into.
        if not self.store.create(key, word.encode()) and self.store.get(key) != word.encode():
            # Another one was faster, or the list is old.
            raise not_shown(self.store, f"the object {key} that it was given")
        self.life = f"{number:08d}-{word}"
        return self.life

    def has_later_life(self) -> bool:
        """Whether the store shows one of this island. Then this one has nothing more to say."""
        listed = _list_pairs(self.store, "lives")
        return any(_ROUND.fullmatch(n) and n > self.life for name, n in listed if name == self.name)

    def post(
        self,
        round: int,
        words: np.ndarray,
        *,
        weight: float,
        digest: str,
        late: bool = False,
        loss: float | None = None,
    ) -> None:
        """Sends this island's message. A second time it changes nothing."""
        message = Message(round, self.settings, self.name, self.life, weight, digest, late, loss)
        data = message.to_bytes(np.ascontiguousarray(words, "<u4").tobytes())
        key = _message_key(round, self.name, self.life)
        if self.store.create(key, data):
            # What others read is what the store has taken, so it need not be read again.
            self._good[key] = self._check(data, round, self.name, self.life)

    def decided(self, round: int) -> Decision | None:
        """The decision of a round, or None as long as there is none.

        It raises UnreachableError if the store shows none, or one that can't be read, and this
        island has seen one of this round or a later one. Else it would decide a second time.
        """
        if (known := self._decisions.get(round)) is not None:
            return known  # it never changes
        decision, newest = self._read_decision(round), max(self._decisions, default=-1)
        if decision is not None:
            self._decisions = {r: d for r, d in self._decisions.items() if r >= round - 1}
            self._decisions[round] = decision
        elif round <= newest:
            was_there = f"although that of round {newest} was there"
            raise not_shown(self.store, f"the decision of round {round}, {was_there}")
        return decision

    def _read_decision(self, round: int) -> Decision | None:
        """What the store shows now."""
        data = self.store.get(decision_key(round))
        if data is None:
            return None
        try:
            return Decision.from_bytes(data, round, self.settings)[0]
        except ForeignError as error:
            raise of_another_run(self.store, f"a decision of round {round}", error) from None
        except BrokenError as error:
            raise UnreachableError(
                f"{self.store} shows a decision of round {round} that can't be read: {error}. "
                f"Islands read it again. If {decision_key(round)} is broken in the store, delete "
                "it: none has gone by it, and they decide anew"
            ) from None

    def _see_before(self, round: int) -> None:
        """Raises UnreachableError unless the store has what a decision of this round follows.

        Then what was read of this round is forgotten.
        """
        known = self._decisions.pop(round, None)
        if round == 0:
            what, is_there = "any snapshot of its run", bool(self.snapshots())
        else:
            what = f"the decision of round {round - 1} that {self.name} went by"
            before = self._read_decision(round - 1)
            is_there = before is not None and before == self._decisions.get(round - 1, before)
        if not is_there:
            raise not_shown(self.store, f"{what}, so that it decides nothing there")
        if known is not None:
            self._decisions[round] = known

    def decide(self, round: int, waited: float, took: float = math.inf) -> Decision | None:
        """The decision of a round, which this island makes if it is time. Else None.

        It has posted, and `waited` for so many seconds. It waits no longer than its steps of a
        round `took` for those that have another chance: they take twice as long, or more.

        It raises UnreachableError if it has made one, and the store shows none, or not the one
        before; or if a quorum needs messages that can't be read.
        """
        decision = self.decided(round) or self._propose(round, waited, took)
        if decision is not None and decision.by == self.name:
            self._see_before(round)
        return decision

    def _propose(self, round: int, waited: float, took: float) -> Decision | None:
        """Makes a decision if it is time. Returns the one that stands."""
        found = self._posted(round)
        in_time, chances = self._expected(round)
        here = {each.member.name for each in found}
        has_waited = chances <= here or waited >= took
        is_complete = bool(in_time) and in_time <= here and has_waited
        if len(found) < self.quorum and waited >= self.grace:
            self._tell_lack(round, here)
        if len(found) < self.quorum or not (is_complete or waited >= self.grace):
            return None
        self._see_before(round)
        for key, (_, why) in self._bad.items():
            warnings.warn(f"the message {key} is left out: {why}", stacklevel=5)
        digests = collections.Counter(each.digest for each in found)
        decision = Decision(
            round,
            self.settings,
            tuple(each.member for each in found),
            max(sorted(digests), key=digests.__getitem__),
            self.name,
            max(waited, 0.0),
            self.words[self.part(round)],
        )
        self.store.create(decision_key(round), decision.to_bytes())
        stands = self.decided(round)  # whoever made it
        if stands is None:
            raise not_shown(self.store, f"the decision of round {round} that it was given")
        return stands

    def _tell_lack(self, round: int, here: set[str]) -> None:
        """Says what a quorum lacks after the grace. Raises if that is there, but can't be read."""
        names = {key.rpartition("/")[2].split(".")[0] for key in self._bad}
        if self.is_listed and len(here | names) >= self.quorum:
            keys = ", ".join(f"{key} ({why})" for key, (_, why) in self._bad.items())
            raise UnreachableError(
                f"{self.store} shows messages that can't be read, and quorum={self.quorum} needs "
                f"them: {keys}. If they are broken in the store, delete them"
            )
        self.lacks = (
            f"round {round} has messages of {len(here)} islands ({', '.join(sorted(here))}), and "
            f"waits for others: quorum={self.quorum}"
        )

    def _expected(self, round: int) -> tuple[set[str], set[str]]:
        """Whom to wait for: those that were in time in the last round, and some that were late.

        To wait for one that is slow makes all others slow, too. But one that was held up once
        starts its steps a little behind who decides, and would be late in each second round for
        ever. So it gets another chance, and after that fewer and fewer. If none was in time, nobody
        knows who will come.
        """
        last = self.decided(round - 1) if round else None
        members = () if last is None else last.members
        in_time = {member.name for member in members if not member.late}
        late = {member.name for member in members} - in_time
        return in_time, {name for name in late if _is_power_of_four(self._late[name])}

    def read(self, decision: Decision) -> list[np.ndarray] | None:
        """The words of the messages that count, in order, or None if one is not there any more."""
        found = []
        for member in decision.members:
            key = _message_key(decision.round, member.name, member.life)
            good = self._good.get(key)
            if good is None or good.member.checksum != member.checksum:
                data = self.store.get(key)
                if data is None or checksum(data) != member.checksum:
                    return None
                try:
                    # Kept until all are there, because the store may fail at the next one.
                    good = self._good[key] = self._check(
                        data, decision.round, member.name, member.life
                    )
                except BrokenError:
                    return None
            found.append(good.words)
        for member in decision.members:
            self._late[member.name] = self._late[member.name] + 1 if member.late else 0
        self._good.clear()
        self._bad.clear()
        self.lacks = None
        return found

    def snapshots(self) -> list[int]:
        """The rounds that have a snapshot, ascending."""
        return list_rounds(self.store, "snapshots")

    def snapshot(self, round: int) -> bytes | None:
        return self.store.get(_snapshot_key(round))

    def keep(self, round: int, snapshot: bytes) -> None:
        """Creates the snapshot of a round, and deletes what is not needed any more."""
        self.store.create(_snapshot_key(round), snapshot)
        # A later round is none of this run, or this island is behind: neither makes these old.
        rounds = [each for each in self.snapshots() if each <= round]
        old, kept = rounds[:-_KEPT], rounds[-_KEPT:]
        if not old:
            return
        # Folders go from the oldest to the newest, and snapshots last. So what an interruption left
        # is found the next time, in the rounds right before the snapshots that are kept. A snapshot
        # that came back from long ago has nobody list all rounds since.
        folders = []
        for each in range(kept[0] - 1, old[0] - 1, -1):
            keys = [_folder(each) + "/" + key for key in self.store.names(_folder(each))]
            if not keys:
                break
            folders.append(keys)
        for keys in reversed(folders):
            self.store.delete(keys)
        self.store.delete([_snapshot_key(each) for each in old])

    def _posted(self, round: int) -> list[Read]:
        """The good messages of a round, one for each island, by name."""
        by_name, there = {}, list_posted(self.store, round)
        self.is_listed = (self.name, self.life) in there
        for name, life in there:  # of two lives, the later one
            key = _message_key(round, name, life)
            if key not in self._good:
                self._look_at(key, round, name, life)
            if key in self._good:
                by_name[name] = self._good[key]
        return [by_name[name] for name in sorted(by_name)]

    def _look_at(self, key: str, round: int, name: str, life: str) -> None:
        """Reads a message, and keeps a good one. Others again at looks 2, 4, 8: they are large."""
        looks, why = self._bad.get(key, (0, ""))
        if looks & (looks + 1):
            self._bad[key] = looks + 1, why
            return
        data = self.store.get(key)
        if data is None:
            self._bad[key] = 0, "it is listed, and not there"
            return
        try:
            self._good[key] = self._check(data, round, name, life)
            self._bad.pop(key, None)
        except BrokenError as error:
            self._bad[key] = looks + 1, str(error)

    def _check(self, data: bytes, round: int, name: str, life: str) -> Read:
        message, body = Message.from_bytes(data, round, self.settings)
        if (message.name, message.life) != (name, life):
            raise BrokenError(f"it says that it is {message.name}.{message.life}")
        member = CountedMessage(
            name, life, message.weight, message.late, message.loss, checksum(data)
        )
        return Read(member, message.digest, words_of(body, self.words[self.part(round)]))


def _is_power_of_four(n: int) -> bool:
    return n & (n - 1) == 0 and n.bit_length() % 2 == 1


def list_posted(store: Objects, round: int) -> list[tuple[str, str]]:
    """Names and lives of the messages of a round, sorted. Other objects are not ours."""
    return _list_pairs(store, _folder(round))


def _list_pairs(store: Objects, folder: str) -> list[tuple[str, str]]:
    """The two parts of names in a folder, sorted."""
    found = [_PAIR.fullmatch(key) for key in store.names(folder)]
    return [(match[1], match[2]) for match in found if match]


def list_rounds(store: Objects, folder: str) -> list[int]:
    """The rounds that have an object in a folder, ascending."""
    return sorted(int(name) for name in store.names(folder) if _ROUND.fullmatch(name))


def _folder(round: int) -> str:
    return f"messages/{round:08d}"


def _message_key(round: int, name: str, life: str) -> str:
    return f"{_folder(round)}/{name}.{life}"


def decision_key(round: int) -> str:
    """Where a round's decision stands."""
    return f"decisions/{round:08d}"


def _snapshot_key(round: int) -> str:
    return f"snapshots/{round:08d}"
