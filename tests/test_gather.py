"""Leaves that are cut over workers, gathered in few bits: against NumPy, its laws and its bytes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_gather as twin
from jax.sharding import PartitionSpec as P
from reference_formats import rounded
from workers import WAYS, mesh, on_workers, rows, some

import jaxsparse
from jaxsparse.comm.shards import Residual, rows_of, whole_of
from jaxsparse.quantize import QSGD, Format

GROUP = 16
INT8, INT4 = Format("int8", GROUP), Format("int4", GROUP)
FORMATS = {
    "plain": (None, None),
    "int8": (INT8, INT8),
    "int4": (INT8, INT4),
    "fp8": (Format("float8_e4m3fn", GROUP), Format("sign", GROUP)),
}
# Number of workers, the shape of a whole leaf, and the dimension that is cut.
LEAVES = [(1, (6, 5), 0), (3, (2, 9, 7), 1), (5, (35,), 0), (8, (3, 11, 16), 2)]


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def rule(spec):
    if spec is None:
        return lambda x: x
    return lambda x: rounded(x, spec.name, spec.group_size, "bfloat16")[0]


def run(whole, given, axis, way="vmap", *, residuals=None, **settings):
    """What each worker sees of the leaf, its gradient and its residual."""
    workers = len(given)

    def one(shard, gradient, residual):
        def loss(shard, residual):
            seen = jaxsparse.gather(shard, axis, residual=residual, **settings)
            return jnp.sum(seen * gradient), seen

        of = (0,) if residual is None else (0, 1)
        found, seen = jax.grad(loss, of, has_aux=True)(shard, residual)
        return seen, *found

    shards = rows_of(whole, axis, workers)
    return on_workers(one, workers, way)(shards, given, residuals)


@functools.cache
def case(workers, shape, axis):
    return normal(*shape), normal(workers, *shape, seed=1)


@pytest.mark.parametrize("name", some(FORMATS, ["int4"]))
@pytest.mark.parametrize(("workers", "shape", "axis"), rows(LEAVES[1:2], [LEAVES[0], *LEAVES[2:]]))
def test_gather_equals_its_twin(name, workers, shape, axis):
    weights, gradients = FORMATS[name]
    whole, given = case(workers, shape, axis)
    seen, mean = run(whole, given, axis, weights=weights, gradients=gradients)
    rounds = workers > 1  # a single worker sends nothing
    want = twin.gathered(whole, axis, workers, rule(weights if rounds else None))
    for worker in seen:
        np.testing.assert_array_equal(worker, seen[0])
    np.testing.assert_allclose(seen[0], want, rtol=2e-6, atol=1e-6)
    shares, _ = twin.averaged(given, axis, rule(gradients))
    np.testing.assert_allclose(mean, shares, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", some(WAYS, ["shard_map"]))
def test_all_ways_agree_and_residuals_hold_what_was_not_sent(way):
    workers, shape, axis = 3, (2, 9, 7), 1
    whole, given = case(workers, shape, axis)
    before = normal(workers, *shape, seed=2)
    residuals = Residual(jnp.asarray(before), jnp.ones(workers))
    seen, mean, left = run(
        whole, given, axis, way, residuals=residuals, weights=INT8, gradients=INT4
    )
    shares, lost = twin.averaged(given + before, axis, rule(INT4))
    np.testing.assert_allclose(mean, shares, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(left.values, lost, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(seen[0], seen[2])


@pytest.mark.parametrize(
    ("dtype", "gradients"),
    rows(
        [("float8_e4m3fn", QSGD(4, GROUP))],
        [("float32", Format("sign", GROUP)), ("bfloat16", INT4), ("float16", INT4)],
    ),
)
@pytest.mark.parametrize(("workers", "shape", "axis"), rows(LEAVES[1:2], LEAVES[2:3]))
def test_what_arrived_and_residuals_are_all_gradients(dtype, gradients, workers, shape, axis):
    whole, given = case(workers, shape, axis)
    given = given * 1e-4  # below the least number of 8 bits
    old = jax.vmap(Residual.updated)(
        jax.vmap(lambda _: Residual.zeros(shape, dtype))(jnp.arange(workers)),
        normal(workers, *shape, seed=2) * 1e-4,
    )
    _, mean, new = run(
        whole, given, axis, residuals=old, gradients=gradients, key=jax.random.key(3)
    )
    assert new.values.dtype == dtype
    held = jax.vmap(lambda r: r.whole)
    before = given.sum(0) + np.asarray(held(old)).sum(0)
    after = np.asarray(whole_of(mean * workers, axis)) + np.asarray(held(new)).sum(0)
    rounding = workers * float(np.abs(held(new)).max()) * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(after, before, atol=rounding + 1e-9)


@pytest.mark.parametrize("dtype", some(["bfloat16", "float16"], ["float16"]))
@pytest.mark.parametrize("name", ["plain", "int8"])  # int4 has ties
def test_parameters_of_16_bits(dtype, name):
    weights, gradients = FORMATS[name]
    workers, shape, axis = LEAVES[1]
    whole, given = (jnp.asarray(x, dtype) for x in case(workers, shape, axis))
    seen, mean = run(whole, given, axis, weights=weights, gradients=gradients)
    assert seen.dtype == mean.dtype == dtype
    wide = np.asarray(whole, np.float32), np.asarray(given, np.float32)
    want = twin.gathered(wide[0], axis, workers, rule(weights))
    shares, _ = twin.averaged(wide[1], axis, rule(gradients))
    np.testing.assert_allclose(np.float32(seen[0]), want, rtol=1e-2, atol=1e-3)
    np.testing.assert_allclose(np.float32(mean), shares, rtol=2e-2, atol=2e-2)


def test_stochastic_draws_are_each_workers_own_and_unbiased():
    workers, shape, axis = 3, (9, 64), 0
    whole, given = case(workers, shape, axis)
    given = np.broadcast_to(given[:1], given.shape)
    settings = {"gradients": QSGD(2, GROUP), "weights": QSGD(8, GROUP)}
    means = jax.jit(lambda key: run(whole, given, axis, key=key, **settings)[1])
    found = np.stack([means(jax.random.key(i)) for i in range(64)])
    wanted = np.stack(twin.shards_of(given[0], axis, workers))
    assert np.abs(found.mean(0) - wanted).mean() < np.abs(found[0] - wanted).mean() / 5
    # Two others round the same values: with one draw, a mean would be one of few.
    scale = np.abs(given[0]).reshape(-1, GROUP).max(1)
    levels = (found[0].reshape(-1, GROUP) - wanted.reshape(-1, GROUP) / workers) * workers
    assert (np.round(levels / scale[:, None]) % 2 == 1).any()
    np.testing.assert_array_equal(found[0], means(jax.random.key(0)))
    assert not np.array_equal(found[0], found[1])


def compiled(loss, shapes, specs, workers=8):
    """The gradient of a loss of one worker."""
    body = lambda *given: jax.grad(loss)(*given)
    mapped = jax.shard_map(
        body, mesh=mesh(workers), in_specs=specs, out_specs=specs[0], check_vma=False
    )
    return jax.jit(mapped).lower(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).compile()


@pytest.mark.slow
@pytest.mark.parametrize("workers", some([3, 8], [3]))
@pytest.mark.parametrize(
    ("weights", "gradients"),
    rows(
        [(INT8, QSGD(4, GROUP))],
        [(None, None), (INT8, INT4), (INT4, None)],
    ),
)
def test_bytes_follow_the_formats(workers, weights, gradients):
    shape = (5, 3 * workers)
    settings = {"weights": weights, "gradients": gradients, "key": jax.random.key(0)}
    loss = lambda x: jnp.sum(jaxsparse.gather(x, 1, **settings) ** 3)
    found = jaxsparse.wire_bytes(compiled(loss, [shape], (P(None, "data"),), workers))
    size = 15
    words = [size if spec is None else spec.words(size) for spec in (weights, gradients)]
    assert found.received == (workers - 1) * 4 * sum(words)


def test_a_tied_leaf_is_sent_once():
    def loss(x, tokens):
        whole = jaxsparse.gather(x, weights=INT8, gradients=INT4)
        return jnp.sum(jnp.tanh(whole[tokens] @ whole.T) ** 2)

    tokens = lambda x: loss(x, jnp.arange(4))
    once = lambda x: jnp.sum(jaxsparse.gather(x, weights=INT8, gradients=INT4) ** 3)
    programs = [compiled(f, [(64, 4)], (P("data"),)) for f in (tokens, once)]
    twice, single = (jaxsparse.wire_bytes(program).received for program in programs)
    assert twice == single > 0


@pytest.mark.slow
@pytest.mark.parametrize("way", some(["vmap", "shard_map"], ["shard_map"]))
def test_layers_of_a_scan_gather_where_they_run(way):
    workers, layers, width = 3, 4, 6
    stack, x = normal(layers, width, width), normal(workers, 2, width, seed=1)
    get = lambda w: jaxsparse.gather(w, weights=INT8, gradients=INT8)

    def scanned(shards, x):
        layer = lambda x, w: (jnp.tanh(x @ get(w)), None)
        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, shards)[0] ** 2)

    def unrolled(shards, x):
        for w in shards:
            x = jnp.tanh(x @ get(w))
        return jnp.sum(x**2)

    shards = rows_of(stack, 1, workers)
    found, wanted = (on_workers(jax.grad(f), workers, way)(shards, x) for f in (scanned, unrolled))
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_rematerialised_layer_is_gathered_again_and_held_no_longer():
    layers, width = 8, 128
    get = lambda w: jaxsparse.gather(w, weights=INT8, gradients=INT8)

    def loss(shards, x, wrap):
        layer = lambda x, w: (jnp.tanh(x @ get(w)), None)
        return jnp.sum(jax.lax.scan(wrap(layer), x, shards)[0] ** 2)

    shapes, specs = [(layers, width, width), (16, width)], (P(None, "data"), P("data"))
    kept, again = (
        compiled(functools.partial(loss, wrap=wrap), shapes, specs)
        for wrap in (lambda f: f, jax.checkpoint)
    )
    message = 7 * 4 * INT8.words(width * width // 8)
    assert jaxsparse.wire_bytes(kept).received == 2 * layers * message
    assert jaxsparse.wire_bytes(again).received == 3 * layers * message
    all_layers = 4 * layers * width * width
    temporaries = [program.memory_analysis().temp_size_in_bytes for program in (kept, again)]
    assert temporaries[1] < temporaries[0] - all_layers / 2


def test_gradients_that_are_not_finite_arrive_so_and_leave_no_residual():
    workers, shape, axis = 3, (6, 16), 0
    whole, given = case(workers, shape, axis)
    given = np.array(given)
    given[1, 0, 0] = np.inf
    residuals = jax.vmap(lambda _: Residual.zeros(shape, "float8_e5m2"))(jnp.arange(workers))
    _, mean, left = run(whole, given, axis, residuals=residuals, gradients=INT4)
    assert not np.isfinite(mean[0]).all()
    assert np.isfinite(mean[1:]).all()
    assert np.isfinite(left.values.astype(jnp.float32)).all()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x: jaxsparse.gather(x, gradients=QSGD(4)), "has no key: give key=jax.random"),
        (lambda x: jaxsparse.gather(x, weights="int9"), "'int9' is unknown: use one of int8"),
        (lambda x: jaxsparse.gather(x, weights=8), "weights=8 is no quantizer: use weights="),
        (lambda x: jaxsparse.gather(x, 1), "axis=1 is no dimension of a shard of shape"),
        (lambda x: jaxsparse.gather(x, -1), "axis=-1 is no dimension"),
        (lambda x: jaxsparse.gather(x.astype(int)), "has dtype int32: give param"),
        (lambda x: jaxsparse.gather(x, axis_name="model"), "axis_name='model' is not bound"),
        (
            lambda x: jaxsparse.gather(x, gradients=INT4, residual=Residual.zeros((5,))),
            r"residual has shape \(5,\), and the whole leaf \(12,\): make it by",
        ),
        (
            lambda x: jaxsparse.gather(x, residual=Residual.zeros((12,))),
            "gradients=None rounds nothing: give gradients='int4', or leave out",
        ),
        (
            lambda x: jaxsparse.gather(
                x, gradients=QSGD(2), key=jax.random.key(0), residual=Residual.zeros((12,))
            ),
            "fed back it grows from step to step",
        ),
        (lambda x: jaxsparse.gather(jnp.ones(4)), "equal on all workers of 'data', so there"),
    ],
)
def test_misuse_is_refused_with_what_to_write(call, text):
    with pytest.raises(ValueError, match=text):
        on_workers(call, 3)(jnp.ones((3, 4)))
