"""Settings of the docs site, for Sphinx. `generate.py` writes its reference and its systems."""

import importlib.metadata
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import generate
import jax.typing
import optax
from sphinx.util.typing import stringify_annotation

generate.write_pages(HERE)

project = "jaxsparse"
author = "The jaxsparse authors"
project_copyright = "The jaxsparse authors, Apache-2.0"
version = release = importlib.metadata.version("jaxsparse")

extensions = [
    "myst_nb",  # Markdown pages, and notebooks that run
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",  # Google docstrings
    "sphinx.ext.viewcode",
    "sphinx_design",  # tabs, and blocks that open
]
html_theme = "furo"
html_title = "jaxsparse"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = html_show_sourcelink = False
pygments_style, pygments_dark_style = "friendly", "github-dark"

myst_enable_extensions = ["colon_fence", "attrs_inline"]
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True

default_role = "code"  # docstrings have single backticks around code
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
suppress_warnings = ["ref.python"]  # shapes in types ("k") are taken for names
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"


def show_blocks(app, what, name, obj, options, lines):
    """Reads a docstring as it was meant: what is indented by itself is code or a table.

    Elsewhere bars are bars, and a plural may stand directly behind code.
    """
    del app, what, name, obj, options
    text: list[str] = []
    before, block = "", None  # the last line with words; the indent around a block
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if block is not None and line.strip() and indent <= block:
            block = None
        if block is None and line.strip():
            around = len(before) - len(before.lstrip())
            if before and not (text and text[-1].strip()) and indent > around:
                text += [" " * around + "::", ""]
                block = around
            elif not before.lstrip().startswith(("..", ">>>")) and ">>>" not in line:
                parts = re.split(r"(`[^`]+`)", line)
                parts[::2] = (part.replace("|", r"\|") for part in parts[::2])
                line = re.sub(r"(`[^`\s][^`]*`)(?=\w)", r"\1\\ ", "".join(parts))
        before = line if line.strip() else before
        text.append(line)
    lines[:] = text


# Unions that have a name of their own, as signatures write them out.
NAMED = {
    stringify_annotation(optax.ScalarOrSchedule, "smart"): "~optax.ScalarOrSchedule",
    stringify_annotation(jax.typing.DTypeLike, "smart"): "~jax.typing.DTypeLike",
}


def short_types(app, what, name, obj, options, signature, returned):
    """Signatures with names for unions, and without the paths of JAX's insides."""
    del app, what, name, obj, options

    def short(text):
        for union, named in NAMED.items():
            text = text.replace(union, named)
        return re.sub(r"\b(jaxlib\._jax|jaxtyping)\.", "", text)

    return [x and short(x) for x in (signature, returned)]


def follow_links(app, docname, source):
    """Links of hand-written pages to Markdown of the repository lead to the site's copy of it."""
    del app
    folder = (HERE / docname).parent
    source[0] = generate.linked(source[0], folder, folder)


def setup(app):
    """Registers what is our own."""
    app.connect("autodoc-process-signature", short_types)
    app.connect("source-read", follow_links)
    app.connect("autodoc-process-docstring", show_blocks, priority=100)  # before napoleon
    app.connect("env-check-consistency", generate.check_coverage)
