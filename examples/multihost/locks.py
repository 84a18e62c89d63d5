"""One run at a time in a directory, by a lock that ends with the processes that hold it."""

import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

WAIT = 30.0  # seconds: processes of a run whose launcher or process 0 was killed end within these
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class HeldError(Exception):
    """Another run holds the lock. The message says which one and what to do."""


class Lock:
    """The right of a run to write to a directory.

    Process 0 takes the lock for itself, and then all processes of the run share it, so processes
    that outlive process 0 keep other runs out. The kernel frees it when the last one ends, even by
    SIGKILL. Network file systems pass such locks on to their server, which frees those of a lost
    machine. The file is deleted when a run ends by itself. If a killed run leaves it, it locks
    nothing.
    """

    def __init__(self, directory: Path):
        self.path = directory / "lock"
        self._file: TextIO | None = None
        self._owns = False

    def take(self, token: str, say: Callable[[str], object]) -> None:
        """Takes the lock in process 0, and writes `token` into its file.

        If another run has the lock, it waits up to `WAIT` seconds for its end.

        Raises:
            HeldError: another run still has it.
            OSError: the file can't be written.
        """
        deadline = time.monotonic() + WAIT
        waits = False
        while not self._try(fcntl.LOCK_EX, say):
            if time.monotonic() > deadline:
                raise HeldError(
                    f"{self._holder()} uses it. Wait for its end, or end it. If its machine is "
                    f"lost and the file server does not notice, delete {self.path}"
                )
            if not waits:
                say(f"{self._holder()} uses {self.path.parent}: waiting up to {WAIT:.0f} s")
            waits = True
            time.sleep(0.1)
        assert self._file is not None
        now = time.strftime("%Y-%m-%d %H:%M:%S %Z")
        self._file.truncate(0)
        self._file.write(
            f"process {os.getpid()} on {socket.gethostname()} (since {now})\n{token}\n"
        )
        self._file.flush()
        os.fsync(self._file.fileno())  # for the other machines
        self._owns = True
        if not self._try(fcntl.LOCK_SH):
            raise HeldError(f"{self._holder()} uses it")  # it came between the two locks

    def share(self, token: str) -> bool:
        """Joins the lock in another process, once process 0 has it.

        Returns:
            Whether this process sees the file that process 0 wrote.
        """
        with contextlib.suppress(OSError):
            if self.path.read_text().split("\n")[1:2] == [token]:
                return self._try(fcntl.LOCK_SH)
        return False

    def release(self) -> None:
        """Frees this process's part of the lock. Call it when nothing will be written."""
        if self._file is not None and self._owns:
            self.path.unlink(missing_ok=True)
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _try(self, kind: int, say: Callable[[str], object] = lambda _: None) -> bool:
        if self._file is None:
            self._file = self.path.open("a+")
        try:
            fcntl.flock(self._file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            self._close()
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            say(f"make sure that no other run uses {self.path.parent}: it can't be locked there")
            return True
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self._file.fileno()), self.path.stat()):
                return True
        self._close()  # a run that ended deleted this file
        return False

    def _holder(self) -> str:
        with contextlib.suppress(OSError):
            return "the run of " + (self.path.read_text().partition("\n")[0] or "another process")
        return "a run that is ending"
