"""Error feedback for any plan of which leaves are exchanged how."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, DTypeLike

from jaxsparse import layout as layouts
from jaxsparse.collectives import wire
from jaxsparse.feedback import accumulators, exchange
from jaxsparse.feedback.checks import (
    check_delay,
    check_local,
    check_momentum,
    check_shards,
    check_state,
)
from jaxsparse.feedback.levels import Levels
from jaxsparse.feedback.state import ErrorFeedbackState
from jaxsparse.per_worker import PerWorker, is_sharded
from jaxsparse.reducers.base import Reducer, info


class Planned(NamedTuple):
    """How the leaves of a tree are exchanged."""

    layout: layouts.Layout
    reducers: tuple[Reducer, ...]  # one a bucket
    shards: tuple[int, ...]  # elements of this device's shard of each bucket


def planned_feedback(
    plan: Callable[[Any], Planned],
    levels: Levels,
    *,
    momentum: float | Array | None,
    delay: int | None,
    accumulator_dtype: DTypeLike | None,
) -> optax.GradientTransformationExtraArgs:
    """See `error_feedback`; the plan says which leaves are exchanged how.

    Args:
        plan: of a tree's shapes, where `levels.dense_axis` is bound.
        levels: the axes of workers.
        momentum: factor in [0, 1), a float or a (traced) scalar array; None saves the buffer.
        delay: steps, 0 (or None) or 1, between a gradient and its exchange.
        accumulator_dtype: of residuals and momenta, float32 (or None) or bfloat16.
    """
    check_momentum(momentum)
    is_delayed = check_delay(delay)
    dtype = accumulators.check_dtype(accumulator_dtype)
    is_narrow = dtype != jnp.float32
    has_momentum = momentum is not None

    def init(params: Any) -> ErrorFeedbackState:
        levels.check_init()
        layout, reducers, shards = plan(params)

        def zeros(size: int, of_mean: bool = False) -> Any:
            buffer = jnp.zeros((size,), dtype)
            return levels.store(buffer) if of_mean else levels.mark(buffer)

        dense = jnp.zeros((layout.dense_size,), jnp.float32)
        return ErrorFeedbackState(
            residual=tuple(map(zeros, shards)),
            momentum=tuple(map(zeros, shards, (r.needs_zeros for r in reducers)))
            if has_momentum
            else (),
            dense_momentum=(levels.store(dense) if levels.sharded else dense)
            if has_momentum and dense.size
            else (),
            reducers=tuple(levels.store(r.init(d)) for r, d in zip(reducers, shards)),
            skipped=jnp.int32(0),
            info=info(0),
            pending=levels.mark(dense) if is_delayed and dense.size else (),
            roundings=jnp.uint32(0) if is_narrow else (),
        )

    def update(
        updates: Any, state: ErrorFeedbackState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, ErrorFeedbackState]:
        del params, extra_args
        levels.check_bound()
        check_local(updates, levels)
        layout, reducers, shards = plan(updates)
        check_shards(updates, layout, levels)
        check_state(
            state,
            shards,
            layout.dense_size,
            has_momentum=has_momentum,
            is_delayed=is_delayed,
            dtype=dtype,
            parts=None if levels.dense_axis is None else levels.shards,
        )
        of_mean = tuple(reducer.needs_zeros for reducer in reducers)
        settings = exchange.Settings(levels, reducers, layout.bucket_sizes, of_mean, momentum)
        before = [
            exchange.Bucket(
                residual=PerWorker.unwrap(state.residual[i]).astype(jnp.float32),
                momentum=_load_momentum(state.momentum[i], of_mean[i], levels).astype(jnp.float32)
                if has_momentum
                else None,
                reducer=levels.load(
                    functools.partial(reducers[i].init, shards[i]), state.reducers[i]
                ),
            )
            for i in range(len(reducers))
        ]
        buckets, dense = layout.flatten(updates)
        # Orbax saves no empty arrays, so that the state has none.
        dense_before = exchange.Dense(*(jnp.zeros((0,), jnp.float32) for _ in range(2)))
        if dense.size:
            mean_levels = levels if levels.sharded else Levels(None)
            dense_before = exchange.Dense(
                _load_momentum(state.dense_momentum, True, mean_levels) if has_momentum else None,
                PerWorker.unwrap(state.pending) if is_delayed else None,
            )

        gradients = exchange.scatter(buckets, shards, levels)
        run = exchange.delayed if is_delayed else exchange.immediate
        done = run(gradients, dense, before, dense_before, settings)

        update_tree = layout.unflatten(done.means, done.dense_mean)
        residuals = [b.residual for b in done.buckets]
        if any(dtype != jnp.float32 for dtype in layout.dtypes):
            # What rounding to the leaves' dtypes takes from the update is not delivered either.
            rounded, _ = layout.flatten(update_tree)
            residuals = [
                r if zeros else _add(r, levels.own(m - low, r.size))
                for r, m, low, zeros in zip(residuals, done.means, rounded, of_mean)
            ]
        momenta = [b.momentum for b in done.buckets]
        if is_narrow:
            # Equal copies of a mean's momentum have to be rounded alike.
            keys = functools.partial(accumulators.key_of, state.roundings)
            residuals = [
                accumulators.rounded(r, keys(2 * i, levels.axes)) for i, r in enumerate(residuals)
            ]
            momenta = [
                accumulators.rounded(m, keys(2 * i + 1, () if mean else levels.axes))
                for i, (m, mean) in enumerate(zip(momenta, of_mean))
                if m is not None
            ]
        counts = levels.total(
            done.infos, layout.bucket_sizes, shards, _dense_elements(updates, layout, levels)
        )
        new_state = ErrorFeedbackState(
            residual=tuple(map(levels.wrap, residuals)),
            momentum=tuple(
                levels.store(m) if mean else levels.wrap(m) for m, mean in zip(momenta, of_mean)
            )
            if has_momentum
            else (),
            dense_momentum=(
                levels.store(done.dense.momentum) if levels.sharded else done.dense.momentum
            )
            if has_momentum and dense.size
            else (),
            reducers=tuple(levels.store(b.reducer) for b in done.buckets),
            skipped=state.skipped + jnp.where(done.ok, jnp.int32(0), jnp.int32(1)),
            info=counts if is_delayed else exchange.select(done.ok, counts, state.info),
            pending=levels.wrap(done.dense.pending) if is_delayed and dense.size else (),
            # A skipped step leaves the state as it was.
            roundings=state.roundings
            + jnp.where(jnp.bool_(is_delayed) | done.ok, jnp.uint32(1), jnp.uint32(0))
            if is_narrow
            else (),
        )
        return _typed_as(update_tree, updates, levels), new_state

    return optax.GradientTransformationExtraArgs(init, update)


def _add(residual: Array, lost: Array) -> Array:
    """Their sum; where nothing is lost, the bits of the residual, as after a skipped step."""
    return jnp.where(lost == 0, residual, residual + lost)  # -0 + 0 is +0


def _dense_elements(updates: Any, layout: layouts.Layout, levels: Levels) -> int:
    """Elements of the uncompressed leaves; of those that are shards, of all shards."""
    axis = levels.dense_axis
    if not levels.sharded or axis is None:
        return layout.dense_size
    leaves = jax.tree_util.tree_flatten_with_path(updates)[0]
    is_typed = wire.tracks_replication(axis)

    def copies(leaf: int) -> int:
        path, x = leaves[leaf]
        is_shard = wire.is_varying(x, axis) if is_typed else is_sharded(path)
        return levels.shards if is_shard else 1

    return sum((piece.stop - piece.start) * copies(piece.leaf) for piece in layout.dense)


def _load_momentum(stored: Any, of_mean: bool, levels: Levels) -> Array:
    if not of_mean:
        return PerWorker.unwrap(stored)
    return levels.load(lambda: jnp.float32(0), stored)


def _typed_as(updates: Any, gradients: Any, levels: Levels) -> Any:
    """Updates whose gradients were equal along the fast axis, typed as equal there."""
    axis = levels.dense_axis
    if not levels.sharded or axis is None or not wire.tracks_replication(axis):
        return updates
    return jax.tree.map(
        lambda u, g: u if wire.is_varying(g, axis) else wire.replicated(u, axis),
        updates,
        gradients,
    )
