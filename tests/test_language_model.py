"""The language model: its text, its embedding's gradient, and a small run."""

import importlib
import json
import math
import subprocess
import sys

import jax
import matplotlib.image
import numpy as np
import pytest
import running
from flax import nnx

FOLDER = running.ROOT / "examples" / "language_model"


@pytest.fixture(scope="module")
def modules():
    """The example's own modules, which it imports from its folder."""
    names = ("corpus", "model", "results", "train")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        others = {name: sys.modules.pop(name) for name in names if name in sys.modules}
        yield {name: importlib.import_module(name) for name in names}
        for name in names:
            del sys.modules[name]
        sys.modules.update(others)


@pytest.fixture(scope="module")
def corpus(modules):
    return modules["corpus"]


@pytest.fixture(scope="module")
def model(modules):
    return modules["model"]


@pytest.fixture(scope="module")
def train(modules):
    return modules["train"]


def run(*flags, cwd):
    env = running.ENV | running.QUICK | {"COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, str(FOLDER / "train.py"), *map(str, flags)],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_embedding_gradient_has_the_rows_of_the_inputs_and_no_others(model):
    lm = model.LanguageModel(words=50, width=8, hidden=8, output=8, rngs=nnx.Rngs(0))
    value_and_grad = jax.jit(nnx.value_and_grad(model.loss))
    for seed in range(5):
        windows = np.random.default_rng(seed).integers(50, size=(3, 5), dtype=np.int32)
        loss, grads = value_and_grad(lm, windows)
        assert float(loss) == pytest.approx(math.log(50), rel=0.2)  # it knows nothing yet
        rows = np.flatnonzero(np.any(grads.embedding.embedding[...] != 0, axis=1))
        np.testing.assert_array_equal(rows, np.unique(windows[:, :-1]))
        assert np.all(np.any(grads.output.kernel[...] != 0, axis=0))  # no word is left out


@pytest.mark.slow
def test_small_run_reports_perplexity_bytes_and_overflow(tmp_path):
    flags = ["--methods", "omni", "s2", "--seeds", 0, 1, "--factors", "nan", 1e-6, 1, 1e3]
    printed = run("--small", *flags, "--embedding-optimizer", "adam", cwd=tmp_path)
    assert "At the edge" not in printed
    out = tmp_path / "out/language_model"
    result = json.loads((out / "results.json").read_text())
    settings, (dense, omni, s2) = result["settings"], result["methods"].values()
    words, width, workers = settings["vocabulary"], settings["width"], settings["workers"]
    assert dense["embedding_bytes"] == 2 * (workers - 1) / workers * 4 * (words * width + 1)
    assert s2["embedding_bytes"] < omni["embedding_bytes"] < dense["embedding_bytes"] / 4
    for method in (omni, s2):
        saved = dense["received_bytes"] - method["received_bytes"]
        assert saved == pytest.approx(dense["embedding_bytes"] - method["embedding_bytes"])
        assert method["overflow"] == 0
    assert dense["overflow"] == 0
    for method in (dense, omni, s2):
        assert method["factor"] == 1  # a run that diverges is not the best one
        perplexities = np.array(method["curves"]["perplexity"])
        assert perplexities.shape == (2, len(method["curves"]["steps"]))
        assert np.all(perplexities[:, -1] < words)
        row = f"{perplexities[:, -1].mean():.1f} ± {perplexities[:, -1].std(ddof=1):.1f}"
        assert row in printed
    assert s2["perplexity"] == pytest.approx(dense["perplexity"], rel=0.05)
    assert omni["perplexity"] == pytest.approx(dense["perplexity"], rel=1e-4)  # exact
    height, width, _ = matplotlib.image.imread(out / "perplexity.png").shape
    assert height > 300
    assert width > 500


@pytest.mark.thorough
def test_every_method_trains_on_a_file_of_tokens_with_three_workers(tmp_path):
    rng = np.random.default_rng(0)
    lines = [" ".join(f"w{i}" for i in rng.zipf(1.3, size=30) % 900) for _ in range(200)]
    (tmp_path / "train").write_text("\n\n".join(lines[:150]))
    (tmp_path / "valid").write_text("\n\n".join(lines[150:]))
    flags = ["--corpus", "train", "--valid", "valid", "--workers", 3, "--steps", 10, "--union", 8]
    run("--small", *flags, cwd=tmp_path)
    result = json.loads((tmp_path / "out/language_model/results.json").read_text())["methods"]
    names = ["dense", "gather", "omni", "s2", "s2 + spardl", "s2 + random"]
    assert list(result) == names
    assert result["gather"]["perplexity"] == pytest.approx(result["dense"]["perplexity"], rel=1e-3)
    assert result["gather"]["overflow"] == 0
    assert result["omni"]["overflow"] > 0  # --union leaves room for too few
    assert result["s2"]["overflow"] > 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--valid", "x"], "--valid needs --corpus"),
        (["--corpus", "missing"], "missing"),
        (["--corpus", "short", "--length", "64"], "--length"),
        (["--small", "--density", "2"], "--density: density=2.0"),
        (["--steps", "0"], "--steps: 0 is out of range: give at least 1"),
    ],
)
def test_wrong_flags_are_named(train, tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short").write_text("\n".join(f"one two {i}" for i in range(20)))
    with pytest.raises(SystemExit):
        train.main(flags)
    assert message in capsys.readouterr().err
