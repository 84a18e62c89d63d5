"""Where a count sketch puts each element: tiles, their places in the rows, signs.

As many tiles as fit into a row are a group. Each row puts the tiles of a group one after the other
in a random order, from a random column on, and past its end goes on at its beginning. So elements
of a group never collide, and those of two groups collide with probability 1 / cols. Up to 2**14
columns, and with a tile size of one's own, a group is one tile.

A column has at most one element of a group. So a GPU, whose additions to memory would be atomic,
sums the elements of all groups in a column, in a fixed order.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int, Integer, UInt32

from jaxsparse.arrays.hashing import as_uint32, combine, drawn, keyed
from jaxsparse.arrays.platforms import zeros
from jaxsparse.arrays.settings import static_int, static_seed

# Largest number of elements of a tile, unless a spec has its own. Shorter tiles are closer to
# independent columns, and longer ones have less overhead. This one is within a tenth of the fastest
# and small enough for a second-level cache.
_MAX_TILE = 2**14
# Numbers under which signs and orders of tiles are hashed. The first column of a group is hashed
# under the number of the row, and no row has these.
_SIGN = 2**32 - 1
_ORDER = 2**32 - 3
_MOST_ORDERS = 64  # of tiles in a group
# Columns of all rows and parts that a GPU sums side by side, and groups that it adds in one turn.
_LANES, _AT_ONCE = 2**20, 8

Seed = Integer[Array, ""] | int | None


@dataclasses.dataclass(frozen=True)
class SketchSpec:
    """Shape and default seed of a count sketch.

    Attributes:
        rows: number of independent rows, r. An estimate is the median over them. O(log(d / delta))
            rows bound the failure probability by delta. 5 is usual.
        cols: number of columns of a row, c. O(1 / eps) are needed to find coordinates whose squares
            are at least eps ||x||^2.
        seed: seed of the hashes where a function is not given its own, 0 <= seed < 2**32.
        tile_size: number of consecutive elements that stay together in each row, at most `cols`.
            They never collide with each other. `encode_blocks` needs it to be the size of a block.
            If one run of heavy elements fills the columns, every other element collides with it in
            all rows, so with few columns runs are found more often with small tiles. None: cols up
            to 2**14, and a power of two from 2**12 to 2**14 beyond, which is fast, and summed in
            one order on a GPU: see `encode`.

    >>> SketchSpec(rows=5, cols=1000)
    SketchSpec(rows=5, cols=1000, seed=0, tile_size=None)
    """

    rows: int
    cols: int
    seed: int = 0
    tile_size: int | None = None

    def __post_init__(self):
        for name, high in ("rows", 2**16), ("cols", 2**30):
            value = static_int(name, getattr(self, name))
            if not 1 <= value < high:
                raise ValueError(f"{name}={value} must be in 1 .. {high - 1}: choose it there")
            object.__setattr__(self, name, value)
        object.__setattr__(self, "seed", static_seed("seed", self.seed))
        if self.tile_size is not None:
            tile = static_int("tile_size", self.tile_size)
            if not 1 <= tile <= self.cols:
                raise ValueError(
                    f"tile_size={tile} must be in 1 .. {self.cols}, cols: a tile is no longer than "
                    "a row"
                )
            object.__setattr__(self, "tile_size", tile)

    @property
    def tile(self) -> int:
        """Number of elements of a tile. It can't depend on d, which `decode_at` does not know."""
        if self.tile_size is not None:
            return self.tile_size
        if self.cols <= _MAX_TILE:
            return self.cols
        # At least four in a row, so that a group leaves at most a fifth of a row empty.
        return int(min(_MAX_TILE, 2 ** ((self.cols // 4).bit_length() - 1)))

    @property
    def group(self) -> int:
        return 1 if self.tile_size is not None else self.cols // self.tile


@functools.cache
def _orders(group: int) -> tuple[np.ndarray, np.ndarray]:
    """Factors that put the tiles of a group in an order modulo their number, and their inverses."""
    factors = [x for x in range(1, group) if math.gcd(x, group) == 1]
    some = factors[:: -(-len(factors) // _MOST_ORDERS)]
    return np.array(some, np.uint32), np.array([pow(x, -1, group) for x in some], np.uint32)


def _order(
    factors: np.ndarray,
    seed: UInt32[Array, ""],
    row: Integer[Array, "..."] | int,
    group: Integer[Array, "..."],
) -> UInt32[Array, "..."]:
    """One of the factors, for each row and group."""
    return jnp.asarray(factors)[drawn(len(factors), combine(seed, _ORDER), row, group)]


def _columns(
    spec: SketchSpec,
    seed: UInt32[Array, ""],
    rows: Sequence[Integer[Array, "..."] | int],
    tile: Integer[Array, "..."],
) -> list[Int[Array, "..."]]:
    """The columns of tiles' first elements, for each of `rows`."""
    if spec.group == 1:
        return [drawn(spec.cols, seed, row, tile) for row in rows]
    count = np.uint32(spec.group)
    group, within = as_uint32(tile) // count, as_uint32(tile) % count

    def of(row: Integer[Array, "..."] | int) -> Int[Array, "..."]:
        place = within * _order(_orders(spec.group)[0], seed, row, group) % count
        column = place.astype(jnp.int32) * spec.tile + drawn(spec.cols, seed, row, group)
        return jnp.where(column < spec.cols, column, column - spec.cols)

    return [of(row) for row in rows]


def _places(
    spec: SketchSpec,
    seed: UInt32[Array, ""],
    tile: Integer[Array, "*tiles"],
    within: Integer[Array, "..."],
) -> tuple[list[Int[Array, "*tiles"]], list[UInt32[Array, "..."]]]:
    """The columns where each row holds the tiles, and whether it flips the signs of elements.

    Both lists have an item for each row: the column of each tile's first element, and words whose
    highest bit is set where an element's sign is flipped. The shape of `within`, places of elements
    in their tiles, broadcasts with that of `tile`.
    """
    size = np.uint32(spec.tile)
    if tile.shape == within.shape:  # XLA's CPU backend would store columns of all rows at once
        columns = _columns(spec, seed, range(spec.rows), tile)
    else:  # columns are few, and one hash for all rows is less to compile
        row = lax.iota(jnp.uint32, spec.rows).reshape(-1, *[1] * tile.ndim)
        (each,) = _columns(spec, seed, [row], tile[None])
        if tile.ndim:  # otherwise they would be hashed again for each element
            each = lax.optimization_barrier(each)
        columns = list(jnp.unstack(each))
    index = as_uint32(tile) * size + as_uint32(within)
    words: list[Array] = []
    for first in range(0, spec.rows, 32):  # one hash has the signs of 32 rows
        word = keyed(index, combine(seed, _SIGN, first // 32))
        words += [word << np.uint32(bit) for bit in range(min(32, spec.rows - first))]
    return columns, words


def _flip(x: Float[Array, "..."], word: UInt32[Array, "..."]) -> Float[Array, "..."]:
    """Flips the signs of elements where the highest bit of a word is set."""
    sign = word & np.uint32(0x80000000)
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint32) ^ sign, jnp.float32)


def empty(spec: SketchSpec, like: tuple[Array, ...]) -> Float[Array, "rows cols+tile"]:
    """A table of zeros with `tile` further columns, into which tiles near a row's end run on."""
    return zeros((spec.rows, spec.cols + spec.tile), jnp.float32, like)


def wrapped(table: Float[Array, "rows cols+tile"], spec: SketchSpec) -> Float[Array, "rows cols"]:
    """The sketch: columns past the end of a row are added to its beginning."""
    return table[:, : spec.cols].at[:, : spec.tile].add(table[:, spec.cols :])


def add_one(
    table: Float[Array, "rows cols+tile"],
    values: Float[Array, " n"],
    tile: Int[Array, ""],
    spec: SketchSpec,
    seed: UInt32[Array, ""],
) -> Float[Array, "rows cols+tile"]:
    """Adds the first n elements of the tile with number `tile`."""
    values = values.astype(jnp.float32)
    columns, words = _places(spec, seed, tile, lax.iota(jnp.uint32, values.size))
    for row, (column, word) in enumerate(zip(columns, words)):
        corner = jnp.int32(row), column
        window = lax.dynamic_slice(table, corner, (1, values.size)) + _flip(values, word)[None]
        table = lax.dynamic_update_slice(table, window, corner)
    return table


def add_all(
    values: Float[Array, "n tile"],
    tiles: Int[Array, " n"],
    spec: SketchSpec,
    seed: UInt32[Array, ""],
) -> Float[Array, "rows cols"]:
    """The sketch of some whole tiles, given their numbers, in one scatter.

    To rounding, it is what `add_one` makes of one tile after the other. Sums are taken in any
    order, which may change from run to run. So workers may send such sums to each other, but must
    not rely on all computing equal ones.
    """
    size = spec.tile
    row, within = lax.iota(jnp.int32, spec.rows), lax.iota(jnp.uint32, size)[None, None]
    (columns,) = _columns(spec, seed, [row[None]], tiles[:, None])
    rows = jnp.broadcast_to(row[None], columns.shape)
    # Rows are an axis inside that of tiles, so that a tile is read from memory for one row alone.
    row = row[None, :, None]
    index = as_uint32(tiles)[:, None, None] * np.uint32(size) + within
    updates = _flip(values.astype(jnp.float32)[:, None], _words(index, row, seed))
    # Without a barrier, the offset of a tile would be hashed again for each element.
    corners = lax.optimization_barrier(jnp.stack([rows, columns], axis=2))
    table = lax.scatter_add(
        jnp.zeros_like(updates, shape=(spec.rows, spec.cols + size)),
        corners,
        updates,
        lax.ScatterDimensionNumbers(
            update_window_dims=(2,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
        ),
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )
    return wrapped(table, spec)


def gathered(
    x: Float[Array, " d"], seed: UInt32[Array, ""], *, spec: SketchSpec
) -> Float[Array, "rows cols"]:
    """The sketch of a vector, each column a sum of one element of each group.

    To rounding, it is what `add_one` makes of one tile after the other. It scatters nothing, so
    each run sums in the same order. A turn of the loop adds some groups to a column at once, so
    that it reads and writes the table seldom. XLA makes one kernel of that, and stores what it
    would gather for one large sum. Small tables are summed in parts, so that a turn has enough to
    do.
    """
    size, count = spec.tile, spec.group
    groups = -(-x.size // (size * count))
    parts = min(max(_LANES // (spec.rows * spec.cols), 1), groups)
    at_once = min(_AT_ONCE, -(-groups // parts))
    turns = -(-groups // (parts * at_once))
    row = lax.iota(jnp.int32, spec.rows)[None, :, None]
    column = lax.iota(jnp.int32, spec.cols)[None, None]
    group = jnp.arange(turns * at_once * parts, dtype=jnp.int32).reshape(-1, parts, 1, 1)
    first = drawn(spec.cols, seed, row[None], group)
    order = _order(_orders(count)[1], seed, row[None], group) if count > 1 else None

    def one(i: Any) -> Float[Array, "parts rows cols"]:
        at = lambda v: lax.dynamic_index_in_dim(v, i, keepdims=False)
        place = column - at(first)
        place = jnp.where(place < 0, place + spec.cols, place).astype(jnp.uint32)
        place, within = place // np.uint32(size), place % np.uint32(size)
        tile = at(group).astype(jnp.uint32) * np.uint32(count)
        if order is not None:
            tile += place * at(order) % np.uint32(count)
        index = tile * np.uint32(size) + within
        is_held = (place < count) & (index < np.uint32(x.size))
        index = jnp.where(is_held, index, 0)
        values = x.at[index.astype(jnp.int32)].get(mode="promise_in_bounds").astype(jnp.float32)
        is_flipped = _words(index, row, seed) >= np.uint32(2**31)
        return jnp.where(is_held, jnp.where(is_flipped, -values, values), 0)

    def add(turn: Any, table: Float[Array, "parts rows cols"]) -> Float[Array, "parts rows cols"]:
        for i in range(at_once):
            table += one(turn * at_once + i)
        return table

    # Replicated as the vector and the seed are.
    table = jnp.zeros_like(x, jnp.float32, (parts, spec.rows, spec.cols))
    table += jnp.zeros_like(seed, jnp.float32, ())
    return jnp.sum(lax.fori_loop(0, turns, add, table), axis=0)


def _words(
    index: UInt32[Array, "..."], row: Int[Array, "..."], seed: UInt32[Array, ""]
) -> UInt32[Array, "..."]:
    """Words whose highest bit is set where a row flips the sign of an element."""
    return keyed(index, combine(seed, _SIGN, row // 32)) << (row % 32).astype(jnp.uint32)


def tile_estimates(
    table: Float[Array, "rows cols"], spec: SketchSpec, seed: UInt32[Array, ""]
) -> Callable[[Int[Array, ""], int], Float[Array, " n"]]:
    """A function that decodes a tile, given its number and length."""
    # A tile that starts near the end of a row goes on at the row's beginning.
    table = jnp.concatenate([table, table[:, : spec.tile]], axis=1)

    def estimates(tile: Array, length: int) -> Array:
        columns, words = _places(spec, seed, tile, lax.iota(jnp.uint32, length))
        rows = []
        for row, (column, word) in enumerate(zip(columns, words)):
            corner = jnp.int32(row), column
            rows.append(_flip(lax.dynamic_slice(table, corner, (1, length))[0], word))
        return median(rows)

    return estimates


def estimates_at(
    table: Float[Array, "rows cols"],
    spec: SketchSpec,
    seed: UInt32[Array, ""],
    tile: Integer[Array, "..."],
    within: Integer[Array, "..."],
) -> Float[Array, "..."]:
    """Decodes elements anywhere, bitwise as `tile_estimates` does. For `within` see `_places`."""
    columns, words = _places(spec, seed, tile, within)
    rows = []
    for row, (start, word) in enumerate(zip(columns, words)):
        column = start + within.astype(jnp.int32)
        column = jnp.where(column < spec.cols, column, column - spec.cols)
        rows.append(_flip(table[row].at[column].get(mode="promise_in_bounds"), word))
    return median(rows)


def median(rows):
    """Elementwise median, by dropping the smallest and the largest again and again.

    The smallest of n // 2 + 2 elements has more than half of all n above it, so it is dropped
    before the others are looked at. So is the largest.
    """
    n = len(rows)
    window, later = rows[: n // 2 + 2], rows[n // 2 + 2 :]
    for _ in range((n - 1) // 2):
        for i in range(len(window) - 1):
            window[i], window[i + 1] = _ordered(window[i], window[i + 1])
        window.pop()
        for i in reversed(range(len(window) - 1)):
            window[i], window[i + 1] = _ordered(window[i], window[i + 1])
        window = window[1:] + later[:1]
        later = later[1:]
    return window[0] if n % 2 else 0.5 * window[0] + 0.5 * window[1]


def _ordered(a, b):
    # Each selection is one instruction. jnp.minimum takes three, because it propagates NaN. That is
    # not needed: a column lost to NaN is an outlier like others, and a coordinate that is NaN is so
    # in all rows.
    less = a < b
    return jnp.where(less, a, b), jnp.where(less, b, a)
