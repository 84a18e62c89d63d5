"""Trains on a mesh with an inner axis as one of several processes.

A script for `test_processes.py`: `run_meshes.py CASE...`. It exits with an error if replicas
differ, or if W times the updates and the residuals do not add up to all gradients. Cases that do
not conserve sums in each step are not checked for the latter.
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
    from contract import CASES, rounds

    reducer = CASES[name].reducer
    where = cases.mesh((jax.process_count(), jax.local_device_count()))
    run, state, _ = cases.stepper(reducer, where)
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
    assert name in ("dense", "qsgd") or any(np.any(x) for x in owed.values())
    assert np.any(given["both"])
    tolerance = {"atol": 0.2} if rounds(reducer) else {"atol": 0, "rtol": 0}
    for leaf in cases.SHAPES:
        if reducer.conserves or leaf not in owed:
            total = given[leaf] + owed.get(leaf, 0.0)
            np.testing.assert_allclose(total, sent[leaf], **tolerance, err_msg=leaf)
    jaxsparse.check_replicas(state)


if __name__ == "__main__":
    jax.distributed.initialize()
    with fail_at_once():
        for name in sys.argv[1:]:
            check(name)
            print(name, "equal", flush=True)
