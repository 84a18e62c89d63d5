"""MaxText's training loop, with updates exchanged behind Adam, which is each worker's own.

It is `maxtext_train.py` but for what is exchanged. No original has such losses: the first script
without its lines is beside it in the table. `compare.py` runs both.
"""

import os
import types

import jax
import jax.numpy as jnp
import maxtext_tiny
from maxtext.optimizers import optimizers
from maxtext.trainers.pre_train import train

import jaxsparse  # +

DENSITY = float(os.environ.get("DENSITY", "0.01"))
SETTINGS = maxtext_tiny.SETTINGS | {"ici_data_parallelism": 2}

make, optax = optimizers.get_optimizer, optimizers.optax  # +
tx = lambda m, s: jaxsparse.spardl(DENSITY, mesh=m, specs=s)  # +
mine = lambda m, *a: jaxsparse.per_worker(make(*a, mesh=m), mesh=m, specs=a[2])  # +
optimizers.get_optimizer = lambda *a, mesh: optax.chain(mine(mesh, *a), tx(mesh, a[2]))  # +
of = lambda loss, config: lambda *a: loss(*a[:3], config, a[3])  # +
own = lambda loss, c, **k: jaxsparse.value_and_grad(of(loss, c), batch_argnums=3, **k)  # +
both = lambda loss, **k: lambda *a: means(*own(loss, a[3], **k)(*a[:3], a[4]))  # +
means = lambda value, grads: (jax.tree_util.tree_map_with_path(mean, value), grads)  # +
is_sum = lambda path: "xent_sum" in str(path) or "total_weights" in str(path)  # +
is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # +
mean = lambda path, x: x.sum(0) if is_sum(path) else x.mean(0) if is_float(x) else x[0]  # +
train.jax = types.SimpleNamespace(**vars(jax) | {"value_and_grad": both})  # +

maxtext_tiny.run(SETTINGS)
