"""Meshes with more axes than that of the workers: where leaves are, and how they are exchanged.

One axis of a mesh is compressed. All others, the inner axes, are JAX's: it shards parameters and
activations over them, as FSDP and tensor parallelism ask. A step runs there in one of two ways
(`jaxsparse.LocalSteps`), and in both the exchange runs manually over all axes: each device
exchanges its own shard of each leaf with the devices that hold the same shard for other workers.
In automatic or partly manual mode XLA would gather sharded leaves as soon as they are flattened.

A leaf that an inner axis does not cut is cut along it for the exchange, so that no two devices of a
worker send the same values. A leaf that has no dimension to be cut goes uncompressed: devices that
shared one vector of cut and uncut leaves would choose different entries of the uncut ones.
"""

import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Container, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding
from jax.tree_util import keystr, tree_flatten_with_path

AnyMesh = Mesh | AbstractMesh

# The exchange's operations have this scope in compiled programs.
SCOPE = "jaxsparse_exchange"
# Those of `per_worker` have this one.
OWN_SCOPE = "jaxsparse_own_gradients"


def context_of(mesh: AnyMesh | None) -> contextlib.AbstractContextManager[Any]:
    """A context in which PartitionSpecs are of this mesh, unless there is a mesh in context."""
    if mesh is None or not jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    abstract = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
    return jax.sharding.use_abstract_mesh(abstract)


@dataclasses.dataclass(frozen=True)
class Placement:
    """The partitions of leaves on a mesh with inner axes. A state carries it as `named`.

    Attributes:
        inner: name and size of each inner axis that is larger than 1.
        own: each leaf's partition over the inner axes.
    """

    inner: tuple[tuple[str, int], ...]
    own: tuple[PartitionSpec, ...]

    @property
    def named(self) -> dict[str, dict[str, dict[str, tuple[()]]]]:
        """The same as a tree without leaves, whose keys say it, because all walkers keep these.

        >>> Placement((("fsdp", 4),), (PartitionSpec(None, "fsdp"),)).named
        {'[["fsdp", 4]]': {'0': {'[[], ["fsdp"]]': ()}}}
        """
        parts = [json.dumps(list(map(names_of, spec))) for spec in self.own]
        return {json.dumps(self.inner): {str(i): {part: ()} for i, part in enumerate(parts)}}

    @classmethod
    def of(cls, named: Any) -> "Placement | None":
        """Inverse of `named`. None if the state has no inner axes."""
        if not named:
            return None
        ((inner, own),) = named.items()
        specs = [json.loads(part) for i in range(len(own)) for part in own[str(i)]]
        return cls(
            tuple((axis, size) for axis, size in json.loads(inner)),
            tuple(PartitionSpec(*(one_or_all(tuple(part)) for part in spec)) for spec in specs),
        )

    @property
    def axes(self) -> tuple[str, ...]:
        """The inner axes."""
        return tuple(name for name, _ in self.inner)

    @property
    def devices(self) -> int:
        """The number of devices of a worker."""
        return math.prod(size for _, size in self.inner)

    def exchanged(self, leaf: int, shape: Sequence[int]) -> PartitionSpec:
        """The partition in which a leaf is exchanged: its own, cut further over other inner axes.

        Each of these axes cuts the largest dimension that it divides, if there is one.

        Raises:
            ValueError: the tree has more leaves than that for which this was made.
        """
        if leaf >= len(self.own):
            raise ValueError(
                f"the state was made for a tree of fewer leaves ({len(self.own)}): pass the state "
                "that init(params) made for the same tree"
            )
        sizes = dict(self.inner)
        spec = self.own[leaf]
        parts = [names_of(part) for part in (*spec, *[None] * (len(shape) - len(spec)))]
        left = [n // math.prod(sizes[a] for a in part) for n, part in zip(shape, parts)]
        unused = set(sizes) - {a for part in parts for a in part}
        for axis in self.axes:
            fits = [i for i, n in enumerate(left) if n and n % sizes[axis] == 0]
            if axis in unused and fits:
                i = max(fits, key=lambda i: left[i])
                parts[i] = (*parts[i], axis)
                left[i] //= sizes[axis]
        return PartitionSpec(*(one_or_all(part) for part in parts))

    def is_cut(self, spec: PartitionSpec) -> bool:
        """Whether a partition gives each device of a worker elements of its own."""
        return {a for part in spec for a in names_of(part)} == set(self.axes)

    def local(self, shape: Sequence[int], spec: PartitionSpec) -> tuple[int, ...]:
        """The shape of one device's shard."""
        sizes, rest = dict(self.inner), [None] * (len(shape) - len(spec))
        return tuple(
            n // math.prod(sizes[a] for a in names_of(part))
            for n, part in zip(shape, (*spec, *rest))
        )


def names_of(part: Any) -> tuple[str, ...]:
    """The axes over which a partition cuts one dimension."""
    return () if part is None else (part,) if isinstance(part, str) else tuple(part)


def restricted(spec: PartitionSpec, axes: Container[str]) -> PartitionSpec:
    """The partition with these axes alone."""
    kept = ([a for a in names_of(part) if a in axes] for part in spec)
    return PartitionSpec(*(one_or_all(tuple(part)) for part in kept))


def one_or_all(part: tuple[str, ...]) -> Any:
    """One dimension's part of a partition, from its axes. The inverse of `names_of`."""
    return None if not part else part[0] if len(part) == 1 else part


def inner_axes(mesh: AnyMesh, axis_name: str | None) -> tuple[tuple[str, int], ...]:
    """Name and size of each inner axis: larger than 1, not manual, and not that of the workers."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types))
    return tuple(
        (str(name), size)
        for name, size in mesh.shape.items()
        if name != axis_name and size > 1 and kinds[name] != AxisType.Manual
    )


def check_inner(mesh: AnyMesh | None, axis_name: str | None, placement: Placement | None) -> None:
    """Raises ValueError unless a state with this placement was made for this mesh's inner axes."""
    inner = () if mesh is None or axis_name is None else inner_axes(mesh, axis_name)
    made_for = placement.inner if placement else ()
    if inner != made_for:
        raise ValueError(
            f"the state was made for the inner axes {made_for}, but the mesh here has {inner} "
            f"beside {axis_name!r}: put the parameters on this mesh first (jaxsparse.shard(params, "
            "mesh)), or give mesh= and specs= to the transformation, and make it with "
            "tx.init(params). Or carry it over with jaxsparse.reshard(state, mesh, "
            "like=tx.init(params))"
        )


def place(tree: Any, axis_name: str, mesh: AnyMesh, specs: Any = None) -> Placement | None:
    """The placement of the leaves of `tree`, None without inner axes.

    Args:
        tree: parameters.
        axis_name: the axis of the workers.
        mesh: their mesh.
        specs: partitions of the parameters, if they can't be seen from them: see `Options`.

    Raises:
        ValueError: partitions are unknown, or don't fit the tree or the mesh.
    """
    check_has_axis(mesh, axis_name)
    inner = inner_axes(mesh, axis_name)
    if not inner:
        return None
    leaves = tree_flatten_with_path(tree)[0]
    given = [None] * len(leaves) if specs is None else of_leaves(specs, tree)
    own = tuple(
        _partition(f"leaf{keystr(path)}", leaf, spec, mesh, axis_name, dict(inner))
        for (path, leaf), spec in zip(leaves, given)
    )
    return Placement(inner, own)


def check_has_axis(mesh: AnyMesh, axis_name: str) -> None:
    """Raises ValueError unless the axis is one of the mesh."""
    if axis_name not in mesh.axis_names:
        raise ValueError(
            f"axis_name={axis_name!r} is not an axis of the mesh, whose axes are "
            f"{mesh.axis_names}: pass one of them"
        )


def of_leaves(specs: Any, tree: Any) -> list[PartitionSpec | None]:
    """The partition that `specs` gives for each leaf of `tree`; None where it gives none.

    Raises:
        ValueError: `specs` is no prefix of the tree, or holds something without a partition.
    """
    if hasattr(specs, "params") and not hasattr(tree, "params"):
        specs = specs.params  # of a training state
    nnx: Any = sys.modules.get("flax.nnx")  # Flax is not imported here
    if nnx is not None and isinstance(specs, nnx.Module):
        specs = nnx.state(specs, nnx.Param)

    def is_variable(node: Any) -> bool:
        return nnx is not None and isinstance(node, nnx.Variable)

    def partition_of(node: Any) -> PartitionSpec | None:
        if is_variable(node):
            held = node.get_value()
            if isinstance(held, PartitionSpec | Sharding):
                return partition_of(held)
            found = getattr(held, "sharding", None)
            return partition_of(nnx.spmd.get_var_pspec(node) if found is None else found)
        if node is None or isinstance(node, PartitionSpec):
            return node
        if isinstance(node, Sharding):
            return node.spec if isinstance(node, NamedSharding) else PartitionSpec()
        if not hasattr(node, "sharding"):
            raise ValueError(
                f"specs holds {node!r}, which has no partition: give PartitionSpecs, "
                "NamedShardings, or arrays or shapes that have a sharding"
            )
        return partition_of(node.sharding)

    is_spec = lambda node: node is None or is_variable(node) or isinstance(node, PartitionSpec)
    found: list[PartitionSpec | None] = []
    try:
        pairs = jax.tree.map(
            lambda spec, part: _Given(spec, len(jax.tree.leaves(part))),
            specs,
            tree,
            is_leaf=is_spec,
        )
    except ValueError as error:
        raise ValueError(
            f"specs has another structure than the parameters ({error}): give a PartitionSpec or "
            "NamedSharding for each leaf, as nnx.get_partition_spec makes them, or an abstract "
            "model or state"
        ) from None
    for given in jax.tree.leaves(pairs, is_leaf=lambda node: isinstance(node, _Given)):
        found += [partition_of(given.spec)] * given.leaves
    return found


@dataclasses.dataclass
class _Given:
    """What `specs` has for some leaves."""

    spec: Any
    leaves: int


def _partition(
    name: str,
    leaf: Any,
    given: PartitionSpec | None,
    mesh: AnyMesh,
    axis_name: str,
    inner: dict[str, int],
) -> PartitionSpec:
    """A leaf's partition over inner axes larger than 1."""
    spec = given
    if spec is None and isinstance(leaf, jax.core.Tracer):
        spec = _of_type(leaf, mesh, inner)
        if spec is None:
            raise ValueError(
                f"{name} is traced, so its partition over the axes {tuple(inner)} is not known "
                "here: make the state outside of jax.jit from parameters on the mesh, or give the "
                "transformation specs=: PartitionSpecs, NamedShardings, or an abstract model or "
                "state whose arrays have a sharding, as nnx.get_abstract_model makes it"
            )
    if spec is None:
        sharding = getattr(leaf, "sharding", None)
        spec = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
    named = {a for part in spec for a in names_of(part)}
    if axis_name in named:
        raise ValueError(
            f"{name} is partitioned by {spec} over {axis_name!r}, the axis of the workers: "
            "each worker needs all of the parameters. Shard them over other axes"
        )
    if unknown := sorted(named - set(mesh.axis_names)):
        raise ValueError(
            f"{name} has the partition {spec}, but the mesh has no axis {unknown[0]!r}: its "
            f"axes are {mesh.axis_names}"
        )
    shape, own = jnp.shape(leaf), restricted(spec, inner)
    for n, part in zip(shape, own):
        cut = math.prod(inner[a] for a in names_of(part))
        if n % cut:
            raise ValueError(
                f"{name} of shape {shape} can't be cut by {spec}: {cut} devices can't share "
                f"{n} rows equally"
            )
    return own


def _of_type(leaf: Any, mesh: AnyMesh, inner: dict[str, int]) -> PartitionSpec | None:
    """The partition in an array's type. None unless all inner axes are Explicit."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types))
    sharding = getattr(jax.typeof(leaf), "sharding", None)
    if sharding is None or any(kinds[a] != AxisType.Explicit for a in inner):
        return None
    return sharding.spec


def typed(x: Any) -> NamedSharding | None:
    """The sharding in an array's type. None: no axis of its mesh is Explicit."""
    is_traced = isinstance(x, jax.core.Tracer)
    sharding = getattr(jax.typeof(x) if is_traced else x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    return sharding


def untyped(f: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """`f(tree, *others)`, whose result is like `tree`, on arrays without a sharding in their types.

    Explicit axes refuse to flatten leaves that they cut. The result has the types of `tree`.
    """
    found = next(filter(None, map(typed, jax.tree.leaves(tree))), None)
    if found is None:
        return f(tree, *others)
    specs = jax.tree.map(lambda x: own.spec if (own := typed(x)) else PartitionSpec(), tree)
    mesh = found.mesh
    explicit = tuple(a for a, k in zip(mesh.axis_names, mesh.axis_types) if k == AxisType.Explicit)
    with context_of(mesh):
        return jax.sharding.auto_axes(f, axes=explicit, out_sharding=specs)(tree, *others)


def kind_of(x: Any) -> str | None:
    """The memory that holds an array, such as "pinned_host". None: its devices' own, or unknown."""
    sharding = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
    if sharding is None or isinstance(getattr(sharding, "mesh", None), AbstractMesh):
        return None
    try:
        usual = next(iter(sharding.device_set)).default_memory().kind
    except jax.errors.JaxRuntimeError:  # one to compile for ahead of time may not know
        usual = "device"
    return None if sharding.memory_kind == usual else sharding.memory_kind


def constrain(x: Any, sharding: NamedSharding) -> Any:
    """`x` with this sharding."""
    mesh = sharding.mesh
    if not isinstance(x, jax.core.Tracer) and isinstance(mesh, Mesh):
        return jax.device_put(x, sharding)
    explicit = [a for a, k in zip(mesh.axis_names, mesh.axis_types) if k == AxisType.Explicit]
    if explicit:  # types know nothing of Auto axes
        return jax.reshard(x, NamedSharding(mesh, restricted(sharding.spec, explicit)))
    return jax.lax.with_sharding_constraint(x, sharding)
