"""States through Orbax: into a new process bit for bit, to other workers, past a SIGKILL."""

import functools
import os
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import run_resume
import running
from running import cache_in, patient_loops
from workers import mesh

import jaxsparse
from jaxsparse import reshard, shard

SCRIPT = running.ROOT / "tests" / "run_resume.py"
ENV = (
    running.ENV
    | running.QUICK
    | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(run_resume.WORKERS)}
)
QUICK = ("spardl_adaptive", "warm_up", "delay")


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(QUICK, id="three", marks=pytest.mark.slow),
        pytest.param(
            tuple(name for name in run_resume.CASES if name not in QUICK),
            id="others",
            marks=pytest.mark.slow,
        ),
        pytest.param(tuple(run_resume.LOCAL), id="local", marks=pytest.mark.slow),
    ],
)
def test_a_new_process_goes_on_with_the_same_bits(tmp_path, names):
    for what in ("straight", "resumed"):
        done = subprocess.run(
            [sys.executable, SCRIPT, what, tmp_path, *names],
            env=ENV | cache_in(tmp_path),
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{name} equal" for name in names]


@pytest.mark.slow
def test_a_run_killed_amid_a_save_goes_on_among_others(tmp_path):
    """The launcher of two processes is killed, then one of two, then all of three.

    Before the second start, the newest checkpoint loses what only process 1 reads.
    """
    folder = tmp_path / "checkpoints"
    launcher = [sys.executable, str(running.MULTIHOST / "launch.py")]
    launcher += ["--timeout", "120", "--grace", "0.5"]
    begun = 0
    for processes, victim in ((2, "launcher"), (2, "rank"), (3, "all")):
        command = [*launcher, "-n", str(processes), "--", sys.executable, str(SCRIPT), "hanging"]
        with subprocess.Popen(
            [*command, str(folder)], env=ENV, stdout=subprocess.PIPE, text=True
        ) as process:
            try:
                pids = {}
                for line in process.stdout:
                    rank, word, *numbers = line.split()
                    if word == "found":
                        found, pids[rank] = map(int, numbers)
                    if len(pids) == processes:
                        break
                assert found == begun
                deadline = time.monotonic() + 60
                while not ((folder / str(found + 2)).exists() and half_written(folder)):
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
                kill = {"launcher": [process.pid], "rank": [pids["[1]"]], "all": pids.values()}
                for pid in kill[victim]:
                    os.kill(pid, signal.SIGKILL)
                process.communicate()
            finally:
                process.kill()
        assert half_written(folder)
        begun = found + 2
        if victim == "launcher":
            for file in (folder / str(begun)).glob("state/ocdbt.process_1/d/*"):
                os.truncate(file, file.stat().st_size // 2)
            begun -= 1
    assert begun == 5


@pytest.mark.parametrize(
    ("names", "layouts"),
    [
        pytest.param(("spardl", "sparse_loco"), ((3, 1), (2, 1)), marks=pytest.mark.slow),
        pytest.param(
            ("spardl", "powersgd", "sparse_loco"),
            ((3, 2), (2, 1), (2, 2), (1, 3)),
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["3 to 2", "several devices"],
)
def test_processes_go_on_with_what_others_saved(tmp_path, names, layouts):
    """Means over workers are kept, and all processes agree after the next steps."""
    done = 0
    for processes, devices in layouts:
        outcome, lines = running.in_processes(
            [sys.executable, SCRIPT, "moved", tmp_path, *names],
            processes,
            devices=devices,
            env=ENV | cache_in(tmp_path),
            timeout=300,
        )
        assert outcome.status == 0, outcome.report
        for each in lines:
            assert [line for line in each if line.endswith("agree")] == [
                f"{name} {done} agree" for name in names
            ]
        done += 3


def half_written(folder):
    return any("tmp" in path.name for path in folder.iterdir())


def abstract(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def to_host(tree, folder):
    """The state as NumPy arrays, through a checkpoint."""
    with ocp.CheckpointManager(folder) as saved:
        saved.save(1, args=ocp.args.StandardSave(tree))
    target = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), tree)
    with ocp.CheckpointManager(folder) as saved:
        return saved.restore(1, args=ocp.args.StandardRestore(target))


def test_other_workers_need_reshard(tmp_path):
    """Neither Orbax nor the library invents residuals."""
    tx = jaxsparse.top_k(0.05)
    residual = tx.init({"w": jnp.ones((40, 30))}).residual
    host = to_host(shard(residual, run_resume.mesh()), tmp_path)
    three = shard(residual, mesh(3))
    target = jax.tree.map(abstract, three)
    with (
        ocp.CheckpointManager(tmp_path) as saved,
        patient_loops(),  # without it, what Orbax leaves behind may fail another test
        pytest.raises(ValueError, match=r"Requested shape: \(3, 40, 30\) is not compatible with"),
    ):
        saved.restore(1, args=ocp.args.StandardRestore(target))
    with pytest.raises(ValueError, match=r"jaxsparse\.reshard\(state, mesh\)"):
        shard(host, mesh(3))
    carried = reshard(host, mesh(3))
    assert jax.tree.leaves(jax.tree.map(abstract, carried)) == jax.tree.leaves(target)


COUNTS = (8, 6, 8, 1, 16)  # numbers of workers, one after another
STEPS = 20  # number of steps with each number of workers
BATCH = 48
RATE = 0.1
METHODS = {"plain": None, "momentum": 0.9}


def exchange_of(method, workers):
    return jaxsparse.top_k(0.02, momentum=METHODS[method], workers=workers)


@functools.cache
def program(method, workers):
    tx = exchange_of(method, workers)

    def loss_of(params, images, labels):
        hidden = jax.nn.relu(images @ params["in"] + params["in_bias"][None])
        logits = hidden @ params["out"] + params["out_bias"][None]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    own = jaxsparse.value_and_grad(loss_of, batch_argnums=(1, 2), workers=workers)

    @jax.jit
    def step(state, images, labels):
        params, method_state = state
        loss, grads = own(params, images, labels)
        updates, method_state = tx.update(grads, method_state, params)
        params = jax.tree.map(lambda p, u: p - RATE * u, params, updates)
        return (params, method_state), (loss, grads), updates

    return step


def train(method, seed, counts, folder):
    """Trains with each number of workers in turn. A state goes through a checkpoint and `reshard`.

    Returns:
        The loss of each step. For each number of workers, three vectors of the only compressed
        leaf: the sum of the gradients' means so far, the sum of the updates, and the mean of the
        residuals.
    """
    from sklearn.datasets import load_digits  # which takes two seconds

    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype(np.float32), labels.astype(np.int32)
    rng = np.random.default_rng(seed)
    params = {
        "in": rng.normal(0, 0.2, (64, 32)),
        "in_bias": np.zeros(32),
        "out": rng.normal(0, 0.2, (32, 10)),
        "out_bias": np.zeros(10),
    }
    params = jax.tree.map(np.float32, params)
    state = params, exchange_of(method, counts[0]).init(params)
    losses, sums = [], []
    owed = delivered = 0.0
    for i, workers in enumerate(counts):
        if i and workers != counts[i - 1]:
            state = reshard(to_host(state, folder / str(i)), workers)
        for _ in range(STEPS):
            rows = rng.integers(len(labels), size=BATCH)
            state, local, updates = program(method, workers)(state, images[rows], labels[rows])
            mean = lambda x: np.asarray(x).mean(axis=0, dtype=np.float64)
            loss, grads = jax.tree.map(mean, local)
            losses.append(float(loss))
            owed = owed + grads["in"].ravel()
            delivered = delivered + np.asarray(updates["in"], np.float64).ravel()
        (residual,) = state[1].residual.values()
        rest = np.asarray(residual.value).mean(axis=0, dtype=np.float64).ravel()
        sums.append((owed, delivered, rest))
    return np.array(losses), sums


@pytest.mark.slow
def test_nothing_is_lost_from_8_workers_to_6_8_1_and_16(tmp_path):
    _, sums = train("plain", 0, COUNTS, tmp_path)
    for workers, (owed, delivered, rest) in zip(COUNTS, sums, strict=True):
        scale = np.abs(owed).max()
        assert np.abs(rest).max() > 0.01 * scale  # something is held back each time
        np.testing.assert_allclose(
            delivered + rest, owed, rtol=0, atol=3e-6 * scale, err_msg=str(workers)
        )
