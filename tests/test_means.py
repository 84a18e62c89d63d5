"""Means over tokens of which workers and micro-batches have unequal numbers, against plain JAX."""

import contextlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from workers import WAYS, mesh, on_workers, some

import jaxsparse
from jaxsparse.outer.worker import weighted

P = PartitionSpec
RNG = np.random.default_rng(0)
INPUTS, TARGETS = (RNG.normal(size=(3, 24, n)).astype(np.float32) for n in (5, 3))
START = {"kernel": RNG.normal(size=(5, 3)).astype(np.float32)}
# The last of three micro-batches has no token, and two workers have none in the first one.
MASK = np.arange(72).reshape(3, 24) % 5 < np.int32([[3], [5], [0]])
MASK[0, :12] = False


def sums(params, batch):
    inputs, targets, mask = batch
    off = inputs @ params["kernel"] - targets
    each = jnp.square(off).sum(1)
    return jnp.sum(jnp.where(mask, each, 0)), (mask.sum(), jnp.sum(mask & (off[:, 0] > 0)))


def whole(params, batch):
    total, (count, hits) = sums(params, jax.tree.map(lambda x: x.reshape(72, *x.shape[2:]), batch))
    return total / count.astype(total.dtype), hits / count


@pytest.mark.parametrize(
    "case", some([4, (4,), (4, 2), ("explicit", 4), ("context", 4)], [4, ("explicit", 4)]), ids=str
)
def test_tokens_of_workers_and_micro_batches_count_alike(case):
    simulated = case if isinstance(case, int) else None
    params, batch, at = START, (INPUTS, TARGETS, MASK), contextlib.nullcontext()
    if not simulated:
        kind = AxisType.Explicit if case[0] == "explicit" else AxisType.Auto
        there = mesh(tuple(n for n in case if isinstance(n, int)), kind)
        params = jax.device_put(params, NamedSharding(there, P()))
        batch = jax.device_put(batch, NamedSharding(there, P(None, "data")))
        at = jax.set_mesh(there) if case[0] == "context" else at
    both = jaxsparse.value_and_grad(sums, has_aux=True, workers=simulated)
    tx = jaxsparse.dense(workers=simulated)

    @jax.jit
    def step(params, state, batch):
        add = lambda total, micro: (jax.tree.map(jnp.add, total, both(params, micro)), None)
        first, rest = (tuple(x[i] for x in batch) for i in (0, slice(1, None)))
        ((loss, (count, hits)), grads), _ = jax.lax.scan(add, both(params, first), rest)
        loss, hits, grads = jaxsparse.mean_of((loss, hits, grads), count)
        return loss.mean(), hits.mean(), tx.update(grads, state, params)[0]

    with at:
        found = jax.device_get(step(params, tx.init(params), batch))
    (loss, hits), grads = jax.value_and_grad(whole, has_aux=True)(START, (INPUTS, TARGETS, MASK))
    chex.assert_trees_all_close(found, (loss, hits, grads), rtol=1e-5)


def test_each_dtype_divides_by_counts_beyond_its_range():
    counts = jnp.int32([3_000_000, 0, 70_001])
    sums = RNG.uniform(1, 60_000, (3, 4)).astype(np.float32)
    for dtype in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.int32):
        given = jnp.asarray(sums, dtype)
        found = jaxsparse.mean_of({"x": given}, counts)["x"]
        assert found.dtype == (jnp.float32 if dtype == jnp.int32 else dtype)
        right = np.asarray(given, np.float64) * 3 / 3_070_001
        off = 1e-6 if found.dtype == jnp.float32 else jnp.finfo(found.dtype).eps
        # The smallest float16s have fewer digits.
        np.testing.assert_allclose(np.float64(found), right, rtol=off, atol=1e-7)
    nothing = jaxsparse.mean_of(jnp.float32([1, 2]), jnp.zeros(2, jnp.int32))
    assert nothing.tolist() == [0, 0]


def test_what_is_no_count_skips_the_step():
    tx, params = jaxsparse.dense(workers=3), jnp.ones(4)

    @jax.jit
    def of(total, counts):
        mean = jaxsparse.mean_of(total, counts)
        return mean, *tx.update(mean, tx.init(params), params)

    for wrong in (np.nan, np.inf, -np.inf, -1):
        for dtype in (jnp.float16, jnp.float32):
            counts = jnp.float32([2, wrong, 5])
            mean, updates, state = of(jnp.ones((3, 4), dtype), counts)
            assert np.isnan(mean).all()
            assert not np.any(updates)
            assert int(state.skipped) == 1
    assert np.isnan(jaxsparse.mean_of(jnp.ones(3), jnp.full(3, 3e38))).all()  # their sum is none


def in_local_steps():
    def step(state, batch):
        return state, jaxsparse.mean_of(jnp.sum(state["params"] * batch[0]), jnp.sum(batch))

    own = lambda state: state["params"]
    local = jaxsparse.LocalSteps(step, jaxsparse.dense(), optax.sgd(1.0), 2, params=own)
    local(local.init({"params": jnp.ones(4)}), jnp.ones((2, 4)))


def test_counts_may_be_a_list():
    np.testing.assert_allclose(jaxsparse.mean_of(jnp.float32([30, 40]), [30, 10]), [1.5, 2.0])


REFUSED = {
    "in a loss": (
        lambda: jaxsparse.grad(lambda w, b: jaxsparse.mean_of(w * b.sum(), b.size), workers=2)(
            1.0, jnp.ones(4)
        ),
        r"count has shape \(\) and dtype int32, and needs a number for each worker.*value_and_grad",
    ),
    "in local steps": (in_local_steps, r"count has shape \(\).*weight= gives that to LocalSteps"),
    "flags": (lambda: jaxsparse.mean_of(jnp.ones(2), jnp.ones(2, bool)), "dtype bool, and needs"),
    "a dict": (
        lambda: jaxsparse.mean_of(jnp.ones(2), {"tokens": jnp.ones(2)}),
        "count is a dict, and needs a number for each worker",
    ),
    "swapped": (lambda: jaxsparse.mean_of(jnp.ones(2), ([1.0], {})), "count is a tuple, and needs"),
    "nothing": (lambda: jaxsparse.mean_of(jnp.ones(2), None), "count is a NoneType, and needs"),
    "float16": (
        lambda: jaxsparse.mean_of(jnp.ones(2), jnp.ones(2, jnp.float16)),
        "count has dtype float16, which skips whole numbers from 2048 on",
    ),
    "no rows": (
        lambda: jaxsparse.mean_of({"a": jnp.ones(3)}, jnp.ones(2)),
        r"sums\['a'\] has shape \(3,\) and dtype float32, and count has 2 workers",
    ),
    "keys": (
        lambda: jaxsparse.mean_of(jax.random.split(jax.random.key(0)), jnp.ones(2)),
        r"sums has shape \(2,\) and dtype key",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refusals(what):
    use, match = REFUSED[what]
    with pytest.raises(ValueError, match=match):
        use()


@pytest.mark.parametrize("way", some(WAYS, ["vmap"]))
def test_shares_of_any_number(way):
    """Of displacements in local steps."""
    scale = on_workers(lambda x, w: weighted({"x": x}, w, "data"), 3, way)
    ones = jnp.ones((3, 2))
    for weights, shares in (
        ([1, 2, 3], [0.5, 1, 1.5]),
        ([0, 0, 3], [0, 0, 3]),
        ([0, 0, 0], [0, 0, 0]),
        ([2**30, 2**30, 0], [1.5, 1.5, 0]),
    ):
        found = scale(ones, jnp.int32(weights))["x"]
        np.testing.assert_allclose(found, np.float32(shares)[:, None] * ones, rtol=1e-6)
    for wrong in (-1, np.nan, np.inf):
        assert np.isnan(scale(ones, jnp.float32([wrong, 3, 3]))["x"]).any()
    assert np.isnan(scale(ones, jnp.full(3, 2e38, jnp.float32))["x"]).all()
