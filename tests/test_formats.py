"""Number formats against NumPy, alone and in the all-reduce."""

import functools
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from published_traffic import dense_traffic, quantized_all_reduce_traffic
from reference_formats import (
    MEANS,
    all_reduced,
    rounded,
    scale_above,
    values_of,
)
from workers import finished, on_workers, rows, some

from jaxsparse import dense, quantized, traffic
from jaxsparse.collectives import quantized_all_reduce
from jaxsparse.quantize import (
    QSGD,
    Format,
    Quantizer,
    dequantize,
    from_message,
    quantize,
    to_message,
)
from jaxsparse.quantize.formats import FormatName, Scale
from jaxsparse.quantize.packing import digit_words, pack_digits, unpack, unpack_digits
from jaxsparse.reducers.quantized import GatheredQuantized, Quantized

NAMES, SCALES = get_args(FormatName), get_args(Scale)
NEAREST = tuple(name for name in NAMES if name not in MEANS)  # each value becomes the nearest
SCALED = tuple(name for name in NEAREST if name != "bfloat16")
TINY = np.finfo(np.float32).tiny
LARGEST = {"int8": 127, "int4": 7, "e3m0": 64}
LARGEST |= {"float8_e4m3fn": 448, "float8_e5m2": 57344, "float16": 65504}


def normal(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@functools.partial(jax.jit, static_argnames="spec")
def sent(x, spec):
    """A vector after it was packed into a message and unpacked."""
    message = to_message(quantize(x, spec, None), spec)
    return dequantize(from_message(message, spec, x.size), spec, x.size)


# --- formats ---


@pytest.mark.slow
def test_the_formats_have_the_values_of_their_definition():
    assert [len(values_of(name)) for name in ("int8", "int4", "e3m0")] == [255, 15, 15]
    for name, largest in LARGEST.items():
        assert values_of(name)[-1] == largest
        # A format keeps all its values exactly, times any scale that divides out.
        table = values_of(name)[:: 1 if name != "float16" else 97]
        x = np.append(table, [largest] * (-len(table) % 64)).astype(np.float32)
        x[::64] = largest
        np.testing.assert_array_equal(sent(x * np.float32(2.0**-9), Format(name, 64)), x / 512)


SPECS = [Format(name, 32) for name in NAMES]
SPECS += [Format("int8", 32, "float32"), Format("int4", 32, "e8m0")]


@pytest.mark.parametrize("size", some((33, 1000), (1000,)))
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_value_becomes_what_its_format_says(spec, size):
    name, scale = spec.name, spec.scale
    for power in (1, 3):
        x = normal(size) ** power
        expected, unclear = rounded(x, name, 32, scale)
        assert np.mean(unclear) < 0.02
        found = np.asarray(sent(x, spec))
        np.testing.assert_allclose(
            np.where(unclear, expected, found), expected, rtol=2e-6, atol=1e-30
        )
    assert isinstance(spec, Quantizer)


def test_worked_int8_example():
    x = jnp.float32([0.5, -1.27, 0.013, 0.8])
    spec = Format("int8", 256, "float32")
    words, scales = quantize(x, spec, None)
    np.testing.assert_allclose(scales, [0.01], rtol=1e-6)
    assert unpack(words, 8, 4).tolist() == [50, -127, 1, 80]
    np.testing.assert_allclose(sent(x, spec), [0.5, -1.27, 0.01, 0.8], rtol=1e-6)


def test_worked_e3m0_example():
    """Levels are 0 and s 2**-k, k = 0 .. 6. Midpoints are 1.5 2**j. Below s 2**-7 all is 0."""
    spec, s = Format("e3m0", 16, "float32"), 3.0
    shares = np.float32([1, 0.76, 0.74, 0.5, 0.376, 0.374, 2**-6, 1.01 * 2**-7, 0.99 * 2**-7, 0])
    expected = [1, 1, 0.5, 0.5, 0.5, 0.25, 2**-6, 2**-6, 0, 0]
    found = np.asarray(sent(np.float32(s) * shares, spec)) / s
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_allclose(sent(np.float32(-s) * shares, spec) / -s, expected, rtol=1e-6)


@pytest.mark.parametrize(("scale", "slack"), [("bfloat16", 2**-7), ("e8m0", 1.0), ("float32", 0)])
@pytest.mark.parametrize("name", some(SCALED, ("int8", "e3m0")))
def test_scales_are_rounded_up_to_their_bits_so_that_no_maximum_clips(name, scale, slack):
    spec, largest = Format(name, 8, scale), LARGEST[name]
    x = normal(8 * 500) * np.repeat(10.0 ** np.linspace(-20, 20, 500), 8).astype(np.float32)
    scales = np.asarray(quantize(x, spec, None).scales, np.float64)
    top = np.abs(x).reshape(-1, 8).max(axis=1).astype(np.float64)
    assert np.all(scales * largest >= top * (1 - 2**-23))
    assert np.all(scales * largest <= top * (1 + slack) * (1 + 2**-23))
    expected = [scale_above(float(np.float32(t / largest)), scale) for t in top]
    np.testing.assert_allclose(scales, expected, rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_as_many_words_travel_as_claimed(name):
    for scale, group_size in (("bfloat16", 32), ("e8m0", 1000), ("float32", 1)):
        spec = Format(name, group_size, scale)
        for size in (33, 2049):
            x = jax.ShapeDtypeStruct((size,), jnp.float32)
            message = jax.eval_shape(lambda x, s=spec: to_message(quantize(x, s, None), s), x)
            assert message.shape == (spec.words(size),)
            assert message.dtype == jnp.uint32


def test_bits_a_value_in_all():
    assert 32 * Format("int4", 32).words(2**20) / 2**20 == 4.5
    assert 32 * Format("int8", 32, "e8m0").words(2**20) / 2**20 == 8.25
    assert 32 * Format("bfloat16").words(2**20) / 2**20 == 16
    spec = Format("int8", 256, "float32")
    for workers in (2, 8):
        words = quantized_all_reduce_traffic(2**20, workers, spec).words
        np.testing.assert_allclose(words / dense_traffic(2**20, workers).words, 0.2539, rtol=1e-3)
    # A flat buffer is cut into groups. Values that were rows of their own would take 8 bytes each.
    assert Format("int8", 1, "float32").words(1000) > 1000 > 3 * Format("int8").words(1000)


@pytest.mark.parametrize(
    ("size", "name"),
    rows(
        [(3.4e38, "int4"), (1e-38, "float8_e4m3fn")],
        [(3.4e38, "float8_e4m3fn"), (1e-38, "int4"), (0.0, "int4"), (0.0, "float8_e4m3fn")],
    ),
)
def test_huge_tiny_and_zero_groups(size, name):
    x = np.float32(size) * np.sign(normal(192)) * np.random.default_rng(1).uniform(0, 1, 192)
    x = x.astype(np.float32)
    x[:64] = 0  # a group of zeros beside the others
    x[64::64] = size
    for scale in SCALES:
        found = np.asarray(sent(x, Format(name, 64, scale)), np.float64)
        assert not np.any(found[:64])
        if name == "bfloat16":
            continue
        if size > 2 * TINY * LARGEST[name]:
            bound = np.abs(x) / 2 + size / LARGEST[name]
            assert np.all(np.abs(found - x) <= bound * (1 + 1e-5))
            assert np.all(found[64::64] > 0.49 * size)
        elif size:
            assert np.all(np.abs(found) <= 2 * size)
    assert np.all(np.isfinite(found))


@pytest.mark.parametrize("bad", some([np.nan, -np.nan, np.inf, -np.inf], [np.nan, -np.inf]))
@pytest.mark.parametrize("name", ["int4", "float8_e4m3fn", "ternary"])
def test_a_value_that_is_not_finite_does_not_vanish(name, bad):
    x = normal(64 * 3)
    x[3] = bad
    x[128:] = 0
    for scale in SCALES:
        found = sent(x, Format(name, 64, scale))
        assert not np.any(np.isfinite(found[:64]))
        assert np.all(np.isfinite(found[64:]))


# --- means ---


DIGITS = {2: 32, 3: 20, 4: 16}


@pytest.mark.parametrize("size", some([1, 20, 1003, 200_001], [1003]))
@pytest.mark.parametrize("base", DIGITS)
def test_digits_fill_words(base, size):
    count, words = DIGITS[base], digit_words(size, base)
    pack, unpack = (jax.jit(f, static_argnums=(1, 2)) for f in (pack_digits, unpack_digits))
    assert 0 <= words - -(-size // count) <= (15 if words >= 1024 else 0)
    drawn = np.random.default_rng(size).integers(base, size=size)
    for digits in (drawn, np.zeros(size), np.full(size, base - 1)):
        packed = pack(digits.astype(np.uint8), base, size)
        assert packed.shape == (words,)
        np.testing.assert_array_equal(unpack(packed, base, size), digits)
    packed = np.asarray(pack(drawn.astype(np.uint8), base, size)).tolist()
    planes = np.pad(drawn, (0, count * words - size)).reshape(count, -1)
    for word, digits in list(zip(packed, planes.T.tolist(), strict=True))[:50]:
        number = sum(digit * base ** (count - 1 - j) for j, digit in enumerate(digits))
        assert number << 32 <= word * base**count < (number + 1) << 32


def test_worked_examples_of_means():
    x = jnp.float32([1, -3, 0, 8])
    assert sent(x, Format("sign", 4)).tolist() == [3, -3, 3, 3]
    # w = 74 / 12: the threshold is 3.08 for "ternary", and 4.93 for "int2".
    assert sent(x, Format("ternary", 4)).tolist() == [0, 0, 0, 8]
    np.testing.assert_allclose(
        sent(x, Format("int2", 4, "float32")), [4 / 3, -4 / 3, 4 / 3, 8], rtol=1e-6
    )
    # The nearest power of two to 3 is 4, and to 4 / 3 it is 1.
    assert sent(x, Format("sign", 4, "e8m0")).tolist() == [4, -4, 4, 4]
    assert sent(x, Format("int2", 4, "e8m0")).tolist() == [1, -1, 1, 8]


@pytest.mark.parametrize("count", some([0, 3, 16, 17, 40], [3, 17]))
@pytest.mark.parametrize("name", MEANS)
def test_padding_does_not_count_in_a_mean(name, count):
    spec, x = Format(name, 16, "float32"), normal(40)
    x[count:] = 0
    padded = dequantize(quantize(jnp.asarray(x), spec, None, jnp.int32(count)), spec, 40)
    expected, unclear = rounded(x[:count], name, 16)
    assert not unclear.any()
    np.testing.assert_allclose(padded[:count], expected, rtol=2e-6)


def hard(B):
    """Groups of B values at which a format may lose much, most of them at some distance from 0."""
    rng, n = np.random.default_rng(B), B - 1
    one = np.zeros(B)
    one[B // 2] = -2
    edge = (np.sqrt(1 + n) - 1) / n  # beside a value of 1, w / 2 of n others of this size
    few_at_edge = np.full(B, 0.999 * edge)
    few_at_edge[1 : 1 + int(n**0.5)] = 1.001 * edge
    few_at_edge[0] = 1
    rows = [one, np.ones(B), few_at_edge, 2.0 ** -np.arange(B), 1 / np.arange(1, B + 1)]
    rows += [np.where(np.arange(B) == 0, 1, share) for share in (0.5, 0.1, edge, 1.01 * edge)]
    rows += [rng.standard_t(df, B) for df in (0.3, 1, 3)] + [
        rng.uniform(-1, 1, B),
        rng.normal(size=B),
    ]
    rows += [np.where(np.arange(B) < k, 1, 1e-3) for k in (2, B // 2, n)]
    return np.stack(rows) * np.where(rng.uniform(size=B) < 0.5, -1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("scale", some(SCALES, ("bfloat16",)))
@pytest.mark.parametrize("name", some(MEANS, ("ternary",)))
def test_means_are_a_contraction_of_any_data(name, scale):
    for B in (2, 64, 256):
        factor = 1 / B if name == "sign" else 1 / np.sqrt(8 * B)
        rows = hard(B)
        # Sizes to the ends of float32's range, where scales of e8m0 are up to a half too small.
        sizes = [1, 3, 1e20, 1e-20, 1e-30, 3.4e38]
        x = np.stack([size * rows / np.abs(rows).max(axis=1)[:, None] for size in sizes])
        x = x.astype(np.float32)
        found = np.asarray(sent(jnp.asarray(x.reshape(-1)), Format(name, B, scale)))
        assert np.all(np.isfinite(found))
        found, x = found.reshape(x.shape).astype(np.float64), x.astype(np.float64)
        ratio = np.sum((found - x) ** 2, axis=2) / np.sum(x**2, axis=2)
        off = {"float32": 0, "bfloat16": 2**-8, "e8m0": 1 / 3}[scale]
        kept = np.full((len(sizes), 1), 1 - off**2)
        if scale == "e8m0":
            kept[-1] = 3 / 4
        assert np.all(ratio <= 1 - kept * factor + 1e-5)
        if name == "sign" and scale == "float32":
            np.testing.assert_allclose(ratio[:, 0], 1 - 1 / B, atol=1e-5)  # a single value


@pytest.mark.parametrize("name", some(MEANS, ("int2",)))
def test_means_of_zeros_of_tiny_values_and_of_a_cut_group(name):
    x = np.zeros(64 * 4 + 5, np.float32)
    x[64:128] = 1e-40  # subnormal
    x[128:192] = 1e-38 * normal(64)
    x[192] = 1e-36  # means over 64 values are near the least scale
    x[256:] = 7, -7, 7, 7, -7
    for scale in SCALES:
        found = np.asarray(sent(jnp.asarray(x), Format(name, 64, scale)), np.float64)
        assert not found[:128].any()
        for start in (128, 192):
            part = slice(start, start + 64)
            error = np.linalg.norm(found[part] - x[part].astype(np.float64))
            assert error <= np.linalg.norm(x[part].astype(np.float64)) * (1 + 1e-6)
        np.testing.assert_allclose(found[256:], x[256:], rtol=0 if scale != "e8m0" else 1 / 3)


def test_bfloat16_is_that_of_jax_and_stays_finite():
    x = normal(1000) * np.float32(10.0) ** np.arange(-36, 39).repeat(14)[:1000].astype(np.float32)
    x[5:8] = 3.4e38, -3.4e38, np.inf
    expected = jnp.asarray(x).astype(jnp.bfloat16).astype(jnp.float32)
    expected = expected.at[5].set(jnp.finfo(jnp.bfloat16).max.astype(jnp.float32))
    expected = expected.at[6].set(-jnp.finfo(jnp.bfloat16).max.astype(jnp.float32))
    np.testing.assert_array_equal(sent(x, Format("bfloat16")), expected)


# --- in the all-reduce ---


@pytest.mark.slow
def test_large_ranges_have_whole_groups():
    """Of 1523 values, each of 3 workers has 508, sent as 512, and the last has 499."""
    spec, workers, size = Format("sign", 8), 3, 1523
    x = normal((workers, size), seed=1)  # no value on a tie of float32
    run = on_workers(lambda x: quantized_all_reduce(x, spec, axis_name="data"), workers)
    compiled = run.lower(stacked(workers, size)).compile()
    result = jax.tree.map(np.asarray, compiled(x))
    rule = lambda v: rounded(v, "sign", 8, "bfloat16")[0]
    total, residuals = all_reduced(x.astype(np.float64), rule, 8)
    np.testing.assert_array_equal(result.total, np.broadcast_to(result.total[:1], x.shape))
    np.testing.assert_allclose(result.total[0], total, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(result.residual, residuals, rtol=1e-4, atol=1e-5)
    assert traffic.wire_bytes(compiled).received == 4 * 4 * spec.words(512)


@pytest.mark.slow
def test_ranges_that_are_stored_lose_nothing():
    """50,021 values of 3 workers: ranges of 16,674 are sent as 16,680, and stored."""
    x = normal((3, 50_021))
    run = lambda x: quantized_all_reduce(x, Format("ternary", 8), axis_name="data")
    found = jax.tree.map(np.asarray, on_workers(run, 3, "vmap")(x))
    kept = found.total[0] + found.residual.sum(axis=0)
    np.testing.assert_allclose(kept, x.sum(axis=0), atol=1e-4)
    assert np.linalg.norm(found.residual) < np.linalg.norm(x)


def test_large_messages_have_whole_groups():
    """71 values are sent as 72. The last group has the mean of its seven."""
    spec = Format("ternary", 8)
    reducer = GatheredQuantized(spec, "nearest")
    assert reducer.words(71) == spec.words(72)
    x = normal((3, 71))
    found = on_workers(lambda x: finished(reducer, x, ()), 3, "vmap")(x)
    each = np.stack([rounded(row, "ternary", 8, "bfloat16")[0] for row in x.astype(np.float64)])
    np.testing.assert_allclose(found.mean[0], each.mean(axis=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.residual, x - each, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spec", [Format("int4"), Format("sign"), QSGD(4)], ids=str)
def test_the_largest_vectors_are_not_filled(spec):
    most = 2**31 - 1
    x = jax.ShapeDtypeStruct((most,), jnp.float32)
    assert jax.eval_shape(lambda x: to_message(quantize(x, spec, None), spec), x).size
    assert GatheredQuantized(spec, "nearest").words(most - 100) == spec.words(most - 100)


@pytest.mark.slow
def test_without_decay_neither_rounding_is_fed_back():
    def outcome(decay, x):
        tx = quantized("int4", group_size=8, decay=decay, is_dense=lambda path, shape: False)
        once, state = tx.update(x, tx.init(x))
        return once, tx.update(x, state)[0]

    x = normal((3, 64))
    first, second = (np.asarray(u) for u in on_workers(lambda x: outcome(0.0, x), 3, "vmap")(x))
    np.testing.assert_array_equal(first, second)
    first, second = (np.asarray(u) for u in on_workers(lambda x: outcome(None, x), 3, "vmap")(x))
    assert np.any(first != second)
    mean = x.mean(axis=0)
    assert np.abs(first[0] + second[0] - 2 * mean).mean() < np.abs(2 * first[0] - 2 * mean).mean()


# --- bytes ---


def stacked(workers, size):
    return jax.ShapeDtypeStruct((workers, size), jnp.float32)


def test_a_dense_sum_in_bfloat16_travels_as_16_bits_and_is_summed_in_32():
    workers, size = 8, 4096

    def step(tx):
        def update(x):
            gradient = x.reshape(64, 64)
            return tx.update(gradient, tx.init(gradient))[0]

        return on_workers(update, workers)

    exact, half = (
        traffic.wire_bytes(step(tx).lower(stacked(workers, size)).compile()).received
        for tx in (dense(), quantized("bfloat16"))
    )
    assert abs(half - exact / 2) < 16
    # One worker has 1, all others 2**-8. Sums in bfloat16, one after the other, would stay at 1.
    x = np.full((workers, size), 2.0**-8, np.float32)
    x[0] = 1
    found = np.asarray(step(quantized("bfloat16"))(x))
    np.testing.assert_allclose(workers * found, 1 + 7 * 2.0**-8, rtol=2**-8)
    assert np.all(workers * found > 1.02)


ERRORS = {
    "format": (
        lambda: quantized("int3"),
        "format='int3' is unknown: use one of int8, int4, int2, tern",
    ),
    "scale": (lambda: Format("int8", scale="max"), "scale='max' is unknown: use one of float32"),
    "group_size": (lambda: quantized(group_size=0), "group_size=0 must be at least 1"),
    "key": (
        lambda: quantize(jnp.ones(3), Format(), jax.random.key(0)),
        r"Format\(name='int8'.*rounds without one: pass key=None",
    ),
    "rounding": (lambda: Quantized(Format()), "is deterministic: use 'nearest'"),
}


@pytest.mark.parametrize(("wrong", "text"), ERRORS.values(), ids=ERRORS)
def test_errors_name_the_argument_its_value_and_the_fix(wrong, text):
    with pytest.raises(ValueError, match=text):
        wrong()
