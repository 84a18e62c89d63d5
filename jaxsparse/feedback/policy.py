"""Policies that choose a reducer for each leaf of a tree, and their checks."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxsparse.arrays.layout import named_leaves
from jaxsparse.reducers.base import Reducer, check_reducer

# The way in which one leaf is exchanged. None: uncompressed.
Rule = Reducer | None
# A function of a leaf's key path, as jax.tree_util.keystr prints it, and its shape.
Policy = Callable[[str, tuple[int, ...]], Rule]
# A function of a tree that returns the reducer of each leaf, checked.
Rules = Callable[[Any], Sequence[Reducer | None]]


def by_policy(policy: Policy | Mapping[str, Rule], default: Rule) -> Rules:
    """The rules of a policy function, or of a mapping from regular expressions on key paths."""
    if callable(policy):
        return lambda tree: [_checked(policy(*leaf), leaf[0]) for leaf in named_leaves(tree)]
    patterns = _compiled(policy)

    def rules(tree: Any) -> list[Reducer | None]:
        leaves = named_leaves(tree)
        first = [next((p for p in patterns if p.search(path)), None) for path, _ in leaves]
        if unused := sorted(pattern.pattern for pattern in patterns if pattern not in first):
            paths = tuple(path for path, _ in leaves)
            raise ValueError(f"policy: no leaf is left for {unused}; the paths are {paths}")
        found = [default if pattern is None else patterns[pattern] for pattern in first]
        return [_checked(rule, path) for rule, (path, _) in zip(found, leaves)]

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


def _checked(reducer: Any, path: str) -> Reducer | None:
    return None if reducer is None else check_reducer(reducer, f"policy, for leaf{path}: ")
