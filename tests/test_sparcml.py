"""SparCML's room in messages, from the geometry of its groups, and the choice of "auto"."""

import dataclasses
import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from at_density import one_in
from workers import few, finished, on_workers, rows, some

from jaxsparse import codecs
from jaxsparse.arrays.stream import SparseStream
from jaxsparse.collectives import recursive_double
from jaxsparse.comm import wire
from jaxsparse.comm.links import Link, rounds
from jaxsparse.select.groups import most_entries
from jaxsparse.systems import SparCML
from jaxsparse.traffic import traced_bytes

WORKERS = (2, 3, 4, 5, 7, 8, 32)


def ranges(size, workers):
    m = -(-size // workers)
    return [range(min(size, w * m), min(size, (w + 1) * m)) for w in range(workers)]


def most(size, k, group_size, workers):
    """The most entries in a range, group by group."""

    def of(part):
        return sum(min(k, count) for count in np.bincount(np.array(part, int) // group_size))

    return max(map(of, ranges(size, workers)))


def test_the_room_for_entries_is_the_most_that_a_range_can_get():
    rng = np.random.default_rng(0)
    for _ in range(500):
        size, group_size = (int(rng.integers(1, most)) for most in (300, 60))
        k, workers = int(rng.integers(1, group_size + 1)), int(rng.choice([1, *WORKERS, 400]))
        expected = most(size, k, group_size, workers)
        assert most_entries(size, k, group_size, workers) == expected


def group_top_k(x, k, group_size):
    kept = np.zeros_like(x)
    for start in range(0, len(x), group_size):
        group = x[start : start + group_size]
        places = start + np.argsort(-np.abs(group), kind="stable")[:k]
        kept[places] = x[places]
    return kept


def split_allgather(x, k, group_size, room):
    """Totals, residuals and overflow: each owner delivers its `room` largest sums. None: all."""
    workers, size = x.shape
    sent = np.stack([group_top_k(row, k, group_size) for row in x])
    total, residual, overflow = sent.sum(0), x - sent, 0
    for owner, part in enumerate(ranges(size, workers)):
        own = total[part.start : part.stop]
        left = np.argsort(-np.abs(own), kind="stable")[len(own) if room is None else room :]
        overflow += np.count_nonzero(own[left])
        residual[owner, part.start + left] += own[left]
        own[left] = 0
    return total, residual, overflow


def data(kind, workers, size):
    rng = np.random.default_rng(workers * size)
    x = np.round(10 * rng.standard_t(3, (workers, size))) * workers  # exact means
    first = rng.permutation(size)[: size // 3]
    if kind == "crowded":  # large elements at the ends of groups
        x[:, first] = 0
        x *= 1 + 9 * (np.arange(size) % 64 > 56)
    if kind == "zero":
        x[:] = 0
    return x.astype(np.float32)


@pytest.mark.parametrize(
    "algorithm", few(["split_allgather", "dsar_split_allgather"], ["split_allgather"])
)
@pytest.mark.parametrize("factor", few([None, 1.0, 0.5], [1.0, 0.5]))
@pytest.mark.parametrize("workers", some(WORKERS, (), slow=(3, 32)))
def test_against_numpy(workers, factor, algorithm):
    """Sizes below W, of less than a group, and with a short last group."""
    for size in (2, 31, 64, 130, 1031):
        check(SparCML(3, 64, algorithm=algorithm, union_factor=factor), workers, size)


def test_entries_always_find_room():
    """With the former room of twice an even share, 5 of these 64 entries found none."""
    check(SparCML(4, 512, algorithm="split_allgather"), 8, 1024)


def check(reducer, workers, size):
    run = on_workers(lambda x: finished(reducer, x, ()), workers, "vmap")
    room = None
    if reducer.algorithm == "split_allgather":
        room = reducer.union_capacity(size, workers)
    for kind in ("random", "crowded", "zero"):
        x = data(kind, workers, size)
        reduced = run(jnp.asarray(x))
        total, residual, overflow = split_allgather(x, reducer.k, reducer.group_size, room)
        if np.any(reduced.info.overflow == 0):  # dense messages have room for all
            total, residual, _ = split_allgather(x, reducer.k, reducer.group_size, None)
        else:
            np.testing.assert_array_equal(reduced.info.overflow, overflow)
        means = np.stack([total / workers] * workers)
        np.testing.assert_allclose(reduced.mean, means, rtol=1e-6)  # 1 / 7 is no float
        np.testing.assert_array_equal(reduced.residual, residual)
        if reducer.union_factor != 0.5 and kind == "random":
            assert not np.any(reduced.info.overflow)


@pytest.mark.parametrize("workers", few(WORKERS, (3, 32)))
@pytest.mark.parametrize("k", some([1, 4, 16], [4]))
def test_random_supports_fit(workers, k):
    """The union of W random supports, drawn 100 times."""
    size, group_size = 5000, 512  # the last group has 392
    reducer = SparCML(k, group_size)
    room = reducer.union_capacity(size, workers)
    rng = np.random.default_rng(k)
    largest = 0
    for _ in range(100):
        drawn = np.zeros(size, bool)
        for start in range(0, size, group_size):
            chances = rng.random((workers, min(group_size, size - start)))
            drawn[start + np.argpartition(chances, k, axis=1)[:, :k]] = True
        largest = max(largest, *(drawn[list(part)].sum() for part in ranges(size, workers)))
    assert largest <= room
    assert min(room, workers * reducer.capacity(size, workers)) <= 1.3 * largest + 8


@pytest.mark.parametrize("workers", few(WORKERS, (8,)))
def test_the_split_receives_little_more_than_random_supports_need(workers):
    """With room for twice an even share, and for all sums of it, 8 workers received twice as much.

    The published bound for disjoint supports is 2 k W words (section 5.3.2).
    """
    size, k, group_size = 2**20, 4, 512
    reducer = SparCML(k, group_size, algorithm="split_allgather")
    count = k * size // group_size
    union = size * (1 - (1 - k / group_size) ** workers)
    # The first half has room for the groups that a range has a part of.
    even = workers * reducer.capacity(size, workers) / count
    needed = 2 * (workers - 1) / workers * (even * count + union)
    words = traced_bytes(reducer, size, workers).received / 4
    assert needed <= words < 1.05 * needed
    if workers & (workers - 1) == 0:
        assert even == 1
        assert words < 2 * count * workers


@pytest.mark.parametrize(("rounding", "scale"), [("stochastic", "l2"), ("nearest", "max")])
def test_sums_are_on_the_levels_of_their_group(rounding, scale):
    workers, size, group_size = 2, 256, 16
    reducer = SparCML(
        64, 64, bits=4, bits_group_size=group_size, scale=scale, rounding=rounding, seed=1
    )
    x = np.random.default_rng(0).normal(size=(workers, size)).astype(np.float32)
    run = on_workers(
        lambda x: reducer(x, reducer.init(size), axis_name="data").mean, workers, "vmap"
    )
    sums = x.sum(0).reshape(-1, group_size)
    scales = np.abs(sums).max(1) if scale == "max" else np.linalg.norm(sums, axis=1)
    levels = 7 * workers * np.asarray(run(jnp.asarray(x)))[0].reshape(sums.shape) / scales[:, None]
    np.testing.assert_allclose(levels, levels.round(), atol=1e-4)
    most = 1 if rounding == "stochastic" else 0.5
    assert np.all(np.abs(levels - 7 * sums / scales[:, None]) < most + 1e-4)


def test_sums_that_vanish_have_one_sign_on_all_workers(monkeypatch):
    """CPUs flush subnormal sums to zeros of their sign, which messages leave out."""
    monkeypatch.setattr(wire, "replicated", lambda x, axis_name: x)  # each worker's own
    stream = SparseStream(
        jnp.array([[5, 0, 1, 2], [4, 0, 1, 2], [5, 0, 1, 2]]),
        jnp.array([[-2.16e-38, 1, 1, 1], [1, 1, 1, 1], [2.14e-38, 1, 1, 1]], jnp.float32),
    )
    total = on_workers(lambda own: recursive_double(own, 24, axis_name="data").total, 3)
    rows = np.asarray(total(stream)).view(np.uint32)
    np.testing.assert_array_equal(rows, rows[:1].repeat(3, 0))


EVERY = ("all_gather", "recursive_double", "split_allgather")


@pytest.mark.parametrize("workers", few((2, 3, 5, 8, 17, 32), (3,)))
@pytest.mark.parametrize(
    ("codec", "factor"),
    rows(
        [(codecs.COO, None), (codecs.Packed(), 1.0)], [(codecs.COO, 1.0), (codecs.Packed(), None)]
    ),
    ids=str,
)
def test_closed_forms_have_the_rounds_and_bytes_of_the_program(workers, codec, factor):
    for k, size in ((1, 512 * 40 + 7), (128, 512 * 40 + 7), (4, 1000)):
        reducer = SparCML(k, union_factor=factor, codec=codec)
        for name, (messages, received) in reducer.traffic(size, workers).items():
            single = dataclasses.replace(reducer, algorithm=name)
            moved = traced_bytes(single, size, workers)
            waits = sum(c.count * rounds(c.op, c.group_size) for c in moved.collectives)
            assert (messages, received) == (waits, moved.received), (name, k, size)


def test_auto_takes_the_least_time_and_the_simplest_within_a_tenth():
    """Times are those of alpha-beta formulas, written down once more."""
    rng, seen = np.random.default_rng(0), set()
    for _ in range(2000):
        W, size = int(rng.integers(2, 300)), int(2 ** rng.uniform(10, 27))
        alpha, beta = 10 ** rng.uniform(-6, -1), 10 ** rng.uniform(-10, -5)  # of 4 bytes
        k = int(rng.choice([1, 4, 32, 128]))
        reducer = SparCML(k, link=Link(alpha, 4 / beta))
        m, n = -(-size // W), reducer.entries(size)
        room = min(2 * reducer.capacity(size, W), m)
        sums = min(2 * reducer.union_capacity(size, W), 2 * W * reducer.capacity(size, W), m)
        log = W.bit_length() - 1
        if 2**log == W:
            carried = [2**t for t in range(log)]
        else:
            carried = [1, *(min(2 ** (t + 1), W) for t in range(log)), W]
        words = [min(2 * min(c * n, size), size) for c in carried]
        times = {
            "all_gather": (W - 1) * (alpha + beta * min(2 * n, size)),
            "recursive_double": len(carried) * alpha + beta * sum(words),
            "split_allgather": (W - 1) * (2 * alpha + beta * (room + sums + 1)),
        }
        chosen = reducer.algorithm_for(size, W)
        seen.add(chosen)
        assert 0.9 * times[chosen] <= min(times.values()) * (1 + 1e-9)
        simpler = [times[name] for name in EVERY[: EVERY.index(chosen)]]
        assert all(times[chosen] < 0.9 * time * (1 + 1e-9) for time in simpler)
    assert seen == set(EVERY)


def test_settings_that_leave_no_choice():
    far = Link(latency=1e-2, bandwidth=1e10)
    assert SparCML(link=far, bits=4).algorithm_for(2**16, 8) == "dsar_split_allgather"
    assert SparCML(link=far, algorithm="ring").algorithm_for(2**16, 8) == "ring"
    assert SparCML(link=far).algorithm_for(2**16, 1) == "all_gather"
    # Latency decides: the fewest messages.
    assert SparCML(link=far).algorithm_for(2**16, 8) == "recursive_double"
    # Bandwidth decides, and random supports overlap: ranges are best.
    slow = Link(latency=1e-6, bandwidth=1e6)
    assert SparCML(link=slow).algorithm_for(2**24, 64) == "split_allgather"
    assert SparCML(link=slow, union_factor=None).algorithm_for(2**24, 64) == "all_gather"
    with pytest.raises(ValueError, match=r"link='fast' must be a jaxsparse\.Link"):
        SparCML(link="fast")


def test_auto_was_the_fastest_or_nearly_so_on_hosts():
    """Of exact sums on 2, 4 and 8 emulated hosts, by a link as those had."""
    path = pathlib.Path(__file__).parents[1] / "benchmarks/cluster/sparcml.json"
    found = {}
    for row in json.loads(path.read_text())["rows"]:
        name, _, algorithm = row["system"].partition(":")
        if name == "sparcml" and algorithm and ":" not in algorithm:
            cell = row["hosts"], row["params"], row["density"]
            found.setdefault(cell, {})[algorithm] = row["seconds"]
    assert len(found) == 9
    for (hosts, size, density), seconds in found.items():
        reducer = SparCML(*one_in(density, 512), link=Link(4e-4, 11.95e6))
        ratio = seconds[reducer.algorithm_for(size, hosts)] / min(seconds.values())
        assert ratio < (1.25 if density == 0.001 else 1.01), (hosts, density)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ring", "dsar_split_allgather"])
@pytest.mark.parametrize("factor", [None, 1.0])
@pytest.mark.parametrize("k", some([1, 4, 128], [4]))
def test_the_others_never_receive_less(algorithm, factor, k):
    """They do not wait for fewer messages either, so they need not be among the choices."""
    size, workers = 512 * 40 + 7, 8
    reducer = SparCML(k, algorithm=algorithm, union_factor=factor)
    messages, received = reducer.traffic(size, workers)["split_allgather"]
    moved = traced_bytes(reducer, size, workers)
    assert moved.received >= received - 4 * (workers - 1)  # a count beside the entries
    assert sum(c.count * rounds(c.op, c.group_size) for c in moved.collectives) >= messages
