"""Threshold estimators, selections by them, and reducers with empty slots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from workers import finished, on_workers, some

from jaxsparse import codecs
from jaxsparse.contrib.gtopk import GTopK
from jaxsparse.contrib.ok_topk import OkTopk
from jaxsparse.reducers.spardl import SparDL
from jaxsparse.reducers.top_k import TopK
from jaxsparse.select.thresholds import bisection_threshold, sampled_threshold
from jaxsparse.select.top_k import (
    Bisection,
    Sampled,
    _threshold_top_k,
    bisection_top_k,
    sampled_top_k,
    threshold_top_k,
)

SIZE = 1024
LARGE = 40_000  # large enough to be sampled: over twice the smallest sample


def distributions(size):
    rng = np.random.default_rng(size)
    normal = rng.normal(size=size)
    one_heavy = np.full(size, 1e-3)
    one_heavy[size // 2] = -1e3
    return {
        "normal": normal,
        "cubed": normal**3,
        "zeros": np.zeros(size),
        "constant": np.full(size, -0.7),
        "one heavy": one_heavy,
        "one entry": np.where(np.arange(size) == size - 1, 2.0, 0.0),
        "denormals": rng.integers(-50, 50, size) * 1e-45,
        "huge": normal * 1e30,
        "sum overflows": np.full(size, 3e38),
        "ties": rng.integers(-3, 4, size),
        "many scales": normal * 10.0 ** rng.integers(-30, 30, size),
    }


def bits(x):
    return np.abs(np.asarray(x, np.float32)).view(np.uint32)


def largest(x, k):
    """Indices of the k largest magnitudes. Of equal ones, the lower indices count."""
    return np.argsort(-bits(x).astype(np.int64), kind="stable")[:k]


def distinct(kept, size):
    """Indices of the entries. They must be distinct, and empty slots must be empty."""
    indices = np.asarray(kept.indices)
    entries = indices[indices < size]
    assert len(set(entries.tolist())) == len(entries)
    assert indices.min() >= 0
    assert indices.max() <= size
    assert not np.asarray(kept.values, np.float32)[indices == size].any()
    return entries


@pytest.mark.parametrize("k", some([1, 37, SIZE], [37]))
@pytest.mark.parametrize("passes", [0, 3, 32])
def test_brackets_hold(k, passes):
    bracket = jax.jit(lambda x: bisection_threshold(x, k, passes=passes))
    for name, x in distributions(SIZE).items():
        x = x.astype(np.float32)
        lower, upper = (bits(end) for end in bracket(x))
        assert np.sum(bits(x) >= lower) >= k, name
        assert np.sum(bits(x) >= upper) < k, name
        if passes == 32:
            assert lower == np.sort(bits(x))[SIZE - k], name
            assert upper == lower + 1, name


def mstopk(x, k, passes):
    """The bracket's ends as bits, for vectors whose mean is exact."""
    low, high = 0, int(bits(x).max()) + 1
    for i in range(passes):
        trial = (low + high) // 2
        if i == 0:
            mean = int(bits(np.mean(np.abs(x))))
            trial = mean if mean < high else trial
        if np.sum(bits(x) >= trial) >= k:
            low = trial
        else:
            high = trial
    return low, high


@pytest.mark.parametrize("setting", some([(10, 4), (400, 6)], [(10, 4)]), ids=str)
def test_bisection_equals_its_description(setting):
    k, passes = setting
    bracket = jax.jit(lambda x: bisection_threshold(x, k, passes=passes))
    select = jax.jit(lambda x: bisection_top_k(x, k, passes=passes))
    for seed in range(20):
        rng = np.random.default_rng(seed)
        x = np.round(rng.normal(size=SIZE) ** 3 * 100).astype(np.float32)
        low, high = mstopk(x, k, passes)
        assert [int(bits(end)) for end in bracket(x)] == [low, high]
        above = np.flatnonzero(bits(x) >= high)
        between = np.flatnonzero((bits(x) >= low) & (bits(x) < high))
        kept = select(x)
        np.testing.assert_array_equal(kept.indices, np.concatenate([above, between])[:k])
        np.testing.assert_array_equal(kept.values, x[kept.indices])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", some([jnp.float32, jnp.bfloat16], [jnp.bfloat16]))
def test_bisection_keeps_exactly_k(dtype):
    k = 37
    few_passes = jax.jit(lambda x: bisection_top_k(x, k))
    all_passes = jax.jit(lambda x: bisection_top_k(x, k, passes=32))
    for name, x in distributions(SIZE).items():
        x = jnp.asarray(x, jnp.float32).astype(dtype)
        for kept in few_passes(x), all_passes(x):
            assert len(distinct(kept, SIZE)) == k, name
            assert kept.values.dtype == dtype
            np.testing.assert_array_equal(kept.values, x[kept.indices])
        assert set(kept.indices.tolist()) == set(largest(x, k).tolist()), name


@pytest.mark.parametrize("size", some([1, 63, 65, 2**20 + 9], [63, 65, 2**20 + 9]))
def test_bisection_of_any_size(size):
    """Sizes below a matrix's least size, with a rest, and of several tiles."""
    x = np.random.default_rng(size).normal(size=size).astype(np.float32)
    k = -(-size // 3)
    lower = bisection_threshold(jnp.asarray(x), k, passes=32).lower
    assert lower == np.sort(np.abs(x))[size - k]


@pytest.mark.slow
def test_a_small_vector_is_sampled_whole():
    for k in (1, 37):
        threshold = jax.jit(lambda x, seed, k=k: sampled_threshold(x, k, seed=seed))
        select = jax.jit(lambda x, k=k: sampled_top_k(x, k))
        for name, x in distributions(SIZE).items():
            x = x.astype(np.float32)
            expected = np.sort(bits(x))[SIZE - k]
            assert bits(threshold(x, jnp.uint32(5))) == expected, name
            wanted = [i for i in largest(x, k) if bits(x)[i] > 0]
            assert set(distinct(select(x), SIZE).tolist()) == set(wanted), name
            same_as_a_sort(threshold_top_k(jnp.asarray(x), k), x, k, name)


@pytest.mark.slow
def test_the_sampled_count_varies_as_order_statistics():
    k, samples = 800, 2000
    rank = k * samples / LARGE
    assert rank == 40

    @jax.jit
    def counts(x):
        at = lambda seed: sampled_threshold(x, k, samples=samples, seed=seed)
        thresholds = jax.vmap(at)(jnp.arange(300, dtype=jnp.uint32))
        return jnp.sum(jnp.abs(x)[None] >= thresholds[:, None], axis=1)

    normal = np.random.default_rng(0).normal(size=LARGE)
    run = LARGE // samples
    cases = {
        "normal": normal,
        "heavy columns": normal * np.where(np.arange(LARGE) % run == 3, 100, 1),
        "heavy at the end": normal * np.where(np.arange(LARGE) < LARGE - 2 * k, 1, 100),
    }
    for name, x in cases.items():
        found = np.asarray(counts(x.astype(np.float32))) / k
        deviation = rank**-0.5
        assert np.abs(found - 1).max() < 5 * deviation, name
        assert np.abs(found.mean() - 1) < 0.5 * deviation, name
        assert found.std() < 1.2 * deviation, name
        # Draws within runs differ between seeds.
        assert found.std() > 0.1 * deviation, name


def test_where_all_are_alike_k_are_kept():
    kept = jax.jit(lambda x: sampled_top_k(x, 50))(jnp.full(LARGE, -2.0))
    assert distinct(kept, LARGE).tolist() == list(range(50))


def same_as_a_sort(kept, x, k, name=None):
    wanted = largest(x, k)
    wanted = wanted[bits(x)[wanted] > 0]
    entries = distinct(kept, x.size)
    assert set(entries.tolist()) == set(wanted), name
    filled = np.asarray(kept.indices) < x.size
    np.testing.assert_array_equal(np.asarray(kept.values)[filled], x[entries])


@pytest.mark.parametrize("k", some([400, LARGE], [400]))
def test_threshold_top_k_is_exact_whatever_the_sample_says(k):
    select = jax.jit(lambda x, seed: threshold_top_k(x, k, seed=seed))
    by_threshold = jax.jit(lambda x, t: _threshold_top_k(x, k, t))
    for name, x in distributions(LARGE).items():
        x = x.astype(np.float32)
        for seed in range(2):
            same_as_a_sort(select(x, jnp.uint32(seed)), x, k, name)
        ordered = np.sort(np.abs(x))[::-1]
        # Thresholds that let nearly all, half of k, exactly k, k - 1 or nothing pass.
        for t in ordered[-1], ordered[k // 2], ordered[k - 1], ordered[min(k, LARGE - 1)], np.inf:
            same_as_a_sort(by_threshold(x, jnp.float32(t)), x, k, name)


@pytest.mark.slow
def test_threshold_top_k_of_batches_and_other_dtypes():
    x = np.random.default_rng(0).normal(size=(3, LARGE)).astype(np.float32)
    kept = jax.jit(jax.vmap(lambda row: threshold_top_k(row, 300)))(x)
    for indices, values, row in zip(*kept, x):
        same_as_a_sort(type(kept)(indices, values), row, 300)
    half = jnp.asarray(x[0]).astype(jnp.bfloat16)
    kept = jax.jit(lambda x: threshold_top_k(x, 300))(half)
    assert kept.values.dtype == jnp.bfloat16
    same_as_a_sort(kept, np.asarray(half), 300)


def test_a_sparse_vector_leaves_slots_empty():
    x = np.zeros(LARGE, np.float32)
    x[17_000:17_020] = 3
    kept = jax.jit(lambda x: sampled_top_k(x, 50))(x)
    assert sorted(distinct(kept, LARGE)) == list(range(17_000, 17_020))


def test_settings_are_checked():
    x = jnp.ones(5)
    with pytest.raises(ValueError, match="passes=-1 must be at least 0"):
        bisection_threshold(x, 1, passes=-1)
    with pytest.raises(ValueError, match=r"passes=1\.5 must be an int"):
        Bisection(1.5)
    assert sampled_threshold(x, 1, samples=1) == 1
    with pytest.raises(ValueError, match="samples=0 must be at least 1"):
        sampled_top_k(x, 1, samples=0)
    with pytest.raises(ValueError, match="samples='all' must be an int"):
        Sampled("all")
    for select in sampled_threshold, sampled_top_k, threshold_top_k, bisection_threshold:
        with pytest.raises(ValueError, match="must be a vector"):
            select(jnp.ones((2, 2)), 1)
    with pytest.raises(ValueError, match=r"selection=Sampled is unknown|selection=<class"):
        TopK(0.1, selection=Sampled)


# --- Reducers cope with empty slots ---

TOO_FEW = Sampled(samples=8)  # a rough threshold: often fewer than k reach it
REDUCERS = {
    "top_k packed": TopK(0.05, codec=codecs.Packed(), selection=TOO_FEW),
    "gtopk": GTopK(0.05, selection=TOO_FEW),
    "ok_topk": OkTopk(0.05, selection=TOO_FEW),
    "spardl": SparDL(0.05, selection=TOO_FEW),
    "top_k bisection": TopK(0.05, selection="bisection"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", some(REDUCERS, ["top_k packed"]))
def test_nothing_is_lost_with_empty_slots(name):
    workers, size = 4, 601
    reducer = REDUCERS[name]

    def step(x):
        reduced = finished(reducer, x, reducer.init(size))
        return reduced.mean, reduced.residual, reduced.sent

    exchange = on_workers(step, workers, "vmap")
    delivered = 0
    for seed in range(6):
        rng = np.random.default_rng(seed)
        x = np.round(rng.standard_t(2, (workers, size)) * 3).clip(-500, 500) * workers
        if seed % 2:  # few elements are not 0
            x *= rng.random((workers, size)) < 0.02
        x = x.astype(np.float32)
        mean, residual, sent = map(np.asarray, exchange(x))
        np.testing.assert_array_equal(mean, np.broadcast_to(mean[:1], mean.shape))
        np.testing.assert_array_equal(workers * mean[0] + residual.sum(0), x.sum(0))
        assert sent.any() or not mean.any()
        delivered += np.count_nonzero(mean[0])
    assert delivered > 0
