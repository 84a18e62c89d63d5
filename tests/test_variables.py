"""States inside flax.nnx Variables: trainers ask these how to spread and restore them."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn, nnx
from flax.core.spmd import logical_axis_rules
from jax.sharding import NamedSharding
from on_meshes import mesh

import jaxsparse
from jaxsparse import contrib, reducers
from jaxsparse.outer.parallel import run_on_workers


class Model(nnx.Module):
    def __init__(self, rngs):
        def kernel(*names):
            return nnx.with_partitioning(nnx.initializers.lecun_normal(), names)

        self.a = nnx.Linear(32, 64, kernel_init=kernel("fsdp", "tp"), rngs=rngs)
        self.b = nnx.Linear(64, 32, kernel_init=kernel("tp", "fsdp"), rngs=rngs)

    def __call__(self, x):
        return self.b(jnp.tanh(self.a(x)))


def transformation(name, where):
    options = {"axis_name": "hosts", "mesh": where}
    return {
        "ok_topk": lambda: contrib.ok_topk(0.1, **options),  # reducers with a state
        "ef21_sgdm": lambda: contrib.ef21_sgdm(reducers.TopK(0.1), **options),
        "per_worker": lambda: optax.chain(
            jaxsparse.per_worker(optax.scale_by_adam(), **options),
            jaxsparse.chunked_top_k(128, **options),
        ),
    }[name]()


def made(name, where):
    """Model and optimizer, made as trainers do. The parameters' metadata say how to spread them."""
    model = Model(nnx.Rngs(0))
    tx = optax.chain(transformation(name, where), optax.sgd(0.5))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def train(where, model, optimizer, steps):
    def step(state, x):
        model, optimizer = nnx.merge(graphdef, state)
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean(jnp.square(m(x) - x)))(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), jax.lax.pmean(loss, "hosts")

    graphdef, state = nnx.split((model, optimizer))
    x = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)
    run, losses = run_on_workers(step, where, axis_name="hosts"), []
    for _ in range(steps):
        state, loss = run(state, x)
        losses.append(float(loss))
    nnx.update((model, optimizer), state)
    return losses


def states(optimizer):
    return nnx.state(optimizer, nnx.optimizer.OptState)


def assert_placed(tree, shardings):
    """Each array is where its Variable says."""
    for (path, x), wanted in zip(
        jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(shardings), strict=True
    ):
        name = jax.tree_util.keystr(path)
        assert isinstance(x.sharding, NamedSharding) or x.sharding.is_fully_replicated, name
        assert x.sharding.is_equivalent_to(wanted, x.ndim), (name, x.sharding, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ok_topk", "ef21_sgdm", "per_worker"])
def test_a_trainer_restores_each_array_where_it_was(name, tmp_path):
    """Like tunix, it asks the Variables' metadata for the shardings to restore to."""
    where = mesh()
    with jax.set_mesh(where), jax.numpy_dtype_promotion("standard"):  # Optax's Adam needs it
        model, optimizer = made(name, where)
        state = states(optimizer)
        assert_placed(state, nnx.get_named_sharding(state, where))
        own = [x for x in jax.tree.leaves(state) if x.shape[:1] == (2,) and x.ndim == 3]
        assert own
        assert all(x.sharding.num_devices == 8 for x in own)
        assert all(x.addressable_shards[0].data.size * 8 == x.size for x in own)
        losses = train(where, model, optimizer, 3)
        # XLA may have left an array elsewhere than its Variable says. From there the next step
        # would be another program, whose sums may differ in their last bits.
        state = states(optimizer)
        nnx.update(optimizer, jax.device_put(state, nnx.get_named_sharding(state, where)))
        saver = ocp.PyTreeCheckpointer()
        saver.save(tmp_path / "state", nnx.to_pure_dict(states(optimizer)))
        after = train(where, model, optimizer, 2)

        model, optimizer = made(name, where)
        expected = train(where, model, optimizer, 3)
        assert losses == expected
        target = states(optimizer)
        shardings = nnx.get_named_sharding(target, where)
        target, wanted = map(nnx.to_pure_dict, (target, shardings))
        blank = jax.tree.map(jnp.zeros_like, target)
        arguments = ocp.checkpoint_utils.construct_restore_args(blank, wanted)
        restored = saver.restore(tmp_path / "state", item=blank, restore_args=arguments)
        assert_placed(restored, wanted)
        state = states(optimizer)
        nnx.replace_by_pure_dict(state, restored)
        nnx.update(optimizer, state)
        assert train(where, model, optimizer, 2) == after


@pytest.mark.slow
@pytest.mark.parametrize("name", ["per_worker", "ef21_sgdm"])
@pytest.mark.parametrize("where", ["mesh", "simulated"])
def test_a_loop_without_an_optimizer_object_gets_variables_back(where, name):
    on_mesh = mesh() if where == "mesh" else None
    context = jax.set_mesh(on_mesh) if on_mesh else contextlib.nullcontext()
    with context, jax.numpy_dtype_promotion("standard"):
        model = Model(nnx.Rngs(0)) if on_mesh else nnx.Linear(32, 64, rngs=nnx.Rngs(0))
        params, tx = nnx.state(model, nnx.Param), transformation(name, on_mesh)
        step = lambda grads, state: tx.update(grads, state)
        run = run_on_workers(step, on_mesh or 2, axis_name="hosts", batch_argnums=())
        start = lambda params: jaxsparse.shard(tx.init(params), on_mesh or 2, "hosts")
        updates, state = run(params, start(params))
        plain, _ = run(nnx.as_pure(params), start(nnx.as_pure(params)))
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert jax.tree.structure(state) == jax.tree.structure(start(params))
    for one, other in zip(jax.tree.leaves(updates), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(one, other)


def test_arrays_stay_arrays_where_parameters_are():
    where = mesh()
    params = {"kernel": jnp.zeros((32, 64))}
    state = jaxsparse.spardl(0.1, axis_name="hosts", mesh=where).init(params)
    is_variable = lambda node: isinstance(node, nnx.Variable)
    assert not any(map(is_variable, jax.tree.leaves(state, is_leaf=is_variable)))


def test_rules_for_logical_names_leave_the_axes_of_a_state():
    """Names in a state are axes of the mesh, whatever rules a trainer has for logical ones."""
    where = mesh()
    rules = (("embed", "fsdp"), ("mlp", "tp"), ("hosts", None), ("fsdp", "tp"), ("tp", "fsdp"))
    with jax.set_mesh(where), jax.numpy_dtype_promotion("standard"):
        params = nnx.state(Model(nnx.Rngs(0)), nnx.Param)
        state = transformation("per_worker", where).init(params)
    is_variable = lambda node: isinstance(node, nnx.Variable)
    variables = [v for v in jax.tree.leaves(state, is_leaf=is_variable) if is_variable(v)]
    assert len(variables) > 3
    for variable in variables:
        wanted = variable.get_value().sharding.spec
        assert "hosts" in wanted
        assert nn.logical_to_mesh_axes(variable.out_sharding, rules) == wanted
        with logical_axis_rules(rules):
            assert nnx.spmd.get_var_pspec(variable) == wanted


def test_variables_that_hold_nothing_stay():
    """In a masked tree, such as a fragment of streaming, some Variables hold nothing."""
    params = nnx.state(nnx.Linear(32, 64, rngs=nnx.Rngs(0)), nnx.Param)
    part = jax.tree.map(lambda x: x if x.ndim == 2 else None, params)
    tx = jaxsparse.spardl(0.1, axis_name=None)
    updates, state = jax.jit(tx.update)(part, tx.init(part))
    assert jax.tree.structure(updates) == jax.tree.structure(part)
    assert sum(int(jnp.count_nonzero(x)) for x in jax.tree.leaves(updates)) > 0
    _, state = jax.jit(tx.update)(part, state)
    assert int(state.skipped) == 0


def test_paths_are_the_same_where_parameters_are_variables():
    """In `init`, in `update`, and for parts of a tree: a policy may be an exact one."""
    model = nnx.Sequential(
        nnx.Linear(20, 30, rngs=nnx.Rngs(0)), nnx.Linear(30, 20, rngs=nnx.Rngs(1))
    )
    params = nnx.state(model, nnx.Param)
    paths = [f"['layers'][{i}]['{name}']" for i in range(2) for name in ("bias", "kernel")]
    seen = []

    def policy(path, shape):
        seen.append(path)
        return {paths[1]: reducers.TopK(0.1), paths[3]: None}.get(path)

    tx = jaxsparse.partition(policy, axis_name=None)
    for each in (tx, tx.of_parts(params)):
        state = each.init(params)
        updates, state = jax.jit(each.update)(params, state)
        assert [*state.residual] == ["layers.0.kernel"]
        last = [tree["layers"][1] for tree in (updates, params)]
        jax.tree.map(np.testing.assert_array_equal, *last)
    assert set(seen) == set(paths)
