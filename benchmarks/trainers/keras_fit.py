"""Keras' `model.fit` on eight emulated devices: two hosts, and kernels sharded inside.

Model, optimizer, loop and metrics are Keras', with the JAX backend. Lines that end in "# +"
compress between the hosts, and so do the blocks of variants. `compare.py` runs the script with
them and without them.
"""

import functools
import os
import tempfile
from pydoc_data import topics

os.environ["KERAS_BACKEND"] = "jax"
import jax
import keras
import numpy as np
import optax

import jaxsparse  # +

STEPS = int(os.environ.get("STEPS", "10"))
DENSITY = float(os.environ.get("DENSITY", "0.01"))
VARIANT = os.environ.get("VARIANT", "plain")
VOCAB, WIDTH, LENGTH, ROWS, EPOCHS = 256, 32, 16, 64, 2
CLIP = {"clipvalue": 1e-3} if VARIANT == "clip" else {"global_clipnorm": 0.5}
PARTS = 2 if VARIANT == "accumulation" else None

text = np.frombuffer("".join(topics.topics.values()).encode(), np.uint8)
starts = np.random.default_rng(0).integers(len(text) - LENGTH - 1, size=ROWS * STEPS // EPOCHS)
windows = text[starts[:, None] + np.arange(LENGTH + 1)].astype(np.int32)

keras.utils.set_random_seed(0)
keras.config.set_dtype_policy("mixed_float16" if VARIANT == "float16" else "float32")
devices = keras.distribution.DeviceMesh((2, 4), ("hosts", "model"))
layouts = keras.distribution.LayoutMap(devices)
layouts[".*dense.*kernel"] = (None, "model")
distribution = keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="hosts")
keras.distribution.set_distribution(distribution)
model = keras.Sequential(
    [
        keras.Input((LENGTH,), dtype="int32"),
        keras.layers.Embedding(VOCAB, WIDTH),
        keras.layers.Flatten(),
        keras.layers.Dense(256, activation="relu"),
        keras.layers.LayerNormalization(),
        keras.layers.Dense(VOCAB),
    ]
)
optimizer = keras.optimizers.AdamW(3e-3, gradient_accumulation_steps=PARTS, **CLIP)
scaled = functools.partial(keras.optimizers.LossScaleOptimizer, optimizer)
# Gradients overflow until the scale has fallen.
SCALE = {"overflow": 2.0**127, "float16": 2.0**20}.get(VARIANT)
if SCALE:
    optimizer = scaled(initial_scale=SCALE)
model.compile(
    optimizer,
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)

values = [v.value for v in model.trainable_variables]  # +
tx, mesh = jaxsparse.spardl(DENSITY, axis_name="hosts"), devices.backend_mesh  # +

if VARIANT in ("overflow", "float16"):
    tx = jaxsparse.spardl(DENSITY, axis_name="hosts", when_skipped="nan")
    tx, scale_loss = optax.chain(tx, optax.scale(2)), model.optimizer.scale_loss
    model.optimizer.scale_loss = lambda loss: scale_loss(loss) / 2  # means are over half the rows

kept = jaxsparse.shard(tx.init(values), mesh, "hosts")  # +


def step(kept, state, data):  # +
    values, others, moments, seen = state  # +
    batch = keras.utils.unpack_x_y_sample_weight(data)  # +
    more = {"training": True, "optimizer_variables": moments}  # +
    loss = lambda v, batch: model.compute_loss_and_updates(v, others, seen, *batch, **more)  # +
    rows = jaxsparse.value_and_grad(loss, has_aux=True, axis_name="hosts", mesh=mesh)  # +
    (_, (own, preds, others, seen)), grads = rows(values, batch)  # +
    preds = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), preds)  # +
    others, seen = jax.tree.map(lambda x: x.mean(0), (others, seen))  # +
    grads, kept = tx.update(grads, kept, values)  # +
    values, moments = model.optimizer.stateless_apply(moments, grads, values)  # +
    logs, seen = model._update_metrics_variables(seen, own.mean(), *batch[:2], preds, batch[2])  # +
    return kept, logs, (values, others, moments, seen)  # +


def train_function(state, batches):  # +
    global kept  # +
    kept, logs, state = run(kept, state, next(batches))  # +
    return logs, state  # +


run = jax.jit(step, donate_argnums=(0, 1))  # +
model.train_function = train_function  # +


done = 0


def show(batch, logs):
    global done
    done += 1
    print("loss", done, float(logs["loss"]), flush=True)
    if SCALE:
        model.jax_state_sync()
        print("scale", float(model.optimizer.dynamic_scale.value))


def train(model, begin, end):
    """Trains from one epoch to another, with rows in the same order in each."""
    model.fit(
        windows[:, :-1],
        windows[:, -1],
        batch_size=ROWS,
        initial_epoch=begin,
        epochs=end,
        shuffle=False,
        verbose=0,
        callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=show)],
    )


start = 0

if VARIANT == "resumed":
    train(model, 0, start := 1)
    with tempfile.TemporaryDirectory() as folder:
        model.save(f"{folder}/model.keras")
        np.savez(f"{folder}/residuals.npz", *map(np.asarray, jax.tree.leaves(kept)))
        model = keras.models.load_model(f"{folder}/model.keras")
        saved = np.load(f"{folder}/residuals.npz")
    model.train_function = train_function
    leaves, tree = jax.tree.flatten(kept)
    placed = [jax.device_put(saved[f"arr_{i}"], x.sharding) for i, x in enumerate(leaves)]
    kept = tree.unflatten(placed)
    run = jax.jit(lambda *a: step(*a), donate_argnums=(0, 1))  # traces the new model

train(model, start, EPOCHS)
