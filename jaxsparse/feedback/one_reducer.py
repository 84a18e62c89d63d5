"""Error feedback around one reducer, as one Optax transformation."""

from typing import Any, Unpack

import optax

from jaxsparse import layout as layouts
from jaxsparse.feedback.levels import Levels
from jaxsparse.feedback.options import LeafOptions, exchange_options
from jaxsparse.feedback.planned import Planned, planned_feedback
from jaxsparse.reducers.base import Budget


@exchange_options()
def error_feedback(
    reducer: Budget, **options: Unpack[LeafOptions]
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

    **Two levels.** On a mesh of H hosts with L devices each, a `dense_axis` leaves the fast network
    uncompressed: g is averaged over `dense_axis` by a reduce-scatter, which leaves 1/L of each
    bucket to a device; the lines above run on that shard, among the H devices along `axis_name`
    that hold the same one; and an all-gather over `dense_axis` puts the means together. A device
    keeps residual and momentum of its shard only, which are in units of the fast axis' mean:

        sum of all H L workers' g == H L (sum of updates) + L (sum over hosts of their shards' v)

    for buckets as their shards laid end to end. The slow axis carries 1/L of what it would, for
    each device; the fast one 2 (L - 1)/L d words. Settings that are totals for the tree, such as a
    sketch's k, are divided over shards. State depends on L, so `init` runs on the mesh:

        params = jaxsparse.shard(params, mesh, axis_name=("hosts", "local"))
        on_mesh = functools.partial(
            jaxsparse.data_parallel, mesh=mesh, axis_name=("hosts", "local")
        )
        state = on_mesh(tx.init, batch_argnums=())(params)

    With `sharded=True` parameters, and so gradients, are sharded over `dense_axis` already (FSDP),
    and nothing is scattered or gathered: each leaf is this device's shard of the gradient's *mean*
    over `dense_axis`. JAX makes sums (the transpose of an all-gather is a reduce-scatter that
    sums), so scale the loss, or the gradients, by 1/L. A leaf that is equal along `dense_axis`, of
    a parameter that is not sharded, must be averaged along it likewise and go uncompressed.
    `jaxsparse.Sharded` marks sharded arrays, and the optimizer's state takes the marks over.
    `is_dense` sees the shapes of shards, and key paths with the mark:
    "['kernel'].jaxsparse_sharded". By default a leaf whose shard is smaller than 1024 elements
    therefore goes uncompressed.

    **Delay.** With delay=1 a step exchanges what was there before its gradients,

        mean, v = reducer(v)
        u = momentum * (u, zero where the reducer sent) + g
        v = v + u

    so that the exchange depends on nothing that the step computes, and may run beside the backward
    pass (SparCML's non-blocking mode) where the backend's collectives are asynchronous. Updates are
    those of delay=0 a step later, and the first one is zero; uncompressed leaves wait in `pending`.
    Only a flag, that this step's gradients are finite, has to wait for them. If they are not, they
    are left out on all workers, and last step's exchange still counts: its update is to be applied,
    although `skipped` rises.

    Args:
        reducer: how the buckets are exchanged: a `Reducer`, or a budget that makes one for each.
        **options: as for all transformations.

    Returns:
        A transformation whose `init` needs no axis (but `dense_axis`) and returns one worker's
        state, to be spread by `jaxsparse.shard`, and whose `update` must run where `axis_name` and
        `dense_axis` are bound (`jaxsparse.data_parallel`).

    Raises:
        ValueError: settings out of range. From `init`: no leaf is compressed under the default
            rule, the budget does not fit, `dense_axis` is not bound, or see
            `jaxsparse.layout.plan`. From `update`: an axis is not bound, the state
            belongs to another tree or to several workers, the gradients are already summed, or
            with `sharded` a compressed leaf is no shard.
    """
    levels = Levels.of(options)
    is_dense, bucket_size = options.get("is_dense"), options.get("bucket_size")

    def plan(tree: Any) -> Planned:
        rule = layouts.small_or_vector if is_dense is None else is_dense
        layout = layouts.plan(
            tree, is_dense=rule, bucket_size=bucket_size, alignment=reducer.alignment
        )
        if not layout.buckets and is_dense is None:
            raise ValueError(
                f"no leaf would be compressed: all {len(layout.shapes)} are vectors, scalars or "
                "smaller than 1024 elements, which go dense by default. Pass "
                "is_dense=lambda path, shape: False to compress them all, or use jaxsparse.dense()"
            )
        return Planned(layout, *levels.split(reducer, layout.bucket_sizes, layout.dense_size))

    return planned_feedback(
        plan,
        levels,
        momentum=options.get("momentum"),
        delay=options.get("delay"),
        accumulator_dtype=options.get("accumulator_dtype"),
    )
