"""Tests of what every reducer promises. A new one joins by its row in the table of systems."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract import (
    CASES,
    REPRESENTATIVES,
    SENDS_LESS,
    SIZE,
    VARIANTS,
    check_laws,
    each,
    gradients,
    quantizes,
    run,
)
from recorders import record
from training import trainer
from workers import by_step, feedback_loop, finished, mesh, some

import jaxsparse
from jaxsparse import exchange, shard
from jaxsparse.reducers.matrices import MatrixReducer


def named(*args):
    return pytest.mark.parametrize("name", each(*args))


# By default, tests run with one number of workers. Tests of the layers around a reducer, or of its
# collectives alone, run with some systems.
reducers = named(CASES)
# Where a shorter list is usual: the others pass there as they do in tests of their own.
few_representatives = lambda *names: named(CASES, names)


# Their own tests ask the same of them, and more.
ELSEWHERE = {"chunked_top_k", "demo", "dragonn", "ok_topk", "omni_reduce", "s2_reducer", "spardl"}
ELSEWHERE |= {"dgc", "gtopk", "powersgd", "quantized", "sparse_all_gather"}


@pytest.mark.parametrize("name", some(CASES, CASES.keys() - VARIANTS - ELSEWHERE))
@pytest.mark.parametrize("workers", some((3, 8), (3,)))
def test_nothing_is_lost_and_replicas_agree(name, workers):
    results = run(name, workers)
    check_laws(CASES[name].reducer, results, workers)
    assert all(np.any(reduced.mean) for _, reduced in by_step(results))


@few_representatives()
def test_nothing_is_lost_among_simulated_workers(name):
    check_laws(CASES[name].reducer, run(name, 64, "vmap"), 64)


@few_representatives()
def test_the_ways_to_run_are_equal(name):
    one, other = run(name, 3, "vmap"), run(name, 3, "shard_map")
    equal = np.testing.assert_array_equal
    if quantizes(CASES[name].reducer):
        # XLA rounds level * scale or not, depending on what it fuses. Later steps amplify that.
        one, other = by_step(one)[0], by_step(other)[0]
        equal = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-3)
    jax.tree.map(equal, one, other)


@few_representatives("dense", "top_k", "omni_reduce", "qsgd")
def test_no_axis_is_one_worker(name):
    g = gradients(1, steps=1)[0, 0]
    reducer = CASES[name].reducer
    with record() as messages:
        exchange = jax.jit(lambda x, state: finished(reducer, x, state, None))
        reduced = exchange(g, reducer.init(SIZE))
    assert messages == []
    mean, residual = np.asarray(reduced.mean), np.asarray(reduced.residual)
    equal = np.testing.assert_array_equal
    if isinstance(reducer, MatrixReducer):  # products of factors round
        equal = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-5)
    equal(mean + residual, g)


@few_representatives(*(name for name in REPRESENTATIVES if name != "spardl"))
def test_full_budget_is_the_dense_mean(name):
    if name in SENDS_LESS:
        pytest.skip("not promised")
    ((x, reduced),) = by_step(run(name, 3, full=True, steps=1))
    expected = np.asarray(x).mean(0)
    np.testing.assert_array_equal(reduced.mean[0], expected, err_msg="see SENDS_LESS")
    # A reducer may keep values that cancel between workers: no less is delivered for it.
    np.testing.assert_array_equal(np.asarray(reduced.residual).sum(0), np.zeros(SIZE))


@few_representatives("sketched_sgd", "sparcml", "omni_reduce")
@pytest.mark.parametrize("size", some((1, 2), (2,)))
def test_tiny_vectors(name, size):
    reducer = CASES[name].reducer
    fields = {f: 1 for f in ("k", "cols", "rows", "oversampling") if hasattr(reducer, f)}
    reducer = dataclasses.replace(reducer, **fields)
    g = np.arange(1.0, 1 + 3 * size, dtype=np.float32).reshape(3, 1, size) * 3
    check_laws(reducer, feedback_loop(reducer, 3)(jnp.asarray(g)), 3)


def _step_and_state(name):
    tx = optax.chain(
        exchange(CASES[name].reducer, momentum=0.9, is_dense=lambda path, _: "bias" in path),
        optax.sgd(0.1),
    )
    params = {
        "kernel": jnp.zeros((25, 24), jnp.bfloat16),
        "scale": jnp.ones(()),
        "bias": jnp.zeros(3, jnp.float16),
    }

    def loss(p, batch):
        return batch.mean() * sum(x.astype(jnp.float32).sum() for x in jax.tree.leaves(p))

    step = chex.assert_max_traces(trainer(tx, jaxsparse.grad(loss), extra=1), n=1)
    return jax.jit(step), (params, tx.init(params))


@functools.cache
def _compiled_step(name):
    step, state = _step_and_state(name)
    return step, shard(state, mesh(3))


@few_representatives("dense", "sketched_sgd")
def test_the_transformation_keeps_types_and_traces_once(name):
    run, state = _compiled_step(name)
    structure, types = jax.tree.structure(state), list(map(jax.typeof, jax.tree.leaves(state)))
    for i in range(3):
        state = run(state, jnp.full(6, 1.0 + i, jnp.float32))
    assert jax.tree.structure(state) == structure
    assert list(map(jax.typeof, jax.tree.leaves(state))) == types


def check_finite(tree):
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(tree))


@few_representatives("dense", "sketched_sgd")
def test_a_non_finite_gradient_on_one_worker_skips_the_step_on_all(name):
    run, state = _compiled_step(name)
    before = run(state, jnp.arange(1.0, 7.0))
    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        after = run(before, jnp.arange(1.0, 7.0).at[3].set(bad))
        was, now = before[1][0], after[1][0]
        assert now.skipped == was.skipped + 1
        jax.tree.map(np.testing.assert_array_equal, after[0], before[0])
        check_finite(now)
    healthy = run(after, jnp.arange(1.0, 7.0))
    assert any(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (healthy[0], after[0]))))


@reducers
def test_an_empty_vector_has_an_empty_mean_or_is_refused(name):
    reducer = CASES[name].reducer
    call = lambda x: finished(reducer, x, reducer.init(0)).mean
    try:
        mean = jax.eval_shape(jax.vmap(call, axis_name="data"), jnp.zeros((2, 0)))
    except ValueError as error:
        assert "must lie between 1 and" in str(error)  # noqa: PT017
    else:
        assert mean.shape == (2, 0)
