"""The all-reduce that SparCML's `algorithm="auto"` takes: the fastest by prediction."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxsparse.arrays.stream import SparseStream
from jaxsparse.planner.network import Link, Network
from jaxsparse.planner.profiles import SystemProfile
from jaxsparse.systems import SparCML
from jaxsparse.systems.sparcml import ALGORITHMS, Algorithm
from jaxsparse.traffic import WireBytes, traced_bytes


def choose_algorithm(
    reducer: SparCML,
    size: int,
    workers: int,
    *,
    network: Network | None = None,
    profile: SystemProfile | None = None,
) -> Algorithm:
    """The algorithm for vectors of `size` elements: the one set, or the fastest predicted one.

    The prediction is that of `plan`. It is the time of the traced program's messages at the
    network's latency and bandwidth, in the rounds that `rounds` gives each collective, plus the
    measured time that a worker computes. If your device is unlike the profile's and computing
    decides, name the algorithm: `plan` finds it for your own profile. "ring" is never chosen.

    Args:
        reducer: the settings.
        size: number of elements of the vector.
        workers: number of workers, W.
        network: the network. None: one with the reducer's `link` for all collectives.
        profile: times of the device. None: the shipped CPU profile. If any algorithms have times,
            only these are chosen.
    """
    if reducer.algorithm != "auto":
        return reducer.algorithm
    if reducer.quantizer is not None:
        return "dsar_split_allgather"
    if workers == 1:  # which sends nothing
        return "all_gather"
    if network is None:
        network = Network(Link() if reducer.link is None else reducer.link)
    known = SystemProfile.shipped() if profile is None else profile
    timed = [name for name in ALGORITHMS if f"sparcml:{name}" in known.systems]
    density = reducer.entries(size) / size
    # Neither link nor seed changes the messages.
    plain = dataclasses.replace(reducer, link=None, seed=0)

    def seconds(name: str) -> float:
        on_network = network.seconds(_messages(plain, name, size, workers))
        if not timed:
            return on_network
        return on_network + known.seconds(f"sparcml:{name}", size, workers, density)

    return min(timed or ALGORITHMS, key=seconds)


@functools.lru_cache(maxsize=1024)
def _messages(reducer: SparCML, name: str, size: int, workers: int) -> WireBytes:
    """The bytes that an algorithm moves, cached because tracing all four takes some 0.1 s."""
    entries = reducer.entries(size)
    stream = jax.eval_shape(
        lambda: SparseStream(jnp.zeros(entries, jnp.int32), jnp.zeros(entries, jnp.float32))
    )
    run = lambda stream: reducer.all_reduce(name, stream, size, "data", None)
    return traced_bytes(run, stream, workers)
