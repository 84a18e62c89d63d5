"""Error feedback around one reducer or several, as Optax transformations.

The way of one gradient: `Exchange.update` runs `_on_device` on rows of all workers (`over_rows`)
or, where the axis is bound, on one worker's (`in_worker`). There `load` reads the state, `run_step`
begins buckets (adds gradients), calls their reducers (`reduce`: collectives, `deliver`: the mean),
and finishes them (residuals), and `save` writes the state.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, UInt32

from jaxsparse.arrays.layout import LONG_BUCKET, named_shapes
from jaxsparse.comm import wire
from jaxsparse.comm.marks import is_stand_in, on_plain_arrays, warn_of_copies, without_variables
from jaxsparse.comm.meshes import Placement
from jaxsparse.comm.wire import Axes
from jaxsparse.comm.workers import workers_and_placement
from jaxsparse.feedback.devices import in_worker, over_rows, spread, typed_as
from jaxsparse.feedback.messages import Posted, check_messages, post_step, receive_step
from jaxsparse.feedback.options import Options, Policy, Settings, check_names
from jaxsparse.feedback.plan import TreePlan, compiled, plan_of, reducers_of
from jaxsparse.feedback.rows import check_extra_args, check_own, read_rows
from jaxsparse.feedback.step import Exchanged, keep_rounding, run_step
from jaxsparse.feedback.store import (
    ErrorFeedbackState,
    check_made,
    has_nothing,
    init_state,
    load,
    save,
    without_params,
)
from jaxsparse.reducers.base import Reducer, check_reducer


class Exchange(optax.GradientTransformationExtraArgs):
    """An exchange: an Optax transformation that can be asked, and taken in two halves.

    `init(params)` and `update(gradients, state, params)` are those of Optax, see `exchange`. For
    workers that hand messages around without a collective there are halves of an update:

        words, posted = exchange.post(gradients, state)                       # on each worker
        means, state = exchange.receive(messages, posted, gradients, state)   # on each, too

    `words` is all that a worker sends: a flag that its gradients are finite, its uncompressed
    leaves, and a message of each bucket. Files, queues or an object store may carry it. All that
    receive the same messages in the same order get the same means, bit for bit, and those of a
    collective. A receiver must know that they are of the same exchange, tree and step, because
    words do not say so.

    Programs that are compiled alike give the same bits: `receive` on all workers of one kind of
    device. Other programs may round otherwise, because compilers fuse some multiplications into
    additions. What a worker keeps still fits what it sent, because `post` returns the vector behind
    its message, too. With `accumulator_dtype="bfloat16"` all workers round by the same draws.
    """

    @classmethod
    def of(cls, settings: Settings) -> "Exchange":
        """The exchange with these settings."""
        update = on_plain_arrays(functools.partial(_run, settings, run_step))
        return cls(functools.partial(_init, settings), update)

    @property
    def settings(self) -> Settings:
        """What it was made with."""
        return self.init.args[0]  # it outlives jax.tree.map

    @property
    def reducer(self) -> Reducer | None:
        """The reducer of all compressed leaves. None: leaves have several."""
        return self.settings.reducer

    def of_parts(self, whole: Any) -> "Exchange":
        """The same for parts of a tree, whose leaves may be some rows of those of the whole.

        A part is exchanged between steps, where there is nothing to hide behind: in one bucket, if
        no `bucket_size` is given. Raises ValueError if it does not fit the whole.
        """
        paths = named_shapes(without_variables(whole))
        reducers = dict(zip(paths, reducers_of(whole, self.settings)))
        of_path = lambda path, shape: reducers[path]
        size = self.settings.bucket_size or LONG_BUCKET
        return Exchange.of(
            dataclasses.replace(
                self.settings, reducer=None, policy=of_path, is_dense=None, bucket_size=size
            )
        )

    def __repr__(self) -> str:
        return f"Exchange({self.reducer or 'by leaf'})"

    def post(
        self, gradients: Any, state: Any, *, rank: int | Int[Array, ""] = 0
    ) -> tuple[UInt32[Array, " words"], tuple[Posted, ...]]:
        """This worker's message of a step, and what stays with it until messages arrive.

        Args:
            gradients: this worker's gradients, or other updates.
            state: the state of the exchange.
            rank: a number of this worker's own. Draws that differ between workers use it.

        Returns:
            The message, uint32[words], and what each bucket's worker holds.

        Raises:
            ValueError: it is not in one message: reducers of several rounds or in stages,
                a delay, or an axis of workers (make it with `axis_name=None`).
        """
        sent: list[Any] = []

        def half(*given: Any) -> Exchanged:
            message, posted, unchanged = post_step(rank, *given)
            sent.extend((message, posted))
            return unchanged

        _run(self.settings, half, gradients, state)
        words, posted = sent
        return words, posted

    def receive(
        self,
        messages: UInt32[Array, "workers words"],
        posted: Sequence[Posted],
        like: Any,
        state: Any,
        *,
        counts: bool = True,
        weights: Float[Array, " workers"] | None = None,
    ) -> tuple[Any, Any]:
        """The means of a step and the state after it, from the messages that count.

        If any message says that its worker's gradients are not finite, the step is skipped.

        Args:
            messages: uint32[workers, words], in the same order on all workers.
            posted: what `post` returned beside this worker's message.
            like: the gradients, or other arrays of their shapes and dtypes.
            state: as in `post`.
            counts: whether this worker's own message is among them. If it came too late, its
                residual keeps what it sent of compressed leaves, for the next step, which sends it
                without fading it by `decay` again. Uncompressed leaves have no residual, so their
                part is lost: compress all leaves (`is_dense=lambda *_: False`) where that matters.
                With `decay=0` all of it is lost.
                A gradient that is not finite is left out.
            weights: float32[workers], of at least 0: the mean is
                sum(weights * vectors) / sum(weights). None: all count alike. Residuals stay as they
                are: each worker's own, without its weight. A negative one, or a sum that is 0 or
                not finite, skips the step.

        Raises:
            ValueError: messages of another size or dtype.
        """
        check_messages(messages, weights)
        half = functools.partial(receive_step, messages, weights, posted, counts)
        return _run(self.settings, half, like, state)

    def message_words(self, gradients: Any, state: Any) -> int:
        """The number of words of a worker's message. Shapes and dtypes are enough as arguments.

        Raises:
            ValueError: see `post`.
        """
        return jax.eval_shape(lambda *given: self.post(*given)[0], gradients, state).size


def _init(settings: Settings, params: Any) -> ErrorFeedbackState:
    """Optax's `init`."""
    axis_name = settings.axis_name
    at = workers_and_placement(params, axis_name, settings.mesh, settings.workers, settings.specs)
    plan = plan_of(params, settings, at[1])
    state = init_state(plan, settings)
    if axis_name is None:
        state = typed_as(params, state)
    state = spread(state, params, at, plan.compressed)
    return without_params(state) if is_stand_in(params) else state


def _run(
    settings: Settings,
    step: Callable[..., Exchanged],
    updates: Any,
    state: ErrorFeedbackState,
    params: Any = None,
    **extra_args: Any,
) -> tuple[Any, ErrorFeedbackState]:
    """The body of `update`, `post` and `receive`. `step` is `run_step`, or one of its halves."""
    check_made(state, ErrorFeedbackState)
    if has_nothing(updates, state):
        return updates, state
    axis_name, momentum = settings.axis_name, settings.momentum
    shapes: Any = updates  # at least the shapes of one worker's
    if not (is_bound := wire.is_bound(axis_name)):  # else this is one worker's code
        given = axis_name, settings.mesh, settings.workers
        updates, shapes, workers = read_rows(updates, state, params, *given)
        check_extra_args(updates, extra_args)
        warn_of_copies(axis_name, {"state": state})
    plan = plan_of(shapes, settings, Placement.of(state.placement))
    each = functools.partial(_on_device, settings, step, plan)
    # Under `jax.disable_jit()` the loops of an exchange would run step by step in Python.
    with jax.disable_jit(False):
        if not is_bound:
            return over_rows(each, updates, state, momentum, workers, plan.compressed)
        Axes(axis_name).check(updates)  # behind `plan_of`, whose errors tell more
        check_own(updates, params, axis_name)
        return in_worker(each, updates, state, momentum, settings.mesh, axis_name, plan.compressed)


def _on_device(
    settings: Settings,
    step: Callable[..., Exchanged],
    plan: TreePlan,
    updates: Any,
    state: ErrorFeedbackState,
    momentum: Any,
    inner: tuple[str, ...],
) -> tuple[Any, ErrorFeedbackState]:
    """An update on a device whose worker has these inner axes."""
    axes = Axes(settings.axis_name, inner)
    settings = dataclasses.replace(settings, momentum=momentum)  # as this device sees it
    buckets, dense = plan.layout.flatten(updates)
    done = step(buckets, dense, load(state, plan, settings), plan, settings, axes)
    delivered = plan.layout.unflatten(done.means, done.dense_mean)
    if done.counts and set(plan.layout.dtypes) != {jnp.dtype(jnp.float32)}:
        done = keep_rounding(done, plan.layout.flatten(delivered)[0], plan)
    if settings.when_skipped == "nan":
        delivered = jax.tree.map(lambda x: jnp.where(done.ok, x, jnp.nan), delivered)
    return delivered, save(done, state, plan, settings, axes)


def exchange(reducer: Reducer, **options: Unpack[Options]) -> Exchange:
    """Exchanges gradients through a reducer, and adds the residual to the next gradients.

    It is error feedback around any reducer. `jaxsparse.spardl(0.01)` and the others are short for
    `jaxsparse.exchange(jaxsparse.reducers.SparDL(0.01))`.

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
    take `jaxsparse.multi_steps`. `optax.apply_if_finite` branches on a local value,
    so that workers wait for each other forever; the next paragraph makes it needless.
    `optax.masked` never averages the leaves that it leaves out, so that replicas diverge.

    If a gradient is not finite on any worker, or an uncompressed mean overflows, all workers skip
    the step: the update is zero, and `skipped` rises. Nothing of compressed leaves is lost, but
    what `decay` takes. What was finite of their gradients waits in the residuals (with momentum,
    which is masked as in any step), and what was delivered is taken back: an equal share on each
    worker, or what it had to send if the reducer does not conserve sums. Values that are finite but
    absurd (1e30) are delivered: clip them in `jaxsparse.per_worker`. Later transformations in the
    chain still see the zero update: schedules and Adam's moments advance. With when_skipped="nan"
    they see NaN, on all workers alike.
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
    and the first one is zero. Uncompressed leaves wait in `pending`. If this step's gradients are
    not finite, `skipped` rises: what was finite of compressed leaves waits in the residuals, and
    uncompressed ones are left out. The exchange of earlier gradients counts, so apply the update.

    Args:
        reducer: the `Reducer` that exchanges the buckets.
        axis_name: the mesh axis of the workers. None: a single worker.
        momentum: factor of momentum correction, in [0, 1): a float or a (traced) scalar array.
            It acts before the exchange, and is masked where this worker sent, unless the reducer
            says where. The optimizer behind needs no momentum of its own. None: no momentum and no
            buffer for it. With Adam, leave it None, and chain
            `jaxsparse.per_worker(optax.scale_by_adam())` before the exchange: Adam behind it has
            moments of what arrives, and trains worse.
        nesterov: True: Nesterov's momentum. With u = momentum u + g, a step adds g + momentum u
            instead of u. None or False: it adds u.
        decay: factor of the residual in each step, in [0, 1]. None: 1, so that nothing is ever
            dropped. 0: what is not sent is dropped. Without a delay the state then has no
            residual.
        delay: 0 or None: exchange this step's gradients. 1: exchange the residual of earlier
            gradients, so that the exchange can overlap the backward pass.
        is_dense: function of a leaf's key path (as `jax.tree_util.keystr` prints it) and shape:
            whether the leaf travels uncompressed. None: vectors, scalars and leaves below 1024
            elements do.
        when_skipped: "nan": the update of a skipped step is NaN, on all workers alike, for trainers
            whose own dynamic loss scale or watch looks for updates that are not finite. The state
            is that of any skipped step. None or "zero": it is zero, so that nothing behind breaks.
        accumulator_dtype: dtype of the residual and momentum of compressed leaves between steps.
            None: float32. "bfloat16" halves their memory and rounds them at random.
        bucket_size: largest number of elements of a bucket. Buckets are exchanged one after the
            other, the last layers' first, while the backward pass goes on (on GPUs:
            `benchmarks/schedules.py`). They take less memory, and share the budget in proportion to
            their sizes. None: 2**22, or an eighth of the compressed elements of a device, if that
            is more, and buckets of whole leaves, of which one may be larger. `LocalSteps` and
            islands, which exchange between steps, then use one bucket. On CPUs, where nothing
            overlaps, 2**30 (one bucket) saves messages.
        mesh: mesh of the workers, where neither arrays and their types nor `jax.set_mesh` tell it.
        workers: number of workers to simulate on one device, without a mesh.
        specs: partitions of the parameters over the other axes of the mesh, for where parameters do
            not show them: a tree of `PartitionSpec`, `NamedSharding`, or of arrays or shapes that
            have a sharding, or a prefix of it; an abstract `flax.nnx` model; or a training state
            with `params`. Real arrays would be kept alive: give shapes.

    Returns:
        An Optax transformation, see `Exchange`. `init` needs no axis and returns one worker's
        state, for `jaxsparse.shard` to spread, or with `mesh` a state that is spread already.
        `update` takes gradients with a row for each worker (`jaxsparse.value_and_grad`), or where
        `axis_name` is bound a worker's.
        Call it under `jax.jit`: outside, each call compiles the exchange anew.

    Raises:
        TypeError: there is no option of that name.
        ValueError: settings out of range. From `init`: no leaf is compressed under the default
            rule, the budget does not fit, partitions over inner axes are not known, or see
            `jaxsparse.arrays.layout.layout_of`. From `update`: the axis is not bound, the state
            belongs to another tree, mesh or to several workers, or gradients are summed already.
    """
    check_names(options, check_reducer(reducer))
    return Exchange.of(Settings(reducer, **options))


def partition(
    policy: Policy, default: Reducer | None = None, **options: Unpack[Options]
) -> Exchange:
    """Error feedback with different reducers for different leaves.

    Leaves with equal reducers are laid end to end and exchanged as one vector. So a reducer whose
    settings are totals (`jaxsparse.reducers.SketchedSGD`) has them for these leaves together. All
    uncompressed leaves travel in one message. Residuals, momentum and composition are those of
    `exchange`.

    Parallax's hybrid (Kim et al., EuroSys 2019) gathers sparse gradients and all-reduces dense
    ones. It is `partition({"embedding": jaxsparse.reducers.SparseAllGather(...)})`.

    Args:
        policy: a function of a leaf's key path (as `jax.tree_util.keystr` prints it) and shape that
            returns the leaf's reducer, or None for uncompressed. Or a mapping from regular
            expressions to reducers and None: the first expression found anywhere in the path
            counts.
        default: the reducer, or None, for leaves that no expression of the mapping matches.
        options: those of `exchange`, but `is_dense`.

    Raises:
        ValueError: from here: an expression is not valid. From `init` and `update`: an expression
            matches no leaf that earlier ones left, the policy returns neither a reducer nor None,
            or see `exchange`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxsparse.reducers import TopK
        >>> tx = partition({"embedding": TopK(0.01)}, axis_name=None)
        >>> grads = {"embedding": jnp.ones((64, 32)), "kernel": jnp.ones((32, 32))}
        >>> updates, state = jax.jit(tx.update)(grads, tx.init(grads))
        >>> int(updates["embedding"].sum()), int(updates["kernel"].sum())
        (21, 1024)
    """
    check_names(options)
    if not callable(policy):
        compiled(policy)  # raises where an expression is not valid
    return Exchange.of(Settings(None, policy, default, **options))
