"""A whole exchange in two halves, for workers that hand messages around without a collective.

    words, posted = post(tx, gradients, state)                                    # on each worker
    updates, state = receive(tx, messages, posted, gradients, state)              # on each, too

`words` is all that a worker sends: a flag that its gradients are finite, its uncompressed leaves,
and a message of each bucket. Files, queues or an object store may carry it. All that receive the
same messages in the same order get the same updates, bit for bit, and those of a collective.

Messages are of one size, which `message_words` tells. A receiver must know that they are of the
same transformation, tree and step, because words do not say so.

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
from jax.extend.core import get_opaque_trace_state
from jaxtyping import Array, Float, Int, UInt32

from jaxsparse import codecs
from jaxsparse.arrays.layout import Pieces
from jaxsparse.comm.wire import Axes
from jaxsparse.feedback.exchange import (
    Bucket,
    Carried,
    Exchanged,
    Settings,
    TreePlan,
    agreed,
    begin,
    finish,
    joined,
    select,
    total,
    with_mean_momentum,
)
from jaxsparse.reducers.base import Gathered, Info, Kept, Sums, deliver
from jaxsparse.reducers.stages import Staged

_AXIS = "messages"  # the axis over which received messages are added up


class Posted(NamedTuple):
    """What stays with a worker that has posted, for one bucket."""

    vector: Pieces  # what it exchanges: its residual plus what this step adds
    momentum: Pieces | None
    kept: Kept  # what it keeps if its message counts


def post(
    tx: optax.GradientTransformation,
    updates: Any,
    state: Any,
    params: Any = None,
    *,
    rank: int | Int[Array, ""] = 0,
) -> tuple[UInt32[Array, " words"], tuple[tuple[Posted, ...], ...]]:
    """This worker's message of a step, and what stays with it until messages arrive.

    Args:
        tx: an Optax transformation with exchanges of this library in it, made with
            `axis_name=None`, such as `optax.chain(jaxsparse.top_k(0.01, axis_name=None),
            optax.sgd(0.1))`.
        updates: this worker's gradients, or other updates that `tx` takes.
        state: the state of `tx`.
        params: the parameters, if `tx` takes them.
        rank: a number of this worker's own. Draws that differ between workers use it.

    Returns:
        The message, uint32[words], and for each exchange what each bucket's worker holds.

    Raises:
        ValueError: `tx` exchanges nothing, or not in one message: a system of several rounds, a
            setting that changes in stages, a delay, or an axis of workers. Or it has
            its exchange in a branch, as `optax.MultiSteps` and `optax.apply_if_finite` do.
    """
    words: list[Array] = []
    held: list[tuple[Posted, ...]] = []
    trace = get_opaque_trace_state()

    def half(*given: Any) -> Exchanged:
        if get_opaque_trace_state() != trace:
            raise ValueError(
                f"tx={tx} has its exchange in a function that JAX traces by itself, such as a "
                "branch of jax.lax.cond (optax.MultiSteps, optax.apply_if_finite). Its message "
                "can't leave that: leave out what stands around the exchange. Values that are not "
                "finite are left out by the exchange itself"
            )
        message, posted, unchanged = _posted(rank, *given)
        words.append(message)
        held.append(posted)
        return unchanged

    _update(tx, updates, state, params, half)
    if not words:
        raise ValueError(
            f"tx={tx} exchanges nothing: give it an exchange of this library, such as "
            "jaxsparse.top_k(0.01, axis_name=None)"
        )
    return jnp.concatenate(words), tuple(held)


def receive(
    tx: optax.GradientTransformation,
    messages: UInt32[Array, "workers words"],
    posted: Sequence[Sequence[Posted]],
    updates: Any,
    state: Any,
    params: Any = None,
    *,
    counts: bool = True,
    weights: Float[Array, " workers"] | None = None,
) -> tuple[Any, Any]:
    """The updates and the state of a step, from the messages of all workers that count.

    If any message says that its worker's gradients are not finite, the step is skipped, as in
    `jaxsparse.error_feedback`.

    Args:
        tx: as in `post`.
        messages: uint32[workers, words], in the same order on all workers.
        posted: what `post` returned beside this worker's message.
        updates: as in `post`.
        state: as in `post`.
        params: as in `post`.
        counts: whether this worker's own message is among them. If it came too late, its residual
            keeps what it sent of compressed leaves, for the next step. Uncompressed leaves have no
            residual, so their part is lost: compress all leaves (`is_dense=lambda *_: False`)
            where that matters. With `decay=0` all of it is lost. A gradient that is not finite is
            left out.
        weights: float32[workers], above 0: the mean is sum(weights * vectors) / sum(weights). None:
            all count alike. Residuals stay as they are: each worker's own, without its weight.

    Raises:
        ValueError: messages of another size or dtype, `counts=False` for a system whose means
            must be those of all workers (`jaxsparse.ef21_sgdm`).
    """
    if not counts:
        needs_all = lambda node: getattr(node, "needs_all_messages", False)
        for node in filter(needs_all, jax.tree.leaves(state, is_leaf=needs_all)):
            raise ValueError(
                f"counts=False, but {type(node).__name__} adds up the means of all workers, and "
                "would be wrong for ever without this one's message: wait for it"
            )
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
    exchanges, rest = iter(posted), messages

    def half(*given: Any) -> Exchanged:
        nonlocal rest
        done, rest = _received(rest, weights, next(exchanges), counts, *given)
        return done

    received = _update(tx, updates, state, params, half)
    if rest.shape[1]:
        raise _misfit(messages)
    return received


def message_words(
    tx: optax.GradientTransformation, updates: Any, state: Any, params: Any = None
) -> int:
    """The number of words of a worker's message. Shapes and dtypes are enough as arguments.

    Raises:
        ValueError: see `post`.
    """
    make = lambda *given: post(tx, *given)[0]
    return jax.eval_shape(make, updates, state, params).size


def _update(tx: Any, updates: Any, state: Any, params: Any, half: Callable[..., Exchanged]) -> Any:
    """`tx.update`, whose exchange is `half`."""
    if isinstance(tx, optax.GradientTransformation):  # and no optax.MultiSteps
        tx = optax.with_extra_args_support(tx)
    return tx.update(updates, state, params, exchange_by=half)


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
        f"messages have another size than those of this transformation and tree ({messages.shape} "
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
    ok, _ = agreed(gradients, dense, settings.axes)
    flag = jnp.where(ok, jnp.float32(0), jnp.float32(jnp.nan))
    words, held = [codecs.bits(flag[None]), codecs.bits(dense)], []
    for gradient, b, reducer, zeros in zip(
        gradients, before.buckets, plan.reducers, plan.needs_zeros
    ):
        # A gradient that is not finite must not stay with a worker whose message comes too late.
        x, kept = begin(gradient, b, ok, settings, zeros)
        rank = jnp.asarray(rank, jnp.int32)
        message, own = _checked(reducer).encode(joined(x), b.reducer, rank)
        words.append(message)
        held.append(Posted(x, kept, own))
    info = Info(jnp.int32(0), jnp.int32(0))
    unchanged = Exchanged([own.vector for own in held], dense, before, info, jnp.bool_(True))
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
) -> tuple[Exchanged, UInt32[Array, "workers rest"]]:
    """The second half of `exchange`, and the words of messages behind it."""
    first, rest = _cut(messages, 1 + dense.size)
    first = codecs.from_bits(first, jnp.float32)
    shares = None if weights is None else weights / jnp.sum(weights)
    if shares is not None:  # of the dense leaves, whose mean is taken below
        first = first.at[:, 1:].multiply(shares[:, None] * len(messages))
    # Added up as in a collective: over an axis, here that of the messages.
    ok, dense_mean = jax.vmap(
        lambda own: agreed([(own[:1],)], own[1:], Axes(_AXIS)), axis_name=_AXIS, out_axes=None
    )(first)
    means: list[Pieces] = []
    after: list[Bucket] = []
    infos: list[Info] = []
    for own, b, reducer, zeros, size in zip(
        posted, before.buckets, plan.reducers, plan.needs_zeros, plan.sizes
    ):
        reducer = _checked(reducer)
        part, rest = _cut(rest, reducer.words(size))
        vector = joined(own.vector)
        if shares is None:
            reduced = deliver(vector, reducer.decode(part, size), own.kept, len(messages))
        else:
            reduced = deliver(vector, _weighted(reducer, shares, part, size), own.kept, 1)
        if not counts:
            reduced = reduced._replace(kept=Kept(vector, None, reduced.kept.state))
        begun = b._replace(momentum=own.momentum)
        mean, now = finish(own.vector, vector, begun, reduced, ok, settings, zeros)
        means.append(mean)
        after.append(select(ok, now, b))
        infos.append(reduced.info)
    dense_mean, dense_momentum = with_mean_momentum(dense_mean, before.dense_momentum, ok, settings)
    carried = Carried(after, dense_momentum, None)
    return Exchanged(means, dense_mean, carried, total(infos, plan, settings.axes), ok), rest
