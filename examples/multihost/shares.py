"""The share of the data that each process loads: the rows that its own devices need."""

from collections.abc import Iterator
from typing import TypeVar

import digits
import jax
import numpy as np
from digits import Digits
from jax.sharding import NamedSharding

T = TypeVar("T")


def own_rows(rows: int, sharding: NamedSharding) -> np.ndarray:
    """The numbers of the batch's rows that this process's devices hold, in order."""
    slices = sharding.addressable_devices_indices_map((rows,)).values()
    return np.unique(np.concatenate([np.arange(rows)[index] for index in slices]))


def to_global(own: T, rows: int, sharding: NamedSharding) -> T:
    """A tree of global arrays of `rows` rows, to which each process gives its own rows."""
    make = jax.make_array_from_process_local_data
    return jax.tree.map(lambda x: make(sharding, x, (rows, *x.shape[1:])), own)


def batches(
    data: Digits, size: int, steps: int, seed: int, sharding: NamedSharding, skip: int = 0
) -> Iterator[Digits]:
    """Random batches for all processes together, without the first `skip` of the `steps`.

    All processes draw the same row numbers, so a run does not depend on the number of processes.
    Each process reads only its own rows.
    """
    own = own_rows(size, sharding)
    rng = np.random.default_rng(seed)
    for _ in range(skip):
        rng.integers(len(data.labels), size=size)
    for _ in range(steps - skip):
        chosen = rng.integers(len(data.labels), size=size)[own]
        yield to_global(Digits(data.images[chosen], data.labels[chosen]), size, sharding)


def whole(data: Digits, sharding: NamedSharding) -> Digits:
    """All rows once, padded with rows of label -1 until the devices can share them equally."""
    count = len(data.labels)
    rows = digits.shared_batch(count, sharding.num_devices)
    chosen = own_rows(rows, sharding)
    inside = np.minimum(chosen, count - 1)
    labels = np.where(chosen < count, data.labels[inside], np.int32(-1))
    return to_global(Digits(data.images[inside], labels), rows, sharding)
