"""Measures exchanges and training steps on a cluster that one machine emulates, as root.

    python benchmarks/cluster/run.py --hosts 8 --rate 100mbit
    python benchmarks/cluster/run.py --hosts 4 --rate 1gbit --what sparcml
    python benchmarks/cluster/run.py --hosts 4 -- examples/multihost/train.py --method top_k

Each host is a network namespace with links of its own and runs one JAX process. Rows go to a JSON
file as they come, and records.py makes tables of it. If a script stands behind `--`,
all hosts run it instead. README.md beside this file says what such a cluster can show, and what it
cannot.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path[:0] = [str(_EXAMPLES), str(_EXAMPLES / "multihost")]

import namespaces
from digits import number
from launch import Outcome, launch
from records import Records

from jaxsparse.__main__ import count

_FOLDER = Path(__file__).parent
_STORE = Path.home() / ".cache" / "jaxsparse" / "cluster"  # of compiled programs
_TRAIN = _EXAMPLES / "multihost" / "train.py"
# Settings of glibc that leave freed memory with the process, as on accelerators. Otherwise it gives
# large arrays back at once, and page faults are up to 40 % of an exchange's computing time.
_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "MALLOC_TOP_PAD_": str(2**26),
}


def rate(text: str) -> namespaces.Rate:
    try:
        return namespaces.Rate(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--hosts", type=number(int, 1), default=4, help="how many, from 2 on (default: 4)")
    add("--rate", type=rate, default=namespaces.Rate("100mbit"), help="of each link, either way: "
        "100mbit, 1gbit, none for unshaped (default: 100mbit)")  # fmt: skip
    what = ("exchange", "bytes", "peers", "sparcml", "teams", "end_to_end")
    add("--what", choices=what, nargs="+", default=["exchange"], help="exchange: one vector; "
        "bytes, peers, sparcml, teams: exchanges that show what counters count, research code "
        "beside ours, SparCML's algorithms, SparDL's teams; end_to_end: trains a million "
        "parameters on digits (default: exchange)")  # fmt: skip
    add("--params", type=count, nargs="+", metavar="N", help="elements (default: 1M 16M)")
    add("--density", type=number(float, 1e-6, 1.001), nargs="+", metavar="D",
        help="default: 0.01 0.001")  # fmt: skip
    add("--systems", nargs="+", metavar="SYSTEM", help="names of tests/at_density.py, or "
        "sketched_sgd:COMPRESSION, ok_topk:CAPACITY_FACTOR, quantized:FORMAT, "
        "sparcml:ALGORITHM[:BITS], spardl:TEAMS:GATHER (default: all)")  # fmt: skip
    add("--methods", nargs="+", default=["dense", "spardl", "sketched_sgd"], metavar="METHOD",
        help="of end_to_end (default: dense spardl sketched_sgd)")  # fmt: skip
    add("--local-steps", type=number(int, 1), default=1, metavar="H",
        help="of end_to_end, from one exchange to the next (default: 1)")  # fmt: skip
    add("--repeats", type=number(int, 1), default=15, help="of a cell, at most (default: 15)")
    add("--seconds", type=float, default=4.0, help="for the repetitions of a cell, of which there "
        "are at least 3 (default: 4)")  # fmt: skip
    add("--json", type=Path, default=Path("cluster.json"), help="results, which are added to those "
        "that are there (default: cluster.json)")  # fmt: skip
    add("--missing", action="store_true", help="only what this file does not have yet")
    add("--no-pin", action="store_true", help="leave scheduling to the kernel, see README.md")
    add("script", nargs="*", metavar="-- SCRIPT", help="of Python, and its arguments")
    return parser


def wanted(args: argparse.Namespace) -> tuple[list[Any], dict[str, str]]:
    """The cells, and the reasons why others are not possible. Imports JAX, which takes seconds."""
    import cells

    small, middle = [1_000_000], [4_000_000]
    kinds: dict[str, tuple[Sequence[str], list[int], list[float]]] = {
        "exchange": (cells.EVERY, [1_000_000, 16_000_000], [0.01, 0.001]),
        "bytes": (("sketched_sgd", "top_k"), small, [0.01]),
        "peers": (cells.PEERS, middle, [0.01]),
        "sparcml": (cells.SPARCML, small, [0.1, 0.01, 0.001]),
        "teams": (cells.teams(args.hosts), middle, [0.01]),
    }
    found: dict[Any, None] = {}  # in order, each once
    refused: dict[str, str] = {}
    for systems, params, density in (kinds[what] for what in args.what if what in kinds):
        chosen = args.systems or systems
        grid = cells.grid(chosen, args.params or params, args.density or density, args.hosts)
        found |= dict.fromkeys(grid[0])
        refused |= grid[1]
    return list(found), refused


def measure(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    cells, refused = wanted(args)
    for cell, reason in refused.items():
        print(f"left out: {cell}: {reason}")
    if not cells:
        parser.error("nothing is left to measure")
    if args.missing:
        records = Records(args.json)
        where = {"hosts": args.hosts, "rate": args.rate.name}
        cells = [cell for cell in cells if not records.has("rows", cell._asdict() | where)]
        if not cells:
            print(f"{args.json} has all of them already")
            return 0
    _STORE.mkdir(parents=True, exist_ok=True)
    _STORE.chmod(0o700)
    plan = {
        "cells": cells,
        "rate": args.rate.name,
        "repeats": args.repeats,
        "seconds": args.seconds,
        "store": str(_STORE),
        "results": str(args.json.resolve()),
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
        if args.missing and records.has("training", where):
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
        records.add("training", where | run)
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
            timeout=3600.0,
            env={**_MEMORY, **os.environ, "JAX_PLATFORMS": "cpu"},
            wrap=before,
            host=up.address(0),
        )


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
