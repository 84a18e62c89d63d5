"""Steps of 8 devices as they are compiled, and as JAX's cache gives the same programs back."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from workers import mesh

import jaxsparse
from jaxsparse.contrib import ok_topk
from jaxsparse.outer.parallel import run_on_workers

PARAMS = {"kernel": jnp.zeros((40, 30)), "bias": jnp.zeros(30)}


def exchanged(**options):
    """The deltas of some steps. Its reducer communicates within branches."""
    where = mesh(8)
    tx = ok_topk(0.1, **options)
    step = run_on_workers(
        lambda rows, state: tx.update(jax.tree.map(lambda x: x[0], rows), state),
        where,
        batch_argnums=0,
    )
    state, found = jaxsparse.shard(tx.init(PARAMS), where), []
    for _ in range(3):
        updates, state = step(gradients(), state)
        found.append(jax.device_get(updates))
    return found


def local():
    step = lambda params, batch: (jax.tree.map(lambda p, g: p - g[0], params, batch), None)
    train = jaxsparse.LocalSteps(
        step, ok_topk(0.1), optax.sgd(1.0), mesh(8), every=1, params=lambda state: state
    )
    state = train.init(PARAMS)
    for t in range(3):
        state, _ = train(state, gradients(), t)
    return jax.device_get(state.params)


def gradients():
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda p: rng.normal(size=(8, *p.shape)).astype(np.float32), PARAMS)


if __name__ == "__main__":
    cases = {
        "dense leaves": exchanged,
        "nothing but the flag": lambda: exchanged(is_dense=lambda path, shape: False),
        "buckets": lambda: exchanged(is_dense=lambda path, shape: False, bucket_size=300),
        "delay": lambda: exchanged(delay=1),
        "local steps": local,
    }
    for name, run in cases.items():
        compiled = run()
        jax.clear_caches()
        jax.tree.map(np.testing.assert_array_equal, run(), compiled)
        print(name, "equal", flush=True)
