"""Error feedback around one reducer or several, as Optax transformations."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxsparse.feedback.exchange import Settings, exchange, keep_rounding
from jaxsparse.feedback.options import LeafOptions, Options, exchange_options
from jaxsparse.feedback.plan import Axes, Plan, make_plan
from jaxsparse.feedback.sharded import run, sharded_plan, spread
from jaxsparse.feedback.store import ErrorFeedbackState, Store, accumulator
from jaxsparse.layout import IsDense, named_leaves, small_or_vector
from jaxsparse.reducers.base import Budget, Reducer
from jaxsparse.reducers.stages import Staged, Stages
from jaxsparse.settings import static_float, static_int
from jaxsparse.training.meshes import Placement, place
from jaxsparse.training.variables import unwrapped

# How one leaf is exchanged. None: uncompressed.
Rule = Budget | Stages[Reducer] | None
# Its arguments: a leaf's key path, as jax.tree_util.keystr prints it, and its shape.
Policy = Callable[[str, tuple[int, ...]], Rule]
# The checked rules of all leaves at once.
Rules = Callable[[Sequence[tuple[str, tuple[int, ...]]]], Sequence[Budget | None]]


@exchange_options()
def error_feedback(
    reducer: Budget, **options: Unpack[LeafOptions]
) -> optax.GradientTransformationExtraArgs:
    """Exchanges gradients through `reducer`, and adds the residual to the next gradients.

    In a step, each worker does this with its compressed buckets. u is the momentum and v is the
    residual; both are zero at first:

        u = momentum * u + g        (momentum correction; u = g without momentum)
        v = v + u                   (v + g + momentum * u with Nesterov's)
        mean, v = reducer(v)
        u = 0 where the reducer sent (momentum factor masking)

    With `decay` the second line is v = decay * v + u (SparseLoCo, arXiv 2508.15706, with 0.95):
    stale parts of the residual fade, and the sum of updates owes their share no more.

    The update is `mean`, equal on all workers, in the gradients' shapes and dtypes. Leaves that
    `is_dense` picks are averaged exactly in float32, with the same momentum and no masking.

    The momentum here replaces the optimizer's: chain `optax.sgd(lr)` without momentum after it.
    Masking zeroes the momentum of all coordinates that are sent, so a budget near 1 is not dense
    momentum SGD. Some reducers send all blocks that are not zero (blocks without a density). They
    get the gradient without momentum, because a gradient with momentum would be zero nowhere. Their
    momentum is that of the mean, which is the same if everything is delivered.

    Put it first in an `optax.chain`, or behind stateless transformations of the local gradient such
    as clipping. `optax.multi_transform` may treat leaves differently. Do not put around it:
    `optax.MultiSteps`, which keeps gradients as if all workers had the same (accumulate by a scan
    inside the step instead); `optax.apply_if_finite`, which branches on a local value, so that
    workers wait for each other forever (the next paragraph makes it needless); `optax.masked`,
    which never averages the masked leaves, so that replicas diverge.

    If a gradient, or its sum with residual or momentum, is not finite on any worker, all workers
    skip the step. The update is zero, and only the `skipped` counter of the state changes. Later
    transformations in the chain still see the zero update: schedules and Adam's moments advance.

    **Inner axes.** On a mesh with axes for FSDP or tensor parallelism, each device exchanges its
    own shards of the leaves with the devices that hold the same shards for other workers
    (`jaxsparse.training.meshes`). Leaves that an inner axis does not cut are cut along it for the
    exchange, in a dimension that it divides; those without such a dimension go uncompressed.
    Settings that are totals for the tree, such as a sketch's k, are divided over the devices.
    `init` reads the leaves' partitions from parameters that are on the mesh or have Explicit axes
    in their types; elsewhere, give `mesh` and `specs`. Residual and momentum have their leaves'
    shapes and are sharded alike. `info` and `skipped` count for all devices.

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
        A transformation. `init` needs no axis and returns one worker's state, for `jaxsparse.shard`
        to spread, or with `mesh` a state that is spread already. `update` must run where
        `axis_name` is bound (`jaxsparse.data_parallel`).

    Raises:
        ValueError: settings out of range. From `init`: no leaf is compressed under the default
            rule, the budget does not fit, partitions over inner axes are not known, or see
            `jaxsparse.layout.plan`. From `update`: the axis is not bound, the state belongs to
            another tree, mesh or to several workers, or the gradients are already summed.
    """
    return _feedback(_one_rule(reducer, options.get("is_dense")), options)


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
        >>> import jax, jax.numpy as jnp
        >>> from jaxsparse.systems import TopK
        >>> tx = partition({"embedding": TopK(0.01)}, axis_name=None)
        >>> grads = {"embedding": jnp.ones((64, 32)), "kernel": jnp.ones((32, 32))}
        >>> updates, state = jax.jit(tx.update)(grads, tx.init(grads))
        >>> int(updates["embedding"].sum()), int(updates["kernel"].sum())
        (21, 1024)
    """
    return _feedback(_by_policy(policy, default), options)


def _feedback(rules: Rules, options: Options) -> optax.GradientTransformationExtraArgs:
    """The transformation, for leaves that go as the rules say."""
    axis_name, momentum = options.get("axis_name", "data"), options.get("momentum")
    check_momentum(momentum)
    nesterov = _is_nesterov(options.get("nesterov"), momentum)
    is_delayed, decay = _is_delayed(options.get("delay")), _decay(options.get("decay"))
    dtype = accumulator(options.get("accumulator_dtype"))
    bucket_size, mesh = options.get("bucket_size"), options.get("mesh")
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ValueError(
            f"mesh={mesh!r} must be a jax.sharding.Mesh or None (optax.inject_hyperparams calls "
            "meshes, as it calls schedules: name mesh and specs in its static_args)"
        )

    def plan_of(tree: Any, placement: Placement | None) -> Plan:
        budgets = rules(named_leaves(tree))
        if placement is None:
            return make_plan(tree, budgets, bucket_size)
        return sharded_plan(tree, budgets, bucket_size, placement)

    def store_of(inner: tuple[str, ...]) -> Store:
        return Store(Axes(axis_name, inner), momentum is not None, is_delayed, dtype)

    def init(params: Any) -> ErrorFeedbackState:
        placement, found = place(params, axis_name, mesh, options.get("specs"))
        state = store_of(()).init(plan_of(params, placement))
        return spread(state, params, placement, found, None if mesh is None else axis_name)

    def update(
        updates: Any, state: ErrorFeedbackState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, ErrorFeedbackState]:
        del params, extra_args
        Axes(axis_name).check(updates)
        plan = plan_of(updates, state.placement or None)

        def on_device(
            updates: Any, state: ErrorFeedbackState, momentum: Any, inner: tuple[str, ...]
        ) -> tuple[Any, ErrorFeedbackState]:
            store = store_of(inner)
            settings = Settings(store.axes, momentum, is_delayed, decay, nesterov)
            carried = store.load(state, plan)
            buckets, dense = plan.layout.flatten(updates)
            done = exchange(buckets, dense, carried, plan, settings)
            delivered = plan.layout.unflatten(done.means, done.dense_mean)
            if set(plan.layout.dtypes) != {jnp.dtype(jnp.float32)}:
                done = keep_rounding(done, plan.layout.flatten(delivered)[0], plan)
            return delivered, store.save(done, state, plan)

        return run(on_device, updates, state, momentum, axis_name, mesh)

    return optax.GradientTransformationExtraArgs(init, unwrapped(update))


def _one_rule(budget: Budget, is_dense: IsDense | None) -> Rules:
    """The rules that give the budget to all leaves but those that `is_dense` picks."""

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
    """The rules of a policy function, or of a mapping from regular expressions on key paths."""
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


def check_momentum(momentum: Any) -> None:
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


def _is_nesterov(nesterov: Any, momentum: Any) -> bool:
    """Whether momentum is Nesterov's. Raises ValueError unless it is a bool or None (for False)."""
    if nesterov is None:
        return False
    if not isinstance(nesterov, bool):
        raise ValueError(
            f"nesterov={nesterov!r} must be True, False or None: it is static (list it in "
            "static_args under optax.inject_hyperparams)"
        )
    if nesterov and momentum is None:
        raise ValueError("nesterov=True needs a momentum: give momentum=0.9, for example")
    return nesterov


def _decay(decay: Any) -> float:
    """The factor of residuals. Raises ValueError unless it lies in [0, 1] or is None (for 1)."""
    factor = 1.0 if decay is None else static_float("decay", decay)
    if not 0 <= factor <= 1:
        raise ValueError(
            f"decay={decay} must lie in [0, 1]: 1 keeps what was not sent, 0.95 forgets two thirds "
            "of it in 20 steps, and 0 drops it at once"
        )
    return factor


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
