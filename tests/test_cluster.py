"""The emulated cluster: its parts, and with --thorough and as root a small one."""

import argparse
import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from running import ENV
from workers import some

from jaxsparse import planner
from jaxsparse.traffic import Collective, Conditional, WireBytes

FOLDER = Path(__file__).parents[1] / "benchmarks" / "cluster"


@pytest.fixture(scope="module")
def bench():
    """The benchmark's modules, which import each other by short names."""
    path, before = list(sys.path), set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    names = ("cells", "load", "namespaces", "prediction", "programs", "records", "run", "summary")
    yield types.SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(FOLDER)):
            del sys.modules[name]


def test_rates(bench):
    rate = bench.namespaces.Rate("100mbit")
    assert rate.bits == 1e8
    assert 11.9e6 < rate.payload < 12e6
    assert bench.namespaces.Rate("2.5gbit").bits == 2.5e9
    unshaped = bench.namespaces.Rate("none")
    assert unshaped.bits is unshaped.payload is None
    for name in ("10mbit", "100mbit", "500mbit", "1gbit", "10gbit"):
        rate = bench.namespaces.Rate(name)
        assert rate.burst > rate.segment  # or no packet would ever pass


@pytest.mark.parametrize("name", ["", "fast", "100", "0mbit", "100MB", "-1gbit", "100mbit/s"])
def test_rates_that_are_none(bench, name):
    with pytest.raises(ValueError, match="100mbit or 1gbit, or none"):
        bench.namespaces.Rate(name)


def test_flags(bench, capsys):
    args = bench.run.flags().parse_args(["--params", "1M", "64k", "2^20", "--density", "0.01"])
    assert args.params == [1_000_000, 64_000, 2**20]
    script = ["train.py", "--steps", "3", "--methods", "dense", "a b"]
    assert bench.run.flags().parse_args(["--hosts", "8", "--", *script]).script == script
    for wrong in (
        ["--params", "1.5"],
        ["--params", "0"],
        ["--density", "2"],
        ["--density", "x"],
        ["--rate", "100"],
        ["--hosts", "0"],
        ["--hosts", "1"],
        ["--what", "nothing"],
    ):
        with pytest.raises(SystemExit) as caught:
            bench.run.main(wrong)
        assert caught.value.code == 2
        assert wrong[1] in capsys.readouterr().err


def test_without_root_it_says_so_and_ends(bench, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(bench.namespaces.shutil, "which", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(bench.namespaces.os, "geteuid", lambda: 1000)
    assert bench.run.main(["--json", str(tmp_path / "none.json")]) == 0
    said = capsys.readouterr().err
    assert "needs root" in said
    assert "sudo" in said
    assert not list(tmp_path.iterdir())


def test_without_iproute_it_says_so(bench, monkeypatch):
    monkeypatch.setattr(bench.namespaces.shutil, "which", lambda name: None)
    assert "iproute2" in bench.namespaces.missing()


def test_grid(bench):
    found, refused = bench.cells.grid(
        ["exchange"], ("dense", "top_k", "sketched_sgd", "sketched_sgd:25"), [1000], [0.3, 0.01], 4
    )
    of = lambda system: [cell.density for cell in found if cell.system == system]
    assert of("dense") == of("sketched_sgd:25") == [0.3]  # the same at any density
    assert of("top_k") == [0.3, 0.01]
    assert of("sketched_sgd") == [0.01]
    assert list(refused) == ["sketched_sgd, 1000 parameters, density 0.3"]


def test_teams_divide_the_hosts(bench):
    parser = bench.run.flags()
    found, refused = bench.run.wanted(
        parser.parse_args(["--hosts", "6", "--what", "teams"]), parser
    )
    with_teams = [cell.system.split(":")[1:] for cell in found if cell.system.count(":") == 2]
    assert with_teams == [["2", "bruck"], ["3", "bruck"], ["6", "bruck"], ["2", "recursive"]]
    assert not refused
    _, refused = bench.cells.grid(["exchange"], ["spardl:4:bruck"], [1000], [0.1], 6)
    assert "'4' is no number of teams that divides 6 hosts" in str(refused)


def test_a_format_stands_in_the_name(bench):
    found = bench.cells.budget(bench.cells.Cell("exchange", "quantized:sign", 1000, 0.01), 4)
    assert found.quantizer.name == "sign"
    assert found.rounding == "nearest"
    assert bench.cells.is_fixed("quantized:sign")


@pytest.mark.parametrize(
    "name", ["no_such", "spardl:4", "spardl:3:bruck", "sketched_sgd:much", "quantized:int3"]
)
def test_unknown_systems_are_an_error(bench, name, capsys):
    with pytest.raises(SystemExit):
        bench.run.wanted(bench.run.flags().parse_args(["--systems", name]), bench.run.flags())
    assert name in capsys.readouterr().err


def test_every_system_is_in_the_default_grid(bench):
    parser = bench.run.flags()
    found, refused = bench.run.wanted(parser.parse_args(["--hosts", "8"]), parser)
    assert not refused
    assert {cell.system for cell in found} == set(bench.cells.EVERY)


def test_the_usual_branch_is_predicted(bench):
    def moved(received):
        return WireBytes((Collective("all-gather", "g", ("f32[1]",), 5, 1, received),))

    cheap, dear, dearer = moved(4.0), moved(40.0), moved(400.0)
    both = WireBytes((*moved(8.0).parts, Conditional("c", 1, (dear, cheap))))
    link = planner.Link(latency=0.5, bandwidth=4.0)
    # Two all-gathers of 8 and 4 bytes, in 4 messages each.
    assert bench.prediction.usual_seconds(both, link) == pytest.approx(2 * 4 * 0.5 + 2 + 1)
    # The cheaper branch is `both`, which has a branch of its own: its dear one does not count.
    outer = WireBytes((Conditional("d", 1, (both, dearer)),))
    assert bench.prediction.usual_seconds(outer, link) == pytest.approx(2 * 4 * 0.5 + 2 + 1)


def test_bandwidths_are_held_to_the_rate_of_the_link(bench):
    rate = bench.namespaces.Rate("100mbit")
    held = lambda bandwidth: bench.prediction.fitted(planner.Link(0.002, bandwidth), rate)
    assert held(1e5) == planner.Link(0.002, 0.5 * rate.payload)
    assert held(1e9) == planner.Link(0.002, rate.payload)
    assert bench.prediction.fitted(held(1e5), bench.namespaces.Rate("none")) == held(1e5)


@pytest.fixture
def compilation_cache(tmp_path):
    """A folder in which JAX keeps all programs that it compiles."""
    settings = {
        "jax_enable_compilation_cache": True,
        "jax_compilation_cache_dir": str(tmp_path / "cache"),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}

    def update(values):
        for name, value in values.items():
            jax.config.update(name, value)
        reset_cache()

    update(settings)
    yield tmp_path / "cache"
    update(before)


@pytest.mark.parametrize("what", some(["exchange", "step"], ["step"]))
def test_a_stored_program_runs_as_it_was(bench, what, tmp_path, compilation_cache):
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    cell = bench.cells.Cell(what, "top_k", 3000, 0.1)
    made = bench.programs.program(cell, mesh, alone=False)
    if what == "exchange":  # an exchange that comes from the cache can't be stored
        made.function.lower(*made.carried, *made.fixed).compile()
        assert list(compilation_cache.iterdir())
    store = bench.programs.Store(tmp_path, 1)
    store.compile(cell, False, mesh)
    loaded = store.load(cell, False, mesh)
    carried, fixed = bench.programs.arguments(made)
    before = list(map(np.array, carried))
    after = loaded.run(*carried, *fixed)
    assert [x.shape for x in after] == [x.shape for x in before]
    if what == "exchange":
        mean, residual, gradient = (np.ravel(x) for x in (*after, *fixed))
        np.testing.assert_allclose(mean + residual, gradient, rtol=1e-6)
        assert np.count_nonzero(mean) == 300
    else:
        assert not np.array_equal(after[0], before[0])
    assert loaded.moved.rounds == 0  # a single worker waits for nothing
    assert not store.path(cell, True).exists()


def row(system, seconds, predicted, **other):
    moved = {"received_bytes": 4e5, "interface_received_bytes": 4.1e5, "interface_sent_bytes": 2e5}
    return {
        "what": "exchange",
        "system": system,
        "params": 16_000_000,
        "density": 0.01,
        "hosts": 8,
        "rate": "100mbit",
        "seconds": seconds,
        "computing_seconds": predicted / 2,
        "predicted_network_seconds": predicted / 2,
        "predicted_seconds": predicted,
        "measured_over_predicted": seconds / predicted,
        "collectives": 2,
        "messages": 14,
        "others_cores": 0.1,
        **moved,
        **other,
    }


def test_records_keep_every_row(bench, tmp_path):
    path = tmp_path / "results.json"
    bench.records.Records(path).add(row("dense", 9.0, 9.0))
    bench.records.Records(path).add(row("top_k", 3.0, 2.0))
    bench.records.Records(path).add(row("top_k", 1.0, 2.0))  # the same cell again
    read = bench.records.Records(path)
    assert [(r["system"], r["seconds"]) for r in read.rows] == [("dense", 9.0), ("top_k", 1.0)]
    assert list(tmp_path.iterdir()) == [path]
    assert read.has(row("dense", 1.0, 1.0))
    assert not read.has(row("dense", 1.0, 1.0, rate="1gbit"))
    path.write_text(json.dumps({"something": "else"}))
    with pytest.raises(ValueError, match="no file of this benchmark's results"):
        bench.records.Records(path)


def test_ranking_leaves_near_ties_out(bench):
    rows = [row("dense", 9.0, 8.0), row("top_k", 1.0, 2.0), row("spardl", 1.05, 1.0)]
    found = bench.summary.cells(rows)
    assert bench.summary.ranked(found) == (2, 2)
    rows.append(row("gtopk", 2.0, 9.0))  # predicted to be the slowest
    found = bench.summary.cells(rows)
    assert bench.summary.ranked(found) == (4, 5)
    assert bench.summary.ranked(found, "dense") == (2, 3)


def test_statements(bench):
    rows = [
        row("dense", 9.0, 8.0),
        row("spardl", 0.6, 0.5),
        row("spardl_packed", 0.3, 0.3),
        row("top_k", 1.0, 0.5),
        row("sketched_sgd:25", 0.9, 0.8),
        row("qsgd", 11.0, 2.0),
    ]
    said = {claim.text: claim for claim in bench.summary.claims(rows)}

    def holds(part):
        (claim,) = (claim for text, claim in said.items() if part in text)
        return claim.holds

    assert holds("SparDL (spardl_packed) at least 10 times")
    assert holds("top-k all-gather (top_k) at least 10") is False
    assert holds("Sketched-SGD (sketched_sgd:25) at least 10")
    assert holds("the model's fastest that picks large entries")
    assert holds("1.5 times the model's") is False
    assert holds("slower than dense") is False
    assert holds("top_k: bytes from 4 to 8") is None
    peers = [row("spardl_packed", 0.2, 0.2, params=4_000_000)]
    said = {claim.text: claim for claim in bench.summary.claims(peers)}
    assert holds("8 hosts, 100mbit, 4M floats, 1 %: spardl_packed faster")
    assert holds("at most 300 kB")
    assert holds("8 hosts, 100mbit, 4M floats, 1 %: ok_topk no slower") is None


def test_bytes_between_4_and_8_hosts(bench):
    def both(system, at_4, at_8):
        return [
            row(system, 1.0, 1.0, hosts=hosts, rate="none", received_bytes=moved,
                interface_received_bytes=1.03 * moved)
            for hosts, moved in ((4, at_4), (8, at_8))
        ]  # fmt: skip

    for system, at_8, holds in (
        ("top_k", 7.0, True),
        ("top_k", 3.5, False),
        ("sketched_sgd", 3.5, True),
        ("sketched_sgd", 7.0, False),
    ):
        found = bench.summary.claims(both(system, 3.0, at_8))
        (claim,) = (claim for claim in found if claim.text.startswith(f"{system}: bytes"))
        assert claim.holds is holds


def test_tables_and_figures(bench, tmp_path, capsys):
    records = bench.records.Records(tmp_path / "results.json")
    for i, (rate, hosts, density) in enumerate(
        itertools.product(("100mbit", "1gbit", "none"), (4, 8), (0.01, 0.001))
    ):
        if density == 0.01:
            records.add(row("dense", 9.0 + i, 9.0, rate=rate, hosts=hosts))
        records.add(row("top_k", 10.0, 2.0, rate=rate, hosts=hosts, density=density))
    point = {"step": 1, "seconds": 2.5, "loss": 0.1, "accuracy": 0.97}
    records.add_training({"method": "dense", "hosts": 4, "rate": "1gbit", "points": [point],
                          "received_bytes": 6e6})  # fmt: skip
    figures = tmp_path / "figures"
    assert bench.summary.main([str(records.path), "--figures", str(figures)]) == 0
    text = capsys.readouterr().out
    assert "**exchange, 8 hosts, 1gbit, 16,000,000 parameters, density 0.001**" in text
    assert text.count("| dense | 9000 |") == 2  # at both densities
    assert "0.90x, slower" in text
    assert "| dense | 4 | 1gbit | 1 | 2.5 | 97.0 % | 6000 |" in text
    assert sorted(path.name for path in figures.iterdir()) == [
        "cluster_hosts.png",
        "cluster_rate.png",
        "cluster_training.png",
    ]


def test_sparcml_times_are_those_of_its_algorithms(bench):
    rows = [row("dense", 3.0, 3.0), row("sparcml:ring", 2.0, 2.0), row("top_k", 1.0, 1.0)]
    common = {"workers": 8, "size": 16_000_000, "density": 0.01}
    assert bench.summary.sparcml_times(rows) == [
        {"algorithm": "dense", "seconds": 3.0, **common},
        {"algorithm": "ring", "seconds": 2.0, **common},
    ]


def test_load_of_others(bench):
    own = bench.load.Others(os.getpid())
    nobody = bench.load.Others(2**22 + 1)  # no such process: all are others
    start, end = time.perf_counter(), time.process_time() + 0.3
    while time.process_time() < end:
        pass
    elapsed = time.perf_counter() - start
    # The difference is what this process used, whatever share of the cores it got.
    assert elapsed * (nobody.cores() - own.cores()) > 0.2


def _start(path, *flags):
    command = [sys.executable, str(FOLDER / "run.py"), "--json", str(path), *flags]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=ENV,
    )  # fmt: skip


@pytest.mark.thorough
def test_a_small_cluster(bench, tmp_path):
    if lacking := bench.namespaces.missing():
        pytest.skip(f"needs {lacking}")
    path = tmp_path / "results.json"
    with _start(path, "--hosts", "2", "--params", "200k", "--density", "0.01", "--systems",
                "dense", "top_k", "--store", str(tmp_path / "store")) as running:  # fmt: skip
        said, _ = running.communicate(timeout=300)
    assert running.returncode == 0, said
    rows = {row["system"]: row for row in bench.records.Records(path).rows}
    assert set(rows) == {"dense", "top_k"}
    for row in rows.values():
        # Headers are 4.5 % of full packets; the rest is acknowledgements.
        assert 1 <= row["interface_sent_bytes"] / row["received_bytes"] < 1.2
    wire = rows["dense"]["received_bytes"] / bench.namespaces.Rate("100mbit").payload
    assert 0.9 * wire < rows["dense"]["seconds"] < 3 * wire
    _assert_clean()


@pytest.mark.thorough
@pytest.mark.parametrize("ended", ["rank", "run"])
def test_what_is_killed_ends_the_run(bench, tmp_path, ended):
    if lacking := bench.namespaces.missing():
        pytest.skip(f"needs {lacking}")
    lines = []
    with _start(tmp_path / "results.json", "--hosts", "2", "--params", "1M", "--density",
                "0.01", "--systems", "dense", "--repeats", "1000", "--seconds", "1000",
                "--store", str(tmp_path / "store")) as running:  # fmt: skip
        for line in running.stdout:
            lines.append(line)
            if line.startswith("[0] permutation"):
                break
        else:
            pytest.fail("".join(lines))
        reader = threading.Thread(target=lambda: lines.extend(running.stdout))
        reader.start()
        time.sleep(3)
        began = time.monotonic()
        if ended == "rank":
            command = ["ip", "netns", "pids", bench.namespaces.Cluster.name(1)]
            pids = subprocess.run(command, capture_output=True, text=True).stdout.split()
            os.kill(int(pids[0]), signal.SIGKILL)
        else:
            running.send_signal(signal.SIGTERM)
        status = running.wait(timeout=60)
        assert time.monotonic() - began < 30
        reader.join()
    expected = "rank 1 was killed by SIGKILL" if ended == "rank" else "stopped"
    assert expected in "".join(lines)
    assert status == (128 + signal.SIGKILL if ended == "rank" else 130)
    _assert_clean()


def _assert_clean():
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert "jaxsparse-" not in names
    assert not list(Path("/etc/netns").glob("jaxsparse-*"))


def test_argparse_types_say_what_they_want(bench):
    for parse, text in ((bench.run.count, "many"), (bench.run.share, "0"), (bench.run.rate, "1")):
        with pytest.raises(argparse.ArgumentTypeError, match=text):
            parse(text)
