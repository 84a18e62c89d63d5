"""DRAGONN against its description."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from supports import SUPPORTS, run, shares_by_quarter, total, vectors
from workers import rows, some

import jaxsparse
from jaxsparse import codecs, dragonn
from jaxsparse.arrays import hashing
from jaxsparse.arrays.settings import entries
from jaxsparse.collectives.messages import AllReduced
from jaxsparse.reducers import Staged
from jaxsparse.reducers.base import keep_streams
from jaxsparse.reducers.dragonn import Dragonn, extractor
from jaxsparse.select.slots import hash_extract, hash_slots

SIZE = 61
DENSITY = 0.1
STEPS = 3
EXTRACTS = ("hash", "slot_max")


@functools.cache
def slots_of(workers, slots):
    """The slot of each index, by step and worker: (STEPS, W, SIZE)."""

    def one(step, rank):
        seed = hashing.combine(Dragonn().hash_seed(step, rank), 1)
        return hash_slots(jnp.arange(SIZE, dtype=jnp.int32), slots, seed)

    over_workers = jax.vmap(one, (None, 0))
    return np.asarray(
        jax.vmap(over_workers, (0, None))(
            jnp.arange(STEPS, dtype=jnp.uint32), jnp.arange(workers, dtype=jnp.int32)
        )
    )


def description(x, slots, slot_of):
    """A mask of one worker's entries: Algorithm 1 with the threshold of a sample of everything."""
    threshold = max(np.sort(np.abs(x))[-slots], 1e-30)
    held = np.full(slots, -1)
    for i in range(len(x)):
        if abs(x[i]) >= threshold:
            held[slot_of[i]] = i
    sent = np.zeros(len(x), bool)
    sent[held[held >= 0]] = True
    return sent


@pytest.mark.parametrize(("workers", "way"), rows([(3, "shard_map")], [(8, "vmap")]))
def test_equals_its_description(workers, way):
    reducer = Dragonn(DENSITY, extract="hash")
    slots = entries(DENSITY, SIZE)
    lost = 0
    for seed, supports in enumerate(SUPPORTS):
        steps = [vectors(supports, workers, SIZE, seed + i, scale=16) for i in range(STEPS)]
        for i, (x, reduced) in enumerate(run(reducer, np.stack(steps, 1), way)):
            sent = np.array(
                [description(x[w], slots, slots_of(workers, slots)[i, w]) for w in range(workers)]
            )
            np.testing.assert_array_equal(reduced.residual, np.where(sent, 0, x))
            np.testing.assert_array_equal(reduced.sent, sent)
            np.testing.assert_array_equal(total(reduced, 1), np.where(sent, x, 0).sum(0))
            assert reduced.info.delivered[0] == np.count_nonzero(np.where(sent, x, 0).sum(0))
            assert reduced.state.tolist() == [i + 1] * workers
            lost += (slots - sent.sum(1)).clip(0).sum()
    assert lost > 0  # slots do collide


@pytest.mark.parametrize("codec", some([codecs.COO, codecs.Packed()], [codecs.COO]), ids=str)
def test_slot_max_conserves_and_sends_the_largest(codec):
    reducer, workers = Dragonn(DENSITY, extract="slot_max", codec=codec), 5
    for seed, supports in enumerate(SUPPORTS):
        steps = [vectors(supports, workers, SIZE, seed + i, scale=16) for i in range(STEPS)]
        for x, reduced in run(reducer, np.stack(steps, 1)):
            np.testing.assert_array_equal(reduced.mean, reduced.mean[:1].repeat(workers, 0))
            kept = workers * reduced.mean[0].astype(float) + reduced.residual.sum(0, dtype=float)
            np.testing.assert_allclose(kept, x.sum(0, dtype=float), atol=1e-3 * abs(x).max())
            assert np.all(reduced.sent.sum(1) <= entries(DENSITY, SIZE))
            largest = abs(x).argmax(1)
            assert np.all(reduced.sent[range(workers), largest] | (abs(x).max(1) == 0))


def test_worked_example():
    """x = [5, 9, 1, 3], t = 4, three slots. 5 is kept back if it shares a slot with 9."""
    x = jnp.float32([5, 9, 1, 3])

    def outcome(seed):
        stream = hash_extract(x, jnp.float32(4), 3, seed=seed)
        summed = jnp.zeros_like(x).at[stream.indices].add(stream.values, mode="drop")
        result = AllReduced(summed, jnp.zeros_like(x), jnp.int32(0))
        return stream, keep_streams(x, stream, result, ())[1].whole(x).residual

    seeds = jnp.arange(40, dtype=jnp.uint32)
    slots = np.asarray(jax.jit(jax.vmap(lambda s: hash_slots(jnp.arange(4), 3, s)))(seeds))
    streams, residuals = jax.tree.map(np.asarray, jax.jit(jax.vmap(outcome))(seeds))
    collides = slots[:, 0] == slots[:, 1]
    assert 5 < collides.sum() < 35
    np.testing.assert_array_equal(residuals[collides], [[5, 0, 1, 3]] * collides.sum())
    np.testing.assert_array_equal(residuals[~collides], [[0, 0, 1, 3]] * (~collides).sum())
    in_slot_1 = collides & (slots[:, 0] == 1)
    assert in_slot_1.any()
    assert np.unique(streams.indices[in_slot_1], axis=0).tolist() == [[4, 1, 4]]
    assert np.unique(streams.values[in_slot_1], axis=0).tolist() == [[0, 9, 0]]


@pytest.mark.slow
def test_more_may_pass_than_there_are_slots():
    """The paper's example in A.2.2: m = 512, n = 1024, and 13 to 14 % of the slots stay empty."""
    size, seeds = 51_200, jnp.arange(20, dtype=jnp.uint32)
    x = jax.random.normal(jax.random.key(0), (size,))
    extract = extractor("hash", samples=size, passing=2.0)  # samples cover all of x
    threshold = np.sort(np.abs(x))[-1024]
    indices, values = jax.jit(jax.vmap(lambda seed: extract(x, 512, seed)))(seeds)
    held = np.asarray(indices) < size
    assert np.all((np.abs(values) >= threshold) == held)
    assert 0.13 < 1 - held.mean() < 0.14
    assert Dragonn(0.01, extract="hash", passing=2.0).passing == 2


@pytest.mark.slow
@pytest.mark.parametrize("passing", some([1.0, 3.0], [3.0]))
def test_the_error_is_within_lemma_a8(passing):
    """E |x - sent|^2 <= (1 - m (1 - (1 - 1/m)^n) / (d t^2)) |x|^2 with t the range of n values.

    The expectation itself is that of Lemma A.5: the i-th of n is kept if no later one takes its
    slot.
    """
    size, slots, seeds = 300, 30, jnp.arange(400, dtype=jnp.uint32)
    x = np.float32(np.random.default_rng(0).normal(size=size))
    extract = extractor("hash", passing=passing)  # samples cover all of x
    values = jax.jit(jax.vmap(lambda seed: extract(jnp.asarray(x), slots, seed).values))(seeds)
    sent = np.sum(np.square(np.asarray(values, np.float64)), axis=1)
    n = round(passing * slots)
    passed = np.sort(np.argsort(-np.abs(x))[:n])  # in the order in which they are written
    chance = (1 - 1 / slots) ** (n - 1 - np.arange(n))
    expected = np.sum(chance * np.square(x[passed], dtype=np.float64))
    assert abs(sent.mean() - expected) < 4 * sent.std() / np.sqrt(len(seeds))
    energy, spread = np.sum(np.square(x, dtype=np.float64)), np.abs(x[passed])
    tau = spread.max() / spread.min()
    bound = 1 - slots * (1 - (1 - 1 / slots) ** n) / (size * tau**2)
    assert energy - sent.mean() <= bound * energy


@pytest.mark.parametrize("extract", some(EXTRACTS, EXTRACTS[:1]))
def test_zeros_take_no_slots(extract):
    x = np.zeros((3, SIZE))
    x[:, 7], x[:, 50] = 1, -2
    ((_, reduced),) = run(Dragonn(DENSITY, extract=extract), x)
    assert np.all(reduced.sent.sum(1) >= 1)
    assert set(np.flatnonzero(reduced.mean[0])) <= {7, 50}


@pytest.mark.slow
def test_hashes_differ_between_workers_and_steps():
    x, slots, count = jax.random.normal(jax.random.key(0), (2000,)), 100, 8
    reducer = Dragonn(0.05, seed=5)
    extract = lambda step, rank: extractor("hash")(x, slots, reducer.hash_seed(step, rank)).indices
    numbers, zeros = jnp.arange(count, dtype=jnp.uint32), jnp.zeros(count, jnp.uint32)
    run = jax.jit(jax.vmap(extract))
    for step, rank in ((numbers, zeros), (zeros, numbers)):
        sent = [set(row[row < 2000]) for row in np.asarray(run(step, rank))]
        assert 55 < np.mean([*map(len, sent)]) < 72
        assert len(set.union(*sent)) >= 98


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extract", "kind"),
    rows(
        [("hash", "constant")],
        [("hash", "noise"), ("slot_max", "noise"), ("slot_max", "constant")],
    ),
)
def test_nothing_starves(extract, kind):
    workers, steps, size, density = 3, 80, 400, 0.1
    x = np.random.default_rng(0).normal(size=(workers, steps, size))
    if kind == "constant":
        x[:] = 1.0
    counts, outcomes = shares_by_quarter(Dragonn(density, extract=extract), x)
    shares = counts.sum(0) / counts.sum()
    assert np.all(abs(shares - 0.25) < 0.05), shares
    delivered = np.sum([r.mean[0] != 0 for r in outcomes], 0)
    assert delivered.min() >= 3
    if kind == "constant":
        # A share of the W workers' m slots is filled, so each element waits about d / m / share
        # steps.
        assert abs(outcomes[-1].residual).max() <= 45


FIXED = Dragonn(0.05)
STAGED = Staged((Dragonn(0.2), Dragonn(0.01)), (3,))


@pytest.mark.slow
@pytest.mark.parametrize("reducer", some([FIXED, STAGED], [FIXED]), ids=["fixed", "staged"])
def test_transformation_masks_momentum_where_it_sent(reducer):
    tx = jaxsparse.exchange(reducer, momentum=0.5, axis_name=None)
    grads = {"w": jax.random.normal(jax.random.key(1), (40, 30)), "b": jnp.ones(30)}
    state = tx.init(grads)
    step = jax.jit(tx.update)
    fed = np.zeros((40, 30))
    u = np.zeros((40, 30))
    for _ in range(6):
        u = np.float32(0.5) * u + np.asarray(grads["w"])
        fed += u
        updates, state = step(grads, state)
        sent = np.asarray(updates["w"]) != 0
        assert 0 < sent.sum() < sent.size
        fed -= updates["w"]
        u = np.where(sent, 0, u)
        np.testing.assert_allclose(state.residual["w"].value[0], fed, atol=1e-5)
        np.testing.assert_allclose(state.momentum["w"].value[0], u, atol=1e-6)


def test_settings_are_checked():
    for settings, complaint in [
        ({"extract": "count"}, r"extract='count' is unknown: use 'hash' or 'slot_max'"),
        ({"samples": 0}, "samples=0 must be at least 1"),
        ({"samples": 10}, "samples=10 are for the threshold of"),
        ({"passing": 0.0}, r"passing=0\.0 must be positive"),
        ({"passing": 2}, "passing=2.0 is for the threshold of"),
        ({"seed": 0.5}, r"seed=0\.5 must be an int"),
        ({"codec": "coo"}, "codec='coo'"),
    ]:
        with pytest.raises(ValueError, match=complaint):
            dragonn(**settings)
