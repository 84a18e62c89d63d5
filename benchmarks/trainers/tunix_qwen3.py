"""google-tunix trains a tiny Qwen3 on eight emulated devices: two hosts, fsdp and tp inside.

Model, loss, loop and compiling are tunix's. Lines that end in "# +" compress between the hosts.
`compare.py` runs the script with them and without them.
"""

import dataclasses
import os
import types
from pydoc_data import topics

import jax
import numpy as np
import optax
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.sft import peft_trainer, utils
from tunix.sft.hooks import TrainingHooks

import jaxsparse  # +

STEPS = int(os.environ.get("STEPS", "10"))
DENSITY = float(os.environ.get("DENSITY", "0.01"))
VARIANT = os.environ.get("VARIANT", "plain")
PARTS = 2 if VARIANT == "accumulation" else None
CONFIG = dataclasses.replace(
    qwen3.ModelConfig.qwen3_0p6b(),
    num_layers=2,
    vocab_size=256,
    embed_dim=64,
    hidden_dim=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
)
CONFIG.shd_config = dataclasses.replace(CONFIG.shd_config, emb_vd=("fsdp", "tp"))  # +


@nnx.jit
def create_model():
    model = qwen3.Qwen3(CONFIG, rngs=nnx.Rngs(0))
    state = nnx.state(model)
    placed = jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state))
    nnx.update(model, placed)
    return model


def batches():
    text = np.frombuffer("".join(topics.topics.values()).encode(), np.uint8)
    rng = np.random.default_rng(0)
    for _ in range(STEPS * (PARTS or 1)):
        starts = rng.integers(len(text) - 64, size=16)
        tokens = text[starts[:, None] + np.arange(64)].astype(np.int32)
        yield peft_trainer.TrainingInput(input_tokens=tokens, input_mask=np.ones_like(tokens))


def model_inputs(batch):
    mask = batch.input_mask != 0
    return {
        "input_tokens": batch.input_tokens,
        "input_mask": mask,
        "positions": utils.build_positions_from_mask(mask),
        "attention_mask": utils.make_causal_attn_mask(mask),
    }


class Print(TrainingHooks):
    """Prints the loss of each step."""

    def on_train_step_end(self, train_ctx, train_step, train_loss):
        print("loss", train_step, float(train_loss), flush=True)

    def on_train_start(self, train_ctx): ...
    def on_train_end(self, train_ctx): ...
    def on_train_step_start(self, train_ctx): ...
    def on_eval_step_start(self, train_ctx): ...
    def on_eval_step_end(self, train_ctx, eval_loss): ...


mesh = jax.make_mesh(
    (2, 2, 2), ("hosts", "fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 3
)
if VARIANT == "accumulation":
    of_rows = lambda tx, k: jaxsparse.multi_steps(tx, k, axis_name="hosts", mesh=mesh)
    peft_trainer.optax = types.SimpleNamespace(**vars(optax) | {"MultiSteps": of_rows})
with mesh:
    tx = optax.adamw(3e-3)
    tx = optax.chain(jaxsparse.spardl(DENSITY, axis_name="hosts", mesh=mesh), tx)  # +
    config = peft_trainer.TrainingConfig(
        eval_every_n_steps=1000,
        max_steps=STEPS,
        data_sharding_axis=(("hosts", "fsdp"),),
        gradient_accumulation_steps=PARTS,
    )
    trainer = peft_trainer.PeftTrainer(create_model(), tx, config)
    trainer.with_gen_model_input_fn(model_inputs).with_training_hooks(Print())

    def step(model, optimizer, batch):  # +
        graph, params = nnx.split(model)  # +
        loss = lambda p, x: trainer.loss_fn(nnx.merge(graph, p), **model_inputs(x))  # +
        value, grads = jaxsparse.value_and_grad(loss, axis_name="hosts")(params, batch)  # +
        optimizer.update(model, grads)  # +
        return value.mean(), None, optax.global_norm(grads)  # +

    trainer.create_train_step_fn = lambda: step  # +
    trainer.train(batches())
