"""One island: trains a small byte-level transformer, with others or alone.

    python examples/islands/island.py --store out/run --name oslo --rounds 40

It may be ended and started again at any time, by Ctrl-C, SIGKILL or a power cut: it then goes on
from the run's newest snapshot. Others with the same settings and other names join the same way.
At SIGTERM, which machines get that are taken back soon, it sends what it has, and leaves.
"""

import argparse
import json
import signal
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import jaxsparse
from jaxsparse import islands

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import transformer as model


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--store", required=True, help="a folder, or s3://bucket/run, gs://..., az://...")
    add("--name", required=True, help="the island's name, another one for each")
    add("--rounds", type=int, default=20, help="round in which the island leaves")
    add("--every", type=int, default=10, help="local steps in a round")
    add("--overlap", type=int, default=5, help="steps beside an exchange")
    add("--quorum", type=int, default=2, help="least number of islands in a round")
    add("--grace", type=float, default=5.0, help="seconds to wait for those that are late")
    add("--poll", type=float, default=0.05, help="seconds from one look at the store to the next")
    add("--alone", type=int, default=0, help="steps to go on if the store does not answer")
    add("--lr", type=float, default=0.01, help="learning rate of the inner AdamW")
    add("--batch", type=int, default=8, help="windows in a step")
    add("--k", type=int, default=512, help="entries of each 4,096 that travel")
    add("--width", type=int, default=64)
    add("--seed", type=int, help="of the batches; drawn if left out")
    add("--events", help="a file to which a line of JSON is added for each round")
    add("--steps", help="a file to which a line of JSON is added for each step")
    add("--pause", type=float, default=0.0, help="seconds to sleep in each step: a slow island")
    return parser


def main() -> None:
    args = options().parse_args()
    text, length = model.corpus(), 64
    made = model.Transformer(args.width, 2, 4, length, nnx.Rngs(0))
    graphdef, params = nnx.split(made, nnx.Param)
    tx = optax.adamw(args.lr, b2=0.95, weight_decay=0.1)

    def loss_of(params: Any, windows: jax.Array) -> jax.Array:
        return model.loss_of(nnx.merge(graphdef, params), windows)

    @jax.jit
    def step(state: Any, windows: jax.Array) -> tuple[Any, jax.Array]:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_of)(params, windows)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    train = islands.Islands(
        step,
        jaxsparse.chunked_top_k(args.k, decay=0.95, axis_name=None, is_dense=lambda *_: False),
        optax.sgd(1.0),
        islands.Store(args.store),
        name=args.name,
        every=args.every,
        quorum=args.quorum,
        grace=args.grace,
        overlap=args.overlap,
        loss=lambda loss: loss,
        poll=args.poll,
        alone=args.alone,
    )
    leaves = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: leaves.set())
    began = time.time()
    state = train.join((params, tx.init(params)))
    print(f"{args.name} joins in round {state.round} after {time.time() - began:.1f} s", flush=True)
    evaluate = jax.jit(loss_of)
    windows = model.windows(text.held_out, 64, length, np.random.default_rng(0))
    # Each life of an island reads other parts of the text.
    seed = time.time_ns() if args.seed is None else args.seed
    rng = np.random.default_rng([zlib.crc32(args.name.encode()), seed, state.round])
    told = state.round - 1
    while state.round < args.rounds and not leaves.is_set():
        batch = model.windows(text.train, args.batch, length, rng)
        began = time.perf_counter()
        state, loss = train(state, batch)
        jax.block_until_ready(loss)
        seconds = time.perf_counter() - began
        status = train.status()
        progress = {"round": state.round, "steps": state.steps, "seconds": seconds}
        note(args.steps, name=args.name, life=status.life, **progress)
        time.sleep(args.pause)
        # The thread may be a round ahead of the state.
        new = [report for report in status.rounds if told < report.round < state.round]
        if not new:
            continue
        told = new[-1].round
        held_out = float(evaluate(state.params, windows))
        for report in new:
            print(f"{args.name} {report}, held-out loss {held_out:.3f}", flush=True)
            note(args.events, **report._asdict(), name=args.name, held_out=held_out, at=state.round)
    state = train.leave(state)
    status = train.status()
    print(
        f"{args.name} leaves in round {state.round}: {status.counted} of {status.posted} messages "
        f"counted, {status.sent / 1e6:.2f} MB sent, {status.received / 1e6:.2f} MB received, "
        f"{status.waiting:.1f} s waited",
        flush=True,
    )


def note(path: str | None, **fields: Any) -> None:
    """Adds a line of JSON with fields and the time to a file, if there is one."""
    if path:
        with open(path, "a") as file:
            file.write(json.dumps({**fields, "time": time.time()}) + "\n")


if __name__ == "__main__":
    main()
