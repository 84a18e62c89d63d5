"""The command line: it predicts and watches. See python -m jaxsparse --help."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxsparse.comm.links import Link
from jaxsparse.planner import units
from jaxsparse.planner.planning import MEMORY_BANDWIDTH, plan


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand.

    Args:
        argv: arguments. None: the process's own.

    Returns:
        The exit code: 0, or 2 if settings don't fit together.

    Raises:
        SystemExit: an argument can't be read.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        args.run(args)
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m jaxsparse", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")

    planning = commands.add_parser(
        "plan",
        help="one recipe for a run, with its hours, bytes and cost, or none",
        description='Answers "leave your trainer as it is", or one recipe as Python, with hours, '
        "bytes, and what it cost where it was measured.",
    )
    planning.set_defaults(run=_plan)
    add = planning.add_argument
    add("--params", type=_read(units.count), required=True, help="number of elements: 110M, 1.5B")
    which = planning.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--workers",
        type=_read(units.count),
        metavar="W",
        help="number of workers that exchange: hosts or sites, or the devices of one host",
    )
    which.add_argument(
        "--islands",
        type=_read(units.count),
        metavar="N",
        help="islands that meet in an object store (jaxsparse.islands)",
    )
    add(
        "--bandwidth",
        type=_read(units.bytes_per_second),
        required=True,
        help="of a worker: 10Gbit, 1.25GB/s; NVLink of a host: 450GB/s",
    )
    add("--latency", type=_read(units.seconds), help="of a message (50us; of islands 20ms)")
    add(
        "--step",
        type=_read(units.seconds),
        required=True,
        help="time of a step without its exchange: 120ms",
    )
    add("--steps", type=_read(units.count), default=100_000, help="of the whole run (100k)")
    add("--optimizer", default="adamw", help="adamw or muon (adamw)")
    add(
        "--nats",
        type=float,
        default=0.1,
        help="of held-out loss that a recipe may cost at most, above dense gradients (0.1)",
    )
    add(
        "--dtype",
        default="float32",
        help="in which gradients travel now: float32 or bfloat16 (float32)",
    )
    add(
        "--memory-bandwidth",
        type=_read(units.bytes_per_second),
        default=MEMORY_BANDWIDTH,
        help="of a device: 2TB/s (an H100's)",
    )
    add("--json", action="store_true", help="print all recipes as JSON")

    watching = commands.add_parser(
        "islands",
        help="show who takes part in a run of islands, from its store",
        description="Shows the last rounds of a run of islands: whose messages counted, who was "
        "late, and who has posted in the open round. It reads the store alone.",
    )
    watching.set_defaults(run=_islands)
    add = watching.add_argument
    add("url", help="the run's folder, or s3://bucket/run, gs://bucket/run, az://container/run")
    add("--rounds", type=_read(units.count), default=20, help="number of rounds to show (20)")
    add(
        "--every",
        type=_read(units.seconds),
        metavar="TIME",
        help="look again after this time, until interrupted: 5s",
    )
    return parser


def _islands(args: argparse.Namespace) -> None:
    from jaxsparse.islands import Store, watch

    if "://" not in args.url and not Path(args.url).is_dir():  # a store would make it
        raise ValueError(f"{args.url!r} is no folder: give that of a run, or a URL")
    watch.show(Store(args.url), args.rounds, args.every)


def _read(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _plan(args: argparse.Namespace) -> None:
    is_of_islands = args.islands is not None
    latency = args.latency
    if latency is None:
        latency = 20e-3 if is_of_islands else 50e-6
    found = plan(
        args.params,
        args.islands if is_of_islands else args.workers,
        Link(latency, args.bandwidth),
        args.step,
        islands=is_of_islands,
        steps=args.steps,
        optimizer=args.optimizer,
        nats=args.nats,
        dtype=args.dtype,
        memory_bandwidth=args.memory_bandwidth,
    )
    if not args.json:
        print(found)
        return
    rows = [
        {**row._asdict(), "recipe": str(row.recipe), "cost": row.cost._asdict()}
        for row in (found.dense, *found.forecasts)
    ]
    best = None if found.best is None else str(found.best.recipe)
    content: dict[str, Any] = {"given": found.given, "best": best, "answer": found.answer}
    content |= {"program": found.program, "recipes": rows, "units": "bytes, seconds, hours, nats"}
    print(json.dumps(content, indent=1))


if __name__ == "__main__":
    sys.exit(main())
