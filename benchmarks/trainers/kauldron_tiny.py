"""Kauldron's trainer on eight emulated devices, with a tiny language model.

Model and data are as its documentation asks; step, loop, losses and shardings are Kauldron's. Lines
that end in "# +" compress between the devices. `compare.py` runs the script with them and without
them.
"""

import os
import tempfile
import types
from pydoc_data import topics

import jax
import numpy as np
import optax
from flax import linen as nn
from kauldron import kd
from kauldron.train import train_step

import jaxsparse  # +

STEPS = int(os.environ.get("STEPS", "10"))
DENSITY = float(os.environ.get("DENSITY", "0.01"))
VOCAB, WIDTH, LENGTH, ROWS = 256, 64, 32, 32


class LanguageModel(nn.Module):
    """A byte-level transformer of one block."""

    tokens: kd.kontext.Key = "batch.tokens"

    @nn.compact
    def __call__(self, tokens):
        """Scores of the next byte: int[n, length] to float[n, length, 256]."""
        places = self.param("places", nn.initializers.normal(0.1), (LENGTH, WIDTH))
        x = nn.Embed(VOCAB, WIDTH)(tokens) + places
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(4)(y, mask=nn.make_causal_mask(tokens))
        x = x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))
        return nn.Dense(VOCAB, use_bias=False)(nn.LayerNorm()(x))


def windows():
    text = np.frombuffer("".join(topics.topics.values()).encode(), np.uint8)
    starts = np.random.default_rng(0).integers(len(text) - LENGTH - 1, size=ROWS * STEPS)
    tokens = text[starts[:, None] + np.arange(LENGTH + 1)].astype(np.int32)
    return {"tokens": tokens[:, :-1], "next": tokens[:, 1:, None]}


class Print(kd.train.metric_writer.NoopWriter):
    """Prints the loss of each step."""

    def write_step_metrics(self, *, step, aux, **_):
        print("loss", step + 1, float(aux.compute().loss_values["losses/total"]), flush=True)


optimizer = optax.adamw(3e-3)
name = {"axis_name": "devices", "mesh": kd.sharding.DEVICES_MESH}  # +
optimizer = optax.chain(jaxsparse.spardl(DENSITY, **name), optimizer)  # +


def grad(loss, **_):  # +
    def rows(context, **k):  # +
        of = lambda params, batch: loss(context.replace(params=params, batch=batch), **k)  # +
        grads, shown = jaxsparse.grad(of, has_aux=True, **name)(context.params, context.batch)  # +
        states = jax.tree.map(lambda x: x.sum(0), shown.loss_states)  # +
        preds = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), shown.preds)  # +
        kept = jax.tree.map(lambda x: x.mean(0), shown.collections)  # +
        context = context.replace(loss_states=states, preds=preds, collections=kept)  # +
        return types.SimpleNamespace(params=grads), context  # +

    return rows  # +


train_step.jax = types.SimpleNamespace(**vars(jax) | {"grad": grad})  # +

with tempfile.TemporaryDirectory() as folder:
    kd.train.Trainer(
        workdir=folder,
        train_ds=kd.data.InMemoryPipeline(loader=windows, batch_size=ROWS, seed=0),
        model=LanguageModel(),
        optimizer=optimizer,
        train_losses={
            "next": kd.losses.SoftmaxCrossEntropyWithIntLabels(logits="preds", labels="batch.next")
        },
        num_train_steps=STEPS - 1,  # Kauldron counts from step 0
        log_metrics_every=1,
        log_summaries_every=1,
        writer=Print(),
    ).train()
