"""The example in several processes: equal training, shares of the data, losses, checkpoints."""

import argparse
import importlib
import json
import os
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
from running import ENV as OWN, MULTIHOST, QUICK, in_processes, launch
from workers import few, mesh

from jaxsparse import PerWorker, shard

TINY = ["--hidden", "16", "--steps", "4", "--eval-every", "2", "--batch-size", "24"]
ENV = OWN | QUICK | {"JAX_PLATFORMS": "cpu"}


@pytest.fixture(scope="module")
def modules():
    """The example's own modules, which it imports from its folder."""
    names = ("checkpoints", "processes", "shares", "train", "digits")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(MULTIHOST)
        others = {name: sys.modules.pop(name) for name in names if name in sys.modules}
        path = list(sys.path)
        train = importlib.import_module("train")
        yield {"train": train, **{name: sys.modules[name] for name in names}}
        sys.path[:] = path
        for name in names:
            del sys.modules[name]
        sys.modules.update(others)


SAID = re.compile(
    r"(no checkpoint in |resumed after |\d+ workers saved it|step \d+: |\w+: [\d,]+ param).*"
)


def run(processes, devices, *flags, folder):
    command = [sys.executable, str(MULTIHOST / "train.py"), *TINY, *flags]
    command += ["--json", str(folder / f"{processes}.json")]
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    env = ENV | cache
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
@pytest.mark.parametrize("method", few(["spardl", "sketched_sgd"], ["spardl"]))
def test_processes_train_as_the_devices_of_one(tmp_path, method, local):
    flags = ["--method", method, "--compression", "2", *local]
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
@pytest.mark.parametrize("victim", few([0, 1], [1]))
def test_a_killed_process_ends_the_others_at_once(tmp_path, by_hand, victim):
    processes = by_hand(3)
    processes[victim].kill()
    # Who loses a connection says so and leaves. JAX aborts who hears of the loss before that.
    words = {1: "Another process was probably lost", -signal.SIGABRT: "another task died"}
    for i in {0, 1, 2} - {victim}:
        status, said = processes[i].wait(timeout=15), (tmp_path / str(i)).read_text()
        assert status in words, said
        assert words[status] in said


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


@pytest.mark.parametrize(
    ("processes", "devices", "local"),
    [
        pytest.param(1, 4, (), marks=pytest.mark.thorough),
        pytest.param(1, 4, LOCAL, marks=pytest.mark.thorough),
        pytest.param(2, 1, (), marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_ends_with_the_same_bits(tmp_path, processes, devices, local):
    flags = ["--steps", "12", "--eval-every", "4", "--checkpoint-every", "5", "--keep", "9", *local]
    flags += ["--density", "0.1", "--resume", "--checkpoint-dir"]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    straight, shown = run(processes, devices, *flags, str(whole), folder=tmp_path)
    assert shown[0] == f"no checkpoint in {whole}: from the start"
    assert steps_in(whole) == [5, 10, 12]
    shutil.copytree(whole, stopped, ignore=shutil.ignore_patterns("10", "12"))
    resumed, shown = run(processes, devices, *flags, str(stopped), folder=tmp_path)
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


@pytest.mark.thorough
@pytest.mark.parametrize("local", [(), ("--local-steps", "7")], ids=["gradients", "local"])
def test_killed_among_four_it_goes_on_among_three(tmp_path, local):
    folder = tmp_path / "checkpoints"
    command = [sys.executable, str(MULTIHOST / "train.py"), *TINY, "--steps", "200"]
    command += ["--eval-every", "10", "--checkpoint-every", "5", "--density", "0.1", *local]
    command += [
        "--json",
        str(tmp_path / "report.json"),
        "--checkpoint-dir",
        str(folder),
        "--resume",
    ]
    pid = tmp_path / "pid"
    times = []

    def kill(rank, line):
        if rank == 0 and line.startswith("step 30:"):
            os.kill(int(pid.read_text()), signal.SIGKILL)
            times.append(time.monotonic())

    note = ("sh", "-c", f'echo $$ > {pid}; exec "$@"', "sh")
    died = launch(
        command,
        4,
        timeout=300,
        env=ENV,
        wrap=lambda rank: note if rank == 2 else (),
        on_line=kill,
    )
    assert time.monotonic() - times[0] < 20
    assert (died.failed, died.status) == (2, 128 + signal.SIGKILL)
    assert died.report.startswith("rank 2 was killed by SIGKILL\n")
    last = steps_in(folder)[-1]
    # The checkpoint of step 25 may be incomplete. That of step 20 was complete when 25 was begun.
    assert 20 <= last < 200

    outcome, (printed, *_) = in_processes(command, 3, timeout=300, env=ENV)
    assert outcome.status == 0, outcome.report
    shown = said(printed)
    assert shown[0] == f"resumed after step {last} of 200"
    assert shown[1].startswith("4 workers saved it: what their residuals hold back is carried over")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["workers"] == 3
    assert [point["step"] for point in report["points"]] == list(range(10, 201, 10))
    assert not list(folder.glob("*tmp*"))
    residuals = [
        value.shape[0]
        for path, value in read(folder, 200)
        if "jaxsparse_per_worker" in jax.tree_util.keystr(path)
    ]
    assert residuals
    assert set(residuals) == {3}


@pytest.mark.thorough
def test_processes_that_see_different_directories_are_told(tmp_path):
    command = [sys.executable, MULTIHOST / "train.py", *TINY, "--checkpoint-dir", "checkpoints"]
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    there = lambda rank: ("sh", "-c", f'cd {tmp_path / str(rank)}; exec "$@"', "sh")
    outcome, lines = in_processes(command, 2, timeout=120, env=ENV, wrap=there)
    assert outcome.status == 2
    assert all("that processes [1] do not see" in "\n".join(each) for each in lines)


@pytest.mark.thorough
def test_an_announced_preemption_is_saved(tmp_path, by_hand):
    folder = tmp_path / "checkpoints"
    processes = by_hand(2, "--checkpoint-dir", str(folder), "--checkpoint-every", "1000000")
    assert steps_in(folder) == []
    processes[1].send_signal(signal.SIGTERM)  # what schedulers send before they kill
    deadline = time.monotonic() + 60
    while not steps_in(folder):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture(scope="module")
def three_steps(modules, tmp_path_factory):
    """A directory with checkpoints of steps 1 to 3 of four workers. Parameters are the step."""
    folder = tmp_path_factory.mktemp("three_steps")
    saved = TestCheckpoints.open(modules, folder)
    for step in (1, 2, 3):
        progress = modules["train"].Progress(step, 4, 0.5, [{"step": 1}])
        saved.save(TestCheckpoints.state(4, step), progress)
    saved.close()
    return folder


class TestCheckpoints:
    """The example's own checkpoints, in one process."""

    FLAGS = ("--steps", "9", "--checkpoint-every", "1", "--keep", "9")

    @classmethod
    def open(cls, modules, folder, *flags):
        parser = modules["train"].flags()
        args = parser.parse_args([*cls.FLAGS, "--checkpoint-dir", str(folder), *flags])
        return modules["train"].Checkpoints(args, parser)

    @pytest.fixture
    def opened(self, modules, tmp_path):
        """Opens the directory as a run with these flags does."""
        everything = []

        def open_as(*flags):
            everything.append(self.open(modules, tmp_path, *flags))
            return everything[-1]

        yield open_as
        for each in everything:
            each.close()

    @staticmethod
    def state(workers, fill=0.0):
        residual = np.arange(workers * 6, dtype=np.float32).reshape(workers, 2, 3) + fill
        params = {"w": np.full(5, fill, np.float32), "count": np.int32(fill)}
        return shard((params, PerWorker(residual)), mesh(workers))

    @pytest.fixture
    def steps(self, three_steps, tmp_path):
        shutil.copytree(three_steps, tmp_path, dirs_exist_ok=True)

    def resume(self, modules, saved, workers):
        start = modules["train"].Progress(0, workers, 0.0, [])
        return saved.resume(self.state(workers), start, mesh(workers))

    def test_as_many_workers(self, modules, opened, steps):
        state, progress = self.resume(modules, opened("--resume"), 4)
        assert progress == (3, 4, 0.5, [{"step": 1}])
        for mine, other in zip(jax.tree.leaves(state), jax.tree.leaves(self.state(4, 3.0))):
            assert mine.sharding == other.sharding
            np.testing.assert_array_equal(mine, other)

    @pytest.mark.parametrize("workers", [3, 8])
    def test_other_workers_hold_the_same_mean(self, modules, opened, steps, capsys, workers):
        (params, residual), progress = self.resume(modules, opened("--resume"), workers)
        assert f"carried over to {workers}" in capsys.readouterr().out
        assert (progress.step, progress.workers) == (3, 4)
        old = self.state(4, 3.0)[1].value
        assert residual.value.shape == (workers, 2, 3)
        assert residual.value.sharding.spec == PartitionSpec("data")
        np.testing.assert_allclose(residual.value.mean(axis=0), old.mean(axis=0), rtol=1e-6)
        np.testing.assert_array_equal(params["w"], 3)

    def test_the_first_start(self, modules, opened, capsys):
        state, progress = self.resume(modules, opened("--resume"), 4)
        assert progress.step == 0
        assert "from the start" in capsys.readouterr().out
        np.testing.assert_array_equal(state[1].value, self.state(4)[1].value)

    @pytest.mark.parametrize("name", ["9", "9.orbax-checkpoint-tmp"])
    @pytest.mark.parametrize("missing", ["everything", "marker"])
    def test_incomplete_ones_are_passed_over(self, modules, opened, steps, tmp_path, name, missing):
        if missing == "everything":
            (tmp_path / name).mkdir()
        else:
            shutil.copytree(tmp_path / "3", tmp_path / name)
            marker = tmp_path / name / "_CHECKPOINT_METADATA"
            content = json.loads(marker.read_text())
            assert content["commit_timestamp_nsecs"] > 0
            marker.write_text(json.dumps(content | {"commit_timestamp_nsecs": None}))
        saved = opened("--resume")
        _, progress = self.resume(modules, saved, 4)
        assert progress.step == 3
        # A checkpoint of that step can be saved again.
        saved.save(self.state(4, 9), progress._replace(step=9))
        saved.close()
        assert steps_in(tmp_path) == [1, 2, 3, 9]
        aside = [path.name for path in tmp_path.iterdir() if not path.name.isdigit()]
        assert len(aside) == (name == "9")
        assert all(other.startswith("incomplete-9-") for other in aside)
        np.testing.assert_array_equal(self.resume(modules, opened("--resume"), 4)[0][0]["w"], 9)

    def test_when_it_saves(self, modules, opened, tmp_path):
        saved = opened("--checkpoint-every", "4", "--keep", "2")
        for step in range(1, 10):
            saved.save(self.state(4), modules["train"].Progress(step, 4, 0.0, []))
        saved.close()
        assert steps_in(tmp_path) == [8, 9]

    def test_a_second_run_is_refused(self, opened, steps, capsys):
        with pytest.raises(SystemExit):
            opened()
        assert "holds a run that came to step 3: add --resume" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("flag", "value", "saved"),
        [
            ("--method", "top_k", "spardl"),
            ("--hidden", "17", "964"),
            ("--steps", "10", "9"),
            ("--lr", "0.2", "0.1"),
            ("--batch-size", "255", "256"),
            ("--seed", "1", "0"),
        ],
    )
    def test_other_settings_are_refused(self, modules, opened, steps, capsys, flag, value, saved):
        with pytest.raises(SystemExit):
            self.resume(modules, opened("--resume", flag, value), 4)
        message = capsys.readouterr().err
        assert f"{flag} {value}: the run in " in message
        assert f"has {flag} {saved}. Give that" in message

    def test_resume_needs_a_directory(self, modules, monkeypatch, capsys):
        monkeypatch.setattr(sys, "argv", ["train.py", "--resume"])
        with pytest.raises(SystemExit):
            modules["train"].main()
        assert "--resume: name the run's --checkpoint-dir" in capsys.readouterr().err


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
def test_bad_flags(modules, capsys, flags, message):
    parser = argparse.ArgumentParser()
    modules["processes"].add_flags(parser)
    with pytest.raises(SystemExit):
        modules["processes"].join(parser.parse_args(flags), parser)
    assert message in capsys.readouterr().err
