"""Sketched-SGD as in Alg. 2, on a strongly convex quadratic: does it reach SGD's rate (Theorem 1)?

    f(w) = sum_i a_i (w_i - o_i)^2 / 2,  a_i from 2 to 20,  eta_t = 1 / (t + xi)

Each of 4 workers has the gradient plus normal noise. Steps scale gradients by eta before the
exchange, residuals are of scaled gradients, and the answer is the mean of all iterates with the
weights (t + xi)^2. The table has f at the answer after T steps, over dense SGD's, mean of some
seeds. Remark 1 expects more than dense's while T is well below (d / k)^2, and as much above it.

Beside it stand the k largest of the true mean, and as many words as the sketch sends of random
coordinates, with residuals fed back and dropped.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import optax
import timing

import jaxsparse

WORKERS, ROWS = 4, 3


def exchanges(d: int, k: int) -> dict[str, Any]:
    shared: dict[str, Any] = {"workers": WORKERS, "is_dense": lambda path, shape: False}
    cols = 8 * k
    share = min(1.0, (ROWS * cols + k) / d)
    return {
        "dense": jaxsparse.dense(workers=WORKERS),
        "sketched": jaxsparse.sketched_sgd(
            k=k, cols=cols, rows=ROWS, selection="heavymix", **shared
        ),
        "true top-k": jaxsparse.true_top_k(k, **shared),
        "random, fed back": jaxsparse.random_k(share, decay=1.0, **shared),
        "random, dropped": jaxsparse.random_k(share, decay=0.0, **shared),
    }


def suboptimality(exchange: Any, args: argparse.Namespace, seed: int) -> jax.Array:
    """What the weighted mean of the iterates has above the optimum, after each number of steps."""
    d, xi = args.size, args.xi
    tx = optax.chain(
        optax.scale_by_schedule(lambda t: 1 / (t + 1 + xi)), exchange, optax.scale(-1.0)
    )
    curvature = jnp.linspace(args.curvature[0], args.curvature[1], d)
    key, first = jax.random.split(jax.random.key(seed))
    optimum = jax.random.normal(first, (d,))

    def step(carry: Any, t: jax.Array) -> tuple[Any, jax.Array]:
        w, state, mean, total = carry
        weight = (t + 1 + xi) ** 2
        total += weight
        mean += weight / total * (w - mean)
        drawn = args.noise * jax.random.normal(jax.random.fold_in(key, t), (WORKERS, d))
        updates, state = tx.update(curvature * (w - optimum) + drawn, state, w)
        excess = 0.5 * jnp.sum(curvature * (mean - optimum) ** 2)
        return (optax.apply_updates(w, updates), state, mean, total), excess

    w = jnp.zeros(d)
    start = w, tx.init(w), w, jnp.float32(0)
    found = jax.jit(lambda: jax.lax.scan(step, start, jnp.arange(max(args.steps)))[1])()
    return found[jnp.array(args.steps) - 1]


def main() -> None:
    parser = timing.parser_of(__doc__)
    add = parser.add_argument
    add("--size", type=int, default=1000, help="d")
    add("--k", type=int, default=25, help="delivered in a step (25)")
    add("--xi", type=float, default=160.0, help="2 + 6 d / (1.56 k) at least (160)")
    add("--curvature", type=float, nargs=2, default=[2.0, 20.0])
    add("--noise", type=float, default=1.0, help="its standard deviation (1)")
    add("--steps", type=int, nargs="+", default=[400, 1600, 6400, 25600])
    add("--seeds", type=int, default=3)
    args = parser.parse_args()
    timing.where()
    print(f"d = {args.size}, k = {args.k}, (d / k)^2 = {(args.size / args.k) ** 2:.0f}")
    print(timing.head("exchange", *(f"T = {t}" for t in args.steps)))
    dense: Any = None
    for name, exchange in exchanges(args.size, args.k).items():
        runs = [suboptimality(exchange, args, seed) for seed in range(args.seeds)]
        mean = jnp.stack(runs).mean(0)
        dense = mean if dense is None else dense
        label, values = ("dense (f itself)", mean) if name == "dense" else (name, mean / dense)
        print(timing.row(label, *(f"{x:.4g}" for x in values)), flush=True)


if __name__ == "__main__":
    main()
