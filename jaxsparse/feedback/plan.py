"""The axes of an exchange, and the static plan that budgets make from a tree's shapes."""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jaxsparse import layout as layouts
from jaxsparse.collectives import wire
from jaxsparse.reducers.base import Budget, Leaf, Reducer


@dataclasses.dataclass(frozen=True)
class Axes:
    """The axes of an exchange.

    Attributes:
        axis_name: the axis of the workers, over which reducers exchange; None for a single worker.
        inner: the axes of a worker's own devices. Each device exchanges its own shards.
    """

    axis_name: str | None
    inner: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        """All axes."""
        return (*(() if self.axis_name is None else (self.axis_name,)), *self.inner)

    def none_of(self, *broken: Bool[Array, ""]) -> tuple[Bool[Array, ""], ...]:
        """For each flag, whether it is set on no device. The result is the same on all devices."""
        flags = jnp.stack([jnp.where(flag, jnp.float32(1), jnp.float32(0)) for flag in broken])
        total = wire.psum(wire.varying(flags, self.axis_name), self.all)
        return tuple(total[i] == 0 for i in range(len(broken)))

    def check(self, updates: Any) -> None:
        """Raises ValueError if the axis is not bound, or gradients have been summed already."""
        axis = self.axis_name
        wire.axis_size(axis)
        if axis is None or not wire.tracks_replication(axis):
            return
        for path, leaf in jax.tree_util.tree_flatten_with_path(updates)[0]:
            if leaf.size and not wire.is_varying(leaf, axis):
                raise ValueError(
                    f"gradient{jax.tree_util.keystr(path)} is equal on all workers of axis "
                    f"{axis!r}: JAX has already summed it, uncompressed, because it was taken "
                    "with respect to replicated parameters. Differentiate with respect to "
                    f"jaxsparse.local(params, {axis!r}) instead, and do not average gradients "
                    "yourself. (If it is a constant, make it local with jaxsparse.local, too. If "
                    "this shard_map checks types but stands in one with check_vma=False, or if "
                    "optax.MultiSteps around this has averaged it, run the step through "
                    "jaxsparse.data_parallel, or give check_vma=False here, too)"
                )


class Plan(NamedTuple):
    """How the leaves of a tree are exchanged."""

    layout: layouts.Layout
    reducers: tuple[Reducer, ...]  # one a bucket
    needs_zeros: tuple[bool, ...]  # one a reducer
    sizes: tuple[int, ...]  # number of elements of each bucket
    dense_size: int  # number of uncompressed elements
    dense_elements: int  # number of uncompressed elements of all of a worker's devices


def make_plan(
    tree: Any,
    budgets: Sequence[Budget | None],
    bucket_size: int | None,
    *,
    devices: int = 1,
    dense_elements: int | None = None,
) -> Plan:
    """The plan for one tree structure, given each leaf's budget; None: uncompressed.

    Leaves with equal budgets are laid end to end and exchanged as one vector.

    Args:
        tree: arrays, or their shapes and dtypes, as one device has them.
        budgets: a budget or None for each leaf.
        bucket_size: see `jaxsparse.layout.plan`.
        devices: the number of a worker's devices, each with buckets of the same sizes. They share
            settings that are totals for the tree, as buckets do.
        dense_elements: the number of uncompressed elements of them all.

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
    of_group = [[i for i, own in enumerate(layout.groups) if own == group] for group in groups]
    dense_size = all_dense if sum(map(bool, of_group)) == 1 else 0
    reducers: list[Reducer] = []
    for (budget, (_, is_whole)), own in zip(shape.items(), of_group):
        each = tuple(sizes[i] for i in own for _ in range(devices))
        made = list(budget.split(each, dense_size * devices)[::devices])
        if is_whole:
            leaves = [tuple(Leaf(*leaf) for leaf in layout.leaves(i)) for i in own]
            made = [reducer.with_leaves(each) for reducer, each in zip(made, leaves)]
        reducers += made
    # No permutation may stand in a branch on a value that differs between a worker's devices,
    # because XLA runs it as one collective of all devices. Sums may.
    if devices > 1 and (adapting := [r for r in reducers if r.adapts_messages]):
        raise ValueError(
            f"gather='bruck' of {adapting[0]} adapts its messages to each device's shard, and "
            f"the {devices} devices of a worker would wait for each other for ever: use "
            "gather='recursive' (for a power of two of teams), or teams=1"
        )
    return Plan(
        layout=layout,
        reducers=tuple(reducers),
        needs_zeros=tuple(map(operator.attrgetter("needs_zeros"), reducers)),
        sizes=sizes,
        dense_size=all_dense,
        dense_elements=all_dense if dense_elements is None else dense_elements,
    )
