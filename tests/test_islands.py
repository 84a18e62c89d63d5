"""Islands: rounds by an object store, through failures of all kinds. See test_histories.py, too."""

import collections
import contextlib
import functools
import hashlib
import itertools
import json
import math
import signal
import threading
import time
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference_islands as reference
import running
from safetensors.numpy import save
from simulation import Event, simulate
from workers import rows, some

import jaxsparse
from jaxsparse import islands
from jaxsparse.__main__ import main
from jaxsparse.islands import (
    life as life_of,
    protocol,
    round as exchange_of,
    threads,
    train as training,
    watch,
)
from jaxsparse.islands.arithmetic import Arithmetic, Shared, _digest as digested, shared_leaves
from jaxsparse.islands.store import UnreachableError

NAMES = ("amsterdam", "bergen", "cork", "dover")


def ran(members, states, rounds, batches, clock):
    """States after rounds in which all are in time. `batches[round][i]` moves island i."""
    for round in range(rounds):
        exchanges = []
        for i, one in enumerate(members):
            states[i], exchange = one.begin(reference.moved(states[i], batches[round][i]))
            exchanges.append(exchange)
        for exchange in exchanges:
            exchange.advance()
        clock.now += 10
        for i, (one, exchange) in enumerate(zip(members, exchanges)):
            assert exchange.advance()
            states[i] = one.finish(states[i], exchange)
    return states


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def joined(store, names, clock, **settings):
    members = [reference.member(store, name, clock, **settings) for name in names]
    return members, [one.join(reference.start()) for one in members]


def test_islands_without_failures_are_local_steps(clock):
    """The same exchange, optimizer and moves. Gathered messages are added up in the same order."""
    rounds, workers = 4, 3
    moves = np.random.default_rng(0).normal(size=(rounds, workers, 1, 6)).astype(np.float32)
    members, states = joined(reference.Memory(), NAMES[:workers], clock)
    states = ran(members, states, rounds, moves, clock)

    def step(state, batch):
        params, count = state
        return ({"w": params["w"] + batch.reshape(2, 3)}, count + 1), None

    pair = jaxsparse.top_k(0.4, is_dense=lambda *_: False), optax.sgd(1.0, momentum=0.5)
    train = jaxsparse.LocalSteps(step, *pair, workers, params=lambda state: state[0])
    state = train.init(reference.start())
    for t in range(rounds):
        state, _ = train(state, jnp.asarray(moves[t].reshape(workers, 6)), t)
    # The two programs may fuse multiplications and additions otherwise.
    np.testing.assert_allclose(states[0].params["w"], state.params["w"], rtol=1e-6, atol=1e-6)
    owed = np.stack([reference.residual(one) for one in states])
    expected = np.asarray(state.outer[0][0].residual["w"].value).reshape(workers, -1)
    np.testing.assert_allclose(owed, expected, rtol=1e-6, atol=1e-6)


def test_a_weight_is_a_share_of_the_mean(clock):
    """10 steps beside 30 count 1 to 3. What an island owes is without its weight."""
    programs = reference.arithmetic(weighted=True)
    members = [
        reference.member(store, name, clock, programs=programs)
        for store in [reference.Memory()]
        for name in NAMES[:2]
    ]
    states = [one.join(reference.start()) for one in members]
    states = [one._replace(weight=weight) for one, weight in zip(states, (10.0, 30.0))]
    moves = [[np.float32([8, 0, 0, 0, 0, 1]), np.float32([0, 16, 0, 0, 0, 1])]]
    states = ran(members, states, 1, moves, clock)
    # Two of six entries travel: 8 and 1, and 16 and 1.
    expected = [8 / 4, 16 * 3 / 4, 0, 0, 0, 1]
    np.testing.assert_allclose(np.asarray(states[0].params["w"]).reshape(-1), expected, rtol=1e-6)
    assert [one.weight for one in states] == [0, 0]


EXCHANGES = {
    "dense": functools.partial(jaxsparse.dense, axis_name=None),
    "top_k": functools.partial(jaxsparse.top_k, 0.8, axis_name=None, is_dense=lambda *_: False),
}


@pytest.mark.parametrize("weighted", some([False, True], [False]))
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_message_far_larger_than_the_others_is_left_out(exchange, weighted, clock):
    """As of an island that diverges. Its next one counts again."""
    pair = EXCHANGES[exchange](), optax.sgd(1.0)
    programs = Arithmetic(*pair, lambda state: state[0], weighted, norm_bound=3.0)
    members, states = joined(reference.Memory(), NAMES[:3], clock, programs=programs)
    weight = lambda states: [one._replace(weight=10.0) for one in states]
    rows = np.float32([[1, 2, 3, 4, 0, 0], [3, 2, 1, 4, 0, 0], [0, 0, 90, 0, 0, 12]])
    with pytest.warns(UserWarning, match=rf"{NAMES[2]} in round 0 was larger than norm_bound"):
        states = ran(members, weight(states), 1, rows[None], clock)
    mean = np.float32([2, 2, 2, 4, 0, 0])
    for state in states:
        np.testing.assert_array_equal(reference.flat(state.params), mean)
        np.testing.assert_array_equal(reference.flat(state.worker[0]), mean)
        assert not any(np.any(x) for x in jax.tree.leaves(state.outer[0][0].residual))
    states = ran(members, weight(states), 1, np.stack([rows[[0, 1, 1]]]), clock)
    second = (rows[0] + 2 * rows[1]) / 3
    np.testing.assert_allclose(reference.flat(states[0].params), mean + second, rtol=1e-6)
    for one in members:
        assert [report.beyond for report in one.reports] == [(NAMES[2],), ()]
    assert f"{NAMES[2]} beyond the bound" in str(one.reports[0])


def test_of_two_messages_the_larger_one_is_left_out_and_zeros_bound_nothing(clock):
    programs = Arithmetic(
        EXCHANGES["dense"](), optax.sgd(1.0), lambda state: state[0], norm_bound=2.0
    )
    members, states = joined(reference.Memory(), NAMES[:2], clock, programs=programs)
    with pytest.warns(UserWarning, match="larger than norm_bound"):
        states = ran(members, states, 1, [[np.full(6, 5.0), np.ones(6)]], clock)
    np.testing.assert_array_equal(reference.flat(states[0].params), 1)
    states = ran(members, states, 1, [[np.ones(6), np.zeros(6)]], clock)
    np.testing.assert_array_equal(reference.flat(states[0].params), 1.5)


@pytest.mark.parametrize("bound", [2, 9, None])
def test_what_is_owed_for_too_many_rounds_is_dropped(bound, clock):
    settings = {"age_bound": bound} if bound else {}
    members, states = joined(reference.Memory(), NAMES[:2], clock, **settings)
    state, exchange = members[0].begin(reference.moved(states[0], [8, 0, 0, 0, 0, 0]))
    ran(members[1:], states[1:], 3, np.ones((3, 1, 6)), clock)
    told = pytest.warns(UserWarning, match="round 0, 3 rounds ago, and age_bound is 2")
    with told if bound == 2 else contextlib.nullcontext():
        clock.now += 10
        exchange.advance()
        clock.now += 10
        assert exchange.advance()
    state = members[0].finish(state, exchange)
    assert state.round == (3 if bound == 2 else 4)  # it sends nothing late
    if bound == 2:
        np.testing.assert_array_equal(reference.residual(state), 0)
        np.testing.assert_array_equal(reference.flat(state.worker[0]), reference.flat(state.params))
        assert state.owed == 0


def exchanged(one, state, clock, by=1, seconds=10):
    """The state and exchange of an island that moves, posts, and decides after some seconds."""
    state, exchange = one.begin(reference.moved(state, [by] * 6))
    exchange.advance()
    clock.now += seconds
    assert exchange.advance()
    return state, exchange


def missed(members, states, clock):
    """The first member's state and exchange, after the second has decided round 0 alone."""
    exchanged(members[1], states[1], clock)
    return exchanged(members[0], states[0], clock, by=8, seconds=20)


@pytest.mark.parametrize(
    "exchange",
    [
        jaxsparse.dense,
        functools.partial(jaxsparse.top_k, 0.4, decay=0.0, is_dense=lambda *_: False),
    ],
    ids=["dense", "top_k"],
)
def test_an_island_that_keeps_nothing_sends_nothing_late(exchange, clock):
    """Its next message would be zeros that count."""
    pair = exchange(axis_name=None), optax.sgd(1.0)
    programs = Arithmetic(*pair, lambda state: state[0], weighted=True)
    settings = {"programs": programs}
    members, states = joined(reference.Memory(), NAMES[:2], clock, **settings)
    states = [one._replace(weight=10.0) for one in states]
    state, exchange = missed(members, states, clock)
    assert (exchange.counted, exchange.round) == (False, 1)
    state = members[0].finish(state, exchange)
    assert state.weight == 0
    assert members[0].rounds.decided(1) is None


@pytest.mark.parametrize(("weight", "sent"), [(1e-30, 1e-20), (1e30, 1e20)])
def test_a_weight_that_has_left_the_range_still_counts(weight, sent, clock):
    """A lone island would wait for ever."""
    settings = {"programs": reference.arithmetic(weighted=True)}
    (one,), (state,) = joined(reference.Memory(), NAMES[:1], clock, **settings)
    exchanged(one, state._replace(weight=weight), clock)
    assert [each.weight for each in one.rounds.decided(0).members] == [sent]


def fading():
    """Programs of an exchange of two of six entries, whose residuals fade by half."""
    exchange = jaxsparse.top_k(0.2, decay=0.5, axis_name=None, is_dense=lambda *_: False)
    return {"programs": Arithmetic(exchange, optax.sgd(1.0), lambda state: state[0])}


def test_what_an_island_owes_does_not_fade_while_others_go_on(clock):
    """It moves, sleeps for three rounds, and then sends the two largest entries."""
    settings = fading()
    members, states = joined(reference.Memory(), NAMES[:2], clock, grace=0.0, **settings)
    state, exchange = members[0].begin(reference.moved(states[0], [6, 5, 4, 3, 2, 1]))
    states = ran(members[1:], states[1:], 3, np.zeros((3, 1, 6)), clock)
    assert exchange.advance()
    state = members[0].finish(state, exchange)
    np.testing.assert_array_equal(reference.flat(state.params), [6, 5, 0, 0, 0, 0])
    np.testing.assert_array_equal(reference.residual(state), [0, 0, -4, -3, -2, -1])


def test_replayed_rounds_do_not_fade_what_an_island_owes(clock):
    settings = fading()
    members, states = joined(reference.Memory(), NAMES[:3], clock, **settings)
    moves = np.array([[[6, 5, 4, 3, 2, 1]] * 3, np.zeros((3, 6))])
    states = ran(members, states, 1, moves, clock)
    broken = jax.tree.map(lambda x: x + 2**-20, states[1].params)
    states[1] = states[1]._replace(params=broken)
    with pytest.warns(UserWarning, match="reloads the snapshot of round 0"):
        states = ran(members, states, 1, moves[1:], clock)
    for state in states:
        np.testing.assert_allclose(reference.residual(state), [0, 0, 0, 0, -1, -0.5], atol=1e-5)


@pytest.mark.parametrize("rate", [1.0, 1e38])
def test_a_round_that_is_not_applied_is_told_and_an_infinity_may_stay(rate, clock):
    """An infinity that was in the state, as the bound of a clip that is off."""
    clip = optax.inject_hyperparams(optax.clip_by_global_norm)(max_norm=jnp.inf)
    optimizer = optax.chain(clip, optax.sgd(rate))
    exchange = jaxsparse.dense(axis_name=None)
    settings = {"programs": Arithmetic(exchange, optimizer, lambda state: state[0])}
    (one,), (state,) = joined(reference.Memory(), NAMES[:1], clock, **settings)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        state, exchange = exchanged(one, state, clock, by=8)
    state, (report,) = one.finish(state, exchange), one.reports
    np.testing.assert_array_equal(reference.flat(state.params), 8 if report.applied else 0)
    assert report.applied == (rate == 1) == (not told) == ("not applied" not in str(report))
    assert all("sum of round 0 is not applied" in str(each.message) for each in told)


def test_parameters_that_drifted_are_reloaded(clock):
    members, states = joined(reference.Memory(), NAMES[:3], clock)
    moves = np.random.default_rng(1).normal(size=(5, 3, 6))
    states = ran(members, states, 2, moves, clock)
    broken = jax.tree.map(lambda x: x.at[0, 0].add(2**-20), states[1].params)
    states[1] = states[1]._replace(params=broken)
    with pytest.warns(UserWarning, match="round 2 bergen began from other parameters than most"):
        states = ran(members, states, 1, moves[2:], clock)
    for one in states[1:]:
        np.testing.assert_array_equal(one.params["w"], states[0].params["w"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        states = ran(members, states, 2, moves[3:], clock)
    np.testing.assert_array_equal(states[1].params["w"], states[0].params["w"])


def test_parameters_that_drifted_stay_where_there_is_no_snapshot(clock):
    store = reference.Memory()
    members, states = joined(store, NAMES[:3], clock)
    states = ran(members, states, 1, np.ones((1, 3, 6)), clock)
    store.objects = {k: x for k, x in store.objects.items() if not k.startswith("snapshots")}
    states[1] = states[1]._replace(params=jax.tree.map(lambda x: x + 1, states[1].params))
    with pytest.warns(UserWarning, match=r"reloads the snapshot of round \?"):
        states = ran(members, states, 1, np.ones((1, 3, 6)), clock)
    assert [one.round for one in states] == [2, 2, 2]
    np.testing.assert_array_equal(states[1].params["w"], states[0].params["w"] + 1)


@pytest.mark.parametrize(("far", "move"), [(0.0, np.nan), (3e38, -3e38)])
def test_an_island_that_is_not_finite_sends_nothing_and_starts_anew(far, move, clock):
    """Nor where both ends are finite, but not what lies between: nobody would count a message."""
    store = reference.Memory()
    (one,), (state,) = joined(store, NAMES[:1], clock)
    params = jax.tree.map(lambda x: x + far, state.params)
    state = reference.moved(state._replace(params=params), [move] * 6)
    with pytest.warns(UserWarning, match="amsterdam are not finite in round 0, or moved too far"):
        state, exchange = one.begin(state)
    assert exchange is None
    assert (state.steps, state.weight) == (0, 0.0)
    assert not store.names("messages/00000000")
    np.testing.assert_array_equal(state.worker[0]["w"], params["w"])


def test_a_life_that_sees_a_later_one_stops(clock):
    """Though no message of it has counted: what it owes may be in a state that the other has."""
    store = reference.Memory()
    (one,), (state,) = joined(store, NAMES[:1], clock)
    again = reference.member(store, NAMES[0], clock)
    other = again.join(state)
    ran([again], [other], 2, np.ones((2, 1, 6)), clock)
    _, exchange = one.begin(reference.moved(state, [1] * 6))
    with pytest.raises(RuntimeError, match="a process that joined as amsterdam after this one"):
        exchange.advance()
    assert one.rounds.life not in str(store.names(f"messages/0000000{state.round}"))


def test_a_faster_life_that_was_replaced_sends_nothing(clock):
    """No message of the later one, which has no residual to send late, would ever count."""
    store = reference.Memory()
    programs = Arithmetic(DENSE, optax.sgd(1.0), lambda state: state[0])
    members = [reference.member(store, NAMES[0], clock, programs=programs) for _ in range(2)]
    states = [member.join(reference.start()) for member in members]
    _, exchange = members[0].begin(reference.moved(states[0], [1] * 6))
    with pytest.raises(RuntimeError, match=r"joined as amsterdam after this one has begun"):
        exchange.advance()
    ran(members[1:], states[1:], 2, np.ones((2, 1, 6)), clock)
    assert members[1].totals[:2] == (2, 2)


def test_lives_are_in_the_order_in_which_they_joined(clock):
    """Whatever the store answers to who takes a number."""
    store = reference.Memory()
    link = reference.Link(store)
    lives = []
    for fault in (None, "deaf", "late", None):
        one = reference.member(link, NAMES[0], clock)
        link.fault = fault
        with contextlib.suppress(UnreachableError):
            one.join(reference.start())
        link.mend()
        lives.append(one.join(reference.start()) and one.rounds.life)
        joined(store, ["amsterdam-2"], clock)  # which is another
    assert lives == sorted(set(lives))


def test_a_state_of_another_island_is_refused(clock):
    """A copy of it would send again what it owes."""
    store = reference.Memory()
    (_one,), (state,) = joined(store, NAMES[:1], clock)
    saved = jax.tree.map(np.asarray, state)
    with pytest.raises(
        ValueError, match=r"another island's than 'cork'.* or join with state.worker"
    ):
        reference.member(store, "cork", clock).join(saved)
    assert reference.member(store, "cork", clock).join(saved.worker).round == 0
    assert reference.member(store, NAMES[0], clock).join(saved).round == 0


def test_a_state_that_was_restored_without_a_target_is_told(clock):
    store = reference.Memory()
    (_one,), (state,) = joined(store, NAMES[:1], clock)
    saved = jax.tree.map(np.asarray, state)
    for given in (saved._asdict(), tuple(saved)):
        with pytest.raises(ValueError, match=r"fields of IslandState.*Restore\(train.like\(state"):
            reference.member(store, NAMES[0], clock).join(given)


def test_a_state_of_another_optimizer_is_told(clock):
    store = reference.Memory()
    (_one,), (state,) = joined(store, NAMES[:1], clock)
    plain = Arithmetic(reference.OUTER["top_k"](), optax.sgd(1.0), lambda state: state[0])
    with pytest.raises(ValueError, match=r"another optimizer: .* an array .* needs nothing"):
        reference.member(store, NAMES[0], clock, programs=plain).join(state)


def test_an_island_that_always_differs_goes_on(clock, monkeypatch):
    members, states = joined(reference.Memory(), NAMES[:3], clock)
    digest = exchange_of.Round._digest_now
    mine = lambda self: digest(self)[::-1] if self.member is members[1] else digest(self)
    monkeypatch.setattr(exchange_of.Round, "_digest_now", mine)
    with pytest.warns(UserWarning, match="bergen began from other parameters"):
        states = ran(members, states, 2, np.ones((2, 3, 6)), clock)
    assert [one.round for one in states] == [2, 2, 2]


def changed(data, at, by):
    return data[:at] + by + data[at + len(by) :]


def record(kind, body, **fields):
    """An object with a right checksum, whatever it says."""
    header = json.dumps({"kind": kind, **fields}).encode()
    data = b"jaxisland2" + len(header).to_bytes(4, "little") + header + body
    return data + hashlib.sha256(data).digest()


def resealed(data):
    return data[:-32] + hashlib.sha256(data[:-32]).digest()


def of_message(body=None, **fields):
    usual = {
        "round": 0,
        "settings": "s",
        "name": "eve",
        "life": "0",
        "weight": 1.0,
        "digest": "d",
        "late": False,
        "loss": None,
    }
    body = np.uint32([0, 1, 2]).tobytes() if body is None else body
    return record("message", body, **{**usual, **fields})


GOOD = of_message()
BROKEN_MESSAGES = {
    "empty": b"",
    "cut in the middle": GOOD[: len(GOOD) // 2],
    "longer": GOOD + b"\0",
    "a field too many": of_message(more=1),
    "no weight": of_message(weight=0.0),
    "too few words": of_message(b"\0" * 8),
    "no magic": b"x" + GOOD[1:],
    "another version with its checksum": resealed(changed(GOOD, 9, b"1")),
    "a flipped bit of a word": changed(GOOD, len(GOOD) - 36, b"\x01"),
    "a flipped bit of the checksum": GOOD[:-1] + bytes([GOOD[-1] ^ 1]),
    "a header of 4 GB": record("message", b"")[:10] + b"\xff\xff\xff\xff" + GOOD[14:],
    "no JSON": b"jaxisland2" + (3).to_bytes(4, "little") + b"{{{",
    "nested JSON": record("message", b"", x=[[[[]]]]),
    "another kind": record("decision", b"", round=0, settings="s", members=[], digest="", by=""),
    "no name": of_message(name=None),
    "another island's": of_message(name="adam"),
    "another life's": of_message(life="1"),
    "a hostile name": of_message(name="../../x"),
    "another round": of_message(round=7),
    "a negative round": of_message(round=-1),
    "a round that is true": of_message(round=True),
    "a huge round": of_message(round=10**30),
    "other settings": of_message(settings="t"),
    "a weight that is no number": of_message(weight=float("nan")),
    "an infinite weight": of_message(weight=float("inf")),
    "a huge weight": of_message(weight=10**400),
    "a loss that is no number": of_message(loss=float("nan")),
    "late by a number": of_message(late=0),
    "too many words": of_message(b"\0" * 16),
    "half a word": of_message(b"\0" * 11),
    "not finite": of_message(np.uint32([0x7FC00000, 1, 2]).tobytes()),
}


def rounds(store, name="adam", **settings):
    usual = {"settings": "s", "words": (3,), "quorum": 1, "grace": 5.0}
    store.objects["snapshots/00000000"] = b""  # of a run that has begun
    one = protocol.Rounds(store, name, **{**usual, **settings})
    one.life = "0"
    return one


@pytest.mark.parametrize("kind", BROKEN_MESSAGES)
def test_a_broken_message_is_left_out(kind):
    store = reference.Memory()
    store.objects["messages/00000000/eve.0"] = BROKEN_MESSAGES[kind]
    one = rounds(store)
    one.post(0, np.uint32([0, 5, 6]), weight=1.0, digest="d")
    with pytest.warns(UserWarning, match=r"eve\.0 is left out"):
        decision = one.decide(0, 5.0)
    assert [each.name for each in decision.members] == ["adam"]
    (words,) = one.read(decision)
    assert words.tolist() == [0, 5, 6]


def test_a_broken_message_is_read_again_and_told_once():
    class Counting(reference.Memory):
        reads = 0

        def get(self, key):
            self.reads += key.endswith("eve.0")
            return super().get(key)

    store = Counting()
    store.objects["messages/00000000/eve.0"] = b""
    one = rounds(store)
    one.post(0, np.uint32([0, 5, 6]), weight=1.0, digest="d")
    for i in range(40):
        assert one.decide(0, 0.1 * i) is None
    assert store.reads == 6  # at looks 1, 2, 4, 8, 16, 32: messages are large
    with pytest.warns(UserWarning, match=r"eve\.0 is left out: it is no object of this version"):
        assert one.decide(0, 5.0)
    assert store.reads == 6


def test_a_message_that_reads_broken_once_counts():
    store = reference.Memory()
    store.objects["messages/00000000/eve.0"] = GOOD
    link = Damaging(store, "messages/00000000/eve.0", "flip", 1)
    one = rounds(store)
    one.store = link
    one.post(0, np.uint32([0, 5, 6]), weight=1.0, digest="d")
    assert one.decide(0, 1.0) is None
    assert list(one.decide(0, 5.0).lives) == ["adam", "eve"]


MEMBER = {"name": "adam", "life": "0", "weight": 1.0, "late": False, "loss": None, "checksum": "0"}


BROKEN_DECISIONS = [
    [],
    None,
    {},
    [MEMBER, MEMBER],
    [{**MEMBER, "name": "../x"}],
    [{**MEMBER, "weight": -1.0}],
    [{**MEMBER, "more": 1}],
    ["adam"],
]


@pytest.mark.parametrize("members", BROKEN_DECISIONS, ids=str)
def test_nobody_goes_by_a_broken_decision(members):
    """Once somebody has deleted it, they decide anew."""
    store = reference.Memory()
    says = {"digest": "d", "by": "eve", "waited": 1.0, "words": 3}
    broken = record("decision", b"", round=0, settings="s", members=members, **says)
    store.objects["decisions/00000000"] = broken
    one = rounds(store)
    one.post(0, np.uint32([0, 5, 6]), weight=1.0, digest="d")
    with pytest.raises(UnreachableError, match=r"can't be read: .* delete it: none has gone by it"):
        one.decide(0, 9.0)
    store.delete(["decisions/00000000"])
    assert list(one.decide(0, 9.0).lives) == ["adam"]


DAMAGES = dict(zip(("empty", "half", "html", "flip"), reference.DAMAGES))


class Damaging(reference.Link):
    """A way on which some reads of objects of a kind are damaged. The objects are whole."""

    def __init__(self, store, start, how, reads):
        super().__init__(store)
        self.start, self.how, self.reads = start, how, reads

    def get(self, key):
        data = super().get(key)
        if data is None or not self.reads or not key.startswith(self.start):
            return data
        self.reads -= 1
        return DAMAGES[self.how](data)


@pytest.mark.parametrize(
    ("kind", "how"),
    rows([("messages", "flip"), ("snapshots", "half")], [("decisions", "html")]),
)
def test_what_never_reads_whole_ends_by_patience(kind, how):
    """With its reason. A message is read if the answer to its writing was lost."""
    link = Damaging(reference.Memory(), kind, how, math.inf)
    create, posted = link.create, []

    def deaf_once(key, data):
        found = create(key, data)
        if key.startswith("messages/"):
            posted.append(key)
            if len(posted) == 1:
                raise UnreachableError("the answer is lost")
        return found

    link.create = deaf_once
    train = trainer(link, every=1, grace=0.0, patience=0.2)
    if kind == "snapshots":
        with (
            pytest.warns(UserWarning, match=r"snapshot of round 0 is left out|can't join yet"),
            pytest.raises(UnreachableError, match=r"shows no whole snapshot"),
        ):
            train.join((jnp.zeros(8),))
        return
    state = train.join((jnp.zeros(8),))
    with pytest.raises(UnreachableError, match="can't be read"):
        train(state, jnp.ones(8))
    assert "can't be read" in train.status().trouble


def test_a_wait_for_a_quorum_has_its_reason():
    train = trainer(reference.Memory(), every=1, quorum=2, grace=0.0, overlap=0)
    state = train.join((jnp.zeros(8),))
    train._overlap = 1  # so that it does not wait
    state, _ = train(state, jnp.ones(8))
    until = time.monotonic() + 60
    while train.status().trouble is None and time.monotonic() < until:
        time.sleep(0.01)
    assert train.status().trouble == (
        "round 0 has messages of 1 islands (one), and waits for others: quorum=2"
    )
    with pytest.warns(UserWarning, match="one leaves in round 0"):
        train.leave(state, patience=0.0)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_folder_that_goes_as_it_decides_is_not_believed(when, clock):
    """As it has looked for the decision before, or as it looks what stands."""
    store, empty = reference.Memory(), reference.Memory()
    link = reference.Link(store)
    (one,), (state,) = joined(link, NAMES[:1], clock)
    (state,) = ran([one], [state], 1, np.ones((1, 1, 6)), clock)
    _, exchange = one.begin(reference.moved(state, np.ones(6)))
    create = link.create

    def goes(key, data):
        link.store = empty if key.startswith("decisions/") else store
        found = create(key, data)
        if when == "before":
            link.store = store
        return found

    link.create = goes
    for _ in range(2):
        with pytest.raises(UnreachableError, match="does not show the decision of round"):
            exchange.advance()
    link.create, link.store = create, store
    assert exchange.advance()
    assert store.names("decisions") == ["00000000", "00000001"]


# An array of safetensors that is larger than all that follows.
CLAIMS = {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}


def with_header(arrays):
    header = json.dumps(arrays).encode()
    return len(header).to_bytes(8, "little") + header


DAMAGED = ["cut", "flipped", "other arrays", "other shapes", "other types", "one too many"]
DAMAGED += ["claims", "no arrays", "empty"]


@pytest.mark.parametrize("damage", DAMAGED)
def test_an_island_joins_by_the_newest_snapshot_that_is_whole(damage, clock):
    store = reference.Memory()
    members, states = joined(store, NAMES[:1], clock, snapshots=2)
    states = ran(members, states, 4, np.ones((4, 1, 6)), clock)
    assert store.names("snapshots") == ["00000002", "00000004"]
    newest = store.objects["snapshots/00000004"]
    with_arrays = lambda body: record(
        "snapshot", body, round=4, settings=members[0].rounds.settings
    )
    shared = Shared(states[0].params, states[0].outer)
    there = {path: np.asarray(x) for path, x in shared_leaves(shared)}
    store.objects["snapshots/00000004"] = {
        "cut": newest[:-40],
        "flipped": newest[:-40] + b"\x01" + newest[-39:],
        "other arrays": with_arrays(save({})),
        "other shapes": with_arrays(save({path: x.ravel() for path, x in there.items()})),
        "other types": with_arrays(save({path: x.view("i4") for path, x in there.items()})),
        "one too many": with_arrays(save({**there, "x": np.zeros(1)})),
        "claims": with_arrays(with_header({"x": CLAIMS})),
        "no arrays": with_arrays(b"half"),
        "empty": b"",
    }[damage]
    with pytest.warns(UserWarning, match="snapshot of round 4 is left out"):
        (again,) = joined(store, ["new"], clock)[1]
    assert again.round == 4
    np.testing.assert_array_equal(again.params["w"], states[0].params["w"])


def test_a_run_of_other_settings_is_refused(clock):
    store = reference.Memory()
    joined(store, NAMES[:1], clock)
    other = reference.member(store, "new", clock, programs=reference.arithmetic("int8"))
    with (
        pytest.warns(UserWarning, match="another model, exchange or optimizer"),
        pytest.raises(ValueError, match="holds snapshots of another run: its settings are"),
    ):
        other.join(reference.start())


def test_a_saved_state_in_a_run_of_other_settings_is_refused(clock):
    """At once: waiting does not help, and the decision is a good one."""
    store = reference.Memory()
    members, states = joined(store, NAMES[:2], clock)
    states = ran(members, states, 1, np.ones((1, 2, 6)), clock)
    other = reference.member(store, NAMES[0], clock, programs=reference.arithmetic("int8"))
    with pytest.raises(ValueError, match=r"a decision of round 0 of another run: .* same settings"):
        other.join(states[0])


def test_messages_that_somebody_deleted_end_in_an_error(clock):
    store = reference.Memory()
    members, states = joined(store, NAMES[:2], clock, snapshots=100)
    ran(members, states, 2, np.ones((2, 2, 6)), clock)
    store.delete([f"messages/00000000/{name}" for name in store.names("messages/00000000")])
    with pytest.raises(UnreachableError, match=r"messages of round 0 are gone .* somebody deletes"):
        joined(store, ["new"], clock)


def test_a_folder_is_a_store(tmp_path):
    store = jaxsparse.islands.Store(tmp_path / "run")
    assert store.create("a/b.0", b"x")
    assert not store.create("a/b.0", b"y")
    assert store.get("a/b.0") == b"x"
    assert store.get("a/c") is None
    assert store.names("a") == ["b.0"]
    assert store.names("none") == []
    store.delete(["a/b.0", "a/none"])
    assert store.names("a") == []
    with pytest.raises((ValueError, PermissionError)):
        store.create("../outside", b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is no store"):
        jaxsparse.islands.Store(tmp_path / "file" / "run")


@pytest.mark.parametrize("url", ["nothing://x", "s3://", "", None])
def test_an_unknown_url_is_refused(url):
    with pytest.raises(ValueError, match="is no store"):
        jaxsparse.islands.Store(url)


STEP = jax.jit(lambda state, batch: ((state[0] - 0.1 * (state[0] - batch),), state[0].sum()))


DENSE = jaxsparse.dense(axis_name=None)


def half():
    """Half of the entries travel."""
    return jaxsparse.top_k(0.5, axis_name=None, is_dense=lambda *_: False)


def trained(train, state, steps, batch=1.0):
    """The state after steps towards a batch of equal numbers."""
    for _ in range(steps):
        state, _ = train(state, jnp.full(8, batch))
    return state


@functools.cache
def programs_of_half(weighted):
    return Arithmetic(half(), optax.sgd(1.0), lambda state: state[0], weighted)


def trainer(store, name="one", *, step=STEP, exchange=None, optimizer=None, **settings):
    """An island, by default with programs that tests share."""
    usual = {"every": 2, "grace": 20.0, "poll": 0.01}
    pair = exchange or half(), optimizer or optax.sgd(1.0)
    train = islands.Islands(step, *pair, store, name=name, **{**usual, **settings})
    if exchange is optimizer is None:
        train._member.arithmetic = programs_of_half(settings.get("weighted", False))
    return train


@pytest.mark.parametrize("overlap", some([0, 1], [1]))
def test_islands_train_in_threads_of_their_own(overlap, tmp_path):
    ended = {}

    def run(name, target):
        store = jaxsparse.islands.Store(tmp_path)
        train = trainer(store, name, quorum=2, grace=0.1, overlap=overlap, snapshots=1)
        state = train.join((jnp.zeros(8),))
        while state.round < 4:
            state, _out = train(state, jnp.full(8, target))
        ended[name] = state, train.status()

    threads = [threading.Thread(target=run, args=each) for each in (("one", 1.0), ("two", 3.0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (one, status), (two, _) = ended["one"], ended["two"]
    np.testing.assert_array_equal(one.params, two.params)
    assert status.round == 4
    assert status.counted == status.posted == 4
    assert status.trouble is None
    assert status.sent == 4 * status.rounds[0].sent
    assert status.received == 2 * status.sent
    assert [report.members for report in status.rounds] == [("one", "two")] * 4


def test_reports_of_a_long_run_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(life_of, "_KEPT", 3)
    train = trainer(reference.Memory(), every=1, grace=0.0)
    state = train.join((jnp.zeros(8),))
    for _ in range(8):
        state, _ = train(state, jnp.ones(8))
        kept = len(train.status().rounds)
        assert min(state.round, 3) == kept
    status = train.status()
    assert (status.counted, status.posted, status.round) == (8, 8, 8)
    assert status.received == status.sent == 8 * status.rounds[-1].sent
    assert status.rounds[-1].round == 7


def test_a_store_that_does_not_answer():
    link = reference.Link(reference.Memory())
    train = trainer(link, alone=3, grace=0.0, patience=0.2)
    state = trained(train, train.join((jnp.zeros(8),)), 2)
    assert state.round == 1
    link.fault = "down"
    state = trained(train, state, 4)  # the second one begins an exchange
    assert state.round == 1
    assert "down" in train.status().trouble
    link.mend()
    state = trained(train, state, 1)
    assert state.round == 3  # that one, and the next, which is due
    link.fault = "down"
    state = trained(train, state, 4)
    with pytest.raises(ConnectionError, match="down"):
        train.leave(state)


class SlowSnapshots(reference.Memory):
    """A store that takes snapshots but the first only when it may."""

    def __init__(self):
        super().__init__()
        self.may, self.fails = threading.Event(), 0

    def create(self, key, data):
        if key.startswith("snapshots/") and key != "snapshots/00000000":
            self.may.wait()
            self.fails -= 1
            if self.fails >= 0:
                raise UnreachableError("down")
        return super().create(key, data)


def test_nobody_waits_for_a_snapshot():
    """It is written beside training, tried again, and waited for at the end."""
    store = SlowSnapshots()
    train = trainer(store, every=1, grace=0.0, snapshots=3, poll=0.01)
    state = train.join((jnp.zeros(8),))
    state = trained(train, state, 5)
    assert state.round == 5
    assert store.names("snapshots") == ["00000000"]
    store.fails = 1
    threading.Timer(0.3, store.may.set).start()
    train.leave(state)
    assert store.names("snapshots") == ["00000000", "00000003"]


def test_leaving_takes_no_longer_than_it_may():
    """Neither a snapshot nor a message on its way is waited for. Then it has to join again."""
    store = SlowSnapshots()
    train = trainer(store, every=1, grace=0.0, snapshots=1, poll=0.01)
    state, _ = train(train.join((jnp.zeros(8),)), jnp.ones(8))
    begun = time.monotonic()
    train.leave(state, patience=0.2)
    assert time.monotonic() - begun < 5
    store.may.set()
    lonely = trainer(reference.Memory(), every=1, quorum=2, poll=0.01, overlap=0, alone=0)
    state = lonely.join((jnp.zeros(8),))
    lonely._overlap = 1  # so that it does not wait
    state, _ = lonely(state, jnp.ones(8))
    with pytest.warns(UserWarning, match="leaves in round 0, whose decision it has waited for in"):
        state = lonely.leave(state, patience=0.1)
    with pytest.raises(ValueError, match="one has not joined"):
        lonely(state, jnp.ones(8))


def test_no_thread_is_at_work_as_python_ends():
    train = trainer(reference.Memory(), every=1, quorum=2, overlap=0, alone=0, poll=0.01)
    state = train.join((jnp.zeros(8),))
    train._overlap = 1  # so that it does not wait
    train(state, jnp.ones(8))
    assert not train._running._has_ended.is_set()
    threads._stop_all()
    assert train._running._has_ended.is_set()


def test_snapshots_are_written_in_turn(clock):
    """If all wrote one, an upload that takes long would make all of them slow."""
    store, written = reference.Memory(), []
    members, states = joined(store, NAMES, clock, snapshots=2)
    for one in members:
        one.beside = lambda write, one=one: written.append((write.args[0], one.name))
    ran(members, states, 6, np.ones((6, 4, 6)), clock)
    assert written == [(2, NAMES[1]), (4, NAMES[2]), (6, NAMES[3])]


def test_programs_of_an_exchange_may_run_in_the_main_thread(monkeypatch):
    """As on several accelerators. The result is the same."""
    ends = []
    for beside in (True, False):
        monkeypatch.setattr(threads, "_may_compute_in_a_thread", lambda _, x=beside: x)
        train = trainer(reference.Memory(), every=2, overlap=1, grace=0.0, poll=0.01)
        state = train.join((jnp.zeros(8),))
        for i in range(6):
            state, _ = train(state, i + jnp.arange(8.0))
        ends.append(train.leave(state))
    assert ends[0].round == ends[1].round == 3
    np.testing.assert_array_equal(ends[0].params, ends[1].params)


def test_a_snapshot_that_the_store_does_not_take_is_left_out():
    store = SlowSnapshots()
    store.may.set()
    store.fails = 10**9
    train = trainer(store, every=1, grace=0.0, snapshots=1, poll=0.01, patience=0.1)
    state = train.join((jnp.zeros(8),))

    def trains_and_leaves():
        train.leave(train(state, jnp.ones(8))[0])
        train._await_snapshot(60.0)  # it may give up later than `leave`

    with pytest.warns(UserWarning, match="could not write its snapshot, and leaves it out: down"):
        trains_and_leaves()
    assert train.status().round == 1


def test_the_end_of_an_island_is_exchanged():
    train = trainer(reference.Memory(), every=5, grace=0.0)
    state = trained(train, train.join((jnp.zeros(8),)), 1)
    state = train.leave(state)
    assert state.round == 1
    np.testing.assert_allclose(np.sort(np.asarray(state.params)), [0] * 4 + [0.1] * 4, rtol=1e-6)


WRONG = {
    "name": ({"name": "a/b"}, "name='a/b' must be 1 to 64 letters"),
    "every": ({"every": 0}, "every=0 must be at least 1"),
    "stages": ({"every": jaxsparse.Stages((1, 4), (9,))}, "islands take one number of steps"),
    "a loss": ({"optimizer": optax.contrib.reduce_on_plateau()}, "no loss to give it .*'value'"),
    "a measure": (
        {"optimizer": optax.monitor({"norm": lambda updates, **_: optax.tree.norm(updates)})},
        r"from {} to {.*\['norm'\].*leave it out",
    ),
    "step": ({"step": None}, "step=None must be a function of state and batch"),
    "params": ({"params": lambda: 0}, "must be a function of state: write params=lambda state"),
    "loss": ({"loss": 3}, "loss=3 must be a function of out: write loss=lambda out"),
    "quorum": ({"quorum": 1.5}, "quorum=1.5 must be an int"),
    "overlap": ({"overlap": 2}, "overlap=2 must be less than every=2"),
    "grace": ({"grace": -1.0}, "grace=-1.0 must be a number of seconds"),
    "norm_bound": ({"norm_bound": 0.5}, "norm_bound=0.5 must be at least 1"),
    "age_bound": ({"age_bound": 0}, "age_bound=0 must be"),
    "fragments": ({"fragments": 0}, "fragments=0 must be at least 1"),
    "weights of fragments": (
        {"fragments": 2, "weighted": True},
        "weighted=True and fragments=2: a fragment moves in more steps",
    ),
    "several rounds": (
        {"exchange": jaxsparse.spardl(0.5, axis_name=None, is_dense=lambda *_: False)},
        "SparDL exchanges in several rounds",
    ),
    "a key": (
        {"optimizer": optax.add_noise(0.1, 0.5, 3)},
        r"state of exchange and optimizer holds key<fry> at \[0\]\[1\].rng_key, which snapshots",
    ),
    "no exchange": ({"exchange": optax.sgd(1.0)}, "is no exchange of this library alone"),
    "an exchange twice": (
        {"optimizer": optax.chain(jaxsparse.dense(axis_name=None), optax.sgd(1.0))},
        "optimizer holds an exchange",
    ),
    "both in one": (
        {"exchange": optax.chain(jaxsparse.dense(axis_name=None), optax.sgd(1.0))},
        "is no exchange of this library alone",
    ),
    "not made": ({"optimizer": optax.sgd}, "optimizer=<function sgd .* is no Optax transformation"),
    "an axis": (
        {"exchange": jaxsparse.top_k(0.5, is_dense=lambda *_: False)},
        "axis_name='data'.* make it with axis_name=None",
    ),
    "an axis of what is dense": (
        {"exchange": jaxsparse.dense(axis_name="hosts")},
        "axis_name='hosts'.* make it with axis_name=None",
    ),
    "lookahead": ({"optimizer": optax.lookahead(optax.sgd(1.0), 2, 0.5)}, "give every=k and"),
}


def test_second_copies_of_parameters_are_told():
    params = {"w": jnp.arange(6.0)}
    with pytest.warns(UserWarning, match=r"leaf\[1\]\['w'\] starts as a copy of the parameters"):
        trainer(reference.Memory()).like((params, params))


@pytest.mark.parametrize("what", WRONG)
def test_wrong_settings_are_refused(what):
    given, message = WRONG[what]
    with pytest.raises(ValueError, match=message):
        trainer(reference.Memory(), **given).join((jnp.zeros(8),))


@pytest.mark.parametrize(
    ("store", "message"),
    [
        (None, r"store=None is no store: give jaxsparse\.islands\.Store\(url\)"),
        (jaxsparse.islands.Store, "store=<class .*Store'> is no store"),
        ("s3://bucket/run", r"is a text: give jaxsparse\.islands\.Store\('s3://bucket/run'\)"),
    ],
)
def test_what_is_no_store_is_refused(store, message):
    with pytest.raises(ValueError, match=message):
        trainer(store)


def test_a_state_in_host_memory_is_refused():
    there = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    state = jnp.zeros(8), jax.device_put(jnp.ones(3), there)
    train = trainer(reference.Memory())
    with pytest.raises(ValueError, match=r"leaf\[1\] lies in the memory 'pinned_host'"):
        train.join(state)
    train.join(jax.device_put(state, jax.memory.Space.Device))


@pytest.mark.slow
def test_the_example_survives_a_kill(tmp_path):
    flags = [*("--islands", 2, "--rounds", 6, "--kill", 2, "--away", 0, "--quorum", 1)]
    small = ["--width", 16, "--batch", 2, "--grace", 1]
    script = "islands/run.py"
    printed = running.run(script, *flags, *small, cwd=tmp_path)
    assert "bergen is killed" in printed
    assert printed.count("bergen joins in round") == 2
    assert "parameters equal bit for bit on all islands: True" in printed


@pytest.mark.slow
def test_losses_of_steps_are_averaged_over_a_round():
    store = jaxsparse.islands.Store("memory://")
    train = trainer(store, "adam", grace=0.0, loss=lambda out: out["loss"])
    train._step = lambda state, batch: (state, {"loss": jnp.float32(batch)})
    state = train.join((jnp.zeros(3),))
    for batch in (1.0, 2.0, 5.0, float("nan")):
        state, _ = train(state, batch)
    first, second, _ = watch.read_history(store)[0]
    assert (first.losses, second.losses) == ({"adam": 1.5}, {})
    # Each is too little for a sum of so few bits.
    assert training._mean([jnp.bfloat16(256.0)] + [jnp.bfloat16(1.0)] * 256) == 512 / 257
    for picked, match in ((jnp.zeros(2), r"loss picks \(2,\) values"), (None, "loss picks None")):
        train._loss_of = lambda out, picked=picked: picked
        with pytest.raises(ValueError, match=match):
            train(state, 1.0)


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (lambda state, batch: state, "must return .state, out.*but returns tuple"),
        (lambda state, batch: ((state[0], state[0]), None), r"leaf\[1\] was nothing"),
    ],
)
def test_a_step_that_returns_something_else_is_named(step, text):
    train = trainer(jaxsparse.islands.Store("memory://"), "adam")
    train._step = step
    state = train.join((jnp.zeros(3),))
    with pytest.raises(ValueError, match=text):
        train(state, jnp.zeros(3))


def shown(capsys, *arguments):
    status = main(["islands", *map(str, arguments)])
    return status, capsys.readouterr()


def test_a_run_is_shown_from_its_store(tmp_path, capsys, clock):
    store = jaxsparse.islands.Store(tmp_path)
    members, states = joined(store, NAMES[:2], clock)
    states = ran(members, states, 2, np.ones((2, 2, 6)), clock)
    _, exchange = members[0].begin(reference.moved(states[0], [1] * 6))
    exchange.advance()
    store.create("decisions/00000001x", b"")
    before = sorted(path for path in tmp_path.rglob("*"))
    found, snapshots = watch.read_history(store)
    assert snapshots == [0]
    open_round = watch.Seen(2, None, NAMES[:1], "")
    assert found[-1] == open_round
    assert [seen.members for seen in found[:-1]] == [NAMES[:2]] * 2
    assert watch.read_history(store, 1)[0] == found[-2:]
    status, printed = shown(capsys, tmp_path)
    assert status == 0
    assert all(name in printed.out for name in NAMES[:2])
    assert sorted(path for path in tmp_path.rglob("*")) == before


def test_losses_and_broken_decisions_are_shown(tmp_path, capsys, clock):
    store = jaxsparse.islands.Store(tmp_path)
    (one, two), states = joined(store, NAMES[:2], clock)
    for loss in (4.5, 2.25):
        states[0], mine = one.begin(reference.moved(states[0], [1] * 6), loss)
        states[1], other = two.begin(reference.moved(states[1], [2] * 6))
        mine.advance()
        other.advance()
        clock.now += 10
        assert mine.advance()
        assert other.advance()
        states = [one.finish(states[0], mine), two.finish(states[1], other)]
    first, *_, last = watch.read_history(store)[0]
    assert first.decision.waited == 10
    assert first.received == 2 * 4 * one.rounds.words[0]
    assert (first.losses, last.losses) == ({NAMES[0]: 4.5}, {})
    store.create("decisions/00000002", b"[red]")
    status, printed = shown(capsys, tmp_path)
    assert (status, printed.err) == (0, "")
    assert "2.25" in printed.out
    assert "can't be read" in printed.out


def test_a_store_without_a_run_is_named(tmp_path, capsys):
    assert shown(capsys, tmp_path / "none")[0] == 2
    assert not (tmp_path / "none").exists()
    status, printed = shown(capsys, tmp_path)
    assert status == 2
    assert "holds no run" in printed.err


def test_it_looks_again_until_interrupted(clock):
    store = reference.Memory()
    joined(store, NAMES[:1], clock)
    looks = []

    def sleep(seconds):
        looks.append(seconds)
        if len(looks) == 3:
            raise KeyboardInterrupt

    watch.show(store, 5, 2.0, sleep)
    assert looks == [2.0] * 3


def simulated(events=(), seconds=200.0, names=NAMES[:3], **settings):
    """Each island's steps lead towards a target of its own."""
    targets = {name: jnp.full(8, float(i)) for i, name in enumerate(names)}
    batches = {name: lambda t, x=x: x for name, x in targets.items()}
    usual = {"step_seconds": 1.0, "every": 5, "grace": 4.0, "poll": 0.5}
    given = {"seconds": seconds, "events": events, **usual, **settings}
    return simulate(STEP, programs_of_half(False), (jnp.zeros(8),), batches, **given)


def test_in_a_simulation_all_steps_count_without_failures():
    told = simulated()
    assert len({one.state.round for one in told.values()}) == 1
    for one in told.values():
        assert one.steps - one.counted <= 10  # of the round that is open
        # The first round waits for the grace time, because nobody knows who will come.
        assert one.waited <= 4 + 0.5 * len(one.rounds)
        assert all(report.members == NAMES[:3] for report in one.rounds)


@pytest.mark.parametrize("latency", some([0.4, 1.5], [1.5]))
def test_an_island_that_was_held_up_gets_into_step_again(latency):
    """It was late in each second round for ever: who decides was always a little ahead."""
    events = [
        Event(at + since, "bergen", what)
        for at in (52.0, 252.0)  # and a second time, as if it were the first
        for since, what in ((0.0, "stop"), (18.3, "go"))
    ]
    told = simulated(events, 600.0, latency=latency)
    assert told["bergen"].steps > 0.92 * told["cork"].steps  # it was away for 37 s of 600
    missed = [i for i, each in enumerate(told["cork"].rounds) if "bergen" not in each.members]
    assert len(missed) == 6  # three each time: it was away for these


def test_a_simulation_tells_what_went_to_and_from_the_store():
    told = simulated()
    rounds = len(told["cork"].rounds)
    for one in told.values():
        assert 0 <= one.requests["create", "messages"] - rounds <= 1  # of the round that is open
        assert one.requests["get", "messages"] == 2 * rounds  # it has its own
        (size,) = {report.sent for report in one.rounds}
        assert 150 < one.bytes["get", "messages"] / (2 * rounds) - size < 350  # header, checksum
        # Each decision is read once, also by who made it. Who makes one reads the one before, too,
        # before it and after. Most looks find none.
        assert one.bytes["get", "decisions"] / rounds < 3 * (200 + 3 * 175)
        assert one.requests["get", "decisions"] > 2 * rounds
        assert one.bytes["names", "messages"] == 0 < one.requests["names", "messages"]
    snapshots = sum(one.requests["create", "snapshots"] for one in told.values())
    assert rounds // 10 <= snapshots <= rounds // 10 + 3


@pytest.mark.parametrize(
    "what", some([("kill", "start"), ("cut", "mend"), ("stop", "go")], [("kill", "start")])
)
def test_in_a_simulation_others_wait_once_for_one_that_is_gone(what):
    gone, back = what
    usual = simulated()
    told = simulated([Event(52.0, "bergen", gone), Event(113.0, "bergen", back)])
    for name in ("amsterdam", "cork"):
        assert told[name].waited <= usual[name].waited + 4.5 + 2  # grace, a poll, and joining
        assert told[name].steps >= usual[name].steps - 8
    rounds = told["amsterdam"].rounds
    without = [report.round for report in rounds if "bergen" not in report.members]
    assert 8 <= len(without) <= 14  # of five steps each, in 61 seconds
    assert "bergen" in rounds[-1].members
    assert agree(told)
    # What it did in its last round before it died is lost; a cut or a pause loses nothing.
    lost = told["bergen"].steps - told["bergen"].counted
    assert lost <= (20 if gone == "kill" else 15)
    assert told["bergen"].counted % 5 == 0  # whole messages, and nothing of a former life


def agree(told):
    """Whether all had the same after each round that they know of."""
    digests = collections.defaultdict(set)
    for one in told.values():
        for report in one.rounds:
            digests[report.round].add(report.digest)
    return all(len(each) == 1 for each in digests.values())


def test_a_slow_island_that_is_late_makes_nobody_slow_however_long_the_grace_is():
    """A chance lasts as long as a round's steps. In 12 s it would come, and make all slow."""
    times = {"amsterdam": 1.0, "bergen": 1.0, "cork": 3.0}
    stop = [Event(40.0, "cork", "stop"), Event(70.0, "cork", "go")]
    told = simulated(stop, step_seconds=times, seconds=400.0, grace=12.0)
    fast, slow = told["amsterdam"], told["cork"]
    assert fast.steps >= 70 / 3 + 330 - 0.5 * len(fast.rounds) - 4 * 5  # four chances
    assert slow.counted >= slow.steps - 15


@pytest.mark.slow
def test_an_overlap_hides_a_slow_link():
    link = {"latency": 1.0, "poll": 0.1}
    waits = [simulated(overlap=overlap, **link)["cork"].waited for overlap in (0, 4)]
    assert waits[1] < 6 < 20 < waits[0]


@functools.cache
def in_fragments(count):
    """Programs, and the first state, of parameters that are a stack of layers."""
    programs = Arithmetic(half(), optax.sgd(1.0), lambda state: state[0], fragments=count)
    return programs, ({"layers": jnp.zeros((4, 2, 2))},)


@pytest.mark.slow
@pytest.mark.parametrize("slow", some([1.0, 2.0, 3.0], [2.0]))
def test_a_slow_island_sends_all_fragments(slow):
    """In time in each second round, it would send each second fragment alone."""
    programs, state = in_fragments(2)
    move = jax.jit(lambda x, batch: x + 0.1 * (batch - x))
    step = lambda state, batch: (jax.tree.map(lambda x: move(x, batch), state), None)
    times = {"amsterdam": 1.0, "bergen": 1.0, "cork": slow}
    batches = {name: lambda t, x=x: x for name, x in zip(times, (0.0, 0.0, 3.0))}
    settings = {"every": 5, "grace": 1.0, "overlap": 2, "poll": 0.5}
    told = simulate(step, programs, state, batches, seconds=300.0, step_seconds=times, **settings)
    assert agree(told)
    rounds = [one.round for one in told["amsterdam"].rounds if "cork" in one.members]
    part = functools.partial(protocol.Rounds.part, types.SimpleNamespace(words=(0, 0)))
    counted = collections.Counter(map(part, rounds))
    assert len(rounds) >= 300 / 5 / slow - 5
    assert min(counted[0], counted[1]) > 0.4 * len(rounds)


def joined_to(store, names, clock, programs, first):
    members = [reference.member(store, name, clock, programs=programs) for name in names]
    return members, [one.join(first) for one in members]


def test_rules_of_an_exchange_are_for_the_whole_and_not_for_each_fragment(clock):
    """Fragment 0 has no compressed leaf, and fragment 1 comes late all the same."""
    rules = {"w1": jaxsparse.reducers.TopK(1.0)}
    make = lambda rules: Arithmetic(
        jaxsparse.partition(rules, axis_name=None), optax.sgd(1.0), lambda state: state[0], False, 2
    )
    with pytest.raises(ValueError, match=r"no leaf is left for \['w2'\]"):
        make(rules | {"w2": None}).start(reference.start(2))
    store, settings = reference.Memory(), {"programs": make(rules), "grace": 0.0}
    members = [reference.member(store, name, clock, **settings) for name in NAMES[:2]]
    states = [one.join(reference.start(2)) for one in members]
    state, exchange = members[0].begin(reference.moved(states[0], [8] * 6))
    ran(members[1:], states[1:], 1, np.zeros((1, 1, 6)), clock)
    assert exchange.advance()
    assert exchange.counted
    np.testing.assert_array_equal(members[0].finish(state, exchange).params["w1"], [8, 8, 8])


def test_a_fragment_leaves_the_others_where_they_are(clock):
    """Bit for bit: an island's own moves of them, and the global parameters."""
    (one,), (state,) = joined_to(reference.Memory(), ["one"], clock, *in_fragments(2))
    by = np.random.default_rng(0).normal(size=(4, 2, 2)).astype(np.float32)
    state, exchange = one.begin(state._replace(worker=({"layers": jnp.asarray(by)},), steps=1))
    exchange.advance()
    clock.now += 10
    assert exchange.advance()
    state = one.finish(state, exchange)
    own, whole = (np.asarray(x["layers"]) for x in (state.worker[0], state.params))
    np.testing.assert_array_equal(own[1::2], by[1::2])
    np.testing.assert_array_equal(own[0::2], whole[0::2])
    assert np.count_nonzero(whole[0::2]) == 4  # half of 8
    assert not whole[1::2].any()


@pytest.mark.slow
def test_who_joins_within_a_cycle_has_what_all_have(clock):
    programs, first = in_fragments(4)
    store = reference.Memory()
    members, states = joined_to(store, NAMES[:2], clock, programs, first)
    for round in range(5):
        exchanges = []
        for i, one in enumerate(members):
            by = (i + 1) * (round + 1)
            worker = ({"layers": states[i].worker[0]["layers"] + by},)
            states[i], exchange = one.begin(states[i]._replace(worker=worker, steps=1))
            exchange.advance()
            exchanges.append(exchange)
        clock.now += 10
        for i, exchange in enumerate(exchanges):
            assert exchange.advance()
            states[i] = members[i].finish(states[i], exchange)
        _, (late,) = joined_to(store, ["late"], clock, programs, first)
        assert late.round == round + 1
        expected = dict(shared_leaves(Shared(states[0].params, states[0].outer)))
        for path, x in shared_leaves(Shared(late.params, late.outer)):
            np.testing.assert_array_equal(x, expected[path])
    assert np.asarray(late.params["layers"]).any(axis=(1, 2)).all()


def test_leaving_exchanges_all_fragments():
    step = jax.jit(lambda state, batch: (jax.tree.map(lambda x: x + batch, state), None))
    exchange = jaxsparse.dense(axis_name=None)
    settings = {"every": 2, "overlap": 1, "fragments": 4, "grace": 0.0, "poll": 0.01}
    store = reference.Memory()
    train = islands.Islands(step, exchange, optax.sgd(1.0), store, name="one", **settings)
    state = train.join(in_fragments(4)[1])
    for _ in range(5):
        state, _ = train(state, 1.0)
    state = train.leave(state)
    np.testing.assert_array_equal(state.params["layers"], np.full((4, 2, 2), 5.0))
    np.testing.assert_array_equal(state.worker[0]["layers"], state.params["layers"])


@pytest.mark.slow
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize(("fragments", "missed"), rows([(2, 1)], [(1, 1), (4, 3)]))
def test_leaving_late_exchanges_all_fragments(fragments, missed, keeps):
    """Or says that it can't. Others have decided on as many rounds as it has missed."""
    step = jax.jit(lambda state, move: (jax.tree.map(lambda x: x + move, state), None))
    exchange = DENSE if not keeps else jaxsparse.top_k(1.0, axis_name=None, is_dense=lambda *_: 0)
    store, start = reference.Memory(), lambda: in_fragments(4)[1]
    fast, slow = (
        islands.Islands(step, exchange, optax.sgd(1.0), store, name=name, every=every,
                        fragments=fragments, grace=0.0, poll=0.01)
        for name, every in (("fast", 1), ("slow", 9))
    )  # fmt: skip
    at_slow, at_fast = slow.join(start()), fast.join(start())
    at_slow, _ = slow(at_slow, 3.0)
    for _ in range(missed):
        at_fast, _ = fast(at_fast, 0.0)
    told = contextlib.nullcontext() if keeps else pytest.warns(UserWarning, match=r"\[0\] is lost")
    with told:
        at_slow = slow.leave(at_slow)
    expected = np.full((4, 2, 2), 3.0)
    if not keeps:
        expected[::fragments] = 0
    np.testing.assert_array_equal(at_slow.params["layers"], expected)


@pytest.mark.slow
def test_what_is_lost_beside_residuals_is_told_too():
    """Of uncompressed leaves, where others' residuals are sent again."""
    step = jax.jit(lambda state, move: (jax.tree.map(lambda x: x + move, state), None))
    exchange = jaxsparse.top_k(1.0, axis_name=None, is_dense=lambda path, _: path == "['b']")
    start = lambda: ({"w": jnp.zeros((8, 4)), "b": jnp.zeros(4)},)
    store, settings = reference.Memory(), {"every": 2, "grace": 0.0, "poll": 0.01}
    fast, slow = (
        islands.Islands(step, exchange, optax.sgd(1.0), store, name=name, **settings)
        for name in ("fast", "slow")
    )
    at_fast, at_slow = fast.join(start()), slow.join(start())
    for _ in range(2):
        at_fast, _ = fast(at_fast, 0.0)
    at_slow, _ = slow(at_slow, 1.0)
    with pytest.warns(UserWarning, match=r"of \[0\] is lost where exchange keeps no residual"):
        at_slow = slow.leave(at_slow)
    np.testing.assert_array_equal(at_slow.params["w"], np.ones((8, 4)))
    np.testing.assert_array_equal(at_slow.params["b"], np.zeros(4))


def test_leaving_again_sends_what_the_last_try_could_not():
    store, step = reference.Memory(), jax.jit(lambda state, move: ((state[0] + move,), None))
    make = lambda quorum: trainer(
        store, step=step, exchange=DENSE, optimizer=optax.sgd(1.0), every=4, quorum=quorum,
        grace=0.1, poll=0.01,
    )  # fmt: skip
    lonely = make(2)
    state = lonely.join((jnp.zeros(8),))
    for _ in range(3):
        state, _ = lonely(state, 1.0)
    with pytest.warns(UserWarning, match="To go on, give that to join"):
        state = lonely.leave(state, patience=0.1)
    alone = make(1)
    state = alone.leave(alone.join(state))
    np.testing.assert_array_equal(state.params[0], np.full(8, 3.0))


def test_a_step_may_donate_its_state():
    def step(state, batch):
        params, count = state
        return (params - 0.1 * (params - batch), count + 1), None

    settings = {"exchange": DENSE, "optimizer": optax.sgd(0.7, 0.9, nesterov=True)}
    step = jax.jit(step, donate_argnums=0)
    train = trainer(reference.Memory(), step=step, **settings, overlap=1, grace=0.0)
    first = (jnp.zeros(8), jnp.int32(0))
    state = trained(train, train.join(first), 5)
    saved = jax.tree.map(np.asarray, state)
    train.leave(state)
    assert first[1] == 0
    assert not first[0].any()
    with pytest.warns(UserWarning, match="after its state was saved"):  # by leave
        again = train.join(saved)
    assert again.worker[1] == saved.worker[1]


def ahead(state):
    """What an island owes and has moved, with the opposite sign."""
    away = np.asarray(state.params["w"] - state.worker[0]["w"]).reshape(-1)
    return -(reference.residual(state) + away)


def test_a_store_that_fails_after_a_long_sleep_has_nothing_sent_twice(clock):
    """It fails as the island looks for messages of its former life."""
    store = reference.Memory()
    (one, two), states = joined(store, NAMES[:2], clock, snapshots=2)
    saved = reference.moved(states[0], np.arange(1, 7))
    one.begin(saved)[1].advance()  # posts, and is killed
    link = reference.Link(store)
    again = reference.member(link, NAMES[0], clock, snapshots=2)
    state = again.join(saved)
    ran([two], states[1:], 9, np.zeros((9, 1, 6)), clock)
    state, exchange = again.begin(state)

    def get(key):
        if key == "decisions/00000003":
            raise UnreachableError("down")
        return store.get(key)

    link.get = get
    with pytest.raises(UnreachableError, match="down"):
        exchange.advance()
    del link.get
    with pytest.warns(UserWarning, match="amsterdam sent in round 0, after its state was saved"):
        exchange.advance()
    while not exchange.advance():
        clock.now += 10
    np.testing.assert_array_equal(ahead(again.finish(state, exchange)), 0)


def test_a_saved_state_that_drifts_keeps_what_it_owes(clock, monkeypatch):
    """It replays rounds in which a former life counted, before the state was saved."""
    members, states = joined(reference.Memory(), NAMES[:3], clock, snapshots=10)
    states = ran(members, states, 3, np.random.default_rng(0).normal(size=(3, 3, 6)), clock)
    again = reference.member(members[0].rounds.store, NAMES[0], clock, snapshots=10)
    states[0] = again.join(states[0])
    owed = reference.residual(states[0])
    digest = exchange_of.Round._digest_now

    def drifted(self):
        differs = self.member is again and self.round == 3 and self.drifted_in < 3
        return digest(self)[::-1] if differs else digest(self)

    monkeypatch.setattr(exchange_of.Round, "_digest_now", drifted)
    with pytest.warns(UserWarning, match="reloads the snapshot of round 0") as told:
        states = ran([again, *members[1:]], states, 1, [np.zeros((3, 6))], clock)
    assert len(told) == 1
    largest = np.argsort(-np.abs(owed))[:3]  # which its message had
    np.testing.assert_array_equal(
        reference.residual(states[0]), np.where(np.isin(range(6), largest), 0, owed)
    )


def test_digests_are_the_same_with_64_bits(clock):
    (one,), (state,) = joined(reference.Memory(), NAMES[:1], clock)
    shared = Shared(state.params, state.outer)
    usual = one.arithmetic.digest(shared)
    with jax.enable_x64():
        wide = jax.jit(digested)(shared)
    assert wide.dtype == usual.dtype == jnp.uint32
    np.testing.assert_array_equal(usual, wide)


def test_names_that_are_no_snapshots_of_the_run_keep_nothing_from_it(clock):
    store = reference.Memory()
    members, states = joined(store, NAMES[:1], clock, snapshots=2)
    for name in ("00000090", "00000091", "x", "\u00b2" * 8):
        store.objects[f"snapshots/{name}"] = b""
    ran(members, states, 6, np.ones((6, 1, 6)), clock)
    assert members[0].rounds.snapshots() == [4, 6, 90, 91]
    assert len(watch.read_history(store)[0]) == 7


def test_an_island_has_seconds_to_leave():
    """Also where the store is silent, for which it would wait longer, and end with an error."""
    link = reference.Link(reference.Memory())
    train = trainer(link, quorum=2)
    state = train.join((jnp.zeros(8),))
    link.fault = "down"  # before its exchange begins in a thread
    state, _ = train(state, jnp.ones(8))
    with pytest.raises(ValueError, match=r"patience=-1.0 must be a number of seconds"):
        train.leave(state, patience=-1.0)
    with pytest.warns(UserWarning, match=r"in vain for \d+ s: what it has sent counts"):
        state = train.leave(state, patience=0.1)
    assert state.worker[0].any()
    link.mend()
    state, _ = train(train.join(state), jnp.ones(8))
    with pytest.warns(UserWarning, match="one leaves in round 0"):
        train.leave(state, patience=0.1)
    # It counts once there is another island. Its former life may have sent one as the link mended.
    assert f"one.{train.status().life}" in link.names("messages/00000000")


def test_who_joins_again_waits_for_the_thread_that_it_left():
    """Else that would send the message of one life in the name of the next."""
    store, may = reference.Memory(), threading.Event()
    get = store.get

    def get_when_it_may(key):
        if threading.current_thread().name == "islands":
            may.wait(60)
        return get(key)

    store.get = get_when_it_may
    train = trainer(store, overlap=1, grace=0.0)
    state = train.join((jnp.zeros(8),))
    state = trained(train, state, 2)  # the second one begins an exchange in a thread
    former = train.status().life
    with pytest.warns(UserWarning, match="one leaves in round 0"):
        left = train.leave(state, patience=0.1)
    threading.Timer(0.3, may.set).start()
    with warnings.catch_warnings(action="ignore"):  # what is left was sent, if that came in time
        train.join(left)
    may.wait(60)
    (sent,) = store.names("messages/00000000")
    assert sent == f"one.{former}"


@pytest.mark.slow
@pytest.mark.parametrize("is_saved", some([False, True], [True]))
def test_joining_may_take_longer_than_the_store_may_be_silent(is_saved):
    """And an error on the way does not have read again what is there."""
    store, read = reference.Memory(), []
    first = trainer(store, every=1, grace=0.0, snapshots=100)
    saved = trainer(store, "two").join((jnp.zeros(8),))
    trained(first, first.join((jnp.zeros(8),)), 6)
    get = store.get

    def fails_once_a_round(key):
        if key.startswith("messages/"):
            time.sleep(0.03)
            read.append(key)
            if read.count(key) == 1:
                raise UnreachableError("down")
        return get(key)

    store.get = fails_once_a_round
    again = trainer(store, "two", every=1, patience=0.2)
    with pytest.warns(UserWarning, match="two can't join yet, and tries for 0.2 s: down"):
        state = again.join(saved if is_saved else (jnp.zeros(8),))
    assert state.round == 6
    assert sorted(collections.Counter(read).values()) == [2] * 6


def test_a_wrong_weight_is_refused():
    for weighted, weights in ((False, [3]), (True, [0.0, -1.0, math.nan, math.inf, 1e-60, 1e39])):
        train = trainer(reference.Memory(), weighted=weighted)
        state = train.join((jnp.zeros(8),))
        for weight in weights:
            complaint = "must lie in" if weighted else "weight=3, but weighted=False"
            with pytest.raises(ValueError, match=complaint):
                train(state, jnp.ones(8), weight=weight)
    with pytest.raises(ValueError, match="weight='3x' must be a number"):
        train(state, jnp.ones(8), weight="3x")
    state, _ = train(state, jnp.ones(8), weight=jnp.float32(3))
    assert state.weight == 3.0


@pytest.mark.slow
def test_a_scalar_is_a_parameter():
    """A temperature, as a number of Python's."""
    step = jax.jit(lambda s, x: ((jax.tree.map(lambda p: p + x, s[0]),), x))
    settings = {"step": step, "exchange": DENSE, "every": 1, "grace": 0.0}
    train = trainer(store := reference.Memory(), **settings)
    state = train.join(({"w": jnp.zeros(3), "t": 0.5},))
    for _ in range(3):
        state, _ = train(state, jnp.float32(1))
    assert (state.round, float(state.params["t"])) == (3, 3.5)
    assert train._step._cache_size() == 1
    saved = jax.tree.map(np.asarray, state)
    again = trainer(store, **settings)  # in another process it is an array from the beginning
    assert float(again.join(saved).worker[0]["t"]) == 3.5


def test_an_interrupt_in_an_exchange_leaves_it_on_its_way(request):
    """Python takes a thread for ended if it is joined as an interrupt comes."""
    # Where tests run in the background, interrupts may be ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    store = reference.Memory()
    one, two = (trainer(store, name, every=1, quorum=2, grace=0.0) for name in ("one", "two"))
    state, other = one.join((jnp.zeros(8),)), two.join((jnp.zeros(8),))

    def interrupt():
        while one.status().trouble is None:
            time.sleep(0.01)
        time.sleep(0.1)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        one(state, jnp.ones(8))
    with pytest.raises(RuntimeError, match="the exchange of round 0 is not at its end"):
        one._member.finish(state, one._running.exchange)
    two(other, jnp.ones(8))
    left = one.leave(state)
    assert (left.round, one.status().counted) == (1, 1)
    # The step that it was interrupted in is undone: its own state does not have it.
    (residual,) = jax.tree.leaves(left.outer[0][0].residual)
    np.testing.assert_allclose(left.worker[0], residual[0], atol=1e-7)
    with pytest.raises(ValueError, match="the state is of round 0, and one is in round 1"):
        one(state, jnp.ones(8))


def test_a_state_that_did_not_join_is_refused():
    """One that `join` did not return, unless it is the first one, as a trainer makes it."""
    store = reference.Memory()
    train = trainer(store)
    state = trainer(store).join((jnp.zeros(8),))
    with pytest.raises(ValueError, match="one has not joined"):
        train(state, jnp.ones(8))
    train.join((jnp.zeros(8),))
    with pytest.raises(ValueError, match="state is a tuple, but one has joined: give the one that"):
        train((jnp.zeros(8),), jnp.ones(8))


def test_islands_stand_where_a_jitted_step_stood():
    """They take the first state that a trainer makes."""

    def loop(step, state):
        for i in range(4):
            state, loss = step(state, jnp.full(8, float(i)))
        return state, loss

    step = jax.jit(lambda state, batch: ((state[0] - 0.125 * batch,), jnp.sum(batch)))
    alone, last = loop(step, (jnp.ones(8),))
    train = trainer(reference.Memory(), step=step, exchange=DENSE, grace=0.0)
    state, loss = loop(train, (jnp.ones(8),))
    np.testing.assert_array_equal(state.params[0], alone[0])
    assert (state.round, float(loss)) == (2, float(last))


def test_steps_beside_an_exchange_that_are_not_finite_start_anew():
    """And what they weigh goes with what they moved."""
    train = trainer(reference.Memory(), every=3, overlap=2, grace=0.0, weighted=True)
    state = train.join((jnp.zeros(8),))
    for _ in range(3):
        state, _ = train(state, jnp.ones(8), 5.0)
    state, _ = train(state, jnp.full(8, jnp.nan), 7.0)
    with pytest.warns(UserWarning, match="one are not finite in round 1"):
        state, _ = train(state, jnp.ones(8), 7.0)
    assert (state.steps, state.weight) == (0, 0.0)
    np.testing.assert_array_equal(state.worker[0], state.params)


def test_a_saved_state_that_is_not_finite_starts_anew(clock):
    store, programs = reference.Memory(), reference.arithmetic(weighted=True)
    settings = {"programs": programs}
    (state,) = joined(store, NAMES[:1], clock, **settings)[1]
    saved = reference.moved(state, [np.nan] * 6)._replace(weight=7.0)
    again = reference.member(store, NAMES[0], clock, **settings)
    with pytest.warns(UserWarning, match="amsterdam are not finite in round 0"):
        state = again.join(saved)
    assert (state.steps, state.weight) == (0, 0.0)
    np.testing.assert_array_equal(state.worker[0]["w"], state.params["w"])


def test_what_is_owed_keeps_its_weight_when_later_steps_are_not_finite(clock):
    """Amsterdam's message is late twice, because bergen does not see it."""
    store = reference.Memory()
    link = reference.Link(store)
    make = functools.partial(
        reference.member, clock=clock, programs=reference.arithmetic(weighted=True)
    )
    members = make(store, NAMES[0], grace=1e9), make(link, NAMES[1], grace=0.0)
    states = [one.join(reference.start()) for one in members]
    link.show(store.objects, ["messages"])
    begun, exchange = members[0].begin(reference.moved(states[0], [8] * 6)._replace(weight=3.0))
    for _ in range(2):
        assert not exchange.advance()
        state, alone = members[1].begin(reference.moved(states[1], [0] * 6))
        assert alone.advance()
        states[1] = members[1].finish(state, alone)
    assert exchange.advance()
    state = members[0].finish(begun, exchange)
    owed = reference.residual(state)
    assert (exchange.counted, state.weight) == (False, 3.0)
    spoilt = reference.moved(state, [np.nan] * 6)._replace(weight=4.0)
    for end in (lambda: members[0].begin(spoilt)[0], lambda: make(store, NAMES[0]).join(spoilt)):
        with pytest.warns(UserWarning, match="amsterdam are not finite in round 2"):
            after = end()
        assert (after.steps, after.weight) == (0, 3.0)
        np.testing.assert_array_equal(reference.residual(after), owed)


def test_what_is_owed_keeps_its_weight_in_a_round_that_is_not_applied(clock):
    """Amsterdam owes moves of weight 3, and what it moves then is too much for the optimizer."""
    exchange = jaxsparse.top_k(0.4, axis_name=None, is_dense=lambda *_: False)
    programs = Arithmetic(exchange, optax.sgd(2.0), lambda state: state[0], weighted=True)
    store = reference.Memory()
    link = reference.Link(store)
    make = functools.partial(reference.member, clock=clock, programs=programs)
    members = make(store, NAMES[0], grace=1e9), make(link, NAMES[1], grace=0.0)
    states = [one.join(reference.start()) for one in members]
    link.show(store.objects, ["messages"])
    state, exchange = members[0].begin(reference.moved(states[0], [8] * 6)._replace(weight=3.0))
    for _ in range(2):
        assert not exchange.advance()
        own, alone = members[1].begin(reference.moved(states[1], [0] * 6)._replace(weight=1.0))
        assert alone.advance()
        states[1] = members[1].finish(own, alone)
    assert exchange.advance()
    state = members[0].finish(state, exchange)
    owed, member = reference.residual(state), make(store, NAMES[0], grace=0.0)
    state = member.join(state)
    for round, (by, weight, left) in enumerate([(3e38, 7.0, 3.0), (1, 5.0, 0.0)], start=2):
        begun, exchange = member.begin(reference.moved(state, [by] * 6)._replace(weight=weight))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert exchange.advance()
        assert [each.weight for each in member.rounds.decided(round).members] == [weight]
        state = member.finish(begun, exchange)
        assert (exchange.counted, state.weight, state.owed) == (True, left, left)
        assert bool(told) == (round == 2)
        if told:
            np.testing.assert_array_equal(reference.residual(state), owed)


def test_a_step_that_leaves_parameters_as_they_are_keeps_its_weight():
    """As one does that leaves out a gradient that is not finite. It is the same in LocalSteps."""

    def step(state, batch):
        return state, jnp.nan * batch.sum()

    train = trainer(reference.Memory(), step=step, exchange=DENSE, every=3, weighted=True)
    state, _ = train(train.join((jnp.zeros(3),)), jnp.ones(7), 7.0)
    assert state.weight == 7
    local = jaxsparse.LocalSteps(
        step, jaxsparse.dense(), optax.sgd(1.0), 1, every=3, weight=jnp.sum
    )
    state, _ = local(local.init((jnp.zeros(3),)), jnp.ones(7))
    assert jax.tree.leaves(state.weight)[0].tolist() == [[7.0]]


def test_a_url_in_the_place_of_a_store_is_refused():
    with pytest.raises(ValueError, match=r"give jaxsparse.islands.Store\('s3://x'\)"):
        trainer("s3://x", "one")


def test_a_round_that_is_over_is_not_decided_again():
    """Although the store shows that there is no decision any more."""
    store = reference.Memory()
    one = rounds(store)
    for round in range(3):
        one.post(round, np.uint32([0, 5, 6]), weight=1.0, digest="d")
        assert one.decide(round, 5.0)
    shown = store.objects.copy()
    for round in range(3):
        del store.objects[f"decisions/0000000{round}"]
    with pytest.raises(UnreachableError, match="does not show the decision of round 0, although"):
        one.decided(0)
    store.objects = shown
    assert one.decided(0).lives == {"adam": "0"}


@pytest.mark.parametrize(("fault", "what"), rows([("loses", "message")], [("stale", "decision")]))
def test_a_store_that_never_shows_what_it_is_given_ends_training(fault, what):
    link, asked = reference.Link(reference.Memory()), collections.Counter()
    train = trainer(link, every=1, grace=0.0, patience=0.3)
    state = train.join((jnp.zeros(8),))
    create = link.create

    def counted(key, data):
        asked[key.split("/")[0]] += 1
        if fault == "stale" and key.startswith("decisions/"):
            return link.store.create(key, data)  # and its view stays as it is
        return create(key, data)

    link.create = counted
    if fault == "stale":
        link.show(link.store.objects, ["decisions"])
    else:
        link.fault = fault
    with pytest.raises(UnreachableError, match=f"does not show the {what} of round 0 that it was"):
        train(state, jnp.ones(8))
    assert what in train.status().trouble
    assert asked["messages"] <= 3  # messages are large


def test_whoever_joins_waits_for_a_late_list(clock):
    store = reference.Memory()
    link = reference.Link(store)
    link.fault = "late"
    new = reference.member(link, "new", clock)
    for _ in range(2):
        with pytest.raises(UnreachableError, match="does not show the snapshot of round 0"):
            new.join(reference.start())
    link.mend()
    (saved,) = [new.join(reference.start())]
    link.fault, link.listed = "late", {}
    with pytest.raises(UnreachableError, match=r"does not show the object lives/new\.0{8}"):
        new.join(saved)
    link.listed = {key for key in store.objects if key.startswith("lives")}
    assert new.join(saved).round == 0  # there is a run, whatever the list of snapshots shows


@pytest.mark.parametrize("late_by", [0, 3])
def test_whoever_joins_takes_one_life_though_the_store_shows_it_late(late_by, clock):
    """As many reads and lists later. A former life is behind, and its number is taken."""
    store = reference.Memory()
    joined(store, ["new"], clock)
    member, born, asked = reference.member(store, "new", clock), {}, itertools.count()
    create, get, names = store.create, store.get, store.names

    def created(key, data):
        born.setdefault(key, next(asked))
        return create(key, data)

    is_shown = lambda key: key not in born or next(asked) > born[key] + late_by
    store.create = created
    store.get = lambda key: get(key) if is_shown(key) else None
    store.names = lambda folder: [name for name in names(folder) if is_shown(f"{folder}/{name}")]
    born["lives/new.00000000"] = 0
    for _ in range(5):
        with contextlib.suppress(UnreachableError):
            member.join(reference.start())
            break
    assert member.rounds.life.startswith("00000001-")
    assert [key for key in store.objects if key.startswith("lives")] == [
        "lives/new.00000000",
        "lives/new.00000001",
    ]


def test_a_run_that_has_begun_is_not_begun_again(clock):
    """Because a list comes late, or is a proxy's page."""
    store = reference.Memory()
    members, states = joined(store, NAMES[:1], clock)
    ran(members, states, 7, np.ones((7, 1, 6)), clock)
    there = store.names("snapshots")
    assert there == ["00000003", "00000006"]
    link = reference.Link(store)
    link.fault, link.listed = "late", {}
    with pytest.raises(UnreachableError, match="does not show any snapshot of its run"):
        reference.member(link, "new", clock).join(reference.start())
    assert store.names("snapshots") == there


def test_a_snapshot_that_came_back_has_nobody_list_all_rounds(clock):
    """Those of rounds that were deleted are looked for once, and what was left is deleted."""
    store, listed = reference.Memory(), []
    members, states = joined(store, NAMES[:1], clock)
    states = ran(members, states, 30, np.ones((30, 1, 6)), clock)
    store.objects["snapshots/00000000"] = b""  # as of a request that was long on its way
    lives = store.names("messages/00000028")
    store.objects["snapshots/00000024"] = b""  # and as an interruption left them
    for round in (25, 26):
        store.objects[f"messages/000000{round}/{lives[0]}"] = b""
    names = store.names
    store.names = lambda folder: listed.append(folder) or names(folder)
    ran(members, states, 3, np.ones((3, 1, 6)), clock)
    assert store.names("snapshots") == ["00000030", "00000033"]
    asked = [folder for folder in listed if folder in [f"messages/{r:08d}" for r in range(30)]]
    assert asked == [f"messages/{r:08d}" for r in range(29, 23, -1)]
    assert not any(store.names(f"messages/{r:08d}") for r in range(30))


def test_whoever_joins_asks_a_store_that_shows_nothing_less_and_less_often():
    """Each time it sends a snapshot, and snapshots are large."""
    link, sent = reference.Link(reference.Memory()), []
    create, link.fault = link.create, "loses"
    link.create = lambda key, data: sent.append(key) or create(key, data)
    with (
        pytest.warns(UserWarning, match="one can't join yet"),
        pytest.raises(UnreachableError, match="does not show the snapshot of round 0"),
    ):
        trainer(link, patience=0.5, poll=0.001).join((jnp.zeros(8),))
    assert 2 <= len(sent) <= 8


def test_a_snapshot_that_is_listed_and_not_shown_is_asked_for_again(clock):
    store = reference.Memory()
    joined(store, NAMES[:1], clock)
    link = reference.Link(store)
    link.get = lambda key: None if key.startswith("snapshots/") else store.get(key)
    new = reference.member(link, "new", clock)
    with pytest.raises(UnreachableError, match="the snapshot of round 0 that it lists"):
        new.join(reference.start())
    del link.get
    assert new.join(reference.start()).round == 0


def test_a_saved_state_waits_for_a_store_that_shows_an_old_state(clock):
    store = reference.Memory()
    (one,), states = joined(store, NAMES[:1], clock)
    (saved,) = ran([one], states, 1, [[np.arange(6)]], clock)
    link = reference.Link(store)
    back = reference.member(link, NAMES[0], clock)
    link.show({}, ["snapshots"])
    with pytest.raises(UnreachableError, match="does not show any snapshot of its run"):
        back.join(saved)
    link.show({}, ["snapshots", "decisions"])
    with pytest.raises(ValueError, match="holds no run, but the state is of its round 1"):
        back.join(saved)
    link.mend()
    assert back.join(saved).round == 1


def test_a_saved_state_does_not_go_on_in_another_run(clock):
    """It would decide a round of its own there, and others would begin from its snapshot."""
    (one,), states = joined(reference.Memory(), NAMES[:1], clock)
    (saved,) = ran([one], states, 5, np.ones((5, 1, 6)), clock)
    store = reference.Memory()
    joined(store, ["other"], clock)
    with pytest.raises(UnreachableError, match=r"decision of round 4, .* or holds another run"):
        reference.member(store, NAMES[0], clock).join(saved)
    assert list(store.objects) == ["snapshots/00000000", "lives/other.00000000"]


@pytest.mark.slow
@pytest.mark.parametrize("devices", some([(), (0, 1, 2)], [(0, 1, 2)]))
def test_parameters_stay_on_their_devices_and_programs_are_kept(devices):
    w = jnp.arange(24.0).reshape(6, 4)
    batch = jnp.full((6, 4), 100.0)
    if devices:
        mesh = jax.sharding.Mesh(np.array(jax.devices())[list(devices)], "x")
        w, batch = jax.device_put((w, batch), jax.sharding.NamedSharding(mesh, jax.P("x")))
    train = trainer(reference.Memory(), exchange=half(), every=1, grace=0.0)
    state = train.join((w,))
    like = train.like((w,))
    for x, found in zip(jax.tree.leaves(like), jax.tree.leaves(state), strict=True):
        if isinstance(found, jax.Array):
            assert (x.shape, x.dtype) == (found.shape, found.dtype)
            # What is bound to no device must be named with those of the mesh, to be read there.
            assert x.sharding == (found.sharding if found.committed else x.sharding)
            assert x.sharding.device_set == w.sharding.device_set
    residual = jax.tree.leaves(state.outer[0][0].residual)[0]
    assert residual.sharding.shard_shape(residual.shape) == (1, 6 // max(1, len(devices)), 4)
    for _ in range(4):
        state, _ = train(state, batch)
    assert state.round == 4
    assert state.params.sharding == w.sharding
    assert np.all(np.asarray(state.params) > np.asarray(w))
    arithmetic = train._member.arithmetic
    assert arithmetic.begin._cache_size() == arithmetic.outer_step._cache_size() == 1


@pytest.mark.slow
def test_a_member_fewer_takes_no_compilation(caplog):
    store = reference.Memory()
    other = trainer(store, "two", exchange=half(), quorum=2)
    _, exchange = other._member.begin(other.join((jnp.zeros(8),)))
    assert not exchange.advance()  # two has sent its message, and dies
    one = trainer(store, exchange=half(), every=1, grace=0.0)
    state, _ = one(one.join((jnp.zeros(8),)), jnp.ones(8))
    for thread in threading.enumerate():
        if thread.name == "islands-compile":
            thread.join()
    jax.config.update("jax_log_compiles", True)  # in all threads
    try:
        state, _ = one(state, jnp.ones(8))
    finally:
        jax.config.update("jax_log_compiles", False)
    assert [report.members for report in one.status().rounds] == [("one", "two"), ("one",)]
    assert not [text for text in caplog.messages if "Compiling jit(_outer_step)" in text]
