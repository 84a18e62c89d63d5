"""EF21-SGDM against NumPy and by hand.

Its law is tested with every kind of reducer, and past skipped steps, other numbers of workers,
meshes and processes.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from on_meshes import SHAPES, SPECS, gradients as mesh_gradients, is_bias, mesh as inner_mesh, put
from reference_ef21 import ef21_sgdm as reference, top_k
from training import stepped, train, trainer
from workers import mesh, some

import jaxsparse
from jaxsparse import contrib, local, quantize, reducers, reshard, shard
from jaxsparse.contrib import ef21_sgdm
from jaxsparse.outer.parallel import run_on_workers

close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)
ALL = {"is_dense": lambda path, shape: False}


def rows(tree):
    """The marked arrays of a tree, by worker: float64[W, d]."""
    parts = [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]
    return np.concatenate([x.reshape(len(x), -1) for x in parts], axis=1)


def flat(tree):
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])


def check_law(state, **tolerance):
    """The estimate is the mean of momenta less residuals. (Dense leaves have no residual.)"""
    for name, momentum in state.momentum.items():
        own = np.asarray(momentum.value, np.float64)
        if name in state.feedback.residual:
            own = own - np.asarray(state.feedback.residual[name].value, np.float64)
        close(state.estimate[name], own.mean(0), **tolerance)


def test_worked_example():
    """Two workers send the larger of two entries. f_w = a_w x**2 / 2, eta = 0.5, rate 0.1."""
    a = jnp.float32([[3, 1], [-1, 2]])
    reducer = reducers.TopK(0.5, selection="exact")
    tx = optax.chain(ef21_sgdm(reducer, momentum=0.5, **ALL), optax.sgd(0.1))

    def step(state, a):
        x, opt_state = state
        updates, opt_state = tx.update(a[0] * x, opt_state)
        return optax.apply_updates(x, updates), opt_state

    run, x = run_on_workers(step, 2), jnp.ones(2)
    state = shard((x, tx.init(x)), 2)
    near = functools.partial(np.testing.assert_allclose, atol=1e-6)
    for x, v, estimates, g in (
        ([0.85, 0.9], [[3, 1], [-1, 2]], [[3, 0], [0, 2]], [1.5, 1]),
        (
            [0.74625, 0.7525],
            [[2.775, 0.95], [-0.925, 1.9]],
            [[3, 0.95], [-0.925, 2]],
            [1.0375, 1.475],
        ),
        (
            [0.6671563, 0.619875],
            [[2.506875, 0.85125], [-0.835625, 1.7025]],
            [[2.506875, 0.95], [-0.925, 1.7025]],
            [0.790937, 1.32625],
        ),
    ):
        state = run(state, a)
        own = state[1][0]
        near(state[0], x)
        near(own.momentum.value, v)
        near(own.momentum.value - own.feedback.residual["parameters"].value, estimates)
        near(own.estimate, g)


STEPS = 6


def draws(workers, shapes, dtype="float32", steps=STEPS, seed=0):
    rng = np.random.default_rng([seed, workers])
    draw = lambda shape: jnp.asarray(rng.normal(size=(workers, *shape)), dtype)
    return [{name: draw(shape) for name, shape in shapes.items()} for _ in range(steps)]


@pytest.mark.parametrize("momentum", [0.9, *some([None], [])])
@pytest.mark.parametrize("workers", some((3, 8), (3,)))
@pytest.mark.parametrize("dtype", ["bfloat16", *some(["float32"], [])])
def test_equal_to_the_reference(dtype, workers, momentum):
    """Top-k of an odd number of elements. Gradients and updates may be narrow, states are not."""
    shapes = {"kernel": (7, 9), "bias": (5,)}
    steps = draws(workers, shapes, dtype)
    reducer = reducers.TopK(6 / 63, selection="exact")
    tx = ef21_sgdm(reducer, momentum=momentum, is_dense=is_bias)
    params = jax.tree.map(lambda x: x[0], steps[0])
    history, (_, state) = train(tx, params, workers, steps)
    eta = 1 - (momentum or 0)
    for name, compress in (("kernel", lambda x: top_k(x, 6)), ("bias", lambda x: x)):
        g = [np.asarray(step[name], np.float64).reshape(workers, -1) for step in steps]
        expected = list(reference(g, eta, compress))
        for updates, (total, _, _) in zip(history, expected):
            assert updates[name].dtype == dtype
            precision = {} if dtype == "float32" else {"rtol": 2**-8, "atol": 1e-5}
            close(np.asarray(updates[name], np.float64).ravel(), total, **precision)
        total, momenta, estimates = expected[-1]
        close(rows(state.momentum[name]), momenta)
        close(flat(state.estimate[name]), total)
        if name == "kernel":
            close(rows(state.momentum[name]) - rows(state.feedback.residual[name]), estimates)
    check_law(state)


CONTRACTIONS = {
    # "exact" picks the same few elements, and compiles in half the time.
    "spardl": reducers.SparDL(0.05, selection="exact"),
    "quantized": reducers.Quantized(quantize.QSGD(2, 64), rounding="nearest"),
    "ok_topk": contrib.OkTopk(0.05),
    "powersgd": reducers.PowerSGD(2, min_compression_rate=1.0),
    "sketched_sgd": reducers.SketchedSGD(k=37, rows=3, cols=37, oversampling=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", some(CONTRACTIONS, ["spardl"]))
def test_the_law_with_any_reducer(name):
    """Gradients that stay the same arrive in full, though a few per cent are sent at a time."""
    workers, shapes = 3, {"kernel": (20, 31), "bias": (5,)}
    tx = ef21_sgdm(CONTRACTIONS[name], momentum=0.5, is_dense=is_bias)
    params = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    noisy, lasting = draws(workers, shapes, steps=5), draws(workers, shapes, steps=1, seed=1)[0]

    @functools.partial(run_on_workers, mesh=workers, batch_argnums=(1, 2))
    def run(state, noisy, lasting):
        first = lambda tree: jax.tree.map(lambda x: x[0], tree)
        step = lambda state, g: tx.update(g, state)[::-1]
        state, _ = jax.lax.scan(step, state, jax.tree.map(lambda x: x[0], noisy))
        begun = state
        lasting = first(lasting)
        state, updates = jax.lax.scan(lambda s, _: step(s, lasting), state, length=150)
        return begun, state, jax.tree.map(lambda x: x[-1], updates)

    stacked = jax.tree.map(lambda *x: jnp.stack(x, axis=1), *noisy)
    begun, state, updates = run(shard(tx.init(params), workers), stacked, lasting)
    for each in (begun, state):
        check_law(each, rtol=1e-4, atol=1e-5)
    for leaf in shapes:
        np.testing.assert_array_equal(updates[leaf], state.estimate[leaf])
        wanted = np.asarray(lasting[leaf], np.float64).mean(0)
        error = np.linalg.norm(np.asarray(updates[leaf]) - wanted) / np.linalg.norm(wanted)
        assert error < 0.05, error
    report = jaxsparse.diagnose
    found = run_on_workers(report, workers, batch_argnums=())(begun)
    own = np.asarray(begun.feedback.residual["kernel"].value, np.float64).reshape(workers, -1)
    close(found.residual_norm, np.sqrt((own**2).sum(1).mean()))


@pytest.mark.slow
def test_everything_sent_is_momentum_of_the_mean_gradient():
    shapes = {"kernel": (7, 9), "bias": (5,)}
    steps = draws(3, shapes)
    tx = optax.inject_hyperparams(ef21_sgdm, static_args=("reducer", "is_dense"))(
        reducers.TopK(1.0),
        momentum=optax.piecewise_constant_schedule(0.8, {3: 0.0}),
        is_dense=is_bias,
    )
    params = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    with jax.numpy_dtype_promotion("standard"):  # Optax's schedules need it
        history, _ = train(tx, params, 3, steps)
    for name in shapes:
        means = [np.asarray(step[name], np.float64).mean(0) for step in steps]
        momentum = means[0]
        for i, (updates, mean) in enumerate(zip(history, means)):
            eta = 1.0 if i in (0, 3, 4, 5) else 0.2
            momentum = momentum + eta * (mean - momentum)
            close(updates[name], momentum)


PARAMS = {
    "kernel": jnp.zeros((25, 24), jnp.bfloat16),
    "scale": jnp.ones(()),
    "bias": jnp.zeros(3, jnp.float16),
}


@functools.cache
def compiled_step():
    tx = optax.chain(ef21_sgdm(reducers.TopK(0.1), is_dense=is_bias), optax.sgd(0.1))

    def loss(p, batch):
        return batch.mean() * sum(x.astype(jnp.float32).sum() for x in jax.tree.leaves(p))

    step = trainer(tx, lambda p, batch: jax.grad(loss)(local(p), batch), extra=1)
    step = chex.assert_max_traces(step, n=2)  # one of them for the check
    return run_on_workers(step, mesh(3)), shard((PARAMS, tx.init(PARAMS)), mesh(3))


@pytest.mark.slow
def test_types_are_kept_and_replicas_agree():
    run, state = compiled_step()
    kinds = lambda state: (jax.tree.structure(state), [*map(jax.typeof, jax.tree.leaves(state))])
    before = kinds(state)
    for i in range(3):
        state = run(state, jnp.arange(6.0) * i)
        check_law(state[1][0])
        jaxsparse.check_replicas(state)
    assert kinds(state) == before
    assert np.any(state[1][0].feedback.residual["kernel"].value)


def test_what_was_finite_of_a_skipped_step_waits():
    run, state = compiled_step()
    before = run(state, jnp.arange(1.0, 7.0))
    for bad in (jnp.nan, -jnp.inf):
        after = run(before, jnp.arange(1.0, 7.0).at[3].set(bad))
        skipped = after[1][0].feedback.skipped
        assert skipped == before[1][0].feedback.skipped + 1
        jax.tree.map(np.testing.assert_array_equal, after[0], before[0])
        was, now = before[1][0], after[1][0]
        jax.tree.map(np.testing.assert_array_equal, now.estimate, was.estimate)
        assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(now))
        check_law(now)
    healthy = run(after, jnp.arange(1.0, 7.0))
    assert np.any(healthy[0]["bias"] != after[0]["bias"])
    check_law(healthy[1][0])


@pytest.mark.slow
def test_other_numbers_of_workers_keep_the_law():
    shapes = {"kernel": (7, 9), "bias": (5,)}
    params = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    tx = ef21_sgdm(reducers.TopK(0.1, selection="exact"), is_dense=is_bias)
    state = shard(tx.init(params), 4)
    for workers in (4, 3):
        for other in (8, 1, workers):
            state = reshard(state, other)
            check_law(state)
        estimate = flat(state.estimate)
        run = stepped(tx, workers)
        for gradients in draws(workers, shapes, steps=2):
            updates, state = run(gradients, state)
        check_law(state)
        assert np.any(estimate != flat(updates))
    assert int(state.steps) == 4  # kept, so no first gradient becomes the momentum again


def on_mesh(where, is_manual=False, **options):
    tx = ef21_sgdm(reducers.TopK(0.1), axis_name="hosts", is_dense=is_bias, momentum=0.5, **options)
    run = stepped(tx, where, "hosts", is_manual)
    return run, tx, put(where, {name: jnp.zeros(shape) for name, shape in SHAPES.items()})


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 2, 2), (2, 4)], ids=str)
@pytest.mark.parametrize("is_manual", [False, True])
def test_on_meshes_with_inner_axes(shape, is_manual):
    where = inner_mesh(shape)
    run, tx, params = on_mesh(where, is_manual)
    state = shard(tx.init(params), where, "hosts")
    start = [x.sharding for x in jax.tree.leaves(state)]
    momenta = dict.fromkeys(SHAPES, None)
    for seed in range(2):
        grads = mesh_gradients(where.shape["hosts"], seed)
        updates, state = run(put(where, grads, "hosts"), state)
        for name, g in grads.items():
            first = momenta[name] is None
            momenta[name] = g if first else 0.5 * (momenta[name] + g)
            np.testing.assert_allclose(state.momentum[name].value, momenta[name], atol=1e-3)
            np.testing.assert_array_equal(updates[name], state.estimate[name])
    check_law(state, atol=1e-2)
    jaxsparse.check_replicas(state)
    assert np.any(state.feedback.residual["both"].value)
    for x, sharding in zip(jax.tree.leaves(state), start):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)


def test_a_state_that_init_spreads_is_the_same():
    where = inner_mesh((2, 2, 2))
    _, tx, params = on_mesh(where)
    eager = shard(tx.init(params), where, "hosts")
    _, given, _ = on_mesh(where, mesh=where, specs=SPECS)
    for state in (given.init(params), jax.jit(given.init)(params)):
        assert jax.tree.structure(state) == jax.tree.structure(eager)
        for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(eager)):
            assert x.shape == y.shape, path
            assert x.sharding.is_equivalent_to(y.sharding, x.ndim), path


def test_misuse_names_the_argument():
    for settings, message in (
        ({"reducer": jaxsparse.top_k(0.1)}, "reducer=.* must be a reducer, such as jaxsparse.red"),
        (
            {"reducer": reducers.Quantized()},
            "does not conserve sums, so that .*rounding to nearest",
        ),
        ({"reducer": contrib.GTopK(0.1, residuals="published")}, "does not conserve sums"),
        ({"momentum": 1.0}, r"momentum=1.0 must lie in \[0, 1\)"),
    ):
        with pytest.raises(ValueError, match=message):
            ef21_sgdm(**{"reducer": reducers.TopK(0.1)} | settings)
    tx = ef21_sgdm(reducers.TopK(0.1), axis_name=None, **ALL)
    with pytest.raises(ValueError, match=r"momentum has the leaves .*\(3,\).*\(4,\)"):
        tx.update(jnp.zeros(4), tx.init(jnp.zeros(3)))
