"""DeMo in NumPy, from the paper and its published code: slow, in float64, tile by tile."""

import ml_dtypes
import numpy as np


def half(x):
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def cosine(x, inverse=False):
    """The orthonormal DCT-II of the rows and columns of a matrix, by its formula."""

    def matrix(n):
        a = np.array(
            [[np.cos(np.pi * (2 * i + 1) * k / (2 * n)) for i in range(n)] for k in range(n)]
        )
        return a * np.array([np.sqrt(1 / n), *[np.sqrt(2 / n)] * (n - 1)])[:, None]

    rows, columns = map(matrix, x.shape)
    return rows.T @ x @ columns if inverse else rows @ x @ columns.T


def tiles(shape, chunk):
    """Yields the slice and the sides of each tile. Tiles are as few, and as equal, as may be."""
    counts = [-(-n // chunk) for n in shape]
    sides = [-(-n // count) for n, count in zip(shape, counts)]
    for i in range(counts[0]):
        for j in range(counts[1]):
            yield np.s_[i * sides[0] : (i + 1) * sides[0], j * sides[1] : (j + 1) * sides[1]], sides


def exchange(m, k, chunk, round_=half):
    """The update and all residuals of an exchange of momenta (W, rows, columns)."""
    workers = len(m)
    u, left = np.zeros(m.shape[1:]), m.copy()
    for part, sides in tiles(m.shape[1:], chunk):
        total = np.zeros(sides)
        rows, columns = m[0][part].shape
        for w in range(workers):
            tile = np.zeros(sides)
            tile[:rows, :columns] = m[w][part]
            q = cosine(tile)
            kept = np.argsort(-np.abs(q).ravel(), kind="stable")[:k]
            sent = np.zeros(q.size)
            sent[kept] = round_(q.ravel()[kept])
            total += sent.reshape(sides)
            left[w][part] -= cosine(sent.reshape(sides), inverse=True)[:rows, :columns]
        u[part] = cosine(total / workers, inverse=True)[:rows, :columns]
    return u, left
