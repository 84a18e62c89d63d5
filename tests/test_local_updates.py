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
