"""One process of a run, and what it writes."""

import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Literal

TAIL = 20  # lines

Stream = Literal["stdout", "stderr"]

_LOG = re.compile(r"rank\d+\.(stdout|stderr)")

# What XLA adds to the message of a process that it aborts.
_STACK = re.compile(r"(\*\*\* Check failure stack trace: \*\*\*|    @ +0x[0-9a-f]+  .*)\n?")

# gloo prints this of every process, with no switch to turn it off.
_NOISE = re.compile(r"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\..*\n?")


class Rank:
    """A process in a group of its own, whose output goes to files."""

    def __init__(self, rank: int, words: Sequence[str], env: Mapping[str, str], folder: Path):
        self.rank = rank
        self.paths: dict[Stream, Path] = {
            "stdout": folder / f"rank{rank}.stdout",
            "stderr": folder / f"rank{rank}.stderr",
        }
        with self.paths["stdout"].open("wb") as stdout, self.paths["stderr"].open("wb") as stderr:
            self.process = subprocess.Popen(
                words,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    def wait(self) -> int | None:
        """Waits, and leaves the zombie: until it is reaped its id can't become another's.

        Returns:
            Exit status, or less the signal; None: it was reaped elsewhere, so nobody knows.
        """
        try:
            info = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            return None
        assert info is not None
        return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status

    def signal(self, number: int) -> str:
        """To the process and all that it started and that stayed in its group.

        Returns:
            Why that failed; empty if it did not.
        """
        try:
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            os.killpg(self.process.pid, number)
        except ChildProcessError:  # reaped: the id may be another's by now
            return ""
        except ProcessLookupError:  # nothing but the zombie is left
            return ""
        except OSError as error:
            return str(error)
        return ""

    def is_running(self) -> bool:
        flags = os.WEXITED | os.WNOWAIT | os.WNOHANG
        try:
            return os.waitid(os.P_PID, self.process.pid, flags) is None
        except ChildProcessError:
            return False

    def last_lines(self) -> str:
        for stream in ("stderr", "stdout"):
            text = _STACK.sub("", _NOISE.sub("", _text(self.paths[stream])))
            if text.strip():
                return "\n".join(text.rstrip().splitlines()[-TAIL:])
        return "(it wrote nothing)"


def remove_logs(folder: Path) -> None:
    """Removes what the ranks of an earlier run, maybe more of them, wrote there."""
    for path in folder.iterdir():
        if _LOG.fullmatch(path.name):
            path.unlink()


def _text(path: Path, end: int = 1 << 16) -> str:
    """The last `end` bytes of a file."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - end))
        return file.read().decode(errors="replace")


class Reader:
    """Follows what a rank writes."""

    def __init__(self, rank: Rank, on_output: Callable[[str, Stream], object] | None):
        self._on_output = on_output
        self._files: dict[Stream, IO[bytes]] = {
            stream: path.open("rb") for stream, path in rank.paths.items()
        }
        self._pending = dict.fromkeys(self._files, b"")

    def poll(self) -> None:
        """Passes on the lines that have become complete."""
        for stream, file in self._files.items():
            *lines, self._pending[stream] = (self._pending[stream] + file.read()).split(b"\n")
            for line in lines:
                self._pass_on(line, stream)

    def finish(self) -> None:
        try:
            self.poll()
            for stream, pending in self._pending.items():
                if pending:
                    self._pass_on(pending, stream)
        finally:
            for file in self._files.values():
                file.close()

    def _pass_on(self, line: bytes, stream: Stream) -> None:
        text = line.decode(errors="replace")
        if self._on_output is None or _NOISE.fullmatch(text):
            return
        try:
            self._on_output(text, stream)
        except Exception:
            self._on_output = None  # it would fail again in `finish`
            raise
