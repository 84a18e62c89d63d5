"""Linear maps between a vector, or its blocks, and its count sketch: encode, merge, decode.

The size of a tile depends on the spec alone, because `decode_at` does not know the vector's size.
Signs are per element, because signs per tile would bias the l2 norm of constant data.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int, Integer, UInt32

from jaxsparse.arrays.blocks import BlockStream
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
    _check_indices(indices)
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


def encode_blocks(
    stream: BlockStream, spec: SketchSpec, *, seed: Seed = None
) -> Float[Array, "rows cols"]:
    """Sketches a block-sparse vector: to rounding, `encode` of the dense vector it stands for.

    A block is a tile of the sketch: spec.tile_size is the stream's block_size. Slots of zeros add
    nothing. S2 Reducer (Ge et al., 2021), Alg. 1, lines 3-7.

    On a GPU sums are taken in any order, by atomic additions: see `encode`. That concerns a
    worker's own sketch alone. Replicas decode one sum of all sketches, and so stay equal.

    >>> stream = BlockStream(jnp.array([7]), jnp.ones((1, 4)))
    >>> encode_blocks(stream, SketchSpec(rows=1, cols=8, tile_size=4)).shape
    (1, 8)
    """
    return _encode_blocks(stream, spec, check_seed(spec.seed if seed is None else seed))


@functools.partial(jax.jit, static_argnames="spec")
def _encode_blocks(
    stream: BlockStream, spec: SketchSpec, seed: UInt32[Array, ""]
) -> Float[Array, "rows cols"]:
    _check_blocks(stream, spec)
    return by_platform(
        stream.values,
        stream.indices,
        seed,
        default=functools.partial(_encode_blocks_in_turn, spec=spec),
        gpu=lambda values, blocks, seed: add_all(values, blocks, spec, seed),
    )


def _encode_blocks_in_turn(
    values: Float[Array, "k block_size"],
    indices: Int[Array, " k"],
    seed: UInt32[Array, ""],
    *,
    spec: SketchSpec,
) -> Float[Array, "rows cols"]:
    def add(slot: Int[Array, ""], table: Array) -> Array:
        block = lax.dynamic_index_in_dim(indices, slot, keepdims=False)
        return add_one(
            table, lax.dynamic_index_in_dim(values, slot, keepdims=False), block, spec, seed
        )

    table = empty(spec, (values, indices, seed))
    return wrapped(lax.fori_loop(jnp.int32(0), jnp.int32(indices.size), add, table), spec)


def decode_blocks(
    table: Float[Array, "rows cols"],
    spec: SketchSpec,
    indices: Int[Array, " n"],
    *,
    count: int | None = None,
    seed: Seed = None,
) -> BlockStream:
    """Estimates some blocks, bitwise as `decode` does. S2 Reducer, Alg. 1, lines 10-15.

    Indices from `count` on, the number of blocks, mark empty slots, which get zeros. With None no
    slots are empty.

    >>> stream = BlockStream(jnp.array([7]), jnp.ones((1, 4)))
    >>> spec = SketchSpec(rows=1, cols=8, tile_size=4)
    >>> decode_blocks(encode_blocks(stream, spec), spec, jnp.array([7])).values.tolist()
    [[1.0, 1.0, 1.0, 1.0]]
    """
    return _decode_blocks(
        table, spec, indices, count, check_seed(spec.seed if seed is None else seed)
    )


@functools.partial(jax.jit, static_argnames=("spec", "count"))
def _decode_blocks(
    table: Float[Array, "rows cols"],
    spec: SketchSpec,
    indices: Int[Array, " n"],
    count: int | None,
    seed: UInt32[Array, ""],
) -> BlockStream:
    table = check_table(table, spec)
    _check_indices(indices)
    values = by_platform(
        table,
        indices,
        seed,
        default=functools.partial(_decode_blocks_in_turn, spec=spec, count=count),
        gpu=functools.partial(_decode_blocks_at_once, spec=spec, count=count),
    )
    return BlockStream(indices, values)


def _decode_blocks_in_turn(
    table: Float[Array, "rows cols"],
    indices: Int[Array, " n"],
    seed: UInt32[Array, ""],
    *,
    spec: SketchSpec,
    count: int | None,
) -> Float[Array, "n block_size"]:
    estimates = tile_estimates(table, spec, seed)

    def put(slot: Int[Array, ""], out: Array) -> Array:
        block = lax.dynamic_index_in_dim(indices, slot, keepdims=False)
        values = estimates(block, spec.tile)
        if count is not None:
            values = jnp.where(block < count, values, 0)
        return lax.dynamic_update_slice(out, values[None], (slot, jnp.int32(0)))

    values = zeros((indices.size, spec.tile), jnp.float32, (table, indices, seed))
    return lax.fori_loop(jnp.int32(0), jnp.int32(indices.size), put, values)


def _decode_blocks_at_once(
    table: Float[Array, "rows cols"],
    indices: Int[Array, " n"],
    seed: UInt32[Array, ""],
    *,
    spec: SketchSpec,
    count: int | None,
) -> Float[Array, "n block_size"]:
    blocks = indices[:, None]
    values = estimates_at(table, spec, seed, blocks, lax.iota(jnp.int32, spec.tile)[None])
    return values if count is None else jnp.where(blocks < count, values, 0)


def _check_blocks(stream: BlockStream, spec: SketchSpec) -> None:
    shape, dtype = stream.values.shape, stream.values.dtype
    if len(shape) != 2 or shape[1] != spec.tile:
        raise ValueError(
            f"stream.values has shape {shape}, but a block must be a tile of spec, of {spec.tile} "
            "elements: give SketchSpec tile_size=block_size"
        )
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize > 4:
        raise ValueError(f"stream.values has dtype {dtype}: pass .astype(jnp.float32)")
    indices = stream.indices
    if indices.shape != shape[:1] or not jnp.issubdtype(indices.dtype, jnp.integer):
        raise ValueError(
            f"stream.indices has shape {indices.shape} and dtype {indices.dtype}: pass "
            f"int32[{shape[0]}], one for each block"
        )


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


def _check_indices(indices: Array) -> None:
    if indices.ndim != 1 or not jnp.issubdtype(indices.dtype, jnp.integer):
        raise ValueError(
            f"indices have shape {indices.shape} and dtype {indices.dtype}: pass int32[n]"
        )
