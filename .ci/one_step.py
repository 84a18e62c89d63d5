"""One step with what is installed, which must be this version: `.ci/release` runs it."""

import importlib.metadata
import pathlib
import sys

import jax
import jax.numpy as jnp
import optax

import jaxsparse

[version] = sys.argv[1:]
assert importlib.metadata.version("jaxsparse") == version
package = pathlib.Path(jaxsparse.__file__).parent
assert package.parent.name == "site-packages", package
assert (package / "py.typed").exists()
assert jaxsparse.plan(10**7, 8, jaxsparse.Link(1e-3, 1e7), step_seconds=1.0).best

params = {"w": jnp.ones((64, 64))}
tx = optax.chain(jaxsparse.spardl(0.1, momentum=0.9, workers=4), optax.sgd(0.1))


@jax.jit
def step(params, opt_state, batch):
    """What all workers do."""
    grads = jaxsparse.grad(lambda p, batch: jnp.mean(batch @ p["w"]), workers=4)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


params, _ = step(params, tx.init(params), jnp.ones((8, 64)))
changed = int(jnp.sum(params["w"] != 1))
assert 0 < changed <= 4 * 103, changed
print(f"jaxsparse {version} trains with Python {sys.version.split()[0]} and JAX {jax.__version__}")
