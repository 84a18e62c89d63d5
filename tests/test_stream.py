"""Sparse vectors and their messages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from workers import rows, some

from jaxsparse import codecs
from jaxsparse.arrays import stream
from jaxsparse.arrays.stream import SparseStream
from jaxsparse.codecs.codec import order_of

# Jitted, because each operation outside of a program is a program of its own.
to_dense = jax.jit(stream.to_dense, static_argnums=(1, 2))
NUMPY = {"sum": np.add, "max": np.maximum, "min": np.minimum, "or": np.bitwise_or}


def random_stream(rng, k, size, dtype=np.float32, empty=0.2):
    indices = np.where(rng.random(k) < empty, size, rng.integers(0, size, k)).astype(np.int32)
    signs = 1 if dtype == np.uint32 else rng.choice([-1, 1], k)
    values = np.where(indices < size, rng.integers(1, 100, k) * signs, 0).astype(dtype)
    return SparseStream(jnp.asarray(indices), jnp.asarray(values))


def as_dict(entries, size, op):
    out = {}
    for index, value in zip(*map(np.asarray, entries)):
        if index < size:
            out[int(index)] = NUMPY[op](out[int(index)], value) if int(index) in out else value
    return out


OPERATIONS = rows(
    [("sum", np.float32), ("min", np.int32)], [("max", np.float32), ("or", np.uint32)]
)


def is_combined(both, entries, op):
    """Checks that `both` has one entry for each index of `entries`, in order."""
    expected = as_dict(entries, 13, op)
    assert as_dict(both, 13, op) == expected
    filled = np.asarray(both.indices)[np.asarray(both.indices) < 13]
    assert sorted(expected) == filled.tolist()  # each once, in order
    assert not np.asarray(both.values)[np.asarray(both.indices) == 13].any()
    dense = np.asarray(to_dense(both, 13, op))
    empty = np.asarray(stream.neutral(op, both.values.dtype))
    assert dense.tolist() == [expected.get(i, empty) for i in range(13)]
    return True


@pytest.mark.parametrize(("op", "dtype"), OPERATIONS)
@pytest.mark.parametrize("k", some([0, 1, 2, 40], [40]))
def test_entries_with_the_same_index_are_combined(k, op, dtype):
    for seed in range(3):
        entries = random_stream(np.random.default_rng(seed), k + 7, 13, dtype)
        both = jax.jit(stream.merge_duplicates, static_argnums=(1, 2))(entries, 13, op)
        assert both.capacity == k + 7
        assert is_combined(both, entries, op)


@pytest.mark.parametrize(("op", "dtype"), OPERATIONS)
@pytest.mark.parametrize("k", some([0, 1, 2, 11], [11]))
def test_streams_are_added(k, op, dtype):
    for seed in range(3):
        rng = np.random.default_rng(seed)
        a, b = (random_stream(rng, n, 13, dtype) for n in (k, 7))
        a, b = (distinct(rng, entries) for entries in (a, b))
        both = jax.jit(stream.add, static_argnums=(2, 3))(a, b, 13, op)
        assert both.capacity == k + 7
        assert is_combined(both, SparseStream(*(jnp.concatenate(p) for p in zip(a, b))), op)


def distinct(rng, entries):
    """The stream with new indices. They are distinct, except that empty slots all have 13."""
    indices = rng.permutation(16)[: entries.capacity].clip(max=13).astype(np.int32)
    values = np.where(indices < 13, np.asarray(entries.values), 0).astype(entries.values.dtype)
    return SparseStream(jnp.asarray(indices), jnp.asarray(values))


def test_dense_and_back():
    x = jnp.arange(5.0)
    entries = stream.from_dense(x, jnp.array([4, 5, 1]))
    assert entries.values.tolist() == [4, 0, 1]
    assert stream.to_dense(entries, 5).tolist() == [0, 1, 0, 0, 4]


def test_delta():
    assert stream.delta(1000) == 500
    assert stream.delta(1000, entry_bytes=4) == 1000


SIZES = [1, 100, 2**16 - 1, 2**16, 2**16 + 1, 200_000]


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def sent(codec, entries, size, dtype):
    """The message, the values as it rounds them, and what is read from it."""
    message = codec.encode(entries, size)
    arrived = codec.decode(message, entries.capacity, size, dtype)
    return message, codec.rounded(entries, size), arrived


@pytest.mark.parametrize("size", some(SIZES, [1, 200_000]))
@pytest.mark.parametrize("dtype", some([np.float32, np.int32, np.uint32], [np.float32]))
def test_coordinates_are_exact(size, dtype):
    entries = random_stream(np.random.default_rng(size), 50, size, dtype)
    message, _, arrived = sent(codecs.COO, entries, size, dtype)
    assert message.dtype == jnp.uint32
    assert message.shape == (codecs.COO.words(50, size),) == (100,)
    jax.tree.map(np.testing.assert_array_equal, arrived, entries)


@pytest.mark.parametrize("codec", [codecs.COO, codecs.Packed(), codecs.EliasFano()], ids=str)
def test_a_message_of_other_sizes_is_refused(codec):
    stream = SparseStream(jnp.arange(16), jnp.ones(16))
    message = np.asarray(jax.jit(codec.encode, static_argnums=1)(stream, 1000))
    decode = jax.jit(codec.decode, static_argnums=(1, 2, 3))
    assert decode(message, 16, 1000, jnp.float32).capacity == 16
    given = [(message, 8), (message[:-1], 16), (message[None], 16), (message.astype(jnp.int32), 16)]
    for wrong, capacity in given:
        with pytest.raises(ValueError, match="give the sizes that it was encoded with"):
            codec.decode(wrong, capacity, 1000, jnp.float32)
    with pytest.raises(ValueError, match=r"indices of shape \(4,\) and values of shape \(16,\)"):
        codec.encode(stream._replace(indices=stream.indices[:4]), 1000)


@pytest.mark.parametrize("size", some(SIZES, [200_000]))
@pytest.mark.parametrize("dtype", some([jnp.bfloat16, jnp.float16], [jnp.bfloat16]))
def test_packed_messages(size, dtype):
    codec = codecs.Packed(dtype)
    for k, empty in ((1, 0.0), (50, 0.3), (50, 1.0), (700, 0.0)):
        rng = np.random.default_rng(k)
        entries = random_stream(rng, k, size, empty=empty)
        noise = np.asarray(1 + rng.random(k) / 100, np.float32)
        entries = entries._replace(values=np.asarray(entries.values) * noise)
        message, rounded, arrived = sent(codec, entries, size, jnp.float32)
        assert message.shape == (codec.words(k, size),)
        assert codec.words(k, size) == k + (-(-size // 2**16) if size > 2**16 else 0)
        expected = np.asarray(entries.values).astype(dtype).astype(np.float32)
        np.testing.assert_array_equal(rounded, expected)
        np.testing.assert_array_equal(
            to_dense(arrived, size), to_dense(entries._replace(values=rounded), size)
        )


def at_start(values):
    return SparseStream(jnp.arange(values.size), values)


def test_values_beyond_16_bits_are_clipped():
    values = jnp.float32([1e30, -1e6, 7e4, 65504.0, 1e-30])
    rounded = codecs.Packed(jnp.float16).rounded(at_start(values), 5)
    assert rounded.tolist() == [65504, -65504, 65504, 65504, 0]
    largest = jnp.float32([jnp.finfo(jnp.float32).max])
    assert jnp.isfinite(codecs.Packed().rounded(at_start(largest), 1)).all()


def test_the_compiler_keeps_the_rounding():
    codec = codecs.Packed()
    values = jnp.float32([1.001, 2.003])
    assert jax.jit(lambda x: codec.rounded(at_start(x), 2))(values).tolist() == [1.0, 2.0]


@pytest.mark.parametrize("rows", ["sorted", "leading", "unsorted"])
def test_packed_messages_of_many_ranges_keep_the_order_or_make_it(rows):
    """Also in batches. If one row is out of order, all rows are sorted."""
    size, capacity = 200_000, 40
    rng = np.random.default_rng(0)
    indices = np.sort(rng.choice(size, (3, capacity), replace=False).astype(np.int32))
    indices[0, 0], indices[1, -1] = 0, size - 1
    values = rng.normal(size=indices.shape).astype(np.float32)
    indices[2, 30:] = size  # empty slots, which may have any values
    if rows != "sorted":
        indices[1, :10] = size
    if rows == "unsorted":
        indices[0], values[0] = indices[0][::-1].copy(), values[0][::-1].copy()
    codec = codecs.Packed()
    entries = SparseStream(jnp.asarray(indices), jnp.asarray(values))
    entries = entries._replace(values=codec.rounded(entries, size))
    messages = jax.jit(jax.vmap(lambda row: codec.encode(row, size)))(entries)
    for row, message in enumerate(messages):
        arrived = jax.jit(codec.decode, static_argnums=(1, 2, 3))(
            message, capacity, size, jnp.float32
        )
        one = SparseStream(*(np.asarray(x)[row] for x in entries))
        assert np.count_nonzero(arrived.indices < size) == (indices[row] < size).sum()
        np.testing.assert_array_equal(to_dense(arrived, size), to_dense(one, size))


@pytest.mark.parametrize("count", [300, 2**25])  # for one sort, and for two arrays
def test_entries_come_in_the_order_of_their_ranges(count):
    numbers = np.random.default_rng(0).integers(count, size=(2, 1000), dtype=np.int32)
    order = np.asarray(order_of(jnp.asarray(numbers), count))
    np.testing.assert_array_equal(np.sort(order), np.tile(np.arange(1000), (2, 1)))
    found = np.take_along_axis(numbers, order, axis=1)
    np.testing.assert_array_equal(found, np.sort(numbers))


def test_messages_of_zeros_hold_nothing():
    """A worker to which nobody sends receives such messages."""
    for size in (100, 200_000):
        for codec in (codecs.COO, codecs.Packed()):
            message = np.zeros(codec.words(5, size), np.uint32)
            decode = jax.jit(codec.decode, static_argnums=(1, 2, 3))
            assert not np.any(to_dense(decode(message, 5, size, jnp.float32), size))


def test_errors_name_what_is_wrong():
    with pytest.raises(ValueError, match="dtype=float32 is not of 16 bits"):
        codecs.Packed("float32")


@pytest.mark.parametrize("indices", some([[], [0], [5], [-1, 2], [-2]], [[], [-1, 2]]))
def test_what_is_filled_has_the_value_whatever_the_indices(indices):
    indices = jnp.asarray(indices, jnp.int32)
    for value in (False, np.float32(-np.inf), np.int32(-(2**31)), np.uint32(0)):
        vector = stream.filled(3, value, indices)
        assert vector.dtype == np.asarray(value).dtype
        assert vector.tolist() == [value] * 3
