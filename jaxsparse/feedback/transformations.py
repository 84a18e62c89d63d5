"""Error feedback around one reducer or several, as Optax transformations."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from jaxsparse.feedback.exchange import Settings, exchange, keep_rounding
from jaxsparse.feedback.options import LeafOptions, Options, exchange_options
from jaxsparse.feedback.plan import Axes, Plan, check_shards, make_plan
from jaxsparse.feedback.store import ErrorFeedbackState, Store, accumulator
from jaxsparse.layout import IsDense, named_leaves, small_or_vector
from jaxsparse.reducers.base import Budget, Reducer
from jaxsparse.reducers.stages import Staged, Stages
from jaxsparse.settings import static_int

# How one leaf is exchanged. None: uncompressed.
Rule = Budget | Stages[Reducer] | None
# Given a leaf's key path, as printed by jax.tree_util.keystr, and its shape.
Policy = Callable[[str, tuple[int, ...]], Rule]
# Of all leaves at once, checked.
Rules = Callable[[Sequence[tuple[str, tuple[int, ...]]]], Sequence[Budget | None]]


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
    return _feedback(_one_rule(reducer, options.get("is_dense")), options)


@exchange_options(without=("is_dense",))
def partition(
    policy: Policy | Mapping[str, Rule], default: Rule = None, **options: Unpack[Options]
) -> optax.GradientTransformationExtraArgs:
    """Error feedback around a reducer for each group of leaves.

    Leaves with equal reducers are laid end to end and exchanged as one vector, so a reducer whose
    settings are totals (`SketchedReducer`) has them for its group. All uncompressed leaves travel
    in one message. What `error_feedback` says of residuals, momentum and composition holds here.

    Parallax's hybrid (Kim et al., EuroSys 2019), sparse gradients by gather and dense ones by
    all-reduce, is `partition({"embedding": jaxsparse.systems.SparseAllGather(...)})`.

    Args:
        policy: a function of a leaf's key path (as `jax.tree_util.keystr` prints it) and shape that
            returns its reducer, or None for uncompressed; or a mapping from regular expressions to
            these, of which the first one found anywhere in the path counts. A reducer that changes
            during training is `Stages` of reducers.
        default: of leaves that no expression of the mapping matches.
        **options: as for all transformations.

    Raises:
        ValueError: from here: an expression is not valid. From `init` and `update`: an expression
            matches no leaf, a reducer is none, or see `error_feedback`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxsparse.systems import TopK
        >>> tx = partition({"embedding": TopK(0.01)}, axis_name=None)
        >>> grads = {"embedding": jnp.ones((64, 32)), "kernel": jnp.ones((32, 32))}
        >>> updates, state = tx.update(grads, tx.init(grads))
        >>> int(updates["embedding"].sum()), int(updates["kernel"].sum())
        (21, 1024)
    """
    return _feedback(_by_policy(policy, default), options)


def _feedback(rules: Rules, options: Options) -> optax.GradientTransformationExtraArgs:
    """The transformation of leaves that go as the rules say."""
    axes, momentum = Axes.of(options), options.get("momentum")
    _check_momentum(momentum)
    is_delayed = _is_delayed(options.get("delay"))
    settings = Settings(axes, momentum, is_delayed)
    dtype = accumulator(options.get("accumulator_dtype"))
    store = Store(axes, momentum is not None, is_delayed, dtype)

    bucket_size = options.get("bucket_size")

    def plan_of(tree: Any) -> Plan:
        return make_plan(tree, rules(named_leaves(tree)), axes, bucket_size)

    def init(params: Any) -> ErrorFeedbackState:
        return store.init(plan_of(params))

    def update(
        updates: Any, state: ErrorFeedbackState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, ErrorFeedbackState]:
        del params, extra_args
        axes.check(updates)
        plan = plan_of(updates)
        if axes.sharded:
            check_shards(updates, plan, axes)
        carried = store.load(state, plan)
        buckets, dense = plan.layout.flatten(updates)
        done = exchange(buckets, dense, carried, plan, settings)
        delivered = plan.layout.unflatten(done.means, done.dense_mean)
        if set(plan.layout.dtypes) != {jnp.dtype(jnp.float32)}:
            done = keep_rounding(done, plan.layout.flatten(delivered)[0], plan, axes)
        if axes.sharded:
            delivered = axes.typed_as(delivered, updates)
        return delivered, store.save(done, state, plan)

    return optax.GradientTransformationExtraArgs(init, update)


def _one_rule(budget: Budget, is_dense: IsDense | None) -> Rules:
    """The budget for all leaves but those that `is_dense` picks."""

    def rules(leaves: Sequence[tuple[str, tuple[int, ...]]]) -> list[Budget | None]:
        pick = small_or_vector if is_dense is None else is_dense
        found = [None if pick(*leaf) else budget for leaf in leaves]
        if is_dense is None and not any(found):
            raise ValueError(
                f"no leaf would be compressed: all {len(leaves)} are vectors, scalars or smaller "
                "than 1024 elements, which go dense by default. Pass "
                "is_dense=lambda path, shape: False to compress them all, or use jaxsparse.dense()"
            )
        return found

    return rules


def _by_policy(policy: Policy | Mapping[str, Rule], default: Rule) -> Rules:
    """What a policy says of each leaf, or the first regular expression found in its path."""
    if callable(policy):
        return lambda leaves: [_budget(policy(*leaf), leaf[0]) for leaf in leaves]
    patterns = _compiled(policy)

    def rules(leaves: Sequence[tuple[str, tuple[int, ...]]]) -> list[Budget | None]:
        first = [next((p for p in patterns if p.search(path)), None) for path, _ in leaves]
        if unused := sorted(pattern.pattern for pattern in patterns if pattern not in first):
            paths = tuple(path for path, _ in leaves)
            raise ValueError(f"policy: no leaf is left for {unused}; the paths are {paths}")
        found = [default if pattern is None else patterns[pattern] for pattern in first]
        return [_budget(rule, path) for rule, (path, _) in zip(found, leaves)]

    return rules


def _compiled(policy: Mapping[str, Rule]) -> dict[re.Pattern[str], Rule]:
    if not isinstance(policy, Mapping) or not all(isinstance(rule, str) for rule in policy):
        raise ValueError(
            f"policy={policy!r} must be a function of path and shape, or a mapping from regular "
            'expressions to reducers: {"embedding": jaxsparse.systems.S2(...)}'
        )
    try:
        return {re.compile(rule): reducer for rule, reducer in policy.items()}
    except re.error as error:
        raise ValueError(
            f"policy: {error.pattern!r} is no regular expression ({error}): escape the brackets of "
            "key paths, or leave them out"
        ) from None


def _budget(reducer: Any, path: str) -> Budget | None:
    if reducer is None:
        return None
    if isinstance(reducer, Stages):
        for stage in reducer.values:
            _budget(stage, path)
        reducer = Staged(reducer)
    if isinstance(reducer, type) or not isinstance(reducer, Budget):
        raise ValueError(
            f"policy gives {reducer!r} for leaf{path}: give a reducer, such as "
            "jaxsparse.systems.SparDL(0.01), or None for uncompressed"
        )
    try:
        hash(reducer)
    except TypeError:
        raise ValueError(
            f"policy gives {reducer!r} for leaf{path}, which is not hashable: leaves are grouped "
            "by equal reducers, so make it a frozen dataclass"
        ) from None
    return reducer


def _check_momentum(momentum: Any) -> None:
    """Raises ValueError unless it is None or a scalar in [0, 1); of traced ones, the shape only."""
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
    """Whether the exchange is delayed; a ValueError unless it is 0, 1 or None (for 0)."""
    if delay is None:
        return False
    steps = static_int("delay", delay)
    if steps not in (0, 1):
        raise ValueError(
            f"delay={steps} must be 0, for the mean of this step's gradients, or 1, for last step's"
        )
    return steps == 1
