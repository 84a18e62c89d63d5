"""Error feedback around one reducer or several, as Optax transformations."""

from collections.abc import Mapping
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from jaxsparse.feedback.axes import Axes
from jaxsparse.feedback.exchange import Settings, exchange, keep_rounding
from jaxsparse.feedback.options import LeafOptions, Options, exchange_options
from jaxsparse.feedback.plan import (
    Policy,
    Rule,
    Rules,
    by_policy,
    check_shards,
    make_plan,
    one_rule,
)
from jaxsparse.feedback.store import ErrorFeedbackState, Store, accumulator
from jaxsparse.reducers.base import Budget
from jaxsparse.settings import static_int


@exchange_options()
def error_feedback(
    reducer: Budget, **options: Unpack[LeafOptions]
) -> optax.GradientTransformationExtraArgs:
    """Exchanges gradients through `reducer`, and adds the residual to the next gradients.

    In a step, each worker does this with its compressed buckets. u is the momentum and v is the
    residual; both are zero at first:

        u = momentum * u + g        (momentum correction; u = g without momentum)
        v = v + u
        mean, v = reducer(v)
        u = 0 where the reducer sent (momentum factor masking)

    The update is `mean`, equal on all workers, in the gradients' shapes and dtypes. Leaves that
    `is_dense` picks are averaged exactly in float32, with the same momentum and no masking.

    The momentum here replaces the optimizer's: chain `optax.sgd(lr)` without momentum after it.
    Masking zeroes the momentum of all coordinates that are sent, so a budget near 1 is not dense
    momentum SGD. Some reducers send all blocks that are not zero (blocks without a density). They
    get the gradient without momentum, because a gradient with momentum would be zero nowhere. Their
    momentum is that of the mean, which is the same if everything is delivered.

    Put it first in an `optax.chain`, or behind stateless transformations of the local gradient such
    as clipping. `optax.multi_transform` may treat leaves differently. Do not put around it:
    `optax.MultiSteps`, which exchanges at each micro-step (accumulate by a scan inside the step
    instead); `optax.apply_if_finite`, which branches on a local value, so that workers wait for
    each other forever (the next paragraph makes it needless); `optax.masked`, which never averages
    the masked leaves, so that replicas diverge.

    If a gradient, or its sum with residual or momentum, is not finite on any worker, all workers
    skip the step. The update is zero, and only the `skipped` counter of the state changes. Later
    transformations in the chain still see the zero update: schedules and Adam's moments advance.

    **Two levels.** On a mesh of H hosts with L devices each, `dense_axis` names the fast axis, over
    which nothing is compressed. A reduce-scatter averages g over `dense_axis` and leaves 1/L of
    each bucket to a device. The lines above run on that shard, among the H devices along
    `axis_name` that hold the same shard. An all-gather over `dense_axis` puts the means together. A
    device keeps residual and momentum of its shard only, in units of the mean over the fast axis:

        sum of all H L workers' g == H L (sum of updates) + L (sum over hosts of their shards' v)

    where a bucket is its shards laid end to end. For each device, the slow axis carries 1/L of the
    words that it would carry without `dense_axis`, and the fast axis carries 2 (L - 1)/L d words.
    Settings that are totals for the tree, such as a sketch's k, are divided over shards. The state
    depends on L, so `init` runs on the mesh:

        params = jaxsparse.shard(params, mesh, axis_name=("hosts", "local"))
        on_mesh = functools.partial(
            jaxsparse.data_parallel, mesh=mesh, axis_name=("hosts", "local")
        )
        state = on_mesh(tx.init, batch_argnums=())(params)

    `sharded=True` says that parameters, and so gradients, are sharded over `dense_axis` already
    (FSDP). Nothing is then scattered or gathered: each leaf is this device's shard of the
    gradient's *mean* over `dense_axis`. JAX makes sums (the transpose of an all-gather is a
    reduce-scatter that sums), so scale the loss, or the gradients, by 1/L. The gradient of a
    parameter that is not sharded is equal along `dense_axis`: average it along that axis, too, and
    let it go uncompressed. `jaxsparse.Sharded` marks sharded arrays, and the optimizer's state
    takes over the marks. `is_dense` sees the shapes of shards, and key paths with the mark:
    "['kernel'].jaxsparse_sharded". So, by default, a leaf whose shard has fewer than 1024 elements
    goes uncompressed.

    **Delay.** With delay=1 a step exchanges the residual that it starts with,

        mean, v = reducer(v)
        u = momentum * (u, zero where the reducer sent) + g
        v = v + u

    so that the exchange does not depend on the step's gradients. It can run beside the backward
    pass (SparCML's non-blocking mode) if the backend's collectives are asynchronous. Updates are
    those of delay=0 one step later, and the first one is zero. Uncompressed leaves wait in
    `pending`. Only a flag waits for this step's gradients: it says that they are finite. If they
    are not, all workers leave them out and `skipped` rises. The exchange of earlier gradients still
    counts, so apply the update.

    Args:
        reducer: exchanges the buckets: a `Reducer`, or a `Budget` that makes one for each bucket.
        **options: as for all transformations.

    Returns:
        A transformation. `init` needs no axis but `dense_axis` and returns one worker's state, for
        `jaxsparse.shard` to spread. `update` must run where `axis_name` and `dense_axis` are bound
        (`jaxsparse.data_parallel`).

    Raises:
        ValueError: settings out of range. From `init`: no leaf is compressed under the default
            rule, the budget does not fit, `dense_axis` is not bound, or see
            `jaxsparse.layout.plan`. From `update`: an axis is not bound, the state belongs to
            another tree or to several workers, the gradients are already summed, or with `sharded`
            a compressed leaf is no shard.
    """
    return _feedback(one_rule(reducer, options.get("is_dense")), options)


@exchange_options(without=("is_dense",))
def partition(
    policy: Policy | Mapping[str, Rule], default: Rule = None, **options: Unpack[Options]
) -> optax.GradientTransformationExtraArgs:
    """Error feedback with different reducers for different leaves.

    Leaves with equal reducers are laid end to end and exchanged as one vector. So a reducer whose
    settings are totals (`jaxsparse.systems.SketchedSGD`) has them for these leaves together. All
    uncompressed leaves travel in one message. Residuals, momentum and composition are those of
    `error_feedback`.

    Parallax's hybrid (Kim et al., EuroSys 2019) gathers sparse gradients and all-reduces dense
    ones. It is `partition({"embedding": jaxsparse.systems.SparseAllGather(...)})`.

    Args:
        policy: a function of a leaf's key path (as `jax.tree_util.keystr` prints it) and shape that
            returns the leaf's reducer, or None for uncompressed. Or a mapping from regular
            expressions to reducers and None: the first expression found anywhere in the path
            counts. A reducer that changes during training is `Stages` of reducers.
        default: the reducer, or None, for leaves that no expression of the mapping matches.
        **options: as for all transformations.

    Raises:
        ValueError: from here: an expression is not valid. From `init` and `update`: an expression
            matches no leaf, the policy returns no reducer, or see `error_feedback`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxsparse.systems import TopK
        >>> tx = partition({"embedding": TopK(0.01)}, axis_name=None)
        >>> grads = {"embedding": jnp.ones((64, 32)), "kernel": jnp.ones((32, 32))}
        >>> updates, state = tx.update(grads, tx.init(grads))
        >>> int(updates["embedding"].sum()), int(updates["kernel"].sum())
        (21, 1024)
    """
    return _feedback(by_policy(policy, default), options)


def _feedback(rules: Rules, options: Options) -> optax.GradientTransformationExtraArgs:
    """The transformation, for leaves that go as the rules say."""
    axes, momentum = Axes.of(options), options.get("momentum")
    _check_momentum(momentum)
    is_delayed = _is_delayed(options.get("delay"))
    settings = Settings(axes, momentum, is_delayed)
    dtype = accumulator(options.get("accumulator_dtype"))
    store = Store(axes, momentum is not None, is_delayed, dtype)

    bucket_size = options.get("bucket_size")

    def init(params: Any) -> ErrorFeedbackState:
        return store.init(make_plan(params, rules, axes, bucket_size))

    def update(
        updates: Any, state: ErrorFeedbackState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, ErrorFeedbackState]:
        del params, extra_args
        axes.check(updates)
        plan = make_plan(updates, rules, axes, bucket_size)
        if axes.sharded:
            check_shards(updates, plan, axes)
        carried = store.load(state, plan)
        buckets, dense = plan.layout.flatten(updates)
        done = exchange(buckets, dense, carried, plan, settings)
        delivered = plan.layout.unflatten(done.means, done.dense_mean)
        if any(dtype != jnp.float32 for dtype in plan.layout.dtypes):
            done = keep_rounding(done, plan.layout.flatten(delivered)[0], plan, axes)
        if axes.sharded:
            delivered = axes.typed_as(delivered, updates)
        return delivered, store.save(done, state, plan)

    return optax.GradientTransformationExtraArgs(init, update)


def _check_momentum(momentum: Any) -> None:
    """Raises ValueError unless it is None or a scalar in [0, 1). A traced one has no value yet."""
    if momentum is None:
        return
    if jnp.ndim(momentum) != 0:
        raise ValueError(
            f"momentum has shape {jnp.shape(momentum)}: pass a scalar in [0, 1), the same for all "
            "leaves (optax.multi_transform treats leaves differently)"
        )
    if not isinstance(momentum, jax.core.Tracer) and not 0 <= float(momentum) < 1:
        raise ValueError(f"momentum={momentum} must lie in [0, 1); use None for no momentum")


def _is_delayed(delay: Any) -> bool:
    """Whether the exchange is delayed. Raises ValueError unless `delay` is 0, 1 or None (for 0)."""
    if delay is None:
        return False
    steps = static_int("delay", delay)
    if steps not in (0, 1):
        raise ValueError(
            f"delay={steps} must be 0, to exchange this step's gradients, or 1, to exchange those "
            "of the steps before"
        )
    return steps == 1
