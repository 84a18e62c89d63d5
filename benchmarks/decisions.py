"""Prints the table of docs/which.md: which recipe, by what a dense exchange takes of a step.

    python benchmarks/decisions.py

The planner predicts a run of 100,000 steps of 1 s, of 1B parameters on 8 workers with an H100's
memory, over a link of 1 ms on which a dense exchange takes this many times as long as a step. A
cell is the planner's choice within a cost, and how many times as fast as dense gradients it is.
"""

from jaxsparse import Link, plan
from jaxsparse.planner.planning import Plan

PARAMS, WORKERS, STEPS = 10**9, 8, 100_000
RATIOS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # time of a dense exchange over that of a step
COSTS = (0.02, 0.1, 0.2)  # nats above dense gradients by the same optimizer
OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon"}


def planned(ratio: float, cost: float, optimizer: str) -> Plan:
    """The plan of a cell."""
    received = 2 * (WORKERS - 1) / WORKERS * 4 * PARAMS
    link = Link(1e-3, received / ratio)
    return plan(PARAMS, WORKERS, link, 1.0, steps=STEPS, optimizer=optimizer, nats=cost)


def cell(plan: Plan) -> str:
    """The best recipe in a few words."""
    return "dense" if plan.best is None else f"{plan.best.recipe}: {plan.speedup:.3g}x"


def table() -> list[str]:
    """The lines of the Markdown table."""
    costs = [(optimizer, cost) for optimizer in OPTIMIZERS for cost in COSTS]
    heads = [f"{OPTIMIZERS[optimizer]}, {cost:g} nats" for optimizer, cost in costs]
    lines = [["dense exchange over step", *heads], ["---"] * (1 + len(heads))]
    for ratio in RATIOS:
        cells = [cell(planned(ratio, cost, optimizer)) for optimizer, cost in costs]
        lines.append([f"{ratio:g}", *cells])
    return [f"| {' | '.join(line)} |" for line in lines]


if __name__ == "__main__":
    print("\n".join(table()))
