"""Counts the files that one gradient passes through, from `update` to the wire and back.

One `update` is traced, not run, for four simulated workers and a tree of a (64, 64) kernel and a
bias, with momentum on and JAX's caches of traced functions empty. `sys.setprofile` sees the calls
of the package's own functions (lambdas, comprehensions and resumed generators, too) in the order
of their starts. A move is a call whose file is not that of the call before it. Returns do not
count, nor does what a decorator puts around a function. Compare counts within one version of Python
only: 3.12 runs comprehensions without a frame.
"""

import functools
import itertools
import re
import sys
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jaxsparse

PACKAGE = Path(jaxsparse.__file__).parent
WRAPPER = re.compile(r"unwrapped\.<locals>")
SETTINGS: dict[str, dict[str, Any]] = {
    "dense": {},
    "spardl": {"density": 0.01},
    "sketched_sgd": {"k": 8, "cols": 64, "rows": 3},
}


@functools.cache  # asked for each of a million calls
def own_file(code: types.CodeType) -> str | None:
    """The file of a function of the package, unless it is what a decorator puts around one."""
    path = Path(code.co_filename)
    if WRAPPER.search(code.co_qualname) or not path.is_relative_to(PACKAGE):
        return None
    return str(path.relative_to(PACKAGE))


def calls(name: str) -> list[str]:
    """The file of each call of an own function during one `update`, in order."""
    tx = getattr(jaxsparse, name)(workers=4, momentum=0.9, **SETTINGS[name])
    params = {"kernel": jnp.zeros((64, 64)), "bias": jnp.zeros(64)}
    files: list[str] = []

    def note(frame, event, _):
        if event == "call" and (file := own_file(frame.f_code)):
            files.append(file)

    def update(gradients, state):
        sys.setprofile(note)
        try:
            return tx.update(gradients, state, params)
        finally:
            sys.setprofile(None)

    gradients = jax.tree.map(lambda x: jnp.stack([x] * 4), params)
    jax.clear_caches()
    jax.eval_shape(update, gradients, tx.init(params))
    return files


if __name__ == "__main__":
    print("| system | files | moves |\n|---|---|---|")
    for name in SETTINGS:
        files = calls(name)
        moves = sum(one != other for one, other in itertools.pairwise(files))
        print(f"| `{name}` | {len(set(files))} | {moves} |")
