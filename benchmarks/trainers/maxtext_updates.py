"""MaxText's training loop, with updates exchanged behind Adam, which is each worker's own.

It is `maxtext_train.py` but for what is exchanged. No original has such losses: the first script
without its lines is beside it in the table. `compare.py` runs both.
"""

import os

import maxtext_tiny
from maxtext.optimizers import optimizers
from maxtext.trainers.pre_train import train

import jaxsparse  # +

DENSITY = float(os.environ.get("DENSITY", "0.01"))
SETTINGS = maxtext_tiny.SETTINGS | {"ici_data_parallelism": 2}

make, old, optax = optimizers.get_optimizer, train.train_step, optimizers.optax  # +
tx = lambda m, s: jaxsparse.spardl(DENSITY, mesh=m, specs=s)  # +
own = lambda m, *a: jaxsparse.per_worker(make(*a, mesh=m), mesh=m, specs=a[2])  # +
optimizers.get_optimizer = lambda *a, mesh: optax.chain(own(mesh, *a), tx(mesh, a[2]))  # +
said = (None, lambda path: "sum" if "weights" in path else "mean")  # +
run = lambda step, mesh: jaxsparse.data_parallel(step, mesh, outputs=said)  # +
train.train_step = lambda *a: run(lambda *b: old(*a[:4], *b), a[2].optimizer.step.mesh)(*a[4:])  # +

maxtext_tiny.run(SETTINGS)
