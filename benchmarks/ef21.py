"""EF21-SGDM beside classic error feedback: logistic regression on digits, batches of one or of all.

    python benchmarks/ef21.py

Each of ten simulated workers has digits of its own, sorted by label, so that the workers' gradients
differ even at the minimum. A worker draws one of its images in each step, or takes all of them (0),
and sends the largest hundredth of 650 entries. Rates are constant. The table has norms of the full
gradient of the regularised loss, which is convex: medians over the last fifth of each run, and of
these the median and range over seeds of the draws. Nothing is downloaded.
"""

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
from jaxsparse import contrib
from jaxsparse.outer.parallel import run_on_workers
from jaxsparse.reducers import TopK

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import digits

CLASSES, WORKERS, STEPS, SEEDS = 10, 10, 10_000, 5
POINTS = 50  # times at which the full gradient is taken
DENSITY, MOMENTUM, L2 = 0.01, 0.99, 0.01


def data_of() -> tuple[jax.Array, jax.Array]:
    """Images [W, n, 65], with a constant pixel, and labels [W, n]: a few digits a worker."""
    train, _ = digits.load()
    order = np.argsort(train.labels, kind="stable")
    n = len(order) // WORKERS
    order = order[: n * WORKERS].reshape(WORKERS, n)
    images = np.concatenate([train.images, np.ones((len(train.images), 1), np.float32)], axis=1)
    return jnp.asarray(images[order]), jnp.asarray(train.labels[order])


def loss_of(params: jax.Array, images: jax.Array, labels: jax.Array) -> jax.Array:
    logits = images @ params
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss + 0.5 * L2 * jnp.sum(jnp.square(params))


def rows() -> dict[str, Any]:
    """Transformations by name. Momenta are averages of gradients, with one factor for all."""
    everything: Any = {"is_dense": lambda path, shape: False}
    top_k = TopK(DENSITY, selection="exact")
    average = lambda: optax.ema(MOMENTUM, debias=False)
    return {
        "dense": optax.chain(jaxsparse.dense(), average()),
        "top-k, error feedback": jaxsparse.exchange(top_k, **everything),
        "top-k, error feedback, momentum behind": optax.chain(
            jaxsparse.exchange(top_k, **everything), average()
        ),
        "top-k, error feedback of momenta": optax.chain(
            jaxsparse.per_worker(average()), jaxsparse.exchange(top_k, **everything)
        ),
        "EF21-SGD, no momentum": contrib.ef21_sgdm(top_k, momentum=None, **everything),
        "EF21-SGDM": contrib.ef21_sgdm(top_k, momentum=MOMENTUM, **everything),
    }


def train(tx: Any, batch: int, rate: float, seed: int) -> np.ndarray:
    """The norm of the full gradient at each of `POINTS` times of a run."""
    images, labels = data_of()
    shape = POINTS, STEPS // POINTS, WORKERS, batch or 1
    draws = jax.random.randint(jax.random.key(seed), shape, 0, images.shape[1])
    tx = optax.chain(tx, optax.scale_by_learning_rate(rate))

    def step(state: Any, own: Any) -> Any:
        params, opt_state = state
        x, y, chosen = jax.tree.map(lambda a: a[0], own)
        drawn = (x[chosen], y[chosen]) if batch else (x, y)
        gradient = jax.grad(loss_of)(params, *drawn)
        updates, opt_state = tx.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    parallel = run_on_workers(step, WORKERS)
    everything = images.reshape(-1, images.shape[-1]), labels.reshape(-1)

    def some(state: Any, chosen: jax.Array) -> tuple[Any, jax.Array]:
        run = lambda state, c: (parallel(state, (images, labels, c)), None)
        state, _ = jax.lax.scan(run, state, chosen)
        return state, jnp.linalg.norm(jax.grad(loss_of)(state[0], *everything))

    params = jnp.zeros((images.shape[-1], CLASSES))
    state = jaxsparse.shard((params, tx.init(params)), WORKERS)
    _, norms = jax.jit(lambda state, draws: jax.lax.scan(some, state, draws))(state, draws)
    return np.asarray(norms)


def floor(norms: np.ndarray) -> float:
    """The median over the last fifth of a run."""
    return float(np.median(norms[-len(norms) // 5 :]))


def main() -> None:
    timing.where()
    settings = list(itertools.product((0, 1), (0.03, 0.1)))
    names = (f"{f'batch {batch}' if batch else 'full batch'}, rate {r:g}" for batch, r in settings)
    print(timing.head("exchange", *names))
    for name, tx in rows().items():
        cells = []
        for batch, rate in settings:
            seeds = range(SEEDS if batch else 1)  # all draw the same full batches
            ends = [floor(train(tx, batch, rate, seed)) for seed in seeds]
            spread = f" ({min(ends):.2g} to {max(ends):.2g})" if len(ends) > 1 else ""
            cells.append(f"{statistics.median(ends):.2g}{spread}")
        print(timing.row(name, *cells), flush=True)


if __name__ == "__main__":
    main()
