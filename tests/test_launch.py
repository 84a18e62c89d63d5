"""The launcher of the multi-host example, with shells for ranks, as they start at once."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from running import MULTIHOST, in_processes, launch

RANK = "$OMPI_COMM_WORLD_RANK"
GLOO = "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1"
# A rank and a process that it starts write their ids. Then they stay, and ignore SIGTERM.
STAY = f"trap '' TERM; sleep 100 & echo $! $$ > new{RANK}; mv new{RANK} pid{RANK}; wait"


def run(script, processes, **settings):
    return in_processes(["sh", "-c", script], processes, **{"timeout": 60, **settings})


# A parent that ignores SIGCHLD would hide exit statuses: its children inherit that.
DEAF = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
DEAF += "; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"


def command_line(*flags):
    """Exit status and output of the launcher in a process of its own."""
    command = [sys.executable, "-c", DEAF, str(MULTIHOST / "launch.py"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def is_alive(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def assert_all_ended(folder, count):
    pids = [int(pid) for path in folder.glob("pid*") for pid in path.read_text().split()]
    assert len(pids) == count
    deadline = time.monotonic() + 60  # SIGKILL takes its time, on a busy machine more
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_each_rank_is_told_its_place_and_its_lines_come_with_its_number():
    say = 'echo "$WHO $XLA_FLAGS ${JAX_COORDINATOR_ADDRESS%:*} $JAX_NUM_CPU_DEVICES"'
    say += f' "$JAX_LOCAL_DEVICE_IDS {RANK} $OMPI_COMM_WORLD_SIZE"; cat'  # stdin is empty
    say += "; tr '\\0' '\\n' < /proc/$$/environ | grep FUNC"
    outcome, lines = run(
        f"{say}; echo '{GLOO}'; echo error >&2; printf unfinished",
        2,
        devices=2,
        host="10.0.0.1",
        wrap=lambda rank: ("env", f"WHO=rank{rank}"),
        env={"XLA_FLAGS": "--mine", "PATH": os.environ["PATH"], "BASH_FUNC_f%%": "() { true; }"},
    )
    assert (outcome.status, outcome.failed) == (0, None)
    assert lines == [
        ["rank0 --mine 10.0.0.1 2 0,1 0 2", "BASH_FUNC_f%%=() { true; }", "error", "unfinished"],
        ["rank1 --mine 10.0.0.1 2 2,3 1 2", "BASH_FUNC_f%%=() { true; }", "error", "unfinished"],
    ]


@pytest.mark.parametrize(
    ("death", "status", "how"),
    [("exit 3", 3, "failed with exit status 3"), ("kill -KILL $$", 137, "was killed by SIGKILL")],
)
def test_one_failure_ends_all(tmp_path, monkeypatch, death, status, how):
    monkeypatch.chdir(tmp_path)
    wait = "while [ ! -e pid0 ] || [ ! -e pid2 ]; do sleep 0.02; done"
    die = f"{wait}; sleep 100 & echo $! > pid1; echo first; echo why >&2; {death}"
    outcome, _ = run(f"if [ {RANK} = 1 ]; then {die}; fi; {STAY}", 3, grace=0.2)
    assert (outcome.status, outcome.failed) == (status, 1)
    assert outcome.report == f"rank 1 {how}\nlast lines of rank 1:\nfirst\nwhy"
    assert_all_ended(tmp_path, 5)


def test_the_ranks_have_time_to_end_by_themselves(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save = "trap 'sleep 0.2; echo saved; exit' TERM; touch ready; sleep 100 & wait"
    fail = "while [ ! -e ready ]; do sleep 0.02; done; exit 1"
    outcome, lines = run(f"if [ {RANK} = 0 ]; then {save}; fi; {fail}", 2)
    assert (outcome.failed, lines[0]) == (1, ["saved"])


def test_the_report_has_the_last_lines_without_a_native_stack():
    stack = "    @     0x7f4d30040634  absl::SendToLog()"
    outcome, _ = run(f"seq 30; echo '{stack}'; exit 1", 1)
    assert outcome.report.splitlines()[2:] == [str(i) for i in range(11, 31)]


def test_what_gloo_prints_amid_a_line_leaves_the_line_whole():
    # Python writes a line and its newline one after the other.
    _, lines = run(f"printf 'first half'; echo '{GLOO}'; echo; echo '{GLOO}'; echo next", 1)
    assert lines == [["first half", "next"]]
    _, lines = run(f"printf unfinished; echo '{GLOO}'", 1)
    assert lines == [["unfinished"]]
    # Two of Gloo's threads write at the same time.
    word, rest = GLOO[:12], GLOO[12:]
    both = GLOO.replace("Expected", f"{word}Expected")
    script = f"echo '{both}'; echo '{rest}'; printf '{word}'; echo 7 lines; echo '{rest}'; echo 8"
    assert run(script, 1)[1] == [["7 lines", "8"]]


def test_the_limit_names_who_still_ran():
    outcome, _ = run(f"[ {RANK} = 1 ] || exec sleep 100", 3, timeout=0.4)
    assert outcome == (124, None, "rank 0, 2 still ran")


def test_an_error_of_on_line_ends_all(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def on_line(rank, line):
        raise OSError("mine")

    command = ["sh", "-c", "echo $$ > pid; echo; exec sleep 100"]
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(OSError, match="mine"):
        launch(command, 1, on_line=on_line)
    assert signal.getsignal(signal.SIGTERM) is before
    assert not any(map(is_alive, map(int, Path("pid").read_text().split())))


@pytest.fixture
def heeded(request):
    """A signal that is not ignored. Jobs that a shell runs in the background ignore SIGINT."""
    inherited = signal.signal(request.param, signal.default_int_handler)
    yield request.param
    signal.signal(request.param, inherited)


@pytest.mark.parametrize("heeded", [signal.SIGINT, signal.SIGTERM], indirect=True)
def test_the_launcher_ends_its_ranks_when_stopped(tmp_path, monkeypatch, heeded):
    monkeypatch.chdir(tmp_path)
    # Rank 1 stops the launcher, which may still be busy with starting it.
    stop = f"while [ ! -e pid0 ]; do :; done; kill -{heeded} $PPID"
    script = f"sleep 100 & echo $! $$ > new{RANK}; mv new{RANK} pid{RANK}"
    script += f"; if [ {RANK} = 1 ]; then {stop}; fi; wait"
    status, _, _ = command_line("-n", "2", "--", "sh", "-c", script)
    assert status == 128 + heeded
    assert_all_ended(tmp_path, 4)


@pytest.mark.parametrize(
    ("flags", "first"),
    [((), ""), (("--grace", "0.5"), "trap '' TERM; ")],
    ids=["heeds SIGTERM", "ignores SIGTERM"],
)
def test_the_ranks_end_with_a_killed_launcher(tmp_path, monkeypatch, flags, first):
    monkeypatch.chdir(tmp_path)
    script = f"{first}sleep 100 & echo $! $$ > new{RANK}; mv new{RANK} pid{RANK}"
    script += f"; if [ {RANK} = 1 ]; then while [ ! -e pid0 ]; do :; done; kill -KILL $PPID; fi"
    script += "; wait"
    status, _, _ = command_line("-n", "2", *flags, "--", "sh", "-c", script)
    assert status == -signal.SIGKILL
    assert_all_ended(tmp_path, 4)  # within 5 seconds


def test_a_command_that_is_not_there():
    outcome, ((said,),) = in_processes(["no-such-program"], 1, timeout=60)
    assert outcome.status == 127
    assert "no-such-program: not found" in said


def test_the_command_line_shows_all_and_names_who_failed():
    script = f"echo hello {RANK}; [ {RANK} = 0 ] && exec sleep 100; sleep 0.2; exit 3"
    flags = ("-n", "2", "-d", "2", "--", "sh", "-c", script)
    status, out, err = command_line(*flags)
    assert status == 3
    assert sorted(out.splitlines()) == ["[0] hello 0", "[1] hello 1"]
    assert err == "rank 1 failed with exit status 3\nlast lines of rank 1:\nhello 1\n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-n", "2"], "required: command"),
        (["-n", "0", "--", "true"], "-n 0 -d 1: give at least 1 of each"),
        (["--", "true"], "required: -n"),
        (["-n", "1", "--timeout", "0", "--", "true"], "--timeout 0: give more than 0 seconds"),
        (["-n", "1", "--timeout", "nan", "--", "true"], "--timeout nan: give more than 0 seconds"),
        (["-n", "1", "--grace", "-1", "--", "true"], "--grace -1: give 0 or more seconds"),
    ],
)
def test_bad_command_lines(flags, message):
    status, _, err = command_line(*flags)
    assert status == 2
    assert message in err
