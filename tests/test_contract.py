"""What every reducer promises; a new one joins by a line in CASES."""

import dataclasses
import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from recorders import record
from workers import MESH_SIZES, few, mesh, on_workers, some

from jaxsparse import (
    BlockGatherReducer,
    DenseReducer,
    DragonnReducer,
    GTopKReducer,
    OkTopkReducer,
    OmniReduceReducer,
    PerWorker,
    QuantizedReducer,
    RandomKReducer,
    S2Reducer,
    SketchedReducer,
    SparCMLReducer,
    SparDLReducer,
    TopKReducer,
    TrueTopKReducer,
    codecs,
    data_parallel,
    error_feedback,
    local,
    quantize,
    shard,
)
from jaxsparse.collectives import wire

WAYS_TO_RUN = [(3, "vmap"), (3, "shard_map_unchecked"), (8, "vmap")]
SIZE = 601  # prime: no worker count, block or column count divides it
STEPS = 3


class Case(NamedTuple):
    reducer: object  # with a small budget for SIZE elements
    full: object  # with budget for everything


CASES = {
    "dense": Case(DenseReducer(), DenseReducer()),
    "true_top_k": Case(TrueTopKReducer(k=19), TrueTopKReducer(k=SIZE)),
    "sketched": Case(SketchedReducer(k=11, cols=53), SketchedReducer(k=SIZE, cols=SIZE)),
    "sketched_even_rows": Case(
        SketchedReducer(k=11, cols=53, rows=4, seed=3), SketchedReducer(k=SIZE, cols=1)
    ),
    "top_k": Case(TopKReducer(0.03), TopKReducer(1.0)),
    "top_k_packed": Case(TopKReducer(0.03, codecs.Packed()), TopKReducer(1.0, codecs.Packed())),
    "gtopk": Case(GTopKReducer(0.03), GTopKReducer(1.0)),
    "ok_topk": Case(OkTopkReducer(0.03), OkTopkReducer(1.0)),
    "sparcml": Case(
        SparCMLReducer(k=2, bucket_size=64),
        SparCMLReducer(k=64, bucket_size=64, capacity_factor=None),
    ),
    "sparcml_split": Case(
        SparCMLReducer(2, 64, "split_allgather", capacity_factor=1.0, union_factor=1.0),
        SparCMLReducer(64, 64, "split_allgather", capacity_factor=None),
    ),
    "sparcml_nearest": Case(
        SparCMLReducer(k=2, bucket_size=64, bits=4, rounding="nearest"),
        SparCMLReducer(k=64, bucket_size=64, bits=4, rounding="nearest"),
    ),
    "spardl": Case(SparDLReducer(0.03), SparDLReducer(1.0)),
    "spardl_packed": Case(
        SparDLReducer(0.03, codec=codecs.Packed()), SparDLReducer(1.0, codec=codecs.Packed())
    ),
    "heavymix": Case(
        SketchedReducer(k=31, cols=53, oversampling=1, selection="heavymix"),
        SketchedReducer(k=SIZE, cols=7, oversampling=1, selection="heavymix"),
    ),
    "s2": Case(
        S2Reducer(8, 0.1, rows=3, union_density=0.15, sketch_ratio=0.4),
        S2Reducer(8, None, union_density=1.0, sketch_ratio=1.0),
    ),
    "omni_reduce": Case(OmniReduceReducer(8, 0.1), OmniReduceReducer(8, 1.0)),
    "omni_reduce_little_room": Case(
        OmniReduceReducer(8, union_density=0.1), OmniReduceReducer(8, union_density=1.0)
    ),
    "block_gather": Case(BlockGatherReducer(8, 0.1, 0.05), BlockGatherReducer(8, 1.0)),
    "dragonn": Case(DragonnReducer(0.03), DragonnReducer(1.0)),
    "dragonn_slot_max": Case(DragonnReducer(0.03, "slot_max"), DragonnReducer(1.0, "slot_max")),
    "dgc": Case(TopKReducer(0.03, selection="sampled"), TopKReducer(1.0, selection="sampled")),
    "ms_topk": Case(
        TopKReducer(0.03, selection="bisection"), TopKReducer(1.0, selection="bisection")
    ),
    "random_k": Case(RandomKReducer(0.03), RandomKReducer(1.0)),
    "qsgd": Case(QuantizedReducer(), QuantizedReducer()),
    "qsgd_nearest": Case(
        QuantizedReducer(quantize.QSGD(4, 64), "nearest"),
        QuantizedReducer(quantize.QSGD(8, 64), "nearest"),
    ),
    "sign": Case(
        QuantizedReducer(quantize.Sign(64), "nearest"),
        QuantizedReducer(quantize.Sign(64), "nearest"),
    ),
}
VARIANTS = {  # of cases that always run: those that differ by what a reducer shares with others
    "sketched_even_rows",
    "heavymix",
    "top_k_packed",
    "sparcml_split",
    "spardl_packed",
    "omni_reduce_little_room",
    "dragonn_slot_max",
    "ms_topk",
    "sign",
}


# One for each way to select and to exchange.
REPRESENTATIVES = ("dense", "top_k", "sketched", "spardl", "sparcml", "omni_reduce", "qsgd")


def each(names, usual=None, slow=None):
    """One test for each; without `usual` names for all but the variants, which are slow."""
    usual = [name for name in names if name not in VARIANTS] if usual is None else usual
    return pytest.mark.parametrize("name", some(names, usual, slow))


reducers = each(CASES)
# For what the layers around a reducer do, or its collectives alone, these are enough by default.
representatives = each(CASES, REPRESENTATIVES, slow=("ok_topk", "s2"))
few_representatives = each(CASES, REPRESENTATIVES, slow=())


def gradients(workers, steps=STEPS, size=SIZE):
    """Heavy-tailed integers times W: their sums, and means, are exact in float32.

    (But for the W whose reciprocal rounds badly, such as 7: XLA multiplies by the reciprocal.)
    """
    rng = np.random.default_rng(workers)
    heavy = np.round(rng.standard_t(2, (steps, workers, size)) * 3).clip(-500, 500)
    return (heavy * workers).astype(np.float32)


@functools.cache
def runner(reducer, workers, way, size=SIZE):
    """Feeds each step's residual back; what went in and came out, stacked by worker and step."""

    def step(carried, gradient):
        state, residual = carried
        x = residual + gradient
        reduced = reducer(x, state, axis_name="data")
        if way == "shard_map":
            for leaf in jax.tree.leaves((reduced.mean, reduced.info)):
                assert not wire.is_varying(leaf, "data"), "must be typed replicated"
        return (reduced.state, reduced.residual), (x, reduced)

    def run(gradients):  # (steps, d)
        per_worker = lambda leaf: isinstance(leaf, PerWorker)
        state = jax.tree.map(
            lambda leaf: wire.varying(leaf, "data") if per_worker(leaf) else leaf,
            reducer.init(size),
            is_leaf=per_worker,
        )
        start = state, jnp.zeros_like(gradients[0])
        return jax.lax.scan(step, start, gradients)[1]

    return on_workers(run, workers, way, has_sketch=has_sketch(reducer))


def run(name, workers, way="shard_map", full=False, steps=STEPS):
    case = CASES[name]
    stacked = jnp.asarray(gradients(workers, steps).swapaxes(0, 1))
    return runner(case.full if full else case.reducer, workers, way)(stacked)


def by_step(results):
    steps = jax.tree.leaves(results)[0].shape[1]
    return [jax.tree.map(lambda leaf, i=i: leaf[:, i], results) for i in range(steps)]


def rounds(reducer):
    """Whether values are rounded on the wire."""
    codec = getattr(reducer, "codec", codecs.COO)
    return not codec.is_exact or quantizes(reducer)


def quantizes(reducer):
    return isinstance(reducer, QuantizedReducer) or getattr(reducer, "bits", None) is not None


def has_sketch(reducer):
    return isinstance(reducer, SketchedReducer | S2Reducer)


def check_laws(reducer, results, workers):
    for x, reduced in by_step(results):
        mean = np.asarray(reduced.mean)
        np.testing.assert_array_equal(mean, np.broadcast_to(mean[0], mean.shape))
        assert reduced.mean.dtype == reduced.residual.dtype == jnp.float32
        assert reduced.sent is None or reduced.sent.dtype == jnp.bool_
        if reducer.laws.conserves:
            kept = workers * mean[0].astype(np.float64)
            kept += np.asarray(reduced.residual, np.float64).sum(0)
            if rounds(reducer):  # what is delivered are no multiples of W, and means inexact
                np.testing.assert_allclose(np.asarray(x, np.float64).sum(0), kept, atol=1e-2)
            else:
                np.testing.assert_array_equal(np.asarray(x, np.float64).sum(0), kept)
        assert np.all(np.asarray(reduced.info.delivered) == reduced.info.delivered[0])


@reducers
@pytest.mark.parametrize("workers", few(MESH_SIZES, (3,)))
def test_nothing_is_lost_and_replicas_agree(name, workers):
    results = run(name, workers)
    check_laws(CASES[name].reducer, results, workers)
    assert all(np.any(reduced.mean) for _, reduced in by_step(results))


@reducers
@pytest.mark.parametrize("workers", few((64,), ()))
def test_nothing_is_lost_among_simulated_workers(name, workers):
    check_laws(CASES[name].reducer, run(name, workers, "vmap"), workers)


@reducers
@pytest.mark.parametrize("where", few(WAYS_TO_RUN, []), ids=str)  # CI: see test_processes.py
def test_the_ways_to_run_are_equal(name, where):
    workers, way = where
    one, other = run(name, workers, way), run(name, workers, "shard_map")
    equal = np.testing.assert_array_equal
    if quantizes(CASES[name].reducer):
        # XLA rounds level * scale, or does not, as it fuses; later steps amplify that.
        one, other = by_step(one)[0], by_step(other)[0]
        equal = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-3)
    jax.tree.map(equal, one, other)


@representatives
def test_no_axis_is_one_worker(name):
    g = gradients(1, steps=1)[0, 0]
    reducer = CASES[name].reducer
    with record() as messages:
        reduced = jax.jit(functools.partial(reducer, axis_name=None))(g, reducer.init(SIZE))
    assert messages == []
    mean, residual = np.asarray(reduced.mean), np.asarray(reduced.residual)
    np.testing.assert_array_equal(mean + residual, g)


@few_representatives
@pytest.mark.parametrize("workers", few((3, 8), (3,)))
def test_full_budget_is_the_dense_mean(name, workers):
    if not CASES[name].full.laws.dense_at_full_budget:
        pytest.skip("not promised")
    ((x, reduced),) = by_step(run(name, workers, full=True, steps=1))
    np.testing.assert_array_equal(reduced.mean[0], np.asarray(x).mean(0))
    # Where the workers' values cancel, a reducer may keep them: no less is delivered for it.
    np.testing.assert_array_equal(np.asarray(reduced.residual).sum(0), np.zeros(SIZE))


@few_representatives
@pytest.mark.parametrize("size", few((1, 2), (2,)))
def test_tiny_vectors(name, size):
    reducer = CASES[name].reducer
    fields = {f: 1 for f in ("k", "cols", "rows", "oversampling") if hasattr(reducer, f)}
    reducer = dataclasses.replace(reducer, **fields)
    g = np.arange(1.0, 1 + 3 * size, dtype=np.float32).reshape(3, 1, size) * 3
    check_laws(reducer, runner(reducer, 3, "vmap", size)(jnp.asarray(g)), 3)


@pytest.mark.thorough
@each([name for name, case in CASES.items() if case.reducer.laws.conserves])
def test_rounding_error_only_on_real_numbers(name):
    workers = 7
    x = np.random.default_rng(0).normal(size=(workers, 1, SIZE)).astype(np.float32)
    ((x, reduced),) = by_step(runner(CASES[name].reducer, workers, "vmap")(jnp.asarray(x)))
    total = workers * np.asarray(reduced.mean[0], np.float64) + np.asarray(reduced.residual).sum(0)
    np.testing.assert_allclose(np.asarray(x, np.float64).sum(0), total, atol=3e-6)


def _step_and_state(name, momentum):
    tx = optax.chain(
        error_feedback(
            CASES[name].reducer, momentum=momentum, is_dense=lambda path, _: "bias" in path
        ),
        optax.sgd(0.1),
    )
    params = {
        "kernel": jnp.zeros((25, 24), jnp.bfloat16),
        "scale": jnp.ones(()),
        "bias": jnp.zeros(3, jnp.float16),
    }

    @chex.assert_max_traces(1)
    def step(state, batch):
        params, opt_state = state

        def loss(p):
            return batch.mean() * sum(x.astype(jnp.float32).sum() for x in jax.tree.leaves(p))

        updates, opt_state = tx.update(jax.grad(loss)(local(params)), opt_state, params, extra=1)
        return optax.apply_updates(params, updates), opt_state

    return step, (params, tx.init(params))


@functools.cache
def _compiled_step(name, momentum):
    chex.clear_trace_counter()
    step, state = _step_and_state(name, momentum)
    return data_parallel(step, mesh(3)), shard(state, mesh(3))


@representatives
@pytest.mark.parametrize("momentum", few((None, 0.9), (0.9,)))
def test_the_transformation_keeps_types_and_traces_once(name, momentum):
    run, state = _compiled_step(name, momentum)
    structure, types = jax.tree.structure(state), list(map(jax.typeof, jax.tree.leaves(state)))
    for i in range(3):
        state = run(state, jnp.full(6, 1.0 + i, jnp.float32))
    assert jax.tree.structure(state) == structure
    assert list(map(jax.typeof, jax.tree.leaves(state))) == types


@representatives
def test_a_non_finite_gradient_on_one_worker_skips_the_step_on_all(name):
    run, state = _compiled_step(name, 0.9)
    before = run(state, jnp.arange(1.0, 7.0))
    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        after = run(before, jnp.arange(1.0, 7.0).at[3].set(bad))
        feedback = after[1][0]
        assert feedback.skipped == 1
        expected = before[1][0]._replace(skipped=feedback.skipped)
        jax.tree.map(np.testing.assert_array_equal, (after[0], feedback), (before[0], expected))
    healthy = run(after, jnp.arange(1.0, 7.0))
    assert any(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (healthy[0], after[0]))))


@reducers
def test_init_marks_what_differs_between_workers(name):
    _, (_, state) = _step_and_state(name, 0.9)
    assert all(isinstance(leaf, PerWorker) for leaf in state[0].residual)
    assert state[0].residual[0].value.shape == (1, 601)
