"""Processes that differ, or that stay behind, are told so: digests, notes, and real processes."""

import functools
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from running import ENV, QUICK, in_processes
from workers import mesh, rows

import jaxsparse
from jaxsparse import shard
from jaxsparse.comm import compat
from jaxsparse.outer import local_steps
from jaxsparse.outer.parallel import run_on_workers
from jaxsparse.processes import failing
from jaxsparse.processes.agreement import _difference, agree, compare
from jaxsparse.processes.digest import Digested
from jaxsparse.processes.group import ProcessGroup, group_of
from jaxsparse.quantize import Format
from jaxsparse.reducers import Quantized
from jaxsparse.training import sharding

SCRIPT = Path(__file__).with_name("run_unlike.py")


def digested(step, *args, batches=(1,), where=None):
    where = where or mesh(2)
    run = run_on_workers(step, where, batch_argnums=batches)
    return Digested(run.trace(*args).jaxpr, where, args)


def only(one, other):
    """The texts of the parts that `one` alone has."""
    known = {line.split(" ")[0] for line in other.lines()}
    return [line for line in one.lines() if line.split(" ")[0] not in known]


STATE, BATCH = {"w": jnp.ones(8), "rate": jnp.float32(0.1)}, jnp.ones((4, 8))


def step_of(rate=0.1, scale=(1.0, 2.0), order=(0, 1, 2), prints=False, k=3):
    constant, parts = np.float32(scale), [np.float32([i, 1]) for i in range(3)]

    def step(state, batch):
        mean = jax.lax.pmean(batch.mean(0), "data")
        x = mean * jnp.float32(rate) + jax.lax.top_k(mean, k)[0].sum()
        terms = {i: jnp.sin(x * i) + jax.jit(jnp.sum)(jnp.asarray(parts[i])) for i in order}
        if prints:
            jax.debug.print("{}", x)
        total = terms[0] + terms[1] + terms[2]
        return {**state, "w": total + state["w"] * jnp.asarray(constant)[1]}

    return step


USUAL = digested(step_of(), STATE, BATCH)


@pytest.mark.parametrize(
    "step",
    [step_of(), step_of(prints=True), step_of(order=(2, 0, 1))],
    ids=["traced again", "prints", "order of equations"],
)
def test_what_computes_the_same_has_the_same_digest(step):
    assert digested(step, STATE, BATCH).digest == USUAL.digest


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda: digested(step_of(rate=0.2), STATE, BATCH), "0.2"),
        (lambda: digested(step_of(k=2), STATE, BATCH), "top_k(float32[8], k=2"),
        (
            lambda: digested(step_of(scale=(1.0, 3.0)), STATE, BATCH),
            "constant float32[2] [1.0, 3.0]",
        ),
        (
            lambda: digested(step_of(), STATE | {"rate": jnp.float32(0.2)}, BATCH),
            "argument 0['rate'] = [0.2",
        ),
        (
            lambda: digested(step_of(), STATE | {"w": jnp.ones(8).at[7].set(2)}, BATCH),
            "argument 0['w'] = [1.0, 1.0, 1.0, 1.0], ... (digest ",
        ),
        (
            lambda: digested(step_of(), STATE, jnp.ones((8, 8))),
            "argument 1 of type float32[8, 8]",
        ),
        (lambda: digested(step_of(), STATE, BATCH, where=mesh(1)), "a mesh {'data': 1} of"),
    ],
    ids=["rate", "k", "constant", "scalar", "array", "shape", "mesh"],
)
def test_what_differs_is_named(other, said):
    other = other()
    assert other.digest != USUAL.digest
    assert said in only(other, USUAL)[0]
    assert only(USUAL, other)


def test_exchanges_of_other_settings_are_named():
    """Their operations alone are in the program."""

    def lines(name, before=1.0, behind=1.0):
        exchange = Quantized(Format(name), rounding="nearest")
        reduce = lambda x: exchange.pmean(x.reshape(-1), (), "data").mean
        step = lambda state, batch: reduce(batch * jnp.float32(before)) * jnp.float32(behind)
        return ["step", *digested(step, STATE, jnp.ones((4, 1024))).lines()]

    int4 = lines("int4")
    said = functools.partial(_difference, ProcessGroup((0, 1)))
    assert "Exchanges differ in reducer or settings" in said(int4, lines("int2"))
    for other in (lines("int4", before=2.0), lines("int4", behind=2.0)):
        assert "Exchanges differ" not in said(int4, other)


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (doubled(x), None), lambda _, g: (2 * g,))


def test_every_kind_of_program_is_read():
    def run(scale):
        @jax.checkpoint
        def layer(x):
            x = jax.lax.scan(lambda c, y: (c + y * scale, y), x, jnp.ones((3, 8)))[0]
            x = jax.lax.cond(x[0] > 0, jnp.sin, lambda y: y * scale, jax.nn.relu(x))
            return doubled(x).sum()

        def step(state, batch):
            key = jax.random.wrap_key_data(jnp.uint32([1, 2]))
            noise = jax.random.normal(key, (8,))
            mean = jax.lax.pmean(batch.mean(0), "data")
            grown = jax.lax.while_loop(lambda c: c.sum() < 5, lambda c: c + scale, state)
            return jax.grad(lambda w: layer(w + mean + noise))(grown)

        return digested(step, jnp.ones(8), BATCH)

    usual, again, other = run(0.5), run(0.5), run(0.25)
    assert usual.digest == again.digest
    assert "0.25" in only(other, usual)[0]


def test_a_static_argument_is_refused():
    step = jax.jit(lambda x, is_on: x if is_on else -x, static_argnums=1)
    with pytest.raises(ValueError, match="has static arguments, which processes do not compare"):
        compare(ProcessGroup((0, 1)), step, mesh(2), (jnp.ones(3), True))


def test_batches_and_per_worker_arrays_may_differ():
    tx = optax.chain(jaxsparse.top_k(0.5, is_dense=lambda *_: False), optax.sgd(0.1))
    params = {"w": jnp.ones(8)}

    def step(state, batch):
        grads = jax.grad(lambda p: jnp.sum(batch @ p["w"]))(state[0])
        updates, opt_state = tx.update(grads, state[1], state[0])
        return optax.apply_updates(state[0], updates), opt_state

    state = shard((params, tx.init(params)), mesh(2))
    other = jax.tree_util.tree_map_with_path(
        lambda path, x: x + 1 if "per_worker" in jax.tree_util.keystr(path) else x, state
    )
    split = lambda x: jax.device_put(x, NamedSharding(mesh(2), PartitionSpec("data")))
    one, two = digested(step, state, split(BATCH)), digested(step, other, split(2 * BATCH))
    assert one.digest == two.digest


class Store:
    """The part of JAX's store that groups use, in one process."""

    def __init__(self):
        self.notes, self.came = {}, threading.Condition()

    def key_value_set_bytes(self, key, value, allow_overwrite):
        with self.came:
            self.notes[key] = value
            self.came.notify_all()

    def blocking_key_value_get_bytes(self, key, milliseconds):
        """Needs some milliseconds for an answer, as under load."""
        with self.came:
            here = self.came.wait_for(lambda: key in self.notes, milliseconds / 1000)
        if not here or milliseconds < 10:
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: no note")
        return self.notes[key]

    def key_value_dir_get_bytes(self, place):
        return [(key, value) for key, value in self.notes.items() if key.startswith(place)]


@pytest.fixture
def members(monkeypatch):
    """Three processes of a group, each with a function that makes it the running one."""
    store = Store()
    monkeypatch.setattr(compat, "shared_store", lambda: store)
    groups = [ProcessGroup((0, 1, 2)) for _ in range(3)]

    def look(process, looks=3):
        monkeypatch.setattr(jax, "process_index", lambda: process)
        return groups[process].apart(looks)

    return groups, look


def test_processes_that_stay_together_are_left_alone(members):
    groups, look = members
    for _ in range(3):
        for process, group in enumerate(groups):
            group.begin("step")
            assert look(process) is None
    assert {look(p) for p in range(3) for _ in range(20)} == {None}


def test_one_that_is_slow_is_waited_for(members):
    groups, look = members
    for _ in range(20):
        groups[0].begin("step")
    assert look(0) is None
    for _ in range(20):  # process 1 is behind, but goes on
        groups[1].begin("step")
        assert look(1) is None
        assert look(0) is None


def test_one_that_leaves_out_a_step_is_named(members):
    groups, look = members
    for process, group in enumerate(groups):
        for _ in range(5 - (process == 1)):
            group.begin("step")
        look(process)
    said = [look(0) for _ in range(4)]
    assert said[:3] == [None] * 3
    assert said[3] == (
        "process 0 began 5 calls, the last of step; process 1 began 4 calls, the last of step; "
        "process 2 began 5 calls, the last of step"
    )


def test_only_who_is_late_counts_as_late(members, monkeypatch):
    groups, _ = members
    for process in (0, 2):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        groups[process].put("topic", f"of {process}")
    assert groups[0].get("topic", [1, 2, 0], seconds=0.05) == [None, "of 2", "of 0"]
    assert groups[0].get("topic", [2, 0], seconds=0.05) == ["of 2", "of 0"]


def test_what_comes_next_is_compared_with_the_first_process(members, monkeypatch):
    groups, _ = members

    def say(process, said):
        monkeypatch.setattr(jax, "process_index", lambda: process)
        agree(groups[process], said)

    for process in (0, 1, 2):
        say(process, "exchanges after 4 steps")
    say(0, "exchanges after 8 steps")
    say(2, "exchanges after 8 steps")
    with pytest.raises(RuntimeError, match=r"process 1 finishes after 7 steps, but process 0 ex"):
        say(1, "finishes after 7 steps")


STREAMING = jaxsparse.outer.Streaming(2, overlap=1)


@pytest.mark.parametrize(
    ("streaming", "turns"), rows([(None, [3, 6])], [(STREAMING, [1, 3, 4, 6])])
)
def test_local_steps_say_when_they_exchange(monkeypatch, streaming, turns):
    said = []
    for name in ("compare_texts", "agree"):
        monkeypatch.setattr(local_steps, name, lambda *args: said.append(args[-1]))
    monkeypatch.setattr(local_steps, "group_of", lambda mesh: ProcessGroup((0, 1)))
    params = {"a0": jnp.zeros(2), "a1": jnp.zeros(2)}
    step = lambda s, b: ((jax.tree.map(lambda x: x + b.sum(), s[0]),), None)
    make = lambda: jaxsparse.LocalSteps(
        step, jaxsparse.dense(), optax.sgd(1.0), mesh(2), every=3, streaming=streaming
    )
    train = make()
    state = train.init((params,))
    for _ in range(7):
        state, _ = jax.block_until_ready(train(state, jnp.ones(2)))
    state = train.finish(state)
    pace = ("every=3", f"fragments={1 + bool(streaming)}, overlap={int(bool(streaming))}")
    expected = [(*pace, "goes on after 0 steps"), *(f"exchanges after {t} steps" for t in turns)]
    assert said == [*expected, "finishes after 7 steps"]
    make().finish(state)  # restored in a new process
    assert said[-1] == (*pace, "finishes after 7 steps")


def test_one_process_has_no_group():
    assert group_of(mesh(2)) is None


def test_what_a_run_is_started_with_is_compared(monkeypatch):
    found = []
    monkeypatch.setattr(failing, "whole_group", lambda: ProcessGroup((0, 1)))
    monkeypatch.setattr(failing, "compare_texts", lambda *args: found.append([*args[-1]]))

    def begin():
        with jaxsparse.fail_at_once():
            return set(found[-1])

    monkeypatch.setenv("XLA_FLAGS", "--xla_b=1 --xla_dump_to=/here")
    usual = begin()
    assert {"8 devices of this process", "jax_enable_x64=False", "XLA_FLAGS --xla_b=1"} < usual
    assert not any("dump" in text for text in usual)
    with jax.enable_x64(True):
        assert begin() - usual == {"jax_enable_x64=True"}
    monkeypatch.setenv("XLA_FLAGS", "--xla_b=2")
    assert begin() - usual == {"XLA_FLAGS --xla_b=2"}


def test_values_that_differ_are_named_before_they_are_spread(monkeypatch):
    found = []
    monkeypatch.setattr(sharding, "group_of", lambda mesh: ProcessGroup((0, 1)))
    monkeypatch.setattr(sharding, "compare_texts", lambda *args: found.append({*args[-1]}))
    for seed, size in ((0, 8), (1, 8), (0, 9)):
        params = {"w": jax.random.normal(jax.random.key(seed), (size,)), "b": np.zeros(2), "n": 3}
        shard(params, mesh(2))
    usual, seeded, longer = found
    assert {text.partition(" = ")[0] for text in usual} == {"leaf['w']", "leaf['b']", "leaf['n']"}
    for other in (seeded, longer):
        assert {text.partition(" = ")[0] for text in other - usual} == {"leaf['w']"}
    assert "float32[9]" in next(iter(longer - usual))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "theirs", "ours"),
    [
        ("SEED=1", "leaf['w'] = float32[40]", "leaf['w'] = float32[40]"),
        ("JAX_ENABLE_X64=1", "jax_enable_x64=True", "jax_enable_x64=False"),
        ("JAX_NUM_CPU_DEVICES=2", "2 devices of this process", "1 devices of this process"),
    ],
)
def test_a_process_that_is_started_unlike_others_is_told(setting, theirs, ours):
    command, env = [sys.executable, SCRIPT, "begin"], ENV | {"JAX_PLATFORMS": "cpu", "SEED": "0"}
    unlike = lambda rank: ("env", setting) if rank == 1 else ("env",)
    outcome, lines = in_processes(command, 2, timeout=60, env=env, wrap=unlike)
    assert outcome.status
    text = "\n".join(line for each in lines for line in each)
    assert f"Process 1 has: {theirs}" in text
    assert f"Process 0 has: {ours}" in text


@pytest.mark.slow
def test_values_that_are_cut_inside_of_processes_are_compared():
    command, env = [sys.executable, SCRIPT, "begin"], ENV | {"JAX_PLATFORMS": "cpu", "SEED": "0"}
    for odd in (0, 1):
        unlike = lambda rank, odd=odd: ("env", f"CUT_SEED={odd * rank}")
        outcome, lines = in_processes(command, 2, devices=2, timeout=60, env=env, wrap=unlike)
        text = "\n".join(line for each in lines for line in each)
        assert bool(outcome.status) == bool(odd), outcome.report
        assert ("Process 1 has: leaf['cut'][0:20] = float32[20]" in text) == bool(odd), text


@pytest.mark.slow
def test_unlike_processes_end_with_the_reason():
    command, env = [sys.executable, SCRIPT], ENV | QUICK | {"JAX_PLATFORMS": "cpu"}
    unlike_sets = lambda rank: ("env", f"PYTHONHASHSEED={rank}")
    outcome, lines = in_processes(command, 3, timeout=120, env=env, wrap=unlike_sets)
    wanted = {
        "rate": ("mul(float32[] [-0.2", "mul(float32[] [-0.1"),
        "local": ("mul(float32[] [-0.2", "mul(float32[] [-0.1"),
        "every": ("every=3", "every=4"),
        "value": ("argument 0['rate'] = [0.2", "argument 0['rate'] = [0.1"),
    }
    for rank in range(3):
        said = dict(line.split(": ", 1) for line in lines[rank] if ": " in line)
        for name, (odd, usual) in wanted.items():
            assert said[name].startswith("process 1 calls '"), said[name]
            assert f"Process 1 has: {odd}" in said[name]
            assert f"Process 0 has: {usual}" in said[name]
        assert said["equal"] == "ran"
        assert said["late"].startswith("process 1 did not come to the first call of '<lambda>'")
        assert "all called" in lines[rank] or rank != 1
    assert outcome.status
    text = "\n".join(line for each in lines for line in each)
    assert "Processes have been apart for 2 s: process 0 began" in text
