"""MaxText's training loop on eight emulated devices: two hosts ("data"), fsdp and tensor inside.

Model, loss, loop, compiling and metrics are MaxText's. Lines that end in "# +" compress between
the hosts, and so do the blocks of variants. `compare.py` runs the script with them and without
them.
"""

import functools
import os
import types

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
make, optax = optimizers.get_optimizer, optimizers.optax  # +
tx = lambda m, s: (jaxsparse.spardl(DENSITY, mesh=m, specs=s), optax.clip_by_global_norm(CLIP))  # +
optimizers.get_optimizer = lambda *a, mesh: optax.chain(*tx(mesh, a[2]), make(*a, mesh=mesh))  # +
of = lambda loss, config: lambda *a: loss(*a[:3], config, a[3])  # +
own = lambda loss, c, **k: jaxsparse.value_and_grad(of(loss, c), batch_argnums=3, **k)  # +
both = lambda loss, **k: lambda *a: means(*own(loss, a[3], **k)(*a[:3], a[4]))  # +
means = lambda value, grads: (jax.tree_util.tree_map_with_path(mean, value), grads)  # +
is_sum = lambda path: "xent_sum" in str(path) or "total_weights" in str(path)  # +
is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # +
mean = lambda path, x: x.sum(0) if is_sum(path) else x.mean(0) if is_float(x) else x[0]  # +
train.jax = types.SimpleNamespace(**vars(jax) | {"value_and_grad": both})  # +

if VARIANT == "accumulation":
    accumulate = train.gradient_accumulation_loss_and_grad

    def accumulated(loss, config, model, params, shardings, data, rng):
        graph, state = nnx.split(model)

        def one(nothing, data, state):
            model = nnx.merge(graph, state, copy=True)
            found = accumulate(loss, config, model, params, shardings, data, rng)
            return nothing, (*found, nnx.state(model, nnx.RngState))

        each = jaxsparse.value_and_grad(one, has_aux=True)
        value, aux, grads, rngs = each(0.0, data, state)[0][1]
        (value, aux, rngs), _ = means((value, aux, rngs), None)
        nnx.update(model, rngs)
        return value, aux, grads

    train.gradient_accumulation_loss_and_grad = accumulated

if VARIANT == "explicit":
    SETTINGS |= maxtext_tiny.APART | {"ici_data_parallelism": 1}
    whole = train.loss_fn

    def inside(x):
        """A value with a worker's mesh in the place of the whole one."""
        if isinstance(x, functools.partial):
            named = {name: inside(value) for name, value in x.keywords.items()}
            return functools.partial(x.func, *x.args, **named)
        types = jax.sharding.get_abstract_mesh().axis_types
        is_mesh = isinstance(x, jax.sharding.Mesh)
        return jax.sharding.Mesh(x.devices, x.axis_names, axis_types=types) if is_mesh else x

    def loss_fn(model, *a, **k):
        for _, node in nnx.iter_graph(model):
            if isinstance(node, nnx.Module):
                vars(node).update({name: inside(value) for name, value in vars(node).items()})
        return whole(model, *a, **k)

    train.loss_fn = loss_fn

if VARIANT in ("slices", "explicit"):
    axis = {"axis_name": "diloco"}
    tx = lambda m, s: (
        jaxsparse.spardl(DENSITY, mesh=m, specs=s, **axis),
        optax.clip_by_global_norm(CLIP),
    )
    own = lambda loss, c, **k: jaxsparse.value_and_grad(of(loss, c), batch_argnums=3, **axis, **k)

if VARIANT == "explicit":
    # Explicit axes give no row of what lies over them.
    first = lambda x: jax.reshard(x, jax.sharding.PartitionSpec())[0]
    mean = lambda p, x: x.sum(0) if is_sum(p) else x.mean(0) if is_float(x) else first(x)

if VARIANT == "muon_inside":
    iterate = _muon.orthogonalize_via_newton_schulz
    whole = lambda x: jax.lax.with_sharding_constraint(x, jax.sharding.PartitionSpec())
    _muon.orthogonalize_via_newton_schulz = lambda x, *a, **b: whole(iterate(whole(x), *a, **b))

if VARIANT == "updates":
    mine = lambda m, *a: optax.chain(optax.clip_by_global_norm(CLIP), make(*a, mesh=m))
    own_of = lambda m, *a: jaxsparse.per_worker(mine(m, *a), mesh=m, specs=a[2])
    sent = lambda m, s: jaxsparse.spardl(DENSITY, mesh=m, specs=s)
    optimizers.get_optimizer = lambda *a, mesh: optax.chain(own_of(mesh, *a), sent(mesh, a[2]))

if VARIANT == "tokens":
    averaged = means

    def means(value, grads):
        tokens = value[1][0]["total_weights"]
        sums = lambda x: jax.vmap(jnp.multiply)(x, tokens)  # MaxText divides by a worker's own
        loss, grads = jaxsparse.mean_of(jax.tree.map(sums, (value[0], grads)), tokens)
        return averaged((loss, value[1]), grads)


if VARIANT == "dropout":
    fold = lambda key: jax.random.fold_in(key, jax.lax.axis_index("data"))

    def of(loss, config):
        def one(params, custom, rest, data):
            keys, others = nnx.split_state(rest, nnx.RngKey, ...)
            rest = nnx.merge_state(others, jax.tree.map(jnp.vectorize(fold), keys))
            return loss(params, custom, rest, config, data)

        return one


maxtext_tiny.run(SETTINGS, VARIANT)
