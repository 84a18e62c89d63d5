"""Checks of what every reducer promises. A reducer joins by its row in the table."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from table import EXCHANGES
from workers import by_step, feedback_loop, some

SIZE = 601  # prime: no worker count, block or column count divides it
STEPS = 3


class Case(NamedTuple):
    system: str
    reducer: object  # with a small budget for SIZE elements
    full: object  # with budget for everything


def _bare(system, settings):
    return system.reducer(**settings).split((SIZE,))[0]


# Cases by name: the system's name, followed by the variant's if it has one. (A system of another
# law wraps a reducer that is here. Fuzzing and its own tests check what it conserves.)
CASES = {
    "_".join(filter(None, (name, variant))): Case(
        name, _bare(system, case.small), _bare(system, case.full)
    )
    for name, system in EXCHANGES.items()
    for variant, case in system.cases.items()
    if system.law == "sums"
}
# Cases that send less than everything, or round it, with a budget for everything.
SENDS_LESS = {
    "_".join(filter(None, (name, variant)))
    for name, row in EXCHANGES.items()
    for variant in row.sends_less
}
VARIANTS = {name for name, case in CASES.items() if name != case.system}

# One system for each way to select and to exchange.
REPRESENTATIVES = ("dense", "top_k", "sketched_sgd", "spardl", "sparcml", "omni_reduce", "qsgd")
# Those, and one for each kind of state and of message besides. What is around a reducer, or its own
# tests ask in other words, is asked of these alone.
KINDS = {*REPRESENTATIVES, "chunked_top_k", "demo", "ok_topk", "powersgd", "quantized_gathered"}
KINDS |= {"random_k", "s2_reducer"}


def each(names, usual=None):
    """One test for each of KINDS, slow if not `usual`. None: each name; variants are slow."""
    if usual is None:
        return some(names, [name for name in names if name not in VARIANTS])
    return some([name for name in names if name in usual or name in KINDS], usual)


def gradients(workers, steps=STEPS, size=SIZE):
    """Heavy-tailed integers times W, so that their sums and means are exact in float32.

    Means are not exact if 1 / W rounds badly, as for W = 7: XLA multiplies by the reciprocal.
    """
    rng = np.random.default_rng(workers)
    heavy = np.round(rng.standard_t(2, (steps, workers, size)) * 3).clip(-500, 500)
    return (heavy * workers).astype(np.float32)


def run(name, workers, way="shard_map", full=False, steps=STEPS):
    case = CASES[name]
    stacked = jnp.asarray(gradients(workers, steps).swapaxes(0, 1))
    return feedback_loop(case.full if full else case.reducer, workers, way)(stacked)


def has_sketch(reducer):
    """Whether the reducer delivers estimates from a sketch."""
    return hasattr(reducer, "rows")


def check_laws(reducer, results, workers):
    for x, reduced in by_step(results):
        mean = np.asarray(reduced.mean)
        np.testing.assert_array_equal(mean, np.broadcast_to(mean[0], mean.shape))
        assert reduced.mean.dtype == reduced.residual.dtype == jnp.float32
        assert reduced.sent is None or reduced.sent.dtype == jnp.bool_
        for indices in () if reduced.indices is None else np.asarray(reduced.indices):
            entries = indices[indices != x.shape[1]]
            assert len(np.unique(entries)) == len(entries)
            assert entries.min(initial=0) >= 0
            assert entries.max(initial=0) < x.shape[1]
        if reducer.conserves:
            kept = workers * mean[0].astype(np.float64)
            kept += np.asarray(reduced.residual, np.float64).sum(0)
            came, promise = np.asarray(x, np.float64).sum(0), f"{reducer.conservation=}"
            if reducer.conservation == "exact":
                np.testing.assert_array_equal(came, kept, err_msg=promise)
            else:  # delivered sums are no multiples of W, so means are inexact
                np.testing.assert_allclose(came, kept, atol=1e-2, err_msg=promise)
        assert np.all(np.asarray(reduced.info.delivered) == reduced.info.delivered[0])


def rounds(reducer):
    """Whether delivered values are rounded or estimated."""
    return reducer.conservation != "exact"


def quantizes(reducer):
    """Whether values are rounded by arithmetic, whose results depend on what XLA fuses.

    Single values are rounded by conversions. Sketches of integers are exact.
    """
    return reducer.conservation not in ("exact", "to rounding") and not has_sketch(reducer)
