"""The hashes against NumPy's 64-bit arithmetic, and the properties that sketches rely on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_sketch as reference
from workers import some

from jaxsparse.arrays import hashing

WORDS = np.random.default_rng(0).integers(0, 2**32, 20_000, dtype=np.uint64)


def test_mix_is_the_reference_and_loses_nothing():
    mixed = np.asarray(hashing.mix(jnp.asarray(WORDS.astype(np.uint32))))
    np.testing.assert_array_equal(mixed, reference.mix(WORDS))
    assert len(np.unique(mixed)) == len(np.unique(WORDS))


@pytest.mark.parametrize("words", [(0,), (1, 2), (2, 1), (2**32 - 1, 0, 7)])
def test_combine_is_the_reference(words):
    assert int(hashing.combine(*words)) == int(reference.combine(*words))
    assert int(hashing.combine(*[jnp.uint32(w) for w in words])) == int(reference.combine(*words))


@pytest.mark.parametrize("stride", [1, 64, 2**14])
def test_bits_of_progressions_are_balanced_and_independent_of_each_other(stride):
    index = jnp.arange(2**14, dtype=jnp.uint32) * jnp.uint32(stride)
    a, b = (np.asarray(hashing.keyed(index, hashing.combine(s))) for s in (1, 2))
    bits = np.concatenate(
        [(w >> np.arange(32, dtype=np.uint32)[:, None]) & 1 for w in (a, b)]
    ).astype(float)
    correlation = (2 * bits - 1) @ (2 * bits - 1).T / bits.shape[1]
    # Off the diagonal, correlations of 64 bits lie within five standard deviations of zero.
    assert np.max(np.abs(correlation - np.eye(64))) < 5 / np.sqrt(bits.shape[1])
    assert np.max(np.abs(bits.mean(axis=1) - 0.5)) < 2.5 / np.sqrt(bits.shape[1])


def test_bounded_is_the_high_word_of_the_product():
    h = np.concatenate([WORDS, np.uint64([0, 1, 65535, 65536, 2**32 - 1])])
    for n in (1, 2, 3, 1000, 65535, 65536, 65537, 2**31 - 1, 2**32 - 1):
        bounded = np.asarray(hashing.bounded(jnp.asarray(h.astype(np.uint32)), n))
        np.testing.assert_array_equal(bounded, (h * np.uint64(n)) >> np.uint64(32), str(n))


@pytest.mark.parametrize("n", some([1, 2, 3, 7, 8, 9, 100, 1023, 1024, 1025], [1, 2, 7, 9, 1025]))
def test_permute_is_a_permutation(n, key):
    np.testing.assert_array_equal(
        np.sort(hashing.permuted(jnp.arange(n, dtype=jnp.int32), n, key)), np.arange(n)
    )


def test_permute_of_the_largest_range_stays_inside_and_distinct(key):
    drawn = np.asarray(hashing.permuted(jnp.arange(1000, dtype=jnp.int32), 2**31 - 1, key))
    assert len(set(drawn.tolist())) == 1000
    assert drawn.min() >= 0
    assert np.abs(drawn.mean() / 2**30 - 1) < 0.1


@pytest.mark.parametrize("n", [5, 37])
def test_permute_draws_singles_and_pairs_uniformly(n, key):
    keys = jax.random.split(key, 20_000)
    two = jnp.arange(2, dtype=jnp.int32)
    drawn = np.asarray(jax.jit(jax.vmap(lambda key: hashing.permuted(two, n, key)))(keys))
    singles = np.bincount(drawn[:, 0], minlength=n)
    expected = len(keys) / n
    assert np.sum((singles - expected) ** 2) / expected < (n - 1) + 5 * np.sqrt(2 * (n - 1))
    pairs = np.bincount(drawn[:, 0] * n + drawn[:, 1], minlength=n * n).reshape(n, n)
    assert np.all(np.diag(pairs) == 0)
    cells = n * (n - 1)
    expected = len(keys) / cells
    off_diagonal = pairs[~np.eye(n, dtype=bool)]
    assert np.sum((off_diagonal - expected) ** 2) / expected < cells + 5 * np.sqrt(2 * cells)


@pytest.mark.parametrize("number", [5, np.int32(5), np.uint32(5), np.array([5])], ids=repr)
def test_numbers_of_any_kind_are_hashed_alike(number):
    """NumPy's own arithmetic would warn of each overflow, and would not return JAX's arrays."""
    for hashed in (
        hashing.combine(1, number),
        hashing.keyed(hashing.as_uint32(number), hashing.combine(7)),
    ):
        assert isinstance(hashed, jax.Array)
    expected = hashing.keyed(jnp.uint32([5]), hashing.combine(7))
    np.testing.assert_array_equal(
        jnp.ravel(hashing.keyed(hashing.as_uint32(number), hashing.combine(7))), expected
    )
