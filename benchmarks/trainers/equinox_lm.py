"""A language model in Equinox on eight emulated devices, as its documentation trains in parallel.

https://docs.kidger.site/equinox/examples/parallelism has the loop: a step under `filter_jit` whose
model is replicated and whose batch is split, by constraints. Lines that end in "# +" compress
between the devices. `compare.py` runs the script with them and without them.
"""

import os
from pydoc_data import topics

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import jaxsparse  # +

STEPS = int(os.environ.get("STEPS", "10"))
DENSITY = float(os.environ.get("DENSITY", "0.01"))
CLIPS = [optax.clip_by_global_norm(0.1)] if os.environ.get("VARIANT") == "clip" else []
VOCAB, WIDTH, LENGTH = 256, 64, 32


class LanguageModel(eqx.Module):
    """A byte-level transformer of one block."""

    embed: eqx.nn.Embedding
    positions: jax.Array
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    norms: list
    dropout: eqx.nn.Dropout
    out: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 5)
        self.embed = eqx.nn.Embedding(VOCAB, WIDTH, key=keys[0])
        self.positions = 0.1 * jax.random.normal(keys[1], (LENGTH, WIDTH))
        self.attention = eqx.nn.MultiheadAttention(4, WIDTH, key=keys[2])
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, activation=jax.nn.gelu, key=keys[3])
        self.norms = [eqx.nn.LayerNorm(WIDTH) for _ in range(3)]
        self.dropout = eqx.nn.Dropout(0.1, inference=True)
        self.out = eqx.nn.Linear(WIDTH, VOCAB, use_bias=False, key=keys[4])

    def __call__(self, tokens):
        """Scores of the next byte: int[length] to float[length, 256]."""
        x = 0.1 * jax.vmap(self.embed)(tokens) + self.positions
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y, mask=jnp.tri(LENGTH, dtype=bool))
        x = x + self.dropout(jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x)))
        return jax.vmap(self.out)(jax.vmap(self.norms[2])(x))


def loss_of(model, tokens):
    logits = jax.vmap(model)(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def batches():
    text = np.frombuffer("".join(topics.topics.values()).encode(), np.uint8)
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        starts = rng.integers(len(text) - LENGTH - 1, size=32)
        yield text[starts[:, None] + np.arange(LENGTH + 1)].astype(np.int32)


mesh = jax.make_mesh((8,), ("hosts",), axis_types=(jax.sharding.AxisType.Auto,))
split, whole = (NamedSharding(mesh, spec) for spec in (PartitionSpec("hosts"), PartitionSpec()))
tx = optax.chain(*CLIPS, optax.adamw(3e-3))
tx = optax.chain(jaxsparse.spardl(DENSITY, axis_name="hosts"), tx)  # +


@eqx.filter_jit(donate="all")
def train_step(model, opt_state, tokens):
    model, opt_state = eqx.filter_shard((model, opt_state), whole)
    tokens = eqx.filter_shard(tokens, split)
    loss, grads = eqx.filter_value_and_grad(loss_of)(model, tokens)
    own = jaxsparse.value_and_grad(loss_of, axis_name="hosts")  # +
    loss, grads = own(model, tokens)  # +
    loss = loss.mean()  # +
    updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_array))
    model = eqx.apply_updates(model, updates)
    return *eqx.filter_shard((model, opt_state), whole), loss


model = LanguageModel(jax.random.key(0))
opt_state = tx.init(eqx.filter(model, eqx.is_array))
model, opt_state = eqx.filter_shard((model, opt_state), whole)
model, opt_state = jaxsparse.shard((model, opt_state), mesh, "hosts")  # +
specs = jaxsparse.specs((model, opt_state), axis_name="hosts")  # +
whole = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)  # +
for i, tokens in enumerate(batches(), start=1):
    tokens = eqx.filter_shard(tokens, split)
    model, opt_state, loss = train_step(model, opt_state, tokens)
    print("loss", i, float(loss), flush=True)
