"""A reducer whose settings change from stage to stage."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from jaxsparse import _compat
from jaxsparse.collectives import wire
from jaxsparse.reducers.base import Conservation, Leaf, Reduced, Reducer
from jaxsparse.stages import Stages

T = TypeVar("T")


class StagedState(NamedTuple):
    """The number of exchanges so far, and what the reducers of all stages carry."""

    step: UInt32[Array, ""]
    reducer: Any


# From the strongest promise to the weakest.
_CONSERVATION: tuple[Conservation, ...] = ("exact", "to rounding", "in expectation", "leaks")


@dataclasses.dataclass(frozen=True)
class Staged(Reducer):
    """Takes the stage's reducer, by the number of exchanges so far (skipped steps don't count).

    Attributes:
        stages: the reducers; their states must be alike.
    """

    stages: Stages[Reducer]

    @property
    def conservation(self) -> Conservation:
        """What all stages promise."""
        return max((r.conservation for r in self.stages.values), key=_CONSERVATION.index)

    @property
    def dense_at_full_budget(self) -> bool:
        """If all stages promise it."""
        return all(reducer.dense_at_full_budget for reducer in self.stages.values)

    @property
    def alignment(self) -> int:
        """Of whole blocks in all stages."""
        return math.lcm(*(reducer.alignment for reducer in self.stages.values))

    @property
    def needs_zeros(self) -> bool:
        """If any stage does."""
        return any(reducer.needs_zeros for reducer in self.stages.values)

    @property
    def adapts_messages(self) -> bool:
        """If any stage does; the stage itself is the same for all shards."""
        return any(reducer.adapts_messages for reducer in self.stages.values)

    @property
    def whole_leaves(self) -> bool:
        """If any stage does."""
        return any(reducer.whole_leaves for reducer in self.stages.values)

    def with_leaves(self, leaves: tuple[Leaf, ...]) -> "Staged":
        """Each stage with the same."""
        stages = tuple(reducer.with_leaves(leaves) for reducer in self.stages.values)
        return Staged(Stages(stages, self.stages.boundaries))

    def split(self, sizes: tuple[int, ...], dense_size: int = 0) -> tuple[Reducer, ...]:
        """Each stage splits for itself."""
        buckets = zip(*(reducer.split(sizes, dense_size) for reducer in self.stages.values))
        return tuple(Staged(Stages(bucket, self.stages.boundaries)) for bucket in buckets)

    def init(self, size: int) -> StagedState:
        """The first stage's state, and a counter."""
        states = [reducer.init(size) for reducer in self.stages.values]
        kinds = {str(jax.tree.map(jax.typeof, state)) for state in states}
        if len(kinds) > 1:
            raise ValueError(
                f"stages={self.stages} carry different states, {sorted(kinds)}: let them differ in "
                "density only"
            )
        return StagedState(jnp.uint32(0), states[0])

    def __call__(
        self, x: Float[Array, " d"], state: StagedState, *, axis_name: str | None
    ) -> Reduced:
        """See `Reducer`."""
        masks: list[bool] = []  # whether each stage masks momentum, known once all have been traced

        def run(reducer: Reducer, x: Array, inner: Any) -> Reduced:
            reduced = reducer(x, inner, axis_name=axis_name)
            masks.append(reduced.sent is not None)
            sent = jnp.zeros_like(x, jnp.bool_) if reduced.sent is None else reduced.sent
            counts = reduced.info
            for axis in _compat.varying_axes(x) - {axis_name}:  # a constant is typed as equal
                counts = wire.varying(counts, axis)
            return reduced._replace(
                info=counts,
                residual=wire.varying(reduced.residual, axis_name),
                sent=wire.varying(sent, axis_name),
            )

        begun = [state.step >= jnp.uint32(step) for step in self.stages.boundaries]
        stage = sum((b.astype(jnp.int32) for b in begun), jnp.int32(0))
        branches = [functools.partial(run, reducer) for reducer in self.stages.values]
        reduced = jax.lax.switch(stage, branches, x, state.reducer)
        return reduced._replace(
            sent=reduced.sent if any(masks) else None,
            state=StagedState(state.step + jnp.uint32(1), reduced.state),
        )


def staged(make: Callable[[T], Reducer], setting: T | Stages[T]) -> Reducer:
    """make(setting), or a `Staged` of make(value) for each of its stages."""
    if not isinstance(setting, Stages):
        return make(setting)
    return Staged(Stages(tuple(map(make, setting.values)), setting.boundaries))
