"""ZeRO-1 in few bits: each worker owns a part of the optimizer's moments, and updates that part.

A dense exchange in few bits is a reduce-scatter and an all-gather. ZeRO-1 (Rajbhandari et al., SC
2020) puts the optimizer between the two. Gradients travel to the owners of their parts, which sum
them; the optimizer updates each part where it lies, in JAX's own arrays that are cut over the
workers; and the updates travel back. Both roundings are fed back. So moments take 1/W of their
memory, for the bytes of an exchange with whole moments.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Int

from jaxsparse.arrays import layout as layouts
from jaxsparse.arrays.layout import IsDense
from jaxsparse.arrays.magnitude import LARGEST
from jaxsparse.collectives.quantized_all_reduce import (
    quantized_all_gather,
    quantized_reduce_scatter,
)
from jaxsparse.comm import marks, meshes, wire
from jaxsparse.comm.marks import PerWorker
from jaxsparse.comm.meshes import AnyMesh, Placement
from jaxsparse.comm.wire import Axes
from jaxsparse.comm.workers import Workers, is_checked, workers_and_placement
from jaxsparse.feedback.front import means_in_check, unread
from jaxsparse.feedback.options import check_transformation, leaves_rule
from jaxsparse.feedback.rows import check_extra_args, read_rows
from jaxsparse.feedback.step import (
    all_finite_in,
    behind,
    count_moved,
    exchange_dense,
    finite_part,
    where_ok,
)
from jaxsparse.feedback.store import check_made
from jaxsparse.quantize.formats import Format, FormatName, Scale
from jaxsparse.quantize.quantizer import check_feedback
from jaxsparse.reducers.base import Info, info
from jaxsparse.reducers.quantized import Quantized
from jaxsparse.training.ownership import Ownership


class Zero1State(NamedTuple):
    """The state of `zero1`.

    Attributes:
        residual: float32[W, *shape] for each compressed leaf by name: what the rounding of each
            worker's gradients has left.
        owed: float32[*shape] for each compressed leaf by name, cut over its owners: what the
            rounding of its updates has left.
        optimizer: the optimizer's state.
        skipped: number of steps whose gradients were not finite on all workers.
        info: how many coordinates the updates of the last step carried that was not skipped.
        placement: partitions over the mesh's other axes.
    """

    residual: dict[str, Any]
    owed: dict[str, Array]
    optimizer: Any
    skipped: Int[Array, ""]
    info: Info
    placement: Any


def zero1(
    optimizer: optax.GradientTransformation,
    format: FormatName = "int4",
    *,
    back: FormatName | None = None,
    group_size: int = 256,
    scale: Scale = "bfloat16",
    is_dense: IsDense | None = None,
    axis_name: str = "data",
    mesh: Mesh | None = None,
    workers: int | None = None,
    specs: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """An Optax optimizer whose moments are cut over the workers, and its exchange in few bits.

        tx = jaxsparse.zero1(optax.adamw(1e-3), "int4")
        opt_state = tx.init(params)                                    # of parameters on the mesh
        loss, grads = jaxsparse.value_and_grad(loss_of)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)       # in your own jax.jit

    It stands for `optax.chain(jaxsparse.quantized("int4"), optax.adamw(1e-3))`. Each worker has all
    parameters, as there, and 1/W of the moments. Worker w owns part w of each leaf, along the first
    axis that W divides. It receives (W - 1)/W d (bits / 8 + scale bits / (8 group_size)) bytes of
    gradients, and as many of updates: those of `quantized`. It keeps a float32 residual of all
    compressed leaves, as there. The optimizer sees ordinary arrays in the parameters' shapes, cut
    over the workers, so masks, weight decay, norms and clips are those of Optax. It should be
    elementwise, but for norms. For others, such as Muon, XLA gathers what they need.

    Updates are rounded behind the optimizer, and what is lost comes with the next ones. So what
    bounds parameters, such as `optax.keep_params_nonnegative`, stands behind `zero1` in a chain,
    where updates are whole. So does what freezes them, if `back` has no zero ("sign", "int2").

    A leaf without an axis that W divides travels as in `quantized`, and its moments are whole. So
    are those of dense leaves, whose gradients are averaged in float32. A step with a gradient that
    is not finite on some worker gives the optimizer a mean of zero, and `skipped` counts it.

    Args:
        optimizer: what updates parameters from mean gradients, with its learning rate.
        format: number format of the gradients, as in `jaxsparse.quantized`. "sign" and "int2" have
            no zero, so they move elements without gradients.
        back: that of the updates. None: the same.
        group_size: number of consecutive values that share a scale.
        scale: format of the scales.
        is_dense: function of a leaf's key path and shape: whether it travels uncompressed. None:
            vectors, scalars and leaves below 1024 elements do.
        axis_name: the mesh axis of the workers.
        mesh: mesh of the workers, where neither arrays and their types nor `jax.set_mesh` tell it.
        workers: number of workers to simulate on one device, without a mesh.
        specs: partitions over other axes of the mesh, as for `jaxsparse.quantized`.

    Returns:
        A transformation of gradients with a row for each worker. Its updates are whole, and equal
        on all workers, in the optimizer's dtypes. `init` places the state if it sees parameters on
        the mesh, or inside of `jax.jit` if `mesh` or `jax.set_mesh` tells it. `jaxsparse.diagnose`
        reads it. What updates owe is `optax.tree.norm(state.owed)`.

    Raises:
        ValueError: settings are out of range. From `init` and `update`: no mesh is known, or the
            axis is bound (there is no single worker's step: what it owns is a part). From `update`:
            gradients have no rows, or the state is of another tree, mesh or number of workers
            (`jaxsparse.reshard(state, mesh, like=tx.init(params))` carries it over).

    Example:
        >>> tx = zero1(optax.sgd(0.5, momentum=0.9), "int8", workers=2)
        >>> params = jnp.zeros((64, 32))
        >>> state = tx.init(params)
        >>> rows = jnp.stack([params + 1, params + 3])  # each worker's gradient
        >>> updates, state = jax.jit(tx.update)(rows, state, params)
        >>> [round(u, 3) for u in updates[0, :2].tolist()]
        [-1.0, -1.0]
    """
    check_transformation("optimizer", optimizer, "optax.adamw(1e-3)")
    out = Format(format, group_size, scale)
    home = Format(format if back is None else back, group_size, scale)
    for each in (out, home):
        check_feedback(each, stochastic=False)
    inside = optax.with_extra_args_support(optimizer)
    rule = leaves_rule(is_dense)

    def init(params: Any) -> Zero1State:
        bare, in_variables = marks.without_variables(params), marks.has_variables(params)
        if marks.is_stand_in(params):
            start = inside.init(bare)
            zero = jnp.int32(0)
            return Zero1State(zero, zero, start, zero, info(0), ())
        _refuse_bound(axis_name)
        at = Workers.find(params, axis_name, mesh, workers)
        _, placement = workers_and_placement(params, axis_name, mesh, workers, specs)
        parts = Ownership.plan(bare, rule, at, placement)
        zeros = functools.partial(_zeros, at.mesh, isinstance(jax.tree.leaves(bare)[0], Tracer))
        rows = lambda i: PerWorker(zeros((at.count, *parts.shapes[i]), parts.row_spec(i)))
        return Zero1State(
            residual={parts.names[i]: rows(i) for i in parts.compressed},
            owed={
                parts.names[i]: zeros(parts.shapes[i], parts.owner_spec(i))
                for i in parts.compressed
            },
            optimizer=parts.started(inside.init, bare, in_variables),
            skipped=zeros((), PartitionSpec(), jnp.int32),
            info=jax.tree.map(lambda _: zeros((), PartitionSpec(), jnp.int32), info(0)),
            placement=placement.named if placement else (),
        )

    def update(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Zero1State]:
        check_made(state, Zero1State)
        if params is None:
            raise ValueError("params=None: zero1 needs tx.update(grads, state, params)")
        _refuse_bound(axis_name)
        updates, _, at = read_rows(updates, state, params, axis_name, mesh, workers)
        check_extra_args(updates, extra_args)
        placement = Placement.of(state.placement)
        meshes.check_inner(at.mesh, axis_name, placement)
        parts = Ownership.plan(params, rule, at, placement)
        _check(parts, state)
        if is_checked():
            means = means_in_check(updates)
            made, after = inside.update(means, state.optimizer, params, **extra_args)
            return made, state._replace(optimizer=after)
        updates, state = unread((updates, state))
        # Under `jax.disable_jit()` the loops of an exchange would run step by step in Python.
        with jax.disable_jit(False), jax.named_scope(meshes.SCOPE):
            means, residual, ok = _send_out(parts, out, updates, state)
        own = parts.placed(params)
        made, optimizer_state = _optimized(inside, means, state.optimizer, own, extra_args)
        with jax.disable_jit(False), jax.named_scope(meshes.SCOPE):
            delivered, owed = _send_home(parts, home, made, state)
        kept = Zero1State(
            residual=residual,
            owed=owed,
            optimizer=parts.placed(optimizer_state),
            skipped=state.skipped + jnp.where(ok, jnp.int32(0), jnp.int32(1)),
            info=where_ok(ok, info(count_moved(jax.tree.leaves(delivered))), state.info),
            placement=state.placement,
        )
        return unread((delivered, kept))

    return optax.GradientTransformationExtraArgs(init, marks.on_plain_arrays(update))


def _send_out(
    parts: Ownership, out: Format, updates: Any, state: Zero1State
) -> tuple[Any, dict[str, PerWorker], Bool[Array, ""]]:
    """Mean gradients, cut over their owners; the new residuals; whether gradients are finite."""
    axis_name, count = parts.workers.axis_name, parts.workers.count
    axes = Axes(axis_name, parts.inner)

    def on_worker(rows: dict[int, Array], residual: dict[int, Array]) -> Any:
        given = {i: x[0].astype(jnp.float32) for i, x in rows.items()}
        before = {i: x[0] for i, x in residual.items()}
        added = finite_part({i: given[i] for i in before})
        x = {i: jnp.clip(before[i] + added[i], -LARGEST, LARGEST) for i in before}
        exact: dict[int, Array] = {}  # means in float32
        lost: dict[int, Array] = {}
        if parts.owned:
            total, rest = quantized_reduce_scatter(parts.to_rows(x), out, axis_name=axis_name)
            # A sum beyond float32's range is clipped: the other workers do not know of it.
            exact |= parts.of_owner(jnp.clip(total, -LARGEST, LARGEST) / count)
        if parts.whole:
            shapes = [x[i].shape for i in parts.whole]
            vector = layouts.join([x[i] for i in parts.whole])
            done = Quantized(out, "nearest").pmean(vector, (), axis_name)
            found = layouts.cut((done.mean, done.kept.residual), shapes)
            exact |= dict(zip(parts.whole, found[0]))
            lost |= dict(zip(parts.whole, found[1]))
        loose = [i for i in given if i not in before]
        last = all_finite_in(given), layouts.join([given[i] for i in loose])
        finite, vector = behind(last, [(mean,) for mean in exact.values()])
        ok, dense = exchange_dense(finite, vector, [vector.size], axes)
        means = dict(zip(loose, layouts.cut(dense, [given[i].shape for i in loose])))
        means |= {i: jnp.where(ok, layouts.narrow(y, rows[i].dtype), 0) for i, y in exact.items()}
        # What does not arrive: what the mean's dtype has rounded, and all of a skipped step.
        late = {i: y - means[i].astype(jnp.float32) for i, y in exact.items()}
        lost = {i: left + late[i] for i, left in lost.items()}
        if parts.owned:
            # A worker's residual of its own part is free for it.
            left = layouts.join([late[i] for i in parts.owned])
            lost |= parts.from_rows(rest.at[wire.axis_index(axis_name)].set(count * left))
        means = {i: jnp.where(ok, means[i].astype(rows[i].dtype), 0) for i in rows}
        return means, {i: lost[i][None] for i in residual}, ok

    treedef: Any
    leaves, treedef = jax.tree.flatten(updates)
    rows = dict(enumerate(leaves))
    residual = {i: state.residual[parts.names[i]].value for i in parts.compressed}
    of_residual = {i: parts.row_spec(i) for i in residual}
    means, residual, ok = parts.workers.map(
        on_worker,
        (rows, residual),
        ({i: parts.row_spec(i) for i in rows}, of_residual),
        ({i: parts.owner_spec(i) for i in rows}, of_residual, PartitionSpec()),
    )
    named = {parts.names[i]: PerWorker(x) for i, x in residual.items()}
    return treedef.unflatten([means[i] for i in rows]), named, ok


def _optimized(
    optimizer: optax.GradientTransformationExtraArgs,
    means: Any,
    state: Any,
    params: Any,
    extra_args: dict[str, Any],
) -> tuple[Any, Any]:
    """The optimizer's updates and its next state.

    Explicit axes refuse products of what owners have, such as Muon's. For XLA they are nothing new.
    """
    treedef: Any
    leaves, treedef = jax.tree.flatten(extra_args)
    arrays = {i: x for i, x in enumerate(leaves) if isinstance(x, jax.Array)}

    def update(before: tuple[Any, Any], params: Any, arrays: dict[int, Array]) -> tuple[Any, Any]:
        extra = treedef.unflatten([arrays.get(i, x) for i, x in enumerate(leaves)])
        return optimizer.update(*before, params, **extra)

    return meshes.untyped(update, (means, state), params, arrays)


def _send_home(
    parts: Ownership, home: Format, updates: Any, state: Zero1State
) -> tuple[Any, dict[str, Array]]:
    """Updates, whole on all workers, and what their rounding leaves with the owners."""
    axis_name = parts.workers.axis_name

    def rounded(x: dict[int, Array]) -> dict[int, Array]:
        """Updates in their dtypes. One that is not finite arrives so."""
        own = lambda y, dtype: jnp.where(jnp.isfinite(y), layouts.narrow(y, dtype), y.astype(dtype))
        return {i: own(y, leaves[i].dtype) for i, y in x.items()}

    def left(x: Array, arrived: Array, before: Array) -> Array:
        new = x - arrived.astype(jnp.float32)
        return jnp.where(jnp.isfinite(new), new, before)  # or it would stay for ever

    def on_worker(given: dict[int, Array], before: dict[int, Array]) -> Any:
        x = {i: given[i].astype(jnp.float32) + before[i] for i in before}
        vector = layouts.join([*x.values()])
        rows, _ = quantized_all_gather(vector, home, axis_name=axis_name)
        arrived = rounded(parts.of_owner(rows[wire.axis_index(axis_name)]))
        owed = {i: left(x[i], y, before[i]) for i, y in arrived.items()}
        return rounded(parts.from_rows(rows)), owed

    treedef: Any
    leaves, treedef = jax.tree.flatten(updates)
    owed = {i: state.owed[parts.names[i]] for i in parts.compressed}
    # An update that travels no more is whole. It may owe something of other numbers of workers.
    wide = {i: leaves[i].astype(jnp.float32) + owed[i] for i in parts.whole}
    whole = rounded(wide)
    owed |= {i: left(wide[i], whole[i], owed[i]) for i in parts.whole}
    if parts.owned:
        of_owned = {i: parts.owner_spec(i) for i in parts.owned}
        given = {i: leaves[i] for i in parts.owned}, {i: owed[i] for i in parts.owned}
        equal = {i: parts.own[i] for i in parts.owned}
        found = parts.workers.map(on_worker, given, (of_owned, of_owned), (equal, of_owned))
        whole |= found[0]
        owed |= found[1]
    delivered = [parts.as_parameter(i, whole.get(i, x)) for i, x in enumerate(leaves)]
    return treedef.unflatten(delivered), {parts.names[i]: x for i, x in owed.items()}


def _check(parts: Ownership, state: Zero1State) -> None:
    """Raises ValueError if the state was made for another tree."""
    wanted = {parts.names[i]: parts.shapes[i] for i in parts.compressed}
    there = {name: node.value.shape[1:] for name, node in state.residual.items()}
    if there != wanted:
        raise ValueError(
            f"the state has residuals of {there}, and these parameters need {wanted}: pass the "
            "state that init(params) made for the same tree, settings and mesh"
        )


def _zeros(
    mesh: AnyMesh | None,
    is_traced: bool,
    shape: tuple[int, ...],
    spec: PartitionSpec,
    dtype: Any = jnp.float32,
) -> Array:
    if mesh is None:
        return jnp.zeros(shape, dtype)
    sharding = NamedSharding(mesh, spec)
    if isinstance(mesh, Mesh) and not is_traced:  # no device ever holds all of it
        return jnp.zeros(shape, dtype, device=sharding)
    return meshes.constrain(jnp.zeros(shape, dtype), sharding)


def _refuse_bound(axis_name: str) -> None:
    if wire.is_bound(axis_name):
        raise ValueError(
            f"axis_name={axis_name!r} is bound here, and zero1 has no update of a single worker, "
            "which owns a part alone: call it outside of that jax.shard_map or jax.vmap, on "
            "gradients of jaxsparse.value_and_grad"
        )
