"""Keras' `model.fit` on eight emulated devices: two hosts, and kernels sharded inside.

Model, optimizer, loop and metrics are Keras', with the JAX backend. Lines that end in "# +"
compress between the hosts. `compare.py` runs the script with them and without them.
"""

import os
from pydoc_data import topics

os.environ["KERAS_BACKEND"] = "jax"
import keras
import numpy as np

import jaxsparse  # +

STEPS = int(os.environ.get("STEPS", "10"))
DENSITY = float(os.environ.get("DENSITY", "0.01"))
VOCAB, WIDTH, LENGTH, ROWS, EPOCHS = 256, 32, 16, 64, 2

text = np.frombuffer("".join(topics.topics.values()).encode(), np.uint8)
starts = np.random.default_rng(0).integers(len(text) - LENGTH - 1, size=ROWS * STEPS // EPOCHS)
windows = text[starts[:, None] + np.arange(LENGTH + 1)].astype(np.int32)

keras.utils.set_random_seed(0)
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
model.compile(
    keras.optimizers.AdamW(3e-3, global_clipnorm=0.5),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)

values = [v.value for v in model.trainable_variables]  # +
tx = jaxsparse.spardl(DENSITY, axis_name="hosts")  # +
exchange = jaxsparse.StatefulExchange(tx, values, devices.backend_mesh, axis_name="hosts")  # +
apply = model.optimizer.stateless_apply  # +
model.optimizer.stateless_apply = lambda own, grads, now: apply(own, exchange(grads), now)  # +
step = exchange.data_parallel(model.train_step, outputs=("mean", (None, None, None, "mean")))  # +
model.train_function = lambda state, batches: step(state, next(batches))  # +

done = 0


def show(batch, logs):
    global done
    done += 1
    print("loss", done, float(logs["loss"]), flush=True)


callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=show)]
model.fit(
    windows[:, :-1],
    windows[:, -1],
    batch_size=ROWS,
    epochs=EPOCHS,
    shuffle=False,
    verbose=0,
    callbacks=callbacks,
)
