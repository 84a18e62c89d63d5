"""Gradients of programs with Explicit axes that differentiate outside of a parallel step."""

from typing import Any, TypeVar

import jax
from jax.sharding import PartitionSpec
from jax.tree_util import KeyPath, keystr, tree_map_with_path

T = TypeVar("T")


def own_gradients(sums: T, axis_name: str = "data") -> T:
    """Each worker's own gradients, from unreduced ones. It moves no data.

    On a mesh of Explicit axes, `jax.grad` with respect to parameters that are typed as reduced
    over an axis leaves gradients unreduced over it: each worker has the sum over its own part of
    the batch. Compress and exchange them like this:

        exchange = jaxsparse.data_parallel(
            lambda grads, state: tx.update(jax.tree.map(lambda g: g[0], grads), state),
            mesh,
            axis_name="hosts",
            batch_argnums=0,
        )

        @jax.jit
        def step(params, opt_state, batch):
            typed = lambda w, spec: jax.reshard(w, P(*spec, reduced={"hosts"}))
            grads = jax.grad(loss)(jax.tree.map(typed, params, partitions), batch)
            grads = jaxsparse.own_gradients(grads, "hosts")
            updates, opt_state = exchange(grads, opt_state)
            return optax.apply_updates(params, updates), opt_state

    The loss is the mean over the whole batch, as in the same program without jaxsparse. Partial
    sums of its gradient add up to the gradient, and the exchange takes means, so `own_gradients`
    multiplies them by the number of workers, W. On a mesh without other axes, a `jax.shard_map` of
    your own (`in_specs=P(*spec, unreduced={"hosts"})`, `check_vma=False`) can call `tx.update`
    directly, on W times the partial sums.

    Args:
        sums: gradients whose types are unreduced over `axis_name` and no other axis.
        axis_name: the mesh axis of the workers.

    Returns:
        The same tree with arrays of shape (W, ...), split over `axis_name`: row w is W times the
        partial sum of worker w, so that the mean of the rows is the gradient.

    Raises:
        ValueError: a gradient is not unreduced over `axis_name`, or is unreduced over another axis,
            too.
    """

    def one(path: KeyPath, x: Any) -> Any:
        sharding = getattr(jax.typeof(x), "sharding", None)
        spec = PartitionSpec() if sharding is None else sharding.spec
        if sharding is None or set(spec.unreduced) != {axis_name}:
            raise ValueError(
                f"gradient{keystr(path)} has the type {jax.typeof(x)}, which is unreduced over "
                f"{tuple(spec.unreduced)} and not over {axis_name!r} alone: differentiate, on a "
                "mesh of Explicit axes, with respect to parameters that are typed by "
                f"jax.reshard(w, PartitionSpec(*spec, reduced={{{axis_name!r}}}))"
            )
        workers = sharding.mesh.shape[axis_name]
        return jax.shard_map(
            lambda x: workers * x[None],
            mesh=sharding.mesh,
            in_specs=spec,
            out_specs=PartitionSpec(axis_name, *spec.partitions),
            check_vma=False,
        )(x)

    return tree_map_with_path(one, sums)
