"""The algorithm that SparCML chooses: the planner's fastest, held against measured times."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import pytest
from workers import few, mesh

from jaxsparse import codecs, data_parallel
from jaxsparse.planner.algorithms import choose_algorithm
from jaxsparse.planner.network import Link, Network
from jaxsparse.planner.profiles import Floor, SystemPoint, SystemProfile
from jaxsparse.systems import SparCML, choose
from jaxsparse.systems.sparcml import ALGORITHMS
from jaxsparse.traffic import traced_bytes

CLUSTER = pathlib.Path(__file__).parent.parent / "benchmarks" / "cluster"
OPS = ("all_reduce", "all_gather", "all_to_all", "collective_permute", "reduce_scatter")


def measured(name="results.json"):
    """Seconds by (hosts, rate, elements, density) and algorithm, and networks by (hosts, rate).

    Algorithms whose messages have become shorter since are left out: in "results.json" those that
    split. So is the sum in 4 bits, which "auto" never takes.
    """
    content = json.loads((CLUSTER / name).read_text())
    cells = {}
    for row in content["rows"]:
        name, _, algorithm = row["system"].partition(":")
        if name == "sparcml" and algorithm and ":" not in algorithm:
            assert row["what"] == "exchange"
            cell = row["hosts"], row["rate"], row["params"], row["density"]
            reducer = reducer_of(row["density"], row["params"], row["hosts"], None)
            single = dataclasses.replace(reducer, algorithm=algorithm)
            received = traced_bytes(single, row["params"], row["hosts"]).received
            if received == pytest.approx(row["received_bytes"], rel=1e-3):
                cells.setdefault(cell, {})[algorithm] = row["seconds"]
    networks = {
        (each["hosts"], each["rate"]): Network(**{name: each[name] for name in ("link", *OPS)})
        for each in content["networks"]
    }
    return cells, networks


def reducer_of(density, size, workers, link):
    budget = choose("sparcml", density, size=size, workers=workers).budget
    return SparCML(budget.k, budget.group_size, link=link)


# The hosts are eight processes that share the two cores of the profile.
SHARED = 4


def test_the_choice_against_measured_times():
    """Among the algorithms that were measured: 8 emulated hosts at 100 Mbit/s."""
    cells, networks = measured()
    assert sorted(cells) == [(8, "100mbit", 10**6, density) for density in (0.001, 0.01, 0.1)]
    by_link, by_all = {}, {}
    shipped = SystemProfile.shipped()
    names = {f"sparcml:{name}" for name in set.union(*map(set, cells.values()))}
    idle = dataclasses.replace(
        shipped, points=tuple(point for point in shipped.points if point.system in names)
    )
    there = idle.scaled(idle.memory_bandwidth / SHARED)
    for (hosts, rate, size, density), seconds in cells.items():
        network, best = networks[hosts, rate], min(seconds.values())
        reducer = reducer_of(density, size, hosts, network.link)
        assert seconds.keys() == {"all_gather", "recursive_double", "ring"}
        by_link[density] = seconds[choose_algorithm(reducer, size, hosts, profile=idle)] / best
        known = {"network": network, "profile": there}
        by_all[density] = seconds[choose_algorithm(reducer, size, hosts, **known)] / best
    # Chosen by one link and an idle CPU, the algorithm is the fastest, or nearly so.
    assert max(by_link.values()) < 1.12, by_link
    assert set(by_all.values()) == {1.0}


def test_the_choice_on_2_4_and_8_hosts():
    """Among all algorithms, with the network that was measured and the hosts' computing."""
    cells, networks = measured("sparcml.json")
    shipped = SystemProfile.shipped()
    there = shipped.scaled(shipped.memory_bandwidth / SHARED)
    densities = (0.001, 0.01, 0.1)
    assert sorted(cells) == [(n, "100mbit", 10**6, p) for n in (2, 4, 8) for p in densities]
    for (hosts, rate, size, density), seconds in cells.items():
        assert seconds.keys() == {*ALGORITHMS, "ring"}
        reducer = reducer_of(density, size, hosts, None)
        known = {"network": networks[hosts, rate], "profile": there}
        ratio = seconds[choose_algorithm(reducer, size, hosts, **known)] / min(seconds.values())
        # At 0.1 % waking up takes longer than the messages, and no model knows when.
        assert ratio < (2 if density == 0.001 else 1.2), (hosts, density, ratio)


def test_recursive_doubling_is_not_taken_where_it_was_slow():
    """At 1 % it took 1.75 times as long, because it adds and selects at each stage."""
    cells, networks = measured()
    seconds = cells[8, "100mbit", 10**6, 0.01]
    assert seconds["recursive_double"] > 1.7 * seconds["all_gather"]
    reducer = reducer_of(0.01, 10**6, 8, networks[8, "100mbit"].link)
    assert choose_algorithm(reducer, 10**6, 8) == "all_gather"


def predicted(reducer, name, size, workers):
    single = SparCML(
        reducer.k, reducer.group_size, algorithm=name, codec=reducer.codec, link=reducer.link
    )
    moved = traced_bytes(single, size, workers)
    entries = reducer.k * (size // reducer.group_size)
    computing = SystemProfile.shipped().seconds(f"sparcml:{name}", size, workers, entries / size)
    return Network(reducer.link).seconds(moved) + computing


@pytest.mark.parametrize("workers", few((2, 5, 16, 100), (5, 16)))
@pytest.mark.parametrize("link", [Link(1e-6, 1e8), Link(1e-2, 1e10)], ids=["slow", "far"])
def test_it_is_the_planner_s_minimum(workers, link):
    size = 2**16
    reducer = SparCML(link=link, codec=codecs.Packed())
    times = {name: predicted(reducer, name, size, workers) for name in ALGORITHMS}
    assert times[choose_algorithm(reducer, size, workers)] == min(times.values())


@pytest.mark.parametrize("workers", few((2, 3, 8, 17, 32), (3, 8)))
@pytest.mark.parametrize("factor", [None, 1.0])
@pytest.mark.parametrize("k", [1, 4, 128])
def test_a_ring_never_receives_less(workers, factor, k):
    """It does not wait for fewer messages either, so it need not be among the choices."""
    size, network = 512 * 40 + 7, Network(Link(1.0, 1e30))
    ring, split = (
        traced_bytes(SparCML(k, 512, algorithm=name, union_factor=factor), size, workers)
        for name in ("ring", "split_allgather")
    )
    assert ring.received >= split.received - 4 * (workers - 1)  # a count beside the entries
    assert network.seconds(ring) == network.seconds(split)


def test_settings_that_leave_no_choice():
    far = Link(latency=1e-2, bandwidth=1e10)
    assert choose_algorithm(SparCML(link=far, bits=4), 2**16, 8) == "dsar_split_allgather"
    assert choose_algorithm(SparCML(link=far, algorithm="ring"), 2**16, 8) == "ring"
    assert choose_algorithm(SparCML(link=far), 2**16, 1) == "all_gather"
    # Latency decides: the fewest messages.
    assert choose_algorithm(SparCML(link=far), 2**16, 8) == "recursive_double"
    # Bandwidth decides, and random supports overlap: ranges are best.
    slow = Link(latency=1e-6, bandwidth=1e6)
    assert choose_algorithm(SparCML(link=slow), 2**24, 64) == "split_allgather"
    assert choose_algorithm(SparCML(link=slow, union_factor=None), 2**24, 64) == "all_gather"
    # So many entries that their union is dense: both have the same bytes, and computing decides.
    chosen = choose_algorithm(SparCML(64, link=slow), 2**20, 64)
    assert chosen in ("split_allgather", "dsar_split_allgather")


def test_it_is_chosen_once_where_the_step_is_traced(monkeypatch):
    """Within shard_map and vmap. Traced messages, which link and seed don't change, are kept."""
    traced = []

    def counting(*args, **settings):
        traced.append(args)
        return traced_bytes(*args, **settings)

    monkeypatch.setattr("jaxsparse.planner.algorithms.traced_bytes", counting)
    size = 5000  # in no other test, so that nothing is kept yet

    def lower(reducer):
        run = lambda x: reducer(x, reducer.init(size), axis_name="data").mean
        x = jax.ShapeDtypeStruct((3, size), jnp.float32)
        data_parallel(lambda x: run(x[0]), mesh(3), batch_argnums=0).lower(x)
        jax.jit(jax.vmap(run, axis_name="data")).lower(x)

    lower(SparCML())
    lower(SparCML(seed=7, link=Link(1e-2, 1e10)))
    assert len(traced) == len(ALGORITHMS)


def test_algorithms_without_times_are_left_out():
    points = [SystemPoint("sparcml:ring", 2**16, 8, None, 1.0)]
    points.append(SystemPoint("sparcml:split_allgather", 2**16, 8, None, 9.0))
    part = SystemProfile(tuple(points), (Floor(2**16, 1e-5),))
    far = Network(Link(latency=1e-2, bandwidth=1e10))
    assert choose_algorithm(SparCML(), 2**16, 8, network=far, profile=part) == "split_allgather"
    none = SystemProfile((SystemPoint("dense", 8, 8, None, 1.0),), (Floor(8, 1e-5),))
    assert choose_algorithm(SparCML(), 2**16, 8, network=far, profile=none) == "recursive_double"
