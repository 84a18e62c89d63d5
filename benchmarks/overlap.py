"""Reads from a compiled training step what may run beside the exchange of gradients.

    python benchmarks/overlap.py
    python benchmarks/overlap.py --method top_k --layers 8 --bucket-size 262144 --repeats 20

With libtpu installed, but no TPU, or with JAX's plugin for CUDA, but no GPU, it shows what XLA's
scheduler makes of the step there:

    python benchmarks/overlap.py --topology h200:4
    python benchmarks/overlap.py --topology v5e:2x4
    python benchmarks/overlap.py --topology v5e:2x4 --method dense --async-all-reduce

For each collective of the step it prints how many computations of the backward pass the collective
depends on: by default, and with delay=1. If the backend's collectives are
asynchronous, it also counts the computations that the schedule puts between start and end. A
synchronous collective has nothing in between. Independent computations may run beside it only if
the backend runs several at the same time.

A computation belongs to the backward pass if JAX's name stack, which XLA keeps, says so.
"""

import os

# This stands before jax is imported, because a mesh needs devices.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import argparse
import functools
import statistics
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from timing import interleaved, save, where

import jaxsparse
from jaxsparse.outer.parallel import run_on_workers
from jaxsparse.traffic import hlo

COLLECTIVES = {
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
}
METHODS: dict[str, Callable[..., optax.GradientTransformation]] = {
    # In buckets, so that it is delayed as the others are.
    "dense": functools.partial(jaxsparse.error_feedback, jaxsparse.systems.Dense()),
    "sketched_sgd": functools.partial(jaxsparse.sketched_sgd, 10),
    "spardl": functools.partial(jaxsparse.spardl, 0.01),
    "sparcml": functools.partial(jaxsparse.sparcml, 4),
    "top_k": functools.partial(jaxsparse.top_k, 0.01),
    "true_top_k": functools.partial(jaxsparse.true_top_k, 1000),
}


MODES: dict[str, dict[str, Any]] = {"in order": {}, "delay": {"delay": 1}}

# NVIDIA's data sheet of the H200 SXM, and the limits of compute capability 9.0.
_H200 = """
gpu_device_info {
  name: "NVIDIA H200"
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  memory_bandwidth: 4800000000000
  device_memory_size: 151397597184
  l2_cache_size: 52428800
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_core: 233472
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
}
platform_name: "CUDA"
runtime_version { major: 12 minor: 8 }
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
"""


def h200(count: int = 1) -> list[Any]:
    """Devices of one host, for which programs can be compiled, and nothing else.

    Call it before JAX looks for devices. If there are GPUs, it asks none. It ends the program if
    JAX's plugin for CUDA is not installed.
    """
    jax.config.update("jax_platforms", "cpu")
    # Variants of a kernel can't be tried to find the fastest.
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"
    try:
        described = topologies.get_topology_desc(
            platform="cuda", target_config=_H200, topology=f"1x1x{count}"
        )
    except (NotImplementedError, RuntimeError) as error:
        sys.exit(f'{error}: pip install "jax[cuda12]", of the same version as jax')
    return list(described.devices)


class Row(NamedTuple):
    """One collective of a compiled step."""

    op: str
    operand_bytes: int
    backward: int  # number of the backward pass's computations that it depends on
    is_async: bool
    between: int  # computations scheduled between its start and its end
    between_backward: int  # number of the backward pass's among them


def rows(text: str) -> list[Row]:
    """The collectives of a compiled module's entry computation, in the order of its schedule."""
    module = hlo.parse(text)
    entry = module.computations[module.entry].instructions
    position = {name: i for i, name in enumerate(entry)}
    inside = {name: list(_inside(module, name)) for name in entry}
    ancestors: dict[str, frozenset[str]] = {}
    for name, instruction in entry.items():  # operands come first
        own = [o for o in instruction.operands if o in entry]
        ancestors[name] = frozenset(own).union(*(ancestors[o] for o in own))
    backward = {n for n in entry if any("transpose(" in x.op_name for _, x in inside[n])}
    work = {n for n, x in entry.items() if x.opcode not in _NO_WORK and not _is_part(x)}

    table = []
    for name, instruction in entry.items():
        sent = [(c, x) for c, x in inside[name] if _base(x) in COLLECTIVES]
        if (
            not sent
            or _is_end(instruction)
            or "async_collective_fusion" in str(instruction.callees)
        ):
            continue
        end = _end(name, entry)
        between = {n for n in work if end and position[name] < position[n] < position[end]}
        table.append(
            Row(
                op=_base(sent[0][1]),
                operand_bytes=sum(s.nbytes for c, x in sent for s in c.operand_shapes(x)),
                backward=len(ancestors[name] & backward & work),
                is_async=end is not None,
                between=len(between),
                between_backward=len(between & backward),
            )
        )
    return table


_NO_WORK = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}
# Names of fusions. TPUs cut a collective into pieces, and fuse these with the computations between
# two fusions of these names.
_FUSED_START, _FUSED_DONE = "async-collective-start", "async-collective-done"


def _base(instruction: hlo.Instruction) -> str:
    return instruction.opcode.removesuffix("-start")


def _is_end(instruction: hlo.Instruction) -> bool:
    ends = ("-done", "-update")
    return instruction.opcode.endswith(ends) or instruction.name.startswith(_FUSED_DONE)


def _is_part(instruction: hlo.Instruction) -> bool:
    return instruction.opcode.endswith("-start") or _is_end(instruction)


def _inside(module: hlo.Module, name: str) -> Iterable[tuple[hlo.Computation, hlo.Instruction]]:
    """An entry instruction and those that it calls, each with the computation that holds it."""
    entry = module.computations[module.entry]
    todo = [(entry, entry.instructions[name])]
    while todo:
        computation, instruction = todo.pop()
        yield computation, instruction
        for role, callees in instruction.callees.items():
            if role != "to_apply" or instruction.opcode == "call":
                for callee in map(module.computations.__getitem__, callees):
                    todo += [(callee, x) for x in callee.instructions.values()]


def _end(start: str, entry: dict[str, hlo.Instruction]) -> str | None:
    """The instruction that waits for an asynchronous collective. None for a synchronous one."""
    if start.startswith(_FUSED_START):
        return start.replace(_FUSED_START, _FUSED_DONE)
    if not entry[start].opcode.endswith(("-start", "-update")):
        return None
    ends = (n for n, x in entry.items() if start in x.operands and _is_end(x))
    end = next(ends, None)
    return _end(end, entry) if end and entry[end].opcode.endswith("-update") else end


_ASYNC: dict[str, str | bool] = {
    "xla_enable_async_all_reduce": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": "true",
}


def make_step(args: argparse.Namespace, mode: str, mesh: Mesh) -> tuple[Any, Any, Any]:
    """A training step of a multi-layer perceptron, its first state and a batch."""
    exchange = METHODS[args.method](bucket_size=args.bucket_size, **MODES[mode])
    tx = optax.chain(exchange, optax.sgd(0.01))

    def loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
        for kernel in params:
            x = jnp.tanh(x @ kernel)
        return jnp.mean(jnp.square(x))

    def step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), opt_state
        return new, jax.lax.pmean(value, "data")

    run = run_on_workers(step, mesh, donate_argnums=0)
    workers = mesh.shape["data"]

    def start() -> Any:
        rng = np.random.default_rng(0)
        kernel = rng.normal(size=(args.layers, args.width, args.width)) / args.width**0.5
        params = [jnp.asarray(k, jnp.float32) for k in kernel]
        return jaxsparse.shard((params, tx.init(params)), mesh)

    params = [jax.ShapeDtypeStruct((args.width,) * 2, jnp.float32)] * args.layers
    shapes = jax.eval_shape(lambda p: jaxsparse.shard((p, tx.init(p)), workers), params)
    specs = jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)),
        shapes,
        jaxsparse.specs(shapes),
    )
    batch = jax.ShapeDtypeStruct(
        (workers * args.batch, args.width),
        jnp.float32,
        sharding=NamedSharding(mesh, PartitionSpec("data")),
    )
    return run, start, run.lower(specs, batch).compile(_ASYNC if args.async_all_reduce else None)


def show(table: Iterable[Row]) -> None:
    for row in table:
        if row.is_async:
            beside = f"{row.between} computations run beside it, {row.between_backward} backward"
        else:
            beside = "synchronous"
        print(
            f"  {row.op:20} {row.operand_bytes:>12,} B  needs {row.backward:3} backward  {beside}"
        )


def main() -> None:
    args = flags().parse_args()
    if args.topology:
        devices: Any
        kind, _, count = args.topology.partition(":")
        if kind == "h200" and count.isdecimal():
            devices = h200(int(count))
        else:
            devices = topologies.get_topology_desc(args.topology, platform="tpu").devices
        found = {"jax": jax.__version__, "topology": args.topology, "kind": devices[0].device_kind}
        print(", ".join(f"{name} {value}" for name, value in found.items()))
    else:
        devices, found = jax.devices(), where()
    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))

    result: dict[str, Any] = {"where": found, "settings": vars(args), "modes": {}}
    runs = {}
    for mode in MODES:
        run, start, compiled = make_step(args, mode, mesh)
        table = rows(compiled.as_text())
        memory = compiled.memory_analysis()
        print(f"{mode}: {memory.temp_size_in_bytes:,} bytes of temporaries")
        show(table)
        result["modes"][mode] = {
            "collectives": [row._asdict() for row in table],
            "temporary_bytes": memory.temp_size_in_bytes,
        }
        runs[mode] = run, start
    if args.repeats and not args.topology:
        seconds = time_steps(runs, args, mesh)
        for mode, samples in seconds.items():
            print(f"{mode}: {1e3 * statistics.median(samples):.1f} ms a step")
            result["modes"][mode]["seconds"] = samples
    save(result, args.json)


def time_steps(
    runs: dict[str, Any], args: argparse.Namespace, mesh: Mesh
) -> dict[str, list[float]]:
    states = {mode: start() for mode, (_, start) in runs.items()}
    batch = jnp.ones((mesh.shape["data"] * args.batch, args.width), jnp.float32)

    def advance(mode: str) -> Any:
        states[mode], loss = runs[mode][0](states[mode], batch)
        return loss

    named: dict[str, Callable[[], Any]] = {mode: functools.partial(advance, mode) for mode in runs}
    return interleaved(named, args.repeats)


def flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--method", choices=METHODS, default="spardl", help="(default: spardl)")
    add("--layers", type=int, default=4, help="(default: 4)")
    add("--width", type=int, default=512, help="units of a layer (default: 512)")
    add("--batch", type=int, default=32, help="rows of a worker (default: 32)")
    add("--bucket-size", type=int, default=None, help="elements (default: all in one)")
    add("--repeats", type=int, default=0, help="timed steps (default: 0)")
    add("--topology", help="GPUs or TPUs to compile for, such as h200:4 or v5e:2x4")
    add("--async-all-reduce", action="store_true", help="sets XLA's options for it, on TPUs")
    add("--json", help="where to write the results")
    return parser


if __name__ == "__main__":
    main()
