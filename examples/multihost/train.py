"""Trains a Flax linen classifier of scikit-learn's digits in one or many processes.

    python examples/multihost/train.py
    python examples/multihost/launch.py -n 4 -- python examples/multihost/train.py --method spardl

docs/hosts.md has the commands for Slurm, Open MPI, Kubernetes and bare machines.
"""

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parents[1]))

import checkpoints
import digits
import jax
import jax.numpy as jnp
import optax
import processes
import shares
from checkpoints import Checkpoints, Progress
from digits import number
from flax import linen as nn
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxsparse

METHODS = ("dense", "spardl", "top_k", "chunked_top_k", "sketched_sgd", "qsgd")


class MLP(nn.Module):
    hidden: int

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        for _ in range(2):
            images = nn.relu(nn.Dense(self.hidden)(images))
        return nn.Dense(10)(images)


class TrainState(NamedTuple):
    params: Any
    opt_state: Any
    loss: jaxsparse.PerWorker  # summed over the steps since the last point


class Task(NamedTuple):
    """A model to train, and how."""

    args: argparse.Namespace
    method: optax.GradientTransformation
    loss_of: Callable[[Any, digits.Digits], jax.Array]
    schedule: optax.Schedule
    params: Any
    batch: digits.Digits
    mesh: Mesh


class Training(NamedTuple):
    """A way to train: by exchanges of gradients, or of displacements."""

    state: Any
    run: Callable[[Any, digits.Digits, int], Any]  # one step, from state, batch and steps done
    finish: Callable[[Any], Any]  # the exchange that may be left at the end
    moved: jaxsparse.traffic.WireBytes  # bytes of one exchange
    own: Callable[[Any], TrainState]  # the part of a state that has the loss
    with_own: Callable[[Any, TrainState], Any]  # the state with another such part


def make_method(args: argparse.Namespace) -> optax.GradientTransformation:
    """The transformation that takes the place of averaging gradients."""
    make: Callable[..., Any] = getattr(jaxsparse, args.method)
    # With local steps, the workers' own optimizer has the momentum.
    settings: dict[str, Any] = {"momentum": args.momentum} if args.local_steps == 1 else {}
    if args.method in ("spardl", "top_k"):
        settings["density"] = args.density
    elif args.method == "sketched_sgd":
        settings["compression"] = args.compression
    elif args.method == "chunked_top_k":
        settings["k"] = max(1, round(args.density * 4096))
    return make(**settings)


def train(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    split = NamedSharding(mesh, PartitionSpec("data"))
    size = digits.shared_batch(args.batch_size, mesh.size)
    train_set, test_set = digits.load()
    say = print if jax.process_index() == 0 else lambda *_, **__: None

    model = MLP(args.hidden)
    params = jax.jit(model.init)(jax.random.key(args.seed), jnp.zeros((1, 64)))["params"]
    parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    # The rate does not fall to 0, because entries that wait in residuals still have to arrive.
    schedule = optax.cosine_decay_schedule(args.lr, args.steps, alpha=0.1)

    def loss_of(params: Any, batch: digits.Digits) -> jax.Array:
        logits = model.apply({"params": params}, batch.images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels).mean()

    first = next(shares.batches(train_set, size, 1, args.seed, split))
    try:
        method = make_method(args)
        make = exchanging_gradients if args.local_steps == 1 else exchanging_displacements
        training = make(Task(args, method, loss_of, schedule, params, first, mesh))
    except ValueError as error:
        parser.error(f"--method {args.method}, --density, --compression, --hidden: {error}")
    state, moved = training.state, training.moved

    progress = Progress(0, mesh.size, 0.0, [])
    saved = None if args.checkpoint_dir is None else Checkpoints(args, parser)
    if saved is not None and args.resume:
        state, progress = saved.resume(state, progress, mesh)
    done, _, seconds, points = progress

    @jax.jit
    def count_right(params: Any, batch: digits.Digits) -> jax.Array:
        logits: Any = model.apply({"params": params}, batch.images)
        return jnp.sum(logits.argmax(axis=-1) == batch.labels)

    test_batch = shares.whole(test_set, split)
    every = "step" if args.local_steps == 1 else f"{args.local_steps} steps"
    say(
        f"{args.method}: {parameters:,} parameters, {mesh.size} workers in "
        f"{jax.process_count()} processes, {moved.received:,.0f} bytes received per worker and "
        f"{every} in {moved.rounds} collective(s)",
        flush=True,
    )
    batches = shares.batches(train_set, size, args.steps, args.seed, split, skip=done)
    multihost_utils.sync_global_devices("compiled")  # or the first step waits for the others
    for i, batch in enumerate(batches, start=done + 1):
        began = time.perf_counter()
        state = jax.block_until_ready(training.run(state, batch, i - 1))
        if i == args.steps:
            state = jax.block_until_ready(training.finish(state))
        seconds += time.perf_counter() - began
        if i % args.eval_every == 0 or i == args.steps:
            right = count_right(state.params, test_batch)
            own = training.own(state)
            # No process holds all workers' losses, so all compute their mean.
            loss = float(jax.jit(jnp.mean)(own.loss.value)) / (
                i - (points[-1]["step"] if points else 0)
            )
            accuracy = int(right) / len(test_set.labels)
            say(
                f"step {i}: {seconds:.2f} s, train loss {loss:.4f}, "
                f"test accuracy {100 * accuracy:.1f} %",
                flush=True,
            )
            # Seconds of training, without compiling and evaluating; the loss since the last point.
            points.append({"step": i, "seconds": seconds, "loss": loss, "accuracy": accuracy})
            state = training.with_own(state, own._replace(loss=jaxsparse.shard(no_loss(), mesh)))
        if saved is not None:
            saved.save(state, Progress(i, mesh.size, seconds, points))
    if saved is not None:
        saved.close()
    if args.json is not None and jax.process_index() == 0:
        result = {
            "settings": vars(args),
            "processes": jax.process_count(),
            "workers": mesh.size,
            "received_bytes": moved.received / args.local_steps,  # mean over steps
            "rounds": moved.rounds,
            "points": points,
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=2, default=str))


def exchanging_gradients(task: Task) -> Training:
    """Workers exchange gradients in each step."""
    _, method, loss_of, schedule, params, batch, mesh = task
    tx = optax.chain(method, optax.sgd(schedule))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, batch: digits.Digits) -> TrainState:
        losses, grads = jaxsparse.value_and_grad(loss_of)(state.params, batch)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        # Losses are averaged only for reports, so a step communicates nothing but the exchange.
        total = jaxsparse.PerWorker(state.loss.value + losses)
        return TrainState(optax.apply_updates(state.params, updates), opt_state, total)

    state = jaxsparse.shard(TrainState(params, tx.init(params), no_loss()), mesh)
    run = step.lower(state, batch).compile()
    return Training(
        state,
        lambda state, batch, _: run(state, batch),
        lambda state: state,
        jaxsparse.traffic.wire_bytes(run),
        lambda state: state,
        lambda _, own: own,
    )


def exchanging_displacements(task: Task) -> Training:
    """Each worker trains alone for `--local-steps` steps, and then all exchange displacements."""
    args, method, loss_of, schedule, params, batch, mesh = task
    tx = optax.sgd(schedule, momentum=args.momentum)

    def step(state: TrainState, batch: digits.Digits) -> tuple[TrainState, None]:
        loss, grads = jax.value_and_grad(loss_of)(state.params, batch)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        return TrainState(
            optax.apply_updates(state.params, updates), opt_state, state.loss + loss
        ), None

    outer = optax.sgd(args.outer_lr)
    steps = jaxsparse.LocalSteps(step, method, outer, mesh, every=args.local_steps)
    state = steps.init(TrainState(params, tx.init(params), jnp.float32(0)))
    steps.lower(state, batch).compile()  # JAX keeps the program for the first step
    return Training(
        state,
        lambda state, batch, done: steps(state, batch, done)[0],
        steps.finish,
        jaxsparse.wire_bytes(steps.outer[0], state),
        lambda state: state.worker,
        lambda state, worker: state._replace(worker=worker),
    )


def no_loss() -> jaxsparse.PerWorker:
    return jaxsparse.PerWorker.wrap(jnp.float32(0))


def main() -> None:
    parser = flags()
    args = parser.parse_args()
    if args.resume and args.checkpoint_dir is None:
        parser.error("--resume: name the run's --checkpoint-dir")
    if args.json is not None and args.json.is_dir():
        parser.error(f"--json {args.json}: that is a directory. Name a file")
    processes.join(args, parser)
    with jaxsparse.fail_at_once():
        train(args, parser)


def flags() -> argparse.ArgumentParser:
    parser = digits.parser_of(__doc__)
    processes.add_flags(parser)

    add = parser.add_argument_group("method").add_argument
    add("--method", choices=METHODS, default="spardl", help="(default: spardl)")
    add("--density", type=number(float, 0), default=0.01,
        help="share of the entries sent, of methods that select (default: 0.01)")  # fmt: skip
    add("--compression", type=number(float, 1), default=10.0, help="of sketched_sgd (default: 10)")
    add("--momentum", type=number(float, 0, 1), default=0.9, help="(default: 0.9)")
    add("--local-steps", type=number(int, 1), default=1, metavar="H", help="1 exchanges gradients; "
        "more let each worker train alone for H steps, and exchange what that moved "
        "(default: 1)")  # fmt: skip
    add("--outer-lr", type=number(float, 0), default=1.0, help="of local steps (default: 1)")
    digits.add_training_flags(parser, steps=180, lr=0.1, hidden=964)
    checkpoints.add_flags(parser)

    add = parser.add_argument_group("results").add_argument
    add("--eval-every", type=number(int, 1), default=20, metavar="STEPS", help="(default: 20)")
    add("--json", type=Path, metavar="FILE", help="written by process 0")
    return parser


if __name__ == "__main__":
    main()
