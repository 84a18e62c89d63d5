"""The planner: predicted times add up, rank as they should, and are written as Python runs them."""

import json
import math
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import optax
import pytest
from planned import profile
from workers import few

import jaxsparse
import jaxsparse.__main__ as shell
from jaxsparse import systems
from jaxsparse.planner import planning, units
from jaxsparse.planner.computing import profile_systems, time_exchange
from jaxsparse.planner.links import fit_link
from jaxsparse.planner.losses import End, Losses
from jaxsparse.planner.network import Link, Network, Timing, rounds
from jaxsparse.planner.planning import plan
from jaxsparse.planner.plans import compared
from jaxsparse.planner.profiles import Floor, SystemPoint, SystemProfile
from jaxsparse.planner.tensors import TensorPoint, TensorProfile
from jaxsparse.planner.trials import autotune
from jaxsparse.systems.sparcml import ALGORITHMS
from jaxsparse.traffic import traced_bytes

COSTS = TensorProfile((TensorPoint(1000, 1e-5, 1e-5, 1e-9),))
SLOW, FAST = Link(50e-6, 1.25e6), Link(1e-9, 1e15)


def planned(params=10**6, workers=3, network=SLOW, names=("spardl",), **settings):
    settings = {"profile": profile(), "systems": names, **settings}
    return plan(params, workers, network=network, **settings)


TREE = {
    "embedding": jax.ShapeDtypeStruct((500, 64), jnp.float32),
    "mlp": {
        "bias": jax.ShapeDtypeStruct((64,), jnp.float32),
        "kernel": jax.ShapeDtypeStruct((1000, 64), jnp.float32),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("workers", few([2, 3, 8, 14, 64], [3]))
def test_every_system_is_planned(workers):
    found = planned(workers=workers, names=None)
    predicted = {p.system for p in found.predictions}
    matrices = {"powersgd", "demo"}  # a profile of vectors says nothing about them
    assert predicted == set(systems.WITH_VARIANTS) - matrices
    assert {name for name, _ in found.left_out} == matrices
    times = [p.exchange for p in found.predictions]
    assert times == sorted(times)
    assert min(times) > 0
    assert all(name in str(found) for name in systems.WITH_VARIANTS)


def evaluated(expression):
    """The budget of the transformation that an expression makes."""
    rows = {name: system.reducer for name, system in systems.SYSTEMS.items()}
    names = types.SimpleNamespace(systems=systems, codecs=jaxsparse.codecs, **rows)
    return eval(expression, {"jaxsparse": names})


@pytest.mark.parametrize("density", [0.01, 0.001])
@pytest.mark.parametrize("touched", [None, 0.05])
def test_what_is_written_is_what_is_meant(density, touched):
    for name in systems.WITH_VARIANTS:
        settings = {"size": 10**6, "workers": 8, "touched": touched}
        choice = systems.choose(name, density, **settings, block_size=64)
        assert evaluated(choice.transformation) == choice.budget


def test_what_is_written_needs_only_the_library():
    """Runs in a new process, because in this one all modules are imported anyway."""
    asked = {"size": 10**6, "workers": 8}
    choices = [
        systems.choose(name, 0.01, touched=touched, block_size=64, **asked)
        for name in systems.WITH_VARIANTS
        for touched in (None, 0.05)
    ]
    code = "\n".join(["import jaxsparse", *sorted({each.transformation for each in choices})])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dense_size", [0, 50_000, 10**6])
def test_a_sketch_delivers_as_much_beside_dense_leaves(dense_size):
    for density in (0.1, 0.03, 0.02, 0.01, 0.001):  # one row, and three
        asked = {"size": 10**6, "workers": 8, "dense_size": dense_size}
        choice = systems.choose("sketched_sgd", density, **asked)
        (reducer,) = choice.budget.split((10**6,), dense_size)
        assert reducer.k == pytest.approx(density * 10**6, rel=0.005)


@pytest.mark.parametrize("algorithm", few(ALGORITHMS, ALGORITHMS[:3:2]))
def test_sparcml_s_algorithm_is_chosen_by_the_profile_that_is_given(algorithm):
    points = [SystemPoint("dense", 10, 2, None, 1.0)]
    for name in ALGORITHMS:
        passes = 1.0 if name == algorithm else 1e9
        points.append(SystemPoint(f"sparcml:{name}", 10, 2, None, passes))
    given = SystemProfile(tuple(points), (Floor(10, 1e-9),))
    found = planned(names=["sparcml"], profile=given, network=FAST)["sparcml"]
    assert found.transformation == f"jaxsparse.sparcml(5, algorithm='{algorithm}')"
    tx = eval(found.transformation, {"jaxsparse": jaxsparse})
    moved = traced_bytes(tx, {"a": jax.ShapeDtypeStruct((1, 10**6), jnp.float32)}, 3)
    assert found.received == pytest.approx(moved.received)
    assert found.computing == pytest.approx(given.seconds(f"sparcml:{algorithm}", 10**6, 3, 0.01))


def test_more_elements_than_int32_can_index():
    found = planned(3 * 10**9, names=["top_k", "qsgd"])
    assert not found.left_out
    assert found["top_k"].transformation == "jaxsparse.top_k(0.01, bucket_size=1073741824)"
    assert found["qsgd"].transformation == "jaxsparse.qsgd(4, bucket_size=1073741824)"
    assert found["top_k"].received == pytest.approx(2 * 8 * 0.01 * 3e9, rel=1e-6)
    assert found["top_k"].rounds == 4  # three buckets and the flag


@pytest.mark.parametrize(
    "name",
    few(
        ["random_k", "omni_reduce", "sketched_sgd", "qsgd", "true_top_k", "spardl", "ok_topk"],
        ["random_k", "omni_reduce"],
    ),
)
def test_buckets_move_the_bytes_of_the_whole_transformation(name, monkeypatch):
    """The plan traces one bucket, and counts the others, whose seeds differ, as the same."""
    monkeypatch.setattr("jaxsparse.planner.planning._LONGEST", 4000)
    monkeypatch.setattr("jaxsparse.planner.planning._BUCKET", 4000)
    tree = {"bias": jnp.zeros(77), "w": jnp.zeros((1500, 10))}
    found = planned(tree, names=[name], density=0.1)[name]
    assert "bucket_size=4000" in found.transformation
    moved = traced_bytes(eval(found.transformation, {"jaxsparse": jaxsparse}), tree, 3).usual
    assert found.rounds == moved.rounds
    assert found.received == pytest.approx(moved.received, rel=1e-12)


def test_a_trillion_elements_are_traced_like_a_few(monkeypatch):
    """One bucket is traced, and the others count as it."""
    traced = []
    count = lambda *given: traced.append(given) or traced_bytes(*given)
    monkeypatch.setattr("jaxsparse.planner.planning.traced_bytes", count)
    planning._moved.cache_clear()
    found = planned(10**12, names=["top_k", "random_k"])
    assert not found.left_out
    assert found["top_k"].rounds == 933
    assert found["top_k"].received == pytest.approx(2 * 8 * 0.01 * 1e12, rel=1e-6)
    assert len(traced) == 2 + 1 + 1  # dense and its flag; all buckets count as the first


def test_many_leaves_are_traced_like_one(monkeypatch):
    """Only the number of elements counts, and each leaf is looked at once."""
    traced, seen = [], []
    count = lambda *given: traced.append(given) or traced_bytes(*given)
    monkeypatch.setattr("jaxsparse.planner.planning.traced_bytes", count)
    planning._moved.cache_clear()
    tree = [jax.ShapeDtypeStruct((50, 40), jnp.float32)] * 300
    is_dense = lambda path, shape: seen.append(path) or "[7]" in path
    found = planned(tree, names=["top_k", "random_k"], is_dense=is_dense)
    assert (found.elements, found.dense_elements) == (600_000, 2000)
    assert all(isinstance(size, int) for _, size, _ in traced)
    assert len(seen) == 300


def test_a_million_workers():
    """Permutations list all workers, so their bytes are not predicted. All others are."""
    found = planned(workers=10**6, names=["top_k", "gtopk"])
    message = "workers=1000000: its permutations list all workers, so their bytes are counted for"
    assert message in dict(found.left_out)["gtopk"]
    assert found["top_k"].received == pytest.approx((10**6 - 1) * 80_000 + 8, rel=1e-9)


def test_dense_wins_on_a_fast_network_and_loses_on_a_slow_one():
    assert planned(network=FAST).best == "dense"
    assert "use dense" in str(planned(network=FAST))
    # A twentieth of the time is not worth the change.
    exchange = planned(network=SLOW)["dense"].exchange
    assert planned(network=SLOW, step_seconds=19 * exchange).best == "dense"
    assert planned(network=SLOW, step_seconds=5 * exchange).best == "spardl"
    # With ten local steps a dense exchange takes a twentieth of the time.
    rare = {"step_seconds": 2 * exchange, "local_steps": 10}
    assert planned(network=SLOW, **rare).best == "dense"
    slow = planned(network=SLOW)
    assert slow.best == "spardl"
    assert slow.transformation == "jaxsparse.spardl(0.01)"
    assert slow.speedup("spardl") > 5
    assert "jaxsparse.spardl(0.01)" in str(slow)


@pytest.mark.parametrize("system", ["spardl", "qsgd"])
def test_what_is_printed_for_sgd_and_for_adam_runs(monkeypatch, system):
    is_before = system == "qsgd"
    exchange = "QSGD 4 bits" if is_before else "SparDL 1 %"
    ends = {
        "adamw, gradients, dense": 1.0,
        f"adamw, gradients, {exchange}": 1.1 if is_before else 1.3,
        f"adamw, updates, {exchange}": 1.2,
        f"muon, gradients, {exchange}": 0.9,
        "muon, gradients, dense": 0.8,
    }
    known = Losses("by hand", 100, {name: End(0.01, {0: loss}) for name, loss in ends.items()})
    monkeypatch.setattr(Losses, "shipped", lambda: known)
    text = str(planned(network=SLOW, names=[system]))
    (table,) = re.findall(r"How they trained with .*, by hand\n.*((?:\n.*){3})", text)
    above = ["+0.100", "+0.100", "+0.200"] if is_before else ["+0.100", "+0.200", "+0.300"]
    assert re.findall(r"\+0\.\d+", table) == above
    code = re.sub(r"^    ", "", re.search(r"\n\n((?:    .*\n)+)", text).group(1), flags=re.M)
    assert code.count("tx = ") == 2
    assert ("per_worker" in code) != is_before
    made = {"optax": optax, "jaxsparse": jaxsparse, "lr": 0.1}
    exec(code, made)
    made["tx"].init({"w": jnp.zeros((40, 40))})


def test_what_is_known_of_training_is_of_these_systems_and_as_many_local_steps():
    local = lambda name, h: str(planned(network=SLOW, names=[name], local_steps=h))
    text = local("quantized", 10)
    assert "quantized  adamw, local 10, int4" in text
    assert "gradients," not in text
    assert "top 1/" not in text
    assert "outer = jaxsparse.outer.sparse_loco(41)" in local("chunked_top_k", 10)
    assert "No training with these was measured" in local("quantized", 17)


def test_totals_add_up():
    found = planned(step_seconds=0.25, network=Network(SLOW, all_reduce=Link(1e-3, 1e6)))
    size = 10**6
    for name, passes, tx in [
        ("dense", 1, jaxsparse.dense()),
        ("spardl", 10, jaxsparse.spardl(0.01)),
    ]:
        row = found[name]
        moved = traced_bytes(tx, {"a": jax.ShapeDtypeStruct((1, size), jnp.float32)}, 3)
        assert row.rounds == moved.rounds
        assert row.received == pytest.approx(moved.received)
        assert row.network == pytest.approx(
            Network(SLOW, all_reduce=Link(1e-3, 1e6)).seconds(moved)
        )
        assert row.computing == pytest.approx(passes * 1e-9 * size, rel=1e-5)
        assert found.step(name) == pytest.approx(0.25 + row.network + row.computing)
        assert found.delayed_step(name) == pytest.approx(row.computing + max(0.25, row.network))
    dense = 4 / 1e-3 * 1e-3 * 1e-3 + 2 * 2 / 3 * 4 * (size + 1) / 1e6
    assert found["dense"].network == pytest.approx(dense)


def test_local_steps_share_an_exchange(capsys):
    """A step has one H-th of an exchange. Speedups are over a dense exchange in each step."""
    once, local = (planned(step_seconds=0.02, local_steps=h) for h in (1, 30))
    assert local["spardl"] == once["spardl"]
    assert local.step("spardl") == pytest.approx(0.02 + once["spardl"].exchange / 30)
    assert local.speedup("dense") == pytest.approx(once.step("dense") / local.step("dense"))
    assert local.delayed_step("spardl") == pytest.approx(
        max(0.02, once["spardl"].network / 30) + once["spardl"].computing / 30
    )
    with pytest.raises(ValueError, match="different local_steps"):
        compared({"1": once, "30": local})
    text = str(local)
    assert "an exchange every 30 steps" in text
    assert "outer = jaxsparse.outer.mean(exchange=jaxsparse.spardl(0.01))" in text
    assert "jaxsparse.LocalSteps(step, outer, mesh, every=30)" in text
    fast = planned(network=FAST, local_steps=30)
    assert (fast.best, fast.speedup("dense")) == ("dense", pytest.approx(30))
    assert "outer = jaxsparse.outer.mean()" in str(fast)
    flags = ["--params", "1M", "--workers", "3", "--bandwidth", "10Mbit", "1Gbit"]
    flags += ["--profile", "cpu"]
    assert shell.main(["plan", *flags, "--local-steps", "30", "--systems", "spardl"]) == 0
    assert "| ms a step | 10Mbit | 1Gbit |" in capsys.readouterr().out
    with pytest.raises(ValueError, match="local_steps=0 must be at least 1"):
        planned(local_steps=0)


def test_usual_steps_have_the_cheapest_branches():
    tx = jaxsparse.ok_topk(0.01)
    moved = traced_bytes(tx, {"a": jax.ShapeDtypeStruct((1, 10**6), jnp.float32)}, 3)
    found = planned(names=["ok_topk"])["ok_topk"]
    assert moved.conditionals
    assert found.rounds == 5  # the flag, two all-to-alls, a gather of counts and one of entries
    assert found.received == moved.usual.received < moved.received


def test_leaves_that_are_small_travel_dense_in_all_systems():
    found = planned(TREE)
    assert (found.elements, found.dense_elements) == (500 * 64 + 1001 * 64, 64)
    moved = traced_bytes(jaxsparse.spardl(0.01), TREE, 3)
    assert found["spardl"].received == pytest.approx(moved.received)
    everything = planned(TREE, is_dense=lambda path, shape: False)
    assert everything.dense_elements == 0
    assert everything["spardl"].transformation == "jaxsparse.spardl(0.01, is_dense=is_dense)"
    nothing = planned(TREE, is_dense=lambda path, shape: True)
    assert nothing.best == "dense"
    assert dict(nothing.left_out)["spardl"].startswith("no leaf")


@pytest.fixture
def few_systems(monkeypatch):
    names = ("spardl", "random_k", "dense", "omni_reduce", "sparse_all_gather")
    few = {name: systems.WITH_VARIANTS[name] for name in names}
    monkeypatch.setattr("jaxsparse.planner.planning.WITH_VARIANTS", few)


@pytest.mark.usefixtures("few_systems")
def test_caveats_are_heeded_unless_a_system_is_asked_for():
    assert planned(names=None, workers=14).best != "random_k"
    assert planned(names=["random_k"], workers=14).best == "random_k"


def test_it_says_that_the_shipped_profile_is_of_another_device():
    found = planned(profile=None, memory_bandwidth=2e12)
    assert "extrapolated from cpu" in str(found)
    assert "measured on the library's machine" in str(found)
    assert "library's machine" not in str(planned())
    assert found["spardl"].computing < planned(profile=None)["spardl"].computing


def test_a_shipped_profile_by_name():
    found = planned(profile="h100")
    assert "computing: gpu: NVIDIA H100" in str(found)
    assert "library's machine" not in str(found)
    assert found["spardl"].computing < planned(profile="cpu")["spardl"].computing


def test_what_cannot_be_planned_says_why():
    found = planned(density=0.3, names=["sketched_sgd", "spardl"])
    assert "density=0.3" in dict(found.left_out)["sketched_sgd"]
    assert "sketched_sgd" in str(found)
    with pytest.raises(KeyError, match=r"ask for less than 0\.25"):
        found["sketched_sgd"]
    part = SystemProfile((SystemPoint("dense", 10, 2, None, 1.0),), (Floor(10, 1e-6),))
    unknown = planned(profile=part, names=["spardl", "sparcml"])
    assert unknown.best == "dense"
    assert dict(unknown.left_out) == dict.fromkeys(["spardl", "sparcml"], "no measured profile")
    assert re.search(r"\nspardl +not predicted: no measured profile\n", str(unknown))
    shaped = planned(profile=None, names=["powersgd", "demo"])
    reason = "its computing depends on the shapes of leaves"
    assert dict(shaped.left_out) == dict.fromkeys(["powersgd", "demo"], reason)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"names": ["spar"]}, "systems has 'spar', which is unknown: use dense,"),
        ({"workers": 0}, "workers=0 must be at least 1"),
        ({"density": 2.0}, "density=2.0 must lie in"),
        ({"network": 1e9}, "network=1000000000.0 must be a Network"),
        ({"step_seconds": -1}, "step_seconds=-1.0 must be finite"),
        ({"params": 0}, "params=0 must be at least 1"),
        ({"params": 1e6}, "params=1000000.0 must be an int"),
        ({"memory_bandwidth": 0}, "memory_bandwidth=0 must be positive"),
        ({"profile": 3}, "profile=3 must be a SystemProfile"),
    ],
)
def test_errors(settings, message):
    with pytest.raises(ValueError, match=message):
        planned(**settings)


@pytest.mark.parametrize(
    "text", ["", "M", "1.2.3M", "110X", "-3M", "0", "0.1", "nan", "1e400", "1e308M"]
)
def test_no_count(text):
    with pytest.raises(ValueError, match=re.escape(f"{text!r} is no number of elements: write")):
        units.count(text)


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("10Gbit", 10e9),
        ("10Gbit/s", 10e9),
        ("100mbit", 100e6),
        ("25 Gbps", 25e9),
        ("400Gb/s", 400e9),
        ("1GB/s", 8e9),
        ("2TB/s", 16e12),
        ("500kB", 4e6),
    ],
)
def test_bandwidths(text, bits):
    assert units.bytes_per_second(text) == pytest.approx(bits / 8)


@pytest.mark.parametrize("text", ["10", "10G", "fast", "0Gbit", "10Xbit", "10GBit", "1e400bit"])
def test_no_bandwidth(text):
    with pytest.raises(ValueError, match=re.escape(f"{text!r} is no bandwidth: write 10Gbit")):
        units.bytes_per_second(text)


@pytest.mark.parametrize("text", ["50", "50 min", "us", "1e", "-1ms", "1e400s"])
def test_no_time(text):
    with pytest.raises(ValueError, match=re.escape(f"{text!r} is no time: write 50us")):
        units.seconds(text)


ARGUMENTS = [
    "plan",
    "--params",
    "1M",
    "--workers",
    "4",
    "--bandwidth",
    "10mbit",
    "--profile",
    "cpu",
]
ARGUMENTS += ["--systems", "spardl", "qsgd"]


def test_the_shell_prints_a_table(capsys, tmp_path):
    path = tmp_path / "profile.json"
    profile().save(path)
    assert shell.main([*ARGUMENTS, "--profile", str(path), "--step", "120ms"]) == 0
    printed = capsys.readouterr().out
    assert "jaxsparse.spardl(0.01)" in printed
    assert "with delay=1" in printed
    assert "1,000,000 elements" in printed
    assert "0.01 Gbit/s" in printed
    Network(Link(1e-3, 1e6)).save(tmp_path / "network.json")
    by_file = [*ARGUMENTS[:5], "--network", str(tmp_path / "network.json"), "--json"]
    assert shell.main([*by_file, "--systems", "spardl", "--profile", str(path)]) == 0
    content = json.loads(capsys.readouterr().out)
    expected = planned(workers=4, network=Link(1e-3, 1e6))
    assert content["best"] == "spardl"
    assert [p["exchange"] for p in content["predictions"]] == pytest.approx(
        [p.exchange for p in expected.predictions]
    )


def test_the_shell_compares_bandwidths(capsys, tmp_path):
    path = tmp_path / "profile.json"
    profile().save(path)
    several = ["--bandwidth", "10mbit", "1TB/s", "--systems", "spardl", "--profile", str(path)]
    assert shell.main([*ARGUMENTS[:5], *several]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "| exchange, ms | 10mbit | 1TB/s |" in printed
    assert "| best | spardl | dense |" in printed


MEASURING = ["profile", "--out", "{}/new.json", "--sizes", "1k", "--workers", "2", "--repeats", "1"]


@pytest.mark.parametrize(
    ("arguments", "changed", "message"),
    [
        (ARGUMENTS, "--params many", "argument --params: 'many' is no number of elements: write"),
        (ARGUMENTS, "--params 1.5", "argument --params: '1.5' is no number of elements: write"),
        (ARGUMENTS, "--params 1e30", "elements to compress, which take"),
        *(
            (ARGUMENTS, f"{flag} {value}", f"argument {flag}: '{value}' is no whole number of at")
            for flag in ("--workers", "--local-steps")
            for value in ("0", "-1", "1.5", "nan", "1e400", "many")
        ),
        (ARGUMENTS, "--bandwidth 10", "argument --bandwidth: '10' is no bandwidth: write 10Gbit"),
        (ARGUMENTS, "--bandwidth 1e-320B", "takes for ever: give less latency, more bandwidth"),
        (ARGUMENTS, "--bandwidth", "argument --bandwidth: expected at least one argument"),
        (ARGUMENTS, "--latency 5", "argument --latency: '5' is no time: write 50us"),
        (ARGUMENTS, "--latency 0", "argument --latency: '0' is no latency: write 50us"),
        (ARGUMENTS, "--step nan", "argument --step: 'nan' is no time: write 50us"),
        (ARGUMENTS, "--memory-bandwidth 0B", "argument --memory-bandwidth: '0B' is no bandwidth"),
        (ARGUMENTS, "--network net.json", "give either --bandwidth"),
        (ARGUMENTS[:5], "--network {}/good.json --latency 1ms", "--latency has no effect on"),
        (ARGUMENTS[:5], "--network {}/none.json", "none.json' can't be read (No such file or dir"),
        (ARGUMENTS[:5], "--network=", "--network '' can't be read (Is a directory): give a file"),
        (ARGUMENTS[:5], "--network {}/cut.json", "cut.json is no profile of networks that can be"),
        (ARGUMENTS, "--profile {}/cut.json", "cut.json is no profile of systems that can be read"),
        (ARGUMENTS, "--profile {}/bytes.json", "bytes.json is no profile of systems that can be"),
        (ARGUMENTS, "--profile {}/good.json", "its kind is 'networks', not 'systems'"),
        (ARGUMENTS, "--profile missing.json", "--profile 'missing.json' can't be read (No such"),
        (ARGUMENTS, "--systems none", "systems has 'none', which is unknown"),
        *(
            (command, f"--density {value}", f"argument --density: '{value}' is no share in (0, 1]")
            for command in (ARGUMENTS, MEASURING)
            for value in ("0", "-1", "1.5", "nan", "1e400", "some")
        ),
        *(
            (MEASURING, f"{flag} {value}", f"argument {flag}: '{value}' is no whole number of at")
            for flag in ("--workers", "--repeats")
            for value in ("0", "-1", "1.5", "nan")
        ),
        (MEASURING, "--workers 2 0", "argument --workers: '0' is no whole number of at least 1"),
        (MEASURING, "--sizes 0", "argument --sizes: '0' is no number of elements"),
        (MEASURING, "--sizes 1e13", "sizes=[10000000000000]: indices are int32"),
        (MEASURING, "--systems none", "system 'none' is unknown"),
        (MEASURING, "--systems top_k --out {}/cut.json", "cut.json is no profile of systems that"),
        (MEASURING, "--out {}", "can't be written: name a file in a writable folder"),
        (MEASURING, "--out {}/none/new.json", "can't be written: name a file in a writable folder"),
    ],
)
def test_the_shell_names_the_flag(arguments, changed, message, capsys, tmp_path):
    Network(SLOW).save(tmp_path / "good.json")
    (tmp_path / "cut.json").write_text((tmp_path / "good.json").read_text()[:50])
    (tmp_path / "bytes.json").write_bytes(b"\xff")
    given = [text.replace("{}", str(tmp_path)) for text in [*arguments, *changed.split(" ")]]
    try:
        code = shell.main(given)
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new.json").exists()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: planned(0), "params=0 must be at least 1"),
        (lambda: planned(10**20), "elements to compress, which take"),
        (lambda: planned("1M"), "params='1M' must be a number of elements, or a tree of arrays"),
        (lambda: planned(workers=0), "workers=0 must be at least 1"),
        (lambda: planned(workers=10**20), "workers=100000000000000000000 must be at least 1, and"),
        (lambda: planned(density=math.nan), "density=nan is not a number"),
        (lambda: planned(memory_bandwidth=math.nan), "memory_bandwidth=nan is not a number"),
        (lambda: traced_bytes(lambda x: x, jnp.zeros(3), 2**31), "workers=2147483648 must be at"),
        (lambda: rounds("all-gather", 0), "workers=0 must be at least 1"),
        (lambda: rounds("all-gather", math.nan), "workers=nan must be an int"),
        (lambda: Network(workers=0), "workers=0 must be at least 1"),
        (lambda: fit_link([Timing("all-gather", 0, 8.0, 1.0)]), "workers=0 must be at least 1"),
        (lambda: fit_link([Timing("all-gather", 3, -1.0, 1.0)]), "bytes of at least 0"),
        (lambda: fit_link([Timing("all-gather", 3, 8.0, math.nan)]), "seconds=nan is not a number"),
        (lambda: fit_link([Timing("all-gather", 3, 0.0, 1.0)]), "timings are of nothing"),
        (lambda: COSTS.encode_seconds(0), "elements=0 must be at least 1"),
        (lambda: COSTS.decode_seconds(5, -1), "entries=-1 must be at least 0"),
        (lambda: COSTS.decode_seconds(math.nan, 5), "elements=nan must be an int"),
        (lambda: profile_systems(workers=[0]), "workers=0 must be at least 1"),
        (lambda: profile_systems(workers=[]), r"workers=\[\] is empty"),
        (lambda: profile_systems(sizes=[2**31]), "indices are int32"),
        (lambda: profile_systems(density=math.nan), "density=nan is not a number"),
        (lambda: profile_systems(density=None), "density=None must be a number"),
        (lambda: profile_systems(repeats=0), "repeats=0 must be at least 1"),
        (lambda: time_exchange(systems.Dense(), 3, 3, warm_up=-1), "warm_up=-1 must be at least 0"),
        (lambda: autotune(jaxsparse.top_k, [0.1], TREE, None, repeats=1.5), "repeats=1.5 must be"),
    ],
)
def test_numbers_out_of_range(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_shell_lists_its_commands(capsys):
    with pytest.raises(SystemExit, match="0"):
        shell.main(["--help"])
    printed = capsys.readouterr().out
    assert "plan" in printed
    assert "profile" in printed
