"""MaxText's own ahead-of-time compile, for two slices of sixteen TPUs. Needs no TPU.

    pip install -r benchmarks/trainers/requirements_maxtext.txt 'jax[tpu]==0.12.0.1'   # Python 3.12
    python benchmarks/trainers/maxtext_slices.py

Plain MaxText stands beside the lines of docs/trainers.md, read from there, with one exchange after
the other. Workers are slices, on the axis "data", or on "diloco" where the name says so. "local" is
MaxText's step in `LocalSteps`, and "outer" its exchange after many steps. Bytes are those that a
device receives over DCN in a step, temporaries and code those of a device.
"""

import argparse
import os
import re
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # there is no machine to ask
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
}

import jax
import maxtext
import optax
from flax import nnx
from maxtext.optimizers import optimizers
from maxtext.trainers.pre_train import train, train_compile

import jaxsparse

PAGE = Path(__file__).parents[2] / "docs" / "trainers.md"
EXCHANGES = {  # as calls whose bracket stays open
    "dense": "jaxsparse.dense(",
    "bfloat16": 'jaxsparse.quantized("bfloat16", ',
    "int4": 'jaxsparse.quantized("int4", ',
    "spardl": "jaxsparse.spardl(0.01, ",
    "powersgd": "jaxsparse.powersgd(4, ",
}
WAYS = ["plain", *EXCHANGES, "int4 on diloco", "local", *(f"outer {name}" for name in EXCHANGES)]
SETTINGS: dict[str, Any] = {
    "compile_topology": "v5e-16",
    "compile_topology_num_slices": 2,
    "dcn_data_parallelism": 2,
    "ici_fsdp_parallelism": 16,
    "dataset_type": "synthetic",
    "attention": "flash",
    "use_iota_embed": True,  # rows that are looked up would cross slices
    "scan_layers": True,
    "remat_policy": "full",
    "per_device_batch_size": 2,
    "max_target_length": 1024,
    "vocab_size": 8192,
    "base_emb_dim": 512,
    "base_mlp_dim": 2048,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 4,
    "head_dim": 128,
    "base_num_decoder_layers": 4,
    "enable_checkpointing": False,
}
ON_DILOCO = {  # rows are cut over "diloco", too, which nothing else of MaxText names
    "dcn_data_parallelism": 1,
    "dcn_diloco_parallelism": 2,
    "logical_axis_rules": [["rows", ["diloco", "data", "fsdp"]]],
    "input_data_sharding_logical_axes": ["rows", "activation_norm_length"],
}


def documented(exchange: str, axis_name: str) -> str:
    """The lines of the page, with another exchange and axis."""
    blocks = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (lines,) = [block for block in blocks if "# 13\n" in block]
    named = f", axis_name={axis_name!r}"
    lines = lines.replace('jaxsparse.quantized("int4", mesh=m', f"{exchange}mesh=m{named}")
    return lines.replace("batch_argnums=3", f"batch_argnums=3{named}")


def report(name: str, program: Any, mesh: jax.sharding.Mesh, axis_name: str, spent: float) -> None:
    memory, moved = program.memory_analysis(), jaxsparse.wire_bytes(program, mesh=mesh)
    sizes = memory.temp_size_in_bytes, memory.peak_memory_in_bytes
    sizes += (memory.generated_code_size_in_bytes,)
    shown = " | ".join(f"{size / 1e6:.1f}" for size in sizes)
    print(
        f"| {name} | {moved.across(axis_name).received:,.0f} | {shown} | {spent:.0f} |", flush=True
    )


def compile_way(name: str, others: list[str]) -> None:
    """Runs MaxText's `train_compile`, which compiles its step in one way."""
    system = EXCHANGES.get(name.removesuffix(" on diloco").removeprefix("outer "))
    is_local = name == "local" or name.startswith("outer")
    axis_name = "diloco" if is_local or name.endswith("diloco") else "data"
    settings = SETTINGS | (ON_DILOCO if axis_name == "diloco" else {})
    if system and not is_local:
        given = {"SETTINGS": settings, "train": train, "optimizers": optimizers}
        exec(documented(system, axis_name), given | {"jax": jax, "jnp": jax.numpy, "types": types})
    usual = train_compile.jit_and_compile

    def compiled(*args: Any) -> Any:
        began = time.perf_counter()
        program = usual(*args)
        report(name, program, args[3], axis_name, time.perf_counter() - began)
        return program

    def local(step: Any, args: Any, _: Any, mesh: jax.sharding.Mesh, *rest: Any) -> None:
        state, batch = args
        params = lambda state: nnx.filter_state(state, nnx.Param)
        placed = {"mesh": mesh, "specs": params(state), "axis_name": axis_name}
        sent = eval(
            f"{system or EXCHANGES['dense']}**placed)", {"jaxsparse": jaxsparse, "placed": placed}
        )
        outer = optax.sgd(0.3, 0.9, nesterov=True)
        how: dict[str, Any] = {"axis_name": axis_name, "every": 30, "params": params}
        train_local = jaxsparse.LocalSteps(step, sent, outer, mesh, **how)
        with jax.set_mesh(mesh), rest[-1]:
            whole, began = train_local.init(state), time.perf_counter()
            if system:
                lowered = train_local.outer[0].lower(whole)
            else:
                lowered = train_local.lower(whole, batch)
            report(name, lowered.compile(), mesh, axis_name, time.perf_counter() - began)
        raise SystemExit  # MaxText would go on with its own program

    train_compile.jit_and_compile = local if is_local else compiled
    config = os.path.join(os.path.dirname(maxtext.__file__), "configs", "base.yml")
    train_compile.main(
        ["", config, *(f"{key}={value}" for key, value in settings.items()), *others]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("ways", nargs="*", metavar="WAY", help=f"some of {WAYS}; default: all")
    parser.add_argument("--settings", nargs="*", default=[], metavar="KEY=VALUE", help="of MaxText")
    parser.add_argument("--here", action="store_true", help="one way, in this process")
    args = parser.parse_args()
    if unknown := {*args.ways} - {*WAYS}:
        parser.error(f"there is no way {sorted(unknown)}: give some of {WAYS}")
    if args.here:
        return compile_way(*args.ways, args.settings)
    print("| | B over DCN | temporaries, MB | peak, MB | code, MB | compiled in s |")
    print("|---|---|---|---|---|---|", flush=True)
    for way in args.ways or WAYS:
        # In a process of its own, since the lines replace MaxText's names.
        command = [sys.executable, __file__, way, "--here", "--settings", *args.settings]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        row = [line for line in run.stdout.splitlines() if line.startswith(f"| {way} |")]
        print(*row or [f"{way} failed:", *run.stderr.splitlines()[-12:]], sep="\n", flush=True)


if __name__ == "__main__":
    main()
