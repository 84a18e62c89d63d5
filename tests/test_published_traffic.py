"""Words of the sparse all-reduces, read from compiled programs, against the papers' formulas."""

import json
import math
import os
import pathlib
import subprocess
import sys

import pytest
from published_traffic import (
    all_gather_sum_traffic,
    dsar_split_allgather_traffic,
    gtopk_traffic,
    ok_topk_traffic,
    recursive_double_traffic,
    sparse_ring_traffic,
    split_allgather_traffic,
)
from workers import few

from jaxsparse import quantize

SIZE, K = 84_000, 840  # K is a multiple of all worker counts: nothing is rounded up
BENCHMARK = pathlib.Path(__file__).parent.parent / "benchmarks" / "collectives.py"


def table(workers):
    command = [sys.executable, str(BENCHMARK), "--json", "--workers", str(workers)]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    env["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # compiles sooner, to the same messages
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=400)
    assert done.returncode == 0, done.stderr
    (rows,) = json.loads(done.stdout).values()
    return {name: (exchanges, words, published) for name, exchanges, words, published, _ in rows}


@pytest.mark.parametrize("workers", few((4, 6, 8, 14), ()))
def test_words_and_exchanges(workers):
    rows = table(workers)
    log, power = math.ceil(math.log2(workers)), workers & (workers - 1) == 0
    counted = workers - 1  # a word from each other worker, which counts overflow or entries

    def paid(name):
        return rows[name][1]

    def exchanges(name):
        return rows[name][0]

    # These pay what is published, to the word.
    for name in ("spardl", "all_gather_sum (TopkA)", "dense all-reduce"):
        assert paid(name) == pytest.approx(rows[name][2]), name
    assert exchanges("spardl") == 2 * log
    assert paid("spardl")[0] == pytest.approx(4 * K * (workers - 1) / workers)
    blocks = (workers - 1) * 2  # each block of each message has a header from 65,537 elements on
    header = math.ceil(SIZE / workers / 2**16) * blocks if SIZE / workers > 2**16 else 0
    assert paid("spardl, Packed")[0] == pytest.approx(paid("spardl")[0] / 2 + header)

    for teams in range(2, workers + 1):
        if workers % teams:
            continue
        steps = 2 * math.ceil(math.log2(workers / teams)) + math.ceil(math.log2(teams))
        if not teams & (teams - 1):
            name = f"spardl, R-SAG, {teams} teams"
            assert paid(name) == pytest.approx(rows[name][2]), name
            assert exchanges(name) == steps
        name = f"spardl, B-SAG, {teams} teams"
        members = workers // teams
        low, high = paid(name)
        # The upper bound is the published one. The lower bound all-gathers k entries whatever h is.
        assert high == pytest.approx(rows[name][2][1] + (members - 1))
        scatter = 4 * K * (workers - teams) / workers
        assert low == pytest.approx(scatter + 2 * K * (teams - 1) / workers + members - 1)
        assert exchanges(name) == steps

    # Others have a published range, within which static shapes pay a fixed price, or need a tree
    # that is not built.
    low, high = rows["split_allgather, even room"][2]
    assert paid("split_allgather, even room")[0] == pytest.approx(low + counted)
    low, high = rows["dsar_split_allgather, even room"][2]
    assert paid("dsar_split_allgather, even room")[0] == pytest.approx(
        low + 2 * K * (workers - 1) / workers + counted
    )
    assert low < paid("dsar_split_allgather, even room")[0] < high + counted
    if power:
        assert paid("recursive_double")[0] == pytest.approx(rows["recursive_double"][2][1])
        assert paid("gtopk")[0] == pytest.approx(2 * K * log)
        assert exchanges("gtopk") == exchanges("recursive_double") == log
    else:
        assert exchanges("gtopk") == exchanges("recursive_double") == log + 1
    steady = 6 * K * (workers - 1) / workers + 3 * counted
    assert paid("ok_topk, factor 1")[0] == pytest.approx(steady)

    # The formulas with this library's room.
    room = K // workers
    for name, reckoned in {
        "recursive_double": recursive_double_traffic(K, SIZE, workers),
        "gtopk": gtopk_traffic(K, SIZE, workers),
        "all_gather_sum (TopkA)": all_gather_sum_traffic(K, SIZE, workers),
        "split_allgather, lossless": split_allgather_traffic(K, SIZE, workers),
        "split_allgather, even room": split_allgather_traffic(
            K, SIZE, workers, capacity=room, union_capacity=room
        ),
        "dsar_split_allgather, even room": dsar_split_allgather_traffic(
            K, SIZE, workers, capacity=room
        ),
        "dsar_split_allgather, 4 bits": dsar_split_allgather_traffic(
            K, SIZE, workers, capacity=room, quantizer=quantize.QSGD(4)
        ),
        "sparse_ring, even room": sparse_ring_traffic(K, SIZE, workers, capacity=room),
        "ok_topk, factor 1": ok_topk_traffic(K, SIZE, workers, capacity_factor=1.0),
    }.items():
        assert paid(name)[0] == pytest.approx(reckoned.words), name
