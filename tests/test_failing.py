"""`fail_at_once`: how one of several processes ends on an error."""

import io
import os
import sys

import pytest

from jaxsparse import fail_at_once


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
