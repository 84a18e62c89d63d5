"""The wrappers of arrays in a state: this library's marks, and Flax's variables.

Parameters and most optimizer state are equal on all workers; residuals are not. `PerWorker` marks
the arrays that differ, so that `shard` and exchanges serve an Optax state, a linen
`TrainState` and an nnx state alike.

Optax's states of an `nnx.State` hold `nnx.Variable`s. Trainers ask these for the sharding of arrays
that they spread or restore (`nnx.get_named_sharding`). Flax is not imported here. A program that
has not imported it has no Variables.
"""

import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath, keystr, tree_leaves_with_path

from jaxsparse.arrays.layout import check_arrays
from jaxsparse.comm.meshes import names_of

T = TypeVar("T")


class PerWorker(NamedTuple):
    """Marks an array that differs from worker to worker.

    It is a named tuple, because all that walk trees know these. Frameworks that flatten a tree and
    drop its node types (`nnx.split`, Orbax, `flax.serialization`) still keep the field's name in
    key paths.

    Attributes:
        value: the array with a leading worker axis. One worker sees (1, ...); outside the parallel
            step the trainer sees (W, ...).

    Example:
        >>> import jax.numpy as jnp
        >>> PerWorker.wrap(jnp.zeros(3)).value.shape
        (1, 3)
    """

    jaxsparse_per_worker: Any

    @property
    def value(self) -> Any:
        return self.jaxsparse_per_worker

    @classmethod
    def wrap(cls, tree: Any) -> Any:
        """Marks each array of one worker's `tree` as per-worker.

        Raises:
            ValueError: a leaf is no array.
        """
        check_arrays("leaf", tree)
        return jax.tree.map(lambda x: cls(jnp.asarray(x)[None]), tree)

    @classmethod
    def unwrap(cls, tree: Any) -> Any:
        """This worker's arrays from a tree that `wrap` made.

        Raises:
            ValueError: an array holds several workers' values, as outside of the parallel step, or
                has no worker axis.
        """

        def one(node: PerWorker) -> Any:
            check_wrapped("a leaf", node.value)
            if node.value.shape[0] != 1:
                raise ValueError(
                    f"a PerWorker array of shape {node.value.shape} holds {node.value.shape[0]} "
                    "workers' values, but one worker's has shape (1, ...). Outside of one worker's "
                    "code take .value, which has a row for each; in a jax.shard_map give the "
                    "in_specs jaxsparse.specs(state)"
                )
            return node.value[0]

        return jax.tree.map(one, tree, is_leaf=is_per_worker)


def is_per_worker(node: Any) -> bool:
    """Whether a node is marked, for `jax.tree.map(..., is_leaf=)`."""
    return isinstance(node, PerWorker)


def _stand_in() -> type:
    """The type of what `optax.tree.map_params` gives to `init` in the place of parameters."""
    given: list[type] = []

    def init(params: Any) -> tuple[()]:
        given.append(type(params))
        return ()

    optax.tree_utils.tree_map_params(init, lambda x: x, ())
    return given[0]


_STAND_IN = _stand_in()


def is_stand_in(tree: Any) -> bool:
    """Whether `optax.tree.map_params` asks where a state has arrays like parameters."""
    return isinstance(tree, _STAND_IN)


def key_name(key: Any) -> str:
    """The name of a field or of a dictionary's item. Flax and Orbax make keys of fields."""
    return str(getattr(key, "name", getattr(key, "key", "")))


def is_marked(path: KeyPath) -> bool:
    """Whether the leaf at `path` is per-worker."""
    return PerWorker._fields[0] in map(key_name, path)


def check_wrapped(name: str, value: Any) -> None:
    """Raises ValueError if the array of a `PerWorker` has no worker axis."""
    if jnp.ndim(value) == 0:
        raise ValueError(
            f"{name} is marked PerWorker but has shape (), without an axis for the workers: mark "
            "it with jaxsparse.PerWorker.wrap(x), which adds one, instead of PerWorker(x)"
        )


def map_marked(f: Callable[[Any, bool], Any], tree: T) -> T:
    """Maps `f(leaf, is_per_worker)` over the leaves of `tree`."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: f(leaf, is_marked(path)), tree)


def own_leaves(tree: Any) -> list[tuple[KeyPath, Any]]:
    """The path and the array of each per-worker leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(path, leaf) for path, leaf in leaves if is_marked(path)]


def specs(tree: Any, axis_name: str = "data", *, inner: bool = True) -> Any:
    """Partition specs of `tree`, in its own structure, for `jax.shard_map` and `NamedSharding`.

    Args:
        tree: any pytree. Key paths identify marked arrays, so a state that `nnx.split` took apart
            works, too.
        axis_name: the mesh axis of the workers.
        inner: whether to keep how arrays, or shapes with a sharding, are cut over other axes of
            the mesh. A `jax.shard_map` that leaves these to JAX (`axis_names={axis_name}`) takes
            False.

    Returns:
        `PartitionSpec(axis_name, ...)` for each per-worker array. For all others `PartitionSpec()`
        or, with `inner`, the partition that the array has.
    """

    def of(x: Any, is_own: bool) -> PartitionSpec:
        sharding = getattr(x, "sharding", None) if inner else None
        spec = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
        return PartitionSpec(axis_name, *spec[1:]) if is_own else spec

    return map_marked(of, tree)


def _is_variable(node: Any) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(node, nnx.Variable)


def has_variables(tree: Any) -> bool:
    """Whether the tree contains Variables."""
    return any(map(_is_variable, jax.tree.leaves(tree, is_leaf=_is_variable)))


def module_in(tree: Any) -> Any:
    """An nnx Module or Optimizer in the tree, or None. An `nnx.State` is neither."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return None
    is_module = lambda node: isinstance(node, nnx.Pytree)
    return next(filter(is_module, jax.tree.leaves(tree, is_leaf=is_module)), None)


def without_variables(tree: Any) -> Any:
    """The tree with each Variable replaced by its content: an array, or nothing."""
    held = lambda node: node.get_value() if _is_variable(node) else node
    return jax.tree.map(held, tree, is_leaf=_is_variable)


def in_variable(x: Any, spec: PartitionSpec) -> Any:
    """An array in a Variable that says how it is sharded, or the array if it is not sharded."""
    if not any(spec):
        return x
    # Each part is a tuple, because trainers that resolve logical names by rules take a string for
    # such a name: one without a rule is dropped (flax.linen.logical_to_mesh_axes), and another's
    # rule may apply. Tuples are axes of the mesh.
    axes = tuple(names_of(part) or None for part in spec)
    # The array is where it belongs already, and Flax would look for a mesh to place it.
    return sys.modules["flax.nnx"].Variable(x, out_sharding=axes, eager_sharding=False)


def on_plain_arrays(update: optax.TransformUpdateExtraArgsFn) -> optax.TransformUpdateExtraArgsFn:
    """`update` for trees with Variables. It sees plain arrays; its results are in Variables again.

    `nnx.Optimizer` takes arrays out by itself. A loop that calls `tx.update` with an `nnx.State`
    does not.
    """

    @functools.wraps(update)
    def wrapper(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        given = (updates, state, params)
        if not has_variables(given):
            return update(updates, state, params, **extra_args)
        found = update(*without_variables(given), **extra_args)
        whole: Any = jax.tree.structure((updates, state))
        return whole.unflatten(jax.tree.leaves(found))

    return wrapper


def warn_of_copies(axis_name: str | None, trees: Mapping[str, Any], stacklevel: int = 4) -> None:
    """Warns of per-worker arrays of which each device holds all workers' rows.

    Of traced arrays, types tell this on Explicit axes alone. `trees` have names.
    """
    found = [
        name + keystr(path)
        for name, tree in trees.items()
        for path, x in tree_leaves_with_path(tree)
        if is_marked(path) and _is_copied(x, axis_name)
    ]
    if found:
        warnings.warn(
            f"{found[0]} is per-worker state, but each device holds that of all workers "
            f"({len(found)} arrays in all): split it with jaxsparse.shard(state, mesh), or give "
            "the trainer that places it, as by out_shardings, jaxsparse.specs(state). A step that "
            "returns it so sends all of it to all devices each time",
            stacklevel=stacklevel,
        )


def _is_copied(x: Any, axis_name: str | None) -> bool:
    """Whether each of several devices has all rows of an array, as far as this is known."""
    if not jnp.ndim(x) or x.shape[0] == 1 or not x.size:  # XLA gives back empty arrays replicated
        return False
    if not isinstance(x, jax.core.Tracer):
        sharding = getattr(x, "sharding", None)
        if sharding is None or sharding.num_devices == 1:
            return False
        return sharding.shard_shape(x.shape)[0] == x.shape[0]
    sharding = jax.typeof(x).sharding
    kinds = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types))
    is_known = kinds.get(axis_name) == AxisType.Explicit
    return is_known and axis_name not in names_of(sharding.spec[0])
