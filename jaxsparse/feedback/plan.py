"""How the leaves of a tree are exchanged: rules, and buckets of leaves with one reducer."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxsparse.arrays import layout as layouts
from jaxsparse.arrays.layout import IsDense, Layout, named_leaves
from jaxsparse.feedback.options import leaves_rule
from jaxsparse.reducers.base import Leaf, Reducer, check_reducer

# The way in which one leaf is exchanged. None: uncompressed.
Rule = Reducer | None
# A function of a leaf's key path, as jax.tree_util.keystr prints it, and its shape.
Policy = Callable[[str, tuple[int, ...]], Rule]
# A function of a tree, and of whether it is a part of one, that returns the reducer of each leaf,
# checked. A part may lack leaves that a whole tree must have.
Rules = Callable[[Any, bool], Sequence[Reducer | None]]


class BucketPlan(NamedTuple):
    """How a bucket is exchanged."""

    reducer: Reducer
    size: int  # number of elements
    name: str  # in a state: its number and the reducer's system
    state: Any  # shapes and dtypes of the reducer's own state
    leaves: frozenset[int]  # the numbers of the leaves that have a part in it

    @property
    def needs_zeros(self) -> bool:
        return self.reducer.needs_zeros


class TreePlan(NamedTuple):
    """How the leaves of a tree are exchanged."""

    layout: Layout
    buckets: tuple[BucketPlan, ...]
    dense_elements: int  # number of uncompressed elements of all of a worker's devices

    @property
    def compressed(self) -> frozenset[int]:
        """The numbers of the leaves in buckets."""
        return frozenset().union(*(bucket.leaves for bucket in self.buckets))

    @property
    def systems(self) -> tuple[str, ...]:
        """The name of each bucket's system."""
        return tuple(bucket.reducer.system for bucket in self.buckets)


def one_rule(reducer: Reducer, is_dense: IsDense | None) -> Rules:
    """The rules that give the reducer to all leaves but those that `is_dense` picks."""
    rule = leaves_rule(is_dense)

    def rules(tree: Any, is_part: bool) -> list[Reducer | None]:
        goes_dense = layouts.picked(tree, rule)
        found = [None if dense else reducer for dense in goes_dense]
        if is_dense is None and not (is_part or any(found)):
            raise ValueError(
                f"no leaf would be compressed: all {len(found)} are vectors, scalars or smaller "
                "than 1024 elements, which go dense by default. Pass "
                "is_dense=lambda path, shape: False to compress them all, or use jaxsparse.dense()"
            )
        return found

    return rules


def by_policy(policy: Policy | Mapping[str, Rule], default: Rule) -> Rules:
    """The rules of a policy function, or of a mapping from regular expressions on key paths."""
    if callable(policy):
        return lambda tree, _: [_checked(policy(*leaf), leaf[0]) for leaf in named_leaves(tree)]
    patterns = _compiled(policy)

    def rules(tree: Any, is_part: bool) -> list[Reducer | None]:
        leaves = named_leaves(tree)
        first = [next((p for p in patterns if p.search(path)), None) for path, _ in leaves]
        unused = sorted(pattern.pattern for pattern in patterns if pattern not in first)
        if unused and not is_part:
            paths = tuple(path for path, _ in leaves)
            raise ValueError(f"policy: no leaf is left for {unused}; the paths are {paths}")
        found = [default if pattern is None else patterns[pattern] for pattern in first]
        return [_checked(rule, path) for rule, (path, _) in zip(found, leaves)]

    return rules


def _compiled(policy: Mapping[str, Rule]) -> dict[re.Pattern[str], Rule]:
    if not isinstance(policy, Mapping) or not all(isinstance(rule, str) for rule in policy):
        raise ValueError(
            f"policy={policy!r} must be a function of path and shape, or a mapping from regular "
            'expressions to reducers: {"embedding": jaxsparse.reducers.S2(...)}'
        )
    try:
        return {re.compile(rule): reducer for rule, reducer in policy.items()}
    except re.error as error:
        raise ValueError(
            f"policy: {error.pattern!r} is no regular expression ({error}): escape the brackets of "
            "key paths, or leave them out"
        ) from None


def _checked(reducer: Any, path: str) -> Reducer | None:
    return None if reducer is None else check_reducer(reducer, f"policy, for leaf{path}: ")


def plan_for(
    tree: Any,
    given: Sequence[Reducer | None],
    bucket_size: int | None,
    devices: int = 1,
    dense_elements: int | None = None,
) -> TreePlan:
    """The plan for one tree structure, given each leaf's reducer; None: uncompressed.

    Leaves with equal reducers are laid end to end and exchanged as one vector.

    Args:
        tree: arrays, or their shapes and dtypes, as one device has them.
        given: a reducer or None for each leaf, of the whole tree.
        bucket_size: see `jaxsparse.layout.plan`.
        devices: the number of a worker's devices, each with buckets of the same sizes. They share
            settings that are totals for the tree, as buckets do.
        dense_elements: the number of uncompressed elements of all these devices. None: those of
            `tree`.

    Raises:
        ValueError: settings for the whole tree do not fit, or see `jaxsparse.layout.plan`.
    """
    groups = dict.fromkeys(r for r in given if r is not None)
    shape = {r: (r.alignment, r.whole_leaves) for r in groups}
    layout = layouts.plan_groups(
        tree,
        given,
        bucket_size=bucket_size,
        alignment={r: alignment for r, (alignment, _) in shape.items()},
        whole_leaves={r for r, (_, whole) in shape.items() if whole},
    )
    sizes, all_dense = layout.bucket_sizes, layout.dense_size
    of_group = [[i for i, own in enumerate(layout.groups) if own == group] for group in groups]
    dense_size = all_dense if sum(map(bool, of_group)) == 1 else 0
    reducers: list[Reducer] = []
    for (whole, (_, is_whole)), own in zip(shape.items(), of_group):
        each = tuple(sizes[i] for i in own for _ in range(devices))
        made = list(whole.split(each, dense_size * devices)[::devices])
        if is_whole:
            leaves = [tuple(Leaf(*leaf) for leaf in layout.leaves(i)) for i in own]
            made = [reducer.with_leaves(each) for reducer, each in zip(made, leaves)]
        reducers += made
    buckets = tuple(
        BucketPlan(
            reducer,
            size,
            f"{i}_{reducer.system}",
            reducer.abstract_state(size),
            frozenset(piece.leaf for piece in pieces),
        )
        for i, (reducer, size, pieces) in enumerate(zip(reducers, sizes, layout.buckets))
    )
    return TreePlan(layout, buckets, all_dense if dense_elements is None else dense_elements)
