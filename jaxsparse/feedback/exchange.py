"""One step's exchange of all buckets and dense leaves: of these gradients, or of the last ones."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jaxsparse.collectives import wire
from jaxsparse.feedback.levels import Levels
from jaxsparse.reducers.base import Info, Reduced, Reducer

_LARGEST = float(jnp.finfo(jnp.float32).max)


class Bucket(NamedTuple):
    """One worker's state of its shard of one bucket."""

    residual: Array
    momentum: Array | None  # its own, or that of the mean; None if there is none
    reducer: Any


class Dense(NamedTuple):
    """The state of the uncompressed leaves."""

    momentum: Array | None  # of the mean
    pending: Array | None  # the last gradient, not exchanged yet; None without delay


class Exchanged(NamedTuple):
    """What a step delivers, and its new state."""

    means: list[Array]  # one a bucket, whole
    dense_mean: Array
    buckets: list[Bucket]
    dense: Dense
    infos: list[Info]
    ok: Bool[Array, ""]  # whether all was finite everywhere


class Settings(NamedTuple):
    """What `immediate` and `delayed` need to know, for each bucket and in all."""

    levels: Levels
    reducers: Sequence[Reducer]
    sizes: Sequence[int]  # elements of each bucket, whole
    of_mean: Sequence[bool]  # whether the momentum is that of the mean
    momentum: float | Array | None


def scatter(gradients: Sequence[Array], shards: Sequence[int], levels: Levels) -> list[Array]:
    """This device's shards of the buckets' means over the fast axis, one after the other."""
    own: list[Array] = []
    for gradient, size in zip(gradients, shards):
        if own and levels.dense_axis is not None:
            gradient, own[-1] = jax.lax.optimization_barrier((gradient, own[-1]))
        own.append(levels.scatter(gradient, size))
    return own


def immediate(
    gradients: Sequence[Array],
    dense: Array,
    before: Sequence[Bucket],
    dense_before: Dense,
    settings: Settings,
) -> Exchanged:
    """Exchanges residuals and these gradients."""
    levels, reducers, sizes, of_mean, momentum = settings
    # Whether what is to be exchanged is finite is agreed on in the same message as the dense
    # leaves, before the buckets are exchanged. A skipped step then exchanges the old residual
    # in vain, but no copy of the old state need be kept, as it would be to decide afterwards.
    sums = [
        b.residual + _corrected(g, b.momentum, momentum, mean)
        for g, b, mean in zip(gradients, before, of_mean)
    ]
    finite = functools.reduce(jnp.logical_and, map(_all_finite, [*sums, dense]))
    broken = jnp.where(finite, jnp.float32(0), jnp.float32(1))
    message = jnp.concatenate([dense, broken[None]])
    exchanged = wire.psum(message, levels.summed_axes) / levels.summands
    # A sum of finite gradients can overflow, too.
    ok = _all_finite(exchanged) & (exchanged[-1] == 0)
    if levels.sharded:
        (ok,) = levels.none_of(~ok)
    dense_mean, dense_momentum = _mean_momentum(exchanged[:-1], dense_before.momentum, ok, momentum)

    means: list[Array] = []
    after: list[Bucket] = []
    infos = []
    for gradient, b, reducer, size, mean_only in zip(gradients, before, reducers, sizes, of_mean):
        if means:
            gradient, means[-1] = _after(gradient, means[-1], levels)
        u = _corrected(gradient, b.momentum, momentum, mean_only)
        kept = b.momentum
        if kept is not None and not mean_only:
            # What is exchanged is made of it, lest XLA should make it again after the exchange, of
            # two vectors kept until then.
            kept = u = select(ok, u, kept)
        x = select(ok, b.residual + u, b.residual)
        reduced = reducer(x, b.reducer, axis_name=levels.axis_name)
        mean = select(ok, reduced.mean, jnp.zeros_like(reduced.mean))
        if mean_only:
            mean, kept = _mean_momentum(mean, kept, ok, momentum)
        elif kept is not None:
            kept = select(ok, _masked(kept, reduced), kept)
        means.append(levels.gather(mean, size))
        after.append(
            Bucket(select(ok, reduced.residual, x), kept, select(ok, reduced.state, b.reducer))
        )
        infos.append(reduced.info)
    return Exchanged(means, dense_mean, after, Dense(dense_momentum, None), infos, ok)


def delayed(
    gradients: Sequence[Array],
    dense: Array,
    before: Sequence[Bucket],
    dense_before: Dense,
    settings: Settings,
) -> Exchanged:
    """Exchanges what was there before these gradients, to which only a flag of theirs is added.

    So all exchanges but that of the flag may run beside the computation of the gradients.
    """
    levels, reducers, sizes, of_mean, momentum = settings
    pending = dense_before.pending
    assert pending is not None
    # An empty message would be sent, too.
    total = wire.psum(pending, levels.summed_axes) if dense.size else jnp.zeros((0,), jnp.float32)
    dense_mean = total / levels.summands
    means: list[Array] = []
    exchanged: list[Reduced] = []
    kept_momenta: list[Array | None] = []
    always = jnp.bool_(True)
    for b, reducer, size, mean_only in zip(before, reducers, sizes, of_mean):
        x = b.residual
        if means:
            x, means[-1] = _after(x, means[-1], levels)
        reduced = reducer(x, b.reducer, axis_name=levels.axis_name)
        mean, kept = reduced.mean, b.momentum
        if mean_only:
            mean, kept = _mean_momentum(mean, kept, always, momentum)
        elif kept is not None:
            kept = _masked(kept, reduced)
        means.append(levels.gather(mean, size))
        exchanged.append(reduced)
        kept_momenta.append(kept)

    us = [
        _corrected(g, kept, momentum, mean_only)
        for g, kept, mean_only in zip(gradients, kept_momenta, of_mean)
    ]
    sums = [reduced.residual + u for reduced, u in zip(exchanged, us)]
    finite = functools.reduce(jnp.logical_and, map(_all_finite, [*sums, dense]))
    ok, dense_ok = levels.none_of(~finite, ~_all_finite(dense_mean))
    dense_mean, dense_momentum = _mean_momentum(
        dense_mean, dense_before.momentum, dense_ok, momentum
    )
    after = [
        Bucket(
            select(ok, x, reduced.residual),
            kept if kept is None or mean_only else select(ok, u, kept),
            reduced.state,
        )
        for x, reduced, u, kept, mean_only in zip(sums, exchanged, us, kept_momenta, of_mean)
    ]
    return Exchanged(
        means,
        dense_mean,
        after,
        Dense(dense_momentum, select(ok, dense, jnp.zeros_like(dense))),
        [reduced.info for reduced in exchanged],
        ok & dense_ok,
    )


def _after(x: Array, mean: Array, levels: Levels) -> tuple[Array, Array]:
    """`x`, to be used once `mean` is there, and `mean`.

    Without the barrier XLA may start all buckets at once, or combine their messages, and the memory
    that splitting saves is lost again. The mean comes out of it, too: XLA would drop what does not.
    """
    x, after = jax.lax.optimization_barrier((x, mean))
    for axis in levels.axes:
        if wire.tracks_replication(axis) and not wire.is_varying(mean, axis):
            after = wire.replicated(after, axis)  # a barrier types all as the most varying
    return x, after


def select(ok: Array, new: Any, old: Any) -> Any:
    """`new` where ok, else `old`, leaf by leaf."""
    return jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, old)


def _mean_momentum(
    mean: Array, before: Array | None, ok: Array, momentum: float | Array | None
) -> tuple[Array, Array | None]:
    """The update with the mean's momentum, and the momentum; without `ok`, zeros and as before."""
    if momentum is not None and before is not None:
        mean = jnp.asarray(momentum, jnp.float32) * before + mean
        # An overflow would stay for ever.
        mean = jnp.clip(mean, -_LARGEST, _LARGEST)
        before = select(ok, mean, before)
    return select(ok, mean, jnp.zeros_like(mean)), before


def _corrected(
    gradient: Array, before: Array | None, momentum: float | Array | None, of_mean: bool
) -> Array:
    """The gradient with momentum, u."""
    if momentum is None or before is None or of_mean:
        return gradient
    return jnp.asarray(momentum, jnp.float32) * before + gradient


def _all_finite(x: Array) -> Array:
    # A sum propagates NaN, which maxima on CPU may lose, and it stores nothing of x's size.
    return jnp.sum(x * jnp.zeros_like(x, shape=())) == 0


def _masked(u: Array, reduced: Reduced) -> Array:
    return u if reduced.sent is None else jnp.where(reduced.sent, jnp.zeros_like(u), u)
