"""Chains that train otherwise than they read: clips of each worker's gradient, momentum twice."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from workers import mesh, some

import jaxsparse
from jaxsparse import data_parallel, shard
from jaxsparse.training.chains import warn_of_two_momenta

NORM, RATE = 0.5, 0.1
START = {"w": np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)}
INPUTS = np.random.default_rng(1).normal(size=(24, 6)).astype(np.float32)
CLIP = optax.clip_by_global_norm(NORM)


def loss_of(params, x):
    return jnp.mean(jnp.sum((x @ params["w"]) ** 2, axis=1))


def trained(tx, where, clip=None, scale=1.0):
    """The parameters of three steps of a trainer that clips as it does."""

    def step(state, x):
        params, opt_state = state
        grads = jax.grad(lambda p: scale * loss_of(p, x))(params)
        if clip is not None:
            grads, _ = clip.update(grads, optax.EmptyState())
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    start = START if isinstance(where, int) else jax.device_put(START, NamedSharding(where, P()))
    run, state = data_parallel(step, where), shard((start, tx.init(start)), where)
    for _ in range(3):
        state, _ = run(state, INPUTS)
    return np.asarray(state[0]["w"])


def dense(tx):
    """The same without workers."""
    params, state = START, tx.init(START)
    for _ in range(3):
        updates, state = tx.update(jax.grad(loss_of)(params, INPUTS), state, params)
        params = optax.apply_updates(params, updates)
    return np.asarray(params["w"])


def grid():
    return jax.make_mesh((2, 2), ("data", "tp"), axis_types=(AxisType.Auto,) * 2)


PLACES = {"simulated": lambda: 3, "mesh": lambda: mesh(3), "grid": grid}


@pytest.mark.parametrize("place", some(PLACES, ["simulated"], slow=["mesh"]))
def test_a_clip_behind_is_that_of_the_mean_and_one_in_the_step_may_be_kept_from_acting(place):
    where, exchange, sgd = PLACES[place](), jaxsparse.dense(), optax.sgd(RATE)
    expected = dense(optax.chain(CLIP, sgd))
    assert np.abs(expected - dense(sgd)).max() > 0.01  # it acts
    moved = trained(optax.chain(exchange, CLIP, sgd), where)
    np.testing.assert_allclose(moved, expected, rtol=1e-6, atol=1e-7)
    # The trainer's clip sees gradients that are small, and does nothing.
    scaled = optax.chain(optax.scale(2.0**20), exchange, CLIP, sgd)
    with pytest.warns(UserWarning, match="the step clips gradients in front of the exchange"):
        kept = trained(scaled, where, CLIP, 2.0**-20)
    np.testing.assert_array_equal(kept, moved)


WARNED = {
    "a chain": lambda: trained(optax.chain(CLIP, jaxsparse.dense(), optax.sgd(RATE)), 2),
    "by value": lambda: trained(optax.chain(optax.clip(0.1), jaxsparse.dense()), 2),
    "adaptive": lambda: trained(
        optax.chain(optax.adaptive_grad_clip(0.1), jaxsparse.dense(), optax.sgd(RATE)), 2
    ),
    "the step": lambda: trained(optax.chain(jaxsparse.dense(), optax.sgd(RATE)), 2, CLIP),
}
FINE = {
    "behind": lambda: trained(optax.chain(jaxsparse.dense(), CLIP, optax.sgd(RATE)), 2),
    "momentum": lambda: trained(
        optax.chain(CLIP, jaxsparse.dgc(0.1, is_dense=lambda path, shape: False)), 2
    ),
    "per_worker": lambda: trained(
        optax.chain(CLIP, jaxsparse.per_worker(optax.trace(0.9)), jaxsparse.dense()), 2
    ),
    "one worker": lambda: trained(optax.chain(CLIP, jaxsparse.dense()), 1),
}


@pytest.mark.parametrize("case", [*WARNED, *FINE])
def test_a_clip_of_each_workers_gradient_is_warned_of(case):
    warned = pytest.warns(UserWarning, match="the step clips gradients in front of the exchange")
    with warned if case in WARNED else contextlib.nullcontext():
        (WARNED | FINE)[case]()


TWICE = {
    "sgd": lambda: trained(
        optax.chain(jaxsparse.dense(momentum=0.9), optax.sgd(RATE, momentum=0.9)), 2
    ),
}
ONCE = {
    "in the exchange": lambda: trained(
        optax.chain(jaxsparse.dense(momentum=0.9), optax.sgd(RATE)), 2
    ),
    "behind": lambda: trained(optax.chain(jaxsparse.dense(), optax.sgd(RATE, momentum=0.9)), 2),
    "each worker's own": lambda: trained(
        optax.chain(jaxsparse.per_worker(optax.trace(0.9)), jaxsparse.dense(momentum=0.9)), 2
    ),
    # Two optimizers in one state, as of a GAN, or of groups of leaves.
    "two chains": lambda: warn_of_two_momenta(
        (
            START,
            *(
                optax.chain(
                    jaxsparse.dense(momentum=first, is_dense=lambda *_: False),
                    optax.sgd(RATE, second),
                ).init(START)
                for first, second in ((0.9, None), (None, 0.9))
            ),
        )
    ),
}


@pytest.mark.parametrize("case", [*TWICE, *ONCE])
def test_momentum_in_two_places_is_warned_of(case):
    warned = pytest.warns(UserWarning, match="momentum acts twice: in the exchange")
    with warned if case in TWICE else contextlib.nullcontext():
        (TWICE | ONCE)[case]()


def skipping_spikes(tx):
    """`tx`, but for steps whose loss is above the last one's: MaxText has such a wrapper."""

    def init(params):
        return {"inner": tx.init(params), "last": jnp.float32(np.inf)}

    def update(updates, state, params=None, *, loss):
        def do():
            return tx.update(updates, state["inner"], params)

        def skip():
            return jax.tree.map(jnp.zeros_like, updates), state["inner"]

        updates, inner = jax.lax.cond(loss <= state["last"], do, skip)
        return updates, {"inner": inner, "last": loss}

    return optax.GradientTransformationExtraArgs(init, update)


@pytest.mark.parametrize("where", [2, mesh(2)], ids=["simulated", "mesh"])
def test_who_decides_by_a_loss_needs_its_mean(where):
    tx = skipping_spikes(optax.chain(jaxsparse.dense(), optax.sgd(RATE)))

    def step(state, x, mean):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params, loss=mean(loss))
        return optax.apply_updates(params, updates), opt_state

    make = lambda mean: data_parallel(lambda s, x: step(s, x, mean), where)
    state = shard((START, tx.init(START)), where)
    with pytest.raises(ValueError, match=r"differs between workers.* given a loss.* its mean"):
        make(lambda loss: loss)(state, INPUTS)
    run = make(lambda loss: jax.lax.pmean(loss, "data"))
    losses = []
    for scale in (1, 10, 1):  # the second one is a spike
        before = np.asarray(state[0]["w"])
        state = run(state, scale * INPUTS)
        losses.append(float(state[1]["last"]))
        assert np.array_equal(before, state[0]["w"]) == (scale == 10)
    assert losses[1] > losses[0] > losses[2]


def test_an_exchange_in_front_of_lookahead_is_told_its_place():
    """`init` sees both parameters of lookahead, and gradients are those of the fast ones."""
    send, params = jaxsparse.quantized("int4", is_dense=lambda *_: False), START
    both = optax.LookaheadParams.init_synced(params)
    update = lambda tx: lambda s, x: tx.update(jax.grad(loss_of)(params, x), s, both)
    run = lambda tx: data_parallel(update(tx), 2)(shard(tx.init(both), 2), INPUTS)
    behind = optax.chain(send, optax.lookahead(optax.sgd(0.5), 5, 0.5))
    with pytest.raises(ValueError, match=r"'fast\.w' .* as in optax\.lookahead\(optax\.chain\("):
        run(behind)
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = run(optax.lookahead(optax.chain(send, optax.sgd(0.5)), 5, 0.5))
    assert np.any(updates.fast["w"] != 0)
