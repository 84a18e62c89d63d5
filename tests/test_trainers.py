"""Trainers that users have, with the few lines that compress their exchange between hosts."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TRAINERS = ROOT / "benchmarks" / "trainers"


@pytest.fixture
def compare(monkeypatch):
    """The comparison, which scripts beside it import, too."""
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # it takes LLVM less time
    monkeypatch.syspath_prepend(TRAINERS)
    import compare

    return compare


def test_originals_know_nothing_of_the_lines_that_are_added(compare):
    """The original of a script is what is left without its added lines, and without variants'."""
    for name in compare.MESHES:
        script = (TRAINERS / f"{name}.py").read_text()
        original = compare.without(script)
        assert 0 < compare.added(script) <= compare.MOST_LINES.get(name, 8)
        assert "jaxsparse" not in original.partition('"""\n\n')[2]
        assert "\nif VARIANT" not in original
        compile(original, name, "exec")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linen_lm", "equinox_lm"])
def test_a_trainer_needs_few_lines_and_trains_alike(name, compare):
    """Losses are those of GSPMD, and only messages cross hosts."""
    script = (TRAINERS / f"{name}.py").read_text()
    original = compare.run(name, compare.without(script), 4)
    full, small = (compare.run(name, script, 4, density) for density in (1.0, 0.01))
    assert original.losses[-1] < 0.8 * original.losses[0]
    assert compare.furthest(full.losses, original.losses) < compare.TOLERANCE
    assert small.across < 0.05 * original.across
    assert small.inside <= 1.1 * original.inside
    assert small.losses[-1] < small.losses[0]
