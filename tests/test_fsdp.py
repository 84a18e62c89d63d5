"""Parameters that are cut over the workers' axis, through the front door."""

import functools

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference_gather as twin
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from reference_formats import rounded
from workers import mesh as mesh_of, rows, some

import jaxsparse
from jaxsparse.comm.shards import Residual, rows_of, whole_of
from jaxsparse.quantize import QSGD, Format

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
INT4 = Format("int4", 16)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def problem(workers):
    params = {"w": normal(6, 8 * workers), "v": normal(8 * workers, 5, seed=1), "b": normal(5)}
    batch = normal(3 * workers, 6, seed=2), normal(3 * workers, 5, seed=3)
    return params, batch


def loss_of(params, batch):
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] + params["b"][None] - y) ** 2)


def linear(params, batch):
    """A loss whose gradients are the means of a worker's rows of the batch."""
    return sum(jnp.sum(params[k] * batch[k].mean(0)) for k in params)


def placed(params, batch, mesh, least=16):
    specs = jaxsparse.fsdp_specs(params, mesh, least=least)
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    return jax.tree.map(put, params, specs), jax.device_put(batch, NamedSharding(mesh, P("data")))


@pytest.mark.parametrize(("workers", "kind"), rows([(3, AUTO), (8, EXPLICIT)], [(1, AUTO)]))
@jax.numpy_dtype_promotion("standard")  # Optax' Adam needs it
def test_plain_fsdp_trains_as_plain_jit_does(workers, kind):
    params, batch = problem(workers)
    mesh, tx = (
        mesh_of(workers, kind),
        optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)),
    )
    cut, spread = placed(params, batch, mesh)
    specs = jaxsparse.specs(cut)
    assert specs == {"w": P(None, "data"), "v": P("data"), "b": P()}

    def step(value_and_grad, params, state, batch):
        loss, grads = value_and_grad(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss.mean()

    ours = jaxsparse.value_and_grad(loss_of, specs=specs)
    theirs = jax.jit(functools.partial(step, jax.value_and_grad(loss_of)))
    ours = jax.jit(functools.partial(step, ours))
    found, wanted = (cut, tx.init(cut)), (params, tx.init(params))
    for _ in range(3):
        *found, loss = ours(*found, spread)
        *wanted, other = theirs(*wanted, batch)
        np.testing.assert_allclose(loss, other, rtol=1e-6)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), found, wanted)
    part = 6 * 8
    for moment in (found[0], found[1][1][0].mu):
        assert {x.data.size for x in moment["w"].addressable_shards} == {part}


@pytest.mark.slow
def test_what_is_seen_of_arrays_needs_no_specs():
    params, batch = problem(2)
    cut, spread = placed(params, batch, mesh_of(2))
    loss, grads = jaxsparse.value_and_grad(loss_of)(cut, spread)
    assert loss.shape == (2,)
    wanted = jax.jit(jax.grad(loss_of))(params, batch)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), grads, wanted)
    assert jaxsparse.specs(grads)["w"] == P(None, "data")


def in_few_bits(x):
    return rounded(x, "int4", 16, "bfloat16")[0]


@pytest.mark.parametrize("dtype", some(["float32", "float8_e4m3fn"], ["float8_e4m3fn"]))
def test_residuals_of_steps_hold_what_did_not_arrive(dtype):
    workers, shape = 3, (4, 6)
    params = {"w": normal(*shape), "b": normal(5)}
    specs = {"w": P(None, "data"), "b": P()}
    residual = jaxsparse.gather_residual(params, specs, dtype, workers=workers)
    assert residual["b"] is None
    assert residual["w"].values.value.shape == (workers, *shape)

    @jax.jit
    def step(residual, batch):
        gather = jaxsparse.Gather("int8", INT4, residual=residual)
        of = jaxsparse.value_and_grad(linear, specs=specs, gather=gather, workers=workers)
        return of(params, batch)

    total, given, before = 0, 0, np.zeros((workers, *shape), np.float32)
    for i in range(4):
        batch = {"w": normal(workers, *shape, seed=i), "b": normal(workers, 5, seed=9)}
        _, (grads, residual) = step(residual, batch)
        held = residual["w"].values.value.astype("float32")
        held = np.asarray(held * residual["w"].scale.value[:, None, None])
        if dtype == "float32":
            shares, before = twin.averaged(batch["w"] + before, 1, in_few_bits)
            np.testing.assert_allclose(grads["w"], np.concatenate(shares, 1), atol=2e-6)
            np.testing.assert_allclose(held, before, atol=2e-6)
        np.testing.assert_allclose(grads["b"], batch["b"].mean(0), rtol=1e-6)
        total, given = total + workers * np.asarray(grads["w"]), given + batch["w"].sum(0)
    bound = 1e-5 if dtype == "float32" else 4 * workers * 0.07 * np.abs(held).max()
    np.testing.assert_allclose(total + held.sum(0), given, atol=bound)


def test_leaves_and_workers_draw_for_themselves():
    workers = 4
    x = normal(1, 8, 16).repeat(workers, 0)
    params = {"u": normal(8, 16), "v": normal(8, 16)}
    gather = jaxsparse.Gather(None, QSGD(2, 16), key=jax.random.key(0))
    of = jaxsparse.value_and_grad(
        linear, specs=dict.fromkeys(params, P("data")), gather=gather, workers=workers
    )
    _, grads = jax.jit(of)(params, {"u": x, "v": x})
    assert not np.allclose(grads["u"], grads["v"])
    lost = (np.asarray(grads["u"]) - x[0]) * workers
    assert len(np.unique(np.round(np.abs(lost[0]) / np.abs(x[0][0]).max(), 3))) > 8


def test_layers_gather_where_they_run_if_the_loss_does():
    workers, layers, width = 4, 3, 8
    params = {"layers": normal(layers, width, width), "out": normal(width)}
    batch = normal(2 * workers, width, seed=1)
    specs = {"layers": P(None, None, "data"), "out": P()}

    def scanned(params, x, get):
        layer = lambda x, w: (jnp.tanh(x @ get(w)), None)
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
        return jnp.mean((x @ params["out"]) ** 2)

    get = lambda w: jaxsparse.gather(w, 1)
    ours = functools.partial(scanned, get=get)
    wanted = jax.grad(functools.partial(scanned, get=lambda w: w))(params, batch)
    for way in ({"workers": workers}, {"mesh": mesh_of(workers)}):
        of = jaxsparse.grad(ours, specs=specs, gather=False, **way)
        found = jax.jit(of)(params, batch)
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), found, wanted)


@pytest.mark.parametrize("dtype", some(["float32", "float8_e4m3fn"], ["float8_e4m3fn"]))
def test_residuals_of_layers_are_differentiated_beside_them(dtype):
    workers, layers, width = 4, 3, 8
    params, batch = normal(layers, width, width), normal(2 * workers, width, seed=1)
    rows = (workers, layers, width, width)
    residual = Residual(jnp.zeros(rows, dtype), jnp.ones(rows[:2]))

    def loss(params, x, residual, gradients):
        def layer(x, given):
            w = jaxsparse.gather(given[0], 1, gradients=gradients, residual=given[1])
            return jnp.tanh(x @ w), None

        own = jax.tree.map(lambda x: x[0], residual)
        return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, (params, own))[0] ** 2)

    specs = P(None, None, "data")
    of = lambda *rest, **more: jaxsparse.grad(*rest, gather=False, workers=workers, **more)
    ours = functools.partial(loss, gradients=INT4)
    both = jax.tree.map(lambda x: P("data"), residual)
    grads, new = jax.jit(of(ours, (0, 2), specs=(specs, both)))(params, batch, residual)
    plain = functools.partial(loss, residual=None, gradients=None)
    wanted = jax.jit(of(lambda p, x: plain(p, x), specs=specs))(params, batch)
    held = new.values.astype("float32") * new.scale[..., None, None]
    bound = 1e-6 if dtype == "float32" else 0.07 * workers * float(jnp.abs(held).max())
    assert not np.allclose(grads, wanted, atol=1e-5)
    total = workers * np.asarray(grads) + np.asarray(held).sum(0)
    np.testing.assert_allclose(total, workers * np.asarray(wanted), atol=bound)


class Layer(equinox.Module):
    weight: jax.Array
    name: str

    def __call__(self, x):
        return x @ self.weight


def test_modules_several_arguments_and_auxiliary_output():
    workers, x = 2, normal(4, 6)
    layer, scale = Layer(jnp.asarray(normal(6, 4)), "first"), jnp.float32(2)

    def loss(layer, batch, scale):
        y = layer(batch)
        return jnp.sum(y**2) * scale, y.mean()

    specs = jaxsparse.fsdp_specs((layer, scale), workers, least=2)
    of = jaxsparse.value_and_grad(
        loss, (0, 2), has_aux=True, specs=specs, workers=workers, gather=jaxsparse.Gather("int8")
    )
    of = equinox.filter_jit(of)
    (value, mean), (grads, by_scale) = of(layer, x, scale)
    assert value.shape == mean.shape == (workers,)
    assert isinstance(grads, Layer)
    assert grads.weight.shape == (6, 4)
    assert by_scale.shape == ()
    np.testing.assert_allclose(by_scale * 2, value.mean(), rtol=1e-5)


def test_states_of_nnx():
    graph, state = nnx.split(nnx.Linear(8, 4, rngs=nnx.Rngs(0)))
    x = normal(4, 8)
    loss = lambda state, x: jnp.mean(nnx.merge(graph, state)(x) ** 2)
    specs = jax.tree.map(lambda x: P("data") if x.ndim > 1 else P(), state)
    _, found = jaxsparse.value_and_grad(loss, specs=specs, workers=2)(state, x)
    close = functools.partial(np.testing.assert_allclose, atol=1e-6)
    jax.tree.map(close, found, jax.jit(jax.grad(loss))(state, x))


def value_and_grad(params, batch, **options):
    return jaxsparse.value_and_grad(loss_of, **{"workers": 2, **options})(params, batch)


RESIDUAL = jaxsparse.gather_residual({"w": normal(4, 4)}, {"w": P("data")}, workers=2)
REFUSED = {
    "a format": ({"gather": "int8"}, "gather='int8' is no jaxsparse.Gather: give gather=jaxsp"),
    "no leaf is cut": (
        {"gather": jaxsparse.Gather("int8")},
        "no leaf is known to be cut over .* give jaxsparse.value_and_grad their partitions, as sp",
    ),
    "odd": ({"specs": {"w": P("data"), "v": P(None, "data"), "b": P()}}, "can't be cut equally"),
    "two axes": ({"specs": {"w": P(("data", "tp")), "v": P(), "b": P()}}, "and the mesh the axes"),
    "a residual of others": (
        {
            "specs": {"w": P("data"), "v": P(), "b": P()},
            "gather": jaxsparse.Gather(None, "int4", residual=RESIDUAL),
        },
        "make it by jaxsparse.gather_residual",
    ),
    "a mesh of two axes": (
        {"specs": {"w": P("data"), "v": P(), "b": P()}, "mesh": (2, 2), "workers": None},
        r"other axes \{'fsdp': 2\}, which is not supported: take a mesh with this axis alone",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_misuse_is_refused_with_what_to_write(name):
    options, text = REFUSED[name]
    if "mesh" in options:
        options = options | {"mesh": mesh_of(options["mesh"])}
    with pytest.raises(ValueError, match=text):
        value_and_grad(*problem(2), **options)


def test_an_exchange_refuses_means():
    params, batch = problem(2)
    of = functools.partial(value_and_grad, specs=jaxsparse.fsdp_specs(params, 2, least=16))
    _, grads = jax.jit(of)(params, batch)
    tx = jaxsparse.quantized("int8", workers=2, is_dense=lambda path, shape: False)
    with pytest.raises(ValueError, match="averaged already"):
        tx.update(grads, tx.init(params), params)


def test_rows_and_wholes_are_inverse():
    x = normal(3, 10, 4)
    np.testing.assert_array_equal(whole_of(rows_of(x, 1, 5), 1), x)
    np.testing.assert_array_equal(rows_of(x, 1, 5)[2], x[:, 4:6])


def test_residuals_are_resharded_where_they_have_a_mean():
    params, specs = {"w": jnp.zeros((8, 6))}, {"w": P("data")}
    for dtype in ("bfloat16", "float16", "float8_e4m3fn"):
        left = jaxsparse.gather_residual(params, specs, dtype, workers=4)
        values = np.arange(4 * 48).reshape(4, 8, 6) / 4
        left["w"] = left["w"]._replace(values=jaxsparse.PerWorker(jnp.asarray(values, dtype)))
        if dtype == "bfloat16":
            found = jaxsparse.reshard(left, 2)["w"].values.value
            np.testing.assert_allclose(found.mean(0), values.mean(0), rtol=2**-7)
        else:
            with pytest.raises(ValueError, match=f"values of {dtype}, .*gather_residual"):
                jaxsparse.reshard(left, 2)
            jaxsparse.reshard(left, 4)


def test_partitions_over_other_axes_leave_rows():
    where = mesh_of((4, 2))
    params = {"w": jax.device_put(jnp.ones((8, 6)), NamedSharding(where, P("fsdp")))}
    loss = lambda p, x: jnp.mean((x @ p["w"]) ** 2)
    of = jaxsparse.value_and_grad(loss, specs={"w": P("fsdp")}, mesh=where)
    _, grads = of(params, jnp.ones((4, 8)))
    assert grads["w"].shape == (4, 8, 6)


def test_a_mean_of_float16_lies_in_its_range():
    where = mesh_of(8)
    params = {"w": jax.device_put(jnp.ones((8, 6), jnp.float16), NamedSharding(where, P("data")))}
    loss = lambda p, x: jnp.sum(p["w"].astype(jnp.float32) * 2e4) * x.sum()
    of = jaxsparse.value_and_grad(loss, specs={"w": P("data")}, mesh=where)
    _, grads = of(params, jnp.ones((8, 1)))
    np.testing.assert_allclose(grads["w"], np.float16(2e4), rtol=2**-10)


def test_a_loss_of_whole_leaves_has_nothing_to_gather():
    where = mesh_of(8)
    loss = lambda p, x: jnp.sum(jaxsparse.gather(p["w"], 0) * x.sum())
    for specs in ({"w": P("data")}, None):
        with pytest.raises(ValueError, match="give gather=False there"):
            jaxsparse.value_and_grad(loss, specs=specs, mesh=where)(
                {"w": jnp.ones((8, 6))}, jnp.ones((8, 1))
            )


@pytest.mark.parametrize("spec", [P(None, "dta"), P("data", None, None)])
def test_partitions_that_fit_no_leaf_or_mesh_are_refused(spec):
    of = jaxsparse.value_and_grad(lambda p, x: p["w"].sum() * x.sum(), specs={"w": spec}, workers=2)
    with pytest.raises(ValueError, match="and the mesh the axes"):
        of({"w": jnp.ones((8, 6))}, jnp.ones((8, 1)))


def test_a_gather_in_a_branch_is_refused():
    where = mesh_of(8)

    def loss(p, x):
        w = jax.lax.cond(
            x[0, 0] > 0, lambda w: jaxsparse.gather(w, 0), lambda w: jnp.ones((8, 6)), p["w"]
        )
        return jnp.sum(w * x.sum())

    of = jaxsparse.value_and_grad(loss, specs={"w": P("data")}, gather=False, mesh=where)
    with pytest.raises(ValueError, match=r"Call what communicates \(jaxsparse.gather\) in front"):
        of({"w": jnp.ones((8, 6))}, jnp.ones((8, 1)))


def test_a_residual_of_whole_numbers_is_refused():
    with pytest.raises(ValueError, match="dtype='int8' is no float"):
        jaxsparse.gather_residual({"w": jnp.ones((8, 6))}, {"w": P("data")}, "int8", workers=2)
