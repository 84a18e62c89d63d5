"""The docs' table of refused calls: each message is provoked, and none is missing."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P
from misuse import ONE, PARAMS, sketched, update
from workers import mesh

import jaxsparse
from jaxsparse import PerWorker, diagnose, reshard, shard, specs
from jaxsparse.outer.parallel import run_on_workers
from jaxsparse.quantize import QSGD
from jaxsparse.reducers.quantized import Quantized

ERRORS = pathlib.Path(__file__).parents[1] / "docs" / "errors.md"


def summed_gradient():
    tx = sketched()
    jax.shard_map(
        lambda g, s: tx.update(g, s)[0],
        mesh=mesh(3),
        in_specs=(P(), specs(tx.init(PARAMS))),
        out_specs=P(),
    )(PARAMS, shard(tx.init(PARAMS), 3))


def unspread_state():
    tx = sketched()
    update(tx, state=(PARAMS, tx.init(PARAMS)))


def spread_twice():
    shard(shard(sketched().init(PARAMS), 2), 3)


def state_of_another_tree():
    tx = sketched()
    update(tx, state=shard((PARAMS, tx.init({"w": jnp.ones((50, 50))})), 3))


def uneven_batch():
    run_on_workers(lambda x: x.sum(), 4, batch_argnums=0)({"image": jnp.ones((6, 2))})


def partitioned_over_another_axis():
    grid = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
    shard({"w": jax.device_put(PARAMS["w"], NamedSharding(grid, P(None, "model")))}, mesh(4))


def cut_over_workers(specs, on=None, workers=None):
    gather = jaxsparse.Gather("int8")
    of = jaxsparse.grad(of_rows, specs=specs, gather=gather, mesh=on, workers=workers)
    of(PARAMS, ROWS)


def inner_mesh():
    return jax.make_mesh((2, 4), ("data", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def state_of_shards():
    return jaxsparse.spardl(0.1, mesh=inner_mesh()).init(PARAMS)


def another_accumulator():
    state = shard(jaxsparse.top_k(0.1, accumulator_dtype="bfloat16").init(PARAMS), 3)
    update(jaxsparse.top_k(0.1), state=(PARAMS, state))


def state_of_another_system():
    state = shard(jaxsparse.top_k(0.1).init(PARAMS), 3)
    update(jaxsparse.spardl(0.1), state=(PARAMS, state))


def state_of_another_kind():
    update(jaxsparse.spardl(0.1), state=(PARAMS, optax.adam(0.1).init(PARAMS)))


def copies_that_differ():
    pieces = [jax.device_put(jnp.full(2, i), d) for i, d in enumerate(jax.devices()[:2])]
    everywhere = jax.sharding.NamedSharding(mesh(2), jax.P())
    array = jax.make_array_from_single_device_arrays((2,), everywhere, pieces)
    jaxsparse.check_replicas(array)


def state_of_another_mesh():
    update(jaxsparse.spardl(0.1), where=2, state=(PARAMS, state_of_shards()))


def traced_without_specs():
    tx = jaxsparse.spardl(0.1, mesh=inner_mesh())
    jax.jit(tx.init)(PARAMS)


def modules_as_arguments():
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    run_on_workers(lambda model, x: model(x).mean(), 2)(model, jnp.ones((4, 4)))


ROWS = jnp.arange(6.0)


def of_rows(params, rows, *others):
    return sum(jnp.sum(x) for x in jax.tree.leaves(params)) * rows.mean()


def two_workers(workers=2, state=None, params=PARAMS):
    """Gradients of two workers, in an exchange of so many."""
    tx = sketched(workers=workers)
    grads = jaxsparse.grad(of_rows, workers=2)(PARAMS, ROWS)
    tx.update(grads, tx.init(PARAMS) if state is None else state, params)


def first_worker_frozen():
    tx = jaxsparse.dense(workers=2)
    first = lambda grads: jax.tree.map(lambda g: g.at[0].set(0), grads)
    grads = jaxsparse.grad(of_rows, workers=2)
    jax.jit(lambda p, x: tx.update(first(grads(p, x)), tx.init(p), p)[0])(PARAMS, ROWS)


def layers_as_workers():
    tx, params = jaxsparse.dense(workers=2), {"w": jnp.ones((2, 3))}
    decay = jax.vmap(lambda g, w: g + 0.1 * w)
    grads = jaxsparse.grad(of_rows, workers=2)
    step = lambda p, x: tx.update(jax.tree.map(decay, grads(p, x), p), tx.init(p), p)
    with jax.numpy_rank_promotion("allow"):
        jax.jit(step)(params, ROWS)


def exchange_in_per_worker():
    chain = optax.chain(jaxsparse.spardl(0.1), optax.scale(1.0))
    jaxsparse.per_worker(chain).init(PARAMS)


REFUSED = {
    "is equal on all workers": summed_gradient,
    "has been averaged already": lambda: sketched().update(PARAMS, sketched().init(PARAMS), PARAMS),
    "no mesh with an axis": lambda: jaxsparse.grad(of_rows)(PARAMS, ROWS),
    "without a row for each of the": lambda: two_workers(state=sketched().init(PARAMS)),
    "give jaxsparse.value_and_grad the same mesh": lambda: two_workers(3),
    "is an optax.MaskedNode": lambda: jaxsparse.check(
        optax.masked(sketched(), {"w": True, "b": False}), PARAMS
    ),
    "or picks or moves rows": first_worker_frozen,
    "the chain mixes the rows of workers": lambda: jaxsparse.check(
        optax.chain(optax.clip_by_global_norm(1.0), sketched()), PARAMS
    ),
    "does not take gradients with a row": lambda: jaxsparse.check(
        optax.apply_if_finite(sketched(), 3), PARAMS
    ),
    "give tx.update(grads, state, params)": lambda: two_workers(params=None),
    "has as many rows as the batch": lambda: jaxsparse.grad(of_rows, workers=2)(PARAMS, ROWS, ROWS),
    "each worker would get its share of both": lambda: jaxsparse.grad(of_rows, workers=2)(
        PARAMS, (ROWS, ROWS[:2])
    ),
    "with a layer of parameters": layers_as_workers,
    "and split over the workers": lambda: jaxsparse.grad(of_rows, 1, workers=2)(PARAMS, ROWS),
    "so this is one worker's code already": lambda: jax.vmap(
        lambda x: jaxsparse.grad(of_rows)(PARAMS, x), axis_name="data"
    )(ROWS),
    "spread it once before the first step": unspread_state,
    "carry the state over to another number of workers": spread_twice,
    "but these gradients and settings need": state_of_another_tree,
    "need per-worker float32": another_accumulator,
    "the state was made for other settings": state_of_another_system,
    "the state was made for another transformation": state_of_another_kind,
    "has an exchange of jaxsparse, or another per_worker": exchange_in_per_worker,
    "differentiate its state, as in": lambda: jaxsparse.grad(of_rows, workers=2)(
        nnx.Linear(4, 4, rngs=nnx.Rngs(0)), ROWS
    ),
    "whose changes inside the step would be lost": modules_as_arguments,
    "which is no array": lambda: shard({"name": "adam"}, 2),
    "cannot share equally": uneven_batch,
    "is a scalar in a batch": lambda: run_on_workers(lambda s, b: s, 2)(ONE, {"scale": ONE}),
    "is partitioned over devices": partitioned_over_another_axis,
    "there is no mean to carry over": lambda: reshard(PerWorker(np.arange(4)), 3),
    "would be compressed": lambda: sketched().init({"b": jnp.zeros(3)}),
    "ask for less compression": lambda: jaxsparse.sketched_sgd(400).init(PARAMS),
    "it is static": lambda: jax.jit(lambda d: jaxsparse.top_k(d).init(PARAMS))(0.1),
    "has dtype int32": lambda: sketched().init({"n": jnp.zeros((40, 30), jnp.int32)}),
    "must lie between 1 and": lambda: sketched(k=1201).init(PARAMS),
    "does not divide the": lambda: update(jaxsparse.spardl(0.1, teams=2)),
    "was made for the inner axes": state_of_another_mesh,
    "is traced, so its partition": traced_without_specs,
    "must lie in [0, 1)": lambda: sketched(momentum=1.0),
    "fed back it grows from step to step": lambda: Quantized(
        QSGD(2, scale="l2"), rounding="nearest"
    ),
    "and no leaf is known to be cut over": lambda: cut_over_workers(None, workers=2),
    "on a mesh with other axes": lambda: cut_over_workers({"w": P("data"), "b": P()}, mesh((2, 2))),
    "rounds stochastically, and has no key": lambda: jaxsparse.Gather("int8", QSGD(4)),
    "holds no state of a jaxsparse transformation": lambda: diagnose(PARAMS),
    "Replicas have drifted apart": copies_that_differ,
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_the_docs_say_is_refused(message):
    with pytest.raises((ValueError, RuntimeError), match=re.escape(message)):
        REFUSED[message]()


def test_the_docs_list_just_these():
    section = ERRORS.read_text().split("## What is refused, and why")[1].split("\n## ")[0]
    listed = re.findall(r"^\| `(.*?)` \|", section, re.MULTILINE)
    assert listed == list(REFUSED)
