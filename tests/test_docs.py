"""The docs' Python runs, page by page, and the links between the project's pages lead somewhere."""

import pkgutil
import re
from contextlib import nullcontext
from pathlib import Path

import jax
import pytest

from jaxsparse.systems import SYSTEMS

ROOT = Path(__file__).parents[1]
FOLDERS = (".", "docs", "docs/notebooks", "benchmarks", "benchmarks/*", "examples/*")
TEXTS = {path: path.read_text() for folder in FOLDERS for path in ROOT.glob(f"{folder}/*.md")}
PAGES = [ROOT / "README.md"] + [
    path for path in sorted(TEXTS) if path.parent == ROOT / "docs" and "```python" in TEXTS[path]
]
# A block, and the comment before it if it raises or warns: "% raises: words of the message".
BLOCK = re.compile(
    r"(?:^ *% (raises|warns): ([^\n]+)\n)?^( *)`{3,}python\n(.*?)^ *`{3,}$",
    re.DOTALL | re.MULTILINE,
)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)")
NAME = re.compile(r"\bjaxsparse(?:\.[A-Za-z_]\w*)+")


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_python_of_a_page_runs(page, monkeypatch, tmp_path):
    """Runs all blocks in one namespace, from top to end, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    text, names = TEXTS[page], {"__name__": page.stem}
    for block in BLOCK.finditer(text):
        how, message, indent, source = block.groups()
        above = "\n" * text.count("\n", 0, block.start(4))  # errors give lines of the page
        code = compile(above + re.sub(f"^{indent}", "", source, flags=re.MULTILINE), page, "exec")
        words = re.escape(message or "")
        shows = {
            "raises": lambda words=words: pytest.raises(ValueError, match=words),
            "warns": lambda words=words: pytest.warns(UserWarning, match=words),
        }.get(how, nullcontext)
        # With JAX's own defaults.
        with shows(), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            exec(code, names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_block_is_overlooked(page):
    assert len(BLOCK.findall(TEXTS[page])) == TEXTS[page].count("```python")


@pytest.mark.parametrize("path", sorted(TEXTS), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(path):
    elsewhere = re.compile("[a-z]+:|generated/")  # generated/ exists only once the site is built
    links = {link for link in LINK.findall(TEXTS[path]) if not elsewhere.match(link)}
    assert [link for link in links if not (path.parent / link).exists()] == []


@pytest.mark.parametrize("path", sorted(TEXTS), ids=lambda path: str(path.relative_to(ROOT)))
def test_names_lead_to_what_there_is(path):
    if path == ROOT / "CHANGELOG.md":
        return  # it may name what no longer exists
    for name in set(NAME.findall(TEXTS[path])):
        pkgutil.resolve_name(name)


def test_the_table_of_the_readme_names_systems():
    """It need not have all of them, as the docs' generated table has."""
    rows = [line for line in TEXTS[ROOT / "README.md"].splitlines() if line.startswith("| ")]
    cells = [row.split("|")[-2] for row in rows if "`" in row]
    named = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert len(named) == len(set(named)) >= 20
    assert set(named) <= {*SYSTEMS}


SPARSE = re.compile(
    r"\.(?:spardl|\w*top_k|gtopk|sparcml|dgc|dragonn|sketched_sgd|random_k)\([^()]*\),\s*"
    r"(?:optax\.(?:clip\w*|add\w*)\([^()]*\),\s*)*optax\.(?:adam|contrib\.muon|lion)"
)


def test_nothing_puts_sparse_gradients_in_front_of_adam():
    """README says what that costs. Pages, examples and errors write few bits there."""
    code = {
        path: path.read_text()
        for part in ("examples", "jaxsparse")
        for path in ROOT.glob(f"{part}/**/*.py")
    }
    found = {str(path): SPARSE.findall(text) for path, text in (TEXTS | code).items()}
    assert {path: each for path, each in found.items() if each} == {}
    assert SPARSE.search("optax.chain(jaxsparse.spardl(0.1), optax.clip(1.0), optax.adamw(lr))")
