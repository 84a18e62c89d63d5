"""Where an exchange runs: for rows of all workers, on a mesh or simulated, or in a worker's code.

On a mesh with inner axes each device exchanges its own shards, see `meshes`: their shapes, and how
`init` spreads a state over devices, stand here, too.
"""

import functools
from collections.abc import Callable, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxsparse.arrays import layout as layouts
from jaxsparse.comm import marks, meshes
from jaxsparse.comm.meshes import AnyMesh, Placement
from jaxsparse.comm.workers import RUNNING, Workers, is_checked
from jaxsparse.feedback.front import means_in_check, unread
from jaxsparse.feedback.plan import exchanged_specs
from jaxsparse.feedback.store import ErrorFeedbackState, Kind, kinds


def typed_as(params: Any, state: ErrorFeedbackState) -> ErrorFeedbackState:
    """The state with its accumulators cut as the leaves are whose types say so: Explicit axes."""
    own = dict(zip(layouts.short_names(params), map(meshes.typed, jax.tree.leaves(params))))

    def one(x: Any, kind: Kind) -> Any:
        if kind.leaf is None or (sharding := own[kind.leaf]) is None:
            return x
        spec = PartitionSpec(*([None] if kind.is_own else []), *sharding.spec)
        return meshes.constrain(x, NamedSharding(sharding.mesh, spec))

    return jax.tree.map(one, state, kinds(state))


def spread(
    state: ErrorFeedbackState,
    params: Any,
    at: tuple[Workers, Placement | None],
    compressed: Set[int],
) -> ErrorFeedbackState:
    """The initial state of all devices, from that of one.

    If parameters are in `flax.nnx` Variables, so are the arrays that are spread over workers, as in
    Optax's own transformations. A trainer that restores them then knows how to place them.

    Args:
        state: the initial state of one device's shards: zeros, and reducers' states.
        params: the parameters.
        at: the workers, and the placement of the parameters.
        compressed: the numbers of the leaves in buckets.
    """
    found, placement = at
    workers, mesh, axis_name = found.count, found.mesh, found.axis_name
    if mesh is None:
        rows = lambda x: jnp.broadcast_to(x, (workers, *x.shape[1:]))
        return marks.map_marked(lambda x, is_own: rows(x) if is_own else x, state)
    if placement is None and axis_name is None:
        return state
    shapes, specs = {}, {}
    if placement is not None:
        names = layouts.short_names(params)
        shapes = dict(zip(names, map(jnp.shape, jax.tree.leaves(params))))
        specs = dict(zip(names, exchanged_specs(params, placement, compressed)))
    is_traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(params))
    in_variables = axis_name is not None and marks.has_variables(params)

    def one(x: Any, kind: Kind) -> Any:
        x, sharding = spread_out(x, kind)
        return marks.in_variable(x, sharding.spec) if in_variables else x

    def spread_out(x: Any, kind: Kind) -> tuple[Any, NamedSharding]:
        row_axes, row_sizes = ((axis_name,), (workers,)) if kind.is_own else ((), ())
        shape = x.shape[1:] if kind.is_own else x.shape
        parts: tuple[Any, ...] = ()
        if kind.leaf is not None:
            shape, parts = shapes.get(kind.leaf, shape), tuple(specs.get(kind.leaf, ()))
        elif kind.is_reducers and placement is not None:
            shape, parts = (placement.devices, *shape), (placement.axes,)
        sharding = NamedSharding(mesh, PartitionSpec(*row_axes, *parts))
        if kind.leaf is None:
            x = jnp.broadcast_to(x[0] if kind.is_own else x, (*row_sizes, *shape))
        elif isinstance(mesh, Mesh) and not is_traced:
            return jnp.zeros((*row_sizes, *shape), x.dtype, device=sharding), sharding
        else:
            x = jnp.zeros((*row_sizes, *shape), x.dtype)
        return meshes.constrain(x, sharding), sharding

    return jax.tree.map(one, state, kinds(state))._replace(
        placement=placement.named if placement else ()
    )


def over_rows(
    update: Callable[..., Any],
    updates: Any,
    state: ErrorFeedbackState,
    momentum: Any,
    workers: Workers,
    compressed: Set[int],
) -> tuple[Any, ErrorFeedbackState]:
    """Runs `update` for all workers, whose gradients and per-worker arrays have a row for each.

    Under `jaxsparse.check`, which asks for the program of a chain, none runs.

    Args:
        update: the update of one worker's device, of (updates, state, momentum, inner axes). It
            returns (updates, state).
        updates: gradients.
        state: the state.
        momentum: a factor, equal on all workers.
        workers: the workers.
        compressed: the numbers of the leaves in buckets.

    Raises:
        ValueError: the state was not made for the inner axes of this mesh.
    """
    if is_checked():
        return means_in_check(updates, bool(state.momentum)), state
    placement = Placement.of(state.placement)
    meshes.check_inner(workers.mesh, workers.axis_name, placement)
    given = *unread((updates, state)), momentum
    return unread(_on_each(update, workers, placement, compressed, True, *given))


def in_worker(
    update: Callable[..., Any],
    updates: Any,
    state: ErrorFeedbackState,
    momentum: Any,
    mesh: Mesh | None,
    axis_name: str | None,
    compressed: Set[int],
) -> tuple[Any, ErrorFeedbackState]:
    """Runs `update` in one worker's code. See `over_rows`; `mesh` is the one that was given."""
    how, context = RUNNING.get(), jax.sharding.get_abstract_mesh()
    is_manual = axis_name in context.manual_axes
    found: AnyMesh | None = mesh
    if is_manual or mesh is None:
        found = context if is_manual else how.mesh if how else None
    placement = Placement.of(state.placement)
    meshes.check_inner(found, axis_name, placement)
    if axis_name is None:
        alone = lambda given, momentum: update(given[0], given[1], momentum, ())
        return meshes.untyped(alone, (updates, state), momentum)
    if found is None or (is_manual and placement is None):
        return update(updates, state, momentum, ())
    each = lambda count: functools.partial(
        _on_each, update, Workers(count, found, axis_name), placement, compressed
    )
    if is_manual:
        return each(1)(False, updates, state, momentum)

    @custom_vmap
    def exchanged(updates: Any, state: Any, momentum: Any, rank: Any) -> Any:
        if placement is None:  # it may run where the axis is manual, too
            return update(updates, state, momentum, ())
        return updates, state  # for their shapes: the rule replaces it

    @exchanged.def_vmap
    def rule(count: int, batched: Any, updates: Any, state: Any, momentum: Any, _: Any) -> Any:
        updates, state, momentum = _rows(count, batched[:3], updates, state, momentum)
        delivered, state = each(count)(True, updates, state, momentum)
        described = kinds(state)
        state = jax.tree.map(lambda x, kind: x[:, None] if kind.is_own else x, state, described)
        batched = jax.tree.map(lambda kind: kind.is_own, described)
        return (delivered, state), (jax.tree.map(lambda _: False, delivered), batched)

    # vmap uses the rule only if an argument differs between workers. The rank always does.
    return exchanged(updates, state, momentum, jax.lax.axis_index(axis_name))


def _on_each(
    update: Callable[..., Any],
    workers: Workers,
    placement: Placement | None,
    compressed: Set[int],
    is_stacked: bool,
    updates: Any,
    state: ErrorFeedbackState,
    momentum: Any,
) -> tuple[Any, ErrorFeedbackState]:
    """Runs `update` on each worker's devices.

    With `is_stacked`, gradients and per-worker arrays have a row for each worker. Otherwise the
    workers' axis is manual already.
    """
    mesh, axis_name = workers.mesh, workers.axis_name
    treedef: Any
    leaves, treedef = jax.tree.flatten(updates)
    placement = placement or Placement((), (PartitionSpec(),) * len(leaves))
    inner = placement.axes
    rows = (axis_name,) if is_stacked else ()
    names = layouts.short_names(updates)
    shapes = [jax.ShapeDtypeStruct(x.shape[is_stacked:], x.dtype) for x in leaves]
    specs = exchanged_specs(shapes, placement, compressed)
    of_name = dict(zip(names, specs))

    def spec(kind: Kind) -> PartitionSpec:
        own = (axis_name if is_stacked else None,) if kind.is_own else ()
        if kind.leaf is not None and inner:
            return PartitionSpec(*own, *of_name.get(kind.leaf, ()))  # `update` tells unknown names
        return PartitionSpec(*own, *((inner,) if kind.is_reducers and inner else ()))

    def without_device_axis(x: Any, kind: Kind) -> Any:
        return x if not kind.is_reducers or not inner else x[:, 0] if kind.is_own else x[0]

    def with_device_axis(x: Any, kind: Kind) -> Any:
        return x if not kind.is_reducers or not inner else x[:, None] if kind.is_own else x[None]

    def cut(x: Any, own: PartitionSpec, to: PartitionSpec) -> Any:
        return x if mesh is None or own == to else meshes.constrain(x, NamedSharding(mesh, to))

    described = kinds(state)
    if not is_stacked:  # leaves are cut here as they are exchanged
        leaves = list(map(cut, leaves, placement.own, specs))

    def body(leaves: list[Any], state: ErrorFeedbackState, momentum: Any) -> Any:
        own = treedef.unflatten([x[0] for x in leaves] if is_stacked else leaves)
        with jax.named_scope(meshes.SCOPE):
            state = jax.tree.map(without_device_axis, state, described)
            delivered, state = update(own, state, momentum, inner)
        return jax.tree.leaves(delivered), jax.tree.map(with_device_axis, state, described)

    state_specs = jax.tree.map(spec, described)
    delivered, state = workers.map(
        body,
        (leaves, state, momentum),
        ([PartitionSpec(*rows, *s) for s in specs], state_specs, PartitionSpec()),
        (specs, state_specs),
    )
    # The optimizer behind keeps its moments cut as the parameters are, and not further.
    return treedef.unflatten(map(cut, delivered, specs, placement.own)), state


def _rows(
    workers: int, batched: Any, updates: Any, state: Any, momentum: Any
) -> tuple[Any, Any, Any]:
    """What `vmap` holds, as `over_rows` has it. It holds once what is equal for all workers.

    Raises:
        ValueError: momentum, or an array without a mark, differs between workers.
    """
    of_updates, of_state, of_momentum = batched
    if any(jax.tree.leaves(of_momentum)):
        raise ValueError("momentum differs between workers: give all of them the same")

    def row(x: Any, is_row: bool) -> Any:
        return x if is_row else jnp.broadcast_to(x, (workers, *x.shape))

    def one(x: Any, kind: Kind, is_row: bool) -> Any:
        if kind.is_own:
            return row(x, is_row)[:, 0]
        if is_row:
            raise ValueError(
                "an array of the state differs between workers and has no mark PerWorker: pass the "
                "state that init(params) made, and that no other transformation has changed"
            )
        return x

    updates = jax.tree.map(row, updates, of_updates)
    return updates, jax.tree.map(one, state, kinds(state), of_state), momentum
