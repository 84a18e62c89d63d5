"""EF21-SGDM beside classic error feedback: logistic regression on digits, batches of one or of all.

    python benchmarks/ef21.py

Each of ten simulated workers has digits of its own, sorted by label, so that the workers' gradients
differ even at the minimum. A worker draws `--batches` of its images in each step (0: all of them),
and sends the largest hundredth of 650 entries. Rates are constant. The table has norms of the full
gradient of the regularised loss, which is convex: medians over the last fifth of each run, and of
these the median and range over seeds of the draws. Nothing is downloaded.
"""

import argparse
import itertools
import statistics
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import timing

import jaxsparse
from jaxsparse.arrays.printing import aligned
from jaxsparse.outer.parallel import run_on_workers
from jaxsparse.systems import TopK

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import digits

CLASSES = 10


def data_of(workers: int) -> tuple[jax.Array, jax.Array]:
    """Images [W, n, 65], with a constant pixel, and labels [W, n]: a few digits a worker."""
    train, _ = digits.load()
    order = np.argsort(train.labels, kind="stable")
    n = len(order) // workers
    order = order[: n * workers].reshape(workers, n)
    images = np.concatenate([train.images, np.ones((len(train.images), 1), np.float32)], axis=1)
    return jnp.asarray(images[order]), jnp.asarray(train.labels[order])


def loss_of(params: jax.Array, images: jax.Array, labels: jax.Array, l2: float) -> jax.Array:
    logits = images @ params
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss + 0.5 * l2 * jnp.sum(jnp.square(params))


def rows(args: argparse.Namespace) -> dict[str, Any]:
    """Transformations by name. Momenta are averages of gradients, with one factor for all."""
    everything: Any = {"is_dense": lambda path, shape: False}
    top_k = TopK(args.density, selection="exact")
    average = lambda: optax.ema(args.momentum, debias=False)
    return {
        "dense": optax.chain(jaxsparse.dense(), average()),
        "top-k, error feedback": jaxsparse.error_feedback(top_k, **everything),
        "top-k, error feedback, momentum behind": optax.chain(
            jaxsparse.error_feedback(top_k, **everything), average()
        ),
        "top-k, error feedback of momenta": optax.chain(
            jaxsparse.per_worker(average()), jaxsparse.error_feedback(top_k, **everything)
        ),
        "EF21-SGD, no momentum": jaxsparse.ef21_sgdm(top_k, momentum=None, **everything),
        "EF21-SGDM": jaxsparse.ef21_sgdm(top_k, momentum=args.momentum, **everything),
    }


def train(tx: Any, args: argparse.Namespace, batch: int, rate: float, seed: int) -> np.ndarray:
    """The norm of the full gradient at each of `args.points` times of a run."""
    images, labels = data_of(args.workers)
    shape = args.points, args.steps // args.points, args.workers, batch or 1
    draws = jax.random.randint(jax.random.key(seed), shape, 0, images.shape[1])
    tx = optax.chain(tx, optax.scale_by_learning_rate(rate))

    def step(state: Any, own: Any) -> Any:
        params, opt_state = state
        x, y, chosen = jax.tree.map(lambda a: a[0], own)
        drawn = (x[chosen], y[chosen]) if batch else (x, y)
        gradient = jax.grad(loss_of)(params, *drawn, args.l2)
        updates, opt_state = tx.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    parallel = run_on_workers(step, args.workers)
    everything = images.reshape(-1, images.shape[-1]), labels.reshape(-1)

    def some(state: Any, chosen: jax.Array) -> tuple[Any, jax.Array]:
        run = lambda state, c: (parallel(state, (images, labels, c)), None)
        state, _ = jax.lax.scan(run, state, chosen)
        return state, jnp.linalg.norm(jax.grad(loss_of)(state[0], *everything, args.l2))

    params = jnp.zeros((images.shape[-1], CLASSES))
    state = jaxsparse.shard((params, tx.init(params)), args.workers)
    _, norms = jax.jit(lambda state, draws: jax.lax.scan(some, state, draws))(state, draws)
    return np.asarray(norms)


def floors(runs: list[list[float]]) -> list[float]:
    """Each seed's median over the last fifth of its run."""
    return [statistics.median(run[-len(run) // 5 :]) for run in runs]


def table(found: dict[tuple[str, str], list[list[float]]]) -> str:
    """The runs' floors, by exchange and setting."""
    names, settings = (list(dict.fromkeys(each)) for each in zip(*found))
    cells = [("exchange", *settings)]
    for name in names:
        row = [name]
        for setting in settings:
            ends = floors(found[name, setting])
            spread = f" ({min(ends):.2g} to {max(ends):.2g})" if len(ends) > 1 else ""
            row.append(f"{statistics.median(ends):.2g}{spread}")
        cells.append(tuple(row))
    return "\n".join(aligned(cells, right=range(1, len(cells[0]))))


def main() -> None:
    parser = timing.parser_of(__doc__)
    add = parser.add_argument
    add("--workers", type=int, default=10)
    add("--steps", type=int, default=10_000)
    add("--points", type=int, default=50, help="times at which the full gradient is taken")
    add("--batches", type=int, nargs="+", default=[0, 1], help="of a worker; 0: all that it has")
    add("--density", type=float, default=0.01)
    add("--momentum", type=float, default=0.99, help="1 - eta")
    add("--rates", type=float, nargs="+", default=[0.03, 0.1])
    add("--l2", type=float, default=0.01)
    add("--seeds", type=int, default=5)
    args = parser.parse_args()
    timing.where()
    found: dict[tuple[str, str], list[list[float]]] = {}
    for batch, rate in itertools.product(args.batches, args.rates):
        setting = f"{f'batch {batch}' if batch else 'full batch'}, rate {rate:g}"
        for name, tx in rows(args).items():
            seeds = range(args.seeds if batch else 1)  # all draw the same full batches
            runs = [train(tx, args, batch, rate, seed).tolist() for seed in seeds]
            found[name, setting] = runs
            print(setting, name, *(f"{end:.2g}" for end in sorted(floors(runs))), flush=True)
    print(table(found))


if __name__ == "__main__":
    main()
