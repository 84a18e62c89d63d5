"""What each process loads of the data: the rows that its own devices need."""

from collections.abc import Iterator
from typing import TypeVar

import digits
import jax
import numpy as np
from digits import Digits
from jax.sharding import NamedSharding

T = TypeVar("T")


def own_rows(rows: int, sharding: NamedSharding) -> np.ndarray:
    """Which of a batch's rows this process's devices hold, in order."""
    slices = sharding.addressable_devices_indices_map((rows,)).values()
    return np.unique(np.concatenate([np.arange(rows)[index] for index in slices]))


def to_global(own: T, rows: int, sharding: NamedSharding) -> T:
    """A tree of arrays of `rows` rows over all processes, of which this one gives its own."""
    make = jax.make_array_from_process_local_data
    return jax.tree.map(lambda x: make(sharding, x, (rows, *x.shape[1:])), own)


def batches(
    data: Digits, size: int, steps: int, seed: int, sharding: NamedSharding, skip: int = 0
) -> Iterator[Digits]:
    """Random batches of all processes together, but for the first `skip` of the `steps`.

    All draw the same row numbers, so a run does not depend on how many processes share it, but
    each reads only its own rows.
    """
    own = own_rows(size, sharding)
    rng = np.random.default_rng(seed)
    for _ in range(skip):
        rng.integers(len(data.labels), size=size)
    for _ in range(steps - skip):
        chosen = rng.integers(len(data.labels), size=size)[own]
        yield to_global(Digits(data.images[chosen], data.labels[chosen]), size, sharding)


def whole(data: Digits, sharding: NamedSharding) -> Digits:
    """All rows once, padded to what the devices can share by rows with the label -1."""
    count = len(data.labels)
    rows = digits.shared_batch(count, sharding.num_devices)
    chosen = own_rows(rows, sharding)
    inside = np.minimum(chosen, count - 1)
    labels = np.where(chosen < count, data.labels[inside], np.int32(-1))
    return to_global(Digits(data.images[inside], labels), rows, sharding)
