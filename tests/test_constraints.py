"""Steps with sharding constraints that name the workers' axis, as code for jax.jit has them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxsparse
from jaxsparse import data_parallel, shard
from jaxsparse.training import constraints

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


def step_of(to, jitted, tx):
    apply = model(to, jitted)

    def step(state, x):
        params, opt_state = state
        loss, grads = jax.value_and_grad(apply)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        jax.debug.callback(lambda _: None, loss)
        return (optax.apply_updates(params, updates), opt_state), jax.lax.pmean(loss, "data")

    return step


def trained(where, via, named, names_workers, rows):
    """Losses and a parameter of three steps whose constraints name the workers' axis, or not."""
    inner = tuple(a for a in where.axis_names if a != "data")
    spec = P(("data", *inner) if names_workers else inner)
    sharding = NamedSharding(where, spec) if named else spec
    is_bare = not inner and not names_workers  # nothing is left to constrain
    to = (lambda x: x) if is_bare else lambda x: jax.lax.with_sharding_constraint(x, sharding)
    # An inner jit takes shardings in the same words, but of rows that they divide.
    shardings = {"out_shardings": sharding} if named and not is_bare and rows == 72 else {}
    jitted = jax.jit(lambda x, w: to(jnp.cos(x @ w)), **shardings)
    tx = optax.chain(jaxsparse.top_k(0.2, momentum=0.5, is_dense=lambda *_: False), optax.sgd(0.5))
    params = jax.device_put(START, NamedSharding(where, P(None, inner or None)))
    run = data_parallel(step_of(to, jitted, tx), where, via=via)
    state, losses = shard((params, tx.init(params)), where), []
    with jax.set_mesh(where):
        for _ in range(3):
            state, loss = run(state, INPUTS[:rows])
            losses.append(float(loss))
    return losses, np.asarray(state[0]["a"])


@functools.cache
def grid(*sizes):
    names = ("data", "fsdp")[: len(sizes)]
    devices = jax.devices()[: np.prod(sizes)]
    auto = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(sizes, names, axis_types=auto, devices=devices)


CASES = [
    ((2, 2), "vmap", False, 72),
    ((2, 2), "vmap", True, 72),
    ((2, 2), "vmap", False, 4),  # a row a device
    ((2, 2), "shard_map", True, 72),
    ((3, 2), "vmap", True, 72),
    ((2,), None, True, 72),
    ((3,), None, True, 3),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_constraints_written_both_ways_give_equal_numbers(case):
    sizes, via, named, rows = case
    losses, kernel = trained(grid(*sizes), via, named, True, rows)
    expected, expected_kernel = trained(grid(*sizes), via, named, False, rows)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    np.testing.assert_allclose(kernel, expected_kernel, rtol=1e-5, atol=1e-6)
    assert losses[-1] < losses[0]


SMALL = [((2, 2), "vmap", False), ((2, 2), "shard_map", True), ((3,), None, True)]


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_the_axis_is_taken_out(case, check):
    sizes, via, named = case
    where, workers = grid(*sizes), sizes[0]
    spec = P(where.axis_names, None)
    sharding = NamedSharding(where, spec) if named else spec

    @jax.jit
    def total(x):
        x = jax.lax.with_sharding_constraint(x, sharding)
        return {"sum": x.sum(), "axis": jax.lax.axis_index("data")}

    run = data_parallel(total, where, via=via, batch_argnums=0, outputs="own", check=check)
    x = np.arange(2.0 * 5 * workers, dtype=np.float32).reshape(5 * workers, 2)
    with jax.set_mesh(where):
        found = run(x)
    np.testing.assert_array_equal(found["sum"], x.reshape(workers, -1).sum(1))
    np.testing.assert_array_equal(found["axis"], np.arange(workers))


def test_a_program_that_is_called_often_stays_one():
    where = grid(2, 2)
    layer = jax.jit(lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(where, P("data"))))
    program = jax.make_jaxpr(lambda x: layer(x) + layer(x))(jnp.ones((4, 2)))
    assert program.eqns[0].params["jaxpr"] is program.eqns[1].params["jaxpr"]
    assert constraints.constrains(program.jaxpr, "data")
    assert not constraints.constrains(program.jaxpr, "fsdp")
    rewritten = constraints._Rewriting("data", is_manual=False).closed(program)
    assert not constraints.constrains(rewritten.jaxpr, "data")
    first, second = (equation.params["jaxpr"] for equation in rewritten.eqns[:2])
    assert first is second
