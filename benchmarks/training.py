"""Trains a small language model, or a model of digits, by each exchange on simulated workers.

The language model (embeddings of the last bytes, two layers, Adam) learns Python's reference
manual, the other (two hidden layers, SGD with momentum) scikit-learn's digits. Numbers are of
held-out data, with means and ranges over seeds. All rows take the same steps and batches. The rate
of each row is tuned by the rule of rates.py on seed 0 and at full length. A file of `--json` is
written after each row, and rows that it has are not trained again.

    python benchmarks/training.py --json benchmarks/results/training_text.json
    python benchmarks/training.py --task digits --json benchmarks/results/training_digits.json
    python benchmarks/training.py --steps 100 --seeds 1 --only dense "4 bits, before Adam"
    python benchmarks/training.py --rates benchmarks/results/training_digits.json

With `--rates`, it prints the best rates of such files over dense's, and what they gain on seed 0.
"""

import argparse
import functools
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from pydoc_data import topics
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
import rates
import timing

import jaxsparse
from jaxsparse import LocalSteps, codecs, contrib, per_worker, reducers, shard
from jaxsparse.outer.parallel import run_on_workers

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
digits: Any = importlib.import_module("digits")

CONTEXT, WIDTH, HIDDEN, BATCH = 16, 24, 384, 32  # BATCH is for each worker
Transformation: TypeAlias = optax.GradientTransformation


class Local(NamedTuple):
    """A worker's own optimizer, and the exchange of displacements of some steps."""

    inner: Transformation
    exchange: Transformation
    every: int


LATE = "dense, one step late", "4 bits, one step late", "SparDL, one step late"
Rows = dict[str, Callable[[float], Transformation | Local]]


def exchanges(density: float) -> dict[str, Callable[..., Transformation]]:
    """Exchanges of gradients by name, each a function of `momentum=`."""
    make: Any = functools.partial
    bits = {"codec": codecs.EliasFano()}
    draw = lambda share, **more: make(jaxsparse.random_k, share * density, **more)
    sums: tuple[tuple[str, str, Any, dict[str, Any]], ...] = (
        ("SparCML", "", jaxsparse.sparcml, {}),
        ("SparCML", ", 4 bits", jaxsparse.sparcml, {"bits": 4}),
        ("top-k", "", jaxsparse.top_k, {}),
    )
    few = {
        f"{name}, {n} of 512{more}": make(tx, n if name == "SparCML" else n / 512, **settings)
        for n in (8, 16)
        for name, more, tx, settings in sums
    }
    return {
        "dense": jaxsparse.dense,
        "4 bits": make(jaxsparse.qsgd, 4),
        "SparDL": make(jaxsparse.spardl, density),
        "dense, one step late": make(jaxsparse.dense, delay=1),
        "4 bits, one step late": make(jaxsparse.qsgd, 4, delay=1),
        "SparDL, one step late": make(jaxsparse.spardl, density, delay=1),
        "SparDL, 2-bit values": make(jaxsparse.spardl, density, **bits),
        "top-k": make(jaxsparse.top_k, density),
        "top-k, 2-bit values": make(jaxsparse.top_k, density, **bits),
        "chunked top-k": make(jaxsparse.chunked_top_k, round(4096 * density)),
        "DGC": make(jaxsparse.dgc, density),
        "DRAGONN": make(jaxsparse.dragonn, density, extract="hash"),
        "DRAGONN, slot_max": make(jaxsparse.dragonn, density, extract="slot_max"),
        # As many bytes as SparDL, which sends an index with each value.
        "random-k": draw(2),
        # As many bytes as eight workers receive by top-k.
        "random-k as top-k": draw(8),
        # What waits for its draw is stale when it comes, so that dropping it is the better control.
        "random-k, not fed back": draw(2, decay=0.0),
        "random-k as top-k, not fed back": draw(8, decay=0.0),
        "PowerSGD rank 2": make(jaxsparse.powersgd, 2),
        "PowerSGD rank 4": make(jaxsparse.powersgd, 4),
        **few,
    }


def text_rows(density: float) -> Rows:
    """Transformations by name, each a function of the learning rate."""
    adam, rate, k = optax.scale_by_adam, optax.scale_by_learning_rate, round(4096 * density)
    in_4_bits = reducers.Quantized()  # which rounds up or down, and is right on average
    before = lambda tx: lambda lr: optax.chain(tx(momentum=None), adam(), rate(lr))
    behind = lambda tx: lambda lr: optax.chain(per_worker(adam()), tx(momentum=None), rate(lr))
    every = exchanges(density)
    blind = functools.partial(jaxsparse.random_k, 8 * density, reducer=in_4_bits, decay=0.0)
    aged = functools.partial(jaxsparse.spardl, density, decay=0.95)
    firsts = "4 bits", "SparDL", "random-k", "random-k, not fed back", "PowerSGD rank 2"
    bare = lambda tx: lambda lr: optax.chain(tx(), adam(b1=0.0), rate(lr))
    rows = {"dense": before(every["dense"])}
    rows |= {f"{name}, before Adam": before(every[name]) for name in firsts + LATE}
    rows |= {f"{name}, no momentum": bare(every[name]) for name in ("dense", LATE[0])}
    for name in ("dense", "4 bits", *LATE):
        del every[name]
    for name, tx in every.items():
        what, *bits = name.split(", 2-bit values")
        rows[f"{what}, behind Adam" + (", 2-bit values" if bits else "")] = behind(tx)
    return rows | {
        "SparDL, behind Adam, decay 0.95": behind(aged),
        "random-k as top-k, 4 bits, not fed back, behind Adam": behind(blind),
        "DeMo": lambda lr: optax.chain(contrib.demo(k), optax.scale_by_sign(), rate(lr)),
        "DeMo, before Adam": lambda lr: optax.chain(contrib.demo(k), adam(), rate(lr)),
        "EF21-SGDM, before Adam": lambda lr: optax.chain(
            contrib.ef21_sgdm(jaxsparse.reducers.SparDL(density)), adam(b1=0.0), rate(lr)
        ),
        **local_rows(optax.adam),
    }


def digit_rows(density: float) -> Rows:
    """Transformations by name, each a function of the learning rate."""
    k, rate = round(4096 * density), optax.scale_by_learning_rate
    own = lambda tx: lambda lr: optax.chain(tx(momentum=0.9), rate(lr))
    twice = functools.partial(jaxsparse.dragonn, density, extract="hash", passing=2.0)
    every = exchanges(density) | {"DRAGONN, twice as many pass": twice}
    bare = lambda tx: lambda lr: optax.chain(tx(), rate(lr))
    return {name: own(tx) for name, tx in every.items()} | {
        **{f"{name}, no momentum": bare(every[name]) for name in ("dense", LATE[0])},
        "DeMo": lambda lr: optax.chain(contrib.demo(k), optax.scale_by_sign(), rate(lr / 50)),
        "EF21-SGDM": lambda lr: optax.chain(
            # Its momentum is an average, and the others' is a sum.
            contrib.ef21_sgdm(jaxsparse.reducers.SparDL(density), momentum=0.9),
            rate(10 * lr),
        ),
        **local_rows(functools.partial(optax.sgd, momentum=0.9)),
    }


def local_rows(inner: Callable[[float], Transformation]) -> Rows:
    return {
        "10 local steps, mean": lambda lr: Local(inner(lr), jaxsparse.dense(), 10),
        "10 local steps, SparseLoCo": lambda lr: Local(
            inner(lr), jaxsparse.chunked_top_k(decay=0.95), 10
        ),
    }


class Task(NamedTuple):
    """A model to train, and its data."""

    rows: Callable[[float], Rows]
    rate: float  # the first to try
    steps: int
    init: Callable[[int], Any]  # parameters, from a seed
    loss_of: Callable[[Any, Any], jax.Array]
    draw: Callable[[int, np.random.Generator], Any]  # a number of examples to train on
    test: Callable[[], Any]  # held-out examples
    right: Callable[[Any, Any], jax.Array] | None = None  # share of right ones


def text() -> Task:
    whole = "\n".join(topics.topics[key] for key in sorted(topics.topics)).encode()
    data = np.frombuffer(whole, np.uint8).astype(np.int32)
    learn, held_out = np.split(data, [len(data) * 9 // 10])

    def windows(data: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
        """Random windows of CONTEXT bytes and the byte that follows."""
        starts = rng.integers(0, len(data) - CONTEXT - 1, count)
        return data[starts[:, None] + np.arange(CONTEXT + 1)]

    def loss_of(params: Any, batch: jax.Array) -> jax.Array:
        x = params["embedding"][batch[:, :-1]].reshape(len(batch), -1)
        x = jax.nn.gelu(x @ params["in"])
        x = x + jax.nn.gelu(x @ params["hidden"])
        logits = x @ params["out"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, -1]).mean()

    shapes = {
        "embedding": (256, WIDTH),
        "in": (CONTEXT * WIDTH, HIDDEN),
        "hidden": (HIDDEN, HIDDEN),
        "out": (HIDDEN, 256),
    }
    return Task(
        text_rows,
        0.01,
        600,
        lambda seed: normal(shapes, seed, 1.0),
        loss_of,
        lambda count, rng: windows(learn, count, rng),
        lambda: windows(held_out, 4096, np.random.default_rng(0)),
    )


def digit() -> Task:
    train, test = digits.load()

    def logits_of(params: Any, batch: Any) -> jax.Array:
        x = jax.nn.relu(batch.images @ params["in"])
        return jax.nn.relu(x @ params["hidden"]) @ params["out"]

    def loss_of(params: Any, batch: Any) -> jax.Array:
        logits = logits_of(params, batch)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels).mean()

    def right(params: Any, batch: Any) -> jax.Array:
        return jnp.mean(logits_of(params, batch).argmax(axis=-1) == batch.labels)

    def draw(count: int, rng: np.random.Generator) -> Any:
        chosen = rng.integers(len(train.labels), size=count)
        return type(train)(train.images[chosen], train.labels[chosen])

    shapes = {"in": (64, HIDDEN), "hidden": (HIDDEN, HIDDEN), "out": (HIDDEN, 10)}
    return Task(
        digit_rows,
        0.1,
        300,
        lambda seed: normal(shapes, seed, 2.0),
        loss_of,
        draw,
        lambda: test,
        right,
    )


TASKS = {"text": text, "digits": digit}


def normal(shapes: dict[str, tuple[int, int]], seed: int, gain: float) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return {
        name: jax.random.normal(key, shape) * (gain / shape[0]) ** 0.5
        for key, (name, shape) in zip(keys, shapes.items())
    }


def train(
    task: Task, method: Transformation | Local, seed: int, args: argparse.Namespace
) -> tuple[float, float]:
    """The loss after training, and the share of examples that are right."""
    tx = method.inner if isinstance(method, Local) else method

    def step(state: Any, batch: Any) -> tuple[Any, None]:
        params, opt_state = state
        gradient = jax.grad(task.loss_of)(params, batch)
        updates, opt_state = tx.update(gradient, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    rng = np.random.default_rng(seed)
    draw = lambda: task.draw(args.workers * BATCH, rng)
    params = task.init(seed)
    state: Any = (params, tx.init(params))
    if isinstance(method, Local):
        local = LocalSteps(step, method.exchange, optax.sgd(1.0), args.workers, every=method.every)
        state = local.init(state)
        for t in range(args.steps):
            state, _ = local(state, draw(), t)
        params = local.finish(state, args.steps).params
    else:
        run = run_on_workers(lambda s, b: step(s, b)[0], args.workers, donate_argnums=0)
        state = shard(state, args.workers)
        for _ in range(args.steps):
            state = run(state, draw())
        params = state[0]
    test = jax.tree.map(jnp.asarray, task.test())
    right = float(jax.jit(task.right)(params, test)) if task.right else 0.0
    return float(jax.jit(task.loss_of)(params, test)), right


def received(task: Task, method: Transformation | Local, workers: int) -> float:
    """Bytes that a worker receives, mean over steps."""
    tx, every = (method.exchange, method.every) if isinstance(method, Local) else (method, 1)
    return jaxsparse.traffic.traced_bytes(tx, task.init(0), workers).received / every


def trained(task: Task, make: Callable[[float], Any], args: argparse.Namespace) -> dict[str, Any]:
    """A row: its rate, what was tried, the losses and right ones of all seeds, and its bytes."""
    run = functools.cache(lambda rate, seed: train(task, make(rate), seed, args))
    tried = dict[float, float]()

    def loss(rate: float) -> float:
        tried[rate], _ = run(rate, 0)
        return tried[rate]

    rate = rates.tuned(loss, args.first)
    losses, right = zip(*(run(rate, seed) for seed in range(args.seeds)))
    received_bytes = received(task, make(rate), args.workers)
    return {
        "losses": losses, "right": right, "rate": rate, "tried": tried, "received": received_bytes
    }  # fmt: skip


def print_rates(file: str) -> None:
    """The rates of rows over dense's, and the losses of seed 0 at dense's rate and at their own."""
    rows = json.loads(Path(file).read_text())["rows"]
    of_dense = rows["dense"]["rate"]
    print(timing.head("exchange", "rate over dense's", "loss at dense's rate", "at its own"))
    for name, row in rows.items():
        tried = {float(rate): loss for rate, loss in row["tried"].items()}
        losses = (f"{tried[rate]:.3f}" for rate in (of_dense, row["rate"]))
        print(timing.row(name, f"{row['rate'] / of_dense:g}", *losses))


def main() -> None:
    parser = timing.parser_of(__doc__)
    add = parser.add_argument
    add("--rates", metavar="FILE", help="prints rates of a file, and trains nothing")
    add("--task", choices=TASKS, default="text")
    add("--workers", type=int, default=8)
    add("--steps", type=int, help="default: 600; digits: 300")
    add("--seeds", type=int, default=3)
    add("--density", type=float, default=0.01)
    add("--first", type=float, metavar="RATE", help="the first to try (default: 0.01; digits: 0.1)")
    add("--only", nargs="+", metavar="ROW", help="rows by name; default: all")
    add("--json", metavar="FILE", help="where rows are, and where new ones go")
    args = parser.parse_args()
    if args.rates:
        print_rates(args.rates)
        return
    where, task = timing.where(), TASKS[args.task]()
    args.steps, args.first = args.steps or task.steps, args.first or task.rate
    settings = {name: x for name, x in vars(args).items() if name not in ("only", "json", "rates")}
    found: dict[str, Any] = {}
    if args.json and Path(args.json).exists():
        known = json.loads(Path(args.json).read_text())
        if any(known.get(name) != x for name, x in settings.items()):
            parser.error(f"{args.json} has rows of other settings. Name another file.")
        found = known["rows"]
    made = task.rows(args.density)
    dense = received(task, made["dense"](args.first), args.workers)
    print(timing.head("exchange", "loss", "range", "right", "rate", "fewer bytes"))
    for name in args.only or made:
        if name not in found:
            found[name] = trained(task, made[name], args)
            timing.save({**where, **settings, "rows": found}, args.json)
        row = found[name]
        cells = (
            f"{np.mean(row['losses']):.3f}",
            f"{np.ptp(row['losses']):.3f}",
            f"{100 * np.mean(row['right']):.1f} %" if task.right else "",
            f"{row['rate']:g}",
            f"{dense / row['received']:.1f}x",
        )
        print(timing.row(name, *cells), flush=True)


if __name__ == "__main__":
    main()
