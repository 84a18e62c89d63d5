"""Plans: seconds and bytes by hand, costs as measured, and programs that run as printed."""

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
from workers import mesh, some

import jaxsparse
import jaxsparse.__main__ as shell
from jaxsparse import Link, plan
from jaxsparse.planner.planning import MEMORY_BANDWIDTH, moved_by
from jaxsparse.planner.recipes import DENSE, MEASURED, RECIPES, USUAL_SPREAD

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))
decisions, measured = map(importlib.import_module, ("decisions", "recipes"))
sys.path.remove(str(BENCHMARKS))

BOTH = ("adamw", "muon")
SLOW = Link(1e-3, 1.25e7)


def of(found, name):
    return next(f for f in (*found.forecasts, found.dense) if str(f.recipe) == name)


# --- what an exchange moves and takes, by hand


# Bits of a value, with a scale of 16 bits for each 256 values, or 128 of two bits.
BITS = {"dense": 32, "int4": 4 + 1 / 16, "int2": 2 + 1 / 8, "sign": 1 + 1 / 16}


@pytest.mark.parametrize("workers", some([2, 5, 32], [5]))
@pytest.mark.parametrize("exchange", BITS)
def test_bytes_and_messages_are_those_of_the_formats(exchange, workers):
    size = 10**8
    messages, received = moved_by(exchange, size, 0, workers, at_once=True)
    ring, payload = 2 * (workers - 1), size * BITS[exchange] / 8
    assert received == pytest.approx(ring / workers * payload, rel=2e-3)
    # A dense vector travels with its flag. Else the flag is a sum of its own.
    assert messages == (ring if exchange == "dense" else 2 * ring)
    through_a_store = moved_by(exchange, size, 0, workers, islands=True)
    assert through_a_store.messages == workers + 5
    assert through_a_store.received == pytest.approx(workers * payload, rel=2e-3)


@pytest.mark.slow
def test_chunks_are_gathered_and_vectors_travel_dense():
    few, many = (moved_by("top 1/8", 10**8, 0, W).received for W in (2, 8))
    assert many == pytest.approx(7 * few, rel=1e-3)
    assert 6 < 8 * few / (10**8 / 8) < 11  # bits an entry
    beside = moved_by("int4", 10**8, 10**6, 8).received - moved_by("int4", 10**8, 0, 8).received
    assert beside == pytest.approx(2 * 7 / 8 * 4e6, rel=1e-3)


def test_long_vectors_travel_in_buckets():
    one = moved_by("int4", 2**30, 0, 8, at_once=True)
    assert moved_by("int4", 2**34, 0, 8) == (16 * one.messages, 16 * one.received)
    # Of shorter ones, too, if a backward pass goes on beside them.
    one = moved_by("int4", 10**8 // 8, 0, 8, at_once=True)
    assert moved_by("int4", 10**8, 0, 8) == (8 * one.messages, 8 * one.received)
    assert moved_by("dense", 10**8, 0, 8).messages == 2 * 7


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", BOTH)
def test_seconds_are_those_of_alpha_beta_and_passes(optimizer):
    """An oracle of one line, and all that follows from it."""
    size, steps = 10**8, 1000
    for workers, alpha, bandwidth, step in itertools.product(
        (8,), (1e-4, 1e-2), (1e7, 1e9), (0.2, 2.0)
    ):
        found = plan(size, workers, Link(alpha, bandwidth), step, steps=steps, optimizer=optimizer)
        for f in (found.dense, *found.forecasts):
            at_once = f.recipe.what != "gradients"
            messages, received = moved_by(f.recipe.exchange, size, 0, workers, at_once=at_once)
            passes = {"dense": 2.3, "top 1/8": 16.8}.get(f.recipe.exchange, 9.3)
            seconds = messages * alpha + received / bandwidth + passes * 8 * size / 2.856e12
            first = f.recipe.warm * steps // 100
            exchanges = first + math.ceil((steps - first) / f.recipe.every)
            assert f.exchange == pytest.approx(seconds)
            assert f.step == pytest.approx(step + exchanges / steps * seconds)
            assert f.hours == pytest.approx(steps * f.step / 3600)
            assert f.received == pytest.approx(exchanges / steps * received)
        hours = [f.hours for f in found.forecasts]
        assert hours == sorted(hours)


def test_computing_was_predicted_on_real_gpus():
    """Four hosts with an L40S each, measured by others: see benchmarks/planning.md."""
    text = (BENCHMARKS / "planning.md").read_text().split("| H | 50 Mbit/s")[1]
    rows = [line.split("|")[1:-1] for line in text.splitlines()[2:6]]
    size, step, ratios = 30_800_000, 0.026, []

    def computing(exchange, every, bits, passes):
        messages, received = moved_by(exchange, size, 0, 4, at_once=True)
        seconds = messages * 50e-6 + received / (bits / 8) + passes * 8 * size / 864e9
        return 100 * step / (step + seconds / every)

    for every, *cells in rows:
        for bits, cell in zip((50e6, 200e6, 1e9, 5e9), cells, strict=True):
            published, told, _ = map(float, cell.split("/"))  # the last is of emulated hosts
            assert told == pytest.approx(computing("dense", int(every), bits, 2.3), abs=0.0051)
            ratios.append(told / published)
    few, most, middle = min(ratios), max(ratios), float(np.median(ratios))
    for exchange, shares in {"int4": (0.7, 18, 81, 99), "sign": (2.6, 46, 94, 99.6)}.items():
        for every, bits, share in zip((1, 8, 32, 128), (50e6, 200e6, 1e9, 5e9), shares):
            assert share == pytest.approx(computing(exchange, every, bits, 9.3), rel=0.02)
    assert (few, most) == pytest.approx((0.86, 1.27), abs=0.02)
    assert middle == pytest.approx(1.03, abs=0.01)


def test_an_islands_exchange_goes_through_a_store():
    islands, every, step = 4, 10, 0.5
    link = Link(0.02, 1e6)
    found = plan(10**8, islands, link, step, islands=True, nats=1.0)
    f = of(found, f"local {every}, sign")
    message = moved_by("sign", 10**8, 0, 2, islands=True).received / 2
    seconds = (islands + 5) * 0.02 + islands * message / 1e6 + 9.3 * 8e8 / MEMORY_BANDWIDTH
    seconds += 0.75 * 0.2  # three of four look once more
    assert f.exchange == pytest.approx(seconds)
    assert seconds > 9 * step
    assert f.overlap == 9  # less than a round
    assert f.step == pytest.approx(step + (seconds - 9 * step) / every)
    assert f.received == pytest.approx((islands - 1) * message / every)
    # On a fast link all of it is hidden, and no more steps stand beside it than it takes.
    fast = of(plan(10**8, 4, Link(0.02, 1e9), step, islands=True), "local 10, sign")
    assert fast.step == step
    assert fast.overlap == math.ceil(fast.exchange / step)
    names = {str(f.recipe) for f in found.forecasts}
    assert not any("warm" in name or "gradients" in name for name in names)
    assert "diloco 30, int4" in names


def test_gradients_in_16_bits_and_memory_of_another_device():
    now = plan(10**8, 8, SLOW, 1.0, dtype="bfloat16")
    whole = plan(10**8, 8, SLOW, 1.0)
    assert now.dense.received == pytest.approx(whole.dense.received / 2)
    assert now.forecasts == whole.forecasts
    assert now.speedup < whole.speedup
    slower = plan(10**8, 8, SLOW, 1.0, memory_bandwidth=MEMORY_BANDWIDTH / 10)
    one, other = (of(x, "gradients, int4").exchange for x in (whole, slower))
    assert other - one == pytest.approx(9 * 9.3 * 8e8 / MEMORY_BANDWIDTH)


# --- the choice


def test_costs_are_those_of_the_runs():
    ends = measured.load_ends()
    for recipe in (DENSE, *RECIPES):
        trained = {o for o in BOTH if f"{o}, {recipe}" in ends.ends}
        assert trained == recipe.costs.keys()
        for optimizer, cost in recipe.costs.items():
            name = f"{optimizer}, {recipe}"
            nats, spread = ends.above_dense(name)
            if recipe is DENSE:
                assert cost == (0.0, None, 1)
                continue
            assert cost.nats == pytest.approx(nats, abs=6e-5)
            assert cost.spread == (spread and pytest.approx(spread, abs=6e-5))
            dense = ends.ends[f"{optimizer}, gradients, dense"]
            assert cost.seeds == len(ends.ends[name].losses.keys() & dense.losses.keys())
    spreads = [ends.above_dense(x)[1] for x in ends.ends if "gradients, dense" not in x]
    usual = np.sqrt(np.mean([x**2 for x in spreads if x is not None]))
    assert usual == pytest.approx(USUAL_SPREAD, abs=6e-5)
    assert f"{ends.steps:,} steps" in MEASURED


@pytest.mark.parametrize("optimizer", BOTH)
def test_the_choice_is_the_cheapest_of_the_fastest_within_the_cost(optimizer):
    chosen = set()
    for ratio, nats, workers in itertools.product((0.03, 0.3, 3, 30), (0.02, 0.1, 0.3), (2, 8)):
        received = 2 * (workers - 1) / workers * 4e8
        link = Link(1e-4, received / ratio)  # a dense exchange takes this many steps
        found = plan(10**8, workers, link, 1.0, optimizer=optimizer, nats=nats)
        able = [f for f in found.forecasts if f.cost.most <= nats]
        able = [f for f in able if f.hours <= 0.9 * found.dense.hours]
        if not able:
            assert found.best is None
            assert str(found).endswith("saves a tenth of the hours.")
            continue
        least = min(f.hours for f in able)
        near = [f for f in able if f.hours <= 1.05 * least]
        assert found.best.cost.nats == min(f.cost.nats for f in near)
        chosen.add(str(found.best.recipe))
    assert len(chosen) >= 3


@pytest.mark.slow
def test_what_has_one_seed_costs_the_usual_spread_more():
    found = plan(10**9, 8, Link(1e-3, 1e8), 1.0, nats=0.06, optimizer="adamw")
    assert str(found.best.recipe) == "gradients, int4"  # local 3 costs 0.051, by one seed
    found = plan(10**9, 8, Link(1e-3, 1e8), 1.0, nats=0.064, optimizer="adamw")
    assert str(found.best.recipe) == "local 3, int4"
    said = "It cost +0.051 ± 0.012 nats a byte (1 seed, usual spread) above dense adamw, of at most"
    assert f"{said} 0.064, on {MEASURED}: " in str(found)


def test_the_docs_have_the_planners_answers():
    text = (BENCHMARKS.parent / "docs" / "which.md").read_text()
    assert "\n".join(decisions.table()) in text


@pytest.mark.slow
def test_a_tree_counts_as_its_elements():
    tree = {"w": jax.ShapeDtypeStruct((1000, 1000), jnp.bfloat16), "b": jnp.zeros(5000)}
    found = plan(tree, 4, SLOW, 0.1)
    messages, received = moved_by("int4", 10**6, 5000, 4)
    f = of(found, "gradients, int4")
    assert f.received == received
    assert f.exchange == pytest.approx(
        SLOW.seconds(messages, received) + 9.3 * 8 * 1005000 / 2.856e12
    )
    vectors = plan({"b": jnp.zeros(10**6)}, 4, Link(1e-3, 1e4), 0.1, nats=1.0)
    assert {f.recipe.exchange for f in vectors.forecasts} == {"dense"}


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"workers": 1}, "workers=1 must be at least 2"),
        ({"params": "1B"}, "params='1B' must be an int"),
        ({"params": 0}, "params=0 must be at least 1"),
        ({"params": 2**50}, "elements: plan 1 to"),
        ({"params": {"w": jnp.zeros((64, 64), jnp.int32)}}, "dtype int32"),
        ({"link": 1e9}, r"link=1000000000\.0 must be a jaxsparse\.Link"),
        ({"step_seconds": 0}, "step_seconds=0 must be above 0"),
        ({"memory_bandwidth": math.inf}, "memory_bandwidth=inf must be above 0 and finite"),
        ({"nats": -1}, "nats=-1 must be at least 0"),
        ({"steps": 0}, "steps=0 must be at least 1"),
        ({"optimizer": "sgd"}, "optimizer='sgd' is unknown: use one of adamw, muon"),
        ({"dtype": "int8"}, "dtype='int8' is unknown: use one of float32, bfloat16"),
    ],
)
def test_wrong_arguments_are_named(settings, complaint):
    given = {"params": 10**6, "workers": 3, "link": SLOW, "step_seconds": 1.0}
    with pytest.raises(ValueError, match=complaint):
        plan(**{**given, **settings})


# --- programs


@pytest.fixture
def usual_jax():
    """Programs are written for JAX as it is, and tests have stricter rules."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def data():
    """What the programs call theirs: a model of two matrices and a bias."""
    x = jax.random.normal(jax.random.key(0), (16, 48))
    y = jnp.tanh(x[:, :32])

    def loss_of(params, batch):
        return jnp.mean((batch[0] @ params["v"] @ params["w"] + params["b"] - batch[1]) ** 2)

    draw = lambda key, *shape: jax.random.normal(jax.random.key(key), shape) / 8
    params = {"v": draw(1, 48, 48), "w": draw(2, 48, 32), "b": jnp.zeros(32)}
    given = {"lr": 0.02, "batches": [(x, y)] * 12, "params": params, "loss_of": loss_of}
    return {**given, "jax": jax, "optax": optax, "jaxsparse": jaxsparse}


PROGRAMS = [(recipe, optimizer) for recipe in RECIPES for optimizer in recipe.costs]
name_of = lambda pair: f"{pair[1]}, {pair[0]}"
OF_A_KIND = {(r.what, r.exchange, bool(r.warm)): (r, optimizer) for r, optimizer in PROGRAMS}


def programs(usual, is_wanted=lambda recipe: True):
    """One program of each kind; the usual one runs by default."""
    chosen = {name_of(pair): pair for pair in OF_A_KIND.values() if is_wanted(pair[0])}
    chosen |= {name_of(pair): pair for pair in PROGRAMS if name_of(pair) == usual}
    return pytest.mark.parametrize("pair", some(chosen.values(), [chosen[usual]]), ids=name_of)


@pytest.mark.slow
@programs("muon, gradients, int4")
def test_a_printed_program_trains(pair, usual_jax):
    recipe, optimizer = pair
    scope = {**data(), "mesh": mesh(2)}
    if recipe.what != "gradients":
        scope["mesh"] = 2  # workers simulated on one device
    before = float(scope["loss_of"](scope["params"], scope["batches"][0]))
    exec(recipe.written(optimizer, 12), scope)
    after = float(scope["loss_of"](jax.device_get(scope["params"]), scope["batches"][0]))
    assert after < 0.9 * before


@pytest.mark.slow
@programs("adamw, local 3, int4", lambda recipe: recipe.is_for_islands)
def test_a_printed_program_of_an_island_trains(pair, tmp_path, usual_jax):
    recipe, optimizer = pair
    settings = {"overlap": 0, "grace": 0.05, "quorum": 1}
    text = recipe.written(optimizer, 12, settings).replace("s3://bucket/run-7", str(tmp_path))
    scope = data()
    before = float(scope["loss_of"](scope["params"], scope["batches"][0]))
    exec(text, scope)
    assert float(scope["loss_of"](scope["params"], scope["batches"][0])) < 0.9 * before


@pytest.mark.slow
def test_a_plan_prints_its_program():
    found = plan(10**8, 8, SLOW, 0.1, nats=0.2, steps=1000)
    assert found.program == found.best.recipe.written("adamw", 1000)
    assert str(found).endswith(f"\n\n{found.program}")
    texts = {str(recipe): recipe.written("adamw", 1005) for recipe in RECIPES}
    assert "every=jaxsparse.Stages((1, 10), (100,)))" in texts["local 10, int4, warm 10 %"]
    assert "every=10)" in texts["local 10, int4"]
    assert 'exchange = jaxsparse.quantized("int4")\n' in texts["local 10, int4"]
    assert "optimizer = optax.sgd(1.0)  #" in texts["local 10, int4"]
    assert "optimizer = optax.sgd(0.7, 0.6, nesterov=True)  #" in texts["diloco 30, int4"]
    assert "exchange = jaxsparse.chunked_top_k(512, decay=0.95)\n" in texts["local 10, top 1/8"]
    islands = plan(10**7, 3, SLOW, 0.1, islands=True, optimizer="muon")
    every = islands.best.recipe.every
    message = moved_by(islands.best.recipe.exchange, 10**7, 0, 3, islands=True).received / 3
    grace = math.ceil(1e-3 + message / 1.25e7 + every * 0.1 / 10 + 1)
    assert f"overlap={islands.best.overlap}, grace={grace}.0, quorum=2," in islands.program
    assert "quorum=1," in plan(10**7, 2, SLOW, 0.1, islands=True).program
    none = plan(10**7, 3, SLOW, 0.1, islands=True, nats=0.01)
    assert none.best is None
    assert none.answer.startswith("No recipe of adamw for islands cost 0.01 nats a byte or less")
    assert none.answer.endswith("The least is 0.063.")


# --- the command line

SHELL = ["plan", "--params", "1M", "--workers", "3", "--bandwidth", "1mbit", "--step", "500ms"]


@pytest.mark.slow
def test_the_shell_answers(capsys):
    assert shell.main([*SHELL, "--nats", "0.2", "--steps", "1000"]) == 0
    found = plan(10**6, 3, Link(50e-6, 1.25e5), 0.5, nats=0.2, steps=1000)
    assert capsys.readouterr().out == f"{found}\n"
    dense = f"a step takes {found.dense.step:.3g} s with its exchange, for which a worker receives "
    assert dense in str(found)
    assert shell.main([*SHELL, "--json", "--optimizer", "muon"]) == 0
    content = json.loads(capsys.readouterr().out)
    found = plan(10**6, 3, Link(50e-6, 1.25e5), 0.5, optimizer="muon")
    assert (content["best"], content["program"]) == (str(found.best.recipe), found.program)
    assert [row["hours"] for row in content["recipes"][1:]] == [f.hours for f in found.forecasts]
    assert content["recipes"][0]["recipe"] == "gradients, dense"
    islands = [x if x != "--workers" else "--islands" for x in SHELL]
    assert shell.main([*islands, "--dtype", "bfloat16", "--memory-bandwidth", "1TB/s"]) == 0
    given = {"islands": True, "dtype": "bfloat16", "memory_bandwidth": 1e12}
    assert capsys.readouterr().out == f"{plan(10**6, 3, Link(20e-3, 1.25e5), 0.5, **given)}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*SHELL, "--islands", "3"], "not allowed with argument --workers"),
        (SHELL[:3], "required"),
        ([*SHELL, "--nats", "-1"], "nats=-1.0 must be at least 0"),
        ([*SHELL, "--optimizer", "sgd"], "optimizer='sgd' is unknown"),
        ([*SHELL, "--latency", "0"], "latency=0.0 must be positive"),
        ([*SHELL, "--steps", "1.5"], "'1.5' is not a whole number from 1 on, such as 84000"),
        (
            [*SHELL, "--latency", "50"],
            "'50' has no unit: give a number with its unit, such as",
        ),
        ([*SHELL, "--memory-bandwidth", "2"], "'2' can't be read: give a number with its unit, su"),
    ],
)
def test_the_shell_names_what_is_wrong(arguments, message, capsys):
    code: object = None
    try:
        code = shell.main(arguments)
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert message in capsys.readouterr().err
