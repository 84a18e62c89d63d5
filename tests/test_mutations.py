"""tests/mutations.py draws one-line faults that can be run, and says what catches them."""

import ast
import re
import textwrap

import mutations
import pytest
from workers import some


def lines_of(source):
    """Each edited line of a source, once for each edit."""
    source = source.encode()
    faults = [mutations.Fault("", "", edit) for edit in mutations.Finder(source).edits]
    before = source.split(b"\n")
    changed = []
    for fault in faults:
        after = fault.mutated(source).split(b"\n")
        assert len(after) == len(before)
        (line,) = [new for old, new in zip(before, after) if old != new]
        changed.append(line.strip().decode())
    return changed


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a - b", {"a + b", "a"}),
        ("(a * b) + c", {"(a / b) + c", "(a * b) - c", "(a * b)", "c"}),
        ("a += b", {"a -= b"}),
        ("a < b >= c", {"a <= b >= c", "a < b > c"}),
        ("a == b & c", {"a != b & c", "a == b | c"}),
        ("a and not b", {"a or not b", "a and b"}),
        ("~(a)", {"(a)"}),
        ("f(True, 0x1F, -1)", {"f(False, 0x1F, -1)", "f(True, 0x20, -1)", "f(True, 0x1F, -2)"}),
        ("jnp.minimum(a, max(b))", {"jnp.maximum(a, max(b))", "jnp.minimum(a, min(b))"}),
        ("jnp.where(a, (b), c)", {"jnp.where(a, (c), b)"}),
        ("(a) if b else f(c)", {"f(c) if b else (a)"}),
        ("return f(a)", {"return a"}),
        ("return f(a, b)", {"return a"}),
        ("return f(a or b).c", {"return f(a and b).c", "return (a or b).c"}),
        ("return a.astype(b)", {"return a"}),
        ("return jnp.reshape(a, b)", {"return a"}),
        ("é = (  # +\n  'é' , a  # -\n  + # *\n b)", {"- # *"}),
    ],
)
def test_what_becomes_of_a_line(source, expected):
    changed = lines_of(source)
    assert set(changed) == expected
    assert len(changed) == len(expected)


@pytest.mark.parametrize("seed", some(range(3), []))
def test_faults_parse_and_change_one_line_each(seed):
    faults = mutations.drawn(mutations.ROOT, 40, seed)
    places = set()
    for fault in faults:
        before = (mutations.ROOT / fault.path).read_bytes()
        after = fault.mutated(before)
        compile(after, fault.path, "exec")
        assert ast.dump(ast.parse(after)) != ast.dump(ast.parse(before))
        pairs = list(zip(before.split(b"\n"), after.split(b"\n"), strict=True))
        (changed,) = [row for row, (old, new) in enumerate(pairs, 1) if old != new]
        old, new = (line.strip().decode() for line in pairs[changed - 1])
        assert fault.described(mutations.ROOT) == (f"{fault.path}:{changed}", old, new)
        places.add((fault.path, changed))
    assert len(places) == len(faults)


@pytest.fixture
def tree(tmp_path):
    """A library of two lines: one that its tests check, and one that they do not."""
    for name, text in {
        "jaxsparse/__init__.py": "",
        "jaxsparse/arrays/layout.py": "def half(x):\n    return x / 2\n",
        "jaxsparse/arrays/platforms.py": "ROOM = 4\n",
        "tests/test_layout.py": """
            from jaxsparse.arrays import layout
            def test_half():
                assert layout.half(4) == 2
            """,
        "tests/test_room.py": """
            from jaxsparse.arrays import platforms
            def test_room():
                assert platforms.ROOM in (4, 5)
            """,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    return tmp_path


@pytest.mark.slow
def test_faults_are_caught_or_survive(tree, capsys):
    before = {path: path.read_bytes() for path in tree.rglob("*.py")}
    mutations.main(["--count", "2", "--workers", "0", "--skip-unchanged"], root=tree)
    printed = capsys.readouterr().out
    assert re.search(r"^\| 1 \| .*layout.py:2 .*\| tests/test_layout.py::", printed, re.M)
    assert "| 2 | jaxsparse/arrays/platforms.py:1 | `ROOM = 4` | `ROOM = 5` | SURVIVED |" in printed
    assert "1 of 2 caught" in printed
    assert "- survivor 2, jaxsparse/arrays/platforms.py:1: `ROOM = 4` -> `ROOM = 5`" in printed
    assert {path: path.read_bytes() for path in tree.rglob("*.py")} == before
