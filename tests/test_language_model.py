"""benchmarks/language_model.py: its embedding's gradient, and a small run."""

import importlib.util
import json
import math
import subprocess
import sys

import jax
import numpy as np
import pytest
import running
from flax import nnx

SCRIPT = running.ROOT / "benchmarks" / "language_model.py"


@pytest.mark.slow
def test_embedding_gradient_has_the_rows_of_the_inputs_and_no_others(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    spec = importlib.util.spec_from_file_location("language_model", SCRIPT)
    model = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(model)
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
    flags += ["--small", "--embedding-optimizer", "adam", "--json", tmp_path / "rows.json"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, flags)],
        env=running.ENV | running.QUICK,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "rows.json").read_text())
    settings, (dense, omni, s2) = result["settings"], result["rows"].values()
    words, width, workers = 2048, settings["width"], settings["workers"]
    assert dense["embedding_bytes"] == 2 * (workers - 1) / workers * 4 * (words * width + 1)
    assert s2["embedding_bytes"] < omni["embedding_bytes"] < dense["embedding_bytes"] / 4
    for row in (omni, s2):
        saved = dense["received_bytes"] - row["received_bytes"]
        assert saved == pytest.approx(dense["embedding_bytes"] - row["embedding_bytes"])
    for row in (dense, omni, s2):
        assert row["overflow"] == 0
        assert row["factor"] == 1  # a run that diverges is not the best one
        assert len(row["perplexity"]) == 2
        assert max(row["perplexity"]) < words
        assert f"{np.mean(row['perplexity']):.1f} ± {np.std(row['perplexity'], ddof=1):.1f}" in (
            done.stdout
        )
    assert s2["perplexity"] == pytest.approx(dense["perplexity"], rel=0.05)
    assert omni["perplexity"] == pytest.approx(dense["perplexity"], rel=1e-4)  # exact
