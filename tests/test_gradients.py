"""The front door: each worker's own loss, in a step that is the trainer's own `jax.jit`."""

import contextlib
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from workers import mesh as mesh_of, some

import jaxsparse
from jaxsparse import contrib, reducers
from jaxsparse.outer.parallel import run_on_workers

CLIPPED = lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


def problem(mesh=None, rows=24):
    """Parameters and a batch, on the mesh as a trainer places them."""
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "w": jax.random.normal(keys[0], (12, 88)) * 0.3,
        "v": jax.random.normal(keys[1], (88, 4)) * 0.3,
        "b": jnp.zeros(4),
    }
    batch = jax.random.normal(keys[2], (rows, 12)), jax.random.normal(keys[3], (rows, 4))
    if mesh is None:
        return params, batch
    has_inner = "fsdp" in mesh.axis_names
    specs = (
        {"w": P("fsdp"), "v": P(None, "fsdp"), "b": P()}
        if has_inner
        else dict.fromkeys(params, P())
    )
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    of_batch = P(("data", "fsdp") if has_inner else "data")
    return {k: put(x, specs[k]) for k, x in params.items()}, tuple(put(x, of_batch) for x in batch)


def loss_of(params, batch):
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] + params["b"][None] - y) ** 2)


@jax.numpy_dtype_promotion("standard")  # Optax' Adam needs it
def trained(value_and_grad, tx, params, batch, steps=4):
    """Losses of some steps, written as for `jax.jit`, and the parameters and state behind them."""

    @jax.jit
    @chex.assert_max_traces(2)  # once more as arrays that init made get a placement
    def step(params, state, batch):
        loss, grads = value_and_grad(loss_of)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss.mean()

    state, losses = tx.init(params), []
    for _ in range(steps):
        params, state, loss = jax.block_until_ready(step(params, state, batch))
        losses.append(float(loss))
    return np.array(losses), params, state


@functools.cache
def plain():
    params, batch = problem(rows=120)
    return trained(jax.value_and_grad, CLIPPED(), params, batch)


SENT = {"dense": lambda **o: jaxsparse.dense(**o), "all": lambda **o: jaxsparse.top_k(1.0, **o)}
# Numbers of workers are simulated; tuples are meshes.
CASES = [((4, 2), "all"), (8, "all"), (8, "dense"), ((3,), "all"), ((2, 4), "dense")]


@pytest.mark.parametrize("case", some(CASES, CASES[:1]), ids=str)
def test_everything_sent_is_the_trainers_own_step(case):
    shape, sent = case
    losses, params, _ = plain()
    workers = shape if isinstance(shape, int) else None
    mesh = None if workers else mesh_of(shape)
    start, batch = problem(mesh, rows=120)
    tx = optax.chain(SENT[sent](workers=workers), CLIPPED())
    own = functools.partial(jaxsparse.value_and_grad, workers=workers)
    found, after, _ = trained(own, tx, start, batch)
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    chex.assert_trees_all_close(jax.device_get(after), jax.device_get(params), atol=2e-5)
    if mesh is not None:
        for name, x in after.items():  # as the trainer placed them
            assert x.sharding.is_equivalent_to(start[name].sharding, x.ndim), name


@pytest.mark.slow
def test_the_state_has_rows_and_means_are_exchanged():
    """Rows of the state are split, and what a worker receives is read from the compiled program."""
    mesh = mesh_of((8,))
    params, batch = problem(mesh)
    tx = jaxsparse.top_k(0.1)

    @jax.jit
    def step(params, state, batch):
        _, grads = jaxsparse.value_and_grad(loss_of)(params, batch)
        updates, state = tx.update(grads, state, params)
        return updates, state, grads

    state = jax.jit(tx.init)(params)
    updates, after, grads = step(params, state, batch)
    for x in (*jax.tree.leaves(after.residual), *jax.tree.leaves(grads)):
        assert x.shape[0] == 8
        assert x.sharding.shard_shape(x.shape)[0] == 1
    left = {"w": after.residual["w"].value.sum(0)} | {"v": grads["v"] * 0, "b": grads["b"] * 0}
    for name in ("w",):  # the law: everything is delivered or kept
        np.testing.assert_allclose(
            8 * updates[name] + left[name], grads[name].sum(0), rtol=1e-5, atol=1e-6
        )
    found = jaxsparse.wire_bytes(step, params, state, batch, mesh=mesh)

    def one(carried, batch):  # one worker's step on all
        params, state = carried
        return tx.update(jax.grad(loss_of)(params, batch), state, params)

    other = run_on_workers(one, mesh)
    wanted = jaxsparse.wire_bytes(other, (params, state), batch, mesh=mesh)
    assert found.received == wanted.received > 0
    assert found.payload == wanted.payload


def test_the_number_of_a_worker_and_rows_of_all_that_returns():
    def loss(params, batch, scale):
        rank = jax.lax.axis_index("data")
        aux = {"rank": rank, "seen": batch[0].shape[0], "scale": scale}
        return loss_of(params, batch) * scale, aux

    for workers, shape in ((4, None), (None, (4, 2))):
        params, batch = problem(shape and mesh_of(shape))
        both = jaxsparse.value_and_grad(loss, has_aux=True, workers=workers)
        (values, aux), grads = jax.jit(both)(params, batch, 2.0)
        assert aux["rank"].tolist() == [0, 1, 2, 3]
        assert aux["seen"].tolist() == [6] * 4
        whole, (_, own) = jax.jit(jax.value_and_grad(loss_of))(*problem()), problem()
        np.testing.assert_allclose(values.mean(), 2 * whole[0], rtol=1e-5)
        part = jax.jit(jax.grad(loss_of))(problem()[0], tuple(x[6:12] for x in own))
        np.testing.assert_allclose(grads["w"][1], 2 * part["w"], rtol=2e-4, atol=1e-6)
        gradient = jax.jit(jaxsparse.grad(loss, has_aux=True, workers=workers))
        only, rest = gradient(params, batch, 2.0)
        chex.assert_trees_all_close(only, grads)
        assert rest["scale"].tolist() == [2.0] * 4


@pytest.mark.parametrize("convolves", [False, True])
@pytest.mark.parametrize("shape", [(4,), (4, 2)], ids=str)
def test_models_keep_their_constraints_and_convolutions(shape, convolves):
    """Code for `jax.jit` names the axis of the workers; XLA takes convolutions under shard_map.

    Flax makes constraints of logical names, and whenever it finds a mesh in context.
    """
    mesh = mesh_of(shape)
    params, batch = problem(mesh)
    spec = P(mesh.axis_names)

    def loss(params, batch, constrains=True):
        hidden = jnp.tanh(batch[0] @ params["w"])
        is_seen = not jax.sharding.get_abstract_mesh().empty
        if constrains and (convolves or is_seen):
            sharding = NamedSharding(mesh, spec) if convolves else spec
            hidden = jax.lax.with_sharding_constraint(hidden, sharding)
        if convolves:
            layout, kernel = ("NHC", "HIO", "NHC"), params["v"][:3, :1, None]
            hidden = jax.lax.conv_general_dilated(
                hidden[..., None], kernel, (1,), "SAME", dimension_numbers=layout
            )[..., 0]
        return jnp.mean((hidden @ params["v"] - batch[1]) ** 2)

    wanted = jax.jit(jax.grad(functools.partial(loss, constrains=False)))(*problem())
    for context in (contextlib.nullcontext(), jax.set_mesh(mesh)):
        with context:
            grads = jax.jit(jaxsparse.grad(loss))(params, batch)
        mean = jax.tree.map(lambda x: x.mean(0), jax.device_get(grads))
        chex.assert_trees_all_close(mean, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_own_moments_on_explicit_axes():
    """`jax.make_mesh` makes such axes by default."""
    where = mesh_of((4,)), mesh_of((4,), AxisType.Explicit)
    tx = optax.chain(jaxsparse.per_worker(optax.trace(0.9)), jaxsparse.top_k(0.1))
    found = []
    for mesh in where:
        params, batch = problem(mesh)

        def step(state, params, batch):
            return tx.update(jaxsparse.grad(loss_of)(params, batch), state, params)[0]

        found.append(jax.device_get(jax.jit(step)(tx.init(params), params, batch)))
    chex.assert_trees_all_close(*found, atol=1e-6)


@pytest.mark.slow
def test_what_plain_jit_survives():
    """Modes of JAX, on a mesh: without jit, exported, donated, under a guard, as shapes alone."""
    mesh = mesh_of((4,))
    params, batch = problem(mesh)
    tx = optax.chain(jaxsparse.top_k(0.1), optax.sgd(0.1))

    def step(params, state, batch):
        loss, grads = jaxsparse.value_and_grad(loss_of)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss.mean()

    state = jax.jit(tx.init)(params)
    chex.assert_trees_all_equal_shapes(state, tx.init(params))
    wanted = jax.jit(step)(params, state, batch)
    with jax.disable_jit():
        chex.assert_trees_all_close(step(params, state, batch), wanted, rtol=1e-4, atol=1e-6)
    shapes = jax.eval_shape(step, params, state, batch)
    chex.assert_trees_all_equal_shapes(shapes, wanted)
    exported = jax.export.export(jax.jit(step))(params, state, batch)
    chex.assert_trees_all_close(exported.call(params, state, batch), wanted, rtol=1e-6)
    with jax.transfer_guard("disallow"):
        donated = jax.jit(step, donate_argnums=(0, 1))
        lowered = donated.lower(params, state, batch).compile()
    assert lowered.memory_analysis().alias_size_in_bytes > 0.9 * 4 * (2 * 12 * 88 + 88 * 4)


MISTAKES = {
    "workers": (lambda p, b: jaxsparse.grad(loss_of, workers=0)(p, b), "workers=0 must be"),
    "both": (
        lambda p, b: jaxsparse.grad(loss_of, workers=2, mesh=mesh_of((2,)))(p, b),
        "give one of both",
    ),
    "share": (lambda p, b: jaxsparse.grad(loss_of, workers=5)(p, b), "5 workers cannot share"),
    "missing": (lambda p, b: jaxsparse.grad(loss_of, workers=2)(p), "batch_argnums=1 names"),
    "unsplit": (
        lambda p, b: jaxsparse.grad(lambda p, x, y: loss_of(p, (x, y)), workers=2)(p, *b),
        r"give batch_argnums=\(1, 2\)",
    ),
    "no workers": (
        lambda p, b: jaxsparse.top_k(0.1).update(
            jaxsparse.grad(loss_of, workers=2)(p, b), jaxsparse.top_k(0.1).init(p), p
        ),
        "To simulate workers on one device, give workers=",
    ),
    "no mesh": (
        lambda p, b: jaxsparse.grad(loss_of)(p, b),
        r"as by params = jaxsparse.shard\(params, mesh\) in front of tx.init",
    ),
    "not spread": (
        lambda p, b: jaxsparse.top_k(0.1, workers=2).update(
            jaxsparse.grad(loss_of, workers=2)(p, b), jaxsparse.top_k(0.1).init(p), p
        ),
        r"each of the 2 workers: spread it by jaxsparse.shard\(state, mesh\)",
    ),
    "other workers": (
        lambda p, b: jaxsparse.top_k(0.1, workers=3).update(
            jaxsparse.grad(loss_of, workers=2)(p, b), jaxsparse.top_k(0.1, workers=3).init(p), p
        ),
        "but there are 3 workers",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name):
    run, text = MISTAKES[name]
    with pytest.raises(ValueError, match=text):
        run(*problem())


D = jaxsparse.top_k(0.1)
LABELS = {"w": "sent", "v": "still", "b": "still"}
# Wrappers of Optax and transformations in front: None if the chain is what it reads like.
CHAINS = {
    "behind": (optax.chain(D, optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), None),
    "finite behind": (optax.chain(D, optax.apply_if_finite(optax.adam(1e-3), 3)), None),
    "ema behind": (optax.chain(D, optax.adam(1e-3), optax.ema(0.9)), None),
    "injected": (optax.inject_hyperparams(lambda lr: optax.chain(D, optax.sgd(lr)))(0.1), None),
    "value in front": (optax.chain(optax.clip(1.0), D), None),
    "own": (
        optax.chain(
            jaxsparse.per_worker(
                optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam())
            ),
            D,
        ),
        None,
    ),
    "no exchange": (optax.adam(1e-3), "update.'b'. has shape .3, 4."),
    "norm in front": (optax.chain(optax.clip_by_global_norm(1.0), D), "combines elements"),
    "block in front": (optax.chain(optax.clip_by_block_rms(1.0), D), "combines elements"),
    "centre in front": (optax.chain(optax.centralize(), D), "combines elements"),
    "trace in front": (optax.chain(optax.trace(0.9), D), "state.0..trace.'b'. has shape"),
    "adam in front": (optax.chain(optax.scale_by_adam(), D), "state.0..mu.'b'. has shape"),
    "multi_transform": (
        optax.multi_transform({"sent": D, "still": optax.set_to_zero()}, LABELS),
        "optax.MaskedNode",
    ),
    "masked": (optax.masked(D, {"w": True, "v": False, "b": False}), "optax.MaskedNode"),
    "finite around": (optax.apply_if_finite(optax.chain(D, optax.sgd(1.0)), 3), "branches"),
    "conditional": (
        optax.conditionally_transform(optax.chain(D, optax.sgd(1.0)), lambda s: s % 2 == 0),
        "branches",
    ),
    "MultiSteps": (optax.MultiSteps(optax.chain(D, optax.sgd(1.0)), 2), "optax.MultiSteps"),
    "mechanize": (optax.contrib.mechanize(optax.chain(D, optax.sgd(1.0))), "mechanize"),
    "lookahead": (optax.lookahead(optax.chain(D, optax.sgd(1.0)), 5, 0.5), None),
    "in front of lookahead": (
        optax.chain(D, optax.lookahead(optax.sgd(1.0), 5, 0.5)),
        "optax.lookahead.optax.chain.exchange",
    ),
}


@pytest.mark.parametrize("name", CHAINS)
@jax.numpy_dtype_promotion("standard")
@jax.numpy_rank_promotion("allow")
def test_rows_end_in_the_exchange(name):
    (tx, text), params = CHAINS[name], problem()[0]
    if "lookahead" in name:
        params = optax.LookaheadParams.init_synced(params)
    if text is None:
        jaxsparse.check(tx, params)
    else:
        with pytest.raises(ValueError, match=text):
            jaxsparse.check(tx, params)


@pytest.mark.parametrize("name", some(["dense", "ef21_sgdm", "zero1"], ["dense"]))
def test_arguments_of_optimizers_behind_the_exchange_have_no_rows(name):
    """Three workers' losses fit the columns: each had a rate of its own, without a word."""
    target = jnp.float32(np.random.default_rng(0).normal(size=(5, 3)))
    params, x = {"w": jnp.ones((5, 3))}, jnp.float32(np.random.default_rng(1).normal(size=(6, 5)))
    loss = lambda p, x: jnp.mean(jnp.square(x @ (p["w"] - target)))
    optimizer = optax.polyak_sgd()
    options = {"workers": 3, "is_dense": lambda *_: False}
    tx = {
        "dense": lambda: optax.chain(jaxsparse.dense(workers=3), optimizer),
        "ef21_sgdm": lambda: optax.chain(
            contrib.ef21_sgdm(reducers.TopK(1.0), **options), optimizer
        ),
        "zero1": lambda: jaxsparse.zero1(optimizer, "float16", **options),
    }[name]()
    state = tx.init(params)
    values, grads = jax.jit(jaxsparse.value_and_grad(loss, workers=3))(params, x)
    mean = jax.tree.map(lambda g: g.mean(0), grads)
    with pytest.raises(ValueError, match=r"value has shape \(3,\), a row .* value=loss.mean\(\)"):
        tx.update(grads, state, params, value=values)
    with pytest.raises(ValueError, match=r"grad\['w'\] has shape \(3, 5, 3\), a row"):
        tx.update(grads, state, params, value=values.mean(), grad=grads)
    found, _ = jax.jit(tx.update)(grads, state, params, value=values.mean(), grad=mean)
    value, slope = jax.jit(jax.value_and_grad(loss))(params, x)
    wanted, _ = jax.jit(optimizer.update)(slope, optimizer.init(params), params, value=value)
    np.testing.assert_allclose(found["w"], wanted["w"], rtol=2e-3, atol=1e-4)


def test_what_gradients_overwrite_is_not_exchanged():
    params, _ = problem()
    tx = jaxsparse.dense(workers=2)
    tree = {"params": params, "_overwrite_with_gradient": {"scale": jnp.ones(1)}}
    rows = jax.tree.map(lambda x: jnp.stack([x, x]), tree)
    with pytest.raises(ValueError, match=r"scale'. is no gradient but .*maximum of its rows"):
        tx.update(rows, tx.init(tree), tree)


@pytest.mark.slow
@jax.numpy_dtype_promotion("standard")
def test_moments_stay_where_the_trainer_split_them():
    """ZeRO-1: Adam's moments lie over the workers. What follows from them is gathered."""
    mesh = mesh_of((4,))
    params, batch = problem(mesh)
    tx = optax.chain(jaxsparse.dense(), optax.scale_by_adam(), optax.scale(-1e-2))
    split = lambda x: jax.device_put(
        x, NamedSharding(mesh, P("data" if x.shape[0] % 4 == 0 else None))
    )
    state = tx.init(params)
    moments = state[1]._replace(
        mu=jax.tree.map(split, state[1].mu), nu=jax.tree.map(split, state[1].nu)
    )

    @jax.jit
    def step(params, state, batch):
        _, grads = jaxsparse.value_and_grad(loss_of)(params, batch)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return jax.lax.with_sharding_constraint(params, NamedSharding(mesh, P())), state

    held = lambda x: x.addressable_shards[0].data.nbytes
    before = state[0], moments, state[2]
    after, behind = step(params, before, batch)
    for name in params:
        for moment in ("mu", "nu"):
            assert held(getattr(behind[1], moment)[name]) == held(getattr(moments, moment)[name])
    plain, _ = step(params, state, batch)
    chex.assert_trees_all_close(jax.device_get(after), jax.device_get(plain), atol=1e-6)
    moved = {c.op for c in jaxsparse.wire_bytes(step, params, before, batch, mesh=mesh).collectives}
    assert "all-gather" in moved


def test_products_of_experts_run_beside_inner_axes():
    """JAX has no rule to map a ragged product over rows, so that it runs by shard_map."""
    where = mesh_of((2, 2))
    params = {"w": jnp.arange(24.0).reshape(3, 4, 2) / 24}
    x = jnp.linspace(-1, 1, 24).reshape(6, 4)
    sizes = jnp.int32([[1, 2], [0, 1], [2, 0]])  # rows of each expert, on each worker

    def loss(params, x):
        own = sizes[:, jax.lax.axis_index("data")]
        return jnp.mean(jnp.square(jax.lax.ragged_dot(x, params["w"], own)))

    found = jax.jit(jaxsparse.grad(loss, mesh=where))(params, x)["w"]
    of_one = lambda w, x, expert: jnp.mean(jnp.square(jnp.einsum("bi,bio->bo", x, w[expert])))
    for worker, part in enumerate(jnp.split(x, 2)):
        expert = np.repeat(np.arange(3), np.asarray(sizes[:, worker]))
        own = jax.grad(of_one)(params["w"], part, expert)
        np.testing.assert_allclose(found[worker], own, rtol=1e-5, atol=1e-7)


def test_what_a_watched_step_sends_besides_is_warned_of_once():
    """Moments cut over the workers: what follows from them is gathered."""
    where = mesh_of((2,))
    tx = jaxsparse.dense()
    params = jax.device_put({"w": jnp.ones((64, 32))}, NamedSharding(where, P()))
    state, cut = tx.init(params), NamedSharding(where, P("data"))
    moments = jax.device_put(jnp.zeros((64, 32)), cut)

    @functools.partial(jax.jit, static_argnums=4)
    def step(params, moments, state, x, is_cut=True):
        grads = jaxsparse.grad(lambda p, x: jnp.sum(p["w"] @ x.T))(params, x)
        means, state = tx.update(grads, state, params)
        moments = 0.9 * moments + means["w"]
        update = jax.lax.with_sharding_constraint(moments, cut) if is_cut else means["w"]
        whole = jax.lax.with_sharding_constraint(update, NamedSharding(where, P()))
        return {"w": params["w"] - whole}, moments, state

    x = jax.device_put(jnp.ones((4, 32)), cut)
    run = jaxsparse.watch(step, where)
    with pytest.warns(UserWarning, match=r"besides the exchange, 1 collectives .* 4,096 bytes"):
        first = run(params, moments, state, x)
    run(*first, x)
    jax.tree.map(np.testing.assert_array_equal, first, step(params, moments, state, x))
    assert run.lower(params, moments, state, x).out_info[0]["w"].shape == (64, 32)
    jaxsparse.watch(jax.jit(lambda *a: step(*a, False)), where)(params, moments, state, x)
    with pytest.raises(ValueError, match="axis_name='hosts' is not an axis of the mesh"):
        jaxsparse.watch(step, where, axis_name="hosts")


def test_rows_that_each_device_holds_are_warned_of():
    where = mesh_of((2,))
    tx = jaxsparse.top_k(0.5, is_dense=lambda *_: False)
    params = jax.device_put({"w": jnp.ones((8, 4))}, NamedSharding(where, P()))
    state = jax.device_put(tx.init(params), NamedSharding(where, P()))
    step = jaxsparse.watch(jax.jit(lambda s: jax.tree.map(jnp.negative, s)), where)
    with pytest.warns(UserWarning, match="is per-worker state, but each device holds that of all"):
        step(state)
    split = jaxsparse.shard(tx.init(params), where)
    whole = jax.jit(lambda s: s, out_shardings=NamedSharding(where, P()))
    step = jaxsparse.watch(whole, where)
    after = step(split)  # it comes back whole, and the next call says so
    with pytest.warns(UserWarning, match="is per-worker state, but each device holds that of all"):
        step(after)


def test_a_loss_that_fails_is_told_what_was_split():
    stats, x = jnp.zeros(6), jnp.ones((8, 6))
    loss = lambda w, stats, x: ((x - stats[None]) @ w).sum()
    both = jaxsparse.value_and_grad(loss, workers=2)
    with pytest.raises((TypeError, ValueError)) as caught:
        both(jnp.ones(6), stats, x)
    assert "as batch_argnums" in caught.value.__notes__[0]
    closed = lambda w, x: ((x - 2 * jnp.ones((8, 6))) @ w).sum()
    with pytest.raises((TypeError, ValueError)) as caught:
        jaxsparse.value_and_grad(closed, workers=2)(jnp.ones(6), x)
    assert "arrays over which it closes" in caught.value.__notes__[0]
    value, _ = jaxsparse.value_and_grad(loss, workers=2, batch_argnums=2)(jnp.ones(6), stats, x)
    assert value.tolist() == [24.0, 24.0]


SQUARES = lambda params, x: jnp.square(x @ params["w"])
GIVEN = {"w": jnp.linspace(0.1, 1, 15).reshape(5, 3)}, jnp.linspace(-1, 1, 80).reshape(16, 5)


def test_check_loss_takes_a_mean_over_rows():
    mean = lambda params, x: SQUARES(params, x).mean()
    jaxsparse.check_loss(mean, *GIVEN)
    both = lambda params, x: (mean(params, x), x.shape)
    jaxsparse.check_loss(both, *GIVEN, has_aux=True, workers=4)
    jaxsparse.check_loss(lambda params, x: 0 * mean(params, x), *GIVEN)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_check_loss_takes_arrays_of_a_mesh(kind):
    on = jaxsparse.shard(GIVEN, jax.make_mesh((4,), ("data",), (kind,), devices=jax.devices()[:4]))
    jaxsparse.check_loss(lambda params, x: SQUARES(params, x).mean(), *on)


def test_check_loss_tells_that_an_axis_has_no_whole_batch():
    named = lambda params, x: SQUARES(params, x).mean() * jax.lax.psum(1.0, "data")
    with pytest.raises(ValueError, match=r"the loss names an axis .* check it without that part"):
        jaxsparse.check_loss(named, *GIVEN)


def test_check_loss_tells_a_sum_with_its_factor():
    total = lambda params, x: SQUARES(params, x).sum()
    with pytest.raises(ValueError, match=r"4 workers is 0.25 times .* at \['w'\]: the loss is a"):
        jaxsparse.check_loss(total, *GIVEN, workers=4)


def test_check_loss_tells_unlike_numbers_of_tokens():
    def of_tokens(params, batch):
        x, mask = batch
        return (SQUARES(params, x) * mask[:, None]).sum() / mask.sum()

    params, x = GIVEN
    with pytest.raises(ValueError, match=r"2 workers differs .* at \['w'\], by up to .*mean_of"):
        jaxsparse.check_loss(of_tokens, params, (x, jnp.float32(jnp.arange(16) < 9)), workers=2)
