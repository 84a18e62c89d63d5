"""Meshes with inner axes, for FSDP and tensor parallelism inside a worker."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import workers
from contract import CASES, KINDS, rounds
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from on_meshes import MESHES, NAMES, SHAPES, SPECS, gradients, is_bias, mesh, on, put, stepper
from training import stepped
from workers import some

import jaxsparse
from jaxsparse import PerWorker, reshard, shard, traffic
from jaxsparse.comm import meshes
from jaxsparse.feedback.devices import exchanged_specs
from jaxsparse.outer.parallel import run_on_workers
from jaxsparse.reducers import OmniReduce, SparCML, SparDL
from jaxsparse.reducers.dense import Dense

STEPS = 2


def steps(reducer, where, broken=None, **settings):
    """Sums of gradients and of W times the updates, and the last state."""
    run, state, _ = stepper(reducer, where, **settings)
    workers = where.shape["hosts"]
    sent = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    given = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for seed in range(STEPS):
        grads = gradients(workers, seed)
        if broken is not None and seed == STEPS - 1:
            grads["both"][broken] = np.nan
        updates, state = run(put(where, grads, "hosts"), state)
        for name in SHAPES:
            given[name] += workers * np.asarray(updates[name], np.float64)
            sent[name] += grads[name].sum(0, dtype=np.float64)
    return sent, given, state


def kept(state, field, name):
    found = getattr(state, field).get(name)
    return 0.0 if found is None else np.asarray(found.value, np.float64).sum(0)


LAWFUL = [name for name, case in CASES.items() if case.reducer.conserves]
SLOW = [name for name in LAWFUL if name in KINDS]


def pairs(usual, names=SLOW):
    """The systems, and two more, on one mesh, and these two on all meshes."""
    found = [(name, MESHES[0]) for name in LAWFUL if name in names]
    found += [(name, shape) for name in ("spardl", "sketched_sgd") for shape in MESHES]
    return some(dict.fromkeys(found), [(usual, MESHES[0])])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "way"), [("top_k", "manual"), *((name, "mapped") for name in SLOW)]
)
def test_what_is_dropped_takes_no_memory(name, way):
    """A step with decay=0 is one whose residual has been set to zero before it."""
    where, reducer = mesh(), CASES[name].reducer
    run, state, _ = stepper(reducer, where, way, decay=0.0, momentum=0.5)
    expected, other, _ = stepper(reducer, where, way, momentum=0.5)
    assert not state.residual
    assert other.residual
    for seed in range(STEPS):
        grads = put(where, gradients(2, seed), "hosts")
        updates, state = run(grads, state)
        other = other._replace(residual=jax.tree.map(jnp.zeros_like, other.residual))
        wanted, other = expected(grads, other)
        jax.tree.map(np.testing.assert_array_equal, updates, wanted)
    jax.tree.map(np.testing.assert_array_equal, state.momentum, other.momentum)


@pytest.mark.parametrize("pair", pairs("spardl"), ids=str)
def test_nothing_is_lost(pair):
    """W times the updates and the residuals add up to all gradients, leaf by leaf."""
    name, shape = pair
    where, case = mesh(shape), CASES[name]
    sent, given, state = steps(case.reducer, where)
    for leaf in SHAPES:
        total = given[leaf] + kept(state, "residual", leaf)
        tolerance = {"atol": 0.2} if rounds(case.reducer) else {"atol": 0, "rtol": 0}
        np.testing.assert_allclose(total, sent[leaf], **tolerance, err_msg=leaf)
    jaxsparse.check_replicas(state)
    assert int(state.skipped) == 0
    assert 0 < int(state.info.delivered) <= sum(map(math.prod, SHAPES.values()))


@pytest.mark.parametrize("pair", pairs("sketched_sgd", ["top_k", "quantized", "powersgd"]), ids=str)
def test_full_budget_is_the_dense_mean(pair):
    name, shape = pair
    where, case = mesh(shape), CASES[name]
    sent, given, state = steps(case.full, where)
    for leaf in SHAPES:
        tolerance = {"atol": 4.0} if rounds(case.full) else {"rtol": 1e-5, "atol": 1e-3}
        owed = kept(state, "residual", leaf)
        np.testing.assert_allclose(given[leaf] + owed, sent[leaf], **tolerance, err_msg=leaf)


@pytest.mark.slow
@pytest.mark.parametrize(
    "reducer",
    some(
        [
            SparCML(4, 64, algorithm="recursive_double"),
            SparCML(4, 64, algorithm="split_allgather"),
            SparDL(0.2, teams=2, gather="bruck"),
        ],
        [SparCML(4, 64, algorithm="recursive_double")],
    ),
    ids=lambda reducer: f"{reducer.name} {getattr(reducer, 'algorithm', '')}",
)
def test_a_workers_devices_take_the_same_room(reducer):
    """Workers agree on one device's shards and not on another's: their sums need unlike rooms.

    Devices with rooms of their own would take different branches, each with collectives in it.
    """
    where = mesh((4, 1, 2))
    run, state, _ = stepper(reducer, where)
    sent, given = np.zeros(SHAPES["both"]), np.zeros(SHAPES["both"])
    for seed in range(4):
        grads = gradients(4, seed)
        for name in ("both", "one"):
            half = SHAPES[name][1] // 2
            grads[name][:, :, :half] = grads[name][:1, :, :half]
        updates, state = run(put(where, grads, "hosts"), state)
        given += 4 * np.asarray(updates["both"], np.float64)
        sent += grads["both"].sum(0, dtype=np.float64)
    np.testing.assert_array_equal(given + kept(state, "residual", "both"), sent)
    for one in jax.tree.leaves(state.reducers):
        np.testing.assert_array_equal(one[0], one[1])  # a row for each of the two devices


@dataclasses.dataclass(frozen=True)
class Remembering(Dense):
    """Its state is a worker's own: the sum of the first elements of what it exchanged."""

    def init(self, size):
        return PerWorker(jnp.zeros(1))

    def reduce(self, x, state, axis_name):
        sums, kept = super().reduce(x, (), axis_name)
        return sums, kept._replace(state=PerWorker(state.value + x[0]))


def test_a_reducers_state_may_differ_between_workers():
    sent, given, state = steps(Remembering(), mesh((2, 2)))
    for leaf in SHAPES:
        np.testing.assert_allclose(given[leaf], sent[leaf], rtol=1e-5, atol=1e-3)
    for one in state.reducers.values():
        first, second = jax.device_get(one.value)
        assert first.shape == (2,)  # one of each device of the worker
        assert (first != second).any()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["mapped", some(["manual"], [])[0]])
def test_ways_are_equal_and_momentum_and_delay_are_those_of_one_device(way):
    """A budget for everything leaves nothing to choose, so results are as without inner axes."""
    full = CASES["top_k"].full
    compressed_in_both = {"both", "one", "none"}  # "odd" goes uncompressed where it can't be cut
    settings = {"momentum": 0.5, "delay": 1}
    _, here, state = steps(full, mesh((2, 2, 2)), way=way, **settings)
    _, there, plain = steps(full, mesh((2,)), **settings)
    for leaf in compressed_in_both:
        np.testing.assert_array_equal(here[leaf], there[leaf])
        for field in ("residual", "momentum"):
            ours, theirs = (getattr(s, field).get(leaf) for s in (state, plain))
            jax.tree.map(np.testing.assert_array_equal, *jax.device_get((ours, theirs)))


def test_a_device_holds_its_shards_alone():
    where = mesh((2, 2, 2))
    _, state, _ = stepper(CASES["spardl"].reducer, where)
    for name, node in state.residual.items():
        local = node.value.addressable_shards[0].data
        assert local.size == math.prod(SHAPES[name]) // 4, name
        assert node.value.shape == (2, *SHAPES[name])
    assert set(state.residual) == {"both", "one", "none"}


def test_a_small_dense_leaf_is_exchanged_as_it_is():
    """A large one is cut further. Gathering a small one again would cost more than that saves."""
    placement = meshes.Placement((("fsdp", 4),), (P(), P()))
    leaves = {"large": jnp.zeros(4096), "small": jnp.zeros(4092)}
    assert exchanged_specs(leaves, placement, set()) == [P("fsdp"), P()]


def test_updates_are_placed_as_parameters_are_and_counted_on_all_devices():
    """They are not placed as the exchange cut them, so moments behind it keep their places."""
    where = mesh((2, 2, 2))
    run, state, params = stepper(CASES["top_k"].full, where)
    ones = {name: np.ones_like(g) for name, g in gradients(2).items()}
    updates, state = run(put(where, ones, "hosts"), state)
    for name, update in updates.items():
        assert update.sharding.is_equivalent_to(params[name].sharding, update.ndim), name
    assert int(state.info.delivered) == sum(map(math.prod, SHAPES.values()))


@pytest.mark.slow
def test_copies_of_a_rounded_momentum_stay_equal():
    """All workers round the momentum of the mean alike, and their residuals independently."""
    where = mesh((2, 2))
    tx = jaxsparse.exchange(
        OmniReduce(block_size=4, density=None, union_density=0.5),  # half finds no room
        axis_name="hosts",
        is_dense=is_bias,
        momentum=0.9,
        accumulator_dtype="bfloat16",
    )
    params = put(where, {name: jnp.zeros(s) for name, s in SHAPES.items()})
    state = shard(tx.init(params), where, "hosts")
    step = run_on_workers(
        lambda g, s: tx.update(jax.tree.map(lambda x: x[0] / 7, g), s),
        where,
        axis_name="hosts",
        batch_argnums=0,
    )
    for seed in range(2):
        _, state = step(put(where, gradients(2, seed), "hosts"), state)
    momentum, residual = state.momentum["both"], state.residual["both"].value
    assert momentum.dtype == residual.dtype == jnp.bfloat16
    assert np.any(momentum)
    assert np.any(residual[0] != residual[1])
    jaxsparse.check_replicas(state)


@pytest.mark.parametrize("shape", [(2, 4), *some([(2, 2, 2), (4, 1, 2)], [])], ids=str)
@pytest.mark.parametrize("way", ["mapped", some(["manual"], [])[0]])
def test_nothing_but_messages_crosses_hosts(shape, way):
    where = mesh(shape)
    run, state, _ = stepper(CASES["top_k"].reducer, where, way=way)
    compiled = run.lower(put(where, gradients(shape[0]), "hosts"), state).compile()
    strays = traffic.crossing(compiled, axis_name="hosts", mesh=where, outside=meshes.SCOPE)
    assert not list(strays), [str(stray) for stray in strays]
    moved = traffic.wire_bytes(compiled, mesh=where).across("hosts")
    dense = 4 * sum(map(math.prod, SHAPES.values())) / math.prod(shape[1:])
    assert 0 < moved.received < dense


def test_what_else_crosses_hosts_is_named_once():
    where = mesh((2, 2, 2))

    def step(params, x):
        own = jnp.square(x @ params).sum(0, keepdims=True)
        return params + jax.lax.pmean(own, "hosts")

    run = run_on_workers(step, where, axis_name="hosts")
    params = jax.device_put(jnp.ones((16, 2048)), NamedSharding(where, P(None, "tp")))
    x = jax.device_put(jnp.ones((4, 16)), NamedSharding(where, P("hosts")))
    with pytest.warns(UserWarning, match=r"1 collectives of the step cross 'hosts'.*all-reduce"):
        run(params, x)
    run(params, x)  # no second warning, or pytest would fail


def model(params, x, layout):
    """An embedding whose table and tokens are sharded over one axis, and two matrices."""
    h = params["table"][x]
    h = layout(h, P("fsdp", None, None))
    h = jax.nn.gelu(h @ params["up"])
    return (layout(h, P("fsdp", None, "tp")) @ params["down"]) @ params["table"].T


PLACES = {"table": P("fsdp", "tp"), "up": P("fsdp", "tp"), "down": P("tp", "fsdp")}


def start(where):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"table": (32, 16), "up": (16, 64), "down": (64, 16)}
    return {
        name: jax.device_put(jax.random.normal(key, s) / 4, NamedSharding(where, PLACES[name]))
        for key, (name, s) in zip(keys, shapes.items())
    }


def loss_of(where):
    def layout(x, spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(where, spec))

    def loss(params, tokens):
        logits = jax.nn.log_softmax(model(params, tokens[:, :-1], layout))
        hot = jax.nn.one_hot(tokens[:, 1:], logits.shape[-1])
        return -(logits * hot).sum(-1).mean()

    return loss


def make_step(where, tx):
    loss = loss_of(where)

    def step(params, opt_state, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        value = jax.lax.pmean(value, "hosts") if tx is not DENSE else value
        return optax.apply_updates(params, updates), opt_state, value

    return step


DENSE = optax.sgd(0.5, momentum=0.9)


@pytest.mark.parametrize("shape", [(2, 2, 2), *some([(4, 1, 2)], [])], ids=str)
def test_sharded_training_is_dense_training(shape):
    """To rounding, and with no more work. Embeddings are sharded, moments placed as parameters."""
    where = mesh(shape)
    tokens = np.random.default_rng(0).integers(0, 32, (4, 16, 9)).astype(np.int32)
    batches = [jax.device_put(t, NamedSharding(where, P(("hosts", "fsdp")))) for t in tokens]

    dense = jax.jit(make_step(where, DENSE))
    expected = start(where), DENSE.init(start(where))
    tx = optax.chain(jaxsparse.top_k(1.0, axis_name="hosts", is_dense=lambda *_: False), DENSE)
    run = run_on_workers(make_step(where, tx), where, axis_name="hosts", batch_argnums=2)
    params = start(where)
    state = params, shard(tx.init(params), where, "hosts")
    exact = optax.chain(jaxsparse.dense(axis_name="hosts"), DENSE)
    plain = run_on_workers(make_step(where, exact), where, axis_name="hosts", batch_argnums=2)
    plainly = start(where), shard(exact.init(start(where)), where, "hosts")
    flops = [
        f.lower(*s, batches[0]).compile().cost_analysis()["flops"]
        for f, s in ((dense, expected), (plain, plainly))
    ]
    assert flops[1] < 1.05 * flops[0] + 20 * 2**11  # an exchange flattens, checks and averages
    for batch in batches:
        *expected, wanted = dense(*expected, batch)
        *state, loss = run(*state, batch)
        np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    close = functools.partial(np.testing.assert_allclose, atol=1e-5)
    jax.tree.map(close, *jax.device_get((state[0], expected[0])))
    jaxsparse.check_replicas(state)
    for name, spec in PLACES.items():
        fits = NamedSharding(where, spec)
        for x in (state[0][name], state[1][1][0].trace[name]):
            assert x.sharding.is_equivalent_to(fits, x.ndim), (name, x.sharding)


def test_convolutions_get_shard_map():
    """Under vmap, weight gradients of a batch of workers would be gathered across workers."""
    where = mesh((2, 2, 2))

    def loss(params, x):
        h = jax.lax.conv_general_dilated(x, params["w"], (1, 1), "SAME")
        return jnp.mean(jnp.square(h))

    tx = jaxsparse.dense(axis_name="hosts")

    def step(params, state, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), state, jax.lax.pmean(value, "hosts")

    w = jax.device_put(jnp.ones((8, 4, 3, 3)), NamedSharding(where, P("tp")))
    x = jax.device_put(jnp.ones((8, 4, 8, 8)), NamedSharding(where, P(("hosts", "fsdp"))))
    state = shard(tx.init({"w": w}), where, "hosts")
    run = run_on_workers(step, where, axis_name="hosts", batch_argnums=2)
    compiled = run.lower({"w": w}, state, x).compile()
    strays = traffic.crossing(compiled, axis_name="hosts", mesh=where, outside=meshes.SCOPE)
    assert sum(stray.received_bytes for stray in strays) <= 16, list(map(str, strays))
    dense = jax.jit(jax.grad(lambda w, x: loss({"w": w}, x))).lower(w, x).compile()
    work = [c.cost_analysis()["flops"] for c in (compiled, dense)]
    assert work[0] < 1.05 * work[1] + 2000


@pytest.mark.parametrize("kinds", ["EEE", *some(["EAA", "AEE"], [])])
@pytest.mark.parametrize("cut", [(None, "tp"), *some([("fsdp", "tp")], [])], ids=str)
def test_explicit_axes(kinds, cut):
    """Partitions are read from types, also under jit. The step runs with either kind of axes.

    A leaf that an axis does not cut is cut over it for the exchange.
    """
    types = tuple({"A": AxisType.Auto, "E": AxisType.Explicit}[kind] for kind in kinds)
    where = jax.make_mesh((2, 2, 2), NAMES, axis_types=types)
    tx = jaxsparse.top_k(1.0, axis_name="hosts", is_dense=lambda *_: False)

    def step(params, state, x):
        def loss(p):
            out = P("fsdp", "tp") if kinds[1] == "E" else None
            return jnp.sum(jnp.einsum("bi,ij->bj", x, p["w"], out_sharding=out))

        updates, state = tx.update(jax.grad(loss)(params), state)
        return jax.tree.map(jnp.subtract, params, updates), state

    w = jax.device_put(jnp.ones((16, 8)), NamedSharding(where, P(*cut)))
    batch = {"E": P(("hosts", "fsdp")), "A": P("hosts")}[kinds[1]]
    x = np.arange(8.0 * 16, dtype=np.float32).reshape(8, 16)
    run = run_on_workers(step, where, axis_name="hosts", batch_argnums=2)
    with jax.set_mesh(where):
        state = (jax.jit(tx.init) if kinds == "EEE" else tx.init)({"w": w})
    state = shard(state, where, "hosts")
    for _ in range(2):
        params, state = run({"w": w}, state, jax.device_put(x, NamedSharding(where, batch)))
    expected = 1 - np.broadcast_to(x.reshape(2, 4, 16).sum(1).mean(0)[:, None], (16, 8))
    np.testing.assert_allclose(params["w"], expected, rtol=1e-6)


@pytest.mark.slow
def test_an_exchange_of_what_no_worker_has_alone_runs_and_keeps_its_momentum():
    """Behind another exchange, all gradients that `dense` gets are equal on all workers."""

    def trained(where):
        tx = optax.chain(
            jaxsparse.top_k(1.0, axis_name="hosts", is_dense=lambda *_: False),
            jaxsparse.dense(axis_name="hosts", momentum=0.5),
        )
        params = put(where, {name: jnp.zeros(shape) for name, shape in SHAPES.items()})
        state, step = shard(tx.init(params), where, "hosts"), stepped(tx, where, "hosts")
        for seed in range(2):
            updates, state = step(put(where, gradients(2, seed), "hosts"), state)
        return jax.device_get(updates)

    averaged = [{n: g.mean(0) for n, g in gradients(2, seed).items()} for seed in range(2)]
    for name, update in trained(mesh((2, 4))).items():
        np.testing.assert_array_equal(update, 0.5 * averaged[0][name] + averaged[1][name])


class TestInit:
    def test_shard_under_jit_does_not_know_partitions(self):
        where = mesh((2, 2, 2))
        with pytest.raises(ValueError, match=r"is traced, so its partition .* outside of jax.jit"):
            jax.jit(lambda p: shard(p, where, "hosts"))({"w": jnp.zeros((8, 8))})

    def test_a_mesh_that_optax_has_called(self):
        make = lambda mesh: jaxsparse.top_k(0.1, mesh=mesh, axis_name="hosts")
        tx = optax.inject_hyperparams(make)(mesh=mesh((2, 2, 2)))
        with pytest.raises(ValueError, match="name mesh and specs in its static_args"):
            tx.init({"w": jnp.zeros((40, 30))})

    def test_under_jit_with_mesh_and_specs(self):
        """Some trainers make or restore their state in a constructor."""
        where = mesh((2, 2, 2))
        given = jaxsparse.spardl(
            0.1, axis_name="hosts", is_dense=is_bias, mesh=where, specs=SPECS, momentum=0.9
        )
        params = put(where, {name: jnp.zeros(s) for name, s in SHAPES.items()})
        state = jax.jit(given.init)(params)
        eager = shard(
            jaxsparse.spardl(0.1, axis_name="hosts", is_dense=is_bias, momentum=0.9).init(params),
            where,
            "hosts",
        )
        assert jax.tree.structure(state) == jax.tree.structure(eager)
        for (path, x), y in zip(
            jax.tree_util.tree_flatten_with_path(state)[0], jax.tree.leaves(eager)
        ):
            assert x.shape == y.shape, path
            assert x.sharding.is_equivalent_to(y.sharding, x.ndim), path

    def test_without_inner_axes(self):
        tx = jaxsparse.spardl(0.1, mesh=workers.mesh(8), is_dense=is_bias)
        state = tx.init({name: jnp.zeros(s) for name, s in SHAPES.items()})
        assert state.residual["both"].value.shape == (8, *SHAPES["both"])
        assert state.residual["both"].value.sharding.spec == P("data")

    def test_specs_are_checked(self):
        where = mesh((2, 2, 2))
        make = lambda specs: jaxsparse.spardl(0.1, axis_name="hosts", mesh=where, specs=specs)
        params = {"w": jnp.zeros((40, 30))}
        for specs, complaint in (
            ({"v": P()}, "specs has another structure"),
            ({"w": P("hosts")}, "the axis of the workers: each worker needs all"),
            ({"w": P("model")}, "the mesh has no axis 'model'"),
            ({"w": P(None, ("fsdp", "tp"))}, "4 devices can't share 30 rows equally"),
            ({"w": "fsdp"}, "specs holds 'fsdp', which has no partition"),
        ):
            with pytest.raises(ValueError, match=complaint):
                make(specs).init(params)

    def test_specs_of_a_list_of_layers(self):
        """Also with a prefix: one partition for all of a layer's kernels."""
        where = mesh((2, 2, 2))
        params = {"layers": [{"a": jnp.zeros((8, 6)), "b": [jnp.zeros((8, 4))]}, jnp.zeros((4, 4))]}
        specs = {"layers": [{"a": P("fsdp", "tp"), "b": P("fsdp")}, P(None, "tp")]}
        placement = meshes.place(params, "hosts", where, specs)
        assert placement.own == (P("fsdp", "tp"), P("fsdp"), P(None, "tp"))
        placement = meshes.place(params, "hosts", where, P("tp"))
        assert placement.own == (P("tp"),) * 3

    def test_specs_of_an_abstract_model_or_state(self):
        """What a trainer has before it makes its parameters, under `jax.jit`."""
        where = mesh((2, 2, 2))
        fits = {"w": NamedSharding(where, P("fsdp", "tp")), "b": NamedSharding(where, P())}
        shapes = {
            name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=fits[name])
            for name, shape in {"w": (32, 64), "b": (64,)}.items()
        }
        state = TrainState(0, None, shapes, optax.sgd(0.1), ())
        arrays = jax.device_put(jax.tree.map(lambda x: jnp.zeros(x.shape), shapes), fits)
        for specs in (fits, shapes, arrays, state):
            tx = jaxsparse.spardl(0.1, axis_name="hosts", mesh=where, specs=specs)
            made = jax.jit(tx.init)(arrays)
            assert made.residual["w"].value.sharding.spec == P("hosts", "fsdp", "tp")

    @pytest.mark.slow
    def test_specs_of_an_abstract_nnx_model(self):
        where = mesh((2, 2, 2))

        def build():
            return nnx.Linear(32, 64, kernel_init=kernel, rngs=nnx.Rngs(0))

        kernel = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("fsdp", "tp"))
        with jax.set_mesh(where):
            model = build()
            abstract = nnx.eval_shape(build)
            _, state = nnx.get_abstract_model(build, where)
        params = nnx.state(model, nnx.Param)
        for specs in (abstract, nnx.as_abstract(abstract), state, nnx.get_partition_spec(params)):
            tx = jaxsparse.spardl(0.1, axis_name="hosts", mesh=where, specs=specs)
            for tree in (params, nnx.as_pure(params)):
                (own, *_) = jax.tree.leaves(jax.jit(tx.init)(tree).residual)
                assert own.sharding.spec == P("hosts", "fsdp", "tp")

    def test_nothing_can_be_cut(self):
        tx = jaxsparse.spardl(
            0.1, axis_name="hosts", mesh=mesh((2, 2, 2)), is_dense=lambda *_: False
        )
        with pytest.raises(ValueError, match="no leaf would be compressed: none of the shapes"):
            tx.init({"w": jnp.zeros((3, 7))})


@pytest.mark.parametrize("name", some(["ok_topk", "spardl"], []))
def test_training_goes_on_with_other_hosts_and_another_inner_mesh(name):
    """From 4 x 2 to 2 x 4 to 8 x 1 devices, residuals keep what they owe, to rounding."""
    shapes = {name: SHAPES[name] for name in ("both", "one")}
    sent = {name: np.zeros(s) for name, s in shapes.items()}
    given = {name: np.zeros(s) for name, s in shapes.items()}
    tx = jaxsparse.exchange(CASES[name].reducer, axis_name="hosts", is_dense=is_bias, momentum=0.0)
    state = None
    for shape in ((4, 2), (2, 4), (8, 1)):
        where = mesh(shape)
        params = put(where, {name: jnp.zeros(s) for name, s in shapes.items()})
        start = tx.init(params)
        state = (
            shard(start, where, "hosts")
            if state is None
            else reshard(state, where, "hosts", like=start)
        )
        step = stepped(tx, where, "hosts")
        for seed in range(2):
            grads = {n: gradients(shape[0], seed)[n] for n in shapes}
            updates, state = step(put(where, grads, "hosts"), state)
            for n in shapes:
                sent[n] += grads[n].mean(0, dtype=np.float64)
                given[n] += np.asarray(updates[n], np.float64)
        for n in shapes:
            owed = np.asarray(state.residual[n].value, np.float64).mean(0)
            np.testing.assert_allclose(given[n] + owed, sent[n], atol=1e-3)
            assert np.abs(owed).max() > 1
        state = jax.device_get(state)  # as a checkpoint has it


def test_a_state_of_another_mesh_is_refused_by_its_name():
    _, state, params = stepper(CASES["ok_topk"].reducer, mesh((2, 4)))
    reducers = r"leaf\.reducers\['0_OkTopk'\].* not on this mesh.*reshard like=tx.init\(params\)"
    with pytest.raises(ValueError, match=reducers):
        reshard(state, mesh((4, 2)), "hosts")
    with pytest.raises(ValueError, match=r"leaf\['bias'\].* simulated workers share one"):
        shard(params, 2)


class TestDoors:
    @pytest.mark.slow
    def test_vmap_of_ones_own(self):
        where = mesh((2, 2, 2))
        tx = jaxsparse.top_k(1.0, axis_name="hosts", mesh=where, is_dense=is_bias)
        params = put(where, {name: jnp.zeros(s) for name, s in SHAPES.items()})
        state = tx.init(params)
        axes = jax.tree.map(
            lambda spec: 0 if spec == P("hosts") else None,
            jaxsparse.specs(state, "hosts", inner=False),
        )
        rows = jaxsparse.comm.marks.map_marked(lambda x, own: x[:, None] if own else x, state)
        update = jax.vmap(
            tx.update,
            in_axes=(0, axes),
            out_axes=(None, axes),
            axis_name="hosts",
            spmd_axis_name="hosts",
        )
        grads = gradients(2)
        updates, _ = jax.jit(update)(put(where, grads, "hosts"), rows)
        for name in SHAPES:
            np.testing.assert_allclose(updates[name], grads[name].mean(0))

    def test_partly_manual_shard_map_of_ones_own(self):
        where = mesh((2, 2, 2))
        tx = jaxsparse.top_k(1.0, axis_name="hosts", is_dense=is_bias)
        params = put(where, {name: jnp.zeros(s) for name, s in SHAPES.items()})
        state = shard(tx.init(params), where, "hosts")
        spread = jaxsparse.specs(state, "hosts", inner=False)
        update = jax.shard_map(
            lambda g, s: tx.update(jax.tree.map(lambda x: x[0], g), s),
            mesh=where,
            in_specs=(P("hosts"), spread),
            out_specs=(P(), spread),
            axis_names={"hosts"},
            check_vma=False,
        )
        grads = gradients(2)
        updates, _ = jax.jit(update)(put(where, grads, "hosts"), state)
        for name in SHAPES:
            np.testing.assert_allclose(updates[name], grads[name].mean(0))

    @pytest.mark.slow
    @pytest.mark.parametrize("shape", [(2, 2, 2), *some([(8,)], [])], ids=str)
    def test_unreduced_gradients_of_explicit_axes(self, shape):
        """Unreduced gradients of a mean loss add up to its gradient. Only messages cross hosts."""
        where = mesh(shape, AxisType.Explicit)
        specs = {"both": P("fsdp", "tp"), "one": P(None, "tp")}
        specs = {name: on(where, spec) for name, spec in specs.items()}
        rng = np.random.default_rng(0)
        draw = lambda *shape: rng.integers(-4, 5, shape).astype(np.float32)
        put = lambda x, spec: jax.device_put(x, NamedSharding(where, spec))
        params = {name: put(draw(16, 8), spec) for name, spec in specs.items()}
        batch = draw(16, 16)
        tx = jaxsparse.top_k(1.0, axis_name="hosts", is_dense=lambda *_: False)
        state = shard(tx.init(params), where, "hosts")

        def loss(params, batch):
            """A loss that gathers each weight over the axes of the batch, as FSDP does."""
            axes = [a for a in ("hosts", "fsdp") if a in where.axis_names]
            whole = on(where, P(None, "tp"))
            out = P(tuple(axes), *whole[1:])
            gathered = [jax.reshard(w, P(*whole, reduced=set(axes))) for w in params.values()]
            return jnp.mean(
                sum(jnp.einsum("bi,ij->bj", batch, w, out_sharding=out) for w in gathered)
            )

        def step(params, state, batch):
            typed = {
                name: jax.reshard(w, P(*specs[name], reduced={"hosts"}))
                for name, w in params.items()
            }
            return tx.update(jax.grad(loss)(typed, batch), state, params)

        with jax.set_mesh(where):
            placed = put(batch, P(tuple(a for a in ("hosts", "fsdp") if a in where.axis_names)))
            compiled = jax.jit(step).lower(params, state, placed).compile()
            updates, state = compiled(params, state, placed)
            with pytest.raises(ValueError, match=r"gradient\['both'\].* averaged already"):
                tx.update(params, state, params)
        expected = np.broadcast_to(batch.sum(0)[:, None] / (16 * 8), (16, 8))
        for update in updates.values():
            np.testing.assert_array_equal(update, expected)
        moved = traffic.wire_bytes(compiled, mesh=where).across("hosts")
        assert moved.payload <= 4 * (2 * 16 * 8 // math.prod(shape[1:]) + 2)  # and two flags


@pytest.mark.slow
def test_orbax_restores_on_another_inner_mesh_and_diagnose_reads_it(tmp_path):
    """The target comes from the saved mesh, which need not be there. `reshard` places it anew."""
    old, new = mesh((2, 2, 2)), mesh((2, 4))
    reducer = CASES["top_k"].reducer
    _, _, state = steps(reducer, old)
    _, start, _ = stepper(reducer, new)
    tx = jaxsparse.exchange(reducer, axis_name="hosts", is_dense=is_bias, specs=SPECS)
    with jax.sharding.use_abstract_mesh(old.abstract_mesh):
        whole = jax.eval_shape(tx.init, {name: jnp.zeros(s) for name, s in SHAPES.items()})
    with ocp.CheckpointManager(tmp_path) as saved:
        saved.save(1, args=ocp.args.StandardSave(state))
        saved.wait_until_finished()
        target = jax.tree.map(lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape), whole)
        restored = saved.restore(1, args=ocp.args.StandardRestore(target))
    restored = jaxsparse.reshard(restored, new, "hosts", like=start)
    for name, node in state.residual.items():
        np.testing.assert_array_equal(restored.residual[name].value, node.value)
        assert restored.residual[name].value.sharding == start.residual[name].value.sharding
    reports = [
        run_on_workers(
            functools.partial(jaxsparse.diagnose, axis_name="hosts"),
            where,
            axis_name="hosts",
            batch_argnums=(),
        )(each)
        for where, each in ((old, state), (new, restored))
    ]
    owed = np.concatenate([np.asarray(n.value).reshape(2, -1) for n in state.residual.values()], 1)
    expected = np.sqrt(np.mean(np.sum(np.square(owed, dtype=np.float64), axis=1)))
    for report in reports:
        np.testing.assert_allclose(report.residual_norm, expected, rtol=1e-5)
    run, _, _ = stepper(reducer, new)
    updates, _ = run(put(new, gradients(2), "hosts"), restored)
    assert np.any(updates["both"])


@pytest.mark.parametrize("shape", [(8,), (4, 2)])
def test_a_state_of_another_tree_is_told_on_a_mesh(shape):
    where = jax.make_mesh(shape, ("data", "fsdp")[: len(shape)])
    put = lambda tree: jax.device_put(tree, NamedSharding(where, P()))
    small, large = put({"a": jnp.ones((64, 32))}), put({"a": jnp.ones((64, 32)), "b": jnp.ones(3)})
    tx = jaxsparse.dense(momentum=0.9)
    grads = {"a": jnp.ones((shape[0], 64, 32))}
    with pytest.raises(ValueError, match=r"the state's momentum of 'b' is float32\[3\], but these"):
        jax.jit(tx.update)(grads, tx.init(large), small)
    more = grads | {"b": jnp.ones((shape[0], 3))}
    told = "'b' is nothing, but these" if len(shape) == 1 else r"a tree of fewer leaves \(1\)"
    with pytest.raises(ValueError, match=told):
        jax.jit(tx.update)(more, tx.init(small), large)
