"""A linen language model on eight emulated devices: two hosts, fsdp and tp inside.

It is a trainer in the style of flax's lm1b example: logical axes with rules, a `TrainState` made
under `jax.jit` with shardings from its metadata, and a jitted step with the same shardings. Lines
that end in "# +" compress between the hosts. `compare.py` runs the script with them and without
them.
"""

import functools
import os
from pydoc_data import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import jaxsparse  # +

STEPS = int(os.environ.get("STEPS", "10"))
DENSITY = float(os.environ.get("DENSITY", "0.01"))
CLIPS = [optax.clip_by_global_norm(0.1)] if os.environ.get("VARIANT") == "clip" else []
RULES = [
    ("batch", ("hosts", "fsdp")),
    ("vocab", "fsdp"),
    ("embed", "fsdp"),
    ("mlp", "tp"),
    ("heads", "tp"),
    ("width", "tp"),
]
VOCAB, WIDTH, HEADS, LAYERS, LENGTH = 256, 64, 4, 2, 64


def sharded(*axes):
    return nn.with_logical_partitioning(nn.initializers.lecun_normal(), axes)


class Block(nn.Module):
    """Causal attention and an MLP."""

    @nn.compact
    def __call__(self, x, mask):
        """Maps float[n, length, width] to the same."""
        y = nn.LayerNorm(use_bias=False)(x)
        y = nn.MultiHeadDotProductAttention(
            HEADS,
            use_bias=False,
            kernel_init=sharded("embed", "heads"),
            out_kernel_init=sharded("heads", "embed"),
        )(y, mask=mask)
        x = nn.with_logical_constraint(x + y, ("batch", None, None))
        y = nn.LayerNorm(use_bias=False)(x)
        y = nn.gelu(nn.Dense(4 * WIDTH, use_bias=False, kernel_init=sharded("embed", "mlp"))(y))
        y = nn.with_logical_constraint(y, ("batch", None, "mlp"))
        y = nn.Dense(WIDTH, use_bias=False, kernel_init=sharded("mlp", "embed"))(y)
        return nn.with_logical_constraint(x + y, ("batch", None, None))


class LanguageModel(nn.Module):
    """A byte-level transformer."""

    @nn.compact
    def __call__(self, tokens):
        """Scores of the next byte: int[n, length] to float[n, length, 256]."""
        table = sharded("vocab", "width")
        x = nn.Embed(VOCAB, WIDTH, embedding_init=table)(tokens)
        x = x + self.param("positions", table, (LENGTH, WIDTH))
        x = nn.with_logical_constraint(x, ("batch", None, None))
        for _ in range(LAYERS):
            x = Block()(x, nn.make_causal_mask(tokens))
        x = nn.LayerNorm(use_bias=False)(x)
        return nn.Dense(VOCAB, use_bias=False, kernel_init=sharded("embed", "mlp"))(x)


def init_state(model, tx, key):
    params = model.init(key, jnp.ones((2, LENGTH), jnp.int32))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def setup_state(model, tx, mesh, key):
    """The state, sharded as its metadata and the rules say, and its shardings."""
    init = functools.partial(init_state, model, tx)
    logical = nn.get_partition_spec(jax.eval_shape(init, key))
    shardings = nn.logical_to_mesh_sharding(logical, mesh, RULES)
    return nn.unbox(jax.jit(init, out_shardings=shardings)(key)), shardings


def train_step(state, tokens):
    def loss_of(params, tokens):
        weights = jnp.ones_like(tokens[:, 1:], jnp.float32)
        logits = state.apply_fn({"params": params}, tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return jnp.sum(losses * weights) / jnp.sum(weights)

    loss, grads = jax.value_and_grad(loss_of)(state.params, tokens)
    own = jaxsparse.value_and_grad(loss_of, axis_name="hosts")  # +
    loss, grads = own(state.params, tokens)  # +
    loss = loss.mean()  # +
    return state.apply_gradients(grads=grads), loss


def batches():
    text = np.frombuffer("".join(topics.topics.values()).encode(), np.uint8)
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        starts = rng.integers(len(text) - LENGTH - 1, size=16)
        yield text[starts[:, None] + np.arange(LENGTH + 1)].astype(np.int32)


def main():
    mesh = jax.make_mesh(
        (2, 2, 2), ("hosts", "fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 3
    )
    tx = optax.chain(*CLIPS, optax.adamw(3e-3))
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
        state, shardings = setup_state(LanguageModel(), tx, mesh, jax.random.key(0))
        data = NamedSharding(mesh, PartitionSpec(("hosts", "fsdp")))
        step = jax.jit(
            train_step,
            in_shardings=(shardings, data),
            out_shardings=(shardings, None),
            donate_argnums=0,
        )
        tx = optax.chain(jaxsparse.spardl(DENSITY, axis_name="hosts"), tx)  # +
        state = state.replace(tx=tx, opt_state=tx.init(state.params))  # +
        state = jaxsparse.shard(state, mesh, "hosts")  # +
        step = jax.jit(train_step, donate_argnums=0)  # +
        for i, tokens in enumerate(batches(), start=1):
            state, loss = step(state, jax.device_put(tokens, data))
            print("loss", i, float(loss), flush=True)


if __name__ == "__main__":
    main()
