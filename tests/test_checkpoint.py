"""States through Orbax: into a new process bit for bit, to other workers, past a SIGKILL."""

import os
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
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
        settings = ENV | cache_in(tmp_path)
        said = running.python(SCRIPT, what, tmp_path, *names, settings=settings, timeout=600)
    assert said.splitlines() == [f"{name} equal" for name in names]


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


@pytest.mark.slow
def test_processes_go_on_with_what_others_saved(tmp_path):
    """Means over workers are kept, and all processes agree after the next steps."""
    done, names = 0, ("spardl", "ef21_sgdm", "sparse_loco")
    command = [sys.executable, SCRIPT, "moved", tmp_path, *names]
    for processes in (3, 2):
        env = ENV | cache_in(tmp_path)
        outcome, lines = running.in_processes(command, processes, env=env, timeout=300)
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
