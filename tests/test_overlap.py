"""Overlap: the exchange of a bucket depends on that bucket's gradients alone."""

import functools
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import running
from contract import CASES
from workers import on_workers, some

import jaxsparse
from jaxsparse import error_feedback

SHAPES = {"kernel": (20, 31), "bias": (5,)}
STEPS = 3
REDUCERS = {name: case.reducer for name, case in CASES.items()}
REDUCERS["all blocks"] = CASES["omni_reduce_little_room"].full  # its momentum is that of the mean


@functools.cache
def runner(name, overlap, momentum, workers, way):
    tx = error_feedback(
        REDUCERS[name],
        momentum=momentum,
        overlap=overlap,
        bucket_size=300,
        is_dense=lambda path, shape: "bias" in path,
    )

    def run(grads):
        state = tx.init({name: jnp.zeros(shape) for name, shape in SHAPES.items()})
        if way == "shard_map":
            state = jaxsparse.local(state)
        state, updates = jax.lax.scan(lambda s, g: tx.update(g, s)[::-1], state, grads)
        return updates, state

    return on_workers(run, workers, way)


@pytest.mark.parametrize(
    "case",
    some(
        [
            ("spardl", 0.5, 3, "vmap"),
            ("all blocks", 0.5, 2, "vmap"),
            ("sparcml", None, 1, "vmap"),
            ("qsgd", None, 5, "vmap"),
            ("true_top_k", 0.5, 8, "shard_map"),
            ("top_k", 0.5, 3, "shard_map"),
        ],
        [("top_k", 0.5, 3, "shard_map")],
    ),
    ids=str,
)
@pytest.mark.parametrize("broken", [None, *SHAPES])
def test_updates_and_skipped_steps_are_those_in_order(case, broken):
    name, momentum, workers, way = case
    rng = np.random.default_rng(workers)
    grads = {
        name: rng.normal(size=(workers, STEPS, *shape)).astype(np.float32)
        for name, shape in SHAPES.items()
    }
    if broken:
        grads[broken][-1, 1, -1] = np.inf  # in one bucket of one worker
    grads = jax.tree.map(jnp.asarray, grads)
    expected = runner(name, None, momentum, workers, way)(grads)
    found = runner(name, True, momentum, workers, way)(grads)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert np.all(np.asarray(found[1].skipped) == (broken is not None))
    moves = np.asarray(found[0]["kernel"]).any(axis=(2, 3))
    np.testing.assert_array_equal(moves, [[True, broken is None, True]] * workers)


def test_what_overlaps_nothing_is_refused():
    with pytest.raises(ValueError, match="overlap=1 must be True, False or None"):
        jaxsparse.top_k(0.1, overlap=1)
    with pytest.raises(ValueError, match="overlap=True would change nothing: give one of them"):
        jaxsparse.top_k(0.1, overlap=True, delay=1)


@pytest.mark.slow
def test_a_compiled_bucket_depends_on_its_own_gradients_alone(tmp_path):
    """Each of four layers is a bucket. Runs benchmarks/overlap.py as users do."""
    script = running.ROOT / "benchmarks" / "overlap.py"
    flags = ["--method", "sparcml", "--width", "64", "--bucket-size", "4096"]
    done = subprocess.run(
        [sys.executable, script, *flags, "--json", tmp_path / "result.json"],
        env=running.ENV | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    modes = json.loads((tmp_path / "result.json").read_text())["modes"]
    rows = lambda mode: [r for r in modes[mode]["collectives"] if r["operand_bytes"] > 12]
    assert [r["op"] for r in rows("overlap")] == ["all-gather"] * 4
    # Layer after layer, from the last one, and the first one needs most of the backward pass.
    needed = [r["backward"] for r in rows("overlap")]
    assert 0 < 2 * min(needed) < max(needed)
    assert len(set(needed)) == 4
    assert len({r["backward"] for r in rows("in order")}) == 1
    assert min(r["backward"] for r in rows("in order")) >= max(needed)
