"""Error feedback around any reducer, as one Optax transformation."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from jaxsparse import layout as layouts
from jaxsparse.collectives import wire
from jaxsparse.per_worker import PerWorker
from jaxsparse.reducers.base import Budget, Info, Reduced, Reducer, alignment, info, needs_zeros


class ErrorFeedbackState(NamedTuple):
    """State of `error_feedback`, for buckets of d_1, d_2, ... and n dense elements."""

    residual: tuple[PerWorker, ...]  # float32[1, d_i] as a worker sees it: not delivered so far
    momentum: tuple[Any, ...]  # PerWorker of float32[1, d_i], or of the mean; () without momentum
    dense_momentum: Any  # float32[n], replicated: the mean's momentum; () without momentum
    reducers: tuple[Any, ...]  # one carried state a bucket
    skipped: Int[Array, ""]  # int32: steps skipped because a gradient was not finite
    info: Info  # of the last step that was not skipped, summed over buckets


class Planned(NamedTuple):
    """How the leaves of a tree are exchanged."""

    layout: layouts.Layout
    reducers: tuple[Reducer, ...]  # one a bucket


def error_feedback(
    reducer: Budget,
    *,
    axis_name: str | None = "data",
    momentum: float | Array | None = None,
    is_dense: layouts.IsDense | None = None,
    bucket_size: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Exchanges gradients through `reducer`; what was not delivered is added to the next ones.

    Per step and worker, for the compressed buckets (u: momentum, v: residual, both zero at first):

        u = momentum * u + g        (momentum correction; u = g without momentum)
        v = v + u
        mean, v = reducer(v)
        u = 0 where the reducer sent (momentum factor masking)

    The update is `mean`, equal on all workers, in the gradients' shapes and dtypes. Leaves that
    `is_dense` picks are averaged exactly in float32, with the same momentum and no masking.

    The momentum here replaces the optimizer's: chain `optax.sgd(lr)` without momentum after it.
    Masking zeroes the momentum of whatever is sent, so a budget near 1 is not dense momentum SGD.
    Reducers that send whatever is not zero (blocks without a density) get the gradient without
    momentum, which would be zero nowhere; the momentum is that of the mean, which comes to the same
    if all is delivered.

    It belongs first in an `optax.chain`, or behind stateless transformations of the local gradient
    such as clipping. Use it with `optax.multi_transform` to treat leaves differently. Not with:
    `optax.MultiSteps` around it (exchanges at each micro-step: accumulate by a scan inside the
    step instead), `optax.apply_if_finite` around it (branches on a local value: workers wait for
    each other forever; and needless, see below), `optax.masked` around it (masked leaves are never
    averaged: replicas diverge).

    A gradient (or its sum with residual or momentum) that is not finite, on any worker, skips the
    step on all: the update is zero and the
    state stays as it was, but for the `skipped` counter. Transformations further down the chain
    still see the zero update: schedules and Adam's moments advance.

    Args:
        reducer: how the buckets are exchanged: a `Reducer`, or a budget that makes one for each.
        axis_name: the axis over which workers are mapped; None for a single worker.
        momentum: factor in [0, 1), a float or a (traced) scalar array; None saves the buffer.
        is_dense: given a leaf's key path and shape, whether it travels uncompressed. By default
            vectors, scalars and anything below 1024 elements do.
        bucket_size: upper limit for the elements of a bucket. More buckets are exchanged one after
            the other, with less memory in flight; the reducer's budget is split in proportion to
            their sizes.

    Returns:
        A transformation whose `init` needs no axis and returns one worker's state, to be spread by
        `jaxsparse.shard`, and whose `update` must run where `axis_name` is bound
        (`jaxsparse.data_parallel`).

    Raises:
        ValueError: from `init`: no leaf is compressed under the default rule, the budget does not
            fit, or see `jaxsparse.layout.plan`. From `update`: the axis is not bound, the state
            belongs to another tree or to several workers, or the gradients are already summed.
    """

    def plan(tree: Any) -> Planned:
        rule = layouts.small_or_vector if is_dense is None else is_dense
        layout = layouts.plan(
            tree, is_dense=rule, bucket_size=bucket_size, alignment=alignment(reducer)
        )
        if not layout.buckets and is_dense is None:
            raise ValueError(
                f"no leaf would be compressed: all {len(layout.shapes)} are vectors, scalars or "
                "smaller than 1024 elements, which go dense by default. Pass "
                "is_dense=lambda path, shape: False to compress them all, or use jaxsparse.dense()"
            )
        return Planned(layout, reducer.split(layout.bucket_sizes, layout.dense_size))

    return planned_feedback(plan, axis_name=axis_name, momentum=momentum)


def planned_feedback(
    plan: Callable[[Any], Planned], *, axis_name: str | None, momentum: float | Array | None
) -> optax.GradientTransformationExtraArgs:
    """See `error_feedback`; the plan says which leaves are exchanged how.

    Args:
        plan: of a tree's shapes.
        axis_name: the axis over which workers are mapped; None for a single worker.
        momentum: factor in [0, 1), a float or a (traced) scalar array; None saves the buffer.
    """
    _check_momentum(momentum)

    def init(params: Any) -> ErrorFeedbackState:
        layout, reducers = plan(params)
        has_momentum = momentum is not None

        def zeros(size: int, is_shared: bool = False) -> Any:
            buffer = jnp.zeros((size,), jnp.float32)
            return buffer if is_shared else PerWorker.wrap(buffer)

        return ErrorFeedbackState(
            residual=tuple(map(zeros, layout.bucket_sizes)),
            momentum=tuple(map(zeros, layout.bucket_sizes, map(needs_zeros, reducers)))
            if has_momentum
            else (),
            dense_momentum=jnp.zeros((layout.dense_size,), jnp.float32) if has_momentum else (),
            reducers=tuple(r.init(d) for r, d in zip(reducers, layout.bucket_sizes)),
            skipped=jnp.int32(0),
            info=info(0),
        )

    def update(
        updates: Any, state: ErrorFeedbackState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, ErrorFeedbackState]:
        del params, extra_args
        wire.axis_size(axis_name)  # raises if the axis is not bound here
        _check_local(updates, axis_name)
        layout, reducers = plan(updates)
        _check_state(state, layout, has_momentum=momentum is not None)
        buckets, dense = layout.flatten(updates)

        # Whether what is to be exchanged is finite is agreed on in the same message as the dense
        # leaves, before the buckets are exchanged. A skipped step then exchanges the old residual
        # in vain, but no copy of the old state need be kept, as it would be to decide afterwards.
        of_mean = tuple(map(needs_zeros, reducers))
        before = []
        for i in range(len(buckets)):
            own = (
                PerWorker.unwrap(state.momentum[i])
                if momentum is not None and not of_mean[i]
                else None
            )
            before.append(_Bucket(PerWorker.unwrap(state.residual[i]), own, state.reducers[i]))
        sums = [b.residual + _corrected(g, b, momentum) for g, b in zip(buckets, before)]
        finite = functools.reduce(jnp.logical_and, map(_all_finite, [*sums, dense]))
        broken = jnp.where(finite, jnp.float32(0), jnp.float32(1))
        message = jnp.concatenate([dense, broken[None]])
        exchanged = wire.psum(message, axis_name) / wire.axis_size(axis_name)
        # A sum of finite gradients can overflow, too.
        ok, dense_update = _all_finite(exchanged) & (exchanged[-1] == 0), exchanged[:-1]
        dense_update, dense_momentum = _mean_momentum(
            dense_update, state.dense_momentum, ok, momentum
        )

        means: list[Array] = []
        momenta: list[Any] = []
        carried: list[_Bucket] = []
        infos = [info(dense.size)]
        for i, gradient in enumerate(buckets):
            if means:
                # Without the barrier XLA may start all buckets at once, and the memory that
                # splitting saves is lost again.
                gradient, _ = jax.lax.optimization_barrier((gradient, means[-1]))
            exchange = functools.partial(reducers[i], axis_name=axis_name)
            mean, after, bucket_info = _exchange(exchange, gradient, before[i], ok, momentum)
            if of_mean[i] and momentum is not None:
                mean, after_mean = _mean_momentum(mean, state.momentum[i], ok, momentum)
                momenta.append(after_mean)
            elif after.momentum is not None:
                momenta.append(PerWorker.wrap(after.momentum))
            means.append(mean)
            carried.append(after)
            infos.append(bucket_info)

        update_tree = layout.unflatten(means, dense_update)
        residuals = [b.residual for b in carried]
        if any(dtype != jnp.float32 for dtype in layout.dtypes):
            # What rounding to the leaves' dtypes takes from the update is not delivered either.
            rounded, _ = layout.flatten(update_tree)
            residuals = [
                r if zeros else r + (m - low)
                for r, m, low, zeros in zip(residuals, means, rounded, of_mean)
            ]
        new_state = ErrorFeedbackState(
            residual=tuple(map(PerWorker.wrap, residuals)),
            momentum=tuple(momenta),
            dense_momentum=dense_momentum,
            reducers=tuple(b.reducer for b in carried),
            skipped=state.skipped + jnp.where(ok, jnp.int32(0), jnp.int32(1)),
            info=_select(
                ok, jax.tree.map(lambda *xs: jnp.stack(xs).sum(dtype=jnp.int32), *infos), state.info
            ),
        )
        return update_tree, new_state

    return optax.GradientTransformationExtraArgs(init, update)


class _Bucket(NamedTuple):
    """One worker's state of one bucket."""

    residual: Array
    momentum: Array | None  # its own; None if there is none, or that of the mean
    reducer: Any


def _exchange(
    reducer: Callable[[Array, Any], Reduced],
    gradient: Array,
    before: _Bucket,
    ok: Array,
    momentum: float | Array | None,
) -> tuple[Array, _Bucket, Info]:
    """Update, new state and info of one bucket; without `ok`, no update and the state of before."""
    u = _corrected(gradient, before, momentum)
    x = _select(ok, before.residual + u, before.residual)
    if before.momentum is not None:
        u = _select(ok, u, before.momentum)
    reduced = reducer(x, before.reducer)
    after = _Bucket(
        residual=_select(ok, reduced.residual, x),
        momentum=None if before.momentum is None else _select(ok, _masked(u, reduced), u),
        reducer=_select(ok, reduced.state, before.reducer),
    )
    return _select(ok, reduced.mean, jnp.zeros_like(reduced.mean)), after, reduced.info


def _mean_momentum(
    mean: Array, before: Any, ok: Array, momentum: float | Array | None
) -> tuple[Array, Any]:
    """The update with the mean's momentum, and the momentum; without `ok`, zeros and as before."""
    if momentum is not None:
        mean = jnp.asarray(momentum, jnp.float32) * before + mean
        before = _select(ok, mean, before)
    return _select(ok, mean, jnp.zeros_like(mean)), before


def _corrected(gradient: Array, before: _Bucket, momentum: float | Array | None) -> Array:
    """The gradient with momentum, u."""
    if momentum is None or before.momentum is None:
        return gradient
    return jnp.asarray(momentum, jnp.float32) * before.momentum + gradient


def _select(ok: Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, old)


def _all_finite(x: Array) -> Array:
    # A sum propagates NaN, which maxima on CPU may lose, and it stores nothing of x's size.
    return jnp.sum(x * jnp.zeros_like(x, shape=())) == 0


def _masked(u: Array, reduced: Reduced) -> Array:
    return u if reduced.sent is None else jnp.where(reduced.sent, jnp.zeros_like(u), u)


def _check_momentum(momentum: Any) -> None:
    if momentum is None:
        return
    if jnp.ndim(momentum) != 0:
        raise ValueError(
            f"momentum has shape {jnp.shape(momentum)}: pass a scalar in [0, 1), the same for all "
            "leaves (optax.multi_transform treats leaves differently)"
        )
    if not isinstance(momentum, jax.core.Tracer) and not 0 <= float(momentum) < 1:
        raise ValueError(f"momentum={momentum} must lie in [0, 1); use None for no momentum")


def _check_local(updates: Any, axis_name: str | None) -> None:
    if not wire.tracks_replication(axis_name):
        return
    assert axis_name is not None
    for path, leaf in jax.tree_util.tree_flatten_with_path(updates)[0]:
        if leaf.size and not wire.is_varying(leaf, axis_name):
            raise ValueError(
                f"gradient{jax.tree_util.keystr(path)} is equal on all workers of axis "
                f"{axis_name!r}: JAX has already summed it, uncompressed, because it was taken "
                "with respect to replicated parameters. Differentiate with respect to "
                f"jaxsparse.local(params, {axis_name!r}) instead, and do not average gradients "
                "yourself. (If it is a constant, make it local with jaxsparse.local, too)"
            )


def _check_state(state: ErrorFeedbackState, layout: layouts.Layout, has_momentum: bool) -> None:
    sizes = tuple(node.value.shape[-1] for node in state.residual)
    if sizes != layout.bucket_sizes:
        raise ValueError(
            f"the state holds residuals of sizes {sizes}, the gradients fill buckets of sizes "
            f"{layout.bucket_sizes}: pass the state that init(params) made for the same tree and "
            "settings"
        )
    dense = state.dense_momentum
    momenta = len(state.momentum), None if isinstance(dense, tuple) else dense.size
    if momenta != ((len(sizes), layout.dense_size) if has_momentum else (0, None)):
        raise ValueError(
            f"the state holds momentum for {momenta[0]} buckets and {momenta[1]} dense elements, "
            f"the gradients fill {len(sizes)} and {layout.dense_size}, and momentum is "
            f"{'on' if has_momentum else 'off'}: pass the state that init(params) made for the "
            "same tree and settings"
        )
