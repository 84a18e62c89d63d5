"""Ends all processes of a run after an error in one, or if one stays behind."""

import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator

import jax

from jaxsparse.processes.agreement import compare_texts
from jaxsparse.processes.digest import VERSIONS
from jaxsparse.processes.group import watched, whole_group

# Settings of JAX that change what a program computes, or its shapes.
_SETTINGS = (
    "jax_enable_x64",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
)

# Gloo, NCCL and JAX's coordination service report a lost process in these words. Errors of a user's
# own connections and settings have other words.
_LOST = re.compile(
    r"Gloo [\w -]+ failed|gloo/transport|remote process exited|remote task has failed"
    r"|tasks? (is|are) unhealthy|another task died|leader task was preempted"
)

# Gloo's words if processes send each other messages of different sizes.
_UNLIKE = re.compile(r"doesn't match expected size|collective mismatch")


_KILLED = (
    "This process ended before its Python code did. If JAX says above that another task died or is "
    "unhealthy, this one is innocent: the output of that one tells why. If nothing stands above, "
    "the system may have ended it, as for want of memory."
)


@contextlib.contextmanager
def _told_if_killed() -> Iterator[None]:
    """Prints a note if this process is killed, or if C++ aborts it, where no Python runs any more.

    So another process waits for the end of a pipe that this one closes, whichever way it ends.
    """
    if os.name != "posix":
        yield
        return
    command = ["sh", "-c", 'trap "" INT TERM; read -r line || echo "$0" >&2', _KILLED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as waiting:
        assert waiting.stdin is not None
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                waiting.stdin.write(b"\n")
                waiting.stdin.flush()


@contextlib.contextmanager
def fail_at_once(limit: float | None = 600.0) -> Iterator[None]:
    """Ends this process at once on an error, and in time if another one stays behind.

    In each process, put `with jaxsparse.fail_at_once():` around all code after
    `jax.distributed.initialize()`. If one process fails, the others lose their connections to it,
    and end within a second, too. It calls `os._exit`, so no clean-up outside it runs.

    If one process leaves out a step of `jaxsparse.watch` or `LocalSteps`, or gets stuck before one,
    the others would wait for it for ever. Instead, they end after `limit` seconds without progress,
    and say how far each process came. If this one is killed, or aborted by JAX, a note says so.

    At its beginning, processes compare their versions and settings of JAX, their XLA_FLAGS, and how
    many devices each has. If they differ, all raise the same error.

    Args:
        limit: seconds. It must exceed the longest time that one process works alone between steps,
            such as on an evaluation or a checkpoint. None: no limit.
    """
    if limit is not None and not 0 < limit < math.inf:
        raise ValueError(f"limit={limit} must be a positive, finite number of seconds, or None")
    try:
        with _told_if_killed(), watched(limit):
            if (group := whole_group()) is not None:
                compare_texts(group, "fail_at_once", _surroundings())
            yield
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            raise
        try:
            _report(error)
        finally:  # even if the output is broken
            try:
                sys.stdout.flush()
            finally:
                os._exit(_status(error))


def _surroundings() -> list[str]:
    """What is to be equal in all processes, before they make anything."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    return [
        VERSIONS,
        f"{jax.local_device_count()} devices of this process",
        *(f"{name}={getattr(jax.config, name, None)}" for name in _SETTINGS),
        *(f"XLA_FLAGS {flag}" for flag in sorted(flags) if "dump" not in flag),
    ]


def _report(error: BaseException) -> None:
    if isinstance(error, SystemExit):
        if not isinstance(error.code, int):
            print(error.code, file=sys.stderr, flush=True)
        return
    traceback.print_exc()
    if _UNLIKE.search(str(error)):
        print("Processes run different programs.", file=sys.stderr)
    elif _LOST.search(str(error)):
        print("Another process was probably lost: its own output tells why.", file=sys.stderr)
    sys.stderr.flush()


def _status(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code & 0xFF  # as Python's own exit; os._exit refuses large ones
    return 1
