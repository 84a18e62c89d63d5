"""S2 Reducer's sketch_ratio on real gradients: 8 simulated workers train an MLP on digits.

    python benchmarks/s2_reducer.py --figure benchmarks/figures/s2_ratio.png
    python benchmarks/s2_reducer.py --momentum 0 --rates 0.25 0.5 1 2
    python benchmarks/s2_reducer.py --received 8 16 64 256

This is the paper's figure 8 in small. For each ratio, the table is sized by the expected union of
the workers' blocks, and by one worker's own blocks. "blocks" are exact blocks, without a sketch:
all that S2 selects, and with `--blocks` as many as have room in the words of each sketch. With that
stand beside each sketch as many coordinates drawn at random, too: the control that a method must
beat. Nothing is downloaded, and one device plays all workers.

Each method takes the rate with the lowest mean training loss over the first two seeds, from a grid
that grows until the best is not at its end. Means and standard deviations are over seeds of initial
weights, batches and hashes. Words are those of the psum of compressed leaves. The union of supports
adds one bit a block. "exact" marks tables that would be no smaller than the blocks of all workers.
Then the blocks are summed.

`--received` trains nothing: it compiles the exchange of 2^20 elements for each number of workers,
with each sizing and with exact blocks, and prints the words received over the elements.
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
from jax.sharding import NamedSharding, PartitionSpec

import jaxsparse
from jaxsparse.arrays import blocks
from jaxsparse.outer.parallel import run_on_workers
from jaxsparse.reducers.base import Reducer
from jaxsparse.systems import Dense, OmniReduce, RandomK, SparseAllGather
from jaxsparse.systems.s2_reducer import S2

spardl: Any = importlib.import_module("spardl")  # the model; beside this file
digits: Any = spardl.digits


class Outcome(NamedTuple):
    """Results of training, by seed."""

    train_loss: list[float]  # over the whole training set
    accuracy: list[float]  # on the test set, in [0, 1]
    tuned: dict[float, float]  # rate -> mean training loss over the first two seeds


def batches(args: argparse.Namespace, seed: int) -> Any:
    """The batches of all steps, stacked: images[steps, batch, 64], labels[steps, batch]."""
    train_set, _ = digits.load()
    size = digits.shared_batch(args.batch_size, args.workers)
    return jax.tree.map(lambda *x: np.stack(x), *digits.batches(train_set, size, args.steps, seed))


def train(tx: Any, args: argparse.Namespace) -> tuple[float, Outcome]:
    """Trains through `tx` at each rate. The best rate, and its outcome over all seeds.

    The best rate has the lowest mean training loss over the first two seeds, none of which
    diverges. The grid grows by factors of two until the best rate is not at its end.
    """
    train_set, test_set = digits.load()
    # The rate does not fall to 0, because entries that wait in residuals still have to arrive.
    schedule = optax.cosine_decay_schedule(1.0, args.steps, alpha=0.1)
    tx = optax.chain(tx, optax.sgd(schedule))

    def step(state: Any, batch: Any) -> tuple[Any, None]:
        params, opt_state, rate = state
        grads = jax.grad(spardl.loss_of)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        updates = jax.tree.map(lambda update: rate * update, updates)
        return (optax.apply_updates(params, updates), opt_state, rate), None

    simulated = run_on_workers(step, args.workers)

    @jax.jit
    def run(state: Any, steps: Any) -> tuple[jax.Array, jax.Array]:
        (params, *_), _ = jax.lax.scan(simulated, state, steps)
        right = spardl.logits_of(params, test_set.images).argmax(axis=-1) == test_set.labels
        return spardl.loss_of(params, train_set), jnp.mean(right)

    def outcome(rate: float, seed: int) -> tuple[float, float]:
        params = spardl.init(seed, args.hidden)
        state = (params, tx.init(params), jnp.float32(rate))
        loss, accuracy = run(jaxsparse.shard(state, args.workers), batches(args, seed))
        return float(loss), float(accuracy)

    first, others = args.seeds[:2], args.seeds[2:]
    outcomes: dict[float, list[tuple[float, float]]] = {}
    tuned: dict[float, float] = {}
    more, rate = args.rates, 0.0
    while more:
        for rate in more:
            outcomes[rate] = [outcome(rate, seed) for seed in first]
            loss = statistics.mean(loss for loss, _ in outcomes[rate])
            tuned[rate] = loss if math.isfinite(loss) else math.inf
        rate = min(tuned, key=tuned.__getitem__)
        ends = {min(tuned): rate / 2, max(tuned): rate * 2}
        more = [ends[rate]] if len(args.rates) > 1 and rate in ends else []
    losses, accuracies = zip(*outcomes[rate], *(outcome(rate, seed) for seed in others))
    return rate, Outcome(list(losses), list(accuracies), tuned)


def spread(values: list[float], scale: float = 1, places: int = 4) -> str:
    """Mean and standard deviation, or the number of runs that diverged."""
    diverged = sum(not math.isfinite(value) for value in values)
    return f"{diverged} diverged" if diverged else spardl.spread(values, scale, places)


def least_diverging(outcome: Outcome) -> str:
    """The lowest rate at which a run diverged, if any did."""
    diverged = [rate for rate, loss in outcome.tuned.items() if loss == math.inf]
    return f"from {min(diverged):g}" if diverged else ""


class Method(NamedTuple):
    """A row of the table."""

    sizing: str
    ratio: float | None
    words: int  # of the psum
    reducer: Reducer | None  # None: dense
    decay: float = 1.0  # of the residual


def exact_blocks(sizing: str, ratio: float | None, k: int, size: int, args: Any) -> Method:
    """The exact sum of k blocks of each worker, with room for all of them."""
    count = blocks.count(size, args.block_size)
    reducer = OmniReduce((k - 0.5) / count, block_size=args.block_size)
    words = min(size, args.workers * k * args.block_size)
    return Method(f"blocks, {sizing}", ratio, words, reducer)


def methods(size: int, args: argparse.Namespace) -> list[Method]:
    """The rows for a bucket of `size` elements."""
    rows = [Method("dense", None, size, None)]
    selected = S2(args.density, block_size=args.block_size).plan(size, args.workers).selected
    rows.append(exact_blocks("all", None, selected, size, args))
    for sizing in args.sizings:
        for ratio in args.ratios:
            s2 = S2(
                args.density,
                block_size=args.block_size,
                rows=args.rows,
                sketch_ratio=ratio,
                sizing=sizing,
            )
            words, cols = s2.words(size, args.workers), s2.plan(size, args.workers).cols
            rows.append(Method(sizing if cols else f"{sizing}, exact", ratio, words, s2))
            if args.blocks and cols is not None:
                k = max(1, words // (args.workers * args.block_size))
                rows.append(exact_blocks(sizing, ratio, k, size, args))
                # What is not drawn is dropped: fed back, it would be stale, and end far higher.
                blind = RandomK(words / size)
                rows.append(Method(f"random, {sizing}", ratio, words, blind, decay=0.0))
    return rows


def sweep(args: argparse.Namespace) -> list[dict[str, Any]]:
    (size,) = jaxsparse.layout.plan(spardl.init(0, args.hidden)).bucket_sizes
    print(
        f"{'sizing':<14} {'ratio':>5} {'train loss':>18} {'accuracy, %':>15} {'words':>6} "
        f"{'rate':>6} {'diverges':>9}  below"
    )
    results: list[dict[str, Any]] = []
    for method in methods(size, args):
        if method.reducer is None:
            tx = jaxsparse.dense(momentum=args.momentum)
        else:
            tx = jaxsparse.error_feedback(
                method.reducer, momentum=args.momentum, decay=method.decay
            )
        rate, outcome = train(tx, args)
        accuracy = statistics.mean(outcome.accuracy)
        dense = statistics.mean(results[0]["accuracy"]) if results else accuracy
        below = 100 * (dense - accuracy)
        print(
            f"{method.sizing:<14} {'' if method.ratio is None else f'{method.ratio:g}':>5} "
            f"{spread(outcome.train_loss):>18} {spread(outcome.accuracy, 100, 2):>15} "
            f"{method.words:>6} {rate:>6g} {least_diverging(outcome):>9}  {below:.2f}",
            flush=True,
        )
        row = method._asdict() | {"reducer": repr(method.reducer), "rate": rate}
        results.append(row | outcome._asdict())
    return results


def received(args: argparse.Namespace) -> None:
    """Prints the words that a worker receives over the elements, as compiled."""
    jax.config.update("jax_num_cpu_devices", max(args.received))
    size, density = 2**20, args.density
    reducers = {
        "union": S2(density, sizing="union"),
        "local": S2(density, sizing="local"),
        "omni_reduce": OmniReduce(density),
        "sparse_all_gather": SparseAllGather(density),
        "dense": Dense(),
    }
    print(f"words received over elements, of {size} elements, density {density:g}, blocks of 256")
    print(f"{'workers':>7}  " + "  ".join(reducers))
    for workers in args.received:
        shares = [received_share(reducer, size, workers) for reducer in reducers.values()]
        cells = [f"{share:>{len(name)}.3f}" for name, share in zip(reducers, shares)]
        print(f"{workers:>7}  " + "  ".join(cells), flush=True)


def received_share(reducer: Reducer, size: int, workers: int) -> float:
    """The words that each of the workers receives in one exchange over its elements."""
    mesh = jax.make_mesh((workers,), ("data",), devices=jax.devices("cpu")[:workers])
    each, all_equal = PartitionSpec("data"), PartitionSpec()
    exchange = jax.jit(
        jax.shard_map(
            lambda x: reducer(x.reshape(-1), reducer.init(size), axis_name="data").mean,
            mesh=mesh,
            in_specs=each,
            out_specs=all_equal,
        )
    )
    sharding = NamedSharding(mesh, each)
    x = jax.ShapeDtypeStruct((workers, size), jnp.float32, sharding=sharding)
    return jaxsparse.traffic.wire_bytes(exchange, x).received / 4 / size


def draw(results: list[dict[str, Any]], args: argparse.Namespace) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), dpi=80, layout="constrained")
    axes = figure.subplots()
    dense = 100 * statistics.mean(results[0]["accuracy"])
    labels = {sizing: f"sized by {sizing}" for sizing in args.sizings}
    for sizing, label in (labels | {"blocks": "exact blocks"}).items():
        runs = [result for result in results if result["sizing"].startswith(sizing)]
        runs.sort(key=lambda run: run["words"])
        mean = [100 * statistics.mean(run["accuracy"]) for run in runs]
        axes.plot([run["words"] for run in runs], mean, marker="o", label=label)
        for run, height in zip(runs, mean):
            axes.annotate(
                "" if sizing == "blocks" else f"{run['ratio']:g}",
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
    add("--ratios", type=number(float, 1e-3), nargs="+", default=[0.1, 0.25, 0.5, 1.0, 2.0])
    add("--sizings", choices=["union", "local"], nargs="+", default=["union", "local"])
    add("--rows", type=number(int, 1), default=1, help="of the sketch")
    add("--block-size", type=number(int, 1), default=16)
    add("--density", type=number(float, 1e-6, math.nextafter(1, 2)), default=1 / 32)
    add("--workers", type=number(int, 1), default=8)
    add("--seeds", type=number(int, 0), nargs="+", default=[0, 1, 2, 3, 4], metavar="SEED")
    add("--steps", type=number(int, 1), default=400)
    add("--hidden", type=number(int, 32), default=128, help="width of the two hidden layers")
    add(
        "--rates",
        type=number(float, 0),
        nargs="+",
        default=[0.05, 0.1, 0.2, 0.4],
        help="learning rates to begin the choice with; one alone is taken as it is. They fall to "
        "a tenth along a cosine",
    )
    add("--momentum", type=number(float, 0, 1), default=0.9, help="of every method")
    add("--blocks", action="store_true", help="also as many words of exact blocks, and at random")
    add("--batch-size", type=number(int, 1), default=144, help="of all workers together")
    add("--figure", type=Path, metavar="PNG", help="also draw accuracies over words")
    add(
        "--received",
        type=number(int, 2),
        nargs="+",
        metavar="W",
        help="print the words that a worker receives, for each of these numbers of workers",
    )
    add("--json", type=Path, metavar="FILE", help="also write all results here")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.received:
        received(args)
        return
    where = {
        "jax": jax.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    print(", ".join(f"{name} {value}" for name, value in where.items()))
    print(
        f"{args.workers} simulated workers, blocks of {args.block_size}, density {args.density:g}, "
        f"{args.rows} rows, {args.steps} steps, rates {args.rates}, momentum {args.momentum:g}, "
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
