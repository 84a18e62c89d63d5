"""Recipes that `frontier.py` trains: what is exchanged, how often, in which format.

A recipe's name says all of it:

    adamw, gradients, int4                  gradients before AdamW, by quantized("int4")
    adamw, updates, top 1/8                 updates of each worker's own Adam, by chunked top-k
    muon, local 10, sign                    Muon inside; displacements of 10 steps
    muon, local 10, int4, warm 10 %         the first tenth of the steps exchanges after each one
    muon, diloco 30, int2                   displacements of 30 steps, and DiLoCo's momentum outside

`jaxsparse.plan` chooses from some of them.
"""

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import optax

import jaxsparse
from jaxsparse import contrib
from jaxsparse.planner.recipes import NESTEROV as NESTEROV
from jaxsparse.reducers import Quantized

# How runs ended: what `frontier_map.py --export` writes.
RESULTS = Path(__file__).parent / "results/recipes.json"


class Exchange(NamedTuple):
    """A way to exchange: one of the systems, and its settings."""

    system: str
    settings: Mapping[str, Any]

    def transformation(self, **options: Any) -> optax.GradientTransformationExtraArgs:
        """The exchange, with further options."""
        home = jaxsparse if hasattr(jaxsparse, self.system) else contrib
        return getattr(home, self.system)(**{**self.settings, **options})


# Chunks of 4,096 entries fade as SparseLoCo's do. Coordinates drawn at random are the dumbest thing
# at equal bytes. The rest is dropped: fed back, it would be stale.
EXCHANGES: dict[str, Exchange] = {
    "dense": Exchange("dense", {}),
    **{
        name: Exchange("quantized", {"format": name})
        for name in ("int8", "int4", "int2", "ternary", "sign")
    },
    **{
        f"top 1/{n}": Exchange("chunked_top_k", {"k": 4096 // n, "decay": 0.95})
        for n in (8, 32, 64)
    },
    **{f"random 1/{n}": Exchange("random_k", {"density": 1 / n, "decay": 0.0}) for n in (8, 20)},
    "random 1/8 in 4 bits": Exchange(
        "random_k", {"density": 1 / 8, "reducer": Quantized(), "decay": 0.0}
    ),
    "SparDL 1 %": Exchange("spardl", {"density": 0.01}),
    "sketched 20x": Exchange("sketched_sgd", {"compression": 20.0}),
    "QSGD 4 bits": Exchange("qsgd", {"bits": 4}),
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to train and what to exchange.

    `what` is "gradients", "updates" (of each worker's own Adam), "local" (the mean of
    displacements) or "diloco" (the same with Nesterov momentum, by `NESTEROV`).
    """

    optimizer: str  # "adamw" or "muon"
    what: str
    every: int  # steps from one exchange to the next, 1 unless local
    exchange: str  # a key of `EXCHANGES`
    warm: int = 0  # percent of the steps that exchange after each one, first; 0 unless local

    @classmethod
    def parsed(cls, name: str) -> "Recipe":
        """The recipe of this name.

        Raises:
            ValueError: there is none.
        """
        optimizer, what, exchange, warm, *_ = [*name.split(", "), "", "", "", ""]
        what, _, every = what.partition(" ")
        percent = warm.removeprefix("warm ").removesuffix(" %")
        try:
            recipe = cls(optimizer, what, int(every or 1), exchange, int(percent or 0))
        except ValueError:  # no numbers
            recipe = None
        if recipe is None or str(recipe) != name or exchange not in EXCHANGES:
            raise ValueError(
                f"no recipe is called {name!r}: write one as in 'adamw, local 10, int4', with "
                f"one of {', '.join(EXCHANGES)}"
            )
        return recipe

    @property
    def is_local(self) -> bool:
        """Whether workers exchange what local steps moved."""
        return self.what in ("local", "diloco")

    def __str__(self) -> str:
        what = f"{self.what} {self.every}" if self.is_local else self.what
        warm = f", warm {self.warm} %" if self.warm else ""
        return f"{self.optimizer}, {what}, {self.exchange}{warm}"

    def exchanges(self, steps: int) -> int:
        """The number of exchanges in so many steps, the last one at the end included."""
        first = self.warm * steps // 100
        return first + math.ceil((steps - first) / self.every)


class End(NamedTuple):
    """How a recipe's runs ended."""

    rate: float  # learning rate
    losses: Mapping[int, float]  # held-out loss in nats by seed

    def above(self, other: "End") -> tuple[float, float | None]:
        """Mean and standard deviation of the differences from another recipe on common seeds.

        With one seed in common there is no standard deviation.
        """
        seeds = sorted(self.losses.keys() & other.losses.keys())
        differences = [self.losses[seed] - other.losses[seed] for seed in seeds]
        spread = statistics.stdev(differences) if len(differences) > 1 else None
        return statistics.fmean(differences), spread


class Ends(NamedTuple):
    """How recipes ended, by their names."""

    steps: int
    ends: Mapping[str, End]

    def above_dense(self, name: str) -> tuple[float, float | None]:
        """Nats of a recipe above dense gradients by the same optimizer, and their spread."""
        optimizer = name.split(", ")[0]
        return self.ends[name].above(self.ends[f"{optimizer}, gradients, dense"])


def load_ends(*, shorter: bool = False) -> Ends:
    """Those of the table of recipes, or of its shorter runs."""
    content, part = json.loads(RESULTS.read_text()), "shorter" if shorter else "ends"
    return Ends(
        content["shorter_steps" if shorter else "steps"],
        {
            name: End(rate, {int(seed): loss for seed, loss in losses.items()})
            for name, (rate, losses) in content[part].items()
        },
    )
