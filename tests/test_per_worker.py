"""Transformations on each worker's own values, and residuals that decay."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from optax_transformations import call, gradients as trees, params_of, transformations
from training import stepped
from workers import mesh, some

import jaxsparse
from jaxsparse import PerWorker, per_worker, reshard, shard
from jaxsparse.outer.parallel import run_on_workers

W, SIZE, STEPS = 3, 40, 4


def gradients(seed=0):
    return np.random.default_rng(seed).normal(size=(STEPS, W, SIZE)).astype(np.float32)


def run(tx, where, grads):
    """The updates of all steps, and the last state."""
    step = stepped(tx, where)
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


@pytest.mark.parametrize("decay", [0.5, *some([0.0], [])])
@pytest.mark.parametrize("delay", some([0, 1], [0]))
def test_residuals_decay(delay, decay):
    """v <- decay v + g; what is sent leaves it. What no step would read is not kept."""
    tx = jaxsparse.top_k(0.25, decay=decay, delay=delay, is_dense=lambda *_: False)
    grads = gradients()
    updates, state = run(tx, mesh(W), grads)
    residual = np.zeros((W, SIZE))
    for g, update in zip(grads, updates):
        held = residual if delay else decay * residual + g
        sent = np.zeros_like(held)
        for w in range(W):
            largest = np.argsort(-np.abs(held[w]), kind="stable")[: SIZE // 4]
            sent[w, largest] = held[w, largest]
        np.testing.assert_allclose(update, sent.mean(0), rtol=1e-5, atol=1e-6)
        residual = decay * (held - sent) + g if delay else held - sent
    assert list(state.residual) == (["parameters"] if decay or delay else [])
    for kept in state.residual.values():
        assert isinstance(kept, PerWorker)
        np.testing.assert_allclose(kept.value, residual, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrong", [-0.1, 1.5])
def test_a_decay_is_a_share(wrong):
    with pytest.raises(ValueError, match=rf"decay={wrong} must lie in \[0, 1\]"):
        jaxsparse.top_k(0.1, decay=wrong)


def test_another_axis_is_named():
    tx = optax.chain(per_worker(optax.trace(0.9)), jaxsparse.dense(axis_name="hosts"))
    state = shard(tx.init(jnp.zeros(SIZE)), 2, "hosts")
    step = stepped(tx, 2, "hosts")
    with pytest.raises(ValueError, match="no mesh with an axis 'data' is known"):
        step(jnp.ones((2, SIZE)), state)


LISTED = transformations()
OLD_NAMES = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Specifying a key")
FEW = ["muon", "frozen"]
SEVERAL = ["MultiSteps", "add_noise", "galore", "lookahead", "mechanize", "sam", "sm3"]


def beside_dense(name, **settings):
    """The transformation in front of a dense exchange, and its step on one worker."""
    tx = optax.chain(per_worker(LISTED[name](), **settings), jaxsparse.dense())

    def step(grads, state):
        return call(name, tx, jax.tree.map(lambda g: g[0], grads), state)

    return tx, step


@OLD_NAMES
@pytest.mark.slow
def test_all_of_optax_keeps_its_state_alike():
    """The next step is the same program: no shape, dtype or key path changes."""
    assert len(LISTED) > 100
    grads = trees(1, W)[0]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for name in LISTED:
            tx, step = beside_dense(name)
            state = shard(tx.init(params_of(name)), W)
            run = run_on_workers(step, W, batch_argnums=0)
            updates, after = jax.eval_shape(run, grads, state)
            assert jax.tree.structure(after) == jax.tree.structure(state), name
            kinds = lambda tree: [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]
            assert kinds(after) == kinds(state), name
            assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, params_of(name))


@OLD_NAMES
@pytest.mark.parametrize(
    "name",
    some(
        [
            *("factored", "muon", "sm3", "add_noise", "flatten", "galore", "lookahead"),
            *("novograd", "scale_by_lbfgs", "scale_by_zoom_linesearch"),
            *("selective_transform", "zero_nans"),
        ],
        ["factored", "muon", "sm3"],
    ),
)
def test_a_mesh_cuts_what_has_the_shape_of_a_parameter(name):
    where = mesh((2, 2))
    specs = {"a": PartitionSpec("fsdp"), "b": PartitionSpec()}
    params = params_of(name)
    if name == "lookahead":
        specs = optax.LookaheadParams(specs, specs)
    with jax.numpy_dtype_promotion("standard"):
        alone = optax.with_extra_args_support(LISTED[name]()).init(params)
        state = per_worker(LISTED[name](), mesh=where, specs=specs).init(params)
    assert jax.tree.structure(state) == jax.tree.structure(PerWorker.wrap(alone))
    for x, one in zip(jax.tree.leaves(state), jax.tree.leaves(alone), strict=True):
        assert (x.shape, x.dtype) == ((2, *one.shape), one.dtype)
        assert x.sharding.spec[0] == "data"
        # Lookahead's optimizer has no parameters but the fast ones, and leaves out this name.
        is_cut = one.shape == (4, 6) and name != "lookahead"
        assert ("fsdp" in x.sharding.spec) == is_cut, x.sharding


@pytest.mark.parametrize("name", some([*FEW, *SEVERAL], FEW))
def test_each_worker_runs_optax_as_it_is(name):
    """The mean of Optax alone on each worker's gradients; a step with NaN changes nothing."""
    grads = trees(3, W)
    broken = jax.tree.map(np.copy, grads[1])
    broken["b"][1, 0] = np.nan
    with jax.numpy_dtype_promotion("standard"):
        tx, step = beside_dense(name)
        run = run_on_workers(step, mesh(W), batch_argnums=0)
        state, found = shard(tx.init(params_of(name)), mesh(W)), []
        for g in (grads[0], broken, *grads[1:]):
            updates, state = run(g, state)
            found.append(updates)
        alone = optax.with_extra_args_support(LISTED[name]())
        step_alone = jax.jit(jax.vmap(lambda g, s: call(name, alone, g, s)))
        own = jax.tree.map(lambda x: jnp.stack([x] * W), alone.init(params_of(name)))
        expected = []
        for g in grads:
            updates, own = step_alone(g, own)
            expected.append(jax.tree.map(lambda x: np.mean(x, axis=0), updates))
        carried = reshard(jax.device_get(state), 5)
    skipped = found.pop(1)
    assert not any(np.any(x) for x in jax.tree.leaves(skipped))
    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5)
    jax.tree.map(close, found, expected)
    bits = lambda x: (
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    ).astype(jnp.float32)
    for x, y in zip(jax.tree.leaves(state[0]), jax.tree.leaves(own), strict=True):
        close(bits(x), bits(y))
    assert {x.shape[0] for x in jax.tree.leaves(carried[0])} <= {5}


def test_what_is_no_transformation_is_named():
    with pytest.raises(ValueError, match=r"tx=<function scale_by_adam .* is no Optax transform"):
        per_worker(optax.scale_by_adam)


def test_a_state_that_changes_its_arrays_is_refused_by_name():
    tx = per_worker(optax.monitor({"norm": lambda updates, **_: optax.tree.norm(updates)}))
    state = shard(tx.init(jnp.zeros(SIZE)), W)
    step = stepped(tx, W)
    with pytest.raises(ValueError, match=r"monitor can't run in per_worker.* from {} to {.*norm"):
        step(gradients()[0], state)


def test_an_error_of_optax_says_whose_it_is():
    """Muon by itself takes one matrix, unless it is told where the matrices of a tree are."""
    tx = optax.chain(
        per_worker(optax.contrib.scale_by_muon(), axis_name=None), jaxsparse.dense(axis_name=None)
    )
    params = {"a": jnp.ones((4, 4))}
    with jax.numpy_dtype_promotion("standard"), pytest.raises(ValueError, match="tree") as raised:
        tx.update(params, tx.init(params))
    assert "scale_by_muon raised this inside per_worker" in raised.value.__notes__[-1]
