"""Measures whole training steps of every system: time, peak memory, and the time to compile them.

The state is donated. Parameters are a tree as a transformer of ordinary sizes has it: kernels whose
sizes are no powers of two, and a bias beside each. Workers are emulated devices. The loss is the
sum of squares of the parameters, so that the exchange takes nearly all of the time. Each system's
step takes turns with dense's, and the table has the ratio of their medians. Tracing includes
lowering.
"""

import argparse
import importlib
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import timing

import jaxsparse
from jaxsparse import shard

sys.path.append(str(Path(__file__).parents[1] / "tests"))
at_density: Any = importlib.import_module("at_density")


def tree_of(size: int, leaves: int) -> dict[str, tuple[int, ...]]:
    """The shapes of some leaves, half of them kernels and half biases, of about `size` elements.

    Kernels are wide by turns, as those of a transformer's blocks are.
    """
    kernels = (leaves + 1) // 2
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(kernels):
        share = size / kernels * (0.8 if i % 2 else 1.2)
        width = round((share / (1 if i % 2 else 3)) ** 0.5) | 1  # odd
        shapes[f"kernel{i}"] = (round(share / width), width)
        if len(shapes) < leaves:
            shapes[f"bias{i}"] = (width,)
    return shapes


def loss_of(params: Any, batch: jax.Array) -> jax.Array:
    return sum(jnp.sum(x * x) for x in jax.tree.leaves(params)) * batch.mean()


class Step:
    """One system's step, from its transformation to the compiled program."""

    def __init__(self, name: str, size: int, mesh: jax.sharding.Mesh, leaves: int):
        self.mesh, self.workers = mesh, mesh.shape["data"]
        exchange = at_density.transformation_at(name, 0.01, size)
        self.tx = optax.chain(exchange, optax.sgd(0.1))
        self.shapes = tree_of(size, leaves)

    def __call__(self, state: Any, batch: jax.Array) -> Any:
        """The step of all workers."""
        params, opt_state = state
        grads = jaxsparse.grad(loss_of, mesh=self.mesh)(params, batch)
        updates, opt_state = self.tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def start(self) -> Any:
        """Parameters and optimizer state, on the mesh."""
        keys = jax.random.split(jax.random.key(0), len(self.shapes))
        params = {n: jax.random.normal(k, s) ** 3 for k, (n, s) in zip(keys, self.shapes.items())}
        return shard((params, self.tx.init(params)), self.mesh)

    def placed(self, x: Any, spec: jax.sharding.PartitionSpec) -> jax.ShapeDtypeStruct:
        sharding = jax.sharding.NamedSharding(self.mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    def compiled(self) -> tuple[Any, float, float]:
        """The program, and the seconds of tracing with lowering, and of compiling."""
        jax.clear_caches()
        arrays = {name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in self.shapes.items()}
        state = jax.eval_shape(lambda p: shard((p, self.tx.init(p)), self.workers), arrays)
        state = jax.tree.map(self.placed, state, jaxsparse.specs(state))
        rows = jax.sharding.PartitionSpec("data")
        batch = self.placed(jax.ShapeDtypeStruct((self.workers,), jnp.float32), rows)
        start = time.perf_counter()
        lowered = jax.jit(self, donate_argnums=0).lower(state, batch)
        traced = time.perf_counter()
        program = lowered.compile()
        return program, traced - start, time.perf_counter() - traced

    def runner(self, program: Any) -> Callable[[], Any]:
        """A function that runs a step on the state that its last call left."""
        state = [self.start()]
        batch = shard(jnp.ones(self.workers), self.mesh)
        spec = jax.sharding.PartitionSpec("data")
        batch = jax.device_put(batch, jax.sharding.NamedSharding(self.mesh, spec))

        def run() -> Any:
            state[0] = program(state[0], batch)
            return state[0]

        return run


def measure(name: str, mesh: jax.sharding.Mesh, args: argparse.Namespace) -> dict[str, Any]:
    """All columns of one row. Of several compilations, each from the beginning, the least count."""
    made = lambda name: Step(name, args.size, mesh, args.leaves)
    programs, traced, compiled = zip(*(made(name).compiled() for _ in range(COMPILATIONS)))
    dense, own = made("dense"), made(name)
    runs = {
        "dense": dense.runner(programs[0] if name == "dense" else dense.compiled()[0]),
        name: own.runner(programs[0]),
    }
    seconds = timing.interleaved(runs, args.repeats)
    time_s, base = (statistics.median(seconds[key]) for key in (name, "dense"))
    return {
        "system": name,
        "trace_s": min(traced),
        "compile_s": min(compiled),
        "peak_d": timing.peak(programs[0]) / (4 * args.size),
        "over_dense": time_s / base,
        "time_s": time_s,
    }


COMPILATIONS = 2  # of which the least is told
COLUMNS = {
    "system": "{}",
    "trace_s": "{:.2f}",
    "compile_s": "{:.2f}",
    "peak_d": "{:.2f}",
    "over_dense": "{:.2f}",
    "time_s": "{:.3f}",
}


def parse_args() -> argparse.Namespace:
    parser = timing.parser_of(__doc__)
    add, names = parser.add_argument, at_density.NAMES
    add("--systems", nargs="+", choices=names, default=names)
    add("--size", type=timing.size_of, default=29_300_000, metavar="D", help="or 2^24")
    add("--leaves", type=int, default=121, help="kernels and biases (default: 121)")
    add("--workers", type=int, default=2, help="emulated devices (default: 2)")
    add("--repeats", type=int, default=7, help="timed steps of each system (default: 7)")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    # Devices are made when JAX is first used.
    flag = f" --xla_force_host_platform_device_count={args.workers}"
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + flag
    jax.config.update("jax_enable_compilation_cache", False)
    timing.where()
    print(f"d = {args.size}, {args.workers} workers, medians of {args.repeats} steps")
    mesh = jax.make_mesh((args.workers,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    print(timing.head(*COLUMNS))
    for name in args.systems:
        row = measure(name, mesh, args)
        print(timing.row(*(form.format(row[key]) for key, form in COLUMNS.items())), flush=True)


if __name__ == "__main__":
    main()
