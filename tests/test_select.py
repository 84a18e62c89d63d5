"""Selections and sparse streams, against NumPy."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from workers import mesh, on_workers, rows, some

from jaxsparse import select, sketch
from jaxsparse.arrays.blocks import BlockStream
from jaxsparse.select import compaction
from jaxsparse.select.compaction import compact_ranked, compact_rows


@pytest.mark.parametrize("size", some([1, 2, 17, 1000], [1, 17]))
@pytest.mark.parametrize("dtype", some([jnp.float32, jnp.bfloat16], [jnp.float32]))
def test_top_k_is_exact(size, dtype):
    x = jnp.asarray(np.random.default_rng(size).normal(size=size), dtype)
    for k in {1, (size + 1) // 2, size}:
        kept = select.top_k(x, k)
        order = np.argsort(-np.abs(np.asarray(x, np.float32)), kind="stable")[:k]
        np.testing.assert_array_equal(kept.indices, order)
        np.testing.assert_array_equal(kept.values, x[order])
        assert kept.values.dtype == dtype
        assert kept.indices.dtype == jnp.int32


def test_a_matrix_is_refused():
    with pytest.raises(ValueError, match=r"x has shape \(2, 3\).*x.ravel\(\)"):
        select.top_k(jnp.ones((2, 3)), 1)


# --- compact ---


def positions(mask, capacity):
    """The definition of `compact`."""
    taken = np.flatnonzero(mask)[:capacity]
    return np.pad(taken, (0, capacity - len(taken)), constant_values=len(mask))


@pytest.mark.parametrize("size", some([0, 1, 32, 33, 1025, 5003, 2**18 + 77], [5003]))
def test_compact_is_nonzero(size):
    for capacity in sorted({0, 1, size // 50, size // 2, size, size + 3}):
        for share in (0.0, 1e-3, 0.02, 0.5, 1.0):
            mask = np.random.default_rng(size).uniform(size=size) < share
            found = select.compact(jnp.asarray(mask), capacity)
            np.testing.assert_array_equal(found, positions(mask, capacity))
            assert found.dtype == jnp.int32


def test_every_single_position_is_found():
    def find(position):
        return select.compact(jnp.arange(2100, dtype=jnp.int32) == position, 2)

    found = jax.jit(jax.vmap(find))(jnp.arange(2100, dtype=jnp.int32))
    np.testing.assert_array_equal(found[:, 0], np.arange(2100))
    assert np.all(found[:, 1] == 2100)


@pytest.mark.parametrize("width", some([1, 33, 1025], [33, 1025]))
def test_compact_of_each_row(width):
    mask = (
        np.random.default_rng(width).uniform(size=(5, width)) < np.array([[0, 0.1, 0.5, 0.9, 1]]).T
    )
    capacity = -(-width // 2)
    places, counts = jax.jit(compact_rows, static_argnums=1)(jnp.asarray(mask), capacity)
    np.testing.assert_array_equal(counts, mask.sum(axis=1))
    for row, found in zip(mask, np.asarray(places)):
        there = np.flatnonzero(row)[:capacity]
        np.testing.assert_array_equal(found[: len(there)], there)


@pytest.mark.parametrize("size", some([1, 1024, 3000], [3000]))
def test_ranks_are_taken_one_after_another(size):
    kind = np.random.default_rng(size).integers(0, 4, size).astype(np.int32)
    expected = np.concatenate([np.flatnonzero(kind == rank) for rank in range(3)])
    compact = jax.jit(
        lambda kind, capacity: compact_ranked(kind, jnp.equal, 3, capacity), static_argnums=1
    )
    for capacity in (1, (size + 1) // 2, size):
        found = compact(jnp.asarray(kind), capacity)
        padded = np.pad(expected, (0, capacity), constant_values=size)[:capacity]
        np.testing.assert_array_equal(found, padded)


def test_some_are_left_out_before():
    mask = np.random.default_rng(0).uniform(size=3000) < 0.3
    compact = jax.jit(lambda mask, first: compact_ranked(mask, lambda m, _: m, 1, 400, first=first))
    for first in (0, 7, 700, 3000):
        found = compact(mask, jnp.int32(first))
        np.testing.assert_array_equal(found, positions(mask, 3400)[first : first + 400])


@pytest.mark.parametrize("enough", some([1, 100, 1000], [100]))
def test_enough_is_enough(enough):
    """It finds at least `enough` elements, which are the first ones. Other slots stay empty."""
    kind = np.random.default_rng(0).integers(0, 4, 3000).astype(np.int32)
    first = np.concatenate([np.flatnonzero(kind == rank) for rank in range(3)])
    compact = lambda kind: compact_ranked(kind, jnp.equal, 3, 3000, enough=enough)
    for found in jax.jit(compact)(kind), jax.jit(jax.vmap(compact))(np.stack([kind, kind]))[1]:
        count = int(np.sum(np.asarray(found) < 3000))
        assert count >= enough
        np.testing.assert_array_equal(
            found, np.pad(first[:count], (0, 3000 - count), constant_values=3000)
        )


@pytest.mark.parametrize(
    ("capacity", "error"), [(-1, "at least 0"), (2.0, "an int: it is static"), (True, "an int")]
)
def test_a_bad_capacity_is_refused(capacity, error):
    with pytest.raises(ValueError, match=f"capacity={capacity} must be {error}"):
        select.compact(jnp.ones(3, bool), capacity)


def test_compact_refuses_what_is_no_mask():
    with pytest.raises(ValueError, match=r"mask has shape \(2, 3\).*mask.ravel\(\)"):
        select.compact(jnp.ones((2, 3), bool), 1)
    with pytest.raises(ValueError, match=r"mask has dtype float32.*mask != 0"):
        select.compact(jnp.ones(3), 1)


# --- inputs for the other selections ---


def runs(rng, size, number):
    x = np.full(size, 0.01)
    for start in rng.integers(0, size, number):
        part = x[start : start + size // (100 * number)]
        part[:] = 1 + rng.uniform(size=len(part))
    return x


def strided(rng, size, stride):
    x = np.full(size, 0.01)
    x[7 % size :: stride] = 1 + rng.uniform(size=len(x[7 % size :: stride]))
    return x


DATA = {
    "normal": lambda rng, n: rng.normal(size=n),
    "cubed": lambda rng, n: rng.normal(size=n) ** 3,
    "rising": lambda rng, n: np.sort(rng.normal(size=n) ** 3),
    "falling": lambda rng, n: -np.sort(rng.normal(size=n) ** 3),
    "linear": lambda rng, n: np.arange(n) / n,
    "constant": lambda rng, n: np.full(n, -2.0),
    "zeros": lambda rng, n: np.zeros(n),
    "negative zeros": lambda rng, n: np.where(rng.uniform(size=n) < 0.5, 0.0, -0.0),
    "ties": lambda rng, n: rng.integers(-2, 3, n),
    "one heavy": lambda rng, n: np.where(np.arange(n) == n // 3, -3.0, 0.0),
    "infinities": lambda rng, n: np.where(rng.uniform(size=n) < 0.01, -np.inf, rng.normal(size=n)),
    "denormal": lambda rng, n: rng.normal(size=n) * 1e-40,
    "one run": lambda rng, n: runs(rng, n, 1),
    "ten runs": lambda rng, n: runs(rng, n, 10),
    "stride 100": lambda rng, n: strided(rng, n, 100),
    "stride 128": lambda rng, n: strided(rng, n, 128),
    "stride 1000": lambda rng, n: strided(rng, n, 1000),
    "stride of a tile": lambda rng, n: strided(rng, n, -(-n // 64)),
}
USUAL = ["normal", "rising", "negative zeros", "ties", "infinities", "denormal", "stride of a tile"]
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


def make(data, size, dtype=jnp.float32, seed=0):
    x = DATA[data](np.random.default_rng(seed), size).astype(np.float32)
    with np.errstate(over="ignore"):  # float16 becomes inf
        return jnp.asarray(x.astype(dtype))


def ranked(x):
    """Indices in order of falling magnitude. Of equal ones the lower index comes first."""
    return np.argsort(-np.abs(np.asarray(x).astype(np.float32)), kind="stable")


def check_stream(kept, x, capacity):
    assert kept.indices.shape == kept.values.shape == (capacity,)
    assert kept.indices.dtype == jnp.int32
    assert kept.values.dtype == x.dtype
    indices = np.asarray(kept.indices)
    assert len(np.unique(indices)) == capacity
    assert indices.min() >= 0
    assert indices.max() < x.size
    np.testing.assert_array_equal(kept.values, np.asarray(x)[indices])
    return indices


# --- fast_top_k ---


def energy_share(x, indices):
    square = np.square(np.asarray(x).astype(np.float64))
    best = np.sum(np.sort(square)[-len(indices) :])
    return np.sum(square[indices]) / best if best else 1.0


@pytest.mark.parametrize(
    "data",
    some(
        [d for d in DATA if d not in ("zeros", "negative zeros", "infinities", "denormal")],
        ["rising", "ties", "one run", "stride of a tile"],
    ),
)
def test_fast_top_k_of_any_arrangement(data):
    """The mean over seeds is as promised. A single seed can lose more where regions meet."""
    x, k = make(data, 70_001), 700
    choose = lambda seed: check_stream(select.fast_top_k(x, k, seed=jnp.uint32(seed)), x, k)
    shares = [energy_share(x, choose(seed)) for seed in range(10)]
    assert np.mean(shares) > 0.93
    assert np.min(shares) > 0.75


@pytest.mark.parametrize(
    ("data", "dtype"),
    rows(
        [(data, jnp.float32) for data in USUAL],
        [
            *((data, jnp.float32) for data in DATA if data not in USUAL),
            *((data, dtype) for data in ("ties", "infinities") for dtype in DTYPES[1:]),
        ],
    ),
)
def test_fast_top_k_is_exact_where_promised(data, dtype):
    for size, k in ((1, 1), (15, 1), (3001, 3001), (70_001, 4400)):
        assert 16 * k > size
        x = make(data, size, dtype)
        indices = check_stream(select.fast_top_k(x, k), x, k)
        np.testing.assert_array_equal(np.sort(indices), np.sort(ranked(x)[:k]))


@pytest.mark.parametrize("size", some([16, 17, 1000, 65_537], [65_537]))
def test_the_largest_element_is_never_lost(size):
    for index in {0, size // 2, size - 1}:
        x = jnp.zeros(size).at[index].set(-3.0)
        for k in {1, max(1, size // 100)}:
            assert index in np.asarray(select.fast_top_k(x, k).indices)


def test_seeds_matter_and_may_be_traced():
    x, k = make("normal", 50_000), 500
    chosen = [select.fast_top_k(x, k, seed=seed) for seed in (0, 0, 1, 2**32 - 1)]
    sets = [set(np.asarray(kept.indices).tolist()) for kept in chosen]
    assert sets[0] == sets[1] != sets[2] != sets[3]
    traced = jax.jit(lambda seed: select.fast_top_k(x, k, seed=seed))(jnp.int32(1))
    assert set(np.asarray(traced.indices).tolist()) == sets[2]


# --- group_top_k ---


def group_oracle(x, k, group_size):
    x = np.asarray(x).astype(np.float32)
    starts = range(0, len(x), group_size)
    return np.concatenate([start + ranked(x[start : start + group_size])[:k] for start in starts])


# Sizes, k and group_size: whole groups and not, a single short one, groups that are no multiple of
# the vector width or that have many elements, and more entries than rounds.
GROUPS = [
    (1, 1, 1),
    (7, 2, 512),
    (2048, 4, 512),
    (2049, 4, 512),
    (2560 + 300, 16, 512),
    (1000, 3, 7),
    (1003, 5, 100),
    (1003, 17, 100),
    (999, 33, 33),
    (9001, 2, 4097),
]


@pytest.mark.slow
@pytest.mark.parametrize("group", some(GROUPS, [GROUPS[i] for i in (4, 9)]), ids=str)
def test_group_top_k_is_exact(group):
    size, k, group_size = group
    for data in DATA:
        x = make(data, size)
        kept = jax.jit(select.group_top_k, static_argnums=(1, 2))(x, k, group_size)
        expected = group_oracle(x, k, group_size)
        assert len(expected) == k * (size // group_size) + min(k, size % group_size)
        if k > 16:  # of rising indices, for codecs
            expected = np.sort(expected)
        found = check_stream(kept, x, len(expected))
        np.testing.assert_array_equal(found, expected, err_msg=data)


def large_groups():
    """Names and vectors. A vector has five groups of 4096 elements and a shorter one."""
    rng = np.random.default_rng(0)
    size = 5 * 4096 + 1100
    normal = rng.normal(size=size)
    sparse = np.where(rng.random(size) < 0.003, normal, 0)  # fewer than k in each group
    yield "normal", normal
    yield "ties", np.round(3 * normal)  # more equal magnitudes than room
    yield "sparse", sparse
    yield "one tied group", np.where(np.arange(size) // 4096 == 2, 1, normal)
    yield "zeros", np.zeros(size)
    yield "columns of a matrix", normal * (1 + 50 * (np.arange(size) % 256 < 9))
    yield "the last of each group", normal + 50 * (np.arange(size) % 4096 == 4095)


@pytest.mark.slow
def test_top_k_of_large_groups_is_exact_and_in_order():
    for name, x in large_groups():
        x = jnp.float32(x)
        kept = select.group_top_k(x, 20, 4096)
        expected = group_oracle(x, 20, 4096).reshape(6, 20)
        found = np.asarray(kept.indices).reshape(6, 20)
        np.testing.assert_array_equal(found, np.sort(expected), err_msg=name)
        np.testing.assert_array_equal(kept.values, np.asarray(x)[kept.indices])


@pytest.mark.parametrize("dtype", some(DTYPES, DTYPES[:1]))
def test_group_top_k_of_any_dtype(dtype):
    for data in ("normal", "ties", "linear"):
        x = make(data, 5000, dtype)
        expected = group_oracle(x, 4, 512)
        np.testing.assert_array_equal(check_stream(select.group_top_k(x), x, 40), expected)


def test_group_arguments_are_checked():
    x = jnp.ones(10)
    with pytest.raises(ValueError, match="group_size=0 must be at least 1"):
        select.group_top_k(x, 1, 0)
    with pytest.raises(ValueError, match="k=5 must lie between 1 and group_size=4"):
        select.group_top_k(x, 5, 4)
    with pytest.raises(ValueError, match=r"x has shape \(2, 5\).*x.ravel\(\)"):
        select.group_top_k(x.reshape(2, 5), 1, 4)


# --- arguments of all that take a k or a seed ---

X = jnp.arange(8.0)
SPEC = sketch.SketchSpec(rows=2, cols=8)
TABLE = jnp.ones((2, 8))
BLOCKS = jnp.arange(2, dtype=jnp.int32)
OF_K = {
    "top_k": lambda k: select.top_k(X, k),
    "threshold_top_k": lambda k: select.threshold_top_k(X, k),
    "sampled_top_k": lambda k: select.sampled_top_k(X, k),
    "bisection_top_k": lambda k: select.bisection_top_k(X, k),
    "fast_top_k": lambda k: select.fast_top_k(X, k),
    "group_top_k": lambda k: select.group_top_k(X, k, 8),
    "block_top_k": lambda k: select.block_top_k(X, k, 1),
    "heavy_hitters": lambda k: sketch.heavy_hitters(TABLE, SPEC, 8, k),
}
OF_SEED = {
    "threshold_top_k": lambda seed: select.threshold_top_k(jnp.zeros(20_000), 2, seed=seed),
    "sampled_top_k": lambda seed: select.sampled_top_k(X, 2, seed=seed),
    "fast_top_k": lambda seed: select.fast_top_k(X, 2, seed=seed),
    "slot_max": lambda seed: select.slot_max(X, 2, seed=seed),
    "hash_extract": lambda seed: select.hash_extract(X, 1.0, 2, seed=seed),
    "encode": lambda seed: sketch.encode(X, SPEC, seed=seed),
    "decode": lambda seed: sketch.decode(TABLE, SPEC, 8, seed=seed),
    "decode_at": lambda seed: sketch.decode_at(TABLE, SPEC, BLOCKS, seed=seed),
    "heavy_hitters": lambda seed: sketch.heavy_hitters(TABLE, SPEC, 8, 2, seed=seed),
    "encode_blocks": lambda seed: sketch.encode_blocks(
        BlockStream(BLOCKS, jnp.ones((2, 8))), SPEC, seed=seed
    ),
    "decode_blocks": lambda seed: sketch.decode_blocks(TABLE, SPEC, BLOCKS, seed=seed),
}


@pytest.mark.slow
def test_blocks_end_where_they_do_beyond_2_to_the_24():
    """Float32 holds no odd number there."""
    counts = np.random.default_rng(0).integers(900, 1025, 40_001, dtype=np.int32)
    ends, _ = compaction._blocks_by_marks(jnp.asarray(counts), jnp.int32(0), capacity=4)
    np.testing.assert_array_equal(ends, np.cumsum(counts))


def takes(module, name):
    """The module's public functions with an argument of this name."""
    functions = {f: x for f, x in vars(module).items() if f[0] != "_" and callable(x)}
    return {
        f
        for f, function in functions.items()
        if not isinstance(function, type) and name in inspect.signature(function).parameters
    }


def test_every_function_of_a_k_or_a_seed_is_tested():
    assert set(OF_K) == takes(select, "k") | takes(sketch, "k")
    assert set(OF_SEED) == takes(select, "seed") | takes(sketch, "seed")


@pytest.mark.parametrize("name", some(OF_K, ["fast_top_k", "threshold_top_k", "block_top_k"]))
def test_k_of_any_type_is_taken_alike(name):
    call = OF_K[name]
    call(1)  # before True, because they are equal and a compiled function would be reused
    for one in 1, np.int64(1), np.uint8(1):
        for a, b in zip(jax.tree.leaves(call(one)), jax.tree.leaves(call(1)), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", OF_K)
def test_bad_k_are_refused_alike(name):
    call = OF_K[name]
    for k in (True, np.bool_(True), 1.0, "1", jnp.int32(1)):
        with pytest.raises(ValueError, match=re.escape(f"k={k!r} must be an int: it is static")):
            call(k)
    for k in (0, 9):
        with pytest.raises(ValueError, match=f"k={k} must lie between 1 and .*8.*: choose it"):
            call(k)


@pytest.mark.slow
@pytest.mark.parametrize("name", some(OF_SEED, ["fast_top_k", "hash_extract", "encode"]))
def test_seeds_of_any_type_are_taken_alike(name):
    call = OF_SEED[name]
    for seed in (2**32 - 5, np.int64(-5), np.uint32(2**32 - 5), jnp.int32(-5)):
        for a, b in zip(jax.tree.leaves(call(seed)), jax.tree.leaves(call(-5)), strict=True):
            np.testing.assert_array_equal(a, b)
    call(1)


@pytest.mark.parametrize("name", OF_SEED)
def test_bad_seeds_are_refused_alike(name):
    call = OF_SEED[name]
    for seed in (True, np.bool_(True), 1.5, jnp.zeros(2, jnp.uint32), jnp.bool_(True)):
        with pytest.raises(
            ValueError, match=r"seed=[\s\S]* must be an integer scalar: pass an int"
        ):
            call(seed)


# --- all of them, under JAX's transformations ---

SELECTIONS = {
    "top_k": lambda x: select.top_k(x, 30),
    "fast_top_k": lambda x: select.fast_top_k(x, 30),
    "fast_top_k exact": lambda x: select.fast_top_k(x, 300),
    "group_top_k": lambda x: select.group_top_k(x, 3, 70),
    "group_top_k by sorts": lambda x: select.group_top_k(x, 30, 70),
    "compact": lambda x: select.compact(x > 1, 400),
    # More elements pass than there is room for, or few do.
    "hash_extract": lambda x: select.hash_extract(x, 0.1, 50, seed=2**32 - 1),
    "hash_extract of few": lambda x: select.hash_extract(x, 20.0, 50),
    "slot_max": lambda x: select.slot_max(x, 50, seed=3),
    "slot_max of tiles": lambda x: select.slot_max(jnp.tile(x, 7), 50),
}
SLOW = ["top_k", "group_top_k", "compact", "hash_extract", "slot_max"]
every_selection = pytest.mark.parametrize("name", some(["fast_top_k", *SLOW], ["fast_top_k"]))


@functools.cache
def rows_and_results(name):
    rows = jnp.stack([make("cubed", 3001, seed=seed) for seed in range(4)])
    results = [SELECTIONS[name](row) for row in rows]
    return rows, jax.tree.map(lambda *leaves: np.stack(leaves), *results)


def check_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "way"),
    rows(
        [("compact", "vmap"), ("fast_top_k", "shard_map")],
        [
            *((name, "vmap") for name in SELECTIONS if name != "compact"),
            *((name, "shard_map") for name in SLOW),
        ],
    ),
)
def test_selections_on_workers(name, way):
    rows, expected = rows_and_results(name)
    check_equal(on_workers(SELECTIONS[name], 4, way)(rows), expected)


@pytest.mark.slow
@every_selection
def test_replicated_inputs_give_replicated_results_under_shard_map(name):
    rows, expected = rows_and_results(name)
    spec = jax.sharding.PartitionSpec()
    one = jax.shard_map(SELECTIONS[name], mesh=mesh(4), in_specs=spec, out_specs=spec)
    check_equal(one(rows[0]), jax.tree.map(lambda leaf: leaf[0], expected))


@pytest.mark.slow
@every_selection
def test_selections_under_x64(name):
    rows, expected = rows_and_results(name)
    with jax.enable_x64(True):
        found = SELECTIONS[name](rows[0])
        for leaf in jax.tree.leaves(found):
            assert leaf.dtype in (jnp.int32, jnp.float32)
        check_equal(found, jax.tree.map(lambda leaf: leaf[0], expected))
        wide = jnp.asarray(np.asarray(rows[0], np.float64))
        check_equal(SELECTIONS[name](wide), jax.tree.map(lambda leaf: leaf[0], expected))
