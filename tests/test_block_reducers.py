"""OmniReduce and the sparse all-gather of blocks against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from published_traffic import block_gather_traffic, dense_traffic, omni_reduce_traffic
from recorders import record
from workers import feed_back, finished, on_workers, some

from jaxsparse import omni_reduce, s2_reducer, sparse_all_gather, traffic
from jaxsparse.reducers.block_sparse import OmniReduce, SparseAllGather
from jaxsparse.reducers.blocks import contribution, select_blocks, take, union_capacity
from jaxsparse.reducers.s2_reducer import S2

SIZE, BLOCK = 403, 8  # 51 blocks, the last one of 3 elements
BLOCKS = 51
SEEDS, STEPS = 4, 6

REDUCERS = {
    "omni, natural": OmniReduce(block_size=BLOCK, union_density=0.4),
    "omni, selected": OmniReduce(0.05, block_size=BLOCK),
    "omni, little room": OmniReduce(0.2, block_size=BLOCK, union_density=0.15),
    "gather, natural": SparseAllGather(block_size=BLOCK, capacity_density=0.18),
    "gather, selected": SparseAllGather(0.05, block_size=BLOCK),
    "gather, little room": SparseAllGather(0.1, block_size=BLOCK, capacity_density=0.05),
}


# The descriptions in NumPy.


def padded(x):
    return np.pad(x, (0, BLOCKS * BLOCK - SIZE)).reshape(BLOCKS, BLOCK)


def selection(x, density):
    """The blocks that one worker selects."""
    norms = np.linalg.norm(padded(x).astype(np.float64), axis=1)
    if density is None:
        return norms > 0
    k = int(np.ceil(density * BLOCKS))
    chosen = np.argsort(-norms, kind="stable")[:k]
    return np.isin(np.arange(BLOCKS), chosen) & (norms > 0)


def taken(mask, capacity, step):
    """The first `capacity` blocks of a mask, from a start that moves by `capacity` a step."""
    turns = -(-len(mask) // capacity)
    start = step % turns * capacity
    order = [*range(start, len(mask)), *range(start)]
    return [b for b in order if mask[b]][:capacity]


def described(reducer, x, step):
    """Total, residuals and overflow of one exchange of x (W, d)."""
    masks = np.array([selection(row, reducer.density) for row in x])
    if isinstance(reducer, OmniReduce):
        room = union_capacity(SIZE, BLOCK, reducer.density, reducer.union_density, len(x))
        union = masks.any(0)
        sent = masks & np.isin(np.arange(BLOCKS), taken(union, room, step))
        overflow = max(0, union.sum() - room) * BLOCK
    else:
        room = int(np.ceil((reducer.capacity_density or reducer.density) * BLOCKS))
        sent = np.array([np.isin(np.arange(BLOCKS), taken(mask, room, step)) for mask in masks])
        overflow = sum(max(0, mask.sum() - room) for mask in masks) * BLOCK
    delivered = np.where(np.repeat(sent, BLOCK, axis=1)[:, :SIZE], x, 0)
    return delivered.sum(0), x - delivered, overflow


# The exchanges themselves.


@functools.cache
def exchange(name, workers, way):
    """A compiled function that feeds residuals back over STEPS, for each of SEEDS."""
    shape = jax.ShapeDtypeStruct((workers, SEEDS, STEPS, SIZE), jnp.float32)
    run = functools.partial(feed_back, REDUCERS[name], way=way)
    return on_workers(lambda seeds: jax.lax.map(run, seeds), workers, way).lower(shape).compile()


def outcomes(name, workers, way, gradients):
    """For each seed and step: the step, what went in, (W, d), and what came out."""
    xs, reduced = exchange(name, workers, way)(jnp.asarray(gradients, jnp.float32))
    results = jax.tree.map(np.asarray, (xs, reduced))
    for seed in range(SEEDS):
        for step in range(STEPS):
            yield step, *jax.tree.map(lambda leaf, at=(seed, step): leaf[:, *at], results)


def total(reduced):
    """The sum over workers, rounded to integers. All workers must have its mean bit by bit."""
    for leaf in jax.tree.leaves((reduced.mean, reduced.info)):
        np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape))
    return np.rint(reduced.mean[0].astype(np.float64) * len(reduced.mean))


def gradients(workers, density, seed=0):
    """Small integers in a share of the blocks, with other blocks for each worker, seed and step."""
    rng = np.random.default_rng((workers, seed))
    shape = (workers, SEEDS, STEPS)
    values = rng.integers(-9, 10, (*shape, SIZE)) * rng.choice([1, 3, 20], (*shape, SIZE))
    blocks = rng.random((*shape, BLOCKS)) < density
    return values * np.repeat(blocks, BLOCK, axis=-1)[..., :SIZE]


USUAL = ("gather, natural", "omni, little room", "gather, selected")
CASES = [(name, 3, "shard_map") for name in ("omni, natural", *USUAL)]
CASES += [("omni, selected", 8, "vmap"), ("gather, little room", 1, "shard_map_unchecked")]


@pytest.mark.parametrize("case", some(CASES, CASES[1:3]), ids=str)
def test_exchanges_are_as_described(case):
    name, workers, way = case
    overflowed = []
    # From supports that fit to gradients without zeros.
    for seed, density in enumerate((0.03, 0.3, 1.0)):
        given = gradients(workers, density, seed)
        for step, x, reduced in outcomes(name, workers, way, given):
            expected, residuals, overflow = described(REDUCERS[name], x, step)
            np.testing.assert_array_equal(total(reduced), expected)
            np.testing.assert_array_equal(reduced.residual, residuals)
            assert reduced.info.overflow[0] == overflow
            assert reduced.info.delivered[0] == np.count_nonzero(expected)
            np.testing.assert_array_equal(x.sum(0), expected + reduced.residual.sum(0))
            if REDUCERS[name].density is None:
                assert reduced.sent is None
            else:
                np.testing.assert_array_equal(reduced.sent, x != residuals)
            overflowed.append(overflow > 0)
    if "selected" in name:
        assert not any(overflowed)
    else:
        assert any(overflowed)
        assert "natural" not in name or not all(overflowed)


@pytest.mark.parametrize(("name", "turns"), [("omni, natural", 3), ("gather, natural", 6)])
def test_no_block_starves(name, turns):
    """All blocks at the first step, then none. Each is delivered once it had its turn."""
    given = gradients(3, 1.0)
    given[:, :, 1:] = 0
    for step, x, reduced in outcomes(name, 3, "shard_map", given):
        if step == 0:
            wanted, delivered = x.sum(0), np.zeros(SIZE)
        delivered += total(reduced)
        assert reduced.residual.any() == (step < turns - 1)
        assert (delivered == wanted).all() == (step >= turns - 1)


def published(reducer, size, workers):
    is_gather = isinstance(reducer, SparseAllGather)
    formula = block_gather_traffic if is_gather else omni_reduce_traffic
    return formula(reducer, size, workers)


@pytest.mark.parametrize("name", ["omni, natural", "gather, natural"])
def test_words_on_the_wire(name):
    reducer = REDUCERS[name]
    moved = traffic.wire_bytes(exchange(name, 3, "shard_map"))
    words = published(reducer, SIZE, 3).words
    assert moved.received == pytest.approx(SEEDS * STEPS * 4 * words)
    assert words < dense_traffic(SIZE, 3).words


@pytest.mark.parametrize("sizes", some([(1, 1), (7, 2), (51, 51)], [(7, 2)]), ids=str)
def test_blocks_without_room_take_turns(sizes):
    size, capacity = sizes
    turns = -(-size // capacity)
    rng = np.random.default_rng(size)
    steps = np.arange(8 * turns, dtype=np.uint32)
    masks = rng.random((len(steps), size)) < 0.7
    always = rng.integers(size)  # a block that is in every mask
    masks[:, always] = True
    run = jax.jit(jax.vmap(lambda mask, step: take(mask, capacity, step)))
    found = np.asarray(run(jnp.asarray(masks), jnp.asarray(steps)))
    for step, mask, indices in zip(steps, masks, found):
        expected = taken(mask, capacity, int(step))
        assert indices.tolist() == expected + [size] * (capacity - len(expected))
    assert (found == always).any(axis=1).reshape(8, turns).any(axis=1).all()


def test_selection_leaves_zeros_out():
    x = np.zeros(10, np.float32)
    x[[1, 9]] = 1e-30, -1e30
    select = jax.jit(select_blocks, static_argnums=(1, 2))
    assert select(x, 4, None).tolist() == [True, False, True]
    assert select(x, 4, 0.9).tolist() == [True, False, True]
    assert select(x, 4, 0.3).tolist() == [False, False, True]
    assert select(np.where(x > 0, 0, x), 4, 0.6).tolist() == [False, False, True]
    selected = np.array([True, False, False])
    own = jax.jit(contribution, static_argnums=3)(x, selected, np.int32([2, 0, 3]), 4)
    own = jax.tree.map(np.asarray, own)
    assert own.indices.tolist() == [3, 0, 3]
    assert (own.values != 0).tolist() == [[False] * 4, [False, True, False, False], [False] * 4]


def messages(reducer, size, workers):
    run = lambda x: reducer.pmean(x, reducer.init(size), "data")
    with record() as sent:
        jax.eval_shape(
            jax.vmap(run, axis_name="data", axis_size=workers),
            jax.ShapeDtypeStruct((workers, size), jnp.float32),
        )
    return [(message.op, message.payload_bytes) for message in sent]


@pytest.mark.parametrize(
    "reducer",
    [
        OmniReduce(block_size=4, union_density=1.0),
        OmniReduce(0.5, block_size=4),  # room for all blocks of two workers
        OmniReduce(0.01, block_size=256),  # a block longer than the vector
        SparseAllGather(1.0, block_size=4),
        SparseAllGather(None, block_size=4, capacity_density=0.8),
        SparseAllGather(0.01, block_size=256),
    ],
    ids=str,
)
def test_all_is_summed_where_that_is_no_dearer(reducer):
    size, workers = 30, 2
    assert messages(reducer, size, workers) == [("psum", 4 * size)]
    assert published(reducer, size, workers) == dense_traffic(size, workers)


def test_messages_of_sparse_exchanges():
    assert messages(OmniReduce(block_size=4, union_density=0.2), 400, 8) == [
        ("all_to_all", 8 * 4),
        ("all_gather", 4),
        ("psum", 20 * 4 * 4),
    ]
    # Block numbers and values. If the blocks may not all fit, a count as well.
    assert messages(SparseAllGather(0.05, block_size=4), 400, 3) == [("all_gather", 4 * 5 * 5)]
    assert messages(SparseAllGather(None, block_size=4, capacity_density=0.05), 400, 3) == [
        ("all_gather", 4 * (5 * 5 + 1))
    ]


@pytest.mark.parametrize(
    "reducer",
    some(
        [OmniReduce(0.2, block_size=2), SparseAllGather(0.2, block_size=2)],
        [OmniReduce(0.2, block_size=2)],
    ),
    ids=["omni", "gather"],
)
def test_sums_that_overflow_are_not_sent(reducer):
    x = np.zeros((2, 20), np.float32)
    x[:, 4:6] = [[3e38, 1], [2e38, 2]]
    run = on_workers(lambda x: finished(reducer, x, reducer.init(20)), 2, "vmap")
    reduced = jax.tree.map(np.asarray, run(jnp.asarray(x)))
    assert np.flatnonzero(reduced.mean[0]).tolist() == [5]
    np.testing.assert_array_equal(reduced.mean[:, 5], [1.5, 1.5])
    np.testing.assert_array_equal(reduced.residual[:, 4], x[:, 4])
    assert not reduced.residual[:, 5].any()
    assert reduced.sent.sum(1).tolist() == [1, 1]


MAKES = (omni_reduce, sparse_all_gather, s2_reducer)


@pytest.mark.slow
@pytest.mark.parametrize("make", some(MAKES, (omni_reduce,)))
def test_momentum_is_masked_only_after_selection(make):
    room = "capacity_density" if make is sparse_all_gather else "union_density"
    grads = {"embedding": jnp.zeros((64, 32)).at[3].set(1.0)}
    for settings, second in (({"density": None, room: 0.1}, 1.5), ({"density": 0.1}, 1.0)):
        tx = make(block_size=32, momentum=0.5, axis_name=None, **settings)
        update = jax.jit(tx.update)
        _, state = update(grads, tx.init(grads))
        updates, _ = update(grads, state)
        np.testing.assert_array_equal(updates["embedding"], second * grads["embedding"])


def test_settings_are_checked():
    with pytest.raises(ValueError, match="density=None and union_density=None leave no bound"):
        OmniReduce()
    with pytest.raises(ValueError, match="density=None and capacity_density=None leave no bound"):
        sparse_all_gather()
    for reducer in (OmniReduce, SparseAllGather):
        with pytest.raises(ValueError, match=r"block_size=0 must be at least 1"):
            reducer(0.1, block_size=0)
    with pytest.raises(ValueError, match=r"union_density=0 must lie in \(0, 1\]: 0\.1 makes room"):
        OmniReduce(None, block_size=8, union_density=0)
    with pytest.raises(ValueError, match=r"capacity_density='a' must be a number"):
        SparseAllGather(None, block_size=8, capacity_density="a")


NATURAL = {
    "omni_reduce": functools.partial(omni_reduce, block_size=4, union_density=0.1),
    "sparse_all_gather": functools.partial(sparse_all_gather, block_size=4, capacity_density=0.05),
    "s2_reducer": functools.partial(
        s2_reducer, None, block_size=4, union_density=0.1, sketch_ratio=1.0
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", some(NATURAL, ["omni_reduce"]))
def test_rows_that_were_touched_once_are_not_sent_for_ever(name):
    """Neither momentum nor the rounding of updates makes such rows non-zero again."""
    workers, rows, steps = 3, 200, 12
    rng = np.random.default_rng(0)
    gradients = np.zeros((workers, steps, rows, 4), np.float32)
    for worker, step in np.ndindex(workers, steps):
        gradients[worker, step, rng.choice(rows, 6, replace=False)] = rng.normal(size=(6, 4))
    gradients = jnp.asarray(gradients, jnp.bfloat16)
    tx = NATURAL[name](momentum=0.5, is_dense=lambda path, shape: False)

    def run(gradients):
        state = tx.init(gradients[0])
        (state, overflow), updates = jax.lax.scan(one, (state, jnp.int32(0)), gradients)
        (residual,) = state.residual.values()
        return updates, residual.value.reshape(1, -1), overflow

    def one(carry, gradient):
        updates, state = tx.update(gradient, carry[0])
        return (state, carry[1] + state.info.overflow), updates

    updates, residual, overflow = on_workers(run, workers, "vmap")(gradients)
    assert not np.any(overflow)
    assert not np.any(residual)
    momentum = np.zeros((rows, 4))
    for step in range(steps):
        momentum = 0.5 * momentum + np.asarray(gradients[:, step], np.float64).mean(0)
        found = np.asarray(updates[0, step], np.float64)
        np.testing.assert_allclose(found, momentum, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    "reducer",
    [
        OmniReduce(0.6, block_size=16),
        pytest.param(SparseAllGather(0.9, block_size=4), marks=pytest.mark.slow),
        S2(0.6, block_size=16, sketch_ratio=9.0),
    ],
    ids=str,
)
def test_sums_that_overflow_are_kept_where_all_is_sent_densely(reducer):
    x = np.ones((2, 64), np.float32)
    x[:, 5] = 3e38
    reduced = on_workers(lambda x: finished(reducer, x, reducer.init(64)), 2, "vmap")(x)
    assert reduced.mean[:, 5].tolist() == [0, 0]
    assert reduced.residual[:, 5].tolist() == [x[0, 5], x[0, 5]]
    assert reduced.mean[0, 6] == 1
