"""Starting all processes, and ending all when one fails."""

import contextlib
import dataclasses
import os
import queue
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from jaxsparse.launch.ranks import Rank, Reader, Stream, remove_logs
from jaxsparse.launch.signals import put_off
from jaxsparse.settings import static_float, static_int

LIMIT_PASSED = 124  # exit status, as that of timeout(1)
POLL = 0.05  # seconds


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    returncode: int  # 0; the failed rank's exit status, or 128 + its signal; 124: limit passed
    # 1 also if the status is unknown, as this program has SIGCHLD ignored or reaps all children
    failed: int | None  # the rank that failed first
    reason: str  # one line; empty if nothing failed
    last_lines: tuple[str, ...]  # each rank's stderr or, if it wrote none, stdout: the last lines
    logs: Path | None  # folder of rank<r>.stdout and rank<r>.stderr; None: removed
    seconds: float  # from the start of the first process to the end of the last

    def __str__(self) -> str:
        if not self.returncode:
            return f"{len(self.last_lines)} processes ended well after {self.seconds:.1f} s"
        told = range(len(self.last_lines)) if self.failed is None else (self.failed,)
        tails = (f"last lines of rank {rank}:\n{self.last_lines[rank]}" for rank in told)
        return "\n".join([self.reason, *tails, f"all output is in {self.logs}"])


class StartError(OSError):
    """The processes can't be started."""


def show(line: str, stream: Stream) -> None:
    """Prints a line of rank 0 where rank 0 wrote it.

    "?" stands for what the encoding lacks. A line that can't be written is left out and the run
    goes on: the pipe may be closed, as by `| head`, or the disk full.
    """
    to = sys.stdout if stream == "stdout" else sys.stderr
    if to is None:  # Python was started with it closed
        return
    encoding = getattr(to, "encoding", None) or "utf-8"
    with contextlib.suppress(OSError, ValueError):  # ValueError: the file is closed
        print(line.encode(encoding, "replace").decode(encoding), file=to, flush=True)


def launch(
    command: Sequence[str],
    processes: int,
    *,
    devices_per_process: int = 1,
    timeout: float | None = None,
    coordinator_host: str = "127.0.0.1",
    port: int | None = None,
    wrap: Callable[[int], Sequence[str]] = lambda rank: (),
    env: Mapping[str, str] | None = None,
    logs: str | os.PathLike[str] | None = None,
    grace: float = 3.0,
    on_output: Callable[[str, Stream], object] | None = show,
) -> Outcome:
    """Runs `command` in several processes of this machine and waits for all of them.

    When one fails or the limit passes, all others are ended, with whatever they started: by
    SIGTERM and, `grace` seconds later, SIGKILL (JAX takes SIGTERM for a notice of preemption and
    goes on). The same happens if an exception, such as Ctrl-C or one of `on_output`, ends this
    function. Who can't be ended, for want of the right to, is named in `reason` or the exception.

    Args:
        command: program and arguments, the same for all ranks.
        processes: how many.
        devices_per_process: emulated CPU devices, or GPUs, of each.
        timeout: limit in seconds for the whole run; None: none.
        coordinator_host: address at which rank 0 can be reached by all.
        port: of JAX's coordinator; None: a free one.
        wrap: words before the command of a rank, such as `("ip", "netns", "exec", f"h{rank}")`.
        env: environment of the processes, to which that of the run is added; None: this one's.
        logs: folder for all output, made if need be and rid of an earlier run's; None: a temporary
            one, kept on failure.
        grace: seconds from SIGTERM to SIGKILL.
        on_output: called with each line of rank 0 and "stdout" or "stderr", gloo's messages left
            out; None: nothing is shown.

    Raises:
        ValueError: a setting is out of range.
        OSError: the command can't be started, or the system has no `waitid`: Linux has, macOS from
            Python 3.13 on.
    """
    check_settings(command, processes, devices_per_process, timeout, port, grace)
    with _starting():
        if not hasattr(os, "waitid"):
            raise StartError("no os.waitid: use Linux, or macOS with Python 3.13")
        port = _free_port() if port is None else port
        folder = Path(tempfile.mkdtemp(prefix="launch-") if logs is None else logs)
        folder.mkdir(parents=True, exist_ok=True)
        remove_logs(folder)
    address = f"{coordinator_host}:{port}"
    began = time.monotonic()
    ranks: list[Rank] = []
    reader = None
    left: list[str] = []
    try:
        try:
            with _starting(), put_off():
                for rank in range(processes):
                    words = [*wrap(rank), *command]
                    settings = _environment(rank, processes, devices_per_process, address)
                    full = {**(os.environ if env is None else env), **settings}
                    ranks.append(Rank(rank, words, full, folder))
                reader = Reader(ranks[0], on_output)
            returncode, failed, reason = _wait(ranks, began, timeout, reader)
            tails = tuple(rank.last_lines() for rank in ranks)  # before the end of the others shows
        finally:
            _end(ranks, grace, left)
            if reader is not None:
                reader.finish()
    except BaseException as error:
        if logs is None and len(ranks) < processes:
            shutil.rmtree(folder)  # there is nothing to read
        else:
            error.add_note(f"all output is in {folder}")
        for each in left:
            error.add_note(each)
        raise
    reason = "; ".join([reason, *left])
    seconds = time.monotonic() - began
    if logs is None and returncode == 0:
        shutil.rmtree(folder)
        return Outcome(0, None, "", tails, None, seconds)
    return Outcome(returncode, failed, reason, tails, folder, seconds)


@contextlib.contextmanager
def _starting() -> Iterator[None]:
    """Tells errors of starting from later ones."""
    try:
        yield
    except StartError:
        raise
    except OSError as error:
        raise StartError(error.errno, error.strerror, error.filename) from error


def check_settings(
    command: Sequence[str],
    processes: int,
    devices_per_process: int,
    timeout: float | None,
    port: int | None,
    grace: float,
) -> None:
    """Raises ValueError for what `launch` refuses."""
    if isinstance(command, str) or not command:
        raise ValueError(f"command={command!r} must be a sequence of words, the program first")
    for name, value in (("processes", processes), ("devices_per_process", devices_per_process)):
        if static_int(name, value) < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if timeout is not None and not static_float("timeout", timeout) > 0:
        raise ValueError(f"timeout={timeout} must be a positive number of seconds, or None")
    if port is not None and not 0 < static_int("port", port) < 1 << 16:
        raise ValueError(f"port={port} must be in 1 .. 65535, or None for a free one")
    if not static_float("grace", grace) >= 0:
        raise ValueError(f"grace={grace} must not be negative: it is in seconds")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _environment(rank: int, processes: int, devices: int, address: str) -> dict[str, str]:
    """What tells a process its place in the run."""
    local = range(rank * devices, (rank + 1) * devices)
    return {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,  # JAX's own default is every interface
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_LOCAL_DEVICE_IDS": ",".join(map(str, local)),
        "OMPI_MCA_orte_hnp_uri": f"0.0;tcp://{address}",  # that there is one makes JAX read these
        "OMPI_COMM_WORLD_SIZE": str(processes),
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(processes),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "PYTHONUNBUFFERED": "1",  # else a process that is killed takes its last words along
    }


def _wait(
    ranks: Sequence[Rank], began: float, timeout: float | None, reader: Reader
) -> tuple[int, int | None, str]:
    """Until all have ended well, one has not, or the limit passes."""
    # One failure causes others within milliseconds: a thread each sees them in their order.
    ended: queue.SimpleQueue[tuple[int, int | None]] = queue.SimpleQueue()
    for each in ranks:
        threading.Thread(target=_report_end, args=(each, ended), daemon=True).start()
    running = {each.rank for each in ranks}
    while running:
        reader.poll()
        if timeout is not None and time.monotonic() - began > timeout:
            names = ", ".join(map(str, sorted(running)))
            return LIMIT_PASSED, None, f"rank {names} still ran at the limit of {timeout:g} s"
        try:
            rank, status = ended.get(timeout=POLL)
        except queue.Empty:
            continue
        running.remove(rank)
        if status != 0:
            after = f"after {time.monotonic() - began:.1f} s"
            return _exit_status(status), rank, f"rank {rank} {_describe(status)} {after}"
    return 0, None, ""


def _report_end(rank: Rank, ended: queue.SimpleQueue[tuple[int, int | None]]) -> None:
    ended.put((rank.rank, rank.wait()))


def _exit_status(status: int | None) -> int:
    if status is None:
        return 1
    return status if status > 0 else 128 - status


def _describe(status: int | None) -> str:
    if status is None:
        return "ended with unknown exit status (SIGCHLD is ignored or children are reaped here)"
    if status > 0:
        return f"failed with exit status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def _end(ranks: Sequence[Rank], grace: float, left: list[str]) -> None:
    """Ends what still runs, descendants of ended ranks included; adds to `left` who can't be."""
    try:
        for each in ranks:
            each.signal(signal.SIGTERM)
        deadline = time.monotonic() + grace
        while any(each.is_running() for each in ranks) and time.monotonic() < deadline:
            time.sleep(POLL)
    finally:  # a second Ctrl-C ends the grace
        errors = [each.signal(signal.SIGKILL) for each in ranks]
        for each, error in zip(ranks, errors, strict=True):
            if error and each.is_running():  # to wait for it could take forever
                left.append(f"rank {each.rank} (process {each.process.pid}) still runs: {error}")
            else:
                each.process.wait()
