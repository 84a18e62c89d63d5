"""Equinox modules as they are: leaves that are no arrays travel in the structure of the tree.

JAX compiles functions of arrays. A module of Equinox has leaves that are none: its activation
function, and numbers on which its code branches, such as the rate of a dropout. As under
`equinox.filter_jit` they are constants of a program, and another value is another program. Equinox
is not imported here. A program that has not imported it has no modules.
"""

import dataclasses
import sys
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath, keystr

T = TypeVar("T")

FLAGS = (bool, np.bool_, str)  # on which code branches


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Static:
    """A leaf that is no array, as a part of the tree's structure.

    Attributes:
        value: the leaf.
        kind: its type, because 1 == 1.0 == True.
    """

    value: Any
    kind: type


def held(tree: T) -> T:
    """The tree with `Static` in the place of each leaf of an Equinox module that is no array.

    Raises:
        ValueError: such a leaf has no hash.
    """
    equinox: Any = sys.modules.get("equinox")
    if equinox is None:
        return tree
    is_module = lambda node: isinstance(node, equinox.Module)

    def hold(path: KeyPath, x: Any) -> Any:
        if isinstance(x, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
            return x
        try:
            hash(x)
        except TypeError:
            raise ValueError(
                f"leaf{keystr(path)} of an Equinox module is {str(x)[:40]!r} of type "
                f"{type(x).__name__}, which has no hash, so JAX can't tell programs apart by it: "
                "make it an array, or leave it out with eqx.partition(model, eqx.is_array)"
            ) from None
        return Static(x, type(x))

    def hold_all(node: Any) -> Any:
        return jax.tree_util.tree_map_with_path(hold, node) if is_module(node) else node

    return jax.tree.map(hold_all, tree, is_leaf=is_module)


def floats_of_modules(tree: T) -> T:
    """The tree with None in the place of arrays of Equinox modules that have no gradients."""
    equinox: Any = sys.modules.get("equinox")
    is_module = lambda node: equinox is not None and isinstance(node, equinox.Module)
    is_float = lambda x: jnp.issubdtype(jnp.result_type(x), jnp.inexact)
    floats = lambda node: jax.tree.map(lambda x: x if is_float(x) else None, node)
    return jax.tree.map(
        lambda node: floats(node) if is_module(node) else node, tree, is_leaf=is_module
    )


def with_flags_held(tree: T) -> T:
    """The tree with `Static` in the place of flags and strings.

    Numbers stay, because each other one would be another program.
    """
    return jax.tree.map(lambda x: Static(x, type(x)) if isinstance(x, FLAGS) else x, tree)


def released(tree: T) -> T:
    """The tree as `held` and `with_flags_held` were given it."""
    is_static = lambda node: isinstance(node, Static)
    return jax.tree.map(lambda x: x.value if is_static(x) else x, tree, is_leaf=is_static)


def has_static(tree: Any) -> bool:
    """Whether `held` has replaced a leaf."""
    is_static = lambda node: isinstance(node, Static)
    return any(map(is_static, jax.tree.leaves(tree, is_leaf=is_static)))
