"""Equinox modules as they are, whose functions and flags are no arrays."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from workers import mesh

from jaxsparse import LocalSteps, dense, reshard, shard
from jaxsparse.comm.static_leaves import Static, has_static, held, released
from jaxsparse.outer.parallel import run_on_workers

RNG = np.random.default_rng(0)
BATCH = RNG.normal(size=(12, 4)).astype(np.float32)


class Model(eqx.Module):
    """It branches on a flag, and calls a function that is one of its leaves."""

    layer: eqx.nn.MLP
    dropout: eqx.nn.Dropout
    doubled: bool
    name: str

    def __init__(self):
        self.layer = eqx.nn.MLP(4, 2, 8, 1, activation=jax.nn.relu, key=jax.random.key(0))
        self.dropout = eqx.nn.Dropout(0.5, inference=True)
        self.doubled, self.name = True, "a"

    def __call__(self, x):
        y = self.dropout(self.layer(x))
        return 2 * y if self.doubled and self.name == "a" else y


def loss_of(model, x):
    return jnp.mean(jnp.square(jax.vmap(model)(x) - x[:, :2]))


def step_of(tx):
    """The loop's step as Equinox' documentation has it, but for the mean of the loss."""

    @eqx.filter_jit
    def step(model, opt_state, x):
        loss, grads = eqx.filter_value_and_grad(loss_of)(model, x)
        updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), opt_state, loss

    return step


def arrays(model):
    return eqx.filter(model, eqx.is_array)


def test_parameters_of_a_module_are_picked_by_type():
    start = Model(), optax.adam(0.1).init(arrays(Model()))
    pick = lambda state: eqx.filter(state[0], eqx.is_inexact_array)
    train = LocalSteps(lambda s, x: (s, ()), dense(), optax.sgd(1.0), 2, params=pick)
    found, expected = train.init(start).params, pick(start)
    assert jax.tree.leaves(expected)
    jax.tree.map(np.testing.assert_array_equal, arrays(found), expected)


class Counted(eqx.Module):
    """It has arrays that have no gradients."""

    scale: jax.Array
    count: jax.Array
    key: jax.Array
    act: object

    def __call__(self, x):
        return self.act(self.scale * x[:2])


COUNTED = Counted(jnp.ones(2), jnp.int32(3), jax.random.key(0), jnp.tanh)


def test_local_steps_move_the_floats_of_a_module():
    def step(state, x):
        loss, grads = eqx.filter_value_and_grad(loss_of)(state[0], x)
        return (eqx.apply_updates(state[0], jax.tree.map(lambda g: -g, grads)),), loss

    train = LocalSteps(step, dense(), optax.sgd(1.0), 2)
    shape = lambda x: x if callable(x) else jax.ShapeDtypeStruct(x.shape, x.dtype)
    shapes, state = train.init((jax.tree.map(shape, COUNTED),)), train.init((COUNTED,))
    assert jax.tree.leaves(shapes) == jax.tree.leaves(jax.tree.map(shape, held(state)))
    state, _ = train(state, BATCH)
    own, _ = zip(*(step((COUNTED,), rows) for rows in np.split(BATCH, 2)))
    np.testing.assert_allclose(
        state.params.scale, (own[0][0].scale + own[1][0].scale) / 2, rtol=1e-5
    )
    whole = eqx.combine(state.params, COUNTED)
    assert whole.count == 3
    assert whole(BATCH[0]).shape == (2,)


@pytest.mark.slow
def test_local_steps_of_a_module():
    tx = optax.sgd(0.1)

    def step(state, x):
        model, opt_state, loss = step_of(tx)(*state, x)
        return (model, opt_state), loss

    train = LocalSteps(step, dense(), optax.sgd(1.0), mesh(2), every=2)
    state = train.init((Model(), tx.init(arrays(Model()))))
    owns = [(Model(), tx.init(arrays(Model())))] * 2
    for t in range(4):
        state, loss = train(state, BATCH, t)
        owns, losses = zip(*(step(own, x) for own, x in zip(owns, np.split(BATCH, 2))))
        np.testing.assert_allclose(loss, losses, rtol=1e-4)
        if t % 2:
            parts = [eqx.partition(own[0], eqx.is_array) for own in owns]
            mean = jax.tree.map(lambda *x: sum(x) / 2, *(a for a, _ in parts))
            owns = [(eqx.combine(mean, parts[0][1]), own[1]) for own in owns]
    state = train.finish(state)
    assert state.params.layer.activation is owns[0][0].layer.activation
    np.testing.assert_allclose(loss_of(state.params, BATCH), loss_of(owns[0][0], BATCH), rtol=1e-4)
    moved = reshard(state, 1)
    assert moved.worker[0].doubled is True
    assert moved.worker[0].layer.layers[0].weight.value.shape == (1, 8, 4)


def test_modules_are_spread_as_they_are():
    model = shard(Model(), mesh(2))
    assert model.layer.layers[0].weight.sharding.num_devices == 2
    assert model.name == "a"
    assert model.dropout.p == 0.5
    assert callable(model.layer.activation)


def test_what_is_held():
    model = Model()
    kept = held({"model": model, "rate": 0.5})
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(kept["model"]))
    assert kept["rate"] == 0.5  # outside of a module, numbers are arrays as ever
    assert has_static(kept)
    assert not has_static(jax.tree.leaves(kept))
    assert jax.tree.leaves(released(kept)) == jax.tree.leaves({"model": model, "rate": 0.5})
    assert held(kept)["model"].doubled == Static(True, bool) != Static(1, int)


def test_a_leaf_without_a_hash_is_named():
    model = eqx.tree_at(lambda m: m.name, Model(), {1, 2})
    with pytest.raises(ValueError, match=r"leaf\.name of an Equinox module is .* of type set"):
        run_on_workers(lambda m, x: x.mean(), 2)(model, BATCH)
