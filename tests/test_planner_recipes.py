"""Recipes: names say all, hours add up, losses are those measured, and code is what was meant."""

import dataclasses
import functools
import importlib
import itertools
import json
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from planned import profile
from workers import some

import jaxsparse
import jaxsparse.__main__ as shell
from jaxsparse.planner import Link, Recipe, SystemProfile, plan_recipes
from jaxsparse.planner.losses import End, Law, Losses
from jaxsparse.planner.recipes import EXCHANGES
from jaxsparse.traffic import traced_bytes

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))
NAMES = ("frontier", "frontier_map", "decisions")
frontier, frontier_map, decisions = map(importlib.import_module, NAMES)
sys.path.remove(str(BENCHMARKS))

LINK = Link(1e-3, 1.25e6)
LAW = Law(0.05, 1.0, 2.0, 1.0, 0.03, {"int4": 0.01, "sign": 0.5}, (20.0, 100.0), (5, 40))
ENDS = {
    "adamw, gradients, dense": (0.01, {0: 1.5}),
    "adamw, local 10, dense": (0.01, {0: 1.75}),
    "adamw, local 10, int4": (0.01, {0: 1.76}),
    "adamw, local 40, int4": (0.02, {0: 2.16}),
    "adamw, local 10, int4, warm 10 %": (0.01, {0: 1.7}),
    "muon, gradients, dense": (0.04, {0: 1.4, 1: 1.6}),
    "muon, gradients, int4": (0.04, {0: 1.41}),
    "muon, local 10, int4": (0.08, {0: 1.48, 1: 1.7, 2: 9.0}),
    "muon, local 10, dense": (0.08, {0: 1.5}),
    "muon, local 40, dense": (0.08, {0: 1.66, 1: 1.9}),
}
SHORTER = {"adamw, gradients, dense": (0.01, {0: 2.0}), "adamw, local 10, int4": (0.01, {0: 2.3})}
LOSSES, SHORTER_LOSSES = (
    Losses("on paper.", steps, {name: End(*end) for name, end in ends.items()}, LAW)
    for steps, ends in ((1000, ENDS), (300, SHORTER))
)
LOSSES = dataclasses.replace(LOSSES, shorter=SHORTER_LOSSES)


@pytest.fixture(autouse=True)
def on_paper(monkeypatch, request):
    if "shipped" not in request.fixturenames:
        monkeypatch.setattr(Losses, "shipped", lambda: LOSSES)


@pytest.fixture
def shipped():
    """The losses that come with the library."""
    return Losses.shipped()


def planned(**settings):
    given = {"network": LINK, "step_seconds": 0.5, "steps": 1005, "profile": profile()}
    return plan_recipes(settings.pop("params", 10**6), 3, **{**given, **settings})


def test_names_are_read_as_they_are_written(shipped):
    for name in shipped.ends:
        assert str(Recipe.parsed(name)) == name
    recipe = Recipe.parsed("muon, local 10, top 1/8, warm 10 %")
    assert recipe == Recipe("muon", "local", 10, "top 1/8", warm=10)
    assert Recipe.parsed("muon, diloco 30, int2") == Recipe("muon", "diloco", 30, "int2")


OTHERS = ["", "adamw", "sgd, gradients, int4", "adamw, local, int4", "adamw, local 10, int3"]
OTHERS += ["adamw, local 0, int4", "adamw, gradients 1, int4", "adamw, local 10, int4, warm ten"]
OTHERS += ["adamw, local 10, int4, warm 100 %", "adamw, gradients, int4, warm 10 %"]
OTHERS += ["adamw, diloco, int4", "muon, updates, int4", "adamw, local 10, int4, warm -5 %"]


@pytest.mark.parametrize("name", OTHERS)
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match="no recipe is called"):
        Recipe.parsed(name)


def test_hours_add_up():
    found = planned()
    alone = found["adamw, gradients, dense"]
    assert alone == found.baseline
    assert alone.hours == pytest.approx(1005 * (0.5 + alone.exchange) / 3600)
    # 100 rounds of ten steps, and one of five.
    local = found["adamw, local 10, int4"]
    assert local.hours == pytest.approx((1005 * 0.5 + 101 * local.exchange) / 3600)
    warm = found["adamw, local 10, int4, warm 10 %"]
    assert warm.hours == pytest.approx((1005 * 0.5 + (100 + 91) * local.exchange) / 3600)
    of_int4 = traced_bytes(jaxsparse.quantized("int4"), {"w": jnp.zeros((1, 10**6))}, 3).received
    assert local.received == pytest.approx(101 * of_int4, rel=1e-3)
    assert found.speedup(local) == alone.hours / local.hours
    mean = found["adamw, local 10, dense"]
    assert found.over_mean(local) == mean.hours / local.hours
    assert found.over_mean(alone) is None
    assert (alone.memory, mean.memory, local.memory) == (0, 8e6, 8e6)
    memory = lambda exchange: Recipe("adamw", "gradients", 1, exchange).memory(1000)
    assert (memory("int4"), memory("random 1/8")) == (4000, 0)  # a residual, and none
    assert [f.hours for f in found.forecasts] == sorted(f.hours for f in found.forecasts)


def test_settings_that_no_name_has_are_refused():
    with pytest.raises(ValueError, match="no recipe is called"):
        Recipe("adamw", "gradients", 10, "int4")


def test_the_best_is_the_fastest_within_its_cost():
    best = lambda **given: str(planned(**given).best.recipe)
    assert best() == "adamw, gradients, dense"  # all others cost more than .1
    assert "Nothing that costs 0.1 nats or less saves a tenth of the hours" in str(planned())
    # It cost 0.2 with one seed. Recipes with several seeds spread by 0.022.
    assert best(nats=0.22) == "adamw, gradients, dense"
    assert best(nats=0.23) == "adamw, local 10, int4, warm 10 %"
    assert best(nats=0.3) == "adamw, local 10, int4"
    # That by signs is faster. It was not trained, and by the law it costs 0.3, with its error.
    assert planned()["adamw, local 10, sign"].hours < planned()["adamw, local 10, int4"].hours
    assert best(nats=0.5) == "adamw, local 10, int4"
    assert best(nats=0.7) == "adamw, local 40, int4"
    assert planned()["adamw, local 40, int4"].hours == planned().forecasts[0].hours
    # On a faster link the fastest saves less than 5 % of the hours of the one that ends lowest.
    link = Link(1e-3, 1.25e7)
    assert best(nats=0.7, network=link) == "adamw, local 10, int4, warm 10 %"
    # Here these take more than nine tenths of the baseline's hours, and the fastest does not.
    between = planned(nats=0.7, network=Link(1e-3, 1e8))
    slower = between["adamw, local 10, int4, warm 10 %"]
    assert slower.hours > 0.9 * between.baseline.hours > between.best.hours
    fast = planned(network=Link(1e-6, 1e12))
    assert fast.best == fast.baseline
    assert "leave your trainer as it is. Nothing saves a tenth of the hours" in str(fast)


def test_costs_are_over_dense_training_by_the_same_optimizer():
    muon = planned(optimizer="muon", nats=0.11)  # 0.09 and a spread of 0.014
    assert str(muon.baseline.recipe) == "muon, gradients, dense"
    assert muon["muon, local 10, int4"].loss.excess == pytest.approx(0.09)
    assert str(muon.best.recipe) == "muon, local 10, int4"
    assert "It was measured with lr = 0.08 at its peak, on" in str(muon)
    assert "If yours has another name, give axis_name=" in str(muon)
    assert str(planned(optimizer="muon", nats=0.05).best.recipe) == "muon, gradients, int4"
    assert {f.recipe.optimizer for f in muon.forecasts} == {"muon"}
    assert "Muon ended 0.100 nats below AdamW there" in str(planned())  # on the seed of both


def test_losses_are_measured_or_by_the_law_and_nothing_is_said_of_others():
    of = lambda name: LOSSES.of(Recipe.parsed(name))
    assert of("adamw, local 10, int4") == (pytest.approx(0.26), None, "measured, 1 seed", 0.01)
    # Differences on the two seeds that dense training has, too: 0.08 and 0.1.
    pair = of("muon, local 10, int4")
    assert pair == (pytest.approx(0.09), pytest.approx(0.02 / 2**0.5), "measured, 2 seeds", 0.08)
    assert str(pair) == "+0.090 ± 0.014"
    # Half way from 10 to 40, in logarithms, and the wider spread of the two: 0.26 and 0.3.
    between = of("muon, local 20, dense")
    assert between[:3] == (pytest.approx(0.19), pytest.approx(0.04 / 2**0.5), BETWEEN)
    # 50 exchanges of 20 steps, and one in the residual for each that arrives.
    signs = of("muon, local 20, sign")
    spread = pytest.approx(math.hypot(between.spread, 0.03))
    assert signs[:3] == (pytest.approx(0.19 + 0.05 * 4 / 2), spread, "by the law above the mean")
    assert of("muon, local 20, int2") is None  # of which the law knows nothing
    assert of("muon, local 100, sign") is None  # ten exchanges, and no mean beyond 40
    assert LAW.nats("sign", 20, 5) == pytest.approx(0.05 * 25 * 2)
    for exchanges, every in [(10, 10), (101, 10), (50, 4), (50, 41)]:
        assert LAW.nats("sign", exchanges, every) is None
    # Nor of the exchanges of a warm start, also where its dense mean was measured.
    ends = {**LOSSES.ends, "muon, local 20, dense, warm 10 %": End(0.08, {0: 1.5})}
    warm = dataclasses.replace(LOSSES, ends=ends)
    assert warm.of(Recipe.parsed("muon, local 20, sign, warm 10 %")) is None
    assert of("adamw, local 20, dense") is None
    assert of("adamw, gradients, sign") is None
    asked = planned(local_steps=20)
    assert {f.recipe.every for f in asked.forecasts} == {1, 20}
    # What was asked for and not measured is shown, with its hours.
    (line,) = (line for line in str(asked).splitlines() if "adamw, local 20, dense" in line)
    assert line.endswith("not measured")
    muon = planned(local_steps=20, optimizer="muon")
    assert muon["muon, local 20, dense"].loss.source == BETWEEN
    assert muon["muon, local 20, int4"].loss.excess == pytest.approx(0.19 + 0.1 / 99)
    assert "Local steps were measured with H = 10, 40." in str(asked)


BETWEEN = "between H = 10 and 40"


def test_what_is_small_travels_dense_and_what_is_long_in_buckets():
    small = planned(params=1000, dtype="bfloat16")
    assert {f.recipe.exchange for f in small.forecasts} == {"dense"}
    long = planned(params=3 * 10**9, nats=0.3)
    assert "jaxsparse.quantized('int4', bucket_size=1073741824)" in str(long)


def test_what_dominates_is_shown():
    found = planned()
    shown = [str(f.recipe) for f in found.undominated]
    order = ["local 40, int4", "local 10, sign", "local 10, int4", "local 10, int4, warm 10 %"]
    assert shown == [f"adamw, {name}" for name in (*order, "gradients, dense")]
    text = str(found)
    assert "adamw, local 10, dense" not in text  # as high as four bits, and slower
    assert "(1 others are as slow or slower, and end as high or higher)" in text
    assert "dense gradients by the same optimizer, on paper." in text
    sixteen = planned(dtype="bfloat16")
    assert "a dense exchange of bfloat16 takes" in str(sixteen)
    assert "a dense exchange of float32 takes" in str(found)
    assert sixteen.baseline.recipe == found.baseline.recipe
    half = (sixteen.baseline.exchange - 1e-3) / (found.baseline.exchange - 1e-3)
    assert half == pytest.approx(0.5, abs=0.01)
    assert sixteen.baseline.received == pytest.approx(found.baseline.received / 2, rel=1e-4)


def test_the_plain_mean_stands_beside_local_steps_measured_or_not():
    found = planned()
    mean = found["adamw, local 40, dense"]
    assert mean.loss is None
    assert found.over_mean(found["adamw, local 40, int4"]) > 1
    (line,) = (x for x in str(found).splitlines() if x.startswith("adamw, local 40, dense"))
    assert line.endswith("not measured")


def test_momentum_outside_has_its_own_memory_and_the_same_plain_mean():
    local, diloco = (Recipe.parsed(f"muon, {what} 30, int2") for what in ("local", "diloco"))
    assert diloco.memory(1000) - local.memory(1000) == 4000
    assert str(diloco.plain_mean) == str(local.plain_mean) == "muon, local 30, dense"
    assert diloco.written(100)[-3].startswith("outer = jaxsparse.outer.diloco(0.7, 0.6, exchange=")
    assert Recipe.parsed("muon, gradients, int4").plain_mean is None


def test_what_a_profile_lacks_is_left_out():
    whole = profile()
    points = tuple(p for p in whole.points if p.system != "quantized")
    found = planned(profile=SystemProfile(points, whole.floors))
    assert dict(found.left_out)["adamw, local 10, int4"] == "no measured profile"
    assert "left out: adamw, local 10, int4: no measured profile" in str(found)
    assert found.best == found.baseline


WRITTEN = [
    "adamw, gradients, int4",
    "adamw, updates, top 1/8",
    "adamw, local 10, dense",
    "muon, local 10, sign, warm 10 %",
    "adamw, local 30, top 1/64",
    "muon, diloco 30, int2",
    "adamw, diloco 30, dense",
]


def kernels(params):
    """The matrix alone, of three axes."""
    numbers = optax.contrib.MuonDimensionNumbers((0,), (1, 2))
    return {"attention": numbers, "embedding": None, "bias": None}


TREE = {"attention": (8, 16, 8), "embedding": (16, 8), "bias": (8,)}


@pytest.mark.parametrize("name", some(WRITTEN, WRITTEN[1:4]))
def test_what_is_written_runs_and_is_what_was_measured(name, monkeypatch):
    """Without an exchange and a rate, its updates are those of the benchmark's optimizer."""
    recipe = Recipe.parsed(name)
    scope = {"jaxsparse": jaxsparse, "optax": optax, "lr": 1.0, "mesh": 2, "kernels": kernels}
    scope["step"] = lambda state, batch: (state, None)
    lines = recipe.written(1000)
    with jax.numpy_dtype_promotion("standard"):
        exec("\n".join(lines), scope)
        rng = np.random.default_rng(0)
        params, grads = (
            {n: jnp.asarray(rng.normal(size=s), jnp.float32) for n, s in TREE.items()}
            for _ in range(2)
        )
        if "train" in scope:
            assert scope["train"].init((params,)).params["bias"].shape == (8,)
        if "inner" in scope:
            monkeypatch.setattr(frontier, "kernels", kernels)
            measured = optax.chain(frontier.direction(recipe), optax.add_decayed_weights(0.1))
            of = lambda tx: tx.update(grads, tx.init(params), params)[0]
            close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
            jax.tree.map(lambda x, y: close(-x, y), of(scope["inner"]), of(measured))


@pytest.mark.slow
def test_every_exchange_is_its_system_in_words():
    for name, exchange in EXCHANGES.items():
        tx = eval(exchange.written(), {"jaxsparse": jaxsparse})
        reducer = exchange.choice.reducer(2**14)
        of_text = traced_bytes(tx, {"w": jax.ShapeDtypeStruct((1, 2**14), jnp.float32)}, 2)
        of_row = traced_bytes(reducer, 2**14, 2)
        assert of_text.payload - of_row.payload in (0, 4), name  # the flag of finite gradients


@pytest.mark.parametrize("length", ["long", "short"])
def test_losses_are_those_of_the_results(length, shipped):
    """By seed, at a rate whose half and double are worse, for the recipe or that in four bits."""
    losses = {"long": shipped, "short": shipped.shorter}[length]
    ends: dict[str, dict[float, dict[int, float]]] = {}
    for line in map(json.loads, (BENCHMARKS / "frontier.jsonl").read_text().splitlines()):
        if line["steps"][-1] == losses.steps:
            rates = ends.setdefault(line["recipe"], {})
            rates.setdefault(line["rate"], {})[line["seed"]] = line["held_out"][-1]
    assert losses.ends.keys() <= shipped.ends.keys()
    assert len(losses.ends) >= 5
    for name, end in losses.ends.items():
        assert end.losses == ends[name][end.rate], name
        in_four_bits = str(frontier.family(Recipe.parsed(name)))
        tried = [
            {rate: seeds[0] for rate, seeds in ends.get(one, {}).items() if 0 in seeds}
            for one in (name, in_four_bits)
        ]
        is_best = [
            end.rate in rates
            and all(rates.get(r, 0.0) >= rates[end.rate] for r in (end.rate / 2, end.rate * 2))
            for rates in tried
        ]
        assert any(is_best), name


@pytest.mark.slow
def test_the_law_is_that_of_the_results(shipped):
    fitted, law = frontier_map.fitted(frontier.Results("136k"))._asdict(), shipped.law._asdict()
    assert fitted.pop("errors") == pytest.approx(law.pop("errors"), abs=1e-3)
    for name, value in law.items():
        assert fitted[name] == pytest.approx(value, rel=0.02), name
    halves = frontier_map.costs(frontier.Results("136k"))
    names = [{(str(c.recipe), c.exchanges) for c in half} for half in halves]
    assert min(map(len, names)) >= 5
    assert not names[0] & names[1]  # no recipe is in both


@pytest.mark.slow
def test_the_law_finds_what_runs_were_made_by(tmp_path):
    """Of runs that cost so much, it finds how much, and an error of none on the others."""
    path = tmp_path / "runs.jsonl"
    with path.open("w") as file:
        for every, steps in itertools.product((2, 5, 10, 20), (500, 1000)):
            for exchange in ("dense", "int4", "int2", "ternary", "sign"):
                error = frontier_map.error_of(exchange)
                cost = 0.1 * error / (1 - error) * (100 * every / steps) * (10 / every) ** 0.5
                line = {"recipe": f"adamw, local {every}, {exchange}", "rate": 0.01, "seed": 0}
                file.write(json.dumps({**line, "steps": [steps], "held_out": [2 + cost]}) + "\n")
    law = frontier_map.fitted(frontier.Results("136k", path))
    assert law[:4] == pytest.approx((0.1, 1, 1, 0.5), rel=1e-2)
    assert law.spread < 1e-4
    assert law[-2:] == ((25, 500), (2, 20))
    assert law.nats("sign", 100, 10) == pytest.approx(0.1 * 0.3623 / 0.6377, rel=0.02)


@pytest.mark.slow
def test_the_docs_have_the_planners_answers(shipped):
    text = (BENCHMARKS.parent / "docs" / "which.md").read_text()
    assert "\n".join(decisions.table()) in text


SHELL = ["plan", "--params", "1M", "--workers", "3", "--bandwidth", "10mbit"]
RUN = [*SHELL, "--step", "500ms", "--steps", "1005", "--profile", "cpu"]


def test_the_shell_prints_recipes(capsys):
    assert shell.main([*RUN, "--nats", "0.23", "--optimizer", "adamw"]) == 0
    printed = capsys.readouterr().out
    assert "best within 0.23 nats: adamw, local 10, int4, warm 10 %" in printed
    assert "every=jaxsparse.Stages((1, 10), (100,))" in printed
    assert shell.main([*RUN, "--json", "--local-steps", "40"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["baseline"] == "adamw, gradients, dense"
    assert content["forecasts"][0]["recipe"] == "adamw, local 40, int4"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (RUN[:-2], "exchanges compute, too: give the device's --profile (h100"),
        ([*SHELL, "--steps", "10", "--profile", "cpu"], "--steps needs --step (1.5s)"),
        (SHELL, "exchanges compute, too: give the device's --profile (h100"),
        ([*RUN, "--density", "0.1"], "--density is for plans without --steps"),
        ([*SHELL, "--profile", "cpu", "--nats", "1"], "--nats is for --steps N"),
        ([*RUN, "--nats", "-1"], "nats=-1.0 must be at least 0"),
        ([*RUN, "--optimizer", "sgd"], "optimizer='sgd' is unknown"),
        ([*RUN, "--dtype", "int8"], "dtype='int8' is unknown"),
        ([*RUN, "--local-steps", "1"], "local_steps=1 is no local step"),
    ],
)
def test_the_shell_names_what_does_not_fit(arguments, message, capsys):
    assert shell.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_it_says_what_the_recipe_cost_in_a_shorter_run():
    told = "after 300 steps in place of 1,000, adamw, local 10, int4 was at +0.300."
    assert told in str(planned(nats=0.3, local_steps=10))
    assert "300 steps" not in str(planned(nats=0.0, network=Link(1e-6, 1e12)))  # dense


def test_no_time_of_a_step_is_refused():
    with pytest.raises(ValueError, match="step_seconds=0 must be above 0"):
        planned(step_seconds=0)
    with pytest.raises(ValueError, match="steps=0 must be at least 1"):
        planned(steps=0)
