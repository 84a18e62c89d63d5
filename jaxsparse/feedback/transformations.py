"""Error feedback around one reducer or several, as Optax transformations.

The way of one gradient: `update` runs `on_device` on rows of all workers (`over_rows`) or, where
the axis is bound, on one worker's (`in_worker`). There `exchange` begins buckets (adds gradients),
calls their reducers (`reduce`: collectives, `deliver`: the mean), and finishes them (residuals).
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxsparse.arrays import layout as layouts
from jaxsparse.arrays.layout import IsDense, named_leaves
from jaxsparse.comm import wire
from jaxsparse.comm.marks import is_stand_in, on_plain_arrays
from jaxsparse.comm.meshes import AnyMesh, Placement, place_rows
from jaxsparse.comm.wire import Axes
from jaxsparse.feedback.devices import in_worker, over_rows, shards, spread, typed_as
from jaxsparse.feedback.exchange import (
    BucketPlan,
    Exchanged,
    Settings,
    TreePlan,
    exchange,
    keep_rounding,
)
from jaxsparse.feedback.options import (
    LeafOptions,
    Options,
    StepOptions,
    as_function,
    check_momentum,
    decay_factor,
    is_delayed,
    is_nesterov,
    leaves_rule,
    part,
    skipped_update,
)
from jaxsparse.feedback.rows import check_extra_args, check_own, read_rows
from jaxsparse.feedback.store import (
    ErrorFeedbackState,
    StateStore,
    accumulator,
    check_made,
    has_nothing,
    without_params,
)
from jaxsparse.reducers.base import Leaf, Reducer, check_reducer

# The way in which one leaf is exchanged. None: uncompressed.
Rule = Reducer | None
# A function of a leaf's key path, as jax.tree_util.keystr prints it, and its shape.
Policy = Callable[[str, tuple[int, ...]], Rule]
# A function of a tree that returns the reducer of each leaf, checked.
Rules = Callable[[Any], Sequence[Reducer | None]]


@dataclasses.dataclass(frozen=True)
class ErrorFeedback(LeafOptions):
    """Exchanges gradients through `reducer`, and adds the residual to the next gradients.

    In a step, each worker does this with its compressed buckets. u is the momentum and v is the
    residual; both are zero at first:

        u = momentum * u + g        (momentum correction; u = g without momentum)
        v = v + u                   (v + g + momentum * u with Nesterov's)
        mean, v = reducer(v)
        u = 0 where the reducer sent (momentum factor masking)

    With `decay` the second line is v = decay * v + u (SparseLoCo, arXiv 2508.15706, with 0.95).
    Stale parts of the residual then fade, and the share that fades is never delivered.

    The update is `mean`, equal on all workers, in the gradients' shapes and dtypes. Leaves that
    `is_dense` picks are averaged exactly in float32, with the same momentum and no masking.

    The momentum here replaces the optimizer's: chain `optax.sgd(lr)` without momentum after it.
    Masking zeroes the momentum of all coordinates that are sent, so a budget near 1 is not dense
    momentum SGD. Some reducers send all blocks that are not zero (blocks without a density). They
    get the gradient without momentum, because a gradient with momentum would be zero nowhere. Their
    momentum is that of the mean, which is the same if everything is delivered.

    Put it first in an `optax.chain`, or behind elementwise scaling, or behind what stands in
    `jaxsparse.per_worker`, such as a clip of each worker's gradient. `jaxsparse.partition` treats
    leaves differently; `optax.multi_transform` would hide gradients from it. Three other wrappers
    must not stand around it. `optax.MultiSteps` keeps gradients as if all workers had the same:
    accumulate by a scan inside the step instead. `optax.apply_if_finite` branches on a local value,
    so that workers wait for each other forever; the next paragraph makes it needless.
    `optax.masked` never averages the leaves that it leaves out, so that replicas diverge.

    If a gradient is not finite on any worker, or an uncompressed mean overflows, all workers skip
    the step. The update is zero, and only the `skipped` counter of the state changes. Later
    transformations in the chain still see the zero update: schedules and Adam's moments advance.
    With when_skipped="nan" they see NaN, on all workers alike.
    Sums with residual or momentum are clipped to float32, because an overflow would stay for ever.

    **Inner axes.** On a mesh with axes for FSDP or tensor parallelism, each device exchanges its
    own shards of the leaves with the devices that hold the same shards for other workers
    (`jaxsparse.comm.meshes`). Leaves that an inner axis does not cut are cut along it for the
    exchange, in a dimension that it divides. Those without such a dimension go uncompressed.
    Settings that are totals for the tree, such as a sketch's k, are divided over the devices.
    `init` reads the leaves' partitions from parameters that are on the mesh or have Explicit axes
    in their types. Elsewhere, give `mesh` and `specs`. Residual and momentum have their leaves'
    shapes and are sharded alike. `info` and `skipped` count for all devices.

    **Delay.** With delay=1 a step exchanges the residual that it starts with,

        mean, v = reducer(v)
        u = momentum * (u, zero where the reducer sent) + g
        v = v + u

    so that the exchange does not depend on the step's gradients. It can run beside the backward
    pass if the backend's collectives are asynchronous. Updates are those of delay=0 one step later,
    and the first one is zero. Uncompressed leaves wait in `pending`. Only a flag waits for this
    step's gradients: it says whether they are finite. If they are not, all workers leave them out
    and `skipped` rises. The exchange of earlier gradients still counts, so apply the update.

    Args:
        reducer: the `Reducer` that exchanges the buckets.

    Returns:
        A transformation. `init` needs no axis and returns one worker's state, for `jaxsparse.shard`
        to spread, or with `mesh` a state that is spread already. `update` takes gradients with a
        row for each worker (`jaxsparse.value_and_grad`), or where `axis_name` is bound a worker's.
        Call it under `jax.jit`: outside, each call compiles the exchange anew.

    Raises:
        ValueError: settings out of range. From `init`: no leaf is compressed under the default
            rule, the budget does not fit, partitions over inner axes are not known, or see
            `jaxsparse.layout.plan`. From `update`: the axis is not bound, the state belongs to
            another tree, mesh or to several workers, or the gradients are already summed.
    """

    reducer: Reducer

    @property
    def tree_reducer(self) -> Reducer:
        """The reducer of the whole tree."""
        return check_reducer(self.reducer)

    def transformation(self) -> optax.GradientTransformationExtraArgs:
        return _feedback(_one_rule(self.tree_reducer, self.is_dense), self)


error_feedback = as_function(ErrorFeedback, "error_feedback")


@dataclasses.dataclass(frozen=True)
class SystemOptions(LeafOptions):
    """The settings of a system, with the options that all share.

    Derived classes have the reducer as their other base, whose fields are then the settings. Or
    they declare settings of their own, and `tree_reducer` makes the reducer from them. Each is a
    class, even if it is empty, because editors and type checkers read its signature: types of
    Python can't join those of a reducer and of the options in any other way.
    """

    def __post_init__(self):
        """The reducer checks its settings, once it is made."""

    @property
    def tree_reducer(self) -> Reducer:
        """The reducer of the whole tree."""
        bases = type(self).__mro__[1:]
        return part(
            self, next(k for k in bases if issubclass(k, Reducer) and not issubclass(k, Options))
        )

    def transformation(self) -> optax.GradientTransformationExtraArgs:
        return _feedback(_one_rule(self.tree_reducer, self.is_dense), self)


@dataclasses.dataclass(frozen=True)
class Partition(StepOptions):
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
            counts.
        default: the reducer, or None, for leaves that no expression of the mapping matches.

    Raises:
        ValueError: from here: an expression is not valid. From `init` and `update`: an expression
            matches no leaf that earlier ones left, the policy returns neither a reducer nor None,
            or see `error_feedback`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxsparse.systems import TopK
        >>> tx = partition({"embedding": TopK(0.01)}, axis_name=None)
        >>> grads = {"embedding": jnp.ones((64, 32)), "kernel": jnp.ones((32, 32))}
        >>> updates, state = jax.jit(tx.update)(grads, tx.init(grads))
        >>> int(updates["embedding"].sum()), int(updates["kernel"].sum())
        (21, 1024)
    """

    policy: Policy | Mapping[str, Rule]
    default: Rule = None

    def transformation(self) -> optax.GradientTransformationExtraArgs:
        return _feedback(_by_policy(self.policy, self.default), self)


partition = as_function(Partition, "partition")


def _feedback(rules: Rules, options: StepOptions) -> optax.GradientTransformationExtraArgs:
    """The transformation that exchanges each leaf as the rules say."""
    axis_name, momentum = options.axis_name, options.momentum
    check_momentum(momentum)
    nesterov = is_nesterov(options.nesterov, momentum)
    delayed, decay = is_delayed(options.delay), decay_factor(options.decay)
    of_skipped = skipped_update(options.when_skipped, options.delay)
    dtype = accumulator(options.accumulator_dtype)
    bucket_size, mesh, workers = options.bucket_size, options.mesh, options.workers
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ValueError(
            f"mesh={mesh!r} must be a jax.sharding.Mesh or None (optax.inject_hyperparams calls "
            "meshes, as it calls schedules: name mesh and specs in its static_args)"
        )

    def plan_of(tree: Any, placement: Placement | None) -> TreePlan:
        reducers = rules(tree) if jax.tree.leaves(tree) else []
        if placement is None:
            return _plan(tree, reducers, bucket_size)
        own, reducers, dense_elements = shards(tree, reducers, placement)
        return _plan(own, reducers, bucket_size, placement.devices, dense_elements)

    def store_of(inner: tuple[str, ...]) -> StateStore:
        keeps_residual = delayed or decay != 0  # a delayed exchange is of the residual
        return StateStore(
            Axes(axis_name, inner), momentum is not None, delayed, keeps_residual, dtype
        )

    def init(params: Any) -> ErrorFeedbackState:
        rows = place_rows(params, axis_name, mesh, workers, options.specs)
        plan = plan_of(params, rows.placement)
        state = store_of(()).init(plan)
        if axis_name is None:
            state = typed_as(params, state)
        state = spread(state, params, rows, plan.compressed)
        return without_params(state) if is_stand_in(params) else state

    def update(
        updates: Any,
        state: ErrorFeedbackState,
        params: Any = None,
        *,
        exchange_by: Callable[..., Exchanged] = exchange,  # or a half of it, see `by_message`
        **extra_args: Any,
    ) -> tuple[Any, ErrorFeedbackState]:
        check_made(state, ErrorFeedbackState)
        if has_nothing(updates, state):
            return updates, state
        is_bound = wire.is_bound(axis_name)  # so this is one worker's code
        shapes: Any = updates  # at least the shapes of one worker's
        found: AnyMesh | None = mesh
        if not is_bound:
            updates, shapes, _, found = read_rows(updates, state, params, axis_name, mesh, workers)
            check_extra_args(updates, extra_args)
        plan = plan_of(shapes, Placement.of(state.placement))
        if is_bound:
            Axes(axis_name).check(updates)  # behind `plan_of`, whose errors tell more
            check_own(updates, params, axis_name)

        def on_device(
            updates: Any, state: ErrorFeedbackState, momentum: Any, inner: tuple[str, ...]
        ) -> tuple[Any, ErrorFeedbackState]:
            store = store_of(inner)
            settings = Settings(store.axes, momentum, delayed, decay, nesterov)
            carried = store.load(state, plan)
            buckets, dense = plan.layout.flatten(updates)
            done = exchange_by(buckets, dense, carried, plan, settings)
            delivered = plan.layout.unflatten(done.means, done.dense_mean)
            if set(plan.layout.dtypes) != {jnp.dtype(jnp.float32)}:
                done = keep_rounding(done, plan.layout.flatten(delivered)[0], plan)
            if of_skipped != 0:
                delivered = jax.tree.map(lambda x: jnp.where(done.ok, x, of_skipped), delivered)
            return delivered, store.save(done, state, plan)

        run = in_worker if is_bound else over_rows
        # Under `jax.disable_jit()` the loops of an exchange would run step by step in Python.
        with jax.disable_jit(False):
            return run(on_device, updates, state, momentum, found, axis_name, plan.compressed)

    return optax.GradientTransformationExtraArgs(init, on_plain_arrays(update))


def _one_rule(reducer: Reducer, is_dense: IsDense | None) -> Rules:
    """The rules that give the reducer to all leaves but those that `is_dense` picks."""
    rule = leaves_rule(is_dense)

    def rules(tree: Any) -> list[Reducer | None]:
        goes_dense = layouts.picked(tree, rule)
        found = [None if dense else reducer for dense in goes_dense]
        if is_dense is None and not any(found):
            raise ValueError(
                f"no leaf would be compressed: all {len(found)} are vectors, scalars or smaller "
                "than 1024 elements, which go dense by default. Pass "
                "is_dense=lambda path, shape: False to compress them all, or use jaxsparse.dense()"
            )
        return found

    return rules


def _by_policy(policy: Policy | Mapping[str, Rule], default: Rule) -> Rules:
    """The rules of a policy function, or of a mapping from regular expressions on key paths."""
    if callable(policy):
        return lambda tree: [_checked(policy(*leaf), leaf[0]) for leaf in named_leaves(tree)]
    patterns = _compiled(policy)

    def rules(tree: Any) -> list[Reducer | None]:
        leaves = named_leaves(tree)
        first = [next((p for p in patterns if p.search(path)), None) for path, _ in leaves]
        if unused := sorted(pattern.pattern for pattern in patterns if pattern not in first):
            paths = tuple(path for path, _ in leaves)
            raise ValueError(f"policy: no leaf is left for {unused}; the paths are {paths}")
        found = [default if pattern is None else patterns[pattern] for pattern in first]
        return [_checked(rule, path) for rule, (path, _) in zip(found, leaves)]

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


def _checked(reducer: Any, path: str) -> Reducer | None:
    return None if reducer is None else check_reducer(reducer, f"policy, for leaf{path}: ")


def _plan(
    tree: Any,
    given: Sequence[Reducer | None],
    bucket_size: int | None,
    devices: int = 1,
    dense_elements: int | None = None,
) -> TreePlan:
    """The plan for one tree structure, given each leaf's reducer; None: uncompressed.

    Leaves with equal reducers are laid end to end and exchanged as one vector.

    Args:
        tree: arrays, or their shapes and dtypes, as one device has them.
        given: a reducer or None for each leaf, of the whole tree.
        bucket_size: see `jaxsparse.layout.plan`.
        devices: the number of a worker's devices, each with buckets of the same sizes. They share
            settings that are totals for the tree, as buckets do.
        dense_elements: the number of uncompressed elements of all these devices. None: those of
            `tree`.

    Raises:
        ValueError: settings for the whole tree do not fit, or see `jaxsparse.layout.plan`.
    """
    groups = dict.fromkeys(r for r in given if r is not None)
    shape = {r: (r.alignment, r.whole_leaves) for r in groups}
    layout = layouts.plan_groups(
        tree,
        given,
        bucket_size=bucket_size,
        alignment={r: alignment for r, (alignment, _) in shape.items()},
        whole_leaves={r for r, (_, whole) in shape.items() if whole},
    )
    sizes, all_dense = layout.bucket_sizes, layout.dense_size
    of_group = [[i for i, own in enumerate(layout.groups) if own == group] for group in groups]
    dense_size = all_dense if sum(map(bool, of_group)) == 1 else 0
    reducers: list[Reducer] = []
    for (whole, (_, is_whole)), own in zip(shape.items(), of_group):
        each = tuple(sizes[i] for i in own for _ in range(devices))
        made = list(whole.split(each, dense_size * devices)[::devices])
        if is_whole:
            leaves = [tuple(Leaf(*leaf) for leaf in layout.leaves(i)) for i in own]
            made = [reducer.with_leaves(each) for reducer, each in zip(made, leaves)]
        reducers += made
    buckets = tuple(
        BucketPlan(
            reducer,
            size,
            f"{i}_{reducer.system}",
            reducer.abstract_state(size),
            frozenset(piece.leaf for piece in pieces),
        )
        for i, (reducer, size, pieces) in enumerate(zip(reducers, sizes, layout.buckets))
    )
    return TreePlan(layout, buckets, all_dense if dense_elements is None else dense_elements)
