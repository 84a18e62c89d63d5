"""Runs the contract's cases as one of several processes, and compares with simulated workers.

A script for `test_processes.py`: `run_contract.py EXPECTED.npz CASE...`. The file has the results
of the simulated workers. The script exits with an error at the first difference.
"""

import sys

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxsparse import fail_at_once

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_disable_most_optimizations", True)

STEPS = 3


def check(name, expected):
    import contract
    from workers import feedback_loop, mesh

    workers = jax.device_count()
    reducer = contract.CASES[name].reducer
    stacked = contract.gradients(workers, STEPS).swapaxes(0, 1)
    sharding = NamedSharding(mesh(workers), PartitionSpec("data"))
    given = jax.make_array_from_callback(stacked.shape, sharding, lambda index: stacked[index])
    results = feedback_loop(reducer, workers, "shard_map")(given)
    for i, leaf in enumerate(jax.tree.leaves(results)):
        for shard in leaf.addressable_shards:
            one, other = np.asarray(shard.data), expected[f"{name} {i}"][shard.index]
            if contract.quantizes(reducer):
                # XLA rounds level * scale or not, depending on what it fuses. Later steps amplify
                # that.
                np.testing.assert_allclose(one[:, 0], other[:, 0], rtol=1e-5, atol=1e-3)
            else:
                np.testing.assert_array_equal(one, other, err_msg=f"{name}, output {i}")


if __name__ == "__main__":
    jax.distributed.initialize()
    path, *names = sys.argv[1:]
    with fail_at_once(), np.load(path) as expected:
        for name in names:
            check(name, expected)
            print(name, "equal", flush=True)
