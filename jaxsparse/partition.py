"""Different reducers for different leaves, as one Optax transformation."""

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import optax
from jaxtyping import Array, DTypeLike

from jaxsparse import layout as layouts
from jaxsparse.feedback import Levels, Planned, planned_feedback
from jaxsparse.reducers.base import Budget, Reducer, alignment
from jaxsparse.reducers.staged import StagedReducer
from jaxsparse.stages import Stages

# Given a leaf's key path, as printed by jax.tree_util.keystr, and its shape: how it is exchanged.
# None: uncompressed.
Rule = Budget | Stages[Reducer] | None
Policy = Callable[[str, tuple[int, ...]], Rule]


def partition(
    policy: Policy | Mapping[str, Rule],
    default: Rule = None,
    *,
    axis_name: str | None = "data",
    dense_axis: str | None = None,
    sharded: bool = False,
    delay: Literal[0, 1] | None = None,
    accumulator_dtype: DTypeLike | None = None,
    momentum: float | Array | None = None,
    bucket_size: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Error feedback around a reducer for each group of leaves.

    Leaves with equal reducers are laid end to end and exchanged as one vector, so a reducer whose
    settings are totals (`SketchedReducer`) has them for its group. All uncompressed leaves travel
    in one message. What `error_feedback` says of residuals, momentum and composition holds here.

    Parallax's hybrid (Kim et al., EuroSys 2019), sparse gradients by gather and dense ones by
    all-reduce, is `partition({"embedding": jaxsparse.BlockGatherReducer(...)})`.

    Args:
        policy: a function of a leaf's key path (as `jax.tree_util.keystr` prints it) and shape that
            returns its reducer, or None for uncompressed; or a mapping from regular expressions to
            these, of which the first one found anywhere in the path counts. A reducer that changes
            during training is `Stages` of reducers.
        default: of leaves that no expression of the mapping matches.
        axis_name: see `error_feedback`, as for the three that follow.
        dense_axis: the fast axis of a mesh with two levels.
        sharded: gradients are shards, averaged over `dense_axis` already. The policy sees their
            shapes, and key paths that end in the mark: "['kernel'].jaxsparse_sharded".
        delay: 1 applies this step what was exchanged before its gradients.
        accumulator_dtype: of residuals and momenta; see `error_feedback`.
        momentum: momentum correction, of all leaves, masked as each leaf's reducer says.
        bucket_size: upper limit for the elements of one bucket; buckets of a reducer with a
            `block_size` are multiples of it.

    Raises:
        ValueError: from here: an expression is not valid. From `init` and `update`: an expression
            matches no leaf, a reducer is none, or see `error_feedback`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxsparse.reducers.top_k import TopKReducer
        >>> tx = partition({"embedding": TopKReducer(0.01)}, axis_name=None)
        >>> grads = {"embedding": jnp.ones((64, 32)), "kernel": jnp.ones((32, 32))}
        >>> updates, state = tx.update(grads, tx.init(grads))
        >>> int(updates["embedding"].sum()), int(updates["kernel"].sum())
        (21, 1024)
    """
    levels = Levels(axis_name, dense_axis, sharded)
    rules = None if callable(policy) else _compiled(policy)

    def plan(tree: Any) -> Planned:
        unused = set(rules or ())

        def group_of(path: str, shape: tuple[int, ...]) -> Any:
            if rules is None:
                assert callable(policy)
                return _checked(policy(path, shape), path)
            for rule, reducer in rules.items():
                if rule.search(path):
                    unused.discard(rule)
                    return _checked(reducer, path)
            return _checked(default, path)

        layout = layouts.plan_groups(tree, group_of, bucket_size=bucket_size, alignment=alignment)
        if unused:
            raise ValueError(
                f"policy: no leaf is left for {sorted(rule.pattern for rule in unused)}; the "
                f"paths are {layout.paths}"
            )
        groups = list(dict.fromkeys(layout.groups))
        dense_size = layout.dense_size if len(groups) == 1 else 0
        reducers: list[Reducer] = []
        shards: list[int] = []
        for group in groups:
            sizes = tuple(
                size for size, own in zip(layout.bucket_sizes, layout.groups) if own == group
            )
            assert isinstance(group, Budget)
            own_reducers, own_shards = levels.split(group, sizes, dense_size)
            reducers += own_reducers
            shards += own_shards
        return Planned(layout, tuple(reducers), tuple(shards))

    return planned_feedback(
        plan, levels, momentum=momentum, delay=delay, accumulator_dtype=accumulator_dtype
    )


def _compiled(
    policy: Mapping[str, Rule],
) -> dict[re.Pattern[str], Rule]:
    if not isinstance(policy, Mapping) or not all(isinstance(rule, str) for rule in policy):
        raise ValueError(
            f"policy={policy!r} must be a function of path and shape, or a mapping from regular "
            'expressions to reducers: {"embedding": jaxsparse.S2Reducer(...)}'
        )
    try:
        return {re.compile(rule): reducer for rule, reducer in policy.items()}
    except re.error as error:
        raise ValueError(
            f"policy: {error.pattern!r} is no regular expression ({error}): escape the brackets of "
            "key paths, or leave them out"
        ) from None


def _checked(reducer: Any, path: str) -> Budget | None:
    if reducer is None:
        return None
    if isinstance(reducer, Stages):
        for stage in reducer.values:
            _checked(stage, path)
        reducer = StagedReducer(reducer)
    # Strings have a split, too.
    if isinstance(reducer, type | str) or not isinstance(reducer, Budget):
        raise ValueError(
            f"policy gives {reducer!r} for leaf{path}: give a reducer, such as "
            "jaxsparse.SparDLReducer(0.01), or None for uncompressed"
        )
    try:
        hash(reducer)
    except TypeError:
        raise ValueError(
            f"policy gives {reducer!r} for leaf{path}, which is not hashable: leaves are grouped "
            "by equal reducers, so make it a frozen dataclass"
        ) from None
    return reducer
