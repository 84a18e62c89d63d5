"""What is measured: a network's two numbers, and DRAGONN's choice of tensors from T_comp."""

import itertools
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from running import ENV, in_processes
from workers import mesh

import jaxsparse
from jaxsparse import Link
from jaxsparse.arrays.layout import small_or_vector
from jaxsparse.comm.links import rounds
from jaxsparse.planner import measure_network, measuring, select_tensors, time_codec

OPS = ("all-reduce", "all-gather", "all-to-all", "collective-permute")


def times(link, workers, spread=0.0):
    """Times of the model, each times a random factor from exp(-spread) to exp(spread)."""
    rng, found = np.random.default_rng(0), []
    for op, received in itertools.product(OPS, (4, 4096, 65536, 1 << 20)):
        waits = rounds(op, workers)
        factor = float(np.exp(rng.uniform(-spread, spread)))
        found.append((waits, received, (waits * link.latency + received / link.bandwidth) * factor))
    return found


def test_rounds_are_those_of_rings():
    assert [rounds(op, 8) for op in OPS] == [14, 7, 7, 1]
    assert [rounds(op, 1) for op in OPS] == [0, 0, 0, 1]
    assert [rounds("collective-broadcast", W) for W in (2, 5, 8)] == [1, 3, 3]
    with pytest.raises(ValueError, match="op='psum' is no collective of which rounds are known"):
        rounds("psum", 2)


@pytest.mark.parametrize("field", ["latency", "bandwidth"])
@pytest.mark.parametrize("value", [0, -1, math.inf])
def test_a_link_has_two_positive_numbers(field, value):
    with pytest.raises(ValueError, match=f"{field}=.* must be positive and finite"):
        Link(**{field: value})
    assert Link(0.5, 4.0).seconds(3, 8) == 3.5


@pytest.mark.parametrize("link", [Link(5e-5, 1.25e9), Link(1e-3, 1.25e7), Link(1e-6, 1e10)])
def test_the_fit_recovers_what_made_the_times(link):
    for workers in (2, 3, 8):
        found = measuring.fit_link(times(link, workers))
        assert found.latency == pytest.approx(link.latency, rel=1e-6)
        assert found.bandwidth == pytest.approx(link.bandwidth, rel=1e-6)
        found = measuring.fit_link(times(link, workers, 0.2))
        assert found.latency == pytest.approx(link.latency, rel=0.25)
        assert found.bandwidth == pytest.approx(link.bandwidth, rel=0.25)


def test_terms_are_never_negative():
    assert measuring.fit_link([(1, 8, 1.0), (1, 8e6, 0.5)]).bandwidth == pytest.approx(1e15)
    assert measuring.fit_link([(1, 8, 1e-6), (1, 8e6, 3.0)]).latency == 1e-9


def test_a_network_is_timed_behind_a_barrier_and_as_often_as_time_allows(monkeypatch):
    """With the times of a link in place of measured ones. The small sizes are repeated."""
    workers, link, repeated = 3, Link(5e-3, 1.25e5), {}

    def placed(exchange, words, mesh, axis_name):
        program = lambda: jnp.zeros(())
        program.words, program.op = words, ops.get(exchange)
        return program

    def slowest(program, barrier):
        assert barrier.op == "all-reduce"
        op, words = program.op, program.words
        repeated[op, words] = repeated.get((op, words), 0) + 1
        share = {"all-reduce": 4 / 3, "all-gather": 2, "all-to-all": 2 / 3}.get(op, 1)
        return link.seconds(rounds(op, workers), share * 4 * words)

    exchanges = measuring._exchanges(workers, "data")
    ops = {exchange: op for op, exchange in exchanges.items()}
    monkeypatch.setattr(measuring, "_exchanges", lambda *_: exchanges)
    monkeypatch.setattr(measuring, "_placed", placed)
    monkeypatch.setattr(measuring, "_slowest", slowest)
    found = measure_network(mesh(workers))
    assert found.latency == pytest.approx(link.latency)
    assert found.bandwidth == pytest.approx(link.bandwidth)
    assert {op for op, _ in repeated} == set(OPS)
    for op in OPS:
        counts = {words: count for (each, words), count in repeated.items() if each == op}
        assert counts[min(counts)] == 9
        assert counts[max(counts)] == 1
        assert len(counts) == 4


def test_emulated_devices_are_measured():
    found = measure_network(mesh(3), words=(1, 1000), seconds=0.5)
    assert 1e-9 <= found.latency < 1
    assert found.bandwidth > 1e3


@pytest.mark.parametrize(
    ("workers", "settings", "match"),
    [
        (2, {"axis_name": "x"}, "axis_name='x' is not an axis"),
        (2, {"words": (1,)}, r"words=\(1,\) must be two or more sizes"),
        (2, {"words": (0, 1)}, "words=0 must be at least 1"),
        (1, {}, "one worker, which exchanges nothing"),
    ],
)
def test_what_can_not_be_measured_is_named(workers, settings, match):
    with pytest.raises(ValueError, match=match):
        measure_network(mesh(workers), **settings)


PROCESS = """
import jax
jax.distributed.initialize()
from jaxsparse import planner
mesh = jax.make_mesh((jax.device_count(),), ("data",))
print(planner.measure_network(mesh, words=(1, 1000, 100_000), seconds=2))
jax.distributed.shutdown()
"""


@pytest.mark.slow
def test_two_processes_agree():
    env = ENV | {"JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu"}
    _, lines = in_processes([sys.executable, "-c", PROCESS], 2, timeout=100, env=env)
    first, second = ([x for x in each if x.startswith("Link(")] for each in lines)
    assert len(first) == 1
    assert first == second


# --- which tensors

SECONDS = {4096: 7e-5, 2**18: 4e-4, 2**22: 1.1e-2, 2**24: 1.2e-1}
TREE = {
    "kernels": [
        jax.ShapeDtypeStruct(shape, jnp.float32)
        for shape in ((1, 1, 64, 64), (3, 3, 256, 256), (7, 7, 3, 64), (2048, 1000), (8192, 4096))
    ],
    "bias": jax.ShapeDtypeStruct((1000,), jnp.float32),
}


@pytest.mark.parametrize("rule", [small_or_vector, lambda path, shape: False])
def test_tensors_are_chosen_by_equation_1(rule):
    kinds = set()
    for alpha, bandwidth, workers, density in itertools.product(
        (1e-6, 1e-3), (1.25e8, 1.25e9, 3e11), (1, 2, 8, 45, 1000), (0.0001, 0.01, 1.0)
    ):
        found = select_tensors(
            TREE,
            workers=workers,
            link=Link(alpha, bandwidth),
            density=density,
            seconds=SECONDS,
            is_dense=rule,
        )
        chosen = 0
        for path, leaf in jax.tree_util.tree_leaves_with_path(TREE):
            name, d = jax.tree_util.keystr(path), math.prod(leaf.shape)
            k = math.ceil(density * d - 1e-9)
            gamma = min(1.0, 2 * k / d)  # a message is never longer than the tensor
            T_comp = np.interp(d, [*SECONDS], [*SECONDS.values()]) * max(1, d / 2**24)
            saved = (workers - 1) * (alpha + (2 / workers - gamma) * 4 * d / bandwidth) - T_comp
            may = not rule(name, leaf.shape)
            if may:
                scale = (workers - 1) * (alpha + 4 * d / bandwidth) + T_comp
                assert found.saving[name] == pytest.approx(saved, abs=1e-9 * scale)
            assert found.is_dense(name, leaf.shape) == (not may or saved <= 0)
            chosen += not found.is_dense(name, leaf.shape)
        kinds.add(chosen)
    assert {0, 5} <= kinds
    assert len(kinds) > 3


@pytest.mark.parametrize("gamma", [0.002, 0.0002])
def test_the_saving_peaks_near_the_root_of_two_over_gamma(gamma):
    tree, link = {"w": jax.ShapeDtypeStruct((1000, 10000), jnp.float32)}, Link(1e-12, 1.25e9)
    saving = {
        W: select_tensors(tree, workers=W, link=link, density=gamma / 2, seconds={1: 0.0}).saving
        for W in range(2, 200)
    }
    best = max(saving, key=lambda W: saving[W]["['w']"])
    assert abs(best - math.sqrt(2 / gamma)) <= 1


def test_a_selection_is_the_is_dense_of_an_exchange():
    tree = {"a": jnp.ones((64, 32)), "big": jnp.ones((300, 300))}
    seconds = {2048: 1e-3, 90_000: 1e-5}  # the small one costs more than it saves
    found = select_tensors(tree, workers=8, link=Link(1e-6, 1e8), density=0.01, seconds=seconds)
    tx = jaxsparse.top_k(0.01, axis_name=None, is_dense=found.is_dense)
    updates, _ = jax.jit(tx.update)(tree, tx.init(tree))
    assert np.count_nonzero(updates["a"]) == 2048
    assert np.count_nonzero(updates["big"]) == 900
    with pytest.raises(ValueError, match=r"leaf\['b'\] of shape \(3,\) was not selected among"):
        found.is_dense("['b']", (3,))


def test_the_codec_is_timed():
    found = time_codec((1000, 50_000), 4, 0.01, repeats=3)
    assert found.keys() == {1000, 50_000}
    assert all(1e-7 < seconds < 10 for seconds in found.values())


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"workers": 0}, "workers=0 must be at least 1"),
        ({"density": 0.0}, r"density=0\.0 must lie in \(0, 1\]"),
        ({"seconds": {}}, "must have times by number of elements: see time_codec"),
        ({"seconds": {100: math.nan}}, "must have times by number of elements"),
        ({"params": {"w": jnp.zeros((3, 4), jnp.int32)}}, "dtype int32"),
    ],
)
def test_wrong_arguments_are_named(settings, complaint):
    given = {"params": TREE, "workers": 8, "link": Link(), "density": 0.1, "seconds": SECONDS}
    with pytest.raises(ValueError, match=complaint):
        select_tensors(**{**given, **settings})
