"""A check, for debugging, that copies of one array on several devices are equal bit for bit."""

import hashlib
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.tree_util import keystr


def check_replicas(tree: Any) -> None:
    """Raises unless all devices hold equal bits of whatever is replicated.

    JAX tracks types, not bits: parameters that are typed as equal on all workers can still drift
    apart, by a sum whose order differs between devices or by hardware that errs. Call it after a
    step while debugging, or now and then in long runs. It copies every replica to the host.

    Args:
        tree: arrays as the trainer sees them, such as a `TrainState`. What only one device holds
            (`PerWorker` arrays) has no copies to compare. In several processes all must call it,
            with the same tree.

    Raises:
        RuntimeError: naming the first array whose copies differ, where, and on which devices.
        ValueError: called on traced arrays, inside a compiled function.
    """
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = f"leaf{keystr(path)}"
        if isinstance(leaf, jax.core.Tracer):
            raise ValueError(
                f"{name} is traced: check_replicas compares what devices hold, so call it on the "
                "step's outputs, outside of jax.jit and of the step"
            )
        if isinstance(leaf, jax.Array):
            _check(name, leaf)


def _check(name: str, x: jax.Array) -> None:
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    pieces = x.sharding.devices_indices_map(x.shape)
    places = list(dict.fromkeys(map(str, pieces.values())))
    if len(places) == len(pieces):
        return
    first: dict[str, Any] = {}
    problem = ""
    for shard in sorted(x.addressable_shards, key=lambda shard: shard.device.id):
        other = first.setdefault(str(shard.index), shard)
        if other is not shard and not problem:
            problem = _difference(name, other, shard)
    if not x.is_fully_addressable:
        problem = _between_processes(name, first, places, problem)
    if problem:
        raise RuntimeError(
            f"{problem}. Replicas have drifted apart: look for a sum whose order differs between "
            "devices, a branch on a local value, or state that was restored on some of them only"
        )


def _difference(name: str, one: Any, other: Any) -> str:
    a, b = (np.atleast_1d(np.asarray(shard.data)) for shard in (one, other))
    differs = (_bytes(a) != _bytes(b)).any(axis=-1)
    if not differs.any():
        return ""
    at = tuple(int(i) for i in np.argwhere(differs)[0])
    return (
        f"{name} differs between {one.device} and {other.device} in {differs.sum()} of {a.size} "
        f"elements, first at {at}: {a[at]} and {b[at]}"
    )


def _bytes(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x)[..., None].view(np.uint8)


def _between_processes(name: str, own: dict[str, Any], places: list[str], problem: str) -> str:
    """The problem found here or elsewhere; all processes take part, so that all of them raise."""
    digests = np.zeros((len(places) + 1, 2), np.uint32)
    digests[-1] = bool(problem)
    for row, place in zip(digests, places):
        if place in own:
            data = _bytes(np.asarray(own[place].data)).tobytes()
            row[:] = np.frombuffer(hashlib.blake2b(data, digest_size=8).digest(), np.uint32)
            row[0] |= 1  # 0 is for what a process does not hold
    everywhere = np.asarray(multihost_utils.process_allgather(digests))
    if problem:
        return problem
    if everywhere[:, -1].any():
        process = int(np.argmax(everywhere[:, -1, 0]))
        return f"{name} differs between devices of process {process}"
    for of_place in everywhere.swapaxes(0, 1):
        holders = np.flatnonzero(of_place[:, 0])
        for holder in holders[1:]:
            if (of_place[holder] != of_place[holders[0]]).any():
                return f"{name} differs between processes {holders[0]} and {holder}"
    return ""
