"""EF21-SGDM: workers exchange the differences between their momenta and shared estimates."""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, UInt32

from jaxsparse.arrays.layout import IsDense, narrow, short_names
from jaxsparse.arrays.magnitude import clipped
from jaxsparse.comm import marks, meshes, wire
from jaxsparse.comm.marks import PerWorker
from jaxsparse.comm.meshes import Placement
from jaxsparse.comm.workers import Workers, workers_and_placement
from jaxsparse.feedback.options import check_momentum, skipped_update
from jaxsparse.feedback.store import ErrorFeedbackState, check_made
from jaxsparse.feedback.transformations import exchange
from jaxsparse.reducers.base import Reducer, check_reducer


class EF21State(NamedTuple):
    """State of `ef21_sgdm`. The estimate of worker w's momentum is g_w = momentum - residual."""

    feedback: ErrorFeedbackState  # its residual is v_w - g_w, 0 for uncompressed leaves
    momentum: Any  # v_w, a tree like the parameters: PerWorker float32 [1, *shape]
    estimate: Any  # g, the mean of all g_w: replicated float32 [*shape]
    steps: UInt32[Array, ""]  # uint32: number of steps that were not skipped


def ef21_sgdm(
    reducer: Reducer,
    *,
    momentum: float | Array | None = 0.9,
    axis_name: str | None = "data",
    bucket_size: int | None = None,
    mesh: Mesh | None = None,
    workers: int | None = None,
    specs: Any = None,
    when_skipped: Literal["zero", "nan"] | None = None,
    is_dense: IsDense | None = None,
) -> optax.GradientTransformationExtraArgs:
    """EF21-SGDM (Fatkhullin, Tyurin and Richtarik, NeurIPS 2023): compressed differences.

    Where workers' gradients differ, classic error feedback stops at a distance from the minimum
    that grows with the learning rate, because parts of the gradients arrive late. Here workers send
    differences that vanish at the minimum. Each worker has a momentum v_w, which small batches
    need, and an estimate g_w of it that all workers know. With C the compression, in a step

        v_w = momentum * v_w + (1 - momentum) * gradient    (the first gradient in the first step)
        c_w = C(v_w - g_w)
        g_w = g_w + c_w
        g = g + mean of all c_w

    The update is g, the mean of all g_w, so all coordinates move in each step. No learning rate
    enters the state, so it may change at any time. Chain an optimizer without momentum behind it:
    `optax.chain(ef21_sgdm(reducers.TopK(0.01)), optax.sgd(0.1))`. (`benchmarks/ef21.py` compares.)

    v_w - g_w is the residual of error feedback on the changes of v_w, so C can be any reducer of
    this library that conserves sums, and g_w is not stored. The law is, to rounding,

        g == mean of all v_w - mean of all residuals

    Reducers that are right only in expectation (Quantized with stochastic rounding, S2), or that
    leak, are refused, because g would add up their errors for ever.

    A skipped step has an update of zero. What was finite of its gradients waits in v_w and the
    residual (not of uncompressed leaves). `jaxsparse.reshard` keeps the means of v_w and of
    residuals, hence the law. Uncompressed leaves have g == mean of all v_w.
    Each worker holds two arrays like the parameters, v_w and the residual, and one that is equal on
    all workers, g.

    There are fewer options than those of `jaxsparse.exchange`: v_w is an average, and all that
    fades, overflows on the way, or is rounded would be missing in the estimate for ever.

    Args:
        reducer: C, such as `jaxsparse.reducers.TopK(0.01)`, `SparDL(0.01)`, `ChunkedTopK()`.
        momentum: that of v_w (1 - eta in the paper): 0.9 is usual, and None (or 0) is EF21-SGD,
            which needs large batches.
        axis_name: see `jaxsparse.exchange`.
        bucket_size: see `jaxsparse.exchange`.
        mesh: see `jaxsparse.exchange`.
        workers: see `jaxsparse.exchange`.
        specs: see `jaxsparse.exchange`.
        when_skipped: see `jaxsparse.exchange`.
        is_dense: see `jaxsparse.exchange`.

    Example:
        >>> from jaxsparse.reducers import TopK
        >>> options = {"axis_name": None, "is_dense": lambda path, shape: False}
        >>> tx = ef21_sgdm(TopK(0.5, selection="exact"), momentum=0.5, **options)
        >>> state, update = tx.init(jnp.zeros(2)), jax.jit(tx.update)
        >>> for gradient in ([4.0, 2.0], [2.0, 2.0], [2.0, 2.0]):
        ...     updates, state = update(jnp.float32(gradient), state)
        ...     print(updates.tolist())
        [4.0, 0.0]
        [4.0, 2.0]
        [2.5, 2.0]
    """
    check_reducer(reducer)
    if not reducer.conserves:
        raise ValueError(
            f"reducer={reducer} does not conserve sums, so that the estimate would add up its "
            "errors for ever: use one that keeps them in its residual (rounding to nearest, the "
            "mean over all workers, residuals='global'), such as jaxsparse.reducers.TopK(0.01)"
        )
    check_momentum(momentum)
    of_skipped = skipped_update(when_skipped, None)
    feedback = exchange(
        reducer,
        axis_name=axis_name,
        bucket_size=bucket_size,
        mesh=mesh,
        workers=workers,
        specs=specs,
        is_dense=is_dense,
    )

    def init(params: Any) -> EF21State:
        at = workers_and_placement(params, axis_name, mesh, workers, specs)
        start = _start(params, feedback.init(params), *at)
        return start._replace(momentum=wire.varying(start.momentum, axis_name))

    def update(
        updates: Any, state: EF21State, params: Any = None, **extra_args: Any
    ) -> tuple[Any, EF21State]:
        check_made(state, EF21State)
        is_bound = wire.is_bound(axis_name)
        if is_bound:
            wire.Axes(axis_name).check(updates)
            before = PerWorker.unwrap(state.momentum)
        else:  # both have a row for each worker
            is_leaf = marks.is_per_worker
            before = jax.tree.map(lambda node: node.value, state.momentum, is_leaf=is_leaf)
        _check_tree(before, updates)
        eta = 1 - jnp.asarray(0.0 if momentum is None else momentum, jnp.float32)
        eta = jnp.where(state.steps == 0, 1, eta)
        after = jax.tree.map(lambda v, g: v + eta * (g.astype(jnp.float32) - v), before, updates)
        # Differences of the rounded momenta, so that they add up to the momentum.
        changes = jax.tree.map(jnp.subtract, after, before)
        # The estimates have the parameters' shapes.
        means, inner = feedback.update(changes, state.feedback, state.estimate, **extra_args)
        ok = inner.skipped == state.feedback.skipped
        select = lambda new, old: jnp.where(ok, new, old)
        # An overflow would stay for ever.
        add = lambda g, c: clipped(g + c.astype(jnp.float32))
        estimate = jax.tree.map(lambda g, c: select(add(g, c), g), state.estimate, means)
        # In a skipped step, what was finite of changes waits in residuals. Changes of uncompressed
        # leaves are made again.
        has_residual = [name in inner.residual for name in short_names(changes)]
        waits = jax.tree.unflatten(jax.tree.structure(changes), has_residual)
        counts = lambda c, waits: ok | (waits & jnp.isfinite(c))
        keep = lambda new, old, c, waits: jnp.where(counts(c, waits), new, old)
        kept = jax.tree.map(keep, after, before, changes, waits)
        delivered = jax.tree.map(
            lambda g, like: narrow(jnp.where(ok, g, of_skipped), like.dtype), estimate, updates
        )
        steps = state.steps + jnp.where(ok, jnp.uint32(1), jnp.uint32(0))
        own = PerWorker.wrap if is_bound else functools.partial(jax.tree.map, PerWorker)
        kept = own(wire.varying(kept, axis_name))
        return delivered, EF21State(inner, kept, estimate, steps)

    return optax.GradientTransformationExtraArgs(init, marks.on_plain_arrays(update))


def _check_tree(momentum: Any, updates: Any) -> None:
    """Raises ValueError unless the state was made for gradients of these shapes."""
    there, here = (
        {jax.tree_util.keystr(path): jnp.shape(x) for path, x in leaves}
        for leaves in map(jax.tree_util.tree_leaves_with_path, (momentum, updates))
    )
    if there != here:
        raise ValueError(
            f"the state's momentum has the leaves {there}, but the gradients are {here}: pass the "
            "state that init(params) made for the same tree"
        )


def _start(
    params: Any, feedback: ErrorFeedbackState, workers: Workers, placement: Placement | None
) -> EF21State:
    """The state before the first step, placed as parameters are.

    Momenta of compressed leaves are placed as their residuals, because an exchange may cut leaves
    further.
    """
    treedef: Any
    leaves, treedef = jax.tree.leaves(params), jax.tree.structure(marks.without_variables(params))
    count, mesh, axis_name = workers.count, workers.mesh, workers.axis_name
    own = [PartitionSpec()] * len(leaves) if placement is None else placement.own
    in_variables = axis_name is not None and marks.has_variables(params)

    def zeros(leaf: Any, spec: PartitionSpec, is_own: bool) -> Any:
        if mesh is None or axis_name is None:
            x = jnp.zeros_like(leaf, jnp.float32)
            return jnp.broadcast_to(x, (count, *x.shape)) if is_own else x
        x = jnp.zeros((count, *jnp.shape(leaf)) if is_own else jnp.shape(leaf), jnp.float32)
        spec = PartitionSpec(*(axis_name,) * is_own, *spec)
        x = meshes.constrain(x, NamedSharding(mesh, spec))
        return marks.in_variable(x, spec) if in_variables else x

    momenta = [
        jax.tree.map(jnp.array, feedback.residual[name].value)
        if name in feedback.residual
        else zeros(leaf, spec, True)
        for name, leaf, spec in zip(short_names(params), leaves, own)
    ]
    estimates = [zeros(leaf, spec, False) for leaf, spec in zip(leaves, own)]
    steps = jnp.uint32(0)
    if mesh is not None and axis_name is not None:
        steps = meshes.constrain(steps, NamedSharding(mesh, PartitionSpec()))
    marked = treedef.unflatten(map(PerWorker, momenta))
    if marks.is_stand_in(params):  # momenta have an axis of workers, which parameters lack
        marked = jnp.int32(0)
    return EF21State(feedback, marked, treedef.unflatten(estimates), steps)
