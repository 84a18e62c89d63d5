"""Transformations survive what plain functions of JAX and Optax's Adam survive."""

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from at_density import settings_at
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from table import EXCHANGES
from workers import some

import jaxsparse
from jaxsparse import reducers

RNG = np.random.default_rng(0)
PARAMS = {"w": jnp.float32(RNG.normal(size=(40, 32))), "b": jnp.float32(RNG.normal(size=32))}


def of_system(name):
    return EXCHANGES[name].transformation(**settings_at(name, 0.1, 1280), axis_name=None)


MADE = {
    **{name: of_system(name) for name in ("dense", "ef21_sgdm", "powersgd")},
    "options": jaxsparse.exchange(
        jaxsparse.warm_up(reducers.TopK(0.1), steps=2, stages=2),
        axis_name=None,
        momentum=0.9,
        nesterov=True,
        accumulator_dtype="bfloat16",
    ),
    "own moments": optax.chain(
        jaxsparse.per_worker(optax.trace(0.5), axis_name=None), jaxsparse.dense(axis_name=None)
    ),
}
names = pytest.mark.parametrize("name", some(MADE, ("dense",)))


def types(tree):
    return jax.tree.map(lambda x: str(jax.typeof(x)), tree)


def near(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    assert types(found) == types(wanted)
    wide = lambda x: np.asarray(x, np.float64)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(wide(x), wide(y), rtol=1e-5, atol=1e-6),
        found,
        wanted,
    )


@names
def test_pickles_exports_and_runs_without_jit(name):
    tx = MADE[name]
    state = tx.init(PARAMS)
    compiled = jax.jit(tx.update)
    found = compiled(PARAMS, state, PARAMS, unexpected=1.0)
    assert types(found[1]) == types(state)
    again = compiled(PARAMS, found[1], PARAMS, unexpected=1.0)
    assert compiled._cache_size() == 1
    back = cloudpickle.loads(cloudpickle.dumps(tx))
    near(back.init(PARAMS), state)
    near(jax.jit(back.update)(PARAMS, state, PARAMS), found)
    with jax.disable_jit():
        near(tx.init(PARAMS), state)
        near(tx.update(PARAMS, state, PARAMS), found)
    exported = jax.export.export(compiled)(PARAMS, found[1], PARAMS, unexpected=1.0)
    near(exported.call(PARAMS, found[1], PARAMS, unexpected=1.0), again)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS)
    assert types(tx.init(abstract)) == types(state)


@names
def test_leaves_may_be_cut_over_an_explicit_axis(name):
    """The state is cut as they are, and keeps its types. Updates are those of one device."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))
    tx, spec = MADE[name], {"w": PartitionSpec(None, "x"), "b": PartitionSpec()}
    cut = {key: jax.device_put(x, NamedSharding(mesh, spec[key])) for key, x in PARAMS.items()}
    wanted, _ = jax.jit(tx.update)(PARAMS, tx.init(PARAMS), PARAMS)
    with jax.set_mesh(mesh):
        state = tx.init(cut)
        own = [str(jax.typeof(x)) for x in jax.tree.leaves(state) if x.shape[-2:] == (40, 32)]
        assert all("40,32@x]" in one for one in own)
        assert types(jax.jit(tx.init)(cut)) == types(state)
        updates, after = jax.jit(tx.update)(cut, state, cut)
    assert types(after) == types(state)
    assert types(updates) == types(cut)
    for key, x in wanted.items():
        np.testing.assert_allclose(updates[key], x, rtol=1e-4, atol=1e-5)
