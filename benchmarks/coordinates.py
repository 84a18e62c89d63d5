"""Trains a logistic regression by stochastic coordinate descent, with dense and sparse all-gathers.

This is the second half of SparCML's classification case (Renggli et al., SC 2019, section 8.2).
Each worker owns one slice of the weights. In each iteration it moves some random weights of its
slice, all workers gather these moves, and everyone has the whole model again. A worker descends
along each of its weights by itself, against the loss of all training rows, which all hold.

    python benchmarks/coordinates.py
    python benchmarks/coordinates.py --workers 4
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import sparse_linear as data
import timing
from digits import number
from jax.sharding import Mesh
from jaxtyping import Array, Float
from scipy.sparse import csc_matrix

import jaxsparse
from jaxsparse import codecs
from jaxsparse.arrays.stream import SparseStream
from jaxsparse.comm import wire
from jaxsparse.outer.parallel import run_on_workers

ITERATIONS = 1500


class Moved(NamedTuple):
    """The weights that W workers move in one iteration, K each, with their columns of the rows.

    A weight's index is feature * columns + column. Columns of features are padded with zeros.
    """

    indices: np.ndarray  # int32[W, K]: increasing, in each worker's own slice
    slopes: np.ndarray  # float32[W, K]: step along the partial derivative
    rows: np.ndarray  # int32[W, room]: training rows that have the features of the weights
    places: np.ndarray  # int32[W, room]: place of the weight among the worker's K
    values: np.ndarray  # float32[W, room]: the rows' values of these features


class Draws:
    """Random weights to move, the same ones for every exchange.

    A worker moves `coordinates` weights in an iteration, K, or as many as the smallest slice has of
    features that occur. Their steps are `rate` over the curvature at most.
    """

    def __init__(
        self,
        rows: data.Rows,
        columns: int,
        *,
        workers: int,
        coordinates: int,
        rate: float,
        seed: int,
    ):
        self._by_feature = csc_matrix(rows.features)
        self._columns, self._seed, self._rate = columns, seed, rate
        self.size = rows.features.shape[1] * columns
        self.slice_size = -(-self.size // workers)
        self._lengths = np.diff(self._by_feature.indptr)
        occurring = np.flatnonzero(self._lengths)
        weights = (occurring[:, None] * columns + np.arange(columns)).reshape(-1)
        edges = np.searchsorted(weights, self.slice_size * np.arange(1, workers))
        self._slices = np.split(weights, edges)
        self.coordinates = min(coordinates, *map(len, self._slices))
        if not self.coordinates:
            raise ValueError(
                f"workers={workers}: a slice of the weights has no feature that occurs"
            )
        # The second derivative of the loss along a weight is at most a quarter of this.
        squares = np.asarray(rows.features.multiply(rows.features).mean(axis=0))[0]
        self._steps = rate * 4 / np.maximum(squares, np.finfo(np.float32).tiny)

    def _indices(self, iterations: int) -> Iterator[np.ndarray]:
        rng = np.random.default_rng(self._seed)
        for _ in range(iterations):
            own = [rng.choice(s, self.coordinates, False, shuffle=False) for s in self._slices]
            yield np.sort(np.stack(own), axis=1)

    def room(self, iterations: int) -> int:
        """The most entries that the columns of one worker's weights have in an iteration."""
        lengths = (self._lengths[i // self._columns] for i in self._indices(iterations))
        return max(int(own.sum(axis=1).max()) for own in lengths)

    def take(self, iterations: int) -> Iterator[Moved]:
        """The draws of all iterations."""
        room = self.room(iterations)
        for indices in self._indices(iterations):
            features = indices // self._columns
            shape = (len(indices), room)
            rows, places = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
            values = np.zeros(shape, np.float32)
            for worker, own in enumerate(features):
                part = self._by_feature[:, own]
                used = slice(0, part.nnz)
                rows[worker, used], values[worker, used] = part.indices, part.data
                places[worker, used] = np.repeat(np.arange(len(own)), np.diff(part.indptr))
            slopes = self._steps[features].astype(np.float32)
            yield Moved(indices.astype(np.int32), slopes, rows, places, values)


# Takes a worker's moves, their indices and the whole model's size, and returns all workers' moves.
Gather = Callable[[Float[Array, " K"], Moved, int], Float[Array, "W K"]]


def dense(moves: Float[Array, " K"], moved: Moved, size: int) -> Float[Array, "W K"]:
    """Gathers the workers' whole slices, zeros included."""
    workers, m = len(moved.indices), -(-size // len(moved.indices))
    rank = wire.axis_index("data")
    mine = jnp.zeros(m, jnp.float32).at[jnp.asarray(moved.indices)[rank] - rank * m].set(moves)
    whole = wire.all_gather(mine, "data").reshape(-1)
    return whole[jnp.asarray(moved.indices)].reshape(workers, -1)


def sparse(moves: Float[Array, " K"], moved: Moved, size: int) -> Float[Array, "W K"]:
    """Gathers indices and values, and concatenates them."""
    own = jnp.asarray(moved.indices)[wire.axis_index("data")]
    messages = wire.all_gather(codecs.COO.encode(SparseStream(own, moves), size), "data")
    decode = lambda words: codecs.COO.decode(words, moves.size, size, jnp.float32)
    return jax.vmap(decode)(messages).values


GATHERS: dict[str, Gather] = {"dense": dense, "sparse": sparse}


class Run(NamedTuple):
    """A trained model."""

    exchange: str
    losses: np.ndarray  # float[iterations]: train loss before each iteration
    accuracy: float  # on the test set
    received: float  # bytes that arrive at a worker in an iteration
    weights: np.ndarray  # float32[d]


def train(dataset: data.Dataset, draws: Draws, name: str, mesh: Mesh) -> Run:
    """Trains from zero by the exchange of this name."""
    labels, columns = jnp.asarray(dataset.train.labels), dataset.columns

    def step(weights: Array, scores: Array, moved: Moved) -> tuple[Array, Array, Array]:
        loss, slope = jax.value_and_grad(data.logistic)(scores, labels)
        column = jnp.asarray(moved.indices) % columns
        rank = wire.axis_index("data")
        indices, steps, rows, places, values = (jnp.asarray(x)[rank] for x in moved)
        along = values * slope[rows, (indices % columns)[places]]
        derivative = jnp.zeros(steps.shape, jnp.float32).at[places].add(along)
        moves = GATHERS[name](-steps * derivative, moved, draws.size)
        weights = weights.at[jnp.asarray(moved.indices)].add(moves)
        which = jnp.take_along_axis(column, jnp.asarray(moved.places), axis=1)
        change = jnp.take_along_axis(moves, jnp.asarray(moved.places), axis=1) * moved.values
        return weights, scores.at[jnp.asarray(moved.rows), which].add(change), loss

    run = run_on_workers(step, mesh, batch_argnums=(), donate_argnums=(0, 1))
    weights = jnp.zeros(draws.size, jnp.float32)
    scores = jnp.zeros((len(labels), columns), jnp.float32)
    state = jaxsparse.shard((weights, scores), mesh)
    received, losses = 0.0, list[float]()
    for moved in draws.take(ITERATIONS):
        if not losses:
            received = jaxsparse.traffic.wire_bytes(run, *state, moved).received
        *state, loss = run(*state, moved)
        losses.append(float(loss))  # waits: queued steps may deadlock
    trained = np.asarray(state[0])
    return Run(name, np.array(losses), data.accuracy_of(trained, dataset), received, trained)


def main() -> None:
    parser = timing.parser_of(__doc__)
    add = parser.add_argument
    add("--workers", type=number(int, 1, 9), default=8, metavar="W", help="1 to 8 (default: 8)")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.workers)
    mesh = jax.make_mesh((args.workers,), ("data",))
    dataset = data.source_chunks(2**18)
    draws = Draws(
        dataset.train, dataset.columns, workers=args.workers, coordinates=100, rate=0.5, seed=0
    )
    rows = len(dataset.train.labels)
    print(f"{rows:,} rows, {draws.size:,} weights, {draws.coordinates} moved by each worker")
    print(timing.head("exchange", "loss", "test", "received kB", "of dense", "max Δw"))
    first: Run | None = None
    for name in GATHERS:
        run = train(dataset, draws, name, mesh)
        first = first or run
        cells = (
            name,
            f"{run.losses[-1]:.3f}",
            f"{100 * run.accuracy:.1f} %",
            f"{run.received / 1000:,.1f}",
            f"{run.received / first.received:.5f}" if first.received else "-",
            f"{np.abs(run.weights - first.weights).max():.0e}",
        )
        print(timing.row(*cells), flush=True)


if __name__ == "__main__":
    main()
