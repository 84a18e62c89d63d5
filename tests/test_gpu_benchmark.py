"""benchmarks/gpu.py on a CPU: it ends in time, and says what it left out and what is wrong."""

import json
import re
import subprocess
import sys
import time

import jax
import pytest
from running import ENV, ROOT

SCRIPT = ROOT / "benchmarks" / "gpu.py"
TINY = ["--platform", "cpu", "--sizes", "10", "11", "--repeat-size", "10", "--params", "40_000"]


def run(*arguments, timeout):
    return subprocess.run(
        [sys.executable, SCRIPT, *TINY, *map(str, arguments)],
        env=ENV,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.mark.thorough
def test_all_stages_run_to_their_end(tmp_path):
    found = tmp_path / "found.json"
    only = ["slot_max", "mean of top_k", "dense"]
    done = run(
        *("--minutes", 4, "--suites", "hashing", "--only", *only, "--repeats", 3),
        *("--json", found),
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(found.read_text())["results"]
    stages = ["device", "tests", "repeats", "kernels", "steps", "forms"]
    assert list(results) == stages
    assert not [row for rows in results.values() for row in rows if "skipped" in row]
    named = {stage: [row for row in rows if "name" in row] for stage, rows in results.items()}
    (suite,) = named["tests"]
    assert suite["status"] == 0
    assert re.match(r"\d+ passed", suite["said"][0])
    assert {row["name"] for row in named["repeats"]} >= {"slot_max", "mean of top_k"}
    assert all(row["times"] == 3 and row["runs"] == 0 for row in named["repeats"])
    assert {(row["name"], row["size"]) for row in named["kernels"]} == {
        ("slot_max", 10),
        ("slot_max", 11),
    }
    assert all(row["ms"] > 0 and row["over_floor"] > 0 for row in named["kernels"])
    assert [(row["name"], row["size"]) for row in named["forms"]] == [("slot_max", 11)]
    (update,) = named["steps"]
    # At least the parameters, and the gradients of 8 workers.
    assert update["planned_bytes"] > 9 * 4 * 16 * (2 * 1024 + 1024)
    block = done.stdout[done.stdout.index("\n## cpu\n") :]
    for title in (
        "Correctness",
        "Replicas",
        "Kernels: ms",
        "Updates of 40000",
        "Forms",
    ):
        assert f"\n### {title}" in block


@pytest.mark.slow
def test_it_ends_in_time_and_names_what_it_left_out(tmp_path):
    start = time.monotonic()
    done = run("--minutes", 0.2, "--stages", "kernels", "steps", timeout=60)
    assert time.monotonic() - start < 20
    assert done.returncode == 0, done.stdout + done.stderr
    assert "- skipped for lack of time: stage steps" in done.stdout


def test_what_is_wrong_is_named(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import gpu

    suite = {"stage": "tests", "name": "a", "failed": "a", "why": "FAILED test_two"}
    decode = {"stage": "repeats", "name": "b", "repeatable": True, "runs": 2, "between_replicas": 0}
    any_order = {**decode, "name": "c", "repeatable": False}
    drifting = {**any_order, "name": "d", "between_replicas": 1}
    results = {"tests": [suite], "repeats": [decode, any_order, drifting]}
    assert gpu.wrong(results) == [
        *("tests: FAILED test_two", "repeats: b differs", "repeats: d differs"),
    ]


@pytest.mark.slow
def test_without_a_gpu_nothing_is_measured_on_the_cpu_instead():
    if jax.default_backend() != "cpu":
        pytest.skip("there is one")
    done = run("--platform", "gpu", "--minutes", 1, timeout=60)
    assert done.returncode == 1
    assert "--platform=gpu, but JAX runs on" in done.stderr
    assert "no device was reached" in done.stdout
    assert "Correctness" not in done.stdout
