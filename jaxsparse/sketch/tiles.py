"""Where a count sketch puts each element: tiles, their segments of the rows, rotations, signs.

Rows are cut into as many segments as tiles form a group. A random bijection deals the tiles of a
group to the segments, so that each segment gets one tile of each group. A tile is rotated within
its segment by a random amount. Then elements of a group never collide, and those of two groups
collide with probability 1 / cols, or slightly more where segments don't divide the row.

Some functions add tiles of a vector to a sketch, one after the other or all at once. Others
estimate single elements from a sketch, tile by tile or anywhere.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int, Integer, UInt32

from jaxsparse.arrays.hashing import as_uint32, combine, drawn, keyed, mix
from jaxsparse.arrays.platforms import zeros
from jaxsparse.arrays.settings import static_int, static_seed

__all__ = [
    "SketchSpec",
    "add_all",
    "add_one",
    "empty",
    "estimates_at",
    "gathered",
    "median",
    "tile_estimates",
    "wrapped",
]


# Largest number of elements of a tile, unless a spec has its own. Shorter tiles are closer to
# independent columns, and longer ones have less overhead. This one is within a tenth of the fastest
# and small enough for a second-level cache.
_MAX_TILE = 2**14
# Least number of columns of a segment, if a row has so many: fewer than one in so many stay unused.
_LEAST_SEGMENT = 8
# Numbers under which signs and segments are hashed. Rotations are hashed under the number of their
# row, and no row has these.
_SIGN = 2**32 - 1
_SEGMENT = 2**32 - 3

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
        tile_size: number of consecutive elements that share a place in each row, at most `cols`.
            They never collide with each other. `encode_blocks` needs it to be the size of a block.
            None: cols, or the largest of cols / 2, cols / 4, ... that is at most 2**14, which is
            fast.

    Raises:
        ValueError: a value is out of range.

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
        return self.cols // self.segments.number if self.tile_size is None else self.tile_size

    @property
    def segments(self) -> "Segments":
        """The segments of a row. Their number is a power of two, for the bijections."""
        if self.tile_size is None:
            count = 2 ** (-(-self.cols // _MAX_TILE) - 1).bit_length()
        else:
            longest = max(self.tile_size, min(self.cols, _LEAST_SEGMENT))
            count = 2 ** ((self.cols // longest).bit_length() - 1)
        return Segments(count, self.cols // count)


@dataclasses.dataclass(frozen=True)
class Segments:
    """How the columns of a row are cut. As many tiles as there are segments form a group.

    Columns that are left at the end of a row, fewer than there are segments, stay 0.
    """

    number: int
    length: int  # number of columns of a segment

    def dealt(
        self, seed: UInt32[Array, ""], row: Integer[Array, "..."] | int, tile: Integer[Array, "..."]
    ) -> Int[Array, "..."]:
        """The segments of tiles."""
        tile = as_uint32(tile)
        if self.number == 1:
            return zeros(tile.shape, jnp.int32, (tile, seed))
        flips, odd = _bijection(seed, row, tile >> np.uint32(self.number.bit_length() - 1))
        return (((tile ^ flips) * odd) & np.uint32(self.number - 1)).astype(jnp.int32)

    def tile_at(
        self, seed: UInt32[Array, ""], row: Int[Array, "..."], group: Int[Array, "..."]
    ) -> Int[Array, "... segments"]:
        """The tiles of groups in the order of their segments: the inverse of `dealt`."""
        flips, odd = (x[..., None] for x in _bijection(seed, row, group))
        inverse = odd  # to 3 bits; each turn doubles their number
        for _ in range(4):
            inverse = inverse * (np.uint32(2) - odd * inverse)
        shape = (1,) * (odd.ndim - 1) + (self.number,)
        segment = lax.broadcasted_iota(jnp.uint32, shape, odd.ndim - 1)
        place = (segment * inverse ^ flips) & np.uint32(self.number - 1)
        return group[..., None] * self.number + place.astype(jnp.int32)


def _bijection(
    seed: UInt32[Array, ""], row: Integer[Array, "..."] | int, group: Integer[Array, "..."]
) -> tuple[UInt32[Array, "..."], UInt32[Array, "..."]]:
    """Bits to flip in a tile's place in its group, which makes it uniform, and an odd factor."""
    word = combine(seed, _SEGMENT, row, group)
    return mix(word), word | np.uint32(1)


class _Places(NamedTuple):
    """Where rows hold tiles, and whether they flip the signs of elements."""

    segments: list[Int[Array, "*tiles"]]  # one for each row, as in the others
    rotations: list[Int[Array, "*tiles"]]
    words: list[UInt32[Array, "..."]]  # the highest bit is set where an element's sign is flipped

    def corners(self, spec: SketchSpec) -> list[Int[Array, "*tiles"]]:
        """The columns of tiles in a table whose segments have `tile` further columns each."""
        width = spec.segments.length + spec.tile
        return [s * width + r for s, r in zip(self.segments, self.rotations)]


def _places(
    spec: SketchSpec,
    seed: UInt32[Array, ""],
    tile: Integer[Array, "*tiles"],
    within: Integer[Array, "..."],
) -> _Places:
    """Where each row holds tiles.

    Args:
        spec: rows, cols and tile of the sketch.
        seed: seed of all hashes.
        tile: numbers of tiles.
        within: places of elements in their tiles. Its shape broadcasts with that of `tile`.
    """
    size, cut = np.uint32(spec.tile), spec.segments
    if tile.shape == within.shape:  # XLA's CPU backend would store columns of all rows at once
        segments = [cut.dealt(seed, row, tile) for row in range(spec.rows)]
        rotations = [drawn(cut.length, seed, row, tile) for row in range(spec.rows)]
    else:  # places are few, and one hash for all rows is less to compile
        row = lax.iota(jnp.uint32, spec.rows).reshape(-1, *[1] * tile.ndim)
        each = cut.dealt(seed, row, tile[None])
        rotation = drawn(cut.length, seed, row, tile[None])
        each = jnp.broadcast_to(each, rotation.shape)
        if tile.ndim:  # otherwise they would be hashed again for each element
            each, rotation = lax.optimization_barrier((each, rotation))
        segments, rotations = list(jnp.unstack(each)), list(jnp.unstack(rotation))
    index = as_uint32(tile) * size + as_uint32(within)
    words: list[Array] = []
    for first in range(0, spec.rows, 32):  # one hash has the signs of 32 rows
        word = keyed(index, combine(seed, _SIGN, first // 32))
        words += [word << np.uint32(bit) for bit in range(min(32, spec.rows - first))]
    return _Places(segments, rotations, words)


def _flip(x: Float[Array, "..."], word: UInt32[Array, "..."]) -> Float[Array, "..."]:
    """Flips the signs of elements where the highest bit of a word is set."""
    sign = word & np.uint32(0x80000000)
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint32) ^ sign, jnp.float32)


def empty(spec: SketchSpec, like: tuple[Array, ...]) -> Float[Array, "rows wide"]:
    """A table of zeros. Each segment has `tile` further columns, into which tiles run on.

    Args:
        spec: rows, cols and tile of the sketch.
        like: arrays that will be added, for the replication type.
    """
    cut = spec.segments
    return zeros((spec.rows, cut.number * (cut.length + spec.tile)), jnp.float32, like)


def wrapped(table: Float[Array, "rows wide"], spec: SketchSpec) -> Float[Array, "rows cols"]:
    """The sketch: columns past the end of a segment are added to its beginning."""
    cut, size = spec.segments, spec.tile
    table = table.reshape(spec.rows, cut.number, -1)
    past = jnp.pad(table[..., cut.length :], ((0, 0), (0, 0), (0, cut.length - size)))
    return _padded(table[..., : cut.length] + past, spec)


def _padded(
    table: Float[Array, "rows segments length"], spec: SketchSpec
) -> Float[Array, "rows cols"]:
    """The table with the columns that are left at the end of its rows."""
    table = table.reshape(spec.rows, -1)
    return jnp.pad(table, ((0, 0), (0, spec.cols - table.shape[1])))


def add_one(
    table: Float[Array, "rows wide"],
    values: Float[Array, " n"],
    tile: Int[Array, ""],
    spec: SketchSpec,
    seed: UInt32[Array, ""],
) -> Float[Array, "rows wide"]:
    """Adds the first n elements of the tile with number `tile`."""
    values = values.astype(jnp.float32)
    places = _places(spec, seed, tile, lax.iota(jnp.uint32, values.size))
    for row, (column, word) in enumerate(zip(places.corners(spec), places.words)):
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
    size, cut = spec.tile, spec.segments
    row, within = lax.iota(jnp.int32, spec.rows), lax.iota(jnp.uint32, size)[None, None]
    segment = cut.dealt(seed, row[None], tiles[:, None])
    rotation = drawn(cut.length, seed, row[None], tiles[:, None])
    columns = segment * (cut.length + size) + rotation
    rows = jnp.broadcast_to(row[None], columns.shape)
    # Rows are an axis inside that of tiles, so that a tile is read from memory for one row alone.
    row = row[None, :, None]
    index = as_uint32(tiles)[:, None, None] * np.uint32(size) + within
    updates = _flip(values.astype(jnp.float32)[:, None], _words(index, row, seed))
    # Without a barrier, the place of a tile would be hashed again for each element.
    corners = lax.optimization_barrier(jnp.stack([rows, columns], axis=2))
    table = lax.scatter_add(
        jnp.zeros_like(updates, shape=(spec.rows, cut.number * (cut.length + size))),
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
    """The sketch of a vector, as sums along one axis of an array that is never stored.

    To rounding, it is what `add_one` makes of one tile after the other. It scatters nothing, so
    each run sums in the same order. Each row reads the vector once.
    """
    size, cut = spec.tile, spec.segments
    tiles = -(-x.size // size)
    groups = -(-tiles // cut.number)
    row = lax.iota(jnp.int32, spec.rows)[:, None]
    tile = cut.tile_at(seed, row, lax.iota(jnp.int32, groups)[None])  # [rows, groups, segments]
    length = jnp.where(tile < tiles, jnp.minimum(x.size - tile * size, size), 0)
    tile = jnp.where(tile < tiles, tile, 0)
    rotation = drawn(cut.length, seed, row[..., None], tile)
    # Without a barrier, the place of a tile would be hashed again for each element.
    tile, length, rotation = (
        v[..., None] for v in lax.optimization_barrier((tile, length, rotation))
    )
    column = lax.broadcasted_iota(jnp.int32, (1, 1, cut.number, cut.length), 3)
    within = column - rotation
    within = jnp.where(within < 0, within + cut.length, within)
    is_held = within < length
    index = jnp.where(is_held, tile * size + within, 0)
    values = x.at[index].get(mode="promise_in_bounds").astype(jnp.float32)
    values = _flip(values, _words(as_uint32(index), row[..., None, None], seed))
    return _padded(jnp.sum(jnp.where(is_held, values, 0), axis=1), spec)


def _words(
    index: UInt32[Array, "..."], row: Int[Array, "..."], seed: UInt32[Array, ""]
) -> UInt32[Array, "..."]:
    """Words whose highest bit is set where a row flips the sign of an element."""
    return keyed(index, combine(seed, _SIGN, row // 32)) << (row % 32).astype(jnp.uint32)


def tile_estimates(
    table: Float[Array, "rows cols"], spec: SketchSpec, seed: UInt32[Array, ""]
) -> Callable[[Int[Array, ""], int], Float[Array, " n"]]:
    """A function that decodes a tile, given its number and length."""
    # A tile that starts near the end of a segment goes on at the segment's beginning.
    cut = spec.segments
    table = table[:, : cut.number * cut.length].reshape(spec.rows, cut.number, -1)
    table = jnp.concatenate([table, table[..., : spec.tile]], axis=2).reshape(spec.rows, -1)

    def estimates(tile: Array, length: int) -> Array:
        places = _places(spec, seed, tile, lax.iota(jnp.uint32, length))
        rows = []
        for row, (column, word) in enumerate(zip(places.corners(spec), places.words)):
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
    """Decodes elements anywhere, bitwise as `tile_estimates` does.

    Args:
        table: sketch.
        spec: rows, cols and tile of the sketch.
        seed: seed of all hashes.
        tile: numbers of tiles.
        within: places of elements in their tiles. Its shape broadcasts with that of `tile`.
    """
    cut, places = spec.segments, _places(spec, seed, tile, within)
    rows = []
    for row, (segment, rotation, word) in enumerate(zip(*places)):
        column = rotation + within.astype(jnp.int32)
        column = jnp.where(column < cut.length, column, column - cut.length)
        if cut.number > 1:
            column += segment * cut.length
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
