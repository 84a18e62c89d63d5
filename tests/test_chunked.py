"""The chunk codec and its system against SparseLoCo's description, and by worked numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_chunks as reference
from supports import SUPPORTS, run, vectors
from workers import few, on_workers, some

from jaxsparse import codecs, error_feedback, select, traffic
from jaxsparse.arrays.bits import field_words, pack_fields, unpack_bits, unpack_fields
from jaxsparse.arrays.stream import SparseStream
from jaxsparse.quantize import entry_values
from jaxsparse.systems import ChunkedTopK, GTopK, OkTopk, SparCML, SparDL, TopK

VALUES = np.float32([0.9, -1.1, 0.5, -0.6, 1.4, -0.4, 0.7, -0.8])


@functools.cache
def there_and_back(bits, quantizer, size):
    way = entry_values(bits, quantizer)

    def arrive(values):
        words = way.encode(values, size)
        assert words.shape == (way.words(size),)
        return way.decode(words, size)

    return jax.jit(arrive)


def decoded(values, bits, quantizer):
    arrive = there_and_back(bits, quantizer, len(values))
    return np.asarray(arrive(np.float32(values)), np.float64)


@pytest.mark.parametrize("bits", [4, 8])
def test_levels_are_as_accurate_at_all_magnitudes(bits):
    """Powers of two scale levels exactly; differences of large logarithms would not."""
    values = np.float32(np.random.default_rng(0).uniform(0.3, 1, 64))
    usual = decoded(values, bits, "sign_magnitude")
    for exponent in (-120, 60, 126):
        scaled = decoded(np.ldexp(values, exponent), bits, "sign_magnitude")
        np.testing.assert_allclose(np.ldexp(scaled, -exponent), usual, rtol=5e-7)


def test_two_indices_are_three_bytes():
    assert np.asarray(pack_fields(jnp.uint32([3000, 77]), 12)).tobytes() == b"\xb8\xdb\x04\x00"


def test_another_number_of_words_is_refused():
    for unpack, taken in (
        (lambda words, size: unpack_fields(words, 12, size), 24),
        (unpack_bits, 2),
    ):
        for found in (taken - 1, taken + 1):
            message = f"packed has {found} words a vector, but `size` elements take {taken}"
            with pytest.raises(ValueError, match=message):
                unpack(jnp.zeros(found, jnp.uint32), 64)


@pytest.mark.parametrize("bits", few(range(33), [0, 9, 12]))
def test_fields_of_any_bits(bits):
    rng = np.random.default_rng(bits)
    for size in (1, 1001):
        fields = rng.integers(2**bits, size=(2, size), dtype=np.uint32)
        pack = jax.jit(functools.partial(pack_fields, bits=bits))
        unpack = jax.jit(functools.partial(unpack_fields, bits=bits, size=size))
        packed = pack(fields)
        assert packed.shape == (2, field_words(size, bits))
        assert packed.tolist() == [reference.pack(row, bits) for row in fields]
        np.testing.assert_array_equal(unpack(packed), fields)


def test_an_entry_has_fourteen_bits():
    codec = codecs.Chunked(64)
    assert codec.words(64, 4096) == 64 * 14 // 32 + 1  # 896 bits, and two levels
    assert codec.words(2**18, 2**24) == 2**18 * 14 // 32 + 2**18 // 256
    # Shorter than a chunk: 7 bits are enough for 100 elements.
    assert codec.words(64, 100) == field_words(64, 7) + field_words(64, 2) + 1
    assert codecs.Chunked(4, 512, 32).words(4 * 3, 512 * 3) == field_words(12, 9) + 12


def test_the_published_quantiser_by_hand():
    found = decoded(VALUES, 2, "published")
    expected = [1.15, -0.95, 0.05, 0.05, 1.15, 0.05, 0.05, -0.95]
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_sign_and_magnitude_by_hand():
    """The mean magnitude is 0.8. Above it are 0.9, 1.1 and 1.4; 0.79 is below."""
    values = np.where(np.float32(-0.8) == VALUES, np.float32(-0.79), VALUES)
    low, high = reference.half([2.99 / 5, 3.4 / 3])
    expected = [high, -high, low, -low, high, -low, low, -low]
    assert decoded(values, 2, "sign_magnitude").tolist() == expected
    sparse = decoded([0, 3, 0, -1, 0, 0, 0, 0], 2, "sign_magnitude")
    assert sparse.tolist() == [0, 2, 0, -2, 0, 0, 0, 0], "zeros stay zeros"


@pytest.mark.parametrize("size", some([1, 300], [300]))
@pytest.mark.parametrize("bits", some([2, 4, 8], [2, 8]))
@pytest.mark.parametrize("quantizer", ["sign_magnitude", "published"])
def test_values_equal_their_description(bits, quantizer, size):
    rng = np.random.default_rng(bits)
    twin = {"sign_magnitude": reference.sign_magnitude, "published": reference.published}[quantizer]
    for values in (
        rng.normal(size=size),
        rng.standard_t(2, size) * (rng.random(size) < 0.7),
        np.zeros(size),
        np.full(size, -2.5),
        1e37 * rng.normal(size=size),
    ):
        x = values.astype(np.float32)
        np.testing.assert_allclose(
            decoded(x, bits, quantizer), twin(x, bits), rtol=2e-5, atol=2e-6 * np.abs(x).max()
        )


def test_values_that_are_not_finite_do_not_vanish():
    for bits, quantizer in ((2, "sign_magnitude"), (8, "sign_magnitude"), (2, "published")):
        for bad in (np.nan, np.inf):
            values = np.ones(300)
            values[1] = bad
            assert not np.isfinite(decoded(values, bits, quantizer)[1]), (bits, quantizer, bad)


@pytest.mark.parametrize(
    ("draw", "most", "published"),
    [
        (lambda rng, n: rng.normal(size=n), 0.0050, 0.0125),
        (lambda rng, n: rng.laplace(size=n), 0.017, 0.038),
        (lambda rng, n: rng.standard_t(3, n), 0.195, 0.39),
    ],
    ids=["normal", "laplace", "student"],
)
def test_errors_of_two_bits(draw, most, published):
    """The 64 largest of each 4096. Errors are at most those of levels for a whole vector."""
    x = draw(np.random.default_rng(0), 2**20).astype(np.float32)
    values = x[np.asarray(reference.top_k(x, 64, 4096))]
    error = lambda y: np.sum(np.square(y - values)) / np.sum(np.square(values))
    assert error(decoded(values, 2, "sign_magnitude")) <= most
    assert error(decoded(values, 2, "published")) == pytest.approx(published, rel=0.25)
    assert error(decoded(values, 8, "sign_magnitude")) < 1e-4


def test_a_small_leaf_keeps_its_magnitude():
    """Levels for the whole vector would decode its small values to over 100 times their size."""
    rng = np.random.default_rng(0)
    scales = np.repeat(10.0 ** rng.uniform(-4, 0, 64), 256)
    values = (scales * (2 + rng.exponential(0.4, 2**14))).astype(np.float32)
    found = decoded(values, 2, "sign_magnitude")
    assert np.max(found / values) < 2
    assert np.max(decoded(values, 2, "published") / values) > 100


WHERE = [(workers, "vmap") for workers in (1, 2, 3, 5, 8)]
WHERE += [(workers, "shard_map") for workers in (2, 3, 8)]
SETTINGS = {
    "": {},
    "published": {"quantizer": "published", "aggregate": "mean_of_senders", "clip": "median"},
    "senders": {"aggregate": "mean_of_senders"},
    "clipped": {"clip": "median", "value_bits": 16},
    "8 bits": {"value_bits": 8},
    "exact": {"value_bits": 32},
}


@pytest.mark.parametrize(
    "case",
    some(
        [(where, name) for where in WHERE for name in SETTINGS],
        [((3, "vmap"), "published"), ((8, "shard_map"), "")],
        slow=[
            (where, name)
            for where in [(2, "vmap"), (3, "vmap"), (5, "vmap"), (8, "shard_map")]
            for name in SETTINGS
        ],
    ),
    ids=str,
)
def test_the_exchange_equals_its_description(case):
    (workers, way), name = case
    settings, size, k, chunk = SETTINGS[name], 1000, 5, 64
    bits = settings.get("value_bits", 2)
    quantize = {16: reference.half, 32: lambda v: v}.get(bits)
    if quantize is None:
        quantizer = settings.get("quantizer", "sign_magnitude")
        quantize = functools.partial(getattr(reference, quantizer), bits=bits)
    reducer = ChunkedTopK(k, chunk, **settings)
    for seed, supports in enumerate(SUPPORTS):
        x = vectors(supports, workers, size, seed)
        order = [np.asarray(select.group_top_k(jnp.float32(row), k, chunk).indices) for row in x]
        ((_, reduced),) = run(reducer, x, way)
        mean, residual = reference.exchange(
            x,
            k,
            chunk,
            quantize,
            order,
            settings.get("aggregate", "mean"),
            settings.get("clip"),
        )
        scale = np.abs(x).max()
        np.testing.assert_allclose(
            reduced.mean, np.broadcast_to(mean, x.shape), rtol=1e-4, atol=1e-5 * scale
        )
        np.testing.assert_allclose(reduced.residual, residual, rtol=1e-4, atol=1e-5 * scale)
        if reducer.conservation != "leaks":
            kept = workers * reduced.mean[0].astype(np.float64) + reduced.residual.sum(0)
            np.testing.assert_allclose(kept, x.sum(0), atol=1e-5 * scale * workers)


@pytest.mark.parametrize("workers", some([4, 8], [8]))
def test_bytes_of_an_exchange(workers):
    size = 2**16
    reducer = ChunkedTopK()
    exchange = on_workers(lambda x: reducer(x, (), axis_name="data").mean, workers)
    moved = traffic.wire_bytes(exchange.lower(jnp.zeros((workers, size), jnp.float32)).compile())
    assert [c.op for c in moved.collectives] == ["all-gather"]
    entries = size * 64 // 4096
    assert moved.received == 4 * (workers - 1) * (entries * 14 // 32 + entries // 256)


def random_stream(rng, capacity, size, empty=0.2):
    indices = rng.choice(size, capacity, replace=False).astype(np.int32)
    indices[rng.random(capacity) < empty] = size
    values = np.where(indices < size, rng.normal(size=capacity), 0)
    return SparseStream(jnp.asarray(indices), jnp.float32(values))


@pytest.mark.parametrize("bits", some((2, 4, 8, 16, 32), [2]))
@pytest.mark.parametrize("chunk_size", few((None, 1, 100, 4096, 2**16), [None]))
def test_any_stream_arrives_as_it_is_rounded(bits, chunk_size):
    """Entries may come in any order, and in batches, whose rows have levels of their own."""
    codec = codecs.Chunked(chunk_size=chunk_size, value_bits=bits)
    rng = np.random.default_rng(0)
    for capacity, size in ((1, 1), (40, 50), (700, 70_001)):
        rows = [random_stream(rng, capacity, size) for _ in range(2)]
        rows = jax.tree.map(lambda *x: jnp.stack(x), *rows)
        rounded, arrived = exchanged(codec, capacity, size)(rows)
        for i in range(2):
            row, came = (jax.tree.map(lambda x, i=i: x[i], s) for s in (rows, arrived))
            expected, found = np.zeros(size + 1), np.zeros(size + 1)
            expected[row.indices], found[came.indices] = rounded[i], came.values
            np.testing.assert_allclose(found[:size], expected[:size], rtol=1e-6)
            assert np.sum(np.asarray(came.indices) < size) == np.sum(np.asarray(row.indices) < size)
            if codec.is_exact:
                np.testing.assert_array_equal(rounded[i], row.values)


def exchanged(codec, capacity, size):
    def one(row):
        message = codec.encode(row, size)
        assert message.shape == (codec.words(capacity, size),)
        arrived = codec.decode(message, capacity, size, jnp.float32)
        return codec.rounded(row, size), arrived

    return jax.jit(jax.vmap(one))


def test_a_zero_is_no_entry_and_takes_no_level():
    """Otherwise 1 and 2 would share a level, beside one for zeros."""
    indices = jnp.array([5, 900, 7, 30, 1000], jnp.int32)
    stream = SparseStream(indices, jnp.float32([1, 2, 0, 0, 0]))
    rounded = jax.jit(lambda stream: codecs.Chunked().rounded(stream, 1000))
    assert rounded(stream).tolist() == [1, 2, 0, 0, 0]


def test_the_chunk_with_the_shortest_messages():
    """At one entry in 64, chunks of 512 take 9 bits an index and 10 a count of 8 entries."""
    size, k = 2**20, 2**14
    words = codecs.Chunked().words(k, size)
    sizes = {chunk: codecs.Chunked(chunk_size=chunk).words(k, size) for chunk in (256, 512, 4096)}
    assert words == min(sizes.values()) < sizes[4096]
    assert words * 32 / k < 12.5


REDUCERS = {
    "top_k": TopK(0.05, codec=codecs.Chunked()),
    "gtopk": GTopK(0.05, codec=codecs.Chunked()),
    "spardl": SparDL(0.05, codec=codecs.Chunked()),
    "spardl, teams": SparDL(0.05, teams=2, codec=codecs.Chunked(value_bits=4)),
    "ok_topk": OkTopk(0.05, codec=codecs.Chunked()),
    "ok_topk, 16 bits": OkTopk(0.05, codec=codecs.Chunked(value_bits=16)),
    "sparcml": SparCML(4, 64, algorithm="all_gather", codec=codecs.Chunked(4, 64)),
    "recursive": SparCML(4, 64, algorithm="recursive_double", codec=codecs.Chunked(value_bits=16)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", some(REDUCERS, ["gtopk"]))
@pytest.mark.parametrize("workers", some([4, 6], [6]))  # with 6, some workers fold in and out
def test_what_others_round_stays_in_the_residual(name, workers):
    reducer = REDUCERS[name]
    rng = np.random.default_rng(0)
    x = rng.standard_t(3, (workers, 3, 900)) * (rng.random((workers, 3, 900)) < 0.5)
    for before, reduced in run(reducer, x):
        mean = np.asarray(reduced.mean[0], np.float64)
        np.testing.assert_array_equal(reduced.mean, np.broadcast_to(reduced.mean[:1], before.shape))
        kept = workers * mean + np.asarray(reduced.residual, np.float64).sum(0)
        np.testing.assert_allclose(kept, before.astype(np.float64).sum(0), atol=1e-4)
        assert np.count_nonzero(mean)


@pytest.mark.parametrize(
    "name", some([name for name in REDUCERS if "sparcml" not in name], ["gtopk", "ok_topk"])
)
def test_messages_have_the_types_that_a_shard_map_checks(name):
    """Tracing for bytes checks types, which `data_parallel` leaves out."""
    tx = error_feedback(REDUCERS[name])
    moved = traffic.traced_bytes(tx, {"w": jax.ShapeDtypeStruct((40, 50), jnp.float32)}, 4)
    assert moved.received > 0


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (
            lambda: codecs.Chunked(chunk_size=70_000),
            r"chunk_size=70000 must lie between 1 and 6",
        ),
        (lambda: codecs.Chunked(65, 64), r"k=65 must lie between 1 and chunk_size=64"),
        (lambda: codecs.Chunked(value_bits=3), r"value_bits=3 .*use 2, 4, 8, 16 or 32"),
        (lambda: codecs.Chunked(quantizer="best"), r"quantizer='best' is unknown"),
        (lambda: codecs.Chunked(4, 64).words(9, 64), r"a stream of 9 entries, but k=4 .* are 4"),
        (lambda: codecs.Chunked().count(9), "k=None"),
        (lambda: codecs.Chunked().check(jnp.int32), "dtype int32: Chunked sends float32"),
        (lambda: ChunkedTopK(aggregate="sum"), r"aggregate='sum' is unknown"),
        (lambda: ChunkedTopK(clip="mean"), r"clip='mean' is unknown"),
        (
            lambda: run(
                SparCML(4, 64, algorithm="recursive_double", codec=codecs.Chunked()),
                np.ones((2, 128)),
            ),
            r"value_bits=2.* sends rounded entries on .*value_bits=16",
        ),
    ],
)
def test_errors_name_the_argument_its_value_and_the_fix(wrong, text):
    with pytest.raises(ValueError, match=text):
        wrong()
