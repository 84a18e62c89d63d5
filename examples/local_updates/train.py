"""Trains a byte-level transformer by exchanging gradients, updates, or what local steps moved.

Eight simulated workers read Python's own library, of which nothing is downloaded. AdamW is the
optimizer of all methods; what workers send each other differs:

- dense: gradients, uncompressed, in each step.
- gradients: by a system of the library, before AdamW, as one would chain it first.
- updates: each worker's own Adam runs first, and its update is exchanged.
- DiLoCo, SparseLoCo, ...: workers train alone for H steps, and then exchange what that moved.

    python examples/local_updates/train.py
    python examples/local_updates/train.py --methods dense "DiLoCo H=10" --steps 2000 --seeds 1 2 3
    python examples/local_updates/train.py --list
"""

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import jax
import model as models
import numpy as np
import optax
import results
from digits import number
from flax import nnx
from rich.console import Console
from rich.progress import Progress

import jaxsparse
from jaxsparse import LocalSteps, outer, per_worker


@dataclasses.dataclass(frozen=True)
class Method:
    """What is exchanged, and how.

    Attributes:
        exchange: "gradients", "updates" or "displacements".
        tx: makes the exchange, or the outer optimizer.
        every: H, of displacements.
        streaming: see `jaxsparse.LocalSteps`.
    """

    exchange: str
    tx: Callable[[], optax.GradientTransformation]
    every: int = 1
    streaming: outer.Streaming | None = None


def every_method() -> dict[str, Method]:
    chunked = lambda **more: jaxsparse.chunked_top_k(64, 4096, **more)
    methods = {
        "dense": Method("gradients", jaxsparse.dense),
        "gradients, SparDL 1 %": Method("gradients", lambda: jaxsparse.spardl(0.01)),
        "gradients, sketched 20x": Method("gradients", lambda: jaxsparse.sketched_sgd(20)),
        "gradients, 4 bits": Method("gradients", lambda: jaxsparse.qsgd(4)),
        "updates, dense": Method("updates", jaxsparse.dense),
        "updates, SparDL 1 %": Method("updates", lambda: jaxsparse.spardl(0.01)),
        "updates, chunks": Method("updates", chunked),
        "updates, chunks, decay .95": Method("updates", lambda: chunked(decay=0.95)),
        "updates, sketched 20x": Method("updates", lambda: jaxsparse.sketched_sgd(20)),
        "updates, 4 bits": Method("updates", lambda: jaxsparse.qsgd(4)),
    }
    for h in (10, 30, 100):
        methods[f"mean H={h}"] = Method("displacements", lambda: outer.diloco(1.0, 0.0), h)
        methods[f"DiLoCo H={h}"] = Method("displacements", outer.diloco, h)
        for k in (20, 64, 123, 512, 4096):
            name = f"SparseLoCo H={h}" + ("" if k == 64 else f" {k / 40.96:.3g} %")
            tx = lambda k=k: outer.sparse_loco(k=k)
            methods[name] = Method("displacements", tx, h)
    return methods | {
        "SparseLoCo H=10 published bits": Method(
            "displacements", lambda: outer.sparse_loco(quantizer="published"), 10
        ),
        "SparseLoCo H=10 of senders": Method(
            "displacements", lambda: outer.sparse_loco(aggregate="mean_of_senders"), 10
        ),
        "SparDL 1 % H=10": Method(
            "displacements", lambda: optax.chain(jaxsparse.spardl(0.01), optax.sgd(1.0)), 10
        ),
        "BMUF H=10": Method("displacements", lambda: outer.bmuf(0.5), 10),
        "SlowMo H=10": Method("displacements", lambda: outer.slowmo(0.5), 10),
        "Streaming H=10": Method("displacements", outer.diloco, 10, outer.Streaming(3, 1, 0.5)),
    }


DEFAULT = (
    "dense",
    "gradients, SparDL 1 %",
    "updates, chunks",
    "DiLoCo H=10",
    "SparseLoCo H=10",
    "Streaming H=10",
)


def train(method: Method, args: argparse.Namespace, advance: Callable[[], object]) -> results.Run:
    """Trains with each rate on the first seed, and with the best one on all others.

    `advance` is called after each step.
    """
    text = models.corpus()
    test = models.windows(text.held_out, 256, args.length, np.random.default_rng(0))
    points = sorted({*range(args.eval_every, args.steps, args.eval_every), args.steps})
    seconds: list[float] = []
    run = None

    def curve(rate: float, seed: int) -> list[float]:
        nonlocal run
        run = start(method, args, rate, seed)
        rng, losses, last = np.random.default_rng(seed), [], time.perf_counter()
        for t in range(args.steps):
            batch = models.windows(text.train, args.workers * args.batch, args.length, rng)
            run.step(batch, t)
            if t + 1 == args.steps:
                run.finish()
            if t + 1 in points:
                losses.append(run.held_out(test))
            advance()
            seconds.append(time.perf_counter() - last)
            last = time.perf_counter()
        return losses

    first, *others = args.seeds
    tried = {rate: curve(rate, first) for rate in args.lr}
    # A loss that is not a number is not the best.
    best = min(tried, key=lambda rate: np.nan_to_num(tried[rate][-1], nan=np.inf))
    curves = [tried[best], *(curve(best, seed) for seed in others)]
    assert run is not None
    return results.Run(
        np.array(points),
        np.array(curves),
        best,
        {str(rate): losses[-1] for rate, losses in tried.items()},
        run.share * run.moved.payload,
        run.share * run.moved.received,
        float(np.median(seconds)),
    )


class Training:
    """One model's training.

    Attributes:
        state: of all workers.
        finish: exchanges what is left to exchange at the end.
        moved: what one exchange moves.
        share: exchanges a step.
    """

    def __init__(
        self,
        graphdef: Any,
        state: Any,
        run: Callable[..., Any],
        moved: jaxsparse.traffic.WireBytes,
        share: float = 1.0,
        finish: Callable[[Any], Any] = lambda state: state,
    ):
        self.state, self.moved, self.share = state, moved, share
        self._run, self._finish = run, finish

        def evaluate(params: Any, windows: jax.Array) -> jax.Array:
            return models.loss_of(nnx.merge(graphdef, params), windows)

        self._evaluate = jax.jit(evaluate)

    def step(self, batch: np.ndarray, t: int) -> None:
        self.state = jax.block_until_ready(self._run(self.state, batch, t))

    def finish(self) -> None:
        self.state = self._finish(self.state)

    def held_out(self, windows: np.ndarray) -> float:
        return float(self._evaluate(self.params, windows))

    @property
    def params(self) -> Any:
        return self.state.params if hasattr(self.state, "params") else self.state[0]


def start(method: Method, args: argparse.Namespace, lr: float, seed: int) -> Training:
    rngs = nnx.Rngs(seed)
    model = models.Transformer(args.width, args.layers, args.length, rngs)
    graphdef, params = nnx.split(model, nnx.Param)
    rate = optax.warmup_cosine_decay_schedule(0, lr, max(1, args.steps // 20), args.steps, 0.1 * lr)
    grad = jax.value_and_grad(lambda p, x: models.loss_of(nnx.merge(graphdef, p), x))

    def stepper(tx: optax.GradientTransformation) -> Callable[..., Any]:
        def step(state: Any, windows: jax.Array) -> tuple[Any, jax.Array]:
            params, opt_state = state
            loss, grads = grad(params, windows)
            updates, opt_state = tx.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), loss

        return step

    inner = optax.adamw(rate, b2=0.95, weight_decay=0.1)
    if method.exchange == "displacements":
        tx = method.tx()
        steps = LocalSteps(
            stepper(inner), tx, args.workers, every=method.every, streaming=method.streaming
        )
        local: Any = steps.init((params, inner.init(params)))
        moved = jaxsparse.traffic.traced_bytes(tx, local.params, args.workers)
        # Streaming exchanges a part of the parameters at a time; at the end, all are exchanged.
        turns = sum(steps.due(n) is not None for n in range(1, args.steps + 1))
        fragments = len(steps.outer)
        is_left = fragments > 1 or steps.due(args.steps) is None
        return Training(
            graphdef,
            local,
            lambda s, batch, t: steps(s, batch, t)[0],
            moved,
            (turns / fragments + is_left) / args.steps,
            lambda s: steps.finish(s, args.steps),
        )
    if method.exchange == "gradients":
        tx = optax.chain(method.tx(), inner)
    else:
        tx = optax.chain(
            per_worker(optax.scale_by_adam(b2=0.95)),
            method.tx(),
            optax.add_decayed_weights(0.1),
            optax.scale_by_learning_rate(rate),
        )
    one = stepper(tx)
    run = jaxsparse.data_parallel(lambda s, x: one(s, x)[0], args.workers, donate_argnums=0)
    state = jaxsparse.shard((params, tx.init(params)), args.workers)
    moved = jaxsparse.traffic.traced_bytes(method.tx(), params, args.workers)
    return Training(graphdef, state, lambda s, batch, _: run(s, batch), moved)


def main() -> None:
    args = flags().parse_args()
    jax.config.update("jax_platforms", "cpu")
    methods, console = every_method(), Console()
    if args.list:
        console.print(*methods, sep="\n")
        return
    runs = results.load(args.show)
    with Progress(console=console) as progress:
        for name in [] if args.show else args.methods:
            total = args.steps * (len(args.seeds) + len(args.lr) - 1)
            task = progress.add_task(name, total=total)
            advance = functools.partial(progress.advance, task)
            runs[name] = train(methods[name], args, advance)
    console.print(results.table(runs, args.workers))
    if args.json is not None:
        results.save_json(runs, vars(args), args.json)
    if args.figure is not None:
        results.save_figure(runs, args.figure)


def flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--methods", nargs="+", choices=every_method(), default=DEFAULT, metavar="NAME")
    add("--list", action="store_true", help="print the names of all methods")
    add("--workers", type=number(int, 1), default=8, help="simulated (default: 8)")
    add("--steps", type=number(int, 1), default=300, help="(default: 300)")
    add("--seeds", type=number(int, 0), nargs="+", default=[0], help="(default: 0)")
    add("--batch", type=number(int, 1), default=4, help="windows of a worker (default: 4)")
    add("--length", type=number(int, 1), default=64, help="bytes of a window (default: 64)")
    add("--width", type=number(int, 4), default=64, help="of the model (default: 64)")
    add("--layers", type=number(int, 1), default=2, help="(default: 2)")
    add(
        "--lr",
        type=number(float, 0),
        nargs="+",
        default=[3e-3],
        help="of AdamW, its peak; of several, each method takes the best on the first seed "
        "(default: 0.003)",
    )
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
    add("--figure", type=Path, metavar="FILE", help="draw loss against steps and bytes")
    return parser


if __name__ == "__main__":
    main()
