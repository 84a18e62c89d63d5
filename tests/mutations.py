"""Draws one-line faults at random and asks whether the default tests catch them.

A fault replaces one operator, constant, function or term in a line of the library. Lines are drawn
from each part of the library by its number of lines that can hold a fault, so the same seed draws
the same faults as long as the sources stay. Each fault is tried in a copy of the tree.

    python tests/mutations.py --list                    # the faults, without running any test
    python tests/mutations.py --seed 3                  # all of them: hours
    python tests/mutations.py --only 3 17 --tests tests/test_select.py

The first tests to run are those of LIKELY and the doctests of the changed file. The other default
tests follow if these pass. A fault whose run takes too long counts as caught. A survivor is a gap
in the tests or an equivalent program: look at each, and name the equivalent ones where you report.
"""

import argparse
import ast
import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = "jaxsparse"
ARRAYS = ("arrays/layout.py", "arrays/platforms.py")
PARTS = (*ARRAYS, "codecs", "collectives", "feedback", "islands", "select", "sketch")
# Patterns of the tests to run first.
LIKELY = {
    "feedback": ("feedback", "delay", "partition", "accumulators", "contract", "messages"),
    "collectives": (
        *("collectives", "wire", "union", "spardl", "quantized*", "contract", "top_k_family"),
    ),
    "select": ("select", "slots", "thresholds", "gpu_forms", "stream"),
    "sketch": ("sketch", "block_sketch", "gpu_forms", "hashing"),
    "arrays/platforms.py": ("select", "thresholds", "gpu_forms"),
    "islands": ("islands", "histories", "islands_of_processes", "messages"),
    "codecs": ("chunked", "stream", "collectives", "union"),
    "arrays/layout.py": ("layout", "partition", "feedback"),
}
SECONDS = 1800  # for one fault
LEFT_OUT = (".git", "__pycache__", ".*_cache", ".hypothesis", ".venv", "*.egg-info")


class Edit(NamedTuple):
    """The bytes from `start` to `stop`, all in one line, become `text`."""

    start: int
    stop: int
    text: bytes


class Fault(NamedTuple):
    """An edit of a file of the library."""

    part: str  # one of PARTS
    path: str  # path of the file from the root of the tree
    edit: Edit

    def mutated(self, source: bytes) -> bytes:
        return source[: self.edit.start] + self.edit.text + source[self.edit.stop :]

    def described(self, root: Path) -> tuple[str, str, str]:
        """The place as file:line, and this line without and with the fault."""
        source = (root / self.path).read_bytes()
        row = source.count(b"\n", 0, self.edit.start)
        lines = (s.split(b"\n")[row].strip().decode() for s in (source, self.mutated(source)))
        return f"{self.path}:{row + 1}", *lines


OPERATORS = {
    ast.Add: (b"+", b"-"),
    ast.Sub: (b"-", b"+"),
    ast.Mult: (b"*", b"/"),
    ast.Div: (b"/", b"*"),
    ast.FloorDiv: (b"//", b"*"),
    ast.BitAnd: (b"&", b"|"),
    ast.BitOr: (b"|", b"&"),
    ast.Lt: (b"<", b"<="),
    ast.LtE: (b"<=", b"<"),
    ast.Gt: (b">", b">="),
    ast.GtE: (b">=", b">"),
    ast.Eq: (b"==", b"!="),
    ast.NotEq: (b"!=", b"=="),
    ast.And: (b"and", b"or"),
    ast.Or: (b"or", b"and"),
}
NAMES = {"min": b"max", "max": b"min", "minimum": b"maximum", "maximum": b"minimum"}
METHODS = ("astype", "reshape", "view")  # methods of arrays
MODULES = ("jnp", "np", "lax")
ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant)


class Finder(ast.NodeVisitor):
    """Collects the edits of a source, outside of annotations, decorators and error messages."""

    def __init__(self, source: bytes):
        self.source = source
        self.lines = [0, *(found.end() for found in re.finditer(rb"\n", source))]
        self.edits: list[Edit] = []
        self.returns = False  # within a return statement
        self.visit(ast.parse(source))

    def span(self, node: ast.AST) -> tuple[int, int]:
        start = self.lines[node.lineno - 1] + node.col_offset
        return start, self.lines[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.AST) -> bytes:
        return self.source[slice(*self.span(node))]

    def add(self, start: int, stop: int, text: bytes) -> None:
        before = self.source[start:stop]
        if before != text and b"\n" not in before + text:
            self.edits.append(Edit(start, stop, text))

    def between(self, left: ast.AST, right: ast.AST, symbol: bytes) -> int:
        """Where `symbol` stands between two nodes."""
        start, stop = self.span(left)[1], self.span(right)[0]
        gap = re.sub(rb"#[^\n]*", lambda found: b" " * len(found[0]), self.source[start:stop])
        return start + gap.index(symbol)

    def operator(self, left: ast.AST, op: ast.AST, right: ast.AST) -> None:
        if type(op) in OPERATORS:
            symbol, other = OPERATORS[type(op)]
            at = self.between(left, right, symbol)
            self.add(at, at + len(symbol), other)

    # Nodes that hold no faults.

    def visit_Raise(self, node):
        pass

    visit_Assert = visit_JoinedStr = visit_arg = visit_Raise  # noqa: N815

    def visit_FunctionDef(self, node):
        if node.name != "__repr__":
            self.visit(node.args)
            for statement in node.body:
                self.visit(statement)

    def visit_ClassDef(self, node):
        for statement in node.body:
            self.visit(statement)

    def visit_AnnAssign(self, node):
        if node.value is not None:
            self.visit(node.value)

    def visit_If(self, node):
        if "TYPE_CHECKING" not in ast.unparse(node.test):
            self.generic_visit(node)

    def visit_Subscript(self, node):
        if getattr(node.value, "id", "") != "Literal":
            self.generic_visit(node)

    # Nodes that hold faults.

    def visit_BinOp(self, node):
        operands = (node.left, node.right)
        if not any(isinstance(x, ast.Constant) and isinstance(x.value, str) for x in operands):
            self.operator(node.left, node.op, node.right)
            if isinstance(node.op, ast.Add | ast.Sub):
                start, stop = self.span(node)
                at = self.between(*operands, OPERATORS[type(node.op)][0])
                self.add(start, stop, self.source[start:at].strip())
                if isinstance(node.op, ast.Add):
                    self.add(start, stop, self.source[at + 1 : stop].strip())
        self.generic_visit(node)

    def visit_AugAssign(self, node):
        self.operator(node.target, node.op, node.value)
        self.generic_visit(node)

    def visit_Compare(self, node):
        operands = [node.left, *node.comparators]
        for left, op, right in zip(operands, node.ops, node.comparators):
            self.operator(left, op, right)
        self.generic_visit(node)

    def visit_BoolOp(self, node):
        for left, right in zip(node.values, node.values[1:]):
            self.operator(left, node.op, right)
        self.generic_visit(node)

    def visit_UnaryOp(self, node):
        sign = {ast.Not: rb"not\s*", ast.Invert: rb"~"}.get(type(node.op))
        if sign is not None:
            start, _ = self.span(node)
            self.add(start, re.compile(sign).match(self.source, start).end(), b"")
        self.generic_visit(node)

    def visit_IfExp(self, node):
        start, stop = self.span(node)
        first = self.between(node.body, node.test, b"if")
        second = self.between(node.test, node.orelse, b"else")
        body, test = self.source[start:first].strip(), self.source[first:second]
        orelse = self.source[second + 4 : stop].strip()
        self.add(start, stop, orelse + b" " + test + b"else " + body)
        self.generic_visit(node)

    def visit_Constant(self, node):
        if isinstance(node.value, bool):
            self.add(*self.span(node), str(not node.value).encode())
        elif isinstance(node.value, int):
            written = hex if self.text(node).lower().startswith(b"0x") else str
            self.add(*self.span(node), written(node.value + 1).encode())

    def visit_Return(self, node):
        call = node.value
        if isinstance(call, ast.Call) and call.args and len(call.args) + len(call.keywords) > 1:
            self.without(call)
        self.returns = True
        self.generic_visit(node)
        self.returns = False

    def visit_Call(self, node):
        stop = self.span(node.func)[1]
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name in NAMES:
            self.add(stop - len(name), stop, NAMES[name])
        if name == "where" and len(node.args) == 3:
            (start, _), (_, stop) = self.span(node.args[1]), self.span(node.args[2])
            middle = self.source[self.span(node.args[1])[1] : self.span(node.args[2])[0]]
            self.add(start, stop, self.text(node.args[2]) + middle + self.text(node.args[1]))
        if self.returns and len(node.args) == 1 and not node.keywords:
            self.without(node)
        self.generic_visit(node)

    def without(self, call: ast.Call) -> None:
        """Adds an edit from a call to its first argument, or to the array before a method."""
        func, kept = call.func, call.args[0]
        if isinstance(func, ast.Attribute) and func.attr in METHODS:
            kept = kept if ast.unparse(func.value) in MODULES else func.value
        if not isinstance(kept, ast.Starred):
            text = self.text(kept)
            self.add(*self.span(call), text if isinstance(kept, ATOMS) else b"(" + text + b")")


def places(root: Path, part: str) -> list[list[Fault]]:
    """The faults of each line that can hold one."""
    top = root / PACKAGE / part
    found: dict[tuple[str, int], list[Fault]] = {}
    for file in sorted(top.rglob("*.py")) if top.is_dir() else [top]:
        source = file.read_bytes()
        for edit in Finder(source).edits:
            fault = Fault(part, str(file.relative_to(root)), edit)
            found.setdefault((fault.path, source.count(b"\n", 0, edit.start)), []).append(fault)
    return [found[place] for place in sorted(found)]


def parses(root: Path, fault: Fault) -> bool:
    try:
        ast.parse(fault.mutated((root / fault.path).read_bytes()))
    except SyntaxError:
        return False
    return True


def drawn(root: Path, count: int, seed: int) -> list[Fault]:
    """`count` faults in different lines, shared by the parts in proportion to their lines."""
    rng = random.Random(seed)
    lines = {part: places(root, part) for part in PARTS if (root / PACKAGE / part).exists()}
    total = sum(map(len, lines.values()))
    quota = {part: count * len(own) / total for part, own in lines.items()}
    share = {part: max(1, int(exact)) for part, exact in quota.items()}
    while sum(share.values()) != count:
        off = 1 if sum(share.values()) < count else -1
        share[max(share, key=lambda part: off * (quota[part] - share[part]))] += off
    found: list[Fault] = []
    for part, own in lines.items():
        choices = (rng.choice(faults) for faults in rng.sample(own, len(own)))
        fine = (fault for fault in choices if parses(root, fault))
        found += sorted(itertools.islice(fine, share[part]), key=lambda f: (f.path, f.edit))
    return found


def failure(copy: Path, arguments: list[str], seconds: float) -> str | None:
    """The test that fails first, or None if none fails."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    # An installed package must not hide the copy. Python tells a stale .pyc file by the source's
    # time and size, which a fault may not change.
    env = {**kept, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-n", "2", "-x", "-q", "-rfE", "--tb=no"]
    with subprocess.Popen(
        [*command, "-p", "no:cacheprovider", *arguments],
        cwd=copy,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as run:
        try:
            output, _ = run.communicate(timeout=max(seconds, 1))
        except subprocess.TimeoutExpired:
            return "no end in time"
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
    if run.returncode in (0, 5):  # 5: there is no test
        return None
    named = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
    return named[1] if named else (output.strip().splitlines() or ["no output"])[-1]


def likely(copy: Path, fault: Fault) -> list[str]:
    files = [fault.path]
    for pattern in LIKELY.get(fault.part, ()):
        found = sorted((copy / "tests").rglob(f"test_{pattern}.py"))
        assert found, f"LIKELY: no file is called test_{pattern}.py"
        files += [str(file.relative_to(copy)) for file in found]
    return list(dict.fromkeys(files))


def caught_by(copy: Path, fault: Fault, tests: list[str]) -> str | None:
    """The test that catches the fault in the copy, or None. The copy is restored afterwards."""
    file = copy / fault.path
    source = file.read_bytes()
    file.write_bytes(fault.mutated(source))
    deadline = time.monotonic() + SECONDS
    try:
        if tests:
            return failure(copy, tests, SECONDS)
        first = likely(copy, fault)
        others = [f"--ignore={name}" for name in first]
        return failure(copy, first, SECONDS) or failure(copy, others, deadline - time.monotonic())
    finally:
        file.write_bytes(source)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40, help="how many faults are drawn")
    parser.add_argument("--list", action="store_true", help="list the faults and run nothing")
    parser.add_argument("--only", type=int, nargs="+", default=[], help="numbers in the list")
    parser.add_argument("--tests", nargs="+", default=[], help="run these instead of the default")
    given = parser.parse_args()
    faults = dict(enumerate(drawn(ROOT, given.count, given.seed), 1))
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        if not given.list:
            shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT_OUT))
            if (failed := failure(copy, given.tests, SECONDS)) is not None:
                raise SystemExit(f"the tests fail without any fault: {failed}")
        for i in given.only or faults:
            place, before, after = faults[i].described(ROOT)
            print(f"{i:3} {place}\n    {before}\n    {after}", flush=True)
            if given.list:
                continue
            test = caught_by(copy, faults[i], given.tests)
            print(f"    {test or 'SURVIVED'}", flush=True)
            survivors += [i] * (test is None)
    if not given.list:
        print(f"survivors: {survivors}")


if __name__ == "__main__":
    main()
