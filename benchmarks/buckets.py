"""Steps by default buckets beside others, on hosts that `benchmarks/cluster` emulates.

    sudo python benchmarks/cluster/run.py --hosts 8 --rate 100mbit -- benchmarks/buckets.py top_k

Behind the exchange stand `--rows`, `--turns` and `--only`, for a longer backward pass and less.

The model has ten layers of 1250 x 1250. Steps take turns in one run. "alone" has the gradients and
no exchange, so that a step which hides its exchange takes the longer one of the two, and another
one their sum.
"""

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxsparse

WIDTH, LAYERS = 1250, 10
EXCHANGES: dict[str, Any] = {
    "dense": jaxsparse.dense,
    "int8": lambda **settings: jaxsparse.quantized("int8", **settings),
    "top_k": lambda **settings: jaxsparse.top_k(0.01, **settings),
    "spardl": lambda **settings: jaxsparse.spardl(0.01, **settings),
}
SETTINGS = {
    "one bucket": {"bucket_size": 2**30},
    "default": {},
    "2**23": {"bucket_size": 2**23},
    "delay=1": {"delay": 1},
}


def loss_of(params: list[jax.Array], x: jax.Array) -> jax.Array:
    for kernel in params:
        x = jnp.tanh(x @ kernel)
    return jnp.mean(x * x)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("exchange", choices=EXCHANGES)
    parser.add_argument("--rows", type=int, default=1, help="of a host (default: 1)")
    parser.add_argument("--turns", type=int, default=9, help="after the first one (default: 9)")
    parser.add_argument("--only", nargs="+", choices=["alone", *SETTINGS], metavar="SETTING")
    args = parser.parse_args()
    jax.distributed.initialize()
    hosts = jax.device_count()
    mesh = jax.make_mesh((hosts,), ("data",), axis_types=(AxisType.Auto,))
    on = lambda spec, x: jax.make_array_from_callback(
        x.shape, NamedSharding(mesh, spec), lambda i: x[i]
    )
    draw = np.random.default_rng(0).normal
    kernels = [draw(0, WIDTH**-0.5, (WIDTH, WIDTH)).astype(np.float32) for _ in range(LAYERS)]
    params = [on(P(), kernel) for kernel in kernels]
    x = on(P("data"), np.full((hosts * args.rows, WIDTH), 0.1, np.float32))
    differentiate = jaxsparse.value_and_grad(loss_of, mesh=mesh)

    def alone(state: Any, x: jax.Array) -> Any:
        loss, grads = differentiate(state[0], x)
        return state, loss.mean() + sum(jnp.sum(jnp.abs(g)) for g in grads)

    def step_of(tx: optax.GradientTransformation) -> Any:
        def step(state: Any, x: jax.Array) -> Any:
            params, opt_state = state
            loss, grads = differentiate(params, x)
            updates, opt_state = tx.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), loss.mean()

        return step

    runs: dict[str, list[Any]] = {"alone": [jax.jit(alone), (params, ()), []]}
    for name, settings in SETTINGS.items():
        tx = optax.chain(EXCHANGES[args.exchange](**settings), optax.sgd(1e-3))
        runs[name] = [jax.jit(step_of(tx)), jaxsparse.shard((params, tx.init(params)), mesh), []]
    for name in {*runs} - {*(args.only or runs)}:
        del runs[name]
    for _ in range(args.turns + 1):
        for run in runs.values():
            began = time.perf_counter()
            run[1], loss = run[0](run[1], x)
            jax.block_until_ready((run[1], loss))
            run[2].append(time.perf_counter() - began)
    if jax.process_index() == 0:
        for name, (*_, seconds) in runs.items():
            low, middle, high = np.quantile(seconds[1:], [0.25, 0.5, 0.75])
            print(f"{name:10s} {middle:.3f} s ({low:.3f} to {high:.3f})", flush=True)


if __name__ == "__main__":
    main()
