"""Every misuse that a user is likely to meet names the argument, its value and the fix."""

import dataclasses

import contract
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P
from misuse import ONE, PARAMS, sketched, update
from workers import mesh

import jaxsparse
from jaxsparse import PerWorker, contrib, shard
from jaxsparse.arrays.settings import static_float, static_int
from jaxsparse.outer.parallel import run_on_workers

SETTINGS = {
    "k too small": (lambda: sketched(k=0).init(PARAMS), r"k=0 must lie between 1 and .* 1200"),
    "rows": (lambda: sketched(rows=0), r"rows=0"),
    "density in percent": (lambda: jaxsparse.spardl(1), r"density=1 is 100 %: write 1.0 to send"),
    "density as text": (lambda: contrib.gtopk("0.1"), r"density='0.1' must be a number"),
    "density that is not a number": (
        lambda: jaxsparse.top_k(float("nan")),
        r"density=nan is not a number \(NaN\): pass a number",
    ),
    "density as an array": (
        lambda: jaxsparse.top_k(jnp.ones(1)),
        r"density=Array.* must be a number: it is static \(list it in static_args",
    ),
    "k as a share": (
        lambda: jaxsparse.sparcml(0.01),
        "k=0.01 must be an int: give a number, not a share",
    ),
    "teams": (lambda: jaxsparse.spardl(0.1, teams=1.0), r"teams=1.0 must be an int"),
    "no bool": (lambda: jaxsparse.quantized(gather=1), "gather=1 must be True or False"),
    "no dtype": (
        lambda: sketched(table_dtype="foo"),
        "table_dtype=foo is unknown: use float32",
    ),
    "bits without a dense half": (
        lambda: jaxsparse.sparcml(bits=4, algorithm="ring"),
        r"bits=4 quantise .* algorithm='ring' lacks: use that or 'auto'",
    ),
    "a scale without bits": (
        lambda: jaxsparse.sparcml(scale="l2"),
        r"bits_group_size=1024 and scale='l2' are for quantised .*bits=None",
    ),
    "a scale that feeds back": (
        lambda: jaxsparse.sparcml(bits=4, scale="l2", rounding="nearest"),
        r"scale='l2' with bits=4, group_size=1024 and rounding to nearest",
    ),
    "a codec's class": (
        lambda: jaxsparse.top_k(0.1, codec=jaxsparse.codecs.Packed),
        r"codec=.*Packed.* is not a codec: use codecs.COO, codecs.Packed\(\) or",
    ),
    "k of a group": (lambda: jaxsparse.sparcml(5, 4), r"k=5 must lie between 1 and group_size=4"),
    "oversampling": (lambda: sketched(oversampling=0), r"oversampling=0 must be at least 1"),
    "oversampling of heavymix": (
        lambda: sketched(selection="heavymix", oversampling=4),
        r"oversampling=4 must be .* 1 with selection='heavymix'",
    ),
    "selection": (
        lambda: sketched(selection="topk"),
        r"selection='topk' is unknown: use 'top_k' or 'heavymix'",
    ),
    "table_dtype": (lambda: sketched(table_dtype="int8"), r"table_dtype=int8.*use float32"),
    "no budget": (lambda: jaxsparse.sketched_sgd(k=5), r"k=5 and cols=None: give compression=10"),
    "too much budget": (
        lambda: jaxsparse.sketched_sgd(10, k=5, cols=40),
        r"compression=10, k=5 and cols=40 cannot all hold",
    ),
    "compression below 1": (lambda: jaxsparse.sketched_sgd(0.5), r"compression=0.5 must be at le"),
    "k that leaves no columns": (
        lambda: jaxsparse.sketched_sgd(10, k=100).init(PARAMS),
        r"compression=10 .* makes k=100 and cols=-\d+: ask for less",
    ),
    "momentum as a jax.Array": (
        lambda: sketched(momentum=jnp.float32(1)),
        r"momentum=1.0 must lie in \[0, 1\)",
    ),
    "momentum that is not a number": (
        lambda: sketched(momentum=jnp.float32(jnp.nan)),
        r"momentum=nan must lie in \[0, 1\)",
    ),
    "momentum of a constant under jit": (
        lambda: jax.jit(lambda: sketched(momentum=ONE).init(PARAMS))(),
        r"momentum=1.0 must lie in \[0, 1\)",
    ),
    "momentum as text": (
        lambda: sketched(momentum="0.9"),
        r"momentum='0.9' is no real number: give one in \[0, 1\), or None",
    ),
    "complex momentum": (lambda: sketched(momentum=1j), "momentum=1j is no real number"),
    "momentum by a schedule": (
        lambda: sketched(momentum=optax.constant_schedule(0.9)),
        r"momentum=<function .* must be a number in \[0, 1\) or None. .*optax.inject_hyperparams",
    ),
    "a mask of leaves": (
        lambda: jaxsparse.top_k(0.1, is_dense={"w": False, "b": True}),
        r"is_dense=\{'w': False, 'b': True\} must be a function of a leaf's key path and shape",
    ),
    "a rule of leaves without their shapes": (
        lambda: jaxsparse.top_k(0.1, is_dense=lambda path: True),
        r"is_dense=<function .* must be a function of path and shape: write is_dense=lambda path, ",
    ),
    "an axis without a name": (
        lambda: jaxsparse.top_k(0.1, axis_name="", workers=2).init(PARAMS),
        r"axis_name='' is not supported: give one axis name",
    ),
    "a mask of leaves that own moments": (
        lambda: jaxsparse.zero1(optax.sgd(0.1), is_dense=[True]),
        r"is_dense=\[True\] must be a function",
    ),
    "momentum per leaf": (
        lambda: jaxsparse.dense(momentum=np.array([0.9])),
        r"momentum has shape \(1,\): pass a scalar in \[0, 1\)",
    ),
}


@pytest.mark.parametrize("misuse", SETTINGS)
def test_settings(misuse):
    act, message = SETTINGS[misuse]
    with pytest.raises(ValueError, match=message):
        act()


@pytest.mark.parametrize("value", [5.0, "5", None, True])
def test_settings_that_are_no_arrays_have_nothing_to_do_with_injecting(value):
    for kind, check in (("an int", static_int), ("a number", static_float)):
        if kind == "a number" and value == 5.0:
            continue
        with pytest.raises(ValueError, match=f"^k={value!r} must be {kind}: ") as error:
            check("k", value)
        assert "static_args" not in str(error.value)


SEEDED = [name for name, case in contract.CASES.items() if hasattr(case.reducer, "seed")]


@pytest.mark.parametrize("name", SEEDED)
def test_seeds_that_would_repeat(name):
    reducer = contract.CASES[name].reducer
    for seed in (-1, 2**32):
        with pytest.raises(ValueError, match=rf"seed={seed} must be in 0 .. .*seed % 2\*\*32"):
            dataclasses.replace(reducer, seed=seed)
    assert dataclasses.replace(reducer, seed=np.uint32(2**32 - 1)).seed == 2**32 - 1


def outside_the_parallel_step():
    tx = sketched()
    tx.update(PARAMS, tx.init(PARAMS))


def spread_over_another_mesh():
    shard(shard(sketched().init(PARAMS), mesh(2)), mesh(3))


def other_axis():
    update(sketched(axis_name="batch"), where=mesh(3))


def several_axes():
    update(sketched(axis_name=("data", "model")))


def whole_state_in_one_worker():
    tx = sketched()
    state = shard(tx.init(PARAMS), 3)
    f = jax.shard_map(
        lambda g, s: tx.update(g, s)[0], mesh=mesh(3), in_specs=P(), out_specs=P(), check_vma=False
    )
    f(PARAMS, state)


def state_for_other_workers():
    tx = sketched()
    update(tx, where=3, state=shard((PARAMS, tx.init(PARAMS)), 2))


def state_of_another_momentum():
    update(sketched(momentum=0.9), state=shard((PARAMS, sketched().init(PARAMS)), 3))


def dense_state_of_another_tree():
    tx = jaxsparse.dense(momentum=0.9)
    update(tx, state=shard((PARAMS, tx.init({"b": jnp.ones(3)})), 3))


def batch_argument_that_is_not_there():
    run_on_workers(lambda x: x, mesh(3), batch_argnums=5)(jnp.ones(3))


def axis_not_in_mesh():
    run_on_workers(lambda x: x, mesh(3), axis_name="workers")


def shard_over_an_axis_not_in_mesh():
    shard(PARAMS, mesh(3), "workers")


def partitioned_over_the_axis_of_the_workers():
    params = jax.device_put(jnp.ones((3, 2)), NamedSharding(mesh(3), P("data")))
    shard({"w": params, "r": PerWorker(params)}, mesh(3))


def partitioned_before_a_simulation():
    shard({"w": jax.device_put(jnp.ones((3, 2)), NamedSharding(mesh(3), P("data")))}, 3)


def unwrapped_state_to_shard():
    shard({"count": PerWorker(jnp.float32(0))}, 3)


def unwrapped_argument():
    run_on_workers(lambda s, x: s, 3)({"count": PerWorker(jnp.float32(0))}, jnp.ones(3))


def several_axes_of_workers():
    run_on_workers(lambda x: x, mesh(3), axis_name=("hosts", "local"))


def rows_for_a_single_worker():
    tx, rows = jaxsparse.dense(axis_name=None), jax.tree.map(lambda x: jnp.stack([x, x]), PARAMS)
    tx.update(rows, tx.init(PARAMS), PARAMS)


def local_steps(exchange=None, optimizer=None, **options):
    made = exchange or jaxsparse.dense(), optimizer or optax.sgd(1.0)
    return jaxsparse.LocalSteps(lambda s, b: (s, b), *made, 2, **options)


def exchange_that_is_not_made():
    local_steps(jaxsparse.dense)


def optimizer_that_is_not_made():
    local_steps(optimizer=optax.adam)


def streaming_by_a_number():
    local_steps(streaming=2)


def owned_by_a_name():
    jaxsparse.zero1("adam", "int4")


def loss_and_gradients_in_one():
    both = jaxsparse.value_and_grad(lambda p, b: jnp.sum(p["b"] * b.mean()), workers=2)
    tx = jaxsparse.dense(workers=2)
    tx.update(both(PARAMS, jnp.ones(4)), tx.init(PARAMS), PARAMS)


def zeros_without_rows():
    tx = jaxsparse.dense(workers=2)
    tx.update(jax.tree.map(jnp.zeros_like, PARAMS), tx.init(PARAMS), PARAMS)


def parameters_to_check_in_front_of_a_chain():
    jaxsparse.check(PARAMS, jaxsparse.dense())


def numbers_in_a_batch_of_local_steps():
    train = local_steps()
    train(train.init((jnp.ones(2),)), [1.0, 2.0])


def arguments_of_shard_by_turns():
    shard(2, {"w": jnp.ones(1000)})


def state_of_another_system_to_carry_over():
    state = {"opt": shard(jaxsparse.top_k(0.1).init(PARAMS), 2), "n": ONE}
    jaxsparse.reshard(state, 3, like={"opt": jaxsparse.spardl(0.1).init(PARAMS), "n": ONE})


USES = {
    rows_for_a_single_worker: r"gradient\['b'\] has shape \(2, 3\), and its parameter \(3,\)",
    exchange_that_is_not_made: r"exchange=<function dense .*is no exchange .*quantized\(.int4.\)",
    optimizer_that_is_not_made: r"optimizer=<function adam .* is no Optax .*optax.sgd\(1.0\)",
    streaming_by_a_number: r"streaming=2 must be None or as jaxsparse.outer.Streaming",
    owned_by_a_name: r"optimizer='adam' is no Optax transformation",
    loss_and_gradients_in_one: r"there are 3 gradients: .* as in loss, grads = jaxsparse.value_and",
    zeros_without_rows: r"no row for each worker: .*, or is one worker's row, or made anew",
    parameters_to_check_in_front_of_a_chain: r"(?s)^tx={.{,80} is no Optax transformation",
    numbers_in_a_batch_of_local_steps: r"argument 1\[0\] is a scalar in a batch",
    arguments_of_shard_by_turns: r"^mesh=.{,60} must be a jax.sharding.Mesh",
    state_of_another_system_to_carry_over: "it is of TopK, and like is of SparDL",
    several_axes_of_workers: r"axis_name=\('hosts', 'local'\) must be the name of one mesh",
    other_axis: r"axis_name='batch' is not bound .*in scope: \['data'\]\).*axis_name='data' if",
    several_axes: r"axis_name=\('data', 'model'\) is not supported: give one axis name",
    outside_the_parallel_step: r"axis_name='data' is not bound here.*tx.update.grads, state",
    whole_state_in_one_worker: r"shape \(3, 40, 30\) holds 3 workers' values.*jaxsparse.specs",
    state_for_other_workers: r"per-worker state for 2 workers, but there are 3",
    spread_over_another_mesh: r"already spread over 2 workers.*jaxsparse.reshard\(state, mesh\)",
    state_of_another_momentum: r"momentum of 'b' is nothing.* need float32\[3\]: pass the state",
    dense_state_of_another_tree: r"momentum of 'w' is nothing.* need float32\[40, 30\]",
    batch_argument_that_is_not_there: r"batch_argnums=.5,. names an argument",
    axis_not_in_mesh: r"axis_name='workers' is not an axis of the mesh.*\('data',\)",
    shard_over_an_axis_not_in_mesh: r"axis_name='workers' is not an axis of the mesh",
    partitioned_over_the_axis_of_the_workers: r"leaf\['w'\] is partitioned by .* over 'data'",
    partitioned_before_a_simulation: r"leaf\['w'\] is partitioned over .*'data'",
    unwrapped_state_to_shard: r"leaf\['count'\].* has shape \(\).*PerWorker.wrap\(x\)",
    unwrapped_argument: r"argument 0\['count'\].* has shape \(\).*PerWorker.wrap\(x\)",
}


@pytest.mark.parametrize("misuse", USES, ids=lambda f: f.__name__)
def test_uses(misuse):
    with pytest.raises(ValueError, match=USES[misuse]):
        misuse()


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        (0, r"mesh=0 gives no worker: pass a mesh, or a number of at least 1"),
        (-2, r"mesh=-2 gives no worker"),
        (2.0, r"mesh=2.0 must be a jax.sharding.Mesh of devices, .*or a number of workers"),
        (True, r"mesh=True must be a jax.sharding.Mesh"),
        (None, r"mesh=None must be a jax.sharding.Mesh"),
        (
            AbstractMesh((3,), ("data",)),
            r"mesh=AbstractMesh\(.* must be a jax.sharding.Mesh of dev",
        ),
        (jax.sharding.Mesh(np.empty(0, object), ("data",)), r"mesh=Mesh\(.*gives no worker"),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "use", [lambda mesh: shard(PARAMS, mesh), lambda mesh: run_on_workers(lambda x: x, mesh)]
)
def test_numbers_of_workers(use, workers, message):
    with pytest.raises(ValueError, match=message):
        use(workers)


def test_unwrap_names_the_remedy():
    with pytest.raises(ValueError, match=r"holds 2 workers' values.*take .value"):
        PerWorker.unwrap(PerWorker(jnp.zeros((2, 3))))
    with pytest.raises(ValueError, match=r"shape \(\).*PerWorker.wrap\(x\)"):
        PerWorker.unwrap(PerWorker(jnp.zeros(())))
