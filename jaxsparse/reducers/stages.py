"""A reducer that changes a few times during training."""

import dataclasses
import functools
import math
import numbers
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from jaxsparse.arrays.settings import Stages
from jaxsparse.comm import wire
from jaxsparse.reducers.base import (
    Conservation,
    Info,
    Kept,
    Leaf,
    Reducer,
    Sums,
    check_reducer,
    settle,
)


class StagedState(NamedTuple):
    """The number of exchanges so far, and the state that all stages' reducers share."""

    step: UInt32[Array, ""]
    reducer: Any


# The promises, from the strongest to the weakest.
_CONSERVATION: tuple[Conservation, ...] = get_args(Conservation)


@dataclasses.dataclass(frozen=True)
class Staged(Reducer):
    """A reducer for each range of steps: those of a warm-up, or dense steps before others.

    One compiled step has a branch for each reducer, with messages of the branch's own sizes: a
    lower density sends fewer bytes. Compile time grows with the number of reducers, so use a few. A
    branch gets a copy of the vector, so a step of DGC takes twice the memory with a warm-up: 8.5 d
    floats instead of 4.2.

    Steps are the exchanges so far. Skipped steps do not count, except with a delay, where they
    exchange, too. The reducers' states must have equal shapes and dtypes. One without state, such
    as dense, leaves the others' state as it is.

    Args:
        reducers: one reducer for each range.
        boundaries: the steps at which all but the first begin, in increasing order.
    """

    reducers: tuple[Reducer, ...]
    boundaries: tuple[int, ...]

    def check(self) -> None:
        stages = Stages(self.reducers, self.boundaries)
        object.__setattr__(self, "reducers", stages.values)
        object.__setattr__(self, "boundaries", stages.boundaries)
        for reducer in self.reducers:
            check_reducer(reducer, "reducers: ")
            if isinstance(reducer, Staged):
                raise ValueError(f"reducers: {reducer!r} has stages of its own: list them all")

    @property
    def name(self) -> str:
        return "-".join(dict.fromkeys(reducer.name for reducer in self.reducers))

    @property
    def conservation(self) -> Conservation:
        """The weakest promise of any stage."""
        return max((r.conservation for r in self.reducers), key=_CONSERVATION.index)

    @property
    def alignment(self) -> int:
        return math.lcm(*(reducer.alignment for reducer in self.reducers))

    @property
    def needs_zeros(self) -> bool:
        return any(reducer.needs_zeros for reducer in self.reducers)

    @property
    def whole_leaves(self) -> bool:
        return any(reducer.whole_leaves for reducer in self.reducers)

    def with_leaves(self, leaves: tuple[Leaf, ...]) -> "Staged":
        return Staged(tuple(r.with_leaves(leaves) for r in self.reducers), self.boundaries)

    def split(self, sizes: tuple[int, ...], dense_size: int = 0) -> tuple[Reducer, ...]:
        buckets = zip(*(reducer.split(sizes, dense_size) for reducer in self.reducers))
        return tuple(Staged(bucket, self.boundaries) for bucket in buckets)

    def init(self, size: int) -> StagedState:
        """The state of the first stage that has one, and a counter."""
        states = [reducer.init(size) for reducer in self.reducers]
        states = [state for state in states if jax.tree.leaves(state)] or states
        kinds = {str(jax.tree.map(jax.typeof, state)) for state in states}
        if len(kinds) > 1:
            raise ValueError(
                f"reducers={self.reducers} carry different states, {sorted(kinds)}: let them "
                "differ in density only"
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

        begun = [state.step >= jnp.uint32(step) for step in self.boundaries]
        stage = sum((b.astype(jnp.int32) for b in begun), jnp.int32(0))
        branches = [functools.partial(run, reducer) for reducer in self.reducers]
        total, counts, kept = jax.lax.switch(stage, branches, x, state.reducer)
        kept = kept._replace(
            sent=kept.sent if any(masks) else None,
            state=StagedState(state.step + jnp.uint32(1), kept.state),
        )
        return Sums(total, counts.delivered, counts.overflow, is_settled=True), kept


def warm_up(reducer: Reducer, *, steps: int, first: float = 0.25, stages: int = 4) -> Staged:
    """A reducer whose density falls exponentially from `first` over so many `steps`, then stays.

    Deep Gradient Compression (Lin et al., ICLR 2018, section 3.3) warms up over four epochs, from
    25 % by factors of 4. A warm-up is not dense training: momentum that is masked where entries are
    sent (see `exchange`) hardly builds up at a high density.

    Args:
        reducer: the reducer of the last stage, with a `density`, such as
            `jaxsparse.reducers.TopK(0.001)`.
        steps: the number of steps before the last stage.
        first: the density of the first stage, in [the reducer's, 1].
        stages: the number of stages before the last.

    >>> from jaxsparse.reducers import TopK
    >>> staged = warm_up(TopK(0.25 / 4**2), steps=200, stages=2)
    >>> [each.density for each in staged.reducers], staged.boundaries
    ([0.25, 0.0625, 0.015625], (100, 200))
    """
    last = getattr(reducer, "density", None)
    if not isinstance(last, numbers.Real):
        raise ValueError(
            f"reducer={reducer!r} has no density that could fall: give a reducer that has, as in "
            "jaxsparse.exchange(jaxsparse.warm_up(reducers.TopK(0.001), steps=400)), "
            "or jaxsparse.reducers.Staged of reducers"
        )
    if not last <= first <= 1:
        raise ValueError(f"first={first} must lie between the reducer's density, {last}, and 1")
    if not 1 <= stages <= steps:
        raise ValueError(f"stages={stages} must lie between 1 and steps={steps}")
    densities = [first * (float(last) / first) ** (i / stages) for i in range(stages)]
    before = [dataclasses.replace(reducer, density=density) for density in densities]  # type: ignore[call-arg]
    starts = tuple(round(steps * i / stages) for i in range(1, stages + 1))
    return Staged((*before, reducer), starts)
