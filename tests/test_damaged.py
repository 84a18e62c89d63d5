"""The multi-host example's checkpoints, whole and after damage, and its lock: one run at a time."""

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from jax.sharding import PartitionSpec
from running import ENV, MULTIHOST
from workers import mesh

from jaxsparse import PerWorker, shard


@contextlib.contextmanager
def opened(multihost, folder, *flags, resumes=True):
    parser = multihost.train.flags()
    flags = ["--steps", "9", "--checkpoint-every", "1", "--keep", "9", *flags]
    flags += ["--resume"] * resumes
    args = parser.parse_args([*flags, "--checkpoint-dir", str(folder)])
    saved = multihost.checkpoints.Checkpoints(args, parser)
    yield saved
    saved.close()


def state_of(workers, fill, width=600):
    """A state whose arrays are too large for Orbax to keep them in its tree of names."""
    rng = np.random.default_rng(fill)
    residual = rng.normal(size=(workers, 2, width)).astype(np.float32)
    params = {"w": rng.normal(size=width).astype(np.float32), "count": np.int32(fill)}
    return shard((params, PerWorker(residual)), mesh(workers))


@pytest.fixture(scope="module")
def two_steps(multihost, tmp_path_factory):
    """A directory with checkpoints of the steps 1 and 2 of four workers."""
    folder = tmp_path_factory.mktemp("two_steps")
    with opened(multihost, folder) as saved:
        for step in (1, 2):
            saved.save(state_of(4, step), multihost.train.Progress(step, 4, 0.5, [{"step": step}]))
    assert sorted(os.listdir(folder)) == ["1", "2"]
    return folder


@pytest.fixture
def folder(two_steps, tmp_path):
    return shutil.copytree(two_steps, tmp_path / "checkpoints")


def resume(multihost, saved, workers=4, **settings):
    start = multihost.train.Progress(0, workers, 0.0, [])
    return saved.resume(state_of(workers, 0, **settings), start, mesh(workers))


def arrays(folder):
    """The file with most of the arrays' bytes."""
    return max(folder.glob("state/ocdbt.process_0/d/*"), key=lambda path: path.stat().st_size)


def truncate(folder):
    file = arrays(folder)
    os.truncate(file, file.stat().st_size // 2)


def flip(folder):
    with arrays(folder).open("r+b") as file:
        file.seek(arrays(folder).stat().st_size // 2)
        four = file.read(4)
        file.seek(-4, os.SEEK_CUR)
        file.write(bytes(byte ^ 0x10 for byte in four))


def change_a_digit(folder):
    file = folder / "progress" / "metadata"
    text = file.read_text()
    assert '"seconds": 0.5' in text
    file.write_text(text.replace('"seconds": 0.5', '"seconds": 1.5'))


def empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()


BREAKS = {
    "truncated": truncate,
    "flipped": flip,
    "no arrays": lambda folder: arrays(folder).unlink(),
    "no folder of arrays": lambda folder: shutil.rmtree(folder / "state"),
    "no manifest": lambda folder: (folder / "state" / "manifest.ocdbt").unlink(),
    "no metadata": lambda folder: (folder / "state" / "_METADATA").unlink(),
    "no progress": lambda folder: shutil.rmtree(folder / "progress"),
    "another progress": change_a_digit,
    "empty": empty,
    "no mark": lambda folder: (folder / "_CHECKPOINT_METADATA").unlink(),
}
INCOMPLETE = ("empty", "no mark")
QUICK = (("flipped", 4), ("empty", 4))


@pytest.mark.parametrize(
    ("how", "workers"),
    [
        pytest.param(how, workers, marks=() if (how, workers) in QUICK else pytest.mark.slow)
        for how in BREAKS
        for workers in (4, 3)
    ],
)
def test_a_damaged_one_is_passed_over(multihost, folder, capsys, how, workers):
    BREAKS[how](folder / "2")
    with opened(multihost, folder) as saved:
        state, progress = resume(multihost, saved, workers)
        assert progress == (1, 4, 0.5, [{"step": 1}])
        kind = "incomplete" if how in INCOMPLETE else "damaged"
        assert f"checkpoint 2 is {kind} and renamed to {kind}-2-" in capsys.readouterr().out
        names = sorted(name.rpartition("-")[0] or name for name in os.listdir(folder))
        assert names == ["1", f"{kind}-2", "lock"]
        np.testing.assert_array_equal(state[0]["w"], state_of(4, 1)[0]["w"])
        if how != "flipped":
            return
        saved.save(state_of(workers, 2), progress._replace(step=2, workers=workers))
    with opened(multihost, folder) as saved:
        assert resume(multihost, saved, workers)[1].step == 2


def test_if_none_is_good_nothing_changes(multihost, folder, capsys):
    truncate(folder / "1")
    flip(folder / "2")
    for _ in range(2):
        with opened(multihost, folder) as saved, pytest.raises(SystemExit):
            resume(multihost, saved)
        said = capsys.readouterr().err
        assert f"--resume: no checkpoint in {folder} is good:\n  2: " in said
        assert "\n  1: " in said
        assert "of 3 arrays is not as saved, such as leaf[" in said
        assert sorted(os.listdir(folder)) == ["1", "2"]


def test_another_program_is_told_and_nothing_changes(multihost, folder, capsys):
    truncate(folder / "1")
    with opened(multihost, folder) as saved, pytest.raises(SystemExit):
        resume(multihost, saved, width=601)
    said = capsys.readouterr().err
    assert "has float32[600] at [0]['w'], and this program has float32[601] there" in said
    assert sorted(os.listdir(folder)) == ["1", "2"]


@pytest.mark.parametrize("workers", [3, 8])
def test_other_workers_hold_the_same_mean(multihost, folder, capsys, workers):
    with opened(multihost, folder) as saved:
        (params, residual), progress = resume(multihost, saved, workers)
    assert f"carried over to {workers}" in capsys.readouterr().out
    assert (progress.step, progress.workers) == (2, 4)
    old = state_of(4, 2)
    assert residual.value.shape == (workers, 2, 600)
    assert residual.value.sharding.spec == PartitionSpec("data")
    np.testing.assert_allclose(residual.value.mean(0), old[1].value.mean(0), atol=1e-6)
    np.testing.assert_array_equal(params["w"], old[0]["w"])


def test_when_it_saves(multihost, tmp_path):
    with opened(multihost, tmp_path, "--checkpoint-every", "4", "--keep", "2") as saved:
        for step in range(1, 10):
            saved.save(state_of(4, 0), multihost.train.Progress(step, 4, 0.0, []))
    assert sorted(os.listdir(tmp_path)) == ["8", "9"]


def test_a_second_run_is_refused(multihost, folder, capsys):
    with pytest.raises(SystemExit), opened(multihost, folder, resumes=False):
        pass
    assert "holds a run that came to step 2: add --resume" in capsys.readouterr().err


def test_other_settings_are_refused(multihost, folder, capsys):
    with opened(multihost, folder, "--batch-size", "255") as saved, pytest.raises(SystemExit):
        resume(multihost, saved)
    message = capsys.readouterr().err
    assert "--batch-size 255: the run in " in message
    assert "has --batch-size 256. Give that" in message
    assert {"method", "hidden", "steps", "lr", "seed"} < {*multihost.checkpoints.FIXED}


HOLD = """
import sys, time, pathlib
sys.path.insert(0, sys.argv[1])
import locks
locks.WAIT = float(sys.argv[3])
lock = locks.Lock(pathlib.Path(sys.argv[2]))
try:
    lock.take("1", lambda text: print(text, flush=True))
except locks.HeldError as error:
    sys.exit(str(error))
print("taken", flush=True)
time.sleep(60)
"""


@pytest.fixture
def start(tmp_path):
    """Starts processes that take the lock of a directory and keep it."""
    started = []

    def begin(wait):
        command = [sys.executable, "-c", HOLD, str(MULTIHOST), str(tmp_path), str(wait)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env=ENV, **pipes))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def test_a_second_run_is_told_who_has_it(multihost, start, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(multihost.locks, "WAIT", 0.3)
    process = start(0)
    assert process.stdout.readline() == "taken\n"
    with pytest.raises(SystemExit), opened(multihost, tmp_path):
        pass
    out, err = capsys.readouterr()
    assert f"the run of process {process.pid} on " in out
    assert "waiting up to 0 s" in out
    assert f"--checkpoint-dir {tmp_path}: the run of process {process.pid} on " in err
    assert "(since 20" in err
    assert "Wait for its end, or end it." in err
    process.kill()  # nothing is left to clean up by hand
    with opened(multihost, tmp_path):
        assert os.listdir(tmp_path) == ["lock"]
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_a_run_waits_for_one_that_ends(start):
    first, second = start(0), None
    assert first.stdout.readline() == "taken\n"
    second = start(30)
    assert f"process {first.pid} on " in second.stdout.readline()
    first.send_signal(signal.SIGKILL)
    assert second.stdout.readline() == "taken\n"


@pytest.mark.slow
def test_of_runs_that_start_together_one_gets_the_directory(start):
    processes = [start(0.2) for _ in range(4)]
    deadline = time.monotonic() + 30
    while sum(process.poll() is None for process in processes) > 1:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    (alive,) = (process for process in processes if process.poll() is None)
    assert "taken\n" in iter(alive.stdout.readline, "")


def test_processes_that_outlive_process_0_keep_others_out(multihost, tmp_path):
    first, other = multihost.locks.Lock(tmp_path), multihost.locks.Lock(tmp_path)
    say = []
    first.take("17", say.append)
    assert not other.share("18")  # another file than process 0's
    assert other.share("17")
    first._close()  # as the kernel does when process 0 is killed
    second = multihost.locks.Lock(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multihost.locks, "WAIT", 0.0)
        with pytest.raises(multihost.locks.HeldError):
            second.take("19", say.append)
    other.release()
    second.take("19", say.append)
    second.release()


def test_a_file_system_without_locks(multihost, tmp_path, monkeypatch, capsys):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(multihost.locks.fcntl, "flock", flock)
    with opened(multihost, tmp_path) as saved:
        assert resume(multihost, saved)[1].step == 0
    said = capsys.readouterr().out
    assert said.count(f"make sure that no other run uses {tmp_path}: ") == 1


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_directory_that_cannot_be_used(multihost, tmp_path, capsys, name):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit), opened(multihost, tmp_path / name):
        pass
    said = capsys.readouterr().err
    assert f"--checkpoint-dir {tmp_path / name}: " in said
    assert "Name a directory that this user can write to" in said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--json", "."], "--json .: that is a directory. Name a file"),
        (
            ["--coordinator", "host:1", "--num-processes", "0", "--process-id", "0"],
            "--num-processes 0: give at least 1",
        ),
        (["--keep", "0"], "--keep: 0 is out of range: give at least 1"),
        (["--resume"], "--resume: name the run's --checkpoint-dir"),
    ],
)
def test_bad_flags(multihost, monkeypatch, capsys, flags, message):
    monkeypatch.setattr(sys, "argv", ["train.py", *flags])
    with pytest.raises(SystemExit):
        multihost.train.main()
    assert message in capsys.readouterr().err
