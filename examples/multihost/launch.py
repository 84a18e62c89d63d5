"""Starts the processes of a run on this machine, shows what they print, and ends all if one fails.

    python examples/multihost/launch.py -n 4 -- python examples/multihost/train.py

It serves tests, demonstrations and emulated clusters. Across machines use Slurm, mpirun or
Kubernetes. `jax.distributed.initialize()` needs no arguments in a process started here, because it
reads Open MPI's variables. So a program that starts MPI itself needs mpirun instead.
"""

import argparse
import collections
import contextlib
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

# Gloo's threads print word by word, amid each other's and Python's lines. Absl prints stacks.
_GLOO = r"\[Gloo\] Rank | is connected to | peer ranks\. |Expected number of [a-z ]+ : "
_NOISE = re.compile(rf"(?:^\d+)?(?:{_GLOO})(?:{_GLOO}|\d+(?={_GLOO}|\n))*\n?|^    @ +0x\w+ .*\n")
# Before a rank's command: a shell starts a process that waits for the end of its stdin, a pipe that
# only the launcher can write to. Even SIGKILL closes that. Then it ends the rank's group as `_end`
# does. Started by a subshell that ends, it is no child of the command, which might wait for all.
_GUARD = """
exec 3<&0 </dev/null
({ trap "" TERM; read -r _ <&3; kill -TERM 0; sleep "$0"; kill -KILL 0; } >/dev/null 2>&1 &)
exec "$@" 3<&-
"""
# An event is a rank with its line or exit status, or -1 with a signal, or -1 with 0: time is up.
_Events = queue.SimpleQueue[tuple[int, str | int]]


class Outcome(NamedTuple):
    """The outcome of a run."""

    status: int  # 0; the failed rank's exit status, or 128 + its signal; 124: the time was up
    failed: int | None  # the rank that failed first
    report: str  # in words, with the last lines of the rank that failed


def launch(
    command: Sequence[str],
    processes: int,
    *,
    devices: int = 1,
    timeout: float | None = None,
    grace: float = 3.0,
    on_line: Callable[[int, str], object] = lambda i, line: print(f"[{i}] {line}", flush=True),
    env: Mapping[str, str] | None = None,
    wrap: Callable[[int], Sequence[str]] = lambda rank: (),
    host: str = "127.0.0.1",
) -> Outcome:
    """Runs `command` in several processes of this machine and waits for all of them.

    If a rank fails, the time is up, `on_line` raises or a signal asks this process to end, the
    ranks and all that they started get SIGTERM and, `grace` seconds later, SIGKILL. A signal is
    then raised as KeyboardInterrupt with its number. If this process is killed, each rank ends in
    the same way. Call it in the main thread.

    Args:
        command: program and arguments, the same for all ranks.
        processes: number of ranks.
        devices: emulated CPU devices, or GPUs, of each process.
        timeout: limit of the run in seconds. None: no limit.
        grace: seconds from SIGTERM, which JAX takes for a notice of preemption, to SIGKILL.
        on_line: called with a rank and each line that it prints, to stdout or stderr.
        env: environment to which the variables of the run are added. None: this process's.
        wrap: words before the command of a rank, such as `("ip", "netns", "exec", f"h{rank}")`.
        host: address at which all ranks reach rank 0.
    """
    with socket.create_server(("", 0)) as probe:  # at a free port
        address = f"{host}:{probe.getsockname()[1]}"
    tails = [collections.deque[str](maxlen=20) for _ in range(processes)]
    running = set(range(processes))
    status, failed, report = 0, None, f"{processes} processes ended well"

    def take(rank: int, what: str | int) -> None:
        nonlocal status, failed, report
        if isinstance(what, str):
            tails[rank].append(what)
            on_line(rank, what)
        elif rank >= 0:
            running.discard(rank)
            if what > 0 and not status:
                status, failed, report = what, rank, f"rank {rank} failed with exit status {what}"
            elif what < 0 and not status:
                name = signal.Signals(-what).name
                status, failed, report = 128 - what, rank, f"rank {rank} was killed by {name}"
        elif what:
            raise KeyboardInterrupt(what)
        elif running and not status:
            status, report = 124, f"rank {', '.join(map(str, sorted(running)))} still ran"

    events: _Events = queue.SimpleQueue()
    ranks: list[_Rank] = []
    timer = threading.Timer(timeout or threading.TIMEOUT_MAX, events.put, [(-1, 0)])
    alive, held = os.pipe()  # the kernel closes `held` when this process ends, however it ends
    # Signals become events, so none can come between a process's start and its place in `ranks`.
    stops = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    stops = [number for number in stops if signal.getsignal(number) != signal.SIG_IGN]
    before = [signal.signal(n, lambda number, _: events.put((-1, number))) for n in stops]
    try:
        timer.start()
        for rank in range(processes):
            variables = _variables(rank, processes, devices, address)
            full = dict(os.environ if env is None else env) | variables
            # Some shells drop variables such as BASH_FUNC_module%%. The command still gets them.
            others = [f"{name}={value}" for name, value in full.items() if not name.isidentifier()]
            guard = ["/bin/sh", "-c", _GUARD, str(grace), *(["env", *others] if others else [])]
            ranks.append(_Rank(rank, [*guard, *wrap(rank), *command], full, events, alive))
        while running and not status:
            take(*events.get())
    finally:
        timer.cancel()
        _end(ranks, grace)
        os.close(alive)
        os.close(held)
        for number, handler in zip(stops, before):
            signal.signal(number, handler)
    while not events.empty():
        take(*events.get())
    if failed is not None:
        report = "\n".join([report, f"last lines of rank {failed}:", *tails[failed]])
    return Outcome(status, failed, report)


def _variables(rank: int, processes: int, devices: int, address: str) -> dict[str, str]:
    """Environment variables that tell a process its place in the run."""
    return {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,  # JAX's own default is every interface
        "JAX_NUM_CPU_DEVICES": str(devices),  # JAX prefers it to XLA_FLAGS
        "JAX_LOCAL_DEVICE_IDS": ",".join(str(rank * devices + i) for i in range(devices)),
        "OMPI_MCA_orte_hnp_uri": f"0.0;tcp://{address}",  # without it JAX reads none of these
        "OMPI_COMM_WORLD_SIZE": str(processes),
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "PYTHONUNBUFFERED": "1",  # so that a killed process leaves its last words
    }


class _Rank:
    """A process in a group of its own, and a thread that reports on it."""

    def __init__(
        self, rank: int, words: Sequence[str], env: Mapping[str, str], events: _Events, stdin: int
    ):
        self._process = subprocess.Popen(
            words, env=env, stdin=stdin, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        self.thread = threading.Thread(target=self._follow, args=(rank, events), daemon=True)
        self.thread.start()

    def _follow(self, rank: int, events: _Events) -> None:
        reader = threading.Thread(target=self._read, args=(rank, events), daemon=True)
        reader.start()
        status = self._process.wait()
        self.signal(signal.SIGKILL)  # ends what it left running, which keeps the pipe open
        reader.join(1.0)
        events.put((rank, status))

    def _read(self, rank: int, events: _Events) -> None:
        assert self._process.stdout is not None
        begun = ""
        with self._process.stdout as lines:
            for line in lines:
                begun = _NOISE.sub("", begun + line)
                if begun.endswith("\n"):
                    events.put((rank, begun[:-1]))
                    begun = ""
        if begun:
            events.put((rank, begun))

    def signal(self, number: int) -> None:
        if self.thread.is_alive():  # later its id may be another process's
            with contextlib.suppress(OSError):  # nothing is left of its group
                os.killpg(self._process.pid, number)


def _end(ranks: Sequence[_Rank], grace: float) -> None:
    for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, 10.0)):
        for each in ranks:
            each.signal(number)
        deadline = time.monotonic() + seconds
        for each in ranks:
            each.thread.join(max(0.0, deadline - time.monotonic()))


def main() -> int:
    parser = argparse.ArgumentParser(
        usage="%(prog)s -n N [-d D] [--timeout SECONDS] [--grace SECONDS] -- command"
    )
    add = parser.add_argument
    add("-n", type=int, required=True, help="how many processes")
    add("-d", type=int, default=1, help="emulated CPU devices, or GPUs, of each")
    add("--timeout", type=float, help="limit of the whole run (default: none)")
    add("--grace", type=float, default=3.0, help="time from SIGTERM to SIGKILL (default: 3)")
    add("command", nargs="+", help="program and arguments")
    args = parser.parse_args()
    if args.n < 1 or args.d < 1:
        parser.error(f"-n {args.n} -d {args.d}: give at least 1 of each")
    if args.timeout is not None and not 0 < args.timeout <= threading.TIMEOUT_MAX:
        parser.error(f"--timeout {args.timeout:g}: give more than 0 seconds, or leave it out")
    if not 0 <= args.grace <= threading.TIMEOUT_MAX:
        parser.error(f"--grace {args.grace:g}: give 0 or more seconds")
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if inherited as ignored, it hides failures
    try:
        outcome = launch(
            args.command, args.n, devices=args.d, timeout=args.timeout, grace=args.grace
        )
    except KeyboardInterrupt as stop:
        return 128 + stop.args[0]
    if outcome.status:
        print(outcome.report, file=sys.stderr)
    return outcome.status


if __name__ == "__main__":
    sys.exit(main())
