"""One worker's function that names the workers' axis, as code for jax.jit does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from workers import mesh, some

import jaxsparse
from jaxsparse import PerWorker, shard
from jaxsparse.outer.parallel import run_on_workers
from jaxsparse.training.rewriting import rewritten

RNG = np.random.default_rng(0)
START = {name: RNG.normal(size=(16, 16)).astype(np.float32) / 4 for name in "abcdef"}
INPUTS = RNG.normal(size=(72, 16)).astype(np.float32)


def model(to, jitted):
    """A model with constraints in all kinds of inner programs. `to(x)` constrains x."""

    @jax.custom_vjp
    def slope_of_one(x):
        return to(jnp.tanh(x))

    slope_of_one.defvjp(lambda x: (slope_of_one(x), None), lambda _, g: (to(g),))
    of_two = jax.custom_jvp(lambda x: to(2 * x))
    of_two.defjvp(lambda x, t: (of_two(x[0]), to(2 * t[0])))

    @jax.checkpoint
    def again(x, w):
        return to(jnp.sin(x @ w))

    def apply(params, x):
        x = to(x @ params["a"])
        x = slope_of_one(jitted(x, params["b"]))
        x = jitted(of_two(x), params["b"])
        x = again(x, params["c"])
        x, _ = jax.lax.scan(lambda x, w: (to(x @ w), None), x, jnp.stack([params["d"]] * 2))
        x = jax.lax.cond(jnp.sum(params["e"]) > 0, lambda x: to(x + 1), lambda x: to(x - 1), x)
        x = jax.lax.fori_loop(0, 2, lambda _, x: to(x * 0.5), x)
        return jnp.mean((to(x @ params["e"]) @ params["f"]) ** 2)

    return apply


CASES = [
    ((2, 2), False, 72),
    ((2, 2), True, 72),
    ((2, 2), False, 4),  # a row a device
    ((3, 2), True, 72),
    ((2,), True, 72),
    ((3,), False, 3),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_constraints_in_inner_programs_leave_the_gradient(case):
    sizes, named, rows = case
    where, x = mesh(sizes), INPUTS[:rows]
    sharding = NamedSharding(where, P(where.axis_names)) if named else P(where.axis_names)
    to = lambda x: jax.lax.with_sharding_constraint(x, sharding)
    # An inner jit takes shardings in the same words, but of rows that they divide.
    shardings = {"out_shardings": sharding} if named and rows == 72 else {}
    apply = model(to, jax.jit(lambda x, w: to(jnp.cos(x @ w)), **shardings))

    def step(params, x):
        loss, grads = jax.value_and_grad(apply)(params, x)
        jax.debug.callback(lambda _: None, loss)
        return PerWorker.wrap((loss, grads))

    inner = tuple(a for a in where.axis_names if a != "data")
    params = jax.device_put(START, NamedSharding(where, P(None, inner or None)))
    with jax.set_mesh(where):
        found = run_on_workers(step, where, batch_argnums=1)(params, x)
    # All layers work row by row, so workers' gradients have the mean of one worker with all rows.
    plain = model(lambda x: x, lambda x, w: jnp.cos(x @ w))
    expected = jax.value_and_grad(plain)(START, x)
    for own, mean in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.mean(own, 0), mean, rtol=1e-5, atol=1e-6)


SMALL = [((2, 2), False), ((2, 2), True), ((3,), True)]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_the_axis_is_taken_out(case):
    sizes, named = case
    where, workers = mesh(sizes), sizes[0]
    spec = P(where.axis_names, None)
    sharding = NamedSharding(where, spec) if named else spec

    @jax.jit
    def total(x):
        x = jax.lax.with_sharding_constraint(x, sharding)
        return PerWorker.wrap({"sum": x.sum(), "axis": jax.lax.axis_index("data")})

    run = run_on_workers(total, where, batch_argnums=0)
    x = np.arange(2.0 * 5 * workers, dtype=np.float32).reshape(5 * workers, 2)
    found = run(x)  # a bare specification is of this mesh, which no jax.set_mesh names
    np.testing.assert_array_equal(found["sum"].value, x.reshape(workers, -1).sum(1))
    np.testing.assert_array_equal(found["axis"].value, np.arange(workers))


# How a mesh has its axes, and how shardings are written: bare, of the whole mesh, or a worker's,
# whose own axis is manual where axes are Explicit.
WAYS = [
    (AxisType.Auto, "bare"),
    (AxisType.Auto, "whole"),
    (AxisType.Explicit, "bare"),
    (AxisType.Explicit, "own"),
]


@pytest.mark.parametrize("way", some(WAYS, [WAYS[3]]), ids=lambda way: "-".join(map(str, way)))
def test_a_model_that_holds_its_mesh_gives_equal_numbers(way):
    """Models for jax.jit hold a mesh, for constraints, products and a shard_map of their own."""
    kind, written = way
    names, is_explicit = ("data", "fsdp"), kind == AxisType.Explicit
    where = mesh((2, 2), kind)
    rows = P("fsdp" if is_explicit else names)
    to = jax.reshard if is_explicit else jax.lax.with_sharding_constraint

    def loss_of(params, x):
        types = jax.sharding.get_abstract_mesh().axis_types
        own = where if written == "whole" else Mesh(where.devices, names, axis_types=types)
        sharding = rows if written == "bare" else NamedSharding(own, rows)
        out = {"out_sharding": sharding} if is_explicit else {}
        product = lambda x, w: to(jnp.einsum("bi,ij->bj", x, w, **out), sharding)
        x, _ = jax.lax.scan(lambda x, w: (product(x, w), None), to(x, sharding), params["a"])
        options = {} if written == "bare" else {"mesh": own}
        x = jax.shard_map(jnp.tanh, in_specs=P("fsdp"), out_specs=P("fsdp"), **options)(x)
        return jnp.mean(product(x, params["b"]) ** 2)

    def step(params, state, x):
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        updates, state = tx.update(grads, state, params)
        return updates, state, jax.lax.pmean(loss, "data")

    start = {"a": np.stack([START["a"], START["b"]]), "b": START["c"]}
    specs = {"a": P(None, None, "fsdp"), "b": P(None, "fsdp")}
    put = lambda x, spec: jax.device_put(x, NamedSharding(where, spec))
    params = {name: put(x, P() if is_explicit else specs[name]) for name, x in start.items()}
    tx = jaxsparse.top_k(1.0, is_dense=lambda *_: False)
    with jax.set_mesh(where):
        x = put(INPUTS[:8], P(names))
        state = shard(tx.init(params), where)
        updates, _, loss = run_on_workers(step, where, batch_argnums=2)(params, state, x)
    of_one = lambda p: jnp.mean((jnp.tanh(INPUTS[:8] @ p["a"][0] @ p["a"][1]) @ p["b"]) ** 2)
    expected, gradient = jax.value_and_grad(of_one)(start)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    for name in start:
        np.testing.assert_allclose(updates[name], gradient[name], rtol=1e-5, atol=1e-6)


def test_a_program_that_is_called_often_stays_one():
    where = mesh((2, 2))
    layer = jax.jit(lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(where, P("data"))))
    program = jax.make_jaxpr(lambda x: layer(x) + layer(x))(jnp.ones((4, 2)))
    assert program.eqns[0].params["jaxpr"] is program.eqns[1].params["jaxpr"]
    without = rewritten(program, "data", where, 2, is_mapped=True)
    assert "'data'" in str(program)
    assert "spec=P('data'" not in str(without)
    first, second = (equation.params["jaxpr"] for equation in without.eqns[:2])
    assert first is second
