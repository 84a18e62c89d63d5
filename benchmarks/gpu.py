"""Tests one GPU by one command that ends in time: is it correct, is it repeatable, is it fast?

    python benchmarks/gpu.py --json gpu.json --markdown gpu.md
    python benchmarks/gpu.py --platform cpu --sizes 16 20 --params 100_000 --minutes 3

Stages run in this order: tests (pytest, chosen for one device), repeats (decodes are bitwise the
same at each run), kernels (times beside their memory traffic), steps (whole updates of simulated
workers), forms (kernels that CPU and GPU have different forms of, in the form of the other), trace.
Each has a process of its own, so that one that hangs or runs out of memory costs no more than its
share of the time. The command names everything that it has no time for. Its exit code is 1 if a
test failed, replicas would drift apart, or something broke. It needs no installation of jaxsparse,
and torch only for its own rows. On a CPU programs are compiled fast, not to run fast: such a run
shows that the command works.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import gpu_report
import gpu_tests

# Shares of the time that is left when a stage starts. Later stages get what it does not need.
SHARES = {"tests": 0.4, "repeats": 0.3, "kernels": 0.6, "steps": 0.7, "forms": 0.7, "trace": 1.0}
_LEAST = 8.0  # seconds: no stage starts if less time is left
_REPORT = 2.0  # seconds for the tables at the end


def exponent(text: str) -> int:
    """E, for vectors of 2^E elements: at least a block of 256, and few enough for int32 indices."""
    if not text.isdecimal() or not 8 <= int(text) <= 30:
        raise argparse.ArgumentTypeError(f"{text!r} must be an int from 8 to 30: 20 is 2^20")
    return int(text)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--platform", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--minutes", type=float, default=9, help="after which it has ended (9)")
    parser.add_argument(
        "--stages", nargs="+", choices=SHARES, default=list(SHARES), help="those to run (all)"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="WORD",
        help="of the stages but tests: what has one in its name",
    )
    parser.add_argument(
        "--suites",
        nargs="+",
        choices=gpu_tests.SUITES,
        default=list(gpu_tests.SUITES),
        help="of tests (all)",
    )
    parser.add_argument(
        "--test-workers",
        type=int,
        default=max(1, min(6, (os.cpu_count() or 1) // 2)),
        help="processes of pytest, if xdist is there (half the cores, at most 6)",
    )
    parser.add_argument(
        "--sizes",
        type=exponent,
        nargs="+",
        metavar="E",
        default=[27, 22, 16, 24, 20, 28, 18],
        help="of the kernels' vectors: 2^E elements, the first ones first (27 22 16 24 20 28 18)",
    )
    parser.add_argument("--density", type=float, default=0.001, help="k / size (0.001)")
    parser.add_argument("--repeats", type=int, default=20, help="of each decode (20)")
    parser.add_argument(
        "--repeat-size",
        type=exponent,
        metavar="E",
        default=18,
        help="of decodes: 2^E elements (18)",
    )
    parser.add_argument("--workers", type=int, default=8, help="that are simulated (8)")
    parser.add_argument(
        "--params", type=int, default=100_000_000, help="of an update, if they fit (100_000_000)"
    )
    parser.add_argument("--trace", metavar="DIR", help="profiles of the three slowest kernels")
    parser.add_argument("--json", metavar="FILE", help="also write all results here")
    parser.add_argument("--markdown", metavar="FILE", help="also write the last block here")
    # Flags of a process that runs one stage.
    for name, kind in ("--stage", str), ("--seconds", float), ("--records", Path):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--slowest", nargs="+", default=[], help=argparse.SUPPRESS)
    return parser.parse_args()


def run_stage(args: argparse.Namespace) -> None:
    """Runs one stage in this process."""
    import gpu_kernels
    import gpu_repeats
    import gpu_stage
    import gpu_steps
    import jax

    stage = gpu_stage.Stage(args, args.stage, args.records, args.seconds)
    device = gpu_stage.device()
    if (device.platform == "cpu") != (args.platform == "cpu"):
        sys.exit(f"--platform={args.platform}, but JAX runs on {device}: install jax[cuda13]")
    stage.record(
        chip=device.device_kind,
        platform=device.platform,
        jax=jax.__version__,
        jaxlib=importlib.metadata.version("jaxlib"),
    )
    functions = {
        "device": lambda stage: None,
        "repeats": gpu_repeats.repeats,
        "kernels": gpu_kernels.table,
        "steps": gpu_steps.steps,
        "forms": gpu_kernels.other_forms,
        "trace": gpu_kernels.trace,
    }
    functions[args.stage](stage)


def run_process(
    args: argparse.Namespace, name: str, seconds: float, records: Path, extra: list[str]
) -> list[dict]:
    """Runs a stage in its own process, ends it if it is late, and reads the rows that it wrote."""
    command = [sys.executable, __file__, *sys.argv[1:], "--stage", name]
    # A little less than the time after which it is ended.
    command += ["--seconds", str(max(1.0, seconds - 4)), "--records", str(records), *extra]
    process = subprocess.Popen(
        command, env=gpu_tests.environment(args.platform), start_new_session=True
    )
    end: dict[str, str] = {}
    try:
        if code := process.wait(seconds):
            end = {"failed": f"stage {name}", "why": f"its process ended with {code}"}
    except subprocess.TimeoutExpired:
        end = {"skipped": f"the rest of {name}, stopped after {seconds:.0f} s"}
    finally:
        gpu_tests.end_group(process)
    lines = records.read_text().splitlines(keepends=True) if records.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    if end:
        rows.append({"stage": name, **end})
        print(end, flush=True)
    return rows


def slowest(records: list[dict], count: int = 3) -> list[str]:
    """The library's kernels that are furthest above their floors, at the largest size measured."""
    rows = [r for r in records if "over_floor" in r and "torch" not in r["name"]]
    most = max((r["size"] for r in rows), default=0)
    rows = sorted((r for r in rows if r["size"] == most), key=lambda r: -r["over_floor"])
    return [r["name"] for r in rows[:count]]


def run_all(args: argparse.Namespace) -> dict[str, list[dict]]:
    """Runs all stages that there is time for."""
    end = time.monotonic() + 60 * args.minutes - _REPORT
    results: dict[str, list[dict]] = {}
    with tempfile.TemporaryDirectory() as folder:
        # To look for a device takes at most a minute. Without one, tests would run on the CPU.
        limit = min(60.0, end - time.monotonic())
        results["device"] = run_process(args, "device", limit, Path(folder) / "device", [])
        if not any("chip" in row for row in results["device"]):
            return results
        for name in (name for name in SHARES if name in args.stages):
            extra = []
            if name == "trace":
                kernels = slowest(results.get("kernels", []))
                if not args.trace:
                    continue
                if not kernels:
                    results[name] = [{"stage": name, "note": "no kernel was timed: none is traced"}]
                    continue
                extra = ["--slowest", *kernels]
            left = end - time.monotonic()
            if left < _LEAST:
                print(f"skipped: stage {name}, {left:.0f} s left", flush=True)
                results[name] = [{"stage": name, "skipped": f"stage {name}"}]
                continue
            seconds = left * SHARES[name]
            print(f"\n--- {name}, at most {seconds:.0f} s", flush=True)
            if name == "tests":
                results[name] = list(run_tests(args, seconds))
            else:
                results[name] = run_process(args, name, seconds, Path(folder) / name, extra)
    return results


def run_tests(args: argparse.Namespace, seconds: float) -> Iterator[dict]:
    """Rows of the suites. Each is shown when its suite ends."""
    for row in gpu_tests.run(args.suites, args.platform, seconds, args.test_workers):
        print("\n".join([*row.get("tail", []), str({**row, "tail": "above"})]), flush=True)
        yield {"stage": "tests", **row}


def wrong(results: dict[str, list[dict]]) -> list[str]:
    """Everything that is wrong: failed tests, decodes that differ, stages or kernels that broke."""
    found = []
    for row in (row for rows in results.values() for row in rows):
        if row.get("failed"):
            found.append(f"{row['stage']}: {row.get('why') or row['failures'] or row['failed']}")
        if row.get("between_replicas") or (row.get("repeatable") and row["runs"]):
            found.append(f"repeats: {row['name']} differs")
    return found


def block(args: argparse.Namespace, results: dict[str, list[dict]]) -> str:
    """The report in Markdown. It also shows the same tables on the terminal."""
    tables: list[gpu_report.Table] = []
    makers = {
        "tests": lambda rows: [gpu_report.of_tests(rows)],
        "repeats": lambda rows: [gpu_report.of_repeats(rows)],
        "kernels": gpu_report.of_kernels,
        "steps": lambda rows: [gpu_report.of_steps(rows)],
        "forms": lambda rows: [gpu_report.of_forms(rows, results.get("kernels", []))],
        "trace": lambda rows: [gpu_report.of_trace(rows)],
    }
    for name, make in makers.items():
        if name in results:
            tables += make(results[name])
    for table in tables:
        table.show()
    where = next(
        (row for rows in results.values() for row in rows if "chip" in row),
        {"chip": "no device was reached"},
    )
    versions = [f"{name} {where[name]}" for name in ("jax", "jaxlib") if name in where]
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    command = shlex.join(["python", "benchmarks/gpu.py", *sys.argv[1:]])
    details = ", ".join([f"`{command}`", date, *versions, f"Python {sys.version.split()[0]}"])
    head = f"## {where['chip']}\n\n{details}\n"
    problems = "".join(f"- wrong: {problem}\n" for problem in wrong(results))
    return "\n".join([head, *([problems] if problems else []), *(t.markdown() for t in tables)])


def main() -> None:
    args = parse_args()
    if args.stage:
        run_stage(args)
        sys.stdout.flush()
        os._exit(0)  # without waiting for programs that still compile
    results = run_all(args)
    text = block(args, results)
    print(f"\n{text}")
    if args.markdown:
        Path(args.markdown).write_text(text)
    if args.json:
        content = {"arguments": vars(args), "results": results}
        Path(args.json).write_text(json.dumps(content, indent=1, default=str))
    sys.exit(1 if wrong(results) else 0)


if __name__ == "__main__":
    main()
