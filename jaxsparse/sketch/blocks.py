"""The count sketch of a block-sparse vector, at the cost of its blocks alone."""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int, UInt32

from jaxsparse.arrays.blocks import BlockStream
from jaxsparse.arrays.platforms import by_platform, zeros
from jaxsparse.arrays.settings import check_seed
from jaxsparse.sketch.codec import check_table
from jaxsparse.sketch.tiles import (
    Seed,
    SketchSpec,
    add_all,
    add_one,
    empty,
    estimates_at,
    tile_estimates,
    wrapped,
)

__all__ = ["decode_blocks", "encode_blocks"]


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
        default=functools.partial(_encode_in_turn, spec=spec),
        gpu=lambda values, blocks, seed: add_all(values, blocks, spec, seed),
    )


def _encode_in_turn(
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
    if indices.ndim != 1 or not jnp.issubdtype(indices.dtype, jnp.integer):
        raise ValueError(
            f"indices have shape {indices.shape} and dtype {indices.dtype}: pass int32[n]"
        )
    values = by_platform(
        table,
        indices,
        seed,
        default=functools.partial(_decode_in_turn, spec=spec, count=count),
        gpu=functools.partial(_decode_at_once, spec=spec, count=count),
    )
    return BlockStream(indices, values)


def _decode_in_turn(
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


def _decode_at_once(
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
