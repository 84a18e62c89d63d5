"""Rounds of islands as they are planned, against islands that run in virtual time."""

import collections
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import simulation
from simulation import Event, simulate
from workers import some

import jaxsparse
from jaxsparse.__main__ import main
from jaxsparse.planner import Link, Recipe, plan_islands, requests
from jaxsparse.planner.islands import exchange
from jaxsparse.planner.losses import Losses

NAMES = ("amsterdam", "bergen", "cork", "dover")
STEP = jax.jit(lambda state, batch: ((state[0] - 0.1 * (state[0] - batch),), None))
LINK = Link(1e-6, 1e12)


def counted(overlap, period, seconds):
    """The share of live seconds that are steps which count, and failures an hour of life."""
    outer = optax.chain(
        jaxsparse.top_k(0.5, axis_name=None, is_dense=lambda *_: False), optax.sgd(1.0)
    )
    kills = [(i, 37 + period * i) for i in range(int(seconds / period))]
    kills = [(i, at) for i, at in kills if at + 20 < seconds]
    events = [
        event
        for i, at in kills
        for event in (Event(at, NAMES[i % 4], "kill"), Event(at + 20, NAMES[i % 4], "start"))
    ]
    told = simulate(
        STEP,
        outer,
        (jnp.zeros(8),),
        {name: lambda t: jnp.ones(8) for name in NAMES},
        seconds=seconds,
        step_seconds=1.0,
        every=10,
        events=events,
        grace=6.0,
        overlap=overlap,
        poll=0.5,
    )
    # The steps of the last round, half of it on average, have not been sent.
    alive = 4 * (seconds - 5) - 20 * len(kills)
    return sum(one.counted for one in told.values()) / alive, 3600 * len(kills) / alive


CASES = [(5, 61.3, 700.0), (0, 61.3, 2000.0), (5, 1e9, 1000.0), (0, 1e9, 1000.0)]


@pytest.mark.slow
@pytest.mark.parametrize("case", some(CASES, CASES[:2]), ids=str)
def test_steps_that_count_are_those_of_a_simulation(case):
    overlap, period, seconds = case
    share, failures = counted(overlap, period, seconds)
    found = plan_islands(
        8,
        4,
        link=LINK,
        step_seconds=1.0,
        every=10,
        overlap=overlap,
        failures=failures,
        grace=6.0,
        poll=0.5,
    )
    assert found.rounds[0].goodput == pytest.approx(share, abs=0.03)


class CountedLink(simulation._Link):
    """A link that counts requests and bytes by island, operation and folder."""

    counts = None

    def create(self, key, data):
        return self.counted(super().create(key, data), f"create {key.split('/')[0]}", len(data))

    def get(self, key):
        found = super().get(key)
        received = requests.NOT_THERE if found is None else len(found)
        return self.counted(found, f"get {key.split('/')[0]}", 0, received)

    def names(self, folder):
        found = super().names(folder)
        return self.counted(found, f"names {folder.split('/')[0]}", 0, requests.LISTED * len(found))

    def delete(self, keys):
        return self.counted(super().delete(keys), "delete")

    def counted(self, found, kind, sent=0, received=0):
        self.counts[self._name, kind] += 1, sent, received
        return found


@pytest.fixture
def counts(monkeypatch):
    found = collections.defaultdict(lambda: np.zeros(3))
    monkeypatch.setattr(CountedLink, "counts", found)
    monkeypatch.setattr(simulation, "_Link", CountedLink)
    return found


PARAMS, SNAPSHOTS = 4096, 2


def asked_in(seconds, step_seconds, events=()):
    """Islands in virtual time, and their plan: reports by name."""
    vector = jnp.zeros(PARAMS)
    return simulate(
        jax.jit(lambda state, batch: ((state[0] + batch,), None)),
        exchange("top 1/8"),
        (vector,),
        {name: lambda t: vector + 1e-3 for name in NAMES},
        seconds=seconds,
        step_seconds=step_seconds,
        every=4,
        events=events,
        grace=6.0,
        poll=0.5,
        snapshots=SNAPSHOTS,
    )


def planned(decided_after=None):
    found = plan_islands(
        PARAMS,
        4,
        link=LINK,
        step_seconds=1.0,
        every=4,
        overlap=0,
        poll=0.5,
        snapshots=SNAPSHOTS,
        decided_after=decided_after,
    )
    return next(one for one in found.rounds if one.exchange == "top 1/8")


CREATED = ["create messages", "create decisions"]


def sizes_of(counts, sizes):
    """Sizes as planned, but of these headers: in virtual time lives are shorter, without losses."""
    message, decision = (counts[kind][1] / counts[kind][0] for kind in CREATED)
    return sizes._replace(message=message, decision=decision)


@pytest.mark.parametrize("spread", [0.0, 0.4])
def test_requests_and_bytes_are_those_that_a_store_counts(spread, counts):
    """Each item of the plan, of equally fast islands and of others, in a calm run."""
    told = asked_in(160.0, {name: 1 + spread * i for i, name in enumerate(NAMES)})
    rounds = [report for one in told.values() for report in one.rounds]
    assert all(report.counted for report in rounds)
    waited = sum(report.waited for report in rounds) / len(rounds)
    found = collections.defaultdict(lambda: np.zeros(3))
    for (_, kind), count in counts.items():
        found[kind] += count / len(rounds)
    # What belongs to the last two snapshots is not deleted yet.
    share = 1 - 2 * SNAPSHOTS * len(NAMES) / len(rounds)
    one = planned(waited)
    sizes = sizes_of(found, one.sizes)
    assert sizes.message < one.sizes.message < sizes.message + 60
    assert sizes.decision < one.sizes.decision < sizes.decision + 4 * 60
    items = requests.of_a_round(4, sizes, snapshots=SNAPSHOTS, looks=waited / 0.5)
    for item, of_plan in zip(items, one.items):
        assert item.kind == of_plan.kind
        assert item.requests == pytest.approx(of_plan.requests, rel=1e-4)
        start = [x for x in requests.at_start(4, sizes) if x.kind == item.kind]
        of_start = sum((4 * np.array(x[1:]) for x in start), np.zeros(3)) / len(rounds)
        expected = np.array(item[1:]) * (share if item.kind == "delete" else 1) + of_start
        np.testing.assert_allclose(found.pop(item.kind), expected, rtol=0.1, err_msg=item.kind)
    # As the run began.
    assert sorted(found) == ["create lives", "get lives", "get snapshots", "names lives"]


def test_who_joins_asks_for_what_was_planned(counts):
    """A snapshot of round 4, and the messages of a round since."""
    joins = Event(28.0, "dover", "start")
    told = asked_in(joins.seconds, 1.0, [joins])
    assert told["dover"].state.round == 5
    one = planned()
    created = {kind: counts["amsterdam", kind] for kind in CREATED}
    for item in requests.to_join(3, sizes_of(created, one.sizes), 1):
        found = counts.pop(("dover", item.kind))
        np.testing.assert_allclose(found, item[1:], rtol=0.03, err_msg=item.kind)
    assert not [kind for kind in counts if kind[0] == "dover"]
    # On a link like this one others make no round meanwhile.
    assert one.join == pytest.approx(requests.added(requests.to_join(4, one.sizes, 0.5)), rel=1e-4)


def test_seconds_and_bytes_by_hand():
    """Half a million parameters are 2 MB and a flag, a second each at 2 MB/s."""
    found = plan_islands(
        10**6 // 2, 3, link=Link(0.01, 2e6), step_seconds=1.0, every=30, overlap=2, poll=1.0
    )
    first, *_, sparse, _ = found.rounds
    assert first.message == 2 * 10**6 + 4
    assert first.seconds == pytest.approx(3 * (0.01 + 1) + 2 / 3 + 5 * 0.01, abs=1e-4)
    assert first.waited == pytest.approx(first.seconds - 2)
    assert first.goodput == pytest.approx(30 / (30 + first.waited))
    looks = 2 / 3
    asked = 3 + 3 / 3 + looks + (looks + 2 / 3) + 1 + 2 + 1 / 3 + 1 / 30 + 2 / 30 + (1 / 3 + 1 / 30)
    assert first.asked.requests == pytest.approx(asked)
    assert first.asked.sent == pytest.approx(2e6 + 2e6 / 30, rel=0.01)
    assert first.asked.received == pytest.approx(2 * 2e6, rel=0.01)
    # A snapshot, and three messages in each of four rounds and a half, and in those meanwhile.
    replayed = 4.5 + first.join_seconds / (30 + first.waited)
    assert first.join.received == pytest.approx(2e6 + replayed * 3 * 2e6, rel=0.01)
    asked = 6 + replayed * 4
    assert first.join_seconds == pytest.approx(1 + replayed * 3 + 0.01 * asked, rel=0.01)
    assert sparse.message == pytest.approx(10**6 / 2 / 8 * 7.125 / 8, rel=0.01)
    assert sparse.waited == 0  # it takes less than two steps


def test_a_run_by_hand(capsys):
    """1,001 steps in 34 rounds of 30; losses are those of recipes without failures."""
    found = plan_islands(
        10**6,
        3,
        link=Link(0.01, 2e6),
        step_seconds=1.0,
        every=30,
        steps=1001,
        optimizer="muon",
        overlap=0,
    )
    by_name = {one.exchange: one for one in found.rounds}
    signs, eight = by_name["sign"], by_name["int8"]
    assert signs.message == pytest.approx(10**6 * (1 + 16 / 256) / 8, rel=1e-3)  # with scales
    assert found.hours(signs) == pytest.approx(1001 / signs.goodput / 3600)
    recipe = Recipe.parsed("muon, local 30, sign")
    assert signs.loss == Losses.shipped().of(recipe)
    assert signs.loss is not None
    assert eight.loss is None
    *_, line = (x for x in str(found).splitlines() if x.startswith("int8 "))
    run = found.of_the_run(eight)
    assert run == pytest.approx([34 * x + y for x, y in zip(eight.asked, eight.join)])
    sizes = [f"{run.received / 1e9:.1f}", f"{run.sent / 1e9:.1f}", f"{run.requests:.0f}"]
    assert line.split() == ["int8", f"{found.hours(eight):,.2f}", *sizes]
    arguments = ["plan", "--params", "1M", "--bandwidth", "16Mbit", "--latency", "10ms", "--step"]
    arguments += ["1s", "--islands", "3", "--steps", "1001", "--optimizer", "muon", "--json"]
    arguments += ["--every", "30", "--overlap", "0"]
    assert main(arguments) == 0
    printed = json.loads(capsys.readouterr().out)
    (one,) = (one for one in printed["rounds"] if one["exchange"] == "sign")
    assert one["loss"]["excess"] == pytest.approx(signs.loss.excess)
    assert one["hours"] == pytest.approx(found.hours(signs))


def test_settings_that_are_not_given_are_chosen():
    """The overlap covers an exchange, and the grace if islands fail; H wastes the least time."""
    usual = {"link": Link(0.01, 2e6), "step_seconds": 1.0, "optimizer": "muon"}
    found = plan_islands(10**6, 3, **usual, every=30)
    for one in found.rounds:
        assert one.grace == np.ceil(0.01 + one.message / 2e6 + 3 + 1)
        assert one.seconds <= one.overlap < one.seconds + 1 or one.overlap == 29
        assert one.waited == max(0, one.seconds - 29)
    failing = plan_islands(10**6, 3, **usual, every=30, failures=0.1)
    assert all(one.overlap >= one.grace for one in failing.rounds)
    chosen = plan_islands(10**6, 3, **usual)
    assert chosen.every in {r.every for r in Losses.shipped().recipes if r.is_local}
    others = [plan_islands(10**6, 3, **usual, every=every).best for every in (3, 10, 30)]
    most = max(one.goodput for one in others if one is not None)
    assert chosen.best.goodput >= most / 1.05
    assert f"every={chosen.every}," in str(chosen)
    assert "quorum=2, alone=" in str(chosen)
    assert plan_islands(10**6, 3, **usual, nats=0.0).best is None
    # An hour has no room for a round of 100 steps, with which others are not compared.
    assert plan_islands(10**6, 3, **usual, failures=80.0).every < 100
    with pytest.raises(ValueError, match="leave no round of 3 s: take fewer steps a round than"):
        plan_islands(10**6, 3, **usual, failures=5000.0)


def test_the_best_costs_little_and_is_written_as_islands_take_it():
    """Its lines make islands that join, and its message has the size that the plan says."""
    usual = {"link": Link(0.01, 2e6), "step_seconds": 1.0, "every": 10, "overlap": 1}
    found = plan_islands(10**6, 3, **usual, optimizer="muon", nats=0.1)
    excess = {one.exchange: one.loss.excess for one in found.rounds if one.loss is not None}
    good = {one.exchange: one.goodput for one in found.rounds if one.exchange in excess}
    assert found.best.exchange == "int2"
    assert good["int2"] > good["dense"]
    assert 1.05 * good["int2"] >= max(good.values())
    assert "muon, local 10, int2" in str(found)
    none = plan_islands(10**6, 3, **usual, nats=0.0)
    assert none.best is None
    assert "best: none. Nothing with 10 local steps of adamw is known to cost 0 nats" in str(none)
    for name in ("dense", "int4", "int2"):
        lines = Recipe("adamw", "local", 10, name).on_islands({"overlap": 1})
        text = "\n".join(lines).replace("s3://bucket/run-7", "memory://")
        step = lambda state, batch: (state, None)
        names = {"jaxsparse": jaxsparse, "optax": optax, "lr": 0.1, "step": step}
        exec("import jaxsparse.islands\n" + text, names)
        params = {"w": jnp.zeros(10**4)}
        names["train"].join((params, names["inner"].init(params)))
        of_size = plan_islands(10**4, 3, **usual).rounds
        (planned,) = (each.message for each in of_size if each.exchange == name)
        assert names["train"]._member.words * 4 == planned, name
    for recipe in ("adamw, gradients, int4", "adamw, local 10, int4, warm 10 %"):
        with pytest.raises(ValueError, match=f"{recipe} is no recipe for islands"):
            Recipe.parsed(recipe).on_islands({})


def test_wrong_numbers_are_named():
    usual = {"link": LINK, "step_seconds": 1.0}
    for wrong, text in (
        ({"overlap": 30, "every": 30}, "overlap=30 must be at least 0 and less than every=30"),
        ({"step_seconds": 0.0}, "step_seconds=0.0 must be above 0"),
        ({"failures": -1.0}, "failures=-1.0 must be at least 0"),
        ({"failures": 300.0, "every": 30}, "failures=300.0 an hour leave no round of 30 s"),
        ({"optimizer": "sgd"}, "optimizer='sgd' is unknown: use one of adamw, muon"),
        ({"steps": 0}, "steps=0"),
    ):
        with pytest.raises(ValueError, match=text):
            plan_islands(100, 2, **{**usual, **wrong})


def test_the_command_line(capsys):
    arguments = ["plan", "--params", "1M", "--bandwidth", "100Mbit", "--step", "1s"]
    assert main([*arguments, "--islands", "4", "--every", "30", "--failures", "2"]) == 0
    assert "top 1/64" in capsys.readouterr().out
    for more, text in (
        ([], "give either --workers or --islands"),
        (["--islands", "4", "--workers", "4"], "give either --workers or --islands"),
        (["--workers", "4", "--every", "30"], "--every is for --islands"),
        (["--islands", "4", "--density", "0.5"], "--density is for --workers"),
        (["--islands", "4", "--dtype", "bfloat16"], "--dtype is for --workers"),
    ):
        assert main([*arguments, *more]) == 2
        assert text in capsys.readouterr().err
