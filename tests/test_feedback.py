"""Error feedback: the worked example, and compositions with Optax."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import running
from supports import flat
from training import stepped, train, trainer
from workers import mesh, on_workers, some

import jaxsparse
from jaxsparse import PerWorker, codecs, contrib, local, shard
from jaxsparse.arrays import layout
from jaxsparse.feedback import step
from jaxsparse.feedback.plan import plan_of
from jaxsparse.outer.parallel import run_on_workers


def padded(rows, size=601):
    return jnp.pad(jnp.asarray(rows, jnp.float32), ((0, 0), (0, size - len(rows[0]))))


# Sketched-SGD's Alg. 3 in two steps for two workers, worked out by hand.
STEPS = [[[4, 1, 0, 3], [4, 0, -2, -3]], [[1, 1, 0, 0], [0, 1, -2, 1]]]
UPDATES = [[4, 0, 0, 0], [0, 0, -2.9, 0]]
RESIDUALS = [[1, 2.9, 0, 5.7], [0, 1, 0, -4.7]]
DENSE_UPDATES = [1.0, 1.9]

METHODS = {
    "true_top_k": functools.partial(jaxsparse.true_top_k, k=1),
    # Wide enough that the heaviest coordinate is found for certain.
    "sketched": functools.partial(jaxsparse.sketched_sgd, k=1, cols=97, rows=5),
}


@pytest.mark.parametrize(
    "case",
    some(
        [(method, simulated) for method in METHODS for simulated in (True, False)],
        [("sketched", False)],
    ),
    ids=str,
)
def test_worked_example(case):
    method, simulated = case
    tx = METHODS[method](momentum=0.9, is_dense=lambda path, shape: "bias" in path)
    params = {"w": jnp.zeros(601), "bias": jnp.zeros(2)}
    gradients = [{"w": padded(rows), "bias": jnp.ones((2, 2))} for rows in STEPS]
    history, (_, state) = train(tx, params, 2, gradients, 2 if simulated else mesh(2))
    for updates, expected, dense in zip(history, UPDATES, DENSE_UPDATES):
        np.testing.assert_allclose(updates["w"][:4], expected, rtol=1e-6)
        assert not np.any(updates["w"][4:])
        np.testing.assert_allclose(updates["bias"], [dense, dense], rtol=1e-6)
    np.testing.assert_allclose(flat(state.residual)[:, :4], RESIDUALS, rtol=1e-6)


def test_many_steps_match_the_oracle():
    gradients = np.random.default_rng(3).normal(size=(12, 3, 40)).astype(np.float32)
    tx = jaxsparse.true_top_k(6, momentum=0.8, is_dense=lambda path, shape: False)
    params = jnp.zeros(40)
    history, (_, state) = train(tx, params, 3, gradients)
    oracle = list(reference.alg3_with_exact_selection(gradients.astype(np.float64), 0.8, 6))
    for updates, (expected, _, _) in zip(history, oracle):
        np.testing.assert_allclose(updates, expected, atol=1e-5)
    _, u, v = oracle[-1]
    np.testing.assert_allclose(flat(state.momentum), u, atol=1e-5)
    np.testing.assert_allclose(flat(state.residual), v, atol=1e-5)


def test_dense_momentum_is_optax_trace():
    params = {"w": jnp.zeros((4, 3)), "b": jnp.zeros(3)}
    rng = np.random.default_rng(0)
    gradients = [
        jax.tree.map(lambda p: jnp.asarray(rng.normal(size=(3, *p.shape)), jnp.float32), params)
        for _ in range(5)
    ]
    ours, _ = train(jaxsparse.dense(momentum=0.9), params, 3, gradients)
    plain = optax.trace(0.9)
    state = plain.init(params)
    for updates, gradient in zip(ours, gradients):
        mean = jax.tree.map(lambda g: g.mean(0), gradient)
        expected, state = plain.update(mean, state)
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), updates, expected
        )


def sketched(**settings):
    settings = {"k": 5, "cols": 40, "rows": 3, "momentum": 0.9, **settings}
    return jaxsparse.sketched_sgd(**settings)


PARAMS = {
    "w": jnp.asarray(np.random.default_rng(0).normal(size=(40, 32)) / 6, jnp.float32),
    "b": jnp.zeros(7),
}
BATCH = np.linspace(-1, 2, 12 * 3, dtype=np.float32).reshape(12, 3)


def loss(params, batch):
    hidden = jnp.tanh(batch @ params["w"][:3]) @ params["w"][3:35]
    return jnp.mean((hidden[:, :7] + params["b"][None] - 1) ** 2)


def parallel_step(tx, **settings):
    return jax.jit(trainer(tx, jaxsparse.grad(loss)), **settings)


def sharded(tx):
    return shard((PARAMS, tx.init(PARAMS)), mesh(3))


@pytest.mark.slow
def test_injected_momentum_can_be_changed_between_steps():
    given = {"compression": 3, "oversampling": 2, "bucket_size": 700, "axis_name": "data"}
    make = lambda momentum: jaxsparse.sketched_sgd(**given, momentum=momentum)
    injected = optax.inject_hyperparams(make)(momentum=0.9)
    run, state = parallel_step(injected), sharded(injected)
    for _ in range(2):
        state = run(state, BATCH)
    params, (feedback, hyperparams) = state[0], (state[1].inner_state, state[1].hyperparams)
    assert set(hyperparams) == {"momentum"}

    def after(momentum):
        changed = {"momentum": jnp.full_like(hyperparams["momentum"], momentum)}
        params, opt_state = run((state[0], state[1]._replace(hyperparams=changed)), BATCH)
        return params, opt_state.inner_state

    plain = parallel_step(jaxsparse.sketched_sgd(**given, momentum=0.5))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7),
        after(0.5),
        plain((params, feedback), BATCH),
    )
    for name in PARAMS:
        assert np.any(np.abs(after(0.9)[0][name] - after(0.5)[0][name]) > 1e-3), name


def test_buckets_share_the_budget_and_lose_nothing():
    tx = jaxsparse.true_top_k(10, bucket_size=300, is_dense=lambda path, shape: False)
    params = {"a": jnp.zeros((20, 30)), "b": jnp.zeros(401)}
    rng = np.random.default_rng(0)
    gradient = jax.tree.map(
        lambda p: jnp.asarray(2 * rng.integers(-50, 50, (2, *p.shape)), jnp.float32), params
    )
    (updates,), (_, state) = train(tx, params, 2, [gradient])
    assert len(state.reducers) == 4  # buckets of 251, 250, 250 and 250 elements
    assert state.info.delivered == 10
    sum_of = np.concatenate([updates["a"].ravel(), updates["b"]])
    kept = flat(state.residual).sum(0)
    sent = np.concatenate([gradient["a"].reshape(2, -1), gradient["b"]], axis=1).sum(0)
    np.testing.assert_array_equal(2 * sum_of + kept, sent)


@pytest.mark.parametrize("dtype", some([jnp.bfloat16, jnp.float16], [jnp.float16]))
def test_what_rounding_to_half_precision_takes_stays_in_the_residual(dtype):
    tx = jaxsparse.true_top_k(64, is_dense=lambda path, shape: False)
    rng = np.random.default_rng(0)
    gradient = jnp.asarray(rng.normal(size=(3, 64)), dtype).at[0, 5].set(2e-7)
    history, (_, state) = train(tx, jnp.zeros(64, dtype), 3, [gradient] * 20)
    assert all(updates.dtype == dtype for updates in history)
    delivered = 3 * np.sum(np.asarray(history, np.float64), axis=0)
    kept = np.asarray(flat(state.residual), np.float64).sum(0)
    sent = 20 * np.asarray(gradient, np.float64).sum(0)
    np.testing.assert_allclose(delivered + kept, sent, rtol=1e-5, atol=1e-5)


def test_an_update_beyond_float16_is_delivered_in_parts():
    tx = jaxsparse.true_top_k(8, is_dense=lambda path, shape: False, axis_name=None)
    params = jnp.zeros(8, jnp.float16)
    tx = optax.chain(optax.scale(1.0), tx)
    state = tx.init(params)
    total = 0.0
    update = jax.jit(tx.update)
    for _ in range(4):
        updates, state = update(jnp.full(8, 6e4, jnp.float16), state)
    state = (state[0], state[1]._replace(residual={"parameters": PerWorker(jnp.full((1, 8), 1e5))}))
    for _ in range(3):
        updates, state = update(jnp.zeros(8, jnp.float16), state)
        assert np.all(np.isfinite(updates))
        total += float(updates[0])
    assert total + float(flat(state[1].residual)[0, 0]) == 1e5


# Shapes with 600 elements in all.
LEAVES = {"a": (3, 5, 7), "b": (39,), "c": (1,), "d": (16, 16), "e": (1, 2, 99), "f": ()}


@pytest.mark.slow
@pytest.mark.parametrize("bucket_size", some([None, 251], [None]))
@pytest.mark.parametrize("density", some([0.01, 0.05, 0.2], [0.05]))
def test_several_leaves_are_exchanged_as_one(density, bucket_size):
    """Their entries are few, few for a single leaf, or many. One step in between is skipped."""
    top = jaxsparse.reducers.TopK(density, codec=codecs.Packed())  # this codec rounds
    tx = jaxsparse.exchange(top, momentum=0.5, bucket_size=bucket_size, is_dense=lambda *_: False)
    rows = np.random.default_rng(0).integers(-3000, 3000, (2, 5, 600)).astype(np.float32)
    rows[1, 2, 333] = np.nan
    stops = np.cumsum([math.prod(shape) for shape in LEAVES.values()])[:-1]
    parts = zip(LEAVES.items(), np.split(rows, stops, axis=2))
    trees = {name: part.reshape(2, 5, *shape) for (name, shape), part in parts}

    def run(grads):
        def step(state, grads):
            updates, state = tx.update(grads, state)
            return state, (updates, state.residual, state.momentum, state.info, state.skipped)

        return jax.lax.scan(step, tx.init(jax.tree.map(lambda g: g[0], grads)), grads)[1]

    joined = lambda part: flat(part, 2).reshape(2, 5, -1)
    several, one = (
        [joined(part) for part in on_workers(run, 2, "vmap")(grads)] for grads in (trees, rows)
    )
    jax.tree.map(np.testing.assert_array_equal, several, one)
    updates, residual, momentum, _, skipped = one
    assert skipped[0, :, 0].tolist() == [0, 0, 1, 1, 1]
    came = 0.5 * momentum[:, 1] + np.where(np.isfinite(rows[:, 2]), rows[:, 2], 0)
    waits = residual[:, 1].sum(0) + came.sum(0)
    np.testing.assert_allclose(residual[:, 2].sum(0), waits, rtol=1e-5, atol=1e-2)
    assert not updates[:, 2].any()
    assert updates[:, 3].any()
    assert np.all((momentum[:, 0] == 0).sum(1) >= round(density * 600))


@pytest.mark.parametrize("momentum", some([None, 0.9], [0.9]))
@pytest.mark.parametrize("method", [jaxsparse.dense, functools.partial(jaxsparse.true_top_k, 3)])
def test_a_sum_that_overflows_is_never_applied(method, momentum):
    tx = method(momentum=momentum)
    params = {"w": jnp.zeros((40, 30))}
    gradients = [{"w": jnp.full((2, 40, 30), value)} for value in (1.0, 3e38, 3e38, 1.0)]
    history, (_, state) = train(tx, params, 2, gradients)
    for leaf in jax.tree.leaves((history, state)):
        assert np.all(np.isfinite(leaf))


BUCKETED = {
    "top_k": lambda: jaxsparse.top_k(0.05, is_dense=lambda *_: False),
    "omni_reduce": lambda: jaxsparse.omni_reduce(0.2, block_size=13, is_dense=lambda *_: False),
}


@pytest.mark.parametrize("name", some(BUCKETED, ["top_k"]))
def test_by_default_buckets_have_whole_leaves(monkeypatch, name):
    """Also of blocks that no leaf is a multiple of. Parts, exchanged between steps, have one."""
    monkeypatch.setattr(layout, "usual_bucket_size", lambda size: 100)
    tx, sizes = BUCKETED[name](), {"a": (9, 7), "b": (30,), "c": (17, 11), "d": (40,)}
    rng = np.random.default_rng(0)
    draw = lambda shape: jnp.asarray(rng.integers(-9, 9, (2, *shape)), jnp.float32)
    params = {name: jnp.zeros(shape) for name, shape in sizes.items()}
    gradients = [{name: draw(shape) for name, shape in sizes.items()} for _ in range(3)]
    buckets = plan_of(params, tx.settings, None).buckets
    assert [sorted(bucket.leaves) for bucket in buckets] == [[0, 1], [2], [3]]
    assert len(plan_of(params, tx.of_parts(params).settings, None).buckets) == 1
    history, (_, state) = train(tx, params, 2, gradients)
    for name in sizes:
        came = sum(np.asarray(g[name]).sum(0) for g in gradients)
        went = 2 * sum(np.asarray(updates[name]) for updates in history)
        left = np.asarray(state.residual[name].value).sum(0)
        np.testing.assert_allclose(went + left, came, atol=1e-4)
        assert left.any()
        assert went.any()


LOSSY = {
    "qsgd": lambda: jaxsparse.qsgd(2, scale="l2"),
    "s2_reducer": lambda: jaxsparse.s2_reducer(0.5, block_size=32),
    "spardl": lambda: jaxsparse.spardl(0.05, residuals="local"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", some(LOSSY, ["qsgd"]))
def test_what_waits_of_skipped_steps_does_not_grow(name):
    """What such a reducer delivers is not what its residual lacks: it takes back what it had."""
    params = {"w": jnp.zeros((40, 30))}
    rows = np.random.default_rng(0).normal(size=(3, 40, 30)).astype(np.float32)
    rows[1, 2, 3] = np.nan
    _, (_, state) = train(LOSSY[name](), params, 3, [{"w": jnp.asarray(rows)}] * 4)
    waits = 4 * np.where(np.isfinite(rows), rows, 0)
    np.testing.assert_allclose(np.asarray(state.residual["w"].value), waits, rtol=1e-6)
    assert int(np.asarray(state.skipped).max()) == 4


@pytest.mark.parametrize("broken", [False, True])
def test_large_uncompressed_leaves_travel_alone(monkeypatch, broken):
    """Small ones travel with the next. What is not finite on one worker skips the step on all."""
    monkeypatch.setattr(step, "_LEAST", 100)
    tx, sizes = jaxsparse.dense(), {"a": 70, "b": 40, "c": 130, "d": 3, "e": 90}
    rng = np.random.default_rng(0)
    rows = {name: rng.normal(size=(2, n)).astype(np.float32) for name, n in sizes.items()}
    if broken:
        rows["e"][1, 89] = np.inf
    params = {name: jnp.zeros(n) for name, n in sizes.items()}
    updates, state = on_workers(lambda g: tx.update(g, tx.init(g)), 2, "vmap")(rows)
    assert state.skipped.tolist() == [int(broken)] * 2
    for name, x in rows.items():
        mean = np.zeros(sizes[name]) if broken else x.mean(0)
        np.testing.assert_allclose(updates[name][0], mean, rtol=1e-6)
    moved = jaxsparse.traffic.traced_bytes(tx, params, 2)
    assert sorted(each.shapes for each in moved.collectives) == [
        ("f32[110]",),
        ("f32[130]",),
        ("f32[93]",),
    ]


ODD = (100, 1003)  # the number of elements is no multiple of 8


@functools.cache
def two_workers(simulated):
    tx = jaxsparse.top_k(0.01, momentum=0.9, bucket_size=60_000)  # two halves of one leaf
    where = 2 if simulated else mesh(2)
    return stepped(tx, where), shard(tx.init({"w": jnp.zeros(ODD)}), where)


@pytest.mark.slow
@pytest.mark.parametrize("position", some([0, 50_149, 100_299], [100_299]))
@pytest.mark.parametrize("simulated", some([False, True], [False]))
def test_one_nan_in_many_elements_skips_the_step(position, simulated):
    """XLA's maximum on CPU can lose a NaN, the more surely the longer the vector is."""
    healthy = {"w": jnp.ones((2, *ODD))}
    broken = {"w": healthy["w"].at[(1, *np.unravel_index(position, ODD))].set(jnp.nan)}
    step, state = two_workers(simulated)
    _, before = step(healthy, state)
    updates, after = step(broken, before)
    assert after.skipped == 1
    assert not np.any(updates["w"])
    came = 0.9 * before.momentum["w"].value + np.nan_to_num(broken["w"])
    waits = before.residual["w"].value.sum(0) + came.sum(0)
    np.testing.assert_allclose(after.residual["w"].value.sum(0), waits, rtol=1e-5)


LOWERED = """
import jax, jax.numpy as jnp, jaxsparse
from jaxsparse.outer.parallel import run_on_workers
tx = jaxsparse.top_k(0.1, momentum=0.9)
params, grads = ({name: jnp.zeros((n, 30)) for name in "abcdefgh"} for n in (40, 80))
step = run_on_workers(lambda state, grads: tx.update(grads, state), 2)
print(jax.jit(step).lower(jaxsparse.shard(tx.init(params), 2), grads).as_text())
"""


@pytest.mark.slow
def test_processes_lower_the_same_program():
    """Strings hash differently in each process, so none may go through names in a set's order."""
    texts = []
    for seed in "12":
        settings = running.QUICK | {"PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"}
        texts.append(running.python("-c", LOWERED, settings=settings))
    assert len(texts[0]) > 10_000
    assert texts[0] == texts[1]


SPARSE = {
    "top_k": jaxsparse.top_k,
    "gtopk": contrib.gtopk,
    "ok_topk": contrib.ok_topk,
    "spardl": jaxsparse.spardl,
    "sparcml": lambda density, **settings: jaxsparse.sparcml(
        50, 500, algorithm="split_allgather", **settings
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    some(
        [(name, codec) for name in SPARSE for codec in (codecs.COO, codecs.Packed())],
        [("sparcml", codecs.COO)],
    ),
    ids=str,
)
def test_finite_values_whose_sum_overflows_stay_in_residuals(case):
    name, codec = case
    tx = SPARSE[name](0.1, codec=codec)
    params = {"w": jnp.zeros((40, 30))}
    huge = jnp.zeros((4, 40, 30)).at[:2, 0, 0].set(3e38)
    history, (_, state) = train(tx, params, 4, [{"w": huge}, {"w": jnp.ones((4, 40, 30))}])
    assert state.skipped == 0
    for leaf in jax.tree.leaves((history, state)):
        assert np.all(np.isfinite(leaf))
    assert float(flat(state.residual)[0, 0]) > 1e38


@pytest.mark.slow
@pytest.mark.parametrize("delay", some([0, 1], [0]))
def test_momentum_without_uncompressed_elements(delay):
    where = mesh(2)
    params = {"w": jnp.zeros(40), "nothing": jnp.zeros((0, 3))}
    tx = jaxsparse.exchange(
        jaxsparse.reducers.TopK(0.1),
        momentum=0.5,
        delay=delay,
        is_dense=lambda path, _: "no" in path,
    )
    state = shard(tx.init(params), where)
    assert all(leaf.size for leaf in jax.tree.leaves(state))  # Orbax saves no empty arrays

    def step(grads, state):
        return tx.update({"w": grads[0], "nothing": local(params["nothing"])}, state)

    step = run_on_workers(step, where, batch_argnums=0)
    for _ in range(2):
        updates, state = step(jnp.ones((2, 40)), state)
    assert jnp.count_nonzero(updates["w"]) == 4


def test_momentum_of_the_mean_does_not_overflow_for_good():
    """It overflows with finite gradients: 3e38 + 3e38 / 2 is more than float32 holds."""
    tx = jaxsparse.dense(momentum=0.5, axis_name=None)
    state, update = tx.init({"w": jnp.zeros(3)}), jax.jit(tx.update)
    largest = jnp.finfo(jnp.float32).max
    for _ in range(3):
        updates, state = update({"w": jnp.float32([3e38, -3e38, 1])}, state)
    np.testing.assert_array_equal(updates["w"], jnp.float32([largest, -largest, 1.75]))
    for _ in range(3):
        updates, state = update({"w": jnp.zeros(3)}, state)
    np.testing.assert_allclose(updates["w"], jnp.float32([largest, -largest, 1.75]) / 8)


def test_a_skipped_step_takes_its_means_back_beside_16_bit_leaves():
    """All of them, and not what rounding to the leaves' dtype would have left."""
    tx = jaxsparse.exchange(jaxsparse.reducers.TopK(0.5), axis_name=None, is_dense=lambda *_: False)
    state = tx.init({"w": jnp.zeros(4, jnp.bfloat16)})
    fine = jnp.float32([[1 / 3, 0.1, 1.7, -2.1]])
    state = state._replace(residual={"w": PerWorker(fine)})
    _, after = jax.jit(tx.update)({"w": jnp.full(4, jnp.nan, jnp.bfloat16)}, state)
    np.testing.assert_array_equal(flat(after.residual), flat(state.residual))


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", some(["split_allgather", "ring"], ["split_allgather"]))
def test_a_partial_sum_that_overflows_and_finds_no_room_does_not_stay_inf(algorithm):
    tx = jaxsparse.sparcml(4, 8, algorithm=algorithm, is_dense=lambda *_: False)
    step = stepped(tx, 2)
    state = shard(tx.init({"w": jnp.zeros(32)}), 2)
    for value in (3e38, 0.0, 0.0):
        updates, state = step({"w": jnp.full((2, 32), value)}, state)
        assert np.isfinite(updates["w"]).all()
        assert np.isfinite(flat(state.residual)).all()
    assert int(state.skipped) == 0


@pytest.mark.slow
@pytest.mark.parametrize("delay", some([0, 1], [0]))
def test_a_huge_gradient_does_not_stop_momentum_for_ever(delay):
    """Residual and momentum of the first step add up beyond float32 in all later ones."""
    tx = jaxsparse.top_k(0.1, momentum=0.9, delay=delay, is_dense=lambda *_: False)
    step = stepped(tx, 2)
    state = shard(tx.init({"w": jnp.zeros(32)}), 2)
    gradients = jnp.zeros((4, 2, 32)).at[0, :, 5].set(2e38).at[2:, :, 9].set(1.0)
    delivered = 0
    for gradient in gradients:
        updates, state = step({"w": gradient}, state)
        delivered += updates["w"]
        for leaf in jax.tree.leaves((updates, state)):
            assert np.isfinite(leaf).all()
    assert int(state.skipped) == 0
    np.testing.assert_allclose(delivered[9], 1 if delay else 2, rtol=1e-6)  # masked once sent
