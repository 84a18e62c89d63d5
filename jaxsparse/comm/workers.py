"""The workers of a step: how many there are, on which mesh, and how a function runs on all of them.

A step runs in one worker's code, where the workers' axis is bound, or in a program of all workers,
whose arrays have a row for each. `Workers` is for the second.
"""

import contextlib
import contextvars
import dataclasses
import numbers
import operator
from collections.abc import Callable, Iterator, Set
from itertools import zip_longest
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxsparse.comm import meshes, shard_maps, wire
from jaxsparse.comm.meshes import AnyMesh, Placement, names_of


@dataclasses.dataclass(frozen=True)
class Running:
    """How the step that is being traced runs.

    Attributes:
        mesh: the mesh, or None for simulated workers.
        axis_name: the axis of the workers.
        checked: the number of workers that `jaxsparse.check` traces for, without an exchange. None:
            a real step is traced.
    """

    mesh: Mesh | None
    axis_name: str
    checked: int | None = None


# How the step that is being traced runs; None outside of `LocalSteps` and `jaxsparse.check`.
RUNNING: contextvars.ContextVar[Running | None] = contextvars.ContextVar(
    "jaxsparse_running", default=None
)


@contextlib.contextmanager
def running(how: Running) -> Iterator[None]:
    """A context to trace a step in that runs this way."""
    token = RUNNING.set(how)
    try:
        yield
    finally:
        RUNNING.reset(token)


def is_checked() -> bool:
    """Whether `jaxsparse.check` asks for the program of a chain: exchanges are not run."""
    return (how := RUNNING.get()) is not None and how.checked is not None


@dataclasses.dataclass(frozen=True)
class Workers:
    """The workers of a program.

    Attributes:
        count: their number, W. 1: the state of one worker alone, too.
        mesh: the mesh they are on. None: one device simulates them.
        axis_name: the axis of the workers. None: arrays are not split over one.
    """

    count: int
    mesh: AnyMesh | None
    axis_name: str | None

    @classmethod
    def on(cls, mesh: Mesh | int, axis_name: str) -> "Workers":
        """Those that a mesh provides, or this number of simulated ones.

        Raises:
            ValueError: the mesh has no such axis or no devices, or `mesh` is a number that is not a
                positive int.
        """
        if not isinstance(axis_name, str):
            raise ValueError(
                f"axis_name={axis_name!r} must be the name of one mesh axis, whose devices are the "
                "workers. All other axes of the mesh are JAX's to shard over, and need no naming"
            )
        if isinstance(mesh, Mesh):
            if axis_name not in mesh.axis_names:
                raise ValueError(
                    f"axis_name={axis_name!r} is not an axis of the mesh, whose axes are "
                    f"{mesh.axis_names}: pass one of them, or make the mesh with "
                    f"jax.make_mesh((workers,), ({axis_name!r},))"
                )
            count: Any = mesh.shape[axis_name]
        else:
            count = mesh
        if isinstance(count, bool) or not isinstance(count, numbers.Integral):
            raise ValueError(
                f"mesh={str(mesh)[:60]} must be a jax.sharding.Mesh of devices, as "
                f"jax.make_mesh((workers,), ({axis_name!r},)) makes it, or a number of workers to "
                "simulate, as an int"
            )
        if count < 1:
            raise ValueError(f"mesh={mesh} gives no worker: pass a mesh, or a number of at least 1")
        return cls(operator.index(count), mesh if isinstance(mesh, Mesh) else None, axis_name)

    @classmethod
    def find(cls, tree: Any, axis_name: Any, mesh: Mesh | None, workers: Any) -> "Workers":
        """Those of a program in which the axis is not bound.

        Args:
            tree: arrays that may show the mesh.
            axis_name: the axis of the workers.
            mesh: the mesh, if it is given.
            workers: the number of workers to simulate, if it is given.

        Raises:
            ValueError: no mesh is known, or it is not one with this axis, or there is one besides
                `workers`.
        """
        if (how := RUNNING.get()) is not None and how.checked is not None:
            return cls(how.checked, None, axis_name)
        if workers is not None:
            if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
                raise ValueError(
                    f"workers={workers!r} must be a number of workers to simulate, an int of at "
                    "least 1 (list it in static_args under optax.inject_hyperparams), or None on a "
                    "mesh"
                )
            if mesh is not None:
                raise ValueError(
                    f"workers={workers} simulates workers on one device, and mesh={mesh} has them: "
                    "give one of both"
                )
            return cls(workers, None, axis_name)
        found = find_mesh(tree, axis_name, mesh)
        if found is None:
            raise ValueError(
                f"no mesh with an axis {axis_name!r} is known here: put the parameters on one, as "
                "by params = jaxsparse.shard(params, mesh) in front of tx.init(params), call "
                "jax.set_mesh(mesh), or give mesh=. If the axis has another name, give axis_name=. "
                "To simulate workers on one device, give workers="
            )
        meshes.check_has_axis(found, axis_name)
        return cls(found.shape[axis_name], found, axis_name)

    @property
    def inner(self) -> dict[str, int]:
        """The size of each inner axis, see `meshes.inner_axes`."""
        return {} if self.mesh is None else dict(meshes.inner_axes(self.mesh, self.axis_name))

    @property
    def is_explicit(self) -> bool:
        """Whether the mesh has Explicit axes."""
        return self.mesh is not None and AxisType.Explicit in self.mesh.axis_types

    def map(
        self,
        f: Callable[..., Any],
        given: tuple[Any, ...],
        in_specs: tuple[Any, ...],
        out_specs: Any,
        *,
        auto: Set[str] = frozenset(),
        vmapped_as: str | None = None,
    ) -> Any:
        """Runs `f` on all workers.

        Args:
            f: function of `given`, as `jax.shard_map` would call it: of an array that is split over
                the workers, it sees and returns the part of its worker.
            given: trees of the arrays of all workers.
            in_specs: the partition of each array; of trees, as in `jax.shard_map`.
            out_specs: the partition of each array that `f` returns.
            auto: axes that are left to JAX. Partitions do not name them.
            vmapped_as: the name of the axis in `f`, if it is mapped by `jax.vmap`, so that JAX
                places all but the workers' axis. None: it runs manually over all axes but `auto`.

        Simulated workers are mapped by `jax.vmap`. Where the workers' axis is manual already, `f`
        runs over the other axes.
        """
        mesh = self.mesh
        if mesh is None or vmapped_as is not None:
            return self._vmapped(f, given, in_specs, out_specs, vmapped_as or self.axis_name)
        kinds = dict(zip(mesh.axis_names, mesh.axis_types))
        manual = {name for name, kind in kinds.items() if kind == AxisType.Manual}
        mapped = jax.shard_map(
            f,
            mesh=None if manual else mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(kinds) - manual - auto,
            check_vma=False,
        )
        if self.is_explicit and not manual:  # it refuses arrays of another sharding
            put = lambda spec, tree: jax.tree.map(lambda x: _typed(x, mesh, spec, auto), tree)
            given = jax.tree.map(put, in_specs, given)
            if auto:  # JAX runs no partly manual program on Explicit axes as it is read
                mapped = jax.jit(mapped)
        with shard_maps.of_library():
            return mapped(*given)

    def _vmapped(
        self,
        f: Callable[..., Any],
        given: tuple[Any, ...],
        in_specs: tuple[Any, ...],
        out_specs: Any,
        name: str | None,
    ) -> Any:
        """See `map`. Each array gets an axis of the workers in front of the one that they share."""
        of_workers = lambda part: self.axis_name in names_of(part)
        axis_of = lambda spec: next((i for i, part in enumerate(spec) if of_workers(part)), None)

        def placed(x: Any, axis: int) -> Any:
            """Tells XLA that the axis is the workers'. It may copy the array over them if not told.

            Along its other axes it may be sharded in any way.
            """
            if self.mesh is None:
                return x
            parts: list[Any] = [PartitionSpec.UNCONSTRAINED] * x.ndim
            parts[axis] = self.axis_name
            sharding = NamedSharding(self.mesh, PartitionSpec(*parts))
            return jax.lax.with_sharding_constraint(x, sharding)

        def divided(spec: PartitionSpec, x: Any) -> Any:
            if (i := axis_of(spec)) is None:
                return x
            own = x.shape[i] // self.count  # no -1, which arrays without elements refuse
            return placed(x.reshape(*x.shape[:i], self.count, own, *x.shape[i + 1 :]), i)

        def joined(spec: PartitionSpec, x: Any) -> Any:
            if (i := axis_of(spec)) is None:
                return x
            shape = *x.shape[:i], self.count * x.shape[i + 1], *x.shape[i + 2 :]
            return placed(x.reshape(shape), i)

        each = lambda to: lambda spec, tree: jax.tree.map(lambda x: to(spec, x), tree)
        mapped = jax.vmap(
            f,
            in_axes=jax.tree.map(axis_of, in_specs),
            out_axes=jax.tree.map(axis_of, out_specs),
            axis_name=name,
            axis_size=self.count,
            spmd_axis_name=None if self.mesh is None else self.axis_name,
        )
        found = mapped(*jax.tree.map(each(divided), in_specs, given))
        return jax.tree.map(each(joined), out_specs, found)


def _typed(x: Any, mesh: AnyMesh, spec: PartitionSpec, auto: Set[str]) -> Any:
    """`x`, whose type then has this partition, and its own over axes that are left to JAX."""
    if not auto:
        return meshes.constrain(x, NamedSharding(mesh, spec))
    explicit = {a for a, k in zip(mesh.axis_names, mesh.axis_types) if k == AxisType.Explicit}
    own = meshes.restricted(jax.typeof(x).sharding.spec, auto)
    pairs = zip_longest(meshes.restricted(spec, explicit), own)
    both = PartitionSpec(*(meshes.one_or_all((*names_of(a), *names_of(b))) for a, b in pairs))
    return jax.reshard(x, NamedSharding(mesh, both))


def find_mesh(tree: Any, axis_name: str | None, given: Mesh | None) -> AnyMesh | None:
    """The mesh that leaves are on: the given one, or theirs, the running step's, the context's."""
    if given is not None:
        return given
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(leaf, jax.core.Tracer):  # types name the mesh of Auto axes, too
            sharding = getattr(jax.typeof(leaf), "sharding", None)
        if isinstance(sharding, NamedSharding) and axis_name in sharding.mesh.axis_names:
            return sharding.mesh
    if (how := RUNNING.get()) is not None:
        return how.mesh
    context = jax.sharding.get_abstract_mesh()
    return context if axis_name in context.axis_names else None


def workers_and_placement(
    params: Any, axis_name: str | None, mesh: Mesh | None, workers: int | None, specs: Any
) -> tuple[Workers, Placement | None]:
    """The workers of a state for these parameters, and their placement. See `Options`.

    One worker's code, in which the axis is bound, gets one worker's state. So does code in which no
    mesh is known, for `jaxsparse.shard` to spread.
    """
    is_bound = wire.is_bound(axis_name)
    if (workers is not None or is_checked()) and axis_name is not None and not is_bound:
        return Workers.find((), axis_name, mesh, workers), None
    found = find_mesh(params, axis_name, mesh)
    if found is None or axis_name is None:
        return Workers(1, None, None), None
    placement = meshes.place(params, axis_name, found, specs)
    if is_bound:
        return Workers(1, found, None), placement
    return Workers(found.shape[axis_name], found, axis_name), placement
