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
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import digits
import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits import number
from flax import nnx
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import jaxsparse

MOMENTUM, RATE, BATCH, LOCAL_STEPS, DENSITY = 0.9, 0.1, 256, 10, 0.01
LAST = 20  # steps whose losses are averaged


class MLP(nnx.Module):
    def __init__(self, hidden: int, rngs: nnx.Rngs):
        self.first = nnx.Linear(64, hidden, rngs=rngs)
        self.second = nnx.Linear(hidden, hidden, rngs=rngs)
        self.last = nnx.Linear(hidden, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        return self.last(nnx.relu(self.second(nnx.relu(self.first(images)))))


# A function of `workers=` makes an exchange of gradients. An exchange by itself is one of
# displacements: each worker trains alone, and then all exchange how far their models moved.
Method: TypeAlias = optax.GradientTransformation | Callable[..., optax.GradientTransformation]


def methods_to_compare(args: argparse.Namespace) -> dict[str, Method]:
    """The methods by name. They share the model, the data and all other settings."""
    make = functools.partial
    methods: dict[str, Method] = {"dense": make(jaxsparse.dense, momentum=MOMENTUM)}
    if "local" in args.methods:
        methods["local steps"] = jaxsparse.chunked_top_k(decay=0.95)
    if "spardl" in args.methods:
        methods["SparDL 1 %"] = make(jaxsparse.spardl, DENSITY, momentum=MOMENTUM)
    if "sketched_sgd" in args.methods:
        for ratio in args.compression:
            method = make(jaxsparse.sketched_sgd, ratio, momentum=MOMENTUM)
            methods[f"sketched {ratio:g}x"] = method
    return methods


class Run(NamedTuple):
    """One method, trained once for each seed."""

    train_loss: np.ndarray  # float[seeds]: mean over the last steps
    test_accuracy: np.ndarray  # float[seeds]
    received: float  # bytes that a device receives in a step, mean over steps


def train(
    method: Method,
    workers: digits.Workers,
    args: argparse.Namespace,
    advance: Callable[[], object],
) -> Run:
    """Trains once for each seed, and calls `advance` after every step."""
    train_set, test_set = digits.load()
    model_graph = nnx.graphdef(MLP(args.hidden, nnx.Rngs(0)))

    @jax.jit
    def test_accuracy(params: Any) -> jax.Array:
        model = nnx.merge(model_graph, params)
        return jnp.mean(model(test_set.images).argmax(axis=-1) == test_set.labels)

    batches = functools.partial(digits.batches, train_set, args.batch_size, args.steps)
    is_local = isinstance(method, optax.GradientTransformation)
    make = with_local_steps if is_local else with_gradients
    trainer = make(method, workers, args)
    # Simulated workers send nothing. Their bytes are those that a mesh would send.
    on_mesh = make(method, workers._replace(simulated=None), args)
    received = on_mesh.received(on_mesh.start(0), next(batches(seed=0)))

    ends: list[tuple[float, float]] = []
    for seed in args.seeds:
        state, losses = trainer.start(seed), list[float]()
        for i, batch in enumerate(batches(seed=seed)):
            state, loss = trainer.step(state, batch, i)
            losses.append(float(loss.mean()))  # waits: emulated devices may deadlock if steps queue
            advance()
        ends.append((float(np.mean(losses[-LAST:])), float(test_accuracy(trainer.params(state)))))
    losses_at_end, accuracies = np.array(ends).T
    return Run(losses_at_end, accuracies, received)


class Trainer(NamedTuple):
    """A way to train on all workers."""

    start: Callable[[int], Any]  # the first state, given a seed
    step: Callable[[Any, digits.Digits, int], tuple[Any, jax.Array]]  # losses of all workers
    params: Callable[[Any], Any]  # the model's, of a state
    received: Callable[[Any, digits.Digits], float]  # bytes a device and step, mean over steps


def schedule_of(steps: int) -> optax.Schedule:
    # The rate does not fall to 0, because entries that wait in residuals still have to arrive.
    return optax.cosine_decay_schedule(RATE, steps, alpha=0.1)


def create(tx: optax.GradientTransformation, hidden: int, seed: int) -> tuple[MLP, nnx.Optimizer]:
    model = MLP(hidden, nnx.Rngs(seed))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def loss_of(model: MLP, batch: Any) -> jax.Array:
    logits = model(batch.images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels).mean()


def with_gradients(method: Any, workers: digits.Workers, args: argparse.Namespace) -> Trainer:
    """Workers exchange gradients in each step. What a trainer changes for that is numbered."""
    tx = optax.chain(
        method(workers=workers.simulated),  # 1: the exchange, which has the momentum
        optax.sgd(schedule_of(args.steps)),
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


def with_local_steps(exchange: Any, workers: digits.Workers, args: argparse.Namespace) -> Trainer:
    """Workers train alone. Every `LOCAL_STEPS` they exchange how far their models moved."""
    tx = optax.sgd(schedule_of(args.steps), momentum=MOMENTUM)
    graph = nnx.graphdef(create(tx, args.hidden, seed=0))

    def step(state: Any, batch: digits.Digits) -> tuple[Any, jax.Array]:
        """The step of one worker, given its share of the batch."""
        model, optimizer = nnx.merge(graph, state)
        loss, grads = nnx.value_and_grad(loss_of)(model, batch)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    local = jaxsparse.LocalSteps(
        step,
        exchange,
        optax.sgd(1.0),
        workers.where,
        every=LOCAL_STEPS,
        params=lambda state: nnx.filter_state(state, nnx.Param),
    )
    return Trainer(
        lambda seed: local.init(nnx.state(create(tx, args.hidden, seed))),
        local,
        lambda state: state.params[0],
        lambda state, _: jaxsparse.wire_bytes(local.outer[0], state).received / LOCAL_STEPS,
    )


def main() -> None:
    parser = flags()
    args = parser.parse_args()
    workers = digits.find_workers(args, parser)
    count = workers.mesh.size
    args.batch_size = digits.shared_batch(BATCH, count)
    params = nnx.state(nnx.eval_shape(lambda: MLP(args.hidden, nnx.Rngs(0))), nnx.Param)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))

    methods: dict[str, Any] = methods_to_compare(args)
    for method in methods.values():
        try:
            is_local = isinstance(method, optax.GradientTransformation)
            tx: Any = method if is_local else method(workers=count)
            jax.eval_shape(tx.init, params)
        except ValueError as error:
            parser.error(f"--compression: {error}")

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

    console.print(table(runs))
    if args.json:
        save_json(runs, vars(args), args.json)


# --- what is told


def compression(runs: dict[str, Run], name: str) -> float:
    return runs["dense"].received / runs[name].received


def table(runs: dict[str, Run]) -> Table:
    caption = "Received: by a device in a step, from the others, mean over steps, as compiled."
    style: Any = {"box": box.SIMPLE_HEAD, "show_edge": False, "pad_edge": False}
    result = Table(**style, collapse_padding=True, caption=caption, caption_justify="left")
    result.add_column("method", no_wrap=True)
    for head in ("train loss", "test accuracy", "received B", "compression"):
        result.add_column(head, justify="right")

    def shown(values: np.ndarray, form: str) -> str:
        spread = f" ± {values.std(ddof=1):{form}}" if len(values) > 1 else ""
        return format(values.mean(), form) + spread

    for name, run in runs.items():
        result.add_row(
            name,
            shown(run.train_loss, ".4f"),
            shown(100 * run.test_accuracy, ".2f") + " %",
            f"{run.received:,.0f}",
            f"{compression(runs, name):.2f}x",
        )
    return result


def save_json(runs: dict[str, Run], settings: dict[str, Any], path: Path) -> None:
    methods = {
        name: {
            "train_loss": run.train_loss.tolist(),
            "test_accuracy": run.test_accuracy.tolist(),
            "received_bytes": run.received,
            "compression": compression(runs, name),
        }
        for name, run in runs.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"settings": settings, "methods": methods}, indent=1, default=str))


def flags() -> argparse.ArgumentParser:
    parser = digits.parser_of(__doc__)
    digits.add_worker_flags(parser)
    add, every = parser.add_argument, ["local", "spardl", "sketched_sgd"]
    add("--methods", nargs="*", choices=every, default=every, help="beside dense (default: all)")
    add("--compression", nargs="+", type=number(float, 1), default=[10.0], metavar="RATIO",
        help="of sketched_sgd: words of the gradient over words sent (default: 10)")  # fmt: skip
    add("--steps", type=number(int, 1), default=180, help="(default: 180)")
    add("--hidden", type=number(int, 32), default=964, help="units of two layers (default: 964)")
    add("--seeds", nargs="+", type=number(int, 0), default=[0], metavar="SEED",
        help="of initial weights and batches; several are averaged (default: 0)")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="also write the table as JSON")
    return parser


if __name__ == "__main__":
    main()
