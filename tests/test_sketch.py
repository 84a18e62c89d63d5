"""The count sketch against its definition, the textbook's, and the papers' claims."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_sketch as reference
from workers import some

from jaxsparse import sketch
from jaxsparse.arrays.hashing import permuted
from jaxsparse.select.fast import Values, streaming_top_k
from jaxsparse.sketch import SketchSpec, tiles
from jaxsparse.sketch.heavy import mix_in_random

# Sizes and specs. They cover one element, fewer elements than a tile and than cols, whole tiles and
# not, cols that are odd, prime or beyond the longest tile, even rows, and more rows than one hash
# has bits.
CASES = [
    (1, SketchSpec(1, 1)),
    (1, SketchSpec(5, 7, seed=3)),
    (6, SketchSpec(3, 7, seed=1)),
    (7, SketchSpec(3, 7, seed=1)),
    (8, SketchSpec(2, 7, seed=1)),
    (50, SketchSpec(3, 1)),
    (100, SketchSpec(4, 97, seed=2**32 - 1)),
    (1024, SketchSpec(5, 128)),
    (5003, SketchSpec(6, 1000, seed=5)),
    (300, SketchSpec(35, 40)),
    (40_000, SketchSpec(3, 2**14 + 1, seed=9)),
    (2**15, SketchSpec(2, 20_001, seed=9)),
]
USUAL = [CASES[i] for i in (4, 8, 11)]
cases = pytest.mark.parametrize("case", some([*USUAL, *CASES[:10:3]], USUAL), ids=str)


def places(size, spec):
    return reference.buckets_and_signs(spec.rows, spec.cols, spec.seed, np.arange(size))


def integers(size, seed=0):
    """Small integers. Their sums are exact in float32, whatever their order."""
    return np.random.default_rng(seed).integers(-8, 9, size).astype(np.float32)


def cubed_normal(size, seed=0):
    return (np.random.default_rng(seed).normal(size=size) ** 3).astype(np.float32)


# --- agreement with the definition ---


@cases
def test_encode_is_the_definition_exactly_on_integers(case):
    size, spec = case
    x = integers(size)
    expected = reference.encode(x, spec.cols, places(size, spec))
    np.testing.assert_array_equal(sketch.encode(jnp.asarray(x), spec), expected)


@cases
def test_decode_is_the_definition_and_decode_at_agrees_bitwise(case):
    size, spec = case
    x = integers(size)
    table = reference.encode(x, spec.cols, places(size, spec)).astype(np.float32)
    estimates = np.asarray(sketch.decode(table, spec, size))
    np.testing.assert_array_equal(estimates, reference.decode(table, places(size, spec)))

    table = cubed_normal(table.size).reshape(table.shape)
    estimates = np.asarray(sketch.decode(table, spec, size))
    np.testing.assert_allclose(estimates, reference.decode(table, places(size, spec)), rtol=1e-6)
    indices = np.random.default_rng(1).integers(0, size, min(2 * size, 300)).astype(np.int32)
    at = np.asarray(sketch.decode_at(table, spec, jnp.asarray(indices)))
    np.testing.assert_array_equal(at.view(np.uint32), estimates[indices].view(np.uint32))


def test_decode_at_past_the_end_estimates_zeros():
    size, spec = 500, SketchSpec(5, 101)
    table = np.asarray(sketch.encode(jnp.asarray(integers(size)), spec))
    past = np.array([500, 503, 123_456_789, 2**31 - 1, -1], np.int32)
    index = past.astype(np.int64) % 2**32
    expected = reference.decode(
        table, reference.buckets_and_signs(spec.rows, spec.cols, spec.seed, index)
    )
    np.testing.assert_array_equal(sketch.decode_at(table, spec, jnp.asarray(past)), expected)


def test_encode_rounds_as_float32_sums_do():
    size, spec = 5003, SketchSpec(5, 100)
    x = cubed_normal(size)
    expected = reference.encode(x, spec.cols, places(size, spec))
    table = np.asarray(sketch.encode(jnp.asarray(x), spec))
    bound = reference.encode(
        np.abs(x), spec.cols, [np.abs(p) for p in places(size, spec)]
    )  # of all magnitudes in a column
    assert np.all(np.abs(table - expected) <= 1e-5 * bound)


@pytest.mark.parametrize("dtype", some([jnp.bfloat16, jnp.float16], [jnp.bfloat16]))
def test_half_precision_is_accumulated_in_float32(dtype):
    spec = SketchSpec(3, 16)
    # Sums of these are exact in float32, in any order, but need more than 8 bits.
    x = jnp.asarray(np.random.default_rng(0).integers(-100, 100, 1000), dtype)
    table = sketch.encode(x, spec)
    assert table.dtype == jnp.float32
    np.testing.assert_array_equal(table, sketch.encode(x.astype(jnp.float32), spec))


def test_merge_is_the_sketch_of_the_sum():
    spec = SketchSpec(5, 64)
    xs = [jnp.asarray(integers(1001, seed)) for seed in range(3)]
    tables = [sketch.encode(x, spec) for x in xs]
    np.testing.assert_array_equal(sketch.merge(*tables), sketch.encode(sum(xs), spec))
    np.testing.assert_array_equal(sketch.merge(tables[0]), tables[0])


@pytest.mark.slow
def test_fresh_seeds_and_signed_seeds_need_no_new_trace():
    traces = 0

    @jax.jit
    def step(x, seed):
        nonlocal traces
        traces += 1
        return sketch.encode(x, SketchSpec(3, 50), seed=seed)

    x = jnp.asarray(cubed_normal(100))
    tables = [np.asarray(step(x, jnp.uint32(seed))) for seed in range(3)]
    assert traces == 1
    assert len({table.tobytes() for table in tables}) == 3
    np.testing.assert_array_equal(step(x, jnp.int32(2)), tables[2])
    fresh, static = SketchSpec(3, 50), SketchSpec(3, 50, seed=2)
    decoded = sketch.decode(tables[2], fresh, 100, seed=jnp.uint32(2))
    np.testing.assert_array_equal(decoded, sketch.decode(tables[2], static, 100))
    found = sketch.heavy_hitters(tables[2], fresh, 100, 9, seed=jnp.uint32(2))
    expected = sketch.heavy_hitters(tables[2], static, 100, 9)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


# --- statistics ---


def structured(name, size=4096):
    """Vectors like gradients that have broken sketches. Their strides divide cols and the tile."""
    rng = np.random.default_rng(3)
    x = 0.01 * rng.normal(size=size)
    if name == "constant":
        x[:] = 1
    elif name == "normal":
        x = rng.normal(size=size)
    elif name == "cubed":
        x = rng.normal(size=size) ** 3
    elif name == "heavy row":
        x[640:704] += 1 + rng.uniform(size=64)
    elif name == "heavy column":
        x[17::64] += 1 + rng.uniform(size=64)
    elif name == "stride of a tile":
        x[5::256] += 1 + rng.uniform(size=16)
    elif name == "low rank":
        x = np.outer(rng.normal(size=64) ** 3, rng.normal(size=64)).ravel()
    else:
        assert name == "alternating"
        x = np.where(np.arange(size) % 2, 1, -1)
    return np.asarray(x, np.float32)


STRUCTURES = (
    *("constant", "normal", "cubed", "heavy row", "heavy column"),
    *("stride of a tile", "low rank", "alternating"),
)
structures = pytest.mark.parametrize(
    "name", some(["stride of a tile", "constant"], ["stride of a tile"])
)
SEEDS = jnp.arange(400, dtype=jnp.uint32)


@functools.partial(jax.jit, static_argnames="spec")
def estimates_and_norms(x, spec):
    def one(seed):
        table = sketch.encode(x, spec, seed=seed)
        return sketch.decode(table, spec, x.size, seed=seed), sketch.l2_norm(table)

    return jax.lax.map(one, SEEDS)


@pytest.mark.slow
@pytest.mark.parametrize("cols", [256, 257])
@structures
def test_one_row_is_unbiased_with_variance_below_the_bound(name, cols, monkeypatch):
    """Of tiles that are a row each, and with 257 columns of groups of eight tiles."""
    if cols == 257:  # no other test has this spec, whose programs are kept
        monkeypatch.setattr(tiles, "_MAX_TILE", 32)
    spec, x = SketchSpec(1, cols), structured(name)
    assert spec.group == (8 if cols == 257 else 1)
    estimates, norms = (np.asarray(v, float) for v in estimates_and_norms(jnp.asarray(x), spec))
    errors = estimates - x
    bound = np.sum(x.astype(float) ** 2) / spec.cols

    # Per coordinate and overall, compared with the standard error that the bound allows.
    z = errors.mean(axis=0) / np.sqrt(bound / len(SEEDS))
    assert np.max(np.abs(z)) < 6
    overall = errors.mean(axis=1)
    assert abs(overall.mean()) < 5 * overall.std() / np.sqrt(len(SEEDS))

    variance = np.mean(errors**2, axis=1)
    standard_error = variance.std() / np.sqrt(len(SEEDS))
    assert variance.mean() < bound + 4 * standard_error
    # A coordinate never meets elements of its own group of tiles. It meets all others with
    # probability 1 / cols.
    groups = np.sum(x.astype(float).reshape(-1, spec.tile * spec.group) ** 2, axis=1)
    expected = np.mean(groups.sum() - groups) / spec.cols
    assert abs(variance.mean() - expected) < 5 * standard_error + 1e-3 * bound

    # A row's squared norm is unbiased: signs differ for elements, not for tiles, so that cross
    # terms cancel.
    squared = norms**2 / np.sum(x.astype(float) ** 2)
    assert abs(squared.mean() - 1) < 5 * squared.std() / np.sqrt(len(SEEDS)) + 1e-4


@structures
def test_median_is_as_accurate_as_the_textbook_sketch(name):
    spec, x = SketchSpec(5, 256), structured(name)
    estimates, norms = (np.asarray(v) for v in estimates_and_norms(jnp.asarray(x), spec))
    ours, theirs, their_norms = np.abs(estimates - x), [], []
    for seed in range(100):
        where = reference.random_buckets_and_signs(spec.rows, spec.cols, seed, x)
        table = reference.encode(x, spec.cols, where)
        theirs.append(np.abs(reference.decode(table, where) - x))
        their_norms.append(reference.l2_norm(table))
    for q in (0.5, 0.9, 0.99):
        assert np.quantile(ours, q) < 1.15 * np.quantile(theirs, q) + 1e-6, q
    assert np.quantile(ours, 0.9) > 0.7 * np.quantile(theirs, 0.9) - 1e-6  # as accurate, not better
    assert abs(np.median(norms) / np.median(their_norms) - 1) < 0.02
    bias = estimates.mean(axis=0) - x  # the median has none, because noise is symmetric
    assert np.max(np.abs(bias)) < 6 * np.linalg.norm(x) / np.sqrt(spec.cols * len(SEEDS))


@pytest.mark.parametrize("cols", some([97, 128, 250, 1000], [97]))
def test_elements_of_a_group_never_meet_and_others_do_with_probability_one_in_cols(
    cols, monkeypatch
):
    """The columns of the definition, which `encode` and `decode` have exactly."""
    monkeypatch.setattr(reference, "TILE", 16)
    tile, count = reference.tile_and_group(cols)
    length = tile * count
    assert cols - tile < length <= cols
    assert count >= 4
    index, seeds, rows = np.arange(4 * length), 3000, 3
    met = np.zeros(len(index))
    for seed in range(seeds // rows):
        for row in range(rows):
            columns = reference.placed(cols, seed, row, index.astype(np.uint64))
            assert len(np.unique(columns[:length])) == length
            met += columns == columns[length // 3]
    assert met[length // 3] == seeds
    others = met[length:] / seeds
    assert abs(others.mean() * cols - 1) < 0.25
    # None is met much more often than others: they are as even as independent draws.
    assert np.max(np.abs(others - others.mean())) < 6 * np.sqrt(1 / cols / seeds)


@pytest.mark.parametrize("rows", [1, 4, 5])
def test_l2_norm_is_the_median_of_row_norms_at_any_scale(rows):
    table = cubed_normal(rows * 300).reshape(rows, 300)
    for scale in (0, 1, 1e30, 1e-30):
        norm = sketch.l2_norm(jnp.asarray(table * np.float32(scale)))
        np.testing.assert_allclose(norm, reference.l2_norm(table) * scale, rtol=1e-5)


# --- heavy hitters ---


def check_choice(table, spec, size, choice):
    """Checks any choice: indices are distinct and in range, estimates are those of decoding."""
    indices, estimates = (np.asarray(v) for v in choice)
    assert indices.dtype == np.int32
    assert len(np.unique(indices)) == len(indices)
    assert indices.min() >= 0
    assert indices.max() < size
    np.testing.assert_array_equal(estimates, np.asarray(sketch.decode(table, spec, size))[indices])
    return indices


@pytest.mark.slow
@pytest.mark.parametrize("case", some(USUAL, [CASES[8]]), ids=str)
@pytest.mark.parametrize("share", some([0, 1], [1]))
def test_top_k_is_exact_where_every_element_has_a_slot(case, share):
    size, spec = case
    k = max(1, -(-size // 15), int(share * size))
    table = sketch.encode(jnp.asarray(cubed_normal(size)), spec)
    indices = check_choice(table, spec, size, sketch.heavy_hitters(table, spec, size, k))
    magnitudes = np.abs(np.asarray(sketch.decode(table, spec, size)))
    smallest_kept = magnitudes[indices].min()
    if k == size:
        assert len(indices) == size
    else:
        largest_left = np.delete(magnitudes, indices).max()
        assert largest_left <= smallest_kept * (1 + 2.0**-14)


LARGE = 200_003


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", some([(1, 2000), (20, 2000), (2000, 2000), (20, 60)], [(20, 60)]), ids=str
)
def test_top_k_keeps_nearly_all_energy(case):
    k, cols = case
    spec = SketchSpec(
        5, cols, seed=4
    )  # with 60 columns there are 4000 tiles, so slots are as full as they get
    x = np.random.default_rng(0).normal(size=LARGE).astype(np.float32) ** 3
    table = sketch.encode(jnp.asarray(x), spec)
    indices = check_choice(table, spec, LARGE, sketch.heavy_hitters(table, spec, LARGE, k))
    estimates = np.asarray(sketch.decode(table, spec, LARGE))
    best = estimates[reference.top_k(estimates, k)]
    assert np.sum(estimates[indices] ** 2) >= 0.97 * np.sum(best**2)


# Regions of heavy elements: a layer, and columns of matrices whose width divides the tile or is it.
REGIONS = {
    "adjacent": slice(70_001, 70_801),
    "stride 1000": slice(9, None, 1000),
    "stride of a tile": slice(1999, None, 2000),
    "last": slice(LARGE - 500, None),
}


@pytest.mark.slow
@pytest.mark.parametrize("region", some(REGIONS, ["stride of a tile"]))
def test_heavy_regions_are_not_lost_to_each_other(region):
    """The table is exact, so that only the slots can lose. A lone element loses one in 16."""
    heavy = np.arange(LARGE)[REGIONS[region]]
    k = len(heavy)
    magnitudes = np.full(LARGE, 0.01, np.float32)
    magnitudes[heavy] = 1 + np.random.default_rng(0).uniform(size=k)
    values = jnp.asarray(magnitudes)

    @jax.jit
    def recall(seed):
        stored = Values.of_vector(values, 2000)
        chosen = streaming_top_k(stored, LARGE, 2000, k, seed=seed, like=(values,))
        return jnp.mean(values[chosen] >= 1)

    recalls = np.asarray([recall(jnp.uint32(seed)) for seed in range(10)])
    assert recalls.mean() > 0.9
    assert recalls.min() > 0.7


@pytest.mark.slow
def test_indices_are_recovered_where_slots_are_fullest():
    """The last of 255 tiles that share slots. Its number needs all the bits that it has."""
    size, tile, k = 255 * 15 * 50, 50, 20
    values = jnp.zeros(size).at[-k:].set(1.0)
    stored = Values.of_vector(values, tile)
    chosen = streaming_top_k(stored, size, tile, k, seed=jnp.uint32(0), like=(values,))
    np.testing.assert_array_equal(np.sort(chosen), np.arange(size - k, size))


@pytest.mark.slow
def test_single_large_element_survives_ties():
    spec, size = SketchSpec(5, 1000), 2000
    for index in (0, 1234, size - 1):
        table = sketch.encode(jnp.zeros(size).at[index].set(-3.0), spec)
        indices, estimates = sketch.heavy_hitters(table, spec, size, 200)
        assert estimates[np.asarray(indices) == index] == -3.0


def test_non_finite_coordinates_are_found_and_the_rest_survives():
    spec, size = SketchSpec(5, 1000), 2000
    x = np.zeros(size, np.float32)
    x[[3, 700, 1500]] = np.nan, np.inf, 5
    table = sketch.encode(jnp.asarray(x), spec)
    indices, _ = sketch.heavy_hitters(table, spec, size, 200)
    assert {3, 700, 1500} <= set(np.asarray(indices).tolist())
    assert len(set(np.asarray(indices).tolist())) == 200


def heavymix(table, spec, size, k, key):
    choice = sketch.heavy_hitters(table, spec, size, k, rule="heavymix", key=key)
    return set(check_choice(table, spec, size, choice).tolist())


@pytest.mark.slow
@pytest.mark.parametrize("k", some([70, 1000], [70]))
def test_heavymix_is_algorithm_1(k):
    size, spec = 1000, SketchSpec(5, 200)
    x = 0.01 * cubed_normal(size)
    x[:20] += 10
    x[20:40] += 2  # between l2 / k and l2 / sqrt(k) for the smallest k
    table = np.asarray(sketch.encode(jnp.asarray(x), spec))
    estimates = np.asarray(sketch.decode(table, spec, size))
    expected = set(reference.heavy(estimates, reference.l2_norm(table), k).tolist())
    assert 15 <= len(expected) < k

    first, second = (heavymix(table, spec, size, k, jax.random.key(seed)) for seed in (0, 1))
    all_heavy = set(np.flatnonzero(np.abs(estimates) >= reference.l2_norm(table) / np.sqrt(k)))
    for chosen in (first, second):
        assert chosen & all_heavy == expected
        assert k > 70 or not chosen >= set(range(20, 40))
    assert first == heavymix(table, spec, size, k, jax.random.key(0))
    assert (first != second) == (k < size)


@pytest.mark.slow
def test_heavymix_cuts_to_the_k_largest_when_more_are_heavy():
    size, k = 4000, 40
    spec = SketchSpec(1, 20)  # so crowded that most estimates are noise, and heavy
    table = np.asarray(sketch.encode(jnp.asarray(cubed_normal(size)), spec))
    estimates = np.abs(np.asarray(sketch.decode(table, spec, size)))
    threshold = reference.l2_norm(table) / np.sqrt(k)
    assert np.sum(estimates >= threshold) > 10 * k
    chosen = heavymix(table, spec, size, k, jax.random.key(0))
    assert np.all(estimates[list(chosen)] >= threshold)


@jax.jit
def mixed(indices, heavy, is_heavy, key):
    return mix_in_random(indices, heavy, is_heavy.size, lambda i: is_heavy[i], key=key)


@pytest.mark.parametrize("light", [0, 25, 990])
def test_places_left_go_to_light_coordinates_and_only_then_to_missed_heavy_ones(light, key):
    """As if slots had lost heavy coordinates: most of those that `indices` lacks are heavy, too."""
    size, k = 1000, 60
    indices, heavy = jnp.arange(k, dtype=jnp.int32) * 7, jnp.arange(k) % 2 == 0
    light_ones = np.random.default_rng(0).permutation(np.setdiff1d(np.arange(size), indices))[
        :light
    ]
    is_heavy = np.ones(size, bool)
    is_heavy[light_ones] = is_heavy[indices[~heavy]] = False
    chosen = mixed(indices, heavy, is_heavy, key)
    chosen = set(np.asarray(chosen).tolist())
    assert len(chosen) == k
    assert chosen >= set(np.asarray(indices[heavy]).tolist())
    added = chosen - set(np.asarray(indices[heavy]).tolist())
    drawn = np.asarray(permuted(jnp.arange(2 * k, dtype=jnp.int32), size, key))
    light_drawn = set(drawn[~is_heavy[drawn]].tolist())
    assert added <= light_drawn if len(light_drawn) >= k // 2 else added > light_drawn


@functools.partial(jax.jit, static_argnames=("spec", "k", "rule"))
def shares_delivered(x, spec, k, rule):
    """The share of the squared norm at the coordinates chosen, for each seed."""

    def one(seed):
        table = sketch.encode(x, spec, seed=seed)
        key = jax.random.key(seed)
        chosen, _ = sketch.heavy_hitters(table, spec, x.size, k, rule=rule, key=key, seed=seed)
        return jnp.sum(jnp.square(x[chosen])) / jnp.sum(jnp.square(x))

    return jax.lax.map(one, SEEDS)


@pytest.mark.slow
@pytest.mark.parametrize("rule", some(["heavymix", "top_k"], ["heavymix"]))
@pytest.mark.parametrize("name", STRUCTURES)
def test_exact_values_of_heavy_hitters_are_a_contraction(name, rule):
    """Lemma 1: E ||x - comp(x)||^2 <= (1 - k/d) ||x||^2, if columns are of the order of k.

    Where x is constant, no choice does better. Where few coordinates are heavy, they are delivered.
    """
    spec, x, k = SketchSpec(5, 256), structured(name), 64
    shares = np.asarray(shares_delivered(jnp.asarray(x), spec, k, rule), float)
    least = k / x.size
    assert shares.mean() >= least - 4 * shares.std() / np.sqrt(len(shares)) - 1e-6
    if name == "constant":
        np.testing.assert_allclose(shares, least, rtol=1e-5)
    if name.startswith(("heavy", "stride")):
        # Estimates of 64 coordinates of like magnitudes are noisy, and some of them are below
        # HEAVYMIX's threshold, l2 / sqrt(k).
        assert shares.mean() > 0.5


# --- composition ---


def test_nothing_of_the_vectors_size_is_stored_or_sorted(request):
    """Encoding makes no copy. Choosing 1 % takes a fraction of the size. Neither sorts."""
    on_cpu = jax.default_backend() == "cpu"
    # For a GPU, XLA stores arrays that are small enough for its cache.
    size, spec = (2**20, SketchSpec(5, 2**12)) if on_cpu else (2**24, SketchSpec(5, 2**14))
    x = jax.ShapeDtypeStruct((size,), jnp.float32)
    table = jax.ShapeDtypeStruct((spec.rows, spec.cols), jnp.float32)
    encode = jax.jit(lambda x: sketch.encode(x, spec)).lower(x)
    choose = jax.jit(lambda table: sketch.heavy_hitters(table, spec, size, size // 100)).lower(
        table
    )
    for lowered, share in (encode, 0.1), (choose, 0.4):
        assert not re.search(r"\.sort|top_k", lowered.as_text())
        if on_cpu and request.config.getoption("--gpu-forms"):
            continue  # a CPU stores what a GPU computes on the fly
        assert lowered.compile().memory_analysis().temp_size_in_bytes < share * 4 * size


# --- errors ---

SPEC = SketchSpec(2, 8)
TABLE = jnp.zeros((2, 8))
X = jnp.zeros(5)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: SketchSpec(0, 8), r"rows=0 must be in 1"),
        (lambda: SketchSpec(2.0, 8), r"rows=2\.0 must be an int"),
        (lambda: SketchSpec(True, 8), r"rows=True must be an int"),
        (lambda: SketchSpec(2, 0), r"cols=0 must be in 1"),
        (lambda: SketchSpec(2, 2**30), r"cols=1073741824 must be in 1"),
        (lambda: SketchSpec(2, 8, seed=-1), r"seed=-1 must be in 0"),
        (lambda: SketchSpec(2, 8, seed=2**32), r"seed=4294967296 must be in 0"),
        (lambda: sketch.encode(X[None], SPEC), r"x has shape \(1, 5\).*ravel"),
        (lambda: sketch.encode(X[:0], SPEC), r"x\.size=0 must lie between 1"),
        (lambda: sketch.encode(X.astype(jnp.int32), SPEC), r"x has dtype int32.*astype"),
        (
            lambda: jax.eval_shape(
                lambda x: sketch.encode(x, SPEC), jax.ShapeDtypeStruct((2**31,), jnp.float32)
            ),
            r"x\.size=2147483648 must lie between 1 .*split",
        ),
        (lambda: sketch.merge(), r"tables is empty"),
        (lambda: sketch.merge(TABLE, TABLE[:1]), r"tables have shapes .*one SketchSpec"),
        (lambda: sketch.decode(TABLE.T, SPEC, 5), r"table has shape \(8, 2\), but spec is"),
        (lambda: sketch.decode(TABLE.astype(jnp.bfloat16), SPEC, 5), r"dtype bfloat16.*astype"),
        (lambda: sketch.decode(TABLE, SPEC, 0), r"size=0 must lie between 1"),
        (lambda: sketch.decode(TABLE, SPEC, 2**31), r"size=2147483648 must lie between 1"),
        (lambda: sketch.decode_at(TABLE[0], SPEC, jnp.arange(2)), r"table has shape \(8,\)"),
        (lambda: sketch.decode_at(TABLE, SPEC, X), r"indices have shape \(5,\) and dtype float32"),
        (lambda: sketch.decode_at(TABLE, SPEC, jnp.int32(1)), r"indices have shape \(\)"),
        (lambda: sketch.l2_norm(TABLE[0]), r"table has shape \(8,\)"),
        (lambda: sketch.heavy_hitters(TABLE, SPEC, 0, 1), r"size=0 must lie between 1"),
        (lambda: sketch.heavy_hitters(TABLE.T, SPEC, 5, 1), r"table has shape \(8, 2\)"),
        (lambda: sketch.heavy_hitters(TABLE, SPEC, 5, 1, rule="topk"), r"rule='topk' is unknown"),
        (
            lambda: sketch.heavy_hitters(TABLE, SPEC, 5, 1, rule="heavymix"),
            r"key=None, but 'heavymix' draws",
        ),
    ],
)
def test_errors_name_the_argument_its_value_and_the_remedy(call, words):
    with pytest.raises(ValueError, match=words):
        call()
