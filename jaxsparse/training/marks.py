"""Pytree marks for per-worker arrays, and their partition specs.

Parameters and most optimizer state are equal on all workers; residuals are not. `PerWorker` marks
the arrays that differ, so that `shard` and `data_parallel` serve an Optax state, a linen
`TrainState` and an nnx state alike. `Sharded` marks arrays that are cut over the fast axis of a
mesh with two levels, and equal along the slow one.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.tree_util import GetAttrKey, KeyPath, keystr

T = TypeVar("T")

# The axis or axes of workers. The last of several is the fast one.
AxisName = str | tuple[str, ...]

# Marked arrays appear under these keys in key paths. Frameworks that flatten a tree and drop its
# node types (nnx.split, Orbax) still keep the path.
_KEY = "jaxsparse_per_worker"
_SHARD_KEY = "jaxsparse_per_shard_of_"
_SHARDED_KEY = "jaxsparse_sharded"


@dataclasses.dataclass(eq=False, repr=False)
class _Mark:
    """A node around one array."""

    __slots__ = ("value",)
    value: Any
    key: ClassVar[str]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.value!r})"

    def tree_flatten_with_keys(self):
        return ((GetAttrKey(self.key), self.value),), None

    def tree_flatten(self):
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(children[0])


@jax.tree_util.register_pytree_with_keys_class
class Sharded(_Mark):
    """Marks an array whose first axis is cut over the fast axis of a mesh with two levels.

    Use it for parameters that no device holds whole (FSDP), under axis_name=("hosts", "local").
    States that Optax makes from marked parameters, such as Adam's moments, are marked, too.

    Attributes:
        value: the array. The trainer sees all of it; the parallel step sees (n / L, ...).

    Example:
        >>> import jax.numpy as jnp
        >>> specs({"w": Sharded(jnp.zeros((8, 3)))}, ("hosts", "local"))["w"].value
        P('local',)
    """

    __slots__ = ()
    key = _SHARDED_KEY


@jax.tree_util.register_pytree_with_keys_class
class PerWorker(_Mark):
    """Marks an array that differs from worker to worker.

    Attributes:
        value: the array with a leading worker axis. One worker sees (1, ...); outside the parallel
            step the trainer sees (W, ...).

    Example:
        >>> import jax.numpy as jnp
        >>> PerWorker.wrap(jnp.zeros(3)).value.shape
        (1, 3)
    """

    __slots__ = ()
    key = _KEY

    @classmethod
    def wrap(cls, tree: Any) -> Any:
        """Marks each array of one worker's `tree` as per-worker."""
        return jax.tree.map(lambda x: cls(jnp.asarray(x)[None]), tree)

    @classmethod
    def unwrap(cls, tree: Any) -> Any:
        """This worker's arrays from a tree that `wrap` made.

        Raises:
            ValueError: an array holds several workers' values, because the state is whole.
        """

        def one(node: PerWorker) -> Any:
            check_wrapped("a leaf", node.value)
            if node.value.shape[0] != 1:
                raise ValueError(
                    f"a PerWorker array of shape {node.value.shape} holds {node.value.shape[0]} "
                    "workers' values, but one worker's has shape (1, ...). Run the step through "
                    "jaxsparse.data_parallel, or give jax.shard_map the in_specs "
                    "jaxsparse.specs(state)"
                )
            return node.value[0]

        return jax.tree.map(one, tree, is_leaf=_is_per_worker)


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(eq=False, repr=False)
class PerShard(PerWorker):
    """A `PerWorker` array of one shard, at one position along the fast axis.

    Error feedback with a `dense_axis` marks its state so. The state can then not be mistaken for a
    state of workers that all hold the same coordinates, or for a state of another number of shards.

    Attributes:
        value: as for `PerWorker`.
        shards: number of shards, the size of the fast axis.
    """

    __slots__ = ("shards",)
    shards: int

    @property
    def key(self) -> str:  # type: ignore[override]
        """The key, which contains the number of shards."""
        return f"{_SHARD_KEY}{self.shards}"

    def tree_flatten_with_keys(self):
        return ((GetAttrKey(self.key), self.value),), self.shards

    def tree_flatten(self):
        return (self.value,), self.shards

    @classmethod
    def tree_unflatten(cls, shards, children):
        return cls(children[0], shards)


def _is_per_worker(node: Any) -> bool:
    return isinstance(node, PerWorker)


def is_marked(path: KeyPath) -> bool:
    """Whether the leaf at `path` is per-worker."""
    return _KEY in _names(path) or shards_of(path) is not None


def shards_of(path: KeyPath) -> int | None:
    """The number of shards if the leaf at `path` is one of several; None if it is not."""
    marks = [name for name in _names(path) if name.startswith(_SHARD_KEY)]
    return int(marks[0].removeprefix(_SHARD_KEY)) if marks else None


def is_sharded(path: KeyPath) -> bool:
    """Whether the leaf at `path` is cut over the fast axis."""
    return _SHARDED_KEY in _names(path) and not is_marked(path)


def _names(path: KeyPath) -> list[str]:
    return [str(getattr(k, "name", getattr(k, "key", ""))) for k in path]


def unpacked(axis_name: AxisName) -> AxisName:
    """The name from a tuple of one name; other values as they are."""
    return axis_name[0] if isinstance(axis_name, tuple) and len(axis_name) == 1 else axis_name


def fast_axis(name: str, axis_name: AxisName) -> str:
    """The axis over which the `Sharded` leaf `name` is cut.

    Raises:
        ValueError: there is only one axis.
    """
    if isinstance(axis_name, str) or len(axis_name) < 2:
        raise ValueError(
            f"{name} is marked Sharded, but axis_name={axis_name!r} has no fast axis to cut it "
            'over: pass both axes of a mesh with two levels, axis_name=("hosts", "local")'
        )
    return axis_name[-1]


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


def specs(tree: Any, axis_name: AxisName = "data") -> Any:
    """Partition specs of `tree`, in its own structure, for `jax.shard_map` and `NamedSharding`.

    Args:
        tree: any pytree. Key paths identify marked arrays, so a state that `nnx.split` took apart
            works, too.
        axis_name: the mesh axis of the workers, or both axes of a mesh with two levels, the fast
            one last.

    Returns:
        `PartitionSpec(axis_name)` for each per-worker array, `PartitionSpec(fast axis)` for each
        `Sharded` array, and `PartitionSpec()` for all others.

    Raises:
        ValueError: an array is `Sharded`, and there is only one axis.
    """
    axis_name = unpacked(axis_name)

    def spec(path: KeyPath, _: Any) -> PartitionSpec:
        if is_marked(path):
            return PartitionSpec(axis_name)
        if is_sharded(path):
            return PartitionSpec(fast_axis(f"leaf{keystr(path)}", axis_name))
        return PartitionSpec()

    return jax.tree_util.tree_map_with_path(spec, tree)
