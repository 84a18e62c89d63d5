"""Measured results of training with some systems, which `plan` prints beside its times.

examples/local_updates/train.py writes `trained.json`. Its README describes the trainings.
"""

import functools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from jaxsparse.arrays.printing import aligned

Exchanged = Literal["gradients", "updates", "displacements"]
_SHIPPED = Path(__file__).with_name("trained.json")


class Trained(NamedTuple):
    """The result of one training with a system."""

    system: str  # a name in `jaxsparse.systems.SYSTEMS`
    exchanged: Exchanged
    method: str  # the example's name for it
    every: int  # steps from one exchange to the next
    excess: float  # nats of held-out loss above those of dense gradients
    fewer: float  # received bytes of dense gradients over those of this method


class Evidence(NamedTuple):
    """Measured trainings of one setup: model, data, optimizer and length."""

    setup: str
    rows: tuple[Trained, ...]

    @classmethod
    @functools.cache
    def shipped(cls) -> "Evidence":
        """The measurements that come with the library."""
        content = json.loads(_SHIPPED.read_text())
        return cls(content["setup"], tuple(Trained(*row) for row in content["rows"]))

    def best(self, system: str) -> Trained | None:
        """The training by gradients or updates that ended lowest, or None."""
        found = [r for r in self.rows if r.system == system and r.exchanged != "displacements"]
        return min(found, key=lambda row: row.excess, default=None)

    def table(self, systems: Iterable[str], local_steps: int) -> Sequence[str]:
        """The lines of a table of the trainings with these systems."""
        names = dict.fromkeys(systems)
        rows = [
            row
            for row in self.rows
            if row.system in names
            and (row.exchanged == "displacements") == (local_steps > 1)
            and row.every == local_steps
        ]
        if not rows:
            return ["No training with these was measured."]
        cells = [["system", "exchanged", "method", "nats above dense", "fewer bytes"]]
        for row in sorted(rows, key=lambda row: (list(names).index(row.system), row.excess)):
            what = {
                "gradients": "gradients, before Adam",
                "updates": "each worker's Adam updates",
                "displacements": f"what {row.every} local steps moved",
            }[row.exchanged]
            cells.append([row.system, what, row.method, f"{row.excess:+.2f}", f"{row.fewer:.0f}x"])
        return [f"How they trained: {self.setup}", *aligned(cells, right=(3, 4))]


def chains(transformation: str, system: str) -> Sequence[str]:
    """Optax chains with an exchange in each step, as Python: for SGD, and for Adam."""
    known = Evidence.shipped().best(system)
    for_sgd = f"tx = optax.chain({transformation}, optax.sgd(lr))  # for SGD"
    if known is not None and known.exchanged == "gradients":
        return for_sgd, f"tx = optax.chain({transformation}, optax.adamw(lr))  # for Adam"
    return (
        for_sgd,
        "tx = optax.chain(  # for Adam, on each worker",
        "    jaxsparse.per_worker(optax.scale_by_adam()),",
        f"    {transformation},",
        "    optax.scale_by_learning_rate(lr),",
        ")",
    )
