"""Ways to add up the workers' sparse gradients, all of them lossless."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from batches import Room

import jaxsparse
from jaxsparse import collectives
from jaxsparse.collectives import AllReduced
from jaxsparse.stream import to_dense

Exchange = Callable[..., AllReduced]  # takes a stream and the vector's size


def dense(stream: jaxsparse.stream.SparseStream, size: int, *, axis_name: str) -> AllReduced:
    """All-reduce of the whole gradient, zeros included."""
    mine = to_dense(stream, size)
    return AllReduced(jax.lax.psum(mine, axis_name), jnp.zeros_like(mine), jnp.int32(0))


def fastest(room: Room, k: int, size: int, workers: int, link: jaxsparse.planner.Link) -> str:
    """Name of the fastest exchange by the alpha-beta model, for k entries of `size` elements."""
    network = jaxsparse.planner.Network(link)
    stream = jax.eval_shape(
        lambda: jaxsparse.stream.SparseStream(jnp.zeros(k, jnp.int32), jnp.zeros(k, jnp.float32))
    )

    def seconds(exchange: Exchange) -> float:
        run = functools.partial(exchange, size=size, axis_name="data")
        return network.seconds(jaxsparse.traffic.traced_bytes(run, stream, workers))

    known = exchanges(room)
    return min(known, key=lambda name: seconds(known[name]))


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
