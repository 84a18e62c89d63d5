"""The docs' Python runs, page by page, and the links between the project's pages lead somewhere."""

import ast
import importlib
import pkgutil
import re
from contextlib import nullcontext
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = (".", "docs", "docs/notebooks", "benchmarks", "benchmarks/*", "examples/*")
TEXTS = {path: path.read_text() for folder in FOLDERS for path in ROOT.glob(f"{folder}/*.md")}
PAGES = [ROOT / "README.md"] + [
    path for path in sorted(TEXTS) if path.parent == ROOT / "docs" and "```python" in TEXTS[path]
]
BLOCK = re.compile(r"^( *)`{3,}python\n(.*?)^ *`{3,}$", re.DOTALL | re.MULTILINE)
# The last line of a block that fails: an error, and words of its message.
FAILS = re.compile(r"^ *# ValueError: (.+)\n\Z", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)")
NAME = re.compile(r"\bjaxsparse(?:\.[A-Za-z_]\w*)+")


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_python_of_a_page_runs(page, monkeypatch, tmp_path):
    """Runs all blocks in one namespace, from top to end, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    text, names = TEXTS[page], {"__name__": page.stem}
    for block in BLOCK.finditer(text):
        indent, source = block.groups()
        above = "\n" * text.count("\n", 0, block.start(2))  # errors give lines of the page
        code = compile(above + re.sub(f"^{indent}", "", source, flags=re.MULTILINE), page, "exec")
        fails = FAILS.search(source)
        shows = pytest.raises(ValueError, match=re.escape(fails[1])) if fails else nullcontext()
        # With JAX's own defaults.
        with shows, jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            exec(code, names)


def test_no_block_is_overlooked():
    for page in PAGES:
        assert len(BLOCK.findall(TEXTS[page])) == TEXTS[page].count("```python"), page


def test_links_lead_to_files():
    elsewhere = re.compile("[a-z]+:")
    for path, text in TEXTS.items():
        links = {link for link in LINK.findall(text) if not elsewhere.match(link)}
        assert [link for link in links if not (path.parent / link).exists()] == [], path


def test_names_lead_to_what_there_is():
    others = [text for path, text in TEXTS.items() if path.name != "CHANGELOG.md"]  # of the past
    for name in {name for text in others for name in NAME.findall(text)}:
        pkgutil.resolve_name(name)


@pytest.mark.slow
def test_pages_use_each_public_name(monkeypatch):
    pytest.importorskip("sphinx")  # of the docs' requirements
    monkeypatch.syspath_prepend(ROOT / "docs")
    generate = importlib.import_module("generate")
    pages = {path: text for path, text in TEXTS.items() if path.name != "CHANGELOG.md"}
    words = set(re.findall(r"\w+", "".join(pages.values())))
    named = {name for names in generate.entries().values() for name in names}
    assert sorted(named - words) == []


def always_run(file):
    """Names of a file's tests, and whether a test runs without --slow."""
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            yield node.name, "pytest.mark.slow" not in map(ast.unparse, node.decorator_list)


def test_commands_name_tests_that_run_with_their_flags():
    found = re.compile(r"pytest [^`\n]*?(tests/\w+\.py)[^`\n]* -k (\w+)[^`\n]*")
    commands = [match for text in TEXTS.values() for match in found.finditer(text)]
    assert len(commands) > 5
    for command in commands:
        file, word = command.groups()
        runs = [always for name, always in always_run(file) if word in name]
        assert runs, command[0]
        assert any(runs) or "--slow" in command[0], command[0]
