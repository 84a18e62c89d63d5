"""A reducer whose settings change a few times during training."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from jaxsparse.arrays.settings import Stages
from jaxsparse.comm import wire
from jaxsparse.reducers.base import Conservation, Info, Kept, Leaf, Reducer, Sums, settle

T = TypeVar("T")


class StagedState(NamedTuple):
    """The number of exchanges so far, and the state that all stages' reducers share."""

    step: UInt32[Array, ""]
    reducer: Any


# The promises, from the strongest to the weakest.
_CONSERVATION: tuple[Conservation, ...] = get_args(Conservation)


@dataclasses.dataclass(frozen=True)
class Staged(Reducer):
    """Uses the reducer of the current stage, which the number of exchanges so far determines.

    Skipped steps do not count, except with a delay, where they exchange, too. A branch gets a copy
    of the vector, so a step of DGC takes twice the memory with a warm-up: 8.5 d floats instead of
    4.2. The states of stages must have equal shapes and dtypes. A stage without state, such as
    dense, leaves the others' state as it is.
    """

    stages: Stages[Reducer]

    @property
    def has_stages(self) -> bool:
        """No: it is the reducer that changes."""
        return False

    @property
    def system(self) -> str:
        return "-".join(dict.fromkeys(reducer.system for reducer in self.stages.values))

    @property
    def conservation(self) -> Conservation:
        """The weakest promise of any stage."""
        return max((r.conservation for r in self.stages.values), key=_CONSERVATION.index)

    @property
    def alignment(self) -> int:
        return math.lcm(*(reducer.alignment for reducer in self.stages.values))

    @property
    def needs_zeros(self) -> bool:
        return any(reducer.needs_zeros for reducer in self.stages.values)

    @property
    def adapts_messages(self) -> bool:
        """Whether any stage adapts them. The stage itself is the same for all shards."""
        return any(reducer.adapts_messages for reducer in self.stages.values)

    @property
    def whole_leaves(self) -> bool:
        return any(reducer.whole_leaves for reducer in self.stages.values)

    def with_leaves(self, leaves: tuple[Leaf, ...]) -> "Staged":
        stages = tuple(reducer.with_leaves(leaves) for reducer in self.stages.values)
        return Staged(Stages(stages, self.stages.boundaries))

    def split(self, sizes: tuple[int, ...], dense_size: int = 0) -> tuple[Reducer, ...]:
        buckets = zip(*(reducer.split(sizes, dense_size) for reducer in self.stages.values))
        return tuple(Staged(Stages(bucket, self.stages.boundaries)) for bucket in buckets)

    def init(self, size: int) -> StagedState:
        """The state of the first stage that has one, and a counter."""
        states = [reducer.init(size) for reducer in self.stages.values]
        states = [state for state in states if jax.tree.leaves(state)] or states
        kinds = {str(jax.tree.map(jax.typeof, state)) for state in states}
        if len(kinds) > 1:
            raise ValueError(
                f"stages={self.stages} carry different states, {sorted(kinds)}: let them differ in "
                "density only"
            )
        return StagedState(jnp.uint32(0), states[0])

    def reduce(
        self, x: Float[Array, " d"], state: StagedState, axis_name: str | None
    ) -> tuple[Sums, Kept]:
        masks: list[bool] = []  # whether each stage masks momentum; complete once all are traced

        def run(reducer: Reducer, x: Array, inner: Any) -> tuple[Array, Info, Kept]:
            sums, kept = reducer.reduce(x, inner, axis_name)
            counts = sums.info(wire.axis_size(axis_name))
            sums, kept = settle(x, sums, kept.whole(x))
            masks.append(kept.sent is not None)
            sent = jnp.zeros_like(x, jnp.bool_) if kept.sent is None else kept.sent
            counts = wire.varying_as(counts, x, axis_name)  # a constant is typed as equal
            residual, sent = (wire.varying(each, axis_name) for each in (kept.residual, sent))
            return sums.total, counts, Kept(residual, sent, kept.state)

        begun = [state.step >= jnp.uint32(step) for step in self.stages.boundaries]
        stage = sum((b.astype(jnp.int32) for b in begun), jnp.int32(0))
        branches = [functools.partial(run, reducer) for reducer in self.stages.values]
        total, counts, kept = jax.lax.switch(stage, branches, x, state.reducer)
        kept = kept._replace(
            sent=kept.sent if any(masks) else None,
            state=StagedState(state.step + jnp.uint32(1), kept.state),
        )
        return Sums(total, counts.delivered, counts.overflow, is_settled=True), kept


def in_stages(settings: T, make: Callable[[T], Reducer]) -> Reducer:
    """What `make` makes of the settings, or a `Staged` if one of their fields is `Stages`."""
    if isinstance(settings, Staged):
        return settings
    fields = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}  # type: ignore[arg-type]
    changing = {name: value for name, value in fields.items() if isinstance(value, Stages)}
    if not changing:
        return make(settings)
    if len(changing) > 1:
        raise ValueError(f"{' and '.join(changing)} are both Stages: let one setting change")
    ((name, stages),) = changing.items()
    made = (dataclasses.replace(settings, **{name: value}) for value in stages.values)  # type: ignore[type-var]
    return Staged(Stages(tuple(map(make, made)), stages.boundaries))


def reducer_of(reducer: Any, place: str = "") -> Reducer:
    """What a user's reducer, or `Stages` of them, stands for. `place` is for errors."""
    given = reducer.values if isinstance(reducer, Stages) else (reducer,)
    for one in given:
        if not isinstance(one, Reducer):
            raise ValueError(
                f"{place or 'reducer='}{one!r} must be a reducer, such as "
                "jaxsparse.systems.TopK(0.01), or Stages of reducers"
            )
    if not isinstance(reducer, Stages):
        return in_stages(reducer, lambda settings: settings)
    if any(one.has_stages for one in given):
        raise ValueError(
            f"{place or 'reducer='}{reducer!r} has stages within stages: list them all"
        )
    return Staged(reducer)
