"""Trains by EF21-SGDM on a mesh with an inner axis as one of several processes.

A script for `test_ef21.py`. It exits with an error if the update is not the mean of the workers'
momenta less the mean of their residuals.
"""

import jax
import numpy as np
import on_meshes as cases
from jax.experimental import multihost_utils

import jaxsparse
from jaxsparse import ef21_sgdm, fail_at_once, shard, systems
from jaxsparse.outer.parallel import run_on_workers

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_disable_most_optimizations", True)


def check():
    where = cases.mesh((jax.process_count(), jax.local_device_count()))
    tx = ef21_sgdm(systems.TopK(0.1), axis_name="hosts", is_dense=cases.is_bias)

    def step(grads, state):
        return tx.update(jax.tree.map(lambda g: g[0], grads), state)

    run = run_on_workers(step, where, axis_name="hosts", batch_argnums=0)
    params = cases.put(where, {name: np.zeros(s, np.float32) for name, s in cases.SHAPES.items()})
    state = shard(tx.init(params), where, "hosts")
    whole = lambda x: np.asarray(multihost_utils.process_allgather(x, tiled=True), np.float64)
    for seed in range(3):
        grads = cases.gradients(where.shape["hosts"], seed)
        updates, state = run(cases.put(where, grads, "hosts"), state)
        jax.block_until_ready(state)
    for name in cases.SHAPES:
        own = whole(state.momentum[name].value)
        if name in state.feedback.residual:
            own = own - whole(state.feedback.residual[name].value)
        np.testing.assert_allclose(whole(updates[name]), own.mean(0), atol=1e-2, err_msg=name)
    jaxsparse.check_replicas(state)


if __name__ == "__main__":
    jax.distributed.initialize()
    with fail_at_once():
        check()
        print("equal", flush=True)
