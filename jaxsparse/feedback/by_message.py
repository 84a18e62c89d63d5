"""An exchange in two halves, for workers that hand messages around without a collective.

    words, posted = post(exchange, gradients, state)                              # on each worker
    means, state = receive(exchange, messages, posted, gradients, state)          # on each, too

`words` is all that a worker sends: a flag that its gradients are finite, its uncompressed leaves,
and a message of each bucket. Files, queues or an object store may carry it. All that receive the
same messages in the same order get the same means, bit for bit, and those of a collective.

Messages are of one size, which `message_words` tells. A receiver must know that they are of the
same exchange, tree and step, because words do not say so.

Programs that are compiled alike give the same bits: `receive` on all workers of one kind of device.
Other programs may round otherwise, because compilers fuse some multiplications into additions. What
a worker keeps still fits what it sent, because `post` returns the vector behind its message, too.
With `accumulator_dtype="bfloat16"` all workers round by the same draws.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, UInt32

from jaxsparse.arrays.layout import Pieces, join
from jaxsparse.codecs.codec import bits, from_bits
from jaxsparse.comm.wire import Axes
from jaxsparse.feedback.exchange import (
    Bucket,
    Carried,
    Exchanged,
    Settings,
    TreePlan,
    begin,
    exchange_dense,
    finish,
    total,
    where_ok,
    with_mean_momentum,
)
from jaxsparse.feedback.store import ErrorFeedbackState
from jaxsparse.reducers.base import Gathered, Info, Kept, Sums, deliver
from jaxsparse.reducers.stages import Staged

_AXIS = "messages"  # the axis over which received messages are added up


class Posted(NamedTuple):
    """What stays with a worker that has posted, for one bucket."""

    begun: Bucket  # its residual is what it exchanges
    kept: Kept  # what it keeps if its message counts


def post(
    exchange: optax.GradientTransformationExtraArgs,
    gradients: Any,
    state: Any,
    *,
    rank: int | Int[Array, ""] = 0,
) -> tuple[UInt32[Array, " words"], tuple[Posted, ...]]:
    """This worker's message of a step, and what stays with it until messages arrive.

    Args:
        exchange: an exchange of this library with `axis_name=None`, such as
            `jaxsparse.top_k(0.01, axis_name=None)`. Optimizers take the means behind it.
        gradients: this worker's gradients, or other updates.
        state: the state of the exchange.
        rank: a number of this worker's own. Draws that differ between workers use it.

    Returns:
        The message, uint32[words], and what each bucket's worker holds.

    Raises:
        ValueError: it is no exchange, or not in one message: a system of several rounds, a reducer
            that changes in stages, a delay, or an axis of workers.
    """
    sent: list[Any] = []

    def half(*given: Any) -> Exchanged:
        message, posted, unchanged = _posted(rank, *given)
        sent.extend((message, posted))
        return unchanged

    _run(exchange, gradients, state, half)
    words, posted = sent
    return words, posted


def receive(
    exchange: optax.GradientTransformationExtraArgs,
    messages: UInt32[Array, "workers words"],
    posted: Sequence[Posted],
    like: Any,
    state: Any,
    *,
    counts: bool = True,
    weights: Float[Array, " workers"] | None = None,
) -> tuple[Any, Any]:
    """The means of a step and the exchange's state after it, from the messages that count.

    If any message says that its worker's gradients are not finite, the step is skipped, as in
    `jaxsparse.error_feedback`.

    Args:
        exchange: as in `post`.
        messages: uint32[workers, words], in the same order on all workers.
        posted: what `post` returned beside this worker's message.
        like: the gradients, or other arrays of their shapes and dtypes.
        state: as in `post`.
        counts: whether this worker's own message is among them. If it came too late, its residual
            keeps what it sent of compressed leaves, for the next step. Uncompressed leaves have no
            residual, so their part is lost: compress all leaves (`is_dense=lambda *_: False`)
            where that matters. With `decay=0` all of it is lost. A gradient that is not finite is
            left out.
        weights: float32[workers], above 0: the mean is sum(weights * vectors) / sum(weights). None:
            all count alike. Residuals stay as they are: each worker's own, without its weight.

    Raises:
        ValueError: messages of another size or dtype.
    """
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
    half = lambda *given: _received(messages, weights, posted, counts, *given)
    return _run(exchange, like, state, half)


def message_words(
    exchange: optax.GradientTransformationExtraArgs, gradients: Any, state: Any
) -> int:
    """The number of words of a worker's message. Shapes and dtypes are enough as arguments.

    Raises:
        ValueError: see `post`.
    """
    make = lambda *given: post(exchange, *given)[0]
    return jax.eval_shape(make, gradients, state).size


def _run(exchange: Any, gradients: Any, state: Any, half: Callable[..., Exchanged]) -> Any:
    """The update of an exchange, of which `half` takes place."""
    if not isinstance(state, ErrorFeedbackState):
        raise ValueError(
            f"exchange={exchange} has a {type(state).__name__} for its state: give an exchange of "
            "one message, such as jaxsparse.top_k(0.01, axis_name=None), without an optimizer "
            "behind or a wrapper around it. (jaxsparse.ef21_sgdm adds up the means of all workers, "
            "and would be wrong for ever without one of them)"
        )
    return exchange.update(gradients, state, exchange_by=half)


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
        f"{reducer.system} {reason}, so that it is no exchange of one message: use a system that "
        "gathers one message from each worker, such as jaxsparse.chunked_top_k() or "
        "jaxsparse.quantized(gather=True)"
    )


def _check(settings: Settings) -> None:
    """Raises ValueError where the halves of an exchange would need collectives, or a later step."""
    if settings.axes.axis_name is not None:
        raise ValueError(
            f"axis_name={settings.axes.axis_name!r} is for workers of one program, but messages "
            "are for workers that each run their own: make the transformation with axis_name=None"
        )
    if settings.is_delayed:
        raise ValueError(
            "delay=1 exchanges the last step's residual, beside this step's gradients. Messages "
            "can be received as late as you like: leave delay out"
        )


def _posted(
    rank: int | Int[Array, ""],
    gradients: Sequence[Pieces],
    dense: Array,
    before: Carried,
    plan: TreePlan,
    settings: Settings,
) -> tuple[UInt32[Array, " words"], tuple[Posted, ...], Exchanged]:
    """The first half of `exchange`, and the result of a step that changes nothing."""
    _check(settings)
    ok, _ = exchange_dense(gradients, dense, settings.axes)
    flag = jnp.where(ok, jnp.float32(0), jnp.float32(jnp.nan))
    words, held = [bits(flag[None]), bits(dense)], []
    rank = jnp.asarray(rank, jnp.int32)
    for gradient, b, bucket in zip(gradients, before.buckets, plan.buckets):
        # A gradient that is not finite must not stay with a worker whose message comes too late.
        begun = begin(gradient, b, ok, settings, bucket)
        message, kept = _checked(bucket.reducer).encode(join(begun.residual), b.reducer, rank)
        words.append(message)
        held.append(Posted(begun, kept))
    info = Info(jnp.int32(0), jnp.int32(0))
    means = [own.begun.residual for own in held]  # nobody reads them
    unchanged = Exchanged(means, dense, before, info, jnp.bool_(True))
    return jnp.concatenate(words), tuple(held), unchanged


def _received(
    messages: UInt32[Array, "workers words"],
    weights: Float[Array, " workers"] | None,
    posted: Sequence[Posted],
    counts: bool,
    gradients: Sequence[Pieces],
    dense: Array,
    before: Carried,
    plan: TreePlan,
    settings: Settings,
) -> Exchanged:
    """The second half of `exchange`."""
    first, rest = _cut(messages, 1 + dense.size)
    first = from_bits(first, jnp.float32)
    shares = None if weights is None else weights / jnp.sum(weights)
    if shares is not None:  # of the dense leaves, whose mean is taken below
        first = first.at[:, 1:].multiply(shares[:, None] * len(messages))
    # Added up as in a collective: over an axis, here that of the messages.
    ok, dense_mean = jax.vmap(
        lambda own: exchange_dense([(own[:1],)], own[1:], Axes(_AXIS)),
        axis_name=_AXIS,
        out_axes=None,
    )(first)
    means: list[Pieces] = []
    after: list[Bucket] = []
    infos: list[Info] = []
    for own, b, bucket in zip(posted, before.buckets, plan.buckets):
        reducer, size = _checked(bucket.reducer), bucket.size
        part, rest = _cut(rest, reducer.words(size))
        vector = join(own.begun.residual)
        if shares is None:
            reduced = deliver(vector, reducer.decode(part, size), own.kept, len(messages))
        else:
            reduced = deliver(vector, _weighted(reducer, shares, part, size), own.kept, 1)
        if not counts:
            reduced = reduced._replace(kept=Kept(vector, None, reduced.kept.state))
        mean, now = finish(own.begun, vector, reduced, ok, settings, bucket)
        means.append(mean)
        after.append(where_ok(ok, now, b))
        infos.append(reduced.info)
    if rest.shape[1]:
        raise _misfit(messages)
    dense_mean, dense_momentum = with_mean_momentum(dense_mean, before.dense_momentum, ok, settings)
    carried = Carried(after, dense_momentum, None)
    return Exchanged(means, dense_mean, carried, total(infos, plan, settings.axes), ok)
