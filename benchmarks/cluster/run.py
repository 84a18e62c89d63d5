"""Measures exchanges and training steps on a cluster that one machine emulates, as root.

    python benchmarks/cluster/run.py --hosts 8 --rate 100mbit
    python benchmarks/cluster/run.py --hosts 4 --rate 1gbit --what step --params 1M
    python benchmarks/cluster/run.py --hosts 4 -- examples/multihost/train.py --method top_k

Each host is a network namespace with links of its own and runs one JAX process. Rows go to a JSON
file as they come, and summary.py makes tables and figures of it. If a script stands behind `--`,
all hosts run it instead. README.md beside this file says what such a cluster can show, and what it
cannot.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "examples" / "multihost"))

import namespaces
import transfer
from launch import Outcome, launch
from records import Records

_FOLDER = Path(__file__).parent
_TRAIN = _FOLDER.parents[1] / "examples" / "multihost" / "train.py"
# Settings of glibc that leave freed memory with the process, as on accelerators. Otherwise it gives
# large arrays back at once, and page faults are up to 40 % of an exchange's computing time.
_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "MALLOC_TOP_PAD_": str(2**26),
}
_WHAT = ("exchange", "step", "bytes", "peers", "sparcml", "teams", "end_to_end")


def count(text: str) -> int:
    """The number that 1000000, 1M, 64k or 2^20 stands for."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kM]?)|(\d+)\^(\d+)", text)
    value = 0.0
    if found:
        number, unit, base, exponent = found.groups()
        value = (
            float(base) ** int(exponent)
            if base
            else float(number) * {"k": 1e3, "M": 1e6}.get(unit, 1)
        )
    if value < 1 or value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is no number such as 1000000, 1M, 64k or 2^20")
    return int(value)


def share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} must lie in (0, 1]: 0.01 sends 1 %")
    return value


def rate(text: str) -> namespaces.Rate:
    try:
        return namespaces.Rate(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--hosts", type=positive, default=4, help="how many, from 2 on (default: 4)")
    add("--rate", type=rate, default=namespaces.Rate("100mbit"), help="of each link, either way: "
        "100mbit, 1gbit, none for unshaped (default: 100mbit)")  # fmt: skip
    add("--what", choices=_WHAT, nargs="+", default=["exchange"], help="exchange: one vector; "
        "step: of training a perceptron; bytes, peers, sparcml, teams: exchanges that show what "
        "counters count, research code beside ours, SparCML's algorithms, SparDL's teams; "
        "end_to_end: trains a million parameters on digits (default: exchange)")  # fmt: skip
    add("--params", type=count, nargs="+", metavar="N", help="elements (default: 1M 16M; step: 1M)")
    add("--density", type=share, nargs="+", metavar="D", help="default: 0.01 0.001; step: 0.01")
    add("--systems", nargs="+", metavar="SYSTEM", help="names of tests/at_density.py, or "
        "sketched_sgd:COMPRESSION, ok_topk:CAPACITY_FACTOR, quantized:FORMAT, "
        "sparcml:ALGORITHM[:BITS], spardl:TEAMS:GATHER (default: all)")  # fmt: skip
    add("--methods", nargs="+", default=["dense", "spardl", "sketched_sgd"], metavar="METHOD",
        help="of end_to_end (default: dense spardl sketched_sgd)")  # fmt: skip
    add("--local-steps", type=positive, default=1, metavar="H",
        help="of end_to_end, from one exchange to the next (default: 1)")  # fmt: skip
    add("--repeats", type=positive, default=15, help="of a cell, at most (default: 15)")
    add("--seconds", type=float, default=4.0, help="for the repetitions of a cell, of which there "
        "are at least 3 (default: 4)")  # fmt: skip
    add("--json", type=Path, default=Path("cluster.json"), help="results, which are added to those "
        "that are there (default: cluster.json)")  # fmt: skip
    add("--missing", action="store_true", help="only what this file does not have yet")
    add("--store", type=Path, default=Path.home() / ".cache" / "jaxsparse" / "cluster",
        help="folder that keeps compiled programs")  # fmt: skip
    add("--timeout", type=float, default=3600.0, help="limit in seconds (default: 3600)")
    add("--no-pin", action="store_true", help="leave scheduling to the kernel, see README.md")
    add("--check", action="store_true", help="only show that links have their rate")
    add("script", nargs="*", metavar="-- SCRIPT", help="of Python, and its arguments")
    return parser


def wanted(
    args: argparse.Namespace, parser: argparse.ArgumentParser
) -> tuple[list[Any], dict[str, str]]:
    """The cells, and the reasons why others are not possible. Imports JAX, which takes seconds."""
    import cells

    for system in args.systems or ():
        try:
            # All systems are possible at this density, so that only names are in question.
            cells.budget(cells.Cell("exchange", system, 1_000_000, 0.001), args.hosts)
        except ValueError as error:
            parser.error(f"--systems {system}: {error}")
    found: dict[Any, None] = {}  # in order, each once
    refused: dict[str, str] = {}
    for what in args.what:
        if what == "end_to_end":
            continue
        systems: Sequence[str] = cells.EVERY
        kind, params, density = "exchange", [1_000_000, 16_000_000], [0.01, 0.001]
        if what == "step":
            kind, params, density = "step", [1_000_000], [0.01]
        elif what == "bytes":
            systems, params, density = ("sketched_sgd", "top_k"), [1_000_000], [0.01]
        elif what == "peers":
            systems, params, density = cells.PEERS, [4_000_000], [0.01]
        elif what == "sparcml":
            systems, params, density = cells.SPARCML, [1_000_000], [0.1, 0.01, 0.001]
        elif what == "teams":
            systems, params, density = cells.teams(args.hosts), [4_000_000], [0.01]
        grid = cells.grid(
            [kind], args.systems or systems, args.params or params, args.density or density,
            args.hosts,
        )  # fmt: skip
        found |= dict.fromkeys(grid[0])
        refused |= grid[1]
    return list(found), refused


def measure(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    cells, refused = wanted(args, parser)
    for cell, reason in refused.items():
        print(f"left out: {cell}: {reason}")
    if not cells:
        parser.error("nothing is left to measure")
    if args.missing:
        records = Records(args.json)
        where = {"hosts": args.hosts, "rate": args.rate.name}
        cells = [cell for cell in cells if not records.has(cell._asdict() | where)]
        if not cells:
            print(f"{args.json} has all of them already")
            return 0
    args.store.mkdir(parents=True, exist_ok=True)
    args.store.chmod(0o700)
    plan = {
        "cells": cells,
        "rate": args.rate.name,
        "repeats": args.repeats,
        "seconds": args.seconds,
        "store": str(args.store.resolve()),
        "results": str(args.json.resolve()),
        "root": os.getpid(),
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(plan, file)
        file.flush()
        outcome = start(args, str(_FOLDER / "worker.py"), file.name)
    print(f"{outcome.report}\n{args.json} has all rows that were measured", flush=True)
    return outcome.status


def train(args: argparse.Namespace) -> int:
    """Runs examples/multihost/train.py with each method."""
    records = Records(args.json)
    for method in args.methods:
        name = method if args.local_steps == 1 else f"{method}, every {args.local_steps} steps"
        where = {"method": name, "hosts": args.hosts, "rate": args.rate.name}
        if args.missing and any(where.items() <= run.items() for run in records.training):
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run.json"
            given = ["--method", method, "--local-steps", str(args.local_steps)]
            given += ["--json", str(path)]
            outcome = start(args, str(_TRAIN), *given)
            print(outcome.report, flush=True)
            if outcome.status:
                return outcome.status
            run = json.loads(path.read_text())
        records.add_training(where | run)
    return 0


def start(args: argparse.Namespace, *script: str) -> Outcome:
    """Runs a Python script on all hosts of a fresh cluster."""
    cores = os.cpu_count() or 1
    with namespaces.cluster(args.hosts, args.rate) as up:

        def before(rank: int) -> tuple[str, ...]:
            pin = ("chrt", "--batch", "0", "taskset", "--cpu-list", str(rank % cores))
            return (*up.enter(rank), *(() if args.no_pin else pin))

        return launch(
            (sys.executable, *script),
            args.hosts,
            timeout=args.timeout,
            env={**_MEMORY, **os.environ, "JAX_PLATFORMS": "cpu"},
            wrap=before,
            host=up.address(0),
        )


def check(args: argparse.Namespace) -> int:
    with namespaces.cluster(args.hosts, args.rate) as up:
        found = transfer.ring(up)
    each = ", ".join(f"{value:.1f}" for value in found)
    print(f"{args.hosts} hosts in a ring, {args.rate.name}: {each} Mbit/s of payload")
    if args.rate.payload is None:
        return 0
    nominal = 8e-6 * args.rate.payload
    print(f"nominal: {nominal:.1f}")
    return int(not all(0.9 < value / nominal < 1.1 for value in found))


def main(argv: Sequence[str] | None = None) -> int:
    parser = flags()
    args = parser.parse_args(argv)
    if args.hosts < 2:
        parser.error(f"--hosts {args.hosts}: give at least 2")
    lacking = namespaces.missing()
    if lacking:
        print(f"The emulated cluster needs {lacking}. Nothing was measured.", file=sys.stderr)
        return 0
    began = time.monotonic()
    try:
        if args.check:
            return check(args)
        if args.script:
            outcome = start(args, *args.script)
            print(outcome.report, flush=True)
            return outcome.status
        status = 0
        if set(args.what) != {"end_to_end"}:
            status = measure(args, parser)
        return status or (train(args) if "end_to_end" in args.what else 0)
    except (RuntimeError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{parser.prog}: stopped; {args.json} has the rows so far", file=sys.stderr)
        return 130
    finally:
        print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
