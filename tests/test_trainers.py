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
    for name in (*compare.MESHES, "maxtext_islands"):
        script = (TRAINERS / f"{name}.py").read_text()
        original = compare.without(script)
        assert 0 < compare.added(script) <= compare.MOST_LINES.get(name, 8)
        assert "jaxsparse" not in original.partition('"""\n\n')[2]
        assert "\nif VARIANT" not in original
        compile(original, name, "exec")


def test_a_block_belongs_to_the_variants_that_it_names(compare):
    block = 'if VARIANT in ("one", "other"):\n    x = 2\n\n    y = 3\n\n'
    script = f"x = 1  # +\n{block}print(x)\n"
    assert compare.without(script) == "print(x)\n"
    counted = [compare.added(script, name) for name in ("one", "other", "on", "plain")]
    assert counted == [3, 3, 1, 1]


def test_a_row_of_a_variant_says_what_differs(compare, monkeypatch, capsys):
    """Variants that stop are compared with the run that does not, and with each other's 1 %."""
    shown = {"plain": [4.0, 2.0], "resumed": [4.0, 2.0], "clip": [4.0, 3.0]}
    asked = []

    def run_variants(name, script, variants, steps, density=1.0, reads_bytes=True):
        asked.append((script, variants, density, reads_bytes))
        return {v: compare.Run(shown[v], 10 * density, 7) for v in variants if v in shown}

    monkeypatch.setattr(compare, "run_variants", run_variants)
    assert compare.print_variants("trainer", "a = 1  # +\nb\n", ["resumed", "plain"], 2)
    (original, full, small), text = asked, capsys.readouterr().out
    assert original == ("b\n", ["plain"], 1.0, True)
    assert (full[1:], small[1:]) == ((["resumed", "plain"], 1.0, False), (full[1], 0.01, True))
    assert "| resumed | 1 | 4.000000 | 2.000000 | 0.0e+00 | 10 | 0 | 7 | 7 |" in text
    assert "resumed and plain, 1 % sent: last loss 2.000000, 0.0e+00" in text
    shown["resumed"] = [4.0, 2.1]
    assert not compare.print_variants("trainer", "b\n", ["resumed", "plain"], 2)
    del shown["clip"]
    assert not compare.print_variants("trainer", "b\n", ["plain", "clip"], 2)
    assert "| clip | 0 | fails |" in capsys.readouterr().out


def test_a_variant_that_fails_is_left_out(compare, capsys):
    """A trainer reads its variant from the environment."""
    losses = "{'plain': 2.0, 'clip': 3.0}[os.environ['VARIANT']]"
    script = f"import os\nprint('loss', 1, {losses})\n"
    found = compare.run_variants("keras_fit", script, ["plain", "other", "clip"], 1, 1.0, False)
    assert found == {"plain": compare.Run([2.0], 0, 0), "clip": compare.Run([3.0], 0, 0)}
    assert "failed other" in capsys.readouterr().err


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
