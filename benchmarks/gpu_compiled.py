"""Counts what XLA makes of the kernels and updates of gpu.py, for a GPU that need not be there.

    pip install "jax[cuda12]"
    python benchmarks/gpu_compiled.py --markdown compiled.md

Times need the GPU, but a compiled program tells the kernels that a call starts, turns of loops, the
memory besides arguments and results, and about how many bytes go through the memory, as a multiple
of those that must. JAX's plugin for CUDA compiles for the H200 without any device.
"""

import argparse
import datetime
import math
import re
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gpu_kernels
import gpu_repeats
import gpu_report
import gpu_steps
import gpu_target
import jax
import jax.numpy as jnp
from gpu import exponent
from gpu_stage import Program
from jax.sharding import SingleDeviceSharding

from jaxsparse.traffic import hlo

_SECTOR = 32  # least number of bytes that are read
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("opt-barrier", "partition-id", "add-dependency"),
}


class Work(NamedTuple):
    """The work of one call of a computation. The branch with the fewest kernels counts."""

    kernels: int
    bytes: float  # an estimate: as if nothing of one kernel were left in the cache for the next
    loops: tuple[str, ...]  # "turns x kernels of a turn [loops in it]"; ?: depends on data


def work(module: hlo.Module, name: str) -> Work:
    """The work of all instructions of a computation.

    A loop whose number of turns depends on data counts as one turn. A sort counts as one kernel,
    which it is not, so "sort" is then among the loops.
    """
    kernels, moved, loops = 0, 0.0, list[str]()
    computation = module.computations[name]
    for instruction in computation.instructions.values():
        if instruction.opcode in _FREE or instruction.opcode.endswith("-done"):
            continue
        if instruction.opcode == "while":
            turns = hlo.trip_count(instruction)
            body = work(module, instruction.callees["body"][0])
            inside = f" [{', '.join(body.loops)}]" if body.loops else ""
            loops.append(f"{'?' if turns is None else turns} x {body.kernels}{inside}")
            times = 1 if turns is None else turns
            part = Work(times * body.kernels, times * body.bytes, ())
        elif instruction.opcode == "conditional":
            roles = ("true_computation", "false_computation", "branch_computations")
            branches = [b for role in roles for b in instruction.callees.get(role, ())]
            part = min((work(module, b) for b in branches), key=lambda part: part.kernels)
        elif instruction.opcode == "call":
            part = work(module, instruction.callees["to_apply"][0])
        else:
            part = Work(1, _traffic(module, computation, instruction), ())
            inner = (
                module.computations[instruction.callees["calls"][0]].instructions.values()
                if instruction.opcode == "fusion"
                else (instruction,)
            )
            loops += ["sort" for each in inner if each.opcode == "sort"]
        loops += part.loops
        kernels, moved = kernels + part.kernels, moved + part.bytes
    return Work(kernels, moved, tuple(loops))


def _traffic(
    module: hlo.Module, computation: hlo.Computation, instruction: hlo.Instruction
) -> float:
    """Bytes that a kernel reads and writes. If it takes parts of an operand, the parts count."""
    sizes = [
        sum(s.nbytes for s in hlo.parse_type(computation.instructions[name].type))
        for name in instruction.operands
    ]
    if instruction.opcode != "fusion":
        return sum(sizes) + _size(instruction)
    fused = module.computations[instruction.callees["calls"][0]]
    total = 0.0
    for parameter in fused.instructions.values():
        if parameter.opcode == "parameter":
            needed = _needed(fused, parameter.name)
            total += min(sizes[int(parameter.arguments[0])], needed)
    roots = fused.root.operands if fused.root.opcode == "tuple" else (fused.root.name,)
    return total + sum(_written(fused, name) for name in roots)


def _size(instruction: hlo.Instruction) -> float:
    return float(sum(shape.nbytes for shape in hlo.parse_type(instruction.type)))


def _written(fused: hlo.Computation, name: str) -> float:
    """Bytes of a result that a fusion writes. If it is updated in place, the update counts."""
    root = fused.instructions[name]
    if root.opcode == "bitcast":
        return _written(fused, root.operands[0])
    if root.opcode == "dynamic-update-slice":
        return _size(fused.instructions[root.operands[1]])
    if root.opcode == "scatter":
        # Each update reads and writes a sector, or as many as it fills.
        indices, updates = (fused.instructions[operand] for operand in root.operands[1:3])
        return min(2 * _sectors(_size(updates), _size(indices) / 4), 2 * _size(root))
    return _size(root)


def _needed(fused: hlo.Computation, name: str) -> float:
    """Bytes of a value that a fusion reads, or infinity for all of them."""
    total = 0.0
    for user in fused.instructions.values():
        if name not in user.operands:
            continue
        is_first = user.operands[0] == name
        if user.opcode == "bitcast":
            total += _needed(fused, user.name)
        elif user.opcode in ("slice", "dynamic-slice"):
            total += _size(user)
        elif user.opcode == "gather" and is_first:
            found = re.search(r"slice_sizes=\{([\d,]+)\}", user.structure)
            assert found is not None
            elements = math.prod(s for shape in hlo.parse_type(user.type) for s in shape.dims)
            total += _sectors(_size(user), elements / math.prod(map(int, found[1].split(","))))
        elif user.opcode in ("scatter", "dynamic-update-slice") and is_first:
            pass  # updated in place, which counts as written
        else:
            return math.inf
    return total


def _sectors(size: float, pieces: float) -> float:
    """Bytes that are moved for scattered pieces that have `size` bytes together."""
    return max(size, _SECTOR * pieces)


class Shapes(gpu_kernels.Inputs):
    """Shapes of the inputs of all kernels, without the inputs."""

    def made(self, function: Callable[..., Any], *args: Any) -> Any:
        """The shapes of function(*args)."""
        return jax.eval_shape(function, *args)


class Compiled(NamedTuple):
    """Numbers of a compiled program."""

    work: Work
    temporary: int  # bytes besides arguments and results
    all_bytes: int  # bytes with arguments and results
    seconds: float


def compiled(program: Program, device: Any, donate: tuple[int, ...] = ()) -> Compiled:
    """Compiles a program for a device that is only described."""
    function, given = program
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(device)),
        given,
    )
    start = time.perf_counter()
    done = jax.jit(function, donate_argnums=donate).lower(*placed).compile()
    seconds = time.perf_counter() - start
    module, memory = hlo.parse(str(done.as_text())), done.memory_analysis()
    assert memory is not None  # the plugin always tells it
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return Compiled(
        work(module, module.entry),
        memory.temp_size_in_bytes,
        kept - memory.alias_size_in_bytes + memory.temp_size_in_bytes,
        seconds,
    )


def kernels(args: argparse.Namespace, device: Any) -> gpu_report.Table:
    """A table of all kernels at one size, and of how many a CPU's form would start."""
    inputs = Shapes(2**args.size, args.density)
    rows = []
    for name, kernel in gpu_kernels.KERNELS.items():
        if args.only and not any(word in name for word in args.only):
            continue
        of_cpu = ""
        if name in gpu_kernels.TWO_FORMS:
            gpu_kernels.choose_forms("default")
            of_cpu = f"{compiled(kernel.program(inputs), device).work.kernels}"
            gpu_kernels.choose_forms("cuda")  # as for all that follow
        found = compiled(kernel.program(inputs), device)
        moved = found.work.bytes / kernel.traffic(inputs)
        loops = ", ".join(found.work.loops) or "none"
        cells = [of_cpu, str(found.work.kernels), loops, f"{moved:.2f}"]
        rows.append([name, *cells, f"{found.temporary / 2**20:.1f}"])
        print(f"{name}: {rows[-1][1:]}, compiled in {found.seconds:.1f} s", flush=True)
    headers = ["kernel", "started in a CPU's form", "started", "loops: turns x started"]
    headers += ["bytes over the least", "MiB besides"]
    return gpu_report.Table(f"Kernels at 2^{args.size} float32", headers, rows, [])


def exchanges(args: argparse.Namespace, device: Any) -> gpu_report.Table:
    """A table of every system's exchange, at 1 %."""
    rows = []
    size = 2**args.exchange_size
    x = jax.ShapeDtypeStruct((args.workers, size), jnp.float32)
    for name, run in gpu_repeats.exchanges(size, args.workers).items():
        if args.only and not any(word in name for word in args.only):
            continue
        found = compiled((run, (x,)), device)
        moved = found.work.bytes / (4 * size * args.workers)
        cells = [str(found.work.kernels), ", ".join(found.work.loops) or "none", f"{moved:.1f}"]
        rows.append([name, *cells])
        print(f"{name}: {rows[-1][1:]}, compiled in {found.seconds:.1f} s", flush=True)
    title = f"Exchanges of 2^{args.exchange_size} float32, {args.workers} simulated workers"
    headers = ["system", "started", "loops: turns x started", "words moved an element and worker"]
    return gpu_report.Table(title, headers, rows, [])


def updates(args: argparse.Namespace, device: Any) -> gpu_report.Table:
    """A table of whole updates of simulated workers."""
    rows = []
    for name, tx in gpu_steps.methods(args.density, args.params).items():
        if args.only and not any(word in name for word in args.only):
            continue
        update = gpu_steps.update_of(tx, args.params, args.workers)
        shapes = jax.eval_shape(update.start)
        gradients = jax.eval_shape(update.gradients, jax.random.key(0))
        found = compiled((update.step, (shapes, gradients)), device, donate=(0,))
        cells = [str(found.work.kernels), ", ".join(found.work.loops) or "none"]
        per_worker = found.work.bytes / (4 * args.params * args.workers)
        sizes = [f"{found.temporary / 2**30:.2f}", f"{found.all_bytes / 2**30:.2f}"]
        rows.append([name, *cells, f"{per_worker:.1f}", *sizes])
        print(f"{name}: {rows[-1][1:]}, compiled in {found.seconds:.1f} s", flush=True)
    title = f"Updates of {args.params} parameters, {args.workers} simulated workers"
    headers = ["method", "started", "loops: turns x started", "words moved a parameter and worker"]
    return gpu_report.Table(title, [*headers, "GiB besides", "GiB in all"], rows, [])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=exponent, default=27, help="2^E elements (27)", metavar="E")
    parser.add_argument("--exchange-size", type=exponent, default=20, metavar="E", help="(20)")
    parser.add_argument("--density", type=float, default=0.001, help="k / size (0.001)")
    parser.add_argument("--params", type=int, default=100_000_000, help="of an update")
    parser.add_argument("--workers", type=int, default=8, help="that are simulated (8)")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="what has one in its name")
    parser.add_argument("--markdown", metavar="FILE", help="also write the tables here")
    args = parser.parse_args()
    (device,) = gpu_target.h200()
    tables = [kernels(args, device), exchanges(args, device), updates(args, device)]
    for table in tables:
        table.show()
    if args.markdown:
        command = shlex.join(["python", "benchmarks/gpu_compiled.py", *sys.argv[1:]])
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        head = f"## Compiled for an NVIDIA H200\n\n`{command}`, {date}, jax {jax.__version__}\n"
        text = "\n".join([head, *(table.markdown() for table in tables if table.rows)])
        Path(args.markdown).write_text(text)


if __name__ == "__main__":
    main()
