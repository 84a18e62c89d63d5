"""The axes of workers, and the static plan that budgets make from a tree's shapes.

One axis is compressed, and perhaps a fast one is not. On a mesh of hosts and their devices each
bucket is cut into L shards, one for each device of the fast axis. A reduce-scatter sums shards over
the fast axis, a reducer exchanges them over the slow one, and an all-gather puts them together.
Parameters that are themselves sharded over the fast axis need neither of the two. Error feedback
does this, and not a reducer around a reducer, so that residual and momentum are 1/L as large on
each device. For that, `init` has to know L.
"""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxsparse import layout as layouts
from jaxsparse.collectives import wire
from jaxsparse.feedback.options import Options
from jaxsparse.reducers.base import Budget, Leaf, Reducer
from jaxsparse.training.marks import is_sharded


@dataclasses.dataclass(frozen=True)
class Axes:
    """The axes of workers. L is 1 without a `dense_axis`.

    Attributes:
        axis_name: the axis that reducers exchange over; None for a single worker.
        dense_axis: the fast axis, over which shards are summed exactly; None without one.
        sharded: whether gradients are this device's shards, already averaged over `dense_axis`.
        all: all axes.
        summed: the axes over which uncompressed leaves are yet to be summed.
        scatters: whether `scatter` cuts whole gradients into shards.
    """

    axis_name: str | None
    dense_axis: str | None = None
    sharded: bool = False
    all: tuple[str, ...] = dataclasses.field(init=False)
    summed: tuple[str, ...] = dataclasses.field(init=False)
    scatters: bool = dataclasses.field(init=False)

    def __post_init__(self):
        if self.dense_axis is not None and (
            not isinstance(self.dense_axis, str) or self.dense_axis == self.axis_name
        ):
            raise ValueError(
                f"dense_axis={self.dense_axis!r} must be the name of one other axis than "
                f"axis_name={self.axis_name!r}, or None: axis_name is the slow axis, dense_axis "
                'the fast one, as in axis_name="hosts", dense_axis="local"'
            )
        if not isinstance(self.sharded, bool):
            raise ValueError(f"sharded={self.sharded!r} must be True or False")
        if self.sharded and self.dense_axis is None:
            raise ValueError(
                "sharded=True without a dense_axis: name the axis that the parameters are sharded "
                'over, such as dense_axis="local"'
            )
        named = tuple(axis for axis in (self.axis_name, self.dense_axis) if axis is not None)
        summed = tuple(a for a in named if not (self.sharded and a == self.dense_axis))
        object.__setattr__(self, "all", named)
        object.__setattr__(self, "summed", summed)
        object.__setattr__(self, "scatters", self.dense_axis is not None and not self.sharded)

    @classmethod
    def of(cls, options: Options) -> "Axes":
        """The axes that the options name."""
        return cls(
            options.get("axis_name", "data"),
            options.get("dense_axis"),
            options.get("sharded", False),
        )

    def summands(self) -> int:
        """The number of workers over which uncompressed leaves are yet to be averaged.

        Raises:
            ValueError: an axis is not bound where this is traced.
        """
        workers = wire.axis_size(self.axis_name)
        shards = 1 if self.dense_axis is None else wire.axis_size(self.dense_axis)
        return workers if self.sharded else workers * shards

    def shards(self) -> int:
        """The number of shards, L.

        Raises:
            ValueError: L is not known where this is traced.
        """
        if self.dense_axis is None:
            return 1
        try:
            return wire.axis_size(self.dense_axis)
        except ValueError:
            raise ValueError(
                f"init needs the size of dense_axis={self.dense_axis!r}, for the state of one "
                "shard. Run it on the mesh: state = jaxsparse.data_parallel(tx.init, mesh, "
                f"axis_name={self.all!r}, batch_argnums=())(params)"
            ) from None

    def scatter(self, x: Float[Array, " d"], size: int) -> Float[Array, " size"]:
        """This device's shard of the mean of `x` over the fast axis."""
        shards = self.shards()
        return wire.reduce_scatter(_rows(x, shards, size), self.dense_axis) / shards

    def gather(self, shard: Float[Array, " size"], size: int) -> Float[Array, " d"]:
        """All `size` elements of a bucket, of which `shard` is this device's part."""
        return wire.all_gather(shard, self.dense_axis).reshape(-1)[:size]

    def own(self, x: Float[Array, " d"], size: int) -> Float[Array, " size"]:
        """This device's shard of `x`."""
        rank = wire.axis_index(self.dense_axis)
        return jax.lax.dynamic_index_in_dim(_rows(x, self.shards(), size), rank, keepdims=False)

    def none_of(self, *broken: Bool[Array, ""]) -> tuple[Bool[Array, ""], ...]:
        """For each flag, whether it is set on no worker. The result is the same on all workers."""
        flags = jnp.stack([jnp.where(flag, jnp.float32(1), jnp.float32(0)) for flag in broken])
        total = wire.psum(self.varying(flags), self.all)
        return tuple(total[i] == 0 for i in range(len(broken)))

    def varying(self, tree: Any) -> Any:
        """`tree`, typed as different on all devices."""
        for axis in self.all:
            tree = wire.varying(tree, axis)
        return tree

    def check(self, updates: Any) -> None:
        """Raises ValueError if an axis is not bound, or gradients have been summed already."""
        self.summands()
        for axis in self.summed:
            if not wire.tracks_replication(axis):
                continue
            axes = self.summed if len(self.summed) > 1 else axis
            for path, leaf in jax.tree_util.tree_flatten_with_path(updates)[0]:
                if leaf.size and not wire.is_varying(leaf, axis):
                    raise ValueError(
                        f"gradient{jax.tree_util.keystr(path)} is equal on all workers of axis "
                        f"{axis!r}: JAX has already summed it, uncompressed, because it was taken "
                        "with respect to replicated parameters. Differentiate with respect to "
                        f"jaxsparse.local(params, {axes!r}) instead, and do not average gradients "
                        "yourself. (If it is a constant, make it local with jaxsparse.local, too)"
                    )

    def typed_as(self, updates: Any, gradients: Any) -> Any:
        """Types updates as equal along the fast axis if their gradients were equal there."""
        axis = self.dense_axis
        if axis is None or not wire.tracks_replication(axis):
            return updates
        return jax.tree.map(
            lambda u, g: u if wire.is_varying(g, axis) else wire.replicated(u, axis),
            updates,
            gradients,
        )


class Plan(NamedTuple):
    """How the leaves of a tree are exchanged."""

    layout: layouts.Layout
    reducers: tuple[Reducer, ...]  # one a bucket
    needs_zeros: tuple[bool, ...]  # one a reducer
    sizes: tuple[int, ...]  # number of elements of each whole bucket
    shards: tuple[int, ...]  # number of elements of this device's shard of each bucket
    parts: int  # number of shards of a bucket, L
    dense_size: int  # number of uncompressed elements
    dense_elements: int  # number of uncompressed elements of all shards


def make_plan(
    tree: Any, budgets: Sequence[Budget | None], axes: Axes, bucket_size: int | None
) -> Plan:
    """The plan for one tree structure, given each leaf's budget; None: uncompressed.

    Leaves with equal budgets are laid end to end and exchanged as one vector.

    Raises:
        ValueError: a budget does not fit, or see `jaxsparse.layout.plan`.
    """
    groups = dict.fromkeys(budget for budget in budgets if budget is not None)
    shape = {budget: (budget.alignment, budget.whole_leaves) for budget in groups}
    layout = layouts.plan_groups(
        tree,
        budgets,
        bucket_size=bucket_size,
        alignment={budget: alignment for budget, (alignment, _) in shape.items()},
        whole_leaves={budget for budget, (_, whole) in shape.items() if whole},
    )
    sizes, all_dense = layout.bucket_sizes, layout.dense_size
    parts = 1 if axes.dense_axis is None else axes.shards()
    of_group = [[i for i, own in enumerate(layout.groups) if own == group] for group in groups]
    dense_size = all_dense if sum(map(bool, of_group)) == 1 else 0
    reducers: list[Reducer] = []
    shards: list[int] = []
    for (budget, (alignment, whole)), own in zip(shape.items(), of_group):
        pieces = [sizes[i] for i in own]
        if axes.scatters:
            pieces = [_shard_size(size, parts, budget, alignment, whole) for size in pieces]
        made = _split(budget, pieces, parts, dense_size, axes)
        if whole:
            leaves = [tuple(Leaf(*leaf) for leaf in layout.leaves(i)) for i in own]
            made = [reducer.with_leaves(each) for reducer, each in zip(made, leaves)]
        reducers += made
        shards += pieces
    return Plan(
        layout=layout,
        reducers=tuple(reducers),
        needs_zeros=tuple(map(operator.attrgetter("needs_zeros"), reducers)),
        sizes=sizes,
        shards=tuple(shards),
        parts=parts,
        dense_size=all_dense,
        dense_elements=_of_all_shards(tree, layout, axes, parts) if axes.sharded else all_dense,
    )


def _split(
    budget: Budget, sizes: Sequence[int], parts: int, dense_size: int, axes: Axes
) -> list[Reducer]:
    """One reducer for this device's shard of each bucket.

    Settings that are totals for the tree are divided over shards as they are over buckets.
    """
    each = tuple(size for size in sizes for _ in range(parts))
    reducers = list(budget.split(each, dense_size * parts)[::parts])
    # No permutation may stand in a branch on a value that differs along the fast axis, because XLA
    # runs it as one collective of all devices. Sums may.
    if axes.dense_axis is not None and any(reducer.adapts_messages for reducer in reducers):
        raise ValueError(
            f"gather='bruck' of {budget} adapts its messages to each shard along "
            f"dense_axis={axes.dense_axis!r}, and devices with different messages would wait for "
            "each other for ever: use gather='recursive' (for a power of two of teams), or teams=1"
        )
    return reducers


def _shard_size(size: int, parts: int, budget: Budget, alignment: int, whole: bool) -> int:
    if whole:
        raise ValueError(
            f"{budget} works on whole matrices, which dense_axis cuts into shards: exchange over "
            "one axis, or give it shards of parameters (sharded=True)"
        )
    return -(-size // (parts * alignment)) * alignment


def _of_all_shards(tree: Any, layout: layouts.Layout, axes: Axes, parts: int) -> int:
    """The number of uncompressed elements. Leaves that are shards count on all devices."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    axis = axes.dense_axis
    assert axis is not None
    is_typed = wire.tracks_replication(axis)

    def copies(leaf: int) -> int:
        path, x = leaves[leaf]
        is_shard = wire.is_varying(x, axis) if is_typed else is_sharded(path)
        return parts if is_shard else 1

    return sum((piece.stop - piece.start) * copies(piece.leaf) for piece in layout.dense)


def check_shards(updates: Any, plan: Plan, axes: Axes) -> None:
    """Raises ValueError if a compressed gradient is no shard but equal along the fast axis."""
    axis, layout = axes.dense_axis, plan.layout
    if axis is None or not wire.tracks_replication(axis):
        return
    leaves = jax.tree.leaves(updates)
    for i in sorted({piece.leaf for bucket in layout.buckets for piece in bucket}):
        if not wire.is_varying(leaves[i], axis):
            raise ValueError(
                f"gradient{layout.paths[i]} is compressed and equal along dense_axis={axis!r}, "
                "but sharded=True expects shards. Each device would deliver different parts of it, "
                "and its copies would drift apart. Let it go uncompressed "
                "(is_dense=lambda path, shape: ..., or None in a policy), or shard the parameter"
            )


def _rows(x: Array, shards: int, size: int) -> Array:
    return jnp.pad(x, (0, shards * size - x.size)).reshape(shards, size)
