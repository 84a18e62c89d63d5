"""Bytes that an exchange will move, read from the traced program, against the compiled one."""

import math
from collections import Counter

import jax
import jax.numpy as jnp
import optax
import pytest
from at_density import NAMES, reducer_at
from contract import each
from jax import lax
from jax.sharding import PartitionSpec
from published_traffic import (
    dsar_split_allgather_traffic,
    recursive_double_traffic,
    sparse_ring_traffic,
    split_allgather_traffic,
)
from workers import mesh, some

import jaxsparse
from jaxsparse import shard, specs
from jaxsparse.arrays.stream import SparseStream
from jaxsparse.collectives import (
    all_gather_sum,
    dsar_split_allgather,
    recursive_double,
    sparse_ring,
    split_allgather,
)
from jaxsparse.comm import wire
from jaxsparse.comm.links import Link, rounds
from jaxsparse.contrib import GTopK
from jaxsparse.outer.parallel import run_on_workers
from jaxsparse.planner.planning import Moved
from jaxsparse.reducers import SparDL, TopK
from jaxsparse.reducers.base import Reducer
from jaxsparse.traffic import traced_bytes, wire_bytes

SIZE = 3001
PARAMS = {
    "kernel": jax.ShapeDtypeStruct((300, 201), jnp.float32),
    "bias": jax.ShapeDtypeStruct((201,), jnp.float32),
}


def compiled(exchange, init, shapes, workers):
    """The bytes that the compiled `exchange(x, init(x))` moves."""
    state = jax.eval_shape(lambda x: shard(init(x), workers), shapes)

    def body(x, state):
        outputs = exchange(jax.tree.map(lambda leaf: leaf[0], x), state)
        return [wire.varying(leaf, "data")[None] for leaf in jax.tree.leaves(outputs)]

    spec = PartitionSpec("data")
    f = jax.jit(
        jax.shard_map(body, mesh=mesh(workers), in_specs=(spec, specs(state)), out_specs=spec)
    )
    x = jax.tree.map(lambda s: jax.ShapeDtypeStruct((workers, *s.shape), s.dtype), shapes)
    return wire_bytes(f.lower(x, state).compile())


def summary(moved):
    """Payload, received bytes, and rounds by opcode, for all branches."""
    executed = Counter()
    for one in moved.collectives:
        if one.group_size > 1:
            executed[one.op, one.group_size] += one.count
    branches = [
        (one.count, sorted(map(str, map(summary, one.branches)))) for one in moved.conditionals
    ]
    return moved.payload, round(moved.received, 3), executed, branches


USUAL = {"gtopk", "omni_reduce"}


@pytest.mark.parametrize("name", each(NAMES, USUAL))
def test_equals_what_is_compiled(name):
    reducer, workers = reducer_at(name, 0.02, SIZE, block_size=16), 3
    run, init = lambda x, state: reducer.pmean(x, state, "data"), lambda x: reducer.init(SIZE)
    shape = jax.ShapeDtypeStruct((SIZE,), jnp.float32)
    moved = compiled(run, init, shape, workers)
    assert summary(traced_bytes(reducer, SIZE, workers)) == summary(moved)


TRANSFORMATIONS = {
    "dense": lambda: jaxsparse.dense(momentum=0.9),
    "sketched_sgd": lambda: jaxsparse.sketched_sgd(k=50, cols=211, momentum=0.9),
    "spardl, buckets": lambda: jaxsparse.spardl(0.01, bucket_size=30_000),
    "partition": lambda: jaxsparse.partition({"kernel": TopK(0.01)}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", some(TRANSFORMATIONS, ["partition"]))
def test_an_update_equals_what_is_compiled(name):
    tx = TRANSFORMATIONS[name]()
    moved = compiled(lambda x, state: tx.update(x, state, x), tx.init, PARAMS, 3)
    assert summary(traced_bytes(tx, PARAMS, 3)) == summary(moved)


def test_it_can_be_asked_within_an_exchange():
    """It can be asked by code that shard_map or vmap traces, and under a mesh."""
    found = []

    def ask(x):
        found.append(traced_bytes(TopK(0.01), 1000, 16))
        return x

    run_on_workers(lambda x: wire.psum(ask(x), "data"), mesh(3), batch_argnums=0).lower(
        jnp.ones((3, 4))
    )
    jax.jit(jax.vmap(ask, axis_name="data")).lower(jnp.ones((3, 4)))
    with jax.set_mesh(mesh(2)):
        ask(None)
    assert len(found) >= 3  # a step may be traced more than once
    assert all(one == traced_bytes(TopK(0.01), 1000, 16) for one in found)
    assert found[0].payload == 80


def test_dense_leaves_and_the_flag_are_counted():
    tx = optax.chain(jaxsparse.top_k(0.01), optax.sgd(0.1))
    moved = traced_bytes(tx, PARAMS, 4)
    assert moved.payload == 4 * (201 + 1 + 2 * 603)
    assert moved.rounds == 2
    assert {each.op_name.rpartition("/")[2] for each in moved.collectives} == {
        "psum_invariant",
        "all_gather",
    }
    assert moved.collectives[-1].shapes == ("f32[202]",)  # the flag is known last


K, LENGTH = 840, 84_000  # K is a multiple of all numbers of workers: nothing is rounded up


@pytest.mark.slow
@pytest.mark.parametrize("workers", some((4, 6, 8, 14), (6,)))
def test_words_are_those_that_are_published(workers):
    """Where static shapes pay for more, they are those of this library's formulas."""
    others, room = workers - 1, K // workers
    log, is_power = others.bit_length(), workers & others == 0

    def of(exchange, **settings):
        if isinstance(exchange, Reducer):
            return traced_bytes(exchange, LENGTH, workers).received / 4
        run = lambda given: exchange(SparseStream(*given), LENGTH, axis_name="data", **settings)
        given = tuple(jax.ShapeDtypeStruct((K,), dtype) for dtype in (jnp.int32, jnp.float32))
        return traced_bytes(run, given, workers).received / 4

    near = lambda words: pytest.approx(words)
    assert of(SparDL(0.01)) == near(4 * K * others / workers)
    assert of(TopK(0.01)) == of(all_gather_sum, distinct=True) == near(2 * K * others)
    for teams in (n for n in range(2, workers + 1) if workers % n == 0):
        members = workers // teams
        if teams & (teams - 1) == 0:
            gathered = teams / workers * math.log2(teams)
            words = 2 * K * (2 * (workers - teams) / workers + gathered)
            assert of(SparDL(0.01, teams=teams)) == near(words)
        words = 2 * K * (teams**2 + 2 * workers - 3 * teams) / workers + members - 1
        assert of(SparDL(0.01, teams=teams, gather="bruck")) == near(words)
    if is_power:
        assert of(recursive_double) == near(2 * K * others)
        assert of(GTopK(0.01)) == near(2 * K * log)
    for exchange, settings, traffic in (
        (recursive_double, {}, recursive_double_traffic),
        (split_allgather, {}, split_allgather_traffic),
        (split_allgather, {"capacity": room, "union_capacity": room}, split_allgather_traffic),
        (dsar_split_allgather, {"capacity": room}, dsar_split_allgather_traffic),
        (sparse_ring, {"capacity": room}, sparse_ring_traffic),
    ):
        assert of(exchange, **settings) == near(traffic(K, LENGTH, workers, **settings).words)


def test_one_worker_moves_nothing():
    moved = traced_bytes(TopK(0.1), 100, 1)
    assert (moved.payload, moved.received, moved.rounds) == (0, 0, 0)


def moved_by(f, workers=4, size=16):
    return traced_bytes(f, jax.ShapeDtypeStruct((size,), jnp.float32), workers)


def psum(x):
    return lax.psum(x, "data")


@pytest.mark.parametrize(
    ("op", "f", "payload", "received"),
    [
        ("all-reduce", psum, 64, 96),
        ("all-reduce", lambda x: lax.pmin(x, "data"), 64, 96),
        ("all-gather", lambda x: lax.all_gather(x.astype(jnp.bool_), "data"), 16, 48),
        ("all-to-all", lambda x: lax.all_to_all(x, "data", 0, 0, tiled=True), 64, 48),
        ("reduce-scatter", lambda x: lax.psum_scatter(x, "data", tiled=True), 64, 48),
        ("collective-permute", lambda x: lax.ppermute(x, "data", [(0, 1), (2, 2)]), 64, 64),
    ],
)
def test_one_collective(op, f, payload, received):
    moved = moved_by(f)
    assert [each.op for each in moved.collectives] == [op]
    assert (moved.payload, moved.received, moved.rounds) == (payload, received, 1)


def test_a_permutation_onto_itself_moves_nothing():
    assert moved_by(lambda x: lax.ppermute(x, "data", [(2, 2)])).payload == 0


def test_loops_calls_and_branches():
    def step(carry, _):
        inner = jax.checkpoint(jax.jit(psum))(carry)
        return wire.varying(inner * 0.5, "data"), None

    def f(x):
        x = lax.scan(step, x, None, length=5)[0]
        x = lax.fori_loop(0, 3, lambda i, x: lax.ppermute(x, "data", [(0, 1)]), x)
        large = psum(x.sum()) > 0
        x = lax.cond(large, psum, lambda x: psum(x[:4]).repeat(4), x)
        return x

    moved = moved_by(f)
    assert [(each.name, each.count) for each in moved.collectives] == [
        ("psum_invariant", 5),
        ("ppermute", 3),
        ("psum_invariant", 1),
        ("psum_invariant", 1),
    ]
    assert moved.payload == 64 * (5 + 3 + 1) + 4
    (conditional,) = moved.conditionals
    assert [branch.payload for branch in conditional.branches] == [16, 64]


def test_a_loop_of_unknown_length_raises():
    def talking(x):
        return lax.while_loop(lambda c: c.sum() < 9, lambda c: wire.varying(psum(c), "data"), x)

    with pytest.raises(ValueError, match=r"while .*bound the loop statically"):
        moved_by(talking)
    silent = lambda x: psum(lax.while_loop(lambda c: c.sum() < 9, lambda c: c * 2, x))
    assert moved_by(silent).payload == 64


def test_several_axes():
    def f(x):
        x = lax.psum(lax.psum(x, "local"), "hosts")
        return lax.all_gather(wire.varying(wire.varying(x, "local"), "hosts"), ("hosts", "local"))

    moved = moved_by(f, {"hosts": 4, "local": 2})
    assert [each.group_size for each in moved.collectives] == [2, 4, 8]


@pytest.mark.parametrize(
    ("exchange", "shapes", "workers", "error", "match"),
    [
        (TopK(0.1), 100, 0, ValueError, "workers=0 must be at least 1"),
        (TopK(0.1), 100, 2.0, ValueError, "workers=2.0 must be an int"),
        (TopK(0.1), 0, 2, ValueError, "shapes=0 must be at least 1"),
        (TopK(0.1), PARAMS, 2, ValueError, "must be an int"),
        (jaxsparse.top_k(0.1, axis_name="x"), PARAMS, 2, ValueError, "'x' is not bound"),
        ("top_k", 100, 2, TypeError, "must be a reducer, a gradient transformation or a function"),
    ],
)
def test_bad_settings(exchange, shapes, workers, error, match):
    with pytest.raises(error, match=match):
        traced_bytes(exchange, shapes, workers)


def test_seconds_on_a_network():
    link, moved = Link(1.0, 1e3), traced_bytes(TopK(0.1), 100, 4)
    assert Moved.counted(moved) == (3, moved.received)
    both = moved_by(lambda x: psum(x).sum() + psum(x[:1]).sum())
    seconds = link.seconds(*Moved.counted(both))
    assert seconds == pytest.approx(2 * rounds("all-reduce", 4) + both.received / 1e3)
