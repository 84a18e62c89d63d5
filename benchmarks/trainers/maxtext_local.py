"""MaxText's DiLoCo on eight emulated devices: two hosts, fsdp and tensor inside.

Without the lines that end in "# +", it is MaxText's own. With them, MaxText's plain step runs in
`LocalSteps`, whose outer optimizer is the same, and displacements are compressed. `compare.py` runs
the script with them and without them.
"""

import json
import os
import tempfile
from pathlib import Path

import maxtext
from maxtext.trainers.pre_train import train
from maxtext.utils import train_utils

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
    "enable_diloco": True,
    "diloco_sync_period": 5,
    "diloco_outer_lr": 0.3,
    "diloco_outer_momentum": 0.9,
    "ici_diloco_parallelism": 2,
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

SETTINGS["enable_diloco"] = False  # +
sent = jaxsparse.spardl(DENSITY, axis_name="diloco")  # +
how = {"axis_name": "diloco", "outer": jaxsparse.outer.diloco(0.3, 0.9, exchange=sent)}  # +
how["params"] = lambda state: train.nnx.filter_state(state, train.nnx.Param)  # +
how |= {"every": 5, "outputs": (None, lambda path: "sum" if "weights" in path else "mean")}  # +
plain = lambda *a: lambda *b: a[5](a[1], a[0], a[3], a[6], *b)  # +
train_utils.jit_train_step = lambda *a, mesh: jaxsparse.LocalSteps(plain(*a), mesh=mesh, **how)  # +

config = os.path.join(os.path.dirname(maxtext.__file__), "configs", "base.yml")
train.main(["", config, *(f"{name}={value}" for name, value in SETTINGS.items())])
for i, line in enumerate(Path(FOLDER, "metrics").read_text().splitlines(), start=1):
    shown = json.loads(line)
    islands = [x for name, x in shown.items() if name.startswith("learning/loss_island_")]
    islands = islands or [shown["learning/loss"]]  # MaxText's DiLoCo shows that of one island there
    print("loss", i, sum(islands) / len(islands), flush=True)
