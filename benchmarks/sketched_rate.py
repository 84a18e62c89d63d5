"""Sketched-SGD as in Alg. 2, on a strongly convex quadratic: does it reach SGD's rate (Theorem 1)?

    f(w) = sum_i a_i (w_i - o_i)^2 / 2,  a_i from 2 to 20,  eta_t = 1 / (t + xi)

Each of 4 workers has the gradient plus normal noise. Steps scale gradients by eta before the
exchange, residuals are of scaled gradients, and the answer is the mean of all iterates with the
weights (t + xi)^2. The table has f at the answer after T steps, over dense SGD's, mean of some
seeds. Remark 1 expects more than dense's while T is well below (d / k)^2, and as much above it.

Beside it stand the k largest of the true mean, and as many words as the sketch sends of random
coordinates, with residuals fed back and dropped.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import timing

import jaxsparse

WORKERS, ROWS, SEEDS = 4, 3, 3
SIZE, K = 1000, 25  # d, and the number of entries that a step delivers
XI = 160.0  # 2 + 6 d / (1.56 k) at least
STEPS = (400, 1600, 6400, 25600)


def exchanges() -> dict[str, Any]:
    d, k = SIZE, K
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


def suboptimality(exchange: Any, seed: int) -> jax.Array:
    """What the weighted mean of the iterates has above the optimum, after each number of steps."""
    tx = optax.chain(
        optax.scale_by_schedule(lambda t: 1 / (t + 1 + XI)), exchange, optax.scale(-1.0)
    )
    curvature = jnp.linspace(2.0, 20.0, SIZE)
    key, first = jax.random.split(jax.random.key(seed))
    optimum = jax.random.normal(first, (SIZE,))

    def step(carry: Any, t: jax.Array) -> tuple[Any, jax.Array]:
        w, state, mean, total = carry
        weight = (t + 1 + XI) ** 2
        total += weight
        mean += weight / total * (w - mean)
        drawn = jax.random.normal(jax.random.fold_in(key, t), (WORKERS, SIZE))
        updates, state = tx.update(curvature * (w - optimum) + drawn, state, w)
        excess = 0.5 * jnp.sum(curvature * (mean - optimum) ** 2)
        return (optax.apply_updates(w, updates), state, mean, total), excess

    w = jnp.zeros(SIZE)
    start = w, tx.init(w), w, jnp.float32(0)
    found = jax.jit(lambda: jax.lax.scan(step, start, jnp.arange(max(STEPS)))[1])()
    return found[jnp.array(STEPS) - 1]


def main() -> None:
    timing.where()
    print(f"d = {SIZE}, k = {K}, (d / k)^2 = {(SIZE / K) ** 2:.0f}")
    print(timing.head("exchange", *(f"T = {t}" for t in STEPS)))
    dense: Any = None
    for name, exchange in exchanges().items():
        runs = [suboptimality(exchange, seed) for seed in range(SEEDS)]
        mean = jnp.stack(runs).mean(0)
        dense = mean if dense is None else dense
        label, values = ("dense (f itself)", mean) if name == "dense" else (name, mean / dense)
        print(timing.row(label, *(f"{x:.4g}" for x in values)), flush=True)


if __name__ == "__main__":
    main()
