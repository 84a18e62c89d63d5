"""What one faulty island costs the others, with and without bounds on its messages.

    pip install '.[examples,islands]'
    python benchmarks/faulty_islands.py

Four islands, threads of one process, train the small transformer of examples/islands. From a third
of the rounds on, the last one

- loud: moves a thousand times too far, in every third round;
- noise: moves by noise, ten times as long as its displacement, in every third round;
- asleep: sleeps for twenty rounds, and then sends what it had moved before;
- absent: ends, which is what one would do by hand.

Bounds are norm_bound=3 and age_bound=5. A row has the held-out losses of the first island's
global parameters at the end, a seed each.
"""

import argparse
import functools
import itertools
import tempfile
import threading
import time
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import transformer as model
from flax import nnx

import jaxsparse
from jaxsparse import islands
from jaxsparse.arrays.printing import aligned

NAMES, LENGTH, EVERY, ASLEEP = ("amsterdam", "bergen", "cork", "oslo"), 64, 10, 20
FAULTS = "none", "loud", "noise", "asleep", "absent"
BOUNDS: dict[str, Any] = {"norm_bound": 3.0, "age_bound": 5}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=45)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS)
    args = parser.parse_args()
    rows = [["fault", "bounds", *(f"seed {seed}" for seed in range(args.seeds)), "left out"]]
    for fault, bounds in itertools.product(args.faults, ({}, BOUNDS)):
        found = [train(fault, bounds, args.rounds, seed) for seed in range(args.seeds)]
        losses = [f"{loss:.3f}" for loss, _ in found]
        rows.append([fault, "yes" if bounds else "no", *losses, str([n for _, n in found])])
        print(*rows[-1], flush=True)
    print("\n".join(aligned(rows, right=range(2, 3 + args.seeds))))


@functools.cache
def programs() -> tuple[Any, Any, Any, Any]:
    """The first state, the step, the held-out loss, and how far a fault moves parameters."""
    graphdef, params = nnx.split(model.Transformer(64, 2, 4, LENGTH, nnx.Rngs(0)), nnx.Param)
    tx = optax.adamw(0.01, b2=0.95, weight_decay=0.1)
    loss_of = lambda params, windows: model.loss_of(nnx.merge(graphdef, params), windows)

    @jax.jit
    def step(state: Any, windows: jax.Array) -> tuple[Any, jax.Array]:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_of)(params, windows)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    @functools.partial(jax.jit, static_argnums=3)
    def strayed(origin: Any, params: Any, key: jax.Array, fault: str) -> Any:
        moved = jax.tree.map(jnp.subtract, params, origin)
        if fault == "loud":
            return jax.tree.map(lambda g, m: g + 1000 * m, origin, moved)
        noise = optax.tree.random_like(key, moved)
        far = 10 * optax.tree.norm(moved) / optax.tree.norm(noise)
        return jax.tree.map(lambda g, n: g + far * n, origin, noise)

    return (params, tx.init(params)), step, jax.jit(loss_of), strayed


def train(fault: str, bounds: dict[str, Any], rounds: int, seed: int) -> tuple[float, int]:
    """The held-out loss, and how many messages were left out."""
    start, step, loss_of, strayed = programs()
    text = model.corpus()
    reached = dict.fromkeys(NAMES, 0)
    ended: dict[str, Any] = {}

    def run(name: str, store: Any) -> None:
        # Those that are well wait for all that are in time, and not for one that sleeps.
        one = islands.Islands(
            step,
            jaxsparse.quantized("int8", gather=True, axis_name=None, is_dense=lambda *_: False),
            optax.sgd(0.7, 0.6, nesterov=True),
            store,
            name=name,
            every=EVERY,
            quorum=3,
            grace=2.0,
            poll=0.01,
            **bounds,
        )
        rng = np.random.default_rng([seed, NAMES.index(name)])
        state = one.join(start)
        slept = False
        while state.round < rounds:
            is_faulty = name == NAMES[-1] and state.round >= rounds // 3
            is_last = state.steps == EVERY - 1
            if is_faulty and fault == "absent":
                break
            strays = is_last and is_faulty and fault in ("loud", "noise") and not state.round % 3
            if strays:
                params, moments = state.worker
                key = jax.random.key(state.round)
                params = strayed(state.params, params, key, fault)
                state = state._replace(worker=(params, moments))
            if is_last and is_faulty and fault == "asleep" and not slept:
                slept, until = True, state.round + ASLEEP
                while max(reached.values()) < until:
                    time.sleep(0.05)
            state, _ = one(state, model.windows(text.train, 8, LENGTH, rng))
            reached[name] = state.round
        ended[name] = state, one.status()

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = [(name, islands.Store(folder)) for name in NAMES]
        threads = [threading.Thread(target=run, args=each) for each in given]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    state, status = ended[NAMES[0]]
    held_out = model.windows(text.held_out, 64, LENGTH, np.random.default_rng(0))
    beyond = sum(len(report.beyond) for report in status.rounds)
    return float(loss_of(state.params, held_out)), beyond


if __name__ == "__main__":
    main()
