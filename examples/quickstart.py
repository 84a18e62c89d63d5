"""Trains a Flax NNX classifier with dense gradients, local steps and compressed gradients.

The data are scikit-learn's 8x8 digits, so nothing is downloaded. Eight emulated devices are the
workers:

    python examples/quickstart.py
    python examples/quickstart.py --devices 3 --compression 5 50
    python examples/quickstart.py --simulate 64 --seeds 1 2 3
    python examples/quickstart.py --platform gpu
"""

import argparse
import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import digits
import jax
import jax.numpy as jnp
import numpy as np
import optax
import report
from digits import number
from flax import nnx
from rich.console import Console
from rich.progress import Progress

import jaxsparse


class MLP(nnx.Module):
    def __init__(self, hidden: int, rngs: nnx.Rngs):
        self.first = nnx.Linear(64, hidden, rngs=rngs)
        self.second = nnx.Linear(hidden, hidden, rngs=rngs)
        self.last = nnx.Linear(hidden, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        return self.last(nnx.relu(self.second(nnx.relu(self.first(images)))))


class Local(NamedTuple):
    """Local steps: each worker trains alone, and then all exchange how far their models moved."""

    outer: optax.GradientTransformation
    every: int


# A method that exchanges gradients is a function of `workers=`, which makes its transformation.
Method = Local | Callable[..., optax.GradientTransformation]


def methods_to_compare(args: argparse.Namespace) -> dict[str, Method]:
    """The methods by name. They share the model, the data and all other settings."""
    make = functools.partial
    methods: dict[str, Method] = {"dense": make(jaxsparse.dense, momentum=args.momentum)}
    if "local" in args.methods:
        methods["local steps"] = Local(jaxsparse.outer.sparse_loco(k=64), args.local_steps)
    if "spardl" in args.methods:
        method = make(jaxsparse.spardl, args.density, momentum=args.momentum)
        methods[f"SparDL {100 * args.density:g} %"] = method
    if "sketched_sgd" in args.methods:
        for ratio in args.compression:
            method = make(jaxsparse.sketched_sgd, ratio, momentum=args.momentum)
            methods[f"sketched {ratio:g}x"] = method
    if "true_top_k" in args.methods:
        methods["true top-k"] = make(jaxsparse.true_top_k, args.k, momentum=args.momentum)
    return methods


def train(
    method: Method,
    workers: digits.Workers,
    args: argparse.Namespace,
    advance: Callable[[], object],
) -> report.Run:
    """Trains once for each seed, and calls `advance` after every step."""
    train_set, test_set = digits.load()
    model_graph = nnx.graphdef(MLP(args.hidden, nnx.Rngs(0)))

    @jax.jit
    def test_accuracy(params: Any) -> jax.Array:
        model = nnx.merge(model_graph, params)
        return jnp.mean(model(test_set.images).argmax(axis=-1) == test_set.labels)

    batches = functools.partial(digits.batches, train_set, args.batch_size, args.steps)
    trainer = trainer_of(method, workers, args)
    # Simulated workers send nothing. Their bytes are those that a mesh would send.
    on_mesh = trainer_of(method, workers._replace(simulated=None), args)
    received = on_mesh.received(on_mesh.start(0), next(batches(seed=0)))

    curves: list[list[tuple[int, float, float]]] = []
    seconds: list[float] = []
    for seed in args.seeds:
        state = trainer.start(seed)
        curves.append([])
        losses: list[float] = []
        for i, batch in enumerate(batches(seed=seed), start=1):
            began = time.perf_counter()
            state, loss = trainer.step(state, batch, i - 1)
            losses.append(float(loss.mean()))  # waits: emulated devices may deadlock if steps queue
            seconds.append(time.perf_counter() - began)
            if i % args.eval_every == 0 or i == args.steps:
                curves[-1].append(
                    (i, float(np.mean(losses)), float(test_accuracy(trainer.params(state))))
                )
                losses = []
            advance()

    steps, train_loss, test = np.moveaxis(np.array(curves), -1, 0)
    return report.Run(steps[0].astype(int), train_loss, test, received, float(np.median(seconds)))


class Trainer(NamedTuple):
    """A way to train on all workers."""

    start: Callable[[int], Any]  # the first state, given a seed
    step: Callable[[Any, digits.Digits, int], tuple[Any, jax.Array]]  # losses of all workers
    params: Callable[[Any], Any]  # the model's, of a state
    received: Callable[[Any, digits.Digits], float]  # bytes a device and step, mean over steps


def trainer_of(method: Method, workers: digits.Workers, args: argparse.Namespace) -> Trainer:
    # The rate does not fall to 0, because entries that wait in residuals still have to arrive.
    schedule = optax.cosine_decay_schedule(args.lr, args.steps, alpha=0.1)
    if isinstance(method, Local):
        return with_local_steps(method, schedule, workers, args)
    return with_gradients(method, schedule, workers, args)


def create(tx: optax.GradientTransformation, hidden: int, seed: int) -> tuple[MLP, nnx.Optimizer]:
    model = MLP(hidden, nnx.Rngs(seed))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def loss_of(model: MLP, batch: Any) -> jax.Array:
    logits = model(batch.images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels).mean()


def with_gradients(
    method: Callable[..., Any], schedule: Any, workers: digits.Workers, args: argparse.Namespace
) -> Trainer:
    """Workers exchange gradients in each step. What a trainer changes for that is numbered."""
    tx = optax.chain(
        method(workers=workers.simulated),  # 1: the exchange, which has the momentum
        optax.sgd(schedule),
    )
    graph = nnx.graphdef(create(tx, args.hidden, seed=0))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, batch: digits.Digits) -> tuple[Any, jax.Array]:
        model, optimizer = nnx.merge(graph, state)
        of_model, params = nnx.split(model)
        own = jaxsparse.value_and_grad(  # 2: in the place of nnx.value_and_grad
            lambda params, batch: loss_of(nnx.merge(of_model, params), batch),
            workers=workers.simulated,
        )
        loss, grads = own(params, batch)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    return Trainer(
        # 3: places the whole state. Each worker has a residual.
        lambda seed: jaxsparse.shard(nnx.state(create(tx, args.hidden, seed)), workers.where),
        lambda state, batch, _: step(state, batch),
        lambda state: state[0],
        lambda state, batch: jaxsparse.wire_bytes(step, state, batch).received,
    )


def with_local_steps(
    method: Local, schedule: Any, workers: digits.Workers, args: argparse.Namespace
) -> Trainer:
    """Workers train alone. Every `method.every` steps they exchange how far their models moved."""
    tx = optax.sgd(schedule, momentum=args.momentum)
    graph = nnx.graphdef(create(tx, args.hidden, seed=0))

    def step(state: Any, batch: digits.Digits) -> tuple[Any, jax.Array]:
        """The step of one worker, given its share of the batch."""
        model, optimizer = nnx.merge(graph, state)
        loss, grads = nnx.value_and_grad(loss_of)(model, batch)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    local = jaxsparse.LocalSteps(
        step,
        method.outer,
        workers.where,
        every=method.every,
        params=lambda state: nnx.filter_state(state, nnx.Param),
    )
    return Trainer(
        lambda seed: local.init(nnx.state(create(tx, args.hidden, seed))),
        local,
        lambda state: state.params[0],
        lambda state, _: jaxsparse.wire_bytes(local.outer[0], state).received / method.every,
    )


def main() -> None:
    parser = flags()
    args = parser.parse_args()
    workers = digits.find_workers(args, parser)
    count = workers.mesh.size
    args.batch_size = digits.shared_batch(args.batch_size, count)
    params = nnx.state(nnx.eval_shape(lambda: MLP(args.hidden, nnx.Rngs(0))), nnx.Param)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    args.k = args.k or size // 40

    methods = methods_to_compare(args)
    for name, method in methods.items():
        try:
            tx = method.outer if isinstance(method, Local) else method(workers=count)
            jax.eval_shape(tx.init, params)
        except ValueError as error:
            parser.error(f"{'--k' if name == 'true top-k' else '--compression'}: {error}")

    title = (
        f"{size:,} parameters, {count} {'simulated ' if args.simulate else ''}workers, "
        f"batches of {args.batch_size}"
    )
    console = Console()
    console.print(title, highlight=False)
    runs = {}
    with Progress(console=console) as progress:
        for name, method in methods.items():
            task = progress.add_task(name, total=args.steps * len(args.seeds))
            advance = functools.partial(progress.advance, task)
            runs[name] = train(method, workers, args, advance)

    console.print(report.table(runs, caption(args, count)))
    report.save_figure(runs, title, args.output)
    if args.json:
        report.save_json(runs, vars(args), args.json)
    console.print(f"The curves are in {args.output}", highlight=False, soft_wrap=True)
    console.print(report.summary(runs), highlight=False, soft_wrap=True)


def caption(args: argparse.Namespace, workers: int) -> str:
    lines = ["Payload: what a worker hands to collectives, mean over steps, as compiled."]
    if args.simulate:
        lines.append("One device plays all workers: s/step says nothing about a network.")
    elif args.platform == "cpu":
        lines.append(
            f"{workers} emulated devices share {os.cpu_count()} cores: s/step says nothing about a "
            "network."
        )
    if len(args.seeds) > 1:
        lines.append(f"±: standard deviation over {len(args.seeds)} seeds.")
    return "\n".join(lines)


def flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    digits.add_worker_flags(parser)

    group = parser.add_argument_group("methods")
    add = group.add_argument
    add(
        "--methods",
        nargs="*",
        choices=["local", "spardl", "sketched_sgd", "true_top_k"],
        default=["local", "spardl", "sketched_sgd"],
        help="what to compare with dense (default: all but true_top_k, which saves no bytes: it is "
        "what a sketch approximates)",
    )
    add(
        "--compression",
        nargs="+",
        type=number(float, 1),
        default=[10.0],
        metavar="RATIO",
        help="of sketched_sgd: words of the gradient over words sent (default: 10)",
    )
    add("--density", type=number(float, 0), default=0.01, help="of spardl (default: 0.01)")
    add(
        "--k",
        type=number(int, 1),
        help="of true_top_k: coordinates updated per step (default: 1/40 of the parameters, about "
        "what sketching 10x updates)",
    )
    add(
        "--momentum",
        type=number(float, 0, 1),
        default=0.9,
        help="of every method (default: 0.9)",
    )

    add(
        "--local-steps",
        type=number(int, 1),
        default=10,
        metavar="H",
        help="that a worker makes before SparseLoCo exchanges what they moved (default: 10)",
    )

    group = parser.add_argument_group("training")
    add = group.add_argument
    add("--steps", type=number(int, 1), default=180, help="(default: 180)")
    add(
        "--batch-size",
        type=number(int, 1),
        default=256,
        metavar="IMAGES",
        help="of all workers together, rounded up to what they can share equally (default: 256)",
    )
    add(
        "--lr",
        type=number(float, 0),
        default=0.1,
        help="first learning rate; it falls to a tenth along a cosine (default: 0.1)",
    )
    add(
        "--hidden",
        type=number(int, 32),
        default=964,
        help="width of the two hidden layers (default: 964, a million parameters)",
    )
    add(
        "--seeds",
        nargs="+",
        type=number(int, 0),
        default=[0],
        metavar="SEED",
        help="of initial weights and batches; several are averaged (default: 0)",
    )

    group = parser.add_argument_group("results")
    add = group.add_argument
    add(
        "--eval-every",
        type=number(int, 1),
        default=20,
        metavar="STEPS",
        help="steps between points of the curves (default: 20)",
    )
    add(
        "--output",
        type=Path,
        default=Path("out/quickstart.png"),
        metavar="PNG",
        help="the figure (default: out/quickstart.png)",
    )
    add("--json", type=Path, metavar="FILE", help="also write curves and table as JSON")
    return parser


if __name__ == "__main__":
    main()
