"""Leaving a run on an error."""

import contextlib
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator

# How gloo, NCCL and JAX's coordination service say that another process is gone. Errors of a
# user's own connections, and of settings of these, are worded otherwise.
_LOST = re.compile(
    r"Gloo [\w -]+ failed|gloo/transport|remote process exited|remote task has failed"
    r"|tasks? (is|are) unhealthy|another task died|leader task was preempted"
)


@contextlib.contextmanager
def fail_at_once() -> Iterator[None]:
    """Ends the process on an error within it, without waiting for the others.

    Put it around all that follows `jax.distributed.initialize()`. Lost connections then end the
    other processes within a second. It calls `os._exit`: no clean-up outside it is run.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            raise
        try:
            _report(error)
        finally:  # whatever the output's state
            try:
                sys.stdout.flush()
            finally:
                os._exit(_status(error))


def _report(error: BaseException) -> None:
    if isinstance(error, SystemExit):
        if not isinstance(error.code, int):
            print(error.code, file=sys.stderr, flush=True)
        return
    traceback.print_exc()
    if _LOST.search(str(error)):
        print("Another process was probably lost: its own output tells why.", file=sys.stderr)
    sys.stderr.flush()


def _status(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code & 0xFF  # as Python's own exit; os._exit refuses large ones
    return 1
