"""Where a count sketch puts each element: tiles, their offsets in the rows, signs."""

import dataclasses
from collections.abc import Iterator

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int, Integer, UInt32

from jaxsparse.hashing import as_uint32, bounded, combine, keyed
from jaxsparse.select.checks import check_seed
from jaxsparse.settings import static_int, static_seed

__all__ = ["Seed", "SketchSpec", "all_places", "flip", "places", "resolve", "tile_index"]

# Shorter tiles are closer to independent buckets, longer ones have less overhead: this one is
# within a tenth of the fastest, and small enough for a second-level cache.
_MAX_TILE = 2**14
# Rows' offsets are hashed under their numbers, signs under one that no row has.
_SIGN = 2**32 - 1

Seed = Integer[Array, ""] | int | None


@dataclasses.dataclass(frozen=True)
class SketchSpec:
    """Shape and default seed of a count sketch.

    Attributes:
        rows: r, independent rows; an estimate is the median over them. O(log(d / delta)) rows
            bound the failure probability by delta; 5 is usual.
        cols: c, buckets a row. O(1 / eps) are needed to find coordinates of eps ||x||^2.
        seed: 0 <= seed < 2**32, of the hashes wherever a function is not given its own.
        tile_size: consecutive elements that share an offset in each row, at most `cols`, and so
            never collide with each other; `encode_blocks` wants it to be the size of a block.
            None: min(cols, 2**14), which is fast.

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
                    f"tile_size={tile} must be in 1 .. {self.cols}, cols: a tile is shorter than a "
                    "row"
                )
            object.__setattr__(self, "tile_size", tile)

    @property
    def tile(self) -> int:
        """Elements that share an offset. No function of the size, which `decode_at` lacks."""
        return min(self.cols, _MAX_TILE) if self.tile_size is None else self.tile_size


def resolve(spec: SketchSpec, seed: Seed) -> UInt32[Array, ""]:
    """The seed in force, as uint32; a ValueError if it is not an integer scalar."""
    return check_seed(spec.seed if seed is None else seed)


def places(
    spec: SketchSpec,
    seed: UInt32[Array, ""],
    tile: Integer[Array, "*tiles"],
    index: UInt32[Array, " n"],
) -> Iterator[tuple[int, Int[Array, "*tiles"], UInt32[Array, " n"]]]:
    """Row by row: its number, the bucket where a tile begins, and elements' sign bits.

    Args:
        spec: rows and cols.
        seed: of all hashes.
        tile: numbers of tiles.
        index: of elements in the vector.

    Yields:
        row; int32 bucket of each tile's first element; uint32 of each element, 2**31 or 0.
    """
    for row in range(spec.rows):
        if row % 32 == 0:  # one hash has the signs of 32 rows
            word = _word(seed, row, index)
        yield row, _bucket(spec, seed, row, tile), _sign(word, row)


def all_places(
    spec: SketchSpec, seed: UInt32[Array, ""], tile: Int[Array, " n"], index: UInt32[Array, "n t"]
) -> tuple[Int[Array, "n rows"], UInt32[Array, "n rows t"]]:
    """What `places` yields of whole tiles, in two arrays: first buckets and signs.

    Args:
        spec: rows and cols.
        seed: of all hashes.
        tile: numbers of tiles.
        index: of their elements.
    """
    row = lax.iota(jnp.int32, spec.rows)
    buckets = _bucket(spec, seed, row[None], tile[:, None])
    row = row[None, :, None]
    return buckets, _sign(_word(seed, row, index[:, None]), row)


def _bucket(
    spec: SketchSpec,
    seed: UInt32[Array, ""],
    row: Int[Array, "..."] | int,
    tile: Integer[Array, "..."],
) -> Int[Array, "..."]:
    return bounded(combine(seed, row, tile), spec.cols).astype(jnp.int32)


def _word(
    seed: UInt32[Array, ""], row: Int[Array, "..."] | int, index: UInt32[Array, "..."]
) -> UInt32[Array, "..."]:
    return keyed(index, combine(seed, _SIGN, row // 32))


def _sign(word: UInt32[Array, "..."], row: Int[Array, "..."] | int) -> UInt32[Array, "..."]:
    return (word << as_uint32(row % 32)) & jnp.uint32(0x80000000)


def flip(x: Float[Array, " n"], sign: UInt32[Array, " n"]) -> Float[Array, " n"]:
    """Flips the signs of elements where `sign` has the highest bit set."""
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint32) ^ sign, jnp.float32)


def tile_index(
    spec: SketchSpec, tile: Int[Array, ""] | Int[Array, "n 1"], length: int
) -> UInt32[Array, "*n length"]:
    """Indices of a tile's first `length` elements, or of several tiles'."""
    within = lax.iota(jnp.uint32, length)
    return as_uint32(tile * spec.tile) + (within[None] if tile.ndim else within)
