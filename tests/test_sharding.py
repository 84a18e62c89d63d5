"""Functions that a trainer needs: one pair for all states, on every mesh."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from workers import mesh, some

import jaxsparse
from jaxsparse import PerWorker, local, shard, specs
from jaxsparse.outer.parallel import run_on_workers

P = PartitionSpec


def transformation():
    return optax.chain(
        jaxsparse.sketched_sgd(k=40, cols=60, momentum=0.9, is_dense=lambda p, s: len(s) < 2),
        optax.sgd(0.05),
    )


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(8, 64, rngs=rngs)
        self.out = nnx.Linear(64, 2, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.hidden(x)))


def nnx_state():
    model = Nnx(nnx.Rngs(0))
    return nnx.split((model, nnx.Optimizer(model, transformation(), wrt=nnx.Param)))


def test_specs_find_per_worker_arrays_by_type_and_by_path():
    tree = {"a": PerWorker.wrap(jnp.zeros(3)), "b": jnp.zeros(3)}
    assert specs(tree, "x")["b"] == P()
    assert specs(tree, "x")["a"].value == P("x")
    _, state = nnx_state()
    marked = [
        path
        for path, spec in jax.tree_util.tree_flatten_with_path(specs(state))[0]
        if spec == P("data")
    ]
    assert len(marked) == 4  # residual and momentum of two kernels; nnx.split forgot their types


def test_specs_keep_how_arrays_are_cut_over_other_axes():
    where = jax.make_mesh((2, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    cut = {"w": P(None, "fsdp"), "b": P("fsdp"), "s": P()}
    shapes = {"w": (4, 8), "b": (4,), "s": ()}
    put = lambda name: jax.device_put(jnp.ones(shapes[name]), NamedSharding(where, cut[name]))
    params = {name: put(name) for name in shapes}
    tree = jaxsparse.shard({"params": params, "kept": PerWorker.wrap(params)}, where)
    rows = {"w": P("data", None, "fsdp"), "b": P("data", "fsdp"), "s": P("data")}
    found = specs(tree)
    assert found["params"] == cut
    assert {name: x.value for name, x in found["kept"].items()} == rows
    shaped = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
    )
    assert specs(shaped) == found
    alone = specs(tree, inner=False)
    assert alone["params"] == dict.fromkeys(cut, P())
    assert {name: x.value for name, x in alone["kept"].items()} == dict.fromkeys(cut, P("data"))


def test_shard_repeats_the_initial_value_and_is_idempotent():
    tree = {"a": PerWorker.wrap(jnp.arange(3.0)), "b": jnp.arange(3.0)}
    for where in (mesh(5), 5):
        spread = shard(shard(tree, where), where)
        np.testing.assert_array_equal(spread["a"].value, np.tile(np.arange(3.0), (5, 1)))
        np.testing.assert_array_equal(spread["b"], np.arange(3.0))


@pytest.mark.parametrize("put", [shard, jaxsparse.reshard])
def test_what_is_no_array_is_named(put):
    with pytest.raises(
        ValueError, match=r"leaf\['layer'\]\['f'\] is '<.*which is no array.*eqx.partition"
    ):
        put({"layer": {"f": nn.relu, "scale": 1.0}, "w": jnp.ones(2)}, 2)


def test_the_number_of_workers_may_be_numpys():
    spread = shard(PerWorker.wrap(jnp.zeros(2)), np.int64(3))
    assert run_on_workers(lambda s, x: s, np.int64(3))(spread, jnp.ones(3)).value.shape == (3, 2)


def test_shard_accepts_replicated_arrays_on_meshes_of_several_axes():
    grid = jax.make_mesh((2, 2, 1), ("data", "model", "one"), devices=jax.devices()[:4])
    x = jnp.arange(4.0)
    for spec in (P(), P("one")):
        whole = jax.device_put(x, jax.sharding.NamedSharding(grid, spec))
        np.testing.assert_array_equal(shard(whole, grid), x)


def test_shard_brings_arrays_from_other_devices():
    params = jax.device_put(jnp.arange(4.0), jax.devices()[5])
    tree = {"p": params, "r": PerWorker.wrap(params)}
    spread = shard(shard(tree, mesh(3)), mesh(3))
    np.testing.assert_array_equal(spread["r"].value, np.tile(np.arange(4.0), (3, 1)))
    moved = shard({"p": spread["p"]}, mesh(5))
    assert len(moved["p"].devices()) == 5


@pytest.mark.parametrize("where", [1, "mesh"])
def test_shard_copies_keys_too(where):
    where = mesh(1) if where == "mesh" else where
    key = jax.random.key(0)
    run = run_on_workers(lambda k, x: jax.random.fold_in(k, 1), where, donate_argnums=0)
    run(shard(key, where), jnp.ones(1))
    jax.random.key_data(key) + jnp.uint32(0)  # the original key was not donated


def test_negative_batch_argnums_count_from_the_last():
    run = run_on_workers(lambda s, b: s + b.shape[0], mesh(3), batch_argnums=-1)
    assert run(jnp.int32(0), jnp.ones(6)) == 2


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_state_that_each_device_holds_whole_is_warned_of(kind):
    where, warning = (
        mesh(2, kind),
        r"argument 0\.jaxsparse_per_worker is per-worker state, but each",
    )
    step = lambda state, x: jax.tree.map(lambda s: s + x.sum(), state)
    x, state = jnp.ones(4), PerWorker(jnp.zeros((2, 3)))
    copied, split = (jax.device_put(state, NamedSharding(where, spec)) for spec in (P(), P("data")))
    empty = jax.device_put(PerWorker(jnp.zeros((2, 0))), NamedSharding(where, P()))  # as XLA does
    for each in state, split, empty:  # an array on one device is not everywhere
        run_on_workers(step, where)(each, x)
        jax.jit(run_on_workers(step, where))(each, x)
    with pytest.warns(UserWarning, match=warning):
        run_on_workers(step, where)(copied, x)
    if kind == AxisType.Explicit:  # a trace knows of these alone
        with pytest.warns(UserWarning, match=warning):
            jax.jit(run_on_workers(step, where))(copied, x)


@pytest.mark.parametrize("sizes", some([4, (4, 2)], [(4, 2)]), ids=str)
def test_what_lies_in_host_memory_stays_there(sizes):
    """Residuals, moments and a key, wherever JAX's own functions put them."""
    at, kind = mesh(sizes), "pinned_host"
    spec = P("fsdp") if isinstance(sizes, tuple) else P()
    put = lambda x, spec, on=at: jax.device_put(x, NamedSharding(on, spec, memory_kind=kind))
    params = {"w": put(np.arange(3200, dtype=np.float32).reshape(80, 40), spec), "b": jnp.ones(3)}
    kinds = lambda tree: [x.sharding.memory_kind for x in jax.tree.leaves(tree)]
    # New residuals lie on devices, and moments with their parameters, as Optax's own.
    adam = optax.adam(0.1)
    usual = kinds(adam.init(params))
    assert set(usual) == {kind, "device"}
    own = jaxsparse.per_worker(adam)
    state = optax.chain(jaxsparse.quantized("int4"), own).init(params)
    assert set(kinds(state[0])) == {"device"}
    assert kinds(state[1]) == usual
    assert kinds(jaxsparse.zero1(adam).init(params).optimizer) == usual
    # A trainer may move all of it.
    moved = {
        "state": jax.tree.map(lambda x: put(x + 1, x.sharding.spec), state),
        "one": PerWorker(put(np.float32([[5, 6]]), P())),
        "key": put(jax.random.key(3), P()),
        "here": jnp.arange(4),
    }
    for there in (shard(moved, at), jaxsparse.reshard(shard(moved, at), at, like=shard(moved, at))):
        assert kinds(there) == kinds(moved)
        wanted = moved | {"one": PerWorker(jnp.tile(moved["one"].value, (4, 1)))}
        for x, y in zip(jax.tree.leaves(there), jax.tree.leaves(wanted)):
            if x.dtype != moved["key"].dtype:
                np.testing.assert_array_equal(x, y)
                pointer = lambda x: x.addressable_data(0).unsafe_buffer_pointer()
                assert pointer(x) != pointer(y)
    assert there["one"].value.sharding.spec[0] == "data"
    assert (
        there["state"][0]
        .residual["w"]
        .value.sharding.is_equivalent_to(
            state[0].residual["w"].value.sharding.with_memory_kind(kind), 3
        )
    )
    # Onto other devices.
    fewer = mesh((2, *sizes[1:]) if isinstance(sizes, tuple) else 2)
    like = shard({"a": PerWorker(jnp.ones((2, 4))), "b": jnp.zeros(3)}, fewer)
    like = jax.tree.map(lambda x: jax.device_put(x, x.sharding.with_memory_kind(kind)), like)
    rows = {"a": PerWorker(np.float32([[1] * 4, [3] * 4])), "b": jnp.ones(3)}
    there = jaxsparse.reshard(rows, fewer, like=like)
    assert kinds(there) == kinds(shard(put(np.ones(3), P()), fewer)) * 2 == [kind, kind]
    np.testing.assert_array_equal(there["a"].value, rows["a"].value)


def test_shard_copies():
    tree = shard({"b": jnp.arange(3.0)}, mesh(1))
    given = {"b": jnp.arange(3.0)}
    run_on_workers(lambda t, x: t, mesh(1), donate_argnums=0)(shard(given, mesh(1)), jnp.ones(1))
    np.testing.assert_array_equal(given["b"], tree["b"])


def test_wrap_and_unwrap_are_inverse():
    tree = {"a": jnp.arange(3.0), "b": [jnp.zeros(())]}
    back = PerWorker.unwrap(PerWorker.wrap(tree))
    jax.tree.map(np.testing.assert_array_equal, back, tree)


@pytest.mark.parametrize("where", [3, "mesh"])
def test_per_worker_outputs_come_back_stacked(where):
    def step(x):
        return {"max": PerWorker.wrap(x.max()), "mean": jax.lax.pmean(x.mean(), "data")}

    run = run_on_workers(step, mesh(3) if where == "mesh" else where, batch_argnums=0)
    out = run(jnp.arange(6.0))
    np.testing.assert_array_equal(out["max"].value, [1, 3, 5])
    np.testing.assert_array_equal(out["mean"], 2.5)


@pytest.mark.parametrize("where", [3, "mesh"])
def test_gradients_are_local_and_a_loss_may_be_averaged_before(where):
    def step(p, x):
        loss = lambda p, x: (p * x).sum()
        own = jax.grad(loss)(p, x), jax.grad(loss)(local(p), x)
        of_mean = jax.grad(lambda p, x: jax.lax.pmean(loss(p, x), "data"))(p, x)
        return [PerWorker.wrap(g) for g in (*own, of_mean)]

    run = run_on_workers(step, mesh(3) if where == "mesh" else where)
    for gradients in run(jnp.float32(1), jnp.array([1.0, 2.0, 4.0])):
        np.testing.assert_array_equal(gradients.value, [1, 2, 4])
