"""Measured losses of recipes, which `plan_recipes` and `plan` print beside their times.

`benchmarks/frontier_map.py --export` writes `losses.json`.
"""

import dataclasses
import functools
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxsparse.arrays.printing import aligned
from jaxsparse.planner.recipes import EXCHANGES, Recipe

# Among recipes that take this many times the hours of the fastest, the loss decides.
ABOUT_AS_FAST = 1.05

_SHIPPED = Path(__file__).with_name("losses.json")


class End(NamedTuple):
    """How a recipe's runs ended."""

    rate: float  # learning rate
    losses: Mapping[int, float]  # held-out loss in nats by seed

    def common(self, other: "End") -> list[int]:
        """The seeds that another recipe has, too."""
        return sorted(self.losses.keys() & other.losses.keys())

    def above(self, other: "End") -> tuple[float, float | None]:
        """Mean and standard deviation of the differences from another recipe on common seeds.

        With one seed in common there is no standard deviation.
        """
        differences = [self.losses[seed] - other.losses[seed] for seed in self.common(other)]
        spread = statistics.stdev(differences) if len(differences) > 1 else None
        return statistics.fmean(differences), spread


class Law(NamedTuple):
    """What a format for all values costs over the dense mean of as many local steps, in nats.

        scale * (error / (1 - error)) ** power * (100 / exchanges) ** decay * (10 / H) ** noise

    The error is the share of the squared norm of normal numbers that does not arrive in one
    exchange, so that `error / (1 - error)` exchanges pass, on average, before a number does. The
    last factor is for noise, of which displacements of few steps have more.
    """

    scale: float
    power: float
    decay: float
    noise: float
    spread: float  # nats: root mean square error of fits of one half of the runs, on the other
    errors: Mapping[str, float]  # by exchange: those that it was fitted on
    exchanges: tuple[float, float]  # the fewest and the most in a run of these
    every: tuple[int, int]  # the fewest and the most local steps

    def nats(self, exchange: str, exchanges: float, every: int) -> float | None:
        """Nats above the dense mean, or None where no runs were.

        Args:
            exchange: a key of `recipes.EXCHANGES`.
            exchanges: number of exchanges in the run.
            every: local steps between two of them, H.
        """
        is_near = self.exchanges[0] <= exchanges <= self.exchanges[1]
        if exchange not in self.errors or not is_near:
            return None
        if not self.every[0] <= every <= self.every[1]:
            return None
        error = self.errors[exchange]
        lag = (error / (1 - error)) ** self.power
        few = (100 / exchanges) ** self.decay * (10 / every) ** self.noise
        return float(self.scale * lag * few)


class Loss(NamedTuple):
    """Held-out loss of a recipe in nats above dense gradients, same optimizer, steps and seeds."""

    excess: float
    spread: float | None  # standard deviation over seeds, or the law's error; None: one seed
    source: str  # "measured", or by what
    rate: float | None = None  # learning rate with which it was measured

    @property
    def is_measured(self) -> bool:
        """Whether it was trained, and no formula says so."""
        return self.source.startswith("measured")

    def __str__(self) -> str:
        return f"{self.excess:+.3f}" + ("" if self.spread is None else f" ± {self.spread:.3f}")


def trained_first(found: Sequence[Any]) -> Sequence[Any]:
    """Those whose `loss` was measured, or all for want of these."""
    return [one for one in found if one.loss is not None and one.loss.is_measured] or found


@dataclasses.dataclass(frozen=True)
class Losses:
    """Measured losses of recipes.

    Attributes:
        setup: model, steps and seeds, in words.
        steps: steps of the runs.
        ends: how each recipe's runs ended, by its name.
        law: what the others cost, where it was fitted.
        shorter: the same recipes in shorter runs, which tell how losses depend on the length.
    """

    setup: str
    steps: int
    ends: Mapping[str, End]
    law: Law | None = None
    shorter: "Losses | None" = None

    @classmethod
    @functools.cache
    def shipped(cls) -> "Losses":
        """The measurements that come with the library."""
        content = json.loads(_SHIPPED.read_text())

        def ends(content: Any) -> dict[str, End]:
            return {
                name: End(rate, {int(seed): loss for seed, loss in losses.items()})
                for name, (rate, losses) in content["ends"].items()
            }

        setup, steps, short = content["setup"], content["steps"], content["shorter"]
        shorter = cls(setup, short["steps"], ends(short))
        return cls(setup, steps, ends(content), Law(**content["law"]), shorter)

    @functools.cached_property
    def usual_spread(self) -> float:
        """Root mean square of the standard deviations over seeds, for recipes with one seed."""
        found = [
            spread
            for name, end in self.ends.items()
            for dense in [self.dense(Recipe.parsed(name).optimizer)]
            if end is not dense and end.common(dense)
            for spread in [end.above(dense)[1]]
            if spread is not None
        ]
        return math.sqrt(statistics.fmean([x**2 for x in found])) if found else 0.0

    def most(self, loss: Loss | None) -> float:
        """What a recipe may cost, with one standard deviation. Infinite if it was not measured."""
        if loss is None:
            return math.inf
        return loss.excess + (self.usual_spread if loss.spread is None else loss.spread)

    @functools.cached_property
    def recipes(self) -> tuple[Recipe, ...]:
        """The measured recipes."""
        return tuple(map(Recipe.parsed, self.ends))

    def dense(self, optimizer: str) -> End:
        """How dense gradients ended by this optimizer."""
        return self.ends[str(Recipe(optimizer, "gradients", 1, "dense"))]

    def of(self, recipe: Recipe) -> Loss | None:
        """The loss of a recipe: measured, or by the law above the dense mean, or None.

        Between two numbers of local steps the dense mean lies on a straight line over log H.
        Nothing is said beyond them.
        """
        if str(recipe) in self.ends:
            end, dense = self.ends[str(recipe)], self.dense(recipe.optimizer)
            excess, spread = (0.0, None) if end is dense else end.above(dense)
            seeds = len(end.common(dense))
            return Loss(excess, spread, f"measured, {seeds} seed{'s' * (seeds > 1)}", end.rate)
        if not recipe.is_local or recipe.warm:
            return None
        if recipe.exchange == "dense":
            return self._between(recipe)
        mean = self.of(dataclasses.replace(recipe, exchange="dense"))
        if mean is None or self.law is None:
            return None
        cost = self.law.nats(recipe.exchange, self.steps / recipe.every, recipe.every)
        if cost is None:
            return None
        spread = math.hypot(mean.spread or 0.0, self.law.spread)
        return Loss(mean.excess + cost, spread, "by the law above the mean", mean.rate)

    def _between(self, recipe: Recipe) -> Loss | None:
        """The loss between those of two other numbers of local steps."""
        known = sorted(
            (other.every, found)
            for other in self.recipes
            if other.is_local and dataclasses.replace(other, every=recipe.every) == recipe
            for found in [self.of(other)]
            if found is not None
        )
        below = [pair for pair in known if pair[0] < recipe.every]
        above = [pair for pair in known if pair[0] > recipe.every]
        if not below or not above:
            return None
        (h0, low), (h1, high) = below[-1], above[0]
        share = math.log(recipe.every / h0) / math.log(h1 / h0)
        excess = low.excess + share * (high.excess - low.excess)
        spreads = [x.spread for x in (low, high) if x.spread is not None]
        return Loss(excess, max(spreads, default=None), f"between H = {h0} and {h1}")

    def best(self, system: str) -> Recipe | None:
        """AdamW's recipe that ended lowest by this system after each step, or None."""
        found = [
            recipe
            for recipe in self.recipes
            if (recipe.optimizer, recipe.is_local) == ("adamw", False)
            and EXCHANGES[recipe.exchange].system == system
        ]
        excess = lambda recipe: self.ends[str(recipe)].above(self.dense("adamw"))[0]
        return min(found, key=excess, default=None)

    def table(self, systems: Iterable[str], local_steps: int) -> Sequence[str]:
        """The lines of a table of the recipes with these systems."""
        names = list(dict.fromkeys(systems))
        rows = []
        for recipe in self.recipes:
            system, loss = EXCHANGES[recipe.exchange].system, self.of(recipe)
            if system in names and recipe.every == local_steps and loss is not None:
                rows.append((names.index(system), loss.excess, (system, str(recipe), str(loss))))
        if not rows:
            return ["No training with these was measured."]
        cells = [("system", "recipe", "nats above dense, same optimizer")]
        return [
            f"How they trained with AdamW or Muon (SGD: docs/which.md), {self.setup}",
            *aligned([*cells, *(row for *_, row in sorted(rows))], right=[]),
        ]
