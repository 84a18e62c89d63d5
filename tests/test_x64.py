"""Steps run under JAX_ENABLE_X64, where Python numbers and counters would widen unasked."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES
from workers import some

import jaxsparse
from jaxsparse.systems import SYSTEMS

SCRIPT = """
import functools
import jax, jax.numpy as jnp, numpy as np
import jaxsparse
from jaxsparse.outer.parallel import run_on_workers

assert jnp.zeros(()).dtype == jnp.float64
jax.config.update("jax_numpy_dtype_promotion", "strict")
PARAMS = {"w": jnp.zeros((12, 10), jnp.float32), "b": jnp.zeros(3), "h": jnp.zeros(5, jnp.bfloat16)}
METHODS = [
    functools.partial(jaxsparse.sketched_sgd, k=4, cols=16, rows=3, bucket_size=70),
    functools.partial(jaxsparse.sketched_sgd, k=4, cols=16, rows=3, selection="heavymix"),
    functools.partial(jaxsparse.sketched_sgd, 2, rows=1, table_dtype="float16"),
    functools.partial(jaxsparse.true_top_k, 4),
    functools.partial(jaxsparse.quantized, "ternary", group_size=16),
    functools.partial(jaxsparse.quantized, "int2", group_size=16, scale="e8m0"),
]
is_dense = lambda path, shape: len(shape) < 2
MADE = [method(momentum=0.9, is_dense=is_dense) for method in METHODS]
MADE.append(jaxsparse.dense(momentum=0.9))


def step(tx, state, batch):
    params, opt_state = state

    def loss(params):
        return sum(
            jnp.sum((x.astype(jnp.float32) - batch.mean()) ** 2) for x in jax.tree.leaves(params)
        )

    gradient = jax.grad(loss)(jaxsparse.local(params))
    updates, opt_state = tx.update(gradient, opt_state, params)
    params = jax.tree.map(lambda p, u: p - u * jnp.asarray(0.1, u.dtype), params, updates)
    return (params, opt_state), None


def types(tree):
    return [(x.dtype, x.shape) for x in jax.tree.leaves(tree)]


mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
for tx in MADE:
    state = jaxsparse.shard((PARAMS, tx.init(PARAMS)), mesh)

    def epoch(state, batch):
        batches = jnp.stack([batch] * 3)
        return jax.lax.scan(functools.partial(step, tx), state, batches)[0]

    after = run_on_workers(epoch, mesh)(state, jnp.arange(4, dtype=jnp.float32))
    assert types(after) == types(state), (types(after), types(state))
    assert all(np.all(np.isfinite(np.asarray(x, np.float64))) for x in jax.tree.leaves(after))
    assert all(np.any(np.asarray(x, np.float64)) for x in jax.tree.leaves(after[0]))
    assert not any(x.dtype == jnp.float64 for x in jax.tree.leaves(after[1]))
print("passed")
"""


@pytest.mark.slow
def test_a_scan_of_steps_keeps_its_types():
    environment = {**os.environ, "JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu"}
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.stdout == "passed\n", run.stderr


WIDE = {
    "a": jnp.ones((24, 20), jnp.float32),
    "b": np.ones((20, 16)),
    "c": jnp.ones(7, jnp.bfloat16),
}
QUICK = ("dense", "omni_reduce", "powersgd")


def kinds(tree):
    return jax.tree.map(lambda x: (x.shape, str(x.dtype), x.weak_type), tree)


@pytest.mark.parametrize("name", some(sorted(SYSTEMS), QUICK))
def test_accumulators_keep_their_dtype_beside_wide_gradients(name):
    """So a scan or a branch with a step in it has the types that it starts with."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        params = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), WIDE)
        assert params["b"].dtype == jnp.float64
        for case in CASES[name].values():
            for settings in case:
                if name != "dense":
                    settings = {"is_dense": lambda path, shape: len(shape) < 2, **settings}
                tx = getattr(jaxsparse, name)(**settings, axis_name=None)
                state = jax.eval_shape(tx.init, params)
                assert all(x.dtype.itemsize <= 4 for x in jax.tree.leaves(state)), settings
                updates, after = jax.eval_shape(tx.update, params, state, params)
                assert kinds(after) == kinds(state), settings
                assert kinds(updates) == kinds(params), settings
