"""The union of supports against NumPy, and what it costs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from published_traffic import union_traffic
from workers import on_workers, rows, some

from jaxsparse import traffic
from jaxsparse.arrays import bits
from jaxsparse.collectives.union import union
from jaxsparse.comm import wire

# Sizes of one word, of words that no number of workers divides, and of more words than workers.
SIZES = (1, 33, 97, 1030)
SEEDS = 12


def masks(workers, size):
    """Masks by seed and worker, from empty to full. In many places only one worker has True."""
    rng = np.random.default_rng(size)
    share = np.linspace(0, 1, SEEDS)[:, None, None] ** 2
    return rng.random((SEEDS, workers, size)) < share


@functools.cache
def unions(workers, way):
    def run(*seeds):  # masks of each size, (SEEDS, size)
        step = lambda mask: union(mask, "data")
        found = tuple(jax.lax.map(step, mask) for mask in seeds)
        if way == "shard_map":
            assert not any(wire.is_varying(x, "data") for x in found), "must be typed replicated"
        return found

    return on_workers(run, workers, way)


@pytest.mark.parametrize(
    ("workers", "way"),
    rows(
        [(1, "vmap"), (5, "vmap"), (8, "shard_map")],
        [(37, "vmap"), (2, "shard_map"), (3, "shard_map_unchecked")],
    ),
)
def test_union_is_numpys(workers, way):
    inputs = [masks(workers, size) for size in SIZES]
    results = unions(workers, way)(*(jnp.asarray(x.swapaxes(0, 1)) for x in inputs))
    for given, found in zip(inputs, results):
        expected = given.any(axis=1)
        np.testing.assert_array_equal(found, np.broadcast_to(expected, found.shape))


def test_union_of_one_worker_and_of_nothing():
    mask = jnp.array([True, False, True])
    assert union(mask, None).tolist() == [True, False, True]
    none = jnp.zeros((0,), jnp.bool_)
    assert on_workers(lambda: union(none, "data"), 3, "vmap")().shape == (3, 0)


@pytest.mark.parametrize("workers", [3, 8])
@pytest.mark.parametrize("blocks", some((33, 10_000), (10_000,)))
def test_words_on_the_wire(workers, blocks):
    run = on_workers(lambda mask: union(mask, "data"), workers)
    moved = traffic.wire_bytes(run, jax.ShapeDtypeStruct((workers, blocks), jnp.bool_))
    words = union_traffic(blocks, workers).words
    assert moved.received == 4 * words
    # Counts would take more: a word an element, or floor(log2 W) + 1 bits.
    assert words <= 2 * (workers - 1) * -(-blocks // 32)
    if blocks == 10_000:
        packed_counts = 2 * (workers - 1) / workers * blocks * workers.bit_length() / 32
        assert words < packed_counts


@pytest.mark.parametrize("size", [1, 32, 33, 100])
def test_bits_are_as_described(size):
    rng = np.random.default_rng(0)
    mask = rng.random((2, 3, size)) < 0.5
    length = bits.words(size)
    expected = np.zeros((2, 3, length), np.uint32)
    for i in range(size):
        expected[..., i % length] |= mask[..., i].astype(np.uint32) << np.uint32(i // length)
    packed = bits.pack_bits(jnp.asarray(mask))
    np.testing.assert_array_equal(packed, expected)
    np.testing.assert_array_equal(bits.unpack_bits(packed, size), mask)


def test_other_than_masks_are_refused():
    with pytest.raises(ValueError, match=r"mask has shape \(3,\) and dtype float32"):
        union(jnp.zeros(3), None)
    with pytest.raises(ValueError, match=r"mask has shape \(1, 3\) and dtype bool"):
        union(jnp.zeros((1, 3), jnp.bool_), None)
