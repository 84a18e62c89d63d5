"""The files build on each other in one direction, and only wire.py names JAX's collectives."""

import ast
import pathlib
import re
import subprocess
import sys

import pytest
from running import ENV

import jaxsparse

ROOT = pathlib.Path(jaxsparse.__file__).parent

# A module may import only from rows above its own, and in its own package from the same row.
LAYERS = [
    ["_compat", "settings", "magnitude", "platforms"],
    ["bits", "hashing"],
    ["training.group"],
    ["training.failing"],
    ["stream", "blocks", "quantize", "printing"],
    ["codecs"],
    ["select.compaction", "select.groups", "select.blocks", "select.maxima"],
    ["select.fast", "select.slots", "select.thresholds"],
    ["select.top_k"],
    ["select.selection"],
    ["select"],
    ["sketch.tiles"],
    ["sketch.codec"],
    ["sketch.heavy", "sketch.blocks"],
    ["sketch", "layout"],
    ["collectives.wire"],
    ["training.marks", "training.meshes", "training.replicas"],
    ["training.unreduced"],
    ["training.sharding", "traffic"],
    ["training.digest", "training.calls", "training.strays"],
    [
        "training.agreement",
        "training.parallel",
        "training.per_worker",
        "training.resharding",
    ],
    ["collectives.messages"],
    ["collectives.split"],
    ["collectives"],
    ["reducers.base"],
    [
        "reducers.one_message",
        "reducers.matrices",
        "reducers.blocks",
        "reducers.entries",
        "reducers.stages",
    ],
    ["reducers"],
    ["feedback"],
    ["training.diagnostics"],
    ["systems.row"],
    ["systems.dense"],
    ["systems.top_k", "systems.true_top_k", "systems.omni_reduce", "systems.quantized"],
    ["systems"],
    ["outer.fragments", "outer.optimizers"],
    ["outer.worker"],
    ["outer"],
    ["planner"],
    ["__main__"],
]


# Imported within a function, when it is called.
LATE = {("systems.sparcml", "planner.algorithms")}


def layer(module):
    """The row of the longest prefix of `module` that LAYERS names."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        for row, names in enumerate(LAYERS):
            if ".".join(parts[:length]) in names:
                return row
    raise AssertionError(f"{module} has no layer: add it to LAYERS")


def sources():
    for path in ROOT.rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if not module.endswith("__init__"):
            yield module, path.read_text()


def imported(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxsparse"):
            base = node.module.removeprefix("jaxsparse").lstrip(".")
            for alias in node.names:
                full = f"{base}.{alias.name}".lstrip(".")
                is_module = (ROOT / (full.replace(".", "/") + ".py")).exists()
                is_package = (ROOT / full.replace(".", "/")).is_dir()
                yield full if is_module or is_package else base


def test_imports_point_one_way():
    for module, source in sources():
        for other in imported(source):
            if (module, other) in LATE:
                continue
            in_one_package = "." in module and module.split(".")[0] == other.split(".")[0]
            if not in_one_package or layer(other) != layer(module):
                assert layer(other) < layer(module), f"{module} must not import {other}"


COLLECTIVES = {"psum", "pmax", "pmin", "pmean", "all_gather", "ppermute", "all_to_all"}
COLLECTIVES |= {"psum_scatter", "pbroadcast", "ragged_all_to_all"}


def test_only_wire_names_collectives():
    for module, source in sources():
        if module != "collectives.wire":
            assert not COLLECTIVES & set(_lax_names(source)), module
            assert "from jax.lax import" not in source, module


def test_nothing_private_to_jax_is_imported():
    for module, source in sources():
        # The store that processes share has no public name.
        allowed = ["from jax._src import distributed"] if module == "_compat" else []
        assert re.findall(r".*jax\._src.*", source) == [" " * 8 + line for line in allowed], module


def test_public_names_exist():
    for name in jaxsparse.__all__:
        assert hasattr(jaxsparse, name)
    assert len(set(jaxsparse.__all__)) == len(jaxsparse.__all__)


def _lax_names(source):
    """Attributes of anything called lax: jax.lax.psum and lax.psum, but not wire.psum."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[-1] == "lax":
            yield node.attr


def test_no_test_imports_another():
    """Code that several tests need stands in a helper module beside them."""
    for path in pathlib.Path(__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in getattr(node, "names", ()) if hasattr(alias, "asname")]
            names += [getattr(node, "module", None) or ""]
            assert not any(name.startswith("test_") for name in names), path.name


@pytest.mark.slow
def test_a_gradient_walks_through_few_files():
    script = ROOT.parent / "benchmarks" / "call_path.py"
    done = subprocess.run(
        [sys.executable, script], env=ENV, capture_output=True, text=True, check=True
    )
    found = re.findall(r"\| `(\w+)` \| (\d+) \| (\d+) \|", done.stdout)
    most = {"dense": (8, 25), "spardl": (15, 70), "sketched_sgd": (18, 100)}
    assert {name for name, _, _ in found} == set(most)
    for name, files, moves in found:
        assert int(files) <= most[name][0]
        assert int(moves) <= most[name][1]
