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
    reducer: Any


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


def run_step(
    gradients: Sequence[Pieces],
    dense: Array,
    before: Carried,
    plan: TreePlan,
    settings: Settings,
    axes: Axes,
) -> Exchanged:
    """Runs one step for all buckets: begin, reduce, finish. With a delay, the next begin is last.

    Before buckets, workers exchange the dense leaves and, in the same message, a flag that
    gradients are finite. So a skipped step needs no extra message, and its exchange of the old
    residual does not count. A decision after the buckets would need a copy of the exchanged
    vectors, one to two d floats. With a delay, only the flag waits for the gradients.
    """
    pending = None
    buckets = before.buckets
    if settings.is_delayed:
        dense_mean = _pending_mean(before.pending, dense, axes)
        means, after, infos = _exchange_each(None, buckets, jnp.bool_(True), plan, settings, axes)
        # The flag has to depend on the exchange, or XLA may send both in one message, which would
        # then wait for the gradients. So it looks at the sums, too, finite where gradients are.
        begun = _begin_each(gradients, after, True, plan, settings)
        finite = _all_finite_in([gradients, [b.residual for b in begun], dense])
        ok, dense_ok = axes.none_of(~finite, ~_all_finite(dense_mean))
        after = _begin_each(gradients, after, ok, plan, settings)
        pending = where_ok(ok, dense, jnp.zeros_like(dense))
    elif not gradients:
        # No residual waits for a flag. What is not finite shows in the mean, on all workers.
        dense_mean = mean_of_dense(dense, axes, plan.layout.dense_sizes)
        ok = _all_finite(dense_mean)
        if axes.inner:
            (ok,) = axes.none_of(~ok)
        means, after, infos, dense_ok = [], [], [], ok
    else:
        # `begun` is for the flag alone: `_exchange_each` begins again, with `ok`. The sums
        # are finite where gradients are. But if the flag reads them, too, XLA holds less: with
        # momentum and 16 leaves, by a quarter of a vector.
        begun = _begin_each(gradients, buckets, True, plan, settings)
        ok, dense_mean = exchange_dense([gradients, [b.residual for b in begun]], dense, axes)
        means, after, infos = _exchange_each(gradients, buckets, ok, plan, settings, axes)
        dense_ok = ok
    dense_mean, dense_momentum = with_mean_momentum(
        dense_mean, before.dense_momentum, dense_ok, settings
    )
    carried = Carried(after, dense_momentum, pending)
    return Exchanged(means, dense_mean, carried, total(infos, plan, axes), ok & dense_ok)


def _exchange_each(
    gradients: Sequence[Pieces] | None,
    before: Sequence[Bucket],
    ok: Bool[Array, ""],
    plan: TreePlan,
    settings: Settings,
    axes: Axes,
) -> tuple[list[Pieces], list[Bucket], list[Info]]:
    """Exchanges each bucket's residual, plus its gradient unless `gradients` is None.

    Returns:
        The means of the buckets. Their new state, or the old one if not `ok`. The counts of each
        exchange.
    """
    means: list[Pieces] = []
    after: list[Bucket] = []
    infos: list[Info] = []
    for i, (b, bucket) in enumerate(zip(before, plan.buckets)):
        x = b.residual if gradients is None else gradients[i]
        if means:
            x, means[-1] = _after(x, means[-1], axes)
        begun = b._replace(residual=x)
        if gradients is not None:
            begun = begin(x, b, ok, settings, bucket)
        vector = join(begun.residual)
        reduced = bucket.reducer(vector, b.reducer, axis_name=axes.axis_name)
        mean, own = finish(begun, vector, reduced, ok, settings, bucket)
        means.append(mean)
        after.append(own)
        infos.append(reduced.info)
    return means, after, infos


def _begin_each(
    gradients: Sequence[Pieces],
    before: Sequence[Bucket],
    ok: Bool[Array, ""] | bool,
    plan: TreePlan,
    settings: Settings,
) -> list[Bucket]:
    each = zip(gradients, before, plan.buckets)
    return [begin(gradient, b, ok, settings, bucket) for gradient, b, bucket in each]


def begin(
    gradient: Pieces,
    before: Bucket,
    ok: Bool[Array, ""] | bool,
    settings: Settings,
    plan: BucketPlan,
) -> Bucket:
    """The bucket of a worker whose residual is then what it has to send. If not `ok`, as before.

    Args:
        gradient: this step's gradient.
        before: this worker's state.
        ok: whether gradients are finite.
        settings: see there.
        plan: the bucket's. If its reducer needs zeros, `momentum` is that of the mean, and stays.
    """
    kept = before.momentum
    u = corrected(gradient, kept, settings, plan)
    if kept is not None and not plan.needs_zeros:
        # The exchanged vector is computed from it. Otherwise XLA computes the momentum after the
        # exchange, and keeps two vectors until then.
        kept = u = where_ok(ok, u, kept)
    x = fed_back(before.residual, summand(gradient, u, kept, settings, plan), settings)
    return Bucket(where_ok(ok, x, before.residual), kept, before.reducer)


def finish(
    begun: Bucket,
    vector: Array,
    reduced: Reduced,
    ok: Bool[Array, ""],
    settings: Settings,
    plan: BucketPlan,
) -> tuple[Pieces, Bucket]:
    """The mean of an exchange, and the worker's state after it: momentum is masked where it sent.

    If not `ok`, the mean is zero, and the bucket stays as it has begun. If the residual is given at
    entries, only these are selected by `ok`: selecting whole vectors would need a copy.

    Where entries are few, pieces change in place. With two leaves a step of DGC then takes 4.3 d
    floats instead of 5.3, and with six it takes 1.3 times as long as a dense step instead of 1.45.
    But each piece looks at all entries, so with 32 leaves it would take 2.8 times as long instead
    of 1.6 (`benchmarks/whole_step.py --leaves`).

    Args:
        begun: the bucket from `begin`, whose residual was exchanged.
        vector: the same as one vector.
        reduced: the result of the reducer.
        ok: whether the step counts on all workers.
        settings: see there.
        plan: see `begin`.
    """
    x, momentum, state = begun
    residual, sent, after, indices = reduced.kept
    own = vector if indices is None else vector.at[indices].get(mode="fill", fill_value=0)
    mean = where_ok(ok, reduced.mean, jnp.zeros_like(reduced.mean))
    residual = where_ok(ok, residual, own)
    is_masked = momentum is not None and not plan.needs_zeros
    sent = ok & sent if is_masked and sent is not None else None
    shapes = [piece.shape for piece in x]
    if indices is not None and len(x) * indices.size <= vector.size // _PER_ENTRY:
        if momentum is not None and sent is not None:
            momentum = _with(momentum, jnp.where(sent, indices, vector.size), jnp.float32(0))
        means, left = cut(mean, shapes), _with(x, indices, residual)
    else:
        if indices is not None:
            residual, sent, *_ = reduced.kept._replace(residual=residual, sent=sent).whole(vector)
        means, left, sent = cut((mean, residual, sent), shapes)
        if sent is not None:
            momentum = jax.tree.map(_masked, momentum, sent)
    if plan.needs_zeros:
        means, momentum = with_mean_momentum(means, momentum, ok, settings)
    return means, Bucket(left, momentum, where_ok(ok, after, state))


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
    for b, bucket, mean, low in zip(done.carried.buckets, plan.buckets, done.means, rounded):
        if not bucket.needs_zeros:
            b = b._replace(residual=jax.tree.map(_with_lost, b.residual, mean, low))
        buckets.append(b)
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
    """Sums of finite numbers, within float32's range: an overflow would stay for ever."""
    return jnp.clip(x, -LARGEST, LARGEST)


def _pending_mean(pending: Array | None, dense: Array, axes: Axes) -> Array:
    """With a delay: the mean of the last step's dense leaves."""
    if pending is None or not dense.size:  # an empty message would be sent, too
        return dense
    return wire.psum(pending, axes.axis_name) / wire.axis_size(axes.axis_name)


def mean_of_dense(dense: Array, axes: Axes, sizes: Sequence[int]) -> Array:
    """The mean of the dense leaves: large ones in messages of their own, small ones together.

    A message of one leaf does not wait for the gradients of others: XLA takes it from the vector.

    Args:
        dense: the leaves of this worker, end to end.
        axes: the axes of the exchange.
        sizes: their numbers of elements.
    """
    if not dense.size:  # an empty message would be sent, too
        return dense
    ends, start = list[int](), 0
    for end in itertools.accumulate(sizes):
        if end - start >= _LEAST:
            ends.append(start := end)
    parts = jnp.split(dense, [end for end in ends if end < dense.size])
    workers = wire.axis_size(axes.axis_name)
    return jnp.concatenate([wire.psum(part, axes.axis_name) / workers for part in parts])


def exchange_dense(looked_at: Any, dense: Array, axes: Axes) -> tuple[Bool[Array, ""], Array]:
    """Whether everything is finite, and the mean of the dense leaves, from one message."""
    finite = _all_finite_in([looked_at, dense])
    broken = jnp.where(finite, jnp.float32(0), jnp.float32(1))
    workers = wire.axis_size(axes.axis_name)
    exchanged = wire.psum(jnp.concatenate([dense, broken[None]]), axes.axis_name) / workers
    # A sum of finite gradients can overflow, too.
    ok = _all_finite(exchanged) & (exchanged[-1] == 0)
    if axes.inner:
        (ok,) = axes.none_of(~ok)
    return ok, exchanged[:-1]


def _after(x: Pieces, mean: Pieces, axes: Axes) -> tuple[Pieces, Pieces]:
    """Returns `x`, which then depends on `mean`, and `mean`.

    Without the barrier XLA may start all buckets at once, or combine their messages, and need the
    memory that splitting saves. The mean is an output, too, because XLA drops unused operands.
    """
    x, after = jax.lax.optimization_barrier((x, mean))
    for axis in axes.all:
        if wire.tracks_replication(axis) and not wire.is_varying(mean[0], axis):
            # A barrier types all as the most varying.
            after = tuple(wire.replicated(piece, axis) for piece in after)
    return x, after


def where_ok(ok: Array | bool, new: Any, old: Any) -> Any:
    """`new` where ok, else `old`, leaf by leaf."""
    return new if ok is True else jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, old)


def with_mean_momentum(
    mean: T, before: T | None, ok: Array, settings: Settings
) -> tuple[T, T | None]:
    """The update with the mean's momentum, and that momentum; if not `ok`, zeros and the old one.

    Each is an array or a bucket in pieces.

    Momentum is linear: the mean's is the mean of all workers', so one replicated copy is enough.
    """
    if settings.momentum is not None and before is not None:
        factor = jnp.asarray(settings.momentum, jnp.float32)
        with_momentum = lambda u, g: in_range(factor * u + g)
        u = jax.tree.map(with_momentum, before, mean)
        mean = jax.tree.map(with_momentum, u, mean) if settings.nesterov else u
        before = where_ok(ok, u, before)
    return where_ok(ok, mean, jax.tree.map(jnp.zeros_like, mean)), before


def corrected(
    gradient: Pieces, before: Pieces | None, settings: Settings, plan: BucketPlan
) -> Pieces:
    """The gradient with momentum, u."""
    if settings.momentum is None or before is None or plan.needs_zeros:
        return gradient
    factor = jnp.asarray(settings.momentum, jnp.float32)
    return jax.tree.map(lambda u, g: in_range(factor * u + g), before, gradient)


def summand(
    gradient: Pieces, u: Pieces, before: Pieces | None, settings: Settings, plan: BucketPlan
) -> Pieces:
    """The summand of the residual: u, or momentum * u + g with Nesterov's momentum."""
    if not settings.nesterov or before is None:
        return u
    return corrected(gradient, u, settings, plan)


def _all_finite_in(tree: Any) -> Bool[Array, ""]:
    return functools.reduce(jnp.logical_and, map(_all_finite, jax.tree.leaves(tree)))


def _all_finite(x: Float[Array, "..."]) -> Array:
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
