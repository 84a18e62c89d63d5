"""The example in several processes: equal training, shares of the data, the loss of a process."""

import argparse
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from workers import few, mesh

from jaxsparse.launch import launch

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "multihost"
TINY = ["--hidden", "16", "--steps", "4", "--eval-every", "2", "--batch-size", "24"]
ENV = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {
    "PYTHONPATH": str(ROOT),
    "JAX_PLATFORMS": "cpu",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
}


@pytest.fixture(scope="module")
def modules():
    """The example's own modules, which it imports from beside it."""
    names = ("processes", "shares", "train", "digits")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        others = {name: sys.modules.pop(name) for name in names if name in sys.modules}
        path = list(sys.path)
        train = importlib.import_module("train")
        yield {"train": train, **{name: sys.modules[name] for name in names}}
        sys.path[:] = path
        for name in names:
            del sys.modules[name]
        sys.modules.update(others)


def run(processes, devices, *flags, folder):
    command = [sys.executable, str(FOLDER / "train.py"), *TINY, *flags]
    command += ["--json", str(folder / f"{processes}.json")]
    shown = []
    outcome = launch(
        command,
        processes,
        devices_per_process=devices,
        timeout=120,
        env=ENV,
        on_output=lambda line, stream: shown.append(line),
    )
    assert outcome.returncode == 0, str(outcome)
    return json.loads((folder / f"{processes}.json").read_text()), shown


@pytest.mark.slow
@pytest.mark.parametrize("method", few(["spardl", "sketched_sgd"], ["spardl"]))
def test_processes_train_as_the_devices_of_one(tmp_path, method):
    flags = ["--method", method, "--compression", "2"]
    several, shown = run(2, 2, *flags, folder=tmp_path)
    one, _ = run(1, 4, *flags, folder=tmp_path)
    assert (several["processes"], several["workers"], several["rounds"]) == (2, 4, one["rounds"])
    assert several["received_bytes"] == one["received_bytes"] > 0
    assert [point["step"] for point in several["points"]] == [2, 4]
    for mine, other in zip(several["points"], one["points"]):
        np.testing.assert_allclose(mine["loss"], other["loss"], rtol=1e-5)
        assert abs(mine["accuracy"] - other["accuracy"]) < 0.01
    assert shown[0].startswith(f"{method}: 1,482 parameters, 4 workers in 2 processes, ")
    assert [line.partition(":")[0] for line in shown[1:]] == ["step 2", "step 4"]


def free_port():
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


@pytest.fixture
def by_hand(tmp_path):
    """Starts processes that find each other by flags, and waits until all train."""
    started = []

    def start(processes):
        place = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", str(processes)]
        place += [*TINY, "--method", "dense", "--steps", "1000000", "--eval-every", "10"]
        for i in range(processes):
            with (tmp_path / str(i)).open("w") as output:
                command = [sys.executable, "-u", FOLDER / "train.py", *place, "--process-id"]
                started.append(
                    subprocess.Popen(
                        [*command, str(i)], env=ENV, stdout=output, stderr=subprocess.STDOUT
                    )
                )
        deadline = time.monotonic() + 120
        while "step 20:" not in (tmp_path / "0").read_text():
            assert time.monotonic() < deadline
            assert all(process.poll() is None for process in started)
            time.sleep(0.1)
        return started

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("victim", few([0, 1], [1]))
def test_a_killed_process_ends_the_others_at_once(tmp_path, by_hand, victim):
    processes = by_hand(3)
    processes[victim].kill()
    for i in {0, 1, 2} - {victim}:
        assert processes[i].wait(timeout=15) > 0
        assert "Another process was probably lost" in (tmp_path / str(i)).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("victim", few([0, 1], [1]))
def test_a_silent_host_ends_the_others_within_half_a_minute(tmp_path, by_hand, victim):
    processes = by_hand(3)
    processes[victim].send_signal(signal.SIGSTOP)  # as a host without power: nothing is closed
    for i in {0, 1, 2} - {victim}:
        assert processes[i].wait(timeout=30) == -signal.SIGABRT
        said = (tmp_path / str(i)).read_text()
        assert "another task died" in said
        assert victim == 0 or f"stopped sending heartbeats):\n{victim}\n" in said


FIND = "import jax; jax.distributed.initialize(); print(jax.process_index(), jax.process_count())"


def slurm(rank, port):
    return {
        "JAX_COORDINATOR_PORT": port,
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": "0",
    }


def open_mpi(rank, port):
    return {
        "JAX_COORDINATOR_PORT": port,
        "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1,10.148.0.1:34911",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    }


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [slurm, open_mpi])
def test_jax_finds_the_cluster(cluster):
    port = str(free_port())
    started = [
        subprocess.Popen(
            [sys.executable, "-c", FIND],
            env=ENV | cluster(rank, port),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        printed = [process.communicate(timeout=60)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert printed == ["0 2\n", "1 2\n"]


def test_shares_are_what_the_devices_hold(modules):
    shares, digits = modules["shares"], modules["digits"]
    data = digits.Digits(
        np.arange(10 * 64, dtype=np.float32).reshape(10, 64), np.arange(10, dtype=np.int32)
    )
    split = NamedSharding(mesh(3), PartitionSpec("data"))
    np.testing.assert_array_equal(shares.own_rows(12, split), np.arange(12))

    whole = shares.whole(data, split)
    np.testing.assert_array_equal(whole.labels, [*range(10), -1, -1])
    np.testing.assert_array_equal(whole.images[:10], data.images)

    drawn = list(shares.batches(data, 6, 2, seed=3, sharding=split))
    wanted = list(digits.batches(data, 6, 2, seed=3))
    for batch, rows in zip(drawn, wanted, strict=True):
        assert batch.images.sharding == split
        np.testing.assert_array_equal(batch.images, rows.images)
        np.testing.assert_array_equal(batch.labels, rows.labels)


def test_every_method_takes_the_flags_it_is_given(modules):
    train = modules["train"]
    params = {"kernel": jax.ShapeDtypeStruct((64, 32), np.float32)}
    args = train.flags().parse_args(["--compression", "2"])
    for method in train.METHODS:
        args.method = method
        jax.eval_shape(train.make_method(args, 2048).init, params)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--process-id", "1"], "give all three or none"),
        (["--coordinator", "host", "--num-processes", "2", "--process-id", "1"], "give HOST:PORT"),
        (
            ["--coordinator", "host:1", "--num-processes", "2", "--process-id", "2"],
            "--process-id 2: give 0 to 1, as --num-processes is 2",
        ),
        (["--heartbeat", "1"], "--heartbeat 1: give at least 2 seconds"),
    ],
)
def test_bad_flags(modules, capsys, flags, message):
    parser = argparse.ArgumentParser()
    modules["processes"].add_flags(parser)
    with pytest.raises(SystemExit):
        modules["processes"].join(parser.parse_args(flags), parser)
    assert message in capsys.readouterr().err
