"""One step's exchange of all buckets and dense leaves: arrays in, arrays out."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxsparse.arrays.layout import Pieces, cut, join
from jaxsparse.arrays.magnitude import LARGEST
from jaxsparse.arrays.platforms import by_platform
from jaxsparse.comm import wire
from jaxsparse.comm.wire import Axes
from jaxsparse.feedback.options import Settings
from jaxsparse.feedback.plan import BucketPlan, TreePlan
from jaxsparse.reducers.base import Info, Reduced

T = TypeVar("T")

_MOST = 2**31 - 1  # the largest int32
# Uncompressed leaves travel together until a message has at least this many elements, a megabyte.
_LEAST = 2**18
_PER_FLAG = 8  # number of elements that share a flag when a vector is checked
# A bucket is sparse if it has at least this many elements per entry and piece.
_PER_ENTRY = 16


class Bucket(NamedTuple):
    """One worker's state for one bucket."""

    residual: Pieces
    momentum: Pieces | None  # this worker's, or that of the mean; None without momentum
    reducer_state: Any


class Carried(NamedTuple):
    """One worker's state between steps, in float32."""

    buckets: list[Bucket]
    dense_momentum: Array | None  # momentum of the uncompressed leaves' mean
    pending: Array | None  # the last uncompressed gradient, yet to be exchanged; None: no delay


class Exchanged(NamedTuple):
    """The means that a step delivers, and the state after it."""

    means: list[Pieces]  # one a bucket
    dense_mean: Array
    carried: Carried
    info: Info
    ok: Bool[Array, ""]  # whether everything is finite on all workers
    counts: bool = True  # whether this worker's own message is in the means


def run_step(
    gradients: Sequence[Pieces],
    dense: Array,
    before: Carried,
    plan: TreePlan,
    settings: Settings,
    axes: Axes,
) -> Exchanged:
    """Runs one step for all buckets: begin, reduce, finish. With a delay, the next begin is last.

    Nothing waits for all gradients but a flag that they are finite, which is exchanged last. Until
    then, elements that are not finite count as zero. If any worker had one, the step is skipped:
    it delivers nothing, and each worker takes back its share of the means, so that nothing is lost.
    So a bucket is exchanged while the gradients of earlier layers are computed.
    """
    buckets, pending = before.buckets, None
    if settings.is_delayed:
        means, after, infos, *_ = _exchange_each(None, buckets, plan, settings, axes)
        dense_mean = _pending_mean(behind(before.pending, means), dense, axes)
        begun = zip(gradients, after, plan.buckets)
        after = [
            begin(gradient, bucket, its_plan, settings) for gradient, bucket, its_plan in begun
        ]
        finite = behind(all_finite_in([gradients, dense]), means)
        ok, dense_ok = axes.none_of(~finite, ~_all_finite(dense_mean))
        pending = where_ok(ok, dense, jnp.zeros_like(dense))
        ok &= dense_ok
    else:
        means, after, infos, to_send, flags = _exchange_each(
            gradients, buckets, plan, settings, axes
        )
        sizes = plan.layout.dense_sizes
        if gradients:
            finite = functools.reduce(jnp.logical_and, flags)
            finite, loose = behind((finite, dense), means)
            dense_ok, dense_mean = exchange_dense(finite, loose, sizes, axes)
        else:  # what is not finite shows in the mean, on all workers
            dense_mean = _mean_of_dense(dense, sizes, axes)
            dense_ok = _all_finite(dense_mean)
            if axes.inner:
                (dense_ok,) = axes.none_of(~dense_ok)
        ok = dense_ok
        kept = [delivered(*each, ok) for each in zip(means, after, to_send)]
        means, after = [mean for mean, _ in kept], [bucket for _, bucket in kept]
    counts = jnp.bool_(True) if settings.is_delayed else ok
    for i, its_plan in enumerate(plan.buckets):
        if its_plan.needs_zeros:
            means[i], momentum = with_mean_momentum(means[i], after[i].momentum, counts, settings)
            after[i] = after[i]._replace(momentum=momentum)
    dense_mean, dense_momentum = with_mean_momentum(
        dense_mean, before.dense_momentum, dense_ok, settings
    )
    carried = Carried(after, dense_momentum, pending)
    return Exchanged(means, dense_mean, carried, total(infos, plan, axes), ok)


def _exchange_each(
    gradients: Sequence[Pieces] | None,
    before: Sequence[Bucket],
    plan: TreePlan,
    settings: Settings,
    axes: Axes,
) -> tuple[list[Pieces], list[Bucket], list[Info], list[Pieces | None], list[Array]]:
    """Exchanges each bucket's residual, plus its gradient unless `gradients` is None.

    The last layers' gradients exist first, so the last bucket is the first one.

    Returns:
        The means of the buckets, their new states, the counts of each exchange, what the worker had
        to send where a reducer does not conserve it, and flags that gradients are finite.
    """
    found: dict[int, tuple[Pieces, Bucket, Info, Pieces | None]] = {}
    flags = list[Array]()
    mean: Pieces | None = None
    for i in reversed(range(len(before))):
        bucket, its_plan = before[i], plan.buckets[i]
        x = bucket.residual if gradients is None else gradients[i]
        if mean is not None:
            # Else XLA may start all buckets at once, or combine their messages, and need the memory
            # that splitting saves. The barrier keeps the products of gradients out of it.
            x = behind(jax.lax.optimization_barrier(x), [mean])
        begun = bucket._replace(residual=x)
        if gradients is not None:
            begun = begin(x, bucket, its_plan, settings)
            # Looked at now, a gradient need not be kept until the flag is exchanged.
            finite, sends = jax.lax.optimization_barrier((all_finite_in(x), begun.residual))
            flags.append(finite)
            begun = begun._replace(residual=sends)
        vector = join(begun.residual)
        reduced = its_plan.reducer.pmean(vector, bucket.reducer_state, axes.axis_name)
        mean, own = finish(begun, vector, reduced, its_plan)
        to_send = None if its_plan.reducer.conserves else begun.residual
        found[i] = mean, own, reduced.info, to_send
    each = [found[i] for i in range(len(before))]
    means, after, infos = [x for x, *_ in each], [x for _, x, *_ in each], [x for *_, x, _ in each]
    return means, after, infos, [x for *_, x in each], flags


def begin(gradient: Pieces, before: Bucket, plan: BucketPlan, settings: Settings) -> Bucket:
    """Adds this step's gradient. `residual` is then all that the worker has to send.

    Args:
        gradient: this step's gradient. Elements that are not finite count as zero.
        before: this worker's state.
        plan: the bucket's. If its reducer needs zeros, `momentum` is that of the mean, and stays.
        settings: see there.
    """
    x, kept = finite_part(gradient), before.momentum
    if not plan.needs_zeros:
        x, kept = with_momentum(x, kept, settings)
    x = fed_back(before.residual, x, settings)
    return Bucket(x, kept, before.reducer_state)


def finish(
    begun: Bucket, vector: Array, reduced: Reduced, plan: BucketPlan
) -> tuple[Pieces, Bucket]:
    """The mean of an exchange, and the worker's state after it: momentum is masked where it sent.

    Where entries are few, pieces change in place. With two leaves a step of DGC then takes 4.3 d
    floats instead of 5.3, and with six it takes 1.3 times as long as a dense step instead of 1.45.
    But each piece looks at all entries, so with 32 leaves it would take 2.8 times as long instead
    of 1.6 (`benchmarks/whole_step.py --leaves`).

    Args:
        begun: the bucket from `begin`, whose residual was exchanged.
        vector: the same as one vector.
        reduced: the result of the reducer.
        plan: see `begin`.
    """
    x, momentum, _ = begun
    residual, sent, after, indices = reduced.kept
    if momentum is None or plan.needs_zeros:
        sent = None
    shapes = [piece.shape for piece in x]
    if indices is not None and len(x) * indices.size <= vector.size // _PER_ENTRY:
        if momentum is not None and sent is not None:
            momentum = _with(momentum, jnp.where(sent, indices, vector.size), jnp.float32(0))
        means, left = cut(reduced.mean, shapes), _with(x, indices, residual)
    else:
        if indices is not None:
            residual, sent, *_ = reduced.kept._replace(sent=sent).whole(vector)
        means, left, sent = cut((reduced.mean, residual, sent), shapes)
        if sent is not None:
            momentum = jax.tree.map(_masked, momentum, sent)
    return means, Bucket(left, momentum, after)


def delivered(
    mean: Pieces, bucket: Bucket, to_send: Pieces | None, ok: Bool[Array, ""]
) -> tuple[Pieces, Bucket]:
    """The mean that a step delivers, and the state after it. If not `ok`, zero: it is taken back.

    Each worker takes back the mean, which is a W-th of what all delivered. A reducer that does not
    conserve sums decodes errors that are in no residual, and fed back they would grow from one
    skipped step to the next. There the worker keeps `to_send`, what it had to send; None elsewhere.
    """
    if to_send is None:
        to_send = jax.tree.map(lambda left, mean: in_range(left + mean), bucket.residual, mean)
    residual = where_ok(ok, bucket.residual, to_send)
    mean = jax.tree.map(lambda x: jnp.where(ok, x, jnp.zeros_like(x)), mean)
    return mean, bucket._replace(residual=residual)


def behind(tree: T, means: Sequence[Pieces]) -> T:
    """The arrays, which then depend on the means of exchanges, so that they are sent after these.

    XLA may send what is independent in one message, which would wait for all gradients. And
    XLA:CPU mixes up collectives at the same time if one is in a branch: processes died in programs
    that JAX's cache had kept. It takes barriers out before it orders collectives.
    """
    firsts = [piece.reshape(-1)[0] for mean in means for piece in mean[:1] if piece.size]
    are_there = all_finite_in([first[None] for first in firsts])  # always: XLA does not know it
    return jax.tree.map(lambda x: jnp.where(are_there, x, jnp.zeros_like(x)), tree)


def finite_part(tree: T) -> T:
    """The arrays with zero for what is not finite."""
    return jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x)), tree)


def _with(pieces: Pieces, indices: Int[Array, " n"], values: Array) -> Pieces:
    """The pieces of a vector of d elements, with values set at its indices. Index d is ignored."""
    changed, start = [], 0
    for piece in pieces:
        within = indices - jnp.int32(start)
        if start:  # earlier pieces' indices, which would count from the end
            within = jnp.where(within < 0, piece.size, within)
        place = []
        for length in reversed(piece.shape[1:]):
            place.append(within % length)
            within //= length
        changed.append(piece.at[(within, *reversed(place))].set(values, mode="drop"))
        start += piece.size
    return tuple(changed)


def keep_rounding(done: Exchanged, rounded: Sequence[Pieces], plan: TreePlan) -> Exchanged:
    """Adds to the residuals the part of the means that rounding to the leaves' dtypes removes.

    Args:
        done: the exchange.
        rounded: the means after rounding to the leaves' dtypes, in float32.
        plan: the plan of the tree.
    """
    buckets = []
    each = zip(done.carried.buckets, plan.buckets, done.means, rounded)
    for bucket, its_plan, mean, low in each:
        if not its_plan.needs_zeros:
            residual = jax.tree.map(_with_lost, bucket.residual, mean, low)
            bucket = bucket._replace(residual=residual)
        buckets.append(bucket)
    return done._replace(carried=done.carried._replace(buckets=buckets))


def _with_lost(residual: Array, mean: Array, low: Array) -> Array:
    lost = mean - low.reshape(mean.shape)
    # Where nothing is lost, keep the residual's bits: -0 + 0 would be +0.
    return jnp.where(lost == 0, residual, in_range(residual + lost))


def _masked(kept: Array, sent: Array) -> Array:
    return jnp.where(sent, jnp.zeros_like(kept), kept)


def fed_back(residual: Pieces, added: Pieces, settings: Settings) -> Pieces:
    """The sum that a worker has to send: its residual, decayed, plus what it adds."""
    if settings.decay == 1:
        return jax.tree.map(lambda v, u: in_range(v + u), residual, added)
    decay = jnp.float32(settings.decay)
    return jax.tree.map(lambda v, u: in_range(decay * v + u), residual, added)


def in_range(x: Array) -> Array:
    """Sums of finite numbers, within float32's range: an overflow would stay for ever.

    A select, and no clip: XLA computes a clip anew for each of its users, and keeps what it is made
    of until then. With one leaf, top_k's step then takes 5.1 d floats instead of 3.2.
    """
    return jnp.where(jnp.abs(x) <= LARGEST, x, jnp.sign(x) * LARGEST)


def _pending_mean(pending: Array | None, dense: Array, axes: Axes) -> Array:
    """With a delay: the mean of the last step's dense leaves."""
    if pending is None or not dense.size:  # an empty message would be sent, too
        return dense
    return wire.psum(pending, axes.axis_name) / wire.axis_size(axes.axis_name)


def _messages_of_dense(dense: Array, sizes: Sequence[int]) -> list[Array]:
    """The parts of the dense leaves that travel together: small leaves, or a large one alone.

    A message of one leaf does not wait for the gradients of others: XLA takes it from the vector.

    Args:
        dense: the leaves of this worker, end to end.
        sizes: their numbers of elements.
    """
    ends, start = list[int](), 0
    for end in itertools.accumulate(sizes):
        if end - start >= _LEAST:
            ends.append(start := end)
    return list(jnp.split(dense, [end for end in ends if end < dense.size]))


def _means_of_messages(messages: Sequence[Array], axes: Axes) -> list[Array]:
    """The mean of each message over the workers. The last one is sent first.

    A barrier around what was received and what comes next keeps this order. XLA:GPU would send the
    first layer's first, and half as many products hide it (`benchmarks/schedules.py`).
    """
    sums = list[Array]()
    for message in reversed(messages):
        if sums:
            message, sums[-1] = jax.lax.optimization_barrier((message, sums[-1]))
        sums.append(wire.psum(message, axes.axis_name))
    return [x / wire.axis_size(axes.axis_name) for x in reversed(sums)]


def _mean_of_dense(dense: Array, sizes: Sequence[int], axes: Axes) -> Array:
    """The mean of the dense leaves."""
    if not dense.size:  # an empty message would be sent, too
        return dense
    return jnp.concatenate(_means_of_messages(_messages_of_dense(dense, sizes), axes))


def exchange_dense(
    finite: Bool[Array, ""], dense: Array, sizes: Sequence[int], axes: Axes
) -> tuple[Bool[Array, ""], Array]:
    """Whether everything is finite, and the mean of the dense leaves, whose first message says so.

    The first leaves' gradients are the last ones to exist, as the flag is.
    """
    broken = jnp.where(finite & _all_finite(dense), jnp.float32(0), jnp.float32(1))
    first, *others = _messages_of_dense(dense, sizes)
    first, *others = _means_of_messages([jnp.concatenate([first, broken[None]]), *others], axes)
    mean = jnp.concatenate([first[:-1], *others])
    # A sum of finite gradients can overflow, too.
    ok = _all_finite(mean) & (first[-1] == 0)
    if axes.inner:
        (ok,) = axes.none_of(~ok)
    return ok, mean


def where_ok(ok: Array | bool, new: Any, old: Any) -> Any:
    """`new` where ok, else `old`, leaf by leaf."""
    return new if ok is True else jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, old)


def with_momentum(gradient: T, before: T | None, settings: Settings) -> tuple[T, T | None]:
    """What momentum makes of a gradient, an array or a bucket in pieces, and the new momentum."""
    if settings.momentum is None or before is None:
        return gradient, before
    factor = jnp.asarray(settings.momentum, jnp.float32)
    accumulate = lambda u, g: in_range(factor * u + g)
    after = jax.tree.map(accumulate, before, gradient)
    nesterov = settings.nesterov
    return (jax.tree.map(accumulate, after, gradient) if nesterov else after), after


def with_mean_momentum(
    mean: T, before: T | None, ok: Array, settings: Settings
) -> tuple[T, T | None]:
    """The update with the mean's momentum, and that momentum; if not `ok`, zeros and the old one.

    Momentum is linear: the mean's is the mean of all workers', so one replicated copy is enough.
    """
    delivered, after = with_momentum(mean, before, settings)
    delivered = where_ok(ok, delivered, jax.tree.map(jnp.zeros_like, mean))
    return delivered, where_ok(ok, after, before)


def all_finite_in(tree: Any) -> Bool[Array, ""]:
    """Whether all arrays of a tree are finite."""
    return functools.reduce(
        jnp.logical_and, map(_all_finite, jax.tree.leaves(tree)), jnp.bool_(True)
    )


def _all_finite(x: Float[Array, "..."]) -> Array:
    at_once = lambda x: jnp.all(jnp.isfinite(x))  # a vector in rows has another layout on a TPU
    return by_platform(x, default=_all_finite_in_rows, gpu=at_once, tpu=at_once)


def _all_finite_in_rows(x: Float[Array, "..."]) -> Array:
    # A sum would be shorter. But XLA's CPU backend hands sums to a library, and stores their
    # summands, gradients with momentum, for it. The barrier keeps XLA from storing a flag for each
    # element.
    x = x.reshape(-1)
    many = x.size - x.size % _PER_FLAG
    flags = jnp.all(jnp.isfinite(x[:many]).reshape(_PER_FLAG, -1), axis=0)
    return jnp.all(jax.lax.optimization_barrier(flags)) & jnp.all(jnp.isfinite(x[many:]))


def saturated(elements: int) -> Int[Array, ""]:
    """A static number of elements as an int32; 2**31 - 1 if it is larger."""
    return jnp.int32(min(elements, _MOST))


def saturating_sum(counts: Int[Array, "n *k"], axes: tuple[str, ...] = ()) -> Int[Array, " *k"]:
    """The sum of counts over their first axis and over devices; 2**31 - 1 if it is larger.

    Args:
        counts: int32, not negative; all devices together have at most 2**15 of them.
        axes: the mesh axes of the devices.
    """
    # Sums of halves don't overflow.
    halves = jnp.stack([counts >> 16, counts & 0xFFFF]).sum(axis=1, dtype=jnp.int32)
    for axis in axes:
        halves = wire.varying(halves, axis)
    upper, lower = wire.psum(halves, axes) if axes else halves
    upper += lower >> 16
    return jnp.where(upper > _MOST >> 16, jnp.int32(_MOST), (upper << 16) | (lower & 0xFFFF))


def count_moved(arrays: Sequence[Array]) -> Int[Array, ""]:
    """The number of elements that are not 0; 2**31 - 1 if it is larger."""
    counts = (jnp.count_nonzero(x).astype(jnp.int32) for x in arrays)
    return saturating_sum(jnp.stack([jnp.int32(0), *counts]))


def total(infos: Sequence[Info], plan: TreePlan, axes: Axes) -> Info:
    """Counts over buckets and a worker's devices, with uncompressed elements, without padding."""
    delivered, overflow = [jnp.int32(0)], [jnp.int32(0)]
    for one, bucket in zip(infos, plan.buckets):
        delivered.append(jnp.minimum(one.delivered, saturated(bucket.size)))
        overflow.append(one.overflow)
    counts = jnp.stack([jnp.stack(delivered), jnp.stack(overflow)], axis=1)
    compressed, without_room = saturating_sum(counts, axes.inner)
    both = jnp.stack([compressed, saturated(plan.dense_elements)])
    return Info(saturating_sum(both), without_room)
