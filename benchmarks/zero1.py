r"""ZeRO-1 in few bits: what moments that are cut over the workers cost in loss, bytes and memory.

    python benchmarks/zero1.py --json benchmarks/results/zero1.json
    python benchmarks/zero1.py --times --workers 2

The language model of training.py learns Python's reference manual by Adam, on emulated devices.
Rates are tuned by the rule of rates.py on seed 0 and at full length. Rows "by XLA" place moments
over the workers behind an exchange, and leave the rest to the compiler. Bytes are those that a
device receives in a step, read from the compiled program. "moments" and "peak" are a device's
memory, in floats for each parameter; the peak counts arguments, outputs and temporaries.

`--times` compares whole steps of the tree of whole_step.py instead, which take turns. Its sizes are
made even.
"""

import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import rates
import timing
import training
import whole_step
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxsparse
from jaxsparse.arrays.printing import aligned

Make = Callable[[Any], optax.GradientTransformation]  # of a rate
BY_XLA = ", ZeRO-1 by XLA"


def behind(exchange: Callable[[], Any]) -> Make:
    return lambda rate: optax.chain(exchange(), optax.adam(rate))


def owned(*formats: Any, **options: Any) -> Make:
    return lambda rate: jaxsparse.zero1(optax.adam(rate), *formats, **options)


def rows() -> dict[str, Make]:
    int4 = functools.partial(jaxsparse.quantized, "int4")
    return {
        "dense": behind(jaxsparse.dense),
        "dense" + BY_XLA: behind(jaxsparse.dense),
        "int4": behind(int4),
        "zero1, int4": owned("int4"),
        "zero1, int4, back by signs": owned("int4", back="sign"),
        "int4" + BY_XLA: behind(int4),
    }


class Run:
    """A row's compiled step, and its training."""

    def __init__(self, name: str, task: training.Task, mesh: Mesh):
        self.name, self.task, self.mesh = name, task, mesh
        self.make = rows()[name]

    def start(self, seed: int) -> Any:
        whole, cut = (
            NamedSharding(self.mesh, spec) for spec in (PartitionSpec(), PartitionSpec("data"))
        )
        params = jax.device_put(self.task.init(seed), whole)
        state = jaxsparse.shard(self.make(0.0).init(params), self.mesh)
        if self.name.endswith(BY_XLA):
            exchange, adam = state
            put = lambda x: jax.device_put(
                x, cut if jnp.ndim(x) and x.shape[0] % self.mesh.size == 0 else whole
            )
            state = (exchange, jax.tree.map(put, adam))
        return params, state

    def draw(self, rng: np.random.Generator) -> Any:
        batch = self.task.draw(self.mesh.size * training.BATCH, rng)
        return jax.device_put(batch, NamedSharding(self.mesh, PartitionSpec("data")))

    @functools.cached_property
    def step(self) -> Any:
        """Compiled once for all rates."""
        state, batch = self.start(0), self.draw(np.random.default_rng(0))

        def step(state: Any, batch: Any, rate: jax.Array) -> Any:
            params, opt_state = state
            _, grads = jaxsparse.value_and_grad(self.task.loss_of)(params, batch)
            updates, opt_state = self.make(rate).update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        placed = jax.tree.map(lambda x: x.sharding, state)
        compiled = jax.jit(step, donate_argnums=0, out_shardings=placed)
        return compiled.lower(state, batch, jnp.float32(0)).compile()

    def train(self, rate: float, seed: int, steps: int) -> float:
        """The held-out loss."""
        rng, state = np.random.default_rng(seed), self.start(seed)
        for _ in range(steps):
            state = self.step(state, self.draw(rng), jnp.float32(rate))
        test = jax.tree.map(jnp.asarray, self.task.test())
        return float(jax.jit(self.task.loss_of)(jax.device_get(state[0]), test))

    def sizes(self) -> dict[str, float]:
        params, state = self.start(0)
        size = sum(x.size for x in jax.tree.leaves(params))
        moments = state.optimizer if hasattr(state, "optimizer") else state[1]
        own = sum(x.addressable_data(0).size for x in jax.tree.leaves(moments))
        bytes_ = jaxsparse.wire_bytes(self.step, mesh=self.mesh)
        return {
            "parameters": size,
            "received": bytes_.received,
            "moments": own / size,
            "peak": timing.peak(self.step) / 4 / size,
        }


def large() -> training.Task:
    """The tree of whole_step.py with even sizes, which two workers share, and next to no model."""
    odd = whole_step.tree_of(29_300_000, 121)
    shapes = {name: tuple(n + n % 2 for n in shape) for name, shape in odd.items()}
    init = lambda seed: {name: jnp.full(shape, 1e-3) for name, shape in shapes.items()}
    draw = lambda count, rng: np.ones(count, np.float32)
    return training.Task(
        training.text_rows, 0.0, 0, init, whole_step.loss_of, draw, lambda: np.ones(1)
    )


def compare_times(mesh: Mesh) -> None:
    task, steps = large(), dict[str, Callable[[], Any]]()
    names = ("dense", "dense" + BY_XLA, "int4", "int4" + BY_XLA, "zero1, int4")
    runs = {name: Run(name, task, mesh) for name in names}
    table: list[tuple[str, ...]] = [("exchange", "compile s", "peak", "over dense")]
    for name, run in runs.items():
        began = time.perf_counter()
        program = run.step
        table.append((name, f"{time.perf_counter() - began:.1f}", f"{run.sizes()['peak']:.2f}"))
        steps[name] = runner(program, run.start(0), run.draw(np.random.default_rng(0)))
    seconds = timing.interleaved(steps, 7)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    cells = [(*row, f"{medians[row[0]] / medians['dense']:.2f}") for row in table[1:]]
    print("\n".join(aligned([table[0], *cells], right=range(1, 4))))


def runner(program: Any, state: Any, batch: Any) -> Callable[[], Any]:
    held = [state]

    def run() -> Any:
        held[0] = program(held[0], batch, jnp.float32(1e-3))
        return held[0]

    return run


def main() -> None:
    parser = timing.parser_of(__doc__)
    add = parser.add_argument
    add("--workers", type=int, default=8)
    add("--steps", type=int, default=600)
    add("--seeds", type=int, default=3)
    add("--json", metavar="FILE", help="where rows are, and where new ones go")
    add("--times", action="store_true", help="see above")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.workers)
    mesh = jax.make_mesh((args.workers,), ("data",), axis_types=(AxisType.Auto,))
    where, task, found = timing.where(), training.text(), dict[str, Any]()
    if args.times:
        return compare_times(mesh)
    if args.json and Path(args.json).exists():
        found = json.loads(Path(args.json).read_text())["rows"]
    for name in rows():
        if name not in found:
            run = Run(name, task, mesh)
            loss = functools.cache(functools.partial(run.train, steps=args.steps))
            rate = rates.tuned(functools.partial(loss, seed=0), 0.005)
            losses = [loss(rate, seed=seed) for seed in range(args.seeds)]
            found[name] = {"losses": losses, "rate": rate, **run.sizes()}
            print(name, found[name], flush=True)
            timing.save({**where, "workers": args.workers, "rows": found}, args.json)
    table = [("exchange", "nats a byte", "range", "rate", "received", "moments", "peak")]
    for name, row in found.items():
        table.append(
            (
                name,
                f"{np.mean(row['losses']):.3f}",
                f"{np.ptp(row['losses']):.3f}",
                f"{row['rate']:g}",
                f"{row['received']:,.0f}",
                f"{row['moments']:.2f}",
                f"{row['peak']:.1f}",
            )
        )
    print("\n".join(aligned(table, right=range(1, 7))))


if __name__ == "__main__":
    main()
