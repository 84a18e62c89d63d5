"""Trees and frozen parts of other frameworks, trained at full budget as without the library."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from training import trainer
from workers import mesh, some

import jaxsparse
from jaxsparse import contrib, reducers, shard
from jaxsparse.outer.parallel import run_on_workers

W, STEPS = 3, 3
INPUTS = np.random.default_rng(0).normal(size=(12, 8)).astype(np.float32)
EVERYTHING = {"is_dense": lambda *_: False}
EXCHANGES = {
    "dense": jaxsparse.dense,
    "top_k": lambda: jaxsparse.top_k(1.0, **EVERYTHING),
    "ef21_sgdm": lambda: contrib.ef21_sgdm(reducers.TopK(1.0), momentum=0.0, **EVERYTHING),
}


def labels(tree):
    name = lambda path: jax.tree_util.keystr(path)
    return jax.tree.map_with_path(lambda p, _: "frozen" if "a.b" in name(p) else "own", tree)


def is_frozen(tree):
    return jax.tree.map(lambda label: label == "frozen", labels(tree))


FREEZING = {
    "nothing": optax.chain,
    "around": lambda *parts: optax.multi_transform(
        {"own": optax.chain(*parts), "frozen": optax.set_to_zero()}, labels
    ),
    "in front": lambda *parts: optax.chain(optax.masked(optax.set_to_zero(), is_frozen), *parts),
    "behind": lambda *parts: optax.chain(*parts, optax.masked(optax.set_to_zero(), is_frozen)),
}


def odd_tree(dtype=jnp.float32):
    """Keys with dots and slashes, numbers, an empty leaf, leaves of one element, and None."""
    rng = np.random.default_rng(1)
    draw = lambda *shape: jnp.asarray(0.5 * rng.normal(size=shape), dtype)
    return {
        "a.b/c": draw(8, 4),
        "a": {"b/c": draw(4)},
        "0": [draw(4, 2), draw(), draw(1), jnp.zeros((0, 4), dtype), None],
    }


def loss_of(tree, x):
    last, shift, scale, _, _ = tree["0"]
    hidden = jnp.tanh(x.astype(last.dtype) @ tree["a.b/c"] + tree["a"]["b/c"][None])
    return jnp.mean(jnp.square((hidden @ last + shift) * scale[None])).astype(jnp.float32)


def filtered():
    """An Equinox model whose last layer alone is trained. Gradients have None for the others."""
    model = eqx.nn.MLP(8, 2, 4, 1, key=jax.random.key(0))
    wanted = jax.tree.map(lambda _: False, model)
    last = jax.tree.map(eqx.is_inexact_array, model.layers[-1])
    wanted = eqx.tree_at(lambda tree: tree.layers[-1], wanted, last)
    arrays, rest = eqx.partition(model, wanted)

    def loss(arrays, x):
        return jnp.mean(jnp.square(jax.vmap(eqx.combine(arrays, rest))(x)))

    return arrays, loss


CASES = [
    *(("float32", kind, "top_k") for kind in FREEZING),
    *(("float32", "around", name) for name in EXCHANGES if name != "top_k"),
    ("bfloat16", "in front", "top_k"),
    *(("filtered", "nothing", name) for name in ("dense", "top_k")),
]


@pytest.mark.parametrize("case", some(CASES, [("float32", "around", "top_k")]), ids="-".join)
def test_a_full_budget_trains_as_without_an_exchange(case):
    tree, kind, name = case
    params, loss = filtered() if tree == "filtered" else (odd_tree(jnp.dtype(tree)), loss_of)

    step_of = lambda tx: trainer(tx, jax.grad(loss))
    optimizer = optax.sgd(0.1, momentum=0.9)
    plain, tx = FREEZING[kind](optimizer), FREEZING[kind](EXCHANGES[name](), optimizer)
    expected, found = (params, plain.init(params)), shard((params, tx.init(params)), mesh(W))
    run = run_on_workers(step_of(tx), mesh(W), donate_argnums=0)
    run_plain = jax.jit(step_of(plain))
    for _ in range(STEPS):
        expected, found = run_plain(expected, INPUTS), run(found, INPUTS)
    close = {"rtol": 0.05, "atol": 0.02} if tree == "bfloat16" else {"rtol": 1e-4, "atol": 1e-6}
    assert jax.tree.structure(found[0]) == jax.tree.structure(params)
    for x, y, start in zip(*map(jax.tree.leaves, (found[0], expected[0], params)), strict=True):
        assert x.dtype == start.dtype
        np.testing.assert_allclose(x.astype(jnp.float32), y.astype(jnp.float32), **close)
    if kind != "nothing":
        np.testing.assert_array_equal(found[0]["a.b/c"], params["a.b/c"])
        assert np.any(np.asarray(found[0]["0"][0]) != np.asarray(params["0"][0]))
