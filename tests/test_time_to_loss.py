"""benchmarks/time_to_loss.py: which runs count, without training any."""

import argparse
import importlib
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))
frontier, time_to_loss = map(importlib.import_module, ("frontier", "time_to_loss"))
sys.path.remove(str(BENCHMARKS))

RECIPE = "muon, local 10, sign"
ARGS = argparse.Namespace(size="136k", until=1.5, steps=100, eval_every=20, seeds=[0, 1], rate=0.02)


def line(rate, seed, held_out):
    """A run, evaluated each 20 steps."""
    given = {"recipe": RECIPE, **time_to_loss.setting(ARGS), "rate": rate, "seed": seed}
    steps = [20 * (i + 1) for i in range(len(held_out))]
    return {**given, "steps": steps, "held_out": held_out, "seconds": 1.0}


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "runs.jsonl"
    monkeypatch.setattr(time_to_loss, "FILE", path)
    return lambda *runs: path.write_text("".join(json.dumps(run) + "\n" for run in runs))


def test_the_first_rate_to_reach_the_loss_counts_with_all_its_seeds(file):
    file(
        line(0.01, 0, [2.0, 1.8, 1.6, 1.5]),
        line(0.02, 0, [2.0, 1.6, 1.4]),
        line(0.02, 1, [2.0, 1.9, 1.8, 1.7, 1.6]),  # it falls short
        line(0.04, 0, [2.0, math.nan]),  # it diverged
        {**line(0.08, 0, [1.0]), "planned": 50},  # another plan
    )
    runs, exchanges = time_to_loss.reached(ARGS)
    run = runs[RECIPE]
    assert run.rates == "0.02"
    assert list(run.curves) == [0, 1]
    assert exchanges == {RECIPE: ("quantized:sign", 10)}
    assert run.ends.tolist() == [1.4, 1.6]
    # Curves of unlike lengths stand in one table. A loss that a seed missed has no time.
    assert time_to_loss.table(runs, 8).row_count == 1
    cells = lambda goal: [*time_to_loss.times(runs, [goal]).columns[1].cells]
    assert cells(1.5) == ["-"]
    assert cells(1.6) == ["0 (70)"]


def test_rates_are_tuned_for_the_fewest_steps_and_no_run_is_done_twice(file, monkeypatch):
    file(line(0.02, 0, [2.0, 1.7, 1.5]))
    asked = []

    class Trainer:
        """Losses of its runs are known."""

        def __init__(self, recipe, size):
            pass

        def run(self, rate, seed, steps, eval_every, stops):
            losses = {0.01: [2.1, 1.9, 1.8, 1.4], 0.04: [1.9, 1.5], 0.08: [9.0, np.nan]}[rate]
            if seed == 1:
                losses = [1.9, 1.8, 1.7, 1.6, 1.5]
            done = []
            for loss in losses:
                done.append(20 * len(done) + 20)
                if stops(done[-1], loss):
                    break
            asked.append((rate, seed, done[-1]))
            return frontier.Curve(done, losses[: len(done)], 0.0)

    monkeypatch.setattr(time_to_loss, "Trainer", Trainer)
    time_to_loss.train(time_to_loss.Recipe.parsed(RECIPE), ARGS)
    # 0.02 is known; 0.01 stops where that had reached the loss; others are not longer than 0.04.
    assert asked == [(0.01, 0, 60), (0.04, 0, 40), (0.08, 0, 40), (0.04, 1, 100)]
    assert len(time_to_loss.lines()) == 5


def test_a_warm_start_is_refused():
    warm = time_to_loss.Recipe.parsed("muon, local 10, sign, warm 10 %")
    with pytest.raises(ValueError, match="warm starts are not counted"):
        time_to_loss.train(warm, ARGS)
