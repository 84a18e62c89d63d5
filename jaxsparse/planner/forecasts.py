"""Forecasts of whole runs by recipe: hours, bytes and memory, beside measured losses."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxsparse.arrays.printing import aligned
from jaxsparse.arrays.settings import static_count, static_float
from jaxsparse.planner.losses import ABOUT_AS_FAST, Loss, Losses, trained_first
from jaxsparse.planner.network import Link, Network
from jaxsparse.planner.planning import MUCH_FASTER, Predictor
from jaxsparse.planner.profiles import SystemProfile
from jaxsparse.planner.recipes import EXCHANGES, OPTIMIZERS, Recipe


class Forecast(NamedTuple):
    """What a run by one recipe takes."""

    recipe: Recipe
    exchange: float  # seconds of one exchange
    hours: float
    received: float  # bytes that a worker receives in the run
    memory: int  # bytes on each worker, beside dense training's
    loss: Loss | None  # None: not measured


@dataclasses.dataclass(frozen=True)
class RecipePlan:
    """The result of `plan_recipes`. It prints as a table, and the chosen recipe as Python.

    Attributes:
        forecasts: one for each recipe, the fastest first.
        baseline: dense gradients, as the trainer exchanges them.
        best: of the recipes that cost at most `nats`, with their spread over seeds, and save a
            tenth of the baseline's hours: the one that ends lowest among those that take at most
            5 % more hours than the fastest. Recipes that were trained come before those that only
            the law predicts. The baseline if there is none.
        left_out: recipes without a forecast, and the reasons.
        elements: number of parameters.
        workers: number of workers.
        steps: steps of the run.
        step_seconds: seconds of a step without its exchange.
        nats: see `plan_recipes`.
        dtype: see `plan_recipes`.
        notes: where losses were measured, and what is not predicted, a line each.
        conditions: the assumptions, a line each.
        options: options that exchanges take, as Python.
    """

    forecasts: tuple[Forecast, ...]
    baseline: Forecast
    best: Forecast
    left_out: tuple[tuple[str, str], ...]
    elements: int
    workers: int
    steps: int
    step_seconds: float
    nats: float
    dtype: str
    notes: tuple[str, ...]
    conditions: tuple[str, ...]
    options: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Forecast:
        """The forecast for a recipe.

        Raises:
            KeyError: the plan has no recipe of this name.
        """
        return {str(f.recipe): f for f in self.forecasts}[name]

    @property
    def undominated(self) -> tuple[Forecast, ...]:
        """The recipes than which no other is as fast and ends lower, the fastest first."""
        found: list[Forecast] = []
        for forecast in self.forecasts:
            if forecast.loss is None:
                continue
            if not found or _excess(forecast) < _excess(found[-1]):
                found.append(forecast)
        return tuple(found)

    def speedup(self, forecast: Forecast) -> float:
        """Hours of the baseline over those of a recipe."""
        return self.baseline.hours / forecast.hours

    def over_mean(self, forecast: Forecast) -> float | None:
        """Hours of the plain mean of as many local steps over those of a recipe.

        None if the recipe has no local steps, or the mean has no forecast.
        """
        means = [f for f in self.forecasts if f.recipe == forecast.recipe.plain_mean]
        return means[0].hours / forecast.hours if means else None

    def as_dict(self) -> dict[str, Any]:
        """All numbers, for JSON."""
        forecasts = [
            {
                **f._asdict(),
                "recipe": str(f.recipe),
                "loss": None if f.loss is None else f.loss._asdict(),
                "speedup": self.speedup(f),
                "written": f.recipe.written(self.steps, self.options),
            }
            for f in self.forecasts
        ]
        content = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        ends = {"baseline": str(self.baseline.recipe), "best": str(self.best.recipe)}
        left_out = {"left_out": dict(self.left_out)}
        units = {"units": "bytes, seconds, nats, hours"}
        return {**content, "forecasts": forecasts, **ends, **left_out, **units}

    def __str__(self) -> str:
        share = float(f"{self.baseline.exchange / self.step_seconds:.2g}")  # in digits, if large
        return "\n".join(
            [
                f"{self.elements:,} parameters, {self.workers} workers, {self.steps:,} steps of "
                f"{self.step_seconds:g} s; a dense exchange of {self.dtype} takes {share:,g} of a "
                "step",
                *self.conditions,
                "",
                *self._table(),
                "",
                *self._answer(),
                "",
                *self.notes,
            ]
        )

    def _answer(self) -> list[str]:
        if self.best is self.baseline:
            saved = any(f.hours < MUCH_FASTER * self.baseline.hours for f in self.forecasts)
            why = f"Nothing that costs {self.nats:g} nats or less" if saved else "Nothing"
            return [f"best: leave your trainer as it is. {why} saves a tenth of the hours."]
        cost = "" if self.best.loss is None else f", {self.best.loss} nats"
        rate = None if self.best.loss is None else self.best.loss.rate
        lines = self.best.recipe.written(self.steps, self.options)
        return [
            f"best within {self.nats:g} nats: {self.best.recipe}: {self.best.hours:,.2f} hours, "
            f"{self.speedup(self.best):.2f}x{cost}",
            "",
            *(f"    {line}" for line in lines),
            "",
            *([] if rate is None else [_RATE.format(rate)]),
            _AXIS,
        ]

    def _table(self) -> list[str]:
        """Recipes that are not dominated, those without a loss, and the baseline."""
        unknown = [f for f in self.forecasts if f.loss is None]
        shown = {*self.undominated, *unknown, self.baseline}
        heads = ("recipe", "exchange s", "hours", "speedup", "over the mean", "received GB")
        cells: list[tuple[str, ...]] = [(*heads, "memory GB", "nats above dense", "")]
        for f in self.forecasts:
            if f not in shown:
                continue
            over = self.over_mean(f)
            cells.append(
                (
                    str(f.recipe),
                    f"{f.exchange:,.3g}",
                    f"{f.hours:,.2f}",
                    f"{self.speedup(f):.2f}x",
                    "" if over is None else f"{over:.2f}x",
                    f"{f.received / 1e9:,.3g}",
                    f"+{f.memory / 1e9:,.3g}",
                    "" if f.loss is None else str(f.loss),
                    "not measured" if f.loss is None else f.loss.source,
                )
            )
        hidden = len(self.forecasts) - len(shown)
        return [
            *aligned(cells, right=range(1, len(heads) + 2)),
            f"({hidden} others are as slow or slower, and end as high or higher)",
            *(f"left out: {name}: {reason}" for name, reason in self.left_out),
        ]


_RATE = "It was measured with lr = {:g} at its peak, on a small model: begin with your own."
_AXIS = (
    'The axis of the workers is "data". If yours has another name, give axis_name= to the exchange '
    "and to LocalSteps, or to data_parallel and shard."
)


def plan_recipes(
    params: Any,
    workers: int,
    *,
    network: Network | Link,
    step_seconds: float,
    steps: int,
    local_steps: int | None = None,
    optimizer: str = "adamw",
    nats: float = 0.1,
    dtype: str = "float32",
    profile: SystemProfile | str | None = None,
    memory_bandwidth: float | None = None,
    on_recipe: Callable[[str], object] = lambda name: None,
) -> RecipePlan:
    """Predicts the hours of a run by each recipe, beside what they cost where they were measured.

    An exchange takes what `plan` predicts for it; formats of 1 to 4 bits compute as one of 8 bits.
    Losses were measured on a small model in a short run, and are no prediction: they tell recipes
    apart. Each is above dense gradients by the same optimizer.

    Args:
        params: see `plan`.
        workers: number of workers, W.
        network: see `plan`.
        step_seconds: seconds of a step by this optimizer, without its exchange.
        steps: steps of the run.
        local_steps: H of the recipes with local steps. None: each that was measured.
        optimizer: "adamw" or "muon".
        nats: what the chosen recipe may cost at most, above dense gradients.
        dtype: "float32" or "bfloat16", in which the trainer exchanges gradients now.
        profile: see `plan`.
        memory_bandwidth: see `plan`.
        on_recipe: called with the name of each recipe before it is predicted, for progress.

    Raises:
        ValueError: settings out of range, or see `plan`.

    Example:
        >>> slow = plan_recipes(10**7, 8, network=Link(50e-6, 1.25e6), step_seconds=0.1, steps=2000)
        >>> slow.best.recipe.exchange, slow.speedup(slow.best) > 5
        ('int4', True)
        >>> fast = plan_recipes(10**7, 8, network=Link(1e-6, 1e12), step_seconds=0.1, steps=2000)
        >>> str(fast.best.recipe)
        'adamw, gradients, dense'
    """
    steps = static_count("steps", steps)
    if not 0 < static_float("step_seconds", step_seconds) < math.inf:
        raise ValueError(f"step_seconds={step_seconds} must be above 0: give the time of a step")
    if local_steps is not None and static_count("local_steps", local_steps) < 2:
        raise ValueError("local_steps=1 is no local step: leave it out, or give 10")
    for name, value, known in (
        ("optimizer", optimizer, OPTIMIZERS),
        ("dtype", dtype, ("float32", "bfloat16")),
    ):
        if value not in known:
            raise ValueError(
                f"{name}={value!r} is unknown: use one of {', '.join(known)}"
                + (
                    ". Of SGD a plan without steps has times, and docs/which.md how it trains"
                    * (name == "optimizer")
                )
            )
    if not static_float("nats", nats) >= 0:
        raise ValueError(f"nats={nats} must be at least 0")
    predictor = Predictor.of(
        params, workers, network=network, profile=profile, memory_bandwidth=memory_bandwidth
    )
    losses = Losses.shipped()
    elements = predictor.size + predictor.dense_size

    @functools.cache
    def exchanged(name: str) -> tuple[float, float]:
        """Seconds and received bytes of one exchange."""
        if name == "dense":
            found = predictor.dense()
        else:
            one = EXCHANGES[name]
            found = predictor.exchange(one.choice, one.system, one.density)
        return found.exchange, found.received

    def forecast(recipe: Recipe, seconds: float, received: float) -> Forecast:
        turns = recipe.exchanges(steps)
        hours = (steps * step_seconds + turns * seconds) / 3600
        loss = losses.of(recipe)
        return Forecast(recipe, seconds, hours, turns * received, recipe.memory(elements), loss)

    usual = Recipe(optimizer, "gradients", 1, "dense")
    baseline = forecast(usual, *exchanged("dense"))
    if dtype == "bfloat16":  # half as many float32 have as many bytes
        half = predictor._replace(size=predictor.size // 2, dense_size=predictor.dense_size // 2)
        moved, dense = half.dense(), predictor.dense()
        baseline = forecast(usual, moved.network + dense.computing, moved.received)
    forecasts, left_out = [baseline], []
    for recipe in _asked(losses, optimizer, local_steps):
        if recipe.exchange != "dense" and not predictor.size:
            continue  # all leaves are so small that they travel dense
        on_recipe(str(recipe))
        try:
            forecasts.append(forecast(recipe, *exchanged(recipe.exchange)))
        except ValueError as error:
            left_out.append((str(recipe), str(error)))
    forecasts.sort(key=lambda f: (f.hours, _excess(f)))
    fast = [f for f in forecasts if f.hours <= MUCH_FASTER * baseline.hours]
    cheap = [f for f in fast if losses.most(f.loss) <= nats]
    cheap = list(trained_first(cheap))
    fast = [f for f in cheap if f.hours <= ABOUT_AS_FAST * cheap[0].hours]
    best = min(fast, key=_excess, default=baseline)
    return RecipePlan(
        forecasts=tuple(forecasts),
        baseline=baseline,
        best=best,
        left_out=tuple(left_out),
        elements=elements,
        workers=predictor.workers,
        steps=steps,
        step_seconds=step_seconds,
        nats=nats,
        dtype=dtype,
        notes=_notes(losses, optimizer, None if best is baseline else best.recipe),
        conditions=predictor.conditions,
        options=tuple(predictor.options),
    )


def _excess(forecast: Forecast) -> float:
    return math.inf if forecast.loss is None else forecast.loss.excess


def _asked(losses: Losses, optimizer: str, local_steps: int | None) -> Sequence[Recipe]:
    """The measured recipes of an optimizer, with other numbers of local steps if asked for.

    The plain mean of as many local steps is among them, since others have to be faster than that,
    and so are formats that the law knows there.
    """
    found = [r for r in losses.recipes if r.optimizer == optimizer]
    if local_steps is not None:
        found = [dataclasses.replace(r, every=local_steps) if r.is_local else r for r in found]
    if losses.law is not None:
        numbers = dict.fromkeys(r.every for r in found if r.is_local)
        by_law = [
            Recipe(optimizer, "local", every, name)
            for every in numbers
            for name in losses.law.errors
        ]
        found += [recipe for recipe in by_law if losses.of(recipe) is not None]
    found += [r.plain_mean for r in found if r.plain_mean is not None]
    return [r for r in dict.fromkeys(found) if (r.what, r.exchange) != ("gradients", "dense")]


def _notes(losses: Losses, optimizer: str, best: Recipe | None) -> tuple[str, ...]:
    """What stands below the table.

    Args:
        losses: the measurements.
        optimizer: of the recipes.
        best: the chosen recipe, if it is not to leave the trainer as it is.
    """
    every = sorted({r.every for r in losses.recipes if r.is_local})
    lines = [
        f"Nats are above dense gradients by the same optimizer, {losses.setup} They are nats a "
        "byte: a token of four bytes has four times as many.",
        f"Local steps were measured with H = {', '.join(map(str, every))}. All this is no "
        "prediction for another model or a longer run: train to see. Behind ± stands the standard "
        "deviation over seeds, or the error of the formula for recipes that were not trained. A "
        "recipe is within --nats with its ±, which counts as "
        f"{losses.usual_spread:.3f} if there was one seed.",
        "Hours are those of steps and exchanges, one after the other. Formats of 1 to 4 bits "
        "compute as one of 8 bits. A worker is all devices that exchange as one, such as those of "
        "a host, which share its link. Speedups are over dense gradients of as many workers, and "
        "not over one of them.",
    ]
    short = losses.shorter
    if short is not None and best is not None and str(best) in short.ends:
        cost = short.ends[str(best)].above(short.dense(optimizer))[0]
        lines.append(
            f"The shorter a run, the more it costs: after {short.steps} steps in place of "
            f"{losses.steps:,}, {best} was at {cost:+.3f}."
        )
    if optimizer == "adamw":
        gain, _ = losses.dense("adamw").above(losses.dense("muon"))
        lines.append(f"Muon ended {gain:.3f} nats below AdamW there, both dense: --optimizer muon.")
    return tuple(lines)
