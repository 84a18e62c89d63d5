"""Losses with parallel programs inside: each worker's row is its plain gradient, or is refused.

Right values are plain JAX's: the same mathematics without a `jax.shard_map`, under `jax.vmap`.
"""

import contextlib
import dataclasses
import functools
import re
import threading
import warnings

import forms
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from forms import FORMS, Way
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.scheduling_groups import scheduling_group
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from workers import rows, some

import jaxsparse
from jaxsparse.comm import compat, shard_maps

MESHES = {
    (4, 2): ("data", "tp"),
    (2, 2, 2): ("data", "fsdp", "tp"),
    (8,): ("data",),
    (8, 1): ("data", "tp"),
}
# What one worker's function can't run, and its words. The rest is right, or jax.jit refuses it.
REFUSED = {
    "jit_with_shardings": r"forms.py:\d+ .* once more: leave it out of the in_shardings",
    "custom_partitioning_beside": r"custom_partitioning at .*forms.py:\d+.*leave out jax.set_mesh",
}
# What uses the worker's number in a body, and where its specs do not name the axis.
OF_UNNAMED = dict.fromkeys(
    ("workers_in_a_jit", "index_of_worker_inside"),
    r"forms.py:\d+.* uses the worker's number in the jax.shard_map at .*forms.py:\d+",
) | dict.fromkeys(
    ("mean_of_workers_inside", "loss_inside"),
    r"forms.py:\d+.* sums what is of a batch in the jax.shard_map at .*forms.py:\d+",
)
OF_SIMULATED = {
    **dict.fromkeys(FORMS, r"shard_map at .*forms.py:\d+.* give it check_vma=False"),
}


def mesh_of(shape, kind=AxisType.Auto):
    names = MESHES[shape]
    count = int(np.prod(shape))
    return jax.make_mesh(shape, names, (kind,) * len(names), devices=jax.devices()[:count])


def put(where, workers):
    tp = "tp" if "tp" in where.axis_names else None
    specs = {"a": P(None, tp), "b": P(tp)}
    place = lambda x, spec: jax.device_put(x, NamedSharding(where, spec))
    return {n: place(forms.W[n], specs[n]) for n in specs}, place(forms.inputs(workers), P("data"))


def check(found, right, atol=2e-6):
    for ours, plain in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=2e-4, atol=atol)


def check_or_refused(run, right, loss, given, words):
    """Runs it. It is right, or refused in these words, or refused by plain JAX, too."""
    try:
        found = run()
    except Exception as error:
        if words is not None and re.search(words, str(error), re.DOTALL):
            return
        try:
            jax.jit(jax.grad(loss))(*given)
        except Exception as plain:
            if "unbound axis name" not in str(plain):  # jax.jit does not know the workers' axis
                return
        raise
    check(found, right)


ALL = [
    (shape, named, checked, known)
    for shape in MESHES
    for named in (False, True)
    for checked in (False, True)
    for known in (False, True)
    if shape == (4, 2) or (known == (named == checked) and (shape != (8, 1) or named > checked))
]
# The usual form of trainers, and of forms that differ there, what was wrong in silence.
USUAL = [(form, (4, 2), True, True, False) for form in FORMS if form != "pallas"]
OF_SILENT = ("elementwise", "derivative_in_halves", "weights_gathered", "pallas", "experts")
OF_SILENT += ("mean_of_workers_inside", "workers_in_a_jit", "index_of_worker_inside")
OF_SILENT += ("noise_of_worker_inside", "loss_inside", "some_axes")
USUAL += [(form, (4, 2), False, False, True) for form in OF_SILENT]


@pytest.mark.parametrize(
    "way", some([(form, *way) for way in ALL for form in FORMS], USUAL), ids=str
)
def test_rows_are_plain_gradients(way):
    form, shape, named, checked, known = way
    where, workers = mesh_of(shape), shape[0]
    given = put(where, workers)
    loss = FORMS[form](Way(where, named, checked, is_given=not known or named))
    run = jax.jit(jaxsparse.value_and_grad(loss, mesh=where))
    words = REFUSED.get(form) if shape[1:] in ((), (1,)) else None
    words = words if named else OF_UNNAMED.get(form, words)
    with jax.set_mesh(where) if known else contextlib.nullcontext():
        check_or_refused(lambda: run(*given), forms.right(form, workers), loss, given, words)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("shape", "checked"), [((4, 2), False), ((4, 2), True), ((8,), False)], ids=str
)
def test_local_steps(form, checked, shape):
    """The inner steps of workers, whose displacements have the mean of their gradients."""
    where, workers = mesh_of(shape), shape[0]
    params, x = put(where, workers)
    loss = FORMS[form](Way(where, True, checked, is_given=True))

    def step(state, x):
        value, grads = jax.value_and_grad(loss)(state[0], x)
        return (jax.tree.map(jnp.subtract, state[0], grads),), value

    def run():
        train = jaxsparse.LocalSteps(step, jaxsparse.dense(), optax.sgd(1.0), where, every=1)
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # it communicates
            state, values = train(train.init((jax.tree.map(jnp.array, params),)), x, 0)
        return values, jax.tree.map(lambda a, b: a - b, forms.W, jax.device_get(state.params))

    values, grads = forms.right(form, workers)
    right = values, jax.tree.map(lambda g: g.mean(0), grads)
    refused = "communicates over 'data'|" + REFUSED.get(form, "communicates")
    check_or_refused(run, right, loss, (params, x), refused if shape == (8,) else None)


SIMULATED = [(False, False), (False, True), (True, False), (True, True)]


@pytest.mark.parametrize("form", some(FORMS, ["flash_attention", "mean_of_workers_inside"]))
@pytest.mark.parametrize("way", SIMULATED, ids=str)
def test_simulated_workers_with_a_mesh_of_their_own(form, way):
    """A trainer on one host has a mesh with an axis "data" of size 1, which means the workers."""
    named, checked = way
    where = jax.make_mesh((1, 2), ("data", "tp"), (AxisType.Auto,) * 2, devices=jax.devices()[:2])
    given = forms.W, forms.inputs(3)
    loss = FORMS[form](Way(where, named, checked, is_given=True))
    run = jax.jit(jaxsparse.value_and_grad(loss, workers=3))
    words = OF_SIMULATED[form] if checked else None
    if not named and form in OF_UNNAMED:
        words = "|".join(filter(None, (words, OF_UNNAMED[form])))
    check_or_refused(lambda: run(*given), forms.right(form, 3), loss, given, words)


def test_simulated_workers_and_a_mesh_that_has_more():
    where = mesh_of((4, 2))
    loss = FORMS["elementwise"](Way(where, True, False, is_given=True))
    refused = r"axis 'data', and the jax.shard_map at .*forms.py:\d+.* 4 devices.*axis_name=\"work"
    with pytest.raises(ValueError, match=refused):
        jaxsparse.value_and_grad(loss, workers=3)(forms.W, forms.inputs(3))


def test_per_worker_runs_one_workers_optimizer():
    """Each worker's update is made from its own gradients, and nothing else crosses workers."""
    where = mesh_of((4, 2))
    spec = P(None, "tp")
    split = jax.shard_map(jnp.tanh, mesh=where, in_specs=spec, out_specs=spec, check_vma=False)
    inner = optax.stateless(lambda updates, _: jax.tree.map(split, updates))
    tx = optax.chain(jaxsparse.per_worker(inner, mesh=where), jaxsparse.dense(mesh=where))
    params, _ = put(where, 4)
    grads = {n: np.arange(4 * x.size).reshape(4, *x.shape) % 7 / 7 for n, x in params.items()}
    grads = jax.tree.map(np.float32, grads)
    found, _ = jax.jit(tx.update)(grads, jaxsparse.shard(tx.init(params), where), params)
    check(found, {n: np.tanh(g).mean(0) for n, g in grads.items()})


def by_hand(summed):
    """A derivative that sums over workers by hand, as trainers do for jax.jit."""

    @jax.custom_vjp
    def shared(w):
        return w

    shared.defvjp(lambda w: (w, None), lambda _, g: (summed(g),))
    return shared


SUMS = {
    "outside": lambda where, f: lambda w, x: jnp.mean((x @ f(w["a"])) ** 2),
    "in pieces": lambda where, f: (
        lambda w, x: jnp.mean(
            (
                x
                @ jnp.concatenate(
                    [f(half) for half in jnp.split(jnp.stack([w["a"]] * 2)[0], 2, 1)], 1
                )
            )
            ** 2
        )
    ),
    "behind weights": lambda where, f: lambda w, x: jnp.mean((x @ f(w["a"] @ w["b"])) ** 2),
    "in a scan": lambda where, f: (
        lambda w, x: jnp.mean(
            lax.scan(lambda h, _: (jnp.tanh(h @ f(w["a"]) @ w["b"]), None), x, None, length=2)[0]
            ** 2
        )
    ),
    "in a body": lambda where, f: (
        lambda w, x: jnp.mean(
            jax.shard_map(
                lambda x, a: x @ f(a),
                mesh=where,
                in_specs=(P("data"), P(None, "tp")),
                out_specs=P("data", "tp"),
                check_vma=False,
            )(x, w["a"])
            ** 2
        )
    ),
}


def test_sums_by_hand_in_checked_bodies_are_refused():
    """There JAX casts weights to vary, which is no sum of the function's own."""
    where = mesh_of((4, 2))
    rows, whole = P("data"), P()
    split = lambda f, i, o: jax.shard_map(f, mesh=where, in_specs=i, out_specs=o)

    @jax.custom_vjp
    def linear(x, a):
        return split(lambda x, a: x @ a, (rows, whole), rows)(x, a)

    def backward(saved, g):
        body = lambda x, a, g: (g @ a.T, lax.psum(x.T @ g, "data"))
        return split(body, (rows, whole, rows), (rows, whole))(*saved, g)

    linear.defvjp(lambda x, a: (linear(x, a), (x, a)), backward)
    with pytest.raises(ValueError, match=r"derivative of what is called at .*losses.py:\d+"):
        jaxsparse.grad(lambda w, x: jnp.mean(linear(x, w["a"]) ** 2), mesh=where)(*put(where, 4))


@pytest.mark.parametrize("place", SUMS)
def test_gradients_that_are_sums_already_are_refused(place):
    where = mesh_of((4, 2))
    loss = SUMS[place](where, by_hand(lambda g: lax.psum(g, "data") / 4))
    words = (
        r"derivative of what is called at .*losses.py:\d+.* over the workers' axis 'data' by psum"
    )
    with pytest.raises(ValueError, match=words):
        jaxsparse.grad(loss, mesh=where)(*put(where, 4))


def test_a_derivative_that_takes_its_cotangent_for_that_of_all_workers_is_refused():
    """As where a function sums over the batch's axes, and every worker has the result."""
    where = mesh_of((4, 2))

    @jax.custom_vjp
    def energy(h):
        return lax.psum(jnp.sum(h**2), "data")

    energy.defvjp(lambda h: (energy(h), h), lambda h, g: (2 * g * h,))
    whole = jax.shard_map(energy, mesh=where, in_specs=P("data"), out_specs=P(), check_vma=False)
    outside = by_hand(lambda g: g)
    outside.defvjp(lambda h: (whole(h), h), lambda h, g: (2 * g * h,))
    for f in (whole, outside):
        with pytest.raises(ValueError, match=r"by psum, and its custom derivative does not"):
            jaxsparse.grad(lambda w, x, f=f: f(x @ w["a"]), mesh=where)(*put(where, 4))


def test_a_linear_call_that_communicates_is_refused():
    where = mesh_of((4, 2))
    total = lambda _, g: lax.psum(g, "data")
    f = lambda a: jax.custom_derivatives.linear_call(lambda _, x: 2 * x, total, (), a)
    with pytest.raises(ValueError, match=r"linear_call at .*losses.py:\d+"):
        jaxsparse.grad(lambda w, x: jnp.sum(x @ f(w["a"])), mesh=where)(*put(where, 4))


mean_of = lambda g: lax.psum(g, "data") / 4
solves = lambda back: (
    lambda a: lax.custom_linear_solve(
        lambda y: 2 * y, a, lambda _, b: b / 2, lambda _, g: back(g) / 2
    )
)
roots = lambda back: (
    lambda a: lax.custom_root(
        lambda y: y - jnp.sin(a), a, lambda _, y: jnp.sin(a), lambda _, g: back(g)
    )
)


def by_jvp(back):
    f = jax.custom_jvp(jnp.sin)
    f.defjvp(lambda x, t: (f(*x), back(jnp.cos(x[0]) * t[0])))
    return f


@pytest.mark.parametrize("shape", some([(4, 2), (8,)], [(4, 2)]), ids=str)
@pytest.mark.parametrize("kind", [solves, roots, by_jvp])
def test_sums_by_hand_in_other_derivatives(kind, shape):
    if kind is roots and jax.__version_info__ >= (0, 12):
        pytest.skip("JAX writes this derivative without jax.custom_jvp")
    where, workers = mesh_of(shape), shape[0]
    of = lambda f: lambda w, x: jnp.mean((x @ f(w["a"])) ** 2)
    with pytest.raises(ValueError, match=r" at .*losses.py:\d+.* communicates .* axis 'data'"):
        jaxsparse.grad(of(kind(mean_of)), mesh=where)(*put(where, workers))
    same = jax.custom_jvp(lambda a: a)  # its rule has no operation but the sum
    same.defjvp(lambda x, t: (x[0], mean_of(t[0])))
    with pytest.raises(ValueError, match="custom derivative of what is called at"):
        jaxsparse.grad(of(same), mesh=where)(*put(where, workers))
    own = jax.grad(of(jnp.sin if kind is not solves else lambda a: a / 2))
    right = forms.by_worker(own, workers)
    check(jaxsparse.grad(of(kind(lambda g: g)), mesh=where)(*put(where, workers)), right)


@pytest.mark.slow
@pytest.mark.parametrize("checked", some([False, True], [False]))
def test_parallel_programs_in_a_solve(checked):
    """A solve of an operator that is cut, or constrained. One that sums over workers could wait."""
    where = mesh_of((4, 2))
    split = jax.shard_map(
        lambda y: 3 * y, mesh=where, in_specs=P(None, "tp"), out_specs=P(None, "tp"),
        check_vma=checked,
    )  # fmt: skip
    kept = lambda y: lax.with_sharding_constraint(3 * y, NamedSharding(where, P("data", "tp")))
    mean = lambda y: 3 * y + lax.pmean(y, "data")

    def loss(w, x, f=mean):
        h = jax.scipy.sparse.linalg.cg(f, x @ w["a"], maxiter=2)[0]
        return jnp.mean((h @ w["b"] - x) ** 2)

    with pytest.raises(ValueError, match=r"the while at .*losses.py:\d+.* wait for ever"):
        jaxsparse.grad(loss, mesh=where)(*put(where, 4))
    for apply in (split, kept):
        found = jaxsparse.grad(lambda w, x, f=apply: loss(w, x, f), mesh=where)(*put(where, 4))
        plain = jax.grad(lambda w, x: loss(w, x, lambda y: 3 * y))
        check(found, forms.by_worker(plain))


@pytest.mark.parametrize("shape", some([(4, 2), (8,), None], [(4, 2)]), ids=str)
def test_a_kernel_that_knows_its_place_in_the_grid(shape):
    where, workers = (mesh_of(shape), shape[0]) if shape else (None, 3)
    given = put(where, workers) if shape else (forms.W, forms.inputs(workers))

    def scaled(h, out):
        out[...] = h[...] * jnp.float32(2 + pl.program_id(0))

    def kernel(h):
        block = pl.BlockSpec((1, h.shape[1]), lambda i: (i, 0))
        made = jax.ShapeDtypeStruct(h.shape, h.dtype)
        return pl.pallas_call(
            scaled, grid=len(h), in_specs=[block], out_specs=block, out_shape=made, interpret=True
        )(h)

    f = jax.custom_vjp(kernel)
    f.defvjp(lambda h: (kernel(h), None), lambda _, g: (kernel(g),))
    of = lambda f: lambda w, x: jnp.mean((f(x @ w["a"]) @ w["b"] - x) ** 2)
    found = jaxsparse.grad(of(f), mesh=where, workers=None if shape else workers)(*given)
    by_row = lambda h: h * (2 + jnp.arange(len(h), dtype=jnp.float32))[:, None]
    plain = jax.grad(of(by_row))
    check(found, forms.by_worker(plain, workers))


def test_sums_by_hand_beside_means_of_workers():
    """Called at one place, and handed over as they are, where no line tells one from the other."""
    where = mesh_of((4, 2))
    by_sum = by_hand(lambda g: lax.psum(g, "data") / 4)
    mean = lambda x: lax.pmean(x, "data")

    def called(w, x):
        a, h = w["a"], x
        for f in (by_sum, mean):
            a = f(a)
        return jnp.mean((h @ a) ** 2)

    def handed(w, x):
        over = lambda f, x: jax.shard_map(
            f, mesh=where, in_specs=P(None, "tp"), out_specs=P(None, "tp"), check_vma=False
        )(x)
        return jnp.mean((x @ over(by_sum, w["a"])) ** 2) + jnp.sum(over(mean, x @ w["a"]))

    kept, centred = jax.jit(by_sum), by_hand(mean)  # JAX keeps the program of one of them
    centred.defvjp(lambda h: (mean(h), None), lambda _, g: (mean(g),))
    beside = lambda w, x: jnp.mean(centred(x @ kept(w["a"])) ** 2)
    for loss in (called, handed, beside, beside):
        with pytest.raises(ValueError, match="custom derivative of what is called at"):
            jaxsparse.grad(loss, mesh=where)(*put(where, 4))


def test_a_function_that_communicates_has_a_derivative_that_does():
    """The rule of the forward pass calls the function, as JAX's pages write it."""
    where = mesh_of((4, 2))

    @jax.custom_vjp
    def centred(h):
        return h - lax.pmean(h.mean(0, keepdims=True), "data")

    back = lambda _, g: (g - lax.pmean(g.mean(0, keepdims=True), "data"),)
    centred.defvjp(lambda h: (centred(h), None), back)
    spec = P("data")
    split = jax.shard_map(centred, mesh=where, in_specs=spec, out_specs=spec, check_vma=False)
    off = lambda h: h - lax.pmean(h.mean(0, keepdims=True), "data")
    by_tangents, around = jax.custom_jvp(off), by_hand(lambda g: g)
    by_tangents.defjvp(lambda x, t: jax.jvp(off, x, t))
    around.defvjp(
        lambda h: (by_tangents(h), h), lambda h, g: jax.vjp(jax.checkpoint(by_tangents), h)[1](g)
    )
    for f in (centred, split, by_tangents, around):
        of = lambda f: lambda w, x: jnp.mean(jnp.tanh(f(x @ w["a"])) ** 2)
        plain = jax.grad(of(centred))
        found = jaxsparse.grad(of(f), mesh=where)(*put(where, 4))
        check(found, forms.by_worker(plain))


def norm(where):
    """A norm whose spec cuts weights over workers, as ZeRO does by hand."""
    spec = P("data", "tp")
    total = lambda a: lax.psum(jnp.sum(a * a), ("data", "tp"))
    return jax.shard_map(total, mesh=where, in_specs=spec, out_specs=P(), check_vma=False)


def test_what_is_whole_on_each_worker_is_not_cut_over_workers():
    where = mesh_of((4, 2))
    words = r"shard_map at .*losses.py:\d+.* takes a value of shape \(8, 16\)"
    loss = lambda w, x: jnp.mean((x @ w["a"]) ** 2) + norm(where)(w["a"])
    expert = jax.shard_map(  # each device has one
        lambda x, e: x * e[:1],
        mesh=where,
        in_specs=(P("data"), P("data")),
        out_specs=P("data"),
        check_vma=False,
    )
    params, x = put(where, 4)
    of_expert = lambda w, x: jnp.mean(expert(x, jnp.sin(w["a"].reshape(16, 8))) ** 2)
    by_keys = lambda w, x: jnp.mean(expert(x @ w["a"][:, :8], jnp.ones((24, 8))) ** 2)
    in_cond = lambda w, x: lax.cond(x.sum() > 0, of_expert, lambda w, x: x.sum(), w, x)
    for wrong in (loss, of_expert, by_keys, in_cond):
        with pytest.raises(ValueError, match=words.replace(r"\(8, 16", r"\(\d+, \d+")):
            jaxsparse.grad(wrong, mesh=where)(params, x)
    scaled = optax.stateless(lambda u, _: jax.tree.map(lambda g: g / norm(where)(g), u))
    tx = jaxsparse.per_worker(scaled, mesh=where)
    grads = jax.tree.map(lambda p: jnp.ones((4, *p.shape)), {"a": params["a"]})
    with pytest.raises(ValueError, match=words):
        tx.update(grads, jaxsparse.shard(tx.init({"a": params["a"]}), where), {"a": params["a"]})


def cut(body, where, cuts, makes):
    """A shard_map over workers, with the specs of its two arguments and of its result."""
    return jax.shard_map(body, mesh=where, in_specs=cuts, out_specs=makes, check_vma=False)


def by_statistic(where, w, x):
    """Experts of all workers, scaled by what a worker's batch says."""
    scaled = w["b"].reshape(4, 32) / jnp.std(x)
    return cut(lambda x, e: x * e[:, :1].sum(), where, (P("data"), P("data")), P("data"))(x, scaled)


def by_sequence(where, w, x):
    """A ring over workers: a worker has its own rows alone, and their sequences whole."""
    ring = lambda x, y: x + lax.ppermute(y, "data", [(i, (i + 1) % 4) for i in range(4)])
    spec = P(None, "data")
    return cut(ring, where, (spec, spec), spec)(x, jnp.tanh(x))


def by_loop(where, w, x):
    """Weights cut in a loop, where no program outside of it tells that they are weights."""
    part = cut(lambda x, e: x * e.sum(), where, (P("data"), P("data")), P("data"))
    more = lambda c: (part(c[0], lax.stop_gradient(w["b"])), c[1] + 1)
    return lax.stop_gradient(lax.while_loop(lambda c: c[1] < 2, more, (x, 0))[0])


def of_devices(where, w, x):
    """Each device's mean: one entry a worker here, and W of them under jax.jit."""
    return cut(lambda x, y: (x * y).mean()[None], where, (P("data"), P("data")), P("data"))(x, x)


def of_known_size(where, w, x):
    return cut(jnp.add, where, (P("data"), P("data")), P("data"))(x, jnp.ones((4, 8)))


def of_tokens(where, w, x):
    """Sequences end to end, token by token: a part of it has some tokens of each row."""
    tokens = jnp.transpose((x @ w["a"]).reshape(-1, 8, 2), (1, 0, 2)).reshape(-1, 2)
    ring = lambda x, y: x + lax.ppermute(y, "data", [(i, (i + 1) % 4) for i in range(4)])
    return cut(ring, where, (P("data"), P("data")), P("data"))(tokens, tokens)


def of_slots(where, w, x):
    """Slots of experts, which are filled by tokens of all rows."""
    chosen = jax.nn.one_hot(jnp.argmax(x[:, :4], axis=1), 4)
    slots = jnp.einsum("be,bd->ebd", chosen, x).reshape(-1, 8)
    slots = slots - jnp.sort(slots, axis=0)
    own = lambda x, y: x * jnp.float32(lax.axis_index("data")) + y
    return cut(own, where, (P("data"), P("data")), P("data"))(slots, slots)


def of_scattered(where, w, x):
    """Tokens put into slots of experts, by an index, behind another shard_map."""
    slots = jnp.argmax(x[:, :4], axis=1) * 4 + jnp.arange(len(x))
    tanh = cut(lambda x, y: jnp.tanh(x) + y, where, (P("data"), P("data")), P("data"))
    tokens = jnp.zeros((4 * len(x), 8)).at[slots].add(tanh(x, x))
    own = lambda x, y: x * jnp.float32(lax.axis_index("data")) + y
    return cut(own, where, (P("data"), P("data")), P("data"))(tokens, tokens)


def of_own_numbers(where, w, x):
    """Labels of a contrastive loss, which are those of all rows under jax.jit."""
    found = lambda z, own: (z @ lax.all_gather(z, "data", tiled=True).T) * jnp.float32(own)[:, None]
    specs = (P("data"), P("data"))
    return cut(found, where, specs, P("data"))(x @ w["a"], jnp.arange(x.shape[0]))


def sorted_behind_a_kernel(where, w, x):
    """Rows are somewhere behind a kernel, and sorted then."""
    h = cut(jnp.tanh, where, P(None, "tp"), P(None, "tp"))(x @ w["a"])
    own = lambda x, y: x * jnp.float32(lax.axis_index("data")) + y
    h = h[jnp.argsort(h[:, 0])]
    return cut(own, where, (P("data"), P("data")), P("data"))(h, h)


def of_all_workers(where, w, x):
    """Keys of all workers under jax.jit, which a body takes by its rank."""
    ranked = lambda x, keys: x @ jnp.roll(keys, lax.axis_index("data"), axis=0).T
    return cut(ranked, where, (P("data"), P()), P("data"))(x, jnp.tanh(x))


def for_all_workers(where, w, x):
    """All workers' rows under jax.jit, outside of which a loss would count them by x.shape[0]."""
    every = cut(
        lambda x, y: lax.all_gather(x * y, "data", tiled=True), where, (P("data"),) * 2, P()
    )
    return every(x, x)


def of_two_axes(where, w, x):
    """Weights are cut by a shard_map inside of another one."""
    inner = jax.shard_map(
        lambda x, e: x * e[:1, :1],
        mesh=where, in_specs=(P("data"), P("data")), out_specs=P("data"),
        axis_names={"data"}, check_vma=False,
    )  # fmt: skip
    return jax.shard_map(
        lambda x, e: inner(x, e),
        mesh=where, in_specs=(P(), P()), out_specs=P(), axis_names={"tp"}, check_vma=False,
    )(x, w["b"])  # fmt: skip


def tells_workers(where):
    """A body that uses the worker's number."""
    own = lambda x, y: x * jnp.float32(lax.axis_index("data")) + y
    return cut(own, where, (P("data"), P("data")), P("data"))


def of_halves(where, w, x):
    """The batch's even rows, and behind them the odd ones."""
    h = jnp.concatenate([x[::2], x[1::2]])
    return tells_workers(where)(h, h)


def sorted_inside(where, w, x):
    """Sorted in a shard_map that does not name the axis, and then in one that does."""
    h = cut(lambda x, y: jnp.sort(x + y, axis=0), where, (P(), P()), P())(x, x)
    h = cut(lambda x, y: jnp.tanh(x) * y, where, (P("data"), P("data")), P("data"))(h, h)
    return tells_workers(where)(h, h)


def repeated_experts(where, w, x):
    """As many as there are rows, but not of them."""
    experts = jnp.repeat(w["b"][:2], len(x) // 2, axis=0)
    return cut(lambda x, e: x * e[:1], where, (P("data"), P("data")), P("data"))(x, experts)


def of_keys(where, w, x):
    """A key for each worker, drawn outside."""
    noise = lambda x, keys: x * jax.random.normal(keys[0], x.shape)
    keys = jax.random.split(jax.random.key(0), 4)
    return cut(noise, where, (P("data"), P("data")), P("data"))(x, keys)


def in_a_loop(where, w, x):
    """A Python loop over rows has more shard_maps, with more rows."""
    far = lambda x, y: x @ jnp.roll(y, lax.axis_index("data"), axis=0).T
    one = cut(far, where, (P("data"), P()), P("data"))
    return sum(one(x[i : i + 1], x).sum() for i in range(len(x)))


def ranked_in_a_scan(where, w, x):
    """JAX moves what a body makes of the worker's number alone in front of the scan."""
    f = tells_workers(where)
    layer = lambda h, _: (f(h[jnp.argsort(h[:, 0])], h), None)
    return lax.scan(layer, x, None, length=2)[0]


def dealt_out(where, w, x):
    """A row for each device under jax.jit, and a W-th of one worker's rows here."""
    first = lambda x, y: (x * y)[:, 0]
    spec = P(None, "data")
    mean = lambda *a: lax.pmean(first(*a), "data")
    return cut(mean, where, (spec, spec), P())(x.reshape(-1, 4, 8), x.reshape(-1, 4, 8))


def beside_weights(where, w, x):
    """Weights that stand behind rows would count on each worker."""
    z = jnp.concatenate([x, w["b"]])
    centred = lambda x, y: x - lax.pmean(y.mean(0, keepdims=True), "data")
    return cut(centred, where, (P("data"), P("data")), P("data"))(z, z)


def summed_over_both(where, w, x):
    """An entry meets others once the workers' axis has left the spec."""
    spec = P(("data", "tp"))
    add = lambda a, b: a + lax.psum(b, "tp")
    return cut(add, where, (spec, spec), spec)(w["b"], w["b"]) + x.mean()


def of_inner_workers(where, w, x):
    """Rows are cut over the other axis first, so that other ones meet."""
    spec = P(("tp", "data"))
    centred = lambda x, y: x - lax.pmean(y.mean(0, keepdims=True), "data")
    return cut(centred, where, (spec, spec), spec)(x, x)


def ranked_backward(where, w, x):
    """A derivative tells workers apart, its function does not, and rows were sorted."""
    rank = lambda x, g: g * jnp.float32(lax.axis_index("data")) * x
    f = jax.custom_vjp(jnp.sin)
    back = cut(rank, where, (P("data"), P("data")), P("data"))
    f.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (back(x, g),))
    return f(jnp.sort(x @ w["a"], axis=0))


def by_rule(residual, cotangent=lambda g: g):
    """A function and its derivative tell workers apart. The second is given other rows."""

    def made(where, w, x):
        f, rank = jax.custom_vjp(lambda x: rank(x, x)), tells_workers(where)
        back = lambda x, g: (rank(x, cotangent(g)),)
        f.defvjp(lambda x: (rank(x, x), residual(x)), back)
        return lax.scan(jax.checkpoint(lambda h, _: (f(h), None)), x @ w["a"], None, length=2)[0]

    return made


def of_first_rows(pick):
    """A body closes over as many rows as there are on a device, however many the batch has."""

    def made(where, w, x):
        first = pick(x)
        own = cut(lambda x, y: x + jnp.sum(first) * y, where, (P("data"), P("data")), P("data"))
        return lax.scan(jax.checkpoint(lambda h, _: (own(h, h), None)), x, None, length=2)[0]

    return made


def closed_in_a_rule(where, w, x):
    """The residual of a derivative is a fixed number of rows, over which its body closes."""
    split = lambda f: cut(f, where, (P("data"), P("data")), P("data"))
    f = jax.custom_vjp(jnp.sin)
    back = lambda first, g: (split(lambda x, g: g * first.sum())(g, g),)
    f.defvjp(lambda x: (jnp.sin(x), x[:2]), back)
    return f(x @ w["a"])


def by_tangents(where, w, x):
    f = jax.custom_jvp(jnp.sin)
    f.defjvp(lambda x, t: (jnp.sin(x[0]), tells_workers(where)(t[0][::-1], x[0])))
    return f(x @ w["a"])


def solved(where, w, x):
    twice = cut(lambda x, y: x + y, where, (P("data"), P("data")), P("data"))
    return jax.scipy.sparse.linalg.cg(lambda y: twice(y, y), x @ w["a"], maxiter=2)[0]


def mapped_over_workers(where, w, x):
    split = jax.shard_map(jnp.tanh, mesh=where, in_specs=P(), out_specs=P(), check_vma=False)
    return jax.vmap(split, spmd_axis_name="data")(x @ w["a"])


def paired(where, w, x):
    """Pairs of rows that a stack has put beside each other, in another order than the batch's."""
    h = jnp.stack([x, jnp.sin(x)]).reshape(-1, 2, 8)
    return tells_workers(where)(h, h)


def by_each_shard(where, w, x):
    """All rows of one shard, and behind them those of the next."""
    both = cut(lambda x, y: x + y, where, (P(), P()), P("tp"))(x, jnp.sin(x))
    return tells_workers(where)(both, both)


def mapped_outside(where, w, x):
    """A jax.vmap around a shard_map, with another one inside."""
    rank = lambda a: a * jnp.float32(lax.axis_index("data"))
    options = {"mesh": where, "check_vma": False}
    inner = lambda a: jax.shard_map(
        rank, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}, check_vma=False
    )(a)
    outer = jax.shard_map(inner, in_specs=P(), out_specs=P(), axis_names={"tp"}, **options)
    return jax.vmap(outer)(jnp.stack([w["b"], w["b"]])).sum() + x


def gathered_weights(where, w, x):
    """ZeRO by hand."""
    whole = lambda x, a: x @ lax.all_gather(a, "data", tiled=True)
    return cut(whole, where, (P("data"), P("data")), P("data"))(x, w["a"])


def divided(where, w, x):
    """A reduce-scatter of all rows, where each device has them all under jax.jit."""
    part = lambda x: lax.all_gather(
        jnp.tanh(lax.psum_scatter(x, "data", tiled=True) / 4), "data", tiled=True
    )
    return cut(part, where, P(), P())(x @ w["a"])


def by_custom_vmap(where, w, x):
    rank = lambda x: x * jnp.float32(lax.axis_index("data"))
    f = jax.custom_batching.custom_vmap(cut(rank, where, P("data"), P("data")))
    f.def_vmap(lambda count, batched, x: (jax.lax.map(lambda x: f(x), x), True))
    return f(x @ w["a"])


NO_ROWS = {
    divided: r"|the reduce_scatter at .*losses.py:\d+.* a part of one worker's rows",
    by_custom_vmap: r"|rule of the function at .*losses.py:\d+.* all workers' rows",
    paired: r"takes a value of shape \(4, 2, 8\), .* not all rows of a worker",
    by_each_shard: r"takes a value of shape \(8, 8\), .* not all rows of a worker",
    mapped_outside: r"is in a jax.vmap, and has another one inside",
    gathered_weights: r"does not run on one worker's values, which are whole",
    ranked_in_a_scan: r"takes a value of shape \(4, 8\), .* behind the jit at .*_losses",
    dealt_out: r"takes a value of shape \(1, 4, 8\), .* no rows of a batch",
    beside_weights: r"takes a value of shape \(20, 8\), .* no rows of a batch",
    summed_over_both: r"takes a value of shape \(16, 8\), .* no rows of a batch",
    of_inner_workers: r"takes a value of shape \(4, 8\), .* cut over \['tp'\] first",
    ranked_backward: r"takes a value of shape \(4, 16\), .* behind the jit at .*_losses",
    by_rule(lambda x: x[jnp.argsort(x[:, 0])]): r"takes .*\(4, 16\), .* in another order behind",
    by_rule(lambda x: x, lambda g: g[::-1]): r"takes .*\(4, 16\), .* in another order behind",
    of_first_rows(lambda x: x[:2]): r"closes over .*\(2, 8\) that is, .* a fixed number of rows",
    of_first_rows(lambda x: x[0]): r"closes over .*\(8,\) that is, .* a fixed number of rows",
    closed_in_a_rule: r"closes over .*\(2, 16\) that is, .* a fixed number of rows",
    by_tangents: r"tells workers apart, and is given tangents by a jax.custom_jvp",
    solved: r"takes .*\(4, 16\), .* in an operation that is not followed",
    mapped_over_workers: r"is in a jax.vmap with the workers' axis 'data' as spmd_axis_name",
    of_halves: r"takes a value of shape \(4, 8\), .* behind the slice at .*_losses",
    sorted_inside: r"takes a value of shape \(4, 8\), .* behind the jit at .*_losses",
    repeated_experts: r"takes a value of shape \(4, 8\), .* no rows of a batch",
    of_keys: r"takes a value of shape \(4,\), .* no rows of a batch",
    in_a_loop: r"takes a value of shape \(1, 8\), .* are of a fixed size",
    of_tokens: r"takes a value of shape \(32, 2\), whose 32 entries",
    of_own_numbers: r"takes a value of shape \(4,\), whose 4 entries",
    sorted_behind_a_kernel: r"takes a value of shape \(4, 16\), whose 4 entries",
    of_scattered: r"takes a value of shape \(16, 8\), whose 16 entries",
    of_slots: r"takes a value of shape \(16, 8\), whose 16 entries",
    of_all_workers: r"takes a value of shape \(4, 8\) .*grows.*all_gather\(x, 'data'",
    for_all_workers: r"makes a value of shape \(16, 8\) .*grows with the batch, beside others",
    of_two_axes: r"takes a value of shape \(16, 8\), whose 16 entries",
    by_statistic: r"takes a value of shape \(4, 32\), whose 4 entries",
    by_sequence: r"takes a value of shape \(4, 8\), whose 8 entries",
    by_loop: r"takes a value of shape \(16, 8\), whose 16 entries",
    of_devices: r"makes a value of shape \(1,\), whose 1 .* return an entry for each row",
    of_known_size: r"whether these are a worker's rows can't be told. .* the rows of all 4 workers",
}


@pytest.mark.parametrize(
    ("made", "kind"),
    [*((made, AxisType.Auto) for made in NO_ROWS), (of_devices, AxisType.Explicit)],
)
def test_what_is_cut_over_workers_grows_with_the_batch(made, kind):
    where = mesh_of((4, 2), kind)
    loss = lambda w, x: jnp.sum(made(where, w, x) ** 2) + jnp.sum(w["a"])
    with pytest.raises(ValueError, match=r"shard_map at .*losses.py:\d+.*" + NO_ROWS[made]):
        jaxsparse.grad(loss, mesh=where)(*put(where, 4))


@pytest.mark.parametrize("made", some(NO_ROWS, [gathered_weights, ranked_in_a_scan, of_devices]))
def test_simulated_workers_cut_no_more(made):
    """The mesh of their loss has one device along the axis, which stands for all workers."""
    if made in (of_inner_workers, by_each_shard, mapped_over_workers, of_two_axes):
        pytest.skip("cut over the other axis, of one device here, or over devices")
    where = jax.make_mesh((1, 1), ("data", "tp"), (AxisType.Auto,) * 2, devices=jax.devices()[:1])
    loss = lambda w, x: jnp.sum(made(where, w, x) ** 2) + jnp.sum(w["a"])
    with pytest.raises(ValueError, match=r"losses.py:\d+"):
        jaxsparse.grad(loss, workers=4)(forms.W, forms.inputs(4))


@pytest.mark.parametrize("groups", [None, [[0, 1], [2, 3]]])
def test_what_jax_does_not_simulate_is_told(groups):
    where = jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=jax.devices()[:1])
    ring = lambda x: lax.ppermute(x, "data", [(i, i) for i in range(where.shape["data"])])
    means = lambda x: x - lax.psum(x, "data", axis_index_groups=groups)
    split = cut(ring if groups is None else means, where, P("data"), P("data"))
    with pytest.raises(ValueError, match=r"losses.py:\d+.* does not run with simulated workers"):
        jaxsparse.grad(lambda w, x: jnp.sum(split(x @ w["a"])), workers=4)(forms.W, forms.inputs(4))


KEYS = {
    "of a tuple": lambda key: jax.random.fold_in(key, lax.axis_index(("data",))),
    "of a step": lambda key: jax.random.fold_in(key, 3 * 4 + lax.axis_index("data")),
    "made": lambda key: jax.random.key(7 + lax.axis_index("data")),
}


@pytest.mark.parametrize("made", some(KEYS, ["of a step"]))
def test_a_key_made_of_the_workers_number_tells_no_rows_apart(made):
    """So it may draw for micro-batches, of which each is a part of a worker's rows."""
    where = mesh_of((4, 2))
    drawn = lambda x: jax.random.bernoulli(KEYS[made](jax.random.key(0)), 0.5, x.shape)
    drop = lambda x: jnp.where(drawn(x), x, 0)
    split = cut(drop, where, P("data"), P("data"))
    parts = lambda w, x: lax.map(lambda x: jnp.mean(split(x @ w["a"]) ** 2), x.reshape(2, -1, 8))
    _, grads = jaxsparse.value_and_grad(lambda w, x: parts(w, x).mean(), mesh=where)(*put(where, 4))
    assert np.all(np.any(np.asarray(grads["a"]), (1, 2)))


def test_a_number_that_scales_rows_tells_them_apart():
    """As whole numbers may, that no key is made of."""
    where = mesh_of((4, 2))
    for scaled in (
        lambda x: x * jnp.float32(lax.axis_index("data") + 1),
        lambda x: lax.switch(lax.axis_index("data"), [jnp.sin, jnp.cos, jnp.tanh, jnp.exp], x),
    ):
        split = cut(scaled, where, P("data"), P("data"))
        loss = lambda w, x, f=split: jnp.sum(f(jnp.sort(x @ w["a"], 0)))
        with pytest.raises(ValueError, match="in another order"):
            jaxsparse.grad(loss, mesh=where)(*put(where, 4))


def test_rows_that_a_body_takes_past_its_specs():
    where = mesh_of((4, 2))
    params, x = put(where, 4)

    def closed(w, x):
        h = x @ w["a"]
        far = lambda y: y @ jnp.roll(h, lax.axis_index("data"), axis=0).T
        split = jax.shard_map(
            far, mesh=where, in_specs=P("data"), out_specs=P("data"), check_vma=False
        )
        return jnp.sum(split(h))

    def by_number(w, x):
        part = lambda x: lax.dynamic_slice_in_dim(x, lax.axis_index("data") * (len(x) // 4), 1)
        mean = lambda x: lax.pmean(jnp.tanh(part(x)), "data")
        split = jax.shard_map(mean, mesh=where, in_specs=P(), out_specs=P(), check_vma=False)
        return jnp.sum(split(x @ w["a"]))

    for loss, words in (
        (closed, r"shard_map at .*losses.py.* closes over a value .* that grows with the batch"),
        (by_number, r"dynamic_slice at .*losses.py.* uses the worker's number in the"),
    ):
        with pytest.raises(ValueError, match=words):
            jaxsparse.grad(loss, mesh=where)(params, x)


def part(h, rank):
    """A worker's part of rows, where it has all workers' rows."""
    return lax.dynamic_slice_in_dim(h, rank * (len(h) // 4), len(h) // 4)


def parts(h):
    return [h[i::4] for i in range(4)]


def pick_by_kernel(h, rank):
    def pick(rank, h, out):
        out[...] = h[pl.ds(rank[0], 1)]

    shape = jax.ShapeDtypeStruct((1, h.shape[1]), h.dtype)
    return pl.pallas_call(pick, out_shape=shape, interpret=True)(rank[None], lax.stop_gradient(h))


def rule_of_vjp(h):
    """Its backward rule alone knows the worker's number."""
    f = jax.custom_vjp(lambda h: jnp.mean(jnp.sin(h)))

    def back(h, g):
        rank, size = lax.axis_index("data"), len(h) // 4
        own = g * jnp.cos(part(h, rank)) / part(h, rank).size
        return (lax.dynamic_update_slice_in_dim(h * 0, 4 * own, rank * size, 0),)

    f.defvjp(lambda h: (f(h), h), back)
    return f(h)


def rule_of_jvp(h, of_tangents=False):
    f = jax.custom_jvp(lambda h: jnp.mean(jnp.sin(h)))

    @f.defjvp
    def rule(primals, tangents):
        own = lambda x: part(x[0], lax.axis_index("data"))
        slope = 1.0 if of_tangents else jnp.cos(own(primals))
        return f(*primals), jnp.mean(slope * own(tangents))

    return f(h)


ranks = lambda: jnp.arange(4, dtype=jnp.int32)
ring = [(i, (i + 1) % 4) for i in range(4)]
rank_of = lambda: lax.axis_index("data")


def through_reference(h):
    kept = jax.new_ref(h)
    kept[...] = 2 * kept[...]
    return kept[...]


def part_by_a_reference(h):
    """JAX differentiates no reference, but in a rule."""

    def rank_in_a_jit():
        kept = jax.new_ref(jnp.int32(0))
        jax.jit(lambda: kept.__setitem__(..., rank_of()))()
        return kept[...]

    size = len(h) // 4
    f = jax.custom_vjp(lambda h: part(h, rank_in_a_jit()))
    place = lambda rank, g: lax.dynamic_update_slice_in_dim(
        jnp.zeros((4 * size, g.shape[1])), g, rank * size, 0
    )
    f.defvjp(
        lambda h: (lambda rank: (part(h, rank), rank))(rank_in_a_jit()),
        lambda rank, g: (place(rank, g),),
    )
    return f(h)


mask_of = lambda n: jnp.float32(jnp.arange(n) % 4 == rank_of())[:, None]
PICKED = {  # what picks some of a worker's rows by its number
    "table": lambda h: part(h, jnp.int32([2, 0, 3, 1])[rank_of()]),
    "switch": lambda h: lax.switch(rank_of(), [lambda i=i: parts(h)[i] for i in range(4)]),
    "loop": lambda h: lax.stop_gradient(
        lax.fori_loop(0, rank_of(), lambda _, h: jnp.roll(h, 1, 0), h)[:1]
    ),
    "psum_scatter": lambda h: part(h, lax.psum_scatter(ranks(), "data") // 4),
    "all_to_all": lambda h: part(h, lax.all_to_all(ranks(), "data", 0, 0, tiled=True)[0]),
    "ppermute": lambda h: part(h, lax.ppermute(jnp.int32(1), "data", ring[:1])),
    "mask": lambda h: jnp.where((jnp.arange(len(h)) % 4 == rank_of())[:, None], h, 0),
    "mask times rows": lambda h: h * mask_of(len(h)),
    "one_hot times rows": lambda h: jnp.einsum(
        "wr,w->wr", h.reshape(4, -1), jax.nn.one_hot(rank_of(), 4)
    ),
    "product with one_hot": lambda h: jax.nn.one_hot(rank_of() + jnp.arange(1), len(h)) @ h,
    "bias": lambda h: jnp.tanh(h) - 1e9 * (1 - mask_of(len(h))),
    "window": lambda h: h * jnp.roll(jnp.float32(jnp.arange(len(h)) < 2), rank_of() * 2)[:, None],
    "row of a table": lambda h: h.reshape(4, -1) * jnp.eye(4)[rank_of()][:, None],
    "number that is set": lambda h: h.reshape(4, -1) * jnp.zeros(4).at[rank_of()].set(1)[:, None],
    "switch of constants": lambda h: (
        h.reshape(4, -1)
        * lax.switch(rank_of(), [lambda i=i: jnp.eye(4)[i] for i in range(4)])[:, None]
    ),
    "switch of constants for parts": lambda h: (
        h[:, 0].reshape(2, -1)
        * lax.switch(rank_of(), [lambda i=i: jnp.eye(2)[i % 2] for i in range(4)])[:, None]
    ),
    "factor of 0 or 1": lambda h: h * jnp.float32(rank_of() == 0),
    "keys": lambda h: h[
        lax.sort((jnp.arange(len(h)) ^ rank_of(), jnp.int32(h[:, 0])), num_keys=1)[1] % 2
    ],
    "clipped": lambda h: (
        h * jnp.clip(1 - jnp.abs(jnp.arange(len(h)) - rank_of()), 0, 1)[:, None].astype(h.dtype)
    ),
    "sum of segments": lambda h: jax.ops.segment_sum(h, jnp.int32(mask_of(len(h))[:, 0]), 2),
    "rows at a place": lambda h: lax.dynamic_update_slice(
        jnp.zeros((2 * len(h), h.shape[1])), h, (rank_of(), 0)
    )[: len(h)],
    "sort": lambda h: lax.sort((jnp.broadcast_to(mask_of(len(h)), h.shape), h), 0, num_keys=1)[1],
    "filter": lambda h: jnp.convolve(h[:, 0], mask_of(len(h))[:, 0], mode="valid"),
    "bounds": lambda h: lax.clamp(-mask_of(len(h)) * jnp.ones_like(h), h, 9 * jnp.ones_like(h)),
    "statistic": lambda h: jnp.where(rank_of() == 0, h.mean(), 0),
    "group": lambda h: jnp.where(
        lax.psum(jnp.ones(()), "data", axis_index_groups=[[0], [1, 2, 3]]) < 2, h, 0
    ),
    "part of a table": lambda h: h * lax.psum_scatter(jnp.eye(4), "data")[rank_of()],
    "solve": lambda h: (
        lambda d: lax.custom_linear_solve(
            lambda v: v * d, h, lambda _, c: c / d, lambda _, c: c / d
        )
    )(1 + mask_of(len(h))),
    "reference": lambda h: jnp.where(mask_of(len(h)) > 0, through_reference(h), 0),
    "scheduled": scheduling_group("g")(lambda h: jnp.where(mask_of(len(h)) > 0, h, 0)),
    "remat of a scan": jax.checkpoint(
        lambda h: lax.scan(lambda c, _: (c + h * mask_of(len(h)), None), h, None, length=2)[0]
    ),
    "kernel": lambda h: pick_by_kernel(h, rank_of()),
    "rule of vjp": rule_of_vjp,
    "rule of jvp": rule_of_jvp,
    "rule of tangents": lambda h: rule_of_jvp(h, of_tangents=True),
    "number of rows' own": lambda h: jnp.where((jnp.int32(h[:, :1]) % 4 == rank_of()), h, 0),
    "barrier": lambda h: part(*lax.optimization_barrier((h, rank_of()))),
    "reduced": lambda h: lax.reduce(
        jnp.stack([jnp.broadcast_to(mask_of(len(h)), h.shape), h]), jnp.float32(1), lax.mul, (0,)
    ),
    "agreed table": lambda h: (
        jax.nn.one_hot(lax.all_gather(jnp.arange(3, -1, -1), "data")[0][rank_of()], 4)
        @ h.reshape(4, -1)
    ),
    "reference in a jit": part_by_a_reference,
    "key that hides it": lambda h: part(
        h, jax.random.key_data(jax.random.wrap_key_data(jnp.uint32([0, rank_of()])))[1]
    ),
    "bits of a key": lambda h: part(
        h, jax.random.PRNGKey(lax.axis_index("data"))[1].astype(jnp.int32)
    ),
    "first worker's": lambda h: lax.all_gather(h, "data")[0],
    "neighbour's": lambda h: lax.ppermute(h, "data", ring),
    "factor": lambda h: h * jnp.float32(1 + rank_of()),
}


@pytest.mark.parametrize("pick", some(PICKED, ["table", "rule of vjp"]))
@pytest.mark.parametrize("around", some(["nothing", "map", "loop"], ["nothing", "loop"]))
def test_rows_that_a_body_picks_by_its_number(pick, around):
    """It has one worker's rows alone, whole, where it has all workers' under jax.jit."""
    where = mesh_of((4, 2))
    of = lambda h: jnp.mean(PICKED[pick](h))
    # JAX moves what does not change in front of a loop, without the scopes that it was in.
    turn = lambda h: lambda c, _: (jnp.tanh(c * h.mean()) + of(h) + of(lax.stop_gradient(h)), None)
    looped = lambda h: lax.scan(turn(h), 0.0, None, length=2)[0]
    mean = lambda h: lax.pmean((looped if around == "loop" else of)(h), "data")
    split = jax.shard_map(mean, mesh=where, in_specs=P(), out_specs=P(), check_vma=False)
    both = lambda h: jax.vmap(split, in_axes=2)(jnp.stack([h, jnp.sin(h)], 2)).sum()
    loss = lambda w, x: (both if around == "map" else split)(x @ w["a"])
    uses = "uses the worker's number|sums what is of a batch"
    words = rf"({uses}) in the jax.shard_map at .*losses.py:\d+.*do not name"
    with pytest.raises(ValueError, match=words):
        jaxsparse.grad(loss, mesh=where)(*put(where, 4))


four = lambda: mesh_of((4, 2))
by_four = lambda f, i, o, **more: jax.shard_map(
    f, mesh=four(), in_specs=i, out_specs=o, check_vma=more.get("checked", False)
)
square = lambda y: jnp.mean(y**2)


def number_in_a_loop(w, x):
    turn = lambda w: lambda r: jnp.tanh(r @ w) * jnp.float32(1 + rank_of())
    body = lambda x, w: lax.pmean(square(lax.map(turn(w), x)), "data")
    return by_four(body, (P(), P()), P(), checked=True)(x, w)


def with_rule(back, of=lambda x, a: jnp.tanh(x @ a)):
    f = jax.custom_vjp(of)
    f.defvjp(lambda *given: (of(*given), given), back)
    return f


def sum_in_a_loop(w, x):
    """A custom derivative that sums by hand, in a loop that it differentiates."""

    def back(saved, g):
        x, a = saved
        g = g * (1 - jnp.tanh(x @ a) ** 2)
        total = by_four(lambda x, g: lax.psum(x.T @ g, "data"), (P("data"), P("data")), P())
        turn = lambda a: lambda c, _: (c + jnp.sum(a * total(x, g)), None)
        return g @ a.T, jax.grad(lambda a: lax.scan(turn(a), 0.0, None, length=1)[0])(a)

    return square(with_rule(back)(x, w))


def turned_in_a_loop(w, x):
    """A rule that gives rows in another order to a body that tells workers apart."""

    def back(saved, g):
        by_rank = by_four(lambda h: h * jnp.float32(1 + rank_of()), P("data"), P("data"))
        turn = lambda c, h: jnp.tanh(c) * by_rank(h[::-1])[::-1]
        loop = lambda c: lax.scan(lambda c, _: (turn(c, saved[0]), None), c, None, length=1)[0]
        return jax.vjp(loop, saved[0])[1](g)

    return square(jax.jit(with_rule(back, jnp.tanh))(x @ w))


def from_the_first(w, x):
    """JAX keeps one program of jnp.where for both bodies."""
    of_first = lambda y: lax.psum(jnp.where(rank_of() == 0, y, 0.0), "data")
    mean = by_four(lambda x: of_first(x.mean(0)), P(), P())(x)
    one = by_four(lambda x: of_first(x.mean(0) * 0 + 1), P("data"), P())(x)
    return square(jnp.tanh(x @ w) - (mean * one)[None])


def of_rows_and_weights(w, x):
    """JAX keeps one program of a function, which is called with rows and with weights."""
    norm = by_four(lambda g: g / jnp.sqrt((g**2).sum()), P("data"), P("data"))
    back = lambda saved, g: (norm(g) * (1 - jnp.tanh(saved[0]) ** 2),)
    f = jax.jit(with_rule(back, jnp.tanh))
    weights = jnp.tile(w, (2, 1))  # as many rows as the batch
    return square(f(x @ w)) + square(f(weights) - 1)


def unlike_orders(w, x):
    """Devices pair other rows where one spec names the axes in another order."""
    one, other = P(("tp", "data")), P(("data", "tp"))
    by = jax.shard_map(
        lambda h, y: h * y,
        mesh=four(),
        in_specs=(one, other),
        out_specs=other,
        check_vma=False,
    )
    return square(by(jnp.tanh(x @ w), x))


def sum_in_a_force(w, x):
    """JAX drops the energy, of which a jitted gradient needs nothing."""
    total = jax.custom_vjp(lambda v: lax.psum(v, "data"))
    total.defvjp(lambda v: (lax.psum(v, "data"), None), lambda _, g: (g,))
    energy = by_four(lambda h: total((h**4).sum()), P("data"), P())
    return square(jax.jit(jax.grad(energy))(x @ w) - x)


def force_of_a_mean(w, x):
    energy = by_four(lambda h: lax.pmean((h**4).mean(), "data"), P("data"), P())
    return square(jax.grad(energy)(x @ w) - x)


def force_of_a_mean_on_rows(w, x):
    laid = lambda h: jnp.broadcast_to(lax.psum((h**4).sum(), "data"), (len(h),))
    energy = lambda h: by_four(laid, P("data"), P("data"))(h).mean()
    return square(jax.checkpoint(jax.grad(energy))(x @ w) - x)


def curvature_of_turned_rows(w, x):
    by_rank = by_four(lambda h: h * jnp.float32(1 + rank_of()), P("data"), P("data"))
    force = jax.jit(jax.grad(lambda h: by_rank((h**4)[::-1]).sum()))
    return square(jax.grad(lambda h: force(h).sum())(x @ w) - x)


def force_in_a_forward_rule(w, x):
    by_rank = by_four(lambda h: h * jnp.float32(1 + rank_of()), P("data"), P("data"))
    force = jax.grad(lambda h: by_rank((h**4)[::-1]).sum())
    f = jax.custom_vjp(jnp.sin)
    f.defvjp(lambda h: (jnp.sin(h), force(h)), lambda force, g: (g * force,))
    return square(jax.jit(f)(x @ w))


def turned_in_a_rule_under_remat(w, x):
    by_rank = by_four(lambda h: h * jnp.float32(1 + rank_of()), P("data"), P("data"))
    f = jax.custom_jvp(jnp.sin)
    f.defjvp(lambda given, along: (jnp.sin(given[0]), along[0] * by_rank(given[0][::-1])))
    return square(jax.checkpoint(f)(x @ w))


def cut_weights_in_a_third_derivative(w, x):
    by = by_four(lambda h, c: h * c.sum(), (P("data"), P("data")), P("data"))
    slope = lambda f: lambda h: jax.checkpoint(jax.grad(f))(h).sum()
    energy = lambda h: by(h**4, jnp.arange(1.0, 9)).sum()
    return square(jax.checkpoint(jax.grad(slope(slope(energy))))(x @ w) - x)


def rows_in_a_force(w, x):
    by = by_four(lambda h, c: h * c.mean(), (P("data"), P()), P("data"))
    return square(jax.jit(lambda h: jax.grad(lambda c: by(h, c).sum())(h))(x @ w))


def weights_in_a_force(w, x):
    of_parts = lambda h, c: lax.pmean(h.sum() * (c * jnp.arange(1.0, len(c) + 1)).sum(), "data")
    by = by_four(of_parts, (P("data"), P("data")), P())
    return square(jax.jit(lambda h: jax.grad(lambda c: by(h, c))(jnp.ones(8)))(x @ w))


def helper():
    return jax.jit(by_four(lambda h: h * jnp.float32(1 + rank_of()), P("data"), P("data")))


def transposed_helper(w, x):
    """Its other use has the mark of what it takes."""
    f, h = helper(), x @ w
    return square(f(h) + jax.linear_transpose(f, h)(jnp.tanh(h)[::-1])[0][::-1])


def helper_of_tangents(w, x):
    f = helper()
    g = jax.custom_jvp(lambda h: f(jnp.sin(h)))
    slope = lambda h, t: f((t * jnp.cos(h))[::-1])[::-1]
    g.defjvp(lambda given, along: (f(jnp.sin(given[0])), slope(given[0], along[0])))
    return square(g(x @ w))


# JAX drops the mark of what a body takes for its shape alone.
def by_a_number_of_rows(h, y):
    return lax.psum((h**2).sum(), "data") / (y.shape[0] * 8)


def number_of_rows_in_a_jit(w, x):
    mean = by_four(by_a_number_of_rows, (P("data"), P()), P())
    return jax.jit(lambda h: mean(h, x))(jnp.tanh(x @ w))


def number_of_rows_in_a_checkpoint(w, x):
    mean = by_four(by_a_number_of_rows, (P("data"), P()), P())
    return jax.checkpoint(lambda h: mean(h, x))(jnp.tanh(x @ w))


def width_of_cut_weights_in_a_scan(w, x):
    by = by_four(lambda h, a: jnp.tanh(h) * a.shape[0], (P("data"), P("data")), P("data"))
    turn = jax.checkpoint(lambda h, a: (by(h @ a, a[:, 0]), None))
    return square(lax.scan(turn, x, jnp.stack([w, w.T]))[0])


def gradient_of_a_custom_energy_in_a_forward_rule(w, x):
    energy = by_four(lambda h: lax.psum((h**4).sum(), "data"), P("data"), P())
    mean = by_four(lambda c: lax.pmean((c**2).mean(), "data"), P("data"), P())
    own = with_rule(lambda saved, g: jax.vjp(energy, saved[0])[1](g), energy)
    f = jax.custom_vjp(jnp.sin)
    f.defvjp(lambda h: (jnp.sin(h), jax.grad(own)(h)), lambda force, c: (c * force + 0 * mean(c),))
    return square(f(x @ w))


def rows_summed_in_an_unnamed_body(w, x):
    by = by_four(lambda h: jnp.tanh(lax.pmean(h, "data")), P(), P())
    return square(by(x @ w) - x)


def rows_summed_one_by_one(w, x):
    by = by_four(lambda h: lax.map(lambda row: jnp.tanh(lax.pmean(row, "data")), h), P(), P())
    return square(by(x @ w) - x)


def rows_summed_in_a_vmap(w, x):
    by = by_four(lambda h: jnp.tanh(lax.pmean(h, "data")), P(), P())
    return square(jax.vmap(by)(jnp.stack([x @ w, x])))


def rows_summed_in_a_forward_rule(w, x):
    f = jax.custom_vjp(lambda h: jnp.tanh(h) + 0 * lax.pmean(h.mean(), "data"))
    mean = lambda h: lax.pmean(h, "data")
    f.defvjp(lambda h: (jnp.tanh(mean(h)), h), lambda h, g: (mean(g) / jnp.cosh(h) ** 2,))
    return square(by_four(f, P(), P())(x @ w) - x)


def gradient_in_an_unnamed_body(w, x):
    """Of a sum that has weights alone, whose cotangents are rows."""
    mean = lambda v: lax.pmean(v, "data")
    along = lambda h: jnp.tanh(jax.vjp(mean, jnp.zeros_like(h))[1](h)[0])
    return square(by_four(along, P(), P())(x @ w) - x)


def cut_beside(w, x, positions):
    """A mean, and that of a penalty on values that a spec cuts."""
    mean = lambda h, p: lax.pmean(jnp.mean(h**2) + jnp.mean(jnp.tanh(p)) ** 2, "data")
    return by_four(mean, (P("data"), P("data")), P())(x @ w, positions)


def taken_along_equal_tables(w, x):
    table = jnp.broadcast_to(w.reshape(-1), (len(x), 64))
    return cut_beside(w, x, jnp.take_along_axis(table, jnp.arange(len(x))[:, None], 1)[:, 0])


def drawn_by_positions(w, x):
    spread = jnp.exp(w[0, 0]) * jnp.arange(1.0, len(x) + 1)
    return cut_beside(w, x, jax.random.gamma(jax.random.key(0), spread))


def keys_of_positions(w, x):
    """The bits of a key are its seed."""
    numbers = jax.vmap(lambda i: jax.random.key_data(jax.random.key(i))[1])(jnp.arange(len(x)))
    return cut_beside(w, x, w[0, 0] * numbers.astype("f"))


def equal_parts_of_tp(w, x):
    part = by_four(lambda a: jnp.broadcast_to(a.sum(), (len(x) // 2,)), P("tp"), P("tp"))
    return cut_beside(w, x, part(w))


def positions_made_in_a_vmap(w, x):
    number = by_four(lambda z: z + jnp.arange(1.0, len(z) + 1), P(), P())
    return cut_beside(w, x, jax.vmap(number)(jnp.broadcast_to(w[:2, :1], (2, len(x))))[0])


def pairs_of_rows(w, x):
    by = by_four(lambda h, y: h * y.shape[1], (P("data"), P("data")), P("data"))
    return square(by(x @ w, x @ x.T))


def weights_in_a_shape_of_rows(w, x):
    by = by_four(lambda h, y: h * y.shape[0], (P("data"), P()), P("data"))
    return square(by(x @ w, w.reshape(len(x), -1)))


HIDDEN = {
    rows_summed_one_by_one: "sums what is of a batch",
    rows_summed_in_a_vmap: "sums what is of a batch",
    gradient_in_an_unnamed_body: "takes a gradient inside, through a sum over",
    rows_summed_in_a_forward_rule: "sums what is of a batch",
    taken_along_equal_tables: "are no rows of a batch",
    drawn_by_positions: "are no rows of a batch",
    keys_of_positions: "are no rows of a batch",
    equal_parts_of_tp: "are no rows of a batch",
    positions_made_in_a_vmap: "are no rows of a batch",
    pairs_of_rows: "are no rows of a batch",
    weights_in_a_shape_of_rows: "that grows with the batch",
    number_of_rows_in_a_jit: "takes for its size",
    number_of_rows_in_a_checkpoint: "takes for its size",
    width_of_cut_weights_in_a_scan: "takes for its size",
    gradient_of_a_custom_energy_in_a_forward_rule: "the loss takes a gradient inside",
    rows_summed_in_an_unnamed_body: "sums what is of a batch",
    sum_in_a_force: "the loss takes a gradient inside",
    force_of_a_mean: "the loss takes a gradient inside",
    force_of_a_mean_on_rows: "the loss takes a gradient inside",
    curvature_of_turned_rows: "the loss takes a gradient inside",
    force_in_a_forward_rule: "the loss takes a gradient inside",
    turned_in_a_rule_under_remat: "may be in another order",
    cut_weights_in_a_third_derivative: "are no rows of a batch",
    rows_in_a_force: "that grows with the batch",
    weights_in_a_force: "the loss takes a gradient inside",
    transposed_helper: "the loss takes a gradient inside",
    helper_of_tangents: "is given tangents by",
    number_in_a_loop: "uses the worker's number",
    sum_in_a_loop: "communicates over the workers' axis 'data' by psum",
    turned_in_a_loop: "may be in another order",
    from_the_first: "uses the worker's number",
    of_rows_and_weights: "are of a fixed size",
    unlike_orders: "name the workers' axis first",
}


@pytest.mark.parametrize(
    "loss", some(HIDDEN, [sum_in_a_loop, from_the_first, rows_in_a_force, transposed_helper])
)
def test_what_loops_and_kept_programs_hide(loss):
    draw = np.random.default_rng(0).normal
    x, w = draw(size=(16, 8)).astype("f"), (draw(size=(8, 8)) / 3).astype("f")
    with pytest.raises(ValueError, match=HIDDEN[loss]):
        jaxsparse.grad(loss, mesh=four())(w, jax.device_put(x, NamedSharding(four(), P("data"))))


# A step takes its gradient itself. Nothing differentiates a gradient inside of what is linear once
# more, or JAX drops what it does not need.
LINEAR = (curvature_of_turned_rows, cut_weights_in_a_third_derivative, rows_in_a_force)


def stepped(loss, where, params, x):
    """An inner step of `LocalSteps`."""

    def step(state, x):
        value, grads = jax.value_and_grad(loss)(state[0], x)
        return (jax.tree.map(jnp.subtract, state[0], grads),), value

    train = jaxsparse.LocalSteps(step, jaxsparse.dense(), optax.sgd(1.0), where, every=2)
    return train((params,), jax.device_put(x, NamedSharding(where, P("data"))))


@pytest.mark.parametrize(
    "loss", some([x for x in HIDDEN if x not in LINEAR], [force_of_a_mean, sum_in_a_loop])
)
def test_what_is_told_in_a_step_that_takes_its_own_gradient(loss):
    draw = np.random.default_rng(0).normal
    x, w = draw(size=(16, 8)).astype("f"), (draw(size=(8, 8)) / 3).astype("f")
    with pytest.raises(ValueError, match=HIDDEN[loss]):
        stepped(loss, four(), w, x)


@pytest.mark.slow
@pytest.mark.parametrize("place", SUMS)
def test_sums_by_hand_in_a_step_that_takes_its_own_gradient(place):
    where = mesh_of((4, 2))
    loss = SUMS[place](where, by_hand(lambda g: lax.psum(g, "data") / 4))
    with pytest.raises(ValueError, match="custom derivative of what is called at"):
        stepped(loss, where, *put(where, 4))


@pytest.mark.parametrize("is_right", [True, False])
def test_a_gradient_that_a_step_differentiates_is_judged(is_right):
    """JAX drops the forward pass, and a backward pass has what it takes again."""
    draw = np.random.default_rng(0).normal
    x, w = draw(size=(16, 8)).astype("f"), jnp.asarray(draw(size=(8, 8)) / 3, "f")

    def loss(w, x, split=by_four):
        by = split(lambda h, p: jnp.tanh(h) * p[:, None], (P("data"), P("data")), P("data"))
        h = x @ w
        return square(by(h, h[:, 0] if is_right else w[0, 0] * jnp.arange(1.0, len(h) + 1)))

    def curved(w, x, loss=loss):
        gradient = jax.jit(jax.grad(jax.checkpoint(loss)))
        return jnp.vdot(gradient(w, x), jnp.ones_like(w))

    def step(state, x):
        return (state[0] - jax.grad(curved)(state[0], x),), 0.0

    train = jaxsparse.LocalSteps(step, jaxsparse.dense(), optax.sgd(1.0), four(), every=1)
    start = jax.device_put(w, NamedSharding(four(), P()))
    run = lambda: train(
        train.init((start,)), jax.device_put(x, NamedSharding(four(), P("data"))), 0
    )
    if not is_right:
        with pytest.raises(ValueError, match="are no rows of a batch"):
            run()
        return
    plain = lambda w, x: curved(w, x, lambda w, x: loss(w, x, lambda f, *_: f))
    rows = [jax.grad(plain)(w, part) for part in np.split(x, 4)]
    check(w - run()[0].params, sum(rows) / 4, atol=1e-5)


def gathered_weights_of_four():
    return by_four(lambda a: lax.all_gather(jnp.tanh(a), "data", tiled=True), P("data"), P())


@pytest.mark.parametrize("how", ["make_jaxpr", "linearize", "closure_convert"])
def test_what_jax_has_traced_before_is_refused(how):
    """Its specs have the workers' axis, and nothing marks it."""
    draw = np.random.default_rng(0).normal
    x, w = draw(size=(16, 8)).astype("f"), jnp.asarray(draw(size=(8, 8)) / 3, "f")
    gather = gathered_weights_of_four()
    before = {
        "make_jaxpr": lambda: lambda w: jaxpr_as_fun(program)(w)[0],
        "linearize": lambda: jax.linearize(gather, w)[1],
        "closure_convert": lambda: jax.closure_convert(gather, w)[0],
    }
    program = jax.make_jaxpr(gather)(w)
    given = before[how]()
    with pytest.raises(ValueError, match=r"losses.py:\d+.* traced before one worker's function"):
        jaxsparse.grad(lambda w, x: square(x @ given(w)), mesh=four())(
            w, jax.device_put(x, NamedSharding(four(), P("data")))
        )


def embedded(x, w):
    """Values that are equal for all rows, by products, tables and norms."""
    queries = jnp.broadcast_to(w[0], (len(x), 8)) @ w
    positions = w[jnp.broadcast_to(jnp.arange(4), (len(x), 4))].mean(1)
    state = jnp.zeros((len(x), 8)) @ w
    return (queries / jnp.linalg.norm(queries, axis=-1, keepdims=True)).T.T + positions + state


def ring_of_workers(split, h):
    """Of workers that name their axis in a body of its own, inside of one for tp."""
    turn = lambda h, by: lax.ppermute(h, "data", [(i, (i + by) % 4) for i in range(4)])
    options = {"in_specs": P("data"), "out_specs": P("data"), "check_vma": False}
    if split is None:
        return jnp.tanh(h)
    inner = lambda h: jnp.tanh(turn(turn(h, 1), -1))
    inside = lambda h: jax.shard_map(inner, axis_names={"data"}, **options)(h)
    return jax.shard_map(
        inside, mesh=four(), in_specs=P(), out_specs=P(), axis_names={"tp"}, check_vma=False
    )(h)


def of_a_ring(w, x, split):
    return square(ring_of_workers(split, x @ w) - x)


def by_tangents_alike(w, x, split):
    """As of a divergence: the same for all rows."""
    by = jnp.tanh if split is None else split(jnp.tanh, P("data"), P("data"))
    along = lambda y: by(by(y @ w) @ w)
    return square(jax.jvp(along, (x,), (jnp.ones_like(x),))[1])


def in_micro_batches_of_one_row(w, x, split):
    mixed = lambda q, k: jax.nn.softmax(q @ k.swapaxes(-1, -2)) @ k
    by = mixed if split is None else split(mixed, (P("data"), P("data")), P("data"))
    of_part = lambda part: square(by(part @ w, part))
    return lax.map(of_part, x.reshape(2, -1, 4, 2) @ jnp.eye(2, 8)).mean()


@pytest.mark.parametrize("loss", [of_a_ring, by_tangents_alike, in_micro_batches_of_one_row])
def test_what_was_refused_for_nothing(loss):
    draw = np.random.default_rng(0).normal
    x, w = draw(size=(8, 8)).astype("f"), jnp.asarray(draw(size=(8, 8)) / 3, "f")
    with_split = lambda w, x: loss(w, x, by_four)
    found = jaxsparse.grad(with_split, mesh=four())(
        w, jax.device_put(x, NamedSharding(four(), P("data")))
    )
    check(found.mean(0), jax.grad(lambda w, x: loss(w, x, None))(w, x))
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # it communicates
        stepped(with_split, four(), w, x)


def test_what_is_equal_for_all_rows_may_be_cut():
    draw = np.random.default_rng(0).normal
    x, w = draw(size=(16, 8)).astype("f"), jnp.asarray(draw(size=(8, 8)) / 3, "f")

    def loss(w, x, split=by_four):
        by = split(lambda h, q: jnp.tanh(h * q), (P("data"), P("data")), P("data"))
        return square(by(x @ w, embedded(x, w)))

    found = jaxsparse.grad(loss, mesh=four())(
        w, jax.device_put(x, NamedSharding(four(), P("data")))
    )
    check(found.mean(0), jax.grad(lambda w, x: loss(w, x, lambda f, *_: f))(w, x))


@pytest.mark.slow
def test_a_loop_that_communicates_with_a_derivative_that_does():
    draw = np.random.default_rng(0).normal
    x, w = draw(size=(16, 8)).astype("f"), (draw(size=(8, 8)) / 3).astype("f")

    def loss(w, x, wrapped=lambda f: f, split=by_four):
        mean = split(lambda x: lax.pmean(x.mean(0), "data"), P("data"), P())
        turn = lambda x, a: lambda c, _: (jnp.tanh(c @ a) - mean(x)[None], None)
        return square(wrapped(lambda x, a: lax.scan(turn(x, a), x, None, length=2)[0])(x, w))

    def rematerialised(f):
        back = lambda saved, g: (0 * saved[0], jax.vjp(lambda a: f(saved[0], a), saved[1])[1](g)[0])
        return with_rule(back, f)

    given = w, jax.device_put(x, NamedSharding(four(), P("data")))
    found = jaxsparse.grad(lambda w, x: loss(w, x, rematerialised), mesh=four())(*given)
    check(found, jaxsparse.grad(loss, mesh=four())(*given))
    check(found.mean(0), jax.grad(loss)(*given))


def test_sums_of_groups_tell_workers_apart():
    where = mesh_of((8,))
    sums = lambda h: (
        h
        * lax.psum(h.mean(0, keepdims=True), "data", axis_index_groups=[[0, 1, 2, 3], [4, 5, 6, 7]])
    )
    split = cut(sums, where, P("data"), P("data"))
    loss = lambda w, x: jnp.mean(split(jnp.sort(x @ w["a"], 0)))
    with pytest.raises(ValueError, match="in another order"):
        jaxsparse.grad(loss, mesh=where)(*put(where, 8))


def test_a_token_has_no_type():
    where = mesh_of((8,))
    marked = lambda h: (lax.after_all(lax.create_token(h)), h)[1]
    loss = lambda w, x, mark=marked: jnp.mean(mark(jnp.tanh(x @ w["a"])) ** 2)
    found = jax.jit(jaxsparse.grad(loss, mesh=where))(*put(where, 8))
    check(found, forms.by_worker(jax.grad(lambda w, x: loss(w, x, lambda h: h)), workers=8))


def test_what_named_bodies_number_is_a_workers_own():
    """As positions of rows are."""
    where = mesh_of((4, 2))
    places = lambda h: lax.axis_index("data") * len(h) + jnp.arange(len(h))
    number = cut(places, where, P("data"), P("data"))
    scaled = cut(lambda p, h: jnp.sin(p)[:, None] * h, where, (P(), P(None, "tp")), P(None, "tp"))

    def loss(w, x):
        h = jnp.tanh(x @ w["a"])
        return jnp.mean(scaled(number(h).astype(h.dtype), h) ** 2)

    found = jaxsparse.grad(loss, mesh=where)(*put(where, 4))

    def one(w, x, first):
        at = jnp.sin(first + jnp.arange(len(x), dtype=x.dtype))
        return jnp.mean((at[:, None] * jnp.tanh(x @ w["a"])) ** 2)

    parts = np.split(forms.inputs(4), 4)
    own = [jax.grad(one)(forms.W, x, jnp.float32(i * len(x))) for i, x in enumerate(parts)]
    check(found, jax.tree.map(lambda *each: np.stack(each), *own))


def own_key():
    return jax.random.fold_in(jax.random.key(3), rank_of())


NOT_PICKED = {  # what a worker's own number is for
    "dropout": lambda h, a: jnp.where(jax.random.bernoulli(own_key(), 0.5, h.shape), h, 0),
    "key from a table": lambda h, a: h * jax.random.uniform(
        jax.random.split(jax.random.key(3), 4)[rank_of()], h.shape
    ),
    "one that prints": lambda h, a: (
        lax.cond(rank_of() == 0, lambda: jax.debug.callback(len, h), lambda: None),
        h,
    )[1],
    "all print": lambda h, a: (jax.debug.callback(lambda *_: None, rank_of(), h), h)[1],
    "rows by a key": lambda h, a: h[jax.random.permutation(own_key(), len(h))[:2]],
}  # fmt: skip


WEIGHED = {  # by weights that it picks
    "weights": lambda h, a: h * a[rank_of()][None],
    "weights behind nonlinear code": lambda h, a: jax.nn.relu(
        jax.nn.softmax(h * a[rank_of()][None]) - 0.2
    ),
    "weights by one_hot": lambda h, a: h * (jax.nn.one_hot(rank_of(), len(a)) @ a)[None],
    "weights under a mask": lambda h, a: h @ (a * mask_of(len(a))).T,
    "branch of weights": lambda h, a: (
        h @ lax.switch(rank_of(), [jnp.sin, jnp.cos, jnp.tanh, jnp.exp], a).T
    ),
    "product": lambda h, a: h * (mask_of(len(h)) * a[: len(h), :1]),
    "bias": lambda h, a: jax.nn.softmax(h + (a[0, 0] - 1e9 * (1 - mask_of(len(h)))), axis=0),
    "sum of rows": lambda h, a: (mask_of(len(h)) * a[: len(h), :1]).T @ h,
}


@pytest.mark.parametrize("body", some(WEIGHED, ["product"]))
def test_rows_that_a_body_weighs_by_its_number(body):
    where = mesh_of((4, 2))
    mean = lambda h, a: lax.pmean(jnp.mean(WEIGHED[body](h, a)), "data")
    split = jax.shard_map(mean, mesh=where, in_specs=(P(), P()), out_specs=P(), check_vma=False)
    with pytest.raises(ValueError, match=r"uses the worker's number .* at .*losses.py:\d+"):
        jaxsparse.grad(lambda w, x: split(x @ w["a"], w["a"]), mesh=where)(*put(where, 4))


@pytest.mark.parametrize("body", some(NOT_PICKED, ["dropout"]))
@pytest.mark.parametrize("mapped", some([False, True], [True]))
def test_what_a_body_may_do_by_its_number(body, mapped):
    where = mesh_of((4, 2))

    def loss(w, x, split=lambda f: f):
        one = split(lambda h, a: jnp.mean(NOT_PICKED[body](h, a) ** 2))
        h, a = jnp.tanh(x @ w["a"]), w["a"]
        if mapped:
            return jax.vmap(one, in_axes=(2, None))(jnp.stack([h, jnp.sin(h)], 2), a).sum()
        return one(h, a)

    split = lambda f: cut(f, where, (P(), P()), P())
    found = jaxsparse.grad(lambda w, x: loss(w, x, split), mesh=where)(*put(where, 4))
    plain = jax.grad(loss)
    check(found, forms.by_worker(plain))


def test_a_batch_that_a_worker_draws_is_not_cut():
    """Nothing tells its rows from weights."""
    where = mesh_of((4, 2))
    body = jax.shard_map(
        jnp.tanh, mesh=where, in_specs=P("data"), out_specs=P("data"), check_vma=False
    )

    def loss(w, key):
        x = jax.random.normal(jax.random.fold_in(key, lax.axis_index("data")), (8, 8))
        return jnp.mean(body(x @ w["a"]) @ w["b"])

    grad = jaxsparse.grad(loss, batch_argnums=(), mesh=where)
    with pytest.raises(ValueError, match=r"losses.py:\d+.* takes .* no rows of a batch"):
        grad(put(where, 4)[0], jax.random.key(1))


def test_numbers_beside_rows():
    where = mesh_of((4, 2))
    scaled = lambda x, by, rows: jnp.tanh(x) * by / rows * (1 + lax.pmean(x.mean(), "data"))
    split = cut(scaled, where, (P("data"), P(), P()), P("data"))
    of = lambda f: lambda w, x: jnp.mean(f(x @ w["a"], 0.3, np.float32(8)) ** 2)
    plain = jax.value_and_grad(of(scaled))
    found = jaxsparse.value_and_grad(of(split), mesh=where)(*put(where, 4))
    check(found, forms.by_worker(plain))


@pytest.mark.parametrize(
    ("order", "checked"),
    rows([("values", False), ("gradients", True)], [("values", True), ("gradients", False)]),
)
def test_outer_derivatives_sum_over_workers(order, checked):
    """As of a step in a step. Weights are whole on all workers."""
    where = mesh_of((4, 2))
    spec = P("data", "tp")
    body = lambda h, a: jnp.tanh(h * jnp.sum(a) + lax.pmean(h.mean(0, keepdims=True), "data"))
    split = jax.shard_map(
        body, mesh=where, in_specs=(spec, P(None, "tp")), out_specs=spec, check_vma=checked
    )
    of = lambda f: lambda w, x: jnp.mean((f(x @ w["a"], w["a"][:1]) @ w["b"] - x) ** 2)
    both = jaxsparse.value_and_grad(of(split), mesh=where)
    params, x = put(where, 4)
    sums = {"values": lambda v, g: v.sum(), "gradients": lambda v, g: jnp.sum(g["b"] ** 2)}[order]
    outer = jax.jit(jax.grad(lambda w: sums(*both(w, x))))(params)
    step = 1e-2
    moved = jax.jit(lambda by: sums(*both({**params, "a": params["a"].at[0, 3].add(by)}, x)))
    slope = (moved(step) - moved(-step)) / (2 * step)
    np.testing.assert_allclose(outer["a"][0, 3], slope, rtol=5e-2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Metric:
    total: jax.Array
    count: int = dataclasses.field(metadata={"static": True})


def test_auxiliary_output_is_that_of_a_workers_own_rows():
    """The second trace, with twice the rows, leaves nothing."""
    where = mesh_of((4, 2))
    split = jax.shard_map(jnp.tanh, mesh=where, in_specs=P("data"), out_specs=P("data"))

    def loss(w, x):
        h = split(x @ w["a"])
        aux = {f"row {i}": h for i in range(len(x))}
        return jnp.mean(h**2), aux | {"metric": Metric(h.sum(), len(h))}

    (_, aux), _ = jaxsparse.value_and_grad(loss, has_aux=True, mesh=where)(*put(where, 4))
    assert aux["metric"].count == 4
    assert set(aux) == {"metric", "row 0", "row 1", "row 2", "row 3"}

    def step(state, x):
        return state, loss(state[0], x)[1]["metric"]

    train = jaxsparse.LocalSteps(step, jaxsparse.dense(), optax.sgd(1.0), where, every=2)
    _, metric = train((put(where, 4)[0],), put(where, 4)[1])
    assert metric.count == 4
    assert metric.total.shape == (4,)


def batch_norm(x):
    return (x - x.mean(0, keepdims=True)) / jnp.std(x, axis=0, keepdims=True)


def convolved(x):
    h = lax.conv_general_dilated(
        x.reshape(-1, 4, 2, 1), jnp.ones((2, 2, 1, 1)), (1, 1), "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )  # fmt: skip
    return lax.reduce_window(h, -jnp.inf, lax.max, (1, 2, 2, 1), (1,) * 4, "SAME").reshape(-1, 8)


def each_alone(x):
    return jax.vmap(lambda row: jax.nn.softmax(jnp.outer(row, row)) @ row)(x)


def scanned(x):
    layer = lambda h, _: (h + jax.nn.relu(h - h.mean(-1, keepdims=True)), None)
    return lax.scan(jax.checkpoint(layer), x, None, length=2)[0]


FRONTS = [
    batch_norm,
    convolved,
    each_alone,
    scanned,
    jnp.fft.fft,
    lambda x: x + jnp.eye(8)[jnp.abs(jnp.int32(x[:, 0] * 3)) % 8],
]


@pytest.mark.parametrize("front", some(FRONTS, FRONTS[:2]))
def test_rows_are_followed_to_a_body_that_tells_workers_apart(front):
    where = mesh_of((4, 2))
    gathered = lambda z: z @ lax.all_gather(z, "data", tiled=True).T
    split = jax.shard_map(
        gathered, mesh=where, in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    of = lambda f: lambda w, x: jnp.mean(f(jnp.real(front(x)) @ w["a"]) ** 2)
    plain = jax.value_and_grad(of(gathered))
    found = jaxsparse.value_and_grad(of(split), mesh=where)(*put(where, 4))
    check(found, forms.by_worker(plain))


def test_rows_are_followed_through_other_bodies():
    """Attention whose specs name rows, a layer on tokens end to end, and equal ones beside."""
    where = mesh_of((4, 2))
    gathered = lambda z, m, n: (z * m * n) @ lax.all_gather(z, "data", tiled=True).T

    def loss(w, x, is_split):
        split = lambda f, n=1: f
        if is_split:
            split = lambda f, n=1: jax.shard_map(
                f, mesh=where, in_specs=(P("data"),) * n, out_specs=P("data"), check_vma=False
            )
        h = split(lambda h: jnp.einsum("bqd,bkd->bqk", h, h))((x @ w["a"]).reshape(-1, 4, 4))
        h = split(lambda h: jax.nn.gelu(h) @ jnp.ones((4, 2)))(h.reshape(-1, 4)).reshape(-1, 8)
        ones = jnp.tile(jnp.ones((1, 1)), (len(x), 1))
        twos = jnp.repeat(jnp.full((1, 1), 2.0), len(x), axis=0)
        return jnp.mean(split(gathered, 3)(h, ones, twos) ** 2)

    plain = jax.value_and_grad(lambda w, x: loss(w, x, False))
    found = jaxsparse.value_and_grad(lambda w, x: loss(w, x, True), mesh=where)(*put(where, 4))
    check(found, forms.by_worker(plain))


def test_derivatives_by_hand_that_tell_workers_apart():
    """Rows are followed to them, though cotangents come from sorted ones."""
    where = mesh_of((4, 2))
    every = lambda k: lax.all_gather(k, "data", tiled=True)
    near = lambda q, k: jnp.tanh(q @ every(k).T) @ every(k)
    back = lambda q, k, g: jax.vjp(near, q, k)[1](g)

    def loss(w, x, is_split):
        split = lambda f, n, made: f
        if is_split:
            split = lambda f, n, made: cut(f, where, (P("data"),) * n, made)
        f = jax.custom_vjp(split(near, 2, P("data")))
        forward = lambda q, k: (split(near, 2, P("data"))(q, k), (q, k))
        f.defvjp(forward, lambda r, g: split(back, 3, (P("data"),) * 2)(*r, g))
        layer = lambda h, _: (f(h, jnp.sin(h)), None)
        h, _ = lax.scan(jax.checkpoint(layer), x @ w["a"], None, length=2)
        return jnp.mean((h[jnp.argsort(h[:, 0])] @ w["b"]) ** 2)

    of = lambda is_split: lambda w, x: loss(w, x, is_split)
    plain = jax.value_and_grad(of(False))
    found = jaxsparse.value_and_grad(of(True), mesh=where)(*put(where, 4))
    check(found, forms.by_worker(plain), atol=2e-4)  # of up to 30


POLICIES = jax.checkpoint_policies
WRAPPED = {
    "scan": lambda layer: layer,
    "everything": lambda layer: jax.checkpoint(layer, policy=POLICIES.everything_saveable),
    "jit": jax.jit,
}


def test_one_row_a_worker():
    """JAX writes other operations for one row."""
    where, spec = mesh_of((4, 2)), P("data")
    causal = lambda scores: jnp.where(jnp.tri(4, dtype=bool)[None], scores, 0.0)
    attend = lambda h: causal(jnp.einsum("bqd,bkd->bqk", h, h))
    split = jax.shard_map(attend, mesh=where, in_specs=spec, out_specs=spec, check_vma=False)

    def loss(w, x, f=split):
        return jnp.mean(f(causal(jnp.tile(x, 2).reshape(-1, 4, 4))) ** 2) * w["a"].sum()

    plain = jax.jit(jax.vmap(jax.value_and_grad(lambda w, x: loss(w, x, attend)), (None, 0)))
    x = forms.inputs(4)[:4]
    given = put(where, 4)[0], jax.device_put(x, jax.NamedSharding(where, spec))
    check(jaxsparse.value_and_grad(loss, mesh=where)(*given), plain(forms.W, x[:, None]))


@pytest.mark.parametrize("checked", some([False, True], [False]))
@pytest.mark.parametrize("wrapper", some(WRAPPED, ["scan"]))
def test_attention_with_segments_in_a_scan(wrapper, checked):
    """JAX makes the mask once, in front of the scan: what is left of the body closes over it."""
    where = mesh_of((4, 2))
    spec = P("data")

    def attend(h, segments):
        mask = segments[:, :, None] == segments[:, None]
        scores = jnp.where(mask, jnp.einsum("bqd,bkd->bqk", h, h), -9.0)
        return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), h)

    def loss(w, x, f):
        segments = (x.reshape(-1, 4, 2)[..., 0] > 0).astype(jnp.int32)
        layer = lambda h, _: (h + f(h, segments), None)
        h = (x @ w["a"]).reshape(-1, 4, 4)
        return jnp.mean(lax.scan(WRAPPED[wrapper](layer), h, None, length=2)[0] ** 2)

    split = jax.shard_map(
        attend, mesh=where, in_specs=(spec, spec), out_specs=spec, check_vma=checked
    )
    found = jaxsparse.value_and_grad(lambda w, x: loss(w, x, split), mesh=where)(*put(where, 4))
    plain = jax.value_and_grad(lambda w, x: loss(w, x, attend))
    check(found, forms.by_worker(plain))


@pytest.mark.parametrize(
    ("how", "size"),
    rows(
        [("scan", 2)],
        [("scan", -1), ("unrolled", -1), ("map", -1), ("map", 2), ("unrolled", 2)],
    ),
)
def test_micro_batches(how, size):
    """Parts of a fixed size are refused: a body's own part has another size on a device."""
    where = mesh_of((4, 2))
    spec = P("data", "tp")
    centred = lambda h: jnp.tanh(h - lax.pmean(h.mean(0, keepdims=True), "data"))
    split = jax.shard_map(centred, mesh=where, in_specs=spec, out_specs=spec, check_vma=False)

    def loss(w, x, f=split):
        of = lambda part: jnp.mean((f(f(part @ w["a"])) @ w["b"]) ** 2)
        parts = x.reshape(2 if size < 0 else -1, size, 8)
        if how == "scan":
            return lax.scan(lambda c, part: (c + of(part), None), 0.0, parts)[0]
        return lax.map(of, parts).mean() if how == "map" else sum(map(of, parts))

    both = jaxsparse.value_and_grad(loss, mesh=where)
    if size > 0:
        with pytest.raises(ValueError, match=r"are of a fixed size|are no rows of a batch"):
            both(*put(where, 4))
        return
    plain = jax.value_and_grad(lambda w, x: loss(w, x, centred))
    check(both(*put(where, 4)), forms.by_worker(plain))


@pytest.mark.parametrize("kept", [False, True])
def test_a_branch_that_would_wait_is_refused(kept):
    """On Explicit axes, and by a reference's value."""
    where = mesh_of((8,), AxisType.Auto if kept else AxisType.Explicit)
    mean = lambda x: lax.pmean(x.mean(), "data")

    def loss(w, x):
        if kept:
            by = jax.new_ref(jnp.float32(0))
            by[...] = x.sum()
        return lax.cond((by[...] if kept else x.sum()) > 0, mean, jnp.mean, x @ w["a"])

    with pytest.raises(ValueError, match="workers that take other branches would wait for ever"):
        jaxsparse.grad(loss, mesh=where)(*put(where, 8))


def test_weights_that_are_spread_over_rows():
    where = mesh_of((4, 2))
    add = cut(
        lambda x, bias: jnp.tanh(x + bias),
        where,
        (P("data", "tp"), P("data", "tp")),
        P("data", "tp"),
    )
    spread = lambda f: lambda w, x: jnp.mean(f(x, jnp.broadcast_to(w["b"][0], x.shape)) ** 2)
    params, x = put(where, 4)
    found = jaxsparse.value_and_grad(spread(add), mesh=where)(params, x)
    plain = jax.value_and_grad(spread(lambda x, bias: jnp.tanh(x + bias)))
    check(found, forms.by_worker(plain))


@pytest.mark.parametrize("checked", [False, True])
def test_negatives_of_other_workers(checked):
    """The cotangent of what is gathered is scattered: a bias before it has no sum by hand."""
    where = mesh_of((4, 2))

    def loss(w, x, gather=None):
        z = x @ w["a"] + w["c"]
        gather = gather or (lambda z: lax.all_gather(z, "data", tiled=True))
        return jnp.mean((jnp.sin(z) @ gather(z).T) ** 2)

    spec = P("data")
    gather = jax.shard_map(
        lambda z: lax.all_gather(z, "data", tiled=True),
        mesh=where,
        in_specs=spec,
        out_specs=spec,
        check_vma=checked,
    )
    params, x = put(where, 4)
    c = np.ones((1, forms.HIDDEN), np.float32)
    plain = jax.value_and_grad(loss)
    right = forms.by_worker(plain, w={**forms.W, "c": c})
    mapped = lambda w, x: loss(w, x, gather)
    check(jaxsparse.value_and_grad(mapped, mesh=where)({**params, "c": c}, x), right)


CLOSED = {
    "uses the axis": lambda s: lambda h: jnp.tanh(h) * s * lax.pmean(s, "data"),
    "vmap": lambda s: jax.vmap(lambda row: jnp.tanh(row) * s),
}


@pytest.mark.parametrize("body", CLOSED)
@pytest.mark.parametrize("checked", [False, True])
def test_bodies_that_close_over_values(body, checked):
    """With checked types, a value without the axis' type would get a sum over workers."""
    where = mesh_of((4, 2))
    params, x = put(where, 4)
    params |= {"s": jnp.float32(0.3)}
    spec = P("data", "tp")

    def loss(w, x, split=True):
        f = CLOSED[body](jnp.exp(w["s"]))
        if split:
            f = jax.shard_map(f, mesh=where, in_specs=spec, out_specs=spec, check_vma=checked)
        return jnp.mean((f(x @ w["a"]) @ w["b"] - x) ** 2)

    run = lambda: jaxsparse.value_and_grad(loss, mesh=where)(params, x)
    if body == "uses the axis" and checked:
        with pytest.raises(ValueError, match=r"losses.py:\d+.*closes over values of shapes \[\(\)"):
            run()
        return
    plain = jax.value_and_grad(lambda w, x: loss(w, x, False))
    right = forms.by_worker(plain, w={**forms.W, "s": jnp.float32(0.3)})
    check(run(), right)


@pytest.mark.parametrize("checked", [False, True])
def test_bodies_that_return_constants(checked):
    """As losses without an auxiliary one do."""
    where = mesh_of((4, 2))
    spec = P("data", "tp")
    for nothing in (0.0, np.float32(0)):
        body = lambda h, nothing=nothing: (jnp.tanh(h), nothing)
        split = jax.shard_map(
            body, mesh=where, in_specs=spec, out_specs=(spec, P()), check_vma=checked
        )

        def loss(w, x, split=split):
            h, extra = split(x @ w["a"])
            return jnp.mean((h @ w["b"] - x) ** 2) + extra

        found = jaxsparse.value_and_grad(loss, mesh=where)(*put(where, 4))
        check(found, forms.right("elementwise", 4))


def gradients_of_the_sum(loss, workers):
    """Each worker's gradient, by plain JAX, of the sum of losses of workers that communicate."""
    x = forms.inputs(workers).reshape(workers, -1, 8)
    own = jax.tree.map(lambda p: jnp.broadcast_to(p, (workers, *p.shape)), forms.W)
    return jax.jit(jax.grad(lambda w: jax.vmap(loss, axis_name="data")(w, x).sum()))(own)


def centred(h):
    return h - lax.pmean(h.mean(0, keepdims=True), "data")


AGREED = {
    "own": lambda h: h.sum(),
    "rank": lambda h: lax.axis_index("data"),
    "agreed": lambda h: lax.pmean(h.sum(), "data") + 9,
}
FORKS = {
    "cond": lambda f: lambda by, h: lax.cond(by > 0, f, lambda h: 2 * h, h),
    "where": lambda f: lambda by, h: jnp.where(by > 0, f(h), 2 * h),
    "scan": lambda f: lambda by, h: lax.scan(
        jax.checkpoint(lambda h, _: (lax.cond(by > 0, f, jnp.sin, h), None)), h, None, length=2
    )[0],
    "scheduled": lambda f: scheduling_group("g")(
        lambda by, h: lax.cond(by > 0, f, lambda h: 2 * h, h)
    ),
    "while": lambda f: lambda by, h: h * lax.stop_gradient(
        lax.while_loop(lambda c: c[0] < by, lambda c: (c[0] + 10, f(c[1])), (0 * by - 9, h))[1]
    ),
}  # fmt: skip


@pytest.mark.parametrize("fork", some(FORKS, ["cond"]))
@pytest.mark.parametrize("by", AGREED)
@pytest.mark.parametrize("shape", some([(4, 2), (8,), None], [(8,)]), ids=str)
def test_a_branch_with_a_mean_of_workers(fork, by, shape):
    """Workers that take another branch are given no cotangents of it, where jax.vmap runs both."""
    where, workers = (mesh_of(shape), shape[0]) if shape else (None, 3)
    given = put(where, workers) if shape else (forms.W, forms.inputs(workers))

    def loss(w, x):
        h = x @ w["a"]
        return jnp.mean(FORKS[fork](centred)(AGREED[by](h), h) ** 2)

    run = lambda: jaxsparse.grad(loss, mesh=where, workers=None if shape else workers)(*given)
    if by != "agreed" and fork != "where":
        words = r"(cond|while) at .*losses.py:\d+.* over the workers' axis 'data'.* use jnp.where"
        with pytest.raises(ValueError, match=words):
            run()
        return
    check(run(), gradients_of_the_sum(loss, workers))


def test_a_body_that_casts_its_weights_is_told():
    where = mesh_of((4, 2))

    def body(x, a):
        a = lax.pcast(a, "data", to="varying")
        return jnp.tanh(x @ a) * (1 + lax.pmean(x.mean(), ("data", "tp")))

    specs = (P("data"), P(None, "tp"))
    split = jax.shard_map(body, mesh=where, in_specs=specs, out_specs=P("data", "tp"))
    loss = lambda w, x: jnp.mean(split(x, w["a"]) ** 2)
    with pytest.raises(ValueError, match=r"losses.py:\d+.*checked types.*give it check_vma=False"):
        jaxsparse.grad(loss, mesh=where)(*put(where, 4))


def test_a_derivative_that_sums_as_checked_types_demand_is_told():
    f = jax.custom_vjp(lambda s, h: s * h)
    f.defvjp(
        lambda s, h: (s * h, (s, h)),
        lambda kept, ct: (lax.psum((ct * kept[1]).sum(), "data"), ct * kept[0]),
    )
    split = by_four(f, (P(), P("data")), P("data"), checked=True)
    x = jax.device_put(jnp.arange(8.0), NamedSharding(four(), P("data")))
    with pytest.raises(ValueError, match=r"losses.py:\d+.*checked types.*give it check_vma=False"):
        jaxsparse.grad(lambda s, x: square(split(s, x)), mesh=four())(jnp.float32(1), x)


def energy(h, s):
    return jnp.sum(jnp.tanh(s * h))


GRADIENTS = {  # in a body: whether by its types JAX sends anything for them, and what they are
    "of weights": (True, lambda h, s: h * jax.grad(energy, 1)(h, s)),
    "of weights, linear": (True, lambda h, s: h * jax.grad(lambda s: h.sum() + s)(s)),
    "of weights, and a number": (
        True,
        lambda h, s: h * jax.grad(energy, 1)(h, s) + jnp.float32(lax.axis_index("data")),
    ),
    "of weights for each row": (
        True,
        lambda h, s: h * jax.vmap(jax.grad(energy, 1), (0, None))(h, s)[:, None],
    ),
    "of a mean": (True, lambda h, s: h * jax.grad(lambda s: lax.pmean(energy(h, s), "data"))(s)),
    "of a mean, and decay": (  # as many sums as with the types of one worker
        True,
        lambda h, s: h * jax.grad(lambda s: lax.pmean(energy(h, s), "data") + s**2)(s),
    ),
    "of a constant": (True, lambda h, s: h * jax.grad(lambda c: energy(h, c + s))(jnp.zeros(()))),
    "transposed": (True, lambda h, s: h * jax.linear_transpose(lambda s: h * s, s)(h)[0]),
    "of rows and their mean": (
        True,
        lambda h, s: h * jax.grad(lambda h: energy(h - lax.pmean(h.mean(), "data"), s))(h),
    ),
    "of rows": (False, lambda h, s: h * jax.grad(energy)(h, s)),
    "forward": (False, lambda h, s: h * jax.jacfwd(energy, 1)(h, s)),
    "tangents": (False, lambda h, s: h * jax.vmap(jax.grad(lambda x: jnp.tanh(x).sum()))(h)),
    "solve": (False, lambda h, s: jnp.linalg.solve(jnp.eye(4) * (2 + s), h.T).T),
    "solve of a mean": (
        False,
        lambda h, s: jnp.linalg.solve(jnp.eye(4) * (2 + s) + lax.pmean(h.T @ h, "data"), h.T).T,
    ),
}


def of_what_varies(x):
    return lax.psum(x, tuple(compat.varying_axes(x)))


def share(x):
    """One worker's share of a sum of all workers' values."""
    return x if compat.varying_axes(x) else x / 4


READ = {  # axes that a body reads, and by whom these are refused
    "of rows": ("simulated explicit", lambda h, s: jnp.tanh(h) / of_what_varies(jnp.sum(h**2))),
    "of a weight that a mean meets": (
        "auto simulated",
        lambda h, s: (
            h * lax.pmean(h.mean(), "data") + (of_what_varies(s) if compat.varying_axes(s) else s)
        ),
    ),
    "whether it varies": (  # as many sums, of other values
        "auto explicit simulated",
        lambda h, s: h * lax.psum(share(h.mean()) + share(s), "data"),
    ),
    "how many vary": (
        "explicit simulated",
        lambda h, s: jnp.tanh(h) * (2 if compat.varying_axes(h) else 1),
    ),
    "how many vary, in a constant": (
        "explicit simulated",
        lambda h, s: h @ np.full((4, 4), 2.0 if compat.varying_axes(h) else 1.0, np.float32),
    ),
    "nothing, with a constant": (
        "",
        lambda h, s: (
            h @ np.tril(np.ones((4, 4), np.float32)) * jax.random.uniform(jax.random.key(0), (4,))
        ),
    ),
    "of the mesh": (
        "simulated",
        lambda h, s: h - lax.pmean(h.mean(), tuple(jax.sharding.get_abstract_mesh().manual_axes)),
    ),
}


def checked_loss_of(body, where):
    """The loss by jaxsparse and by plain JAX, each a function of whether types are checked."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), "f")
    kind = AxisType.Explicit if where == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((4,), ("data",), (kind,), devices=jax.devices()[:4])
    workers = {"workers": 4} if where == "simulated" else {"mesh": mesh}
    batch = x if where == "simulated" else jax.device_put(x, NamedSharding(mesh, P("data")))

    def loss(is_checked, mesh, s, x):
        specs = (P("data"), P())
        split = jax.shard_map(
            body, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=is_checked
        )
        return jnp.mean(jnp.tanh(split(x, s)) ** 2)

    def found(is_checked):
        own = jax.make_mesh((1, 1), ("data", "tp"), (kind,) * 2, devices=jax.devices()[:1])
        of = functools.partial(loss, is_checked, own if where == "simulated" else mesh)
        both = jax.jit(jaxsparse.value_and_grad(of, **workers))(jnp.float32(0.7), batch)
        return jax.tree.map(lambda x: np.asarray(x).mean(), both)

    def plain(is_checked):
        of = jax.value_and_grad(functools.partial(loss, is_checked, four()))
        return jax.jit(of)(jnp.float32(0.7), jax.device_put(x, NamedSharding(four(), P("data"))))

    return found, plain


WAYS = some(["auto", "explicit", "simulated"], ["auto"])


@pytest.mark.parametrize("name", some(GRADIENTS, ["of weights", "of a mean, and decay", "of rows"]))
@pytest.mark.parametrize("where", WAYS)
def test_a_gradient_in_a_body_with_checked_types(where, name):
    is_refused, body = GRADIENTS[name]
    found, plain = checked_loss_of(body, where)
    with jax.numpy_rank_promotion("allow"):
        check(found(False), plain(False))
        if is_refused or (where == "simulated" and "mean" in name):  # their types have no axis
            with pytest.raises(ValueError, match=r"losses.py:\d+.* give it check_vma=False"):
                found(True)
        else:
            check(found(True), plain(True))


@pytest.mark.parametrize("name", some(READ, ["of a weight that a mean meets"]))
@pytest.mark.parametrize("where", WAYS)
def test_axes_that_a_body_reads(where, name):
    refusing, body = READ[name]
    found, plain = checked_loss_of(body, where)
    with jax.numpy_rank_promotion("allow"):
        is_checked = name != "of the mesh"
        if where in refusing:
            with pytest.raises(ValueError, match=r"losses.py:\d+.*(name the axes|check_vma=False)"):
                found(is_checked)
        else:
            check(found(is_checked), plain(is_checked))


def test_a_constraint_over_an_axis_that_a_body_leaves_to_jax_is_told():
    constrained = lambda h: lax.with_sharding_constraint(jnp.tanh(h), P("data"))
    split = jax.shard_map(
        constrained, mesh=four(), in_specs=P(), out_specs=P(), axis_names={"tp"}, check_vma=False
    )
    x = jax.device_put(jnp.ones((8, 8)), NamedSharding(four(), P("data")))
    with pytest.raises(
        ValueError, match=r"losses.py:\d+.*sharding constraint.*leave that axis out"
    ):
        jaxsparse.grad(lambda w, x: square(split(x @ w)), mesh=four())(jnp.eye(8), x)


def test_a_body_that_leaves_the_workers_axis_to_jax_does_not_read_it():
    norm = lambda a: lax.psum(jnp.sum(a**2), tuple(jax.sharding.get_abstract_mesh().manual_axes))
    scaled = jax.shard_map(
        norm, mesh=four(), in_specs=P("tp"), out_specs=P(), axis_names={"tp"}, check_vma=False
    )
    x = jax.device_put(jnp.ones((8, 8)), NamedSharding(four(), P("data")))
    with pytest.raises(ValueError, match=r"losses.py:\d+.*by the axes of its mesh.*name the axes"):
        jaxsparse.grad(lambda w, x: square(x @ w) * scaled(w), mesh=four())(jnp.eye(8), x)


def test_sums_along_axes_that_a_vmap_has_named():
    draw = np.random.default_rng(0).normal
    x, w = draw(size=(8, 8)).astype("f"), jnp.asarray(draw(size=(8, 8)) / 3, "f")
    of_heads = lambda h: jax.vmap(lambda c: jnp.sin(c) - lax.pmean(c, "i"), 1, 1, axis_name="i")(h)
    stacked = lambda h: jax.vmap(lambda v: lax.psum(v, "k"), axis_name="k", out_axes=None)(
        jnp.stack([h, jnp.sin(h)])
    )

    def loss(w, x, number, split):
        by = lambda h: jnp.tanh(h) * (1 + jnp.float32(number()))
        by = by if split is None else split(by, P("data"), P("data"))
        return square(by(stacked(of_heads(x @ w))) @ w)

    found = jaxsparse.grad(
        lambda w, x: loss(w, x, lambda: lax.axis_index("data"), by_four), mesh=four()
    )(w, jax.device_put(x, NamedSharding(four(), P("data"))))
    for i, part in enumerate(np.split(x, 4)):
        check(found[i], jax.grad(lambda w, part=part, i=i: loss(w, part, lambda: i, None))(w))


@pytest.mark.parametrize("names", [("data", "tp"), ("all", "tp")])
def test_another_mesh_in_a_loss_is_refused(names):
    """As for a kernel that is cut over more devices than the loss."""
    other = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), names)
    spec = P(None, "tp")
    split = jax.shard_map(jnp.tanh, mesh=other, in_specs=spec, out_specs=spec)
    loss = lambda w, x: jnp.mean((x @ w["a"]) ** 2 * lax.stop_gradient(split(x @ w["a"])))
    words = r"there are 4 workers along 'data', and the mesh .*losses.py:\d+.*give it the mesh of"
    with pytest.raises(ValueError, match=words):
        jaxsparse.grad(loss, mesh=mesh_of((4, 2)))(*put(mesh_of((4, 2)), 4))


def test_results_alone_that_name_the_axis_are_refused():
    where = mesh_of((4, 2))
    ones = jax.shard_map(
        lambda: jnp.ones((1, 8)), mesh=where, in_specs=(), out_specs=P("data"), check_vma=False
    )
    with pytest.raises(ValueError, match=r"losses.py:\d+.* names .*'data' in its out_specs alone"):
        jaxsparse.grad(lambda w, x: jnp.mean(ones() * x @ w["a"]), mesh=where)(*put(where, 4))


@pytest.mark.parametrize(
    ("write", "infers"),
    [
        (lambda h, w, spec: jax.reshard(h, P("data", None)), False),
        (lambda h, w, spec: jax.sharding.auto_axes(jnp.tanh, out_sharding=spec)(h), False),
        (lambda h, w, spec: jax.shard_map(jnp.tanh, out_specs=spec)(h), True),
    ],
)
def test_what_explicit_axes_refuse_is_told(write, infers):
    where = mesh_of((4, 2), AxisType.Explicit)
    spec = P(None, "tp")

    def loss(w, x):
        h = jnp.einsum("bi,ij->bj", x, w["a"], out_sharding=spec)
        return jnp.mean(write(h, w, spec) ** 2)

    words = r"losses.py:\d+ .*does not run in one worker's function on Explicit axes.*leave 'data'"
    run = lambda: jax.jit(jaxsparse.grad(loss))(*put(where, 4))
    plain = jax.grad(lambda w, x: jnp.mean(jnp.tanh(x @ w["a"]) ** 2))
    right = forms.by_worker(plain)
    with jax.set_mesh(where):
        if infers:  # JAX infers specs where another axis is manual from 0.12 on
            check_or_refused(run, right, loss, put(where, 4), words)
            return
        with pytest.raises(ValueError, match=words):
            run()


def test_an_array_over_which_a_loss_closes_on_explicit_axes_is_told():
    """JAX's error of shardings is neither a TypeError nor a ValueError."""
    where = mesh_of((4, 2), AxisType.Explicit)
    scale = jax.device_put(np.ones((8, 16), np.float32), NamedSharding(where, P(None, "tp")))
    key = jax.device_put(jax.random.key(3), NamedSharding(where, P()))
    drawn = lambda w, x: (
        jnp.mean(x * jax.random.uniform(jax.random.fold_in(key, rank_of()))) * (w["b"].sum())
    )
    for loss in (drawn, lambda w, x: jnp.mean(x) * jnp.sum(w["a"] * scale)):
        with pytest.raises(ValueError, match=r"losses.py:\d+ .* pass arrays over which it closes"):
            jaxsparse.grad(loss, mesh=where)(*put(where, 4))


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_explicit_axes(checked, given):
    where = mesh_of((4, 2), AxisType.Explicit)
    spec, options = P(None, "tp"), {"mesh": where} if given else {}
    split = jax.shard_map(jnp.tanh, in_specs=spec, out_specs=spec, check_vma=checked, **options)

    def loss(w, x):
        h = split(jnp.einsum("bi,ij->bj", x, w["a"], out_sharding=spec))
        return jnp.mean(jnp.square(jnp.einsum("bi,ij->bj", h, w["b"], out_sharding=P()) - x))

    with jax.set_mesh(where):
        found = jax.jit(jaxsparse.value_and_grad(loss))(*put(where, 4))
    check(found, forms.right("elementwise", 4))


def test_checked_types_on_explicit_axes_are_told():
    where = mesh_of((4, 2), AxisType.Explicit)
    every = lambda z: lax.all_gather(z, "data", tiled=True)
    near = lambda z: lax.pmean(jnp.mean(z @ every(z).T), ("data", "tp"))
    split = jax.shard_map(near, mesh=where, in_specs=P("data", "tp"), out_specs=P())
    loss = lambda w, x: split(jnp.einsum("bi,ij->bj", x, w["a"], out_sharding=P(None, "tp")))
    with pytest.raises(ValueError, match=r"losses.py:\d+.* Explicit axes: give it check_vma"):
        jaxsparse.grad(loss, mesh=where)(*put(where, 4))


def test_an_inner_jit_that_jax_has_traced_before():
    """JAX calls no shard_map in it again."""
    where = mesh_of((4, 2))
    centred = lambda h: jnp.tanh(h - lax.pmean(h.mean(0, keepdims=True), "data"))
    split = jax.jit(jax.shard_map(centred, mesh=where, in_specs=P("data"), out_specs=P("data")))

    def loss(w, x, f=split):
        closed = lambda h: h * jnp.sum(w["b"])
        spec = P(None, "tp")
        g = jax.shard_map(closed, mesh=where, in_specs=spec, out_specs=spec)
        h = x @ w["a"]
        return jnp.mean(f(h if f is centred else g(h) / jnp.sum(w["b"])) ** 2)

    plain = jax.grad(lambda w, x: loss(w, x, centred))
    expected = forms.by_worker(plain)
    for again in (lambda w, x: loss(w, x), lambda w, x: loss(w, x) * 1.0):
        check(jaxsparse.grad(again, mesh=where)(*put(where, 4)), expected)


def test_jax_is_as_it_was_afterwards_and_in_other_threads():
    where = mesh_of((4, 2))
    module, mapping, primitive = compat.shard_map_functions()
    loops = compat.scan_module()
    private = lambda: (
        module._shmap_checks,
        module.broadcast_prefix,
        primitive.bind,
        loops._scan_known_hoisting,
    )
    before = private(), mapping.spmd_names_insert_pvary, jax.custom_vjp.__call__
    params, x = put(where, 4)
    loss = FORMS["elementwise"](Way(where, True, False, is_given=True))
    inside, done, found = threading.Event(), threading.Event(), []

    def other():
        inside.wait(60)
        found.append(jax.jit(jax.grad(loss))(params, x))  # while the other thread traces
        done.set()

    def traced(w, x):
        inside.set()
        done.wait(60)
        raise KeyError("an error of the loss")

    thread = threading.Thread(target=other)
    thread.start()
    with pytest.raises(KeyError, match="an error of the loss"):
        jaxsparse.grad(traced, mesh=where)(params, x)
    thread.join()
    check(found[0], jax.tree.map(lambda g: g.mean(0), forms.right("elementwise", 4)[1]))
    assert (private(), mapping.spmd_names_insert_pvary, jax.custom_vjp.__call__) == before


def test_a_release_that_moves_jaxs_functions_is_told(monkeypatch):
    monkeypatch.setattr(compat, "shard_map_functions", lambda: None)
    assert not shard_maps.can_leave_out()
    where = mesh_of((4, 2))
    params, x = put(where, 4)
    unnamed = FORMS["elementwise"](Way(where, False, False, is_given=True))
    check(jaxsparse.value_and_grad(unnamed, mesh=where)(params, x), forms.right("elementwise", 4))
    named = FORMS["elementwise"](Way(where, True, False, is_given=True))
    words = r"this release of JAX .*shard_map at .*forms.py:\d+.* names the workers' axis 'data'"
    with pytest.raises(ValueError, match=words):
        jaxsparse.value_and_grad(named, mesh=where)(params, x)
