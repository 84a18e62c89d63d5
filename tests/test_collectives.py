"""Every sparse all-reduce against NumPy, for any number of workers, supports and operations."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from workers import on_workers, rows, some

from jaxsparse import codecs, quantize
from jaxsparse.arrays.stream import Combination, SparseStream, from_dense
from jaxsparse.collectives import (
    all_gather_sum,
    dsar_split_allgather,
    recursive_double,
    sparse_ring,
    split_allgather,
)
from jaxsparse.collectives.messages import MOST_STAGES, MessageFormat

SIZE, K = 307, 12  # prime: no number of workers divides it
LOSSLESS = {
    "recursive_double": recursive_double,
    "split_allgather": split_allgather,
    "dsar_split_allgather": dsar_split_allgather,
    "all_gather_sum": all_gather_sum,
    "sparse_ring": sparse_ring,
}
NUMPY = {"sum": np.add, "max": np.maximum, "min": np.minimum, "or": np.bitwise_or}
SUPPORTS = ("random", "disjoint", "identical", "empty", "clustered", "duplicates")


class Streams(NamedTuple):
    indices: np.ndarray  # (W, K)
    values: np.ndarray

    def dense(self, op="sum"):
        """Each worker's stream as a dense vector, float64 or of the integers' dtype."""
        integer = np.issubdtype(self.values.dtype, np.integer)
        dtype = self.values.dtype if integer else np.float64
        limits = np.iinfo(dtype) if integer else None
        low, high = (limits.min, limits.max) if integer else (-np.inf, np.inf)
        empty = {"sum": 0, "or": 0, "max": low, "min": high}[op]
        rows = np.full((len(self.indices), SIZE), empty, dtype)
        for row, indices, values in zip(rows, self.indices, self.values):
            present = indices < SIZE
            NUMPY[op].at(row, indices[present], values[present].astype(dtype))
        return rows


def streams(supports, workers, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    choose = lambda n: rng.choice(n, K, replace=False)
    same = choose(SIZE)
    indices = {
        "random": lambda w: choose(SIZE),
        "disjoint": lambda w: w * K % SIZE + np.arange(K),
        "identical": lambda w: same,
        "empty": lambda w: np.full(K, SIZE),
        "clustered": lambda w: np.append(choose(2 * K)[: K - 2], [SIZE, SIZE]),
        "duplicates": lambda w: np.append(choose(K)[: K // 2], [3] * (K - K // 2)),
    }[supports]
    indices = np.stack([indices(w) for w in range(workers)]).astype(np.int32)
    signs = 1 if dtype == np.uint32 else rng.choice([-1, 1], indices.shape)
    values = rng.integers(1, 50, indices.shape) * signs
    return Streams(indices, np.where(indices < SIZE, values, 0).astype(dtype))


@functools.cache
def collective(name, workers, way, **settings):
    function = LOSSLESS[name]

    def f(indices, values):
        given = {**settings, "needs": after(settings["needs"])} if "needs" in settings else settings
        result = function(SparseStream(indices, values), SIZE, axis_name="data", **given)
        return result.whole()

    return on_workers(f, workers, way)


def run(name, data, way="vmap", **settings):
    out = collective(name, len(data.indices), way, **settings)(*data)
    out = jax.tree.map(np.asarray, out)
    for replicated in (out.total, out.overflow):
        np.testing.assert_array_equal(replicated, np.broadcast_to(replicated[:1], replicated.shape))
    return out.total[0], out.residual, out.overflow[0]


def check_exact(name, workers, way, op="sum", dtype=np.float32, supports=SUPPORTS):
    for seed, kind in enumerate(supports):
        data = streams(kind, workers, seed, dtype)
        total, residual, overflow = run(name, data, way, op=op)
        np.testing.assert_array_equal(total, NUMPY[op].reduce(data.dense(op), axis=0))
        assert total.dtype == dtype
        assert not residual.any()
        assert overflow == 0


@pytest.mark.parametrize("workers", some((1, 6, 8, 14), (6,)))
@pytest.mark.parametrize("name", some(LOSSLESS, set(LOSSLESS) - {"recursive_double"}))
def test_sums(name, workers):
    check_exact(name, workers, "vmap")


@pytest.mark.parametrize("workers", some((5, 8), (5,)))
@pytest.mark.parametrize("name", some(LOSSLESS, ("recursive_double",)))
def test_sums_on_devices(name, workers):
    check_exact(name, workers, "shard_map")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["split_allgather", "all_gather_sum"])
@pytest.mark.parametrize(
    ("op", "dtype"), rows([("or", "uint32")], [("max", "float32"), ("min", "int32")])
)
def test_other_operations(name, op, dtype):
    check_exact(name, 3, "vmap", op, np.dtype(dtype))


PRODUCT = Combination(jnp.multiply, 1)
MODULAR = Combination(lambda a, b: (a + b) % jnp.uint32(97), 0)
BIT_AND = Combination(jnp.bitwise_and, -1)
OWN = {
    "product": (PRODUCT, np.multiply, np.float32, lambda x: np.sign(x) * 2.0 ** (np.abs(x) % 4)),
    "sum modulo 97": (MODULAR, lambda a, b: (a + b) % 97, np.uint32, lambda x: x),
    "bitwise and": (BIT_AND, np.bitwise_and, np.int32, lambda x: x),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "own"),
    rows(
        [("recursive_double", "product")],
        [
            *((name, "product") for name in LOSSLESS if name != "recursive_double"),
            ("split_allgather", "sum modulo 97"),
            ("recursive_double", "bitwise and"),
        ],
    ),
)
def test_operations_of_one_s_own(name, own):
    op, function, dtype, values_of = OWN[own]
    for seed, kind in enumerate(SUPPORTS):
        data = streams(kind, 3, seed, dtype)
        data = data._replace(values=values_of(data.values).astype(dtype))
        expected = np.full(SIZE, op.neutral, dtype)
        for indices, values in zip(*data):
            for index, value in zip(indices, values):
                if index < SIZE:
                    expected[index] = function(expected[index], value)
        total, residual, overflow = run(name, data, op=op)
        np.testing.assert_array_equal(total, expected)
        assert not residual.any()
        assert overflow == 0


def test_an_operation_of_one_s_own_is_checked():
    entries = SparseStream(jnp.array([1, 2], jnp.int32), jnp.ones(2))
    for op, message in (
        (Combination(jnp.multiply, 0), r"neutral=0 is not neutral: function\(0, x\) for x = "),
        (Combination(jnp.multiply, 1e300), r"neutral=1e\+300 is no number that float32 can hold"),
        (Combination(jnp.multiply, (1, 1)), r"neutral=\(1, 1\) is no number that float32"),
        (Combination(lambda a, b: a + b + a * b * (a - b), 0), "is not commutative: for x = "),
        (Combination(jnp.equal, 0), "returns bool and shape"),
    ):
        call = lambda op=op: all_gather_sum(entries, 5, axis_name=None, op=op)
        with pytest.raises(ValueError, match=message):
            jax.jit(call)()
    with pytest.raises(ValueError, match="neutral=-1 is no number that uint32 can hold"):
        all_gather_sum(
            entries._replace(values=jnp.ones(2, jnp.uint32)), 5, axis_name=None, op=BIT_AND
        )
    with pytest.raises(ValueError, match="has no residual for entries that find no room"):
        split_allgather(entries, 50, axis_name=None, op=PRODUCT, capacity=1)


@pytest.mark.parametrize("name", some(LOSSLESS, ("split_allgather", "all_gather_sum")))
def test_an_absent_entry_is_neutral(name):
    data = streams("empty", 3)
    data.indices[0, 0], data.values[0, 0] = 4, -2
    total, _, _ = run(name, data, op="max")
    assert total[4] == -2
    assert np.all(np.delete(total, 4) == -np.inf)


@pytest.mark.parametrize("name", some(LOSSLESS, ("all_gather_sum",)))
def test_messages_are_dense_if_streams_are_no_shorter(name):
    """COO takes two words an entry, so that K entries are as long as 2 K elements."""
    for size, is_dense in ((2 * K, True), (2 * K + 1, False)):
        assert MessageFormat(size, K, "sum", jnp.float32, codecs.COO).is_array == is_dense
        entries = SparseStream(jnp.arange(K, dtype=jnp.int32), jnp.ones(K))
        alone = jax.jit(lambda x, size=size: LOSSLESS[name](x, size, axis_name=None).whole())
        reduced = alone(entries)
        np.testing.assert_array_equal(reduced.total, [1] * K + [0] * (size - K))
        assert not reduced.residual.any()


@pytest.mark.parametrize(
    "codec", [codecs.Packed(jnp.float16), codecs.Packed(), codecs.EliasFano(value_bits=16)], ids=str
)
def test_a_sender_has_what_arrives_to_the_bit(codec):
    """Also where a value rounds to -0: else workers that swap sums would differ in the sign."""
    x = np.outer([1, -1], [3e-5, 1e-30, 1e-40, 0, 0.1]).ravel().astype(np.float32)
    message_format = MessageFormat(5 * x.size, x.size, "sum", jnp.float32, codec)

    @jax.jit
    def both(x):
        sent = message_format.rounded(jnp.pad(x, (0, 4 * x.size)))
        return sent, message_format.vector(message_format.pack(sent))

    sent, arrived = map(np.asarray, both(x))
    assert not message_format.is_array
    np.testing.assert_array_equal(sent.view(np.uint32), arrived.view(np.uint32))


def after(entries):
    """Needs of all stages, as if the last exchange had had so many entries in each."""
    return jnp.full(MOST_STAGES, entries, jnp.int32)


BOUNDED = {
    "split_allgather": {"capacity": 1.0, "union_capacity": 1.0},  # in multiples of K / W
    "split_allgather, union": {"union_capacity": 0.5},
    "dsar_split_allgather": {"capacity": 1.0},
    "split_allgather, needs": {"needs": 1.0},
    "recursive_double": {"needs": 1.0},
    "sparse_ring": {"capacity": 0.5},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "codec"), rows([(3, codecs.Packed())], [(14, codecs.COO)]), ids=str
)
@pytest.mark.parametrize("name", some(BOUNDED, ("split_allgather", "recursive_double")))
def test_what_finds_no_room_stays_and_is_counted(name, workers, codec):
    overflowed = 0
    for kind in SUPPORTS:
        data = streams(kind, workers)
        room = {field: math.ceil(share * K / workers) for field, share in BOUNDED[name].items()}
        if name == "recursive_double":
            room["needs"] = K // 2
        way = "shard_map" if workers == 3 else "vmap"
        total, residual, overflow = run(name.split(",")[0], data, way, codec=codec, **room)
        np.testing.assert_allclose(total + residual.sum(0), data.dense().sum(0), rtol=1e-6)
        if overflow == 0 and codec.is_exact:
            assert not residual.any()
        overflowed += overflow
    assert overflowed > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "room", "too_many"),
    rows(
        [
            ("split_allgather", {"union_capacity": 3}, K - 3),
            ("sparse_ring", {"capacity": 3}, 2 * (K - 3)),  # worker 0's entries, then sums
            ("dsar_split_allgather", {"capacity": 3}, 2 * (K - 3)),
        ],
        [("split_allgather", {"capacity": 3}, 2 * (K - 3))],
    ),
)
def test_zeros_take_no_room_and_nan_is_delivered_or_kept(name, room, too_many):
    """All entries are in the first range, which has room for 3."""
    data = Streams(np.tile(np.arange(K, dtype=np.int32), (2, 1)), np.zeros((2, K), np.float32))
    total, residual, overflow = run(name, data, **room)
    assert not total.any()
    assert overflow == 0
    data.values[:, K - 3 :] = 5, -7, 2  # behind zeros that would fill the room
    total, residual, overflow = run(name, data, **room)
    np.testing.assert_array_equal(total, data.dense().sum(0))
    assert not residual.any()
    assert overflow == 0
    data.values[1, K - 1] = np.nan
    total, residual, overflow = run(name, data, **room)
    np.testing.assert_array_equal(total, data.dense().sum(0))
    assert not residual.any()
    assert overflow == 0
    data.values[:] = np.where(np.isnan(data.values), np.nan, 1)
    total, residual, overflow = run(name, data, **room)
    in_total, in_residual = np.isnan(total), np.isnan(residual).any(0)
    assert np.sum(in_total | in_residual) == 1
    assert not np.any(in_total & in_residual)
    assert overflow == too_many


@pytest.mark.slow
def test_sums_without_room_stay_with_all_who_hold_them():
    """Worker i has entries 10 i to 10 i + 9, and the last exchange had as many as one worker has.

    So two workers that hold the same 20 sums send the 10 largest, and each keeps a half of the
    others. The next exchange has room for all.
    """
    x = np.zeros((4, 400), np.float32)
    for worker in range(4):
        x[worker, 10 * worker : 10 * worker + 10] = np.arange(1, 11) * (-1) ** worker

    def f(row, needs):
        entries = from_dense(row, jnp.argsort(-jnp.abs(row))[:10])
        result = recursive_double(entries, 400, axis_name="data", needs=needs)
        return result.whole()

    run = on_workers(f, 4, "vmap")
    first = np.tile(np.full(MOST_STAGES, 10, np.int32), (4, 1))
    total, residual, overflow, _, needs = map(np.asarray, run(x, first))
    expected, kept = x.sum(0), np.zeros_like(x)
    for pair in (0, 2):
        for place in range(10 * pair, 10 * pair + 20):
            if place % 10 < 5:  # values 1 to 5 of both
                kept[pair : pair + 2, place] = expected[place] / 2
                expected[place] = 0
    np.testing.assert_array_equal(total, np.tile(expected, (4, 1)))
    np.testing.assert_array_equal(residual, kept)
    np.testing.assert_array_equal(overflow, 20)
    np.testing.assert_array_equal(needs[:, :3], [[10, 20, 10]] * 4)
    total, residual, overflow, *_ = run(x, needs)
    np.testing.assert_array_equal(total, np.tile(x.sum(0), (4, 1)))
    assert not np.any(residual)
    assert not np.any(overflow)


def test_overflow_of_the_ring_counts_what_is_cut_on_the_way_and_at_the_end():
    """Worker 0 sends three of its entries to worker 1, which delivers three of the sums."""
    indices = np.stack([np.arange(K), np.arange(K)]).astype(np.int32)  # all of the first range
    data = Streams(indices, np.stack([np.arange(1, K + 1), np.ones(K)]).astype(np.float32))
    total, residual, overflow = run("sparse_ring", data, capacity=3)
    small, large = slice(K - 3), slice(K - 3, K)
    assert overflow == 2 * (K - 3)
    np.testing.assert_array_equal(total[small], 0)
    np.testing.assert_array_equal(total[large], np.arange(K - 3, K) + 2)
    np.testing.assert_array_equal(residual[:, small], data.values[:, small])
    assert not residual[:, K - 3 :].any()


def test_dense_messages_of_a_bounded_ring_have_room_for_all():
    """Room for 6 entries takes 12 words, but a range has only 10 elements and is sent dense."""
    indices = jnp.tile(jnp.arange(K, dtype=jnp.int32), (2, 1))  # the first range, and 2 others
    ring = lambda indices: sparse_ring(
        SparseStream(indices, jnp.ones(K)), 20, axis_name="data", capacity=K // 2
    )
    reduced = on_workers(ring, 2, "vmap")(indices)
    np.testing.assert_array_equal(reduced.total[0], [2] * K + [0] * (20 - K))
    assert not reduced.residual.any()
    assert not reduced.overflow.any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "dtype"), rows([(6, jnp.bfloat16)], [(8, jnp.float16)]), ids=str
)
@pytest.mark.parametrize("name", some(LOSSLESS, ("recursive_double",)))
def test_rounding_stays_in_the_residual(name, workers, dtype):
    rng = np.random.default_rng(1)
    for kind in SUPPORTS:
        data = streams(kind, workers)
        values = data.values * (1 + rng.integers(0, 2**10, data.values.shape) * 2.0**-12)
        data = data._replace(values=values.astype(np.float32))
        total, residual, _ = run(name, data, codec=codecs.Packed(dtype))
        expected = data.dense().sum(0)
        np.testing.assert_allclose(total + residual.sum(0, dtype=np.float64), expected, atol=2e-4)
        if kind == "random":
            assert residual.any(), "the values don't fit 16 bits"
        assert np.abs(residual).max() <= 600 * float(jnp.finfo(dtype).eps)


@pytest.mark.parametrize("bits", some([2, 8], [2]))
def test_quantised_gather(bits):
    data = streams("random", 3)
    exact = data.dense().sum(0)
    spec = quantize.QSGD(bits, group_size=32)
    total, residual, _ = run("dsar_split_allgather", data, quantizer=spec)
    np.testing.assert_allclose(total + residual.sum(0), exact, atol=1e-4)

    @jax.jit
    @jax.vmap
    def stochastic(key):
        body = lambda indices, values: dsar_split_allgather(
            SparseStream(indices, values), SIZE, axis_name="data", quantizer=spec, key=key
        )
        return jax.vmap(body, axis_name="data")(*map(jnp.asarray, data))

    out = stochastic(jax.random.split(jax.random.key(0), 400))
    assert not np.asarray(out.residual).any()
    totals = np.asarray(out.total)[:, 0]
    error = totals.std(0) / np.sqrt(400)
    assert np.all(np.abs(totals.mean(0) - exact) <= 5 * error + 1e-4)


def test_errors_name_what_is_wrong():
    data = streams("random", 2)
    with pytest.raises(ValueError, match="op='mean' is unknown"):
        run("recursive_double", data, op="mean")
    with pytest.raises(ValueError, match="op='or' combines the bits of integers"):
        run("recursive_double", data, op="or")
    with pytest.raises(ValueError, match="rounds, and op='max' has no residual"):
        run("split_allgather", data, op="max", codec=codecs.Packed())
    with pytest.raises(ValueError, match=r"capacity=2, but op='max'"):
        run("split_allgather", data, op="max", capacity=2)
    with pytest.raises(ValueError, match="op='max' has no residual"):
        run("recursive_double", data, op="max", needs=3)
    with pytest.raises(ValueError, match="op='max' has no residual"):
        run("split_allgather", data, op="max", needs=3)
    with pytest.raises(ValueError, match="union_capacity=0 must be at least 1"):
        run("split_allgather", data, union_capacity=0)
    with pytest.raises(ValueError, match=r"capacity=1.5 must be an int"):
        run("sparse_ring", data, capacity=1.5)
    with pytest.raises(ValueError, match="only sums can be quantised"):
        run("dsar_split_allgather", data, op="min", quantizer=quantize.QSGD())


def test_dtypes_that_messages_cannot_hold_are_refused():
    indices = jnp.array([1, 2], jnp.int32)
    for dtype, codec, message in (
        (jnp.int32, codecs.Packed(), "int32: Packed rounds float32"),
        (jnp.bfloat16, codecs.COO, "bfloat16: Coo sends dtypes of 4 bytes"),
        (jnp.int8, codecs.COO, "int8: Coo sends dtypes of 4 bytes"),
        (jnp.float64, codecs.COO, "float64: Coo sends dtypes of 4 bytes"),
    ):
        with jax.enable_x64(dtype == jnp.float64):
            entries = SparseStream(indices, jnp.ones(2, dtype))
        for function in LOSSLESS.values():
            for size in (4, 100):
                with pytest.raises(ValueError, match=message):
                    function(entries, size, axis_name=None, codec=codec)


def test_a_quantizer_whose_error_would_grow_is_refused():
    entries = SparseStream(jnp.array([1, 2], jnp.int32), jnp.ones(2))
    spec = quantize.QSGD(4, scale="l2")
    with pytest.raises(ValueError, match=r"fed back it grows from step to step\. Use scale='max'"):
        dsar_split_allgather(entries, 10, axis_name=None, quantizer=spec)
    unbiased = jax.jit(
        lambda x: dsar_split_allgather(x, 10, axis_name=None, quantizer=spec, key=jax.random.key(0))
    )(entries)
    assert not unbiased.residual.any()
