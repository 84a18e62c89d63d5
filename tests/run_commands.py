"""Parses command lines by the parsers of the scripts that they name, and runs none of them.

Reads a JSON list of command lines from stdin, each a list with the script's path first. Writes a
JSON list of what each parser said: "" where it took the command, and null where its script needs a
package that is not installed.
"""

import argparse
import contextlib
import importlib.util
import io
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


class ParsedError(Exception):
    """A parser took the command."""


def parse_args(self, args=None, namespace=None):
    namespace, unknown = self.parse_known_args(args, namespace)
    if unknown:
        self.error(f"unrecognized arguments: {' '.join(unknown)}")
    raise ParsedError


def main_of(script):
    """The script's main function. Modules of other scripts' folders are forgotten."""
    for name, module in list(sys.modules.items()):
        path = Path(getattr(module, "__file__", None) or "/")
        if {ROOT / "benchmarks", ROOT / "examples"} & set(path.parents):
            del sys.modules[name]
    sys.path[0] = str((ROOT / script).parent)
    spec = importlib.util.spec_from_file_location("script", ROOT / script)
    module = sys.modules["script"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def main():
    argparse.ArgumentParser.parse_args = parse_args
    mains, answers = {}, []
    for command in json.load(sys.stdin):
        script, said = command[0], io.StringIO()
        if script not in mains:
            mains[script] = None
            with contextlib.suppress(ModuleNotFoundError):
                mains[script] = main_of(script)
        if mains[script] is None:
            answers.append(None)
            continue
        sys.argv = command
        with (
            contextlib.redirect_stdout(io.StringIO()),  # --help
            contextlib.redirect_stderr(said),
            contextlib.suppress(ParsedError, SystemExit),
        ):
            mains[script]()
            said.write("nothing parsed the flags")
        answers.append(said.getvalue())
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
