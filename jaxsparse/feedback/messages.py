"""The halves of an exchange by messages: the bodies of `Exchange.post` and `Exchange.receive`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jaxsparse.arrays.layout import Pieces, join
from jaxsparse.codecs.codec import bits, from_bits
from jaxsparse.comm.wire import Axes
from jaxsparse.feedback.options import Settings
from jaxsparse.feedback.plan import TreePlan
from jaxsparse.feedback.step import (
    Bucket,
    Carried,
    Exchanged,
    all_finite_in,
    begin,
    delivered,
    exchange_dense,
    finish,
    in_range,
    total,
    with_mean_momentum,
)
from jaxsparse.reducers.base import Gathered, Info, Kept, Sums, deliver
from jaxsparse.reducers.stages import Staged

_AXIS = "messages"  # the axis over which received messages are added up


class Posted(NamedTuple):
    """What stays with a worker that has posted, for one bucket."""

    begun: Bucket  # its residual is what it exchanges
    kept: Kept  # what it keeps if its message counts


def check_messages(messages: Any, weights: Any) -> None:
    """Raises ValueError unless messages and weights have shapes and dtypes of some."""
    shape, dtype = jnp.shape(messages), jnp.result_type(messages)
    if len(shape) != 2 or not shape[0] or dtype != jnp.uint32:
        raise ValueError(
            f"messages are {dtype}{list(shape)}: give uint32[workers, words], with at least one "
            "worker"
        )
    if weights is not None and jnp.shape(weights) != shape[:1]:
        raise ValueError(
            f"weights have shape {jnp.shape(weights)}, but there are {shape[0]} messages: give "
            "float32[workers], or None"
        )


def _weighted(
    reducer: Gathered,
    shares: Float[Array, " workers"],
    messages: UInt32[Array, "workers words"],
    size: int,
) -> Sums:
    """What messages deliver whose weights add up to 1: each is decoded alone."""

    def add(sums: Array, one: tuple[Array, Array]) -> tuple[Array, None]:
        share, message = one
        return sums + share * reducer.decode(message[None], size).total, None

    return Sums(jax.lax.scan(add, jnp.zeros(size, jnp.float32), (shares, messages))[0])


def _cut(messages: Array, words: int) -> tuple[Array, Array]:
    """The first words of all messages, and the rest."""
    if words > messages.shape[1]:
        raise _misfit(messages)
    return messages[:, :words], messages[:, words:]


def _misfit(messages: Array) -> ValueError:
    return ValueError(
        f"messages have another size than those of this exchange and tree ({messages.shape} "
        "are left to read): give what post returned on each worker for the same ones"
    )


def _checked(reducer: Any) -> Gathered:
    """The reducer. Raises ValueError unless it is of one message."""
    if isinstance(reducer, Gathered):
        return reducer
    reason = "exchanges in several rounds, or sums on the way"
    if isinstance(reducer, Staged):
        reason = "changes in stages, and with it the size of its messages"
    raise ValueError(
        f"{reducer.name} {reason}, so that it is no exchange of one message: use one that "
        "gathers one message from each worker, such as jaxsparse.chunked_top_k() or "
        "jaxsparse.quantized(gather=True)"
    )


def _check(settings: Settings) -> None:
    """Raises ValueError where the halves of an exchange would need collectives, or a later step."""
    if settings.axis_name is not None:
        raise ValueError(
            f"axis_name={settings.axis_name!r} is for workers of one program, but messages "
            "are for workers that each run their own: make the transformation with axis_name=None"
        )
    if settings.is_delayed:
        raise ValueError(
            "delay=1 exchanges the last step's residual, beside this step's gradients. Messages "
            "can be received as late as you like: leave delay out"
        )


def post_step(
    rank: int | Int[Array, ""],
    gradients: Sequence[Pieces],
    dense: Array,
    before: Carried,
    plan: TreePlan,
    settings: Settings,
    axes: Axes,
) -> tuple[UInt32[Array, " words"], tuple[Posted, ...], Exchanged]:
    """The first half of `run_step`, and the result of a step that changes nothing."""
    _check(settings)
    ok, _ = exchange_dense(all_finite_in(gradients), dense, [dense.size], axes)
    flag = jnp.where(ok, jnp.float32(0), jnp.float32(jnp.nan))
    words, held = [bits(flag[None]), bits(dense)], []
    rank = jnp.asarray(rank, jnp.int32)
    for gradient, bucket, its_plan in zip(gradients, before.buckets, plan.buckets):
        begun = begin(gradient, bucket, its_plan, settings)
        reducer = _checked(its_plan.reducer)
        message, kept = reducer.encode(join(begun.residual), bucket.reducer_state, rank)
        words.append(message)
        held.append(Posted(begun, kept))
    info = Info(jnp.int32(0), jnp.int32(0))
    means = [own.begun.residual for own in held]  # nobody reads them
    unchanged = Exchanged(means, dense, before, info, jnp.bool_(True))
    return jnp.concatenate(words), tuple(held), unchanged


def receive_step(
    messages: UInt32[Array, "workers words"],
    weights: Float[Array, " workers"] | None,
    held: Sequence[Posted],
    counts: bool,
    gradients: Sequence[Pieces],
    dense: Array,
    before: Carried,
    plan: TreePlan,
    settings: Settings,
    axes: Axes,
) -> Exchanged:
    """The second half of `run_step`."""
    first, rest = _cut(messages, 1 + dense.size)
    first = from_bits(first, jnp.float32)
    shares, is_mean = None, jnp.bool_(True)
    if weights is not None:
        whole = jnp.sum(weights)
        is_mean = jnp.all(weights >= 0) & (whole > 0) & jnp.isfinite(whole)
        shares = weights / whole
        # Of the dense leaves, whose mean is taken below.
        first = first.at[:, 1:].multiply(shares[:, None] * len(messages))
    # Added up as in a collective: over an axis, here that of the messages.
    ok, dense_mean = jax.vmap(
        lambda own: exchange_dense(jnp.isfinite(own[0]), own[1:], [dense.size], Axes(_AXIS)),
        axis_name=_AXIS,
        out_axes=None,
    )(first)
    ok &= is_mean
    means: list[Pieces] = []
    after: list[Bucket] = []
    infos: list[Info] = []
    for own, its_plan in zip(held, plan.buckets):
        reducer, size = _checked(its_plan.reducer), its_plan.size
        part, rest = _cut(rest, reducer.words(size))
        vector = join(own.begun.residual)
        if shares is None:
            reduced = deliver(vector, reducer.decode(part, size), own.kept, len(messages))
        else:
            reduced = deliver(vector, _weighted(reducer, shares, part, size), own.kept, 1)
        if not counts:
            owed = vector
            if 0 < settings.decay < 1:  # the next message fades it, and is to have all of it
                owed = in_range(vector / settings.decay)
            reduced = reduced._replace(kept=Kept(owed, None, reduced.kept.state))
        mean, now = finish(own.begun, vector, reduced, its_plan)
        # A mean by weights is no sum of equal shares.
        is_equal = shares is None and reducer.conserves
        kept = now.residual
        mean, now = delivered(mean, now, None if is_equal else own.begun.residual, ok)
        if not counts:
            now = now._replace(residual=kept)
        if its_plan.needs_zeros:
            mean, momentum = with_mean_momentum(mean, now.momentum, ok, settings)
            now = now._replace(momentum=momentum)
        means.append(mean)
        after.append(now)
        infos.append(reduced.info)
    if rest.shape[1]:
        raise _misfit(messages)
    dense_mean, dense_momentum = with_mean_momentum(dense_mean, before.dense_momentum, ok, settings)
    carried = Carried(after, dense_momentum, None)
    return Exchanged(means, dense_mean, carried, total(infos, plan, axes), ok, counts)
