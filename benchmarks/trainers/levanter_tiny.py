"""Levanter trains a tiny Llama on eight emulated devices: two hosts, FSDP over four devices inside.

Model, loss, loop and checkpoints are Levanter's, whose mesh axis "replica" is that of the workers.
Lines that end in "# +" compress between the hosts. `compare.py` runs the script with them and
without them. Sequences have unlike lengths, and those of one host are longer.
"""

import dataclasses
import itertools
import os
import tempfile
from pathlib import Path
from pydoc_data import topics

import equinox as eqx
import haliax as hax
import haliax.partitioning
import jax
import jax.numpy as jnp
import levanter.trainer
import numpy as np
import optax
from jax.tree_util import keystr, tree_leaves_with_path, tree_map_with_path
from levanter.callbacks.watch import WatchConfig
from levanter.checkpoint import CheckpointerConfig
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmExample
from levanter.optim.config import AdamConfig
from levanter.tracker import NoopConfig
from levanter.utils.mesh import MeshConfig

import jaxsparse  # +

STEPS = int(os.environ.get("STEPS", "10"))
FOLDER = Path(tempfile.mkdtemp())
DENSITY = float(os.environ.get("DENSITY", "0.01"))
VARIANT = os.environ.get("VARIANT", "plain")
config = levanter.trainer.TrainerConfig(
    id="tiny",
    num_train_steps=STEPS,
    train_batch_size=16,
    tracker=NoopConfig(),
    require_accelerator=False,
    log_jaxprs=False,
    log_xla_hlo=False,
    load_checkpoint=False,
    mesh=MeshConfig(axes={"replica": 2, "data": 4}, param_mapping={"embed": "data"}),
    checkpointer=CheckpointerConfig(base_path=str(FOLDER / "checkpoints")),
    log_dir=FOLDER / "logs",
    watch=WatchConfig(interval=0),  # it logs norms of gradients by a program of its own
)
config.initialize()
mesh, Vocab = config.device_mesh, hax.Axis("vocab", 256)
llama = LlamaConfig(
    max_seq_len=64,
    hidden_dim=64,
    intermediate_dim=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
)
tx = AdamConfig(learning_rate=3e-3, weight_decay=0.1, warmup=0.0).build(STEPS)  # it clips at 1.0

shape = eqx.filter_eval_shape(lambda: llama.build(Vocab, key=jax.random.PRNGKey(0)))  # +
specs = hax.partitioning.pspec_for(shape, config.parameter_axis_mapping)  # +
exchange = jaxsparse.spardl(DENSITY, mesh=mesh, axis_name="replica", specs=specs)  # +
rows, theirs = [], hax.partitioning.infer_resource_partitions  # +
tx = optax.chain(optax.stateless(lambda *_: rows.pop()), exchange, tx)  # +
places = {keystr(p): x.sharding for p, x in tree_leaves_with_path(exchange.init(shape))}  # +
place = lambda p, s: next((x for k, x in places.items() if keystr(p).endswith("[1]" + k)), s)  # +
hax.partitioning.infer_resource_partitions = lambda *a: tree_map_with_path(place, theirs(*a))  # +


def gradients_of(self, loss_fn, model, x, **named):  # +
    of_tokens = lambda n, loss, aux: (loss * n, (n, aux))  # +
    sums = lambda m, x: of_tokens(x.loss_weight.array.sum(), *loss_fn(m, x, **named))  # +
    of = jaxsparse.value_and_grad(sums, has_aux=True, mesh=mesh, axis_name="replica")  # +
    (loss, (count, aux)), grads = of(model, x)  # +
    loss, grads = jaxsparse.mean_of((loss, grads), count)  # +
    means = jax.tree.map(lambda x: x.mean(0), aux)  # +
    return rows.append(grads) or loss.mean(), jax.tree.map(lambda g: g.mean(0), grads), means  # +


levanter.trainer.Trainer._compute_gradients_microbatched = gradients_of  # +


def batches():
    text = np.frombuffer("".join(topics.topics.values()).encode(), np.uint8)
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        starts = rng.integers(len(text) - 64, size=16)
        tokens = text[starts[:, None] + np.arange(64)].astype(np.int32)
        longest = np.where(np.arange(16) < 8, rng.integers(40, 64, 16), rng.integers(4, 14, 16))
        weight = (np.arange(64) < longest[:, None]).astype(np.float32)
        axes = config.TrainBatch, llama.max_Pos
        named = [hax.named(jnp.asarray(x), axes) for x in (tokens, weight)]
        yield hax.shard(LmExample(*named), config.compute_axis_mapping)


stops = [STEPS]
if VARIANT == "resumed":
    stops = [STEPS // 2, STEPS]  # a checkpoint, and another trainer

for stop in stops:
    goes_on = {"num_train_steps": stop, "load_checkpoint": stop > stops[0]}
    loss_of = lambda model, x, *, key=None: model.compute_next_token_loss(x, key=key)
    trainer, losses = (
        levanter.trainer.Trainer(dataclasses.replace(config, **goes_on), tx, loss_of),
        {},
    )
    trainer.add_hook(lambda info, to=losses: to.update({int(info.step): float(info.loss)}))
    with trainer:
        build = lambda: llama.build(Vocab, key=jax.random.PRNGKey(0))
        state = trainer.initial_state(jax.random.PRNGKey(1), model_init=build)
        trainer.train(state, itertools.islice(batches(), int(state.step), None))
    print(*(f"loss {step} {loss}" for step, loss in losses.items()), sep="\n", flush=True)
os._exit(0)  # Levanter's threads go on
