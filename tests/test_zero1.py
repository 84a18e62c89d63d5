"""ZeRO-1 in few bits: against NumPy, on meshes, in its bytes, and carried over to other workers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from reference_formats import rounded
from workers import mesh, rows, some

import jaxsparse
from jaxsparse.comm.meshes import inner_axes

P = PartitionSpec
RNG = np.random.default_rng(0)
# Eight workers share axis 1 of "tall" and axis 0 of "flat", two share axis 0 of "tall", and "odd"
# is shared by seven alone. "bias" travels uncompressed.
SHAPES = {"bias": (5,), "flat": (24, 50), "odd": (35, 49), "tall": (42, 32)}
PARAMS = {name: RNG.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
RATE, GROUP = 0.125, 32


def gradients(workers, step=0):
    rng = np.random.default_rng((1, step))
    return {
        name: rng.normal(size=(workers, *shape)).astype(np.float32)
        for name, shape in SHAPES.items()
    }


def make(**options):
    # Momentum is linear, so what is owed can be counted. Its state has the parameters' shapes.
    return jaxsparse.zero1(optax.sgd(RATE, momentum=0.5), "int8", group_size=GROUP, **options)


def run(tx, params, state, workers, steps, at=None):
    """Updates, which are checked to be whole, and the state after steps."""
    update, found = jax.jit(tx.update), []
    for step in range(steps):
        given = gradients(workers, step)
        if at is not None:
            given = jax.device_put(given, NamedSharding(at, P("data")))
        updates, state = update(given, state, params)
        found.append(updates)
    return jax.device_get(found), state


def axis_of(name, workers):
    return next((i for i, n in enumerate(SHAPES[name]) if n % workers == 0), None)


class Twin:
    """The same for leaves that workers share, in NumPy."""

    def __init__(self, workers):
        self.workers = workers
        self.axes = {name: axis_of(name, workers) for name in ("flat", "odd", "tall")}
        self.axes = {name: axis for name, axis in self.axes.items() if axis is not None}
        zeros = lambda *lead: {name: np.zeros((*lead, *SHAPES[name])) for name in self.axes}
        self.residual, self.owed, self.momentum = zeros(workers), zeros(), zeros()

    def parts(self, tree, name):
        return np.stack(np.split(tree, self.workers, self.axes[name]))

    def through(self, tree):
        """Each owner's parts of all leaves, rounded together, and what is left, by leaf."""
        row = np.concatenate(
            [self.parts(x, name).reshape(self.workers, -1) for name, x in tree.items()], 1
        )
        sent = np.stack([rounded(x, "int8", GROUP, "bfloat16")[0] for x in row.astype(np.float32)])
        found, start = {}, 0
        for name in tree:
            shape = self.parts(tree[name], name).shape
            stop = start + np.prod(shape[1:])
            parts = sent[:, start:stop].reshape(shape)
            found[name], start = np.concatenate([*parts], self.axes[name]), stop
        return found

    def step(self, grads):
        total = {name: np.zeros(SHAPES[name]) for name in self.axes}
        for w in range(self.workers):
            x = {name: self.residual[name][w] + grads[name][w] for name in self.axes}
            sent = self.through(x)
            for name, axis in self.axes.items():
                own = np.zeros(self.workers, bool)
                own[w] = True
                n = SHAPES[name][axis]
                mask = np.repeat(own, n // self.workers)
                mask = mask.reshape(*(n if i == axis else 1 for i in range(2)))
                arrived = np.where(mask, x[name], sent[name])
                self.residual[name][w] = x[name] - arrived
                total[name] += arrived
        wanted = {}
        for name in self.axes:
            self.momentum[name] = 0.5 * self.momentum[name] + total[name] / self.workers
            wanted[name] = self.owed[name] - RATE * self.momentum[name]
        sent = self.through(wanted)
        self.owed = {name: wanted[name] - sent[name] for name in self.axes}
        return sent


@pytest.mark.parametrize("workers", some([2, 3, 7, 8], (8,)))
def test_it_is_its_numpy_twin_on_a_mesh_and_simulated(workers):
    at, twin = mesh(workers), Twin(workers)
    params = jax.device_put(PARAMS, NamedSharding(at, P()))
    tx = make()
    found, state = run(tx, params, tx.init(params), workers, 2, at)
    simulated = make(workers=workers)
    others, _ = run(simulated, PARAMS, simulated.init(PARAMS), workers, 2)
    for step in range(2):
        wanted = twin.step(gradients(workers, step))
        assert wanted, "no leaf is shared"
        for name, x in wanted.items():
            # A value in the middle of two numbers may go either way, one in 10,000.
            unit = np.abs(x).max() / 127
            off = np.abs(found[step][name] - x)
            assert (off > unit / 100).mean() < 1e-3
            assert off.max() < 2.1 * unit
            np.testing.assert_allclose(found[step][name], others[step][name], atol=1e-6)
    own = {name: x.sharding.spec for name, x in state.optimizer[0].trace.items()}
    for name in ("flat", "odd", "tall"):
        axis = axis_of(name, workers)
        cut = P() if axis is None else P(*[None] * axis, "data")
        assert own[name].index("data") == axis if axis is not None else own[name] == cut


@pytest.mark.parametrize("workers", some([1, 2, 3, 8], (3,)))
def test_what_is_not_delivered_is_owed(workers):
    """All that workers ever gave is in updates, residuals and what owners owe."""
    tx = make(workers=workers)
    updates, state = run(tx, PARAMS, tx.init(PARAMS), workers, 3)
    given = [gradients(workers, step) for step in range(3)]
    for name in SHAPES:
        means = [g[name].mean(0, dtype=np.float64) for g in given]
        kept = state.residual.get(name)
        held = 0 if kept is None else np.asarray(kept.value, np.float64).mean(0)
        # Of momentum, a mean that arrives late acts late. So unroll: what optimizers have seen.
        seen = np.asarray(state.optimizer[0].trace[name], np.float64)
        total = -sum(np.asarray(u[name], np.float64) for u in updates) / RATE
        total -= np.asarray(state.owed.get(name, 0), np.float64) / RATE
        # sum of v_t = 2 sum of means - v_T for momentum 0.5
        np.testing.assert_allclose((total + seen) / 2 + held, sum(means), atol=1e-5)


NARROW = [(jnp.bfloat16, "int8", "sign"), (jnp.float16, "sign", "int4")]
OTHERS = [("int4", "int4"), ("ternary", "int2"), ("float16", "float8_e5m2"), ("bfloat16", "e3m0")]
NARROW += [(dtype, *names) for dtype in (jnp.bfloat16, jnp.float16) for names in OTHERS]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "out", "back"), rows(NARROW[:1], NARROW[1:]))
def test_what_narrow_leaves_round_is_owed_too(dtype, out, back):
    """All that workers ever gave is in updates, residuals and what owners owe, to float32."""
    workers, steps = 3, 6  # of them "odd" is shared by none, and all have the others
    tx = jaxsparse.zero1(optax.scale(-1.0), out, back=back, workers=workers, group_size=GROUP)
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), PARAMS)
    state, update = tx.init(params), jax.jit(tx.update)
    given = dict.fromkeys(SHAPES, 0.0)
    arrived = dict.fromkeys(SHAPES, 0.0)
    for step in range(steps):
        # A small part of each gradient is below the digits of its means.
        grads = jax.tree.map(lambda x: jnp.asarray(1 + x / 300, dtype), gradients(workers, step))
        updates, state = update(grads, state, params)
        for name in SHAPES:
            assert updates[name].dtype == dtype
            given[name] += np.asarray(grads[name], np.float64).mean(0)
            arrived[name] -= np.asarray(updates[name], np.float64)
    for name, residual in state.residual.items():
        kept = np.asarray(residual.value, np.float64).mean(0)
        total = arrived[name] - np.asarray(state.owed[name], np.float64) + kept
        np.testing.assert_allclose(total, given[name], atol=3e-5)


def test_it_sends_each_half_in_few_bits_and_nothing_else():
    at, workers = mesh(8), 8
    params = jax.device_put({"w": jnp.ones((64, 512))}, NamedSharding(at, P()))
    tx = jaxsparse.zero1(optax.sgd(0.1, momentum=0.5), "int8", back="int4")
    batch = jax.device_put(jnp.ones((8, 64)), NamedSharding(at, P("data")))

    @jax.jit
    def step(params, state, batch):
        loss = lambda params, batch: jnp.sum((batch @ params["w"]) ** 2)
        loss, grads = jaxsparse.value_and_grad(loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state = tx.init(params)
    found = jaxsparse.wire_bytes(step, params, state, batch)
    share = 7 / 8 * 64 * 512
    scales = 2 * share / 256 * 2
    assert found.received == pytest.approx(share + share / 2 + scales, abs=64)  # and a flag
    after = step(params, state, batch)[1]
    mu = after.optimizer[0].trace["w"]
    assert mu.addressable_data(0).size * workers == mu.size
    assert jax.tree.map(lambda x: x.sharding, after) == jax.tree.map(lambda x: x.sharding, state)


@pytest.mark.slow
@pytest.mark.parametrize("kind", some([AxisType.Auto, AxisType.Explicit], (AxisType.Auto,)))
def test_other_axes_are_cut_further(kind):
    at = mesh((4, 2), kind)
    assert dict(inner_axes(at, "data")) == {"fsdp": 2}
    specs = {"bias": P(), "flat": P(), "odd": P(), "tall": P(None, "fsdp")}
    params = {name: jax.device_put(x, NamedSharding(at, specs[name])) for name, x in PARAMS.items()}
    tx, alone = make(), make(workers=4)
    update, state = jax.jit(tx.update), tx.init(params)
    update_alone, other = jax.jit(alone.update), alone.init(PARAMS)
    for step in range(2):
        given = {
            name: jax.device_put(x, NamedSharding(at, P("data", *specs[name])))
            for name, x in gradients(4, step).items()
        }
        updates, state = update(given, state, params)
        wanted, other = update_alone(gradients(4, step), other, PARAMS)
        for name, x in wanted.items():  # groups differ, so roundings do
            assert np.abs(np.asarray(updates[name]) - x).max() < 3 * np.abs(x).max() / 127
    assert "data" in str(state.owed["flat"].sharding.spec)
    assert "fsdp" in str(state.owed["flat"].sharding.spec)
    assert updates["flat"].sharding.is_equivalent_to(params["flat"].sharding, 2)


MIXING = optax.chain(
    optax.adaptive_grad_clip(0.1), optax.contrib.muon(0.1), optax.contrib.reduce_on_plateau()
)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", some([(4,), (4, 2)], [(4, 2)]), ids=str)
@jax.numpy_dtype_promotion("standard")
def test_optimizers_that_mix_elements_on_explicit_axes(sizes):
    """Muon's products and the norms of a clip by units, beside an argument that is an array."""
    at = mesh(sizes, AxisType.Explicit)
    specs = {"flat": P("fsdp") if sizes[1:] else P(), "bias": P(), "odd": P(), "tall": P()}
    params = {name: jax.device_put(x, NamedSharding(at, specs[name])) for name, x in PARAMS.items()}
    put = lambda name, x: jax.device_put(x, NamedSharding(at, P("data", *specs[name])))
    grads = {name: put(name, x) for name, x in gradients(4).items()}
    tx = jaxsparse.zero1(MIXING, "float16")
    value = jax.device_put(jnp.float32(1), NamedSharding(at, P()))
    wanted, _ = jax.jit(MIXING.update)(
        jax.tree.map(lambda x: x.mean(0), gradients(4)),
        MIXING.init(PARAMS),
        PARAMS,
        value=value[()],
    )
    state = tx.init(params)
    found, after = jax.jit(tx.update)(grads, state, params, value=value)
    for name, x in wanted.items():
        x = np.asarray(x)
        np.testing.assert_allclose(found[name], x, atol=4e-3 * np.abs(x).max())
    same = lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim)
    assert all(jax.tree.leaves(jax.tree.map(same, after, state)))
    assert any("data" in str(x.sharding.spec) for x in jax.tree.leaves(after.optimizer))


def test_diagnose_counts_and_leaves_without_elements_travel():
    workers, params = 3, {name: PARAMS[name] for name in ("bias", "flat", "odd")}
    params |= {"none": np.zeros((0, 6), np.float32), "no_rows": np.zeros((3, 0), np.float32)}
    tx = jaxsparse.zero1(optax.sgd(RATE), "ternary", workers=workers, group_size=GROUP)
    state = tx.init(params)
    draw = gradients(workers)
    grads = {
        name: draw.get(name, np.zeros((workers, *x.shape), np.float32))
        for name, x in params.items()
    }
    broken = grads | {"flat": grads["flat"] * np.float32(np.nan)}
    update = jax.jit(tx.update)
    updates, state = update(grads, state, params)
    _, state = update(broken, state, params)
    updates = jax.device_get(updates)
    diagnose = jax.jit(jaxsparse.diagnose)
    report = diagnose((state, optax.scale(2.0).init(params)), updates)
    rows = [np.float64(x.value).reshape(workers, -1) for x in state.residual.values()]
    norm = np.sqrt(np.square(np.concatenate(rows, 1)).sum() / workers)
    np.testing.assert_allclose(report.residual_norm, norm, rtol=1e-5)
    moved = sum(np.count_nonzero(x) for x in updates.values())
    assert 0 < moved < 5 + 24 * 50 + 35 * 49
    assert (int(report.delivered), int(report.skipped), int(report.overflow)) == (moved, 1, 0)
    assert float(report.delivered_share) == pytest.approx(moved / (5 + 24 * 50 + 35 * 49))
    frozen = updates | {"odd": updates["odd"] * 0}
    dropped = float(diagnose(state, frozen).dropped_share)
    assert dropped == pytest.approx(np.count_nonzero(updates["odd"]) / moved)


def test_a_step_that_is_not_finite_is_a_mean_of_zero():
    tx = make(workers=2)
    _, state = run(tx, PARAMS, tx.init(PARAMS), 2, 1)
    broken = gradients(2, 1)
    broken["tall"][1, 0, 0] = np.inf
    updates, after = jax.jit(tx.update)(broken, state, PARAMS)
    assert int(after.skipped) == 1
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(updates))
    same = lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    for name, left in after.residual.items():
        came = np.where(np.isfinite(broken[name]), broken[name], 0) + state.residual[name].value
        np.testing.assert_allclose(left.value.sum(0), came.sum(0), rtol=1e-4, atol=1e-4)
    trace = lambda state, name: np.asarray(state.optimizer[0].trace[name])
    same(trace(after, "tall"), trace(state, "tall") / 2)


def test_an_optimizer_that_breaks_is_seen_and_owes_nothing_for_ever():
    tx = jaxsparse.zero1(
        optax.scale_by_schedule(lambda t: jnp.where(t == 0, jnp.nan, 1.0)), "int8", workers=2
    )
    params, update = {"flat": PARAMS["flat"]}, jax.jit(tx.update)
    given = {"flat": gradients(2)["flat"]}
    updates, state = update(given, tx.init(params), params)
    assert np.isnan(updates["flat"]).all()
    updates, state = update(given, state, params)
    assert np.isfinite(updates["flat"]).all()


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), rows([(2, 7)], [(7, 8), (8, 3)]))
def test_reshard_keeps_what_is_owed(before, after):
    """ "odd" is shared by seven workers and not by others, "flat" the other way round."""
    params = lambda n: jax.device_put(PARAMS, NamedSharding(mesh(n), P()))
    tx = make()
    _, state = run(tx, params(before), tx.init(params(before)), before, 2, mesh(before))
    like = tx.init(params(after))
    there = jaxsparse.reshard(jax.device_get(state), mesh(after), like=like)
    assert jax.tree.map(lambda x: x.sharding, there) == jax.tree.map(lambda x: x.sharding, like)
    for name, x in state.owed.items():
        np.testing.assert_array_equal(there.owed[name], x)
    updates, last = run(tx, params(after), there, after, 1, mesh(after))
    name = next(name for name in like.owed if axis_of(name, after) is None)
    assert not np.asarray(last.owed[name]).any()
    still = there._replace(owed=jax.tree.map(jnp.zeros_like, there.owed))
    others, _ = run(tx, params(after), still, after, 1, mesh(after))
    np.testing.assert_allclose(updates[0][name] - others[0][name], state.owed[name], atol=1e-6)


@pytest.mark.slow
def test_what_walks_trees_and_chains():
    jaxsparse.check(optax.chain(make(), optax.scale(1.0)), PARAMS)
    tx = make(workers=2)
    state = tx.init(PARAMS)
    doubled = optax.tree.map_params(tx, lambda x: x + 1, state)
    assert np.asarray(doubled.optimizer[0].trace["flat"]).all()
    assert not any(x.any() for x in jax.tree.leaves(doubled.residual))
    half = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), PARAMS)
    grads = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), gradients(2))
    updates, _ = jax.jit(tx.update)(grads, tx.init(half), half)
    assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype(jnp.bfloat16)}


def in_one_worker():
    tx = make(axis_name="data")
    jax.vmap(tx.init, axis_name="data")(jnp.ones((2, 64, 64)))


REFUSED = {
    "format": (lambda: jaxsparse.zero1(optax.sgd(0.1), "int5"), "'int5'"),
    "no mesh": (lambda: make().init(PARAMS), "no mesh with an axis 'data'"),
    "one worker": (in_one_worker, "axis_name='data' is bound here, and zero1"),
    "averaged": (
        lambda: make(workers=2).update(PARAMS, make(workers=2).init(PARAMS), PARAMS),
        "has been averaged already",
    ),
    "no parameters": (
        lambda: make(workers=2).update(gradients(2), make(workers=2).init(PARAMS)),
        "params=None",
    ),
    "another tree": (
        lambda: make(workers=2).update(
            gradients(2), make(workers=2, is_dense=lambda path, _: "t" in path).init(PARAMS), PARAMS
        ),
        "the state has residuals of {'bias': (5,), 'odd': (35, 49)}, and these parameters need ",
    ),
    "nothing to share": (
        lambda: make(workers=2, is_dense=lambda *_: True).init(PARAMS),
        "no leaf would be compressed or shared: all 4",
    ),
    "another state": (lambda: make().update(PARAMS, (), PARAMS), "no Zero1State"),
    "other workers": (
        lambda: make(workers=3).update(gradients(3), make(workers=2).init(PARAMS), PARAMS),
        "without a row for each of the 3 workers",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refusals(what):
    use, message = REFUSED[what]
    with pytest.raises(ValueError, match=re.escape(message)):
        use()
