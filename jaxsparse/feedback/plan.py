"""Rules that give each leaf its reducer, and the static plan that they make from shapes."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxsparse import layout as layouts
from jaxsparse.collectives import wire
from jaxsparse.feedback.axes import Axes
from jaxsparse.reducers.base import Budget, Leaf, Reducer
from jaxsparse.reducers.stages import Staged, Stages
from jaxsparse.training.marks import is_sharded

# How one leaf is exchanged. None: uncompressed.
Rule = Budget | Stages[Reducer] | None
# Its arguments: a leaf's key path, as jax.tree_util.keystr prints it, and its shape.
Policy = Callable[[str, tuple[int, ...]], Rule]
# The checked rules of all leaves at once.
Rules = Callable[[Sequence[tuple[str, tuple[int, ...]]]], Sequence[Budget | None]]


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


def make_plan(tree: Any, rules: Rules, axes: Axes, bucket_size: int | None) -> Plan:
    """The plan for one tree structure.

    Leaves with equal budgets are laid end to end and exchanged as one vector.

    Raises:
        ValueError: a budget does not fit, or see `jaxsparse.layout.plan`.
    """
    budgets = rules(layouts.named_leaves(tree))
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
        needs_zeros=tuple(reducer.needs_zeros for reducer in reducers),
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


def one_rule(budget: Budget, is_dense: layouts.IsDense | None) -> Rules:
    """The rules that give the budget to all leaves but those that `is_dense` picks."""

    def rules(leaves: Sequence[tuple[str, tuple[int, ...]]]) -> list[Budget | None]:
        pick = layouts.small_or_vector if is_dense is None else is_dense
        found = [None if pick(*leaf) else budget for leaf in leaves]
        if is_dense is None and not any(found):
            raise ValueError(
                f"no leaf would be compressed: all {len(leaves)} are vectors, scalars or smaller "
                "than 1024 elements, which go dense by default. Pass "
                "is_dense=lambda path, shape: False to compress them all, or use jaxsparse.dense()"
            )
        return found

    return rules


def by_policy(policy: Policy | Mapping[str, Rule], default: Rule) -> Rules:
    """The rules of a policy function, or of a mapping from regular expressions on key paths."""
    if callable(policy):
        return lambda leaves: [_budget(policy(*leaf), leaf[0]) for leaf in leaves]
    patterns = _compiled(policy)

    def rules(leaves: Sequence[tuple[str, tuple[int, ...]]]) -> list[Budget | None]:
        first = [next((p for p in patterns if p.search(path)), None) for path, _ in leaves]
        if unused := sorted(pattern.pattern for pattern in patterns if pattern not in first):
            paths = tuple(path for path, _ in leaves)
            raise ValueError(f"policy: no leaf is left for {unused}; the paths are {paths}")
        found = [default if pattern is None else patterns[pattern] for pattern in first]
        return [_budget(rule, path) for rule, (path, _) in zip(found, leaves)]

    return rules


def _compiled(policy: Mapping[str, Rule]) -> dict[re.Pattern[str], Rule]:
    if not isinstance(policy, Mapping) or not all(isinstance(rule, str) for rule in policy):
        raise ValueError(
            f"policy={policy!r} must be a function of path and shape, or a mapping from regular "
            'expressions to reducers: {"embedding": jaxsparse.systems.S2(...)}'
        )
    try:
        return {re.compile(rule): reducer for rule, reducer in policy.items()}
    except re.error as error:
        raise ValueError(
            f"policy: {error.pattern!r} is no regular expression ({error}): escape the brackets of "
            "key paths, or leave them out"
        ) from None


def _budget(reducer: Any, path: str) -> Budget | None:
    if reducer is None:
        return None
    if isinstance(reducer, Stages):
        for stage in reducer.values:
            _budget(stage, path)
        reducer = Staged(reducer)
    if isinstance(reducer, type) or not isinstance(reducer, Budget):
        raise ValueError(
            f"policy gives {reducer!r} for leaf{path}: give a reducer, such as "
            "jaxsparse.systems.SparDL(0.01), or None for uncompressed"
        )
    try:
        hash(reducer)
    except TypeError:
        raise ValueError(
            f"policy gives {reducer!r} for leaf{path}, which is not hashable: leaves are grouped "
            "by equal reducers, so make it a frozen dataclass"
        ) from None
    return reducer
