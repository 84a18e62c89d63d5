"""PowerSGD: factors of low rank against NumPy, and by hand; what breaks a power iteration."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference_low_rank import powersgd as reference
from steps import compiled_step
from training import stepped
from workers import by_step, finished, mesh, on_workers, some

import jaxsparse
from jaxsparse import powersgd, reshard, shard, traffic
from jaxsparse.comm import wire
from jaxsparse.reducers import Dense, Staged
from jaxsparse.reducers.matrices import Matrix
from jaxsparse.reducers.powersgd import PowerSGD, PowerState, _orthonormal

FORMS = ("alternating", "full")
forms = pytest.mark.parametrize("iteration", FORMS)


@functools.cache
def runner(reducer, workers, way):
    def step(carried, gradient):
        state, residual = carried
        x = residual + gradient
        reduced = finished(reducer, x, state)
        return (reduced.state, reduced.residual), (x, reduced)

    def run(gradients, *factors):
        factors = tuple(wire.replicated(x, "data") for x in factors)
        start = PowerState(jnp.uint32(0), factors), jnp.zeros_like(gradients[0])
        return jax.lax.scan(step, start, gradients)[1]

    return on_workers(run, workers, way)


def exchange(reducer, gradients, left, right, way="vmap"):
    """Each step's outcome. Gradients are (W, steps, d); factors are lists of (n, r)."""
    factors = [np.concatenate([factor.T.ravel() for factor in side]) for side in (left, right)]
    arrays = gradients, *(np.stack([side] * len(gradients)) for side in factors)
    return by_step(runner(reducer, len(gradients), way)(*map(jnp.float32, arrays)))


def bare(rank, iteration, matrices, rate=0.0):
    return PowerSGD(rank, iteration=iteration, min_compression_rate=rate, matrices=tuple(matrices))


def test_worked_example_of_the_published_form():
    """Two steps of two workers at rank 1, from Q = (1, 0)."""
    m = np.array([[2, 0, 1, 1, 0, 1], [0, 2, 1, 1, 2, 0]], np.float32)
    reducer = bare(1, "full", [Matrix(1, 3, 2)])
    start = [np.zeros((3, 1))], [np.array([[1.0], [0.0]])]
    (_, first), (_, second) = exchange(reducer, np.stack([m, m], axis=1), *start)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=2e-6)
    close(first.mean[0].reshape(3, 2), [[1, 0.8333333]] * 3)
    close(first.residual[0].reshape(3, 2), [[1, -0.833333], [0, 0.166667], [-1, 0.166667]])
    expected = [[1.104565, 1.041188], [1.104565, 1.041188], [0.637847, 0.601250]]
    close(second.mean[0].reshape(3, 2), expected)


def test_worked_example_of_the_alternating_form():
    """The same gradients once, from P = (1, 0, 0): row 1, then the other rows along (1, 1)."""
    m = np.array([[2, 0, 1, 1, 0, 1], [0, 2, 1, 1, 2, 0]], np.float32)
    reducer = bare(1, "alternating", [Matrix(1, 3, 2)])
    start = [np.array([[1.0], [0], [0]])], [np.zeros((2, 1))]
    outcomes = exchange(reducer, np.stack([m, 0 * m], axis=1), *start)
    (_, first), (_, second) = outcomes
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=2e-6)
    close(first.mean[0], [1, 1, 0, 0, 0, 0])
    close(first.residual, [[0, 0, 1, 1, 0, 1], [0, 0, 1, 1, 2, 0]])
    close(second.mean[0], [0, 0, 1, 1, 0.75, 0.75])
    close(second.residual, [[0, 0, 0, 0, -0.5, 0.5], [0, 0, 0, 0, 1, -1]])


MATRICES = (Matrix(1, 9, 5), Matrix(1, 1, 7), Matrix(3, 4, 6), Matrix(1, 2, 2), Matrix(1, 8, 3))
RANKS = (2, 0, 2, 0, 2)  # at rank 2; factors of the vector and of 2 x 2 would be larger


@pytest.mark.parametrize("iteration", some(FORMS, ("alternating",)))
@pytest.mark.parametrize("workers", some((3, 8), (3,)))
@pytest.mark.parametrize("way", some(("shard_map", "vmap"), ("vmap",)))
def test_equal_to_the_reference(iteration, workers, way):
    """Matrices, a stack, and two that travel whole. Sums are conserved, and factors replicated."""
    steps, size = 4, sum(m.size for m in MATRICES)
    reducer = bare(2, iteration, MATRICES, rate=1.0)
    assert tuple(map(reducer.rank_of, MATRICES)) == RANKS
    rng = np.random.default_rng(workers)
    factors = {
        i: [[rng.normal(size=(length, 2)) for _ in range(m.stack)] for length in m[1:]]
        for i, (m, rank) in enumerate(zip(MATRICES, RANKS))
        if rank
    }
    left, right = ([x for pair in factors.values() for x in pair[side]] for side in (0, 1))
    g = rng.normal(size=(workers, steps, size))
    outcomes = exchange(reducer, g, left, right, way)
    means = np.stack([np.asarray(reduced.mean[0]) for _, reduced in outcomes])
    residuals = np.stack([np.asarray(reduced.residual) for _, reduced in outcomes])
    near = functools.partial(np.testing.assert_allclose, atol=1e-4)
    start = 0
    for i, m in enumerate(MATRICES):
        for layer in range(m.stack):
            part = slice(start, start := start + m.rows * m.columns)
            if not RANKS[i]:
                near(means[:, part], g[..., part].mean(0), atol=1e-6)
                assert not residuals[..., part].any()
                continue
            gradients = g[..., part].swapaxes(0, 1).reshape(steps, workers, m.rows, m.columns)
            p, q = (factors[i][side][layer] for side in (0, 1))
            expected = reference(gradients, p, q, iteration)
            for mean, residual, (e_mean, e_residual) in zip(means, residuals, expected):
                near(mean[part], e_mean.ravel())
                near(residual[:, part], e_residual.reshape(workers, -1))
    for x, reduced in outcomes:
        for one in (reduced.mean, *reduced.state.factors):
            np.testing.assert_array_equal(one, np.broadcast_to(one[:1], one.shape))
        kept = workers * np.asarray(reduced.mean[0]) + np.asarray(reduced.residual).sum(0)
        near(np.asarray(x).sum(0), kept, atol=2e-5)


WIDE, TALL = Matrix(1, 4, 7), Matrix(2, 7, 4)


@pytest.mark.parametrize("matrix", some((WIDE, TALL), (WIDE,)), ids=str)
@forms
def test_full_rank_is_the_dense_mean(iteration, matrix):
    """The published form delivers everything. Half an iteration does from the shorter side."""
    g = np.random.default_rng(0).normal(size=(3, 2, matrix.size))
    rank = min(matrix.rows, matrix.columns)
    rng = np.random.default_rng(1)
    left, right = ([rng.normal(size=(n, rank)) for _ in range(matrix.stack)] for n in matrix[1:])
    outcomes = exchange(bare(9, iteration, [matrix]), g, left, right)  # a rank above both sides
    exact = [0, 1] if iteration == "full" else [0] if matrix.rows == 4 else [1]
    for i, (x, reduced) in enumerate(outcomes):
        mean = np.asarray(x).mean(0)
        error = np.abs(np.asarray(reduced.mean[0]) - mean).max()
        assert (error < 2e-6) == (i in exact)


def noise(stack, rank, length):
    values = np.random.default_rng(9).uniform(-1, 1, (stack, rank, length))
    return jnp.asarray(values, jnp.float32)


def test_an_orthonormal_basis_of_anything():
    """Zeros, equal vectors, tiny and huge ones, and as many as there are dimensions."""
    rng = np.random.default_rng(0)
    run = jax.jit(_orthonormal)
    good = rng.normal(size=(5, 64))
    vectors = np.stack(
        [
            good,
            np.zeros((5, 64)),
            np.ones((5, 64)),
            good * 1e-35,
            good * 1e37,
            good * 10.0 ** np.array([[0], [-30], [20], [-9], [5]]),
            np.where(np.arange(5)[:, None] == 2, 0, good),
            good + 1e4 * good[:1],
        ]
    )
    with np.errstate(over="raise"):
        basis = np.asarray(run(jnp.asarray(vectors, jnp.float32), noise(8, 5, 64)), np.float64)
    np.testing.assert_allclose(
        basis @ basis.transpose(0, 2, 1), np.broadcast_to(np.eye(5), (8, 5, 5)), atol=1e-6
    )
    # The span of good vectors stays, in their order.
    for i in (0, 3, 4, 5):
        rest = good.T - basis[i].T @ (basis[i] @ good.T)
        np.testing.assert_allclose(rest, 0, atol=1e-4)
        assert abs(basis[i, 0] @ good[0]) == pytest.approx(np.linalg.norm(good[0]), rel=1e-5)
    for n in (1, 2, 3):
        square = np.asarray(run(jnp.ones((1, n, n)), noise(1, n, n)))[0]
        np.testing.assert_allclose(square @ square.T, np.eye(n), atol=1e-5)


SHAPES = {
    "layers": {"w": (3, 24, 40)},
    "kernel": (40, 36),
    "small": (5, 6),
}


def params(dtype=jnp.float32):
    is_shape = lambda x: isinstance(x, tuple)
    return jax.tree.map(lambda shape: jnp.zeros(shape, dtype), SHAPES, is_leaf=is_shape)


@functools.cache
def stepper(iteration):
    low = PowerSGD(2, iteration=iteration, stacked="layers")
    tx = jaxsparse.exchange(Staged((Dense(), low), (1,)), is_dense=lambda *_: False)
    return stepped(tx, 3), shard(tx.init(params()), 3)


def draws(seed):
    rng = np.random.default_rng(seed)
    draw = lambda x: jnp.asarray(rng.normal(size=(3, *x.shape)), x.dtype)
    return jax.tree.map(draw, params())


def check_finite(tree):
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(tree))


@pytest.mark.slow
@pytest.mark.parametrize("iteration", some(FORMS, ("alternating",)))
def test_a_dense_start_zeros_then_a_nan_then_an_overflow(iteration):
    run, state = stepper(iteration)
    first, state = run(draws(0), state)
    mean = jax.tree.map(lambda x: np.asarray(x).mean(0), draws(0))
    near = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6)
    jax.tree.map(near, first, mean)
    assert not any(np.any(x) for x in jax.tree.leaves(state.residual))

    # Without gradients the factors become zeros, from which a power iteration would not come back.
    zeros = jax.tree.map(jnp.zeros_like, draws(0))
    for _ in range(3):
        updates, state = run(zeros, state)
    assert not any(np.any(x) for x in jax.tree.leaves(updates))
    assert not all(np.any(x) for x in state.reducers["0_Dense-PowerSGD"].reducer.factors)
    updates, state = run(draws(1), state)
    check_finite((updates, state))
    for name, rank in (("kernel", 2), ("small", 5)):
        matrix = np.asarray(updates[name]).reshape(-1, SHAPES[name][-1])
        assert np.linalg.matrix_rank(matrix, tol=1e-4) == rank
    each = np.asarray(updates["layers"]["w"])
    assert [np.linalg.matrix_rank(layer, tol=1e-4) for layer in each] == [2, 2, 2]

    broken = draws(2)
    broken["kernel"] = broken["kernel"].at[1, 3, 4].set(jnp.nan)
    updates, after = run(broken, state)
    assert not any(np.any(x) for x in jax.tree.leaves(updates))
    assert after.skipped == 1
    for name, left in after.residual.items():
        g = np.nan_to_num(dict(zip(state.residual, jax.tree.leaves(broken)))[name])
        waits = (state.residual[name].value + g).sum(0)
        np.testing.assert_allclose(left.value.sum(0), waits, rtol=1e-4, atol=1e-4)

    # The sum of this matrix's factors overflows: it waits, and the others go on.
    large = draws(3) | {"kernel": jnp.full((3, 40, 36), 2e38)}
    updates, state = run(large, after)
    check_finite((updates, state))
    assert not np.any(updates["kernel"])
    assert np.any(updates["layers"]["w"])
    check_finite(run(draws(4), state))


def test_the_state_of_other_numbers_of_workers():
    _, state = stepper("full")
    other = reshard(state, 5)
    jax.tree.map(np.testing.assert_array_equal, other.reducers, state.reducers)


@pytest.mark.slow
@forms
def test_words_of_a_step(iteration):
    """r (n + m)/2 words a matrix on average. Whole matrices travel in the same message."""
    shapes = {"kernel": (300, 201), "conv": (3, 3, 64, 16), "few": (128, 8), "bias": (201,)}
    left, right = 4 * (300 + 576), 4 * (201 + 16)
    whole, other = 128 * 8, 201 + 1  # the latter in the dense leaves' message, with a flag
    moved = traffic.wire_bytes(compiled_step(powersgd(4, iteration=iteration), mesh(5), shapes))
    assert {c.op for c in moved.collectives} == {"all-reduce"}
    assert {c.group_size for c in moved.collectives} == {5}
    words = lambda bytes: sorted(c.payload_bytes / 4 for c in bytes.collectives)
    if iteration == "full":
        assert words(moved) == [other, right + whole, left]
        return
    (conditional,) = moved.conditionals
    assert [words(branch) for branch in conditional.branches] == [[left + whole], [right + whole]]
    assert words(moved) == [other, left + whole]  # the dearer branch


def test_which_matrices_are_compressed():
    for rank, rate, matrix, expected in (
        (4, 2, Matrix(1, 64, 64), 4),
        (8, 2, Matrix(1, 32, 32), 0),  # 8 (32 + 32) 2 = 32 * 32 is not below
        (7, 2, Matrix(1, 32, 32), 7),
        (100, 0.8, Matrix(3, 6, 20), 0),
        (100, 0.7, Matrix(3, 6, 20), 6),
        (1, 1, Matrix(1, 1, 1000), 0),
        (1, 0, Matrix(1, 1, 1), 1),
    ):
        assert (
            PowerSGD(rank, iteration="full", min_compression_rate=rate).rank_of(matrix) == expected
        )


def test_without_factors_a_state_has_no_empty_arrays():
    """Orbax would refuse to save them."""
    tx = powersgd(4, axis_name=None, is_dense=lambda path, shape: False)
    gradient = jnp.ones((3, 2))
    state = tx.init(gradient)
    assert all(x.size for x in jax.tree.leaves(state))
    updates, after = jax.jit(tx.update)(gradient, state)
    np.testing.assert_array_equal(updates, gradient)
    assert jax.tree.structure(after) == jax.tree.structure(state)


def test_errors_name_the_setting():
    for settings, message in (
        ({"rank": 0}, "rank=0 must be at least 1"),
        ({"rank": 1.5}, "rank=1.5 must be an int"),
        ({"rank": 1, "iteration": "half"}, "iteration='half' is unknown: use 'alternating'"),
        ({"rank": 1, "min_compression_rate": -1}, "min_compression_rate=-1 must be at least 0"),
        ({"rank": 1, "min_compression_rate": math.inf}, "min_compression_rate=inf must be"),
    ):
        with pytest.raises(ValueError, match=message):
            powersgd(**settings, axis_name=None).init({"w": jnp.zeros((64, 64))})


@pytest.mark.parametrize("shape", [(20, 4, 5), *some([(20, 20)], [])], ids=str)
def test_stacked_layers_are_delivered_as_leaf_by_leaf(shape):
    """Each layer's gradient has rank 1, so that one exchange delivers all of it."""
    rng = np.random.default_rng(3)
    outer = [np.outer(*rng.normal(size=(2, 20))).reshape(shape) for _ in range(4)]
    grads = {"layers": {"kernel": jnp.asarray(np.stack(outer), jnp.float32)}}
    for stacked, is_seen in (({}, True), ({"stacked": "kernel"}, True), ({"stacked": None}, False)):
        tx = powersgd(1, iteration="full", min_compression_rate=0.0, axis_name=None, **stacked)
        updates, _ = jax.jit(tx.update)(grads, tx.init(grads))
        error = np.abs(updates["layers"]["kernel"] - grads["layers"]["kernel"]).max()
        assert (error < 1e-4) == is_seen, (stacked, error)
