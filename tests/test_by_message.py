"""Messages handed around as bytes give, bit for bit, what collectives give."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from workers import some

import jaxsparse
from jaxsparse import PerWorker, Stages, codecs, systems
from jaxsparse.feedback.by_message import message_words, post, receive
from jaxsparse.reducers.one_message import OneMessage
from jaxsparse.systems import SYSTEMS

STEPS, BROKEN, HUGE = 4, 1, 3  # steps; that of a NaN; that of a sum that overflows
OPTIONS = {"momentum": 0.5}  # powers of two: a fused multiplication rounds alike


def mixed(**options):
    """All reducers of one message in one tree, with an uncompressed leaf."""
    reducers = {
        "chunked": systems.ChunkedTopK(2, 64),
        "demo": systems.DeMo(2, 8),
        "dense": systems.Dense(),
        "dragonn": systems.Dragonn(0.03),
        "exact": systems.TopK(0.4, codec=codecs.Packed()),
        "senders": systems.ChunkedTopK(2, 64, aggregate="mean_of_senders", clip="median"),
        "top": systems.TopK(0.03),
    }
    assert {name for name in dir(systems) if is_one_message(getattr(systems, name))} == {
        type(reducer).__name__ for reducer in reducers.values()
    }
    return jaxsparse.partition(reducers, **options)


MIXED = dict.fromkeys(
    ("chunked", "demo", "dense", "dragonn", "exact", "senders", "top"), jnp.zeros((24, 25))
)
MIXED["bias"] = jnp.zeros(25)
USUAL = {"kernel": jnp.zeros((40, 30)), "bias": jnp.zeros(30, jnp.bfloat16)}


def is_one_message(kind):
    return isinstance(kind, type) and issubclass(kind, OneMessage) and kind is not OneMessage


def cases(name):
    """The transformations of a row of the table."""
    row = SYSTEMS[name]
    for case in row.cases.values():
        yield functools.partial(row.transformation, **case.small)


def drawn(params, workers):
    """Gradients of all workers and steps."""
    rng = np.random.default_rng(0)
    draw = lambda x: rng.normal(size=(STEPS, workers, *x.shape)).astype(np.float32)
    found = {name: draw(x) for name, x in params.items()}
    for own in found.values():
        own[BROKEN, -1].flat[3] = np.nan
        if own.ndim > 3:
            own[HUGE, :2, 0, 7] = 3e38
    return [
        {name: jnp.asarray(x[t], params[name].dtype) for name, x in found.items()}
        for t in range(STEPS)
    ]


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def row(state, worker):
    """What one worker has of the state of all."""
    is_own = lambda x: isinstance(x, PerWorker)
    cut = lambda x: PerWorker(x.value[worker][None]) if is_own(x) else x
    return jax.tree.map(cut, state, is_leaf=is_own)


def check(make, params, workers, **options):
    gradients = drawn(params, workers)
    together, alone = make(axis_name="data", **options), make(axis_name=None, **options)
    step = lambda state, own: together.update(jax.tree.map(lambda x: x[0], own), state)[::-1]
    step = jaxsparse.data_parallel(step, workers, check=False)
    posts = jax.jit(lambda g, state, rank: post(alone, g, state, rank=rank))
    receives = jax.jit(lambda *given: receive(alone, *given))
    state = jaxsparse.shard(together.init(params), workers)
    states = [alone.init(params)] * workers
    words = message_words(alone, params, states[0])
    for t in range(STEPS):
        state, updates = step(state, gradients[t])
        own = [jax.tree.map(lambda x, w=w: x[w], gradients[t]) for w in range(workers)]
        posted = [posts(own[w], states[w], w) for w in range(workers)]
        sent = [np.asarray(message).tobytes() for message, _ in posted]
        assert {len(message) for message in sent} == {4 * words}
        read = np.stack([np.frombuffer(message, np.uint32) for message in sent])
        for w in range(workers):
            found, states[w] = receives(read, posted[w][1], own[w], states[w])
            assert bits(found) == bits(updates), (t, w)
            assert bits(states[w]) == bits(row(state, w)), (t, w)
    assert jaxsparse.feedback.states_in(state)[0].skipped == 1


@pytest.mark.parametrize("workers", some([1, 3, 4], [3]))
def test_messages_of_all_reducers_equal_a_collective(workers):
    check(mixed, MIXED, workers, **OPTIONS)
