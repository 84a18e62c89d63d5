"""SparDL against its description, worker by worker, and against cases worked out by hand."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_collectives as reference
import supports
from supports import SUPPORTS, total, vectors
from workers import feedback_loop, rows, some

from jaxsparse import codecs
from jaxsparse.collectives.messages import ladder
from jaxsparse.collectives.spardl import Adaptation
from jaxsparse.reducers import SparDL
from jaxsparse.traffic import traced_bytes


def run(reducer, x, way="vmap"):
    """The outcome of one exchange."""
    ((_, reduced),) = supports.run(reducer, x, way)
    return reduced


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


USUAL = [(1, 1, "recursive", "vmap"), (6, 2, "recursive", "vmap"), (6, 3, "bruck", "shard_map")]
SLOW = [
    *((3, 3, "bruck", "vmap"), (6, 2, "bruck", "vmap"), (8, 8, "recursive", "vmap")),
    *((8, 4, "bruck", "vmap"), (14, 2, "recursive", "vmap"), (14, 7, "bruck", "vmap")),
    *((3, 1, "recursive", "shard_map"), (8, 1, "recursive", "shard_map")),
    *((6, 2, "recursive", "shard_map"), (8, 2, "bruck", "shard_map")),
]


@pytest.mark.parametrize(("workers", "teams", "gather", "way"), rows(USUAL, SLOW))
def test_equals_the_paper(workers, teams, gather, way):
    reducer = SparDL(0.1, teams=teams, gather=gather, selection="exact")
    for seed, kind in enumerate(SUPPORTS):
        scale = workers * teams
        check(reducer, vectors(kind, workers, 61, seed, scale), scale, way)


@pytest.mark.parametrize("way", some(["vmap", "shard_map"], ["shard_map"]))
def test_three_workers_by_hand(way):
    x = np.array([[5, 1, 2, 0, 0, 3], [1, 4, 0, 6, 2, 0], [0, 2, 3, 1, 7, 1]])
    reduced = run(SparDL(0.5), x, way)
    assert total(reduced, 1).tolist() == [0, 7, 0, 6, 9, 0]
    assert reduced.residual.tolist() == [
        [5, 0, 2, 0, 0, 3],
        [1, 0, 0, 0, 0, 0],
        [0, 0, 3, 1, 0, 1],
    ]
    # Entries that a worker put forward at any stage, and whose sum arrived.
    assert reduced.sent.astype(int).tolist() == [
        [0, 1, 0, 0, 0, 0],
        [0, 1, 0, 1, 1, 0],
        [0, 1, 0, 0, 1, 0],
    ]


def test_the_adaptation_by_hand():
    state = Adaptation(jnp.float32(100), jnp.float32(1), jnp.bool_(False))
    seen = []
    for entries in (150, 150, 150, 150, 260, 180):
        state = state.adapt(jnp.float32(entries), 200, 2)
        seen.append(float(state.h))
    assert seen == [101, 103, 105, 109, 107, 108]


def test_the_adaptation_stays_in_its_range_and_never_stops():
    for entries, end in ((10**6, 50), (0, 200)):
        state = Adaptation.start(200, 4)
        assert float(state.h) == 50
        for _ in range(100):
            state = state.adapt(jnp.float32(entries), 200, 4)
            assert 50 <= float(state.h) <= 200
            assert 1.5 * (1 - 1e-6) <= abs(float(state.step)) <= 150
        assert float(state.h) == end


@pytest.mark.parametrize(("k", "teams"), [(200, 7), (2000, 2), (1, 8), (3, 2), (50, 50)])
def test_the_ladder_has_little_more_room_than_h(k, teams):
    rungs = ladder(k / teams, k)
    assert rungs == sorted(set(rungs))
    assert rungs[0] == -(-k // teams)
    assert rungs[-1] == k
    for h in range(rungs[0], k + 1):
        assert h <= min(rung for rung in rungs if rung >= h) <= np.ceil(1.1 * h)
    assert len(rungs) <= 2 + np.log(teams) / np.log(1.1)


@pytest.mark.slow
def test_the_words_between_teams_follow_h():
    reducer, size, teams = SparDL(0.1, teams=6, gather="bruck"), 6000, 6
    exchange = lambda x: reducer.pmean(x, reducer.init(size), "data").mean
    sent = traced_bytes(exchange, jax.ShapeDtypeStruct((size,), jnp.float32), 6)
    (choice,) = sent.conditionals
    room = [branch.received / 8 / (teams - 1) for branch in choice.branches]
    assert room == ladder(600 / teams, 600)
    assert (room[0], room[-1]) == (100, 600)
    assert all(more <= np.ceil(1.1 * less) for less, more in itertools.pairwise(room))


def test_errors_name_what_is_wrong():
    x = np.zeros((6, 12))
    with pytest.raises(ValueError, match=r"teams=4 does not divide the 6 workers.*\[1, 2, 3, 6\]"):
        run(SparDL(0.1, teams=4), x)
    with pytest.raises(ValueError, match=r"teams=3 is not a power of two.*gather='bruck'"):
        run(SparDL(0.1, teams=3), x)
    with pytest.raises(ValueError, match="gather='ring' is unknown"):
        SparDL(0.1, gather="ring")
    with pytest.raises(ValueError, match="residuals='none' is unknown"):
        SparDL(0.1, residuals="none")


@pytest.mark.slow
@pytest.mark.parametrize(
    "form",
    some([(5, 1, "recursive"), (8, 4, "recursive"), (6, 3, "bruck")], [(6, 3, "bruck")]),
    ids=str,
)
def test_rounding_is_conserved(form):
    workers, teams, gather = form
    reducer = SparDL(0.1, teams=teams, gather=gather, codec=codecs.Packed(), selection="exact")
    for seed in range(3):
        x = np.random.default_rng(seed).normal(size=(workers, 301)) ** 3
        reduced = run(reducer, x)
        mean = reduced.mean[0].astype(np.float64)
        kept = workers * mean + reduced.residual.sum(0, dtype=np.float64)
        np.testing.assert_allclose(kept, x.sum(0), atol=1e-4)


def test_the_adaptation_recovers_from_quiet_steps():
    """Without gradients h goes to its end. Afterwards it settles again."""
    state = Adaptation.start(200, 4)
    for _ in range(400):
        state = state.adapt(jnp.float32(0), 200, 4)
    seen = []
    for _ in range(60):
        state = state.adapt(2.0 * state.h, 200, 4)  # right at h = 100
        seen.append(float(state.h))
    assert np.all(np.abs(np.subtract(seen[-20:], 100)) <= 10)


@functools.cache
def fifty_steps(teams, residuals="global"):
    """What goes into each of 50 exchanges of 14 workers, float64, and what comes out."""
    rng = np.random.default_rng(0)
    # Heavy-tailed, and with a direction that persists.
    x = rng.normal(size=997) ** 3 + rng.normal(size=(14, 50, 997)) ** 3
    # "exact" picks the same few elements, and compiles in half the time.
    reducer = SparDL(0.05, teams=teams, gather="bruck", residuals=residuals, selection="exact")
    x, reduced = feedback_loop(reducer, 14)(x.astype(np.float32))
    reduced = jax.tree.map(np.asarray, reduced)
    np.testing.assert_array_equal(reduced.mean, np.broadcast_to(reduced.mean[:1], x.shape))
    total = 14 * reduced.mean[0].astype(np.float64)
    return np.float64(x), total, np.float64(reduced.residual), reduced.state


@pytest.mark.slow
@pytest.mark.parametrize("teams", some([2, 14], [2]))
def test_nothing_is_lost_in_50_steps_in_which_h_adapts(teams):
    x, total, residual, state = fifty_steps(teams)
    scale = np.abs(x).sum(0)
    assert np.all(np.abs(x.sum(0) - total - residual.sum(0)) <= 1e-5 * (1 + scale))
    assert (total != 0).any(axis=1).all()
    assert len(np.unique(np.rint(state.h))) > 2


@pytest.mark.slow
def test_partial_and_local_residuals_leak():
    leaks = {}
    for rule in ("global", "partial", "local"):
        x, total, residual, _ = fifty_steps(7, rule)
        wanted = x.sum(0)
        lost = wanted - total - residual.sum(0)
        leaks[rule] = np.linalg.norm(lost, axis=1) / np.linalg.norm(wanted, axis=1)
    assert leaks["global"].max() < 1e-6
    assert leaks["partial"].min() > 1e-3
    assert leaks["local"].min() > 1e-2
    assert leaks["local"].mean() > leaks["partial"].mean()
