"""Rounds of islands as they are planned, against islands that run in virtual time."""

import json

import jax
import jax.numpy as jnp
import optax
import pytest
from workers import some

import jaxsparse
from jaxsparse.__main__ import main
from jaxsparse.islands import Event, simulate
from jaxsparse.planner import Link, Recipe, plan_islands
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


def test_seconds_and_bytes_by_hand():
    """A million parameters in bfloat16 are 2 MB and a flag, a second each at 2 MB/s."""
    found = plan_islands(
        10**6, 3, link=Link(0.01, 2e6), step_seconds=1.0, every=30, overlap=2, poll=1.0
    )
    first, *_, sparse, _ = found.rounds
    assert first.message == 2 * 10**6 + 4
    assert first.seconds == pytest.approx(4 * (0.01 + 1) + 1.0 + 5 * 0.01, abs=1e-4)
    assert first.waited == pytest.approx(first.seconds - 2)
    assert first.goodput == pytest.approx(30 / (30 + first.waited))
    assert first.requests == 9
    assert sparse.message == pytest.approx(10**6 / 8 * 7.125 / 8, rel=0.01)
    assert sparse.waited == 0
    assert sparse.goodput == 1


def test_a_run_by_hand(capsys):
    """1,001 steps in 34 rounds of 30; losses are those of recipes without failures."""
    found = plan_islands(
        10**6, 3, link=Link(0.01, 2e6), step_seconds=1.0, every=30, steps=1001, optimizer="muon"
    )
    by_name = {one.exchange: one for one in found.rounds}
    signs, sixteen = by_name['quantized("sign", gather=True)'], found.rounds[0]
    assert signs.message == pytest.approx(10**6 * (1 + 16 / 256) / 8, rel=1e-3)  # with scales
    assert found.hours(signs) == pytest.approx(1001 / signs.goodput / 3600)
    recipe = Recipe.parsed("muon, local 30, sign")
    assert signs.loss == Losses.shipped().of(recipe)
    assert signs.loss is not None
    assert sixteen.loss is None
    (line,) = (x for x in str(found).splitlines()[10:] if x.startswith('quantized("bfloat16"'))
    hours = f"{found.hours(sixteen):,.2f}"
    sent = 34 * sixteen.message / 1e9
    assert line.split()[2:] == [hours, f"{3 * sent:.1f}", f"{sent:.1f}", "306", "not", "measured"]
    arguments = ["plan", "--params", "1M", "--bandwidth", "16Mbit", "--latency", "10ms", "--step"]
    arguments += ["1s", "--islands", "3", "--steps", "1001", "--optimizer", "muon", "--json"]
    assert main(arguments) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["rounds"][2]["loss"]["excess"] == pytest.approx(signs.loss.excess)
    assert printed["rounds"][2]["hours"] == pytest.approx(found.hours(signs))


def test_wrong_numbers_are_named():
    usual = {"link": LINK, "step_seconds": 1.0}
    for wrong, text in (
        ({"overlap": 30}, "overlap=30 must be at least 0 and less than every=30"),
        ({"step_seconds": 0.0}, "step_seconds=0.0 must be above 0"),
        ({"failures": -1.0}, "failures=-1.0 must be at least 0"),
        ({"failures": 300.0}, "failures=300.0 an hour leave no round of 30 s"),
        ({"optimizer": "sgd"}, "optimizer='sgd' is unknown: use one of adamw, muon"),
        ({"steps": 0}, "steps=0"),
    ):
        with pytest.raises(ValueError, match=text):
            plan_islands(100, 2, **{**usual, **wrong})


def test_the_command_line(capsys):
    arguments = ["plan", "--params", "1M", "--bandwidth", "100Mbit", "--step", "1s"]
    assert main([*arguments, "--islands", "4", "--every", "30", "--failures", "2"]) == 0
    assert "sparse_loco(k=64)" in capsys.readouterr().out
    for more, text in (
        ([], "give either --workers or --islands"),
        (["--islands", "4", "--workers", "4"], "give either --workers or --islands"),
        (["--workers", "4", "--every", "30"], "--every is for --islands"),
        (["--islands", "4", "--density", "0.5"], "--density is for --workers"),
        (["--islands", "4", "--nats", "0.5"], "--nats is for --workers"),
        (["--islands", "4", "--optimizer", "muon"], "--optimizer is for --steps N"),
    ):
        assert main([*arguments, *more]) == 2
        assert text in capsys.readouterr().err
