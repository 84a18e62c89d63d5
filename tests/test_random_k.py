"""Random-k: the same draws on all workers, all of them in turn, and k words."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recorders import record
from workers import feedback_loop, few, on_workers

from jaxsparse import traffic
from jaxsparse.reducers.stages import Stages
from jaxsparse.systems import random_k
from jaxsparse.systems.random_k import RandomK

WHERE = [(w, way) for way in ("vmap", "shard_map", "shard_map_unchecked") for w in (1, 2, 3, 5, 8)]
SIZE, STEPS = 61, 12


def run(reducer, gradients, way="vmap"):
    x, reduced = feedback_loop(reducer, len(gradients), way)(gradients.astype(np.float32))
    return np.asarray(x, np.float64), jax.tree.map(np.asarray, reduced)


def integers(workers, seed=0, steps=STEPS, size=SIZE):
    """Multiples of W, so that means are exact; none is 0."""
    rng = np.random.default_rng(seed)
    shape = (workers, steps, size)
    return workers * rng.integers(1, 9, shape) * rng.choice([-1, 1], shape)


@pytest.mark.parametrize("where", few(WHERE, [(3, "vmap"), (8, "shard_map")]), ids=str)
def test_what_is_drawn_is_delivered_and_the_rest_kept(where):
    workers, way = where
    k = 7  # 0.1 of 61, rounded up
    for seed in range(3):
        x, reduced = run(RandomK(0.1), integers(workers, seed), way)
        for field in (reduced.mean, reduced.sent, reduced.state):
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
        np.testing.assert_array_equal(reduced.state[0], np.arange(1, STEPS + 1))
        np.testing.assert_array_equal(reduced.info.delivered[0], (expected != 0).sum(axis=-1))


def test_every_index_gets_its_turn():
    steps, k = 2000, 7
    _, reduced = run(RandomK(0.1), integers(1, steps=steps))
    drawn = reduced.sent[0]
    p = k / SIZE
    turns = drawn.sum(axis=0)
    assert np.abs(turns - p * steps).max() < 5 * (p * (1 - p) * steps) ** 0.5
    # Fresh draws: steps overlap as often as chance has it, neighbours too.
    after = (drawn[1:] & drawn[:-1]).sum() / steps
    beside = (drawn[:, 1:] & drawn[:, :-1]).sum() / steps
    pairs = (SIZE - 1) * p * (k - 1) / (SIZE - 1)
    assert after == pytest.approx(k * p, abs=5 * (k * p / steps) ** 0.5)
    assert beside == pytest.approx(pairs, abs=5 * (pairs / steps) ** 0.5)
    other = run(RandomK(0.1, seed=1), integers(1, steps=steps))[1].sent[0]
    assert (drawn & other).sum() / steps == pytest.approx(k * p, abs=5 * (k * p / steps) ** 0.5)


@pytest.mark.parametrize("workers", [2, 8])
def test_k_words_travel_and_no_indices(workers):
    size, k = 1001, 101
    reducer = RandomK(0.1)
    exchange = on_workers(lambda x: reducer(x, jnp.uint32(3), axis_name="data").mean, workers)
    moved = traffic.wire_bytes(exchange.lower(jnp.zeros((workers, size), jnp.float32)).compile())
    assert [c.op for c in moved.collectives] == ["all-reduce"]
    assert moved.payload == 4 * k


def test_all_is_the_dense_mean():
    x, reduced = run(RandomK(1.0), integers(3))
    np.testing.assert_array_equal(reduced.mean[0], x.mean(axis=0))
    assert not reduced.residual.any()
    assert reduced.sent.all()


def test_one_worker_sends_nothing():
    x = jnp.arange(1.0, 21.0)
    reducer = RandomK(0.25)
    with record() as messages:
        reduced = reducer(x, reducer.init(20), axis_name=None)
    assert messages == []
    np.testing.assert_array_equal(reduced.mean + reduced.residual, x)
    assert np.count_nonzero(reduced.mean) == 5


def test_sums_that_overflow_are_kept():
    x = np.ones((3, 1, 20), np.float32)
    x[:, 0, 4] = 3e38
    _, reduced = run(RandomK(1.0), x)
    expected = np.ones(20)
    expected[4] = 0
    np.testing.assert_allclose(reduced.mean[0, 0], expected, rtol=1e-6)
    np.testing.assert_array_equal(reduced.residual[:, 0, 4], x[:, 0, 4])
    assert not reduced.sent[:, 0, 4].any()


def test_density_in_stages():
    tx = random_k(Stages((0.5, 0.1), (2,)), is_dense=lambda path, shape: False)

    def updates(gradients):
        step = lambda state, g: tx.update(g, state)[::-1]
        return jax.lax.scan(step, tx.init(gradients[0]), gradients)[1]

    found = on_workers(updates, 3, "vmap")(jnp.ones((3, 4, SIZE)))
    np.testing.assert_array_equal((found != 0).sum(axis=-1), [[31, 31, 7, 7]] * 3)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda: RandomK(0.0), r"density=0.0 must lie in \(0, 1\]"),
        (lambda: random_k(2.0), r"density=2.0 must lie in \(0, 1\]"),
        (lambda: RandomK(0.1, seed=0.5), "seed=0.5 must be an int"),
    ],
)
def test_errors_name_the_argument_its_value_and_the_fix(wrong, text):
    with pytest.raises(ValueError, match=text):
        wrong()


def test_buckets_of_one_size_draw_apart():
    tx = random_k(0.1, bucket_size=1024, axis_name=None)
    gradient = {"w": jnp.ones((64, 64))}
    updates, _ = tx.update(gradient, tx.init(gradient))
    supports = np.asarray(updates["w"]).reshape(4, 1024) != 0
    assert len(np.unique(supports, axis=0)) == 4
