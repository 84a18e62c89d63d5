"""Sparse vectors of many kinds, exchanged by a reducer over steps."""

import jax
import numpy as np
from workers import by_step, feedback_loop

SUPPORTS = ("random", "disjoint", "identical", "empty", "clustered")


def vectors(supports, workers, size, seed, scale=1):
    """Integers times `scale` with distinct magnitudes, on supports of about a quarter."""
    rng = np.random.default_rng(seed)
    values = (rng.permutation(workers * size) + 1).reshape(workers, size)
    values = values * rng.choice([-1, 1], (workers, size)) * float(scale)
    index, worker = np.arange(size), np.arange(workers)[:, None]
    mask = {
        "random": rng.random((workers, size)) < 0.25,
        "disjoint": index % workers == worker,
        "identical": np.broadcast_to(rng.random(size) < 0.25, (workers, size)),
        "empty": np.broadcast_to(False, (workers, size)),
        "clustered": np.broadcast_to(index < size // 4, (workers, size)),
    }[supports]
    return np.where(mask, values, 0)


def run(reducer, x, way="vmap"):
    """For each step what went into the exchange, (W, d), and what came out."""
    steps = x[:, None] if x.ndim == 2 else x
    return by_step(feedback_loop(reducer, len(x), way)(steps.astype(np.float32)))


def total(reduced, scale):
    workers = len(reduced.mean)
    np.testing.assert_array_equal(
        reduced.mean, np.broadcast_to(reduced.mean[:1], reduced.mean.shape)
    )
    return np.rint(reduced.mean[0].astype(np.float64) * workers / scale) * scale


def shares_by_quarter(reducer, steps):
    """The number of delivered elements in each quarter of the vector, by step; and all outcomes."""
    outcomes = run(reducer, steps)
    counts = [np.count_nonzero(r.mean[0].reshape(4, -1), axis=1) for _, r in outcomes]
    return np.array(counts), [r for _, r in outcomes]


def flat(accumulators, lead=1):
    """The accumulators of a state end to end, as [W, n] or another number of leading axes."""
    arrays = [np.asarray(x) for x in jax.tree.leaves(accumulators)]
    return np.concatenate([x.reshape(*x.shape[:lead], -1) for x in arrays], axis=-1)
