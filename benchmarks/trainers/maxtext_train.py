"""MaxText's training loop on eight emulated devices: two hosts ("data"), fsdp and tensor inside.

Model, loss, loop, compiling and metrics are MaxText's. Lines that end in "# +" compress between
the hosts, and so do the blocks of variants. `compare.py` runs the script with them and without
them.
"""

import functools
import os

import jax
import jax.numpy as jnp
import maxtext_tiny
from flax import nnx
from maxtext.optimizers import optimizers
from maxtext.trainers.pre_train import train
from optax.contrib import _muon

import jaxsparse  # +

DENSITY = float(os.environ.get("DENSITY", "0.01"))
VARIANT = globals().get("VARIANT", "plain")
SETTINGS = maxtext_tiny.SETTINGS | {"ici_data_parallelism": 2} | maxtext_tiny.VARIANTS[VARIANT]

CLIP, SETTINGS["gradient_clipping_threshold"] = SETTINGS["gradient_clipping_threshold"], 0  # +
make, old, optax = optimizers.get_optimizer, train.train_step, optimizers.optax  # +
tx = lambda m, s: (jaxsparse.spardl(DENSITY, mesh=m, specs=s), optax.clip_by_global_norm(CLIP))  # +
optimizers.get_optimizer = lambda *a, mesh: optax.chain(*tx(mesh, a[2]), make(*a, mesh=mesh))  # +
said = (None, lambda path: "sum" if "weights" in path else "mean")  # +
run = lambda step, mesh: jaxsparse.data_parallel(step, mesh, outputs=said)  # +
train.train_step = lambda *a: run(lambda *b: old(*a[:4], *b), a[2].optimizer.step.mesh)(*a[4:])  # +

if VARIANT in ("ragged", "explicit"):
    SETTINGS |= maxtext_tiny.APART | {"ici_data_parallelism": 1}
    step = old

    def inside(x):
        """A value with a worker's mesh in the place of the whole one."""
        if isinstance(x, functools.partial):
            named = {name: inside(value) for name, value in x.keywords.items()}
            return functools.partial(x.func, *x.args, **named)
        types = jax.sharding.get_abstract_mesh().axis_types
        is_mesh = isinstance(x, jax.sharding.Mesh)
        return jax.sharding.Mesh(x.devices, x.axis_names, axis_types=types) if is_mesh else x

    def old(graph, *a):
        model = nnx.merge(graph, a[3])
        for _, node in nnx.iter_graph(model):
            if isinstance(node, nnx.Module):
                vars(node).update({name: inside(value) for name, value in vars(node).items()})
        return step(nnx.graphdef(model), *a)


if VARIANT in ("slices", "ragged", "explicit"):
    axis = {"axis_name": "diloco"}
    tx = lambda m, s: (
        jaxsparse.spardl(DENSITY, mesh=m, specs=s, **axis),
        optax.clip_by_global_norm(CLIP),
    )
    run = lambda step, mesh: jaxsparse.data_parallel(step, mesh, outputs=said, **axis)

if VARIANT == "muon_inside":
    iterate = _muon.orthogonalize_via_newton_schulz
    whole = lambda x: jax.lax.with_sharding_constraint(x, jax.sharding.PartitionSpec())
    _muon.orthogonalize_via_newton_schulz = lambda x, *a, **b: whole(iterate(whole(x), *a, **b))

if VARIANT == "tokens":
    loss_of = train.loss_fn

    def weighted(*a, is_train):
        loss, aux = loss_of(*a, is_train=is_train)
        return jaxsparse.weighted(loss, aux["total_weights"]) if is_train else loss, aux

    train.loss_fn = weighted

if VARIANT == "dropout":
    step = old

    def old(*a):
        keys, others = nnx.split_state(a[4], nnx.RngKey, ...)
        fold = lambda key: jax.random.fold_in(key, jax.lax.axis_index("data"))
        own = nnx.merge_state(others, jax.tree.map(jnp.vectorize(fold), keys))
        state, shown = step(*a[:4], own, *a[5:])
        return nnx.merge_state(nnx.split_state(state, nnx.RngKey, ...)[1], keys), shown


maxtext_tiny.run(SETTINGS, VARIANT)
