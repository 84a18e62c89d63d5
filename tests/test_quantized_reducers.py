"""Signs, the quantised all-reduce and its reducer against NumPy, and in training."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from published_traffic import quantized_all_reduce_traffic
from reference_formats import all_reduced, rounded
from workers import feedback_loop, on_workers, rows, some

from jaxsparse import qsgd, traffic
from jaxsparse.collectives.quantized_all_reduce import quantized_all_reduce
from jaxsparse.contrib import sign_sgd
from jaxsparse.quantize import QSGD, Format, dequantize, quantize
from jaxsparse.reducers.quantized import Quantized


def normal(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def in_groups(x, size):
    return [x[start : start + size] for start in range(0, len(x), size)]


def nearest(x, bits, group_size):
    """QSGD under "max", rounded to nearest."""
    s = 2 ** (bits - 1) - 1
    parts = [np.zeros(0)]
    for b in in_groups(x, group_size):
        scale = np.abs(b).max()
        parts += [np.round(b / scale * s) * scale / s if scale else b]
    return np.concatenate(parts)


def sign(group_size):
    """EF-signSGD's quantiser."""
    return Format("sign", group_size, "float32")


SIGN = sign(8)
RULES = {
    SIGN: lambda x: rounded(x, "sign", 8)[0],
    QSGD(4, 8): functools.partial(nearest, bits=4, group_size=8),
    Format("ternary", 8): lambda x: rounded(x, "ternary", 8, "bfloat16")[0],
}


@functools.cache
def reduce(quantizer, workers, way="vmap"):
    return on_workers(lambda x: quantized_all_reduce(x, quantizer, axis_name="data"), workers, way)


def run(quantizer, x, way="vmap"):
    result = jax.tree.map(np.asarray, reduce(quantizer, len(x), way)(x.astype(np.float32)))
    assert result.total.dtype == result.residual.dtype == np.float32
    assert not result.overflow.any()
    np.testing.assert_array_equal(result.total, np.broadcast_to(result.total[:1], x.shape))
    return result.total[0].astype(np.float64), result.residual.astype(np.float64)


def test_signs_of_huge_values_and_of_those_that_are_not_finite():
    x = np.full(64, -3e38, np.float32)
    x[16:32], x[40], x[60] = 0, np.nan, np.inf
    found = np.asarray(dequantize(quantize(jnp.asarray(x), SIGN16, None), SIGN16, 64))
    np.testing.assert_allclose(found[:16], x[:16], rtol=1e-6)
    assert not found[16:32].any()
    assert not np.isfinite(found[32:]).any()


SIGN16 = sign(16)


@pytest.mark.parametrize(
    ("workers", "way", "size"),
    rows([(3, "shard_map", 61)], [(1, "vmap", 61), (5, "vmap", 2), (8, "shard_map_unchecked", 80)]),
)
@pytest.mark.parametrize("quantizer", some(RULES, [QSGD(4, 8), Format("ternary", 8)]), ids=str)
def test_all_reduce_equals_its_description(quantizer, workers, way, size):
    for seed in range(3):
        x = normal((workers, size), seed)
        if workers == 1:
            expected, residuals = x[0], np.zeros_like(x)
        else:
            expected, residuals = all_reduced(x.astype(np.float64), RULES[quantizer])
        total, residual = run(quantizer, x, way)
        np.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(residual, residuals, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("workers", some([1, 8], [8]))
def test_nothing_is_lost_to_the_bit(workers):
    # Scales that divide levels, and means of powers of two, are exact in float32.
    for quantizer, sizes in ((QSGD(2, 8), some_sizes(workers)), (SIGN, [workers * 16])):
        for size in sizes:
            for seed in range(3):
                x = np.rint(20 * normal((workers, size), seed))
                total, residual = run(quantizer, x)
                np.testing.assert_array_equal(total + residual.sum(axis=0), x.sum(axis=0))
                assert residual.any() == (workers > 1 and size > workers)


def some_sizes(workers):
    return [workers - 1, 61] if workers > 2 else [61]


@functools.cache
def draw(quantizer, workers, trials):
    """A function that reduces the workers' vectors with each of `trials` keys."""

    def one(x, keys):
        reduced = lambda key: quantized_all_reduce(x, quantizer, axis_name="data", key=key)
        return jax.vmap(reduced)(keys)

    drawn = on_workers(one, workers, "vmap")
    keys = jax.random.split(jax.random.key(0), trials)
    return lambda x: drawn(x, jnp.broadcast_to(keys, (workers, trials)))


@pytest.mark.slow
def test_workers_round_independently():
    # Only one worker's values are not 0. They round to 0 or the largest, which the sum keeps.
    workers, trials, m = 3, 1000, 8
    x = np.full(workers * m, 0.5, np.float32)
    x[::m] = 1
    reduced = draw(QSGD(2, 8), workers, trials)
    by_worker = []
    for worker in (0, 1):
        alone = np.zeros((workers, workers * m), np.float32)
        alone[worker] = x
        by_worker.append(np.asarray(reduced(alone).total)[0].reshape(trials, workers, m) - 0.5)
    (_, c, a), (_, _, b) = (np.moveaxis(errors[:, :, 1:], 1, 0) for errors in by_worker)
    assert np.all(np.abs(a) == 0.5)
    assert np.all(np.abs(b) == 0.5)
    assert np.abs((4 * a * b).mean(axis=0)).max() < 5 / trials**0.5
    assert np.abs((4 * a * c).mean(axis=0)).max() < 5 / trials**0.5  # two ranges
    assert np.abs((4 * a[1:] * a[:-1]).mean(axis=0)).max() < 5 / trials**0.5
    assert np.abs((4 * a[:, 1:] * a[:, :-1]).mean(axis=0)).max() < 5 / trials**0.5


@pytest.mark.slow
def test_each_step_rounds_anew():
    reducer = Quantized(QSGD(2, 8))
    gradients = np.broadcast_to(normal((3, 1, 40)), (3, 5, 40))
    _, reduced = feedback_loop(reducer, 3)(gradients)
    np.testing.assert_array_equal(reduced.state[0], np.arange(1, 6))
    assert reduced.sent is None
    assert len(np.unique(reduced.mean[0], axis=0)) == 5
    _, again = feedback_loop(reducer, 3)(gradients)
    np.testing.assert_array_equal(again.mean, reduced.mean)
    _, other = feedback_loop(Quantized(QSGD(2, 8), seed=1), 3)(gradients)
    assert np.any(other.mean != reduced.mean)


@pytest.mark.parametrize("quantizer", some([SIGN, QSGD(4, 8)], [QSGD(4, 8)]), ids=str)
def test_sums_that_overflow_are_kept(quantizer):
    x = normal((3, 1, 48))
    x[:, 0, 20] = 3e38  # in the first group of the second range
    _, reduced = feedback_loop(Quantized(quantizer, "nearest"), 3)(x)
    mean, residual = np.asarray(reduced.mean)[0, 0], np.asarray(reduced.residual)[:, 0]
    assert not mean[16:24].any()
    np.testing.assert_array_equal(residual[:, 16:24], x[:, 0, 16:24])
    assert mean[:16].any()
    assert np.isfinite(residual).all()
    others = np.r_[0:16, 24:48]
    kept = 3 * mean[others].astype(np.float64) + residual[:, others].sum(axis=0, dtype=np.float64)
    np.testing.assert_allclose(kept, x[:, 0, others].sum(axis=0, dtype=np.float64), atol=1e-5)


WIRED = [QSGD(4, 64), Format("ternary", 64), sign(64), Format("int4", 64, "e8m0")]


@pytest.mark.parametrize("quantizer", some(WIRED, WIRED[:1]), ids=str)
def test_words_on_the_wire_are_as_reckoned(quantizer):
    size, workers = 1001, 3
    compiled = reduce(quantizer, workers, "shard_map").lower(
        jax.ShapeDtypeStruct((workers, size), jnp.float32)
    )
    moved = traffic.wire_bytes(compiled.compile())
    assert {c.op for c in moved.collectives} == {"all-to-all", "all-gather"}
    reckoned = quantized_all_reduce_traffic(size, workers, quantizer)
    assert moved.received == 4 * reckoned.words
    packed = quantizer.words(size)
    assert 2 * (workers - 1) / workers * packed <= reckoned.words
    assert reckoned.words <= 2 * (workers - 1) * (packed / workers + 3)
    assert quantized_all_reduce_traffic(size, 1, quantizer) == (0, 0)


ERRORS = {
    "group_size": (lambda: sign(0), "group_size=0 must be at least 1"),
    "group_size's type": (lambda: sign_sgd(group_size=2.5), "group_size=2.5 must be an int"),
    "key": (
        lambda: quantize(jnp.ones(3), SIGN, jax.random.key(0)),
        r"Format\(name='sign', group_size=8.*rounds without one: pass key=None",
    ),
    "quantizer": (lambda: Quantized(4), "quantizer=4 is no quantizer: use quantize.Format"),
    "rounding": (lambda: qsgd(rounding="up"), "rounding='up' is unknown: use 'stochastic' or"),
    "sign": (
        lambda: Quantized(SIGN),
        r"rounding='stochastic', but Format\(name='sign'.*deterministic: use 'nearest'",
    ),
    "feedback": (
        lambda: qsgd(4, scale="l2", rounding="nearest"),
        "fed back it grows from step to step. Use scale='max'",
    ),
    "bits": (lambda: qsgd(3), "bits=3 is not supported"),
    "seed": (lambda: qsgd(seed=1.5), "seed=1.5 must be an int"),
    "all-reduce": (
        lambda: quantized_all_reduce(jnp.ones(3), QSGD(4, 1024, "l2"), axis_name=None),
        "fed back it grows",
    ),
}


@pytest.mark.parametrize(("wrong", "text"), ERRORS.values(), ids=ERRORS)
def test_errors_name_the_argument_its_value_and_the_fix(wrong, text):
    with pytest.raises(ValueError, match=text):
        wrong()


def test_two_bits_that_round_to_nearest_may_be_fed_back():
    """At random they may not: `check_feedback` is asked about the rounding that is used."""
    assert quantized_all_reduce(jnp.ones(3), QSGD(2), axis_name=None).total.all()
