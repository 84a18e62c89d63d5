"""The marks of arrays that differ between workers, and what goes by them.

Parameters and most optimizer state are equal on all workers; residuals are not. `PerWorker` marks
the arrays that differ, so that one pair of functions (`shard`, `data_parallel`) serves an Optax
state, a linen `TrainState` and an nnx state alike. `Sharded` marks those that are cut over the fast
axis of a mesh with two levels, and equal on the slow one.
"""

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.tree_util import GetAttrKey, KeyPath, keystr

T = TypeVar("T")

# The axis or axes of workers; of several, the last is the fast one.
AxisName = str | tuple[str, ...]

# The keys under which the marked arrays appear in key paths. Frameworks that flatten a tree and
# forget its node types (nnx.split, Orbax) still keep the path.
_KEY = "jaxsparse_per_worker"
_SHARD_KEY = "jaxsparse_per_shard_of_"
_SHARDED_KEY = "jaxsparse_sharded"


class _Mark:
    """A node around one array."""

    __slots__ = ("value",)
    key: ClassVar[str]

    def __init__(self, value: Any):
        self.value = value

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
    """Marks an array that is cut along its first axis over the fast axis of two.

    For parameters that no device holds whole (FSDP), under axis_name=("hosts", "local"). What Optax
    makes of marked parameters, such as Adam's moments, is marked, too.

    Attributes:
        value: the array: all of it as the trainer sees it, (n / L, ...) inside the parallel step.

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
        value: the array with a leading worker axis: (1, ...) as one worker sees it, (W, ...) as
            the trainer sees it outside the parallel step.

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
        """This worker's arrays out of a tree made by `wrap`.

        Raises:
            ValueError: an array holds several workers' values: the state was passed whole.
        """

        def one(node: PerWorker) -> Any:
            check_wrapped("a leaf", node.value)
            if node.value.shape[0] != 1:
                raise ValueError(
                    f"a PerWorker array of shape {node.value.shape} holds {node.value.shape[0]} "
                    "workers' values where one worker's, of shape (1, ...), was expected. Run the "
                    "step through jaxsparse.data_parallel, or give jax.shard_map the in_specs "
                    "jaxsparse.specs(state)"
                )
            return node.value[0]

        return jax.tree.map(one, tree, is_leaf=_is_per_worker)


@jax.tree_util.register_pytree_with_keys_class
class PerShard(PerWorker):
    """A `PerWorker` array of one of several shards: of one place along the fast axis of two.

    Error feedback with a `dense_axis` marks its state so, which keeps it from being mistaken for
    that of workers which all hold the same coordinates, or of other shards.

    Attributes:
        value: as of `PerWorker`.
        shards: how many there are, the size of the fast axis.
    """

    __slots__ = ("shards",)

    def __init__(self, value: Any, shards: int):
        super().__init__(value)
        self.shards = shards

    @property
    def key(self) -> str:  # type: ignore[override]
        """Tells the number, too."""
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
    """Of how many shards the leaf at `path` holds one; None if it is of none."""
    marks = [name for name in _names(path) if name.startswith(_SHARD_KEY)]
    return int(marks[0].removeprefix(_SHARD_KEY)) if marks else None


def is_sharded(path: KeyPath) -> bool:
    """Whether the leaf at `path` is cut over the fast axis."""
    return _SHARDED_KEY in _names(path) and not is_marked(path)


def _names(path: KeyPath) -> list[str]:
    return [str(getattr(k, "name", getattr(k, "key", ""))) for k in path]


def unpacked(axis_name: AxisName) -> AxisName:
    """The name in a tuple of one; anything else as it is."""
    return axis_name[0] if isinstance(axis_name, tuple) and len(axis_name) == 1 else axis_name


def fast_axis(name: str, axis_name: AxisName) -> str:
    """The axis over which the leaf `name`, marked `Sharded`, is cut.

    Raises:
        ValueError: there is one axis only.
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
    """Maps f(leaf, whether it is per-worker) over the leaves of `tree`."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: f(leaf, is_marked(path)), tree)


def specs(tree: Any, axis_name: AxisName = "data") -> Any:
    """Partition specs of `tree`, in its own structure, for `jax.shard_map` and `NamedSharding`.

    Args:
        tree: any pytree; marked arrays are found by their key path, so a state that
            `nnx.split` took apart works too.
        axis_name: the mesh axis of the workers, or both of a mesh with two levels, the fast one
            last.

    Returns:
        `PartitionSpec(axis_name)` in place of each per-worker array, `PartitionSpec(fast axis)` of
        each `Sharded` one, `PartitionSpec()` elsewhere.

    Raises:
        ValueError: an array is `Sharded`, and there is one axis only.
    """
    axis_name = unpacked(axis_name)

    def spec(path: KeyPath, _: Any) -> PartitionSpec:
        if is_marked(path):
            return PartitionSpec(axis_name)
        if is_sharded(path):
            return PartitionSpec(fast_axis(f"leaf{keystr(path)}", axis_name))
        return PartitionSpec()

    return jax.tree_util.tree_map_with_path(spec, tree)
