"""Slow NumPy twins of the extraction into slots, an element at a time."""

import jax.numpy as jnp
import numpy as np

from jaxsparse.arrays.hashing import bounded, combine


def hash_extract(x, threshold, slots, slot_of):
    """DRAGONN, Alg. 1: indices (d for an empty slot) and values."""
    x = np.asarray(x)
    indices, values = np.full(slots, len(x)), np.zeros(slots, x.dtype)
    for i in range(len(x)):
        if abs(np.float32(x[i])) >= threshold:
            indices[slot_of[i]], values[slot_of[i]] = i, x[i]
    return indices, values


def random_sets(size, slots, seed, min_tile=2**14):
    """The slot of each element in `slot_max`."""
    rows = min(-(-min_tile // slots), size // slots)
    tile = rows * slots
    draw = lambda words, n: np.asarray(bounded(combine(seed, *words), n)).astype(int)
    tiles = jnp.arange(-(-size // tile), dtype=jnp.int32)
    starts = draw([tiles], tile)
    turns = draw([jnp.arange(rows, dtype=jnp.int32), 1], slots) if rows > 1 else [0]
    number, place = np.divmod(np.arange(size), tile)
    row, column = np.divmod((place + starts[number]) % tile, slots)
    return (column + np.take(turns, row)) % slots


def largest_of_sets(x, slot_of, slots):
    """The largest magnitude of each slot's elements."""
    largest = np.zeros(slots, np.float32)
    np.maximum.at(largest, slot_of, np.abs(np.asarray(x).astype(np.float32)))
    return largest
