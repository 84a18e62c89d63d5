"""Steps of a trainer, and of a transformation, each worker with gradients of its own.

On a mesh they go through the front door: gradients have a row for each worker. Simulated workers
take their steps inside `jax.vmap`, with the axis bound.
"""

import jax
import optax
from jax.sharding import Mesh, PartitionSpec as P

import jaxsparse
from jaxsparse import shard
from jaxsparse.outer.parallel import run_on_workers


def trainer(tx, gradient, **more):
    """A trainer's step: (parameters and state, batch) -> the next ones."""

    def step(state, batch):
        params, opt_state = state
        updates, opt_state = tx.update(gradient(params, batch), opt_state, params, **more)
        return optax.apply_updates(params, updates), opt_state

    return step


def stepped(tx, where, axis_name="data", is_manual=False):
    """A compiled step of each worker: (gradients with a row each, state) -> (updates, state).

    With `is_manual` it is a `jax.shard_map` over the workers' axis, as users write one.
    """

    def step(grads, state):
        return tx.update(jax.tree.map(lambda g: g[0], grads), state)

    def manually(grads, state):
        own = jaxsparse.specs(state, axis_name, inner=False)
        return jax.shard_map(
            step,
            mesh=where,
            in_specs=(P(axis_name), own),
            out_specs=(P(), own),
            axis_names={axis_name},
            check_vma=False,
        )(grads, state)

    if is_manual:
        return jax.jit(manually)
    return run_on_workers(step, where, axis_name=axis_name, batch_argnums=0)


def scanned(tx, grads):
    """The updates of one worker's steps, in one program, and the last state."""
    start = tx.init(jax.tree.map(lambda g: g[0], grads))
    state, updates = jax.lax.scan(lambda s, g: tx.update(g, s)[::-1], start, grads)
    return updates, state


def train(tx, params, workers, gradients, run_on=None):
    """Feeds each worker its own gradients.

    Returns:
        Each step's updates, and the final parameters and state. Arrays that differ between workers
        have an axis of W workers on top.
    """

    run_on = workers if run_on is None else run_on
    is_one = not isinstance(run_on, Mesh)

    def step(state, gradient):
        params, opt_state = state
        if is_one:  # a worker's share: (1, ...)
            gradient = jax.tree.map(lambda g: g[0], gradient)
        updates, opt_state = tx.update(gradient, opt_state, params)
        return updates, (optax.apply_updates(params, updates), opt_state)

    run = run_on_workers(step, run_on) if is_one else jax.jit(step)
    state = shard((params, tx.init(params)), run_on)
    history = []
    for gradient in gradients:
        updates, state = run(state, gradient)
        history.append(updates)
    return history, state
