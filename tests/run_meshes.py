"""Trains on a mesh with an inner axis as one of several processes.

A script for `test_processes.py`: `run_meshes.py CASE...`. It exits with an error where W times the
updates and what is owed are not all gradients.
"""

import sys

import jax
import numpy as np
from jax.experimental import multihost_utils

import jaxsparse
from jaxsparse import fail_at_once

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_disable_most_optimizations", True)


def check(name):
    import on_meshes as cases
    from contract import CASES

    where = cases.mesh((jax.process_count(), jax.local_device_count()))
    run, state, _ = cases.stepper(CASES[name].reducer, where)
    workers = where.shape["hosts"]
    whole = lambda x: np.asarray(multihost_utils.process_allgather(x, tiled=True), np.float64)
    given = dict.fromkeys(cases.SHAPES, 0.0)
    sent = dict.fromkeys(cases.SHAPES, 0.0)
    for seed in range(2):
        grads = cases.gradients(workers, seed)
        updates, state = run(cases.put(where, grads, "hosts"), state)
        jax.block_until_ready(state)
        for leaf in cases.SHAPES:
            given[leaf] = given[leaf] + workers * whole(updates[leaf])
            sent[leaf] = sent[leaf] + grads[leaf].sum(0, dtype=np.float64)
    owed = {leaf: whole(node.value).sum(0) for leaf, node in state.residual.items()}
    assert any(np.any(x) for x in owed.values())
    for leaf in cases.SHAPES:
        np.testing.assert_array_equal(given[leaf] + owed.get(leaf, 0.0), sent[leaf], err_msg=leaf)
    jaxsparse.check_replicas(state)


if __name__ == "__main__":
    jax.distributed.initialize()
    with fail_at_once():
        for name in sys.argv[1:]:
            check(name)
            print(name, "equal", flush=True)
