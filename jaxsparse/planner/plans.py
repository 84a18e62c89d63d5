"""The result of `plan`: predicted times of systems, and a choice. It prints as a table."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from jaxsparse.arrays.printing import aligned, milliseconds as _ms, with_options
from jaxsparse.planner.losses import Losses
from jaxsparse.systems import WITH_VARIANTS


class Prediction(NamedTuple):
    """Predicted times of one system in a step."""

    system: str  # a key of `jaxsparse.systems.WITH_VARIANTS`
    rounds: int  # number of sequential collectives
    received: float  # bytes that a worker receives
    network: float  # seconds on the network
    computing: float  # seconds that a worker computes
    transformation: str  # Python expression
    caveat: str = ""  # why it is not chosen by time alone

    @property
    def exchange(self) -> float:
        """Seconds on the network and of computing."""
        return self.network + self.computing


@dataclasses.dataclass(frozen=True)
class Plan:
    """The result of `plan`.

    Attributes:
        predictions: one prediction for each system, the shortest exchange first.
        best: name of the system to use; "dense" if nothing saves a tenth of its time.
        left_out: systems without a prediction, and the reasons.
        elements: number of elements of all leaves.
        dense_elements: number of elements of leaves that travel dense in any case.
        workers: number of workers.
        density: share of the other elements that a step delivers.
        step_seconds: time of forward and backward pass, which no system changes.
        local_steps: number of steps from one exchange to the next, H.
        conditions: the assumptions, a line each.
    """

    predictions: tuple[Prediction, ...]
    best: str
    left_out: tuple[tuple[str, str], ...]
    elements: int
    dense_elements: int
    workers: int
    density: float
    step_seconds: float = 0.0
    local_steps: int = 1
    conditions: tuple[str, ...] = ()

    def __getitem__(self, system: str) -> Prediction:
        """The prediction for one system.

        Raises:
            KeyError: the system has no prediction.
        """
        if found := self.find(system):
            return found
        raise KeyError(
            f"{system!r} has no prediction: "
            + dict(self.left_out).get(system, "it was not among the systems that were asked for")
        )

    def find(self, system: str) -> Prediction | None:
        """The prediction for one system, or None."""
        return next((p for p in self.predictions if p.system == system), None)

    @property
    def transformation(self) -> str:
        """The best system as Python code."""
        return self[self.best].transformation

    def step(self, system: str) -> float:
        """Seconds of a whole step: forward and backward pass, then the step's part of an exchange.

        With H local steps, this part is one H-th.
        """
        return self.step_seconds + self[system].exchange / self.local_steps

    def delayed_step(self, system: str) -> float:
        """Seconds of a step with `delay=1`, whose network time overlaps the backward pass.

        The exchange's computing competes with the backward pass for the device, so it is added.
        """
        computing, network = self[system].computing, self[system].network
        overlapped = max(self.step_seconds, network / self.local_steps)
        return computing / self.local_steps + overlapped

    def speedup(self, system: str) -> float:
        """Seconds of a step with a dense exchange over seconds of a step with this system.

        The dense exchange is made in each step, even if the plan has local steps.
        """
        return (self.step_seconds + self["dense"].exchange) / self.step(system)

    def __str__(self) -> str:
        lines = [
            f"{self.elements:,} elements, of which {self.dense_elements:,} travel dense in any "
            f"case; {self.workers} workers; density {self.density:g}; float32"
            + (f"; an exchange every {self.local_steps} steps" if self.local_steps > 1 else ""),
            *self.conditions,
            "",
            *self._table(),
            "",
            *self._choices(),
        ]
        caveats = [p for p in self.predictions if p.caveat]
        if caveats:
            lines += ["", "Not chosen by time alone, unless they are asked for by name:"]
            lines += [f"  {p.system}: {p.caveat}" for p in caveats]
        return "\n".join(lines)

    def _table(self) -> list[str]:
        """A line for each prediction, and one for each system without."""
        is_local, with_step = self.local_steps > 1, self.step_seconds > 0
        columns: dict[str, Callable[[Prediction], str]] = {
            "system": lambda p: p.system,
            "collectives": lambda p: str(p.rounds),  # one after the other
            "received MB": lambda p: f"{p.received / 1e6:,.3f}",
            "network ms": lambda p: _ms(p.network),
            "computing ms": lambda p: _ms(p.computing),
            "exchange ms": lambda p: _ms(p.exchange),
        }
        if is_local:
            columns["MB a step"] = lambda p: f"{p.received / 1e6 / self.local_steps:,.3f}"
        if is_local or with_step:
            columns["step ms"] = lambda p: _ms(self.step(p.system))
        if with_step and not is_local:
            columns["with delay=1"] = lambda p: _ms(self.delayed_step(p.system))
        columns["speedup"] = lambda p: f"{self.speedup(p.system):.2f}x"
        if is_local:
            mean = self.step("dense")
            columns["over the mean"] = lambda p: f"{mean / self.step(p.system):.2f}x"
        rows = [[cell(p) for cell in columns.values()] for p in self.predictions]
        not_predicted = [(system, f"not predicted: {reason}") for system, reason in self.left_out]
        return [
            *aligned([list(columns), *rows], right=range(1, len(columns))),
            *aligned(not_predicted, right=()),
        ]

    def _written(self) -> Sequence[str]:
        """Python code with the best system in an Optax chain, or in `LocalSteps`, and a line."""
        if self.local_steps == 1:
            lines = _chains(self.transformation, _row(self.best)) if self.best != "dense" else ()
            return *(f"    {line}" for line in lines), *([""] if lines else [])
        outer = f"jaxsparse.outer.mean(exchange={self.transformation})"
        if self.best == "dense":
            outer = "jaxsparse.outer.mean()"
        elif _row(self.best) == "chunked_top_k":  # residuals fade, as where its loss was measured
            outer = self.transformation.replace("chunked_top_k", "outer.sparse_loco", 1)
        return (
            f"    outer = {outer}",
            f"    jaxsparse.LocalSteps(step, outer, mesh, every={self.local_steps})",
            "",
        )

    def _choices(self) -> list[str]:
        if self.best == "dense" and self.local_steps > 1:
            found = [f"fastest: dense, {self.speedup('dense'):.2f}x"]
        elif self.best == "dense":
            found = ["best: use dense. No system that may be chosen saves a tenth of the time."]
        else:
            found = [f"fastest: {self.best}, {self.speedup(self.best):.2f}x"]
        if self.local_steps > 1:
            found[0] += " over a dense exchange in each step"
        systems = [*(p.system for p in self.predictions), *(name for name, _ in self.left_out)]
        return [
            *found,
            "",
            *self._written(),
            "This ranks times, whatever they cost in accuracy. What recipes with settings of their",
            "own were measured to cost stands below. For one recipe by both, with AdamW or Muon,",
            "give --steps.",
            *Losses.shipped().table(map(_row, systems), self.local_steps),
        ]


def _row(system: str) -> str:
    """The name in the table of systems of the system that a variant belongs to."""
    return WITH_VARIANTS[system].name if system in WITH_VARIANTS else system


def _chains(transformation: str, system: str) -> Sequence[str]:
    """Optax chains with an exchange in each step, as Python: for SGD, and for Adam."""
    known = Losses.shipped().best(system)
    behind_adam = transformation
    if system == "chunked_top_k":  # residuals fade, as where its loss was measured
        behind_adam = with_options(transformation, ["decay=0.95"])
    with_momentum = with_options(transformation, ["momentum=0.9"])
    for_sgd = (
        f"tx = optax.chain({with_momentum}, optax.sgd(lr))  # for SGD: its momentum moves here"
    )
    if known is not None and known.what == "gradients":
        return for_sgd, f"tx = optax.chain({transformation}, optax.adamw(lr))  # for Adam"
    return (
        for_sgd,
        "tx = optax.chain(  # for Adam, on each worker",
        "    jaxsparse.per_worker(optax.scale_by_adam()),",
        f"    {behind_adam},",
        "    optax.add_decayed_weights(0.1),",
        "    optax.scale_by_learning_rate(lr),",
        ")",
    )


def compared(plans: Mapping[str, Plan]) -> str:
    """A Markdown table of the exchange's milliseconds in several plans.

    Args:
        plans: plans of the same systems and local steps, by column head. The first plan orders
            the rows.

    Raises:
        ValueError: the plans differ in local steps.
    """
    first = next(iter(plans.values()))
    if len({found.local_steps for found in plans.values()}) > 1:
        raise ValueError("plans have different local_steps: compare plans of the same")
    is_local = first.local_steps > 1
    rows = [["ms a step" if is_local else "exchange, ms", *plans], ["---"] * (1 + len(plans))]
    for prediction in first.predictions:
        system = prediction.system
        cells = [
            _ms(found.exchange / plan.local_steps) if (found := plan.find(system)) else "-"
            for plan in plans.values()
        ]
        rows.append([system, *cells])
    for system, reason in first.left_out:
        rows.append([system, f"not predicted: {reason}", *[""] * (len(plans) - 1)])
    rows.append(["best", *(plan.best for plan in plans.values())])
    speedups = [f"{plan.speedup(plan.best):.2f}x" for plan in plans.values()]
    rows.append(["a step's speedup over dense", *speedups])
    return "\n".join([*first.conditions[1:], "", *(f"| {' | '.join(row)} |" for row in rows)])
