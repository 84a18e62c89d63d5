"""Steps run under JAX_ENABLE_X64, where Python numbers and counters would widen unasked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from table import EXCHANGES
from workers import some

WIDE = {
    "a": jnp.ones((24, 20), jnp.float32),
    "b": np.ones((20, 16)),
    "c": jnp.ones(7, jnp.bfloat16),
}
QUICK = ("dense", "omni_reduce", "powersgd")


def kinds(tree):
    return jax.tree.map(lambda x: (x.shape, str(x.dtype), x.weak_type), tree)


@pytest.mark.parametrize("name", some(sorted(EXCHANGES), QUICK))
def test_accumulators_keep_their_dtype_beside_wide_gradients(name):
    """So a scan or a branch with a step in it has the types that it starts with."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        params = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), WIDE)
        assert params["b"].dtype == jnp.float64
        for case in EXCHANGES[name].cases.values():
            for settings in case:
                if name != "dense":
                    settings = {"is_dense": lambda path, shape: len(shape) < 2, **settings}
                tx = EXCHANGES[name].transformation(**settings, axis_name=None)
                state = jax.eval_shape(tx.init, params)
                assert all(x.dtype.itemsize <= 4 for x in jax.tree.leaves(state)), settings
                updates, after = jax.eval_shape(tx.update, params, state, params)
                assert kinds(after) == kinds(state), settings
                assert kinds(updates) == kinds(params), settings
