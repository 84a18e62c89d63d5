"""Trains a Flax linen `TrainState` by one method of gradient exchange, with gradient accumulation.

The data are scikit-learn's 8x8 digits, so nothing is downloaded. Eight emulated devices are the
workers:

    python examples/linen_trainer.py --method sketched_sgd --accumulate 4

With `--log FOLDER` it also writes the loss and diagnostics of each step for TensorBoard (how much
the exchange delivers and holds back), and shows some of them beside the progress.
"""

import argparse
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import digits
import jax
import jax.numpy as jnp
import optax
from digits import number
from flax import linen as nn
from flax.training.train_state import TrainState
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from tensorboardX import SummaryWriter

import jaxsparse

# Shown beside the progress.
SHOWN = ("loss", "jaxsparse/residual_norm", "jaxsparse/delivered_share")


class MLP(nn.Module):
    hidden: int

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        for _ in range(2):
            images = nn.relu(nn.Dense(self.hidden)(images))
            images = nn.Dropout(0.1, deterministic=not train)(images)
        return nn.Dense(10)(images)


def make_step(workers: digits.Workers, *, report: bool) -> Callable[..., Any]:
    @functools.partial(jax.jit, donate_argnums=0)
    def step(
        state: TrainState, micros: digits.Digits, key: jax.Array
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """The trainer's step, given micro-batches of all workers, [micro-batch, image, ...]."""

        def loss_of(params: Any, micro: digits.Digits, key: jax.Array) -> jax.Array:
            """The loss of one worker. Without its number all would drop the same units."""
            rngs = {"dropout": jax.random.fold_in(key, jax.lax.axis_index("data"))}
            logits = state.apply_fn({"params": params}, micro.images, train=True, rngs=rngs)
            return optax.softmax_cross_entropy_with_integer_labels(logits, micro.labels).mean()

        own = jaxsparse.value_and_grad(loss_of, workers=workers.simulated)

        def add_gradients(total: Any, micro_and_key: Any) -> tuple[Any, jax.Array]:
            losses, grads = own(state.params, *micro_and_key)
            return jax.tree.map(jnp.add, total, grads), losses

        # Accumulate here, not by optax.MultiSteps: one exchange then serves all micro-batches.
        count = len(micros.labels)
        keys = jax.random.split(jax.random.fold_in(key, state.step), count)
        zeros = jax.tree.map(lambda x: jnp.zeros((workers.mesh.size, *x.shape)), state.params)
        total, losses = jax.lax.scan(add_gradients, zeros, (micros, keys))

        # The same as state.apply_gradients, written out so that the updates can be reported.
        grads = jax.tree.map(lambda g: g / count, total)
        updates, opt_state = state.tx.update(grads, state.opt_state, state.params)
        state = state.replace(
            step=state.step + 1,
            params=optax.apply_updates(state.params, updates),
            opt_state=opt_state,
        )
        shown = {"loss": losses.mean()}
        if report:
            shown |= jaxsparse.diagnose(opt_state, updates).to_dict()
        return state, shown

    return step


def main() -> None:
    parser = flags()
    args = parser.parse_args()
    workers = digits.find_workers(args, parser)
    batch_size = digits.shared_batch(args.batch_size, workers.mesh.size * args.accumulate)
    train_set, test_set = digits.load()

    method: Any = {
        "dense": jaxsparse.dense,
        "sketched_sgd": functools.partial(jaxsparse.sketched_sgd, args.compression),
    }[args.method]
    tx = optax.chain(method(momentum=0.9, workers=workers.simulated), optax.sgd(args.lr))
    model = MLP(args.hidden)
    init_key, dropout_key = jax.random.split(jax.random.key(args.seed))
    params = model.init(init_key, train_set.images[:1])["params"]
    try:
        state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    except ValueError as error:
        parser.error(f"--compression: {error}")
    state = jaxsparse.shard(state, workers.where)  # places all of it; each worker has a residual

    def batches() -> Iterator[digits.Digits]:
        for batch in digits.batches(train_set, batch_size, args.steps, args.seed):
            yield jax.tree.map(lambda x: x.reshape(args.accumulate, -1, *x.shape[1:]), batch)

    step = make_step(workers, report=args.log is not None)
    moved = jaxsparse.wire_bytes(step, state, next(batches()), dropout_key)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[shown]}"))
    log = SummaryWriter(str(args.log), write_to_disk=args.log is not None)
    log.add_scalar("jaxsparse/received_bytes", moved.received, 0)  # the same in each step
    with log, Progress(TextColumn(args.method), *columns) as progress:
        task = progress.add_task("", total=args.steps, shown="")
        for i, batch in enumerate(batches(), start=1):
            state, found = step(state, batch, dropout_key)
            found = jax.tree.map(float, found)  # waits: queued steps may deadlock here
            for name, x in found.items():
                log.add_scalar(name, x, i)
            shown = "  ".join(f"{name} {found[name]:.4g}" for name in SHOWN if name in found)
            progress.update(task, advance=1, shown=shown)

    logits = jax.jit(model.apply)({"params": state.params}, test_set.images)
    accuracy = jnp.mean(logits.argmax(axis=-1) == test_set.labels)
    sent = f"{moved.payload:,} bytes in {moved.rounds} collective(s) per worker and step"
    print(
        f"{args.method}: train loss {found['loss']:.4f}, test accuracy {100 * accuracy:.1f} %, "
        + ("simulated, so nothing was sent" if args.simulate else sent)
    )


def flags() -> argparse.ArgumentParser:
    parser = digits.parser_of(__doc__)
    digits.add_worker_flags(parser)
    add = parser.add_argument
    add("--method", choices=["dense", "sketched_sgd"], default="sketched_sgd")
    add("--compression", type=number(float, 1), default=10.0, help="of sketched_sgd (default: 10)")
    add("--accumulate", type=number(int, 1), default=4, metavar="N",
        help="micro-batches per step and worker (default: 4)")  # fmt: skip
    add("--log", type=Path, metavar="FOLDER", help="written with diagnostics for TensorBoard")
    digits.add_training_flags(parser, steps=200, lr=0.1, hidden=384)
    return parser


if __name__ == "__main__":
    main()
