"""benchmarks/chaos.py: a short run with processes."""

import importlib.util
import json
import subprocess
import sys

import pytest
from running import ENV, QUICK, ROOT


@pytest.mark.slow
def test_a_run_in_which_an_island_is_killed(tmp_path):
    results, log = tmp_path / "results.jsonl", tmp_path / "log"
    small = [*("--islands", 2, "--width", 16, "--batch", 2, "--quorum", 1, "--grace", 2)]
    times = [*("--seconds", 20, "--period", 8, "--away", 4, "--pause", 0.05)]
    over = "s3" if importlib.util.find_spec("moto") else "folder"
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "benchmarks" / "chaos.py"), "--story", "kill"),
            *map(str, [*small, *times, "--over", over, "--jsonl", results, "--log", log]),
        ],
        env=ENV | QUICK | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr + log.read_text()
    (found,) = map(json.loads, results.read_text().splitlines())
    assert (found["story"], found["failures"], found["ended"]) == ("kill", 2, [])
    assert found["unlike"] == []
    assert 0 < found["counted"] <= found["made"]
    assert any(row.startswith("| kill |") for row in done.stdout.splitlines())
