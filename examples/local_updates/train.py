"""Trains a byte-level transformer whose workers exchange gradients, updates or displacements.

Eight simulated workers read Python's own library, so nothing is downloaded. All methods train with
AdamW. They differ in what workers send each other:

- dense: gradients, uncompressed, in each step.
- gradients: gradients, by a system of jaxsparse that is chained before AdamW.
- updates: the updates of each worker's own Adam, which runs before the exchange.
- DiLoCo, SparseLoCo, ...: displacements. Workers train alone for H steps, and then exchange how far
  their parameters moved.

    python examples/local_updates/train.py
    python examples/local_updates/train.py --methods dense "DiLoCo H=10" --steps 2000 --seeds 1 2 3
    python examples/local_updates/train.py --list

In several processes each device is a worker, and seconds include those of the network:

    python examples/multihost/launch.py -n 4 -- python examples/local_updates/train.py
"""

import argparse
import dataclasses
import functools
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[1] / "multihost"))

import jax
import model as models
import numpy as np
import optax
import processes
import results
import shares
from digits import number
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.progress import Progress

import jaxsparse
from jaxsparse import LocalSteps, outer, per_worker
from jaxsparse.planner import units


@dataclasses.dataclass(frozen=True)
class Method:
    """One of the compared methods: the thing that workers exchange, and the way.

    Attributes:
        exchange: what they exchange: "gradients", "updates" or "displacements".
        system: name of the system that exchanges it.
        tx: makes the exchange, given `workers=`. For displacements, it makes the outer optimizer
            from its rate.
        every: number of local steps between exchanges of displacements, H.
        outer_lr: outer learning rate for displacements if no flag gives one. It is the paper's.
        streaming: see `jaxsparse.LocalSteps`.
    """

    exchange: str
    system: str
    tx: Callable[..., optax.GradientTransformation]
    every: int = 1
    outer_lr: float = 1.0
    streaming: outer.Streaming | None = None


_of = functools.partial
EXCHANGES: dict[str, tuple[str, Callable[..., optax.GradientTransformation]]] = {
    "dense": ("dense", jaxsparse.dense),
    "SparDL 1 %": ("spardl", _of(jaxsparse.spardl, 0.01)),
    "chunks": ("chunked_top_k", _of(jaxsparse.chunked_top_k, 64, 4096)),
    "chunks, decay .95": ("chunked_top_k", _of(jaxsparse.chunked_top_k, 64, 4096, decay=0.95)),
    "sketched 20x": ("sketched_sgd", _of(jaxsparse.sketched_sgd, 20)),
    "4 of 512": ("sparcml", _of(jaxsparse.sparcml, k=4, group_size=512)),
    "random 1 of 64, fed back": ("random_k", _of(jaxsparse.random_k, 1 / 64)),
    "4 bits": ("qsgd", _of(jaxsparse.qsgd, 4)),
    "PowerSGD rank 2": ("powersgd", _of(jaxsparse.powersgd, 2)),
    "PowerSGD rank 4": ("powersgd", _of(jaxsparse.powersgd, 4)),
    "EF21-SGDM by SparDL 1 %": (
        "ef21_sgdm",
        _of(jaxsparse.ef21_sgdm, jaxsparse.systems.SparDL(0.01)),
    ),
}


def every_method(workers: int = 1) -> dict[str, Method]:
    """All methods by name, for so many workers."""
    methods = {
        f"{what}, {name}": Method(what, system, tx)
        for what in ("gradients", "updates")
        for name, (system, tx) in EXCHANGES.items()
    }
    methods = {"dense": methods.pop("gradients, dense"), **methods}
    for h in (10, 30, 100):
        mean = lambda lr: outer.diloco(lr, 0.0)
        methods[f"mean H={h}"] = Method("displacements", "dense", mean, h)
        methods[f"DiLoCo H={h}"] = Method("displacements", "dense", outer.diloco, h, 0.7)
        for k in (20, 64, 123, 512, 4096):
            name = f"SparseLoCo H={h}" + ("" if k == 64 else f" {k / 40.96:.3g} %")
            tx = lambda lr, k=k: outer.sparse_loco(learning_rate=lr, k=k)
            methods[name] = Method("displacements", "chunked_top_k", tx, h)
    of_ten = functools.partial(Method, "displacements", every=10)
    return methods | {
        "SparDL 1 % H=10": of_ten(
            "spardl", lambda lr: optax.chain(jaxsparse.spardl(0.01), optax.sgd(lr))
        ),
        "BMUF H=10": of_ten("dense", lambda lr: outer.bmuf(0.5, lr)),
        # The rule of its authors.
        "BMUF H=10 of 1 - 1/W": of_ten("dense", lambda lr: outer.bmuf(1 - 1 / workers, lr)),
        "SlowMo H=10": of_ten("dense", lambda lr: outer.slowmo(0.5, lr)),
        "Streaming H=10": of_ten(
            "dense", outer.diloco, outer_lr=0.7, streaming=outer.Streaming(3, 1, 0.5)
        ),
    }


DEFAULT = (
    "dense",
    "gradients, SparDL 1 %",
    "updates, chunks",
    "DiLoCo H=10",
    "SparseLoCo H=10",
    "Streaming H=10",
)


class Rates(NamedTuple):
    """Learning rates: AdamW's peak, and the rate of outer steps, or None without outer steps."""

    lr: float
    outer: float | None

    def __str__(self) -> str:
        return f"{self.lr:g}" if self.outer is None else f"{self.lr:g}, outer {self.outer:g}"


def train(
    method: Method, args: argparse.Namespace, mesh: Mesh | None, advance: Callable[[], object]
) -> Iterator[results.Run]:
    """Tries all rates on the first seed, and trains all seeds with the best rates.

    It calls `advance` after each step, and yields the run so far after each seed.
    """
    text = models.corpus()
    test = models.windows(text.held_out, 256, args.length, np.random.default_rng(0))
    split = None if mesh is None else NamedSharding(mesh, PartitionSpec("data"))
    training = functools.cache(functools.partial(Training, method, args, mesh))

    def curve(rates: Rates, seed: int, steps: int) -> results.Curve:
        run = training(rates, steps)
        run.start(seed)
        rng, points, seconds = np.random.default_rng(seed), [], 0.0
        for t in range(steps):
            batch: Any = models.windows(text.train, args.workers * args.batch, args.length, rng)
            if split is not None:
                batch = shares.to_global(
                    batch[shares.own_rows(len(batch), split)], len(batch), split
                )
            if t == 0 and not run.is_compiled:
                run.compile(batch, seed)
            began = time.perf_counter()
            run.step(batch, t)
            if t + 1 == steps:
                run.finish(steps)
            seconds += time.perf_counter() - began
            if (t + 1) % args.eval_every == 0 or t + 1 == steps:
                points.append((t + 1, seconds, run.held_out(test)))
            advance()
        return results.Curve(*map(np.array, zip(*points, strict=True)))

    tried = {}
    rates = every_rates(method, args)
    if len(rates) > 1:
        tried = {r: curve(r, args.seeds[0], args.tune_steps or args.steps) for r in rates}
        # A loss that is not a number counts as infinite.
        best = min(tried, key=lambda r: np.nan_to_num(tried[r].held_out[-1], nan=np.inf))
    else:
        (best,) = rates
    curves = {}
    for seed in args.seeds:
        is_tried = best in tried and seed == args.seeds[0] and not args.tune_steps
        curves[seed] = tried[best] if is_tried else curve(best, seed, args.steps)
        run = training(best, args.steps)
        yield results.Run(
            dict(curves),
            str(best),
            {str(r): float(each.held_out[-1]) for r, each in tried.items()},
            run.share * run.moved.payload,
            run.share * run.moved.received,
        )


def every_rates(method: Method, args: argparse.Namespace) -> list[Rates]:
    """The learning rates that are to be tried."""
    if method.exchange != "displacements":
        return [Rates(lr, None) for lr in args.lr]
    return list(map(Rates, *zip(*itertools.product(args.lr, args.outer_lr or [method.outer_lr]))))


class Training:
    """Trains models of one kind, one after the other.

    Attributes:
        state: state of all workers.
        moved: bytes that one exchange moves.
        share: number of whole exchanges for each step, on average.
        is_compiled: whether the programs are compiled.
    """

    state: Any
    _start: Callable[[Any], Any]
    share = 1.0
    is_compiled = False

    def __init__(
        self,
        method: Method,
        args: argparse.Namespace,
        mesh: Mesh | None,
        rates: Rates,
        steps: int,
    ):
        self._make = lambda seed: models.Transformer(
            args.width, args.layers, args.heads, args.length, nnx.Rngs(seed)
        )
        self._method = method
        graphdef, params = nnx.split(self._make(0), nnx.Param)
        workers = args.workers if mesh is None else mesh
        lr = optax.warmup_cosine_decay_schedule(
            0, rates.lr, max(1, steps // 20), steps, 0.1 * rates.lr
        )
        loss_of = lambda p, x: models.loss_of(nnx.merge(graphdef, p), x)
        self._evaluate = jax.jit(loss_of)

        def stepper(
            tx: optax.GradientTransformation, value_and_grad: Any = jax.value_and_grad
        ) -> Callable[..., Any]:
            def step(state: Any, windows: jax.Array) -> tuple[Any, jax.Array]:
                params, opt_state = state
                loss, grads = value_and_grad(loss_of)(params, windows)
                updates, opt_state = tx.update(grads, opt_state, params)
                return (optax.apply_updates(params, updates), opt_state), loss

            return step

        inner = optax.adamw(lr, b2=args.b2, weight_decay=0.1)
        if method.exchange == "displacements":
            exchange = method.tx(rates.outer)
            local = LocalSteps(
                stepper(inner), exchange, workers, every=method.every, streaming=method.streaming
            )
            # Streaming exchanges a part of the parameters at a time. At the end it exchanges all.
            turns = sum(local.due(n) is not None for n in range(1, steps + 1))
            fragments = len(local.outer)
            is_left = fragments > 1 or local.due(steps) is None
            self.share = (turns / fragments + is_left) / steps
            self._start = lambda params: local.init((params, inner.init(params)))
            self._run = lambda state, batch, t: local(state, batch, t)[0]
            self.finish = lambda done: self._wait(local.finish(self.state, done))
        else:
            simulated = args.workers if mesh is None else None
            exchange = method.tx(workers=simulated)
            if method.exchange == "gradients":
                tx = optax.chain(exchange, inner)
            else:
                tx = optax.chain(
                    per_worker(optax.scale_by_adam(b2=args.b2), workers=simulated),
                    exchange,
                    optax.add_decayed_weights(0.1),
                    optax.scale_by_learning_rate(lr),
                )
            one = stepper(tx, functools.partial(jaxsparse.value_and_grad, workers=simulated))
            run = jax.jit(lambda s, x: one(s, x)[0], donate_argnums=0)
            self._start = lambda params: jaxsparse.shard((params, tx.init(params)), workers)
            self._run = lambda state, batch, _: run(state, batch)
            self.finish = lambda done: None
        self.moved = jaxsparse.traffic.traced_bytes(exchange, params, args.workers)

    def start(self, seed: int) -> None:
        """Begins to train a new model."""
        # Copies in host memory are not donated with the state.
        self.state = self._start(jax.device_get(nnx.state(self._make(seed), nnx.Param)))

    def compile(self, batch: Any, seed: int) -> None:
        """Takes some steps and forgets them, so that later steps do not wait for the compiler."""
        steps = self._method.every + 2  # so that the first fragment has its turn, too
        for t in range(steps):
            self.step(batch, t)
        self.finish(steps)
        self.start(seed)
        self.is_compiled = True

    def step(self, batch: Any, t: int) -> None:
        self._wait(self._run(self.state, batch, t))

    def _wait(self, state: Any) -> None:
        self.state = jax.block_until_ready(state)

    def held_out(self, windows: np.ndarray) -> float:
        return float(self._evaluate(self.params, windows))

    @property
    def params(self) -> Any:
        return self.state.params if hasattr(self.state, "params") else self.state[0]


def main() -> None:
    parser = flags()
    args = parser.parse_args()
    jax.config.update("jax_platforms", args.platform)
    if args.width % args.heads:
        parser.error(f"--heads {args.heads} must divide --width {args.width}")
    if (args.link or args.measured) and not args.time_to:
        parser.error("--link and --measured print seconds to losses: give --time-to, too")
    if args.list:
        print(*every_method(), sep="\n")
        return
    processes.join(args, parser)
    mesh, is_first = None, jax.process_index() == 0
    if jax.process_count() > 1:
        mesh = jax.make_mesh((jax.device_count(),), ("data",))
        args.workers = mesh.size
    methods = every_method(args.workers)
    console = Console(quiet=not is_first)
    runs = results.load(args.show)
    if args.show and args.methods:
        if absent := [name for name in args.methods if name not in runs]:
            parser.error(f"--methods: the files of --show have no {', '.join(absent)}")
        runs = {name: runs[name] for name in args.methods}
    with jaxsparse.fail_at_once(), Progress(console=console) as progress:
        for name in [] if args.show else args.methods or DEFAULT:
            method = methods[name]
            tries = len(every_rates(method, args))
            total = args.steps * len(args.seeds)
            if tries > 1:
                total += (tries * args.tune_steps) if args.tune_steps else (tries - 1) * args.steps
            task = progress.add_task(name, total=total)
            advance = functools.partial(progress.advance, task)
            for run in train(method, args, mesh, advance):
                runs[name] = run
                if args.json is not None and is_first:
                    results.save_json(runs, vars(args), args.json)
    console.print(results.table(runs, args.workers))
    for name, bandwidth in args.link:
        reckoned = results.over_link(runs, bandwidth, args.step_seconds)
        console.print(f"\nOver {name}, {args.step_seconds:g} s of computing a step, reckoned:")
        console.print(results.times(reckoned, args.time_to))
    for path in args.measured:
        exchanges = {name: (methods[name].system, methods[name].every) for name in runs}
        measured = results.over_measured(runs, exchanges, path, args.step_seconds)
        for rate, timed in measured.items():
            console.print(f"\nExchanges as measured at {rate}, {args.step_seconds:g} s a step:")
            console.print(results.times(timed, args.time_to))
    is_timed = args.time_to and not args.link and not args.measured
    if is_timed:
        console.print(results.times(runs, args.time_to))
    if args.figure is not None and is_first:
        results.save_figure(runs, args.figure, against_seconds=bool(is_timed))


def flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--methods",
        nargs="+",
        choices=every_method(),
        metavar="NAME",
        help="(default: six; with --show: all)",
    )
    add("--list", action="store_true", help="print the names of all methods")
    add("--workers", type=number(int, 1), default=8, help="simulated (default: 8)")
    add("--platform", default="cpu", help="cuda simulates the workers on one GPU (default: cpu)")
    add("--steps", type=number(int, 1), default=300, help="(default: 300)")
    add("--seeds", type=number(int, 0), nargs="+", default=[0], help="(default: 0)")
    add("--batch", type=number(int, 1), default=4, help="windows of a worker (default: 4)")
    add("--length", type=number(int, 1), default=64, help="bytes of a window (default: 64)")
    add("--width", type=number(int, 4), default=64, help="of the model (default: 64)")
    add("--layers", type=number(int, 1), default=2, help="(default: 2)")
    add("--heads", type=number(int, 1), default=4, help="divide --width (default: 4)")
    add(
        "--lr",
        type=number(float, 0),
        nargs="+",
        default=[3e-3],
        help="of AdamW, its peak; of several, each method takes the best on the first seed "
        "(default: 0.003)",
    )
    add(
        "--outer-lr",
        type=number(float, 0),
        nargs="+",
        help="of outer steps, if there are any; each is tried with each of --lr (default: 1, "
        "DiLoCo 0.7)",
    )
    add(
        "--tune-steps",
        type=number(int, 1),
        metavar="STEPS",
        help="length of the runs that try rates (default: --steps)",
    )
    add("--b2", type=number(float, 0, 1), default=0.95, help="of AdamW (default: 0.95)")
    add("--eval-every", type=number(int, 1), default=50, metavar="STEPS", help="(default: 50)")
    add("--json", type=Path, metavar="FILE", help="write curves and settings")
    add(
        "--show",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="show what earlier runs wrote as JSON, and train nothing",
    )
    add(
        "--time-to",
        type=number(float, 0),
        nargs="+",
        metavar="LOSS",
        help="print the seconds until held-out losses are reached; the figure is then of seconds",
    )
    add(
        "--link",
        type=lambda text: (text, units.bytes_per_second(text)),
        nargs="+",
        default=[],
        metavar="RATE",
        help="print the seconds of --time-to as those of a network that is slower than memory: "
        "100Mbit and so on, for the bytes that a worker receives",
    )
    add(
        "--measured",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="print the seconds of --time-to with exchanges that benchmarks/cluster/run.py timed",
    )
    add(
        "--step-seconds",
        type=number(float, 0),
        default=0.1,
        help="of computing, with --link or --measured (default: 0.1)",
    )
    add("--figure", type=Path, metavar="FILE", help="draw loss against steps and bytes")
    processes.add_flags(parser)
    return parser


if __name__ == "__main__":
    main()
