"""An exchange that keeps its state, in steps of trainers that have no place for it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from workers import mesh

import jaxsparse
from jaxsparse import StatefulExchange, data_parallel, shard

PARAMS = {"w": jnp.zeros((6, 4)), "b": jnp.zeros(4)}
BATCHES = np.random.default_rng(0).normal(size=(4, 6, 4)).astype(np.float32)


def grads_of(params, batch):
    return jax.grad(lambda p: jnp.mean((batch - (p["b"] + p["w"].sum(0))[None]) ** 2))(params)


class Trainer:
    """It knows nothing of residuals: its state is a flat list, and it applies gradients itself."""

    def apply(self, grads, values):
        return [v - 0.1 * g for g, v in zip(grads, values)]

    def train_step(self, values, batch):
        treedef = jax.tree.structure(PARAMS)
        grads = jax.tree.leaves(grads_of(treedef.unflatten(values), batch))
        return self.apply(grads, values), {"rows": batch.shape[0]}


@pytest.mark.parametrize("where", [3, mesh(3)], ids=["simulated", "mesh"])
def test_a_trainer_with_a_hook_for_gradients(where):
    tx = jaxsparse.top_k(0.25, is_dense=lambda *_: False)

    def step(state, batch):
        params, opt_state = state
        updates, opt_state = tx.update(grads_of(params, batch), opt_state)
        return (jax.tree.map(lambda p, u: p - 0.1 * u, params, updates), opt_state), None

    run = data_parallel(step, where)
    state = shard((PARAMS, tx.init(PARAMS)), where)

    trainer = Trainer()
    exchange = StatefulExchange(tx, jax.tree.leaves(PARAMS), where)
    apply = trainer.apply
    trainer.apply = lambda grads, values: apply(exchange(grads), values)
    own = exchange.data_parallel(
        trainer.train_step, donate_argnums=0, batch_argnums=-1, outputs=(None, {"rows": "sum"})
    )
    values = jax.tree.leaves(shard(PARAMS, where))
    assert own.lower(values, BATCHES[0]).out_info[0][1]["rows"].shape == ()
    for batch in BATCHES:
        before = jax.tree.leaves(exchange.state)
        state, _ = run(state, batch)
        values, metrics = own(values, batch)
        assert all(x.is_deleted() for x in before)  # donated
        assert int(metrics["rows"]) == 6
    jax.tree.map(np.testing.assert_array_equal, values, jax.tree.leaves(state[0]))
    jax.tree.map(
        np.testing.assert_array_equal, jax.tree.leaves(exchange.state), jax.tree.leaves(state[1])
    )
    # Another process goes on.
    after = own(list(values), BATCHES[0])[0]
    other = StatefulExchange(tx, jax.tree.leaves(PARAMS), where)
    assert any(np.any(x) for x in jax.tree.leaves(exchange.state))
    other.state = jax.tree.unflatten(
        jax.tree.structure(other.state), jax.tree.leaves(jax.tree.map(jnp.array, state[1]))
    )
    trainer.apply = lambda grads, values: apply(other(grads), values)
    again = other.data_parallel(trainer.train_step, outputs=(None, {"rows": "sum"}))
    jax.tree.map(np.testing.assert_allclose, again(jax.tree.leaves(state[0]), BATCHES[0])[0], after)


def test_a_loss_scale_behind_it_sees_overflows():
    """As Keras' LossScaleOptimizer, which steers by what the exchange gives it."""
    tx = jaxsparse.top_k(0.25, is_dense=lambda *_: False, when_skipped="nan")
    exchange = StatefulExchange(tx, PARAMS, 2)

    def train_step(state, batch):
        params, scale = state
        scaled = exchange(jax.tree.map(lambda g: g * scale, grads_of(params, batch)))
        good = jnp.isfinite(optax.tree.norm(jax.tree.map(lambda g: g / scale, scaled)))
        moved = jax.tree.map(lambda p, g: p - 0.1 * g / scale, params, scaled)
        params = jax.tree.map(lambda new, old: jnp.where(good, new, old), moved, params)
        return params, jnp.where(good, scale, scale / 2)

    step = exchange.data_parallel(train_step)
    state, scales = (PARAMS, jnp.float32(2.0**127)), [2.0**127]
    batch = np.concatenate([BATCHES[0], 100 * BATCHES[1]])
    for _ in range(8):
        residuals = jax.tree.map(np.asarray, exchange.state.residual)
        state, skipped = step(state, batch), int(exchange.state.skipped)
        scales.append(float(state[1]))
        if scales[-1] < scales[-2]:  # the step is left out
            jax.tree.map(np.testing.assert_array_equal, residuals, exchange.state.residual)
            assert not any(np.any(x) for x in jax.tree.leaves(state[0]))
    assert 0 < skipped < 8
    assert scales[-1] == scales[skipped] == 2.0 ** (127 - skipped)  # it falls at first
    assert all(np.any(x) for x in jax.tree.leaves(state[0]))


def test_wrong_places():
    exchange = StatefulExchange(jaxsparse.dense(), PARAMS, 2)
    with pytest.raises(ValueError, match="called outside of its step"):
        exchange(PARAMS)
    twice = exchange.data_parallel(lambda p, b: exchange(exchange(grads_of(p, b))))
    with pytest.raises(ValueError, match="called twice in a step"):
        twice(PARAMS, BATCHES[0])
    once = exchange.data_parallel(lambda p, b: exchange(grads_of(p, b)))
    with pytest.raises(ValueError, match=r"called inside of jax\.jit"):
        jax.jit(once)(PARAMS, BATCHES[0])
    with pytest.raises(ValueError, match=r"argument 1 .* 2 workers cannot share equally"):
        once(PARAMS, BATCHES[0][:5])
    unused = exchange.data_parallel(lambda p, b: jnp.float32(0))
    assert unused(PARAMS, BATCHES[0]) == 0  # nothing is exchanged, and the state stays
    assert isinstance(optax.tree.get(exchange.state, "skipped"), jax.Array)
