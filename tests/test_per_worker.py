"""Transformations on each worker's own values, and residuals that decay."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
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


PARAMS = {"a": jnp.full((4, 6), 0.5), "b": jnp.arange(1.0, 8.0)}
OF_OPTAX = {  # one for each kind of state, and of arguments
    "add_noise": lambda: optax.add_noise(0.1, 0.5, key=jax.random.key(1)),
    "differentially_private": lambda: optax.contrib.differentially_private_aggregate(1.0, 0.1, 0),
    "factored": lambda: optax.scale_by_factored_rms(min_dim_size_to_factor=4),
    "flatten": lambda: optax.flatten(optax.adam(0.1)),
    "frozen": lambda: optax.multi_transform(
        {"matrix": optax.adam(0.1), "vector": optax.set_to_zero()},
        lambda tree: jax.tree.map(lambda x: "matrix" if x.ndim == 2 else "vector", tree),
    ),
    "galore": lambda: optax.contrib.scale_by_galore(rank=2),
    "lookahead": lambda: optax.lookahead(optax.adam(0.1), 2, 0.5),
    "mechanize": lambda: optax.contrib.mechanize(optax.sgd(0.1, momentum=0.9)),
    "MultiSteps": lambda: optax.MultiSteps(
        optax.adam(0.1), 2, should_skip_update_fn=optax.skip_not_finite
    ),
    "muon": lambda: optax.contrib.muon(0.1),
    "sam": lambda: optax.contrib.sam(optax.adam(0.1), optax.sgd(0.05)),
    "scale_by_lbfgs": optax.scale_by_lbfgs,
    "sm3": lambda: optax.sm3(0.1),
    "sophia": lambda: optax.contrib.sophia(0.1),
}
FEW = ["muon", "frozen"]


def params_of(name):
    """The parameters that a transformation takes."""
    return optax.LookaheadParams(PARAMS, PARAMS) if name == "lookahead" else PARAMS


def objective(tree):
    return sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(tree))


def call(name, tx, grads, state):
    """Calls the transformation's update, with the arguments that it takes."""
    extra = {"obj_fn": objective} if name == "sophia" else {}
    if name == "differentially_private":
        grads = jax.tree.map(lambda x: jnp.stack([x, -x, 2 * x]), grads)  # of three examples
    return tx.update(grads, state, params_of(name), **extra)


def beside_dense(name, **settings):
    """The transformation in front of a dense exchange, and its step on one worker."""
    tx = optax.chain(per_worker(OF_OPTAX[name](), **settings), jaxsparse.dense())

    def step(grads, state):
        return call(name, tx, jax.tree.map(lambda g: g[0], grads), state)

    return tx, step


@pytest.mark.parametrize("name", some(OF_OPTAX, ["factored", "muon", "sm3"]))
def test_a_mesh_cuts_what_has_the_shape_of_a_parameter(name):
    where = mesh((2, 2))
    specs = {"a": PartitionSpec("fsdp"), "b": PartitionSpec()}
    params = params_of(name)
    if name == "lookahead":
        specs = optax.LookaheadParams(specs, specs)
    with jax.numpy_dtype_promotion("standard"):
        alone = optax.with_extra_args_support(OF_OPTAX[name]()).init(params)
        state = per_worker(OF_OPTAX[name](), mesh=where, specs=specs).init(params)
    assert jax.tree.structure(state) == jax.tree.structure(PerWorker.wrap(alone))
    for x, one in zip(jax.tree.leaves(state), jax.tree.leaves(alone), strict=True):
        assert (x.shape, x.dtype) == ((2, *one.shape), one.dtype)
        assert x.sharding.spec[0] == "data"
        # Lookahead's optimizer has no parameters but the fast ones, and leaves out this name.
        is_cut = one.shape == (4, 6) and name != "lookahead"
        assert ("fsdp" in x.sharding.spec) == is_cut, x.sharding


@pytest.mark.parametrize("name", some(OF_OPTAX, FEW))
def test_each_worker_runs_optax_as_it_is(name):
    """The mean of Optax alone on each worker's gradients; a step with NaN changes nothing."""
    rng = np.random.default_rng(0)
    draw = lambda x: rng.normal(size=(W, *x.shape)).astype(np.float32)
    grads = [jax.tree.map(draw, PARAMS) for _ in range(3)]
    broken = jax.tree.map(np.copy, grads[1])
    broken["b"][1, 0] = np.nan
    with jax.numpy_dtype_promotion("standard"):
        tx, step = beside_dense(name)
        run = run_on_workers(step, mesh(W), batch_argnums=0)
        state, found = shard(tx.init(params_of(name)), mesh(W)), []
        for g in (grads[0], broken, *grads[1:]):
            updates, state = run(g, state)
            found.append(updates)
        alone = optax.with_extra_args_support(OF_OPTAX[name]())
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
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
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


@pytest.mark.parametrize("axes", [1, 2])
def test_a_mask_around_it_that_sees_rows_is_told(axes):
    """Optax calls a function with gradients, which have a row for each worker here."""
    params = {"w": jnp.ones((6, 3)), "b": jnp.ones(3)}
    mask = lambda tree: jax.tree.map(lambda x: x.ndim == axes, tree)
    rows = jax.tree.map(lambda x: jnp.ones((2, *x.shape)), params)
    masked = lambda mask: optax.masked(per_worker(optax.scale_by_adam(), workers=2), mask)
    with jax.numpy_dtype_promotion("standard"):
        wrong, right = masked(mask), masked(mask(params))
        with pytest.raises(
            ValueError, match=r"stands a mask or labels that are a function.*a tree"
        ):
            jax.eval_shape(wrong.update, rows, wrong.init(params), params)
        jax.eval_shape(right.update, rows, right.init(params), params)
