"""`fail_at_once`: how one of several processes ends on an error."""

import contextlib
import io
import os
import subprocess
import sys
import threading

import pytest
from workers import rows

from jaxsparse import fail_at_once
from jaxsparse.processes import group


class Left(BaseException):
    pass


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (RuntimeError("Gloo all-reduce failed"), 1, "Another process was probably lost"),
        (RuntimeError("NCCL operation: remote process exited or"), 1, "Another process was"),
        (
            ValueError(
                "Gloo AllGather failed: 80 vs 40. Received data size doesn't match expected "
                "size. Is there a distributed collective mismatch in your code?"
            ),
            1,
            "Processes run different programs",
        ),
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


@pytest.mark.parametrize("limit", [0, -1.0, float("nan"), float("inf")])
def test_a_limit_is_positive(limit):
    with pytest.raises(ValueError, match=rf"limit={limit} must be a positive, finite number"):
        fail_at_once(limit=limit).__enter__()


@pytest.mark.skipif(os.name != "posix", reason="another system has no such note")
@pytest.mark.parametrize(
    ("end", "status"),
    rows([("os.abort()", -6)], [("", 0), ("os.kill(os.getpid(), 9)", -9), ("1 / 0", 1)]),
)
def test_a_process_that_c_ends_is_told_of(end, status):
    """As JAX aborts a process if another one died."""
    code = f"import os, jaxsparse\nwith jaxsparse.fail_at_once():\n    {end or 'pass'}"
    ended = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert ended.returncode == status
    assert ("this one is innocent" in ended.stderr) == (status < 0)
    assert ("ZeroDivisionError" in ended.stderr) == (status == 1)


def test_an_orderly_end_is_left_alone():
    with fail_at_once():
        pass
    with pytest.raises(SystemExit), fail_at_once():
        sys.exit(0)


@pytest.mark.parametrize("ends", [None, SystemExit(0)])
def test_no_watch_is_left_when_python_ends(ends, monkeypatch):
    """A thread that then comes back from C++ would abort the process."""
    left, ended = threading.Event(), threading.Event()

    class Slow:
        def apart(self, looks):
            return None

        def publish(self):
            left.wait(0.3)
            ended.set()

    monkeypatch.setattr(group, "_groups", {(0, 1): Slow()})
    with contextlib.suppress(SystemExit), fail_at_once():
        if ends is not None:
            raise ends
    assert ended.is_set()
