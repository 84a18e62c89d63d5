"""Who owns which part of a tree's leaves, and how what is owned moves between layouts.

Worker w owns part w of a leaf, along the first axis that the W workers divide. An owner's parts of
all leaves are one row, so that a sum of rows is a reduce-scatter.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath, tree_map_with_path
from jaxtyping import Array, Float

from jaxsparse.arrays import layout as layouts
from jaxsparse.arrays.layout import IsDense
from jaxsparse.comm import marks, meshes
from jaxsparse.comm.meshes import Placement, names_of
from jaxsparse.comm.workers import Workers
from jaxsparse.feedback.plan import exchanged_specs
from jaxsparse.training.per_worker import spec_like


@dataclasses.dataclass(frozen=True)
class Ownership:
    """Which worker owns what of each leaf, by the leaf's number."""

    paths: tuple[KeyPath, ...]
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    local: tuple[tuple[int, ...], ...]  # of one device
    of_params: tuple[PartitionSpec, ...]  # over the other axes of the mesh
    own: tuple[PartitionSpec, ...]  # the same, further cut for the exchange
    compressed: tuple[int, ...]
    axes: dict[int, int]  # the axis along which workers own a leaf
    workers: Workers
    inner: tuple[str, ...]

    @classmethod
    def plan(
        cls,
        tree: Any,
        is_dense: IsDense,
        workers: Workers,
        placement: Placement | None,
    ) -> "Ownership":
        """The parts of a tree of this structure."""
        dense = layouts.picked(tree, is_dense)
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        shapes = tuple(jnp.shape(x) for _, x in leaves)
        own, local = (PartitionSpec(),) * len(shapes), shapes
        if placement is not None:
            fits = [placement.is_cut(placement.exchanged(i, s)) for i, s in enumerate(shapes)]
            dense = [a or not b for a, b in zip(dense, fits)]
            sent = {i for i, is_loose in enumerate(dense) if not is_loose}
            own = tuple(exchanged_specs(tree, placement, sent))
            local = tuple(map(placement.local, shapes, own))
        compressed = [i for i, is_loose in enumerate(dense) if not is_loose and 0 not in local[i]]
        if not compressed:
            raise ValueError(
                f"no leaf would be compressed or shared: all {len(shapes)} are uncompressed. By "
                "default vectors, scalars and leaves below 1024 elements are, and those that other "
                "axes of the mesh can't cut: give is_dense=lambda path, shape: False, or take the "
                "optimizer behind jaxsparse.dense()"
            )
        fits_all = lambda n: n % workers.count == 0
        fitting = {i: [a for a, n in enumerate(local[i]) if fits_all(n)] for i in compressed}
        return cls(
            paths=tuple(path for path, _ in leaves),
            names=layouts.short_names(tree),
            shapes=shapes,
            local=local,
            of_params=placement.own if placement else own,
            own=own,
            compressed=tuple(compressed),
            axes={i: axes[0] for i, axes in fitting.items() if axes},
            workers=workers,
            inner=placement.axes if placement else (),
        )

    @property
    def owned(self) -> list[int]:
        """The leaves of which each worker owns a part."""
        return [i for i in self.compressed if i in self.axes]

    @property
    def whole(self) -> list[int]:
        """The compressed leaves that workers can't share equally."""
        return [i for i in self.compressed if i not in self.axes]

    def row_spec(self, leaf: int) -> PartitionSpec:
        """The partition of an array that has a row for each worker."""
        return PartitionSpec(self.workers.axis_name, *self.own[leaf])

    def owner_spec(self, leaf: int) -> PartitionSpec:
        """The partition of an array in a leaf's shape that lies with the owners."""
        if leaf not in self.axes:
            return self.own[leaf]
        axis, own = self.axes[leaf], self.own[leaf]
        spec = [*own, *[None] * (axis + 1 - len(own))]
        inner = names_of(spec[axis])
        own_axis = self.workers.axis_name
        spec[axis] = (*inner, own_axis) if inner else own_axis
        return PartitionSpec(*spec)

    def as_parameter(self, leaf: int, x: Array) -> Array:
        """An update that is cut as its parameter is, and not further."""
        if (mesh := self.workers.mesh) is None or self.of_params[leaf] == self.own[leaf]:
            return x
        return meshes.constrain(x, NamedSharding(mesh, self.of_params[leaf]))

    def to_rows(self, x: dict[int, Array]) -> Float[Array, "W m"]:
        """A row for each owner, with its parts of all leaves."""
        rows = []
        for i in self.owned:
            cut = x[i].reshape(self._divided(i))
            rows.append(jnp.moveaxis(cut, self.axes[i], 0).reshape(self.workers.count, -1))
        return jnp.concatenate(rows, axis=1)

    def from_rows(self, rows: Float[Array, "W m"]) -> dict[int, Array]:
        """The inverse of `to_rows`."""
        found, start = {}, 0
        for i in self.owned:
            shape, axis = self._divided(i), self.axes[i]
            stop = start + math.prod(shape) // self.workers.count
            cut = rows[:, start:stop].reshape(self.workers.count, *shape[:axis], *shape[axis + 1 :])
            found[i], start = jnp.moveaxis(cut, 0, axis).reshape(self.local[i]), stop
        return found

    def of_owner(self, x: Float[Array, " m"]) -> dict[int, Array]:
        """An owner's own parts of the leaves, from its row."""
        shapes = []
        for i in self.owned:
            axis, shape = self.axes[i], self._divided(i)
            shapes.append((*shape[:axis], *shape[axis + 1 :]))
        return dict(zip(self.owned, layouts.cut(x, shapes)))

    def _divided(self, leaf: int) -> tuple[int, ...]:
        """A leaf's shape with an axis of the owners in front of the one that they share."""
        shape, axis, count = self.local[leaf], self.axes[leaf], self.workers.count
        return (*shape[:axis], count, shape[axis] // count, *shape[axis + 1 :])

    def started(self, init: Callable[[Any], Any], params: Any, in_variables: bool) -> Any:
        """The optimizer's first state."""
        mesh = self.workers.mesh
        is_placed = lambda x: isinstance(getattr(x, "sharding", None), NamedSharding)
        on_mesh = lambda x: not isinstance(x, Tracer) and is_placed(x) and not meshes.kind_of(x)
        if isinstance(mesh, Mesh) and all(map(on_mesh, jax.tree.leaves(params))):
            # No device ever holds all of it. (Of another memory, Optax makes moments there.)
            shapes = jax.eval_shape(init, params)
            put = lambda path, x: NamedSharding(mesh, spec_like(path, x, self._specs))
            init = jax.jit(init, out_shardings=tree_map_with_path(put, shapes))
        return self.placed(init(params), in_variables)

    @property
    def _specs(self) -> dict[tuple[KeyPath, tuple[int, ...]], PartitionSpec]:
        """The partitions of arrays that have the name and shape of a leaf."""
        each = enumerate(zip(self.paths, self.shapes))
        return {(path, shape): self.owner_spec(i) for i, (path, shape) in each}

    def placed(self, state: Any, in_variables: bool = False) -> Any:
        """The optimizer's state with its moments cut over their owners."""
        if (mesh := self.workers.mesh) is None:
            return state
        specs = self._specs

        def put(path: KeyPath, x: Any) -> Any:
            spec = spec_like(path, x, specs)
            kind = meshes.kind_of(x)
            x = meshes.constrain(x, NamedSharding(mesh, spec, memory_kind=kind))
            return marks.in_variable(x, spec) if in_variables else x

        return tree_map_with_path(put, state)
