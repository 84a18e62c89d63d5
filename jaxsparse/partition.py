"""Different reducers for different leaves, as one Optax transformation."""

import re
from collections.abc import Callable, Mapping
from typing import Any, Unpack

import optax

from jaxsparse import layout as layouts
from jaxsparse.feedback import Levels, Planned, planned_feedback
from jaxsparse.feedback.options import Options, exchange_options
from jaxsparse.reducers.base import Budget, Reducer
from jaxsparse.reducers.staged import Staged
from jaxsparse.stages import Stages

# Given a leaf's key path, as printed by jax.tree_util.keystr, and its shape: how it is exchanged.
# None: uncompressed.
Rule = Budget | Stages[Reducer] | None
Policy = Callable[[str, tuple[int, ...]], Rule]


@exchange_options(without=("is_dense",))
def partition(
    policy: Policy | Mapping[str, Rule], default: Rule = None, **options: Unpack[Options]
) -> optax.GradientTransformationExtraArgs:
    """Error feedback around a reducer for each group of leaves.

    Leaves with equal reducers are laid end to end and exchanged as one vector, so a reducer whose
    settings are totals (`SketchedReducer`) has them for its group. All uncompressed leaves travel
    in one message. What `error_feedback` says of residuals, momentum and composition holds here.

    Parallax's hybrid (Kim et al., EuroSys 2019), sparse gradients by gather and dense ones by
    all-reduce, is `partition({"embedding": jaxsparse.systems.SparseAllGather(...)})`.

    Args:
        policy: a function of a leaf's key path (as `jax.tree_util.keystr` prints it) and shape that
            returns its reducer, or None for uncompressed; or a mapping from regular expressions to
            these, of which the first one found anywhere in the path counts. A reducer that changes
            during training is `Stages` of reducers.
        default: of leaves that no expression of the mapping matches.
        **options: as for all transformations.

    Raises:
        ValueError: from here: an expression is not valid. From `init` and `update`: an expression
            matches no leaf, a reducer is none, or see `error_feedback`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxsparse.systems import TopK
        >>> tx = partition({"embedding": TopK(0.01)}, axis_name=None)
        >>> grads = {"embedding": jnp.ones((64, 32)), "kernel": jnp.ones((32, 32))}
        >>> updates, state = tx.update(grads, tx.init(grads))
        >>> int(updates["embedding"].sum()), int(updates["kernel"].sum())
        (21, 1024)
    """
    levels = Levels.of(options)
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

        layout = layouts.plan_groups(
            tree,
            group_of,
            bucket_size=options.get("bucket_size"),
            alignment=lambda group: group.alignment,
        )
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
        plan,
        levels,
        momentum=options.get("momentum"),
        delay=options.get("delay"),
        accumulator_dtype=options.get("accumulator_dtype"),
    )


def _compiled(
    policy: Mapping[str, Rule],
) -> dict[re.Pattern[str], Rule]:
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


def _checked(reducer: Any, path: str) -> Budget | None:
    if reducer is None:
        return None
    if isinstance(reducer, Stages):
        for stage in reducer.values:
            _checked(stage, path)
        reducer = Staged(reducer)
    # Strings have a split, too.
    if isinstance(reducer, type | str) or not isinstance(reducer, Budget):
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
