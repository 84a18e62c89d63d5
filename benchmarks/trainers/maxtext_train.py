"""MaxText's training loop on eight emulated devices: two hosts ("data"), fsdp and tensor inside.

Model, loss, loop, compiling and metrics are MaxText's. Lines that end in "# +" compress between
the hosts. `compare.py` runs the script with them and without them.
"""

import json
import os
import tempfile
from pathlib import Path

import maxtext
from maxtext.optimizers import optimizers
from maxtext.trainers.pre_train import train

import jaxsparse  # +

STEPS = int(os.environ.get("STEPS", "10"))
DENSITY = float(os.environ.get("DENSITY", "0.01"))
FOLDER = tempfile.mkdtemp()
SETTINGS = {
    "run_name": "tiny",
    "base_output_directory": FOLDER,
    "metrics_file": f"{FOLDER}/metrics",
    "hardware": "cpu",
    "skip_jax_distributed_system": True,
    "enable_checkpointing": False,
    "enable_goodput_recording": False,
    "monitor_goodput": False,
    "dataset_type": "synthetic",
    "steps": STEPS,
    "ici_data_parallelism": 2,
    "ici_fsdp_parallelism": 2,
    "ici_tensor_parallelism": 2,
    "per_device_batch_size": 2,
    "max_target_length": 32,
    "vocab_size": 256,
    "base_emb_dim": 64,
    "base_mlp_dim": 128,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 4,
    "head_dim": 16,
    "base_num_decoder_layers": 2,
    "attention": "dot_product",
    "dtype": "float32",
    "learning_rate": 3e-3,
    "gradient_clipping_threshold": 1.0,
    "use_iota_embed": True,
}

SETTINGS["gradient_clipping_threshold"] = 0  # +
make, old, optax = optimizers.get_optimizer, train.train_step, optimizers.optax  # +
tx = lambda m, s: (jaxsparse.spardl(DENSITY, mesh=m, specs=s), optax.clip_by_global_norm(1.0))  # +
optimizers.get_optimizer = lambda *a, mesh: optax.chain(*tx(mesh, a[2]), make(*a, mesh=mesh))  # +
said = (None, lambda path: "sum" if "weights" in path else "mean")  # +
run = lambda step, mesh: jaxsparse.data_parallel(step, mesh, outputs=said)  # +
train.train_step = lambda *a: run(lambda *b: old(*a[:4], *b), a[2].optimizer.step.mesh)(*a[4:])  # +

config = os.path.join(os.path.dirname(maxtext.__file__), "configs", "base.yml")
train.main(["", config, *(f"{name}={value}" for name, value in SETTINGS.items())])
for i, line in enumerate(Path(FOLDER, "metrics").read_text().splitlines(), start=1):
    print("loss", i, json.loads(line)["learning/loss"], flush=True)
