"""Gradients that are added up over calls of a chain."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from training import stepped
from workers import mesh, some

import jaxsparse
from jaxsparse import PerWorker, multi_steps, reshard, shard

pytestmark = pytest.mark.filterwarnings("error:in front of the exchange")


@pytest.fixture(autouse=True)
def promoting():  # as Optax' norms do
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


W, K, STEPS = 3, 3, 7
PARAMS = {"w": jnp.linspace(-1, 1, 70).reshape(10, 7), "b": jnp.ones(7, jnp.bfloat16)}
ALL = lambda path, shape: False


def loss_of(params, batch):
    return jnp.mean((batch @ params["w"] + params["b"].astype(jnp.float32) - 1) ** 2)


def batches(workers):
    return np.random.default_rng(0).normal(size=(STEPS, 4 * workers, 10)).astype(np.float32)


def behind():
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def trained(tx, where, count=STEPS):
    """Parameters and state after each call, and the compiled step."""
    params = shard(PARAMS, where)
    state = shard(tx.init(params), where)

    @jax.jit
    def step(params, state, batch):
        _, grads = jaxsparse.value_and_grad(loss_of)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    found = []
    for batch in batches(where.shape["data"])[:count]:
        batch = jax.device_put(batch, NamedSharding(where, P("data")))
        params, state = step(params, state, batch)
        found.append((params, state))
    return found, step.lower(params, state, batch).compile()


@pytest.mark.parametrize("kind", some([AxisType.Auto, AxisType.Explicit], [AxisType.Auto]))
@pytest.mark.parametrize("sizes", some([W, (2, 2), 8], [W]), ids=str)
def test_everything_sent_it_trains_as_multi_steps_of_optax(sizes, kind):
    where = mesh(sizes, kind)
    found, _ = trained(multi_steps(optax.chain(jaxsparse.dense(), behind()), K), where)
    tx = optax.MultiSteps(behind(), K)
    params, state = PARAMS, tx.init(PARAMS)
    for batch, (got, kept) in zip(batches(where.shape["data"]), found):
        updates, state = jax.jit(tx.update)(jax.grad(loss_of)(params, batch), state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(got["w"], params["w"], atol=2e-6)
        np.testing.assert_allclose(np.float32(got["b"]), np.float32(params["b"]), atol=1e-2)
        assert (int(kept.mini_step), int(kept.gradient_step)) == (
            int(state.mini_step),
            int(state.gradient_step),
        )
        assert bool(tx.has_updated(kept)) == bool(tx.has_updated(state))


# Simulated workers run in a vmap, with the axis bound.
@pytest.mark.parametrize(("where", "is_manual"), [("mesh", False), ("mesh", True), (W, False)])
def test_an_exchange_gets_the_mean_of_k_gradients(where, is_manual):
    where = mesh(W) if where == "mesh" else where
    grads = jnp.float32(np.random.default_rng(1).normal(size=(2 * K, W, 40)))
    exchange = optax.chain(jaxsparse.top_k(0.1, momentum=0.9, is_dense=ALL))
    tx = multi_steps(exchange, K)
    step, state = stepped(tx, where, is_manual=is_manual), shard(tx.init(jnp.zeros(40)), where)
    once, kept = stepped(exchange, where), shard(exchange.init(jnp.zeros(40)), where)
    for i, g in enumerate(grads):
        before = jax.tree.map(np.asarray, state.inner_opt_state)
        updates, state = step(g, state)
        if i % K < K - 1:
            assert not np.any(updates)
            jax.tree.map(np.testing.assert_array_equal, before, state.inner_opt_state)
            continue
        total = functools.reduce(jnp.add, grads[i - K + 1 : i + 1], jnp.zeros((W, 40)))
        expected, kept = once(total / K, kept)
        np.testing.assert_array_equal(updates, expected)
        jax.tree.map(np.testing.assert_array_equal, kept, state.inner_opt_state)


def test_calls_in_between_send_nothing():
    _, program = trained(
        multi_steps(optax.chain(jaxsparse.top_k(0.1, is_dense=ALL), optax.sgd(0.1)), K),
        mesh(W),
        count=1,
    )
    moved = jaxsparse.wire_bytes(program)
    assert moved.received > 0
    branches = str(moved).partition("conditional")[2].splitlines()[1:]
    assert len(branches) == 2
    assert "received 0 B" in branches[0]
    assert all("/cond/" in str(one) for one in moved.collectives), moved


def test_what_is_not_finite_skips_the_step_and_is_gone_after_it():
    tx, where = multi_steps(optax.chain(jaxsparse.top_k(1.0, is_dense=ALL)), 2), mesh(W)
    step, state = stepped(tx, where), shard(tx.init(jnp.zeros(4)), where)
    ones = jnp.ones((W, 4))
    for g in (ones.at[1, 2].set(jnp.nan), ones):
        updates, state = step(g, state)
        assert not np.any(updates)
    assert int(jaxsparse.diagnose(state).skipped) == 1
    residual = np.asarray(jax.tree.leaves(state.inner_opt_state[0].residual)[0])
    assert np.all(np.isfinite(residual))
    for g in (ones, ones):
        updates, state = step(g, state)
    assert np.all(np.isfinite(updates))
    assert np.all(np.asarray(updates)[[0, 1, 3]] >= 1)


def test_sums_are_carried_to_another_number_of_workers():
    found, _ = trained(multi_steps(optax.chain(jaxsparse.dense()), K), mesh(W), count=1)
    params, state = found[-1]
    assert isinstance(state.acc_grads["w"], PerWorker)
    assert state.acc_grads["b"].value.dtype == jnp.float32
    _, carried = reshard((params, state), mesh(2))
    mean = lambda node: np.asarray(node.value).mean(0)
    np.testing.assert_allclose(
        mean(carried.acc_grads["w"]), mean(state.acc_grads["w"]), rtol=1e-5, atol=1e-7
    )


CLIP = optax.clip_by_global_norm(1.0)


@pytest.mark.parametrize(
    "tx",
    [
        multi_steps(optax.chain(CLIP, jaxsparse.top_k(0.1, is_dense=ALL)), 2),
        optax.chain(CLIP, multi_steps(optax.chain(jaxsparse.top_k(0.1, is_dense=ALL)), 2)),
    ],
    ids=["inside", "outside"],
)
def test_a_clip_in_front_of_the_exchange_is_refused(tx):
    with pytest.raises(ValueError, match="In front of the exchange, the reduce_sum"):
        trained(tx, mesh(W), count=1)
    with pytest.raises(ValueError, match="the chain mixes the rows of workers"):
        jaxsparse.check(tx, PARAMS)


def test_what_may_stand_in_front_stays_allowed():
    front = optax.chain(
        optax.add_decayed_weights(0.1), jaxsparse.per_worker(optax.clip_by_global_norm(1.0))
    )
    tx = multi_steps(optax.chain(front, jaxsparse.top_k(0.1, is_dense=ALL), optax.sgd(0.1)), 2)
    trained(tx, mesh(W), count=1)
    assert jaxsparse.check(tx, PARAMS) is None


def test_bad_settings_are_refused():
    for tx in (optax.sgd(0.1), optax.adam(0.1)):
        with pytest.raises(ValueError, match="tx has no exchange that takes the mean of rows"):
            trained(multi_steps(tx, 2), mesh(W), count=1)
    front = optax.chain(optax.scale_by_adam(), jaxsparse.dense())
    with (
        pytest.warns(UserWarning, match="in front of the exchange"),
        pytest.raises(ValueError, match=r"or put Adam into jaxsparse\.per_worker"),
    ):
        trained(multi_steps(front, 2), mesh(W), count=1)
    with pytest.raises(ValueError, match="every_k=0 must be at least 1"):
        multi_steps(optax.chain(jaxsparse.dense()), 0)
    with pytest.raises(ValueError, match=r"every_k=<function .* must be an int"):
        multi_steps(optax.chain(jaxsparse.dense()), lambda step: 2)
    with pytest.raises(ValueError, match=r"tx is an exchange alone, .*give the whole chain"):
        multi_steps(jaxsparse.dense(), 2)
    with pytest.raises(ValueError, match="tx"):
        multi_steps(jaxsparse.top_k, 2)


def test_a_state_with_a_larger_k_goes_on():
    chain = optax.chain(jaxsparse.dense(workers=W))
    long, short = (multi_steps(chain, k, workers=W) for k in (4, 2))
    params, g = jnp.zeros(4), jnp.ones((W, 4))
    state = long.init(params)
    for _ in range(3):
        _, state = long.update(g, state, params)
    updates, state = short.update(g, state, params)
    np.testing.assert_array_equal(updates, 1)
    updates, state = short.update(g, state, params)
    assert not np.any(updates)


OTHER_STATES = {
    "optax": (
        lambda tx: optax.MultiSteps(tx, 2).init(jnp.zeros(4)),
        "That of optax.MultiSteps has no row",
    ),
    "chain": (lambda tx: tx.init(jnp.zeros(4)), "made for another transformation"),
    "shape": (lambda tx: multi_steps(tx, 2, workers=W).init(jnp.zeros(5)), "the state has sums of"),
    "tree": (
        lambda tx: multi_steps(tx, 2, workers=W).init({"v": jnp.zeros(4)}),
        "the state has sums of",
    ),
}


@pytest.mark.parametrize("name", OTHER_STATES)
def test_other_states_are_refused(name):
    chain = optax.chain(jaxsparse.dense(workers=W), optax.sgd(0.1))
    state_of, words = OTHER_STATES[name]
    with pytest.raises(ValueError, match=words):
        multi_steps(chain, 2, workers=W).update(jnp.ones((W, 4)), state_of(chain))


FINITE = {
    "zero_nans": optax.zero_nans(),
    "asked": optax.stateless(
        lambda grads, params: jax.tree.map(lambda g: jnp.where(jnp.isfinite(g).all(), g, 0), grads)
    ),
}


@pytest.mark.parametrize("name", FINITE)
def test_gradients_may_be_asked_whether_they_are_finite(name):
    tx = optax.chain(FINITE[name], jaxsparse.top_k(0.1, is_dense=ALL), optax.sgd(0.1))
    trained(multi_steps(tx, 2), mesh(W), count=1)
    assert jaxsparse.check(multi_steps(tx, 2), PARAMS) is None
