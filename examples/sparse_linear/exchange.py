"""Ways to add up the workers' sparse gradients, all of them lossless."""

import functools
import math
from collections.abc import Callable

import jax.numpy as jnp
from batches import Room

import jaxsparse
from jaxsparse import collectives
from jaxsparse.arrays.stream import SparseStream, to_dense
from jaxsparse.collectives import AllReduced
from jaxsparse.comm import wire

Exchange = Callable[..., AllReduced]  # takes a stream and the vector's size


def dense(stream: SparseStream, size: int, *, axis_name: str) -> AllReduced:
    """All-reduce of the whole gradient, zeros included."""
    mine = to_dense(stream, size)
    return AllReduced(wire.psum(mine, axis_name), jnp.zeros_like(mine), jnp.int32(0))


def fastest(room: Room, k: int, size: int, workers: int, link: jaxsparse.Link) -> str:
    """Name of the exchange that should be the fastest, for k entries of `size` elements.

    The time of its messages is that of the alpha-beta model. An exchange that stands further down
    computes more, so it must take a tenth less time.
    """
    indices = jnp.arange(k, dtype=jnp.int32) * (size // k)
    stream = SparseStream(indices, jnp.ones(k, jnp.float32))
    best, least = "", math.inf
    for name, exchange in exchanges(room).items():
        run = functools.partial(exchange, size=size, axis_name="data")
        moved = jaxsparse.traffic.traced_bytes(run, stream, workers)
        seconds = link.seconds(*jaxsparse.planner.Moved.counted(moved))
        if seconds < 0.9 * least:
            best, least = name, seconds
    return best


def exchanges(room: Room) -> dict[str, Exchange]:
    """All exchanges by name, with this room."""
    split = functools.partial(
        collectives.split_allgather, capacity=room.to_owner, union_capacity=room.of_owner
    )
    return {
        "dense": dense,
        "all_gather": functools.partial(collectives.all_gather_sum, distinct=True),
        "recursive_double": collectives.recursive_double,
        "split_allgather": split,
        "dsar_split_allgather": functools.partial(
            collectives.dsar_split_allgather, capacity=room.to_owner
        ),
        "ring": collectives.sparse_ring,
    }
