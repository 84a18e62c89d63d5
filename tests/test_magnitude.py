"""Norms, shares and clipping at the ends of float32's range."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsparse.arrays import magnitude

ROWS = np.float32([[3, -4, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0.5]])


@jax.jit
def norms_of(rows):
    """Its norms, its root mean squares, and the norm of all of it."""
    whole = magnitude.norms(rows.reshape(3, 2, 2), axis=None)
    return magnitude.norms(rows), magnitude.norms(rows, reduce=jnp.mean), whole


@pytest.mark.parametrize("scale", [2.0**-124, 1e-30, 1.0, 1e30, 2.0**124])
def test_no_norm_overflows_or_vanishes_on_the_way(scale):
    rows = ROWS * np.float32(scale)
    expected = np.sqrt(np.sum(np.square(rows.astype(np.float64)), axis=1))
    found, means, whole = norms_of(rows)
    np.testing.assert_allclose(found, expected.astype(np.float32), rtol=1e-6)
    np.testing.assert_allclose(means, (expected / 2).astype(np.float32), rtol=1e-6)
    np.testing.assert_allclose(whole, np.linalg.norm(expected), rtol=1e-6)


def test_a_norm_beyond_float32_is_infinite_and_a_root_mean_square_is_not():
    rows = jnp.full((1, 4), magnitude.LARGEST)
    assert magnitude.norms(rows)[0] == jnp.inf
    np.testing.assert_allclose(magnitude.norms(rows, reduce=jnp.mean), [magnitude.LARGEST])


@pytest.mark.parametrize("broken", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_does_not_vanish(broken):
    rows = jnp.float32([[1, broken, 0], [1, 2, 2]])
    assert np.isnan(magnitude.norms(rows)[0])
    assert magnitude.norms(rows)[1] == 3
    assert not magnitude.all_finite([jnp.arange(2), rows])
    assert magnitude.all_finite([jnp.arange(2), rows[1:]])
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float8_e5m2):
        np.testing.assert_array_equal(magnitude.within(rows, dtype), rows)
        np.testing.assert_array_equal(magnitude.rounded(rows, dtype), rows)


def test_zeros_have_shares_and_a_norm_of_zero():
    shares, scales = magnitude.scaled(jnp.zeros((2, 3)))
    assert not shares.any()
    assert (scales == magnitude.SMALLEST).all()
    assert not magnitude.norms(jnp.zeros((2, 3))).any()
