"""Count sketch (Charikar et al., 2002) of a flat vector: encode, merge, decode, heavy hitters.

    S[j, h_j(i)] += sign_j(i) x_i,    estimate_i = median_j sign_j(i) S[j, h_j(i)]

h_j is piecewise linear: x is cut into tiles, and row j adds tile b to consecutive columns,
cyclically, from a random offset of its own. Two elements of a tile never collide, and two of
different tiles collide with probability 1 / cols. Signs are independent per element. So estimates
are unbiased with variance at most ||x||^2 / cols a row, as for independent columns. But memory is
read and written in runs, many times faster than a scatter into random columns.

Columns and signs are hashes of (seed, row, index), so they are not stored. A sketch is
float32[rows, cols]. Sketches of different x merge by addition if their spec and seed agree; without
a seed, it is the spec's. Decode with the spec and seed of `encode`. Where size <= rows * cols,
sending x dense costs no more than sending its sketch.

Where x has few non-zero blocks, `encode_blocks` and `decode_blocks` do the same for these alone.
"""

from jaxsparse.sketch.codec import (
    decode,
    decode_at,
    decode_blocks,
    encode,
    encode_blocks,
    l2_norm,
    merge,
)
from jaxsparse.sketch.heavy import heavy_hitters
from jaxsparse.sketch.tiles import SketchSpec

__all__ = [
    "SketchSpec",
    "decode",
    "decode_at",
    "decode_blocks",
    "encode",
    "encode_blocks",
    "heavy_hitters",
    "l2_norm",
    "merge",
]
