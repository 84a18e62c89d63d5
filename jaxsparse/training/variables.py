"""Arrays inside `flax.nnx` Variables, which say how they are sharded.

Optax's states of an `nnx.State` hold Variables, too, and trainers ask these for the sharding of
what they spread or restore (`nnx.get_named_sharding`). Flax is not imported here: no Variable
exists before it is.
"""

import functools
import sys
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec


def _is_variable(node: Any) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(node, nnx.Variable)


def are_in(tree: Any) -> bool:
    """Whether arrays of the tree are in Variables."""
    return any(map(_is_variable, jax.tree.leaves(tree, is_leaf=_is_variable)))


def module_in(tree: Any) -> Any:
    """An nnx Module or Optimizer in the tree, or None. An `nnx.State` is neither."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return None
    is_module = lambda node: isinstance(node, nnx.Pytree)
    return next(filter(is_module, jax.tree.leaves(tree, is_leaf=is_module)), None)


def without(tree: Any) -> Any:
    """The tree with what Variables hold in their places: an array, or nothing."""
    held = lambda node: node.get_value() if _is_variable(node) else node
    return jax.tree.map(held, tree, is_leaf=_is_variable)


def with_spec(x: Any, spec: PartitionSpec) -> Any:
    """An array in a Variable that says how it is sharded, or the array if it is not sharded."""
    if not any(spec):
        return x
    # The array is where it belongs already, and Flax would look for a mesh to place it.
    return sys.modules["flax.nnx"].Variable(x, out_sharding=tuple(spec), eager_sharding=False)


def unwrapped(update: optax.TransformUpdateExtraArgsFn) -> optax.TransformUpdateExtraArgsFn:
    """`update` for trees with Variables: it sees arrays, and its results are in Variables again.

    `nnx.Optimizer` takes arrays out by itself. A loop that calls `tx.update` with an `nnx.State`
    does not.
    """

    @functools.wraps(update)
    def wrapper(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        given = (updates, state, params)
        if not are_in(given):
            return update(updates, state, params, **extra_args)
        found = update(*without(given), **extra_args)
        whole: Any = jax.tree.structure((updates, state))
        return whole.unflatten(jax.tree.leaves(found))

    return wrapper
