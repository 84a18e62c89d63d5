"""Steps of a transformation, each worker with gradients of its own."""

import jax
import optax

from jaxsparse import data_parallel, shard


def train(tx, params, workers, gradients, run_on=None):
    """Feeds each worker its own gradients.

    Returns:
        Each step's updates, and the final parameters and state. Arrays that differ between workers
        have an axis of W workers on top.
    """

    def step(state, gradient):
        params, opt_state = state
        gradient = jax.tree.map(lambda g: g[0], gradient)  # a worker's share: (1, ...)
        updates, opt_state = tx.update(gradient, opt_state, params)
        return updates, (optax.apply_updates(params, updates), opt_state)

    run_on = workers if run_on is None else run_on
    run = data_parallel(step, run_on)
    state = shard((params, tx.init(params)), run_on)
    history = []
    for gradient in gradients:
        updates, state = run(state, gradient)
        history.append(updates)
    return history, state
