"""Extraction into random slots, against NumPy."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_slots as reference
from workers import rows, some

from jaxsparse.select.fast import slot_max
from jaxsparse.select.slots import hash_extract, hash_slots


def cubed(size, seed=0, dtype=jnp.float32):
    x = np.random.default_rng(seed).normal(size=size).astype(np.float32) ** 3
    return jnp.asarray(x).astype(dtype)


def magnitudes(x):
    return np.abs(np.asarray(x).astype(np.float32))


def seeds(number, first=0):
    return jnp.arange(first, first + number, dtype=jnp.uint32)


# --- hash_extract ---


def check_extraction(x, threshold, m, seed):
    found = hash_extract(x, threshold, m, seed=seed)
    slot_of = np.asarray(hash_slots(jnp.arange(x.size, dtype=jnp.int32), m, seed))
    indices, values = reference.hash_extract(x, np.float32(threshold), m, slot_of)
    np.testing.assert_array_equal(found.indices, indices)
    np.testing.assert_array_equal(found.values, values)
    assert found.indices.dtype == jnp.int32
    assert found.values.dtype == x.dtype

    kept = np.asarray(found.indices)
    kept, slot = kept[kept < x.size], np.flatnonzero(kept < x.size)
    np.testing.assert_array_equal(slot_of[kept], slot)
    assert np.all(magnitudes(x)[kept] >= np.float32(threshold))


@pytest.mark.parametrize(
    ("size", "m", "dtype"),
    rows(
        [(2, 1, jnp.float32), (5003, 50, jnp.float32)],
        [(1000, 1000, jnp.float32), (17, 3, jnp.float16)],
    ),
)
def test_hash_extract_is_the_papers(size, m, dtype):
    """None pass, a few, as many as there is room for, one more, or all."""
    x = cubed(size, dtype=dtype)
    ordered = np.sort(magnitudes(x))[::-1]
    room = [n for n in (1, m, 2 * m, 2 * m + 1, size) if n <= size]
    for seed, threshold in enumerate([0.0, -1.0, np.inf, np.nan, *(ordered[n - 1] for n in room)]):
        check_extraction(x, jnp.float32(threshold), m, seed)


def test_hash_extract_of_many_tiles():
    """More pass than there is room for. The last tile is not whole."""
    for threshold in (2.0, 0.0):
        check_extraction(cubed(150_001), jnp.float32(threshold), 40, 0)


@pytest.mark.slow
def test_the_share_of_empty_slots():
    """Lemma A.10: p = (1 - 1/m)^n. The variance is that of n balls in m bins."""
    n, m = 1000, 500
    x = jnp.zeros(5000).at[jnp.arange(n, dtype=jnp.int32) * 4].set(1)
    number = 200
    extract = lambda seed: hash_extract(x, 1.0, m, seed=seed).indices == x.size
    share = np.mean(jax.jit(jax.vmap(extract))(seeds(number)), axis=1)
    p = (1 - 1 / m) ** n
    deviation = math.sqrt(m * p * (1 - (1 + n / m) * p)) / m
    assert abs(np.mean(share) - p) < 4 * deviation / math.sqrt(number)
    assert np.max(np.abs(share - p)) < 5 * deviation
    assert abs(np.std(share) / deviation - 1) < 5 / math.sqrt(2 * number)


# --- slot_max ---

# Whole and broken tiles, one or many; one row or many; one slot, or one for each element.
SHAPES = [(1, 1), (7, 4), (5003, 4999), (50_001, 1), (50_000, 17_000), (70_001, 300)]


@functools.cache
def over_seeds(m):
    return jax.jit(jax.vmap(lambda x, seed: slot_max(x, m, seed=seed), in_axes=(None, 0)))


def check_slots(x, m, number=3):
    size = x.size
    found = over_seeds(m)(x, seeds(number))
    assert found.indices.shape == found.values.shape == (number, m)
    assert found.indices.dtype == jnp.int32
    assert found.values.dtype == x.dtype
    for seed in range(number):
        indices = np.asarray(found.indices[seed])
        assert indices.min() >= 0
        assert indices.max() < size
        slot_of = reference.random_sets(size, m, seed)
        np.testing.assert_array_equal(slot_of[indices], np.arange(m))
        np.testing.assert_array_equal(found.values[seed], x[indices])
        largest = reference.largest_of_sets(x, slot_of, m)
        precision = max(size / max(m, 2**14), 1) * 2.0**-22
        # Denormals have fewer bits.
        assert np.all(magnitudes(x)[indices] >= largest * (1 - precision))


@pytest.mark.parametrize("shape", some(SHAPES, [(50_000, 17_000)]))
def test_slot_max_keeps_the_largest_of_each_set(shape):
    size, m = shape
    check_slots(cubed(size), m)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_slot_max_of_half_precision(dtype):
    check_slots(cubed(70_001, 1, dtype), 300)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    some(
        ["zeros", "negative zeros", "constant", "rising", "infinite"],
        ["negative zeros", "infinite"],
    ),
)
def test_slot_max_of_special_data(kind):
    size = 70_001
    x = {
        "zeros": jnp.zeros(size),
        "negative zeros": -jnp.zeros(size),
        "constant": jnp.full(size, -2.0),
        "rising": jnp.arange(size, dtype=jnp.float32),
        "infinite": cubed(size).at[::1000].set(-jnp.inf),
    }[kind]
    check_slots(x, 300)


@pytest.mark.slow
def test_an_element_is_kept_where_it_meets_no_larger_one():
    size, m, number = 50_000, 1000, 300
    x = np.random.default_rng(m).permutation(size).astype(np.float32) + 1
    found = over_seeds(m)(jnp.asarray(x), seeds(number))
    kept = np.bincount(np.asarray(found.indices).ravel(), minlength=size) / number
    kept = kept[np.argsort(-x)][: 2 * m]
    expected = (1 - 1 / m) ** np.arange(len(kept))
    assert kept[0] == 1
    assert np.all(np.abs(kept - expected) < 5 * np.sqrt(expected / number))
    assert abs(np.mean(kept - expected)) < 0.01


@pytest.mark.parametrize(
    "extract", [lambda *a, **k: hash_extract(a[0], 1.0, *a[1:], **k), slot_max]
)
def test_bad_arguments_are_refused(extract):
    x = jnp.ones(3)
    for m in (0, -1, 4):
        with pytest.raises(ValueError, match=f"slots={m} must lie between 1 and .* size, 3"):
            extract(x, m)
    with pytest.raises(ValueError, match=r"slots=1.5 must be an int"):
        extract(x, 1.5)
    with pytest.raises(ValueError, match=r"x has shape \(1, 3\).*x.ravel\(\)"):
        extract(x[None], 1)


def test_a_vector_of_thresholds_is_refused():
    with pytest.raises(ValueError, match=r"threshold has shape \(2,\), but must be a scalar"):
        hash_extract(jnp.ones(3), jnp.ones(2), 1)
