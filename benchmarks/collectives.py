"""Words that each sparse all-reduce pays, read from its compiled program, beside published words.

    python benchmarks/collectives.py
    python benchmarks/collectives.py --workers 8 --size 1000000 --density 0.001

A word is 4 bytes that one worker receives. An entry in COO has two words. An exchange is one
collective of the compiled program. A permutation takes one round, an all-gather or all-to-all as
many as the network library makes of it. Nothing is run, so the table is the same on any machine.
"""

import os

# This stands before jax is imported, because compiling for W workers needs W devices.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=64"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

import jaxsparse
from jaxsparse import codecs, contrib, traffic
from jaxsparse.arrays.stream import SparseStream
from jaxsparse.collectives import (
    all_gather_sum,
    dsar_split_allgather,
    recursive_double,
    sparse_ring,
    split_allgather,
)
from jaxsparse.contrib.gtopk_sum import gtopk_sum
from jaxsparse.reducers.base import Reducer


class Row(NamedTuple):
    """One algorithm: the words that it pays, and the words that its paper says."""

    name: str
    exchanges: int
    words: tuple[float, float]  # with the cheapest and with the dearest branches
    published: tuple[float, float]  # range of words
    reason: str  # reason for a difference


def wire(f: Callable[..., Any], workers: int, *shapes: jax.ShapeDtypeStruct) -> traffic.WireBytes:
    """The bytes that f moves, a function of one worker's arrays."""
    mesh = Mesh(np.array(jax.devices()[:workers]), ("data",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("data")

    def body(*args: jax.Array) -> Any:
        return jax.tree.map(lambda x: jaxsparse.local(x)[None], f(*(arg[0] for arg in args)))

    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)
    arguments = [jax.ShapeDtypeStruct((workers, *s.shape), s.dtype) for s in shapes]
    return traffic.wire_bytes(jax.jit(mapped).lower(*arguments).compile())


def words(sent: traffic.WireBytes) -> tuple[float, float]:
    """Received words if the cheapest branches are taken, and if the dearest are."""
    saved = sum(
        c.branches[c.dearest].received - min(b.received for b in c.branches)
        for c in sent.conditionals
    )
    return (sent.received - saved) / 4, sent.received / 4


def rows(workers: int, size: int, k: int) -> list[Row]:
    """Rows of all algorithms, for k of `size` entries a worker."""
    W, log, room = workers, math.ceil(math.log2(workers)), math.ceil(k / workers)
    table = []

    def add(
        name: str, sent: traffic.WireBytes, published: tuple[float, float], reason: str
    ) -> None:
        table.append(Row(name, sent.rounds, words(sent), published, reason))

    def stream(name: str, collective: Any, published: Any, reason: str = "", **settings: Any):
        def f(indices: jax.Array, values: jax.Array) -> Any:
            entries = SparseStream(indices, values)
            return collective(entries, size, axis_name="data", **settings)

        shapes = jax.ShapeDtypeStruct((k,), jnp.int32), jax.ShapeDtypeStruct((k,), jnp.float32)
        add(name, wire(f, workers, *shapes), published, reason)

    def reducer(name: str, reducer: Reducer, published: Any, reason: str = ""):
        def f(x: jax.Array) -> Any:
            # A compiler that knew the first state would drop the branches of later steps.
            state = jax.lax.optimization_barrier(reducer.init(size))
            reduced = reducer.pmean(x, state, "data")
            return reduced.mean, reduced.kept.whole(x).residual

        sent = wire(f, workers, jax.ShapeDtypeStruct((size,), jnp.float32))
        add(name, sent, published, reason)

    def dense(x: jax.Array) -> Any:
        return jaxsparse.reducers.Dense().pmean(x, (), "data").mean

    ring = 2 * (W - 1) / W * size
    sent = wire(dense, workers, jax.ShapeDtypeStruct((size,), jnp.float32))
    add("dense all-reduce", sent, (ring, ring), "")
    ssar = (log * 2 * k, (W - 1) * 2 * k)
    reason = "room for disjoint supports"
    if W & (W - 1):
        reason += ", 2 more exchanges"
    stream("recursive_double", recursive_double, ssar, reason)
    split = (2 * (W - 1) / W * 2 * k, W * 2 * k)
    stream(
        "split_allgather, even room",
        split_allgather,
        split,
        "1 word counts overflow",
        capacity=room,
        union_capacity=room,
    )
    stream(
        "split_allgather, lossless",
        split_allgather,
        split,
        "room for all k in one range",
    )
    half = (W - 1) / W * size
    stream(
        "dsar_split_allgather, even room",
        dsar_split_allgather,
        (half, half + 2 * k),
        "1 word counts overflow",
        capacity=room,
    )
    stream(
        "dsar_split_allgather, 4 bits",
        dsar_split_allgather,
        (half / 8, half / 8 + 2 * k),
        "1 scale per 1024 values",
        capacity=room,
        quantizer=jaxsparse.quantize.QSGD(4),
    )
    stream("sparse_ring, even room", sparse_ring, split, "", capacity=room)
    topk = ((W - 1) * 2 * k,) * 2
    stream("all_gather_sum (TopkA)", all_gather_sum, topk, distinct=True)
    reason = "no broadcast"
    if W & (W - 1):
        reason += ", 2 exchanges to fold"
    stream("gtopk", gtopk_sum, (4 * k * math.log2(W),) * 2, reason)
    density = k / size
    reducer(
        "ok_topk, factor 1",
        contrib.OkTopk(density, capacity_factor=1.0),
        (2 * k * (W - 1) / W, 6 * k * (W - 1) / W),
        "counts; thresholds and regions every 32, 64 steps",
    )
    spardl = (4 * k * (W - 1) / W,) * 2
    reducer("spardl", jaxsparse.reducers.SparDL(density), spardl)
    packed = jaxsparse.reducers.SparDL(density, codec=codecs.Packed())
    reducer("spardl, Packed", packed, spardl, "4 bytes an entry")
    for T in range(2, W + 1):
        if W % T:
            continue
        if not T & (T - 1):
            formula = 2 * k * ((2 * W - 2 * T) / W + T / W * math.log2(T))
            reducer(
                f"spardl, R-SAG, {T} teams",
                jaxsparse.reducers.SparDL(density, teams=T),
                (formula,) * 2,
            )
        # Eq. (10) has T^2 in the place of T W: it leaves out the reduce-scatter, 2 k (W - T) / W.
        low, printed = (2 * k * (a + W - 2 * T) / (W * T) for a in (T * W, T * T))
        high = 2 * k * (T * T + 2 * W - 3 * T) / W
        reducer(
            f"spardl, B-SAG, {T} teams",
            jaxsparse.reducers.SparDL(density, teams=T, gather="bruck"),
            (low, high),
            f"lower bound corrected: eq. (10) has {printed / k:.2f}, without the reduce-scatter; "
            "all-gather of k whatever h; 1 word counts entries"
            if T < W
            else "",
        )
    return table


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 6, 8, 14])
    parser.add_argument("--size", type=int, default=84_000, help="elements")
    parser.add_argument("--density", type=float, default=0.01, help="share of them in a message")
    args = parser.parse_args()
    k = round(args.density * args.size)
    print(f"d = {args.size}, k = {k}; words in units of k\n")
    for workers in args.workers:
        print(f"| W = {workers} | exchanges | words paid | words published | |")
        print("|---|---|---|---|---|")
        for row in rows(workers, args.size, k):
            paid, published = (span(pair, k) for pair in (row.words, row.published))
            print(f"| {row.name} | {row.exchanges} | {paid} | {published} | {row.reason} |")
        print()


def span(pair: tuple[float, float], k: int) -> str:
    """A range in units of k."""
    low, high = (f"{x / k:.2f}" for x in pair)
    return low if low == high else f"{low} to {high}"


if __name__ == "__main__":
    main()
