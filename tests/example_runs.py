"""An example, run as a user runs it: in a process of its own, from any directory."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(script, *flags, cwd, rc=0, compiles_quickly=True):
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    env |= {"PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    if compiles_quickly:
        env |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / script), *map(str, flags)],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == rc, done.stdout + done.stderr
    return done.stdout if rc == 0 else done.stderr
