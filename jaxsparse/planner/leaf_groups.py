"""Groups of leaves, each of which may have its own system."""

import dataclasses
import functools
import math
import numbers
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxsparse import layout as layouts
from jaxsparse.blocks import check_block_size
from jaxsparse.reducers.blocks import check_room
from jaxsparse.settings import check_density, static_count

REST = "all other leaves"


@dataclasses.dataclass(frozen=True)
class Group:
    """Settings of a group of leaves that may have a system of its own.

    Attributes:
        density: share of the elements that a step delivers, in (0, 1]. None: the plan's.
        touched: share of the blocks that are not zero on one worker, in (0, 1], if gradients are
            sparse already, as those of embeddings are. They are then sent exactly, by
            `omni_reduce`, `sparse_all_gather` (if these may be chosen) or dense. None: gradients
            are dense.
        block_size: number of elements in a block: the width of the embedding.
    """

    density: float | None = None
    touched: float | None = None
    block_size: int = 256

    def __post_init__(self):
        if self.density is not None:
            check_density(self.density)
        check_room("touched", self.touched)
        object.__setattr__(self, "block_size", check_block_size(self.block_size))


class Members(NamedTuple):
    """A group's leaves."""

    group: Group
    leaves: int
    elements: int


@dataclasses.dataclass(frozen=True)
class LeafGroups:
    """The leaves of a tree, and the rules that put them into groups or let them go dense.

    Attributes:
        leaves: the key path and the shape of each leaf.
        rules: mapping from regular expressions to groups, or to None for dense.
        is_dense: the rule for leaves that travel dense in any case. None: the default rule.
    """

    leaves: Sequence[tuple[str, tuple[int, ...]]]
    rules: Mapping[str, Group | None]
    is_dense: layouts.IsDense | None

    @classmethod
    def of(
        cls,
        params: Any,
        rules: Mapping[str, Group | None] | None,
        is_dense: layouts.IsDense | None,
    ) -> "LeafGroups":
        """Makes it from a tree of arrays, or from a number of elements, which are one matrix.

        Raises:
            ValueError: an expression is not valid, or maps to neither a `Group` nor None, or no
                leaf is left for a group.
        """
        if isinstance(params, numbers.Number):
            params = {
                "params": jax.ShapeDtypeStruct((1, static_count("params", params)), jnp.float32)
            }
        for rule, group in (rules or {}).items():
            try:
                re.compile(rule)
            except re.error as error:
                raise ValueError(f"groups: {rule!r} is no regular expression ({error})") from None
            if group is not None and not isinstance(group, Group):
                raise ValueError(
                    f"groups[{rule!r}]={group!r} must be a jaxsparse.planner.Group(...), or "
                    "None for dense"
                )
        if isinstance(params, str):
            raise ValueError(
                f"params={params!r} must be a number of elements, or a tree of arrays or "
                "jax.ShapeDtypeStructs"
            )
        found = cls(layouts.named_leaves(params), rules or {}, is_dense)
        _ = found.members  # raises if a group has no leaf
        return found

    def elements(self, name: str | None) -> int:
        """The number of elements of a group; for None, of the dense leaves."""
        members = self.members.get(name)
        return members.elements if members else 0

    def group_of(self, path: str, shape: tuple[int, ...]) -> str | None:
        """The name of a leaf's group; None for leaves that travel dense."""
        rule = layouts.small_or_vector if self.is_dense is None else self.is_dense
        if rule(path, shape):
            return None
        for expression, group in self.rules.items():
            if re.search(expression, path):
                return None if group is None else expression
        return REST

    @functools.cached_property
    def members(self) -> dict[str | None, Members]:
        """All groups with elements. The dense leaves are under None.

        Raises:
            ValueError: a group has no leaves.
        """
        found: dict[str | None, Members] = {}
        for path, shape in self.leaves:
            if size := math.prod(shape):
                name = self.group_of(path, shape)
                group = self.rules.get(name or "") or Group()
                before = found.get(name, Members(group, 0, 0))
                found[name] = Members(group, before.leaves + 1, before.elements + size)
        if unused := [rule for rule, group in self.rules.items() if group and rule not in found]:
            raise ValueError(f"groups: no leaf that may be compressed is left for {unused}")
        return found

    def written(self, reducers: Mapping[str, str], bucket_size: int | None = None) -> str:
        """Python code that makes the transformation and assigns it to tx.

        Args:
            reducers: each group's reducer as a Python expression; "None" for dense.
            bucket_size: option of the transformation.
        """
        rule = "jaxsparse.layout.small_or_vector" if self.is_dense is None else "is_dense"
        lines = ["def policy(path, shape):", f"    if {rule}(path, shape):", "        return None"]
        for expression, group in self.rules.items():
            reducer = "None" if group is None else reducers[expression]
            lines += [f"    if re.search({expression!r}, path):", f"        return {reducer}"]
        lines.append(f"    return {reducers.get(REST, 'None')}")
        head = ["import re", "", "import jaxsparse", ""]
        limit = "" if bucket_size is None else f", bucket_size={bucket_size}"
        return "\n".join([*head, *lines, "", f"tx = jaxsparse.partition(policy{limit})"])
