"""The command line: `python -m jaxsparse.launch -n N -- command`."""

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxsparse.launch.running import StartError, check_settings, launch, show
from jaxsparse.launch.signals import Stopped, handled, stop


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = _flags()
    args = parser.parse_args(argv)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        parser.error("no command: give it after --, as in -n 2 -- python train.py")
    try:
        check_settings(
            command, args.processes, args.devices_per_process, args.timeout, args.port, grace=0.0
        )
    except ValueError as error:
        parser.error(str(error))
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:  # inherited: no exit status would come
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        with handled(stop):
            outcome = launch(
                command,
                args.processes,
                devices_per_process=args.devices_per_process,
                timeout=args.timeout,
                coordinator_host=args.coordinator_host,
                port=args.port,
                grace=args.grace,
                logs=args.logs,
            )
    except StartError as error:
        show(f"{parser.prog}: {shlex.join(command)}: {error}", "stderr")
        return 127
    except Stopped as stopped:
        notes = "".join(f"\n{note}" for note in getattr(stopped, "__notes__", ()))
        show(f"{parser.prog}: all ranks ended because of {stopped}{notes}", "stderr")
        return 128 + stopped.number
    if outcome.returncode:
        show(f"{parser.prog}: {outcome}", "stderr")
    return outcome.returncode


def _flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxsparse.launch",
        usage="%(prog)s -n N [options] -- command ...",
        description="Starts N local processes of one JAX program, shows rank 0, and ends all when "
        "one fails. jax.distributed.initialize() needs no arguments in them.",
    )
    add = parser.add_argument
    add("-n", "--processes", type=int, required=True, metavar="N", help="how many processes")
    add(
        "-d",
        "--devices-per-process",
        type=int,
        default=1,
        metavar="D",
        help="emulated CPU devices, or GPUs, of each (default: 1)",
    )
    add("--timeout", type=float, metavar="SECONDS", help="of the whole run (default: no limit)")
    add(
        "--grace",
        type=float,
        default=3.0,
        metavar="SECONDS",
        help="from SIGTERM to SIGKILL when ranks are ended, such as for a last checkpoint "
        "(default: 3)",
    )
    add(
        "--logs",
        type=Path,
        metavar="FOLDER",
        help="where all output goes (default: a temporary folder, kept if a rank fails)",
    )
    add(
        "--coordinator-host",
        default="127.0.0.1",
        metavar="HOST",
        help="where rank 0 is reached (default: 127.0.0.1)",
    )
    add("--port", type=int, help="of JAX's coordinator (default: a free one)")
    add("command", nargs=argparse.REMAINDER, help="program and arguments")
    return parser


def drop_unwritable() -> None:
    """Keeps Python's exit from failing on what a closed pipe did not take."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    status = main()
    drop_unwritable()
    sys.exit(status)
