"""One step's exchange of all buckets and dense leaves: arrays in, arrays out."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxsparse.arrays.layout import Layout, Pieces, cut, join
from jaxsparse.arrays.magnitude import LARGEST
from jaxsparse.comm import wire
from jaxsparse.comm.wire import Axes
from jaxsparse.reducers.base import Info, Reduced, Reducer

T = TypeVar("T")

_MOST = 2**31 - 1  # the largest int32
# Uncompressed leaves travel together until a message has at least this many elements, a megabyte.
_LEAST = 2**18
_PER_FLAG = 8  # number of elements that share a flag when a vector is checked
# Entries are few if a bucket has at least this many elements for each entry and piece.
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


class TreePlan(NamedTuple):
    """How the leaves of a tree are exchanged."""

    layout: Layout
    reducers: tuple[Reducer, ...]  # one a bucket
    needs_zeros: tuple[bool, ...]  # one a reducer
    systems: tuple[str, ...]  # the name of each reducer's system
    states: tuple[Any, ...]  # shapes and dtypes of each reducer's own state
    sizes: tuple[int, ...]  # number of elements of each bucket
    dense_elements: int  # number of uncompressed elements of all of a worker's devices
    compressed: frozenset[int]  # the numbers of the leaves in buckets


class Settings(NamedTuple):
    """Settings of an exchange that do not depend on the tree."""

    axes: Axes
    momentum: float | Array | None = None
    is_delayed: bool = False
    decay: float = 1.0  # factor of residuals in each step
    nesterov: bool = False


def exchange(
    gradients: Sequence[Pieces], dense: Array, before: Carried, plan: TreePlan, settings: Settings
) -> Exchanged:
    """Runs one step for all buckets: begin, reduce, finish. With a delay, the next begin is last.

    No bucket waits for other gradients: what is not finite counts as zero, and whether there was
    such comes last. Then a step delivers nothing: each worker takes the means back into its
    residuals, an equal share each, so that all that was finite is delivered later.
    """
    axes = settings.axes
    finite, pending = all_finite_in(gradients), None
    if settings.is_delayed:
        dense_mean = dense
        if before.pending is not None:
            dense_mean = mean_of_dense(before.pending, axes, plan.layout.dense_sizes)
        means, after, infos = _exchange_each(None, before.buckets, plan, settings)
        finite &= _is_finite(dense) & _has_arrived(means)
        ok, dense_ok = axes.none_of(~finite, ~_is_finite(dense_mean))
        after = [
            begin(gradient, b, settings, needs_zeros)
            for gradient, b, needs_zeros in zip(gradients, after, plan.needs_zeros)
        ]
        pending = where_ok(ok, dense, jnp.zeros_like(dense))
        ok_of_means: Array | bool = True
    else:
        means, after, infos = _exchange_each(gradients, before.buckets, plan, settings)
        finite &= _has_arrived(means)
        dense_mean = mean_of_dense(dense, axes, plan.layout.dense_sizes)
        # What is not finite in a dense leaf shows in its mean, on all workers.
        told = axes if gradients else Axes(None, axes.inner)
        (ok,) = told.none_of(~(finite & _is_finite(dense_mean)))
        dense_ok = ok_of_means = ok
        means, after = settled(means, after, ok)
    means, after = with_momentum_of_means(means, after, ok_of_means, plan, settings)
    dense_mean, dense_momentum = with_mean_momentum(
        dense_mean, before.dense_momentum, dense_ok, settings
    )
    carried = Carried(after, dense_momentum, pending)
    return Exchanged(means, dense_mean, carried, total(infos, plan, axes), ok & dense_ok)


def _exchange_each(
    gradients: Sequence[Pieces] | None,
    before: Sequence[Bucket],
    plan: TreePlan,
    settings: Settings,
) -> tuple[list[Pieces], list[Bucket], list[Info]]:
    """Exchanges each bucket's residual, plus its gradient unless `gradients` is None.

    The last bucket is the first, because a backward pass begins with the last layers.

    Returns:
        The means of the buckets, their new state, and the counts of each exchange.
    """
    axes = settings.axes
    found: list[tuple[Pieces, Bucket, Info]] = []
    for i, (b, reducer) in reversed([*enumerate(zip(before, plan.reducers))]):
        x = b.residual if gradients is None else gradients[i]
        if found:
            x, mean = _after(x, found[-1][0], axes)
            found[-1] = (mean, *found[-1][1:])
        begun = b._replace(residual=x)
        if gradients is not None:
            begun = begin(x, b, settings, plan.needs_zeros[i])
        vector = join(begun.residual)
        reduced = reducer(vector, b.reducer, axis_name=axes.axis_name)
        mean, own = finish(begun, vector, reduced, plan.needs_zeros[i])
        found.append((mean, own, reduced.info))
    means, after, infos = zip(*reversed(found)) if found else ((), (), ())
    return list(means), list(after), list(infos)


def begin(gradient: Pieces, before: Bucket, settings: Settings, needs_zeros: bool) -> Bucket:
    """The bucket of a worker whose residual is then what it has to send.

    Args:
        gradient: this step's gradient. What is not finite counts as zero.
        before: this worker's state.
        settings: see there.
        needs_zeros: the reducer's. If so, `momentum` is that of the mean, and stays.
    """
    gradient = jax.tree.map(lambda g: jnp.where(jnp.isfinite(g), g, 0), gradient)
    kept = before.momentum
    u = corrected(gradient, kept, settings, needs_zeros)
    if kept is not None and not needs_zeros:
        # The exchanged vector is computed from it. Otherwise XLA computes the momentum after the
        # exchange, and keeps two vectors until then.
        kept = u
    x = fed_back(before.residual, summand(gradient, u, kept, settings, needs_zeros), settings)
    return Bucket(x, kept, before.reducer)


def finish(
    begun: Bucket, vector: Array, reduced: Reduced, needs_zeros: bool
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
        needs_zeros: see `begin`.
    """
    x, momentum, _ = begun
    residual, sent, after, indices = reduced.kept
    if momentum is None or needs_zeros:
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


def settled(
    means: Sequence[Pieces], after: Sequence[Bucket], ok: Array
) -> tuple[list[Pieces], list[Bucket]]:
    """Means and buckets of a step. If not `ok`, means are zero, and back in the residuals."""
    back = lambda left, mean: _in_range(left + jnp.where(ok, jnp.zeros_like(mean), mean))
    # Where nothing is taken back, keep the residual's bits: -0 + 0 would be +0.
    taken = lambda left, mean: jnp.where(ok, left, back(left, mean))
    buckets = [
        b._replace(residual=jax.tree.map(taken, b.residual, mean)) for b, mean in zip(after, means)
    ]
    return [where_ok(ok, mean, jax.tree.map(jnp.zeros_like, mean)) for mean in means], buckets


def with_momentum_of_means(
    means: Sequence[Pieces],
    after: Sequence[Bucket],
    ok: Array | bool,
    plan: TreePlan,
    settings: Settings,
) -> tuple[list[Pieces], list[Bucket]]:
    """Means with the momentum of means, of the reducers that have such."""
    found = []
    for mean, b, needs_zeros in zip(means, after, plan.needs_zeros):
        momentum = b.momentum
        if needs_zeros:
            mean, momentum = with_mean_momentum(mean, momentum, ok, settings)
        found.append((mean, b._replace(momentum=momentum)))
    return [mean for mean, _ in found], [b for _, b in found]


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
    for b, zeros, mean, low in zip(done.carried.buckets, plan.needs_zeros, done.means, rounded):
        if not zeros:
            b = b._replace(residual=jax.tree.map(_with_lost, b.residual, mean, low))
        buckets.append(b)
    return done._replace(carried=done.carried._replace(buckets=buckets))


def _with_lost(residual: Array, mean: Array, low: Array) -> Array:
    lost = mean - low.reshape(mean.shape)
    # Where nothing is lost, keep the residual's bits: -0 + 0 would be +0.
    return jnp.where(lost == 0, residual, _in_range(residual + lost))


def _masked(kept: Array, sent: Array) -> Array:
    return jnp.where(sent, jnp.zeros_like(kept), kept)


def fed_back(residual: Pieces, added: Pieces, settings: Settings) -> Pieces:
    """The sum that a worker has to send: its residual, decayed, plus what it adds."""
    if settings.decay == 1:
        return jax.tree.map(lambda v, u: _in_range(v + u), residual, added)
    decay = jnp.float32(settings.decay)
    return jax.tree.map(lambda v, u: _in_range(decay * v + u), residual, added)


def _in_range(x: Array) -> Array:
    """Sums of finite numbers, within float32's range: an overflow would stay for ever."""
    return jnp.clip(x, -LARGEST, LARGEST)


def mean_of_dense(dense: Array, axes: Axes, sizes: Sequence[int] = ()) -> Array:
    """The mean of the dense leaves: large ones in messages of their own, small ones together.

    A message of one leaf does not wait for the gradients of others.

    Args:
        dense: the leaves of this worker, end to end.
        axes: the axes of the exchange.
        sizes: their numbers of elements. Without these they travel in one message.
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


def _has_arrived(means: Sequence[Pieces]) -> Bool[Array, ""]:
    """True, by an element of each mean, all of which are finite.

    So a flag depends on all exchanges. Else XLA may send it in one message with an exchange, which
    would wait for all gradients. A barrier is gone when XLA's CPU backend joins messages.
    """
    return all_finite_in([piece.reshape(-1)[:1] for mean in means for piece in mean[:1]])


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
    mean: T, before: T | None, ok: Array | bool, settings: Settings
) -> tuple[T, T | None]:
    """The update with the mean's momentum, and that momentum; if not `ok`, zeros and the old one.

    Each is an array or a bucket in pieces.

    Momentum is linear: the mean's is the mean of all workers', so one replicated copy is enough.
    """
    if settings.momentum is not None and before is not None:
        factor = jnp.asarray(settings.momentum, jnp.float32)
        with_momentum = lambda u, g: _in_range(factor * u + g)
        u = jax.tree.map(with_momentum, before, mean)
        mean = jax.tree.map(with_momentum, u, mean) if settings.nesterov else u
        before = where_ok(ok, u, before)
    return where_ok(ok, mean, jax.tree.map(jnp.zeros_like, mean)), before


def corrected(
    gradient: Pieces, before: Pieces | None, settings: Settings, needs_zeros: bool
) -> Pieces:
    """The gradient with momentum, u."""
    if settings.momentum is None or before is None or needs_zeros:
        return gradient
    factor = jnp.asarray(settings.momentum, jnp.float32)
    return jax.tree.map(lambda u, g: _in_range(factor * u + g), before, gradient)


def summand(
    gradient: Pieces, u: Pieces, before: Pieces | None, settings: Settings, needs_zeros: bool
) -> Pieces:
    """The summand of the residual: u, or momentum * u + g with Nesterov's momentum."""
    if not settings.nesterov or before is None:
        return u
    return corrected(gradient, u, settings, needs_zeros)


def all_finite_in(tree: Any) -> Bool[Array, ""]:
    """Whether all elements of all arrays are finite."""
    return functools.reduce(
        jnp.logical_and, map(_is_finite, jax.tree.leaves(tree)), jnp.bool_(True)
    )


def _is_finite(x: Float[Array, "..."]) -> Array:
    # A sum would be shorter. But XLA's CPU backend hands sums to a library, and stores their
    # summands, gradients with momentum, for it. The barrier keeps XLA from storing a flag for each
    # element.
    x = x.reshape(-1)
    many = x.size - x.size % _PER_FLAG
    flags = jnp.all(jnp.isfinite(x[:many]).reshape(_PER_FLAG, -1), axis=0)
    return jnp.all(jax.lax.optimization_barrier(flags)) & jnp.all(jnp.isfinite(x[many:]))


def count(elements: int) -> Int[Array, ""]:
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
    for one, size in zip(infos, plan.sizes):
        delivered.append(jnp.minimum(one.delivered, count(size)))
        overflow.append(one.overflow)
    counts = jnp.stack([jnp.stack(delivered), jnp.stack(overflow)], axis=1)
    compressed, without_room = saturating_sum(counts, axes.inner)
    both = jnp.stack([compressed, count(plan.dense_elements)])
    return Info(saturating_sum(both), without_room)
