"""S2 Reducer against its description, and the noise that it is said to have."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_sketch as reference
from published_traffic import s2_traffic
from workers import feedback_loop, on_workers, rows, some

from jaxsparse import exchange, s2_reducer, traffic
from jaxsparse.reducers.s2_reducer import S2

SIZE, BLOCK = 601, 8  # 76 blocks, the last of one element
COUNT = 76


def by_step(reducer, gradients, way="vmap"):
    """For each step what went in, (W, d), and what came out."""
    steps, workers, _ = gradients.shape
    results = feedback_loop(reducer, workers, way)(jnp.asarray(gradients.swapaxes(0, 1)))
    return [jax.tree.map(lambda leaf, i=i: np.asarray(leaf[:, i]), results) for i in range(steps)]


def gradients(workers, steps=3, seed=0):
    """Heavy-tailed integers times W. Sums and means are exact, and norms are rarely equal."""
    rng = np.random.default_rng(seed)
    heavy = np.round(rng.standard_t(2, (steps, workers, SIZE)) * 300).clip(-9000, 9000)
    return (heavy * workers).astype(np.float32)


def as_blocks(x):
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, COUNT * BLOCK - SIZE)]).reshape(
        *x.shape[:-1], COUNT, BLOCK
    )


def spread(mask):
    return np.repeat(mask, BLOCK, axis=-1)[..., :SIZE]


def largest(x, k):
    """A mask (W, blocks) of the k blocks with the largest norms on each worker."""
    norms = np.linalg.norm(as_blocks(x.astype(np.float64)), axis=-1)
    return np.argsort(np.argsort(-norms, axis=-1, kind="stable"), axis=-1) < k


def described(x, k, rows, cols, seed, has_room=True):
    """Sum and residuals of Alg. 1 after block top-k.

    cols=None: the sum is exact. Selected blocks for which `has_room` is False stay.
    """
    selected = largest(x, k) & has_room
    union = selected.any(0)
    sent = np.where(spread(selected), x, 0)
    total = sent.sum(0, dtype=np.float64)
    if cols is not None:
        places = reference.buckets_and_signs(rows, cols, seed, np.arange(SIZE), BLOCK)
        table = sum(reference.encode(own, cols, places) for own in sent)
        total = np.where(spread(union), reference.decode(table, places), 0)
    return total, x - sent


SKETCHED = S2(0.1, block_size=BLOCK, rows=3, seed=5)
EXACT = S2(0.1, block_size=BLOCK, sketch_ratio=3.0)
SLOW = [(1, "vmap"), (8, "shard_map"), (8, "vmap")]


@pytest.mark.parametrize(
    ("reducer", "workers", "way"),
    rows(
        [(SKETCHED, 5, "shard_map")],
        [(reducer, *where) for reducer in (SKETCHED, EXACT) for where in SLOW],
    ),
)
def test_it_is_its_description(reducer, workers, way):
    plan = reducer.plan(SIZE, workers)
    assert (plan.cols is None) == (reducer is EXACT)
    assert plan.selected == 8
    for step, (x, reduced) in enumerate(by_step(reducer, gradients(workers), way)):
        hash_seed = int(reference.combine(reducer.seed, step))  # fresh at each step
        cols = plan.cols if workers > 1 else None  # one worker sends nothing
        total, residual = described(x, 8, reducer.rows, cols, hash_seed)
        np.testing.assert_array_equal(reduced.mean, np.repeat(reduced.mean[:1], workers, axis=0))
        np.testing.assert_array_equal(np.rint(reduced.mean[0] * workers), total)
        np.testing.assert_array_equal(reduced.residual, residual)
        np.testing.assert_array_equal(reduced.sent, x != residual)
        assert not reduced.info.overflow.any()
        assert reduced.info.delivered[0] == np.count_nonzero(total)


@pytest.mark.parametrize("ratio", some([0.2, 3.0], [3.0]), ids=["sketched", "exact"])
def test_what_finds_no_room_is_kept_and_counted(ratio):
    reducer, workers = S2(0.2, block_size=BLOCK, sketch_ratio=ratio, union_density=0.25), 5
    plan = reducer.plan(SIZE, workers)
    assert plan[:2] == (16, 19)
    first = np.zeros((8, workers, SIZE), np.float32)
    first[:1] = gradients(workers, steps=1)
    waited = 0
    for x, reduced in by_step(reducer, first):
        selected = largest(x, 16) & np.any(as_blocks(x) != 0, axis=-1)
        union = selected.any(0)
        sent = np.any(as_blocks(x - reduced.residual) != 0, axis=-1)
        kept = sent.any(0)
        np.testing.assert_array_equal(sent, selected & kept)
        assert kept.sum() == min(19, union.sum())
        assert reduced.info.overflow[0] == BLOCK * (union.sum() - kept.sum())
        waited += reduced.info.overflow[0] > 0
        # A worker sends a whole block or nothing of it.
        np.testing.assert_array_equal(reduced.residual, np.where(spread(sent), 0, x))
        np.testing.assert_array_equal(reduced.sent, spread(sent) & (x != 0))
        mean = as_blocks(reduced.mean[0])
        assert not mean[~kept].any()
        if ratio > 1:
            total = np.where(spread(sent), x, 0).sum(0)
            np.testing.assert_array_equal(np.rint(reduced.mean[0] * workers), total)
    assert waited >= 2
    # Nothing new came after the first step. What is left did not fit into the last steps.
    assert np.count_nonzero(reduced.residual) < np.count_nonzero(first) / 2


@pytest.mark.slow
@pytest.mark.parametrize(("union_density", "ratio"), [(1.0, 1.0), (0.25, 0.5)])
def test_gradients_sparse_by_nature(union_density, ratio):
    """Without a density all non-zero blocks are sent. From a ratio of 1 on, their sum is exact."""
    workers = 3
    rng = np.random.default_rng(0)
    x = gradients(workers, steps=1)
    x *= spread(rng.random((1, workers, COUNT)) < 0.06)
    union = np.any(as_blocks(x[0]) != 0, axis=(0, 2))
    assert 5 < union.sum() < 19
    reducer = S2(None, block_size=BLOCK, sketch_ratio=ratio, union_density=union_density)
    ((_, reduced),) = by_step(reducer, x)
    assert not reduced.residual.any()
    assert reduced.sent is None  # its momentum is that of the mean
    assert not reduced.info.overflow.any()
    if ratio == 1:
        np.testing.assert_array_equal(np.rint(reduced.mean[0] * 3), x[0].sum(0))
    else:
        assert not reduced.mean[0][~spread(union)].any()
        assert reducer.plan(SIZE, 3).cols == BLOCK * 9.5


@pytest.mark.parametrize("reducer", some([SKETCHED, EXACT], [SKETCHED]), ids=["sketched", "exact"])
def test_sums_that_overflow_count_as_not_sent(reducer):
    x = np.zeros((1, 2, SIZE), np.float32)
    x[:, :, 3], x[:, :, 100] = 3e38, 1
    ((_, reduced),) = by_step(reducer, x)
    assert np.all(np.isfinite(reduced.mean))
    assert reduced.mean[0, 3] == 0
    assert np.all(reduced.residual[:, 3] == np.float32(3e38))
    assert [np.flatnonzero(sent).tolist() for sent in reduced.sent] == [[100], [100]]


# --- momentum ---

# Blocks that are selected may find no room, and several are sent through one table.
CROWDED = S2(0.2, block_size=BLOCK, rows=3, sketch_ratio=0.4, union_density=0.25, seed=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "reducer", some([SKETCHED, CROWDED], [CROWDED]), ids=["room", "little room"]
)
@pytest.mark.parametrize("workers", some([3, 8], [3]))
def test_momentum_is_that_of_blocks_that_wait(workers, reducer):
    """It is zeroed where this worker's block left, and stays in all others.

    These are blocks that it did not select, even if others sent theirs, and blocks without room.
    """
    steps, momentum = 4, 0.5
    given = 16 * gradients(workers, steps, seed=workers)
    tx = exchange(reducer, momentum=momentum, is_dense=lambda path, shape: False)

    def run(gradients):
        def step(state, gradient):
            updates, state = tx.update(gradient, state)
            (residual,), (kept,) = state.residual.values(), state.momentum.values()
            return state, (updates, residual.value, kept.value, state.info.overflow)

        return jax.lax.scan(step, tx.init(gradients[0]), gradients)[1]

    results = on_workers(run, workers, "vmap")(jnp.asarray(given.swapaxes(0, 1)))
    updates, residuals, kept, overflows = (np.asarray(result) for result in results)
    (bucket,) = reducer.split((SIZE,))
    plan = reducer.plan(SIZE, workers)
    cols = plan.cols if workers > 1 else None
    u = v = np.zeros((workers, SIZE))
    waited = 0
    for step in range(steps):
        u = momentum * u + given[step]
        x = v + u
        selected = largest(x, plan.selected)
        union = selected.any(0)
        turns = -(-COUNT // plan.capacity)
        order = np.roll(np.arange(COUNT), -(step % turns) * plan.capacity)
        room = np.isin(np.arange(COUNT), order[union[order]][: plan.capacity])
        hash_seed = int(reference.combine(bucket.seed, step))
        total, v = described(x, plan.selected, reducer.rows, cols, hash_seed, has_room=room)
        u = np.where(x != v, 0, u)
        at = lambda array, step=step: array[:, step].reshape(workers, -1)
        np.testing.assert_array_equal(at(updates)[0], total / workers)
        np.testing.assert_array_equal(at(residuals), v)
        np.testing.assert_array_equal(at(kept), u)
        assert np.any(u[:, spread(room & union)]) or workers == 1
        waited += at(overflows)[0, 0] > 0
    assert (waited > 0) == (reducer is CROWDED and workers > 1)


@pytest.mark.slow
def test_nothing_is_masked_if_all_blocks_are_sent_at_each_step():
    """No block waits, and momentum is that of the mean, as where all is summed densely."""
    x = gradients(3, steps=1)
    for settings in ({"sketch_ratio": 0.5}, {"sketch_ratio": 1.0}):
        ((_, reduced),) = by_step(S2(1.0, block_size=BLOCK, **settings), x)
        assert reduced.sent is None
    ((_, reduced),) = by_step(S2(1.0, block_size=BLOCK, union_density=0.5, sketch_ratio=0.5), x)
    np.testing.assert_array_equal(reduced.sent, reduced.residual != x[0])


# --- noise ---

REPEATS = 400


@functools.cache
def repeated(reducer, workers):
    """The means of one exchange, with the hashes of many steps: (repeats, d)."""

    def one(x, step):
        return reducer.pmean(x, step, "data").mean

    def run(x):
        by_step = jax.vmap(one, in_axes=(0, None), axis_name="data")
        steps = jnp.arange(REPEATS, dtype=jnp.uint32)
        return jax.lax.map(lambda step: by_step(x, step)[0], steps)

    return jax.jit(run)


def disjoint(workers, own=3, blocks=480, seed=0):
    """Normal values in `own` blocks of each worker. No two workers share a block. (W, d)."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(blocks)
    x = np.zeros((workers, blocks, BLOCK), np.float32)
    for worker in range(workers):
        at = order[worker * own : (worker + 1) * own]
        x[worker, at] = rng.normal(size=(own, BLOCK))
    return x.reshape(workers, -1)


# A table of one row has half as many words as elements, so each element meets 2 others on average,
# of the same energy. (It is 47 / 48 of that, because an element never meets its own block.) With
# sizing="local", 3 of 48 blocks make a table 16 times smaller. The error of a median of rows
# depends on the distribution of elements.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "sizing", "expected"),
    [(1, "union", 2.0), (3, "union", 2.5), (5, "union", 2.7), (1, "local", 32.0)],
)
def test_the_sketch_is_unbiased_and_as_noisy_as_documented(rows, sizing, expected):
    workers = 16
    x = disjoint(workers)
    room = 0.1 if sizing == "union" else None  # room for the 48 blocks of all workers
    reducer = S2(
        3 / 480, block_size=BLOCK, rows=rows, sizing=sizing, union_density=room, sketch_ratio=0.5
    )
    means = np.asarray(repeated(reducer, workers)(jnp.asarray(x)), np.float64)
    truth = x.sum(0, dtype=np.float64) / workers
    assert not means[:, truth == 0].any()
    error = (means - truth)[:, truth != 0]
    standard = error.std(0, ddof=1) / np.sqrt(REPEATS)
    assert np.all(np.abs(error.mean(0)) < 5 * standard)
    assert abs(error.mean() / np.sqrt(np.mean(standard**2))) < 1
    noise = np.sum(error**2) / REPEATS / np.sum(truth**2)
    assert abs(noise / expected - 1) < 0.1
    assert len({mean.tobytes() for mean in means}) == REPEATS


def test_tables_are_sized_as_documented():
    words = lambda workers=8, size=2**20, **settings: S2(**settings).words(size, workers)
    count, k = 4096, 128
    expected_union = count * (1 - (1 - k / count) ** 8)
    assert words() == pytest.approx(0.5 * 256 * expected_union, abs=1)
    assert words(rows=4) == pytest.approx(words(), abs=4)
    assert words(sizing="local") == 0.5 * 256 * k
    assert words(union_density=0.1) == pytest.approx(0.5 * 256 * 410, abs=1)
    assert words(density=None, union_density=0.5) == 0.25 * 2**20
    assert words(sketch_ratio=2.0) == 8 * 256 * k  # blocks sent exactly, rather than a larger table
    assert words(density=0.5, sketch_ratio=2.0) == 2**20  # the whole vector, and no union
    assert words(size=100) == 100


@pytest.mark.slow
@pytest.mark.parametrize("reducer", some([SKETCHED, EXACT], [SKETCHED]), ids=["sketched", "exact"])
def test_words_are_those_of_the_compiled_program(reducer):
    step = on_workers(lambda x: reducer.pmean(x, reducer.init(SIZE), "data"), 3)
    program = step.lower(jax.ShapeDtypeStruct((3, SIZE), jnp.float32)).compile()
    words = s2_traffic(reducer, SIZE, 3).words
    assert traffic.wire_bytes(program).received == pytest.approx(4 * words)


def test_settings_are_checked():
    cases = [
        ({"block_size": 0}, "block_size=0 must be at least 1"),
        ({"density": None}, "union_density"),
        ({"union_density": 1.5}, r"union_density=1\.5 must lie in \(0, 1\]"),
        ({"sketch_ratio": 0.0}, r"sketch_ratio=0\.0 must be above 0"),
        ({"sizing": "all"}, "sizing='all' is unknown"),
        ({"density": None, "union_density": 0.1, "sizing": "local"}, "'local' needs a density"),
        ({"rows": 0}, "rows=0 must be"),
    ]
    for settings, message in cases:
        with pytest.raises(ValueError, match=message):
            S2(**settings)
        with pytest.raises(ValueError, match=message):
            s2_reducer(**settings)
