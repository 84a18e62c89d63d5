"""Gradients that overflow on one worker skip the step on all, and the example lowers its scale."""

import re

import pytest
from running import run


@pytest.mark.slow
def test_the_scale_falls_from_too_high_and_training_goes_on(tmp_path):
    flags = ["--devices", 3, "--hidden", 64, "--steps", 60, "--raise-every", 20, "--lr", 0.005]
    printed = run("loss_scaling.py", *flags, cwd=tmp_path)
    skips = re.findall(r"step (\d+): .* skipped by all; loss scale (\d+)", printed)
    steps, scales = zip(*((int(step), float(scale)) for step, scale in skips))
    # The scale is halved at each of the first steps, until the largest gradient fits float16.
    begun = len([i for i, step in enumerate(steps, start=1) if step == i])
    assert begun >= 3
    assert list(scales[:begun]) == [2.0**24 / 2**i for i in range(1, begun + 1)]
    last = printed.splitlines()[-1]
    assert last.startswith(f"60 steps, {len(skips)} skipped")
    assert len(skips) < 20
    assert float(re.search(r"accuracy ([\d.]+) %", last)[1]) > 80


@pytest.mark.thorough
def test_a_scale_that_fits_skips_nothing_and_is_raised(tmp_path):
    flags = ["--simulate", 4, "--hidden", 64, "--steps", 20, "--scale", 8, "--raise-every", 10]
    printed = run("loss_scaling.py", *flags, cwd=tmp_path)
    assert "20 steps, 0 skipped, loss scale 32" in printed
