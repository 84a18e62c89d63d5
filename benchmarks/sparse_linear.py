"""Trains linear classifiers of sparse rows with dense and with lossless sparse all-reduces.

This is SparCML's classification case (Renggli et al., SC 2019, section 8.2). A minibatch touches
few features, so its gradient is sparse by itself. Workers send less, and leave nothing out. The
rows are pieces of Python's own standard library, so nothing is downloaded.

    python benchmarks/sparse_linear.py
    python benchmarks/sparse_linear.py --model svm --exchange dense all_gather --workers 3

In several processes each device is a worker, and the seconds of the table are those of a network:

    python examples/multihost/launch.py -n 4 -- python benchmarks/sparse_linear.py
"""

import argparse
import functools
import sys
import sysconfig
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import timing
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from scipy.sparse import csr_matrix
from sklearn.preprocessing import normalize

import jaxsparse
from jaxsparse import collectives
from jaxsparse.arrays.stream import SparseStream, to_dense
from jaxsparse.collectives import AllReduced
from jaxsparse.comm import wire

_EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path[:0] = [str(_EXAMPLES), str(_EXAMPLES / "multihost")]

import processes
import shares
from digits import number

from jaxsparse.outer.parallel import run_on_workers

STDLIB = Path(sysconfig.get_path("stdlib"))
# Packages of CPython with several files each; some distributions leave out the last two.
PACKAGES = (
    *("asyncio", "email", "http", "importlib", "multiprocessing"),
    *("unittest", "urllib", "xml", "idlelib", "tkinter"),
)
CHUNK_LINES = 8


class Rows(NamedTuple):
    """Sparse rows and their labels."""

    features: csr_matrix  # float32[n, features], rows of length 1
    labels: np.ndarray  # int32[n], numbers of classes


class Dataset(NamedTuple):
    """Rows to train on, rows to test on, and the number of their classes."""

    train: Rows
    test: Rows
    classes: int  # each has a column of the weights


def source_chunks(features: int) -> Dataset:
    """Chunks of source code, with the package of the standard library that each comes from.

    Test chunks come from other files than training chunks. A chunk that also occurs in training is
    not tested. Trigrams are hashed to `features`. Packages of fewer than two files in this Python
    are left out.
    """
    present = [name for name in PACKAGES if len(python_files(name)) > 1]
    train: list[tuple[str, int]] = []
    test: list[tuple[str, int]] = []
    for label, name in enumerate(present):
        # One file in four is for tests: of all sizes, and the same for every seed.
        for i, file in enumerate(python_files(name)):
            (test if i % 4 == 1 else train).extend((chunk, label) for chunk in chunks(file))
    seen = {chunk for chunk, _ in train}
    test = [(chunk, label) for chunk, label in test if chunk not in seen]
    return Dataset(_rows(train, features), _rows(test, features), len(present))


def python_files(package: str) -> list[Path]:
    """The package's own source by size, without its tests."""
    root = STDLIB / package
    own = (path for path in root.rglob("*.py"))
    files = [p for p in own if not any("test" in part for part in p.relative_to(root).parts[:-1])]
    return sorted(files, key=lambda path: (path.stat().st_size, path))


def chunks(file: Path) -> list[str]:
    """The file's text in chunks of a few lines, with uniform white space and no blank lines.

    A last chunk that is too short for a trigram, such as a bracket, has no features, and is left
    out.
    """
    lines = [" ".join(line.split()) for line in file.read_text("utf-8").splitlines()]
    lines = [line for line in lines if line]
    starts = range(0, len(lines), CHUNK_LINES)
    found = ["\n".join(lines[start : start + CHUNK_LINES]) for start in starts]
    return [chunk for chunk in found if len(chunk) > 2]


def _rows(examples: Iterable[tuple[str, int]], features: int) -> Rows:
    """Counts of trigrams. A feature is the CRC-32 of a trigram, modulo `features`."""
    columns, values, ends, labels = list[int](), list[int](), [0], []
    for text, label in examples:
        counts: Counter[int] = Counter()
        for trigram, count in Counter(text[i : i + 3] for i in range(len(text) - 2)).items():
            counts[zlib.crc32(trigram.encode()) % features] += count  # str's own hash is salted
        columns.extend(counts)
        values.extend(counts.values())
        ends.append(len(columns))
        labels.append(label)
    parts = np.array(values, np.float32), np.array(columns, np.int32), np.array(ends, np.int32)
    matrix = csr_matrix(parts, shape=(len(labels), features))
    return Rows(normalize(matrix), np.array(labels, np.int32))


# --- batches, with static shapes


class Batch(NamedTuple):
    """The rows of all workers in one step, with small numbers for the features that they touch.

    There are W workers with b rows each. A row has at most z features, and a worker's rows touch at
    most t features.
    """

    # int32[W * t]: each worker's distinct features, padded with the number of all features
    touched: np.ndarray
    positions: np.ndarray  # int32[W * b, z]: places in the worker's part of `touched`
    values: np.ndarray  # float32[W * b, z]: 0 where a row has fewer features
    labels: np.ndarray  # int32[W * b]


class Room(NamedTuple):
    """The static shapes that the fullest step of a run needs, so that nothing is ever left out."""

    features: int  # that the rows of one worker touch
    row: int  # features of a row
    to_owner: int  # gradient entries of one worker that lie in one of W equal ranges
    of_owner: int  # those of all workers together, where each index counts once


class Batches:
    """Random batches, the same ones for every exchange, of rows chosen with replacement.

    Each of W workers has b rows, `per_worker`, and a feature has `columns` gradient entries.
    """

    def __init__(
        self, rows: Rows, workers: int, columns: int, *, per_worker: int, steps: int, seed: int
    ):
        size = (steps, workers, per_worker)
        self._chosen = np.random.default_rng(seed).integers(len(rows.labels), size=size)
        self._rows = rows
        self.steps = steps
        entries = -(-rows.features.shape[1] * columns // workers)  # elements of a range
        features = row = to_owner = of_owner = 1
        for step in self._chosen:
            touched = [np.unique(rows.features[own].indices) for own in step]
            features = max(features, *map(len, touched))
            row = max(row, int(np.diff(rows.features[step.reshape(-1)].indptr).max()))
            owned = [_owned(own, columns, entries) for own in touched]
            to_owner = max(to_owner, *owned)
            of_owner = max(of_owner, _owned(np.unique(np.concatenate(touched)), columns, entries))
        self.room = Room(features, row, to_owner, of_owner)

    def __iter__(self) -> Iterator[Batch]:
        for step in self._chosen:
            parts = [self._worker(own) for own in step]
            yield Batch(*(np.concatenate(part) for part in zip(*parts)))

    def _worker(self, chosen: np.ndarray) -> Batch:
        own = self._rows.features[chosen]
        touched, place = np.unique(own.indices, return_inverse=True)
        lengths = np.diff(own.indptr)
        at = (
            np.repeat(np.arange(len(chosen)), lengths),
            np.arange(own.nnz) - np.repeat(own.indptr[:-1], lengths),
        )
        positions = np.zeros((len(chosen), self.room.row), np.int32)
        values = np.zeros(positions.shape, np.float32)
        positions[at], values[at] = place, own.data
        padded = np.full(self.room.features, own.shape[1], np.int32)
        padded[: len(touched)] = touched
        return Batch(padded, positions, values, self._rows.labels[chosen])


def _owned(features: np.ndarray, columns: int, entries: int) -> int:
    """The most gradient entries that these features have in one range of `entries` elements."""
    if not len(features):
        return 0
    indices = features[:, None].astype(np.int64) * columns + np.arange(columns)
    return int(np.bincount((indices // entries).reshape(-1)).max())


# --- models: scores are features times weights


def logistic(scores: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()


def svm(scores: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean of the hinge losses of each class against the rest, added up."""
    targets = 2 * jax.nn.one_hot(labels, scores.shape[1]) - 1
    return jax.nn.relu(1 - targets * scores).sum(axis=1).mean()


LOSSES = {"logistic": logistic, "svm": svm}


def accuracy_of(weights: np.ndarray, dataset: Dataset) -> float:
    """The share of test rows that flat weights label rightly."""
    scores = dataset.test.features @ weights.reshape(-1, dataset.classes)
    return float(np.mean(scores.argmax(axis=1) == dataset.test.labels))


# --- exchanges, all of them lossless

Exchange = Callable[..., AllReduced]  # takes a stream and the vector's size


def dense(stream: SparseStream, size: int, *, axis_name: str) -> AllReduced:
    """All-reduce of the whole gradient, zeros included."""
    mine = to_dense(stream, size)
    return AllReduced(wire.psum(mine, axis_name), jnp.zeros_like(mine), jnp.int32(0))


def exchanges(room: Room) -> dict[str, Exchange]:
    """All exchanges by name, with this room."""
    split = functools.partial(
        collectives.split_allgather, capacity=room.to_owner, union_capacity=room.of_owner
    )
    return {
        "dense": dense,
        "recursive_double": collectives.recursive_double,
        "split_allgather": split,
        "all_gather": functools.partial(collectives.all_gather_sum, distinct=True),
    }


# --- training


class Task(NamedTuple):
    """A model, its data and its settings, which are the same for all exchanges."""

    model: str
    dataset: Dataset
    batches: Batches
    lr: float = 16.0  # of plain SGD

    @property
    def size(self) -> int:
        """Number of weights, d."""
        return self.dataset.train.features.shape[1] * self.dataset.classes


class Run(NamedTuple):
    """One model trained with one exchange."""

    losses: np.ndarray  # float[steps]
    accuracy: float  # on the test set, at the end
    payload: int  # bytes that a worker hands to collectives in one step
    received: float  # bytes that arrive at a worker in one step
    seconds: float  # median time of a step. Devices that share a processor say nothing by it
    weights: np.ndarray  # float32[d], at the end


def step_of(task: Task, exchange: Exchange) -> Callable[..., tuple[jax.Array, ...]]:
    """The step of one worker, given all weights and its own rows.

    The whole step is one worker's, because each differentiates weights of its own, those that its
    rows touch. `jaxsparse.value_and_grad` would make gradients of all weights.
    """
    columns = task.dataset.classes

    def loss_of(weights: jax.Array, batch: Batch) -> jax.Array:
        scores = jnp.einsum("bz,bzc->bc", batch.values, weights[batch.positions])
        return LOSSES[task.model](scores, jnp.asarray(batch.labels))

    def step(weights: jax.Array, batch: Batch) -> tuple[jax.Array, ...]:
        # Take only the weights that the rows touch, so that no gradient of all weights is made.
        touched = weights.reshape(-1, columns).at[batch.touched].get(mode="fill", fill_value=0)
        loss, gradient = jax.value_and_grad(loss_of)(touched, batch)
        indices = batch.touched[:, None] * columns + jnp.arange(columns, dtype=jnp.int32)[None]
        stream = SparseStream(jnp.minimum(indices, task.size).reshape(-1), gradient.reshape(-1))
        summed = exchange(stream, task.size, axis_name="data")
        weights = weights - (task.lr / jax.lax.axis_size("data")) * summed.total
        return weights, jaxsparse.PerWorker.wrap(loss), summed.overflow

    return step


def train(task: Task, exchange: Exchange, mesh: Mesh) -> Run:
    """Trains from zero.

    Raises:
        RuntimeError: an entry found no room, so that the exchange was not lossless.
    """
    step = run_on_workers(step_of(task, exchange), mesh, donate_argnums=0)
    weights = jaxsparse.shard(jnp.zeros(task.size, jnp.float32), mesh)
    split = NamedSharding(mesh, PartitionSpec("data"))
    moved = jaxsparse.traffic.wire_bytes(step, weights, placed(next(iter(task.batches)), split))
    losses, seconds = list[float](), list[float]()
    for i, rows in enumerate(task.batches, start=1):
        batch = placed(rows, split)
        began = time.perf_counter()
        weights, loss, overflow = step(weights, batch)
        # Of this process's workers, until the end. It waits: queued steps may deadlock.
        losses.append(float(np.mean([own.data for own in loss.value.addressable_shards])))
        seconds.append(time.perf_counter() - began)
        if int(overflow):
            raise RuntimeError(f"{int(overflow)} entries found no room in step {i}")
    trained = np.asarray(weights)
    # Processes have equally many workers.
    means = multihost_utils.process_allgather(np.array(losses)).reshape(-1, len(losses)).mean(0)
    return Run(
        *(means, accuracy_of(trained, task.dataset), moved.payload, moved.received),
        *(float(np.median(seconds)), trained),
    )


def placed(batch: Batch, split: NamedSharding) -> Batch:
    """The batch over the devices. All processes have all of it, and keep the rows of their own."""
    own = lambda x: x[shares.own_rows(len(x), split)]
    return Batch(*(shares.to_global(own(x), len(x), split) for x in batch))


HEAD = (
    *("model", "exchange", "loss", "test", "payload kB", "received kB", "of dense", "max Δw"),
    "ms a step",
)


def cells(run: Run, base: Run | None) -> tuple[str, ...]:
    """A row of the table. "of dense" and "Δw" are against the dense run."""
    share = f"{run.received / base.received:.3f}" if base and base.received else "-"
    return (
        f"{run.losses[-max(1, len(run.losses) // 16) :].mean():.3f}",
        f"{100 * run.accuracy:.1f} %",
        *(f"{x / 1000:,.0f}" for x in (run.payload, run.received)),
        share,
        f"{np.abs(run.weights - base.weights).max():.0e}" if base else "-",
        f"{1000 * run.seconds:.1f}",
    )


def main() -> None:
    args = flags().parse_args()
    jax.config.update("jax_platforms", "cpu")
    processes.join(args, flags())
    if jax.distributed.is_initialized():
        args.workers = jax.device_count()
    else:
        jax.config.update("jax_num_cpu_devices", args.workers)
    mesh = jax.make_mesh((args.workers,), ("data",))
    say = print if jax.process_index() == 0 else lambda *_, **__: None
    dataset = source_chunks(2**18)
    batches = Batches(
        *(dataset.train, args.workers, dataset.classes), per_worker=8, steps=args.steps, seed=0
    )
    rows, features = dataset.train.features.shape
    entries, size = batches.room.features * dataset.classes, features * dataset.classes
    most = np.bincount(dataset.train.labels).argmax()
    say(
        f"{rows:,} rows of {features:,} features, {dataset.classes} classes; {args.workers} "
        f"workers: {entries:,} entries of the gradient's {size:,} ({100 * entries / size:.2f} %). "
        f"Always guessing the commonest class: {100 * np.mean(dataset.test.labels == most):.1f} %"
    )
    say(timing.head(*HEAD))
    with jaxsparse.fail_at_once():
        for model in args.model:
            task, base = Task(model, dataset, batches), None
            for name in args.exchange:
                run = train(task, exchanges(batches.room)[name], mesh)
                base = run if name == "dense" else base
                say(timing.row(model, name, *cells(run, base)), flush=True)


def flags() -> argparse.ArgumentParser:
    parser = timing.parser_of(__doc__)
    add, names = parser.add_argument, list(exchanges(Room(1, 1, 1, 1)))
    add("--model", nargs="+", choices=LOSSES, default=list(LOSSES), help="(default: both)")
    add("--exchange", nargs="+", choices=names, default=names, help="(default: all)")
    add("--workers", type=number(int, 1, 9), default=8, metavar="W", help="1 to 8 (default: 8)")
    add("--steps", type=number(int, 1), default=160, help="(default: 160)")
    processes.add_flags(parser)
    return parser


if __name__ == "__main__":
    main()
