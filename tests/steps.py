"""A compiled training step whose only communication is a transformation's."""

import os

import jax
import jax.numpy as jnp
import optax

from jaxsparse import data_parallel, local, shard

SIZES = {"kernel": (300, 201), "bias": (201,)}
COMPRESSED, DENSE = 300 * 201, 201


# Compiler options for programs that must be as users compile them. They turn on again what
# conftest.py turns off for speed.
AS_USERS = (
    {"xla_cpu_use_fusion_emitters": True}
    if "xla_cpu_use_fusion_emitters=false" in os.environ.get("XLA_FLAGS", "")
    else None
)


def compiled_step(tx, where, shapes=SIZES, donate=()):
    """A compiled training step whose only communication is the transformation's."""
    tx = optax.chain(tx, optax.sgd(0.1))

    def step(state, batch):
        params, opt_state = state

        def loss(params):
            return sum(jnp.sum(p * p) for p in jax.tree.leaves(params)) * batch.mean()

        updates, opt_state = tx.update(jax.grad(loss)(local(params)), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    workers = where.shape["data"]
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    state = jax.eval_shape(lambda p: shard((p, tx.init(p)), workers), params)
    run = data_parallel(step, where, donate_argnums=donate)
    lowered = run.lower(state, jax.ShapeDtypeStruct((workers,), jnp.float32))
    return lowered.compile(compiler_options=AS_USERS)
