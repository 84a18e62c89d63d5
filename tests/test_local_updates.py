"""The example of local updates: small runs, one after the other and in two processes."""

import json
import sys

import numpy as np
import pytest
import running
from workers import some

SCRIPT = running.ROOT / "examples" / "local_updates" / "train.py"
TINY = ["--width", 8, "--length", 4, "--batch", 1, "--workers", 2, "--eval-every", 6]
METHODS = ("dense", "Streaming H=10")
pytestmark = pytest.mark.slow


def run(*flags, cwd):
    script = SCRIPT.relative_to(running.ROOT / "examples")
    return running.run(script, *flags, cwd=cwd, **running.cache_in(cwd))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the results of a run of two seeds, and of one of them as if of a third."""
    path = tmp_path_factory.mktemp("runs")
    run(*TINY, "--steps", 12, "--seeds", 0, 1, "--json", "a.json", "--methods", *METHODS, cwd=path)
    results = json.loads((path / "a.json").read_text())
    dense = results["methods"]["dense"]
    dense["seeds"] = {"2": dense["seeds"]["1"]}
    (path / "b.json").write_text(json.dumps({**results, "methods": {"dense": dense}}))
    return path


def test_results_of_several_runs_are_shown_together(folder):
    flags = ["--figure", "curves.png", "--time-to", 9, 1]
    shown = run("--show", "a.json", "b.json", *flags, cwd=folder)
    for name in METHODS:
        assert shown.count(f"\n{name} ") == 2  # in both tables
    assert (folder / "curves.png").stat().st_size > 10_000


def test_seconds_with_measured_exchanges(folder):
    measured = {"system": "dense", "rate": "10mbit", "seconds": 3.0, "computing_seconds": 1.0}
    rows = {"rows": [{**measured, "received_bytes": 1000.0}]}
    (folder / "measured.json").write_text(json.dumps(rows))
    flags = ["--measured", "measured.json", "--step-seconds", 0.5, "--time-to", 9]
    shown = run("--show", "a.json", *flags, "--methods", "dense", cwd=folder)
    received = json.loads((folder / "a.json").read_text())["methods"]["dense"][
        "received_bytes_a_step"
    ]
    part = shown.partition("Exchanges as measured at 10mbit, 0.5 s a step:")[2]
    assert part[part.index("\ndense") :].split()[1] == f"{6 * (1.5 + received * 2 / 1000):.0f}"


def test_seconds_over_a_link_are_those_of_the_bytes_received(folder):
    links = ["--link", "1kbit", "1Mbit", "--step-seconds", 0.5, "--time-to", 9]
    shown = run("--show", "a.json", *links, cwd=folder)
    dense = json.loads((folder / "a.json").read_text())["methods"]["dense"]
    for text, bandwidth in (("1kbit", 125), ("1Mbit", 125_000)):
        seconds = 0.5 + dense["received_bytes_a_step"] / bandwidth
        part = shown.partition(f"Over {text}, 0.5 s")[2]
        row = part[part.index("\ndense") :].split()
        assert row[1:3] == [f"{6 * seconds:.0f}", "(6)"]  # --eval-every
        assert row[3] == f"{12 * seconds:.0f}"


def test_the_rate_that_ends_lowest_is_taken(folder):
    rates = ["--lr", 1e-9, 0.02, "--outer-lr", 0.5, 1, "--tune-steps", 12]
    methods = ["--methods", "dense", "mean H=10", "--json", "tuned.json"]
    run(*TINY, "--steps", 6, *rates, *methods, cwd=folder)
    found = json.loads((folder / "tuned.json").read_text())["methods"]
    assert found["dense"]["rates"] == "0.02"
    assert set(found["dense"]["tried"]) == {"1e-09", "0.02"}
    assert len(found["mean H=10"]["tried"]) == 4
    assert found["mean H=10"]["rates"].startswith("0.02, outer")


@pytest.mark.parametrize("name", some(METHODS, METHODS[1:], slow=()))
def test_two_processes_train_as_two_simulated_workers_do(folder, name):
    flags = [*TINY, "--steps", 12, "--json", folder / "two.json", "--methods", name]
    env = running.ENV | running.QUICK | {"JAX_PLATFORMS": "cpu"}
    done, _ = running.in_processes([sys.executable, SCRIPT, *flags], 2, env=env)
    assert done.status == 0, done.report
    two, one = (json.loads((folder / f).read_text())["methods"] for f in ("two.json", "a.json"))
    here, there = two[name]["seeds"]["0"], one[name]["seeds"]["0"]
    np.testing.assert_allclose(here["held_out"], there["held_out"], rtol=2e-4)
    assert np.all(np.diff([0, *here["seconds"]]) > 0)
    assert two[name]["received_bytes_a_step"] == one[name]["received_bytes_a_step"]
