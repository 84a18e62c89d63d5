"""Tests one GPU by one command that ends in time: is it correct and repeatable, is it fast?

    python benchmarks/gpu.py --json gpu.json
    python benchmarks/gpu.py --platform cpu --sizes 16 20 --params 100_000 --minutes 3

Stages run in this order: tests (pytest, chosen for one device; exchanges are bitwise the same at
each run), kernels (times beside their memory traffic), steps (whole updates of simulated workers).
Each stage and each suite of tests has a process of its own, so that one that hangs or runs out of
memory costs no more than its share of the time. The command names everything that it has no time
for. Its exit code is 1 if a test failed or something broke. It needs no installation of jaxsparse,
and torch only for its own rows. On a CPU programs are compiled fast, not to run fast: such a run
shows that the command works.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Shares of the time that is left when a stage starts. Later stages get what it does not need.
SHARES = {"tests": 0.6, "kernels": 0.6, "steps": 1.0}
_LEAST = 8.0  # seconds: nothing starts if less time is left

# Leaves out variants over devices, other settings of the process, and tests that need no chip.
_ONE_DEVICE = (
    "not shard_map and not varying and not on_devices and not x64 and not replicated "
    "and not seed_may_vary and not refused and not refuses and not errors_name and not checked"
)
# Suites of tests, the most telling first.
SUITES: dict[str, list[str]] = {
    "forms": [
        *("tests/test_gpu_forms.py", "--slow"),
        *("-k", "not only_the_seed_may_vary"),
    ],
    "contract": [
        *("tests/test_replicas_repeat.py", "tests/test_contract.py", "--slow"),
        *("-k", "bitwise or among_simulated"),
    ],
    "select": [
        *("tests/test_slots.py", "tests/test_select.py", "tests/test_thresholds.py"),
        *("tests/test_sketch.py", "-k", _ONE_DEVICE),
    ],
    "codecs": [
        *("tests/test_stream.py", "tests/test_block_sketch.py", "tests/test_quantize.py"),
        *("-k", _ONE_DEVICE),
    ],
    "collectives": ["tests/test_collectives.py", "-k", _ONE_DEVICE],
    "feedback": [
        *("tests/test_feedback.py", "-k"),
        "worked_example and -True or one_nan and True- or third_step or oracle or dense_momentum "
        "or rounding_to_half or beyond_float16 or sum_that_overflows or whose_sum_overflows",
    ],
    "small": ["tests/test_contract.py", "-k", "tiny_vectors or no_axis"],
    "hashing": ["tests/test_hashing.py"],
}
Record = dict[str, Any]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    exponent: dict[str, Any] = {"type": int, "choices": range(8, 31), "metavar": "E"}  # of 2^E
    add("--platform", choices=["gpu", "cpu"], default="gpu")
    add("--minutes", type=float, default=9, help="after which it has ended (9)")
    add("--stages", nargs="+", choices=SHARES, default=list(SHARES), help="those to run (all)")
    add("--only", nargs="+", metavar="WORD", help="of the stages but tests: what has one in it")
    add("--sizes", nargs="+", default=[27, 22, 16, 24, 20, 28, 18], **exponent,
        help="of the kernels' vectors: 2^E elements, the first ones first")  # fmt: skip
    add("--params", type=int, default=100_000_000, help="of an update, if they fit (100_000_000)")
    add("--json", metavar="FILE", help="also write all results here")
    # Flags of a process that runs one stage.
    for name, kind in ("--stage", str), ("--seconds", float), ("--records", Path):
        add(name, type=kind, help=argparse.SUPPRESS)
    return parser.parse_args()


# --- processes


def environment(platform: str) -> dict[str, str]:
    """Variables of every process: the platform, shared memory, and how programs are compiled.

    On a GPU they are compiled as users run them. (tests/conftest.py turns optimisations off unless
    the variable is set. The emulated CPU devices that it asks for do no harm there.) On a CPU,
    where times say nothing here, they are compiled without optimisations.
    """
    platforms = "cpu"
    if platform == "gpu":
        # "cpu" is for code that asks for that backend by name. Without a GPU this fails at once.
        platforms = os.environ.get("JAX_PLATFORMS", "cpu")
        platforms = "cuda,cpu" if platforms == "cpu" else platforms
    defaults = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": {"cpu": "1", "gpu": "0"}[platform],
        "PYTHONUNBUFFERED": "1",
    }
    flags = os.environ.get("XLA_FLAGS", "")
    if platform == "gpu" and importlib.metadata.version("jaxlib") in ("0.10.2", "0.11.0"):
        # Without this they compile sums of floats to loops of compare-and-swap, see docs/bytes.md.
        flags += " --xla_backend_extra_options=-nvptx-allow-ftz-atomics"
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    given = {"JAX_PLATFORMS": platforms, "PYTHONPATH": os.pathsep.join(paths), "XLA_FLAGS": flags}
    return defaults | os.environ | given


def status_of(command: list[str], platform: str, seconds: float) -> int | None:
    """Runs a process, and ends it and all that it started. Its status, or None if it was late."""
    env = environment(platform)
    process = subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def outcome(what: str, status: int | None) -> Record:
    """What is told of a process beside its own rows."""
    if status is None:
        return {"skipped": f"the rest of {what}, for lack of time"}
    return {"failed": what, "why": f"its process ended with {status}"} if status else {}


def run_stage(args: argparse.Namespace, name: str, seconds: float, records: Path) -> list[Record]:
    """Runs a stage in its own process, and reads the rows that it wrote."""
    command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--stage", name]
    # A little less than the time after which it is ended.
    command += ["--seconds", str(max(1.0, seconds - 4)), "--records", str(records)]
    end = outcome(f"stage {name}", status_of(command, args.platform, seconds))
    lines = records.read_text().splitlines(keepends=True) if records.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return rows + ([end] if end else [])


def run_tests(args: argparse.Namespace, seconds: float) -> Iterator[Record]:
    """One row for each suite, until time is up."""
    end = time.monotonic() + seconds
    # addopts in pyproject.toml want xdist. Warnings of a newer JAX are not what is tested here.
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=line", "-p", "no:cacheprovider"]
    command += ["-o", "addopts=--import-mode=importlib", "-W", "default"]
    command += ["--continue-on-collection-errors"]
    if (workers := min(6, (os.cpu_count() or 1) // 2)) > 1 and importlib.util.find_spec("xdist"):
        command += ["-n", str(workers)]
    *_, last = SUITES.values()
    for name, suite in SUITES.items():
        # The first suites matter most, but must not take all of the time.
        left = (end - time.monotonic()) / (1 if suite is last else 2)
        late = left < _LEAST / 2
        status = None if late else status_of(command + suite, args.platform, left)
        yield {"suite": name, "status": status} | outcome(f"suite {name}", status)


def run_all(args: argparse.Namespace) -> dict[str, list[Record]]:
    """Runs all stages that there is time for."""
    end = time.monotonic() + 60 * args.minutes
    results: dict[str, list[Record]] = {}
    with tempfile.TemporaryDirectory() as folder:
        # To look for a device takes at most a minute. Without one, tests would run on the CPU.
        limit = min(60.0, end - time.monotonic())
        results["device"] = run_stage(args, "device", limit, Path(folder) / "device")
        if not any("chip" in row for row in results["device"]):
            return results
        for name in (name for name in SHARES if name in args.stages):
            left = end - time.monotonic()
            seconds = left * SHARES[name]
            print(f"\n--- {name}, at most {seconds:.0f} s", flush=True)
            if left < _LEAST:
                results[name] = [outcome(f"stage {name}", None)]
            elif name == "tests":
                results[name] = list(run_tests(args, seconds))
            else:
                results[name] = run_stage(args, name, seconds, Path(folder) / name)
    return results


# --- the report


def line(cells: Any) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def table(rows: list[Record]) -> list[str]:
    """Rows with a name in Markdown. Times of kernels stand side by side, by size."""
    sizes = sorted({row["exponent"] for row in rows if "exponent" in row})
    if sizes:
        cell = lambda row: f"{row['ms']:.3f} ({row['over_floor']:.1f})"
        known = {(row["name"], row["exponent"]): cell(row) for row in rows}
        names = dict.fromkeys(row["name"] for row in rows)
        head = ["kernel: ms (of the floor)", *(f"2^{size}" for size in sizes)]
        cells = [[name, *(known.get((name, size), "") for size in sizes)] for name in names]
    else:
        head = list(rows[0])
        cells = [[f"{x:.4g}" if isinstance(x, float) else x for x in r.values()] for r in rows]
    return [line(head), "|---" * len(head) + "|", *map(line, cells)]


def wrong(results: dict[str, list[Record]]) -> list[str]:
    """Everything that is wrong: failed tests, and stages or kernels that broke."""
    every = (row for rows in results.values() for row in rows)
    return [f"{row['failed']}: {row['why']}" for row in every if "failed" in row]


def report(results: dict[str, list[Record]]) -> str:
    """All results in Markdown."""
    where = {"chip": "no device was reached"}
    for row in results["device"]:
        where |= row
    date = datetime.datetime.now(datetime.UTC).date()
    command = shlex.join(["python", "benchmarks/gpu.py", *sys.argv[1:]])
    lines = [f"## {where.pop('chip')}", "", f"`{command}`, {date}, {where}"]
    lines += [f"- wrong: {problem}" for problem in wrong(results)]
    for name, rows in results.items():
        named = [row for row in rows if "name" in row]
        lines += ["", f"### {name}", "", *(table(named) if named else [])]
        lines += [
            f"- {key}: {row[key]}" for row in rows for key in ("note", "skipped") if key in row
        ]
    return "\n".join(lines)


def main() -> None:
    args = parse_args()
    if args.stage:
        import gpu_kernels

        gpu_kernels.run_stage(args)
        sys.stdout.flush()
        os._exit(0)  # without waiting for programs that still compile
    results = run_all(args)
    print(f"\n{report(results)}")
    if args.json:
        content = {"arguments": vars(args), "results": results}
        Path(args.json).write_text(json.dumps(content, indent=1, default=str))
    sys.exit(1 if wrong(results) else 0)


if __name__ == "__main__":
    main()
