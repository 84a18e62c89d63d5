r"""FSDP in few bits: what weights and gradients of few bits cost in loss, and the bytes they save.

    python benchmarks/fsdp.py --steps 400 --seeds 2
    python benchmarks/fsdp.py --layers

The transformer of transformer.py learns Python's library by AdamW at one rate, with 8 workers that
one device simulates. Losses are held-out, in nats a byte. Bytes are those that a device receives in
a step, read from a program that is compiled for 8 devices, over those of the parameters in float32.
"float32 / float32" is plain FSDP. The residual of 8 bits is float8_e4m3fn.

`--layers` compiles the gradient of a deeper model instead, whose loss gathers each layer where it
runs, in a scan and under `jax.checkpoint`. It prints what a device receives, and its temporaries,
both over float32 parameters. "by GSPMD" leaves all to JAX, and constrains a layer's weights whole.
"""

import argparse
import functools
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import transformer
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxsparse
from jaxsparse.arrays.printing import aligned
from jaxsparse.quantize import QSGD

W, WINDOWS, LENGTH, RATE = 8, 32, 64, 3e-3
# Formats of weights and of gradients, and the dtype of a residual.
ROWS: dict[str, tuple[Any, Any, str | None]] = {
    "float32 / float32": (None, None, None),
    "bfloat16 / bfloat16": ("bfloat16", "bfloat16", None),
    "int8 / int8": ("int8", "int8", None),
    "int8 / int4": ("int8", "int4", None),
    "int8 / QSGD 4 bits": ("int8", QSGD(4, 256), None),
    "int8 / int4, residual bfloat16": ("int8", "int4", "bfloat16"),
    "int8 / int4, residual 8 bits": ("int8", "int4", "float8_e4m3fn"),
    "int8 / int2": ("int8", "int2", None),
    "int8 / int2, residual bfloat16": ("int8", "int2", "bfloat16"),
    "int4 / int4": ("int4", "int4", None),
}


def start(seed: int) -> tuple[Any, Any]:
    model = transformer.Transformer(64, 2, 4, LENGTH, nnx.Rngs(seed))
    return nnx.split(model)


def step_of(name: str, graph: Any, specs: Any, steps: int, **where: Any) -> Any:
    weights, gradients, dtype = ROWS[name]
    loss_of = lambda params, batch: transformer.loss_of(nnx.merge(graph, params), batch)
    tx = optax.adamw(optax.warmup_cosine_decay_schedule(0, RATE, steps // 10, steps))

    def step(state: Any, batch: Any, number: Any) -> Any:
        params, opt_state, residual = state
        key = jax.random.fold_in(jax.random.key(0), number)
        gather = jaxsparse.Gather(weights, gradients, key, residual)
        of = jaxsparse.value_and_grad(loss_of, specs=specs, gather=gather, **where)
        loss, grads = of(params, batch)
        grads, residual = (grads, None) if dtype is None else grads
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, residual), loss.mean()

    def init(params: Any) -> Any:
        there = {} if dtype is None else {"dtype": dtype, **where}
        residual = jaxsparse.gather_residual(params, specs, **there) if there else None
        return params, tx.init(params), residual

    return init, jax.jit(step, donate_argnums=0)


def received(name: str) -> float:
    mesh = jax.make_mesh((W,), ("data",), axis_types=(AxisType.Auto,))
    graph, params = start(0)
    specs = jaxsparse.fsdp_specs(params, mesh)
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    init, step = step_of(name, graph, specs, 10, mesh=mesh)
    batch = put(jnp.zeros((WINDOWS, LENGTH + 1), jnp.int32), PartitionSpec("data"))
    found = jaxsparse.wire_bytes(step, init(jax.tree.map(put, params, specs)), batch, jnp.int32(0))
    return found.received / 4 / sum(x.size for x in jax.tree.leaves(params))


def train(name: str, seed: int, steps: int, text: transformer.Corpus) -> float:
    """The held-out loss."""
    graph, params = start(seed)
    init, step = step_of(name, graph, jaxsparse.fsdp_specs(params, W), steps, workers=W)
    state, rng = init(params), np.random.default_rng(seed)
    for number in range(steps):
        batch = transformer.windows(text.train, WINDOWS, LENGTH, rng)
        state, _ = step(state, batch, jnp.int32(number))
    test = transformer.windows(text.held_out, 512, LENGTH, np.random.default_rng(0))
    return float(jax.jit(transformer.loss_of)(nnx.merge(graph, state[0]), test))


def compile_layers() -> None:
    """What a device receives, and temporaries, if layers are gathered where they run."""
    mesh = jax.make_mesh((W,), ("data",), axis_types=(AxisType.Auto,))
    layers, width, rows = 16, 1024, 8
    shapes = {"up": (layers, width, 4 * width), "down": (layers, 4 * width, width)}
    size = sum(np.prod(shape) for shape in shapes.values())
    specs = dict.fromkeys(shapes, PartitionSpec(None, "data"))
    whole = NamedSharding(mesh, PartitionSpec())

    def loss_of(params: Any, x: Any, get: Any) -> jax.Array:
        def layer(x: Any, shards: Any) -> tuple[Any, None]:
            w = jax.tree.map(get, shards)
            return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

        return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, params)[0] ** 2)

    def gathering(weights: Any, gradients: Any) -> Any:
        get = functools.partial(jaxsparse.gather, weights=weights, gradients=gradients)
        return jaxsparse.grad(functools.partial(loss_of, get=get), specs=specs, gather=False)

    of_gspmd = functools.partial(loss_of, get=lambda x: jax.lax.with_sharding_constraint(x, whole))
    put = lambda shape, spec: jax.ShapeDtypeStruct(
        shape, jnp.float32, sharding=NamedSharding(mesh, spec)
    )
    table = [("weights / gradients", "received", "temporaries")]
    for name, grad in {
        "float32, by GSPMD": jax.grad(of_gspmd),
        "float32 / float32": gathering(None, None),
        "bfloat16 / bfloat16": gathering("bfloat16", "bfloat16"),
        "int8 / int8": gathering("int8", "int8"),
        "int8 / int4": gathering("int8", "int4"),
        "int4 / int4": gathering("int4", "int4"),
    }.items():
        params = jax.tree.map(put, shapes, specs, is_leaf=lambda x: isinstance(x, tuple))
        x = put((W * rows, width), PartitionSpec("data"))
        out = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        program = jax.jit(grad, out_shardings=out).lower(params, x).compile()
        received = jaxsparse.wire_bytes(program).received
        memory = program.memory_analysis()
        assert memory is not None
        temporaries = memory.temp_size_in_bytes
        table.append((name, f"{received / 4 / size:.3f}", f"{temporaries / 4 / size:.3f}"))
        print(*table[-1], sep="  ", flush=True)
    print("\n".join(aligned(table, right=range(1, 3))))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", nargs="*", default=list(ROWS))
    parser.add_argument("--layers", action="store_true", help="see above")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", W)
    if args.layers:
        return compile_layers()
    table = [("weights / gradients", "nats a byte", "range", "received")]
    for name in args.rows:
        run = functools.partial(train, name, steps=args.steps, text=transformer.corpus())
        losses = [run(seed=seed) for seed in range(args.seeds)]
        cells = statistics.mean(losses), np.ptp(losses), received(name)
        table.append((name, *(f"{x:.3f}" for x in cells)))
        print(*table[-1], sep="  ", flush=True)
    print("\n".join(aligned(table, right=range(1, 4))))


if __name__ == "__main__":
    main()
