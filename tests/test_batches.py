"""What a call splits over the workers, and what it refuses to give whole in silence."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P
from workers import mesh, some

import jaxsparse

RNG = np.random.default_rng(3)
# One row a worker: its losses would broadcast against the weights of all workers.
X = RNG.normal(size=(3, 5, 2)).astype(np.float32)
WEIGHTS = RNG.uniform(size=(3, 5)).astype(np.float32)
W = np.float32([0.5, -2.0])


def loss(w, x, weights, scale=2.0):
    return jnp.mean(jnp.sin(x @ w) * weights) * scale


def of_tree(w, x, extra):
    return loss(w, x, extra["weights"], extra["scale"])


PAIR = {"scale": np.float32(2), "weights": WEIGHTS}
ELSEWHERE = {
    "by name": (loss, (), {"weights": WEIGHTS}, {}, r"argument weights of shape \(3, 5\)"),
    "by name, with numbers": (loss, (), {"weights": WEIGHTS}, {"batch_argnums": 1}, "never split"),
    "in a tree by name": (of_tree, (), {"extra": PAIR}, {}, r"argument extra\['weights'\] of"),
    "by position": (loss, (WEIGHTS,), {}, {}, r"argument 2 of .* batch_argnums=\(1, 2\) if it"),
    "beside a scalar": (of_tree, (PAIR,), {}, {}, r"argument 2\['weights'\] of shape \(3, 5\) has"),
    "a module by name": (
        loss,
        (WEIGHTS[0],),
        {"scale": nnx.Linear(2, 2, rngs=nnx.Rngs(0))},
        {},
        "argument scale has a flax.nnx Linear",
    ),
}


@pytest.mark.parametrize("name", ELSEWHERE)
@pytest.mark.parametrize("where", [{"workers": 3}, {"mesh": mesh(3)}], ids=["simulated", "mesh"])
def test_rows_of_the_batch_that_would_go_whole_are_refused(name, where):
    fun, args, named, options, text = ELSEWHERE[name]
    with pytest.raises(ValueError, match=text):
        jaxsparse.value_and_grad(fun, **options, **where)(W, X, *args, **named)


WHERE = [{"workers": 3}, {"mesh": mesh(3)}]


@pytest.mark.parametrize("where", some(WHERE, WHERE[1:]), ids=["simulated", "mesh"])
def test_what_the_messages_say_gives_the_gradient(where):
    both = jaxsparse.value_and_grad(loss, batch_argnums=(1, 2), **where)
    values, grads = both(W, X, WEIGHTS, scale=jnp.float32(3))
    value, slope = jax.jit(jax.value_and_grad(loss))(W, X, WEIGHTS, 3.0)
    np.testing.assert_allclose(values.mean(), value, rtol=1e-5)
    np.testing.assert_allclose(grads.mean(0), slope, rtol=1e-5)
    # One that each worker is to see whole, with as many rows by chance.
    table = np.float32([[1, 2, 3, 4, 5], [6, 7, 8, 9, 1], [2, 3, 4, 5, 6]])
    whole = lambda w, x, table: loss(w, x, table[1][None])
    grads = jax.jit(jaxsparse.grad(whole, batch_argnums=1, **where))(W, X, table)
    np.testing.assert_allclose(grads.mean(0), jax.jit(jax.grad(whole))(W, X, table), rtol=1e-5)


def test_parameters_may_have_as_many_rows_as_the_batch():
    """So may the second ones, if both are differentiated."""
    square = RNG.normal(size=(4, 4)).astype(np.float32)
    bias = np.ones((4, 4), np.float32)
    fun = lambda w, x, bias, scale: jnp.mean(jnp.square(x @ w + bias[:2])) * scale
    found = jaxsparse.grad(fun, argnums=(0, 2), workers=2)(square, square.T, bias, scale=1.0)
    wanted = [jax.grad(fun, (0, 2))(square, x, bias, 1.0) for x in np.split(square.T, 2)]
    for rows, own in zip(found, zip(*wanted)):
        np.testing.assert_allclose(rows, np.stack(own), rtol=1e-5)
    # And some of the frozen ones. All would be a batch, and so would one if workers had a row each.
    frozen = {"table": np.float32([[2], [5]]), "bias": square[0], "scale": np.float32(3)}
    tuned = lambda w, x, frozen: jnp.mean(x @ w + frozen["bias"][None]) * frozen["scale"]
    found = jaxsparse.grad(tuned, workers=2)(square, square.T, frozen)
    wanted = jax.grad(tuned)(square, square.T, frozen)
    np.testing.assert_allclose(found.mean(0), wanted, rtol=1e-5)


NOTHING = {
    "no rows": (X[:0], {}, r"argument 1 is a batch of shape \(0, 5, 2\), which has no rows: skip"),
    "no leaves": (None, {}, r"argument 1 has no arrays, so nothing is split.*batch_argnums=\(\)"),
    "no leaves in two": ({}, {"batch_argnums": (1, 2)}, "argument 1, 2 has no arrays"),
}


@pytest.mark.parametrize("name", NOTHING)
def test_batches_of_nothing_are_refused(name):
    batch, options, text = NOTHING[name]
    with pytest.raises(ValueError, match=text):
        jaxsparse.grad(lambda w, x, y: w.sum(), workers=3, **options)(W, batch, ())


@pytest.mark.parametrize("kind", ["value_and_grad", "LocalSteps"])
def test_arrays_of_a_batch_have_as_many_rows(kind):
    """Weights of classes would be cut, and an index is clamped."""
    start = np.ones(2, "f")
    batch = {"x": np.ones((6, 2), "f"), "weights": np.arange(3, dtype="f")}
    loss = lambda w, batch: jnp.mean(batch["x"] @ w * batch["weights"][0])
    run = jaxsparse.grad(loss, workers=3)
    if kind == "LocalSteps":
        step = lambda state, batch: ((state[0] - jax.grad(loss)(state[0], batch),), 0.0)
        train = jaxsparse.LocalSteps(step, jaxsparse.dense(), optax.sgd(1.0), mesh(3))
        state = train.init((start,))
        run = lambda _, batch: train(state, batch, 0)
    with pytest.raises(
        ValueError, match=r"\['weights'\] has 3 rows, and argument 1\['x'\] 6: each"
    ):
        run(start, batch)
    keys = {"x": batch["x"], "weights": jax.random.split(jax.random.key(0), 3)}
    drawn = lambda w, batch: jnp.mean(batch["x"] @ w) * jax.random.normal(batch["weights"][0])
    assert jaxsparse.grad(drawn, workers=3)(start, keys).shape == (3, 2)


def test_a_batch_by_name_is_refused():
    with pytest.raises(ValueError, match=r"has 1 positional.* or gets it by name, has to take it"):
        jaxsparse.grad(loss, workers=3)(W, x=X, weights=WEIGHTS)


@pytest.mark.parametrize("where", [{"workers": 3}, {"mesh": mesh(3)}], ids=["simulated", "mesh"])
def test_a_loss_that_closes_over_rows_is_refused(where):
    """Of several rows a worker, JAX tells that shapes differ."""
    closed = lambda weights: lambda w, x: loss(w, x, weights)
    text = r"closes over an array of shape \(3, 5\), which has as many rows as the batch"
    with pytest.raises(ValueError, match=text):
        jaxsparse.grad(closed(WEIGHTS), **where)(W, X)
    kept = jnp.asarray(WEIGHTS)
    inner = jax.jit(lambda w, x: loss(w, x, kept))
    with pytest.raises(ValueError, match=text):
        jaxsparse.grad(lambda w, x: 2 * inner(w, x), **where)(W, X)
    inside = lambda w, x, weights: jaxsparse.grad(closed(2 * weights), **where)(w, x)
    with pytest.raises(ValueError, match=text):
        jax.jit(inside)(W, X, WEIGHTS)
    table = lambda w, x: loss(w, x, WEIGHTS[1:2])
    grads = jaxsparse.grad(table, batch_argnums=1, **where)(W, X)
    np.testing.assert_allclose(grads.mean(0), jax.grad(table)(W, X), rtol=1e-5)


def test_a_loss_closes_over_arrays_of_the_step():
    """Frozen parameters and a scale, traced or not, on the mesh of the workers."""
    where = mesh(3)
    put = lambda x, *spec: jax.device_put(x, NamedSharding(where, P(*spec)))
    start, inputs, held = put(W), put(X, "data"), put(np.float32([0.3, 0.7]))

    def of(scale, w, x):
        return scale[0] * jnp.mean(jnp.sin(x @ (w * scale)) ** 2) + jnp.sum(
            jnp.where(w > 0, held, w)
        )

    expected = jax.grad(of, 1)(held, W, X)
    uses = lambda scale: lambda w, x: of(scale, w, x) + 0 * jax.lax.pmean(w.sum(), "data")
    for loss in (lambda scale: lambda w, x: of(scale, w, x), uses):
        grads = jax.jit(lambda w, x, scale, f=loss: jaxsparse.grad(f(scale))(w, x))
        found = grads(start, inputs, held)
        np.testing.assert_allclose(found.mean(0), expected, rtol=1e-5, atol=1e-6)
    step = lambda state, x: ((state[0] - jax.grad(of, 1)(held, state[0], x),), 0.0)
    train = jaxsparse.LocalSteps(step, jaxsparse.dense(), optax.sgd(1.0), where, every=1)
    state, _ = train((start,), inputs)
    np.testing.assert_allclose(state.params, W - expected, rtol=1e-5, atol=1e-6)


def test_steps_of_local_steps_that_get_rows_whole_are_refused():
    """Closed over, or as a further argument of a later call."""
    moved = lambda w, x, weights: w - 0.1 * jax.grad(loss)(w, x, weights)
    run = lambda step: jaxsparse.LocalSteps(step, jaxsparse.dense(), optax.sgd(1.0), 3, every=2)
    train = run(lambda state, x: ((moved(state[0], x, WEIGHTS),), 0.0))
    with pytest.raises(ValueError, match=r"shape \(3, 5\).*give it another shape, as x\[None\]"):
        train((W,), X)
    train = run(lambda state, x, weights: ((moved(state[0], x, weights),), 0.0))
    state, _ = train((W,), X, None, WEIGHTS[1:2])
    with pytest.raises(ValueError, match=r"rest\[0\] of shape \(3, 5\) has as many rows"):
        train(state, X, None, WEIGHTS)


def test_flags_and_names_stay_pythons():
    """As under `jax.value_and_grad`, whose place it takes."""

    def branching(w, x, deterministic, *, mode, scale):
        kept = x if deterministic else -x
        return {"mean": jnp.mean, "sum": jnp.sum}[mode](jnp.sin(kept @ w)) * scale

    given = (W, X, True), {"mode": "sum", "scale": 3}
    both = jaxsparse.value_and_grad(branching, workers=3)
    values, grads = jax.jit(lambda w, x: both(w, x, np.bool_(True), **given[1]))(W, X)
    value, slope = jax.value_and_grad(branching)(*given[0], **given[1])
    np.testing.assert_allclose(values.sum(), value, rtol=1e-5)
    np.testing.assert_allclose(grads.sum(0), slope, rtol=1e-5)
    assert jaxsparse.value_and_grad(lambda w, x: w * x.mean(), workers=3)(2.0, X)[0].shape == (3,)
    with pytest.raises(ValueError, match="argnums='params' must be the number of an argument"):
        jaxsparse.grad(loss, argnums="params", workers=3)(W, X)
    with pytest.raises(ValueError, match=r"argnums=\(\) differentiates nothing: .* argnums=0"):
        jaxsparse.value_and_grad(loss, argnums=())


def test_flags_and_numbers_beside_arrays_stay_pythons():
    """By position and by name, in trees of any depth."""

    def branching(w, x, config, *, last):
        kept = x[:, : config["rows"][0]] if config["on"] and config["mode"] == "a" else None
        return jnp.sum(jnp.sin(kept @ w) * config["scale"]) * last[0] ** last[1]

    def config(scale):
        return {"rows": [2, None], "on": True, "mode": "a", "scale": scale}

    both = jaxsparse.value_and_grad(branching, workers=3)
    values, grads = jax.jit(lambda w, x, s: both(w, x, config(s), last=(s, 2)))(W, X, 3.0)
    value, slope = jax.value_and_grad(branching)(W, X, config(jnp.float32(3)), last=(3.0, 2))
    np.testing.assert_allclose(values.sum(), value, rtol=1e-5)
    np.testing.assert_allclose(grads.sum(0), slope, rtol=1e-5)
    with pytest.raises(ValueError, match=r"argument\[0\]\[2\]\['act'\] is .* which is no array"):
        both(W, X, {"act": jnp.tanh, "scale": W}, last=(1, 2))


def test_a_key_in_the_place_of_the_batch_is_told_where_batches_stand():
    fun = lambda w, key, x: jnp.sum(x @ w)
    with pytest.raises(ValueError, match=r"argument 1 is a scalar .*another number as batch_arg"):
        jaxsparse.grad(fun, workers=3)(W, jax.random.key(0), X)
    assert jaxsparse.grad(fun, workers=3, batch_argnums=2)(W, jax.random.key(0), X).shape == (3, 2)


def test_auxiliary_output_that_is_no_array_is_told():
    fun = lambda w, x: (jnp.sum(x @ w), {"loss": w, "name": "a"})
    with pytest.raises(ValueError, match=r"auxiliary output\['name'\] is 'a' of type str, which"):
        jaxsparse.grad(fun, has_aux=True, workers=3)(W, X)


@pytest.mark.slow
def test_modules_of_equinox_may_go_whole():
    """With their activation functions, by position or by name."""
    frozen = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))
    over = lambda x, net: jax.vmap(jax.vmap(net))(x)
    fun = lambda w, x, net, last: jnp.mean(jnp.sin(over(over(x, net), last) @ w))
    found = jaxsparse.grad(fun, workers=3)(W, X, frozen, last=frozen)
    np.testing.assert_allclose(found.mean(0), jax.grad(fun)(W, X, frozen, frozen), rtol=1e-5)


def test_workers_may_draw_their_own():
    draw = lambda w, key: jnp.sum(w) * jnp.float32(1 + jax.lax.axis_index("data"))
    found = jaxsparse.grad(draw, workers=3, batch_argnums=())(W, jax.random.key(0))
    assert found.tolist() == [[1, 1], [2, 2], [3, 3]]


def test_local_steps_refuse_the_same():
    """A further argument goes whole to each worker."""
    step = lambda state, batch, *rest: ((state[0] - batch[0].mean() * rest[0].mean(),), None)
    make = lambda: jaxsparse.LocalSteps(step, jaxsparse.dense(), optax.sgd(1.0), 3)
    train = make()
    state = train.init((jnp.zeros(2),))
    with pytest.raises(ValueError, match=r"rest\[0\] of shape \(3, 5\) has as many rows as the"):
        train(state, X, None, WEIGHTS)
    with pytest.raises(ValueError, match=r"rest\[1\]\['weights'\] of shape"):
        train(state, X, None, WEIGHTS[0], PAIR)
    with pytest.raises(ValueError, match=r"shape \(0, 5, 2\), which has no rows"):
        train(state, X[:0], None, WEIGHTS[0])
    state, _ = train(state, X, None, WEIGHTS[None])
    wanted = -X.mean() * WEIGHTS.mean()
    np.testing.assert_allclose(state.params[0], np.full(2, wanted), rtol=1e-5)
