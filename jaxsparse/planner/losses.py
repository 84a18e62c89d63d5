"""Measured losses of recipes, which `plan_recipes` prints beside their hours.

`benchmarks/frontier.py --show --export` writes `losses.json`.
"""

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import NamedTuple

from jaxsparse.planner.recipes import Recipe

_SHIPPED = Path(__file__).with_name("losses.json")


class Loss(NamedTuple):
    """Held-out loss of a recipe in nats above dense gradients, same optimizer and steps."""

    excess: float
    source: str  # "measured", or between which measurements
    rate: float | None = None  # learning rate with which it was measured


@dataclasses.dataclass(frozen=True)
class Losses:
    """Measured losses of recipes.

    Attributes:
        setup: model, steps and seeds, in words.
        ends: held-out loss in nats, and learning rate, by the recipe's name.
    """

    setup: str
    ends: dict[str, tuple[float, float]]

    @classmethod
    @functools.cache
    def shipped(cls) -> "Losses":
        """The measurements that come with the library."""
        content = json.loads(_SHIPPED.read_text())
        return cls(content["setup"], {name: tuple(end) for name, end in content["ends"].items()})

    @functools.cached_property
    def recipes(self) -> tuple[Recipe, ...]:
        """The measured recipes."""
        return tuple(map(Recipe.parsed, self.ends))

    def dense(self, optimizer: str) -> float:
        """Where dense gradients ended by this optimizer."""
        return self.ends[str(Recipe(optimizer, "gradients", 1, "dense"))][0]

    def of(self, recipe: Recipe) -> Loss | None:
        """The loss of a recipe, or between two with other numbers of local steps, or None.

        Between two measurements it lies on a straight line over log H. Nothing is said beyond them.
        """
        dense = self.dense(recipe.optimizer)
        if str(recipe) in self.ends:
            end, rate = self.ends[str(recipe)]
            return Loss(end - dense, "measured", rate)
        if recipe.what != "local":
            return None
        known = sorted(
            (other.every, self.ends[str(other)][0] - dense)
            for other in self.recipes
            if other.what == "local" and dataclasses.replace(other, every=recipe.every) == recipe
        )
        below = [pair for pair in known if pair[0] < recipe.every]
        above = [pair for pair in known if pair[0] > recipe.every]
        if not below or not above:
            return None
        (h0, low), (h1, high) = below[-1], above[0]
        share = math.log(recipe.every / h0) / math.log(h1 / h0)
        return Loss(low + share * (high - low), f"between H = {h0} and {h1}")
