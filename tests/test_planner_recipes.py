"""Recipes: names say all, hours add up, losses are those measured, and code is what was meant."""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from test_planner_plans import profile
from workers import some

import jaxsparse
import jaxsparse.__main__ as shell
from jaxsparse.planner import Link, Recipe, plan_recipes
from jaxsparse.planner.recipes import EXCHANGES, Losses
from jaxsparse.traffic import traced_bytes

LINK = Link(1e-3, 1.25e6)
LOSSES = Losses(
    "on paper.",
    {
        "adamw, gradients, dense": 0.0,
        "adamw, local 10, dense": 0.25,
        "adamw, local 10, int4": 0.26,
        "adamw, local 40, int4": 0.66,
        "adamw, local 10, int4, warm 10 %": 0.2,
        "muon, local 10, int4": -0.01,
    },
)


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
    for name in shipped.excess:
        assert str(Recipe.parsed(name)) == name
    recipe = Recipe.parsed("muon, local 10, top 1/8, warm 10 %")
    assert recipe == Recipe("muon", "local", 10, "top 1/8", warm=10)


OTHERS = ["", "adamw", "sgd, gradients, int4", "adamw, local, int4", "adamw, local 10, int3"]
OTHERS += ["adamw, local 0, int4", "adamw, gradients 1, int4", "adamw, local 10, int4, warm ten"]


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
    assert (alone.memory, mean.memory, local.memory) == (0, 4e6, 8e6)
    assert [f.hours for f in found.forecasts] == sorted(f.hours for f in found.forecasts)


def test_the_best_is_the_fastest_within_its_cost():
    assert str(planned().best.recipe) == "muon, local 10, int4"
    adamw = lambda **given: planned(optimizer="adamw", **given)
    assert adamw().best == adamw().baseline  # all others cost more than .1
    assert str(adamw(nats=0.22).best.recipe) == "adamw, local 10, int4, warm 10 %"
    assert str(adamw(nats=0.5).best.recipe) == "adamw, local 10, int4"
    assert str(adamw(nats=0.7).best.recipe) == "adamw, local 40, int4"
    # On a faster link the fastest saves less than 5 % of the hours of the one that ends lowest.
    link = Link(1e-3, 1.25e7)
    assert str(adamw(nats=0.7, network=link).best.recipe) == "adamw, local 10, int4, warm 10 %"
    fast = planned(network=Link(1e-6, 1e12))
    assert fast.best == fast.baseline
    assert "do not compress, nothing saves a tenth of the hours" in str(fast)


def test_losses_lie_between_measured_ones_and_nowhere_else():
    of = lambda name: LOSSES.of(Recipe.parsed(name))
    assert of("adamw, local 10, int4") == (0.26, "measured")
    excess, source = of("adamw, local 20, int4")
    assert excess == pytest.approx(0.46)  # half way from 10 to 40, in logarithms
    assert source == "between H = 10 and 40"
    assert of("adamw, local 100, int4") is None
    assert of("muon, local 20, int4") is None
    asked = planned(local_steps=20)
    assert {f.recipe.every for f in asked.forecasts} == {1, 20}
    assert asked["adamw, local 20, int4"].loss.source == source
    assert asked["muon, local 20, int4"].loss is None
    assert "muon, local 20" not in str(asked)


def test_what_is_small_travels_dense_and_what_is_long_in_buckets():
    (alone, *_) = planned(params=1000, dtype="bfloat16").forecasts
    assert {f.recipe.exchange for f in planned(params=1000).forecasts} == {"dense"}
    assert alone.recipe.exchange == "dense"
    long = planned(params=3 * 10**9, nats=0.5, optimizer="adamw")
    assert "jaxsparse.quantized('int4', bucket_size=1073741824)" in str(long)


def test_what_dominates_is_shown():
    found = planned()
    shown = [str(f.recipe) for f in found.undominated]
    # As fast as AdamW's, and lower.
    assert shown == ["adamw, local 40, int4", "muon, local 10, int4"]
    text = str(found)
    assert "(3 others are slower and end higher; 0 more were not measured)" in text
    assert "Nats above dense AdamW on paper." in text
    sixteen = planned(dtype="bfloat16")
    assert str(sixteen.baseline.recipe) == "adamw, gradients, bfloat16"
    assert sixteen.baseline.exchange < found.baseline.exchange


WRITTEN = [
    "adamw, gradients, int4",
    "adamw, updates, top 1/8",
    "adamw, local 10, dense",
    "muon, local 10, sign, warm 10 %",
    "adamw, local 30, top 1/64",
]


@pytest.mark.parametrize("name", some(WRITTEN, WRITTEN[1:4]))
def test_what_is_written_runs(name):
    recipe = Recipe.parsed(name)
    scope = {"jaxsparse": jaxsparse, "optax": optax, "lr": 0.01, "mesh": 2}
    scope["step"] = lambda state, batch: (state, None)
    exec("\n".join(recipe.written(1000)), scope)
    params = {"w": jnp.zeros((64, 64))}
    tx = scope.get("tx") or scope["inner"]
    with jax.numpy_dtype_promotion("standard"):
        jax.eval_shape(tx.init, params)
        if "train" in scope:
            assert scope["train"].init((params,)).params["w"].shape == (64, 64)
        else:
            assert EXCHANGES[recipe.exchange].written() in "".join(recipe.written(1000))


@pytest.mark.slow
def test_every_exchange_is_its_system_in_words():
    for name, exchange in EXCHANGES.items():
        tx = eval(exchange.written(), {"jaxsparse": jaxsparse})
        reducer = exchange.choice.reducer(2**14)
        of_text = traced_bytes(tx, {"w": jax.ShapeDtypeStruct((1, 2**14), jnp.float32)}, 2)
        of_row = traced_bytes(reducer, 2**14, 2)
        assert of_text.payload - of_row.payload in (0, 4), name  # the flag of finite gradients


RESULTS = Path(__file__).parents[1] / "benchmarks" / "frontier.jsonl"


def test_losses_are_those_of_the_results(shipped):
    """Each recipe's best rate, its mean over seeds, less dense AdamW's."""
    steps = int(shipped.setup.split(" steps")[0].split()[-1].replace(",", ""))
    ends: dict[str, dict[float, list[float]]] = {}
    for line in map(json.loads, RESULTS.read_text().splitlines()):
        if line.get("steps", [0])[-1] == steps:
            ends.setdefault(line["recipe"], {}).setdefault(line["rate"], []).append(
                line["held_out"][-1]
            )
    best = {
        name: min(sum(seeds) / len(seeds) for seeds in rates.values())
        for name, rates in ends.items()
    }
    dense = best["adamw, gradients, dense"]
    assert set(shipped.excess) <= set(best)
    for name, excess in shipped.excess.items():
        assert math.isclose(best[name] - dense, excess, abs_tol=1e-4), name


SHELL = ["plan", "--params", "1M", "--workers", "3", "--bandwidth", "10mbit"]
RUN = [*SHELL, "--step", "500ms", "--steps", "1005", "--profile", "cpu"]


def test_the_shell_prints_recipes(capsys):
    assert shell.main([*RUN, "--nats", "0.22", "--optimizer", "adamw"]) == 0
    printed = capsys.readouterr().out
    assert "best within 0.22 nats: adamw, local 10, int4, warm 10 %" in printed
    assert "every=jaxsparse.Stages((1, 10), (100,))" in printed
    assert shell.main([*RUN, "--json", "--local-steps", "40"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["baseline"] == "adamw, gradients, dense"
    assert content["forecasts"][0]["recipe"] == "adamw, local 40, int4"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (RUN[:-2], "a step's time needs the device's: give --profile h100"),
        ([*SHELL, "--steps", "10", "--profile", "cpu"], "--steps needs --step (1.5s)"),
        ([*RUN, "--density", "0.1"], "--density is for plans without --steps"),
        ([*SHELL, "--nats", "1"], "--nats is for --steps N"),
        ([*RUN, "--nats", "-1"], "nats=-1.0 must be at least 0"),
        ([*RUN, "--optimizer", "sgd"], "optimizer='sgd' is unknown"),
        ([*RUN, "--dtype", "int8"], "dtype='int8' is unknown"),
        ([*RUN, "--local-steps", "1"], "local_steps=1 is no local step"),
    ],
)
def test_the_shell_names_what_does_not_fit(arguments, message, capsys):
    assert shell.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_no_time_of_a_step_is_refused():
    with pytest.raises(ValueError, match="step_seconds=0 must be above 0"):
        planned(step_seconds=0)
    with pytest.raises(ValueError, match="steps=0 must be at least 1"):
        planned(steps=0)
