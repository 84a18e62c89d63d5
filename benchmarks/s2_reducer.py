"""S2 Reducer's sketch_ratio on real gradients: 8 simulated workers train an MLP on digits.

    python benchmarks/s2_reducer.py
    python benchmarks/s2_reducer.py --figure benchmarks/figures/s2_ratio.png

This is the paper's figure 8 in small. For each ratio, the table is sized by the expected union of
the workers' blocks, and by one worker's own blocks. Nothing is downloaded, and one device plays all
workers. Means and standard deviations are over seeds of initial weights, batches and hashes. Words
are those of the psum of compressed leaves. The union of supports adds one bit a block. "exact"
marks tables that would be no smaller than the blocks of all workers. Then the blocks are summed.
"""

import argparse
import datetime
import importlib
import json
import math
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxsparse
from jaxsparse.systems import s2_reducer
from jaxsparse.systems.s2_reducer import S2

spardl: Any = importlib.import_module("spardl")  # the model; beside this file
digits: Any = spardl.digits


class Outcome(NamedTuple):
    """Results of training, by seed."""

    train_loss: list[float]  # over the whole training set
    accuracy: list[float]  # on the test set, in [0, 1]


def batches(args: argparse.Namespace, seed: int) -> Any:
    """The batches of all steps, stacked: images[steps, batch, 64], labels[steps, batch]."""
    train_set, _ = digits.load()
    size = digits.shared_batch(args.batch_size, args.workers)
    return jax.tree.map(lambda *x: np.stack(x), *digits.batches(train_set, size, args.steps, seed))


def train(make: Any, args: argparse.Namespace) -> Outcome:
    """Trains by the transformation `make()`, once for each seed."""
    train_set, test_set = digits.load()
    # The rate does not fall to 0, because entries that wait in residuals still have to arrive.
    schedule = optax.cosine_decay_schedule(args.lr, args.steps, alpha=0.1)
    tx = optax.chain(make(), optax.sgd(schedule))

    def step(state: Any, batch: Any) -> tuple[Any, None]:
        params, opt_state = state
        grads = jax.grad(spardl.loss_of)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    simulated = jaxsparse.data_parallel(step, args.workers)

    @jax.jit
    def run(state: Any, steps: Any) -> tuple[jax.Array, jax.Array]:
        (params, _), _ = jax.lax.scan(simulated, state, steps)
        right = spardl.logits_of(params, test_set.images).argmax(axis=-1) == test_set.labels
        return spardl.loss_of(params, train_set), jnp.mean(right)

    results = []
    for seed in args.seeds:
        params = spardl.init(seed, args.hidden)
        state = jaxsparse.shard((params, tx.init(params)), args.workers)
        results.append(run(state, batches(args, seed)))
    losses, accuracies = zip(*results)
    return Outcome(list(map(float, losses)), list(map(float, accuracies)))


def spread(values: list[float], scale: float = 1, places: int = 4) -> str:
    """Mean and standard deviation, or the number of runs that diverged."""
    diverged = sum(not math.isfinite(value) for value in values)
    return f"{diverged} diverged" if diverged else spardl.spread(values, scale, places)


def sweep(args: argparse.Namespace) -> list[dict[str, Any]]:
    (size,) = jaxsparse.layout.plan(spardl.init(0, args.hidden)).bucket_sizes
    print(f"{'ratio':>6} {'sizing':<8} {'train loss':>18} {'accuracy, %':>16} {'words':>7}  below")
    dense = train(lambda: jaxsparse.dense(momentum=args.momentum), args)
    results: list[dict[str, Any]] = []

    def show(ratio: float | None, sizing: str, outcome: Outcome, words: int, exact: bool) -> None:
        below = 100 * (statistics.mean(dense.accuracy) - statistics.mean(outcome.accuracy))
        print(
            f"{'' if ratio is None else f'{ratio:g}':>6} {sizing:<8} "
            f"{spread(outcome.train_loss):>18} "
            f"{spread(outcome.accuracy, 100, 2):>16} {words:>7}  {below:.2f}"
            f"{', exact' if exact else ''}",
            flush=True,
        )
        more = {"ratio": ratio, "sizing": sizing, "words": words, "exact": exact}
        results.append(more | outcome._asdict())

    show(None, "dense", dense, size, exact=True)
    for sizing in args.sizings:
        for ratio in args.ratios:
            settings = dict(rows=args.rows, sketch_ratio=ratio, sizing=sizing)
            reducer = S2(args.density, block_size=args.block_size, **settings)

            def make(settings: Any = settings) -> optax.GradientTransformationExtraArgs:
                size, momentum = args.block_size, args.momentum
                return s2_reducer(args.density, block_size=size, momentum=momentum, **settings)

            exact = reducer.plan(size, args.workers).cols is None
            words = reducer.words(size, args.workers)
            show(ratio, sizing, train(make, args), words, exact)
    return results


def draw(results: list[dict[str, Any]], args: argparse.Namespace) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), dpi=80, layout="constrained")
    axes = figure.subplots()
    dense = 100 * statistics.mean(results[0]["accuracy"])
    for sizing in args.sizings:
        runs = [result for result in results if result["sizing"] == sizing]
        mean = [100 * statistics.mean(run["accuracy"]) for run in runs]
        axes.plot([run["words"] for run in runs], mean, marker="o", label=f"sized by {sizing}")
        for run, height in zip(runs, mean):
            axes.annotate(
                f"{run['ratio']:g}",
                (run["words"], height),
                xytext=(0, 5),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
    axes.axhline(dense, color="black", linewidth=1, linestyle=":", label="dense")
    axes.set(xscale="log", xlabel="words of the psum", ylabel="test accuracy, %")
    axes.set_ylim(dense - 6, dense + 1.5)  # runs that diverge are below
    axes.set_title(f"S2 Reducer: {args.workers} workers, by sketch_ratio", fontsize=10)
    axes.legend(fontsize=8, loc="lower right")
    args.figure.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.figure)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, number = parser.add_argument, digits.number
    add("--ratios", type=number(float, 1e-3), nargs="+", default=[0.25, 0.5, 1.0, 2.0])
    add("--sizings", choices=["union", "local"], nargs="+", default=["union", "local"])
    add("--rows", type=number(int, 1), default=1, help="of the sketch")
    add("--block-size", type=number(int, 1), default=16)
    add("--density", type=number(float, 1e-6, math.nextafter(1, 2)), default=1 / 32)
    add("--workers", type=number(int, 1), default=8)
    add("--seeds", type=number(int, 0), nargs="+", default=[0, 1, 2], metavar="SEED")
    add("--steps", type=number(int, 1), default=400)
    add("--hidden", type=number(int, 32), default=128, help="width of the two hidden layers")
    add("--lr", type=number(float, 0), default=0.5, help="falls to a tenth along a cosine")
    add("--momentum", type=number(float, 0, 1), default=0.0, help="of every method")
    add("--batch-size", type=number(int, 1), default=144, help="of all workers together")
    add("--figure", type=Path, metavar="PNG", help="also draw accuracies over words")
    add("--json", type=Path, metavar="FILE", help="also write all results here")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    where = {
        "jax": jax.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    print(", ".join(f"{name} {value}" for name, value in where.items()))
    print(
        f"{args.workers} simulated workers, blocks of {args.block_size}, density {args.density:g}, "
        f"{args.rows} rows, {args.steps} steps, lr {args.lr:g}, momentum {args.momentum:g}, "
        f"seeds {args.seeds}"
    )
    results = sweep(args)
    if args.figure:
        draw(results, args)
    if args.json:
        given = {name: str(value) for name, value in vars(args).items()}
        with open(args.json, "w") as file:
            json.dump({**where, "arguments": given, "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
