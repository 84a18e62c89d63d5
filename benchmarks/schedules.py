"""The schedule that XLA:GPU makes of a training step: what hides behind the backward pass.

    pip install jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12
    python benchmarks/schedules.py
    python benchmarks/schedules.py --hosts 64 --only top_k spardl

No GPU is needed: the step is compiled ahead of time for hosts of one H100. It has six layers of
2048 x 2048, and a bucket for each. D is a matrix product, [ and ] are start and done of a
collective, and what stands between them can run beside it. Temporaries are in units of the
parameters, d floats.
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

WIDTH, LAYERS, ROWS = 2048, 6, 512
SIZE = WIDTH * WIDTH
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
STEPS: dict[str, Callable[[], optax.GradientTransformation] | None] = {
    "plain jit": None,
    "dense": jaxsparse.dense,
    "int8": lambda: jaxsparse.quantized("int8"),
    "top_k": lambda: jaxsparse.top_k(0.01),
    "sketched_sgd": lambda: jaxsparse.sketched_sgd(10),
    "spardl": lambda: jaxsparse.spardl(0.01),
    "int8, one bucket": lambda: jaxsparse.quantized("int8", bucket_size=LAYERS * SIZE),
    "int8, delay=1": lambda: jaxsparse.quantized("int8", delay=1),
    "spardl, delay=1": lambda: jaxsparse.spardl(0.01, delay=1),
}


def devices(hosts: int) -> list[jax.Device]:
    """H100s to compile for, one a host."""
    found = topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=H100, topology=f"{hosts}x1x1"
    )
    return list(found.devices)


def compiled(exchange: optax.GradientTransformation | None, hosts: int) -> jax.stages.Compiled:
    """A training step, compiled for these hosts. None: plain jit."""
    mesh = Mesh(np.array(devices(hosts)), ("data",), axis_types=(AxisType.Auto,))
    optimizer = optax.sgd(0.01)
    tx = optimizer if exchange is None else optax.chain(exchange, optimizer)

    def loss_of(params: list[jax.Array], x: jax.Array) -> jax.Array:
        for kernel in params:
            x = jnp.tanh(x @ kernel)
        return jnp.mean(x * x)

    differentiate = jax.value_and_grad(loss_of)
    if exchange is not None:
        differentiate = jaxsparse.value_and_grad(loss_of, mesh=mesh)

    def step(state, x):
        params, opt_state = state
        loss, grads = differentiate(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss.mean()

    params = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS
    state = jax.eval_shape(lambda params: (params, tx.init(params)), params)
    if exchange is not None:
        state = jax.eval_shape(lambda state: jaxsparse.shard(state, hosts), state)
    specs = jaxsparse.specs(state)
    put = lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
    x = put(jax.ShapeDtypeStruct((hosts * ROWS, WIDTH), jnp.float32), P("data"))
    lowered = jax.jit(step, donate_argnums=0).lower(jax.tree.map(put, state, specs), x)
    return lowered.compile()


def schedule(text: str) -> str:
    """Products, and starts and ends of collectives, in the order of a compiled program."""
    found = ""
    for line in text[text.index("ENTRY") :].split("\n"):
        if (op := re.search(r"= .*? ([\w\-]+)\(", line)) is None:
            continue
        if COLLECTIVE.search(op[1]):
            found += "[" if op[1].endswith("-start") else "]" if op[1].endswith("-done") else "c"
        elif PRODUCT.search(line):
            found += "D"
    return found


def hidden(made: str) -> int:
    """The number of products between start and done of a collective."""
    count = running = 0
    for each in made:
        running += (each == "[") - (each == "]")
        count += each == "D" and running > 0
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=8, help="of one H100 each (default: 8)")
    parser.add_argument("--only", nargs="+", choices=STEPS, default=[*STEPS], metavar="STEP")
    args = parser.parse_args()
    for name in args.only:
        make = STEPS[name]
        program = compiled(None if make is None else make(), args.hosts)
        made = schedule(program.as_text() or "")
        memory = program.memory_analysis()
        assert memory is not None
        kept = memory.temp_size_in_bytes / (4 * LAYERS * SIZE)
        print(f"{name:16s} {made}  {hidden(made)} beside, temporaries {kept:.1f} d", flush=True)


if __name__ == "__main__":
    main()
