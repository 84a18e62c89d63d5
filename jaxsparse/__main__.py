"""The command line: it predicts and watches. See python -m jaxsparse --help."""

import argparse
import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxsparse.comm.links import Link
from jaxsparse.planner.planning import MEMORY_BANDWIDTH, plan

_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "b": 1e9}
_BANDWIDTH = "a number with its unit, such as 10Gbit or 1.25GB/s"
_TIME = "a number with its unit, such as 1.5s or 120ms"
_IN_A_SECOND = {"ns": 10**9, "us": 10**6, "µs": 10**6, "μs": 10**6, "ms": 1000, "s": 1}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand. Returns the exit code: 0, or 2 if settings don't fit together."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        args.run(args)
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    return 0


def count(text: str) -> int:
    """A whole number of at least 1. `argparse.ArgumentTypeError`: it is another text.

    >>> count("110M"), count("1.5B"), count("84_000")
    (110000000, 1500000000, 84000)
    """
    good = "a whole number from 1 on, such as 84000 or 110M"
    number, prefix = _split(re.sub("[_,]", "", text).lower(), "([kmgtb]?)", good)
    found = number * _PREFIXES[prefix]
    if not 0.5 < found < math.inf or not math.isclose(found, round(found)):
        raise argparse.ArgumentTypeError(f"{text!r} is not {good}")
    return round(found)


def bandwidth(text: str) -> float:
    """Bytes a second. A small b is a bit, a capital B a byte. Errors as from `count`.

    >>> bandwidth("10Gbit"), bandwidth("100mbit/s"), bandwidth("1.25GB/s")
    (1250000000.0, 12500000.0, 1250000000.0)
    """
    number, prefix, unit = _split(text, "([kmgtKMGT]?)(bit|bit/s|bps|b/s|B|B/s)", _BANDWIDTH)
    return number * _PREFIXES[prefix.lower()] / (1 if unit.startswith("B") else 8)


def time(text: str) -> float:
    """Seconds, or 0 without a unit. Errors as from `count`.

    >>> time("50us"), time("2 ms"), time("0")
    (5e-05, 0.002, 0.0)
    """
    number, unit = _split(text, "(ns|us|µs|μs|ms|s|)", _TIME)
    if number and not unit:
        raise argparse.ArgumentTypeError(f"{text!r} has no unit: give {_TIME}")
    return number / _IN_A_SECOND[unit or "s"]


def _split(text: str, unit: str, good: str) -> tuple[Any, ...]:
    """The number of a text, and the groups of its unit, a regular expression."""
    found = re.fullmatch(rf"\s*(\d*\.?\d+(?:[eE][+-]?\d+)?)\s*{unit}\s*", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} can't be read: give {good}")
    return float(found[1]), *found.groups()[1:]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m jaxsparse", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")

    planning = commands.add_parser(
        "plan", help="one recipe for a run as Python, with its hours, bytes and cost, or none"
    )
    planning.set_defaults(run=_plan)
    add = planning.add_argument
    add("--params", type=count, required=True, help="number of elements: 110M, 1.5B")
    which = planning.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--workers",
        type=count,
        metavar="W",
        help="workers that exchange: hosts or sites, or the devices of one host",
    )
    which.add_argument(
        "--islands",
        type=count,
        metavar="N",
        help="islands, which meet in an object store (jaxsparse.islands)",
    )
    add("--bandwidth", type=bandwidth, required=True, help="of a worker: 10Gbit, 1.25GB/s")
    add("--latency", type=time, help="of a message (50us; of islands 20ms)")
    add("--step", type=time, required=True, help="time without its exchange: 120ms")
    add("--steps", type=count, default=100_000, help="of the whole run (100k)")
    add("--optimizer", default="adamw", help="adamw or muon (adamw)")
    add(
        "--nats",
        type=float,
        default=0.1,
        help="of held-out loss that a recipe may cost at most, above dense gradients (0.1)",
    )
    add("--dtype", default="float32", help="of gradients now: float32 or bfloat16 (float32)")
    add(
        "--memory-bandwidth",
        type=bandwidth,
        default=MEMORY_BANDWIDTH,
        help="of a device: 2TB/s (an H100's)",
    )
    add("--json", action="store_true", help="print all recipes as JSON")

    watching = commands.add_parser(
        "islands",
        help="show the last rounds of a run of islands, from its store: whose messages counted, "
        "who was late, and who has posted in the open round",
    )
    watching.set_defaults(run=_islands)
    add = watching.add_argument
    add("url", help="the run's folder, or s3://bucket/run, gs://bucket/run, az://container/run")
    add("--rounds", type=count, default=20, help="number of rounds to show (20)")
    add("--every", type=time, metavar="TIME", help="look again after so long: 5s")
    return parser


def _islands(args: argparse.Namespace) -> None:
    from jaxsparse.islands import Store, watch

    if "://" not in args.url and not Path(args.url).is_dir():  # a store would make it
        raise ValueError(f"{args.url!r} is no folder: give that of a run, or a URL")
    watch.show(Store(args.url), args.rounds, args.every)


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
