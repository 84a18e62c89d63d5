"""The schedule that XLA:GPU makes of a training step: what hides behind the backward pass.

    pip install jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12
    python benchmarks/schedules.py
    python benchmarks/schedules.py --hosts 64 --only top_k spardl
    python benchmarks/schedules.py --hosts 2 --devices 8 --width 6144

No GPU is needed: the step is compiled ahead of time for hosts of one H100, or of more, over which
parameters and rows are cut (FSDP). It has six square layers, and a bucket for each. D is a matrix
product, [ and ] are start and done of a collective over hosts, { and } of one inside them, and what
stands between start and done can run beside it; c and i are such that nothing runs beside.
Temporaries are in units of the parameters of a device, d floats.
"""

import argparse
import os
import re
from collections.abc import Callable

# These stand before jax is imported: it then takes the plugin without a GPU.
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
os.environ.pop("JAX_PLATFORMS", None)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import jaxsparse
from jaxsparse.traffic import hlo

LAYERS, ROWS = 6, 512
H100 = """gpu_device_info {
threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.755
device_memory_size: 79096512512 shared_memory_per_block_optin: 232448
cuda_compute_capability { major: 9 } registers_per_core_limit: 65536
registers_per_block_limit: 65536 }
platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3\""""
COLLECTIVE = re.compile(r"all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|async")
PRODUCT = re.compile(r"= .*? (dot|convolution)\(|calls=%\S*gemm|call_target=\S*(gemm|cublas|conv)")
STEPS: dict[str, Callable[..., optax.GradientTransformation] | None] = {
    "plain jit": None,
    "dense": jaxsparse.dense,
    "int8": lambda **cut: jaxsparse.quantized("int8", **cut),
    "top_k": lambda **cut: jaxsparse.top_k(0.01, **cut),
    "sketched_sgd": lambda **cut: jaxsparse.sketched_sgd(10, **cut),
    "spardl": lambda **cut: jaxsparse.spardl(0.01, **cut),
    "int8, one bucket": lambda **cut: jaxsparse.quantized("int8", bucket_size=2**30, **cut),
    "int8, delay=1": lambda **cut: jaxsparse.quantized("int8", delay=1, **cut),
    "spardl, delay=1": lambda **cut: jaxsparse.spardl(0.01, delay=1, **cut),
}


def mesh_of(hosts: int, devices: int) -> Mesh:
    """H100s to compile for, so many a host."""
    found = topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=H100, topology=f"{hosts}x1x{devices}"
    )
    axis_types = (AxisType.Auto,) * 2
    return Mesh(
        np.array(found.devices).reshape(hosts, devices), ("data", "fsdp"), axis_types=axis_types
    )


def compiled(
    make: Callable[..., optax.GradientTransformation] | None, mesh: Mesh, width: int
) -> jax.stages.Compiled:
    """A training step with the exchange that `make` makes, compiled for a mesh. None: plain jit."""
    kernels, optimizer = [P("fsdp")] * LAYERS, optax.sgd(0.01)
    tx = optimizer
    if make is not None:
        tx = optax.chain(make(mesh=mesh, specs=kernels), optimizer)
    on = lambda *axes: NamedSharding(mesh, P(*axes))
    rows = on(("data", "fsdp")) if make is None else on("fsdp")

    def loss_of(params: list[jax.Array], x: jax.Array) -> jax.Array:
        for kernel in params:
            x = jax.lax.with_sharding_constraint(x, rows)
            x = jnp.tanh(x @ jax.lax.with_sharding_constraint(kernel, on()))
        return jnp.mean(x * x)

    differentiate = jax.value_and_grad(loss_of)
    if make is not None:
        differentiate = jaxsparse.value_and_grad(loss_of, mesh=mesh)

    def step(state, x):
        params, opt_state = state
        loss, grads = differentiate(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss.mean()

    params = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * LAYERS
    put = lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on(*spec))
    state = jax.eval_shape(tx.init, params)
    state = jax.tree.map(put, state, jaxsparse.specs(state))
    x = put(jax.ShapeDtypeStruct((mesh.size * ROWS, width), jnp.float32), P(("data", "fsdp")))
    given = ([put(x, spec) for x, spec in zip(params, kernels)], state)
    cut = jax.tree.map(lambda x: x.sharding, given)
    step = jax.jit(step, donate_argnums=0, out_shardings=(cut, on()))
    return step.lower(given, x).compile()


def schedule(text: str, devices: int = 1) -> str:
    """Products, and starts and ends of collectives, in the order of a compiled program.

    Args:
        text: of the program.
        devices: of a host.
    """
    module, found, started = hlo.parse(text), "", dict[str, bool]()
    for each in module.computations[module.entry].instructions.values():
        if PRODUCT.search(f"= {each.type} {each.opcode}(){each.attributes}"):
            found += "D"
        elif each.opcode.endswith("-done"):
            found += "}]"[started[each.operands[0]]]
        elif COLLECTIVE.search(each.opcode):
            named = [name for names in each.callees.values() for name in names]
            called = [x for n in named for x in module.computations[n].instructions.values()]
            moved = [x for x in (each, *called) if re.search("_groups=|_pairs=", x.structure)]
            groups = [group for x in moved for group in module.groups(x)]
            started[each.name] = any(len({i // devices for i in group}) > 1 for group in groups)
            found += ("{[" if each.opcode.endswith("-start") else "ic")[started[each.name]]
    return found


def hidden(made: str) -> int:
    """The number of products between start and done of a collective over hosts."""
    count = running = 0
    for each in made:
        running += (each == "[") - (each == "]")
        count += each == "D" and running > 0
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=8, help="default: 8")
    parser.add_argument("--devices", type=int, default=1, help="H100s a host (default: 1)")
    parser.add_argument("--width", type=int, default=2048, help="of a layer (default: 2048)")
    parser.add_argument("--only", nargs="+", choices=STEPS, default=[*STEPS], metavar="STEP")
    args = parser.parse_args()
    mesh = mesh_of(args.hosts, args.devices)
    for name in args.only:
        program = compiled(STEPS[name], mesh, args.width)
        made = schedule(program.as_text() or "", args.devices)
        memory = program.memory_analysis()
        assert memory is not None
        kept = memory.temp_size_in_bytes / (4 * LAYERS * args.width**2 / args.devices)
        print(f"{name:16s} {made}  {hidden(made)} beside, temporaries {kept:.1f} d", flush=True)


if __name__ == "__main__":
    main()
