"""SparDL over many steps: global residuals lose nothing, and train better than others."""

import functools
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import running
from workers import finished, some

from jaxsparse.collectives.spardl import Adaptation
from jaxsparse.systems.spardl import SparDL

WORKERS, STEPS, SIZE = 14, 50, 997
FORMS = [(1, "recursive"), (2, "recursive"), (2, "bruck"), (7, "bruck"), (14, "bruck")]


def make(teams, gather, residuals="global"):
    # "exact" picks the same few elements, and compiles in half the time.
    return SparDL(0.05, teams=teams, gather=gather, residuals=residuals, selection="exact")


@functools.cache
def feedback_loop(reducer, unit):
    """A compiled function of gradients[step, worker, d]. It returns each step's inputs and outcome.

    Residuals are rounded to multiples of `unit` before the next step, which then divides them
    exactly.
    """
    exchange = jax.vmap(
        lambda x, state: finished(reducer, x, state),
        in_axes=(0, None),
        axis_name="data",
        axis_size=WORKERS,
    )

    def step(carry, gradient):
        residual, state = carry
        x = jnp.round(residual / unit) * unit + gradient
        reduced = exchange(x, state)
        state = jax.tree.map(lambda s: s[0], reduced.state)
        return (reduced.residual, state), (x, reduced.mean, reduced.residual, state)

    start = jnp.zeros((WORKERS, SIZE)), reducer.init(SIZE)
    return jax.jit(lambda gradients: jax.lax.scan(step, start, gradients)[1])


def gradients(unit, seed=0):
    """Multiples of `unit`, heavy-tailed, and with a direction that persists."""
    rng = np.random.default_rng(seed)
    persistent = rng.normal(size=SIZE) ** 3
    noise = rng.normal(size=(STEPS, WORKERS, SIZE)) ** 3
    return np.clip(np.rint(4 * (persistent + noise)), -200, 200).astype(np.float32) * unit


def follow(reducer, unit):
    outcome = feedback_loop(reducer, unit)(gradients(unit))
    x, mean, residual, state = jax.tree.map(np.asarray, outcome)
    np.testing.assert_array_equal(mean, np.broadcast_to(mean[:, :1], mean.shape))
    return x.astype(np.float64), mean[:, 0].astype(np.float64), residual.astype(np.float64), state


@pytest.mark.parametrize(
    "form", some(FORMS, [(2, "bruck")], slow=[(1, "recursive"), (14, "bruck")]), ids=str
)
def test_nothing_is_lost_in_50_steps(form):
    teams, gather = form
    unit = WORKERS * teams
    x, mean, residual, state = follow(make(teams, gather), unit)
    assert np.abs(x).sum(axis=1).max() < 2**24  # all sums are exact in float32
    # Means, and shares of what teams discard, are quotients of integers, rounded to float32.
    total = np.rint(mean * WORKERS)
    share = np.rint(residual)
    np.testing.assert_allclose(mean * WORKERS, total, rtol=3e-7)
    np.testing.assert_allclose(residual, share, rtol=3e-7)
    np.testing.assert_array_equal(x.sum(axis=1), total + share.sum(axis=1))
    assert (total != 0).any(axis=1).all()
    if teams == 1:  # nothing is divided, so nothing was rounded on the way
        everything = gradients(unit).sum(axis=(0, 1), dtype=np.float64)
        np.testing.assert_array_equal(everything, total.sum(axis=0) + share[-1].sum(axis=0))
    if gather == "bruck":
        assert len(np.unique(np.rint(state.h))) > 2  # h adapts meanwhile


@pytest.mark.parametrize(
    "form", some([(1, "recursive"), (7, "bruck")], [], slow=[(7, "bruck")]), ids=str
)
def test_partial_and_local_residuals_leak(form):
    teams, gather = form
    leaks = {}
    for rule in ("global", "partial", "local"):
        reducer = make(teams, gather, residuals=rule)
        x, mean, residual, _ = follow(reducer, WORKERS * teams)
        wanted = x.sum(axis=1)
        lost = wanted - WORKERS * mean - residual.sum(axis=1)
        leaks[rule] = np.linalg.norm(lost, axis=1) / np.linalg.norm(wanted, axis=1)
    assert leaks["global"].max() < 1e-6
    assert leaks["partial"].min() > 1e-3
    assert leaks["local"].min() > 1e-2
    assert leaks["local"].mean() > leaks["partial"].mean()


def benchmark(*flags, cwd):
    """The results of benchmarks/spardl.py, run as a user runs it."""
    script = running.ROOT / "benchmarks" / "spardl.py"
    done = subprocess.run(
        [sys.executable, script, *map(str, flags), "--json", "result.json"],
        cwd=cwd,
        env=running.ENV,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((cwd / "result.json").read_text())["results"]


def by_method(results):
    return {result["method"]: result for result in results}


@pytest.mark.thorough
def test_what_residuals_leak_is_made_up_for_by_the_rate(tmp_path):
    results = by_method(benchmark("residuals", "--teams", 7, "--seeds", 0, cwd=tmp_path))
    rows = [results[f"{rule}, 7 teams"] for rule in ("global", "partial", "local")]
    kept, partial, local = (np.mean(row["leak"]) for row in rows)
    assert kept < 1e-6 < 1e-3 < partial < local
    assert results["dense"]["train_loss"][0] < rows[0]["train_loss"][0]
    assert max(row["train_loss"][0] for row in rows) < 0.02
    assert rows[2]["rate"] > rows[0]["rate"]


@pytest.mark.thorough
def test_packed_messages_halve_the_words_and_train_as_well(tmp_path):
    results = by_method(benchmark("codecs", "--seeds", 0, 1, cwd=tmp_path))
    assert results["COO"]["words"] == 2 * results["Packed"]["words"]
    accuracy = {name: np.mean(result["accuracy"]) for name, result in results.items()}
    assert accuracy["dense"] > 0.96
    assert accuracy["COO"] > accuracy["dense"] - 0.01
    assert accuracy["Packed"] > accuracy["dense"] - 0.01


@pytest.mark.slow
def test_entries_after_the_gather_settle_at_what_is_wanted(tmp_path):
    flags = ["--seeds", 0, "--densities", 0.05]
    (run,) = benchmark("entries", *flags, cwd=tmp_path)
    entries, wanted, h = np.array(run["entries"]), run["wanted"], run["h"]
    assert entries[0] < 0.6 * wanted  # h begins as if teams did not overlap, but these do
    assert np.abs(entries[10:].mean() / wanted - 1) < 0.05
    assert np.abs(entries[10:] / wanted - 1).max() < 0.3
    # The recorded entries are those to which the reducer adapted.
    state = Adaptation.start(wanted, 7)
    for step, count in enumerate(entries):
        np.testing.assert_allclose(state.h, h[step], rtol=1e-5)
        state = state.adapt(jnp.float32(count), wanted, 7)
