"""Parameters that are cut over the workers' axis: whole in the loss, and gradients cut alike.

That is FSDP, or ZeRO-3. Gradients come back as means, so no exchange stands in the optimizer, whose
moments are cut as parameters are. A leaf that is cut travels to `jaxsparse.value_and_grad`'s
workers as rows, one for each shard, which moves nothing.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import (
    KeyPath,
    SequenceKey,
    keystr,
    tree_leaves_with_path,
    tree_map_with_path,
)
from jaxtyping import DTypeLike

from jaxsparse.comm import meshes, wire
from jaxsparse.comm.marks import PerWorker
from jaxsparse.comm.meshes import names_of
from jaxsparse.comm.shards import Plain, Residual, rows_of, whole_of
from jaxsparse.comm.workers import Workers


def fsdp_specs(params: Any, workers: Mesh | int, axis_name: str = "data", least: int = 1024) -> Any:
    """Partitions that cut each leaf over the workers, along the largest dimension that they divide.

    Args:
        params: arrays, or anything with a shape.
        workers: the mesh, or the number of workers.
        axis_name: the axis of the workers.
        least: leaves with fewer elements stay whole. So do those that no dimension cuts.

    Returns:
        A `PartitionSpec` for each leaf.

    >>> fsdp_specs({"w": jnp.zeros((30, 64)), "b": jnp.zeros(64)}, 8)
    {'b': P(), 'w': P(None, 'data')}
    """
    count = Workers.on(workers, axis_name).count

    def of(x: Any) -> PartitionSpec:
        shape = getattr(x, "shape", ())  # modules of Equinox have other leaves, too
        fits = [i for i, n in enumerate(shape) if n and n % count == 0]
        if math.prod(shape) < least or not fits:
            return PartitionSpec()
        return PartitionSpec(*[None] * max(fits, key=lambda i: shape[i]), axis_name)

    return jax.tree.map(of, params)


def gather_residual(
    params: Any,
    specs: Any = None,
    dtype: DTypeLike = jnp.bfloat16,
    *,
    mesh: Mesh | None = None,
    axis_name: str = "data",
    workers: int | None = None,
) -> Any:
    """An empty residual for `Gather(residual=)`: on each worker a value for each one of `params`.

    Args:
        params: the parameters, or with several `argnums` a tuple of them.
        specs: see `value_and_grad`.
        dtype: float32, a float of 16 bits, or one of 8 ("float8_e4m3fn").
        mesh: see `value_and_grad`.
        axis_name: the axis of the workers.
        workers: see `value_and_grad`.

    Returns:
        A tree like `params`, of arrays marked `PerWorker`. None for leaves that are whole.
    """
    there = Workers.find(params, axis_name, mesh, workers)
    cut = _axes(params, specs, there)
    rows = PartitionSpec(axis_name)
    at = NamedSharding(there.mesh, rows) if isinstance(there.mesh, Mesh) else None

    def of(path: KeyPath, x: Any) -> Residual | None:
        if path not in cut:
            return None
        Residual.zeros((), dtype)  # raises where it is no float
        values = jnp.zeros((there.count, *x.shape), dtype, device=at)
        return Residual(*map(PerWorker, (values, jnp.ones(there.count, device=at))))

    return tree_map_with_path(of, params)


@dataclasses.dataclass(frozen=True)
class CutLeaves:
    """The differentiated leaves of a call, some of which are cut over the workers.

    Attributes:
        axes: the dimension along which a leaf is cut, by its path in what is differentiated.
        numbers: the number of each leaf among all of the call.
        gather: how to gather those that are cut. None: the loss does.
        workers: the workers.
    """

    axes: dict[KeyPath, int]
    numbers: dict[KeyPath, int]
    gather: Plain | None
    workers: Workers

    @classmethod
    def find(
        cls,
        leaves: list[tuple[KeyPath, Any]],
        args: tuple[Any, ...],
        argnums: int | Sequence[int],
        specs: Any,
        gather: Plain | Literal[False] | None,
        workers: Workers,
    ) -> Self | None:
        """Those of a call, of whose `leaves` the first are those of `args`. None: none is cut."""
        if not isinstance(gather, Plain) and gather is not None and gather is not False:
            raise ValueError(
                f"gather={gather!r} is no jaxsparse.Gather: give gather=jaxsparse.Gather('int8', "
                "'int4'), or gather=False if the loss calls jaxsparse.gather itself"
            )
        several = (argnums,) if (is_one := isinstance(argnums, int)) else argnums
        several = [i % len(args) for i in several]
        wanted = args[several[0]] if is_one else tuple(args[i] for i in several)
        axes = _axes(wanted, specs, workers)
        if not axes and (specs is None or workers.inner):  # or partitions are of those other axes
            if gather is None:
                return None
            raise ValueError(
                f"gather={gather!r}, and no leaf is known to be cut over the workers' axis "
                f"{workers.axis_name!r}. In jax.jit, arrays on Auto axes do not tell: give "
                "jaxsparse.value_and_grad their partitions, as specs=jaxsparse.fsdp_specs(params, "
                "mesh)"
            )
        if workers.inner:
            raise ValueError(
                f"parameters are cut over the workers' axis {workers.axis_name!r} on a mesh with "
                f"other axes {workers.inner}, which is not supported: take a mesh with this axis "
                "alone, or cut them over the other axes alone, and exchange gradients with rows"
            )
        numbers = {
            (*(() if is_one else (SequenceKey(k),)), *path[2:]): n
            for k, i in enumerate(several)
            for n, (path, _) in enumerate(leaves)
            if path[0] == SequenceKey(0) and path[1] == SequenceKey(i)
        }
        how = Plain() if gather is None else gather or None
        if how is not None and how.residual is not None:
            shapes = {path: jnp.shape(x) for path, x in tree_leaves_with_path(wanted)}
            needed = {keystr(path): (workers.count, *shapes[path]) for path in axes}
            each = _by_path(how.residual)
            given = {keystr(path): jnp.shape(jax.tree.leaves(x)[0]) for path, x in each}
            if given != needed:
                raise ValueError(
                    f"residual= has arrays of {given}, and the leaves that are cut need {needed}: "
                    "make it by jaxsparse.gather_residual(params, specs), once before training"
                )
        return cls(axes, numbers, how, workers)

    def entered(self, leaves: list[Any], is_split: list[bool]) -> tuple[list[Any], list[bool]]:
        """The arrays of all workers: the call's, with rows of what is cut, and the gather's own."""
        leaves, is_split = [*leaves], [*is_split]
        for path, axis in self.axes.items():
            i = self.numbers[path]
            leaves[i], is_split[i] = rows_of(leaves[i], axis, self.workers.count), True
        if self.gather is not None:
            key, residual = map(jax.tree.leaves, (self.gather.key, self.gather.residual))
            leaves += [*key, *residual]
            is_split += [False] * len(key) + [True] * len(residual)
        return leaves, is_split

    def around(self, one: Callable[..., Any], count: int) -> Callable[..., Any]:
        """A function of what `entered` returned, from `one` of the call's `count` whole leaves.

        `one` returns ((value, gradients), None), and this a worker's own of it and the equal rest.
        """
        axis_name, how = self.workers.axis_name, self.gather
        arrays = (None, None) if how is None else (how.key, how.residual)
        numbers = self.numbers

        def run(*given: Any) -> Any:
            structure: Any = jax.tree.structure(arrays)
            key, residual = structure.unflatten(given[count:])
            before = dict(_by_path(PerWorker.unwrap(residual)))
            key_of = lambda path: key if key is None else jax.random.fold_in(key, numbers[path])
            leaves, left = [*given[:count]], dict[KeyPath, Any]()
            for path, axis in self.axes.items():
                x = leaves[numbers[path]][0]
                with jax.named_scope(meshes.SCOPE):
                    x = x if how is None else how.gathered(x, axis, axis_name, key_of(path))
                leaves[numbers[path]] = x
            (value, grads), _ = one(*leaves)

            def own(path: KeyPath, x: Any) -> Any:
                if path not in self.axes:
                    return None
                if how is None:  # the loss' own gather has averaged it
                    return x
                with jax.named_scope(meshes.SCOPE):
                    mean, left[path] = how.averaged(
                        x, self.axes[path], axis_name, key_of(path), before.get(path)
                    )
                return mean

            def equal(path: KeyPath, x: Any) -> Any:
                if path in self.axes:
                    return None
                wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
                with jax.named_scope(meshes.SCOPE):
                    return (wire.psum(wide, axis_name) / self.workers.count).astype(x.dtype)

            mine = tree_map_with_path(own, grads)
            new = tree_map_with_path(lambda path, _: left[path], residual, is_leaf=_is_residual)
            return (value, mine, new), tree_map_with_path(equal, grads)

        return run

    def returned(self, own: Any, equal: Any) -> Any:
        """What `value_and_grad` returns, from what all workers returned of `around`."""
        value, mine, residual = own
        mesh: Any = self.workers.mesh

        def joined(path: KeyPath, x: Any, whole: Any) -> Any:
            if x is None:
                return whole
            axis = self.axes[path]
            spec = PartitionSpec(*[None] * axis, self.workers.axis_name)
            x = whole_of(x, axis)
            return x if mesh is None else meshes.constrain(x, NamedSharding(mesh, spec))

        grads = tree_map_with_path(joined, mine, equal, is_leaf=lambda x: x is None)
        has_residual = self.gather is not None and self.gather.residual is not None
        return value, (grads, jax.tree.map(PerWorker, residual)) if has_residual else grads


def _is_residual(node: Any) -> bool:
    return isinstance(node, Residual)


def _by_path(residual: Any) -> list[tuple[KeyPath, Any]]:
    return tree_leaves_with_path(residual, is_leaf=_is_residual)


def _axes(tree: Any, specs: Any, workers: Workers) -> dict[KeyPath, int]:
    """The dimension along which each leaf is cut over the workers, of those that are."""
    leaves = tree_leaves_with_path(tree)
    parts = map(_seen, leaves) if specs is None else meshes.of_leaves(specs, tree)
    found = dict[KeyPath, int]()
    mesh = workers.mesh
    known = {str(name) for name in ((workers.axis_name,) if mesh is None else mesh.axis_names)}
    for (path, x), spec in zip(leaves, parts):
        named = {name for part in spec or () for name in names_of(part)}
        if named - known or len(spec or ()) > jnp.ndim(x):
            raise ValueError(
                f"leaf{keystr(path)} of shape {jnp.shape(x)} has the partition {spec}, and the "
                f"mesh the axes {sorted(known)}: name these alone, and no more dimensions than the "
                "leaf has. jaxsparse.fsdp_specs(params, mesh) makes such partitions"
            )
        for i, part in enumerate(spec or ()):
            if workers.axis_name not in names_of(part):
                continue
            if len(names_of(part)) > 1 or jnp.shape(x)[i] % workers.count:
                raise ValueError(
                    f"leaf{keystr(path)} of shape {jnp.shape(x)} has the partition {spec}, and its "
                    f"dimension {i} can't be cut equally over the {workers.count} workers of "
                    f"{workers.axis_name!r} alone: cut another one, or leave the leaf whole by "
                    "PartitionSpec(). jaxsparse.fsdp_specs(params, mesh) does either"
                )
            found[path] = i
    return found


def _seen(leaf: tuple[KeyPath, Any]) -> PartitionSpec | None:
    """The partition that an array or its type has."""
    x = leaf[1]
    sharding = getattr(jax.typeof(x) if isinstance(x, jax.core.Tracer) else x, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else None
