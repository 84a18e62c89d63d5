"""A tiny model of MaxText's on eight emulated devices, its losses, and variants of its training.

`run` starts MaxText's training loop for the scripts beside this one, which add lines of their own
first. As a program, `python maxtext_tiny.py SCRIPT VARIANT...` runs a script in each variant, and
sorts the programs that XLA dumps into folders of variants.
"""

import os
import sys
import tempfile
from pathlib import Path

import jax
import maxtext
from flax import nnx
from maxtext.common import checkpointing
from maxtext.common.metric_logger import MetricLogger
from maxtext.input_pipeline.synthetic_data_processing import SyntheticDataIterator
from maxtext.optimizers import optimizers
from maxtext.trainers.pre_train import train
from maxtext.utils import train_utils
from optax.contrib import _muon

STEPS = int(os.environ.get("STEPS", "10"))
DUMPS = os.environ.get("DUMPS") and Path(os.environ["DUMPS"])  # where XLA writes its programs
SETTINGS = {
    "run_name": "tiny",
    "hardware": "cpu",
    "skip_jax_distributed_system": True,
    "enable_checkpointing": False,
    "async_checkpointing": False,
    "enable_goodput_recording": False,
    "monitor_goodput": False,
    "dataset_type": "synthetic",
    "learning_rate_schedule_steps": STEPS,
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
EXPERTS = {"decoder_block": "mixtral", "base_moe_mlp_dim": 128, "num_experts": 4}
EXPERTS |= {"num_experts_per_tok": 2, "sparse_matmul": False, "megablox": False}
# Rows are cut over "diloco", too, which nothing else of MaxText names.
APART = {
    "ici_diloco_parallelism": 2,
    "logical_axis_rules": [["rows", ["diloco", "data", "fsdp"]]],
    "input_data_sharding_logical_axes": ["rows", "activation_norm_length"],
}
STREAMING = {"diloco_sync_period": 4, "enable_streaming_diloco": True, "num_diloco_fragments": 2}
STREAMING |= {"num_communication_overlapping_steps": 1, "communication_overlapping_alpha": 0.5}
RESUMED = {"enable_checkpointing": True}  # stops after a third of the steps, and goes on
VARIANTS = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "clip": {"gradient_clipping_threshold": 0.1},
    "remat": {"remat_policy": "minimal"},
    "experts": EXPERTS,
    "balance": EXPERTS | {"load_balance_loss_weight": 0.01},
    "ragged": EXPERTS | {"sparse_matmul": True},
    "explicit": {"shard_mode": "explicit"},
    "dropout": {"dropout_rate": 0.1},
    "slices": APART | {"ici_tensor_parallelism": 1},  # of two devices, which average inside
    "tokens": {},  # the first half of the rows has a quarter of the tokens
    "evaluation": {"eval_interval": 1, "eval_steps": 1},  # its losses stand for the losses
    "resumed": RESUMED,
    "muon": {"opt_type": "muon"},  # optax.contrib.muon, with MaxText's dimension numbers
    "updates": {},  # of Adam, each worker's own
    "muon_inside": {"opt_type": "muon"},  # without products of matrices that cross hosts
    "streaming": STREAMING,
    "streaming_resumed": STREAMING | RESUMED,
}
# Names of these are replaced by the scripts.
PATCHED = checkpointing, optimizers, train, train_utils
PATCHED += MetricLogger, SyntheticDataIterator, _muon


def run(settings: dict, variant: str = "plain") -> None:
    """Trains, and prints the losses."""
    placed, shown = [], []
    setup = train_utils.setup_train_loop

    def noting(*args, **named):
        *others, state = setup(*args, **named)
        arrays = nnx.state(state) if isinstance(state, nnx.Module) else state
        placed.append(jax.tree.map(lambda x: (x.ndim, x.sharding), arrays))
        return *others, state

    train_utils.setup_train_loop = noting
    name, kind = (
        ("eval/avg_loss", "eval") if variant == "evaluation" else ("learning/loss", "train")
    )
    MetricLogger.write_metrics = lambda self, metrics, step, metric_type="train": (
        metrics and metric_type == kind and shown.append(dict(metrics["scalar"]))
    )
    config = os.path.join(os.path.dirname(maxtext.__file__), "configs", "base.yml")
    with tempfile.TemporaryDirectory() as folder:
        settings = settings | {"base_output_directory": folder}
        for steps in (STEPS // 3, STEPS) if variant.endswith("resumed") else (STEPS,):
            arguments = (f"{key}={value}" for key, value in settings.items())
            train.main(["", config, *arguments, f"steps={steps}"])
    is_same = lambda a, b: a[1].is_equivalent_to(b[1], a[0])
    is_pair = lambda x: type(x) is tuple and isinstance(x[0], int)
    assert jax.tree.all(jax.tree.map(is_same, placed[0], placed[-1], is_leaf=is_pair))
    for i, metrics in enumerate(shown, start=1):
        # MaxText's DiLoCo shows the loss of one island as that of all.
        islands = [float(x) for key, x in metrics.items() if key.startswith(f"{name}_island_")]
        islands = islands or [float(metrics[name])]
        print("loss", i, sum(islands) / len(islands), flush=True)


def main() -> None:
    """Runs a script in variants, one after the other, with MaxText's own functions at first."""
    script = compile(Path(sys.argv[1]).read_text(), sys.argv[1], "exec")
    own = [dict(vars(module)) for module in PATCHED]
    for variant in sys.argv[2:]:
        print("variant", variant, flush=True)
        if variant == "tokens":
            make = SyntheticDataIterator.raw_generate_synthetic_data

            def uneven(config, data, make=make):
                rows = make(config, data)
                is_seen = rows["targets_segmentation"]
                half, quarter = is_seen.shape[0] // 2, is_seen.shape[-1] // 4
                return rows | {"targets_segmentation": is_seen.at[:half, ..., quarter:].set(0)}

            SyntheticDataIterator.raw_generate_synthetic_data = staticmethod(uneven)
        try:
            exec(script, {"__name__": variant, "VARIANT": variant})
        except Exception as error:  # the others run, and this one has no losses
            print("failed", variant, f"{type(error).__name__}: {error}", flush=True)
        if DUMPS:
            (DUMPS / variant).mkdir()
            for file in DUMPS.glob("*after_optimizations.txt"):
                file.rename(DUMPS / variant / file.name)
        for module, names in zip(PATCHED, own):
            for name, value in names.items():
                if vars(module).get(name) is not value:
                    setattr(module, name, value)


if __name__ == "__main__":
    main()
