"""Trains linear classifiers of sparse rows with dense and with lossless sparse all-reduces.

This is SparCML's classification case (Renggli et al., SC 2019, section 8.2). A minibatch touches
few features, so its gradient is sparse by itself. Workers send less, and leave nothing out.

    python examples/sparse_linear/train.py
    python examples/sparse_linear/train.py --model svm --exchange dense auto --workers 3
    python examples/sparse_linear/train.py --libsvm url_combined.bz2

In several processes each device is a worker, and the table has seconds, those of the network
included:

    python examples/multihost/launch.py -n 4 -- python examples/sparse_linear/train.py
"""

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.progress import Progress

import jaxsparse

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "multihost")]

import data
import models
import processes
import results
import shares
from batches import Batch, Batches
from digits import number
from exchange import Exchange, exchanges, fastest

SIZES = {"features": (2**18, 2**14), "steps": (160, 8), "batch_size": (8, 2)}  # full, --small
POINTS = 16  # approximate number of points of a curve
EXCHANGES = ("dense", "recursive_double", "split_allgather", "all_gather", "auto")


class Task(NamedTuple):
    """A model, its data and its settings, which are the same for all exchanges."""

    model: str
    dataset: data.Dataset
    batches: Batches
    lr: float

    @property
    def columns(self) -> int:
        """Number of columns of the weights."""
        return models.columns_of(len(self.dataset.classes))

    @property
    def size(self) -> int:
        """Number of weights, d."""
        return self.dataset.train.features.shape[1] * self.columns

    @property
    def entries(self) -> int:
        """Room for the entries of one worker's gradient, k."""
        return self.batches.room.features * self.columns


def step_of(task: Task, exchange: Exchange) -> Callable[..., tuple[jax.Array, ...]]:
    """The step of one worker, given all weights and its own rows.

    The whole step is one worker's, because each differentiates weights of its own, those that its
    rows touch. `jaxsparse.value_and_grad` would make gradients of all weights.
    """
    columns = task.columns

    def loss_of(weights: jax.Array, batch: Batch) -> jax.Array:
        scores = jnp.einsum("bz,bzc->bc", batch.values, weights[batch.positions])
        return models.LOSSES[task.model](scores, jnp.asarray(batch.labels))

    def step(weights: jax.Array, batch: Batch) -> tuple[jax.Array, ...]:
        # Take only the weights that the rows touch, so that no gradient of all weights is made.
        touched = weights.reshape(-1, columns).at[batch.touched].get(mode="fill", fill_value=0)
        loss, gradient = jax.value_and_grad(loss_of)(touched, batch)
        indices = batch.touched[:, None] * columns + jnp.arange(columns, dtype=jnp.int32)[None]
        stream = jaxsparse.stream.SparseStream(
            jnp.minimum(indices, task.size).reshape(-1), gradient.reshape(-1)
        )
        summed = exchange(stream, task.size, axis_name="data")
        workers = jax.lax.axis_size("data")
        weights = weights - (task.lr / workers) * summed.total
        return weights, jaxsparse.PerWorker.wrap(loss), summed.overflow

    return step


def train(
    task: Task,
    exchange: Exchange,
    mesh: Mesh,
    *,
    name: str,
    advance: Callable[[], object] = lambda: None,
) -> results.Run:
    """Trains from zero, calling `advance` after every step.

    Raises:
        RuntimeError: an entry found no room, so that the exchange was not lossless.
    """
    step = jaxsparse.data_parallel(step_of(task, exchange), mesh, donate_argnums=0)
    weights = jaxsparse.shard(jnp.zeros(task.size, jnp.float32), mesh)
    split = NamedSharding(mesh, PartitionSpec("data"))
    moved = jaxsparse.traffic.wire_bytes(step, weights, placed(next(iter(task.batches)), split))
    steps = task.batches.steps
    curve: list[tuple[int, float]] = []
    losses: list[float] = []
    seconds: list[float] = []
    for i, rows in enumerate(task.batches, start=1):
        batch = placed(rows, split)
        began = time.perf_counter()
        weights, loss, overflow = step(weights, batch)
        # Of this process's workers, until the end. It waits: queued steps may deadlock.
        losses.append(float(np.mean([own.data for own in loss.value.addressable_shards])))
        seconds.append(time.perf_counter() - began)
        if int(overflow):
            raise RuntimeError(f"{name}: {int(overflow)} entries found no room in step {i}")
        if i % max(1, steps // POINTS) == 0 or i == steps:
            curve.append((i, float(np.mean(losses))))
            losses = []
        advance()
    trained = np.asarray(weights)
    test = task.dataset.test
    guesses = models.predicted(test.features @ trained.reshape(-1, task.columns))
    points, own = zip(*curve)
    # Processes have equally many workers.
    means = multihost_utils.process_allgather(np.array(own)).reshape(-1, len(own)).mean(0)
    return results.Run(
        model=task.model,
        exchange=name,
        steps=np.array(points),
        loss=means,
        accuracy=float(np.mean(guesses == test.labels)),
        payload=moved.payload,
        received=moved.received,
        seconds=float(np.median(seconds)),
        weights=trained,
    )


def placed(batch: Batch, split: NamedSharding) -> Batch:
    """The batch over the devices. All processes have all of it, and keep the rows of their own."""
    own = lambda x: x[shares.own_rows(len(x), split)]
    return Batch(*(shares.to_global(own(x), len(x), split) for x in batch))


def compare(
    task: Task, names: Sequence[str], best: str, mesh: Mesh, progress: Progress
) -> list[results.Run]:
    """One run for each exchange. "auto" stands for `best`, which is not trained twice."""
    known = exchanges(task.batches.room)
    runs: dict[str, results.Run] = {}
    for name in [best if name == "auto" else name for name in names]:
        if name not in runs:
            bar = progress.add_task(f"{task.model}, {name}", total=task.batches.steps)
            advance = functools.partial(progress.advance, bar)
            runs[name] = train(task, known[name], mesh, name=name, advance=advance)
    return [
        runs[best]._replace(exchange="auto") if name == "auto" else runs[name] for name in names
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = flags()
    args = parser.parse_args(argv)
    for name, sizes in SIZES.items():
        if getattr(args, name) is None:
            setattr(args, name, sizes[args.small])
    dataset = load(args, parser)
    jax.config.update("jax_platforms", "cpu")
    processes.join(args, parser)
    if jax.distributed.is_initialized():
        args.workers = jax.device_count()
    else:
        jax.config.update("jax_num_cpu_devices", args.workers)
    mesh = jax.make_mesh((args.workers,), ("data",))

    batches = Batches(
        dataset.train,
        workers=args.workers,
        per_worker=args.batch_size,
        columns=models.columns_of(len(dataset.classes)),
        steps=args.steps,
        seed=args.seed,
    )
    tasks = [Task(model, dataset, batches, args.lr) for model in dict.fromkeys(args.model)]
    entries, size = tasks[0].entries, tasks[0].size
    link = jaxsparse.Link(args.latency * 1e-6, args.bandwidth * 1e9 / 8)
    best = ""
    if "auto" in args.exchange:
        best = fastest(batches.room, entries, size, args.workers, link)

    rows, features = dataset.train.features.shape
    title = (
        f"{rows:,} rows of {features:,} features, {len(dataset.classes)} classes; {args.workers} "
        f"workers, {args.batch_size} rows each: {entries:,} entries of the gradient's {size:,} "
        f"({100 * entries / size:.2f} %)."
    )
    caption = (
        f"Always guessing the commonest class: {100 * dataset.majority:.1f} %. Bytes are those of "
        "one worker and step, from the compiled program. Δw: largest difference from the weights "
        "that the dense exchange gives."
    )
    if best:
        caption += f" auto takes {best} on {args.bandwidth:g} Gbit/s and {args.latency:g} µs."
    console = Console(quiet=jax.process_index() > 0)
    console.print(title, highlight=False)
    runs: list[results.Run] = []
    with jaxsparse.fail_at_once(), Progress(console=console) as progress:
        for task in tasks:
            runs += compare(task, list(dict.fromkeys(args.exchange)), best, mesh, progress)

    head = results.TIMED if jax.process_count() > 1 else results.HEAD
    console.print(results.table(runs, head))
    console.print(caption, highlight=False)
    if jax.process_index() == 0:
        settings = vars(args) | {"majority": dataset.majority}
        results.save(runs, head, title, caption, settings, args.out)
    console.print(f"Table, curves and figure are in {args.out}", highlight=False, soft_wrap=True)


def load(args: argparse.Namespace, parser: argparse.ArgumentParser) -> data.Dataset:
    """Loads the data that the flags ask for. Errors name the flag."""
    try:
        if args.libsvm:
            dataset = data.libsvm(args.libsvm)
        else:
            packages = data.SMALL_PACKAGES if args.small else data.PACKAGES
            dataset = data.source_chunks(args.features, packages)
    except ValueError as error:
        parser.error(str(error))
    features = dataset.train.features.shape[1]
    size = features * models.columns_of(len(dataset.classes))
    if size >= 2**31:
        flag = f"--libsvm {args.libsvm}" if args.libsvm else f"--features {features}"
        parser.error(f"{flag}: {size:,} weights are too many for indices of 32 bits")
    return dataset


def flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--model",
        nargs="+",
        choices=list(models.LOSSES),
        default=list(models.LOSSES),
        help="logistic regression, support vector machine (default: both)",
    )
    add(
        "--exchange",
        nargs="+",
        choices=[*EXCHANGES, "dsar_split_allgather", "ring"],
        default=list(EXCHANGES),
        help=f"(default: {' '.join(EXCHANGES)})",
    )
    add(
        "--bandwidth",
        type=number(float, 1e-3),
        default=10.0,
        metavar="GBIT/S",
        help="of the network for which auto takes the fastest (default: 10)",
    )
    add(
        "--latency",
        type=number(float, 1e-3),
        default=50.0,
        metavar="MICROSECONDS",
        help="of that network (default: 50)",
    )
    add("--libsvm", type=Path, metavar="FILE", help="rows in libsvm's format instead")
    add(
        "--features",
        type=number(int, 2**8),
        metavar="D",
        help="to hash trigrams to (default: 2^18)",
    )
    add(
        "--workers",
        type=number(int, 1, 9),
        default=8,
        metavar="W",
        help="1 to 8 (default: 8). In several processes, the number of their devices",
    )
    add(
        "--batch-size",
        type=number(int, 1),
        metavar="ROWS",
        help="of each worker (default: 8)",
    )
    add("--steps", type=number(int, 1), help="(default: 160)")
    add("--lr", type=number(float, 0), default=16.0, help="of plain SGD (default: 16)")
    add("--seed", type=number(int, 0), default=0, help="of the batches (default: 0)")
    add("--small", action="store_true", help="three packages, and smaller defaults: a trial")
    add(
        "--out",
        type=Path,
        default=Path("out/sparse_linear"),
        metavar="FOLDER",
        help="of table, curves and figure (default: out/sparse_linear)",
    )
    processes.add_flags(parser)
    return parser


if __name__ == "__main__":
    main()
