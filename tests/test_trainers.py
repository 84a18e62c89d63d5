"""Trainers that users have, with the few lines that compress their exchange between hosts."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linen_lm", "equinox_lm"])
def test_a_trainer_needs_few_lines_and_trains_alike(name, monkeypatch):
    """Losses are those of GSPMD, and only messages cross hosts."""
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # it takes LLVM less time
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "trainers")
    import compare

    script = (ROOT / "benchmarks" / "trainers" / f"{name}.py").read_text()
    assert compare.added(script) <= compare.MOST_LINES
    assert "jaxsparse" not in compare.without(script).partition('"""\n\n')[2]
    original = compare.run(name, compare.without(script), 4)
    full, small = (compare.run(name, script, 4, density) for density in (1.0, 0.01))
    assert original.losses[-1] < 0.8 * original.losses[0]
    assert compare.furthest(full.losses, original.losses) < compare.TOLERANCE
    assert small.across < 0.05 * original.across
    assert small.inside <= 1.1 * original.inside
    assert small.losses[-1] < small.losses[0]
