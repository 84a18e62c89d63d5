"""Messages handed around as bytes give, bit for bit, what collectives give."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from steps import AS_USERS
from table import EXCHANGES
from workers import mesh, some

import jaxsparse
from jaxsparse import PerWorker, codecs, contrib, quantize, reducers
from jaxsparse.outer.parallel import run_on_workers
from jaxsparse.reducers.base import Gathered

STEPS, BROKEN, HUGE = 4, 1, 3  # steps; that of a NaN; that of a sum that overflows
OPTIONS = {"momentum": 0.5}  # a power of two, so that a fused multiplication rounds alike


# All reducers of one message.
REDUCERS = {
    "chunked": reducers.ChunkedTopK(2, 64),
    "demo": contrib.DeMo(2, 8),
    "dense": reducers.Dense(),
    "dragonn": reducers.Dragonn(0.03),
    "eighths": reducers.GatheredQuantized(quantize.QSGD(4, 64), seed=1),
    "exact": reducers.TopK(0.4, codec=codecs.Packed()),
    "ternary": reducers.GatheredQuantized(quantize.Format("ternary", 64), "nearest"),
    "top": reducers.TopK(0.03),
}
MIXED = {**dict.fromkeys(REDUCERS, jnp.zeros((24, 25))), "bias": jnp.zeros(25)}
USUAL = {"kernel": jnp.zeros((40, 30)), "bias": jnp.zeros(30, jnp.bfloat16)}


def is_one_message(kind):
    return isinstance(kind, type) and issubclass(kind, Gathered) and kind is not Gathered


# The rows of the table that are of one message, and the others. (ef21_sgdm wraps a reducer.)
ROWS, OTHERS = [], []
for name, system in EXCHANGES.items():
    for variant, case in EXCHANGES[name].cases.items() if name != "ef21_sgdm" else ():
        kind = type(system.reducer(**case.small))
        (ROWS if is_one_message(kind) else OTHERS).append((name, variant))


def drawn(params, workers):
    """Gradients of all workers and steps."""
    rng = np.random.default_rng(0)
    draw = lambda x: rng.normal(size=(STEPS, workers, *x.shape)).astype(np.float32)
    found = {name: draw(x) for name, x in params.items()}
    for own in found.values():
        if own.ndim > 3:
            own[BROKEN, -1, 0, 3] = np.nan
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
    jit = functools.partial(jax.jit, compiler_options=AS_USERS)  # or sums may be fused elsewhere
    step = jit(run_on_workers(step, workers))
    posts = jit(lambda g, state, rank: alone.post(g, state, rank=rank))
    receives = jit(lambda *given: alone.receive(*given))
    state = jaxsparse.shard(together.init(params), workers)
    states = [alone.init(params)] * workers
    words = alone.message_words(params, states[0])
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
    assert jaxsparse.feedback.states_in(state)[0].skipped in (1, 2)


def test_all_reducers_of_one_message_are_here():
    made = vars(reducers) | vars(contrib)
    kinds = {name for name, x in made.items() if is_one_message(x)}
    here = {type(reducer).__name__ for reducer in REDUCERS.values()}
    assert kinds == here, f"add {kinds - here} to REDUCERS"


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3, 4])
def test_messages_of_all_reducers_equal_a_collective(workers):
    check(functools.partial(jaxsparse.partition, REDUCERS), MIXED, workers, **OPTIONS)


def words_of(make, **options):
    tx = make(**{"axis_name": None, **options})
    return tx.message_words(USUAL, jax.eval_shape(tx.init, USUAL))


def made(name, variant):
    return functools.partial(EXCHANGES[name].transformation, **EXCHANGES[name].cases[variant].small)


@pytest.mark.slow
@pytest.mark.parametrize("row", some(ROWS, [("top_k", "packed")]), ids=str)
def test_messages_of_each_system_equal_a_collective(row):
    check(made(*row), USUAL, 3, **OPTIONS)


@pytest.mark.parametrize("row", OTHERS, ids=str)
def test_all_other_systems_are_refused_by_name(row):
    with pytest.raises(ValueError, match=r"^[A-Z]\w+ exchanges in several rounds, or sums"):
        words_of(made(*row))


def test_messages_have_the_size_that_their_words_say():
    dense = lambda path, shape: "bias" in path
    assert (
        words_of(lambda **options: jaxsparse.top_k(0.01, is_dense=dense, **options)) == 1 + 30 + 24
    )
    assert words_of(jaxsparse.dense) == 1 + 1200 + 30
    assert reducers.TopK(0.01).words(1200) == 24
    assert reducers.TopK(0.9).words(1200) == 1200  # as a dense array


def test_what_is_no_exchange_of_one_message_is_refused():
    staged = reducers.Staged((reducers.TopK(0.1), reducers.TopK(0.01)), (5,))
    for make, text in (
        (lambda **options: jaxsparse.exchange(staged, **options), "TopK changes in"),
        (
            lambda **options: jaxsparse.top_k(0.1, **{**options, "axis_name": "data"}),
            "axis_name='da",
        ),
        (lambda **options: jaxsparse.top_k(0.1, delay=1, **options), "delay=1 exchanges the last"),
    ):
        with pytest.raises(ValueError, match=text):
            words_of(make)


def test_messages_that_do_not_fit_are_refused():
    tx = jaxsparse.top_k(0.01, axis_name=None)

    def step(messages):
        state = tx.init(USUAL)
        return tx.receive(messages, tx.post(USUAL, state)[1], USUAL, state)

    for shape, dtype, text in (
        ((1, 54), jnp.uint32, "another size"),
        ((2, 56), jnp.uint32, "another size"),
        ((1, 55), jnp.int32, r"int32\[1, 55\]: give uint32"),
        ((55,), jnp.uint32, r"uint32\[55\]: give"),
        ((0, 55), jnp.uint32, r"uint32\[0, 55\]: give"),
    ):
        with pytest.raises(ValueError, match=text):
            jax.eval_shape(step, jax.ShapeDtypeStruct(shape, dtype))


def jitted(tx):
    """What posts and what receives."""
    receives = jax.jit(tx.receive, static_argnames="counts")
    return jax.jit(tx.post), receives


def test_a_worker_that_is_late_keeps_what_it_sent():
    """Residuals and means add up to what workers had, and the late one gets the others' mean."""
    tx = jaxsparse.partition({"kernel": reducers.TopK(0.03)}, axis_name=None)
    whole = {"kernel": jnp.arange(1200.0).reshape(40, 30), "bias": jnp.zeros(30)}
    own = [jax.tree.map(lambda x, w=w: (w + 1) * x, whole) for w in range(3)]
    state = tx.init(whole)
    posts, receives = jitted(tx)
    posted = [posts(g, state) for g in own]
    messages = jnp.stack([posted[0][0], posted[2][0]])
    after = [receives(messages, posted[w][1], own[w], state, counts=w != 1) for w in range(3)]
    updates = [found["kernel"] for found, _ in after]
    left = [state.residual["kernel"].value[0] for _, state in after]
    np.testing.assert_array_equal(updates[1], updates[0])
    np.testing.assert_array_equal(left[1], own[1]["kernel"])
    assert not left[0].ravel()[-36:].any()
    np.testing.assert_array_equal(2 * updates[0] + sum(left), sum(x["kernel"] for x in own))


def test_what_a_late_worker_sent_fades_as_it_is_sent_and_not_before():
    tx = jaxsparse.top_k(1.0, decay=0.5, axis_name=None, is_dense=lambda *_: False)
    gradient, nothing = {"w": jnp.float32([8, -2])}, {"w": jnp.zeros(2)}
    state = tx.init(gradient)
    posts, receives = jitted(tx)
    for own in (gradient, nothing):
        words, posted = posts(own, state)
        means, after = receives(words[None], posted, own, state)
        _, state = receives(words[None], posted, own, state, counts=False)
    np.testing.assert_array_equal(means["w"], gradient["w"])
    assert not after.residual["w"].value.any()


BOTH = ("residual", "momentum")


@pytest.mark.parametrize("broken", some([jnp.nan, jnp.inf], [jnp.nan]))
def test_a_late_worker_leaves_out_a_gradient_that_is_not_finite(broken):
    options = {"axis_name": None, "momentum": 0.5, "decay": 0.5}
    tx = jaxsparse.partition({"kernel": reducers.TopK(0.03)}, **options)
    usual = {"kernel": jnp.arange(1200.0).reshape(40, 30)}
    own = [usual, jax.tree.map(lambda x: x.at[0, 0].set(broken), usual)]
    _, state = jax.jit(tx.update)(usual, tx.init(usual))
    posts, receives = jitted(tx)
    posted = [posts(g, state) for g in own]
    _, after = receives(posted[0][0][None], posted[1][1], own[1], state, counts=False)
    arrays = lambda s: {f: np.asarray(getattr(s, f)["kernel"].value)[0] for f in BOTH}
    was, now = arrays(state), arrays(after)
    u = 0.5 * was["momentum"] + usual["kernel"].at[0, 0].set(0)
    np.testing.assert_array_equal(now["momentum"], u)
    # What it owes fades when it is sent, and not before.
    np.testing.assert_allclose(now["residual"], was["residual"] + u / 0.5, rtol=1e-6)
    assert int(after.skipped) == 0  # the others' step counts


def test_a_late_worker_does_not_owe_the_rounding_of_others():
    tx = jaxsparse.partition({"kernel": reducers.TopK(0.1)}, axis_name=None)
    usual = {"kernel": (jnp.arange(1200.0) / 7).reshape(40, 30).astype(jnp.bfloat16)}
    state = tx.init(usual)
    posts, receives = jitted(tx)
    posted = [posts(jax.tree.map(lambda x, s=s: x * s, usual), state) for s in (1, 5, 3)]
    others = jnp.stack([words for words, _ in posted[:2]])  # their mean does not fit bfloat16
    _, after = receives(others, posted[2][1], usual, state, counts=False)
    own = 3 * np.asarray(usual["kernel"], np.float32)
    found = np.asarray(after.residual["kernel"].value)[0]
    np.testing.assert_array_equal(found, np.asarray(jnp.asarray(own, jnp.bfloat16), np.float32))


@pytest.mark.slow
def test_a_worker_of_many_devices_sends_the_same_words():
    """Messages are in the order of the leaves, not of a mesh."""
    devices = mesh(4, names=("model",))
    tx = jaxsparse.chunked_top_k(2, 64, axis_name=None)
    gradients = drawn(USUAL, 1)[0]["kernel"][0]

    @jax.jit
    def step(gradients):
        state = tx.init(gradients)
        words, posted = tx.post(gradients, state)
        return words, tx.receive(words[None], posted, gradients, state)[0]

    over = jax.sharding.NamedSharding(devices, jax.sharding.PartitionSpec("model"))
    assert bits(step({"kernel": jax.device_put(gradients, over)})) == bits(
        step({"kernel": gradients})
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", some(["top_k", "quantized", "dense"], ["top_k"]))
def test_a_weight_of_two_is_a_message_twice(name):
    make = {
        "quantized": functools.partial(jaxsparse.quantized, gather=True),
        "top_k": functools.partial(jaxsparse.top_k, 0.3),
        "dense": jaxsparse.dense,
    }[name]
    tx = make(axis_name=None)
    own = [jax.tree.map(lambda x, w=w: x[w], drawn(USUAL, 2)[0]) for w in range(2)]
    state = tx.init(own[0])
    posts, receives = jitted(tx)
    posted = [posts(g, state) for g in own]
    words = [message for message, _ in posted]
    given = (posted[0][1], own[0], state)
    weighted, after = receives(jnp.stack(words), *given, weights=jnp.float32([2.0, 1.0]))
    twice, expected = receives(jnp.stack([words[0], *words]), *given)
    for a, b in zip(jax.tree.leaves(weighted), jax.tree.leaves(twice)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    # What a worker keeps is its own, without its weight.
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(expected)):
        np.testing.assert_array_equal(a, b)


def test_there_is_a_weight_for_each_message():
    tx = jaxsparse.chunked_top_k(2, 64, axis_name=None)
    own = jax.tree.map(lambda x: x[0], drawn(USUAL, 2)[0])
    state = tx.init(own)
    posts, receives = jitted(tx)
    words, posted = posts(own, state)
    given = (words[None], posted, own, state)
    with pytest.raises(ValueError, match=r"weights have shape \(2,\), but there are 1 messages"):
        receives(*given, weights=jnp.ones(2))


def test_weights_that_give_no_mean_skip_the_step():
    tx = jaxsparse.chunked_top_k(2, 64, axis_name=None)
    own = jax.tree.map(lambda x: x[0], drawn(USUAL, 2)[0])
    state = tx.init(own)
    posts, receives = jitted(tx)
    words, posted = posts(own, state)
    _, counted = receives(jnp.stack([words] * 2), posted, own, state, weights=jnp.float32([0, 4]))
    assert int(counted.skipped) == 0
    for weights in ([2e38, 2e38], [-1, 2], [0, 0], [np.nan, 1]):
        given = jnp.stack([words] * 2), posted, own, state
        updates, after = receives(*given, weights=jnp.float32(weights))
        assert int(after.skipped) == 1
        assert not any(x.any() for x in jax.tree.leaves(updates))
        for name, left in after.residual.items():
            np.testing.assert_array_equal(left.value[0], own[name])
