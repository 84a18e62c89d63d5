"""Measures what processes spend to compare a step before its first call: the time of its digest.

The step is a stack of dense layers with AdamW behind an exchange. The digest is taken in one
process with emulated devices. The notes that processes leave each other are not measured.
"""

import os
import time
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

import jax
import jax.numpy as jnp
import optax

import jaxsparse
from jaxsparse.processes.digest import Digested

LAYERS, WIDTH = 50, 128  # a kernel and a bias each


def main() -> None:
    key, width = jax.random.key(0), WIDTH
    kernels = jax.random.normal(key, (LAYERS, width, width)) / width**0.5
    params = [{"kernel": kernel, "bias": jnp.zeros(width)} for kernel in kernels]
    tx = optax.chain(jaxsparse.spardl(0.01), optax.adamw(1e-3))
    mesh = jax.make_mesh((jax.device_count(),), ("data",))

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for layer in params:
            x = x + jax.nn.relu(x @ layer["kernel"] + layer["bias"])
        return jnp.mean(x**2)

    @jax.jit
    def step(state: Any, batch: jax.Array) -> Any:
        params, opt_state = state
        grads = jaxsparse.grad(loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    run = jaxsparse.watch(step, mesh)
    state = jaxsparse.shard((params, tx.init(params)), mesh)
    batch = jnp.ones((2 * mesh.size, width))
    began = time.perf_counter()
    jax.block_until_ready(run(state, batch))
    first = time.perf_counter() - began
    program = run.trace(state, batch).jaxpr
    began = time.perf_counter()
    Digested(program, mesh, (state, batch))
    digest = time.perf_counter() - began
    print(
        f"{len(jax.tree.leaves(state))} arrays: first call {first:.2f} s, digest {digest:.3f} s, "
        f"{100 * digest / first:.1f} %"
    )


if __name__ == "__main__":
    main()
