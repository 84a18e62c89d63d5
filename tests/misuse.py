"""The usual trainer, for tests that misuse it."""

import jax
import jax.numpy as jnp
import optax

import jaxsparse
from jaxsparse import local, shard
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
