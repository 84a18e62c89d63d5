"""Random-k: workers draw alike, and each index gets its turn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from workers import feedback_loop, mesh, rows

from jaxsparse import codecs, random_k, shard, traffic
from jaxsparse.outer.parallel import run_on_workers
from jaxsparse.quantize import Format
from jaxsparse.reducers import PowerSGD, Quantized, TopK
from jaxsparse.reducers.random_k import RandomK

SIZE, STEPS = 61, 12


def run(reducer, gradients, way="vmap"):
    x, reduced = feedback_loop(reducer, len(gradients), way)(gradients.astype(np.float32))
    return np.asarray(x, np.float64), jax.tree.map(np.asarray, reduced)


def integers(workers, seed=0, steps=STEPS, size=SIZE):
    """Multiples of W other than 0, so that means are exact."""
    rng = np.random.default_rng(seed)
    shape = (workers, steps, size)
    return workers * rng.integers(1, 9, shape) * rng.choice([-1, 1], shape)


@pytest.mark.parametrize(
    ("workers", "way"), rows([(8, "shard_map")], [(1, "vmap"), (3, "shard_map_unchecked")])
)
def test_what_is_drawn_is_delivered_and_the_rest_kept(workers, way):
    k = 7  # 0.1 of 61, rounded up
    for seed in range(3):
        x, reduced = run(RandomK(0.1), integers(workers, seed), way)
        for field in (reduced.mean, reduced.sent, reduced.state.draws):
            np.testing.assert_array_equal(field, np.broadcast_to(field[:1], field.shape))
        sent = reduced.sent
        np.testing.assert_array_equal(sent.sum(axis=-1), k)
        np.testing.assert_array_equal(reduced.residual, np.where(sent, 0, x))
        expected = np.where(sent[0], x.mean(axis=0), 0)
        np.testing.assert_array_equal(reduced.mean[0], expected)
        np.testing.assert_array_equal(
            workers * reduced.mean[0].astype(np.float64) + reduced.residual.sum(axis=0),
            x.sum(axis=0),
        )
        np.testing.assert_array_equal(reduced.state.draws[0], np.arange(1, STEPS + 1))
        np.testing.assert_array_equal(reduced.info.delivered[0], (expected != 0).sum(axis=-1))


@pytest.mark.slow
def test_every_index_gets_its_turn():
    steps, k = 2000, 7
    _, reduced = run(RandomK(0.1), integers(1, steps=steps))
    drawn = reduced.sent[0]
    p = k / SIZE
    turns = drawn.sum(axis=0)
    assert np.abs(turns - p * steps).max() < 5 * (p * (1 - p) * steps) ** 0.5
    # Draws are fresh: two steps, and neighbours, coincide as often as chance has it.
    after = (drawn[1:] & drawn[:-1]).sum() / steps
    beside = (drawn[:, 1:] & drawn[:, :-1]).sum() / steps
    pairs = (SIZE - 1) * p * (k - 1) / (SIZE - 1)
    assert after == pytest.approx(k * p, abs=5 * (k * p / steps) ** 0.5)
    assert beside == pytest.approx(pairs, abs=5 * (pairs / steps) ** 0.5)
    other = run(RandomK(0.1, seed=1), integers(1, steps=steps))[1].sent[0]
    assert (drawn & other).sum() / steps == pytest.approx(k * p, abs=5 * (k * p / steps) ** 0.5)


def test_sums_that_overflow_are_kept():
    x = np.ones((3, 1, 20), np.float32)
    x[:, 0, 4] = 3e38
    _, reduced = run(RandomK(1.0), x)
    expected = np.ones(20)
    expected[4] = 0
    np.testing.assert_allclose(reduced.mean[0, 0], expected, rtol=1e-6)
    np.testing.assert_array_equal(reduced.residual[:, 0, 4], x[:, 0, 4])
    assert not reduced.sent[:, 0, 4].any()


def lost_of(x, reduced):
    """The largest loss of an exchange, as a share of what went in."""
    workers = len(x)
    kept = workers * reduced.mean[0].astype(np.float64) + reduced.residual.sum(0, np.float64)
    return np.abs(kept - x.sum(axis=0)).max() / np.abs(x).sum(axis=0).max()


def test_another_reducer_exchanges_the_drawn_values():
    """It exchanges a vector of the k drawn values, coordinate by coordinate."""
    inner, x = TopK(0.25, selection="exact"), integers(3, steps=1)
    drawn = run(RandomK(0.4), x)[1].sent[0, 0]
    k, kept = np.count_nonzero(drawn), 7
    _, reduced = run(RandomK(0.4, reducer=inner), x)
    first, residual = reduced.mean[0, 0], reduced.residual[:, 0]
    assert not first[~drawn].any()
    np.testing.assert_array_equal(residual[:, ~drawn], x[:, 0, ~drawn])
    mask = reduced.sent[:, 0]
    assert (mask.sum(axis=1) == kept).all()
    assert kept == -(-k // 4)
    assert not mask[:, ~drawn].any()
    for w in range(3):
        largest = np.sort(np.abs(x[w, 0, drawn]))[-kept]
        assert np.all(np.abs(x[w, 0, mask[w]]) >= largest)
    np.testing.assert_array_equal(residual, np.where(mask, 0, x[:, 0]))
    assert lost_of(x[:, 0], jax.tree.map(lambda a: a[:, 0], reduced)) == 0


@pytest.mark.slow
def test_of_a_reducer_that_rounds_the_residual_has_the_rest():
    few_bits = Quantized(Format("int4", 8), "nearest")
    x, reduced = run(RandomK(0.5, reducer=few_bits), integers(3))
    for step in range(STEPS):
        at = jax.tree.map(lambda a, step=step: a[:, step], reduced)
        assert lost_of(x[:, step], at) < 1e-6
    assert np.any(reduced.residual[:, 0][reduced.sent[:, 0]])
    assert RandomK(0.5, reducer=few_bits).conservation == "to group rounding"


def test_a_reducers_draws_are_fresh_in_each_bucket_and_step():
    reducer = RandomK(0.5, reducer=RandomK(0.5))
    one, other = reducer.split((SIZE, SIZE))
    assert one.seed != other.seed
    assert one.reducer.seed != other.reducer.seed
    _, reduced = run(reducer, integers(2))
    np.testing.assert_array_equal(reduced.state.inner.draws[0], np.arange(1, STEPS + 1))
    assert np.all(reduced.sent.sum(axis=-1) == 16)  # half of 31
    assert len(np.unique(reduced.sent[0], axis=0)) == STEPS


def cocktail(**options):
    """CocktailSGD: random coordinates, top-k of these, 4 bits, one step late."""
    top = TopK(0.1, codec=codecs.EliasFano(value_bits=4))
    return random_k(0.2, reducer=top, delay=1, **options)


@pytest.mark.slow
def test_cocktail_sgd_sends_a_hundredth_of_the_bits():
    size, workers = 2**16, 2
    tx = cocktail(is_dense=lambda path, shape: False)

    def step(state, batch):
        updates, state = tx.update(jnp.full(size, batch.mean()), state)
        return state, updates

    state = shard(tx.init(jnp.zeros(size)), mesh(workers))
    moved = traffic.wire_bytes(run_on_workers(step, mesh(workers)), state, jnp.ones(workers))
    assert size / 100 < moved.received < 4 * size / 100  # from the one other worker


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda: RandomK(0.1, seed=0.5), "seed=0.5 must be an int"),
        (lambda: RandomK(0.1, reducer=3), "reducer=3 must be a reducer of flat vectors, such as"),
        (lambda: random_k(0.1, reducer=PowerSGD(2)), "must be a reducer of flat vectors, such as"),
    ],
)
def test_errors_name_the_argument_its_value_and_the_fix(wrong, text):
    with pytest.raises(ValueError, match=text):
        wrong()


def test_buckets_of_one_size_draw_apart():
    tx = random_k(0.1, bucket_size=1024, axis_name=None)
    gradient = {"w": jnp.ones((64, 64))}
    updates, _ = jax.jit(lambda gradient: tx.update(gradient, tx.init(gradient)))(gradient)
    supports = np.asarray(updates["w"]).reshape(4, 1024) != 0
    assert len(np.unique(supports, axis=0)) == 4
