"""Any history of islands keeps the protocol, and no history does if a rule of it is broken.

    pytest tests/test_histories.py --histories 10000 --histories-seed 7

runs as many other histories, and prints one that fails as a program.
"""

from unittest import mock

import histories
import jax
import numpy as np
import pytest
import reference_islands as reference
from histories import MACHINES, Fractions, Fragments, History, Weighted
from workers import some

from jaxsparse.islands import arithmetic, member, protocol, records, round, snapshots

AT_ONCE = 100  # histories of a test


@pytest.mark.slow
@pytest.mark.parametrize("machine", some(MACHINES, [History]))
def test_any_history(machine):
    histories.run(machine, 20 if machine is History else 10, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_many_histories(machine):
    histories.run(machine, 350, seed=1)


def pytest_generate_tests(metafunc):
    if "part" in metafunc.fixturenames:
        count = metafunc.config.getoption("--histories")
        metafunc.parametrize("part", range(-(-count // AT_ONCE)))


def test_more_histories(part, request):
    seed = request.config.getoption("--histories-seed")
    histories.run(MACHINES[part % len(MACHINES)], AT_ONCE, seed=f"{seed} {part}")


# Faults: each replaces a part of the library, or of the store, by one that breaks a rule.


def own_message_first(patch, programs):
    right = protocol.Rounds.read

    def read(self, decision):
        words, names = right(self, decision), [each.name for each in decision.members]
        own = names.index(self.name) if self.name in names else 0
        return [words[own], *words[:own], *words[own + 1 :]] if words else words

    patch(protocol.Rounds, "read", read)


def late_loses_its_residual(patch, programs):
    patch(programs, "owed", programs.sent)


def counted_is_owed_still(patch, programs):
    right = programs.outer_step

    def outer_step(messages, weights, begun, before, part):
        after, *told = right(messages, weights, begun, before, part)
        return arithmetic.with_own(after, programs.owed(begun, before, part=part)), *told

    patch(programs, "outer_step", outer_step)


def counted_in_its_sleep_is_owed_still(patch, programs):
    patch(programs, "sent", programs.owed)


def replay_skips_a_round(patch, programs):
    right = round.Round._absorb

    def absorb(self, decision, waited=None):
        if self.message is None and decision.round % 3 == 2:
            self._go_to(self.shared, decision.round + 1, False, False)
        else:
            right(self, decision, waited)

    patch(round.Round, "_absorb", absorb)


def snapshot_of_another_round(patch, programs):
    right = snapshots.make

    def make(rounds, shared, round):
        before, rounds.before = getattr(rounds, "before", shared), shared
        return right(rounds, before, round)

    patch(snapshots, "make", make)


def snapshot_without_outer_state(patch, programs):
    right = snapshots.make

    def make(rounds, shared, round):
        return right(rounds, programs.start((shared.params, 0)), round)

    patch(snapshots, "make", make)


def keeps_one_snapshot(patch, programs):
    patch(protocol, "_KEPT", 1)


def deletes_decisions(patch, programs):
    right = protocol.Rounds.keep

    def keep(self, round, snapshot):
        right(self, round, snapshot)
        self.store.delete([protocol.decision_key(each) for each in range(round - 3)])

    patch(protocol.Rounds, "keep", keep)


def the_store_overwrites(patch, programs):
    def create(self, key, data):
        self.history.setdefault(key, data)
        self.objects[key] = data
        return True

    patch(reference.Memory, "create", create)


def who_proposes_believes_itself(patch, programs):
    right = protocol.Rounds.decide

    def decide(self, round, *waited):
        proposed, create = [], self.store.create

        def proposes(key, data):
            proposed.append(records.Decision.from_bytes(data, round)[0])
            return create(key, data)

        with mock.patch.object(self, "store", mock.Mock(wraps=self.store, create=proposes)):
            decision = right(self, round, *waited)
        return proposed[0] if proposed else decision

    patch(protocol.Rounds, "decide", decide)


def first_message_counts_twice(patch, programs):
    right = protocol.Rounds.read

    def read(self, decision):
        words = right(self, decision)
        return words[:1] + words

    patch(protocol.Rounds, "read", read)


def a_broken_message_counts(patch, programs):
    right = protocol.Rounds._check

    def checked(self, data, round, name, life):
        if data != b"half":
            return right(self, data, round, name, life)
        says = records.CountedMessage(name, life, 1.0, False, None, records.checksum(data))
        return protocol.Read(says, "", np.zeros(self.words, np.uint32))

    patch(protocol.Rounds, "_check", checked)


def with_other_settings(patch, **settings):
    right = reference.member
    patch(reference, "member", lambda *args, **usual: right(*args, **{**usual, **settings}))


def no_quorum(patch, programs):
    with_other_settings(patch, quorum=1)


def no_grace(patch, programs):
    with_other_settings(patch, grace=0.0)


def waits_for_ever(patch, programs):
    with_other_settings(patch, grace=float("inf"))


def a_former_life_is_its_own(patch, programs):
    never = lambda self, other: False
    methods = {"__eq__": lambda self, other: True, "__hash__": str.__hash__}
    any_life = type("AnyLife", (str,), {**methods, "__lt__": never, "__gt__": never})()
    lives = property(lambda self: {each.name: any_life for each in self.members})
    patch(records.Decision, "lives", lives)


def lives_share_a_name(patch, programs):
    patch(protocol.Rounds, "begin_life", lambda self: setattr(self, "life", "0") or "0")


def saved_is_owed_still(patch, programs):
    patch(round.Round, "_was_sent_in", lambda self, decision: False)


def an_earlier_life_goes_on(patch, programs):
    patch(round.Round, "_check_life", lambda self, decision: None)
    patch(protocol.Rounds, "has_later_life", lambda self: False)


def decides_in_an_empty_folder(patch, programs):
    patch(protocol.Rounds, "_see_before", lambda self, round: None)


def weights_of_one(patch, programs):
    right = programs.outer_step
    unweighted = lambda words, weights, *more, part: right(words, 0 * weights + 1, *more, part)
    patch(programs, "outer_step", unweighted)


def late_takes_its_moves_for_sent(patch, programs):
    right = member.Member.begin_late

    def begin_late(self, shared, round, begun):
        origin = jax.tree.map(np.float32, begun.own)
        return right(self, shared, round, begun._replace(origin=origin))

    patch(member.Member, "begin_late", begin_late)


def what_was_sent_stays_moved(patch, programs):
    patch(programs, "without_moves", lambda begun: begun)


def one_order_of_fragments(patch, programs):
    patch(protocol.Rounds, "part", lambda self, round: round % len(self.words))


def late_loses_its_weight(patch, programs):
    patch(round.Round, "owed_weight", 0.0)


UNLIKE = "(parameters|snapshot) of round|differs from others|has moved more or less"
UNBALANCED = "has moved more or less"
# Each with a machine that has what it takes, and what the machine finds.
FAULTS = {
    own_message_first: (Fractions, UNLIKE),
    late_loses_its_residual: (History, UNBALANCED),
    counted_is_owed_still: (History, UNBALANCED),
    counted_in_its_sleep_is_owed_still: (History, UNBALANCED),
    replay_skips_a_round: (History, UNLIKE),
    snapshot_of_another_round: (History, UNLIKE),
    snapshot_without_outer_state: (History, "snapshot"),
    keeps_one_snapshot: (History, "was deleted too early"),
    deletes_decisions: (History, "is gone"),
    the_store_overwrites: (History, "a second one|does not go on"),
    who_proposes_believes_itself: (History, UNLIKE),
    first_message_counts_twice: (History, UNLIKE),
    # Or an island meets a life that it takes for a later one of its own, and stops.
    a_broken_message_counts: (History, "no object of this version|after this one counts"),
    no_quorum: (Fractions, "less than a quorum"),
    no_grace: (History, "did not wait for"),
    waits_for_ever: (History, "does not go on|waits without a reason"),
    a_former_life_is_its_own: (History, UNBALANCED),
    lives_share_a_name: (History, UNBALANCED),
    saved_is_owed_still: (History, UNBALANCED),
    an_earlier_life_goes_on: (History, "an earlier life of .* counts after a later one"),
    decides_in_an_empty_folder: (History, UNLIKE),
    weights_of_one: (Weighted, UNLIKE),
    late_loses_its_weight: (Weighted, "weighs"),
    late_takes_its_moves_for_sent: (Fragments, UNBALANCED),
    what_was_sent_stays_moved: (Fragments, UNBALANCED),
    one_order_of_fragments: (Fragments, UNLIKE),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", some(FAULTS, [counted_is_owed_still]), ids=lambda x: x.__name__)
def test_histories_find_a_planted_fault(fault, monkeypatch):
    machine, text = FAULTS[fault]
    settings = machine.exchange, machine.weighted, machine.fragments
    fault(monkeypatch.setattr, reference.arithmetic(*settings))
    with pytest.raises((AssertionError, RuntimeError, records.BrokenError), match=text):
        histories.run(machine, 200, seed=2)
