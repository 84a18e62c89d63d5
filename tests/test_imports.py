"""Rooms build on each other in one direction, and only wire.py names JAX's collectives."""

import ast
import pathlib
import re
import tomllib

import pytest
from running import python

import jaxsparse

ROOT = pathlib.Path(jaxsparse.__file__).parent


def sources():
    for path in ROOT.rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if not module.endswith("__init__"):
            yield module, path.read_text()


def test_the_map_shows_the_rooms_in_the_order_that_imports_keep():
    """`lint-imports` checks the order in `.ci/run`."""
    settings = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())
    contract, *_ = settings["tool"]["importlinter"]["contracts"]
    text = (ROOT.parent / "CONTRIBUTING.md").read_text()
    shown = text[text.index("<!-- map -->") : text.index("<!-- end of map -->")]
    rooms = re.findall(r"^    (\w+)/? ", shown, re.MULTILINE)
    assert rooms == contract["layers"][::-1]
    packages = {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()}
    assert {*rooms} == packages | {"__main__", "exchanges"}


COLLECTIVES = {"psum", "pmax", "pmin", "pmean", "all_gather", "ppermute", "all_to_all"}
COLLECTIVES |= {"psum_scatter", "pbroadcast", "ragged_all_to_all"}


def test_only_wire_names_collectives():
    for module, source in sources():
        if module != "comm.wire":
            assert not COLLECTIVES & set(_lax_names(source)), module
            assert "from jax.lax import" not in source, module


def test_nothing_private_to_jax_is_imported():
    for module, source in sources():
        # The store that processes share has no public name, nor what a jax.shard_map calls.
        private = (" import distributed", " import shard_map as module")
        private += (".interpreters import batching as mapping",)
        private += (".lax.control_flow import loops as module",)
        allowed = [f"from jax._src{name}" for name in private if module == "comm.compat"]
        assert re.findall(r".*jax\._src.*", source) == [" " * 8 + line for line in allowed], module


def test_public_names_exist():
    for name in jaxsparse.__all__:
        assert hasattr(jaxsparse, name)
    assert len(set(jaxsparse.__all__)) == len(jaxsparse.__all__)


@pytest.mark.slow
def test_packages_of_islands_are_imported_where_islands_are_used():
    """They are an extra: `pip install jaxsparse` has none of them."""
    code = "import sys, jaxsparse; print({'msgspec', 'obstore', 'safetensors'} & set(sys.modules))"
    assert python("-c", code) == "set()\n"


def _lax_names(source):
    """Attributes of anything called lax: jax.lax.psum and lax.psum, but not wire.psum."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[-1] == "lax":
            yield node.attr
