"""DeMo against NumPy and by hand; tiles of all shapes; its bytes, and what breaks transforms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference_demo import cosine, exchange, half
from steps import compiled_step
from training import train
from workers import by_step, feedback_loop, mesh, some

from jaxsparse import traffic
from jaxsparse.contrib import demo
from jaxsparse.contrib.demo import DeMo, _inverse, _transformed
from jaxsparse.reducers.matrices import Matrix

close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-5)
ALL = {"is_dense": lambda path, shape: False}


@pytest.mark.parametrize("shape", some([(64, 64), (1, 7), (9, 1), (5, 12)], [(5, 12)]))
def test_the_transform_is_that_of_its_formula(shape):
    x = np.random.default_rng(0).normal(size=(3, *shape)).astype(np.float32)
    there = jax.jit(_transformed)(x)
    close(there, np.stack([cosine(tile).T for tile in x.astype(np.float64)]))
    close(jax.jit(_inverse)(there), x)


def test_worked_example_of_two_steps():
    """Two workers, one chunk of 4, k = 1, beta = 0.9, gradients times 0.1; then steps by sign."""
    tx = demo(1, 4, decay=0.9, value_bits=32, **ALL)
    steps = [
        {"w": 0.1 * jnp.float32([[1, 2, 3, 4], [4, 1, -1, 0]])},
        {"w": 0.1 * jnp.float32([[0.5, 0.5, 1, 0], [0, 1, 0, 2]])},
    ]
    updates, (_, state) = train(tx, {"w": jnp.zeros(4)}, 2, steps)
    near = functools.partial(np.testing.assert_allclose, atol=1e-6)
    near(updates[0]["w"], [0.228033, 0.167678, 0.082322, 0.021967])
    near(updates[1]["w"], [0.02318, 0.057929, 0.107071, 0.14182])
    expected = [[0.03364, 0.054142, 0.095858, 0.01636], [0.009541, -0.05182, -0.17818, 0.220459]]
    near(state.residual["w"].value, expected)
    signed = optax.chain(tx, optax.scale_by_sign(), optax.scale_by_learning_rate(0.1))
    _, (params, _) = train(signed, {"w": jnp.zeros(4)}, 2, steps)
    near(params["w"], [-0.2] * 4)


# Tiles that fit, and tiles that stick out in either direction, alone or in stacks. The tiles of
# (7, 7) and of (8, 12) are (4, 4), and travel together.
MATRICES = (Matrix(1, 8, 12), Matrix(1, 1, 7), Matrix(3, 9, 6), Matrix(1, 2, 1), Matrix(2, 7, 7))
SETTINGS = {
    "": {},
    "all": {"k": 16, "value_bits": 32},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", some(SETTINGS, ["all"]))
@pytest.mark.parametrize("workers", some((3, 8), (3,)))
@pytest.mark.parametrize("way", some(("shard_map", "vmap"), ("vmap",)))
def test_equal_to_the_reference(name, workers, way):
    settings = {"k": 2, "chunk": 5} | SETTINGS[name]
    if name == "all":
        settings["k"] = 25
    reducer = DeMo(**settings, matrices=MATRICES)
    size, k = sum(m.size for m in MATRICES), settings["k"]
    g = np.random.default_rng(workers).normal(size=(workers, 3, size)).astype(np.float32)
    round_ = (lambda x: x) if settings.get("value_bits") == 32 else half
    for x, reduced in by_step(feedback_loop(reducer, workers, way)(g)):
        x, mean, left = (np.asarray(a, np.float64) for a in (x, reduced.mean, reduced.residual))
        np.testing.assert_array_equal(mean, np.broadcast_to(mean[:1], mean.shape))
        start = 0
        for matrix in MATRICES:
            for _ in range(matrix.stack):
                part = np.s_[:, start : start + matrix.rows * matrix.columns]
                start += matrix.rows * matrix.columns
                own = x[part].reshape(workers, *matrix[1:])
                update, residual = exchange(own, k, 5, round_)
                close(mean[part][0], update.ravel())
                close(left[part], residual.reshape(workers, -1))
        assert start == size
        close(workers * mean[0] + left.sum(0), x.sum(0), atol=1e-5)
        if name == "all":
            np.testing.assert_allclose(mean[0], x.mean(0), atol=2e-6)
            np.testing.assert_allclose(left, 0, atol=4e-6)


def test_tiles():
    """The published code's tiles where 64 divides a side. Prime sides have none of one element."""
    tiling = DeMo().tiling
    for sides, expected in (
        ((768, 3072), (64, 64, 12, 48)),
        ((48, 100), (48, 50, 1, 2)),
        ((127, 50257), (64, 64, 2, 786)),
        ((1, 65), (1, 33, 1, 2)),
    ):
        assert tiling(Matrix(1, *sides)) == expected


@pytest.mark.slow
def test_values_too_large_for_a_transform_wait():
    """Only the tiles that hold such values wait."""
    reducer = DeMo(2, 4, matrices=(Matrix(1, 4, 8), Matrix(1, 3, 3)))
    g = np.ones((3, 2, 41), np.float32)
    g[1, 0, 1] = 3e38
    g[2, 0, 2] = -3e38
    for x, reduced in by_step(feedback_loop(reducer, 3)(g)):
        mean, left = np.asarray(reduced.mean[0]), np.asarray(reduced.residual)
        assert np.all(np.isfinite(mean))
        assert np.all(np.isfinite(left))
        first = np.arange(32).reshape(4, 8)[:, :4].ravel()
        np.testing.assert_array_equal(left[1:, first], np.asarray(x)[1:, first])
        others = np.setdiff1d(np.arange(41), first)
        close(mean[others], np.asarray(x)[:, others].mean(0))


@pytest.mark.slow
def test_words_of_a_step():
    """9 bits an index and 16 a value, in one all-gather; small tiles have shorter indices."""
    shapes = {"kernel": (256, 192), "conv": (3, 3, 16, 8), "bias": (201,)}
    moved = traffic.wire_bytes(compiled_step(demo(), mesh(5), shapes))
    # 12 tiles of (64, 64): 32 of 4096. A convolution is (9, 128), two tiles of (9, 64), and 32 of
    # 576 are one in 18: four low bits, and a bitmap of 64 entries and 1152 / 16 high bits.
    words = 12 * 32 * (9 + 16) // 32 + (64 * 4 + 64 + 72 + 24) // 32 + 64 * 16 // 32
    sent = {c.op: c.received_bytes for c in moved.collectives}
    assert set(sent) == {"all-gather", "all-reduce"}
    assert sent["all-gather"] == 4 * 4 * words


def test_errors_name_the_setting():
    for settings, message in (
        ({"k": 0}, r"k=0 must lie between 1 and chunk\*\*2=4096"),
        ({"k": 5, "chunk": 2}, r"k=5 must lie between 1 and chunk\*\*2=4"),
        ({"chunk": 257}, "chunk=257 must lie between 1 and 256"),
        ({"chunk": 8.0}, "chunk=8.0 must be an int"),
        ({"value_bits": 12}, "value_bits=12 is unknown"),
    ):
        with pytest.raises(ValueError, match=message):
            demo(**settings)
