"""Calls of `run_on_workers` by others: under vmap, and with leaves that are no arrays."""

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P
from workers import mesh

import jaxsparse
from jaxsparse import LocalSteps, dense, shard
from jaxsparse.outer.parallel import run_on_workers


def moved(state, batch):
    return state + jax.lax.pmean(batch.mean(), "data")


@pytest.mark.parametrize("where", [2, mesh(2)], ids=["simulated", "mesh"])
@pytest.mark.parametrize("rows", [2, 3])  # as many as workers, and not
def test_vmap_over_a_parallel_step(where, rows):
    step = run_on_workers(moved, where)
    states, batches = jnp.arange(rows, dtype=float), jnp.arange(4.0 * rows).reshape(rows, 4)
    expected = states + batches.mean(1)
    np.testing.assert_allclose(jax.vmap(step)(states, batches), expected)
    alone = jax.vmap(step, in_axes=(0, None))(states, batches[0])
    np.testing.assert_allclose(alone, states + batches[0].mean())


NOT_ARRAYS = {
    "str": ("adam", r"'adam' of type str"),
    "bytes": (b"adam", r"type bytes"),
    "object": (object(), r"type object"),
    "function": (moved, r"type function"),
    "array of words": (np.array(["a"]), r"type ndarray and dtype <U1"),
}


@pytest.mark.parametrize(("leaf", "said"), NOT_ARRAYS.values(), ids=NOT_ARRAYS)
@pytest.mark.parametrize("where", [2, mesh(2)], ids=["simulated", "mesh"])
def test_a_leaf_that_is_no_array_is_named(where, leaf, said):
    step = run_on_workers(lambda state, batch: moved(state["w"], batch), where)
    state, fix = {"w": jnp.ones(3), "by": {"name": leaf}}, ".*: keep .* out of the tree"
    for call in (step, step.lower):
        with pytest.raises(ValueError, match=r"argument 0\['by'\]\['name'\] is .*" + said + fix):
            call(state, jnp.ones(4))
    with pytest.raises(ValueError, match=r"argument 1\['x'\]\[0\] is .*" + said + fix):
        step({"w": jnp.ones(3)}, {"x": [leaf]})
    with pytest.raises(ValueError, match=r"leaf\['by'\]\['name'\] is .*" + said + fix):
        shard(state, where)


def test_local_steps_name_it_too():
    run = LocalSteps(
        lambda s, b: (s, b), dense(), optax.sgd(1.0), 2, every=2, params=lambda s: s["w"]
    )
    with pytest.raises(ValueError, match=r"leaf\['name'\] is 'adam' of type str"):
        run.init({"w": jnp.ones(3), "name": "adam"})


def test_numbers_and_none_are_fine():
    step = run_on_workers(lambda state, batch: moved(state["w"] * state["f"], batch), 2)
    state = {"w": jnp.ones(3), "n": None, "i": 3, "f": 2.0, "empty": optax.EmptyState()}
    np.testing.assert_allclose(step(state, jnp.ones(4)), 3 * np.ones(3))
    assert shard(state, 2)["n"] is None


def test_an_error_of_the_step_itself_stays_as_it_is():
    step = run_on_workers(lambda state, batch: len(7), 2)
    with pytest.raises(TypeError, match="has no len"):
        step(jnp.ones(3), jnp.ones(4))


def test_arguments_by_name_are_refused():
    """They would be neither compared nor counted."""
    step = jaxsparse.watch(jax.jit(lambda state, batch: state + batch.sum()), mesh(2))
    for call in (step, step.lower, run_on_workers(moved, 2)):
        with pytest.raises(ValueError, match="positional arguments only, but got batch by name"):
            call(jnp.ones(3), batch=jnp.ones(4))


def test_a_step_of_nnx_is_watched_and_others_are_refused():
    """nnx.jit has stages of its own, whose collectives are read before the first call."""
    where = mesh(2)
    batch = jax.device_put(jnp.arange(1024.0), NamedSharding(where, P("data")))
    model = nnx.Linear(1024, 2, rngs=nnx.Rngs(0))
    step = jaxsparse.watch(nnx.jit(lambda model, x: model(x[::-1])), where)
    with pytest.warns(UserWarning, match="besides the exchange, .* cross 'data'"):
        found = step(model, batch)
    expected = np.asarray(batch)[::-1] @ np.asarray(model.kernel[...])
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    for wrong in (equinox.filter_jit(moved), moved):
        with pytest.raises(ValueError, match=r"step is a \w+, and must be a .* jax\.jit"):
            jaxsparse.watch(wrong, where)
