"""Exact selection and sparse streams, against NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxsparse import select, stream


@pytest.mark.parametrize("size", [1, 2, 17, 1000])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_top_k_is_exact(size, dtype):
    x = jnp.asarray(np.random.default_rng(size).normal(size=size), dtype)
    for k in {1, (size + 1) // 2, size}:
        kept = select.top_k(x, k)
        order = np.argsort(-np.abs(np.asarray(x, np.float32)), kind="stable")[:k]
        np.testing.assert_array_equal(kept.indices, order)
        np.testing.assert_array_equal(kept.values, x[order])
        assert kept.values.dtype == dtype
        assert kept.indices.dtype == jnp.int32


def test_to_dense_adds_duplicates_and_drops_the_sentinel():
    s = stream.SparseStream(jnp.array([3, 0, 3, 5, 5]), jnp.array([1.0, 2.0, 4.0, 8.0, 16.0]))
    np.testing.assert_array_equal(stream.to_dense(s, 5), [2, 0, 0, 5, 0])


def test_from_dense_leaves_out_of_range_slots_empty():
    s = stream.from_dense(jnp.array([7.0, 8.0]), jnp.array([1, 2]))
    np.testing.assert_array_equal(s.values, [8, 0])


@pytest.mark.parametrize("k", [0, -1, 4])
def test_k_out_of_range_is_refused(k):
    with pytest.raises(ValueError, match=f"k={k} must lie between 1 and the vector's size, 3"):
        select.top_k(jnp.ones(3), k)


def test_a_matrix_is_refused():
    with pytest.raises(ValueError, match=r"x has shape \(2, 3\).*x.ravel\(\)"):
        select.top_k(jnp.ones((2, 3)), 1)
