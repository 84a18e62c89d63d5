"""Shared by benchmarks that train: the one rule by which each row's learning rate is found."""

import functools
import math
from collections.abc import Callable


def tuned(loss: Callable[[float], float], start: float) -> float:
    """The rate whose loss is no higher than those of its half and of its double.

    The search goes from `start` downhill by factors of two, so that the best rate is never at the
    edge of those that were tried. A loss of NaN is an infinite one, and of two of these the lower
    rate counts as better. `loss` is called once a rate.

    Raises:
        ValueError: all runs diverge, down to a millionth of `start`.
    """

    @functools.cache
    def cost(power: int) -> tuple[float, int]:
        found = loss(start * 2.0**power)
        return (found, 0) if math.isfinite(found) else (math.inf, power)

    best = 0
    while True:
        if best < -20:
            raise ValueError(f"start={start} and all rates down to a millionth of it diverge")
        beside = min((best - 1, best + 1), key=cost)
        if cost(beside) >= cost(best):
            return start * 2.0**best
        best = beside
