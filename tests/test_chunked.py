"""The codec of few bits and SparseLoCo's exchange: their descriptions, and worked numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_chunks as reference
from supports import SUPPORTS, run, vectors
from workers import rows, some

from jaxsparse import codecs, exchange, select, traffic
from jaxsparse.arrays.bits import field_words, pack_fields, unpack_bits, unpack_fields
from jaxsparse.arrays.stream import SparseStream
from jaxsparse.contrib import GTopK, OkTopk
from jaxsparse.quantize.entries import entry_values
from jaxsparse.reducers import ChunkedTopK, SparCML, SparDL, TopK

VALUES = np.float32([0.9, -1.1, 0.5, -0.6, 1.4, -0.4, 0.7, -0.8])


@functools.cache
def there_and_back(bits, size):
    way = entry_values(bits)

    def arrive(values):
        words = way.encode(values, size)
        assert words.shape == (way.words(size),)
        return way.decode(words, size)

    return jax.jit(arrive)


def decoded(values, bits):
    arrive = there_and_back(bits, len(values))
    return np.asarray(arrive(np.float32(values)), np.float64)


@pytest.mark.parametrize("bits", [4, 8])
def test_levels_are_as_accurate_at_all_magnitudes(bits):
    """Powers of two scale levels exactly; differences of large logarithms would not."""
    values = np.float32(np.random.default_rng(0).uniform(0.3, 1, 64))
    usual = decoded(values, bits)
    for exponent in (-120, 60, 126):
        scaled = decoded(np.ldexp(values, exponent), bits)
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


@pytest.mark.parametrize("bits", some([0, 1, 9, 12, 31, 32], [0, 9, 12]))
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


def test_bits_of_an_entry():
    codec = codecs.EliasFano()
    assert codec.words(64, 4096) == 64 * (8 + 2) // 32 + 1  # 640 bits, and two levels
    assert codec.words(2**18, 2**24) == 2**18 * 10 // 32 + 2**18 // 256
    assert codec.words(512, 4096) == 512 * (5 + 2) // 32 + 2
    # All elements: 2 bits an index, one of them for the last element.
    assert codec.words(100, 100) == 7 + field_words(100, 2) + 1
    assert codecs.EliasFano(32).words(12, 512 * 3) == field_words(12, 7) + 1 + 12


def test_a_message_by_hand():
    """60 and 9 have high bits 7 and 1, so that bits 7 + 1 and 1 + 0 are set; low bits 4 and 1."""
    indices = jnp.array([60, *[64] * 8, 9], jnp.int32)
    stream = SparseStream(indices, jnp.float32([1, *[0] * 8, -1]))
    bitmap, low, *values = jax.jit(lambda stream: codecs.EliasFano(32).encode(stream, 64))(stream)
    assert (int(bitmap), int(low)) == (0b100000010, 1 | 4 << 3)
    assert np.uint32(values).view(np.float32).tolist() == [-1, 1, *[0] * 8]


def test_sign_and_magnitude_by_hand():
    """The mean magnitude is 0.8. Above it are 0.9, 1.1 and 1.4; 0.79 is below."""
    values = np.where(np.float32(-0.8) == VALUES, np.float32(-0.79), VALUES)
    low, high = reference.half([2.99 / 5, 3.4 / 3])
    expected = [high, -high, low, -low, high, -low, low, -low]
    assert decoded(values, 2).tolist() == expected
    sparse = decoded([0, 3, 0, -1, 0, 0, 0, 0], 2)
    assert sparse.tolist() == [0, 2, 0, -2, 0, 0, 0, 0], "zeros stay zeros"


@pytest.mark.parametrize("size", some([1, 300], [300]))
@pytest.mark.parametrize("bits", some([2, 4, 8], [2, 8]))
def test_values_equal_their_description(bits, size):
    rng = np.random.default_rng(bits)
    for values in (
        rng.normal(size=size),
        rng.standard_t(2, size) * (rng.random(size) < 0.7),
        np.zeros(size),
        np.full(size, -2.5),
        1e37 * rng.normal(size=size),
    ):
        x = values.astype(np.float32)
        np.testing.assert_allclose(
            decoded(x, bits),
            reference.sign_magnitude(x, bits),
            rtol=2e-5,
            atol=2e-6 * np.abs(x).max(),
        )


def test_values_that_are_not_finite_do_not_vanish():
    for bits in (2, 8):
        for bad in (np.nan, np.inf):
            values = np.ones(300)
            values[1] = bad
            assert not np.isfinite(decoded(values, bits)[1]), (bits, bad)


def test_a_small_leaf_keeps_its_magnitude():
    """Levels for the whole vector would decode its small values to over 100 times their size."""
    rng = np.random.default_rng(0)
    scales = np.repeat(10.0 ** rng.uniform(-4, 0, 64), 256)
    values = (scales * (2 + rng.exponential(0.4, 2**14))).astype(np.float32)
    found = decoded(values, 2)
    assert np.max(found / values) < 2


SETTINGS = {
    "": {},
    "16 bits": {"value_bits": 16},
    "8 bits": {"value_bits": 8},
    "exact": {"value_bits": 32},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "way", "name"),
    rows(
        [(3, "shard_map", "")],
        [
            (8, "shard_map", ""),
            (8, "shard_map", "16 bits"),
            (8, "shard_map", "8 bits"),
            (3, "vmap", "exact"),
        ],
    ),
)
def test_the_exchange_equals_its_description(workers, way, name):
    settings, size, k, chunk = SETTINGS[name], 1000, 5, 64
    bits = settings.get("value_bits", 2)
    quantize = {16: reference.half, 32: lambda v: v}.get(bits)
    if quantize is None:
        quantize = functools.partial(reference.sign_magnitude, bits=bits)
    reducer = ChunkedTopK(k, chunk, **settings)
    for seed, supports in enumerate(SUPPORTS):
        x = vectors(supports, workers, size, seed)
        order = [np.asarray(select.group_top_k(jnp.float32(row), k, chunk).indices) for row in x]
        ((_, reduced),) = run(reducer, x, way)
        mean, residual = reference.exchange(x, k, chunk, quantize, order, zeros=bits >= 16)
        scale = np.abs(x).max()
        np.testing.assert_allclose(
            reduced.mean, np.broadcast_to(mean, x.shape), rtol=1e-4, atol=1e-5 * scale
        )
        np.testing.assert_allclose(reduced.residual, residual, rtol=1e-4, atol=1e-5 * scale)
        kept = workers * reduced.mean[0].astype(np.float64) + reduced.residual.sum(0)
        np.testing.assert_allclose(kept, x.sum(0), atol=1e-5 * scale * workers)


def random_stream(rng, capacity, size, empty=0.2):
    drawn = rng.choice(min(size, 2**20), capacity, replace=False)
    indices = (drawn * (size // min(size, 2**20))).astype(np.int32)
    indices[rng.random(capacity) < empty] = size
    values = np.where(indices < size, rng.normal(size=capacity), 0)
    return SparseStream(jnp.asarray(indices), jnp.float32(values))


@pytest.mark.slow
@pytest.mark.parametrize("bits", some((2, 16, 32), [2]))
@pytest.mark.parametrize(
    "sizes",
    some([(1, 1), (5, 5), (700, 70_001), (9, 2**31 - 1)], [(9, 2**31 - 1)]),
)
def test_any_stream_arrives_as_it_is_rounded(bits, sizes):
    """Entries may come in any order, and in batches, whose rows have levels of their own."""
    capacity, size = sizes
    codec = codecs.EliasFano(bits)
    rng = np.random.default_rng(0)
    rows = [random_stream(rng, capacity, size) for _ in range(2)]
    rows = jax.tree.map(lambda *x: jnp.stack(x), *rows)
    rounded, arrived, messages = exchanged(codec, capacity, size)(rows)
    for i in range(2):
        row, came = (jax.tree.map(lambda x, i=i: np.asarray(x[i]), s) for s in (rows, arrived))
        is_sent, is_there = row.indices < size, came.indices < size
        sent = dict(zip(row.indices[is_sent].tolist(), rounded[i][is_sent].tolist(), strict=True))
        found = came.indices[is_there].tolist()
        assert dict(zip(found, came.values[is_there].tolist(), strict=True)) == sent
        assert len(found) == len(sent)
        assert not came.values[~is_there].any()
        if codec.is_exact:
            np.testing.assert_array_equal(rounded[i], row.values)
        expected = reference.elias_fano(sent, capacity, size)
        assert messages[i][: len(expected)].tolist() == expected


def exchanged(codec, capacity, size):
    def one(row):
        message = codec.encode(row, size)
        assert message.shape == (codec.words(capacity, size),)
        arrived = codec.decode(message, capacity, size, jnp.float32)
        return codec.rounded(row, size), arrived, message

    return jax.jit(jax.vmap(one))


def test_a_zero_is_no_entry_and_takes_no_level():
    """Otherwise 1 and 2 would share a level, beside one for zeros."""
    indices = jnp.array([5, 900, 7, 30, 1000], jnp.int32)
    stream = SparseStream(indices, jnp.float32([1, 2, 0, 0, 0]))
    rounded = jax.jit(lambda stream: codecs.EliasFano().rounded(stream, 1000))
    assert rounded(stream).tolist() == [1, 2, 0, 0, 0]


REDUCERS = {
    "top_k": TopK(0.05, codec=codecs.EliasFano()),
    "gtopk": GTopK(0.05, codec=codecs.EliasFano()),
    "spardl": SparDL(0.05, codec=codecs.EliasFano()),
    "spardl, teams": SparDL(0.05, teams=2, codec=codecs.EliasFano(value_bits=4)),
    "ok_topk": OkTopk(0.05, codec=codecs.EliasFano()),
    "ok_topk, 16 bits": OkTopk(0.05, codec=codecs.EliasFano(value_bits=16)),
    "sparcml": SparCML(4, 64, algorithm="all_gather", codec=codecs.EliasFano()),
    "recursive": SparCML(
        4, 64, algorithm="recursive_double", codec=codecs.EliasFano(value_bits=16)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", some(REDUCERS, ["gtopk"]))
def test_what_others_round_stays_in_the_residual(name):
    reducer, workers = REDUCERS[name], 6  # some of which fold in and out
    rng = np.random.default_rng(0)
    x = rng.standard_t(3, (workers, 3, 900)) * (rng.random((workers, 3, 900)) < 0.5)
    for before, reduced in run(reducer, x):
        mean = np.asarray(reduced.mean[0], np.float64)
        np.testing.assert_array_equal(reduced.mean, np.broadcast_to(reduced.mean[:1], before.shape))
        kept = workers * mean + np.asarray(reduced.residual, np.float64).sum(0)
        np.testing.assert_allclose(kept, before.astype(np.float64).sum(0), atol=1e-4)
        assert np.count_nonzero(mean)


@pytest.mark.parametrize(
    "name", some([name for name in REDUCERS if "sparcml" not in name], ["gtopk"])
)
def test_messages_have_the_types_that_a_shard_map_checks(name):
    """Tracing for bytes checks types, which steps leave out."""
    tx = exchange(REDUCERS[name])
    moved = traffic.traced_bytes(tx, {"w": jax.ShapeDtypeStruct((40, 50), jnp.float32)}, 4)
    assert moved.received > 0


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda: ChunkedTopK(65, 64), r"k=65 must lie between 1 and chunk_size=64"),
        (lambda: ChunkedTopK(1, 0), r"chunk_size=0 .*1"),
        (lambda: codecs.EliasFano(value_bits=3), r"value_bits=3 .*use 2, 4, 8, 16 or 32"),
        (lambda: codecs.EliasFano().check(jnp.int32), "dtype int32: EliasFano sends float32"),
        (
            lambda: run(
                SparCML(4, 64, algorithm="recursive_double", codec=codecs.EliasFano()),
                np.ones((2, 128)),
            ),
            r"value_bits=2.* sends rounded entries on .*value_bits=16",
        ),
    ],
)
def test_errors_name_the_argument_its_value_and_the_fix(wrong, text):
    with pytest.raises(ValueError, match=text):
        wrong()
