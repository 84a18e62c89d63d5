"""The usual trainer, for tests that misuse it."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec as P
from workers import mesh

import jaxsparse
from jaxsparse import local, shard, specs
from jaxsparse.outer.parallel import run_on_workers

PARAMS = {"w": jnp.ones((40, 30)), "b": jnp.zeros(3)}
ONE = jnp.float32(1)


def sketched(**settings):
    return jaxsparse.sketched_sgd(**{"k": 5, "cols": 40, **settings})


def update(tx, params=PARAMS, where=3, state=None, gradient_of=local, **settings):
    """One step of `tx` in the usual trainer."""

    def step(state, batch):
        params, opt_state = state
        gradient = jax.grad(lambda p: sum(jnp.sum(x) for x in jax.tree.leaves(p)) * batch.mean())
        updates, opt_state = tx.update(gradient(gradient_of(params)), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    if state is None:
        state = shard((params, tx.init(params)), where)
    return run_on_workers(step, where, **settings)(state, jnp.arange(6.0))


def summed_gradient():
    tx = sketched()
    jax.shard_map(
        lambda g, s: tx.update(g, s)[0],
        mesh=mesh(3),
        in_specs=(P(), specs(tx.init(PARAMS))),
        out_specs=P(),
    )(PARAMS, shard(tx.init(PARAMS), 3))


def outside_the_parallel_step():
    tx = sketched()
    tx.update(PARAMS, tx.init(PARAMS))


def unspread_state():
    tx = sketched()
    update(tx, state=(PARAMS, tx.init(PARAMS)))


def spread_twice():
    shard(shard(sketched().init(PARAMS), 2), 3)


def spread_over_another_mesh():
    shard(shard(sketched().init(PARAMS), mesh(2)), mesh(3))


def state_of_another_tree():
    tx = sketched()
    update(tx, state=shard((PARAMS, tx.init({"w": jnp.ones((50, 50))})), 3))


def uneven_batch():
    run_on_workers(lambda x: x.sum(), 4, batch_argnums=0)({"image": jnp.ones((6, 2))})


def partitioned_over_another_axis():
    grid = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
    shard({"w": jax.device_put(PARAMS["w"], NamedSharding(grid, P(None, "model")))}, mesh(4))
