"""Transformations on each worker's own values, and residuals that decay."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from workers import mesh, some

import jaxsparse
from jaxsparse import PerWorker, data_parallel, per_worker, reshard, shard

W, SIZE, STEPS = 3, 40, 4


def gradients(seed=0):
    return np.random.default_rng(seed).normal(size=(STEPS, W, SIZE)).astype(np.float32)


def run(tx, where, grads):
    """The updates of all steps, and the last state."""
    step = data_parallel(lambda g, s: tx.update(g[0], s), where, batch_argnums=0)
    state, found = shard(tx.init(jnp.zeros(SIZE)), where), []
    for g in grads:
        updates, state = step(jnp.asarray(g), state)
        found.append(np.asarray(updates))
    return np.stack(found), state


def adam(grads, rate1=0.9, rate2=0.999, tiny=1e-8):
    """Adam's updates of each worker (Kingma and Ba, algorithm 1), before the learning rate."""
    m, v, found = np.zeros(SIZE), np.zeros(SIZE), []
    for t, g in enumerate(grads.astype(np.float64), 1):
        m, v = rate1 * m + (1 - rate1) * g, rate2 * v + (1 - rate2) * g * g
        found.append(m / (1 - rate1**t) / (np.sqrt(v / (1 - rate2**t)) + tiny))
    return np.stack(found)


def chain(**settings):
    return optax.chain(
        per_worker(optax.scale_by_adam(), **settings),
        jaxsparse.dense(**settings),
    )


@pytest.mark.parametrize("where", ["mesh", *some([W], [])], ids=str)
def test_each_worker_has_its_own_adam(where):
    with jax.numpy_dtype_promotion("standard"):
        updates, state = run(chain(), mesh(W) if where == "mesh" else where, gradients())
    expected = np.mean([adam(gradients()[:, w]) for w in range(W)], axis=0)
    np.testing.assert_allclose(updates, expected, rtol=1e-4, atol=1e-6)
    moments = np.asarray(state[0].mu.value)
    assert moments.shape == (W, SIZE)
    assert np.all(moments[0] != moments[1])
    with jax.numpy_dtype_promotion("standard"):
        carried = reshard(jax.device_get(state), 6)
    assert carried[0].mu.value.shape == (6, SIZE)
    np.testing.assert_array_equal(carried[0].count.value, [STEPS] * 6)


def test_what_is_not_finite_changes_no_state_on_any_worker():
    grads = gradients()
    grads[2, 1, 5] = np.nan
    with jax.numpy_dtype_promotion("standard"):
        updates, state = run(chain(), mesh(W), grads)
        without, other = run(chain(), mesh(W), np.delete(grads, 2, axis=0))
    assert not updates[2].any()
    assert int(state[1].skipped) == 1
    np.testing.assert_array_equal(np.delete(updates, 2, axis=0), without)
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((state[0], other[0])))


def test_an_exchange_must_stand_behind_it():
    tx = per_worker(optax.trace(0.9))
    with pytest.raises(ValueError, match="differs between workers"):
        run(tx, mesh(W), gradients())


@pytest.mark.parametrize("delay", some([0, 1], [0]))
def test_residuals_decay(delay):
    """v <- decay v + g; what is sent leaves it."""
    tx = jaxsparse.top_k(0.25, decay=0.5, delay=delay, is_dense=lambda *_: False)
    grads = gradients()
    updates, state = run(tx, mesh(W), grads)
    residual = np.zeros((W, SIZE))
    for g, update in zip(grads, updates):
        held = residual if delay else 0.5 * residual + g
        sent = np.zeros_like(held)
        for w in range(W):
            largest = np.argsort(-np.abs(held[w]), kind="stable")[: SIZE // 4]
            sent[w, largest] = held[w, largest]
        np.testing.assert_allclose(update, sent.mean(0), rtol=1e-5, atol=1e-6)
        residual = 0.5 * (held - sent) + g if delay else held - sent
    np.testing.assert_allclose(state.residual["parameters"].value, residual, rtol=1e-5, atol=1e-6)
    for wrong in (-0.1, 1.5):
        with pytest.raises(ValueError, match=rf"decay={wrong} must lie in \[0, 1\]"):
            jaxsparse.top_k(0.1, decay=wrong)
    assert isinstance(state.residual["parameters"], PerWorker)


def test_another_axis_is_named():
    tx = optax.chain(per_worker(optax.trace(0.9)), jaxsparse.dense(axis_name="hosts"))
    state = shard(tx.init(jnp.zeros(SIZE)), 2, "hosts")
    step = data_parallel(lambda g, s: tx.update(g[0], s), 2, axis_name="hosts", batch_argnums=0)
    with pytest.raises(ValueError, match="axis_name='data' is not bound here"):
        step(jnp.ones((2, SIZE)), state)


def test_an_axis_left_over_from_pmap_is_explained():
    step = data_parallel(lambda s, x: s + jax.lax.pmean(x.sum(), "batch"), 2)
    with pytest.raises(NameError) as error:
        step(jnp.float32(0), jnp.ones(2))
    assert "the axis of the workers is 'data'" in error.value.__notes__[0]
