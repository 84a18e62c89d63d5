"""Any Optax transformation on each worker's own values, as part of a chain.

Strongly sparsified gradients before Adam train badly: most entries of its second moment then see
zeros, and now and then a residual of many steps. Exchanging each worker's Adam update instead is
one local step of a local-update method. `benchmarks/training.py` compares both, and docs/which.md
has its result.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxsparse.collectives import wire
from jaxsparse.training import marks, meshes
from jaxsparse.training.marks import PerWorker, is_marked


def per_worker(
    tx: optax.GradientTransformation,
    *,
    axis_name: str | None = "data",
    mesh: Mesh | None = None,
    specs: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Runs `tx` on each worker's own gradients, before they are exchanged.

        tx = optax.chain(
            jaxsparse.per_worker(optax.scale_by_adam()),
            jaxsparse.spardl(0.01),
            optax.scale_by_learning_rate(1e-3),
        )

    Each worker keeps a state of its own, marked `PerWorker`: it is saved, spread and resharded like
    residuals. Resharding averages it over workers, Adam's moments included; counters, which are
    equal on all workers, stay. Put weight decay and the learning rate behind the exchange, since
    they are the same for all workers.

    If anything in the gradients is not finite on any worker, no worker's state changes, and the
    gradients pass as they are, so that the exchange behind skips the step. That takes a message of
    four bytes.

    Args:
        tx: the transformation. All leaves of its state, if it has any, must be arrays.
        axis_name: the axis of the workers. None: a single worker.
        mesh: the mesh, as for the exchange behind. With it, `init` returns a state that is already
            spread over the workers. Without it, `jaxsparse.shard` spreads the state.
        specs: partitions of the parameters, as for the exchange behind. Used with `mesh` alone.

    Returns:
        A transformation, whose `update` must run where `axis_name` is bound
        (`jaxsparse.data_parallel`). Its updates differ between workers, so a transformation of this
        library must stand behind it in the chain.

    Raises:
        ValueError: from `init`: `tx` contains an exchange or another `per_worker`, or partitions
            over `mesh` are not known. From `update`: the axis is not bound, or the state is not one
            worker's.

    Example:
        >>> import jaxsparse
        >>> tx = optax.chain(
        ...     per_worker(optax.trace(0.9), axis_name=None),
        ...     jaxsparse.top_k(0.25, axis_name=None, is_dense=lambda *_: False),
        ... )
        >>> state = tx.init(jnp.zeros(4))
        >>> updates, state = tx.update(jnp.float32([3, 1, 0.5, 0.1]), state)
        >>> updates.tolist()
        [3.0, 0.0, 0.0, 0.0]
    """
    tx = optax.with_extra_args_support(tx)

    def init(params: Any) -> Any:
        bare, in_variables = marks.without_variables(params), marks.has_variables(params)
        start = tx.init(bare)
        if any(is_marked(path) for path, _ in jax.tree_util.tree_leaves_with_path(start)):
            raise ValueError(
                "tx has an exchange of jaxsparse, or another per_worker, inside: leave it out of "
                "per_worker, and chain it behind, as in optax.chain(per_worker("
                "optax.scale_by_adam()), jaxsparse.spardl(0.01))"
            )
        if mesh is None or axis_name is None:
            return PerWorker.wrap(start)
        placement, _ = meshes.place(params, axis_name, mesh, specs)
        leaves, treedef = jax.tree.flatten(bare)
        own = [PartitionSpec()] * len(leaves) if placement is None else placement.own

        def spread(x: Any, spec: PartitionSpec) -> PerWorker:
            spec = PartitionSpec(axis_name, *spec)
            rows = jnp.broadcast_to(x, (mesh.shape[axis_name], *jnp.shape(x)))
            rows = meshes.constrain(rows, NamedSharding(mesh, spec))
            return PerWorker(marks.in_variable(rows, spec) if in_variables else rows)

        return optax.tree_utils.tree_map_params(
            tx,
            spread,
            start,
            jax.tree.unflatten(treedef, own),
            transform_non_params=lambda x: spread(x, PartitionSpec()),
        )

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        wire.axis_size(axis_name)  # raises if it is not bound
        before = PerWorker.unwrap(state)
        delivered, after = tx.update(updates, before, params, **extra_args)
        finite = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(updates)]
        broken = jnp.where(jnp.all(jnp.array(finite)), jnp.float32(0), jnp.float32(1))
        ok = wire.pmax(wire.varying(broken, axis_name), axis_name) == 0
        kept = lambda new, old: jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, old)
        state = PerWorker.wrap(wire.varying(kept(after, before), axis_name))
        return kept(delivered, updates), state

    return optax.GradientTransformationExtraArgs(init, marks.unwrapped(update))
