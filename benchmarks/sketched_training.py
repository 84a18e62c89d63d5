r"""Sketched-SGD's headline in small: does a sketch train as well as true top-k, with a tenth sent?

    python benchmarks/sketched_training.py --json benchmarks/results/sketched_training.json
    python benchmarks/sketched_training.py --json FILE --shares --steps 400
    python benchmarks/sketched_training.py --json FILE --long --steps 9600
    python benchmarks/sketched_training.py --json FILE --workers 1 4 64 256 --windows 256 \
        --width 32 --steps 50 --first 0.2 --only "sketched 10x" "local top-k 10x"

A causal convolutional net reads words of Python's own library (as transformer.py has it),
which are the 2,047 most frequent ones and one for all others. It has a million parameters, most of
them in its first and last matrix, as in models of large vocabularies. SGD has momentum 0.9, inside
the exchange. Losses are in nats a word, on files that are held out.

One device plays all workers where that is exact (see sketch_sizing.py): for dense gradients, true
top-k, random-k and sketches. Others have 8 workers. A row's bytes are the payload.

Rows "decay D" keep D of the residual in each step, and others keep all. Rates are tuned by the
rule of rates.py, from `--first` on, on seed 0 and at full length. The other seeds take the best.
Each run is written to the file when it ends, and runs that the file has are not repeated.

With `--workers`, each row trains instead with each number of workers, on the same global batches,
at a rate of `--first`. The table has the largest difference of a step's loss from that of the
first number of workers, and what a worker receives, as a share of what it does by dense gradients.
"""

import argparse
import collections
import functools
import itertools
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import rates
import timing
import transformer as texts

import jaxsparse
from jaxsparse.reducers import SketchedSGD

VOCABULARY, LAYERS, LENGTH, MOMENTUM = 2048, 4, 16, 0.9
WORD = re.compile(rb"[A-Za-z]+|[0-9]|\n *|[^A-Za-z0-9\n]")
Params = dict[str, jax.Array]


class Row(NamedTuple):
    """An exchange: its transformation, given the axis of the workers, and their number."""

    tx: Callable[[str | None], optax.GradientTransformation]
    workers: int = 1
    is_whole: bool = True  # whether what is not sent stays in the residual


def row(make: Callable[..., Any], *given: Any, workers: int = 1, **settings: Any) -> Row:
    tx = lambda axis: make(*given, axis_name=axis, momentum=MOMENTUM, **settings)
    return Row(tx, workers, "decay" not in settings)


def rows(size: int) -> dict[str, Row]:
    """Table 1 for `size` parameters."""
    found = {"dense": row(jaxsparse.dense)}
    for ratio in (10, 20, 5):
        k, _ = SketchedSGD(ratio).sized(size)
        found[f"true top-k, k of {ratio}x"] = row(jaxsparse.true_top_k, k)
        found[f"sketched {ratio}x"] = row(jaxsparse.sketched_sgd, ratio)
        found[f"random-k {ratio}x"] = row(jaxsparse.random_k, 1 / ratio)
        # What waits long is stale, so that forgetting it may train better.
        found[f"random-k {ratio}x, decay 0"] = row(jaxsparse.random_k, 1 / ratio, decay=0.0)
    for ratio, kept in ((10, 0.0), (10, 0.5), (20, 0.5)):
        found[f"sketched {ratio}x, decay {kept:g}"] = row(jaxsparse.sketched_sgd, ratio, decay=kept)
    # An entry is a value and an index.
    found["local top-k 10x"] = row(jaxsparse.top_k, 1 / 20, workers=8)
    found["4 bits"] = row(jaxsparse.qsgd, 4, workers=8)
    for format in ("int2", "sign"):
        found[format] = row(jaxsparse.quantized, format, workers=8)
    return found


def shares(size: int) -> dict[str, Row]:
    """Figure 3: a quarter, a half and three quarters of the words for candidates, and more rows."""
    budget, found = size // 10, dict[str, Row]()
    for part, fetched in itertools.product((40, 80), (1, 2, 3)):
        k, P = size // part, fetched * part // 40
        given = {"k": k, "cols": budget - P * k, "rows": 1, "oversampling": P}
        found[f"sketched 10x, k=d/{part}, P={P}"] = row(jaxsparse.sketched_sgd, **given)
    found["sketched 10x, 3 rows"] = row(jaxsparse.sketched_sgd, 10, rows=3)
    found["sketched 20x, 1 row"] = row(jaxsparse.sketched_sgd, 20, rows=1)
    return found


def long_runs(size: int) -> dict[str, Row]:
    """Rows for runs in which each entry is sent some sixty times, which takes 60 d / k steps.

    They are the default at 20x and, in its own shape, the 40x of Table 1's transformer.
    """
    made, k = rows(size), size // 900
    cols, rows_, P = round(1.8 * k), 15, 16
    given = {"k": k, "cols": cols, "rows": rows_, "oversampling": P}
    words = (rows_ * cols + P * k) / size
    usual = ("dense", "sketched 20x", "true top-k, k of 20x", "random-k 20x, decay 0")
    return {name: made[name] for name in usual} | {
        "sketched, k=d/900": row(jaxsparse.sketched_sgd, **given),
        "true top-k, k=d/900": row(jaxsparse.true_top_k, k),
        "random-k, words of k=d/900, decay 0": row(jaxsparse.random_k, words, decay=0.0),
    }


def init(seed: int | jax.Array, width: int) -> Params:
    shapes = {"in": (VOCABULARY, width)}
    for layer in range(LAYERS):
        shapes |= {f"past{layer}": (2 * width, width), f"mix{layer}": (width, width)}
    shapes["out"] = (width, VOCABULARY)
    gains = {"in": float(VOCABULARY), "past": 2.0, "mix": 0.5 / LAYERS, "out": 1.0}
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return {
        name: jax.random.normal(key, shape) * (gains[name.rstrip("0123456789")] / shape[0]) ** 0.5
        for key, (name, shape) in zip(keys, shapes.items())
    }


def loss_of(params: Params, windows: jax.Array) -> jax.Array:
    """Nats a word; windows are int32[n, length + 1]."""
    norm = lambda x: x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
    x = params["in"][windows[:, :-1]]
    for layer in range(LAYERS):
        now = norm(x)
        # A causal convolution of two taps, 2**layer words apart.
        past = jnp.pad(now, ((0, 0), (2**layer, 0), (0, 0)))[:, : now.shape[1]]
        both = jnp.concatenate([now, past], axis=-1)
        x = x + jax.nn.relu(both @ params[f"past{layer}"]) @ params[f"mix{layer}"]
    scores = norm(x) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(scores, windows[:, 1:]).mean()


def words() -> tuple[jax.Array, np.ndarray]:
    """The words to train on, int32[n], and windows of others to test on."""
    corpus = texts.corpus()
    parts = [WORD.findall(part.tobytes()) for part in corpus]
    common = collections.Counter(parts[0]).most_common(VOCABULARY - 1)
    number = {word: n for n, (word, _) in enumerate(common, start=1)}
    train, held_out = (np.array([number.get(w, 0) for w in part], np.int32) for part in parts)
    test = texts.windows(held_out, 1024, LENGTH, np.random.default_rng(0))
    return jnp.asarray(train), test


class Found(NamedTuple):
    """A training run."""

    losses: jax.Array  # float32[steps]
    updated: jax.Array  # float32[steps]: share of the coordinates that a step updates
    held_out: jax.Array  # float32[]: loss on other files
    # Of one more exchange of k coordinates, by a single worker: the share of the k largest that are
    # in it, that of the squared norm that it delivers, and that which the k largest hold.
    recall: jax.Array | None = None  # float32[]
    delivered: jax.Array | None = None  # float32[]
    largest: jax.Array | None = None  # float32[]


def trainer(row: Row, args: argparse.Namespace, data: Any) -> Callable[[Any, Any], Found]:
    """A compiled function of seed and rate."""
    text, test = data
    axis = None if row.workers == 1 else "data"
    tx = row.tx(axis)
    schedule = optax.warmup_cosine_decay_schedule(0, 1, args.steps // 20, args.steps, 0.1)

    def exchanged(params: Params, opt_state: Any, batch: jax.Array) -> tuple[Any, Any, Any]:
        """Loss, updates and state of a global batch."""
        grad = jax.value_and_grad(loss_of)
        if axis is None:
            loss, grads = grad(params, batch)
            return loss, *tx.update(grads, opt_state, params)
        parts = batch.reshape(row.workers, -1, LENGTH + 1)
        loss, grads = jax.vmap(grad, in_axes=(None, 0))(params, parts)
        update = jax.vmap(tx.update, in_axes=(0, 0, None), axis_name=axis)
        updates, opt_state = update(grads, opt_state, params)
        return loss.mean(), jax.tree.map(lambda u: u[0], updates), opt_state

    def run(seed: jax.Array, rate: jax.Array) -> Found:
        key, params = jax.random.key(seed), init(seed, args.width)
        size = sum(x.size for x in jax.tree.leaves(params))

        def draw(t: jax.Array | int) -> jax.Array:
            key_of_step = jax.random.fold_in(key, t)
            starts = jax.random.randint(key_of_step, (args.windows, 1), 0, len(text) - LENGTH)
            return text[starts + jnp.arange(LENGTH + 1)]

        def step(state: Any, t: jax.Array) -> Any:
            params, opt_state = state
            loss, updates, opt_state = exchanged(params, opt_state, draw(t))
            scale = -rate * schedule(t)
            updated = sum(jnp.count_nonzero(u) for u in updates.values()) / size
            params = jax.tree.map(lambda p, u: p + scale * u, params, updates)
            return (params, opt_state), (loss, updated)

        opt_state = tx.init(params)
        if axis is not None:
            every = lambda x: jnp.broadcast_to(x, (row.workers, *x.shape))
            opt_state = jax.tree.map(every, opt_state)
        (params, opt_state), (losses, updated) = jax.lax.scan(
            step, (params, opt_state), jnp.arange(args.steps)
        )
        found = Found(losses, updated, loss_of(params, test))
        if axis is not None or not row.is_whole:
            return found
        _, updates, opt_state = exchanged(params, opt_state, draw(args.steps))
        return Found(*found[:3], *of_largest(updates, opt_state.residual))

    return jax.jit(run)


def of_largest(updates: Any, residual: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The last three of `Found`: no coordinate is both in a worker's update and in its residual."""
    flat = lambda tree: [jnp.abs(x).ravel() for x in jax.tree.leaves(tree)]
    sent = jnp.concatenate(flat(updates))
    ranked = -jnp.sort(-jnp.concatenate([sent, *flat(residual)]))
    k = jnp.count_nonzero(sent)
    first = jnp.arange(ranked.size) < k
    whole = jnp.sum(ranked**2)
    recall = jnp.count_nonzero(sent >= ranked[k - 1]) / k
    return recall, jnp.sum(sent**2) / whole, jnp.sum(jnp.where(first, ranked, 0) ** 2) / whole


class File:
    """Runs in a JSON file, which is written after each."""

    def __init__(self, path: str):
        self.path, self.where = path, timing.where()
        self.runs: list[dict[str, Any]] = []
        if Path(path).exists():
            self.runs = json.loads(Path(path).read_text())["runs"]

    def found(
        self, wanted: dict[str, Any], make: Callable[[], dict[str, Any]], needs: str = "held_out"
    ) -> dict[str, Any]:
        """The run that has all of `wanted` and a value of `needs`, made if the file lacks it."""
        for run in self.runs:
            if wanted.items() <= run.items() and needs in run:
                return run
        self.runs.append({**wanted, **make(), "date": self.where["date"]})
        timing.save({**self.where, "runs": self.runs}, self.path)
        shown = {name: x for name, x in self.runs[-1].items() if not isinstance(x, list)}
        print(*(f"{name}={value}" for name, value in shown.items()), flush=True)
        return self.runs[-1]


def run(compiled: Callable[[Any, Any], Found], rate: float, seed: int) -> dict[str, Any]:
    began = time.process_time()
    found = jax.block_until_ready(compiled(jnp.int32(seed), jnp.float32(rate)))
    return {
        "losses": [float(part.mean()) for part in np.array_split(found.losses, 50)],
        "updated": float(found.updated.mean()),
        **{name: float(x) for name, x in found._asdict().items() if x is not None and x.ndim == 0},
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def tuned(name: str, row: Row, args: argparse.Namespace, data: Any, file: File) -> list[Any]:
    """The runs of all seeds at the rate that is best for the first."""
    compiled = trainer(row, args, data)

    def at(rate: float, seed: int) -> dict[str, Any]:
        wanted = {"row": name, "workers": row.workers, "rate": rate, "seed": seed, **sizes(args)}
        return file.found(wanted, lambda: run(compiled, rate, seed))

    best = rates.tuned(lambda rate: at(rate, args.seeds[0])["held_out"], args.first)
    return [at(best, seed) for seed in args.seeds]


def sizes(args: argparse.Namespace) -> dict[str, int]:
    return {"steps": args.steps, "windows": args.windows, "width": args.width}


def compare(chosen: dict[str, Row], args: argparse.Namespace, data: Any, file: File) -> None:
    """Prints the table of rows."""
    lines = [timing.head("exchange", "nats a word", "range", "rate", "fewer bytes", "recall")]
    params = init(0, args.width)
    dense = 4 * sum(x.size for x in params.values())
    for name, row in chosen.items():
        runs = tuned(name, row, args, data, file)
        losses = [run["held_out"] for run in runs]
        payload = jaxsparse.traffic.traced_bytes(row.tx("data"), params, 8).payload
        cells = (
            f"{np.mean(losses):.3f}",
            f"{np.ptp(losses):.3f}",
            f"{runs[0]['rate']:g}",
            f"{dense / payload:.1f}x",
            f"{runs[0]['recall']:.2f}" if "recall" in runs[0] else "",
        )
        lines.append(timing.row(name, *cells))
    print("\n".join(lines))


def scaled(chosen: dict[str, Row], args: argparse.Namespace, data: Any, file: File) -> None:
    """Prints the table of numbers of workers."""
    heads = ("exchange", "workers", "held-out", "largest difference", "updated", "received")
    lines = [timing.head(*heads)]
    params, seed = init(0, args.width), args.seeds[0]
    dense = Row(lambda axis: jaxsparse.dense(axis_name=axis))
    received = lambda row, n: jaxsparse.traffic.traced_bytes(row.tx("data"), params, n).received
    for name, row in chosen.items():
        first = None
        for workers in args.workers:
            wanted = {"row": name, "workers": workers, "rate": args.first, "seed": seed}
            compiled = trainer(row._replace(workers=workers), args, data)
            make = functools.partial(run, compiled, args.first, seed)
            found = file.found({**wanted, **sizes(args)}, make, needs="losses")
            losses = np.array(found["losses"])
            first = losses if first is None else first
            share = received(row, workers) / max(received(dense, workers), 1)
            cells = (
                f"{found['held_out']:.4f}",
                f"{np.abs(losses - first).max():.1e}",
                f"{100 * found['updated']:.1f} %",
                f"{100 * share:.1f} %" if workers > 1 else "",
            )
            lines.append(timing.row(name, workers, *cells))
    print("\n".join(lines))


def main() -> None:
    parser = timing.parser_of(__doc__)
    add = parser.add_argument
    add("--json", metavar="FILE", required=True, help="where runs are, and where new ones go")
    add("--width", type=int, default=168)
    add("--windows", type=int, default=8, help="of a batch, for all workers together")
    add("--steps", type=int, default=1200)
    add("--first", type=float, default=0.1, metavar="RATE", help="the first rate to try")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--only", nargs="+", metavar="ROW", help="rows by name; default: all")
    add("--long", action="store_true", help="the rows for long runs instead")
    add("--shares", action="store_true", help="the rows of the paper's figure 3 instead")
    add("--workers", type=int, nargs="+", help="see above")
    args = parser.parse_args()
    file, data = File(args.json), words()
    size = sum(x.size for x in init(0, args.width).values())
    made = rows(size) | shares(size) | long_runs(size)
    group = shares if args.shares else long_runs if args.long else rows
    chosen = {name: made[name] for name in args.only or group(size)}
    print(f"{size:,} parameters, {len(data[0]):,} words to train on")
    (scaled if args.workers else compare)(chosen, args, data, file)


if __name__ == "__main__":
    main()
