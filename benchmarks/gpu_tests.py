"""Runs the correctness tests that make sense on one device, in a subprocess of gpu.py."""

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

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

# An outcome as pytest -v prints it, with xdist and without.
_OUTCOME = re.compile(
    r"^(?:\[gw\d+\] \[[\s\d]+%\] (?P<parallel>[A-Z]+) (?P<test>.+?)|"
    r"(?P<name>\S*::.+?) (?P<outcome>PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b.*)\s*$"
)
_COLLECTING = re.compile(r"^ERROR (?P<file>tests/\S+)")


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
        # Without this they compile sums of floats to loops of compare-and-swap, see results/gpu.md.
        flags += " --xla_backend_extra_options=-nvptx-allow-ftz-atomics"
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    given = {"JAX_PLATFORMS": platforms, "PYTHONPATH": os.pathsep.join(paths), "XLA_FLAGS": flags}
    return defaults | os.environ | given


def outcomes(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Names and outcomes of the tests in pytest's output, which may be cut short."""
    for line in lines:
        if found := _OUTCOME.match(line):
            yield found["test"] or found["name"], found["parallel"] or found["outcome"]
        elif found := _COLLECTING.match(line):
            yield found["file"], "ERROR"


def run(names: Sequence[str], platform: str, seconds: float, workers: int) -> Iterator[dict]:
    """One row of results for each suite, until time is up.

    Args:
        names: names of suites.
        platform: "gpu" or "cpu".
        seconds: time for all suites.
        workers: number of pytest's processes. Without xdist there is one.
    """
    if importlib.util.find_spec("pytest") is None:
        yield {"note": "pytest is not installed: no test was run"}
        return
    end = time.monotonic() + seconds
    # addopts in pyproject.toml want xdist. Warnings of a newer JAX are not what is tested here.
    command = [sys.executable, "-m", "pytest", "-v", "--tb=line", "-p", "no:cacheprovider"]
    command += ["-o", "addopts=--import-mode=importlib", "-W", "default"]
    command += ["--continue-on-collection-errors"]
    if workers > 1 and importlib.util.find_spec("xdist"):
        command += ["-n", str(workers)]
    for name in names:
        left = end - time.monotonic()
        if left < 5:
            yield {"skipped": name}
            continue
        # The first suites matter most, but must not take all of the time.
        share = left if name == names[-1] else left / 2
        yield _suite(name, command + SUITES[name], platform, share)


def _suite(name: str, command: list[str], platform: str, seconds: float) -> dict[str, Any]:
    start = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(platform),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    complete = True
    try:
        output = process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        complete = False
        end_group(process)
        output = process.communicate()[0]
    finally:
        end_group(process)
    lines = output.splitlines()
    found = dict(outcomes(lines))
    count = {kind: list(found.values()).count(kind) for kind in ("PASSED", "FAILED", "ERROR")}
    bad = [test for test, outcome in found.items() if outcome in ("FAILED", "ERROR")]
    return {
        "name": name,
        "passed": count["PASSED"],
        "failed": count["FAILED"] + count["ERROR"],
        "failures": bad,
        "complete": complete,
        "seconds": round(time.monotonic() - start, 1),
        # pytest's own: 0 and 1 are outcomes of tests. With anything else it did not run them.
        "returncode": process.returncode,
        "tail": lines[-15:] if bad or not found else [],
    }


def end_group(process: subprocess.Popen) -> None:
    """Ends a process, if it still runs, and all that it started, which form one session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
