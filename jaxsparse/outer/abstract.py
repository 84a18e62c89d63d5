"""The state of local steps from shapes alone, to compile ahead of time or to restore into."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath, tree_flatten_with_path, tree_map_with_path

from jaxsparse.comm.marks import is_marked
from jaxsparse.comm.workers import Workers
from jaxsparse.outer.worker import LocalState, Worker


def shapes_of(worker: Worker, state: Any, mesh: Mesh | int) -> LocalState:
    """What `LocalSteps.init` makes of a training state, as shapes with shardings.

    Args:
        worker: the worker's part.
        state: the training state, of arrays and `jax.ShapeDtypeStruct`s. What has no sharding is
            whole on each device.
        mesh: the mesh, or the number of workers to simulate.
    """
    axis, workers = worker.axis_name, Workers.on(mesh, worker.axis_name).count
    on = lambda spec: NamedSharding(mesh, spec) if isinstance(mesh, Mesh) else None
    spec_of = lambda x: getattr(getattr(x, "sharding", x), "spec", PartitionSpec())
    struct = lambda x, spec: jax.ShapeDtypeStruct(
        jnp.shape(x), jnp.result_type(x), sharding=on(spec)
    )
    state = jax.tree.map(lambda x: struct(x, spec_of(x)), state)
    given = dict(tree_flatten_with_path(state)[0])
    # An exchange places its own arrays, and the compiler tells where. It does not see that zeros of
    # an optimizer lie as the parameters like which they are made.
    made = jax.eval_shape(worker.start, state)
    there = jax.jit(worker.start).lower(state).compile().output_shardings
    params = dict(tree_flatten_with_path(worker.params(state))[0])

    def placed(path: KeyPath, x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        spec = spec_of(sharding)
        if is_marked(path):
            if path[0].name == "worker":
                spec = PartitionSpec(None, *spec_of(given[path[1:-1]]))
            spec = PartitionSpec(axis, *spec[1:])
            return jax.ShapeDtypeStruct((workers, *x.shape[1:]), x.dtype, sharding=on(spec))
        tails = (path[n:] for n in range(1, len(path) + 1))
        like = next((params[tail] for tail in tails if tail in params), None)
        is_like = like is not None and x.ndim and like.shape[1:] == x.shape[1:]
        return struct(x, spec_of(like) if is_like and not any(spec) else spec)

    return tree_map_with_path(placed, made, there)
