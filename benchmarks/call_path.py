"""Counts the files that one gradient passes through, from `update` to the wire and back.

One `update` is traced, not run, for four simulated workers and a tree of a (64, 64) kernel and a
bias, with momentum on and JAX's caches of traced functions empty. `sys.setprofile` sees the calls
of the package's own functions (lambdas, comprehensions and resumed generators, too) in the order
of their starts. A move is a call whose file is not that of the call before it. Returns do not
count, nor does what a decorator puts around a function. Compare counts within one version of Python
only: 3.12 runs comprehensions without a frame.

    python benchmarks/call_path.py                          # dense, spardl, sketched_sgd
    python benchmarks/call_path.py gtopk --files            # and how often each file is entered
    python benchmarks/call_path.py top_k --set selection=exact
"""

import argparse
import ast
import collections
import functools
import inspect
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
WORKERS = 4
WRAPPER = re.compile(r"unwrapped\.<locals>")
USUAL = {"momentum": 0.9, "density": 0.01}  # for every system that has such a setting
SETTINGS = {
    "sketched_sgd": {"k": 8, "cols": 64, "rows": 3},
    "sparcml": {"k": 4},
    "true_top_k": {"k": 8},
}


def transformation(name: str, changed: dict[str, Any]) -> Any:
    """The named transformation with small settings."""
    make = getattr(jaxsparse, name)
    known = inspect.signature(make).parameters
    usual = {setting: value for setting, value in USUAL.items() if setting in known}
    return make(**{"workers": WORKERS, **usual, **SETTINGS.get(name, {}), **changed})


@functools.cache  # asked for each of a million calls
def own_file(code: types.CodeType) -> str | None:
    """The file of a function of the package, unless it is what a decorator puts around one."""
    path = Path(code.co_filename)
    if WRAPPER.search(code.co_qualname) or not path.is_relative_to(PACKAGE):
        return None
    return str(path.relative_to(PACKAGE))


def calls(name: str, changed: dict[str, Any]) -> list[str]:
    """The file of each call of an own function during one `update`, in order."""
    tx = transformation(name, changed)
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

    gradients = jax.tree.map(lambda x: jnp.stack([x] * WORKERS), params)
    jax.clear_caches()
    jax.eval_shape(update, gradients, tx.init(params))
    return files


def entries(files: list[str]) -> collections.Counter[str]:
    """Numbers of entries into each file, from another file or from outside."""
    return collections.Counter(file for file, _ in itertools.groupby(files))


def setting(text: str) -> tuple[str, Any]:
    """`k=8` as a name and a value. A value that is no Python literal is a string."""
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("systems", nargs="*", default=["dense", "spardl", "sketched_sgd"])
    parser.add_argument("--files", action="store_true", help="list the entries into each file")
    parser.add_argument("--set", nargs="+", type=setting, default=[], metavar="NAME=VALUE")
    given = parser.parse_args()
    print("| system | files | moves |\n|---|---|---|")
    found = {name: entries(calls(name, dict(given.set))) for name in given.systems}
    for name, counts in found.items():
        print(f"| `{name}` | {len(counts)} | {counts.total() - 1} |")
    if given.files:
        for name, counts in found.items():
            print(f"\n{name}:")
            for file, count in counts.most_common():
                print(f"  {count:4} {file}")


if __name__ == "__main__":
    main()
