"""Runs trainers that others wrote, as they are and with the lines that compress between hosts.

    pip install -r benchmarks/trainers/requirements.txt
    python benchmarks/trainers/compare.py linen_lm equinox_lm tunix_qwen3 keras_fit

A trainer is a script. Its lines that end in "# +" are added for jaxsparse. Without them it is the
original, which `jax.jit` runs on the same mesh. The compressed trainer runs three times: with a
budget for everything, where its losses must be the original's, with 1 %, and with all values in
four bits. Bytes are those that a device receives in a step, or in the exchange of several. They
are read from the dump of the largest programs that the process compiles.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from jax.sharding import AbstractMesh

import jaxsparse

HERE = Path(__file__).parent
MOST_LINES = 8
TOLERANCE = 1e-6  # relative tolerance of losses
# The exchange of all scripts, and what replaces it.
EXCHANGE, IN_FOUR_BITS = "jaxsparse.spardl(DENSITY", 'jaxsparse.quantized("int4"'

_GRID = AbstractMesh((2, 2, 2), ("hosts", "fsdp", "tp"))
MESHES = {
    "linen_lm": _GRID,
    "tunix_qwen3": _GRID,
    "equinox_lm": AbstractMesh((8,), ("hosts",)),
    "keras_fit": AbstractMesh((2, 4), ("hosts", "model")),
    "maxtext_train": AbstractMesh((2, 2, 2), ("data", "fsdp", "tensor")),
    "maxtext_local": AbstractMesh((2, 2, 2), ("diloco", "fsdp", "tensor")),
}


class Run(NamedTuple):
    """Losses and bytes of one run of a trainer."""

    losses: list[float]
    across: float  # bytes that a device receives in one step by collectives that cross hosts
    inside: float  # bytes that it receives in one step by all others


def without(script: str) -> str:
    """The original: the script without the added lines."""
    return "".join(line for line in script.splitlines(True) if not line.endswith("# +\n"))


def added(script: str) -> int:
    """The number of added lines."""
    return script.count("# +\n")


def in_four_bits(script: str) -> str:
    """The script with another exchange, of all values in four bits."""
    assert EXCHANGE in script
    return script.replace(EXCHANGE, IN_FOUR_BITS)


def run(name: str, script: str, steps: int, density: float = 1.0, timeout: float = 600) -> Run:
    """Runs the script of a trainer in a process of its own, on eight emulated devices.

    Raises:
        RuntimeError: the script failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trainer.py"
        path.write_text(script)
        flags = (
            f"--xla_force_host_platform_device_count=8 --xla_dump_to={folder}/hlo "
            "--xla_dump_hlo_as_text"
        )
        # A program that comes out of JAX's cache would not be dumped.
        env = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"} | {
            "XLA_FLAGS": flags,
            "JAX_PLATFORMS": "cpu",
            "STEPS": str(steps),
            "DENSITY": str(density),
            "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]),
        }
        done = subprocess.run(
            [sys.executable, path], env=env, capture_output=True, text=True, timeout=timeout
        )
        losses = [float(x) for x in re.findall(r"^loss \d+ (\S+)", done.stdout, re.MULTILINE)]
        if done.returncode or len(losses) != steps:
            raise RuntimeError(f"{len(losses)} losses of {steps}:\n{done.stdout}\n{done.stderr}")
        programs = [file.read_text() for file in Path(folder).glob("hlo/*after_optimizations.txt")]
        on_all = sorted((text for text in programs if "num_partitions=8" in text), key=len)
        each = [jaxsparse.wire_bytes(text, mesh=MESHES[name]) for text in on_all[-3:]]
    workers = MESHES[name].axis_names[0]
    across = max(moved.across(workers).received for moved in each)
    inside = max(moved.within(workers).received for moved in each)
    return Run(losses, across, inside)


def furthest(run: Run, original: Run) -> float:
    """The largest relative difference between the losses of a step."""
    return max(abs(a - b) / abs(b) for a, b in zip(run.losses, original.losses, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trainers", nargs="+", choices=MESHES)
    parser.add_argument("--steps", type=int, default=10, help="(default: 10)")
    args = parser.parse_args()
    head = "first loss | last loss | largest difference | B across hosts | B inside"
    print(f"| trainer | {head} |", "|---" * 6 + "|", sep="\n")
    failed = False
    for name in args.trainers:
        script = (HERE / f"{name}.py").read_text()
        original = run(name, without(script), args.steps)
        lines = f"{added(script)} lines added"
        for title, each in (
            (f"{name}, original", original),
            (f"{lines}, all sent", full := run(name, script, args.steps)),
            (f"{lines}, 1 % sent", run(name, script, args.steps, 0.01)),
            (f"{lines}, in four bits", run(name, in_four_bits(script), args.steps)),
        ):
            losses = f"{each.losses[0]:.6f} | {each.losses[-1]:.6f}"
            moved = f"{each.across:,.0f} | {each.inside:,.0f}"
            print(f"| {title} | {losses} | {furthest(each, original):.1e} | {moved} |", flush=True)
        failed |= added(script) > MOST_LINES or furthest(full, original) > TOLERANCE
    sys.exit("losses differ, or too many lines were added" if failed else 0)


if __name__ == "__main__":
    main()
