"""What single reducers promise beyond the contract that all of them share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from workers import finished, on_workers, some

from jaxsparse import codecs
from jaxsparse.arrays.stream import SparseStream
from jaxsparse.collectives.messages import AllReduced
from jaxsparse.collectives.spardl import largest_sums
from jaxsparse.contrib import GTopK, OkTopk
from jaxsparse.reducers import SketchedSGD, SparDL, TrueTopK
from jaxsparse.reducers.base import deliver, keep_streams

SIZE = 2003


def exchange(reducer, vectors, way="shard_map"):
    """One exchange among as many workers as there are vectors; each worker's outcome."""
    one = lambda x: finished(reducer, x, reducer.init(SIZE))
    return on_workers(one, len(vectors), way)(jnp.asarray(vectors, jnp.float32))


@pytest.mark.slow
def test_numpy_integers_are_ints():
    settings = {"k": 5, "cols": 40, "rows": 3, "oversampling": 2, "seed": 7}
    numpy = {name: np.int64(value) for name, value in settings.items()}
    sketched = SketchedSGD(**numpy)
    assert repr(sketched) == repr(SketchedSGD(**settings))
    assert repr(SketchedSGD(**{**numpy, "seed": np.uint32(7)})) == repr(sketched)
    for given in ("k", "cols"):
        budgets = [SketchedSGD(4, rows=3, **{given: n}) for n in (9, np.int32(9))]
        assert repr(budgets[0].split((SIZE,))) == repr(budgets[1].split((SIZE,)))
    x = np.random.default_rng(0).normal(size=(2, SIZE))
    for reducer in (sketched, TrueTopK(k=np.int64(5))):
        assert np.count_nonzero(exchange(reducer, x, "vmap").mean[0]) == 5


@pytest.mark.parametrize("compression", some([1.5, 5, 10, 10.5, 20, 100, 900], [1.5, 10.5, 900]))
@pytest.mark.parametrize("selection", ["top_k", "heavymix"])
@pytest.mark.parametrize("rows", some([None, 1, 3, 5, 15], [None, 15]))
def test_a_sketch_has_as_many_columns_as_coordinates(compression, selection, rows):
    """Alg. 1 needs the order of k, and with fewer even k equal coordinates drown."""
    size, dense_size = 1_000_003, 700
    reducer = SketchedSGD(compression, selection=selection, rows=rows)
    k, cols = reducer.sized(size, dense_size)
    least, most = (1, 2) if selection == "top_k" else (8, 8)  # the paper's have 1.8 to 10
    # A word that is left over is a column, too.
    assert least * k - 1 <= cols <= most * k + most + 3
    table, candidates = reducer.used_rows * cols, reducer.fetched * k
    words = (size + dense_size) / compression - dense_size
    assert words - reducer.used_rows - reducer.fetched - 2 < table + candidates <= words
    if rows is None and selection == "top_k":
        assert (reducer.used_rows, reducer.fetched) == ((1, 2) if compression <= 10 else (3, 4))
    # Buckets have the same rows and candidates, whatever their share.
    for bucket in reducer.split((size // 3, size - size // 3), dense_size):
        assert (bucket.used_rows, bucket.fetched) == (reducer.used_rows, reducer.fetched)
        assert least * bucket.k - least <= bucket.cols


def test_too_few_columns_warn():
    with pytest.warns(UserWarning, match=r"cols=19 are too few for k=20 .*at least k columns"):
        SketchedSGD(k=20, cols=19).init(SIZE)
    SketchedSGD(k=20, cols=20).init(SIZE)
    SketchedSGD(k=900, cols=500).init(SIZE)  # no fewer words than elements: it goes dense


@pytest.mark.parametrize("way", some(["shard_map", "vmap"], ["shard_map"]))
def test_values_beyond_float16_are_exchanged_exactly(way):
    big = 999_999  # a multiple of 3: means are exact
    rng = np.random.default_rng(0)
    x = 3.0 * rng.integers(-3, 4, (3, SIZE))
    x[:, 70:80] = big  # values beyond float16
    x[:, 80:90] = 21_840  # a third of its largest value, rounded up: only the sum is beyond
    x[:, :60] = big * np.array([[1], [-1], [0]])  # infinities would cancel to NaN
    x[:, 300] = 9_999
    reducer = SketchedSGD(k=21, cols=256, oversampling=2, table_dtype="float16")
    assert reducer.words(SIZE) < SIZE
    outcome = exchange(reducer, x, way)
    mean, residual = np.asarray(outcome.mean[0], np.float64), np.asarray(outcome.residual)
    assert np.all(np.isfinite(mean))
    assert np.all(np.isfinite(residual))
    np.testing.assert_array_equal(3 * mean + residual.sum(0), x.sum(0))
    np.testing.assert_array_equal(mean[70:80], big)
    np.testing.assert_array_equal(mean[80:90], 21_840)
    assert mean[300] == 9_999


def test_what_an_all_reduce_leaves_is_owed_by_hand():
    """Residuals of sent entries and others, beside a sum that overflows, and beyond float32."""
    x = jnp.float32([1, 2, 3, 4, 3e38, 6])
    stream = SparseStream(jnp.int32([0, 5, 6]), jnp.float32([1, 6, 0]))  # the last slot is empty
    total = jnp.float32([4, 0, jnp.inf, 6, 0, jnp.inf])
    left = AllReduced(total, jnp.float32([0.25, 0, 7, 0.5, 3e38, 0]), jnp.int32(1))
    reduced = deliver(x, *keep_streams(x, stream, left, ()), 2)
    largest = np.finfo(np.float32).max
    np.testing.assert_array_equal(reduced.kept.residual, np.float32([0.25, 2, 3, 4.5, largest, 6]))
    np.testing.assert_array_equal(reduced.mean, [2, 0, 0, 3, 0, 0])
    assert reduced.kept.sent.tolist() == [True, False, False, False, False, False]
    assert (reduced.info.delivered, reduced.info.overflow) == (2, 1)
    own = AllReduced(total, jnp.float32([0.25, 0, 0]), jnp.int32(1), stream.indices)
    for result in (own, own.whole()):
        kept = deliver(x, *keep_streams(x, stream, result, ()), 2).kept.whole(x)
        np.testing.assert_array_equal(kept.residual, np.float32([0.25, 2, 3, 4, 3e38, 6]))


# Reducers and numbers of workers of which partial sums overflow and find no room, or are rounded
# beside a residual near the largest number.
OVERFLOWING = {
    "gtopk": (GTopK(0.1), 7),
    "ok_topk": (OkTopk(0.1, codec=codecs.EliasFano(value_bits=4)), 7),
    "recursive": (SparDL(0.1, teams=4, gather="recursive"), 8),
    "bruck": (SparDL(0.1, teams=2, gather="bruck"), 8),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", some(OVERFLOWING, ["gtopk"]))
def test_sums_that_overflow_on_the_way_leave_finite_residuals(name):
    reducer, workers = OVERFLOWING[name]
    rng, largest = np.random.default_rng(0), float(np.finfo(np.float32).max)
    shape = (workers, 40, 200)
    x = rng.choice([0, 0, 1, 1, 0.33, 1e-5], shape) * rng.uniform(0.9, 1.2, shape)
    x *= rng.choice([-1, 1], shape)
    x[1::2] = -x[: workers - 1 : 2]  # total sums are mostly finite
    x = np.float32(np.clip(largest * x, -largest, largest))

    def run(vectors):
        def step(state, x):
            reduced = finished(reducer, x, state)
            return reduced.state, (reduced.mean, reduced.residual)

        return jax.lax.scan(step, reducer.init(shape[-1]), vectors)[1]

    mean, residual = map(np.float64, on_workers(run, workers, "vmap")(x))
    assert np.all(np.isfinite(mean))
    assert np.all(np.isfinite(residual))
    # An element is off only where a sum of the two largest numbers is cut and clipped.
    error = np.abs(np.float64(x).sum(0) - workers * mean[0] - residual.sum(0))
    assert np.count_nonzero(error > 1e-5 * largest) <= 2
    assert np.all(error <= workers * largest)


def test_a_clipped_sum_is_shared_by_its_holders():
    largest = jnp.finfo(jnp.float32).max
    a = SparseStream(jnp.int32([0, 1]), jnp.float32([largest, largest]))
    kept, share = jax.jit(largest_sums, static_argnums=(2, 3, 4))(a, a, 2, 1, 4)
    assert np.isinf(kept.values).all()
    assert sorted(share.values.tolist()) == [0, 0, 0, float(largest / 4)]
