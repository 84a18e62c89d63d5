"""Which side of Adam a sparse exchange belongs to: a small language model, eight simulated workers.

A byte-level model (embeddings of the last bytes, two layers) learns Python's reference manual.
Each row has the held-out loss in nats a byte, mean and spread over seeds, and the bytes that a
worker receives in a step beside dense's. All rows take the same steps, batches and learning rates;
`--rates` are tried for each row on seed 0 and the best one is used for all seeds, dense included.

    python benchmarks/adam.py
    python benchmarks/adam.py --steps 100 --seeds 1 --rates 0.003      # a quick look
"""

import argparse
from collections.abc import Callable
from pydoc_data import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import timing

import jaxsparse
from jaxsparse import data_parallel, per_worker, shard
from jaxsparse.printing import aligned

CONTEXT, WIDTH, HIDDEN, BATCH = 16, 24, 384, 32  # the batch is a worker's


def rows(density: float) -> dict[str, Callable[[float], optax.GradientTransformation]]:
    """Transformations by name, each a function of the learning rate."""
    adam, rate = optax.scale_by_adam, optax.scale_by_learning_rate
    sparse, k = jaxsparse.spardl, round(4096 * density)
    return {
        "dense": lambda lr: optax.chain(jaxsparse.dense(), adam(), rate(lr)),
        "before Adam": lambda lr: optax.chain(sparse(density), adam(), rate(lr)),
        "behind Adam": lambda lr: optax.chain(per_worker(adam()), sparse(density), rate(lr)),
        "behind Adam, decay 0.95": lambda lr: optax.chain(
            per_worker(adam()), sparse(density, decay=0.95), rate(lr)
        ),
        "DeMo": lambda lr: optax.chain(jaxsparse.demo(k), optax.scale_by_sign(), rate(lr)),
        "DeMo before Adam": lambda lr: optax.chain(jaxsparse.demo(k), adam(), rate(lr)),
        "EF21 before Adam": lambda lr: optax.chain(
            jaxsparse.ef21_sgdm(jaxsparse.systems.SparDL(density)), adam(b1=0.0), rate(lr)
        ),
    }


def texts() -> tuple[np.ndarray, np.ndarray]:
    """Bytes to train on, and bytes that are held out."""
    whole = "\n".join(topics.topics[key] for key in sorted(topics.topics)).encode()
    data = np.frombuffer(whole, np.uint8).astype(np.int32)
    cut = len(data) * 9 // 10
    return data[:cut], data[cut:]


def windows(data: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Random windows of CONTEXT bytes and the byte that follows."""
    starts = rng.integers(0, len(data) - CONTEXT - 1, count)
    return data[starts[:, None] + np.arange(CONTEXT + 1)]


def init(seed: int) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = {
        "embedding": (256, WIDTH),
        "in": (CONTEXT * WIDTH, HIDDEN),
        "hidden": (HIDDEN, HIDDEN),
        "out": (HIDDEN, 256),
    }
    return {
        name: jax.random.normal(key, shape) * shape[0] ** -0.5
        for key, (name, shape) in zip(keys, shapes.items())
    }


def loss_of(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
    x = params["embedding"][batch[:, :-1]].reshape(len(batch), -1)
    x = jax.nn.gelu(x @ params["in"])
    x = x + jax.nn.gelu(x @ params["hidden"])
    logits = x @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, -1]).mean()


def train(tx: optax.GradientTransformation, seed: int, args: argparse.Namespace) -> float:
    """The held-out loss after training."""

    def step(state: Any, batch: jax.Array) -> Any:
        params, opt_state = state
        updates, opt_state = tx.update(jax.grad(loss_of)(params, batch), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    learn, held_out = texts()
    rng = np.random.default_rng(seed)
    params = init(seed)
    state = shard((params, tx.init(params)), args.workers)
    run = data_parallel(step, args.workers, donate_argnums=0)
    for _ in range(args.steps):
        state = run(state, windows(learn, args.workers * BATCH, rng))
    test = windows(held_out, 4096, np.random.default_rng(0))
    return float(jax.jit(loss_of)(state[0], jnp.asarray(test)))


def received(tx: optax.GradientTransformation, workers: int) -> float:
    """Bytes that a worker receives in a step."""
    return jaxsparse.traffic.traced_bytes(tx, init(0), workers).received


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--workers", type=int, default=8)
    add("--steps", type=int, default=600)
    add("--seeds", type=int, default=3)
    add("--density", type=float, default=0.01)
    add("--rates", type=float, nargs="+", default=[1e-3, 3e-3, 1e-2])
    add("--only", nargs="+", metavar="ROW", help="rows by name; default: all")
    add("--json", metavar="FILE")
    args = parser.parse_args()
    where = timing.where()
    found: dict[str, Any] = {}
    made = rows(args.density)
    dense = received(made["dense"](args.rates[0]), args.workers)
    for name in args.only or made:
        make = made[name]
        tried = {rate: train(make(rate), 0, args) for rate in args.rates}
        rate = min(tried, key=lambda r: tried[r])
        losses = [tried[rate], *(train(make(rate), seed, args) for seed in range(1, args.seeds))]
        got = received(make(rate), args.workers)
        found[name] = {"losses": losses, "rate": rate, "tried": tried, "received": got}
        print(name, rate, losses, flush=True)
    cells = [("exchange", "loss", "spread", "rate", "fewer bytes")]
    cells += [
        (
            name,
            f"{np.mean(row['losses']):.3f}",
            f"{np.ptp(row['losses']):.3f}",
            f"{row['rate']:g}",
            f"{dense / row['received']:.1f}x",
        )
        for name, row in found.items()
    ]
    print("\n".join(aligned(cells, right=range(1, 5))))
    timing.save({**where, **vars(args), "rows": found}, args.json)


if __name__ == "__main__":
    main()
