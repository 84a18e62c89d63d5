"""Trains a word-level LSTM whose embedding's gradient travels sparse, sketched or dense.

The text is Python's own documentation, so nothing is downloaded. Eight emulated devices are the
workers:

    python examples/language_model/train.py
    python examples/language_model/train.py --methods dense s2 --seeds 0 1 2 --factors 0.5 1 2
    python examples/language_model/train.py --corpus wiki.train.tokens --valid wiki.valid.tokens
"""

import argparse
import functools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import corpus
import jax
import jax.numpy as jnp
import model
import numpy as np
import optax
import results
from flax import nnx
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import Progress

import jaxsparse
from jaxsparse.reducers.base import Reducer

METHODS = ("dense", "gather", "omni", "s2", "s2 + spardl", "s2 + random")
EMBEDDING = "embedding"
MATRICES = "(gates|recurrent|output).*kernel"


class Method(NamedTuple):
    """What is exchanged by which reducer.

    Attributes:
        policy: reducers of the model's leaves, by a part of their names. Others go dense.
        decay: factor of what waits in residuals, in each step.
    """

    policy: dict[str, Reducer]
    decay: float = 1.0


def named_methods(args: argparse.Namespace, union: int) -> dict[str, Method]:
    """The methods by name. All workers together may touch `union` words in a step."""
    words = args.vocabulary
    own = min(words, args.windows // args.workers * args.length)
    gather = jaxsparse.systems.SparseAllGather(block_size=args.width, capacity_density=own / words)
    rows: dict[str, Any] = {
        "block_size": args.width,
        "density": None,  # all rows that are not zero
        "union_density": union / words,
    }
    s2 = jaxsparse.systems.S2(sketch_ratio=args.sketch_ratio, **rows)
    spardl = jaxsparse.systems.SparDL(args.density)
    # The control: as many words, which need no indices, drawn at random. It feeds nothing back.
    random = jaxsparse.systems.RandomK(min(1.0, 2 * args.density))
    return {
        "dense": Method({}),
        "gather": Method({EMBEDDING: gather}),
        "omni": Method({EMBEDDING: jaxsparse.systems.OmniReduce(**rows)}),
        "s2": Method({EMBEDDING: s2}),
        "s2 + spardl": Method({EMBEDDING: s2, MATRICES: spardl}),
        "s2 + random": Method({EMBEDDING: s2, MATRICES: random}, decay=0.0),
    }


def most_distinct(text: np.ndarray, args: argparse.Namespace) -> int:
    """The largest number of distinct words in a batch's inputs, among 100 batches."""
    batches = corpus.batches(text, args.windows, args.length, 100, seed=12345)
    return max(len(np.unique(batch[:, :-1])) for batch in batches)


def make_optimizer(args: argparse.Namespace) -> optax.GradientTransformation:
    """Adam, but by default SGD with momentum of the mean gradient for the embedding.

    A sketch spreads its noise evenly over the rows of a batch. In the rows of rare words the noise
    is most of the gradient. Adam would divide it by its own size there, and so make it as large as
    the signal in other rows.

    The step size of the second part multiplies all updates, so it is the factor of all rates.
    """

    def schedule(peak: float) -> optax.Schedule:
        return optax.warmup_cosine_decay_schedule(
            0.0, peak, args.steps // 10, args.steps, end_value=0.1 * peak
        )

    def label(path: Any, leaf: Any) -> str:
        return EMBEDDING if EMBEDDING in jax.tree_util.keystr(path) else "other"

    adam = optax.adam(schedule(args.lr))
    sgd = optax.sgd(schedule(args.embedding_lr), momentum=0.9)
    optimizer = optax.multi_transform(
        {EMBEDDING: adam if args.embedding_optimizer == "adam" else sgd, "other": adam},
        lambda params: jax.tree_util.tree_map_with_path(label, params),
    )
    return optax.chain(optimizer, optax.inject_hyperparams(optax.scale)(1.0))


def train(
    method: Method,
    texts: corpus.Corpus,
    mesh: Mesh,
    args: argparse.Namespace,
    advance: Callable[[], object],
) -> results.Run:
    """Trains with each factor of the rates on the first seed, and with the best one on the others.

    It calls `advance` after every step.
    """
    tx = optax.chain(jaxsparse.partition(method.policy, decay=method.decay), make_optimizer(args))

    def create(seed: int, factor: float) -> tuple[Any, Any]:
        lm = model.LanguageModel(
            len(texts.words), args.width, args.hidden, args.output, nnx.Rngs(seed)
        )
        optimizer = nnx.Optimizer(lm, tx, wrt=nnx.Param)
        optimizer.opt_state[1][1].hyperparams["step_size"][...] = factor
        graphdef, state = nnx.split((lm, optimizer))
        return graphdef, jaxsparse.shard(state, mesh)

    graphdef, state = create(0, 1.0)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, windows: jax.Array) -> tuple[Any, jax.Array]:
        lm, optimizer = nnx.merge(graphdef, state)
        of_lm, params = nnx.split(lm)
        loss_of = lambda params, windows: model.loss(nnx.merge(of_lm, params), windows)
        optimizer.update(lm, jaxsparse.grad(loss_of)(params, windows))
        return nnx.state((lm, optimizer)), optimizer.opt_state[0].info.overflow[...]

    valid = corpus.consecutive(texts.valid, args.length)
    valid = valid[:: max(1, len(valid) // args.eval_windows)][: args.eval_windows]

    @jax.jit
    def perplexity(state: Any) -> jax.Array:
        lm, _ = nnx.merge(graphdef, state)
        return jnp.exp(model.loss(lm, jnp.asarray(valid)))

    batches = functools.partial(corpus.batches, texts.train, args.windows, args.length, args.steps)
    sent = jaxsparse.traffic.wire_bytes(step, state, next(batches(seed=0)))

    seconds: list[float] = []

    def run(seed: int, factor: float) -> tuple[list[tuple[int, float]], int]:
        """Steps with their perplexities, and the overflow."""
        _, state = create(seed, factor)
        curve, total_overflow = [], 0
        for i, batch in enumerate(batches(seed=seed), start=1):
            began = time.perf_counter()
            state, overflow = step(state, batch)
            total_overflow += int(overflow)  # waits: emulated devices may deadlock on queued steps
            seconds.append(time.perf_counter() - began)
            if i % args.eval_every == 0 or i == args.steps:
                curve.append((i, float(perplexity(state))))
            advance()
        return curve, total_overflow

    seed, *others = args.seeds
    tried = {factor: run(seed, factor) for factor in args.factors}
    ends = {factor: np.nan_to_num(curve[-1][1], nan=np.inf) for factor, (curve, _) in tried.items()}
    best = min(ends, key=ends.__getitem__)
    curves, overflows = zip(tried[best], *(run(seed, best) for seed in others))
    steps, perplexities = np.moveaxis(np.array(curves), -1, 0)
    embedding = embedding_bytes(method.policy, (len(texts.words), args.width), mesh)
    return results.Run(
        steps[0].astype(int),
        perplexities,
        sent.received,
        embedding,
        sum(overflows),
        float(np.median(seconds)),
        best,
    )


def embedding_bytes(policy: dict[str, Reducer], shape: tuple[int, int], mesh: Mesh) -> float:
    """Bytes that a worker receives for the gradient of the embedding alone, from compiled HLO."""
    tx = jaxsparse.partition({rule: policy[rule] for rule in policy if rule == EMBEDDING})
    params = jaxsparse.shard({EMBEDDING: jnp.zeros(shape)}, mesh)
    rows = jax.tree.map(lambda x: jnp.zeros((mesh.size, *x.shape)), params)
    return jaxsparse.traffic.wire_bytes(jax.jit(tx.update), rows, tx.init(params), params).received


def load(args: argparse.Namespace) -> corpus.Corpus:
    """The text that the flags ask for."""
    if args.corpus is None:
        documents = corpus.manual() + ([] if args.small else corpus.docstrings())
    else:
        documents = corpus.read(args.corpus)
    train, valid = (
        corpus.split(documents) if args.valid is None else (documents, corpus.read(args.valid))
    )
    texts = corpus.build(train, valid, args.vocabulary)
    for name, text in (("train", texts.train), ("valid", texts.valid)):
        if len(text) <= args.length:
            raise ValueError(
                f"{name} has {len(text)} words, and a window --length + 1 = {args.length + 1}: "
                "give a longer text or a shorter window"
            )
    return texts


def main(argv: Sequence[str] | None = None) -> None:
    parser = flags()
    args = parser.parse_args(argv)
    if args.small:
        parser.set_defaults(**SMALL)
        args = parser.parse_args(argv)
    if args.valid is not None and args.corpus is None:
        parser.error("--valid needs --corpus: Python's documentation is split by itself")
    try:
        texts = load(args)
    except (OSError, ValueError) as error:
        parser.error(f"--corpus, --valid: {error}")
    args.vocabulary = len(texts.words)
    args.windows = -(-args.windows // args.workers) * args.workers

    distinct = most_distinct(texts.train, args)
    union = args.union or min(len(texts.words), distinct + distinct // 8)
    try:
        methods = named_methods(args, union)
    except ValueError as error:
        parser.error(f"--sketch-ratio, --union, --density: {error}")

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.workers)
    mesh = jax.make_mesh((args.workers,), ("data",))
    console = Console()
    title = (
        f"{len(texts.train):,} words, {len(texts.words):,} distinct; {args.workers} workers, "
        f"batches of {args.windows} x {args.length}"
    )
    console.print(
        f"{title}\nwhich touch at most {distinct} rows of the embedding in 100 batches "
        f"({distinct / len(texts.words):.1%}); omni and s2 have room for {union}",
        highlight=False,
    )
    chosen = ["dense", *(name for name in METHODS[1:] if name in args.methods)]
    runs = {}
    with Progress(console=console) as progress:
        for name in chosen:
            trainings = len(args.factors) + len(args.seeds) - 1
            task = progress.add_task(name, total=args.steps * trainings)
            advance = functools.partial(progress.advance, task)
            runs[name] = train(methods[name], texts, mesh, args, advance)

    console.print(results.table(runs, caption(args, runs)))
    args.out.mkdir(parents=True, exist_ok=True)
    results.save_figure(runs, title, args.out / "perplexity.png")
    results.save_json(runs, vars(args), args.out / "results.json")
    console.print(f"The curves are in {args.out}", highlight=False, soft_wrap=True)
    console.print(results.summary(runs), highlight=False, soft_wrap=True)


def caption(args: argparse.Namespace, runs: dict[str, results.Run]) -> str:
    lines = [
        "Bytes that a worker receives in one step, as compiled; overflow in elements.",
        f"{args.workers} emulated devices share {os.cpu_count()} cores: s/step says nothing about "
        "a network.",
    ]
    if len(args.factors) > 1:
        tried = ", ".join(f"{factor:g}" for factor in args.factors)
        lines.append(f"Rates: the best of {tried} times those given, on the first seed.")
        ends = min(args.factors), max(args.factors)
        if edge := [name for name, run in runs.items() if run.factor in ends]:
            lines.append(f"At the edge of what was tried, so try more: {', '.join(edge)}.")
    if len(args.seeds) > 1:
        lines.append(f"±: standard deviation over {len(args.seeds)} seeds.")
    return "\n".join(lines)


SMALL = {
    "vocabulary": 2048,
    "width": 16,
    "hidden": 16,
    "output": 16,
    "windows": 8,
    "length": 8,
    "steps": 20,
    "eval_every": 10,
    "eval_windows": 64,
}


def flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--small", action="store_true", help="a tiny model of the reference manual, in seconds")
    add("--workers", type=positive, default=8, metavar="W", help="emulated devices (default: 8)")

    add = parser.add_argument_group("methods").add_argument
    add(
        "--methods",
        nargs="*",
        choices=METHODS,
        default=METHODS,
        help="what to compare with dense (default: all)",
    )
    add(
        "--sketch-ratio",
        type=float,
        default=0.5,
        help="of s2: elements of the sketch over those of the rows it has room for (default: 0.5)",
    )
    add(
        "--union",
        type=positive,
        metavar="ROWS",
        help="of omni and s2: rows that all workers together may touch in a step (default: an "
        "eighth more than the most that 100 batches touch)",
    )
    add(
        "--density",
        type=float,
        default=0.02,
        help="of spardl: share of the other matrices' elements (default: 0.02); random has twice "
        "as many, without indices",
    )

    add = parser.add_argument_group("text and model").add_argument
    add(
        "--corpus",
        type=Path,
        metavar="FILE",
        help="a text of tokens separated by spaces, a paragraph a line, such as wiki.train.tokens "
        "of WikiText-2 (default: the documentation that Python carries)",
    )
    add(
        "--valid",
        type=Path,
        metavar="FILE",
        help="the text to validate on (default: a tenth of the corpus, by documents or lines)",
    )
    add("--vocabulary", type=positive, default=8192, help="words at most (default: 8192)")
    add("--width", type=positive, default=64, help="of the embedding (default: 64)")
    add("--hidden", type=positive, default=96, help="units of the LSTM (default: 96)")
    add("--output", type=positive, default=48, help="inputs of the last layer (default: 48)")

    add = parser.add_argument_group("training").add_argument
    add("--steps", type=positive, default=200, help="(default: 200)")
    add(
        "--windows",
        type=positive,
        default=32,
        help="in a batch of all workers together, rounded up to what they can share (default: 32)",
    )
    add("--length", type=positive, default=32, help="words in a window (default: 32)")
    add("--lr", type=float, default=0.04, help="highest learning rate of Adam (default: 0.04)")
    add(
        "--embedding-lr",
        type=float,
        default=16.0,
        help="highest learning rate of the embedding's SGD (default: 16); Adam takes --lr",
    )
    add(
        "--embedding-optimizer",
        choices=("sgd", "adam"),
        default="sgd",
        help="of the embedding: SGD with momentum, or Adam as for all other leaves (default: sgd)",
    )
    add(
        "--factors",
        nargs="+",
        type=float,
        default=[1.0],
        metavar="F",
        help="of all learning rates: each method takes the best one on the first seed (default: 1)",
    )
    add("--seeds", nargs="+", type=int, default=[0], metavar="SEED", help="(default: 0)")

    add = parser.add_argument_group("results").add_argument
    add("--eval-every", type=positive, default=20, metavar="STEPS", help="(default: 20)")
    add(
        "--eval-windows",
        type=positive,
        default=256,
        help="of the validation text, spread evenly (default: 256)",
    )
    add(
        "--out",
        type=Path,
        default=Path("out/language_model"),
        help="folder of figure and JSON (default: out/language_model)",
    )
    return parser


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is out of range: give at least 1")
    return value


positive.__name__ = "int"  # argparse names the type if the text is no number


if __name__ == "__main__":
    main()
