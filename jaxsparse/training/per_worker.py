"""Any Optax transformation on each worker's own values, as part of a chain.

Strongly sparsified gradients before Adam train badly: most entries of its second moment then see
zeros, and now and then a residual of many steps. Exchanging each worker's Adam update instead is
one local step of a local-update method. `benchmarks/training.py` compares both, and docs/which.md
has its result.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath, tree_leaves_with_path, tree_map_with_path
from jaxtyping import Array, Bool

from jaxsparse.arrays.layout import named_shapes
from jaxsparse.arrays.magnitude import all_finite
from jaxsparse.comm import marks, meshes, wire
from jaxsparse.comm.marks import PerWorker, is_marked
from jaxsparse.comm.workers import Workers, workers_and_placement
from jaxsparse.feedback.front import marked
from jaxsparse.feedback.options import check_transformation
from jaxsparse.feedback.rows import check_extra_args, check_rows
from jaxsparse.training.gradients import OwnAndEqual, on_workers


def per_worker(
    tx: optax.GradientTransformation,
    *,
    axis_name: str | None = "data",
    mesh: Mesh | None = None,
    workers: int | None = None,
    specs: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Runs `tx` on each worker's own gradients, before they are exchanged.

        tx = optax.chain(
            jaxsparse.per_worker(optax.scale_by_adam()),
            jaxsparse.spardl(0.01),
            optax.scale_by_learning_rate(1e-3),
        )

    Each worker keeps a state of its own, marked `PerWorker`: it is saved, spread and resharded like
    residuals. Resharding averages it over workers, Adam's moments included. Counters and keys are
    equal on all workers, so they stay, and all workers draw the same noise. Put weight decay and
    the learning rate behind the exchange, since they are the same for all workers.

    `optax.monitor` is refused, since its first update adds arrays to its state.
    `optax.contrib.scale_by_muon` takes one matrix, as without `per_worker`; use
    `optax.contrib.muon`, or give its `weight_dimension_numbers`.

    If anything in the gradients is not finite on any worker, no worker's state changes, and all
    updates are NaN, so that the exchange behind skips the step. That takes a message of four bytes.

    Args:
        tx: the transformation. All leaves of its state, if it has any, must be arrays.
        axis_name: the axis of the workers. None: a single worker.
        mesh: the mesh, as for the exchange behind.
        workers: number of workers to simulate, as for the exchange behind.
        specs: partitions of the parameters, as for the exchange behind. Arrays of the state that
            end with the name of a parameter, and have its shape, are cut as it is. All others are
            whole on each device of a worker.

    Returns:
        A transformation of gradients with a row for each worker (`jaxsparse.value_and_grad`), or
        of one worker's where `axis_name` is bound. So are its updates, so an exchange of this
        library must stand behind it in the chain.

    Raises:
        ValueError: `tx` is no transformation. From `init`: `tx` contains an exchange or another
            `per_worker`, or partitions over `mesh` are not known. From `update`: the axis is not
            bound, the state is not one worker's, or `tx` changes the arrays of its state.

    Example:
        >>> import jaxsparse
        >>> tx = optax.chain(
        ...     per_worker(optax.trace(0.9), axis_name=None),
        ...     jaxsparse.top_k(0.25, axis_name=None, is_dense=lambda *_: False),
        ... )
        >>> state = tx.init(jnp.zeros(4))
        >>> updates, state = jax.jit(tx.update)(jnp.float32([3, 1, 0.5, 0.1]), state)
        >>> updates.tolist()
        [3.0, 0.0, 0.0, 0.0]
    """
    check_transformation("tx", tx, "optax.scale_by_adam()")
    name = getattr(tx.update, "__qualname__", "tx").partition(".")[0]  # of the function in Optax
    tx = optax.with_extra_args_support(tx)

    def init(params: Any) -> Any:
        bare, in_variables = marks.without_variables(params), marks.has_variables(params)
        start = tx.init(bare)
        if any(is_marked(path) for path, _ in tree_leaves_with_path(start)):
            raise ValueError(
                "tx has an exchange of jaxsparse, or another per_worker, inside: leave it out of "
                "per_worker, and chain it behind, as in optax.chain(per_worker("
                "optax.scale_by_adam()), jaxsparse.spardl(0.01))"
            )
        if marks.is_stand_in(params):  # what is a worker's own has an axis that parameters lack
            own_leaf = lambda node: jnp.int32(0) if marks.is_stand_in(node) else node
            return jax.tree.map(own_leaf, PerWorker.wrap(start), is_leaf=marks.is_stand_in)
        there, placement = workers_and_placement(params, axis_name, mesh, workers, specs)
        count, found, axis = there.count, there.mesh, there.axis_name
        if found is None or axis is None:
            rows = lambda x: PerWorker(jnp.broadcast_to(x, (count, *jnp.shape(x))))
            return jax.tree.map(rows, start)
        leaves = [] if placement is None else tree_leaves_with_path(bare)
        own = {
            (path, jnp.shape(x)): spec
            for (path, x), spec in zip(leaves, placement.own if placement else ())
        }

        def spread(path: KeyPath, x: Any) -> PerWorker:
            spec = PartitionSpec(axis, *spec_like(path, x, own))
            rows = jnp.broadcast_to(x, (count, *jnp.shape(x)))
            kind = meshes.kind_of(rows)
            rows = meshes.constrain(rows, NamedSharding(found, spec, memory_kind=kind))
            return PerWorker(marks.in_variable(rows, spec) if in_variables else rows)

        return tree_map_with_path(spread, start)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        with jax.named_scope(meshes.OWN_SCOPE):
            finite = all_finite(jax.tree.leaves(updates))
        if wire.is_bound(axis_name):
            broken = jnp.where(finite, jnp.float32(0), jnp.float32(1))
            ok = wire.pmax(wire.varying(broken, axis_name), axis_name) == 0
            delivered, after = one(updates, PerWorker.unwrap(state), params, extra_args, ok)
            return delivered, PerWorker.wrap(wire.varying(after, axis_name))
        found = Workers.find((updates, state), axis_name, mesh, workers)
        check_rows(updates, state, found, params)
        check_extra_args(updates, extra_args)
        rows = jax.tree.map(lambda node: node.value, state, is_leaf=marks.is_per_worker)
        treedef: Any
        of_equal: Any
        own, treedef = jax.tree.flatten((updates, rows))
        equal, of_equal = jax.tree.flatten((params, finite))

        def each(*leaves: Any) -> OwnAndEqual:
            given, before = treedef.unflatten([x[0] for x in leaves[: len(own)]])
            whole, ok = of_equal.unflatten(leaves[len(own) :])
            return one(given, before, whole, extra_args, ok), None

        is_split = [True] * len(own) + [False] * len(equal)
        with jax.named_scope(meshes.OWN_SCOPE):
            of_batch = [False] * len(is_split)
            on_rows = on_workers(each, found, is_split, of_batch, lambda program: None)
            (delivered, after), _ = on_rows(*own, *equal)
        is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.extended)
        after = jax.tree.map(lambda x: x if is_key(x) else marked(x, "all"), after)
        return marked(delivered, "all"), jax.tree.map(PerWorker, after)

    def one(
        updates: Any, before: Any, params: Any, extra_args: dict[str, Any], ok: Bool[Array, ""]
    ) -> tuple[Any, Any]:
        """The updates of one worker, and its state, if all workers' gradients are finite."""
        try:
            delivered, after = tx.update(updates, before, params, **extra_args)
        except Exception as error:
            nodes = jax.tree.leaves((before, updates), is_leaf=_is_masked)
            first = lambda: jax.eval_shape(tx.init, updates)
            if any(map(_is_masked, nodes)) and named_shapes(before) != named_shapes(first()):
                raise ValueError(
                    f"per_worker's state of {name} was made for other leaves than these gradients: "
                    "around it, as in optax.masked or optax.multi_transform, stands a mask or "
                    "labels that are a function, which sees gradients with a row for each worker. "
                    "Give a tree made from the parameters, as jax.tree.map(lambda p: p.ndim > 1, "
                    "params), or put per_worker around the mask"
                ) from error
            error.add_note(
                f"{name} raised this inside per_worker, which runs it on one worker's gradients as "
                "Optax does: its update must work by itself, on the same parameters and arguments"
            )
            raise
        _check_same(name, before, after)
        kept = jax.tree.map(lambda new, old: jnp.where(ok, new, old), after, before)
        return _nan_unless(ok, delivered), kept

    return optax.GradientTransformationExtraArgs(init, marks.on_plain_arrays(update))


def spec_like(
    path: KeyPath, x: Any, of_params: Mapping[tuple[KeyPath, tuple[int, ...]], PartitionSpec]
) -> PartitionSpec:
    """The partition of an array in an optimizer's state, from those of parameters.

    An array that has the name and the shape of a parameter is cut as that is. All others, such as
    counters and factors of moments, are whole.
    """
    ends = ((path[i:], jnp.shape(x)) for i in range(len(path) + 1))
    return next((of_params[end] for end in ends if end in of_params), PartitionSpec())


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def _check_same(name: str, before: Any, after: Any) -> None:
    """Raises ValueError if a state's arrays are not those of the state before."""
    if (old := named_shapes(before)) != (new := named_shapes(after)):
        raise ValueError(
            f"{name} can't run in per_worker, because its update changes the arrays of its state "
            f"from {old} to {new}: put it behind the exchange, or leave it out"
        )


def _nan_unless(ok: Bool[Array, ""], tree: Any) -> Any:
    """The tree if `ok`, else one of NaN."""
    is_float = lambda x: jnp.issubdtype(jnp.result_type(x), jnp.inexact)
    return jax.tree.map(lambda x: jnp.where(ok, x, jnp.nan) if is_float(x) else x, tree)
