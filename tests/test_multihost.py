"""The example in several processes: equal training, shares of the data, losses, checkpoints."""

import argparse
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from running import ENV as OWN, MULTIHOST, QUICK, cache_in, in_processes
from workers import mesh

TINY = ["--hidden", "16", "--steps", "4", "--eval-every", "2", "--batch-size", "24"]
ENV = OWN | QUICK | {"JAX_PLATFORMS": "cpu"}


SAID = re.compile(
    r"(no checkpoint in |resumed after |\d+ workers saved it|step \d+: |\w+: [\d,]+ param).*"
)


def run(processes, devices, *flags, folder):
    command = [sys.executable, str(MULTIHOST / "train.py"), *TINY, *flags]
    command += ["--json", str(folder / f"{processes}.json")]
    env = ENV | cache_in(folder)
    outcome, lines = in_processes(command, processes, devices=devices, timeout=120, env=env)
    assert outcome.status == 0, outcome.report
    return json.loads((folder / f"{processes}.json").read_text()), said(lines[0])


def said(lines):
    """The lines of the trainer, without what libraries may print."""
    found = (SAID.search(line) for line in lines)
    return [match[0] for match in found if match]


LOCAL = ("--local-steps", "2")


@pytest.mark.slow
@pytest.mark.parametrize("local", [(), LOCAL], ids=["gradients", "local"])
def test_processes_train_as_the_devices_of_one(tmp_path, local):
    flags = ["--method", "spardl", "--compression", "2", *local]
    several, shown = run(2, 2, *flags, folder=tmp_path)
    one, _ = run(1, 4, *flags, folder=tmp_path)
    assert (several["processes"], several["workers"], several["rounds"]) == (2, 4, one["rounds"])
    assert several["received_bytes"] == one["received_bytes"] > 0
    assert [point["step"] for point in several["points"]] == [2, 4]
    for mine, other in zip(several["points"], one["points"]):
        np.testing.assert_allclose(mine["loss"], other["loss"], rtol=1e-5)
        assert abs(mine["accuracy"] - other["accuracy"]) < 0.01
    assert shown[0].startswith("spardl: 1,482 parameters, 4 workers in 2 processes, ")
    assert [line.partition(":")[0] for line in shown[1:]] == ["step 2", "step 4"]


def free_port():
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


@pytest.fixture
def by_hand(tmp_path):
    """Starts processes that find each other by flags, and waits until all train."""
    started = []

    def start(processes, *flags):
        place = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", str(processes)]
        place += [*TINY, "--method", "dense", "--steps", "1000000", "--eval-every", "10", *flags]
        for i in range(processes):
            with (tmp_path / str(i)).open("w") as output:
                command = [sys.executable, "-u", MULTIHOST / "train.py", *place, "--process-id"]
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
def test_a_killed_process_ends_the_others_at_once(tmp_path, by_hand):
    processes = by_hand(3)
    processes[1].kill()
    # Who loses a connection says so and leaves. JAX aborts who hears of the loss before that.
    words = {1: "Another process was probably lost", -signal.SIGABRT: "another task died"}
    for i in (0, 2):
        status, said = processes[i].wait(timeout=15), (tmp_path / str(i)).read_text()
        assert status in words, said
        assert words[status] in said


@pytest.mark.slow
def test_a_silent_host_ends_the_others_within_half_a_minute(tmp_path, by_hand):
    processes = by_hand(3)
    processes[1].send_signal(signal.SIGSTOP)  # as a host without power: nothing is closed
    for i in (0, 2):
        assert processes[i].wait(timeout=30) == -signal.SIGABRT
        said = (tmp_path / str(i)).read_text()
        assert "another task died" in said
        assert "stopped sending heartbeats):\n1\n" in said


def steps_in(folder):
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def read(folder, step):
    """Path and array of each leaf of a state."""
    with ocp.CheckpointManager(
        folder, item_handlers={"state": ocp.StandardCheckpointHandler()}
    ) as saved:
        shapes = saved.item_metadata(step)["state"].tree
        target = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
        restore = ocp.args.Composite(state=ocp.args.StandardRestore(target))
        return jax.tree_util.tree_leaves_with_path(saved.restore(step, args=restore).state)


def without_seconds(points):
    return [{name: x for name, x in point.items() if name != "seconds"} for point in points]


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_bits(tmp_path):
    flags = ["--steps", "12", "--eval-every", "4", "--checkpoint-every", "5", "--keep", "9"]
    flags += ["--density", "0.1", "--resume", "--checkpoint-dir"]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    straight, shown = run(2, 1, *flags, str(whole), folder=tmp_path)
    assert shown[0] == f"no checkpoint in {whole}: from the start"
    assert steps_in(whole) == [5, 10, 12]
    shutil.copytree(whole, stopped, ignore=shutil.ignore_patterns("10", "12"))
    resumed, shown = run(2, 1, *flags, str(stopped), folder=tmp_path)
    assert shown[0] == "resumed after step 5 of 12"
    assert [line.partition(":")[0] for line in shown[2:]] == ["step 8", "step 12"]
    assert [point["step"] for point in resumed["points"]] == [4, 8, 12]
    assert without_seconds(resumed["points"]) == without_seconds(straight["points"])
    assert steps_in(stopped) == [5, 10, 12]
    ours, theirs = read(stopped, 12), read(whole, 12)
    assert len(ours) > 8
    assert any("jaxsparse_per_worker" in jax.tree_util.keystr(path) for path, _ in ours)
    for (path, mine), (other_path, other) in zip(ours, theirs, strict=True):
        assert path == other_path
        np.testing.assert_array_equal(mine, other, err_msg=jax.tree_util.keystr(path))


@pytest.mark.slow
def test_processes_that_see_different_directories_are_told(tmp_path):
    command = [sys.executable, MULTIHOST / "train.py", *TINY, "--checkpoint-dir", "checkpoints"]
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    there = lambda rank: ("sh", "-c", f'cd {tmp_path / str(rank)}; exec "$@"', "sh")
    outcome, lines = in_processes(command, 2, timeout=120, env=ENV, wrap=there)
    assert outcome.status == 2
    assert all("that processes [1] do not see" in "\n".join(each) for each in lines)


@pytest.mark.slow
def test_an_announced_preemption_is_saved(tmp_path, by_hand):
    folder = tmp_path / "checkpoints"
    processes = by_hand(2, "--checkpoint-dir", str(folder), "--checkpoint-every", "1000000")
    assert steps_in(folder) == []
    processes[1].send_signal(signal.SIGTERM)  # what schedulers send before they kill
    deadline = time.monotonic() + 60
    while not steps_in(folder):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_shares_are_what_the_devices_hold(multihost):
    shares, digits = multihost.shares, multihost.digits
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


def test_every_method_takes_the_flags_it_is_given(multihost):
    train = multihost.train
    params = {"kernel": jax.ShapeDtypeStruct((64, 32), np.float32)}
    args = train.flags().parse_args(["--compression", "2"])
    for method in train.METHODS:
        args.method = method
        jax.eval_shape(train.make_method(args).init, params)


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
def test_bad_flags(multihost, capsys, flags, message):
    parser = argparse.ArgumentParser()
    multihost.processes.add_flags(parser)
    with pytest.raises(SystemExit):
        multihost.processes.join(parser.parse_args(flags), parser)
    assert message in capsys.readouterr().err
