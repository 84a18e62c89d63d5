"""Runs programs in a process of their own, or in several by the multi-host example's launcher."""

import contextlib
import importlib.metadata
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "examples" / "multihost"))

from launch import launch as launch
from loops import patient_loops as patient_loops

sys.path.pop()

ROOT = Path(__file__).parents[1]
MULTIHOST = ROOT / "examples" / "multihost"
# XLA's older code generator, where it is still there, compiles in half the time. A program as a
# single module takes half of that again: every module makes its own compiler.
QUICK_FLAG = (
    " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    if importlib.metadata.version("jaxlib").startswith("0.10.")
    else ""
)
# The workers of pytest, and the processes that tests start, share compiled programs: that saves a
# twelfth of the time. The first process makes the folder, and removes it when it ends.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    PROGRAMS = tempfile.TemporaryDirectory(prefix="jaxsparse-programs-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = PROGRAMS.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
# Children have the devices that a test gives them, and not those of conftest.py.
ENV = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {
    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
}
# Settings for a test that need not compile as users do.
QUICK = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": QUICK_FLAG}


def cache_in(folder):
    """Settings of processes that share their compiled programs in a folder."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def python(*command, rc=0, settings=(), **kwargs):
    """Runs Python. Returns its stdout, or its stderr if it has to fail."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env=ENV | dict(settings),
        capture_output=True,
        text=True,
        **kwargs,
    )
    assert done.returncode == rc, done.stdout + done.stderr
    return done.stdout if rc == 0 else done.stderr


def run(script, *flags, cwd, rc=0, compiles_quickly=True, **settings):
    """Runs an example, as `python` does."""
    settings = {"COLUMNS": "80"} | (QUICK if compiles_quickly else {}) | settings
    return python(ROOT / "examples" / script, *flags, cwd=cwd, rc=rc, settings=settings)


@contextlib.contextmanager
def started(script, *flags, cwd, **settings):
    """An example that runs, whose lines can be read as it prints them. An error ends it."""
    with subprocess.Popen(
        [sys.executable, "-u", str(ROOT / "examples" / script), *map(str, flags)],
        cwd=cwd,
        env=ENV | QUICK | settings,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise


def in_processes(command, processes, **settings):
    """The outcome of a run of several processes, and the lines that each printed."""
    lines = [[] for _ in range(processes)]
    take = lambda rank, line: lines[rank].append(line)
    outcome = launch(list(map(str, command)), processes, on_line=take, **settings)
    return outcome, lines
