"""A check, for debugging, that an array's copies on several devices are equal bit for bit."""

import hashlib
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.tree_util import keystr

from jaxsparse.processes.group import whole_group


def check_replicas(tree: Any) -> None:
    """Raises unless all devices hold equal bits of each replicated array.

    JAX tracks types, not bits. Parameters that are typed as equal on all workers can still drift
    apart: a sum may have different orders on different devices, or hardware may err. Call it after
    a step while debugging, or now and then in long runs. It copies every replica to the host.

    It does not compare arrays that each process made for itself.

    Args:
        tree: arrays as the trainer sees them, such as a `TrainState`. All processes must call it
            with the same tree. One that calls it alone logs a warning after ten seconds, and raises
            an error after those of `jaxsparse.fail_at_once(limit=600)`.

    Raises:
        RuntimeError: copies differ. All processes raise it. It names the first such array, the
            position and the devices, if this process holds both copies, and the processes if not.
            Or another process did not call it.
        ValueError: an array is traced, inside a compiled function.
    """
    problems = []
    digests = [np.zeros(2, np.uint32)]  # the first one says whether this process found a problem
    names = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = f"leaf{keystr(path)}"
        if isinstance(leaf, jax.core.Tracer):
            raise ValueError(
                f"{name} is traced: check_replicas compares what devices hold, so call it on the "
                "step's outputs, outside of jax.jit and of the step"
            )
        if not isinstance(leaf, jax.Array):
            continue
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        pieces: Any = leaf.sharding.devices_indices_map(leaf.shape)
        places = list(dict.fromkeys(map(str, pieces.values())))
        if len(places) == len(pieces):
            continue
        first: dict[str, Any] = {}
        for shard in sorted(leaf.addressable_shards, key=lambda shard: shard.device.id):
            other = first.setdefault(str(shard.index), shard)
            if other is not shard:
                problems += _difference(name, other, shard)
        # The sharding, which all processes know, decides whether there is more to compare.
        if len({device.process_index for device in pieces}) > 1:
            names += [name] * len(places)
            digests += [_digest(first.get(place)) for place in places]
    if jax.process_count() > 1:
        if (group := whole_group()) is not None:
            group.meet("jaxsparse.check_replicas")
        digests[0][:] = bool(problems)
        problems += _between_processes(names, np.stack(digests))
    if problems:
        raise RuntimeError(
            f"{problems[0]}. Replicas have drifted apart: look for a sum whose order differs "
            "between devices, a branch on a local value, or state that was restored on some of "
            "them only"
        )


def _difference(name: str, one: Any, other: Any) -> list[str]:
    a, b = (np.atleast_1d(np.asarray(shard.data)) for shard in (one, other))
    differs = (_bytes(a) != _bytes(b)).any(axis=-1)
    if not differs.any():
        return []
    at = tuple(int(i) for i in np.argwhere(differs)[0])
    return [
        f"{name} differs between {one.device} and {other.device} in {differs.sum()} of {a.size} "
        f"elements, first at {at}: {a[at]} and {b[at]}"
    ]


def _bytes(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x)[..., None].view(np.uint8)


def _digest(shard: Any) -> np.ndarray:
    """A non-zero hash of a shard's bits; 0 if this process does not hold the shard."""
    if shard is None:
        return np.zeros(2, np.uint32)
    data = _bytes(np.asarray(shard.data)).tobytes()
    digest = np.frombuffer(hashlib.blake2b(data, digest_size=8).digest(), np.uint32)
    return digest | np.array([1, 0], np.uint32)


def _between_processes(names: list[str], digests: np.ndarray) -> list[str]:
    everywhere = np.asarray(multihost_utils.process_allgather(digests))
    for name, of_place in zip(names, everywhere.swapaxes(0, 1)[1:]):
        holders = np.flatnonzero(of_place[:, 0])
        for holder in holders[1:]:
            if (of_place[holder] != of_place[holders[0]]).any():
                return [f"{name} differs between processes {holders[0]} and {holder}"]
    with_problem = np.flatnonzero(everywhere[:, 0, 0])
    return [f"an array differs between devices of process {i}" for i in with_problem[:1]]
