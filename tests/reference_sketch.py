"""NumPy twins of the count sketch, with the library's own hashes and with the textbook's tables."""

import math

import numpy as np

TILE = 2**14


def mix(x):
    x = np.uint64(x)
    for shift, multiplier in (16, 0x21F0AAAD), (15, 0xD35A2D97), (15, 1):
        x = ((x ^ (x >> np.uint64(shift))) * np.uint64(multiplier)) & np.uint64(2**32 - 1)
    return x


def combine(*words):
    state = np.uint64(0)
    for word in words:
        state = (mix(state ^ np.uint64(word)) + np.uint64(0x9E3779B9)) & np.uint64(2**32 - 1)
    return state


def tile_and_group(cols, tile=None):
    """Number of elements of a tile, and of tiles of a group."""
    if tile is not None:
        return tile, 1
    if cols <= TILE:
        return cols, 1
    tile = TILE
    while 4 * tile > cols:
        tile //= 2
    return tile, cols // tile


def placed(cols, seed, row, index, tile=None):
    """Column of each index in a row."""
    size, count = map(np.uint64, tile_and_group(cols, tile))
    group, within = np.divmod(index // size, count)
    turn = (combine(seed, row, group) * np.uint64(cols)) >> np.uint64(32)
    place = within
    if count > 1:
        factors = np.array([x for x in range(1, int(count)) if math.gcd(x, int(count)) == 1])
        factors = factors[:: -(-len(factors) // 64)].astype(np.uint64)
        word = combine(int(combine(seed, 2**32 - 3)), row, group)
        place = within * factors[(word * np.uint64(len(factors))) >> np.uint64(32)] % count
    return (turn + place * size + index % size) % np.uint64(cols)


def buckets_and_signs(rows, cols, seed, index, tile=None):
    """Column and sign of each index in each row, (rows, n), from the definition."""
    index = np.asarray(index, np.uint64)
    buckets, signs = [], []
    for row in range(rows):
        buckets.append(placed(cols, seed, row, index, tile))
        multiple = (index * np.uint64(0x9E3779B9)) & np.uint64(2**32 - 1)
        word = mix(multiple ^ combine(seed, 2**32 - 1, row // 32))
        negative = (word >> np.uint64(31 - row % 32)) & np.uint64(1)
        signs.append(1.0 - 2.0 * negative)
    return np.array(buckets, np.int64), np.array(signs)


def random_buckets_and_signs(rows, cols, seed, index):
    """The same from independent uniform tables: the textbook's count sketch."""
    rng = np.random.default_rng(seed)
    shape = rows, len(index)
    return rng.integers(0, cols, shape), rng.choice([-1.0, 1.0], shape)


def encode(x, cols, places):
    buckets, signs = places
    table = np.zeros((len(buckets), cols))
    for row, (bucket, sign) in enumerate(zip(buckets, signs)):
        np.add.at(table[row], bucket, sign * x)
    return table


def decode(table, places):
    buckets, signs = places
    return np.median(signs * np.take_along_axis(table, buckets, axis=1), axis=0)


def l2_norm(table):
    return np.median(np.linalg.norm(np.asarray(table, np.float64), axis=1))


def top_k(x, k):
    return np.argsort(-np.abs(x), kind="stable")[:k]


def heavy(estimates, l2, k):
    """HEAVYMIX's H, cut to the k largest."""
    largest = top_k(estimates, k)
    return largest[np.abs(estimates[largest]) >= l2 / np.sqrt(k)]
