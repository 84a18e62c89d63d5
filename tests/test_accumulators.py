"""Residuals and momenta in bfloat16: rounded at random, so that nothing is lost on average."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from supports import flat
from training import stepped
from workers import some

import jaxsparse
from jaxsparse import shard
from jaxsparse.arrays import hashing
from jaxsparse.feedback import store as accumulators
from jaxsparse.reducers.base import Kept

W = 3
PARAMS = {"w": jnp.zeros((50, 40)), "b": jnp.zeros(7)}


def gradients(seed, scale=1.0):
    draw = lambda p: jax.random.normal(jax.random.key(seed), (W, *p.shape)) * jnp.float32(scale)
    return jax.tree.map(draw, PARAMS)


def test_rounding_is_unbiased_to_neighbours_and_exact_where_it_can_be():
    rng = np.random.default_rng(0)
    x = (rng.normal(size=1000) * 10.0 ** rng.integers(-30, 30, 1000)).astype(np.float32)
    x[:6] = [0.0, -0.0, 1.0, -3.5, 3.4e38, -3.4e38]
    keys = jax.vmap(lambda i: hashing.combine(i, 7))(jnp.arange(1000, dtype=jnp.uint32))
    draws = jax.jit(jax.vmap(accumulators.rounded_at_random, (None, 0)))(x, keys)
    assert draws.dtype == jnp.bfloat16
    draws = np.asarray(draws).astype(np.float64)
    bits = x.view(np.uint32) & np.uint32(0xFFFF0000)
    below = bits.view(np.float32).astype(np.float64)  # the neighbour towards zero
    ulp = np.abs(np.float64(1) * below) * 2.0**-7
    inside = np.abs(x) < 3.38e38
    assert (np.abs(draws - below) <= ulp)[:, inside].all()
    np.testing.assert_array_equal(draws[:, :4], np.tile(x[:4], (1000, 1)))
    assert np.signbit(draws[:, 1]).all()
    assert np.isfinite(draws).all()
    # The mean of n draws of one bit has a standard deviation of at most ulp / (2 sqrt(n)). 5 times
    # that is room for 1000 values.
    error = (draws.mean(axis=0) - x)[inside]
    assert (np.abs(error) <= 5 * ulp[inside] / (2 * np.sqrt(1000)) + 1e-40).all()


@pytest.mark.parametrize("momentum", some([None, 0.5], [0.5]), ids=["", "momentum"])
def test_small_gradients_arrive_beside_large_residuals(momentum):
    """To the nearest, 1e-3 added to 1 would be lost for ever. At random, sums come out right."""
    tx = jaxsparse.exchange(
        Hoard(), accumulator_dtype="bfloat16", momentum=momentum, is_dense=lambda *_: False
    )
    grads = {"w": jnp.full((W, 2000), 1e-3)}
    state = shard(tx.init({"w": jnp.zeros(2000)}), W)
    state = state._replace(residual={"w": jaxsparse.PerWorker(jnp.ones((W, 2000), jnp.bfloat16))})
    step = stepped(tx, W)
    for _ in range(300):
        _, state = step(grads, state)
    assert flat(state.residual).dtype == jnp.bfloat16
    mean = np.asarray(flat(state.residual)).astype(np.float64).mean()
    expected = 1 + 0.3 * (1 if momentum is None else 2)
    assert abs(mean - expected) < 0.01
    # Workers draw independently.
    assert (flat(state.residual)[0] != flat(state.residual)[1]).mean() > 0.5


class Hoard(jaxsparse.reducers.TopK):
    """Delivers nothing, so that residuals only grow."""

    def __init__(self):
        super().__init__(density=0.01)

    def reduce(self, x, state, axis_name):
        sums, kept = super().reduce(x, state, axis_name)
        return sums._replace(total=jnp.zeros_like(x)), Kept(x, None, kept.state)


@pytest.mark.slow
def test_no_two_buffers_are_rounded_by_the_same_draws():
    """In three buckets, whose residuals and momenta are all equal before they are rounded."""
    tx = jaxsparse.exchange(
        Hoard(),
        accumulator_dtype="bfloat16",
        momentum=0.5,
        is_dense=lambda *_: False,
        bucket_size=400,
    )
    grads = {"w": jnp.tile(jax.random.normal(jax.random.key(0), (400,)), (W, 3))}
    _, state = stepped(tx, W)(grads, shard(tx.init({"w": jnp.zeros(1200)}), W))
    kept = [
        flat(tree)[..., i : i + 400]
        for tree in (state.residual, state.momentum)
        for i in (0, 400, 800)
    ]
    found = {np.asarray(worker).tobytes() for buffer in kept for worker in buffer.reshape(W, 400)}
    assert len(found) == 6 * W


def test_what_is_finite_of_a_skipped_step_waits_in_few_bits():
    tx = jaxsparse.top_k(0.05, momentum=0.9, accumulator_dtype=jnp.bfloat16)
    step = stepped(tx, W)
    _, state = step(gradients(0), shard(tx.init(PARAMS), W))
    assert int(state.roundings) == 1
    broken = jax.tree.map(lambda g: g.at[1, 0].set(jnp.nan), gradients(1))
    updates, after = step(broken, state)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(updates))
    assert int(after.skipped) == 1
    assert int(after.roundings) == 2
    for name, left in after.residual.items():
        g = np.nan_to_num(np.asarray(broken[name], np.float32))
        was = state.residual[name].value, state.momentum[name].value
        residual, momentum = (np.asarray(x, np.float32) for x in was)
        waits = (residual + 0.9 * momentum + g).sum(0)
        found = np.asarray(left.value, np.float32).sum(0)
        np.testing.assert_allclose(found, waits, atol=0.02 * np.abs(waits).max())


def test_other_dtypes_and_states_are_refused():
    for dtype in ("float16", "int8", "halves", jnp.float64):
        with pytest.raises(ValueError, match=r"accumulator_dtype=.* must be 'float32'"):
            jaxsparse.top_k(0.05, accumulator_dtype=dtype)
    tx = jaxsparse.top_k(0.05, axis_name=None, accumulator_dtype="bfloat16")
    state = jaxsparse.top_k(0.05, axis_name=None).init(PARAMS)
    with pytest.raises(ValueError, match=r"residual of 'w' is .*float32.* need .*bfloat16"):
        tx.update(PARAMS, state)
