"""How the leaves of a tree are exchanged: in buckets of leaves with one reducer."""

import math
import re
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxsparse.arrays import layout as layouts
from jaxsparse.arrays.layout import Layout, named_leaves
from jaxsparse.comm.marks import without_variables
from jaxsparse.comm.meshes import Placement
from jaxsparse.feedback.options import Settings, leaves_rule
from jaxsparse.reducers.base import Leaf, Reducer, check_reducer

# Uncompressed leaves with fewer elements a device are not cut further: gathering them inside a
# worker would cost more than sending them several times.
_FEWEST = 1024


class BucketPlan(NamedTuple):
    """How a bucket is exchanged."""

    reducer: Reducer
    size: int  # number of elements
    name: str  # in a state: its number and the reducer's name
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
    def reducer_names(self) -> tuple[str, ...]:
        """The name of each bucket's reducer."""
        return tuple(bucket.reducer.name for bucket in self.buckets)


def reducers_of(tree: Any, settings: Settings) -> list[Reducer | None]:
    """The reducer of each leaf of a tree. None: it is uncompressed.

    Raises:
        ValueError: no leaf would be compressed, or the policy does not fit the tree.
    """
    tree = without_variables(tree)  # so that a path is the same in `init` and in `update`
    if not jax.tree.leaves(tree):
        return []
    if settings.reducer is not None:
        goes_dense = layouts.picked(tree, leaves_rule(settings.is_dense))
        found = [None if dense else settings.reducer for dense in goes_dense]
        if settings.is_dense is None and not any(found):
            raise ValueError(
                f"no leaf would be compressed: all {len(found)} are vectors, scalars or smaller "
                "than 1024 elements, which go dense by default. Pass "
                "is_dense=lambda path, shape: False to compress them all, or use jaxsparse.dense()"
            )
        return found
    leaves = named_leaves(tree)
    if callable(policy := settings.policy):
        return [_checked(policy(*leaf), leaf[0]) for leaf in leaves]
    patterns = compiled(policy)
    first = [next((p for p in patterns if p.search(path)), None) for path, _ in leaves]
    unused = sorted(pattern.pattern for pattern in patterns if pattern not in first)
    if unused:
        paths = tuple(path for path, _ in leaves)
        raise ValueError(f"policy: no leaf is left for {unused}; the paths are {paths}")
    chosen = [settings.default if pattern is None else patterns[pattern] for pattern in first]
    return [_checked(reducer, path) for reducer, (path, _) in zip(chosen, leaves)]


def compiled(policy: Any) -> dict[re.Pattern[str], Reducer | None]:
    """The reducers of a policy by its regular expressions. Raises ValueError if one is none."""
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


def plan_of(tree: Any, settings: Settings, placement: Placement | None) -> TreePlan:
    """How the leaves of a tree are exchanged, whose shards are placed so.

    Raises:
        ValueError: reducers or their settings do not fit the tree or its placement.
    """
    reducers = reducers_of(tree, settings)
    if placement is None:
        return _plan_for(tree, reducers, settings.bucket_size)
    own, reducers, dense_elements = _shards(tree, reducers, placement)
    return _plan_for(own, reducers, settings.bucket_size, placement.devices, dense_elements)


def _plan_for(
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
        bucket_size: see `layout_of`. None: `usual_bucket_size`, and no leaf is cut.
        devices: the number of a worker's devices, each with buckets of the same sizes. They share
            settings that are totals for the tree, as buckets do.
        dense_elements: the number of uncompressed elements of all these devices. None: those of
            `tree`.

    Raises:
        ValueError: settings for the whole tree do not fit, or see `layout_of`.
    """
    groups = dict.fromkeys(r for r in given if r is not None)
    shape = {r: (r.alignment, r.whole_leaves) for r in groups}
    uncut = {r for r, (_, whole) in shape.items() if whole}
    if bucket_size is None:
        shapes = map(jnp.shape, jax.tree.leaves(tree))
        compressed = [math.prod(s) for s, r in zip(shapes, given, strict=True) if r is not None]
        bucket_size = layouts.usual_bucket_size(sum(compressed))
        # A part of a leaf would hide no earlier, and take a copy.
        if max(compressed, default=0) <= layouts.LONG_BUCKET:
            uncut = set(groups)
    layout = layouts.plan_groups(
        tree,
        given,
        bucket_size=bucket_size,
        alignment={r: alignment for r, (alignment, _) in shape.items()},
        whole_leaves=uncut,
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
            f"{i}_{reducer.name}",
            reducer.abstract_state(size),
            frozenset(piece.leaf for piece in pieces),
        )
        for i, (reducer, size, pieces) in enumerate(zip(reducers, sizes, layout.buckets))
    )
    return TreePlan(layout, buckets, all_dense if dense_elements is None else dense_elements)


def _shards(
    tree: Any, reducers: Sequence[Reducer | None], placement: Placement
) -> tuple[Any, list[Reducer | None], int]:
    """The shards that one device exchanges.

    Returns:
        The shapes and dtypes of the shards. Their reducers, None for leaves that can't be cut over
        all inner axes. The number of uncompressed elements of all of a worker's devices.

    Raises:
        ValueError: no leaf that a reducer is for can be cut over all inner axes.
    """
    treedef: Any
    leaves, treedef = jax.tree.flatten(tree)
    shapes = [jnp.shape(leaf) for leaf in leaves]
    specs = [placement.exchanged(i, shape) for i, shape in enumerate(shapes)]
    own = [b if placement.is_cut(spec) else None for b, spec in zip(reducers, specs)]
    if any(b is not None for b in reducers) and not any(b is not None for b in own):
        raise ValueError(
            f"no leaf would be compressed: none of the shapes {shapes} has dimensions that the "
            f"inner axes {placement.inner} divide, and leaves that can't be cut over all of them "
            "go uncompressed"
        )
    specs = exchanged_specs(tree, placement, {i for i, b in enumerate(own) if b is not None})
    each = [
        jax.ShapeDtypeStruct(placement.local(shape, spec), jnp.result_type(leaf))
        for leaf, shape, spec in zip(leaves, shapes, specs)
    ]
    dense_elements = sum(math.prod(s) for s, b in zip(shapes, own) if b is None)
    return treedef.unflatten(each), own, dense_elements


def exchanged_specs(tree: Any, placement: Placement, compressed: Set[int]) -> list[PartitionSpec]:
    """The partition in which each leaf is exchanged, given the numbers of compressed ones."""
    found = []
    for i, leaf in enumerate(jax.tree.leaves(tree)):
        cut = placement.exchanged(i, jnp.shape(leaf))
        is_large = math.prod(jnp.shape(leaf)) >= _FEWEST * placement.devices
        found.append(cut if i in compressed or is_large else placement.own[i])
    return found
