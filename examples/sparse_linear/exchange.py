"""Ways to add up the workers' sparse gradients, all of them lossless."""

import functools
import statistics
from collections.abc import Callable

import jax
import jax.numpy as jnp
from batches import Room

import jaxsparse
from jaxsparse import collectives
from jaxsparse.arrays.stream import SparseStream, to_dense
from jaxsparse.collectives import AllReduced
from jaxsparse.comm import wire
from jaxsparse.planner.timing import interleaved

Exchange = Callable[..., AllReduced]  # takes a stream and the vector's size


def dense(stream: SparseStream, size: int, *, axis_name: str) -> AllReduced:
    """All-reduce of the whole gradient, zeros included."""
    mine = to_dense(stream, size)
    return AllReduced(wire.psum(mine, axis_name), jnp.zeros_like(mine), jnp.int32(0))


def fastest(room: Room, k: int, size: int, workers: int, link: jaxsparse.planner.Link) -> str:
    """Name of the exchange that should be the fastest, for k entries of `size` elements.

    The time of its messages is that of the alpha-beta model. The time that a worker computes is
    measured on this machine, without other workers.
    """
    network = jaxsparse.planner.Network(link)
    indices = jnp.arange(k, dtype=jnp.int32) * (size // k)
    stream = SparseStream(indices, jnp.ones(k, jnp.float32))
    seconds, computing = {}, {}
    for name, exchange in exchanges(room).items():
        run = functools.partial(exchange, size=size, axis_name="data")
        seconds[name] = network.seconds(jaxsparse.traffic.traced_bytes(run, stream, workers))
        total = jax.jit(lambda stream, run=run: run(stream).total)
        with wire.dry_run(workers):
            computing[name] = functools.partial(total.lower(stream).compile(), stream)
    for name, measured in interleaved(computing, repeats=9).items():
        seconds[name] += statistics.median(measured)
    return min(seconds, key=lambda name: seconds[name])


def exchanges(room: Room) -> dict[str, Exchange]:
    """All exchanges by name, with this room."""
    split = functools.partial(
        collectives.split_allgather, capacity=room.to_owner, union_capacity=room.of_owner
    )
    return {
        "dense": dense,
        "recursive_double": collectives.recursive_double,
        "split_allgather": split,
        "dsar_split_allgather": functools.partial(
            collectives.dsar_split_allgather, capacity=room.to_owner
        ),
        "all_gather": functools.partial(collectives.all_gather_sum, distinct=True),
        "ring": collectives.sparse_ring,
    }
