"""A state carried to another number of workers. It conserves what residuals owe the mean."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from supports import flat
from workers import mesh as mesh_of, some

import jaxsparse
from jaxsparse import PerWorker, contrib, reshard, shard
from jaxsparse.collectives.spardl import Adaptation
from jaxsparse.outer.parallel import run_on_workers

COUNTS = (1, 2, 3, 5, 6, 8, 16, 256)


def overlaps(before, after):
    """The matrix A of `reshard`'s docstring, from its definition."""
    result = np.zeros((after, before))
    for j, i in itertools.product(range(after), range(before)):
        shared = min((j + 1) / after, (i + 1) / before) - max(j / after, i / before)
        result[j, i] = after * max(0.0, shared)
    return result


@pytest.mark.parametrize("before", some(COUNTS, (1, 3, 8)))
@pytest.mark.parametrize("after", some(COUNTS, (2, 3, 16)))
def test_rows_are_averaged_by_overlap(before, after):
    rng = np.random.default_rng(before * 1000 + after)
    x = rng.normal(size=(before, 40)).astype(np.float32) * 10.0 ** rng.integers(-20, 20, 40)
    x = x.astype(np.float32)
    y = np.asarray(reshard({"residual": PerWorker(x)}, after)["residual"].value)
    assert y.shape == (after, 40)
    assert y.dtype == np.float32
    scale = np.abs(x).max(axis=0)
    np.testing.assert_allclose(y / scale, overlaps(before, after) @ x / scale, rtol=0, atol=1e-7)
    # Rows of A sum to 1 and columns to W' / W, so the mean over workers stays.
    gap = y.mean(axis=0, dtype=np.float64) - x.mean(axis=0, dtype=np.float64)
    assert (np.abs(gap) <= 2.0**-24 * scale).all()
    if after % before == 0:
        np.testing.assert_array_equal(y, np.repeat(x, after // before, axis=0))


def test_copies_stay_copies_and_dtypes_stay():
    x = np.random.default_rng(0).normal(size=20).astype(np.float32)
    for before, after in itertools.permutations((1, 3, 8), 2):
        tree = {
            "equal": PerWorker(np.tile(x, (before, 1))),
            "narrow": PerWorker(jnp.tile(x.astype(jnp.bfloat16), (before, 1))),
            "flag": PerWorker(np.ones((before, 2), bool)),
            "complex": PerWorker(np.tile(x * 1j, (before, 1)).astype(np.complex64)),
            "nothing": PerWorker(np.zeros((before, 0), np.float32)),
            "none": None,
            "count": np.int32(3),
            "key": jax.random.key(1),
        }
        carried = reshard(tree, after)
        assert jax.tree.structure(carried) == jax.tree.structure(tree)
        for name in ("equal", "narrow", "flag", "complex", "nothing"):
            old, new = tree[name].value, carried[name].value
            assert new.dtype == old.dtype
            assert new.shape == (after, *old.shape[1:])
            np.testing.assert_array_equal(new, np.repeat(np.asarray(old[:1]), after, axis=0))
        assert carried["count"] == 3
        assert carried["key"] == tree["key"]


def test_bfloat16_rows_are_averaged_not_copied():
    x = jnp.asarray([[1.0, 2.0], [3.0, 4.0], [5.0, 0.0]], jnp.bfloat16)
    carried = reshard(PerWorker(x), 1).value
    np.testing.assert_array_equal(carried, jnp.asarray([[3.0, 2.0]], jnp.bfloat16))


def test_on_a_mesh_it_is_placed_as_shard_does():
    mesh = mesh_of(6)
    tree = {"residual": PerWorker(jnp.arange(8.0)[:, None]), "params": jnp.ones(3)}
    carried = reshard(tree, mesh)
    assert [s.data.shape for s in carried["residual"].value.addressable_shards] == [(1, 1)] * 6
    assert carried["params"].sharding.is_fully_replicated
    again = shard(carried, mesh)  # needless, and harmless
    np.testing.assert_array_equal(again["residual"].value, carried["residual"].value)
    np.testing.assert_allclose(
        carried["residual"].value[:, 0], overlaps(8, 6) @ np.arange(8.0), rtol=1e-6
    )


def test_on_a_mesh_with_other_axes_arrays_stay_cut_or_are_refused():
    """As with FSDP: a residual that each device held whole would take all of a worker's bytes."""
    before, after = mesh_of((4, 2)), mesh_of((2, 2))
    tx = jaxsparse.top_k(0.1, axis_name="data", is_dense=lambda *_: False)

    def start(where):
        cut = jax.NamedSharding(where, jax.P("fsdp"))
        return shard(tx.init({"w": jax.device_put(jnp.zeros((8, 4)), cut)}), where)

    state = start(before)
    (x,) = state.residual.values()
    moved = jax.device_put(jnp.arange(4.0 * 32).reshape(4, 8, 4), x.value.sharding)
    state = state._replace(residual={name: PerWorker(moved) for name in state.residual})
    expected = np.asarray(moved).reshape(2, 2, 8, 4).mean(1)
    whole = jax.device_get(state)
    found = [
        reshard(state.residual, after),  # as it was cut
        reshard(whole, after, like=start(after)).residual,
    ]
    for residual in found:
        (x,) = residual.values()
        np.testing.assert_array_equal(x.value, expected)
        assert x.value.sharding.spec[:2] == ("data", "fsdp")
        assert x.value.addressable_shards[0].data.shape == (1, 4, 4)
    for tree, match in (
        (whole, r"residual\['w'\].* is in host memory, which does not say how .*give like="),
        (PerWorker(jnp.zeros((4, 3))), r"lies on SingleDevice.*give like="),
        ({"params": np.zeros(3)}, r"leaf\['params'\] is in host memory.*give like="),
        (state.residual, r"is cut by .*give like="),
    ):
        where = mesh_of((2, 4)) if tree is state.residual else after
        with pytest.raises(ValueError, match=match):
            reshard(tree, where)


def by_name(node):
    """Nested dicts with sorted keys, as Orbax restores a tree without a target."""
    if isinstance(node, PerWorker):
        return {"jaxsparse_per_worker": node.value}
    if isinstance(node, tuple):
        names = getattr(node, "_fields", range(len(node)))
        node = {str(name): part for name, part in zip(names, node)}
    return {key: by_name(node[key]) for key in sorted(node)} if isinstance(node, dict) else node


def test_a_tree_restored_by_name_gets_its_structure_again():
    """Sorted keys are in another order than the fields of a state, and dots are no levels."""
    params = {"a.b": jnp.zeros((8, 8)), "a": {"b": jnp.zeros((8, 8))}, "0": jnp.zeros(3)}
    tx = optax.chain(
        jaxsparse.per_worker(optax.scale_by_adam()),
        jaxsparse.top_k(0.5, momentum=0.9, is_dense=lambda *_: False),
    )
    start, marks = tx.init(params), itertools.count(1)
    state = jax.tree.map(lambda x: np.full((2, *x.shape[1:]) if x.ndim else (), next(marks)), start)
    state = jax.tree.map(lambda x, y: x.astype(y.dtype), state, start)
    expected, found = reshard(state, 3), reshard(by_name(state), 3, like=start)
    assert jax.tree.structure(found) == jax.tree.structure(start)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def sums_of_updates(tx, state, params, grads, workers):
    @functools.partial(run_on_workers, mesh=workers, batch_argnums=0)
    def step(grads, state):
        grads = jax.tree.map(lambda g: g[0], grads)
        return tx.update(grads, state, params)

    total = jax.tree.map(np.zeros_like, params)
    for g in grads:
        updates, state = step(g, state)
        total = jax.tree.map(lambda t, u: t + np.asarray(u, np.float64), total, updates)
    return total, state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tx", "counts"),
    [
        pytest.param(jaxsparse.top_k(0.05, delay=1, bucket_size=700), (3, 2), id="delay, buckets"),
        pytest.param(jaxsparse.top_k(0.05), (8, 6, 8, 1, 16), id="top_k", marks=pytest.mark.slow),
        pytest.param(contrib.ok_topk(0.05), (6, 1, 8), id="ok_topk", marks=pytest.mark.slow),
    ],
)
def test_updates_and_what_is_owed_add_up_to_the_gradients(tx, counts):
    """Sum of updates + mean of residuals == sum of mean gradients, whatever numbers of workers."""
    rng = np.random.default_rng(0)
    params = {"w": np.zeros((40, 30), np.float32), "b": np.zeros(5, np.float32)}
    state = tx.init(params)
    owed = jax.tree.map(lambda p: np.zeros(p.shape), params)
    for workers in counts:
        grads = [random_gradients(rng, params, workers) for _ in range(3)]
        for g in grads:
            owed = jax.tree.map(lambda o, x: o + x.mean(axis=0, dtype=np.float64), owed, g)
        total, state = sums_of_updates(tx, reshard(state, workers), params, grads, workers)
        owed = jax.tree.map(np.subtract, owed, total)
        mean = lambda field: flat(field).mean(axis=0, dtype=np.float64)
        rest = mean(state.residual)
        pending = mean(state.pending) if state.pending else 0
        assert np.abs(owed["w"].ravel() - rest).max() < 2e-6, workers
        assert np.abs(rest).max() > 0.1  # residuals are large each time
        assert np.abs(owed["b"] - pending).max() < 2e-6


def random_gradients(rng, params, workers):
    draw = lambda p: rng.normal(size=(workers, *p.shape)).astype(np.float32)
    return jax.tree.map(draw, params)


def test_h_of_another_number_of_workers_is_brought_within_bounds():
    """B-SAG's h counts entries of a block. Blocks are larger with fewer workers."""
    state = Adaptation(jnp.float32(500), jnp.float32(-100), jnp.bool_(True))
    h, step, flag = state.within(60, 3)
    assert (float(h), float(step), bool(flag)) == (60, -40, True)
    inside = Adaptation(jnp.float32(31), jnp.float32(2.5), jnp.bool_(False))
    assert inside.within(60, 3) == inside


class TestRefused:
    def test_different_numbers_of_workers(self):
        tree = [PerWorker(np.zeros((2, 3))), PerWorker(np.zeros((4, 3)))]
        with pytest.raises(ValueError, match="of different numbers of workers"):
            reshard(tree, 3)

    def test_integers_that_differ(self):
        with pytest.raises(
            ValueError, match=r"leaf\['rank'\].*is int64 and differs between workers"
        ):
            reshard({"rank": PerWorker(np.arange(4))}, 3)
        same = reshard({"rank": PerWorker(np.arange(4, dtype=np.int32))}, 4)
        np.testing.assert_array_equal(same["rank"].value, np.arange(4))

    def test_keys(self):
        with pytest.raises(ValueError, match="holds keys that differ between workers"):
            reshard(PerWorker(jax.random.split(jax.random.key(0), 4)), 2)
        same = jnp.stack([jax.random.key(7)] * 4)
        for where in (6, jax.make_mesh((2,), ("data",))):
            carried = reshard(PerWorker(same), where).value
            assert carried.shape == (6 if where == 6 else 2,)
            assert all(key == jax.random.key(7) for key in carried)

    def test_no_axis_for_workers(self):
        with pytest.raises(ValueError, match=r"marked PerWorker but has shape \(\)"):
            reshard(PerWorker(np.float32(1)), 2)

    def test_without_it(self):
        tx = jaxsparse.top_k(0.05)
        params = {"w": jnp.zeros((40, 30))}
        state = shard(tx.init(params), 8)
        with pytest.raises(ValueError, match=r"spread over 8.*jaxsparse\.reshard\(state, mesh\)"):
            shard(state, 6)
        step = run_on_workers(lambda state: state, 6, batch_argnums=())
        with pytest.raises(ValueError, match=r"for 8 workers.*jaxsparse\.reshard\(state, mesh\)"):
            step(state)


def test_an_nnx_state_and_a_restored_dictionary():
    tx = jaxsparse.top_k(0.05, axis_name="data")
    model = nnx.Linear(40, 30, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    graphdef, state = nnx.split((model, optimizer))
    carried = reshard(shard(state, 4), 6)
    _, optimizer = nnx.merge(graphdef, carried)
    assert flat(optimizer.opt_state.residual).shape == (6, 1200)

    # A state that is restored without its types still has the mark in its paths.
    restored = {"residual": {"jaxsparse_per_worker": np.ones((4, 5), np.float32)}, "step": 3}
    carried = reshard(restored, 2)
    assert carried["residual"]["jaxsparse_per_worker"].shape == (2, 5)
    assert carried["step"] == 3
