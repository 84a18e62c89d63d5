"""Writes the pages that the package itself determines: the reference, and the page of systems.

`check_coverage` then fails the build if a public name is missing there, or has no docstring.
"""

import ast
import dataclasses
import importlib
import inspect
import os
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from sphinx.errors import ExtensionError

import jaxsparse
from jaxsparse import traffic
from jaxsparse.feedback.options import Options

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from at_density import settings_at
from table import EXCHANGES, Row

# Modules of the reference, with what they have. The modules that `jaxsparse`
# imports as modules must be here. The others have names that a reader of these meets.
MODULES = {
    "jaxsparse": "Training",
    "jaxsparse.reducers": "Reducers, and their contract",
    "jaxsparse.contrib": "Exchanges that promise less",
    "jaxsparse.outer": "Local steps and outer optimizers",
    "jaxsparse.islands": "Islands",
    "jaxsparse.planner": "Planner",
    "jaxsparse.traffic": "Bytes of programs",
    "jaxsparse.collectives": "Collectives",
    "jaxsparse.select": "Selection",
    "jaxsparse.sketch": "Count sketch",
    "jaxsparse.quantize": "Quantisation",
    "jaxsparse.codecs": "Wire formats",
    "jaxsparse.arrays.stream": "Sparse vectors",
    "jaxsparse.arrays.blocks": "Blocks",
    "jaxsparse.arrays.layout": "Gradient trees and flat buckets",
    "jaxsparse.feedback": "Error feedback",
    "jaxsparse.training.diagnostics": "Diagnostics",
    "jaxsparse.training.checksums": "Checksums of saved states",
}
# Pages that are Markdown files of the repository.
COPIES = {
    "results": "benchmarks/README.md",
    "planning": "benchmarks/planning.md",
    "cluster": "benchmarks/cluster/README.md",
    "islands_example": "examples/islands/README.md",
    "contributing": "CONTRIBUTING.md",
    "changelog": "CHANGELOG.md",
}
# The results by question, in the order of their index.
INDEX = Path(__file__).parents[1] / "benchmarks/README.md"
RESULTS = dict.fromkeys(re.findall(r"\(results/(\w+)\.md\)", INDEX.read_text()))
COPIES |= {f"results_{name}": f"benchmarks/results/{name}.md" for name in RESULTS}
# Sources whose links lead to a generated page on the site, and to themselves elsewhere.
SOURCES = {"systems": "jaxsparse/exchanges.py", "reference": "jaxsparse/__init__.py"}
PARAMS, WORKERS, DENSITY = 2**20, 8, 0.01  # settings of the bytes on the page of systems


def public_names(name: str) -> list[str]:
    """The public names of a module: `__all__`, `from m import x as x`, and its own definitions."""
    module = importlib.import_module(name)
    source = ast.parse(inspect.getsource(module)).body
    if hasattr(module, "__all__") and name != "jaxsparse":
        return sorted(module.__all__, key=str.lower)
    names = list(getattr(module, "__all__", ()))
    for node in source:
        if isinstance(node, ast.ImportFrom):
            names += [a.name for a in node.names if a.name == a.asname]
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.append(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.append(node.target.id)  # constants have a type
    return sorted({x for x in names if x[0] != "_"}, key=str.lower)


def entries() -> dict[str, dict[str, str]]:
    """Public names on each page of the reference, with the paths under which users find them.

    If `jaxsparse` exports a name of a module with its own page, the name is on that page, under its
    short path.
    """
    top = public_names("jaxsparse")
    pages: dict[str, dict[str, str]] = {}
    for module in MODULES:
        names = public_names(module)
        home = importlib.import_module(module)
        short = lambda x, home=home: getattr(jaxsparse, x, None) is getattr(home, x)
        pages[module] = {
            x: f"jaxsparse.{x}" if x in top and short(x) else f"{module}.{x}" for x in names
        }
    specific = {
        p for module, names in pages.items() if module != "jaxsparse" for p in names.values()
    }
    pages["jaxsparse"] = {
        x: path
        for x, path in pages["jaxsparse"].items()
        if path not in specific and not inspect.ismodule(getattr(jaxsparse, x))
    }
    return pages


def write_pages(docs: Path) -> None:
    """Writes the generated pages into `docs/generated`."""
    folder = docs / "generated"
    folder.mkdir(exist_ok=True)
    for page, source in COPIES.items():
        path = docs.parent / source
        text = linked(path.read_text(), path.parent, folder)
        if page == "results":
            text += TOCTREE.format(pages="\n".join(f"results_{name}" for name in RESULTS))
        write(folder / f"{page}.md", text)
    for name, names in entries().items():
        write(folder / f"{name}.md", module_page(name, MODULES[name], names))
    rows = "\n".join(f"| [`{name}`]({name}.md) | {what} |" for name, what in MODULES.items())
    write(folder / "reference.md", REFERENCE.format(rows=rows, toctree="\n".join(MODULES)))
    write(folder / "systems.md", systems_page())


def write(path: Path, text: str) -> None:
    """Writes a page if its text has changed, so that Sphinx builds only such pages again."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


TOCTREE = """
```{{toctree}}
:hidden:

{pages}
```
"""
REFERENCE = """# Reference

Every public name, from its docstring: arguments with shapes, dtypes and units, results, and errors.

| module | what it has |
|---|---|
{rows}

From 0.9 on, a name that stands here keeps its meaning. A release that renames or removes one keeps
the old one for one more release, with a `DeprecationWarning` that says what to write.
`jaxsparse.contrib` may change at once. So may names that stand on no page, and where files lie.
Saved states are restored by releases with the same second number; between others, begin with a new
state, or restore the parameters alone. All islands of a run take one release.

```{{toctree}}
:hidden:

{toctree}
```
"""


def kind_of(value: Any) -> str:
    """The word of Sphinx for a value."""
    if inspect.isclass(value):
        return "class"
    return "function" if inspect.isroutine(value) else "data"


def module_page(name: str, title: str, names: dict[str, str]) -> str:
    """A page of the reference: the module's docstring, then each public name."""
    module = importlib.import_module(name)
    lines = [f".. automodule:: {name}", "   :no-members:", ""]
    for public, path in names.items():
        value = getattr(module, public)
        kind = kind_of(value)
        if kind == "data":
            home = path.removesuffix(f".{public}")
            lines += [f".. py:data:: {public}", f"   :module: {home}", ""]
            lines += [f"   {comment_of(module, public)}", ""]
            continue
        lines += [f".. auto{kind}:: {path}"]
        if kind == "class":
            lines += ["   :members:", "   :special-members: __call__"]
        lines.append("")
    body = "\n".join(lines)
    return f"# `{name}`\n\n{title}\n\n```{{eval-rst}}\n{body}\n```\n"


def comment_of(module: Any, name: str) -> str:
    """The comment above a constant. Without a comment, its value."""
    lines, comment = inspect.getsource(module).splitlines(), []
    for line in reversed(lines[: next((i for i, x in enumerate(lines) if x.startswith(name)), 0)]):
        if not line.startswith("# "):
            break
        comment.insert(0, line[2:])
    return " ".join(comment) or f"`{getattr(module, name)}`"


def linked(text: str, source: Path, page: Path) -> str:
    """Markdown of a file in the folder `source`, with links that hold for a page in `page`."""
    docs = Path(__file__).parent
    pages = (COPIES | SOURCES).items()
    copies = {docs.parent / file: docs / f"generated/{name}.md" for name, file in pages}

    def follow(match: re.Match[str]) -> str:
        file = Path(os.path.normpath(source / match[1]))
        if re.match(r"[a-z]+:", match[1]) or not file.exists():
            return match[0]
        file = copies.get(file, file)
        scheme = "path:" if file.suffix == ".md" and not file.is_relative_to(docs) else ""
        return f"]({scheme}{os.path.relpath(file, page)}{match[2] or ''})"

    return re.sub(r"\]\(([^)#\s]+)(#[^)\s]*)?\)", follow, text)


def systems_page() -> str:
    """One section for each row of the table of systems."""
    rows = [
        "| | what it does | bytes that a worker receives in a step |",
        "|---|---|---|",
        *(
            f"| [`{call(s)}`](#{anchor(s)}) | {s.summary} | {s.received} |"
            for s in EXCHANGES.values()
        ),
    ]
    sections = "\n".join(section(system) for system in EXCHANGES.values())
    options = "\n".join(f"- `{name}`: {text}" for name, text in OPTIONS.items())
    return SYSTEMS_PAGE.format(table="\n".join(rows), sections=sections, options=options)


SYSTEMS_PAGE = """# Systems

Each is a transformation that takes the place of the mean of the gradients. d is the number of
compressed elements, W the number of workers, and k = density d. Sparse systems send 8 bytes an
entry; `codec=jaxsparse.codecs.Packed()` sends 4, and keeps the rounding in the residual.

This page is generated from the table in `jaxsparse/reducers`. *Measured* bytes are those that one
worker receives in a step, from the traced program: one matrix of 1024 x 1024 parameters, 8 workers,
a density of 1 %, or the nearest that the system has.

{table}

All of them take the [options below](#options-of-all-systems).

{sections}

## Options of all systems

{options}
"""


def options_of(function: Any) -> dict[str, str]:
    """The options of an exchange and what they do, from the docstring that describes them."""
    doc = inspect.cleandoc(function.__doc__ or "")
    entries = re.findall(r"^    (\w+): ((?:.|\n     )*)", doc.partition("Args:\n")[2], re.MULTILINE)
    return {name: text for name, text in entries if name in Options.__annotations__}


OPTIONS = options_of(jaxsparse.exchange)


def call(system: Row) -> str:
    """The call of a system, with the arguments that need no name."""
    parameters = inspect.signature(system.transformation).parameters.values()
    named = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    return f"{system.name}({', '.join(named)})"


def anchor(system: Row) -> str:
    """The anchor of a system's section."""
    return system.name.replace("_", "-")


CONSERVED = {
    "exact": "the workers' vectors add up to what the mean delivers plus the residuals, exactly",
    "to rounding": "the workers' vectors add up to what the mean delivers plus the residuals, up "
    "to the rounding of each value",
    "to group rounding": "the workers' vectors add up to what the mean delivers plus the "
    "residuals, up to the rounding of the largest of the values that share a scale or a transform",
    "in expectation": "the mean is unbiased: right on average over random draws",
    "leaks": "part of the workers' vectors is lost: see the settings",
}


def written(value: Any) -> str:
    """A setting as a Python expression. A dataclass shows the fields that are not defaults.

    >>> written(12.0), written(jaxsparse.codecs.Packed())
    ('12', 'jaxsparse.codecs.Packed()')
    """
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    if not dataclasses.is_dataclass(value):
        return repr(value)
    given = {
        field.name: getattr(value, field.name)
        for field in dataclasses.fields(value)
        if getattr(value, field.name) != field.default
    }
    package, name = type(value).__module__.split(".")[1], type(value).__name__
    return called(f"jaxsparse.{package}.{name}", **given)


def called(function: str, *args: Any, **settings: Any) -> str:
    """A call as Python."""
    parts = [*map(written, args), *(f"{name}={written(x)}" for name, x in settings.items())]
    return f"{function}({', '.join(parts)})"


def section(system: Row) -> str:
    """The paper, what is conserved, bytes and defaults of a system."""
    reducer = system.reducer(**system.cases[""].small).split((600,))[0]
    doc = inspect.cleandoc(system.transformation.__doc__ or "")
    if (
        f"See `reducers.{type(reducer).__name__}`" in doc
        or f"See `{type(reducer).__name__}`" in doc
    ):
        doc = inspect.cleandoc(type(reducer).__doc__ or "")
    first, *rest = doc.split("\n\n")
    text = [p for p in rest if not p.startswith(("Args:", "Raises:", "Returns:", "Example:"))]
    parameters = inspect.signature(system.transformation).parameters.values()
    own = [p for p in parameters if p.name not in OPTIONS and p.kind is not p.VAR_KEYWORD]
    settings = ", ".join(
        f"`{p.name}`" if p.default is p.empty else f"`{p.name}={written(p.default)}`" for p in own
    )
    given = settings_at(system.name, DENSITY, PARAMS)
    shown = called(system.path, **given)
    gradient = {"kernel": jax.ShapeDtypeStruct((2**10, PARAMS // 2**10), jnp.float32)}
    moved = traffic.traced_bytes(system.transformation(**given), gradient, WORKERS)
    conserved = CONSERVED[reducer.conservation]
    if system.law == "differences":
        conserved = "the update is the mean of the workers' momenta, less that of their residuals"
    lines = [
        f"({anchor(system)})=",
        f"## {system.name}",
        first,
        *text,
        f"- **Settings**: {settings or 'none of its own'}",
        f"- **Conservation**: {conserved}",
        f"- **Bytes**: {system.received}",
        f"- **Measured**: `{shown}` receives {moved.received:,.0f} bytes in "
        f"{moved.rounds} collectives",
    ]
    head, bullets = lines[: 3 + len(text)], lines[3 + len(text) :]
    bullets.append(f"- **Arguments and errors**: {{py:func}}`{system.path}`")
    return "\n\n".join(head) + "\n\n" + "\n".join(bullets) + "\n"


def check_coverage(app, env) -> None:
    """Fails the build if a public name is missing from the reference, or has no docstring."""
    del app
    documented = env.domaindata["py"]["objects"]
    modules = [x for x in public_names("jaxsparse") if inspect.ismodule(getattr(jaxsparse, x))]
    paths = [getattr(jaxsparse, x).__name__ for x in modules]
    missing = [path for path in paths if path not in MODULES]
    for module in MODULES:
        for name in public_names(module):
            value = getattr(importlib.import_module(module), name)
            if inspect.ismodule(value):
                continue
            if not {f"{module}.{name}", f"jaxsparse.{name}"} & set(documented):
                missing.append(f"{module}.{name}")
            elif kind_of(value) != "data" and not (value.__doc__ or "").strip():
                missing.append(f"the docstring of {module}.{name}")
    if missing:
        raise ExtensionError(f"the reference misses {', '.join(missing)}: see docs/generate.py")
