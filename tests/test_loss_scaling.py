"""Gradients that overflow on one worker skip the step on all, and the example lowers its scale."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from running import run
from training import stepped, train
from workers import mesh, some

import jaxsparse
from jaxsparse import contrib, reducers
from jaxsparse.outer.parallel import run_on_workers


@pytest.mark.slow
def test_the_scale_falls_from_too_high_and_training_goes_on(tmp_path):
    flags = ["--devices", 3, "--hidden", 64, "--steps", 60, "--raise-every", 20, "--lr", 0.005]
    printed = run("loss_scaling.py", *flags, cwd=tmp_path)
    skips = re.findall(r"step (\d+): .* skipped by all; loss scale (\d+)", printed)
    steps, scales = zip(*((int(step), float(scale)) for step, scale in skips))
    # The scale is halved at each of the first steps, until the largest gradient fits float16.
    begun = len([i for i, step in enumerate(steps, start=1) if step == i])
    assert begun >= 3
    assert list(scales[:begun]) == [2.0**24 / 2**i for i in range(1, begun + 1)]
    last = printed.splitlines()[-1]
    assert last.startswith(f"60 steps, {len(skips)} skipped")
    assert len(skips) < 20
    assert float(re.search(r"accuracy ([\d.]+) %", last)[1]) > 80


def trained_with_a_scale_of_its_own(when_skipped):
    """The scales of a trainer that halves its own when updates are not finite, and its losses."""
    tx = jaxsparse.top_k(0.5, is_dense=lambda path, shape: False, when_skipped=when_skipped)

    def step(state, batch):
        params, opt_state, scale = state
        scaled = lambda p: scale * jnp.mean((p - batch[0]) ** 2)
        loss, grads = jax.value_and_grad(scaled)(params)
        grads = grads.astype(jnp.float16).astype(jnp.float32) / scale  # overflows on one worker
        updates, opt_state = tx.update(grads, opt_state)
        is_good = jnp.all(jnp.isfinite(updates))
        params = jnp.where(is_good, params - 0.3 * updates, params)
        scale = jnp.where(is_good, scale, scale / 2)
        return (params, opt_state, scale), jax.lax.pmean(loss / scale, "data")

    start = jnp.zeros(4)
    state = jaxsparse.shard((start, tx.init(start), jnp.float32(2**20)), 3)
    run_, losses, scales = run_on_workers(step, 3), [], []
    batch = jnp.float32([[1], [2], [30]]) * jnp.ones((3, 4))
    for _ in range(12):
        state, loss = run_(state, batch)
        losses.append(float(loss))
        scales.append(float(state[2]))
    return scales, losses


@pytest.mark.slow
def test_a_trainers_own_scale_sees_overflows_by_request():
    scales, losses = trained_with_a_scale_of_its_own(None)
    assert set(scales) == {2.0**20}  # frozen
    assert losses[-1] == losses[0]
    scales, losses = trained_with_a_scale_of_its_own("nan")
    halvings = int(np.log2(2**20 / scales[-1]))
    assert scales == [2.0 ** (20 - min(i, halvings)) for i in range(1, 13)]
    assert halvings == 8  # the largest gradient, 15, times 2**12 fits float16
    assert losses[-1] < 0.9 * losses[0]


SKIPPING = {
    "top_k": lambda **o: jaxsparse.top_k(0.1, momentum=0.9, **o),
    "dense": lambda **o: jaxsparse.dense(**o),
    "ef21_sgdm": lambda **o: contrib.ef21_sgdm(reducers.TopK(0.1), **o),
    "partition": lambda **o: jaxsparse.partition({"a": reducers.SparDL(0.5)}, **o),
    "per_worker": lambda **o: optax.chain(
        jaxsparse.per_worker(optax.scale_by_adam()), jaxsparse.spardl(0.1, **o)
    ),
}


@pytest.mark.parametrize("name", some(SKIPPING, ["top_k"]))
def test_all_of_a_skipped_update_is_nan_and_the_state_is_kept(name):
    params = {"a": jnp.zeros((8, 8)), "b": jnp.zeros(5, jnp.bfloat16)}
    options = {} if name == "partition" else {"is_dense": lambda path, shape: len(shape) < 2}
    rng = np.random.default_rng(0)
    draw = lambda x: jnp.asarray(rng.normal(size=(3, *x.shape)), x.dtype)
    gradients = [jax.tree.map(draw, params) for _ in range(3)]
    gradients[1]["a"] = gradients[1]["a"].at[2, 3, 3].set(np.inf)

    def trained(when_skipped):
        tx = SKIPPING[name](when_skipped=when_skipped, **options)
        with jax.numpy_dtype_promotion("standard"):  # Optax's Adam needs it
            return train(tx, params, 3, gradients)

    (first, broken, last), (_, state) = trained("nan")
    usual, (_, usual_state) = trained("zero")
    for updates, same in ((first, usual[0]), (last, usual[2]), (state, usual_state)):
        jax.tree.map(np.testing.assert_array_equal, updates, same)
    for x, zero in zip(jax.tree.leaves(broken), jax.tree.leaves(usual[1])):
        assert np.isnan(np.asarray(x, np.float32)).all()
        assert not np.asarray(zero, np.float32).any()
        assert x.dtype == zero.dtype


@pytest.mark.slow
@pytest.mark.parametrize("is_manual", [False, True])
def test_all_devices_of_a_worker_see_it(is_manual):
    grid = mesh((2, 2))
    tx = jaxsparse.top_k(0.1, when_skipped="nan", mesh=grid)
    params = {"w": jnp.zeros((64, 64))}
    grads = {"w": jnp.ones((2, 64, 64)).at[1, 50, 3].set(np.nan)}
    updates, state = stepped(tx, grid, is_manual=is_manual)(grads, tx.init(params))
    assert int(state.skipped) == 1
    assert np.isnan(updates["w"]).all()


def test_what_a_skipped_update_can_not_be_is_refused():
    with pytest.raises(ValueError, match="when_skipped='inf' must be 'zero', 'nan' or None"):
        jaxsparse.top_k(0.1, when_skipped="inf")
    with pytest.raises(ValueError, match="when_skipped='nan' would lose updates with delay=1"):
        jaxsparse.top_k(0.1, when_skipped="nan", delay=1)
