"""Settings that change a few times during training, such as a density that is warmed up."""

import bisect
import dataclasses
from typing import Generic, TypeVar

from jaxsparse.settings import static_int

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Stages(Generic[T]):
    """Values of a static setting, each for a range of steps.

    One compiled step holds a branch for each value, and the branch that is taken decides what
    travels: bytes really shrink. Compile time grows with the number of stages, so a few will do.

    Attributes:
        values: one for each stage.
        boundaries: the step at which each but the first stage begins, in increasing order.

    Example:
        >>> stages = Stages(values=(0.25, 0.01), boundaries=(100,))
        >>> stages.at(99), stages.at(100)
        (0.25, 0.01)
    """

    values: tuple[T, ...]
    boundaries: tuple[int, ...]

    def __post_init__(self):
        object.__setattr__(self, "values", tuple(self.values))
        steps = tuple(static_int("boundaries", step) for step in self.boundaries)
        object.__setattr__(self, "boundaries", steps)
        if len(self.values) != len(steps) + 1:
            raise ValueError(
                f"boundaries={steps} divide training into {len(steps) + 1} stages, but there are "
                f"{len(self.values)} values={self.values}: give one for each stage"
            )
        if any(step < 1 for step in steps) or list(steps) != sorted(set(steps)):
            raise ValueError(f"boundaries={steps} must be increasing steps, from 1 on")

    def at(self, step: int) -> T:
        """The value in force at a step."""
        return self.values[bisect.bisect_right(self.boundaries, step)]


def warm_up(last: float, *, steps: int, first: float = 0.25, stages: int = 4) -> Stages[float]:
    """A density that falls exponentially from `first` to `last`, then stays.

    Deep Gradient Compression (Lin et al., ICLR 2018, section 3.3) warms up over four epochs, from
    25 % by factors of 4.

    Masking (see `error_feedback`) zeroes the momentum of all that is sent: at a high density little
    momentum is left, and a warm-up is no dense training.

    Args:
        last: density after the warm-up.
        steps: of the whole warm-up.
        first: density at the beginning.
        stages: of the warm-up, each of steps / stages steps.

    Example:
        >>> warm_up(0.25 / 4**2, steps=200, stages=2)
        Stages(values=(0.25, 0.0625, 0.015625), boundaries=(100, 200))
    """
    if not 0 < last <= first <= 1:
        raise ValueError(f"last={last} and first={first} must satisfy 0 < last <= first <= 1")
    if not 1 <= stages <= steps:
        raise ValueError(f"stages={stages} must lie between 1 and steps={steps}")
    densities = [first * (last / first) ** (i / stages) for i in range(stages)]
    return Stages(
        (*densities, last), tuple(round(steps * i / stages) for i in range(1, stages + 1))
    )
