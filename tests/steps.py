"""A compiled training step whose only communication is a transformation's."""

import os

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from training import trainer

import jaxsparse

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

    def loss(params, batch):
        return sum(jnp.sum(p * p) for p in jax.tree.leaves(params)) * batch.mean()

    def placed(tree):
        put = lambda x, spec: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(where, spec)
        )
        return jax.tree.map(put, tree, jaxsparse.specs(tree))

    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    with jax.set_mesh(where):
        state = placed(jax.eval_shape(lambda p: (p, tx.init(p)), params))
        batch = jax.ShapeDtypeStruct((where.shape["data"],), jnp.float32)
        step = jax.jit(trainer(tx, jaxsparse.grad(loss)), donate_argnums=donate)
        return step.lower(state, batch).compile(compiler_options=AS_USERS)
