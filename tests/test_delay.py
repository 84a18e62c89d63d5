"""Delayed exchange: this step's update is last step's exchange."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract import CASES, rounds
from supports import flat as flat_state
from training import scanned
from workers import on_workers, some

import jaxsparse
from jaxsparse import PerWorker, exchange, local
from jaxsparse.reducers import TopK

STEPS = 4
SHAPES = {"kernel": (20, 31), "bias": (5,)}
REDUCERS = {name: case.reducer for name, case in CASES.items()}
REDUCERS["all blocks"] = CASES["omni_reduce_little_room"].full  # its momentum is that of the mean


def gradients(workers, steps=STEPS):
    rng = np.random.default_rng(workers)
    return {
        name: jnp.asarray(workers * rng.integers(-50, 51, (workers, steps, *shape)), jnp.float32)
        for name, shape in SHAPES.items()
    }


@functools.cache
def runner(name, momentum, delay, bucket_size=None, workers=3, way="vmap"):
    tx = exchange(
        REDUCERS[name],
        momentum=momentum,
        delay=delay,
        bucket_size=bucket_size,
        is_dense=lambda path, shape: "bias" in path,
    )

    def run(grads):
        state = tx.init({name: jnp.zeros(shape) for name, shape in SHAPES.items()})
        if way == "shard_map":
            state = jax.tree.map(
                lambda n: local(n) if isinstance(n, PerWorker) else n,
                state,
                is_leaf=lambda n: isinstance(n, PerWorker),
            )
        state, updates = jax.lax.scan(lambda s, g: tx.update(g, s)[::-1], state, grads)
        return updates, state

    return on_workers(run, workers, way)


# Reducers that do not count exchanges. With a delay, the count would include the first exchange,
# which is of nothing.
@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    some(
        [
            ("spardl", 0.5, 300),
            ("all blocks", 0.5, None),
            ("top_k", None, None),
            ("true_top_k", 0.5, 300),
            ("dense", 0.5, None),
        ],
        [("true_top_k", 0.5, 300)],
    ),
    ids=str,
)
def test_updates_are_those_without_delay_a_step_later(case):
    name, momentum, bucket_size = case
    grads = gradients(3)
    now, _ = runner(name, momentum, 0, bucket_size)(grads)
    later, _ = runner(name, momentum, 1, bucket_size)(grads)
    for leaf in SHAPES:
        assert not np.any(later[leaf][:, 0])
        np.testing.assert_array_equal(later[leaf][:, 1:], now[leaf][:, :-1])


def check_conservation(name, grads, updates, state, workers):
    close = functools.partial(np.testing.assert_allclose, atol=0.1)
    equal = close if rounds(CASES[name].reducer) else np.testing.assert_array_equal
    flat = lambda x, lead: np.asarray(x["kernel"], np.float64).reshape(
        *x["kernel"].shape[:lead], -1
    )
    kept = flat_state(state.residual, 2)[:, 0].astype(np.float64)
    equal(flat(grads, 2).sum((0, 1)), workers * flat(updates, 2)[0].sum(0) + kept.sum(0))
    np.testing.assert_array_equal(
        np.asarray(grads["bias"]).sum((0, 1)),
        workers * np.asarray(updates["bias"])[0].sum(0) + flat_state(state.pending, 2)[:, 0].sum(0),
    )


CONSERVING = [name for name, case in CASES.items() if case.reducer.conserves]


@pytest.mark.parametrize("name", some(CONSERVING, ["top_k"]))
def test_nothing_is_lost_over_a_run(name):
    grads = gradients(3)
    updates, state = runner(name, None, 1, way="shard_map")(grads)
    check_conservation(name, grads, updates, state, 3)


@pytest.mark.parametrize("leaf", SHAPES)
def test_what_is_not_finite_reaches_no_residual_and_the_last_exchange_counts(leaf):
    name = "true_top_k"
    run, grads = runner(name, 0.5, 1, 300), gradients(3)
    index = (2, 1, -1)
    broken = grads | {leaf: grads[leaf].at[index].set(jnp.nan)}
    expected, _ = run(grads)
    updates, state = run(broken)
    for leaf in SHAPES:  # the exchange of a step does not see its gradients
        np.testing.assert_array_equal(updates[leaf][:, :2], expected[leaf][:, :2])
        assert np.any(updates[leaf][:, 1])
    assert np.all(np.asarray(state.skipped) == 1)
    # Without momentum, all is as if what was not finite had been zero, and all of a dense leaf.
    without = jax.tree.map(lambda g: jnp.where(jnp.isfinite(g), g, 0), broken)
    without["bias"] = without["bias"].at[:, 1].set(0)
    expected, _ = runner(name, None, 1, 300)(without)
    plain, after = runner(name, None, 1, 300)(broken)
    jax.tree.map(np.testing.assert_array_equal, plain, expected)
    check_conservation(name, without, plain, after, 3)
    jax.tree.map(lambda x: np.testing.assert_array_equal(np.isfinite(x), True), state)


def test_a_dense_sum_that_overflows_is_never_applied():
    tx = jaxsparse.dense(momentum=0.9, delay=1)
    values = jnp.broadcast_to(jnp.float32([1, 3e38, 1, 1])[None, :, None], (2, 4, 3))
    updates, state = on_workers(lambda g: scanned(tx, g), 2, "vmap")(values)
    np.testing.assert_allclose(updates[0, :, 0], [0, 1, 0, 1.9], rtol=1e-6)
    assert state.skipped[0] == 1


def test_rounding_to_half_precision_stays_in_the_residual():
    rng = np.random.default_rng(0)
    grads = jnp.asarray(rng.normal(size=(2, 6, 64)), jnp.bfloat16)
    tx = exchange(TopK(0.5), delay=1, is_dense=lambda path, shape: False)

    updates, state = on_workers(lambda g: scanned(tx, g), 2, "vmap")(grads)
    kept = state.residual["parameters"].value[:, 0]
    assert updates.dtype == jnp.bfloat16
    total = 2 * np.asarray(updates[0], np.float64).sum(0) + np.asarray(kept, np.float64).sum(0)
    np.testing.assert_allclose(total, np.asarray(grads, np.float64).sum((0, 1)), atol=1e-4)


@pytest.mark.parametrize(
    ("delay", "message"),
    [
        (2, r"delay=2 must be 0, .*or 1, to exchange those of"),
        (-1, r"delay=-1 must be 0"),
        (True, r"delay=True must be an int"),
        (0.5, r"delay=0.5 must be an int"),
    ],
)
def test_other_delays_are_refused(delay, message):
    with pytest.raises(ValueError, match=message):
        jaxsparse.top_k(0.1, delay=delay)


def test_a_traced_delay_names_static_args():
    make = lambda delay: jaxsparse.top_k(0.1, axis_name=None, delay=delay)
    injected = optax.inject_hyperparams(make)(delay=1)
    with pytest.raises(ValueError, match=r"delay=.* must be an int: .*static_args"):
        injected.init({"w": jnp.zeros((40, 30))})
