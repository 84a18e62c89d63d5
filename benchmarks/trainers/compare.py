"""Runs trainers that others wrote, as they are and with the lines that compress between hosts.

    pip install -r benchmarks/trainers/requirements.txt
    python benchmarks/trainers/compare.py linen_lm equinox_lm tunix_qwen3 keras_fit
    python benchmarks/trainers/compare.py keras_fit --variants clip overflow
    python benchmarks/trainers/compare.py maxtext_train --variants clip tokens

A trainer is a script. Its lines that end in "# +" are added for jaxsparse. Without them it is the
original, which `jax.jit` runs on the same mesh. The compressed trainer runs three times: with a
budget for everything, where its losses must be the original's, with 1 %, and with all values in
four bits. Bytes are those that a device receives in a step, or in the exchange of several. They
are read from the dump of the largest programs that the process compiles.

A variant is another way to train, and may have a block of its own, which is added, too. Variants
run beside the original with everything sent, and with 1 %. Those of MaxText take three processes,
and those of other trainers one each. Bytes of a variant are those of the original and of 1 %.
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
TOLERANCE = 1e-6  # relative tolerance of losses
# The exchange of all scripts, and what replaces it.
IN_FOUR_BITS = "jaxsparse.spardl(DENSITY", 'jaxsparse.quantized("int4"'

BLOCK = re.compile(r"^if VARIANT (?:==|in) (.+):\n((?: .*\n|\n)+)", re.MULTILINE)

_GRID = AbstractMesh((2, 2, 2), ("hosts", "fsdp", "tp"))
MESHES = {
    "linen_lm": _GRID,
    "tunix_qwen3": _GRID,
    "equinox_lm": AbstractMesh((8,), ("hosts",)),
    "kauldron_tiny": AbstractMesh((8,), ("devices",)),
    "levanter_tiny": AbstractMesh((4, 2), ("data", "replica")),
    "keras_fit": AbstractMesh((2, 4), ("hosts", "model")),
    "maxtext_train": AbstractMesh((2, 2, 2), ("data", "fsdp", "tensor")),
    "maxtext_local": AbstractMesh((2, 2, 2), ("diloco", "fsdp", "tensor")),
}


class Run(NamedTuple):
    """Losses and bytes of one run of a trainer."""

    losses: list[float]
    across: float  # bytes that a device receives in one step by collectives that cross hosts
    inside: float  # bytes that it receives in one step by all others


# Losses of these differ from the original's: see results/trainers.md.
UNLIKE = {"updates", "dropout", "float16"}
# Variants that stop and go on, and the run that never stops, whose losses they must have.
NEVER_STOPPED = {"resumed": "plain", "streaming_resumed": "streaming"}


def without(script: str) -> str:
    """The original: the script without the added lines and the blocks of variants."""
    script = BLOCK.sub("", script)
    return "".join(line for line in script.splitlines(True) if not line.endswith("# +\n"))


def added(script: str, variant: str = "plain") -> int:
    """The number of added lines, for a variant."""
    blocks = (
        block[2].split("\n") for block in BLOCK.finditer(script) if f'"{variant}"' in block[1]
    )
    return script.count("# +\n") + sum(bool(line) for block in blocks for line in block)


def _started(
    arguments: list[Path | str],
    steps: int,
    density: float,
    dumps: Path | None,
    variant: str = "plain",
) -> str:
    """What a program prints, on eight emulated devices. XLA's programs are dumped into a folder.

    Raises:
        RuntimeError: the program failed.
    """
    flags = ["--xla_force_host_platform_device_count=8"]
    # On a busy machine a device may reach a collective later than the 40 s after which XLA ends.
    flags += ["--xla_cpu_collective_call_terminate_timeout_seconds=600"]
    paths = [str(HERE.parents[1]), str(HERE), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {
        # Threads of XLA. With one a device, collectives that do not depend on each other can wait
        # in all of them for partners that then have none.
        "NPROC": "64",
        "JAX_PLATFORMS": "cpu",
        "STEPS": str(steps),
        "DENSITY": str(density),
        "VARIANT": variant,
        "PYTHONPATH": os.pathsep.join(paths),
    }
    if dumps:  # a program that comes out of JAX's cache would not be dumped
        flags += [f"--xla_dump_to={dumps}", "--xla_dump_hlo_as_text"]
        env |= {"JAX_ENABLE_COMPILATION_CACHE": "false", "DUMPS": str(dumps)}
    env["XLA_FLAGS"] = " ".join(flags)
    done = subprocess.run(
        [sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=3600
    )
    if done.returncode:
        raise RuntimeError(f"{done.stdout}\n{done.stderr}")
    return done.stdout


def _run(name: str, text: str, steps: int, dumps: Path | None) -> Run:
    """Losses that a trainer printed, and bytes of the largest programs in a folder.

    Raises:
        RuntimeError: a loss is missing.
    """
    losses = [float(x) for x in re.findall(r"^loss \d+ (\S+)", text, re.MULTILINE)]
    if len(losses) != steps:
        raise RuntimeError(f"{len(losses)} losses of {steps}:\n{text}")
    if dumps is None:
        return Run(losses, 0.0, 0.0)
    step = "*train_step" if name == "levanter_tiny" else ""  # it makes its state in a program, too
    programs = [file.read_text() for file in dumps.glob(f"{step}*after_optimizations.txt")]
    on_all = sorted((text for text in programs if "num_partitions=8" in text), key=len)
    each = [jaxsparse.wire_bytes(text, mesh=MESHES[name]) for text in on_all[-3:]]
    workers = "replica" if name == "levanter_tiny" else MESHES[name].axis_names[0]
    across = max(moved.across(workers).received for moved in each)
    inside = max(moved.within(workers).received for moved in each)
    return Run(losses, across, inside)


def run(
    name: str,
    script: str,
    steps: int,
    density: float = 1.0,
    variant: str = "plain",
    reads_bytes: bool = True,
) -> Run:
    """Runs the script of a trainer in a process of its own, on eight emulated devices.

    Raises:
        RuntimeError: the script failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path, dumps = Path(folder) / "trainer.py", Path(folder) / "hlo" if reads_bytes else None
        path.write_text(script)
        return _run(name, _started([path], steps, density, dumps, variant), steps, dumps)


def run_variants(
    name: str,
    script: str,
    variants: list[str],
    steps: int,
    density: float = 1.0,
    reads_bytes: bool = True,
) -> dict[str, Run]:
    """Runs a script in variants, those of MaxText in one process. Those that fail are left out.

    Raises:
        RuntimeError: the process of MaxText failed.
    """
    if not name.startswith("maxtext"):
        found = {}
        for variant in variants:
            try:
                found[variant] = run(name, script, steps, density, variant, reads_bytes)
            except RuntimeError as error:
                print("failed", variant, error, file=sys.stderr)
        return found
    with tempfile.TemporaryDirectory() as folder:
        path, dumps = Path(folder) / "trainer.py", Path(folder) / "hlo" if reads_bytes else None
        path.write_text(script)
        program: list[Path | str] = [HERE / "maxtext_tiny.py", path, *variants]
        text = _started(program, steps, density, dumps)
        parts = re.split(r"^variant (\w+)$", text, flags=re.MULTILINE)[1:]
        print(*re.findall("^failed .*", text, re.MULTILINE), sep="\n", file=sys.stderr)
        return {
            variant: _run(name, part, steps, dumps and dumps / variant)
            for variant, part in zip(parts[::2], parts[1::2])
            if "\nfailed " not in part
        }


def furthest(losses: list[float], original: list[float]) -> float:
    """The largest relative difference between the losses of a step."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, original, strict=True))


def print_variants(name: str, script: str, variants: list[str], steps: int) -> bool:
    """Prints a row for each variant. Returns whether all have the original's losses."""
    like = {variant: NEVER_STOPPED.get(variant, variant) for variant in variants}
    original = run_variants(name, without(script), list(dict.fromkeys(like.values())), steps)
    full = run_variants(name, script, variants, steps, reads_bytes=False)
    small = run_variants(name, script, variants, steps, 0.01)
    head = "lines added | first loss | last loss | largest difference"
    head += " | B across hosts, original | 1 % sent | B inside, original | 1 % sent"
    print(f"| {name} | {head} |", "|---" * 9 + "|", sep="\n")
    is_good = True
    for variant in variants:
        lines = added(script, variant)
        if variant not in full or variant not in small or like[variant] not in original:
            print(f"| {variant} | {lines} | fails | | | | | | |")
            is_good = False
            continue
        one, losses, sent = original[like[variant]], full[variant].losses, small[variant]
        far = furthest(losses, one.losses)
        moved = (one.across, sent.across, one.inside, sent.inside)
        print(
            f"| {variant} | {lines} | {losses[0]:.6f} | {losses[-1]:.6f} | {far:.1e} |",
            *(f"{x:,.0f} |" for x in moved),
        )
        is_good &= variant in UNLIKE or far <= TOLERANCE
    for variant in (v for v in variants if v in NEVER_STOPPED and v in small):
        if (other := small.get(like[variant])) is not None:
            far = furthest(small[variant].losses, other.losses)
            last = f"last loss {other.losses[-1]:.6f}, {far:.1e}"
            print(f"{variant} and {like[variant]}, 1 % sent: {last}")
            is_good &= far <= TOLERANCE
    return is_good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trainers", nargs="+", choices=MESHES)
    parser.add_argument("--steps", type=int, default=10, help="(default: 10)")
    parser.add_argument(
        "--variants", nargs="+", default=[], help="of the trainer, in a table of their own"
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
            (f"{lines}, in four bits", run(name, script.replace(*IN_FOUR_BITS), args.steps)),
        ):
            losses = f"{each.losses[0]:.6f} | {each.losses[-1]:.6f}"
            moved = f"{each.across:,.0f} | {each.inside:,.0f}"
            far = furthest(each.losses, original.losses)
            print(f"| {title} | {losses} | {far:.1e} | {moved} |", flush=True)
        is_like = name in UNLIKE or furthest(full.losses, original.losses) <= TOLERANCE
        failed |= not is_like
    sys.exit("losses differ" if failed else 0)


if __name__ == "__main__":
    main()
