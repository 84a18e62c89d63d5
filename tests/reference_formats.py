"""NumPy twins of the number formats: every value that a format has, and the nearest of them."""

import math

import ml_dtypes
import numpy as np

_FLOATS = {
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float16": np.float16,
}


def values_of(name):
    """All finite values of a format, in increasing order, float64."""
    if name in ("int8", "int4"):
        largest = {"int8": 127, "int4": 7}[name]
        return np.arange(-largest, largest + 1, dtype=np.float64)
    if name == "e3m0":
        powers = 2.0 ** np.arange(7)
        return np.concatenate([-powers[::-1], [0], powers])
    dtype = np.dtype(_FLOATS[name])
    codes = np.arange(2 ** (8 * dtype.itemsize), dtype=f"u{dtype.itemsize}").view(dtype)
    found = codes.astype(np.float64)
    return np.unique(found[np.isfinite(found)])


def scale_above(x, kind):
    """The smallest scale of its kind that is at least x."""
    if kind == "float32" or not x:
        return x
    fraction, exponent = math.frexp(x)
    if kind == "bfloat16":
        return math.ldexp(math.ceil(fraction * 2**8), exponent - 8)
    return math.ldexp(1.0, exponent - (fraction == 0.5))


MEANS = ("sign", "ternary", "int2")


def nearest_scale(x, kind):
    """The scale of its kind that is nearest to x, the larger of two, and whether it is a tie."""
    if kind == "float32" or not x:
        return x, False
    bits = {"bfloat16": 8, "e8m0": 1}[kind]
    fraction, exponent = math.frexp(x)
    position = fraction * 2**bits
    is_tie = abs(position % 1 - 0.5) < 2e-6 * position
    return math.ldexp(math.floor(position + 0.5), exponent - bits), is_tie


def rounded_to_means(x, name, group_size, scale="float32"):
    """`rounded` for formats whose scales are means of magnitudes.

    Where float32 may find other values above the threshold, or another scale, the group is unclear.
    """
    found, unclear = np.zeros(len(x)), np.zeros(len(x), bool)
    for start in range(0, len(x), group_size):
        span = slice(start, start + group_size)
        magnitudes = np.abs(x[span])
        if not magnitudes.any():
            continue
        threshold = {"sign": 0, "ternary": 0.5, "int2": 0.8}[name]
        threshold *= np.sum(magnitudes**2) / np.sum(magnitudes)
        parts = {
            "sign": [magnitudes >= 0],
            "ternary": [magnitudes > threshold],
            "int2": [magnitudes > threshold, magnitudes <= threshold],
        }[name]
        unclear[span] = np.any(np.abs(magnitudes - threshold) < 3e-6 * threshold)
        for part in parts:
            if part.any():
                level, is_tie = nearest_scale(np.mean(magnitudes[part]), scale)
                found[span] += np.where(part, np.where(x[span] < 0, -level, level), 0)
                unclear[span] |= is_tie
    return found, unclear


def rounded(x, name, group_size, scale="float32"):
    """A vector after rounding, float64, and where float32 can't tell (ties, or nearly so)."""
    x = np.asarray(x, np.float64)
    if name in MEANS:
        return rounded_to_means(x, name, group_size, scale)
    if name == "bfloat16":
        found = x.astype(ml_dtypes.bfloat16).astype(np.float64)
        return found, np.zeros(len(x), bool)
    table = values_of(name)
    found, unclear = np.zeros(len(x)), np.zeros(len(x), bool)
    for start in range(0, len(x), group_size):
        span = slice(start, start + group_size)
        s = scale_above(float(np.float32(np.abs(x[span]).max() / table[-1])), scale)
        if not s:
            continue
        relative = np.clip(x[span] / s, table[0], table[-1])
        above = np.clip(np.searchsorted(table, relative), 1, len(table) - 1)
        low, high = table[above - 1], table[above]
        middle = (low + high) / 2
        found[span] = s * np.where(relative < middle, low, high)
        unclear[span] = np.abs(relative - middle) < 1e-4 * (high - low)
    return found, unclear


def range_size(size, workers, group_size):
    """ceil(d / W) values, or whole groups of them if these are at most a 64th more."""
    least = -(-size // workers)
    whole = group_size * -(-least // group_size)
    return whole if whole <= least * 65 / 64 else least


def all_reduced(x, rule, group_size=1):
    """Total and residuals of workers' vectors x[w, d], if the owners of ranges sum them.

    Args:
        x: the workers' vectors, float64[W, d].
        rule: function from a vector to what a receiver decodes. Each part is rounded once on its
            way to its owner, unless it is the owner's, and each sum once on its way to all.
        group_size: of the rule. Only large ranges, of 64 values and more, depend on it.

    Returns:
        The total as all decode it, float64[d], and the residuals, float64[W, d]: senders keep x -
        deq(q(x)), and an owner keeps S - deq(q(S)) of its range.
    """
    workers, size = x.shape
    m = range_size(size, workers, group_size)
    total, residuals = np.zeros(size), np.zeros(x.shape)
    for owner in range(workers):
        span = slice(owner * m, (owner + 1) * m)
        if not total[span].size:
            continue
        parts = np.stack([row[span] if w == owner else rule(row[span]) for w, row in enumerate(x)])
        residuals[:, span] = x[:, span] - parts
        total[span] = rule(parts.sum(axis=0))
        residuals[owner, span] = parts.sum(axis=0) - total[span]
    return total, residuals
