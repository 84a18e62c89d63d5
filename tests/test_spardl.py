"""SparDL against its description, worker by worker, and against cases worked out by hand."""

import functools

import jax
import numpy as np
import pytest
import reference_collectives as reference
from workers import on_workers, some

from jaxsparse.reducers.spardl import SparDLReducer


@functools.cache
def exchange(reducer, workers, size, way):
    return on_workers(lambda x: reducer(x, reducer.init(size), axis_name="data"), workers, way)


def run(reducer, x, way="vmap"):
    workers, size = x.shape
    return jax.tree.map(np.asarray, exchange(reducer, workers, size, way)(x.astype(np.float32)))


def total(reduced, scale):
    """The delivered sum; `scale` is the unit of the integers it is made of."""
    workers = reduced.mean.shape[0]
    np.testing.assert_array_equal(
        reduced.mean, np.broadcast_to(reduced.mean[0], reduced.mean.shape)
    )
    return np.rint(reduced.mean[0].astype(np.float64) * workers / scale) * scale


SUPPORTS = ("random", "disjoint", "identical", "empty", "clustered")


def vectors(supports, workers, size, seed, scale=1):
    """Integers times `scale` with distinct magnitudes, on supports of about a quarter."""
    rng = np.random.default_rng(seed)
    values = (rng.permutation(workers * size) + 1).reshape(workers, size)
    values = values * rng.choice([-1, 1], (workers, size)) * float(scale)
    index, worker = np.arange(size), np.arange(workers)[:, None]
    mask = {
        "random": rng.random((workers, size)) < 0.25,
        "disjoint": index % workers == worker,
        "identical": np.broadcast_to(rng.random(size) < 0.25, (workers, size)),
        "empty": np.broadcast_to(False, (workers, size)),
        "clustered": np.broadcast_to(index < size // 4, (workers, size)),
    }[supports]
    return np.where(mask, values, 0)


def divisors(workers):
    return [teams for teams in range(1, workers + 1) if workers % teams == 0]


FORMS = [
    (workers, teams, gather)
    for workers in (*range(1, 10), 12, 14, 16)
    for teams in divisors(workers)
    for gather in ("recursive", "bruck")
    if (gather == "bruck" and teams > 1) or (gather == "recursive" and not teams & (teams - 1))
]


def check(reducer, x, scale, way="vmap"):
    reduced = run(reducer, x, way)
    workers, d = x.shape
    n = workers // reducer.teams
    k = min(-(-d // n), int(np.ceil(reducer.density * d / n - 1e-9)))
    h = max(1, int(np.rint(np.float32(max(1, k / reducer.teams)))))
    expected, residuals, _ = reference.spardl(
        x, reducer.density, reducer.teams, reducer.gather, h=h
    )
    delivered = total(reduced, scale)
    np.testing.assert_array_equal(delivered, expected)
    np.testing.assert_allclose(reduced.residual, residuals, rtol=1e-6)
    assert reduced.info.overflow.max() == 0


USUAL = [form for form in FORMS if form[0] in (1, 3, 6, 8, 9)]


@pytest.mark.parametrize("form", some(FORMS, USUAL), ids=str)
def test_equals_the_paper(form):
    workers, teams, gather = form
    reducer = SparDLReducer(0.1, teams=teams, gather=gather, selection="exact")
    for seed, supports in enumerate(SUPPORTS):
        scale = workers * teams
        check(reducer, vectors(supports, workers, 61, seed, scale), scale)


@pytest.mark.parametrize(
    ("workers", "teams", "gather"),
    [(w, 1, "recursive") for w in (2, 3, 5, 6, 8)]
    + [(6, 2, "recursive"), (8, 8, "recursive"), (6, 3, "bruck"), (5, 5, "bruck"), (8, 2, "bruck")],
)
def test_equals_the_paper_on_devices(workers, teams, gather):
    reducer = SparDLReducer(0.1, teams=teams, gather=gather, selection="exact")
    for seed, supports in enumerate(SUPPORTS):
        scale = workers * teams
        check(reducer, vectors(supports, workers, 61, seed, scale), scale, "shard_map")
