"""Runs trainers that others wrote, as they are and with the lines that compress between hosts.

    pip install -r benchmarks/trainers/requirements.txt
    python benchmarks/trainers/compare.py linen_lm equinox_lm tunix_qwen3 keras_fit
    python benchmarks/trainers/compare.py maxtext_train --variants clip tokens

A trainer is a script. Its lines that end in "# +" are added for jaxsparse. Without them it is the
original, which `jax.jit` runs on the same mesh. The compressed trainer runs three times: with a
budget for everything, where its losses must be the original's, with 1 %, and with all values in
four bits. Bytes are those that a device receives in a step, or in the exchange of several. They
are read from the dump of the largest programs that the process compiles.

A variant is another way to train, and may have a block of its own, which is added, too. Variants
run with everything sent, beside the original, in two processes. These may take their programs from
JAX's cache, so that no bytes are read.
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

BLOCK = re.compile(r'^if VARIANT == "(\w+)":\n((?: .*\n|\n)+)', re.MULTILINE)

_GRID = AbstractMesh((2, 2, 2), ("hosts", "fsdp", "tp"))
MESHES = {
    "linen_lm": _GRID,
    "tunix_qwen3": _GRID,
    "equinox_lm": AbstractMesh((8,), ("hosts",)),
    "keras_fit": AbstractMesh((2, 4), ("hosts", "model")),
    "maxtext_train": AbstractMesh((2, 2, 2), ("data", "fsdp", "tensor")),
    "maxtext_updates": AbstractMesh((2, 2, 2), ("data", "fsdp", "tensor")),
    "maxtext_local": AbstractMesh((2, 2, 2), ("diloco", "fsdp", "tensor")),
}


class Run(NamedTuple):
    """Losses and bytes of one run of a trainer."""

    losses: list[float]
    across: float  # bytes that a device receives in one step by collectives that cross hosts
    inside: float  # bytes that it receives in one step by all others


# Losses of these differ from the original's: see results/trainers.md.
UNLIKE = {"maxtext_updates", "dropout"}


def without(script: str) -> str:
    """The original: the script without the added lines and the blocks of variants."""
    script = BLOCK.sub("", script)
    return "".join(line for line in script.splitlines(True) if not line.endswith("# +\n"))


def added(script: str, variant: str = "plain") -> int:
    """The number of added lines, for a variant."""
    blocks = (block[2].split("\n") for block in BLOCK.finditer(script) if block[1] == variant)
    return script.count("# +\n") + sum(bool(line) for block in blocks for line in block)


def in_four_bits(script: str) -> str:
    """The script with another exchange, of all values in four bits."""
    assert EXCHANGE in script
    return script.replace(EXCHANGE, IN_FOUR_BITS)


def _started(
    arguments: list[Path | str], flags: str, steps: int, density: float, timeout: float, **env: str
) -> str:
    """What a program prints, on eight emulated devices.

    Raises:
        RuntimeError: the program failed.
    """
    env = (
        os.environ
        | env
        | {
            "XLA_FLAGS": f"--xla_force_host_platform_device_count=8 {flags}",
            "JAX_PLATFORMS": "cpu",
            "STEPS": str(steps),
            "DENSITY": str(density),
            "PYTHONPATH": os.pathsep.join(
                [str(HERE.parents[1]), str(HERE), os.environ.get("PYTHONPATH", "")]
            ),
        }
    )
    done = subprocess.run(
        [sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=timeout
    )
    if done.returncode:
        raise RuntimeError(f"{done.stdout}\n{done.stderr}")
    return done.stdout


def _losses(text: str, steps: int) -> list[float]:
    losses = [float(x) for x in re.findall(r"^loss \d+ (\S+)", text, re.MULTILINE)]
    if len(losses) != steps:
        raise RuntimeError(f"{len(losses)} losses of {steps}:\n{text}")
    return losses


def run(name: str, script: str, steps: int, density: float = 1.0, timeout: float = 600) -> Run:
    """Runs the script of a trainer in a process of its own, on eight emulated devices.

    Raises:
        RuntimeError: the script failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trainer.py"
        path.write_text(script)
        flags = f"--xla_dump_to={folder}/hlo --xla_dump_hlo_as_text"
        # A program that comes out of JAX's cache would not be dumped.
        no_cache = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
        losses = _losses(_started([path], flags, steps, density, timeout, **no_cache), steps)
        programs = [file.read_text() for file in Path(folder).glob("hlo/*after_optimizations.txt")]
        on_all = sorted((text for text in programs if "num_partitions=8" in text), key=len)
        each = [jaxsparse.wire_bytes(text, mesh=MESHES[name]) for text in on_all[-3:]]
    workers = MESHES[name].axis_names[0]
    across = max(moved.across(workers).received for moved in each)
    inside = max(moved.within(workers).received for moved in each)
    return Run(losses, across, inside)


def run_variants(
    script: str, variants: list[str], steps: int, density: float = 1.0, timeout: float = 3600
) -> dict[str, list[float]]:
    """The losses of each variant, or none if it failed, all in one process.

    Raises:
        RuntimeError: the process failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trainer.py"
        path.write_text(script)
        text = _started([HERE / "maxtext_tiny.py", path, *variants], "", steps, density, timeout)
    parts = re.split(r"^variant (\w+)$", text, flags=re.MULTILINE)[1:]
    print(*re.findall("^failed .*", text, re.MULTILINE), sep="\n", file=sys.stderr)
    each = dict(zip(parts[::2], parts[1::2]))
    return {
        name: [] if "\nfailed " in part else _losses(part, steps) for name, part in each.items()
    }


def furthest(losses: list[float], original: list[float]) -> float:
    """The largest relative difference between the losses of a step."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, original, strict=True))


def print_variants(name: str, script: str, variants: list[str], steps: int) -> bool:
    """Prints a row for each variant. Returns whether all have the original's losses."""
    original = run_variants(without(script), variants, steps)
    full = run_variants(script, variants, steps)
    head = "lines added | first loss | last loss | largest difference"
    print(f"| {name}, all sent | {head} |", "|---" * 5 + "|", sep="\n")
    is_good = True
    for variant in variants:
        lines, losses = added(script, variant), full[variant]
        if not losses or not original[variant]:
            print(f"| {variant} | {lines} | fails | | |")
            is_good = False
            continue
        far = furthest(losses, original[variant])
        print(f"| {variant} | {lines} | {losses[0]:.6f} | {losses[-1]:.6f} | {far:.1e} |")
        is_good &= variant in UNLIKE or far <= TOLERANCE
    if {"plain", "resumed"} <= set(variants):
        small = run_variants(script, ["plain", "resumed"], steps, 0.01)
        far = furthest(small["resumed"], small["plain"])
        print(f"resumed and never stopped, 1 % sent: last loss {small['plain'][-1]:.6f}, {far:.1e}")
        is_good &= far <= TOLERANCE
    return is_good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trainers", nargs="+", choices=MESHES)
    parser.add_argument("--steps", type=int, default=10, help="(default: 10)")
    parser.add_argument(
        "--variants", nargs="+", default=[], help="variants of maxtext_tiny.py, instead of bytes"
    )
    args = parser.parse_args()
    if args.variants:
        scripts = {name: (HERE / f"{name}.py").read_text() for name in args.trainers}
        good = [print_variants(*item, args.variants, args.steps) for item in scripts.items()]
        sys.exit(0 if all(good) else "losses differ, or a variant failed")
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
            far = furthest(each.losses, original.losses)
            print(f"| {title} | {losses} | {far:.1e} | {moved} |", flush=True)
        is_like = name in UNLIKE or furthest(full.losses, original.losses) <= TOLERANCE
        failed |= added(script) > MOST_LINES or not is_like
    sys.exit("losses differ, or too many lines were added" if failed else 0)


if __name__ == "__main__":
    main()
