"""SparDL over many steps: global residuals lose nothing, and train better than others."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from workers import finished, rows

from jaxsparse.systems.spardl import SparDL

WORKERS, STEPS, SIZE = 14, 50, 997


def make(teams, gather, residuals="global"):
    # "exact" picks the same few elements, and compiles in half the time.
    return SparDL(0.05, teams=teams, gather=gather, residuals=residuals, selection="exact")


@functools.cache
def feedback_loop(reducer, unit):
    """A compiled function of gradients[step, worker, d]. It returns each step's inputs and outcome.

    Residuals are rounded to multiples of `unit` before the next step, which then divides them
    exactly.
    """
    exchange = jax.vmap(
        lambda x, state: finished(reducer, x, state),
        in_axes=(0, None),
        axis_name="data",
        axis_size=WORKERS,
    )

    def step(carry, gradient):
        residual, state = carry
        x = jnp.round(residual / unit) * unit + gradient
        reduced = exchange(x, state)
        state = jax.tree.map(lambda s: s[0], reduced.state)
        return (reduced.residual, state), (x, reduced.mean, reduced.residual, state)

    start = jnp.zeros((WORKERS, SIZE)), reducer.init(SIZE)
    return jax.jit(lambda gradients: jax.lax.scan(step, start, gradients)[1])


def gradients(unit, seed=0):
    """Multiples of `unit`, heavy-tailed, and with a direction that persists."""
    rng = np.random.default_rng(seed)
    persistent = rng.normal(size=SIZE) ** 3
    noise = rng.normal(size=(STEPS, WORKERS, SIZE)) ** 3
    return np.clip(np.rint(4 * (persistent + noise)), -200, 200).astype(np.float32) * unit


def follow(reducer, unit):
    outcome = feedback_loop(reducer, unit)(gradients(unit))
    x, mean, residual, state = jax.tree.map(np.asarray, outcome)
    np.testing.assert_array_equal(mean, np.broadcast_to(mean[:, :1], mean.shape))
    return x.astype(np.float64), mean[:, 0].astype(np.float64), residual.astype(np.float64), state


@pytest.mark.parametrize(
    ("teams", "gather"), rows([(2, "bruck")], [(1, "recursive"), (14, "bruck")])
)
def test_nothing_is_lost_in_50_steps(teams, gather):
    unit = WORKERS * teams
    x, mean, residual, state = follow(make(teams, gather), unit)
    assert np.abs(x).sum(axis=1).max() < 2**24  # all sums are exact in float32
    # Means, and shares of what teams discard, are quotients of integers, rounded to float32.
    total = np.rint(mean * WORKERS)
    share = np.rint(residual)
    np.testing.assert_allclose(mean * WORKERS, total, rtol=3e-7)
    np.testing.assert_allclose(residual, share, rtol=3e-7)
    np.testing.assert_array_equal(x.sum(axis=1), total + share.sum(axis=1))
    assert (total != 0).any(axis=1).all()
    if teams == 1:  # nothing is divided, so nothing was rounded on the way
        everything = gradients(unit).sum(axis=(0, 1), dtype=np.float64)
        np.testing.assert_array_equal(everything, total.sum(axis=0) + share[-1].sum(axis=0))
    if gather == "bruck":
        assert len(np.unique(np.rint(state.h))) > 2  # h adapts meanwhile


@pytest.mark.slow
def test_partial_and_local_residuals_leak():
    leaks = {}
    for rule in ("global", "partial", "local"):
        x, mean, residual, _ = follow(make(7, "bruck", residuals=rule), WORKERS * 7)
        wanted = x.sum(axis=1)
        lost = wanted - WORKERS * mean - residual.sum(axis=1)
        leaks[rule] = np.linalg.norm(lost, axis=1) / np.linalg.norm(wanted, axis=1)
    assert leaks["global"].max() < 1e-6
    assert leaks["partial"].min() > 1e-3
    assert leaks["local"].min() > 1e-2
    assert leaks["local"].mean() > leaks["partial"].mean()
