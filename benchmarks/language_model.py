"""Trains a word-level LSTM whose embedding's gradient travels sparse, sketched or dense.

The text is Python's own documentation: its reference manual and the docstrings of its standard
library, half a million words. Nothing is downloaded. Eight emulated devices are the workers:

    python benchmarks/language_model.py
    python benchmarks/language_model.py --methods s2 --seeds 0 1 2 --factors 0.5 1 2

All learning rates are multiplied by each of `--factors` on the first seed, and the others take the
best. Bytes are those that a worker receives in one step, as compiled.
"""

import argparse
import ast
import collections
import functools
import re
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path
from pydoc_data import topics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import timing
from flax import nnx
from jax.sharding import Mesh
from transformer import windows

import jaxsparse
from jaxsparse.reducers.base import Reducer

METHODS = ("dense", "gather", "omni", "s2", "s2 + spardl", "s2 + random")
EMBEDDING = "embedding"
MATRICES = "(gates|recurrent|output).*kernel"
UNKNOWN, END = "<unk>", "<eos>"

_TOKEN = re.compile(r"[a-z]+(?:'[a-z]+)?|\d+|_+|[^\w\s]")
# Folders that some distributions leave out or add to.
_ELSEWHERE = {"site-packages", "dist-packages", "test", "tests", "lib2to3", "idlelib", "turtledemo"}


class Corpus(NamedTuple):
    """Two texts, each as one long row of word numbers. Every document ends with `END`."""

    train: np.ndarray  # int32[n]
    valid: np.ndarray  # int32[m]
    words: tuple[str, ...]  # by number: `UNKNOWN`, `END`, then the most frequent of train


def documents() -> Iterator[list[str]]:
    """The words of each topic of the reference manual, and of each file of the library."""
    texts = [text for _, text in sorted(topics.topics.items())]
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if not _ELSEWHERE.intersection(path.relative_to(root).parts):
            texts.append("\n".join(docstrings(path)))
    yield from (_TOKEN.findall(text.lower()) for text in texts if text)


def docstrings(path: Path) -> Iterator[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield text


def load(vocabulary: int) -> Corpus:
    """About one document in ten is for validation, by a hash of its words."""
    parts: tuple[list[list[str]], list[list[str]]] = [], []
    for document in documents():
        parts[zlib.crc32(" ".join(document).encode()) % 10 == 0].append(document)
    counts = collections.Counter(word for document in parts[0] for word in document)
    by_frequency = sorted(counts, key=lambda word: (-counts[word], word))
    words = (UNKNOWN, END, *by_frequency[: vocabulary - 2])
    numbers = {word: number for number, word in enumerate(words)}
    train, valid = (
        np.array([numbers.get(word, 0) for each in part for word in (*each, END)], np.int32)
        for part in parts
    )
    return Corpus(train, valid, words)


def batches(text: np.ndarray, args: argparse.Namespace, steps: int, seed: int) -> Iterator:
    """Random windows for all workers together, int32[windows, length + 1]: inputs and targets."""
    rng = np.random.default_rng(seed)
    return (windows(text, args.windows, args.length, rng) for _ in range(steps))


class LanguageModel(nnx.Module):
    """An embedding, one LSTM layer, a narrower layer, and an output matrix that is not shared.

    The gradient of `embedding` is zero in all rows but those of the batch's words. The gradient of
    `output` is dense, because the softmax pushes every word's score down.
    """

    def __init__(self, words: int, width: int, hidden: int, output: int, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(words, width, rngs=rngs)
        self.gates = nnx.Linear(width, 4 * hidden, rngs=rngs)
        self.recurrent = nnx.Linear(
            hidden, 4 * hidden, use_bias=False, kernel_init=nnx.initializers.orthogonal(), rngs=rngs
        )
        self.narrow = nnx.Linear(hidden, output, rngs=rngs)
        self.output = nnx.Linear(output, words, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Scores of the next words: int[windows, length] to float[windows, length, words]."""
        gates = jnp.swapaxes(self.gates(self.embedding(tokens)), 0, 1)  # time first, for the scan
        kernel = self.recurrent.kernel[...]

        def step(carry: Any, gates: jax.Array) -> Any:
            short, long = carry
            enter, keep, leave, new = jnp.split(gates + short @ kernel, 4, axis=-1)
            long = nnx.sigmoid(keep + 1) * long + nnx.sigmoid(enter) * jnp.tanh(new)
            short = nnx.sigmoid(leave) * jnp.tanh(long)
            return (short, long), short

        # Made of the gates, so that the type says, as theirs does, that workers' values differ.
        nothing = jnp.zeros_like(gates[0, :, : kernel.shape[0]])
        _, states = jax.lax.scan(step, (nothing, nothing), gates)
        return self.output(nnx.relu(self.narrow(jnp.swapaxes(states, 0, 1))))


def loss(model: LanguageModel, windows: jax.Array) -> jax.Array:
    """Mean negative log-likelihood of a word, in nats; windows are int[n, length + 1]."""
    scores = model(windows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(scores, windows[:, 1:]).mean()


class Method(NamedTuple):
    """What is exchanged by which reducer."""

    policy: dict[str, Reducer]  # of leaves, by a part of their names. Others go dense
    decay: float = 1.0  # factor of what waits in residuals, in each step


def named_methods(args: argparse.Namespace, words: int, union: int) -> dict[str, Method]:
    """The methods by name. All workers together may touch `union` of the words in a step."""
    own = min(words, args.windows // args.workers * args.length)
    gather = jaxsparse.reducers.SparseAllGather(block_size=args.width, capacity_density=own / words)
    rows: dict[str, Any] = {
        "block_size": args.width,
        "density": None,  # all rows that are not zero
        "union_density": union / words,
    }
    s2 = jaxsparse.reducers.S2(sketch_ratio=0.5, **rows)
    # The control: as many words, which need no indices, drawn at random. It feeds nothing back.
    random = jaxsparse.reducers.RandomK(0.04)
    return {
        "dense": Method({}),
        "gather": Method({EMBEDDING: gather}),
        "omni": Method({EMBEDDING: jaxsparse.reducers.OmniReduce(**rows)}),
        "s2": Method({EMBEDDING: s2}),
        "s2 + spardl": Method({EMBEDDING: s2, MATRICES: jaxsparse.reducers.SparDL(0.02)}),
        "s2 + random": Method({EMBEDDING: s2, MATRICES: random}, decay=0.0),
    }


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

    adam, sgd = optax.adam(schedule(0.04)), optax.sgd(schedule(16.0), momentum=0.9)
    optimizer = optax.multi_transform(
        {EMBEDDING: adam if args.embedding_optimizer == "adam" else sgd, "other": adam},
        lambda params: jax.tree_util.tree_map_with_path(label, params),
    )
    return optax.chain(optimizer, optax.inject_hyperparams(optax.scale)(1.0))


def train(method: Method, texts: Corpus, mesh: Mesh, args: argparse.Namespace) -> tuple[str, ...]:
    """A row: perplexities of all seeds, the best factor, bytes, and what found no room."""
    tx = optax.chain(jaxsparse.partition(method.policy, decay=method.decay), make_optimizer(args))

    def create(seed: int, factor: float) -> tuple[Any, Any]:
        model = LanguageModel(
            len(texts.words), args.width, args.hidden, args.output, nnx.Rngs(seed)
        )
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        optimizer.opt_state[1][1].hyperparams["step_size"][...] = factor
        graphdef, state = nnx.split((model, optimizer))
        return graphdef, jaxsparse.shard(state, mesh)

    graphdef, state = create(0, 1.0)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, windows: jax.Array) -> tuple[Any, jax.Array]:
        model, optimizer = nnx.merge(graphdef, state)
        of_model, params = nnx.split(model)
        loss_of = lambda params, windows: loss(nnx.merge(of_model, params), windows)
        optimizer.update(model, jaxsparse.grad(loss_of)(params, windows))
        return nnx.state((model, optimizer)), optimizer.opt_state[0].info.overflow[...]

    starts = np.arange(0, len(texts.valid) - args.length, args.length)
    starts = starts[:: max(1, len(starts) // 256)][:256]
    valid = texts.valid[starts[:, None] + np.arange(args.length + 1)]

    @jax.jit
    def perplexity(state: Any) -> jax.Array:
        return jnp.exp(loss(nnx.merge(graphdef, state)[0], jnp.asarray(valid)))

    moved = jaxsparse.traffic.wire_bytes(step, state, next(batches(texts.train, args, 1, 0)))

    @functools.cache
    def run(seed: int, factor: float) -> tuple[float, int]:
        """Perplexity and overflow."""
        _, state = create(seed, factor)
        total = 0
        for batch in batches(texts.train, args, args.steps, seed):
            state, overflow = step(state, batch)
            total += int(overflow)  # waits: emulated devices may deadlock on queued steps
        return float(perplexity(state)), total

    tried = {factor: run(args.seeds[0], factor)[0] for factor in args.factors}
    best = min(tried, key=lambda factor: (np.isnan(tried[factor]), tried[factor]))
    perplexities, overflows = zip(*(run(seed, best) for seed in args.seeds))
    spread = f" ± {np.std(perplexities, ddof=1):.1f}" if len(perplexities) > 1 else ""
    own = embedding_bytes(method.policy, (len(texts.words), args.width), mesh)
    return (
        f"{np.mean(perplexities):.1f}{spread}",
        f"{best:g}x",
        f"{moved.received:,.0f}",
        f"{own:,.0f}",
        f"{sum(overflows):,}",
    )


def embedding_bytes(policy: dict[str, Reducer], shape: tuple[int, int], mesh: Mesh) -> float:
    """Bytes that a worker receives for the gradient of the embedding alone, from compiled HLO."""
    tx = jaxsparse.partition({rule: policy[rule] for rule in policy if rule == EMBEDDING})
    params = jaxsparse.shard({EMBEDDING: jnp.zeros(shape)}, mesh)
    rows = jax.tree.map(lambda x: jnp.zeros((mesh.size, *x.shape)), params)
    return jaxsparse.traffic.wire_bytes(jax.jit(tx.update), rows, tx.init(params), params).received


# Words at most, widths of the layers, and batches of all workers together.
SETTINGS = {
    **{"vocabulary": 8192, "width": 64, "hidden": 96, "output": 48},
    **{"windows": 32, "length": 32, "steps": 200, "workers": 8},
}


def main() -> None:
    parser = timing.parser_of(__doc__)
    add = parser.add_argument
    add("--methods", nargs="*", choices=METHODS, default=METHODS, help="beside dense")
    add("--embedding-optimizer", choices=("sgd", "adam"), default="sgd", help="(default: sgd)")
    add("--factors", nargs="+", type=float, default=[1.0], metavar="F", help="of all rates")
    add("--seeds", nargs="+", type=int, default=[0], metavar="SEED", help="(default: 0)")
    args = parser.parse_args()
    vars(args).update(SETTINGS)
    texts = load(args.vocabulary)

    some = batches(texts.train, args, 100, seed=12345)
    distinct = max(len(np.unique(batch[:, :-1])) for batch in some)
    union = min(len(texts.words), distinct + distinct // 8)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.workers)
    mesh = jax.make_mesh((args.workers,), ("data",))
    print(
        f"{len(texts.train):,} words, {len(texts.words):,} distinct; batches touch at most "
        f"{distinct} rows of the embedding; omni and s2 have room for {union}",
        flush=True,
    )
    heads = ("method", "perplexity", "rates", "received B", "for the embedding", "overflow")
    print(timing.head(*heads))
    methods = named_methods(args, len(texts.words), union)
    for name in ["dense", *(name for name in METHODS[1:] if name in args.methods)]:
        print(timing.row(name, *train(methods[name], texts, mesh, args)), flush=True)


if __name__ == "__main__":
    main()
