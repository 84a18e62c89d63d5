"""SparseLoCo's exchange in NumPy, from the paper and its published code, worker by worker."""

import ml_dtypes
import numpy as np

GROUP = 256  # entries that share two levels


def pack(fields, bits):
    """Packs integers of `bits` bits end to end into words of 32 bits, the lowest bits first."""
    number = sum(int(field) << (bits * i) for i, field in enumerate(fields))
    words = -(-len(fields) * bits // 32)
    return [number >> (32 * i) & (2**32 - 1) for i in range(words)]


def top_k(x, k, chunk):
    """Indices of the k largest magnitudes of each chunk. Of equal ones, the lower indices count."""
    kept = []
    for start in range(0, len(x), chunk):
        part = np.abs(x[start : start + chunk])
        kept.append(start + np.sort(np.argsort(-part, kind="stable")[:k]))
    return np.concatenate(kept)


def elias_fano(indices, capacity, size):
    """The words of a bitmap of high bits, and of low bits, for indices below `size`."""
    lows = reversed(range(32))
    room = lambda low: -(-(capacity + -(-size // 2**low)) // 32)
    low = min(lows, key=lambda low: room(low) + -(-capacity * low // 32))
    words = room(low)
    indices = sorted(indices, key=lambda index: index >> low)
    bitmap = [0] * words
    for i, index in enumerate(indices):
        bit = (index >> low) + i
        bitmap[bit // 32] |= 1 << bit % 32
    fields = [index % 2**low for index in indices] + [0] * (capacity - len(indices))
    return bitmap + pack(fields, low)


def half(x):
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def sign_magnitude(values, bits=2):
    """The values that receivers decode from signs and magnitudes."""
    decoded = np.zeros(len(values))
    for start in range(0, len(values), GROUP):
        v = values[start : start + GROUP].astype(np.float64)
        m = np.abs(v)
        if bits == 2:
            is_high = (m != 0) if (m == 0).any() else m > m.mean()
            levels = np.zeros(len(m))
            for half_of_them in (is_high, ~is_high):
                if half_of_them.any():
                    levels[half_of_them] = half(m[half_of_them].mean())
        else:
            levels = np.zeros(len(m))
            if m.any():
                steps = 2 ** (bits - 1) - 2
                high = half(m.max())
                low = min(half(max(m[m > 0].min(), high * 2.0 ** -min(steps, 16))), high)
                spacing = max(np.log2(high / low), 1e-9) / steps
                with np.errstate(divide="ignore"):
                    place = np.clip(np.round(np.log2(m / low) / spacing), 0, steps)
                levels = np.where(m < low / 2, 0, high * 2.0 ** -((steps - place) * spacing))
        decoded[start : start + GROUP] = np.where(v < 0, -levels, levels)
    return decoded


def exchange(x, k, chunk, quantize, order=None, zeros=False):
    """The mean and the residuals of one exchange.

    Args:
        x: the workers' vectors, (W, d).
        k: number of entries that are sent of a chunk.
        chunk: number of elements of a chunk.
        quantize: function from a worker's selected values to what receivers decode.
        order: w's selected indices in the order of its message, order[w]. None: increasing.
        zeros: whether zeros are entries.
    """
    workers = len(x)
    sent = np.zeros(x.shape)
    for w in range(workers):
        chosen = top_k(x[w], k, chunk)
        if order is not None:
            assert sorted(order[w]) == chosen.tolist()
            chosen = order[w]
        if not zeros:
            chosen = chosen[x[w, chosen] != 0]
        if len(chosen):
            sent[w, chosen] = quantize(x[w, chosen])
    return sent.sum(0) / workers, x - sent
