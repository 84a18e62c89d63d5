"""gTop-k and Ok-Topk against their descriptions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_collectives as reference
from supports import SUPPORTS, run, shares_by_quarter, total, vectors
from workers import finished, on_workers, rows, some

from jaxsparse import codecs
from jaxsparse.contrib import GTopK, OkTopk
from jaxsparse.contrib.ok_topk_sum import Regions, _quotas, about_top_k
from jaxsparse.reducers import Staged

SIZE = 61


# Powers of two, and others.
WHERE = [(8, "vmap"), (3, "vmap"), (6, "vmap"), (8, "shard_map"), (1, "vmap"), (14, "vmap")]
everywhere = pytest.mark.parametrize(("workers", "way"), rows([(5, "shard_map")], WHERE))


@everywhere
def test_gtopk_equals_its_description(workers, way):
    reducer = GTopK(0.1, selection="exact")
    for seed, supports in enumerate(SUPPORTS):
        x = vectors(supports, workers, SIZE, seed, scale=16)
        ((_, reduced),) = run(reducer, x, way)
        expected, residuals = reference.gtopk(x, 7)
        np.testing.assert_array_equal(total(reduced, 1), expected)
        np.testing.assert_array_equal(reduced.residual, residuals)
        np.testing.assert_array_equal(expected + residuals.sum(0), x.sum(0))


@pytest.mark.slow
@pytest.mark.parametrize("workers", some((3, 6, 8), (6,)))
def test_gtopk_keeps_what_its_codec_rounds(workers):
    """Also on workers beyond a power of two, whose entries are replaced at the end."""
    x = np.random.default_rng(workers).normal(size=(workers, 1, SIZE)).astype(np.float32)
    x[..., ::10] *= 10  # all workers select these, so that sums are rounded, too
    ((_, reduced),) = run(GTopK(0.1, codec=codecs.Packed(), selection="exact"), x)
    kept = workers * reduced.mean[0].astype(np.float64) + reduced.residual.sum(0, dtype=np.float64)
    np.testing.assert_allclose(kept, x.sum((0, 1), dtype=np.float64), atol=1e-4)


@pytest.mark.slow
def test_gtopk_as_published_leaks():
    x = np.array([[6, 0], [6, 0], [2, 0], [0, 9]])
    for residuals, lost in (("global", 0), ("published", 2)):
        ((_, reduced),) = run(GTopK(0.5, residuals=residuals), x)
        assert total(reduced, 1).tolist() == [12, 0]
        assert x.sum() - 12 - reduced.residual.sum() == lost


@pytest.mark.slow
@everywhere
def test_ok_topk_equals_its_description(workers, way):
    room = 4.0 * workers  # room for everything
    reducer = OkTopk(0.1, refresh_every=2, capacity_factor=room, selection="exact")
    for seed, supports in enumerate(SUPPORTS):
        steps = [vectors(supports, workers, SIZE, seed + i) for i in range(3)]
        threshold = None
        for i, (x, reduced) in enumerate(run(reducer, np.stack(steps, 1), way)):
            old = None if i % 2 == 0 else threshold
            expected, residuals, threshold = reference.ok_topk(x.astype(np.float64), 7, old)
            np.testing.assert_array_equal(total(reduced, 1), expected)
            np.testing.assert_array_equal(reduced.residual, residuals)
            np.testing.assert_array_equal(reduced.sent, (x != residuals))
            assert not reduced.info.overflow.any()


@pytest.mark.slow
@pytest.mark.parametrize("codec", some([codecs.COO, codecs.Packed()], [codecs.Packed()]))
def test_ok_topk_keeps_and_counts_what_finds_no_room(codec):
    reducer, workers = OkTopk(0.1, capacity_factor=1.0, codec=codec), 3
    overflowed = 0
    for seed, supports in enumerate(SUPPORTS):
        steps = [vectors(supports, workers, SIZE, seed + i) for i in range(3)]
        for x, reduced in run(reducer, np.stack(steps, 1)):
            mean = reduced.mean[0].astype(np.float64)
            kept = np.rint(workers * mean * 2**8) / 2**8 + reduced.residual.sum(0, dtype=np.float64)
            np.testing.assert_allclose(kept, x.sum(0, dtype=np.float64), atol=1e-2)
            overflowed += int(reduced.info.overflow[0])
    assert overflowed > 0


@pytest.mark.slow
def test_of_too_many_sums_each_owner_delivers_its_largest():
    """k = 2 of 8 elements. An owner has room for one entry of each worker, and delivers one."""
    x = np.zeros((2, 2, 8))  # worker, step, element
    x[:, 0, :2] = 2  # the sums, 4, set the threshold; element 1 and the last have one owner
    x[0, 1, [2, 7]] = 20, 60
    x[1, 1, [1, 3]] = 40, 80
    reducer = OkTopk(0.25, capacity_factor=1.0, selection="exact")
    first, second = (reduced for _, reduced in run(reducer, x))
    assert total(first, 1).tolist() == [4, 4, 0, 0, 0, 0, 0, 0]
    assert total(second, 1).tolist() == [0, 0, 0, 80, 0, 0, 0, 60]
    left = [[0, 0, 20, 0, 0, 0, 0, 0], [0, 40, 0, 0, 0, 0, 0, 0]]
    assert second.residual.tolist() == left
    assert second.sent.tolist() == [[i == 7 for i in range(8)], [i == 3 for i in range(8)]]
    assert second.info.overflow.tolist() == [2, 2]
    assert second.state.agreed.is_stale.all()


@pytest.mark.slow
def test_ok_topk_delivers_all_sums_if_there_are_fewer_than_k():
    """The threshold is then 0, which empty slots reach, too."""
    x = np.zeros((3, 1, SIZE))
    x[0, 0, [3, 40]] = 5, 7
    x[1, 0, [3, 20]] = 2, 9
    x[2, 0, 50] = 1
    ((_, reduced),) = run(OkTopk(0.1, capacity_factor=1.0, selection="exact"), x)
    np.testing.assert_array_equal(total(reduced, 1), x.sum((0, 1)))
    assert not reduced.residual.any()
    assert not reduced.info.overflow.any()


def test_owners_hand_on_in_proportion_what_is_within_the_limit():
    quotas = lambda *counts: _quotas(jnp.int32(counts), jnp.int32(sum(counts)), 5).tolist()
    assert quotas(6, 3, 1) == [3, 1, 0]
    assert quotas(3, 3, 3, 3, 3) == [1, 1, 1, 1, 1]
    assert quotas(0, 4, 1) == [0, 4, 1]  # all fit


@pytest.mark.slow
def test_ok_topk_draws_regions_of_other_workers_anew():
    """The state comes from more or fewer workers, at a step that would have kept its regions."""
    size = 2000
    reducer = OkTopk(0.02, capacity_factor=4.0)

    def step(x, state):
        return finished(reducer, x, state)

    def spread(state, workers):
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (workers, *x.shape)), state)

    state = reducer.init(size)
    for i, workers in enumerate((4, 3)):
        x = np.rint(np.random.default_rng(i).normal(size=(workers, size)) * 100)
        x = x.astype(np.float32) * workers  # so that means are exact
        reduced = on_workers(step, workers, "vmap")(x, spread(state, workers))
        total = workers * np.asarray(reduced.mean[0])
        np.testing.assert_array_equal(total + np.asarray(reduced.residual).sum(0), x.sum(0))
        assert reduced.info.delivered[0] == np.count_nonzero(total) > 0
        assert reduced.info.overflow[0] == 0
        state = jax.tree.map(lambda leaf: leaf[0], reduced.state)
        place, regions = np.asarray(state.agreed.place), Regions(size, workers)
        assert len(set(place.tolist())) == regions.bins
        assert place.max() < workers * regions.places
        assert state.agreed.workers == workers


@pytest.mark.slow
def test_regions_balance_whatever_the_counts():
    regions = Regions(1024 * 7 - 3, 8)
    rng = np.random.default_rng(0)
    draw = jax.jit(regions.draw)
    for counts in (
        rng.integers(0, 100, 1024),
        np.where(rng.random(1024) < 0.05, 50, 0),
        (3000 / np.arange(1, 1025)).astype(int)[rng.permutation(1024)],
        np.where(np.arange(1024) == 5, 4000, 6),  # the owner of the heavy one needs no others
        np.zeros(1024, int),
    ):
        place = np.asarray(draw(jnp.asarray(counts, jnp.int32)))
        assert len(set(place.tolist())) == 1024
        assert 0 <= place.min() <= place.max() < 8 * regions.places
        loads = np.bincount(place // regions.places, weights=counts, minlength=8)
        assert loads.max() <= max(1.15 * loads.mean(), counts.max() * 1.15)
        positions = np.arange(regions.positions, dtype=np.int32)
        elements = np.asarray(regions.elements(jnp.asarray(place), jnp.asarray(positions)))
        inside = elements[elements < regions.size]
        np.testing.assert_array_equal(np.sort(inside), np.arange(regions.size))
        there = regions.positions_of(jnp.asarray(place), jnp.arange(regions.size))
        np.testing.assert_array_equal(elements[np.asarray(there)], np.arange(regions.size))
    with pytest.raises(ValueError, match="positions in the regions of 3 workers, but indices are"):
        Regions(2**31 - 1, 3)


@pytest.mark.slow
@pytest.mark.parametrize("size", some([2000, 2**16], [2000]))
def test_selected_entries_are_about_the_k_largest(size):
    k = size // 50
    take = jax.jit(lambda x: about_top_k(x, k))
    rng = np.random.default_rng(0)
    normal = rng.normal(size=size).astype(np.float32)
    few_values = np.where(normal > 0, 1, -1).astype(np.float32)  # all of them reach the threshold
    sparse = normal * (rng.random(size) < 0.004)
    for x, least, most in ((normal, 0.75 * k, 1.25 * k), (few_values, k, k), (sparse, 0, k)):
        stream = jax.tree.map(np.asarray, take(x))
        kept = stream.indices[stream.indices < size]
        assert least <= len(kept) <= most
        assert len(set(kept.tolist())) == len(kept)
        np.testing.assert_array_equal(stream.values[stream.indices < size], x[kept])
        assert not stream.values[stream.indices == size].any()
        left = np.delete(x, kept)
        assert np.abs(left).max() <= np.abs(x[kept]).min()
    assert len(kept) == np.count_nonzero(sparse)


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 3])
def test_among_equal_elements_an_odd_number_are_selected(k):
    """Fewer than k / 2 lie above the k-th largest. All others are equal to it."""
    x = np.ones(300, np.float32)
    x[200 : 200 + k // 2] = 5
    stream = jax.tree.map(np.asarray, about_top_k(jnp.asarray(x), k))
    kept = stream.indices[stream.indices < x.size]
    assert len(set(kept.tolist())) == len(kept) == k
    assert stream.values.sum() == 5 * (k // 2) + k - k // 2


def test_settings_are_checked():
    with pytest.raises(ValueError, match="refresh_every=0 must be at least 1"):
        OkTopk(0.1, refresh_every=0)
    with pytest.raises(ValueError, match=r"capacity_factor=0\.5 must be finite and at least 1"):
        OkTopk(0.1, capacity_factor=0.5)
    with pytest.raises(ValueError, match="residuals='partial' is unknown"):
        GTopK(0.1, residuals="partial")
    with pytest.raises(ValueError, match="selection='slow' is unknown"):
        GTopK(0.1, selection="slow")


def noise(workers, steps, size, scale=lambda step: 1.0):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(workers, steps, size))
    return x * np.array([scale(i) for i in range(steps)])[None, :, None]


SCALES = {
    "stationary": lambda step: 1.0,
    "zero at first": lambda step: float(step > 0),
    "grows at once": lambda step: 1.0 if step < 3 else 1e3,
    "shrinks at once": lambda step: 1.0 if step < 3 else 1e-3,
}


@pytest.mark.parametrize("name", some(SCALES, []))
def test_ok_topk_serves_all_of_the_vector_between_refreshes(name):
    workers, size = 8, 2000
    steps = noise(workers, 24, size, SCALES[name])
    counts, _ = shares_by_quarter(OkTopk(0.02), steps)
    k = 40
    late = counts[8:]
    assert np.all(late.sum(1) <= 2 * k)
    if name == "shrinks at once":  # residuals stay large, and are delivered first
        assert late.sum() > 0
        return
    assert late.sum(1).mean() >= 0.6 * k
    quarters = late.sum(0) / late.sum()
    assert np.all(np.abs(quarters - 0.25) < 0.08), quarters


@pytest.mark.slow
def test_ok_topk_follows_a_new_density():
    staged = Staged((OkTopk(0.25), OkTopk(0.01)), (4,))
    counts, outcomes = shares_by_quarter(staged, noise(4, 12, 2000))
    assert np.all(counts[6:].sum(1) <= 40)
    assert counts[6:].sum(1).mean() >= 12
    assert np.count_nonzero(counts[4:].sum(0)) == 4
    # Residuals grow. Every other step, more sums pass than there is room for, 40, and a new
    # threshold is taken. Without it most of the vector's sums would pass.
    assert all(r.info.overflow[0] <= 20 for r in outcomes[-6:])
