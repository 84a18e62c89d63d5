"""The rule by which benchmarks find learning rates, and a benchmark that goes on from its file."""

import importlib
import math
import subprocess
import sys

import pytest
import running

sys.path.insert(0, str(running.ROOT / "benchmarks"))
rates = importlib.import_module("rates")


@pytest.mark.parametrize("start", [0.01, 0.64, 100.0])
def test_the_best_rate_lies_between_two_that_were_tried(start):
    """Runs diverge from 1 on. The best power of two times `start` is the nearest to 0.04."""
    tried = []

    def loss(rate):
        tried.append(rate)
        return math.nan if rate >= 1 else abs(math.log(rate / 0.04))

    best = rates.tuned(loss, start)
    assert 0.04 / 2**0.5 <= best <= 0.04 * 2**0.5
    assert {best / 2, best * 2} <= {*tried}
    assert len(tried) == len({*tried})


def test_a_row_that_always_diverges_ends():
    with pytest.raises(ValueError, match="down to a millionth of it diverge"):
        rates.tuned(lambda rate: math.inf, 0.1)


@pytest.mark.slow
def test_rows_that_a_file_has_are_not_trained_again():
    file = running.ROOT / "benchmarks" / "results" / "training_digits.json"
    before = file.read_text()
    flags = ["--task", "digits", "--json", str(file), "--only", "dense", "DRAGONN"]
    script = running.ROOT / "benchmarks" / "training.py"
    done, other = (
        subprocess.run(
            [sys.executable, script, *flags, *more], capture_output=True, text=True, env=running.ENV
        )
        for more in ([], ["--steps", "7"])
    )
    assert done.returncode == 0, done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()[-2:]] == [
        ["dense", "0.101"],
        ["DRAGONN", "0.087"],
    ]
    assert "has rows of other settings" in other.stderr
    assert file.read_text() == before
