"""DGC and MSTopk as transformations, against a NumPy loop written from their papers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from supports import flat
from training import train
from workers import some

from jaxsparse import dense, dgc, exchange
from jaxsparse.contrib import ms_topk
from jaxsparse.feedback import states_in
from jaxsparse.reducers import Staged, TopK

WORKERS, SHAPE, STEPS, K = 3, (40, 30), 6, 24
DENSITY = K / (40 * 30)


def gradients(seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    shapes = {"kernel": SHAPE, "bias": (30,)}
    draw = lambda shape: (rng.normal(size=(WORKERS, *shape)) * scale).astype(np.float32)
    return [{name: draw(shape) for name, shape in shapes.items()} for _ in range(STEPS)]


PARAMS = {"kernel": jnp.zeros(SHAPE), "bias": jnp.zeros(30)}


def describe(steps, momentum, ks, clip_norm=None, nesterov=False):
    """Updates and residuals by Alg. 1 of DGC, with momentum correction and masking.

    Nesterov's momentum is as in the authors' code: m = momentum (m + g), then v = v + m + g.
    """
    u = v = np.zeros((WORKERS, SHAPE[0] * SHAPE[1]))
    dense_u = np.zeros(30)
    history = []
    for step, k in zip(steps, ks):
        g = step["kernel"].reshape(WORKERS, -1).astype(np.float64)
        dense = step["bias"].astype(np.float64)
        if clip_norm is not None:
            norm = np.sqrt((g**2).sum(1) + (dense**2).sum(1))
            scale = np.minimum(1, clip_norm * WORKERS**-0.5 / norm)[:, None]
            g, dense = g * scale, dense * scale
        u = momentum * u + g
        v = v + (momentum * u + g if nesterov else u)
        mask = np.zeros(v.shape, bool)
        for w in range(WORKERS):
            mask[w, np.argsort(-np.abs(v[w]))[:k]] = True
        dense_u = momentum * dense_u + dense.mean(0)
        bias = momentum * dense_u + dense.mean(0) if nesterov else dense_u
        history.append({"kernel": np.where(mask, v, 0).mean(0).reshape(SHAPE), "bias": bias})
        u, v = np.where(mask, 0, u), np.where(mask, 0, v)
    return history, v


def check(tx, momentum, ks, clip_norm=None, steps=None, nesterov=False):
    steps = gradients() if steps is None else steps
    history, (_, state) = train(tx, PARAMS, WORKERS, steps)
    expected, residual = describe(steps, momentum, ks, clip_norm, nesterov)
    for updates, wanted in zip(history, expected):
        for name in wanted:
            # All workers' updates are stacked.
            got = np.asarray(updates[name]).reshape(-1, *wanted[name].shape)
            for row in got:
                np.testing.assert_allclose(row, wanted[name], rtol=1e-4, atol=1e-6)
    (state,) = states_in(state)
    left = flat(state.residual).reshape(WORKERS, -1)
    np.testing.assert_allclose(left, residual, rtol=1e-4, atol=1e-5)
    return state


def test_dgc_equals_its_description():
    check(dgc(DENSITY), 0.9, [K] * STEPS)


@pytest.mark.slow
def test_nesterov_momentum_is_corrected():
    check(dgc(DENSITY, nesterov=True), 0.9, [K] * STEPS, nesterov=True)


def test_nesterov_momentum_of_everything_is_that_of_sgd():
    """Nothing is masked. With a delay, the same updates come a step later."""
    settings = {"momentum": 0.9, "nesterov": True, "axis_name": None}
    gradients = [jnp.float32([i, 1]) for i in range(4)]

    def run(tx):
        state, history, update = tx.init(jnp.zeros(2)), [], jax.jit(tx.update)
        for gradient in gradients:
            updates, state = update(gradient, state)
            history.append(np.asarray(updates))
        return np.stack(history)

    expected = run(optax.trace(0.9, nesterov=True))
    everything = lambda path, shape: False
    buckets = dense(**settings, is_dense=everything)
    late = dense(**settings, is_dense=everything, delay=1)
    for tx in (dense(**settings), buckets):
        np.testing.assert_allclose(run(tx), expected, rtol=1e-6)
    np.testing.assert_allclose(run(late)[1:], expected[:-1], rtol=1e-6)


def test_nesterov_needs_a_momentum():
    with pytest.raises(ValueError, match="nesterov=True needs a momentum"):
        dgc(DENSITY, momentum=None, nesterov=True)
    with pytest.raises(ValueError, match="nesterov=1 must be True, False or None"):
        dgc(DENSITY, nesterov=1)


@pytest.mark.slow
@pytest.mark.parametrize("clip_norm", some([0.5, 40.0], [40.0]))
def test_gradients_are_clipped_before_they_are_accumulated(clip_norm):
    """Norms are about 35, and 12 in one step. The limit 0.3 clips all, and 23 all but that one."""
    steps = gradients()
    steps[2] = jax.tree.map(lambda g: g / 3, steps[2])
    tx = optax.chain(optax.clip_by_global_norm(clip_norm * WORKERS**-0.5), dgc(DENSITY))
    check(tx, 0.9, [K] * STEPS, clip_norm, steps)


@pytest.mark.slow
def test_density_is_warmed_up():
    stages = Staged(tuple(TopK(each, selection="sampled") for each in (0.25, DENSITY)), (2,))
    state = check(exchange(stages, momentum=0.5), 0.5, [300, 300, K, K, K, K])
    assert K + 30 <= state.info.delivered <= WORKERS * K + 30


@pytest.mark.slow
def test_ms_topk_equals_top_k():
    check(ms_topk(DENSITY, passes=32, momentum=0.9), 0.9, [K] * STEPS)
