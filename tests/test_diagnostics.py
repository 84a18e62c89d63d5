"""Reports on what is delivered and held back, and checks that replicas are equal."""

import functools
import os
import pathlib
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType
from running import ROOT, in_processes, run
from supports import flat
from tensorboardX.proto import event_pb2
from workers import some

import jaxsparse
from jaxsparse import check_replicas, diagnose, shard
from jaxsparse.outer.parallel import run_on_workers

AXES = ("hosts", "local")
PARAMS = {"w": jnp.zeros((50, 40)), "b": jnp.zeros(7)}
P = jax.sharding.PartitionSpec


def mesh_of(shape, axes=("data",)):
    return jax.make_mesh(shape, axes, axis_types=(jax.sharding.AxisType.Auto,) * len(axes))


def gradients(workers, scale):
    rng = np.random.default_rng(0)
    draw = lambda p: (rng.normal(size=(workers, *p.shape)) * scale).astype(np.float32)
    return jax.tree.map(draw, PARAMS)


def norm(x):
    return np.linalg.norm(np.asarray(x, np.float64).ravel())


@pytest.mark.parametrize(
    "mesh", some([3, mesh_of((3,))], [mesh_of((3,))]), ids=["vmap", "shard_map"]
)
def test_norms_and_counts(mesh):
    tx = jaxsparse.top_k(0.01, bucket_size=1100)

    @functools.partial(run_on_workers, mesh=mesh, batch_argnums=0)
    def step(grads, state):
        updates, state = tx.update(jax.tree.map(lambda g: g[0], grads), state)
        return updates, state, diagnose((state, "anything else"), updates)

    for scale in (1.0, 1e30, 1e-30):
        state = shard(tx.init(PARAMS), mesh)
        updates, state, report = step(gradients(3, scale), state)
        rows = flat(state.residual).astype(np.float64)
        expected = np.sqrt(np.mean([norm(row) ** 2 for row in rows]))
        np.testing.assert_allclose(report.residual_norm, expected, rtol=1e-5)
        expected = np.sqrt(sum(norm(u) ** 2 for u in jax.tree.leaves(updates)))
        np.testing.assert_allclose(report.update_norm, expected, rtol=1e-5)
        nonzero = sum(np.count_nonzero(u) for u in jax.tree.leaves(updates))
        assert int(report.delivered) == nonzero
        np.testing.assert_allclose(report.delivered_share, nonzero / 2007, rtol=1e-6)
        logged = report.to_dict()
        assert float(logged["jaxsparse/delivered"]) == nonzero
        assert len(logged) == len(report)
        assert (int(report.overflow), int(report.skipped)) == (0, 0)
        assert float(report.dropped_share) == 0


def test_by_itself_it_finds_states_in_a_trainer_and_adds_them_up():
    dense, sparse = jaxsparse.dense(), jaxsparse.spardl(0.01)
    both = optax.partition({"w": sparse, "b": dense}, {"w": "w", "b": "b"})
    tx = optax.chain(both, optax.adam(1e-3))
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
    run = run_on_workers(diagnose, 3, batch_argnums=())
    report = run(shard(state, 3))
    assert [float(report.residual_norm), int(report.delivered), int(report.skipped)] == [0, 0, 0]
    assert report.update_norm is report.delivered_share is report.dropped_share is None
    with pytest.raises(ValueError, match="state, of type dict, holds no state of a jaxsparse"):
        run({"w": jnp.zeros(3)})


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("sizes", [{"data": 4}, {"data": 2, "fsdp": 2}], ids=str)
def test_residuals_that_a_trainer_puts_on_all_devices_are_told(sizes, kind):
    """Told by `diagnose`, and by the exchange itself where types say where arrays lie."""
    mesh = jax.make_mesh((*sizes.values(),), (*sizes,), axis_types=(kind,) * len(sizes))
    there = lambda spec: jax.sharding.NamedSharding(mesh, spec)
    tx, params = jaxsparse.quantized("int4"), jax.device_put(PARAMS, there(P()))
    state = shard(tx.init(params), mesh)
    grads = jax.device_put(gradients(sizes["data"], 1.0), there(P("data")))
    told = r"state\.residual\['w'\]\.jaxsparse_per_worker is per-worker state, .*specs\(state\)"
    placed = jax.tree.map(there, jaxsparse.specs(state))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, state = jax.jit(tx.update, out_shardings=(None, placed))(grads, state, params)
        diagnose(state)
        run = jax.jit(tx.update, out_shardings=(None, there(P())))
        _, copied = run(grads, state, params)
    with pytest.warns(UserWarning, match=told):
        diagnose(copied)
    if kind == AxisType.Explicit:
        with pytest.warns(UserWarning, match=told):
            run(grads, copied, params)


def test_of_a_single_worker_and_under_nnx():
    tx = jaxsparse.top_k(0.01, axis_name=None)
    model = nnx.Linear(40, 50, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.chain(tx, optax.sgd(0.1)), wrt=nnx.Param)
    grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    nnx.jit(lambda optimizer, model: optimizer.update(model, grads))(optimizer, model)
    report = jax.jit(functools.partial(diagnose, axis_name=None))(optimizer.opt_state)
    # All but 20 of 2000 ones are held back; the bias is delivered.
    np.testing.assert_allclose(report.residual_norm, np.sqrt(1980), rtol=1e-6)
    assert int(report.delivered) == 20 + 50


def scalars_in(folder):
    """(step, name, value) of TensorBoard's events, each behind 12 bytes and in front of 4."""
    (path,) = folder.glob("events.out.tfevents.*")
    data, at = path.read_bytes(), 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 8], "little")
        event = event_pb2.Event.FromString(data[at + 12 : at + 12 + size])
        yield from ((event.step, each.tag, each.simple_value) for each in event.summary.value)
        at += 16 + size


@pytest.mark.slow
def test_the_linen_trainer_logs_them_for_tensorboard(tmp_path):
    flags = ["--devices", 2, "--hidden", 32, "--steps", 3, "--accumulate", 1, "--compression", 2]
    run("linen_trainer.py", *flags, "--log", "out/log", cwd=tmp_path)
    rows = {}
    for step, name, value in scalars_in(tmp_path / "out/log"):
        rows.setdefault(step, {})[name.removeprefix("jaxsparse/")] = value
    assert rows.pop(0)["received_bytes"] > 1000
    assert [*rows] == [1, 2, 3]
    for row in rows.values():
        assert row["loss"] > 0
        assert row["residual_norm"] > 0
        assert row["update_norm"] > 0
        assert 0 < row["delivered_share"] < 0.5
        assert row["skipped"] == row["overflow"] == 0


class TestReplicas:
    mesh = mesh_of((2, 2), AXES)

    def array(self, spec, values):
        """An array of shape (2, 3), from the values on each device."""
        sharding = jax.sharding.NamedSharding(self.mesh, spec)
        pieces = [jax.device_put(v, d) for v, d in zip(values, self.mesh.devices.flat)]
        return jax.make_array_from_single_device_arrays((2, 3), sharding, pieces)

    def test_equal_ones_pass(self):
        x = jnp.float32([[1, -0.0, np.nan], [2, 3, np.inf]])
        tree = {
            "whole": self.array(P(), [x] * 4),
            "halves": self.array(P("local"), [x[:1], x[1:]] * 2),
            "own": self.array(P(AXES[0], None), [x[:1], x[:1], x[1:], x[1:]]),
            "key": jax.device_put(jax.random.key(0), jax.sharding.NamedSharding(self.mesh, P())),
            "bf16": self.array(P(), [x.astype(jnp.bfloat16)] * 4),
            "number": 3,
            "single": jnp.ones(3),
            "empty": jax.device_put(np.zeros((0, 3)), jax.sharding.NamedSharding(self.mesh, P())),
        }
        check_replicas(tree)

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    def test_one_bit_is_found(self, dtype):
        x = jnp.asarray([[1, 0, 3], [4, 5, 6]], dtype)
        other = x.at[0, 1].set(-0.0)
        tree = {"params": [self.array(P(), [x, x, other, x])]}
        with pytest.raises(
            RuntimeError,
            match=r"\['params'\]\[0\] differs between .*0 and .*2 in 1 of 6 elements, first at "
            r"\(0, 1\): 0(\.0)? and -0(\.0)?\. Replicas have drifted",
        ):
            check_replicas(tree)

    def test_shards_are_compared_with_their_own_copies(self):
        x = jnp.float32([[1, 2, 3], [4, 5, 6]])
        changed = self.array(P("local"), [x[:1], x[1:], x[:1], x[1:] + 1])
        with pytest.raises(RuntimeError, match=r"differs between .*1 and .*3 in 3 of 3"):
            check_replicas(changed)

    def test_not_within_a_step(self):
        with pytest.raises(ValueError, match="call it on the step's outputs"):
            jax.jit(lambda x: check_replicas(x))(jnp.ones(3))

    @pytest.mark.slow
    def test_processes_learn_of_differences_elsewhere(self):
        script = pathlib.Path(__file__).with_name("run_replicas.py")
        env = os.environ | {"PYTHONPATH": str(ROOT)}  # includes XLA_FLAGS, which must not matter
        command = [sys.executable, script]
        outcome, lines = in_processes(command, 2, devices=2, timeout=120, env=env)
        assert outcome.status == 0, outcome.report
        cases = (
            "equal: ",
            "between: ",
            "within: ",
            "together: ",
            "finite: ",
            "alone: ",
            "process 0 has",
        )
        # Libraries may print, too.
        said = [[line for line in each if line.startswith(cases)] for each in lines]
        both = ["equal: equal", "between: leaf['v'] differs between processes 0 and 1"]
        broken = "gradient['w'] of worker 2 (process 1) has 1 NaN and 0 infinities among 1 elements"
        alone = []
        for call in ("jaxsparse.check_replicas", "jaxsparse.diagnose"):
            waited = f"process 0 has waited for others in {call} for"
            fix = "so all processes must call it, equally often."
            assert sum(fix in line for line in said[0] if line.startswith(waited)) == 1
            alone += [f"alone: {waited} 1 s"]
        assert [line for line in said[0] if not line.startswith("process")] == [
            *both,
            "within: an array differs between devices of process 1",
            "together: equal",
            f"finite: {broken}",
            *alone,
        ]
        assert said[1][:2] == both
        assert said[1][2].startswith("within: leaf['v'] differs between ")
        assert said[1][3:] == ["together: equal", f"finite: {broken}"]


class TestCheckFinite:
    @pytest.mark.parametrize("shape", [None, (4,), (2, 2)], ids=str)
    def test_leaves_and_workers_are_named(self, shape):
        rows = np.ones((shape[0] if shape else 3, 6, 4), np.float32)
        rows[1, 2, 3], rows[0, :2, 0], rows[0, 5, 1] = np.nan, np.inf, -np.inf
        grads = {"w": rows, "b": np.ones((len(rows), 2), np.float32), "n": np.ones(3, np.int32)}
        if shape:
            names = ("data", "tp")[: len(shape)]
            spec = {"w": P("data", names[1:], None), "b": P("data"), "n": P()}
            place = lambda x, s: jax.device_put(x, jax.NamedSharding(mesh_of(shape, names), s))
            grads = jax.tree.map(place, grads, spec)
        expected = (
            r"^gradient\['w'\] of worker 0 has 0 NaN and 3 infinities among 24 elements; "
            r"gradient\['w'\] of worker 1 has 1 NaN and 0 infinities among 24 elements$"
        )
        with pytest.raises(FloatingPointError, match=expected):
            jaxsparse.check_finite(grads)
        assert jaxsparse.check_finite({"b": grads["b"], "n": grads["n"]}) is None

    def test_an_error_names_ten(self):
        with pytest.raises(FloatingPointError, match=r"worker 9 .*; and 5 more$"):
            jaxsparse.check_finite(jnp.full((15, 2), jnp.nan))

    def test_a_skipped_step_shows_it_again(self):
        mesh, tx = mesh_of((3,)), jaxsparse.top_k(0.5, is_dense=lambda *_: False)
        loss = lambda w, x: jnp.sum(jnp.sqrt(x) * w)
        params = shard(jnp.ones(4), mesh)
        batch = jax.device_put(
            jnp.ones((3, 4)).at[2, 1].set(-1), jax.NamedSharding(mesh, P("data"))
        )
        gradient = jax.jit(jaxsparse.grad(loss))
        with jax.numpy_rank_promotion("allow"):
            grads = gradient(params, batch)
        _, state = jax.jit(tx.update)(grads, shard(tx.init(params), mesh), params)
        assert int(diagnose(state).skipped) == 1
        with pytest.raises(FloatingPointError, match="gradient of worker 2 has 1 NaN"):
            jaxsparse.check_finite(grads)

    def test_not_within_a_step_and_not_without_rows(self):
        with pytest.raises(ValueError, match=r"call check_finite outside of jax\.jit"):
            jax.jit(lambda x: jaxsparse.check_finite(x))(jnp.ones(3))
        with pytest.raises(ValueError, match=r"gradient\['b'\] is a scalar"):
            jaxsparse.check_finite({"b": jnp.float32(1)})
