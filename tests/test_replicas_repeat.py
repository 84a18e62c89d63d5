"""Decoding gives the same bits again and again, and on all workers. Otherwise replicas drift apart.

It also runs on a GPU, where sums by atomics have no order. Only a worker's own sketch is made of
those. Data are real numbers, because sums of integers are exact in any order. There are enough of
them that entries of several workers meet.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import CASES, REPRESENTATIVES, has_sketch
from workers import feedback_loop

WORKERS, TIMES = 8, 20
# A GPU is asked of all systems. benchmarks/gpu.py names its platforms so.
ON_GPU = "cuda" in os.environ.get("JAX_PLATFORMS", "")
NAMES, SIZE = (CASES, 2**18) if ON_GPU else (REPRESENTATIVES, 20_011)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_repeated_exchanges_are_bitwise_equal(name):
    x = np.random.default_rng(0).normal(size=(WORKERS, 2, SIZE)).astype(np.float32) ** 3
    run = feedback_loop(CASES[name].reducer, WORKERS)
    x = jnp.asarray(x)
    first = jax.tree.map(np.asarray, run(x))
    mean = first[1].mean
    assert np.any(mean)
    np.testing.assert_array_equal(mean, np.broadcast_to(mean[:1], mean.shape))
    same_runs = jax.default_backend() == "cpu" or not has_sketch(CASES[name].reducer)
    for _ in range(TIMES - 1):
        again = run(x)
        if same_runs:
            jax.tree.map(np.testing.assert_array_equal, again, first)
        else:
            mean = np.asarray(again[1].mean)
            np.testing.assert_array_equal(mean, np.broadcast_to(mean[:1], mean.shape))
