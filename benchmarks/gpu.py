"""Tests one GPU by one command that ends in time: is it correct, is it repeatable, is it fast?

    python benchmarks/gpu.py --json gpu.json
    python benchmarks/gpu.py --platform cpu --sizes 16 20 --params 100_000 --minutes 3

Stages run in this order: tests (pytest, chosen for one device), repeats (decodes are bitwise the
same at each run), kernels (times beside their memory traffic), steps (whole updates of simulated
workers), forms (kernels that CPU and GPU have different forms of, in the form of the other).
Each has a process of its own, so that one that hangs or runs out of memory costs no more than its
share of the time. The command names everything that it has no time for. Its exit code is 1 if a
test failed, replicas would drift apart, or something broke. It needs no installation of jaxsparse,
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
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Shares of the time that is left when a stage starts. Later stages get what it does not need.
SHARES = {"tests": 0.4, "repeats": 0.3, "kernels": 0.6, "steps": 0.7, "forms": 1.0}
_LEAST = 8.0  # seconds: no stage starts if less time is left
_REPORT = 2.0  # seconds for the tables at the end

# Leaves out variants over devices, other settings of the process, and tests that need no chip.
_ONE_DEVICE = (
    "not shard_map and not varying and not on_devices and not x64 and not replicated "
    "and not seed_may_vary and not refused and not refuses and not errors_name and not checked"
)
# Suites of tests, the most telling first.
SUITES: dict[str, list[str]] = {
    "forms": [
        *("tests/test_gpu_forms.py", "--slow", "--thorough"),
        *("-k", "not only_the_seed_may_vary"),
    ],
    "contract": [
        *("tests/test_replicas_repeat.py", "tests/test_contract.py", "--slow", "--thorough"),
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


def exponent(text: str) -> int:
    """E, for vectors of 2^E elements: at least a block of 256, and few enough for int32 indices."""
    if not text.isdecimal() or not 8 <= int(text) <= 30:
        raise argparse.ArgumentTypeError(f"{text!r} must be an int from 8 to 30: 20 is 2^20")
    return int(text)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, suites = parser.add_argument, list(SUITES)
    add("--platform", choices=["gpu", "cpu"], default="gpu")
    add("--minutes", type=float, default=9, help="after which it has ended (9)")
    add("--stages", nargs="+", choices=SHARES, default=list(SHARES), help="those to run (all)")
    add("--only", nargs="+", metavar="WORD", help="of the stages but tests: what has one in it")
    add("--suites", nargs="+", choices=suites, default=suites, help="of tests (all)")
    add(
        "--sizes",
        type=exponent,
        nargs="+",
        metavar="E",
        default=[27, 22, 16, 24, 20, 28, 18],
        help="of the kernels' vectors: 2^E elements, the first ones first (27 22 16 24 20 28 18)",
    )
    add("--repeats", type=int, default=20, help="of each decode (20)")
    add("--repeat-size", type=exponent, metavar="E", default=18, help="of decodes: 2^E (18)")
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


def end_group(process: subprocess.Popen) -> None:
    """Ends a process, if it still runs, and all that it started, which form one session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_process(args: argparse.Namespace, name: str, seconds: float, records: Path) -> list[Record]:
    """Runs a stage in its own process, ends it if it is late, and reads the rows that it wrote."""
    command = [sys.executable, __file__, *sys.argv[1:], "--stage", name]
    # A little less than the time after which it is ended.
    command += ["--seconds", str(max(1.0, seconds - 4)), "--records", str(records)]
    process = subprocess.Popen(command, env=environment(args.platform), start_new_session=True)
    end: dict[str, str] = {}
    try:
        if code := process.wait(seconds):
            end = {"failed": f"stage {name}", "why": f"its process ended with {code}"}
    except subprocess.TimeoutExpired:
        end = {"skipped": f"the rest of {name}, stopped after {seconds:.0f} s"}
    finally:
        end_group(process)
    lines = records.read_text().splitlines(keepends=True) if records.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    if end:
        rows.append({"stage": name, **end})
        print(end, flush=True)
    return rows


def run_all(args: argparse.Namespace) -> dict[str, list[Record]]:
    """Runs all stages that there is time for."""
    end = time.monotonic() + 60 * args.minutes - _REPORT
    results: dict[str, list[Record]] = {}
    with tempfile.TemporaryDirectory() as folder:
        # To look for a device takes at most a minute. Without one, tests would run on the CPU.
        limit = min(60.0, end - time.monotonic())
        results["device"] = run_process(args, "device", limit, Path(folder) / "device")
        if not any("chip" in row for row in results["device"]):
            return results
        for name in (name for name in SHARES if name in args.stages):
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
                results[name] = run_process(args, name, seconds, Path(folder) / name)
    return results


# --- tests


def run_tests(args: argparse.Namespace, seconds: float) -> Iterator[Record]:
    """One row for each suite, until time is up."""
    end = time.monotonic() + seconds
    # addopts in pyproject.toml want xdist. Warnings of a newer JAX are not what is tested here.
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=line", "-p", "no:cacheprovider"]
    command += ["-o", "addopts=--import-mode=importlib", "-W", "default"]
    command += ["--continue-on-collection-errors"]
    if (workers := min(6, (os.cpu_count() or 1) // 2)) > 1 and importlib.util.find_spec("xdist"):
        command += ["-n", str(workers)]
    for name in args.suites:
        left = end - time.monotonic()
        if left < 5:
            yield {"stage": "tests", "skipped": name}
            continue
        # The first suites matter most, but must not take all of the time.
        share = left if name == args.suites[-1] else left / 2
        row = _suite(name, command + SUITES[name], args.platform, share)
        print(row.get("why", ""), *row["said"], sep="\n", flush=True)
        yield {"stage": "tests", **row}


def _suite(name: str, command: list[str], platform: str, seconds: float) -> Record:
    """What pytest said in its last lines. Its exit status is None if time was up before its end."""
    start = time.monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(platform), text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        output, status = process.communicate(timeout=seconds)[0], process.returncode
    except subprocess.TimeoutExpired:
        end_group(process)
        output, status = process.communicate()[0], None
    finally:
        end_group(process)
    tail = output.splitlines()[-15:]
    is_bad = status or any(line.startswith(("FAILED", "ERROR")) for line in tail)
    return {
        "name": name,
        "status": status,
        "seconds": round(time.monotonic() - start, 1),
        "said": tail[-1:],
        **({"failed": name, "why": "\n".join(tail)} if is_bad else {}),
    }


# --- the report


def table(
    title: str, head: Sequence[str], rows: Sequence[Sequence[str]], notes: Iterable[str]
) -> str:
    """A table in Markdown, with notes below it."""
    line = lambda cells: "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    lines = [f"### {title}", ""]
    if rows:
        lines += [line(head), "|---|" + "---:|" * (len(head) - 1), *map(line, rows), ""]
    return "\n".join(lines + [f"- {note}" for note in notes]).rstrip() + "\n"


def _notes(records: list[Record]) -> list[str]:
    notes = [r["note"] for r in records if "note" in r]
    if skipped := [r["skipped"] for r in records if "skipped" in r]:
        notes.append(f"skipped for lack of time: {'; '.join(skipped)}")
    return notes + [f"failed: {r['failed']}: {r['why']}" for r in records if "why" in r]


def _named(records: list[Record]) -> list[Record]:
    return [r for r in records if "name" in r]


def of_tests(records: list[Record]) -> str:
    """What the suites' last lines say."""
    rows = [(r["name"], *r["said"], str(r["status"]), f"{r['seconds']}") for r in _named(records)]
    head = "suite", "pytest's last line", "status (None: stopped)", "s"
    return table("Correctness", head, rows, _notes(records))


def of_repeats(records: list[Record]) -> str:
    """Counts of runs and elements of each decode that differ."""
    rows: list[Sequence[str]] = []
    for r in _named(records):
        unlike = f"{r['runs']} of {r['times'] - 1}" if r["runs"] else "none"
        rows.append((r["name"], unlike, f"{r['most']}", f"{r['between_replicas']}"))
    head = "decode", "runs unlike the first", "elements at most", "unlike between replicas"
    return table("Replicas stay bitwise equal", head, rows, _notes(records))


def of_kernels(records: list[Record]) -> str:
    """Times of all kernels, by size."""
    found = _named(records)
    sizes = sorted({r["size"] for r in found})
    copies = {s: [r["bandwidth"] for r in found if r["size"] == s] for s in sizes}
    note = (
        "the floor: the bytes that have to move, at the bandwidth of a donated x * 2 of that size"
    )
    spans = (f"2^{s}: {min(x) / 1e9:.4g} to {max(x) / 1e9:.4g} GB/s" for s, x in copies.items())
    short = {(r["name"], r["size"]): f"{r['ms']:.3f} ({r['over_floor']:.1f})" for r in found}
    targets = {r["name"]: "" if r["target"] is None else f"{r['target']:g}" for r in found}
    rows = [(name, t, *(short.get((name, s), "") for s in sizes)) for name, t in targets.items()]
    head = ("kernel", "target", *(f"2^{s}" for s in sizes))
    notes = [f"{note}: {', '.join(spans)}"] if sizes else []
    return table("Kernels: ms (of the floor)", head, rows, notes + _notes(records))


def of_forms(records: list[Record], kernels: list[Record]) -> str:
    """Times of the forms for the other kind of device, beside those of this device's forms."""
    own = {(r["name"], r["size"]): r["ms"] for r in _named(kernels)}
    rows: list[Sequence[str]] = []
    for r in _named(records):
        ms = own.get((r["name"], r["size"]))
        usual = (f"{ms:.3f}", f"{r['ms'] / ms:.1f}") if ms else ("", "")
        rows.append((r["name"], f"2^{r['size']}", f"{r['ms']:.3f}", *usual))
    head = "kernel", "size", "ms", "ms of this device's form", "ratio"
    return table("Forms that other devices get", head, rows, _notes(records))


def of_steps(records: list[Record]) -> str:
    """Times and memory of updates."""
    found = _named(records)
    gib = lambda count: f"{count / 2**30:.3f}"
    rows = [(r["name"], f"{r['ms']:.2f}", gib(r["planned_bytes"])) for r in found]
    title = "Updates"
    if found:
        title += f" of {found[0]['params']} parameters, {found[0]['workers']} simulated workers"
    return table(title, ("method", "ms", "GiB as compiled"), rows, _notes(records))


def wrong(results: dict[str, list[Record]]) -> list[str]:
    """Everything that is wrong: failed tests, decodes that differ, stages or kernels that broke."""
    found = []
    for row in (row for rows in results.values() for row in rows):
        if row.get("failed"):
            found.append(f"{row['stage']}: {row.get('why') or row['failed']}")
        if row.get("between_replicas") or (row.get("repeatable") and row["runs"]):
            found.append(f"repeats: {row['name']} differs")
    return found


def block(results: dict[str, list[Record]]) -> str:
    """The report in Markdown."""
    forms = lambda rows: of_forms(rows, results.get("kernels", []))
    makers = {"tests": of_tests, "repeats": of_repeats, "kernels": of_kernels, "steps": of_steps}
    makers["forms"] = forms
    tables = [make(results[name]) for name, make in makers.items() if name in results]
    where = next(
        (row for rows in results.values() for row in rows if "chip" in row),
        {"chip": "no device was reached"},
    )
    versions = [f"{name} {where[name]}" for name in ("jax", "jaxlib") if name in where]
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    command = shlex.join(["python", "benchmarks/gpu.py", *sys.argv[1:]])
    details = ", ".join([f"`{command}`", date, *versions, f"Python {sys.version.split()[0]}"])
    problems = "".join(f"- wrong: {problem}\n" for problem in wrong(results))
    head = f"## {where['chip']}\n\n{details}\n"
    return "\n".join([head, *([problems] if problems else []), *tables])


def main() -> None:
    args = parse_args()
    if args.stage:
        import gpu_kernels

        gpu_kernels.run_stage(args)
        sys.stdout.flush()
        os._exit(0)  # without waiting for programs that still compile
    results = run_all(args)
    text = block(results)
    print(f"\n{text}")
    if args.json:
        content = {"arguments": vars(args), "results": results}
        Path(args.json).write_text(json.dumps(content, indent=1, default=str))
    sys.exit(1 if wrong(results) else 0)


if __name__ == "__main__":
    main()
