"""What every system promises, by its row, on meshes where devices exchange their own shards."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from contract import CASES, each
from on_meshes import SHAPES, gradients, is_bias, mesh, put, stepper

import jaxsparse
from jaxsparse import shard, traffic
from jaxsparse.comm import meshes
from jaxsparse.outer.parallel import run_on_workers

ROWS = list(CASES)
IN_EXPECTATION = [name for name in ROWS if CASES[name].reducer.conservation == "in expectation"]
SHAPE = (2, 2, 2)


def rows(usual, names=ROWS):
    return pytest.mark.parametrize("name", each(names, usual))


def after(name, count):
    """The step, and the state after `count` steps."""
    where = mesh(SHAPE)
    run, state, _ = stepper(CASES[name].reducer, where, momentum=0.5)
    for seed in range(count):
        _, state = jax.block_until_ready(run(put(where, gradients(2, seed), "hosts"), state))
    return run, state


def test_all_rows_conserve_sums():
    """At each step, or in expectation."""
    assert [n for n in ROWS if not CASES[n].reducer.conserves and n not in IN_EXPECTATION] == []


@pytest.mark.slow
@rows(["qsgd"])
def test_a_checkpoint_goes_on_with_the_same_bits(name, tmp_path):
    where = mesh(SHAPE)
    run, state = after(name, 2)
    _, start = after(name, 0)
    with ocp.CheckpointManager(tmp_path) as saved:
        saved.save(2, args=ocp.args.StandardSave(state))
        saved.wait_until_finished()
        target = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), start
        )
        restored = saved.restore(2, args=ocp.args.StandardRestore(target))
    for x, y, z in zip(*map(jax.tree.leaves, (restored, state, start)), strict=True):
        assert x.sharding.is_equivalent_to(z.sharding, x.ndim)
        assert y.sharding.is_equivalent_to(z.sharding, y.ndim)
        assert (x.shape, x.dtype) == (y.shape, y.dtype) == (z.shape, z.dtype)
        np.testing.assert_array_equal(x, y)
    batch = put(where, gradients(2, 2), "hosts")
    straight, resumed = run(batch, state), run(batch, restored)
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((straight, resumed)))
    assert any(np.any(update) for update in straight[0].values())


@rows(["qsgd"])
def test_one_broken_shard_skips_the_step_on_all_devices(name):
    where = mesh(SHAPE)
    run, before = after(name, 1)
    broken = gradients(2, 1)
    broken["both"][1, 15, 23] = np.nan  # on one of the eight devices
    updates, state = run(put(where, broken, "hosts"), before)
    assert int(state.skipped) == 1
    assert not any(np.any(x) for x in jax.tree.leaves(jax.device_get(updates)))
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(jax.device_get(state)))
    _, state = run(put(where, gradients(2, 1), "hosts"), state)
    assert int(state.skipped) == 1
    jaxsparse.check_replicas(state)


STEPS = 40


@pytest.mark.slow
@rows(["qsgd"], IN_EXPECTATION)
def test_nothing_is_lost_in_expectation(name):
    """The errors of steps have no mean, element by element.

    A step's error is W times its update, plus the change of the residuals, less the gradients' sum.
    """
    where = mesh(SHAPE)
    run, state, _ = stepper(CASES[name].reducer, where)
    errors = {name: [] for name in SHAPES}
    owed = dict.fromkeys(SHAPES, 0.0)
    for seed in range(STEPS):
        grads = gradients(2, seed)
        updates, state = jax.block_until_ready(run(put(where, grads, "hosts"), state))
        for leaf in SHAPES:
            node = state.residual.get(leaf)
            rest = 0.0 if node is None else np.asarray(node.value, np.float64).sum(0)
            given = 2 * np.asarray(updates[leaf], np.float64) + rest - owed[leaf]
            errors[leaf].append(given - grads[leaf].sum(0, dtype=np.float64))
            owed[leaf] = rest
    jaxsparse.check_replicas(state)
    scores = []
    for leaf, steps in errors.items():
        mean, spread = np.mean(steps, axis=0), np.std(steps, axis=0, ddof=1)
        if leaf not in state.residual:
            np.testing.assert_array_equal(np.asarray(steps), np.zeros_like(steps), err_msg=leaf)
            continue
        assert np.any(spread), leaf
        # 1e-2: where almost nothing is rounded, a few errors make a mean and no spread.
        scores.append((mean / (spread / STEPS**0.5 + 1e-2))[spread > 0])
    scores = np.concatenate(scores)
    assert np.abs(scores).max() < 6
    assert 0.7 < np.sqrt(np.mean(np.square(scores))) < 1.2
    assert abs(scores.mean()) < 5 / len(scores) ** 0.5


@rows([])
def test_a_device_sends_the_messages_of_its_shards_and_no_more(name):
    """As many bytes cross hosts as between workers of one device that have only these shards."""
    where, alone = mesh(SHAPE), mesh((2,))
    run, state, _ = stepper(CASES[name].reducer, where)
    compiled = run.lower(put(where, gradients(2), "hosts"), state).compile()
    strays = traffic.crossing(compiled, axis_name="hosts", mesh=where, outside=meshes.SCOPE)
    assert not list(strays), [str(stray) for stray in strays]

    shapes = {"odd": SHAPES["odd"], "bias": (SHAPES["bias"][0] // 2,)}
    for leaf, node in state.residual.items():
        shapes[leaf] = node.value.addressable_shards[0].data.shape[1:]
    assert sorted(shapes) == sorted(SHAPES)
    size = sum(int(np.prod(shapes[leaf])) for leaf in state.residual)
    loose = sum(int(np.prod(shapes[leaf])) for leaf in shapes if leaf not in state.residual)
    tx = jaxsparse.exchange(
        CASES[name].reducer.split((size,) * 4, 4 * loose)[0],
        axis_name="hosts",
        is_dense=lambda path, shape: is_bias(path, shape) or "odd" in path,
    )
    params = {leaf: jnp.zeros(shape) for leaf, shape in shapes.items()}
    plain = run_on_workers(
        lambda g, s: tx.update(jax.tree.map(lambda x: x[0], g), s),
        alone,
        axis_name="hosts",
        batch_argnums=0,
    )
    batch = {leaf: jnp.zeros((2, *shape)) for leaf, shape in shapes.items()}
    start = shard(tx.init(params), alone, "hosts")
    expected = traffic.wire_bytes(plain, batch, start, mesh=alone).across("hosts")
    moved = traffic.wire_bytes(compiled, mesh=where).across("hosts")
    assert expected.payload > 0
    # All axes also agree on whether everything is finite.
    assert moved.payload == expected.payload + 4
