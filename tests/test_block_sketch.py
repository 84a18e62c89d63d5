"""Block top-k and the sketch of blocks, against plain NumPy and the sketch of dense vectors."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
import reference_sketch as reference
from workers import some

from jaxsparse import sketch
from jaxsparse.arrays import blocks
from jaxsparse.arrays.blocks import BlockStream
from jaxsparse.select.groups import block_top_k
from jaxsparse.sketch import SketchSpec
from jaxsparse.sketch.codec import decode_blocks, encode_blocks


def integers(shape, seed=0):
    """Small integers. Their sums are exact in float32, whatever their order."""
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(np.float32)


# --- block top-k ---


def largest_blocks(x, k, block_size):
    rows = np.pad(x.astype(np.float64), (0, -x.size % block_size)).reshape(-1, block_size)
    return np.argsort(-np.linalg.norm(rows, axis=1), kind="stable")[:k]


@pytest.mark.parametrize(
    ("size", "k", "block_size"), [(103, 9, 4), (103, 1, 200), (96, 12, 8), (50, 50, 1)]
)
def test_block_top_k_is_the_definition_at_all_magnitudes(size, k, block_size):
    for seed, scale in enumerate((1.0, 1e30, 1e-30, 3e38, 1e-35)):
        x = np.random.default_rng(seed).uniform(0.01, 1, size) * scale
        x = (x * np.where(np.arange(size) % 3, 1, -1)).astype(np.float32)
        stream = block_top_k(jnp.asarray(x), k, block_size)
        expected = largest_blocks(x, k, block_size)
        np.testing.assert_array_equal(stream.indices, expected)
        rows = np.pad(x, (0, -size % block_size)).reshape(-1, block_size)
        np.testing.assert_array_equal(stream.values, rows[expected])


def test_block_top_k_compares_magnitudes_that_are_far_apart():
    x = np.zeros(40, np.float32)
    x[[1, 13, 22, 30]] = 1e-25, 3e38, -1e20, 1e-30
    assert block_top_k(jnp.asarray(x), 4, 10).indices.tolist() == [1, 2, 0, 3]


def test_block_top_k_breaks_ties_by_the_lower_block():
    x = jnp.float32([0, 1, 2, 0, 0, -2, 0, 0])
    stream = block_top_k(x, 4, 2)
    assert stream.indices.tolist() == [1, 2, 0, 3]
    assert stream.indices.dtype == jnp.int32


def test_block_top_k_checks_its_arguments():
    with pytest.raises(ValueError, match="block_size=0 must be at least 1"):
        block_top_k(jnp.ones(9), 1, 0)
    with pytest.raises(ValueError, match=r"x has shape \(3, 3\)"):
        block_top_k(jnp.ones((3, 3)), 1, 2)


# --- the sketch ---

# Sizes, and specs whose tiles are the blocks. The last block may be shorter. cols is no multiple of
# the tile, equal to it, or prime. There are blocks of one element, even rows, and a single block.
CASES = [
    (601, SketchSpec(1, 100, tile_size=8)),
    (601, SketchSpec(3, 97, seed=2**32 - 1, tile_size=16)),
    (600, SketchSpec(4, 60, seed=3, tile_size=60)),
    (90, SketchSpec(5, 13, tile_size=1)),
    (5, SketchSpec(2, 9, tile_size=9)),
]
cases = pytest.mark.parametrize("case", some(CASES, CASES[1:2]), ids=str)


def stream_of(size, block_size, seed, values=integers):
    """A stream of a third of the blocks in random order and two empty slots; its dense vector."""
    rng = np.random.default_rng(seed)
    count = blocks.count(size, block_size)
    chosen = rng.permutation(count)[: -(-count // 3)]
    dense = np.where(np.isin(np.arange(size) // block_size, chosen), values(size, seed), 0)
    indices = jnp.asarray([count, *chosen, count], jnp.int32)
    return blocks.from_dense(jnp.float32(dense), indices, block_size), dense


def test_the_tile_can_be_chosen():
    assert SketchSpec(1, 100).tile == 100
    assert SketchSpec(1, 2**14).tile == 2**14
    assert SketchSpec(1, 2**14 + 1).tile == 2**12  # at least four in a row
    assert SketchSpec(1, 2**20).tile == 2**14
    assert SketchSpec(1, 2**20, tile_size=256).tile == 256
    with pytest.raises(ValueError, match=r"tile_size=101 must be in 1 \.\. 100"):
        SketchSpec(1, 100, tile_size=101)
    for wrong in (0, True, 2.0):
        with pytest.raises(ValueError, match=re.escape(f"tile_size={wrong!r} must be")):
            SketchSpec(1, 100, tile_size=wrong)


def places(size, spec):
    index = np.arange(size)
    return reference.buckets_and_signs(spec.rows, spec.cols, spec.seed, index, spec.tile_size)


@cases
def test_tables_and_estimates_are_the_definition(case):
    """Exact on integers, both for blocks and for the dense vector that they stand for."""
    size, spec = case
    for seed in range(3):
        stream, dense = stream_of(size, spec.tile, seed)
        expected = reference.encode(dense, spec.cols, places(size, spec))
        table = encode_blocks(stream, spec)
        np.testing.assert_array_equal(table, expected)
        np.testing.assert_array_equal(sketch.encode(jnp.asarray(dense), spec), expected)
        if seed:
            continue
        decoded = decode_blocks(table, spec, stream.indices, count=stream.indices[0].item())
        all_of_it = np.asarray(sketch.decode(table, spec, size))
        np.testing.assert_array_equal(all_of_it, reference.decode(expected, places(size, spec)))
        index = np.arange(size) // spec.tile
        inside = np.isin(index, stream.indices[1:-1])
        out = np.asarray(blocks.to_dense(decoded, size))
        np.testing.assert_array_equal(out, np.where(inside, all_of_it, 0))
        assert not np.any(decoded.values[0])
        assert not np.any(decoded.values[-1])


def test_a_traced_seed_is_the_static_seed_and_rounding_is_that_of_sums():
    spec, other = SketchSpec(3, 200, seed=7, tile_size=16), SketchSpec(3, 200, tile_size=16)
    stream, _ = stream_of(1600, 16, 0)  # of integers, whose sums are exact in any order
    table = np.asarray(encode_blocks(stream, spec))
    np.testing.assert_array_equal(encode_blocks(stream, other, seed=jnp.uint32(7)), table)
    assert np.any(encode_blocks(stream, other) != table)
    normal = lambda size, seed: np.random.default_rng(seed).normal(size=size)
    stream, dense = stream_of(1600, 16, 0, normal)
    table = np.asarray(encode_blocks(stream, spec))
    np.testing.assert_allclose(table, sketch.encode(jnp.float32(dense), spec), atol=1e-5)


def test_tables_of_different_blocks_add_up():
    spec = SketchSpec(3, 100, tile_size=8)
    streams, dense = zip(*(stream_of(601, 8, seed) for seed in range(4)))
    table = sketch.merge(*(encode_blocks(stream, spec) for stream in streams))
    np.testing.assert_array_equal(table, sketch.encode(jnp.float32(sum(dense)), spec))


@pytest.mark.slow
def test_half_precision_is_accumulated_in_float32():
    spec = SketchSpec(1, 8, tile_size=8)
    stream = BlockStream(
        jnp.arange(600, dtype=jnp.int32), jnp.full((600, 8), 1 + 2**-7, jnp.bfloat16)
    )
    wide = BlockStream(stream.indices, stream.values.astype(jnp.float32))
    np.testing.assert_array_equal(encode_blocks(stream, spec), encode_blocks(wide, spec))


def test_work_is_that_of_the_blocks_alone():
    """No array has the size of the vector, of about 2**31 elements."""
    spec = SketchSpec(3, 64, tile_size=32)
    last = 2**26 - 1
    stream = BlockStream(jnp.int32([last]), jnp.asarray(integers((1, 32))))
    decoded = decode_blocks(encode_blocks(stream, spec), spec, stream.indices)
    np.testing.assert_array_equal(decoded.values, stream.values)
    index = last * 32 + np.arange(32)
    at = sketch.decode_at(encode_blocks(stream, spec), spec, jnp.asarray(index, jnp.int32))
    np.testing.assert_array_equal(at, stream.values[0])


def test_encoding_and_decoding_check_their_arguments():
    spec = SketchSpec(1, 64, tile_size=8)
    stream = BlockStream(jnp.int32([1]), jnp.ones((1, 8)))
    table = encode_blocks(stream, spec)
    wrong = [
        (stream, SketchSpec(1, 64), r"shape \(1, 8\), but a block must be a tile of spec, of 64"),
        (stream._replace(values=jnp.ones(8)), spec, r"stream\.values has shape \(8,\)"),
        (stream._replace(values=jnp.ones((1, 8), jnp.int32)), spec, "dtype int32"),
        (stream._replace(indices=jnp.int32([1, 2])), spec, r"stream\.indices has shape \(2,\)"),
    ]
    for stream, spec_of_it, message in wrong:
        with pytest.raises(ValueError, match=message):
            encode_blocks(stream, spec_of_it)
    with pytest.raises(ValueError, match="indices have shape"):
        decode_blocks(table, spec, jnp.ones(3))
    with pytest.raises(ValueError, match="decode with the spec"):
        decode_blocks(table, SketchSpec(1, 63, tile_size=8), jnp.int32([0]))
