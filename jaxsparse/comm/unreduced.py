"""Gradients that the types of JAX leave unreduced: each worker has the sum over its own part."""

from typing import Any, TypeVar

import jax
from jax.sharding import PartitionSpec
from jax.tree_util import KeyPath, keystr, tree_map_with_path

T = TypeVar("T")


def split_unreduced(gradients: T, axis_name: str) -> T:
    """Gives each worker's partial sum of an unreduced gradient a row. It moves no data.

    On a mesh of Explicit axes, `jax.grad` with respect to parameters that are typed as reduced over
    an axis leaves gradients unreduced over it:

        typed = lambda w, spec: jax.reshard(w, PartitionSpec(*spec, reduced={"data"}))
        grads = jax.grad(loss)(jax.tree.map(typed, params, partitions), batch)

    There the loss is the mean over the whole batch. Partial sums of its gradient add up to the
    gradient, and an exchange takes means, so they are multiplied by the number of workers, W.

    Returns:
        The same tree. An array whose type is unreduced over `axis_name` has the shape (W, ...),
        split over this axis. All others stay.

    Raises:
        ValueError: a gradient is unreduced over another axis, too.
    """

    def one(path: KeyPath, x: Any) -> Any:
        sharding = getattr(jax.typeof(x), "sharding", None)
        spec = PartitionSpec() if sharding is None else sharding.spec
        if sharding is None or axis_name not in spec.unreduced:
            return x
        if set(spec.unreduced) != {axis_name}:
            raise ValueError(
                f"gradient{keystr(path)} has the type {jax.typeof(x)}, which is unreduced over "
                f"{tuple(spec.unreduced)} and not over {axis_name!r} alone: type parameters by "
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

    return tree_map_with_path(one, gradients)
