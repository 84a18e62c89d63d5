"""Linear maps between a vector and its count sketch: encode, merge, decode, l2 norm.

The size of a tile depends on the spec alone, because `decode_at` does not know the vector's size.
Signs are per element, because signs per tile would bias the l2 norm of constant data.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Integer, UInt32

from jaxsparse.arrays.magnitude import scaled
from jaxsparse.arrays.platforms import by_platform, over_tiles, zeros
from jaxsparse.arrays.settings import check_seed, check_size
from jaxsparse.sketch.tiles import (
    Seed,
    SketchSpec,
    add_all,
    add_one,
    empty,
    estimates_at,
    gathered,
    median,
    tile_estimates,
    wrapped,
)


def encode(
    x: Float[Array, " d"], spec: SketchSpec, *, seed: Seed = None
) -> Float[Array, "rows cols"]:
    """Sketches a vector, linearly: sketches of x and y sum to the sketch of x + y, to rounding.

    x has 1 <= d < 2**31 elements of float32, bfloat16 or float16. Sums are float32. The seed is
    traced, so that fresh hashes each step need no new trace. Sketched-SGD (Ivkin et al., 2019),
    section 3 and appendix C.

    On a GPU each column is a sum in one order, without atomic additions. With a `tile_size` of
    one's own sums are taken in any order, so the last bits may differ from run to run (unless
    `XLA_FLAGS=--xla_gpu_deterministic_ops=true`, which takes longer).

    >>> encode(jnp.ones(100), SketchSpec(rows=5, cols=20)).shape
    (5, 20)
    """
    check_size("x.size", x.size)
    return _encode(x, spec, check_seed(spec.seed if seed is None else seed))


@functools.partial(jax.jit, static_argnames="spec")
def _encode(
    x: Float[Array, " d"], spec: SketchSpec, seed: UInt32[Array, ""]
) -> Float[Array, "rows cols"]:
    if x.ndim != 1:
        raise ValueError(f"x has shape {x.shape}, but a vector is sketched: pass x.ravel()")
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize > 4:
        raise ValueError(f"x has dtype {x.dtype}: pass x.astype(jnp.float32)")
    return by_platform(
        x,
        seed,
        default=functools.partial(_encode_in_turn, spec=spec),
        gpu=functools.partial(gathered if spec.tile_size is None else _encode_at_once, spec=spec),
    )


def _encode_in_turn(
    x: Float[Array, " d"], seed: UInt32[Array, ""], *, spec: SketchSpec
) -> Float[Array, "rows cols"]:
    def add(tile: Array, table: Array, length: int) -> Array:
        values = lax.dynamic_slice(x, (tile * spec.tile,), (length,))
        return add_one(table, values, tile, spec, seed)

    return wrapped(over_tiles(x.size, spec.tile, add, empty(spec, (x, seed))), spec)


def _encode_at_once(
    x: Float[Array, " d"], seed: UInt32[Array, ""], *, spec: SketchSpec
) -> Float[Array, "rows cols"]:
    values = jnp.pad(x, (0, -x.size % spec.tile)).reshape(-1, spec.tile)
    return add_all(values, lax.iota(jnp.int32, len(values)), spec, seed)


@jax.jit
def merge(*tables: Float[Array, "rows cols"]) -> Float[Array, "rows cols"]:
    """The sketch of a sum of vectors, from their sketches with one spec and seed.

    >>> spec = SketchSpec(rows=3, cols=8)
    >>> merge(encode(jnp.ones(5), spec), encode(-jnp.ones(5), spec)).sum().item()
    0.0
    """
    if not tables:
        raise ValueError("tables is empty: pass one or more sketches")
    shapes = {table.shape for table in tables}
    if len(shapes) > 1:
        raise ValueError(f"tables have shapes {sorted(shapes)}: merge sketches of one SketchSpec")
    return functools.reduce(jnp.add, tables)


def decode(
    table: Float[Array, "rows cols"], spec: SketchSpec, size: int, *, seed: Seed = None
) -> Float[Array, " size"]:
    """Estimates all coordinates of a vector of `size` elements: the median over rows.

    With an even number of rows it is the average of the two middle ones. Sketched-SGD, appendix C.

    >>> spec = SketchSpec(rows=3, cols=8)
    >>> decode(encode(jnp.array([0.0, 7.0]), spec), spec, 2)[1].item()
    7.0
    """
    return _decode(table, spec, size, check_seed(spec.seed if seed is None else seed))


@functools.partial(jax.jit, static_argnames=("spec", "size"))
def _decode(
    table: Float[Array, "rows cols"], spec: SketchSpec, size: int, seed: UInt32[Array, ""]
) -> Float[Array, " size"]:
    table = check_table(table, spec)
    check_size("size", size)
    return by_platform(
        table,
        seed,
        default=functools.partial(_decode_in_turn, spec=spec, size=size),
        gpu=functools.partial(_decode_at_once, spec=spec, size=size),
    )


def _decode_in_turn(
    table: Float[Array, "rows cols"], seed: UInt32[Array, ""], *, spec: SketchSpec, size: int
) -> Float[Array, " size"]:
    estimates = tile_estimates(table, spec, seed)

    def put(tile: Array, out: Array, length: int) -> Array:
        return lax.dynamic_update_slice(out, estimates(tile, length), (tile * spec.tile,))

    return over_tiles(size, spec.tile, put, zeros((size,), jnp.float32, (table, seed)))


def _decode_at_once(
    table: Float[Array, "rows cols"], seed: UInt32[Array, ""], *, spec: SketchSpec, size: int
) -> Float[Array, " size"]:
    tile = lax.iota(jnp.int32, -(-size // spec.tile))[:, None]
    within = lax.iota(jnp.int32, spec.tile)[None]
    return estimates_at(table, spec, seed, tile, within).ravel()[:size]


def decode_at(
    table: Float[Array, "rows cols"],
    spec: SketchSpec,
    indices: Integer[Array, " n"],
    *,
    seed: Seed = None,
) -> Float[Array, " n"]:
    """Estimates some coordinates, bitwise as `decode(...)[indices]` does.

    The vector counts as followed by zeros, so an index past its end gives an unbiased estimate of
    0. A negative one is taken modulo 2**32.

    >>> spec = SketchSpec(rows=3, cols=8)
    >>> decode_at(encode(jnp.array([0.0, 7.0]), spec), spec, jnp.array([1])).tolist()
    [7.0]
    """
    return _decode_at(table, spec, indices, check_seed(spec.seed if seed is None else seed))


@functools.partial(jax.jit, static_argnames="spec")
def _decode_at(
    table: Float[Array, "rows cols"],
    spec: SketchSpec,
    indices: Integer[Array, " n"],
    seed: UInt32[Array, ""],
) -> Float[Array, " n"]:
    table = check_table(table, spec)
    if indices.ndim != 1 or not jnp.issubdtype(indices.dtype, jnp.integer):
        raise ValueError(
            f"indices have shape {indices.shape} and dtype {indices.dtype}: pass int32[n]"
        )
    index = indices.astype(jnp.uint32)
    tile, within = index // jnp.uint32(spec.tile), index % jnp.uint32(spec.tile)
    return estimates_at(table, spec, seed, tile, within)


@jax.jit
def l2_norm(table: Float[Array, "rows cols"]) -> Float[Array, ""]:
    """Estimates the l2 norm of the vector: the median of the norms of the rows.

    The relative error is O(1 / sqrt(cols)). HEAVYMIX, line 1 (Sketched-SGD, Alg. 1).

    >>> l2_norm(encode(jnp.array([0.0, -7.0]), SketchSpec(rows=3, cols=8))).item()
    7.0
    """
    if table.ndim != 2:
        raise ValueError(f"table has shape {table.shape}: pass the [rows, cols] of encode")
    shares, scale = scaled(table, axis=None)
    return scale * median(list(jnp.sqrt(jnp.sum(jnp.square(shares), axis=1))))


def check_table(table: Array, spec: SketchSpec) -> Float[Array, "rows cols"]:
    """The table. Raises ValueError unless it is a float32 sketch of `spec`."""
    if table.shape != (spec.rows, spec.cols):
        raise ValueError(
            f"table has shape {table.shape}, but spec is {spec}: decode with the spec that it was "
            "encoded with"
        )
    if table.dtype != jnp.float32:
        raise ValueError(f"table has dtype {table.dtype}: pass table.astype(jnp.float32)")
    return table
