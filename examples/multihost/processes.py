"""Flags that let a process find the others, and set how soon it notices a lost one."""

import argparse

import jax
import numpy as np
from jax.experimental import multihost_utils

_LONGEST = 1000  # bytes of an error that processes tell each other


def add_flags(parser: argparse.ArgumentParser) -> None:
    found = "Under Slurm, Open MPI, Kubernetes and launch.py the first three are found; give all "
    add = parser.add_argument_group("processes", f"{found}of them or none.").add_argument
    add("--coordinator", metavar="HOST:PORT", help="of process 0, with a free port there")
    add("--num-processes", type=int, metavar="N", help="of the whole run")
    add("--process-id", type=int, metavar="I", help="0 to N-1")
    add("--heartbeat", type=int, default=15, metavar="SECONDS", help="a process without a sign of "
        "life for so long counts as dead, and the others end (default: 15)")  # fmt: skip


def join(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Joins the run that the flags or a cluster's environment name. Without either, it runs alone.

    Call it before anything touches JAX's devices.
    """
    given = (args.coordinator, args.num_processes, args.process_id)
    if None in given and any(value is not None for value in given):
        parser.error("--coordinator, --num-processes, --process-id: give all three or none")
    if args.coordinator is not None:
        host, _, port = args.coordinator.rpartition(":")
        if not host or not port.isdigit():
            parser.error(f"--coordinator {args.coordinator}: give HOST:PORT")
        if args.num_processes < 1:
            parser.error(f"--num-processes {args.num_processes}: give at least 1")
        if not 0 <= args.process_id < args.num_processes:
            parser.error(
                f"--process-id {args.process_id}: give 0 to {args.num_processes - 1}, as "
                f"--num-processes is {args.num_processes}"
            )
    if args.heartbeat < 2:
        parser.error(f"--heartbeat {args.heartbeat}: give at least 2 seconds")
    try:
        jax.distributed.initialize(
            *given,
            # Otherwise a process started by hand inside a Slurm job would get a single GPU.
            cluster_detection_method=None if args.coordinator is None else "deactivate",
            heartbeat_timeout_seconds=args.heartbeat,
        )
    except ValueError as error:
        if "coordinator_address should be defined" not in str(error):
            raise
        # Neither flags nor environment name other processes.


def first_error(own: str) -> str:
    """The error of the first process that has one, or "". Call it in all processes."""
    cut = own.encode()[:_LONGEST].decode(errors="ignore").encode()
    texts = multihost_utils.process_allgather(np.frombuffer(cut.ljust(_LONGEST), np.uint8))
    stripped = (text.tobytes().decode().strip() for text in texts.reshape(-1, _LONGEST))
    return next(filter(None, stripped), "")
