"""The forms that GPUs run in place of loops over tiles: same results, on CPU, and no loops.

`pytest --gpu-forms` runs any other test with these forms.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from workers import on_workers, some

from jaxsparse import select, sketch
from jaxsparse.arrays import platforms
from jaxsparse.arrays.blocks import BlockStream
from jaxsparse.select import compaction, fast, slots
from jaxsparse.sketch import codec, tiles


@pytest.fixture(autouse=True)
def both_forms(monkeypatch):
    """Whatever the other tests of this run trace; see conftest.py."""
    monkeypatch.setattr(platforms, "platform_dependent", jax.lax.platform_dependent)


def cubed(size, seed=0, dtype=jnp.float32):
    x = np.random.default_rng(seed).normal(size=size).astype(np.float32) ** 3
    return jnp.asarray(x).astype(dtype)


def assert_same(forms, *operands):
    """Checks that two functions return the same bits."""
    plain, gpu = (jax.jit(form)(*operands) for form in forms)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(gpu), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    return plain


def test_what_is_stored_is_not_fused():
    """On a CPU: XLA may learn to take the loop out that keeps a padding apart."""
    program = jax.jit(lambda x: 2 * platforms.stored(jnp.pad(x, (0, 5)))).lower(jnp.ones(1003))
    assert " while(" in program.compile().as_text()


# --- counting ---


@pytest.mark.parametrize("size", some([128, 1003, 2**20 + 77], (1003, 2**20 + 77)))
def test_sums_and_maxima(size):
    x = jnp.asarray(np.random.default_rng(size).integers(2**31, size=size), jnp.uint32)
    halved = lambda x: x >> jnp.uint32(1)
    for reduce, join in (platforms._sum, jnp.add), (jnp.max, jnp.maximum):
        in_lanes = functools.partial(platforms._in_lanes, reduce, join, halved)
        assert_same((in_lanes, lambda x, reduce=reduce: reduce(halved(x))), x)


@pytest.mark.parametrize("bits", some([31, 23, 4, 1], [31]))
@pytest.mark.parametrize("k", some([1, 40, 1003], [40]))
def test_kth_largest(bits, k):
    x = np.random.default_rng(bits).integers(2**bits, size=1003).astype(np.uint32)
    x[::7] = x[0]  # ties
    forms = (platforms._by_bits, platforms._by_digits)
    forms = [functools.partial(f, k=k, bits=bits, key=None) for f in forms]
    assert int(assert_same(forms, jnp.asarray(x))) == np.sort(x)[-k]


@pytest.mark.parametrize("k", some([1, 500, 1003], [500]))
def test_kth_largest_of_magnitudes(k):
    x = cubed(1003).at[:300].set(0).at[5].set(jnp.inf)
    forms = (platforms._by_bits, platforms._by_digits)
    forms = [functools.partial(f, k=k, bits=31, key=platforms.magnitude_bits) for f in forms]
    found = np.uint32(assert_same(forms, x)).view(np.float32)
    assert found == np.sort(np.abs(x))[-k]


# --- compaction ---


@pytest.mark.parametrize("share", some([0.001, 1], [0.001]))
@pytest.mark.parametrize(
    "room", some([(1, 0), (100, 40), (5000, 0)], [(100, 40), (5000, 0)]), ids=str
)
def test_blocks_of_slots(share, room):
    capacity, first = room
    counts = np.random.default_rng(0).binomial(32, share, size=(120, 32)).astype(np.int32)
    counts[3:40] = 0
    within = assert_same([compaction._sums_along, compaction._sum_along], jnp.asarray(counts))
    np.testing.assert_array_equal(within, np.cumsum(counts, axis=1))
    total = int(np.sum(counts))
    finders = compaction._blocks_by_marks, compaction._blocks_by_search

    def filled(find):
        def found(counts):
            ends, block = find(counts, jnp.int32(first), capacity=capacity)
            return ends, block[: max(total - first, 0)]

        return found

    ends, block = assert_same(map(filled, finders), within[:, -1])
    np.testing.assert_array_equal(ends, np.cumsum(within[:, -1]))
    expected = np.repeat(np.arange(120), within[:, -1])[first : first + capacity]
    np.testing.assert_array_equal(block, expected)


@pytest.mark.parametrize("ranks", [2, 3])
def test_packed_ranks(ranks):
    kind = jnp.asarray(np.random.default_rng(ranks).integers(0, 4, 5003), jnp.int32)
    forms = (
        functools.partial(compaction._pack_in_turn, mask=jnp.equal, ranks=ranks, enough=5003),
        functools.partial(compaction._pack_all, mask=jnp.equal, ranks=ranks),
    )
    words = assert_same(forms, kind)
    assert int(jnp.sum(jax.lax.population_count(words))) == int(jnp.sum(kind < ranks))


# --- slots ---


@pytest.mark.parametrize("shape", some([(5003, 5003), (200_000, 100)], [(200_000, 100)]), ids=str)
@pytest.mark.parametrize("threshold", some([0.0, 8.0], [8.0]))
def test_hash_extract(shape, threshold):
    size, m = shape
    x, t = cubed(size).at[::11].set(jnp.nan), jnp.float32(threshold)

    def write(held, indices, chosen):
        slot = jnp.where(chosen, slots.hash_slots(indices, m, 3), m)
        return held.at[slot].max(indices, mode="drop")

    compacted = functools.partial(slots._write_compacted, write=write, room=min(2 * m, size))
    forms = compacted, functools.partial(slots._write_all, write=write)
    assert_same(forms, x, t, jnp.full((m,), -1, jnp.int32))


# --- sketches ---

SPECS = [
    sketch.SketchSpec(rows=5, cols=200),
    sketch.SketchSpec(rows=4, cols=97, tile_size=16),
    sketch.SketchSpec(rows=33, cols=64, tile_size=64),
]


@pytest.mark.parametrize("spec", some(SPECS[:2], SPECS[1:2]), ids=str)
@pytest.mark.parametrize("size", some([16, 1003], [1003]))
def test_encode_to_rounding(spec, size):
    x = cubed(size, dtype=jnp.bfloat16)
    gathered = tiles.gathered if spec.tile_size is None else codec._encode_at_once
    forms = codec._encode_in_turn, gathered
    one, other = (jax.jit(functools.partial(form, spec=spec))(x, jnp.uint32(7)) for form in forms)
    assert one.shape == other.shape == (spec.rows, spec.cols)
    bound = 1e-6 * float(jnp.sum(jnp.abs(x.astype(jnp.float32))))
    np.testing.assert_allclose(one, other, rtol=0, atol=bound)
    # Sums of integers are the same in any order.
    x = jnp.round(x.astype(jnp.float32))
    assert_same([functools.partial(form, spec=spec) for form in forms], x, jnp.uint32(7))


@pytest.mark.parametrize("cols", some([200, 20_001], [20_001]))
def test_encoding_on_a_gpu_scatters_nothing(cols):
    """So it needs no atomic additions, and takes sums in one order. Tiles may form groups."""
    spec = sketch.SketchSpec(rows=3, cols=cols, seed=7)
    x = jnp.round(4 * cubed(50_007))
    gathered = jax.jit(functools.partial(tiles.gathered, spec=spec)).lower(x, jnp.uint32(7))
    compiled = gathered.compile()
    for text in gathered.as_text(), compiled.as_text():
        assert "gather" in text
        assert "scatter" not in text
    # Sums of integers are the same in any order.
    np.testing.assert_array_equal(compiled(x, jnp.uint32(7)), sketch.encode(x, spec))
    encode = jax.jit(functools.partial(sketch.encode, spec=spec)).trace(x)
    assert "scatter" not in encode.lower(lowering_platforms=("cuda",)).as_text()  # this form


@pytest.mark.parametrize("spec", some(SPECS[:2], SPECS[:1]), ids=str)
@pytest.mark.parametrize("size", some([16, 1003], [1003]))
def test_decode(spec, size):
    table = cubed(spec.rows * spec.cols).reshape(spec.rows, spec.cols)
    forms = codec._decode_in_turn, codec._decode_at_once
    forms = [functools.partial(form, spec=spec, size=size) for form in forms]
    assert_same(forms, table, jnp.uint32(7))


@pytest.mark.parametrize("spec", some(SPECS, SPECS[1:2]), ids=str)
def test_blocks(spec):
    rng = np.random.default_rng(0)
    indices = jnp.asarray(rng.permutation(40)[:9], jnp.int32).at[4].set(40)
    values = jnp.asarray(rng.integers(-9, 9, size=(9, spec.tile)), jnp.bfloat16)
    seed = jnp.uint32(1)
    forms = codec._encode_blocks_in_turn, lambda v, i, s, spec: tiles.add_all(v, i, spec, s)
    forms = [functools.partial(form, spec=spec) for form in forms]
    table = assert_same(forms, values, indices, seed)
    np.testing.assert_array_equal(
        table, sketch.encode_blocks(BlockStream(indices, values), spec, seed=1)
    )
    forms = codec._decode_blocks_in_turn, codec._decode_blocks_at_once
    forms = [functools.partial(form, spec=spec, count=40) for form in forms]
    assert not np.any(assert_same(forms, table, indices, seed)[4])  # the empty slot


def assert_same_slots(make_values, grid, table, seed):
    """Folding tiles of `make_values(table, seed)` in turn and gathering give the same slots."""
    fold = lambda *a: fast._fold(make_values(*a), grid, a[:1], a[1])
    gather = lambda *a: fast._gather(make_values(*a), grid, a[1])
    # If each element has a slot of its own, there are more slots than elements.
    elements = lambda form: lambda *a: form(*a)[: None if grid.is_shared else grid.size]
    assert_same([elements(fold), elements(gather)], table, seed)


@pytest.mark.parametrize("k", some([20, 90], [20]))  # 90: a slot for each element
def test_slots_of_heavy_hitters(k):
    tile = 200
    spec = sketch.SketchSpec(rows=5, cols=200, tile_size=tile)

    def values(table, seed):
        return fast.Values(
            tiles.tile_estimates(table, spec, seed),
            functools.partial(tiles.estimates_at, table, spec, seed),
        )

    grid = fast._Grid.of(1003, tile, k)
    for seed in map(jnp.uint32, range(3)):
        table = cubed(1000, int(seed)).reshape(5, 200).at[2, 7].set(jnp.inf)
        assert_same_slots(values, grid, table, seed)


# Those of `fast_top_k`, with shared slots and with one for each element, and of `slot_max`.
GRIDS = {
    "shared": lambda tile: fast._Grid.of(1003, tile, 20),
    "own": lambda tile: fast._Grid.of(1003, tile, 90),
    "slot_max": lambda tile: fast._Grid(
        1003, tile, 1, -(-1003 // tile), (1002 // tile).bit_length(), 0
    ),
}


@pytest.mark.parametrize("kind", GRIDS)
@pytest.mark.parametrize("tile", some([7, 16, 64, 200], [7]))
def test_slots_of_a_vector(tile, kind):
    values = lambda x, seed: fast.Values.of_vector(x, tile)
    for seed in map(jnp.uint32, range(3)):
        x = cubed(1003, int(seed), jnp.bfloat16).at[-1].set(1e4)  # nothing past it must be read
        assert_same_slots(values, GRIDS[kind](tile), x, seed)


@pytest.mark.parametrize("k", some([3, 40], [3]))  # 40: a slot for each element
def test_only_the_seed_may_vary(k):
    """Branches must agree on what differs between devices, or nothing is traced."""
    x = cubed(500)

    def on_device(number):
        seed = jax.lax.convert_element_type(number[()], jnp.uint32)
        found = select.fast_top_k(x, k, seed=seed), select.slot_max(x, k, seed=seed)
        found += (
            select.hash_extract(x, 1.0, k, seed=seed),
            select.threshold_top_k(x, k, seed=seed),
        )
        return [stream.indices for stream in found]

    run = on_workers(on_device, 2)
    shape = jax.ShapeDtypeStruct((2,), jnp.int32)
    assert all(out.shape == (2, k) for out in jax.eval_shape(run, shape))


# --- what is compiled for a GPU ---

SPEC = SPECS[0]
X = 20_003
# Each function, and the number of its loops. They have few turns: the digits of a k-th largest, or
# eight groups of tiles, in as many parts as fill the device.
COMPILED = {
    "encode": (lambda x: sketch.encode(x, SPEC), 1),
    "decode": (lambda x: sketch.decode(x[:1000].reshape(5, 200), SPEC, X), 0),
    "heavy_hitters": (lambda x: sketch.heavy_hitters(x[:1000].reshape(5, 200), SPEC, X, 50), 1),
    "encode_blocks": (
        lambda x: sketch.encode_blocks(
            BlockStream(jnp.arange(100, dtype=jnp.int32), x[:20_000].reshape(100, 200)), SPEC
        ),
        0,
    ),
    "decode_blocks": (
        lambda x: sketch.decode_blocks(
            x[:1000].reshape(5, 200), SPEC, jnp.arange(100, dtype=jnp.int32)
        ),
        0,
    ),
    "hash_extract": (lambda x: select.hash_extract(x, 1.0, 100), 0),
    "slot_max": (lambda x: select.slot_max(x, 100), 0),
    "fast_top_k": (lambda x: select.fast_top_k(x, 100), 1),
    "compact": (lambda x: select.compact(x > 1, 100), 0),
    # Three k-th largests: of the sample, of the candidates, and of all if candidates are too few or
    # too many. The fourth loop is the search for candidates, which takes a second turn then.
    "threshold_top_k": (lambda x: select.threshold_top_k(x, 100), 4),
    "group_top_k": (lambda x: select.group_top_k(x), 0),
    "block_top_k": (lambda x: select.block_top_k(x, 5, 256), 0),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    some(COMPILED, ["encode", "heavy_hitters", "hash_extract", "threshold_top_k", "compact"]),
)
@pytest.mark.parametrize("workers", some([0, 2], [2]))
def test_no_loops_over_tiles(name, workers):
    if workers > jax.device_count():
        pytest.skip(f"needs {workers} devices")
    function, loops = COMPILED[name]
    shape = jax.ShapeDtypeStruct((X,), jnp.float32)
    if workers:
        function = on_workers(function, workers)
        shape = jax.ShapeDtypeStruct((workers, X), jnp.float32)
    lowered = jax.jit(function).trace(shape).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("stablehlo.while") == loops
