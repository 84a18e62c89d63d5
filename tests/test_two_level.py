"""Meshes with a slow axis, which is compressed over, and a fast one, which is not."""

import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract import CASES, conserves, rounds
from running import run as run_example
from two_level import (
    AXES,
    STEPS,
    TREES,
    H,
    L,
    P,
    W,
    bucket_sizes,
    check_conservation,
    flat,
    gradients,
    grid,
    on_grid,
    run,
    whole,
)
from workers import QUICK_COMPILE, few, some

from jaxsparse import PerWorker, Stages, data_parallel, local, shard, specs as specs_of, traffic
from jaxsparse.feedback import Axes, error_feedback, partition
from jaxsparse.feedback.exchange import saturating_sum, total
from jaxsparse.feedback.plan import Plan
from jaxsparse.reducers.base import info
from jaxsparse.systems import Dense, SparDL, TopK, dense, spardl
from jaxsparse.training.marks import Sharded

CONSERVING = [name for name, case in CASES.items() if conserves(case.reducer)]


@pytest.mark.parametrize(
    "name",
    some(CONSERVING, ["random_k"]),  # with a state, and quick to compile
)
@pytest.mark.parametrize("check_vma", some([True, False], [True]))
def test_nothing_is_lost_between_hosts(name, check_vma):
    reducer = CASES[name].reducer
    results = run(reducer, check_vma=check_vma)
    check_conservation(*results, 601, exact=not rounds(reducer))
    # What is equal on all hosts is a device's own all the same: shards differ.
    assert all(
        isinstance(x, PerWorker)
        for x in jax.tree.leaves(results[2].reducers, is_leaf=lambda n: isinstance(n, PerWorker))
    )


def oracle(reducer, size, momentum, grads):
    """Each shard exchanged for itself by hosts whose gradients are the mean over the fast axis."""
    means = flat(grads, 2).reshape(H, L, STEPS, -1).mean(1).astype(np.float32)
    updates, residuals = [], []
    for d in bucket_sizes(size):
        unit = L * reducer.alignment
        length = -(-d // unit) * reducer.alignment
        own = np.pad(means[..., :d], ((0, 0), (0, 0), (0, L * length - d)))
        own = own.reshape(H, STEPS, L, length).transpose(2, 0, 1, 3)
        tx = error_feedback(
            reducer.split((length,) * L)[0],
            axis_name="hosts",
            momentum=momentum,
            is_dense=lambda path, shape: False,
        )

        def one(g, tx=tx):
            state, updates = jax.lax.scan(lambda s, g: tx.update(g, s)[::-1], tx.init(g[0]), g)
            return updates, PerWorker.unwrap(state.residual[0])

        hosts = jax.vmap(one, axis_name="hosts", axis_size=H)
        update, residual = jax.jit(jax.vmap(hosts), compiler_options=QUICK_COMPILE)(own)
        updates.append(update[:, 0].transpose(1, 0, 2).reshape(STEPS, -1)[:, :d])
        residuals.append(residual.transpose(1, 0, 2).reshape(H, -1)[:, :d])
        means = means[..., d:]
    return np.concatenate(updates, 1), residuals


ORACLES = [
    ("omni_reduce_little_room", 601, 0.5),
    ("dense", 1030, 0.5),
    ("spardl", 1030, None),
    ("ok_topk", 601, 0.5),
    ("s2_reducer", 601, 0.5),
    ("true_top_k", 601, 0.5),
    ("top_k", 3, None),
    ("sketched_sgd", 601, 0.5),
]


@pytest.mark.parametrize("case", some(ORACLES, ORACLES[:1]), ids=str)
def test_a_shard_is_exchanged_as_a_vector_of_its_own(case):
    name, size, momentum = case
    reducer = CASES[name].reducer
    grads, updates, state = run(reducer, size, momentum)
    expected, residuals = oracle(reducer, size, momentum, grads)
    np.testing.assert_array_equal(flat(updates, 1), expected)
    for node, residual, d in zip(state.residual, residuals, bucket_sizes(size)):
        np.testing.assert_array_equal(whole(node.value, d), residual)
    if momentum is not None and reducer.needs_zeros:
        assert state.momentum[0].value.shape == state.residual[0].value.shape
    expected = np.asarray(grads["bias"], np.float64).mean(0)
    for before, after in zip(range(STEPS - 1), range(1, STEPS)):
        expected[after] += (momentum or 0) * expected[before]
    np.testing.assert_array_equal(updates["bias"], expected)


def test_a_value_that_is_not_finite_skips_the_step_on_all_devices():
    reducer = CASES["random_k"].reducer
    grads = gradients(TREES[601])
    for name, index in (("kernel", (5, 1, 24, 23)), ("bias", (6, 1, 3))):
        broken = grads | {name: grads[name].at[index].set(jnp.nan)}
        _, updates, state = run(reducer, grads=broken)
        assert state.skipped == 1
        for leaf in (updates["kernel"], updates["bias"]):
            assert not np.any(leaf[1])
            assert np.any(leaf[0])
            assert np.any(leaf[2])
            assert np.all(np.isfinite(leaf))


def compiled(tx, shapes, **settings):
    params = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    grads = {name: jax.ShapeDtypeStruct((W, *shape), jnp.float32) for name, shape in shapes.items()}
    state = jax.eval_shape(on_grid(tx.init, batch_argnums=()), params)

    def step(state, grads):
        updates, state = tx.update(jax.tree.map(lambda g: g[0], grads), state)
        return PerWorker.wrap(updates), state

    return traffic.wire_bytes(on_grid(step, **settings).lower(state, grads).compile())


def test_the_slow_axis_carries_a_shard_and_the_fast_one_the_vector():
    d, n, k = 512 * 129, 129, 166
    tx = spardl(0.01, axis_name="hosts", dense_axis="local")
    sent = compiled(tx, {"kernel": (512, 129), "bias": (n,)})
    received = {c.op: c.received_bytes * c.count for c in sent.collectives}
    permutes = [c for c in sent.collectives if c.op == "collective-permute"]
    slow = sum(c.received_bytes * c.count for c in permutes)
    assert slow == 16 * k * (H - 1) / H  # SparDL's, of a shard of d / L elements
    assert received["reduce-scatter"] == received["all-gather"] == 4 * d * (L - 1) / L
    reduced = {c.shapes: c.group_size for c in sent.collectives if c.op == "all-reduce"}
    assert reduced == {(f"f32[{n + 1}]",): W, ("s32[2,2]",): L}  # dense and flag; counts


@pytest.mark.slow
def test_the_fast_axis_carries_nothing_of_shards():
    n, k = 129, 166
    sharded = error_feedback(SparDL(0.01), axis_name="hosts", dense_axis="local", sharded=True)
    sent = compiled(sharded, {"kernel": (128, 129), "bias": (n,)})
    on_fast = [c for c in sent.collectives if c.group_size == L]
    assert sum(c.payload_bytes for c in on_fast) <= 16
    permutes = [c for c in sent.collectives if c.op == "collective-permute"]
    assert sum(c.received_bytes * c.count for c in permutes) == 16 * k * (H - 1) / H


class Shards(NamedTuple):
    """What each device's gradient is, by kind of leaf."""

    kernel: Sharded  # compressed
    vector: Sharded  # uncompressed, and a shard all the same
    bias: jax.Array  # uncompressed, equal along the fast axis


@functools.cache
def sharded_runner(momentum, delay, check_vma=True):
    tx = partition(
        {"kernel": CASES["random_k"].reducer},
        axis_name="hosts",
        dense_axis="local",
        sharded=True,
        momentum=momentum,
        delay=delay,
    )
    params = Shards(Sharded(jnp.zeros((L * 25, 6))), Sharded(jnp.zeros(L * 3)), jnp.zeros(5))

    def step(state, gradients):
        own = jax.tree.map(lambda g: g[0], gradients)
        own = own._replace(bias=jax.lax.pmean(own.bias, "local"))
        state, updates = jax.lax.scan(lambda s, g: tx.update(g, s)[::-1], state, own)
        return PerWorker.wrap(updates), updates, state

    return on_grid(tx.init, batch_argnums=())(params), on_grid(step, check_vma=check_vma)


def sharded_gradients():
    rng = np.random.default_rng(0)
    draw = lambda *s: jnp.asarray(W * rng.integers(-50, 51, (W, STEPS, *s)), jnp.float32)
    return Shards(Sharded(draw(25, 6)), Sharded(draw(3)), draw(5))


@pytest.mark.parametrize("check_vma", some([True, False], [True]))
@pytest.mark.parametrize("momentum", some([None, 0.5], [0.5]))
def test_shards_of_parameters_lose_nothing_and_copies_agree(momentum, check_vma):
    state, steps = sharded_runner(momentum, 0, check_vma=check_vma)
    grads = sharded_gradients()
    each, updates, state = jax.device_get(steps(state, grads))
    for marked in jax.tree.leaves(each._replace(bias=None)):
        by_host = marked.reshape(H, -1)
        np.testing.assert_array_equal(by_host[0], by_host[1])
    np.testing.assert_array_equal(each.bias.value, np.broadcast_to(updates.bias, (W, STEPS, 5)))

    kernel = updates.kernel.value.reshape(L, STEPS, 150)
    residual = state.residual[0].value.reshape(H, L, 150).astype(np.float64)
    given = np.asarray(grads.kernel.value, np.float64).reshape(H, L, STEPS, 150)
    if momentum is None:
        np.testing.assert_array_equal(given.sum((0, 2)), H * kernel.sum(1) + residual.sum(0))
    else:
        assert state.dense_momentum.value.shape == (W, 3 + 5)
    assert state.info.delivered == np.count_nonzero(kernel[:, -1]) + L * 3 + 5
    vector = np.asarray(grads.vector.value, np.float64).reshape(H, L, STEPS, 3).mean(0)
    bias = np.asarray(grads.bias, np.float64).mean(0)
    for t in range(1, STEPS):
        vector[:, t] += (momentum or 0) * vector[:, t - 1]
        bias[t] += (momentum or 0) * bias[t - 1]
    np.testing.assert_array_equal(updates.vector.value.reshape(L, STEPS, 3), vector)
    np.testing.assert_array_equal(updates.bias, bias)
    broken = grads._replace(vector=Sharded(grads.vector.value.at[3, 1, 0].set(jnp.inf)))
    _, updates, after = jax.device_get(
        steps(sharded_runner(momentum, 0, check_vma=check_vma)[0], broken)
    )
    assert after.skipped == 1
    assert not np.any(updates.bias[1])
    assert not np.any(updates.kernel.value.reshape(L, STEPS, -1)[:, 1])


def test_delayed_shards_lose_nothing():
    state, steps = sharded_runner(None, 1)
    grads = sharded_gradients()
    _, updates, state = jax.device_get(steps(state, grads))
    assert not np.any(updates.kernel.value.reshape(L, STEPS, 150)[:, 0])
    by_host = lambda x, *s: np.asarray(x, np.float64).reshape(H, L, *s)
    kernel = updates.kernel.value.reshape(L, STEPS, 150).sum(1)
    kept = by_host(state.residual[0].value, 150).sum(0)
    given = by_host(grads.kernel.value, STEPS, 150).sum((0, 2))
    np.testing.assert_array_equal(given, H * kernel + kept)
    pending = by_host(state.pending.value, 3 + 5).sum(0)
    given = by_host(grads.vector.value, STEPS, 3).sum((0, 2))
    vector = updates.vector.value.reshape(L, STEPS, 3).sum(1)
    np.testing.assert_array_equal(given, H * vector + pending[:, :3])
    given = np.asarray(grads.bias, np.float64).sum((0, 1)) / L
    np.testing.assert_array_equal(given, H * updates.bias.sum(0) + pending[0, 3:])


def test_groups_in_half_precision_lose_nothing():
    tx = partition(
        {"a": Stages((Dense(), TopK(1.0)), (9,)), "b": TopK(0.25)},
        axis_name="hosts",
        dense_axis="local",
    )
    rng = np.random.default_rng(0)
    grads = {
        "a": jnp.asarray(W * rng.integers(-50, 51, (W, 5)), jnp.float32),
        "b": jnp.asarray(rng.normal(size=(W, 42)), jnp.bfloat16),
    }

    def step(grads):
        own = jax.tree.map(lambda g: g[0], grads)
        updates, state = tx.update(own, tx.init(own))
        return updates, state

    updates, state = jax.device_get(on_grid(step, batch_argnums=0)(grads))
    np.testing.assert_array_equal(updates["a"], np.asarray(grads["a"]).mean(0))
    total = np.asarray(grads["b"], np.float64).sum(0)
    kept = whole(state.residual[1].value, 42).sum(0)
    np.testing.assert_allclose(
        total, W * updates["b"].astype(np.float64) + L * kept, rtol=1e-6, atol=1e-5
    )
    assert np.any(kept[updates["b"] != 0])  # what rounding took
    assert state.info.delivered == 5 + np.count_nonzero(updates["b"])


def test_counts_saturate():
    most = 2**31 - 1
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 2**32 // 40, (40, 200))  # sums to either side of the limit
    counts[:, 0] = [most] + [0] * 39
    counts[:, 1] = most
    expected = counts.sum(0).clip(max=most)
    assert 20 < np.sum(expected == most) < 180
    summed = jax.jit(saturating_sum)(jnp.asarray(counts, jnp.int32))
    np.testing.assert_array_equal(summed, expected)
    sizes = 2**31, 5
    plan = Plan(None, (), (), sizes, sizes, 1, 2**31, 2**31)
    assert jax.jit(lambda: total([info(most), info(5)], plan, Axes(None)))() == (most, 0)


def test_training_by_fsdp_equals_training_on_one_axis():
    """Dense exchange, so that all of it is exact: the parameters after some steps of Adam."""
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.normal(size=(2 * W, n)), jnp.float32) for n in (8, 4))
    params = {"w": jnp.asarray(rng.normal(size=(8, 4)), jnp.float32), "b": jnp.zeros(4)}

    def loss(params, x, y):
        return jnp.mean(jnp.square(jnp.tanh(x @ params["w"]) + params["b"][None] - y))

    tx = optax.chain(
        error_feedback(
            CASES["dense"].reducer,
            axis_name="hosts",
            dense_axis="local",
            sharded=True,
            is_dense=lambda path, shape: "b" in path,
        ),
        optax.adam(0.1),
    )

    def step(state, x, y):
        params, opt_state = state

        def sharded_loss(params):
            w = jax.lax.all_gather(params["w"].value, "local", tiled=True)
            return loss({"w": w, "b": params["b"]}, x, y) / L

        grads = jax.grad(sharded_loss)(local(params, "hosts"))
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    marked = shard({"w": Sharded(params["w"]), "b": params["b"]}, grid(), AXES)
    assert marked["w"].value.sharding.is_equivalent_to(
        jax.sharding.NamedSharding(grid(), P("local")), 2
    )
    plain = optax.adam(0.1)
    plain_state = plain.init(params)
    with jax.numpy_dtype_promotion("standard"):  # Optax's Adam needs it
        state = marked, on_grid(tx.init, batch_argnums=())(marked)
        assert isinstance(state[1][1][0].mu["w"], Sharded)
        run = on_grid(step, batch_argnums=(1, 2))
        for _ in range(4):
            state = run(state, x, y)
            updates, plain_state = plain.update(jax.grad(loss)(params, x, y), plain_state)
            params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(state[0]["w"].value, params["w"], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(state[0]["b"], params["b"], rtol=1e-4, atol=1e-6)
    assert state[1][1][0].mu["w"].value.addressable_shards[0].data.shape == (2, 4)


KERNEL = {"kernel": jnp.zeros((40, 32))}


def init_off_the_mesh():
    dense(axis_name="hosts", dense_axis="local").init(KERNEL)


def one_axis_twice():
    spardl(0.1, axis_name="local", dense_axis="local")


def two_fast_axes():
    spardl(0.1, dense_axis=("local", "more"))


def sharded_over_nothing():
    error_feedback(TopK(0.1), sharded=True)


def messages_that_differ_between_shards():
    tx = spardl(
        Stages((0.1, 0.01), (5,)), teams=2, gather="bruck", axis_name="hosts", dense_axis="local"
    )
    on_grid(tx.init, batch_argnums=())(KERNEL)


def update_kernel(gradient, sharded=True):
    tx = error_feedback(TopK(0.1), axis_name="hosts", dense_axis="local", sharded=sharded)
    step = lambda p: tx.update({"kernel": gradient(p["kernel"])}, tx.init(p))[0]
    on_grid(step, batch_argnums=())(KERNEL)


def a_compressed_leaf_that_is_no_shard():
    update_kernel(lambda p: local(p, "hosts"))


def a_gradient_summed_over_hosts():
    update_kernel(lambda p: local(p, "local"))


def a_gradient_summed_over_the_fast_axis():
    update_kernel(lambda p: local(p, "hosts"), sharded=False)


def simulated_hosts():
    data_parallel(lambda x: x, 8, axis_name=AXES)


def an_axis_that_is_not_there():
    data_parallel(lambda x: x, grid(), axis_name=("hosts", "data"))


def a_list_of_axes():
    shard(KERNEL, grid(), ["hosts", "local"])


def an_uneven_shard():
    shard({"w": Sharded(jnp.zeros((6, 4)))}, grid(), AXES)


def an_uneven_argument():
    on_grid(lambda p, x: p)({"w": Sharded(jnp.zeros((6, 4)))}, jnp.ones(8))


def shards_of_one_axis():
    specs_of({"w": Sharded(jnp.zeros((8, 4)))})


def an_output_that_differs_between_hosts():
    on_grid(lambda x: Sharded(x), batch_argnums=0)(jnp.ones(8))


USES = {
    init_off_the_mesh: r"init needs the size of dense_axis='local'.*data_parallel\(tx.init",
    one_axis_twice: r"dense_axis='local' must be the name of one other axis than axis_name='local'",
    two_fast_axes: r"dense_axis=\('local', 'more'\) must be the name of one other axis",
    sharded_over_nothing: r"sharded=True without a dense_axis",
    messages_that_differ_between_shards: r"^gather='bruck' .*'local'.*use gather='recursive'",
    a_compressed_leaf_that_is_no_shard: r"\['kernel'\] is compressed and equal along .*is_dense",
    a_gradient_summed_over_hosts: r"equal on all workers of axis 'hosts'.*\(params, 'hosts'\)",
    a_gradient_summed_over_the_fast_axis: r"of axis 'local'.*\(params, \('hosts', 'local'\)\)",
    simulated_hosts: r"mesh=8 cannot stand for the axes \('hosts', 'local'\).*Pass a mesh",
    an_axis_that_is_not_there: r"axis_name='data' is not an axis of the mesh",
    a_list_of_axes: r"axis_name=\['hosts', 'local'\] must be the name .* tuple",
    an_uneven_shard: r"leaf\['w'\].* is marked Sharded and has shape \(6, 4\).*4 devices",
    an_uneven_argument: r"argument 0\['w'\].*4 devices along 'local' cannot share equally",
    shards_of_one_axis: r"leaf\['w'\].* is marked Sharded, but axis_name='data' has no fast axis",
    an_output_that_differs_between_hosts: r"output.* differs between workers.*\('hosts',\)",
}


@pytest.mark.parametrize("misuse", USES, ids=lambda f: f.__name__)
def test_uses(misuse):
    with pytest.raises(ValueError, match=USES[misuse]):
        misuse()


@pytest.mark.slow
@pytest.mark.parametrize("method", few(["dense", "spardl"], ["spardl"]))
def test_the_example_of_fsdp(tmp_path, method):
    printed = run_example(
        "fsdp.py", "--method", method, "--hidden", 64, "--steps", 60, cwd=tmp_path
    )
    number = lambda pattern: float(re.search(pattern, printed)[1].replace(",", ""))
    assert number(r"train loss ([\d.]+)") < np.log(10) - 0.5
    sharded, whole = 4 * (64 * 64 * 2 + 64 * 10), 4 * (64 + 64 + 10)
    assert number(r"holds ([\d,]+) of") == sharded / L + whole
    assert number(r"([\d,]+) of Adam's") == 2 * (sharded / L + whole) + 4  # and its count
    assert number(r"([\d,]+) from its own") == pytest.approx(2 * sharded * (L - 1) / L, rel=0.05)
    between = number(r"([\d,]+) bytes a step from other hosts")
    dense_between = (sharded / L + whole) * 2 * (H - 1) / H
    assert (method == "spardl") == (between < 0.7 * dense_between)
