"""The launcher, with children that are shells and start at once."""

import io
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxsparse.launch import fail_at_once, launch
from jaxsparse.launch.__main__ import drop_unwritable, main

RANK = "$OMPI_COMM_WORLD_RANK"
GLOO = "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1"


def run(script, processes=2, **settings):
    """The outcome, and what was shown of rank 0."""
    shown = []
    settings = {"timeout": 60, "on_output": lambda *line: shown.append(line), **settings}
    return launch(["sh", "-c", script], processes, **settings), shown


def is_alive(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def assert_all_ended(folder, count):
    pids = [int(line) for path in folder.glob("pid*") for line in path.read_text().split()]
    assert len(pids) == count
    deadline = time.monotonic() + 5  # SIGKILL takes its time
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


# Each rank and a process that it starts write their ids, and then stay, deaf to SIGTERM.
STAY = "trap '' TERM; sleep 100 & echo $! $$ > pid{0}.new; mv pid{0}.new pid{0}; wait"


def test_rank_0_is_shown_without_gloo(tmp_path):
    script = f"echo from {RANK}; echo '{GLOO}'; echo error >&2; printf unfinished"
    outcome, shown = run(script, 3)
    assert sorted(shown) == [("error", "stderr"), ("from 0", "stdout"), ("unfinished", "stdout")]
    assert (outcome.returncode, outcome.failed, outcome.reason) == (0, None, "")
    assert outcome.last_lines == ("error",) * 3
    assert outcome.logs is None

    outcome, _ = run(f"echo from {RANK}", 3, logs=tmp_path / "kept")
    assert (outcome.logs / "rank2.stdout").read_text() == "from 2\n"
    assert outcome.last_lines == ("from 0", "from 1", "from 2")


def test_lines_are_shown_while_rank_0_runs():
    times = []
    on_output = lambda *_: times.append(time.monotonic())
    run("echo first; sleep 0.5; echo second", 1, on_output=on_output)
    assert times[1] - times[0] > 0.3


def test_what_cannot_be_shown_does_not_end_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ["-n", "1", "--", "sh", "-c", r"printf 'caf\303\251\n'; sleep 0.2; echo; touch end"]
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", ascii_only)
    assert main(command) == 0
    assert ascii_only.buffer.getvalue() == b"caf?\n\n"

    Path("end").unlink()
    reading, writing = os.pipe()
    os.close(reading)  # as `| head` does
    with os.fdopen(writing, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert main(command) == 0
        assert Path("end").exists()
        drop_unwritable()


def test_an_error_of_on_output_ends_all_and_is_not_repeated(tmp_path):
    seen = []

    def on_output(*line):
        seen.append(line)
        raise OSError("mine")

    with pytest.raises(OSError, match="mine") as error:
        run("echo one; echo two >&2; sleep 100", on_output=on_output, grace=0.2, logs=tmp_path)
    assert len(seen) == 1
    assert error.value.__notes__ == [f"all output is in {tmp_path}"]


@pytest.mark.parametrize(
    ("death", "returncode", "reason"),
    [
        ("exit 3", 3, "rank 1 failed with exit status 3 after "),
        ("kill -KILL $$", 137, "rank 1 was killed by SIGKILL after "),
    ],
)
def test_one_failure_ends_all(tmp_path, monkeypatch, death, returncode, reason):
    monkeypatch.chdir(tmp_path)
    wait = "while [ ! -e pid0 ] || [ ! -e pid2 ]; do sleep 0.02; done"
    die = f"{wait}; echo shown; echo why >&2; {death}"
    outcome, _ = run(
        f"if [ {RANK} = 1 ]; then {die}; fi; {STAY.format(RANK)}",
        3,
        grace=0.2,
        logs="logs",
    )
    assert (outcome.returncode, outcome.failed) == (returncode, 1)
    assert outcome.reason.startswith(reason)
    assert outcome.last_lines[1] == "why"
    assert str(outcome) == (
        f"{outcome.reason}\nlast lines of rank 1:\nwhy\nall output is in {outcome.logs}"
    )
    assert_all_ended(tmp_path, 4)


def test_what_a_failed_rank_left_running_ends_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("sleep 100 & echo $! > pid; exit 1", 1, logs="logs")
    assert_all_ended(tmp_path, 1)


def test_logs_of_a_larger_run_are_removed(tmp_path):
    for name in ("rank7.stdout", "rank7.stderr", "rank7.stdout.txt", "ranks.stdout"):
        (tmp_path / name).touch()
    run("exit 0", 1, logs=tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["rank0.stderr", "rank0.stdout", "rank7.stdout.txt", "ranks.stdout"]


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
def test_who_cannot_be_ended_is_named_and_the_others_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    killpg, pids = os.killpg, []

    def refuse_rank_1(pid, number):
        if pid not in pids:
            pids.append(pid)
        if pids.index(pid) == 1:
            raise PermissionError(1, "Operation not permitted")
        killpg(pid, number)

    monkeypatch.setattr(os, "killpg", refuse_rank_1)
    script = f"if [ {RANK} = 0 ]; then exit 1; fi; echo $$ > pid{RANK}; exec sleep 100"
    outcome, _ = run(script, 3, grace=0.2, logs="logs")
    still = f"; rank 1 (process {pids[1]}) still runs: [Errno 1] Operation not permitted"
    assert outcome.returncode == 1
    assert outcome.reason.endswith(still)
    assert is_alive(pids[1])
    assert not is_alive(pids[2])
    killpg(pids[1], signal.SIGKILL)
    for thread in threading.enumerate():  # the one that waits for rank 1 holds its Popen
        if thread is not threading.current_thread() and "_report_end" in thread.name:
            thread.join(5)


def test_an_exit_status_that_nobody_knows_is_a_failure():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        outcome, _ = run(f"[ {RANK} = 1 ] || exec sleep 100", grace=0.2)
        assert (outcome.returncode, outcome.failed) == (1, 1)
        assert outcome.reason.startswith(
            "rank 1 ended with unknown exit status (SIGCHLD is ignored"
        )
        assert outcome.seconds < 10
        assert main(["-n", "1", "--", "sh", "-c", "exit 3"]) == 3  # it may undo that
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_native_stack_is_not_among_the_last_lines(tmp_path):
    stack = "*** Check failure stack trace: ***\n    @     0x7f4d30040634  absl::SendToLog()"
    outcome, _ = run(f"printf '%s\\n' 'task 1 died' '{stack}' >&2; exit 1", 1, logs=tmp_path)
    assert outcome.last_lines == ("task 1 died",)


def test_the_limit_names_who_still_ran(tmp_path):
    script = f"if [ {RANK} = 1 ]; then exit 0; fi; echo busy; sleep 100"
    outcome, _ = run(script, 3, timeout=0.4, logs=tmp_path)
    assert (outcome.returncode, outcome.failed) == (124, None)
    assert outcome.reason == "rank 0, 2 still ran at the limit of 0.4 s"
    assert outcome.seconds < 10
    assert str(outcome).count("busy") == 2


@pytest.fixture
def heeded(number):
    """A signal that is not ignored, as SIGINT is in jobs that a shell runs in the background."""
    inherited = signal.signal(number, signal.default_int_handler)
    yield number
    signal.signal(number, inherited)


@pytest.mark.parametrize(("number", "returncode"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_launcher_ends_its_ranks_when_stopped(
    tmp_path, monkeypatch, capfd, number, returncode, heeded
):
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(heeded)
    # Rank 1 stops the launcher, which may still be busy with starting it.
    stop = f"while [ ! -s pid0 ]; do :; done; kill -{number} $PPID"
    script = f"sleep 100 & echo $! $$ > pid{RANK}; [ {RANK} = 0 ] || {{ {stop}; }}; wait"
    assert main(["-n", "2", "--logs", "logs", "--", "sh", "-c", script]) == returncode
    assert_all_ended(tmp_path, 4)
    assert signal.getsignal(number) is before
    said = capfd.readouterr().err
    assert f"all ranks ended because of {number.name}\nall output is in logs" in said


def test_each_rank_is_told_its_place():
    say = 'echo "$WHO $XLA_FLAGS $JAX_COORDINATOR_ADDRESS $JAX_NUM_CPU_DEVICES"'
    say += ' "$JAX_LOCAL_DEVICE_IDS $OMPI_COMM_WORLD_SIZE"'
    outcome, _ = run(
        say,
        devices_per_process=2,
        coordinator_host="10.0.0.1",
        port=1234,
        wrap=lambda rank: ("env", f"WHO=rank{rank}"),
        env={"XLA_FLAGS": "--mine", "PATH": os.environ["PATH"]},
    )
    assert outcome.last_lines == tuple(
        f"rank{rank} --mine 10.0.0.1:1234 2 {ids} 2" for rank, ids in ((0, "0,1"), (1, "2,3"))
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"processes": 0}, "processes=0 must be at least 1"),
        ({"devices_per_process": 0}, "devices_per_process=0 must be at least 1"),
        ({"timeout": -1.0}, r"timeout=-1.0 must be a positive number of seconds"),
        ({"grace": -1.0}, r"grace=-1.0 must not be negative"),
        ({"port": 1 << 16}, r"port=65536 must be in 1 .. 65535"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        run("exit 0", **settings)
    with pytest.raises(ValueError, match="must be a sequence of words"):
        launch("sleep 1", 2)


def test_bad_command_lines(capsys):
    for flags, message in (
        (["-n", "2"], "no command: give it after --"),
        (["-n", "0", "--", "true"], "processes=0 must be at least 1"),
        (["--", "true"], "the following arguments are required: -n"),
    ):
        with pytest.raises(SystemExit) as error:
            main(flags)
        assert error.value.code == 2
        assert message in capsys.readouterr().err
    assert main(["-n", "2", "--", "/no/such program", "x"]) == 127
    assert "'/no/such program' x: " in capsys.readouterr().err


def test_the_command_line_reports_a_failure(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    wait = "while [ ! -e said ]; do sleep 0.02; done; exit 1"
    script = f"echo hello; [ {RANK} = 0 ] || {{ {wait}; }}; touch said; sleep 100"
    assert main(["-n", "2", "--logs", "logs", "--", "sh", "-c", script]) == 1
    printed = capsys.readouterr()
    assert printed.out == "hello\n"
    assert "rank 1 failed with exit status 1" in printed.err
    assert "last lines of rank 1:\nhello\n" in printed.err


class Left(BaseException):
    pass


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (RuntimeError("Gloo all-reduce failed"), 1, "Another process was probably lost"),
        (RuntimeError("NCCL operation: remote process exited or"), 1, "Another process was"),
        (ConnectionRefusedError("Connection refused"), 1, "Connection refused"),
        (KeyboardInterrupt(), 130, "KeyboardInterrupt"),
        (SystemExit(4), 4, ""),
        (SystemExit("no data"), 1, "no data"),
    ],
)
def test_errors_leave_without_farewell(monkeypatch, capsys, error, status, said):
    def leave(status):
        raise Left(status)

    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(Left) as left, fail_at_once():
        raise error
    assert left.value.args == (status,)
    printed = capsys.readouterr().err
    assert said in printed
    assert ("Another process" in printed) == isinstance(error, RuntimeError)


class Closed(io.StringIO):
    def write(self, text):
        raise BrokenPipeError

    def flush(self):
        raise BrokenPipeError


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_closed_pipe_does_not_keep_a_process_from_leaving(monkeypatch, name):
    def leave(status):
        raise Left(status)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(sys, name, Closed())
    with pytest.raises(Left) as left, fail_at_once():
        raise SystemExit(4 if name == "stdout" else "no data")
    assert left.value.args == (4 if name == "stdout" else 1,)


def test_an_orderly_end_is_left_alone():
    with fail_at_once():
        pass
    with pytest.raises(SystemExit), fail_at_once():
        sys.exit(0)
