"""The lowest loss for a number of bytes: what is exchanged, how often, and in how many bits.

Eight simulated workers train the byte-level transformer of examples/local_updates on Python's own
library. A recipe is an optimizer, what workers exchange, each how many steps, in which format, and
for which share of the steps they exchange after each one first (a warm start). Names say all of it:

    muon, local 10, int4                Muon inside; displacements of 10 steps, by quantized("int4")
    adamw, local 10, sign, warm 10 %    the first tenth of the steps exchanges after each step
    muon, diloco 30, int2               the same with DiLoCo's momentum outside
    adamw, gradients, ternary           gradients before AdamW
    adamw, updates, top 1/8             updates of each worker's own Adam

All recipes take the same steps and batches. Rates are tuned by one rule for every recipe, dense
included: a factor of two up and down from 0.01, on seed 0 and `--tune-steps`, until the best rate
has a worse one on either side. With `--rates family` a recipe, dense included, takes the best rate
of the one that sends four bits instead, for a first look. Runs are lines of `frontier.jsonl`, those
of a larger model (`--size 1m`) of a file of its own, and none is done twice, so that what was cut
goes on where it was. Several processes may share the file (`--part`). `--show --export FILE` writes
what the planner prints (jaxsparse/planner/losses.json).

    python benchmarks/frontier.py --recipes "adamw, gradients, dense"
    python benchmarks/frontier.py --recipes first --steps 600 --tune-steps 600 --rates family
    python benchmarks/frontier.py --show
"""

import argparse
import dataclasses
import functools
import importlib
import json
import math
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import scipy.optimize
from flax import nnx

import jaxsparse
from jaxsparse import LocalSteps, per_worker
from jaxsparse.planner.losses import End, Law
from jaxsparse.planner.recipes import EXCHANGES, Recipe

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "local_updates"))
models: Any = importlib.import_module("model")

WORKERS, COUNTED = 8, (4, 8, 20)  # simulated, and those whose bytes are counted
BATCH, LENGTH, HEADS = 4, 64, 4
RATE = 0.01  # where the search begins

Transformation: TypeAlias = optax.GradientTransformation


class Size(NamedTuple):
    """A transformer of `examples/local_updates`."""

    width: int
    layers: int

    def made(self, seed: int) -> Any:
        return models.Transformer(self.width, self.layers, HEADS, LENGTH, nnx.Rngs(seed))

    @property
    def parameters(self) -> int:
        shapes = nnx.eval_shape(lambda: nnx.state(self.made(0), nnx.Param))
        return sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))


SIZES = {"136k": Size(64, 2), "1m": Size(128, 5)}


def first_pass() -> list[Recipe]:
    """All that is tried, to drop what is dominated."""
    recipes = [Recipe("adamw", "gradients", 1, e) for e in ("dense", "int4", "ternary", "sign")]
    recipes += [Recipe("adamw", "updates", 1, e) for e in ("int4", "sign", "top 1/8")]
    for optimizer in ("adamw", "muon"):
        recipes += [
            Recipe(optimizer, "local", every, exchange, warm)
            for warm in (0, 10)
            for every in (10, 3, 30, 5, 20, 2, 100)
            for exchange in ("int4", "sign", "ternary", "int2", "top 1/8", "dense")
            if not (warm and every < 10)
        ]
        recipes += [
            Recipe(optimizer, "local", every, exchange)
            for every in (10, 30)
            for exchange in ("top 1/32", "top 1/64", "SparDL 1 %", "random 1/8", "random 1/32")
        ]
    recipes.insert(1, Recipe("muon", "gradients", 1, "dense"))
    return recipes


def kernels(params: Any) -> Any:
    """The matrices that Muon takes: those between the layers' activations.

    Kernels of attention are matrices with an axis of heads. Embeddings, the last layer and norms
    are Adam's, as Muon's authors have it.
    """
    muon = optax.contrib.MuonDimensionNumbers

    def numbers(path: Any, x: jax.Array) -> Any:
        names = jax.tree_util.keystr(path)
        if "kernel" not in names or "output" in names:
            return None
        return muon((0, 1), (2,)) if "'out'" in names else muon((0,), tuple(range(1, x.ndim)))

    return jax.tree_util.tree_map_with_path(numbers, params)


def direction(recipe: Recipe) -> Transformation:
    """The optimizer without its rate: steps of AdamW's size, and weight decay."""
    adam = optax.scale_by_adam(b2=0.95)
    if recipe.optimizer == "adamw":
        return adam
    # Its updates are as large as Adam's (Liu et al., 2025), so that one rate serves both.
    return optax.contrib.muon(
        -1.0,  # Optax' rates turn the sign, and this is turned again behind it
        adam_b2=0.95,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=kernels,
    )


class State(NamedTuple):
    """The training state. Rate and number of steps are arrays, so that programs are shared."""

    params: Any
    opt_state: Any
    done: jax.Array
    rate: jax.Array
    steps: jax.Array


def schedule(state: State) -> jax.Array:
    """A warm-up of a twentieth of the steps, and a cosine to a tenth."""
    warm = jnp.maximum(1.0, jnp.floor(state.steps / 20))
    share = jnp.clip((state.done - warm) / (state.steps - warm), 0, 1)
    cosine = 0.55 + 0.45 * jnp.cos(jnp.pi * share)
    return state.rate * jnp.where(state.done < warm, state.done / warm, cosine)


class Curve(NamedTuple):
    """Held-out losses of one run."""

    steps: list[int]
    held_out: list[float]
    seconds: float


class Trainer:
    """Trains one recipe with any rate, seed and number of steps."""

    def __init__(self, recipe: Recipe, size: Size):
        self.recipe, self._size = recipe, size
        graphdef, self._shapes = nnx.split(size.made(0), nnx.Param)
        loss_of = lambda p, x: models.loss_of(nnx.merge(graphdef, p), x)
        exchange = EXCHANGES[recipe.exchange].transformation()
        inner = direction(recipe)
        if recipe.what == "gradients":
            inner = optax.chain(exchange, inner)
        if recipe.what == "updates":
            inner = optax.chain(per_worker(inner), exchange)
        self._tx = optax.chain(inner, optax.add_decayed_weights(0.1))

        def step(state: State, windows: jax.Array) -> tuple[State, jax.Array]:
            loss, grads = jax.value_and_grad(loss_of)(state.params, windows)
            updates, opt_state = self._tx.update(grads, state.opt_state, state.params)
            rate = schedule(state)
            params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
            return state._replace(params=params, opt_state=opt_state, done=state.done + 1), loss

        self._step = step
        self._exchange = exchange
        self._evaluate = jax.jit(loss_of)
        self._ways: dict[int, Any] = {}

    def bytes(self) -> dict[str, list[float]]:
        """Payload and received bytes of one exchange, for each of COUNTED workers."""
        moved = [jaxsparse.traffic.traced_bytes(self._exchange, self._shapes, w) for w in COUNTED]
        return {"payload": [m.payload for m in moved], "received": [m.received for m in moved]}

    def _way(self, steps: int) -> Any:
        """The parallel step, or local steps. A warm start depends on the number of steps."""
        recipe = self.recipe
        if not recipe.is_local:
            return self._ways.setdefault(
                0,
                jaxsparse.data_parallel(
                    lambda s, x: self._step(s, x)[0], WORKERS, donate_argnums=0
                ),
            )
        first = recipe.warm * steps // 100
        if first not in self._ways:
            every: Any = jaxsparse.Stages((1, recipe.every), (first,)) if first else recipe.every
            optimizer = jaxsparse.outer.mean if recipe.what == "local" else jaxsparse.outer.diloco
            outer = optimizer(exchange=self._exchange)
            self._ways[first] = LocalSteps(
                self._step, outer, WORKERS, every=every, params=lambda state: state.params
            )
        return self._ways[first]

    def run(self, rate: float, seed: int, steps: int) -> Curve:
        text = models.corpus()
        test = models.windows(text.held_out, 256, LENGTH, np.random.default_rng(0))
        # Copies in host memory are not donated with the state.
        params = jax.device_get(nnx.state(self._size.made(seed), nnx.Param))
        state: Any = State(
            params, self._tx.init(params), jnp.int32(0), jnp.float32(rate), jnp.float32(steps)
        )
        way, is_local = self._way(steps), self.recipe.is_local
        state = way.init(state) if is_local else jaxsparse.shard(state, WORKERS)
        rng, points, began = np.random.default_rng(seed), [], time.perf_counter()
        for t in range(steps):
            batch = models.windows(text.train, WORKERS * BATCH, LENGTH, rng)
            state = jax.block_until_ready(
                way(state, batch, t)[0] if is_local else way(state, batch)
            )
            if t + 1 == steps and is_local:
                state = way.finish(state, steps)
            if (t + 1) % max(1, steps // 10) == 0:
                points.append((t + 1, round(float(self._evaluate(state.params, test)), 5)))
        done, losses = map(list, zip(*points))
        return Curve(done, losses, round(time.perf_counter() - began, 1))


class Results:
    """Runs, and bytes of an exchange, by recipe. Each is a line of JSON that is appended."""

    def __init__(self, path: Path):
        self._path = path

    def lines(self) -> list[dict[str, Any]]:
        return (
            list(map(json.loads, self._path.read_text().splitlines()))
            if self._path.exists()
            else []
        )

    def add(self, recipe: Recipe, **found: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"recipe": str(recipe), **found}) + "\n")

    def runs(self, recipe: Recipe, steps: int) -> dict[tuple[float, int], list[float]]:
        """Held-out losses by rate and seed."""
        return {
            (line["rate"], line["seed"]): line["held_out"]
            for line in self.lines()
            if line["recipe"] == str(recipe) and line.get("steps", [0])[-1] == steps
        }

    def is_tuned(self, recipe: Recipe, rate: float) -> bool:
        """Whether half and twice the rate were tried, with the recipe or with its family's."""
        tried = {
            (line["recipe"], line["rate"]) for line in self.lines() if line.get("rate") is not None
        }
        return any(
            {(str(one), rate / 2), (str(one), rate * 2)} <= tried
            for one in (recipe, family(recipe))
        )

    def exchanges(self) -> dict[str, dict[str, list[float]]]:
        return {line["recipe"]: line["bytes"] for line in self.lines() if "bytes" in line}


def family(recipe: Recipe) -> Recipe:
    """The recipe whose best rate others take: with four bits, without a warm start."""
    return dataclasses.replace(recipe, exchange="int4", warm=0)


def _finite(loss: float) -> float:
    return math.inf if math.isnan(loss) else loss


def tuned(loss: Callable[[float], float]) -> float:
    """The rate whose loss is below those of its half and of its double."""
    known = functools.cache(lambda power: _finite(loss(RATE * 2.0**power)))
    best = 0
    while True:
        beside = min((best - 1, best + 1), key=known)
        if known(beside) >= known(best):
            return RATE * 2.0**best
        best = beside


def train(recipe: Recipe, results: Results, args: argparse.Namespace) -> None:
    """Tunes the rate, and trains all seeds with it, but for runs that the file has."""
    trainers = functools.cache(functools.partial(Trainer, size=SIZES[args.size]))

    def loss(rate: float, seed: int, steps: int, of: Recipe = recipe) -> float:
        known = results.runs(of, steps)
        if str(of) not in results.exchanges():
            results.add(of, bytes=trainers(of).bytes())
        if (rate, seed) not in known:
            curve = trainers(of).run(rate, seed, steps)
            results.add(of, rate=rate, seed=seed, **curve._asdict())
            print(
                f"{of}: rate {rate:g}, seed {seed}, {steps} steps: {curve.held_out[-1]:.4f} "
                f"({curve.seconds:.0f} s)",
                flush=True,
            )
            return curve.held_out[-1]
        return known[rate, seed][-1]

    tunes = family(recipe) if args.rates == "family" else recipe
    best = tuned(lambda rate: loss(rate, 0, args.tune_steps, tunes))
    for seed in args.seeds:
        loss(best, seed, args.steps)


class Row(NamedTuple):
    """A recipe's best rate, its losses by seed, and its bytes a run."""

    recipe: Recipe
    rate: float
    losses: dict[int, float]
    sent: float
    received: list[float]  # for each of COUNTED workers

    @property
    def loss(self) -> float:
        return float(np.mean(list(self.losses.values())))


def rows(results: Results, steps: int) -> list[Row]:
    found = []
    moved = results.exchanges()
    for name in dict.fromkeys(line["recipe"] for line in results.lines()):
        recipe = Recipe.parsed(name)
        runs = results.runs(recipe, steps)
        if not runs or name not in moved:
            continue
        rates = {rate for rate, _ in runs}
        mean = {
            r: float(np.mean([x[-1] for (rate, _), x in runs.items() if rate == r])) for r in rates
        }
        # A rate with one seed says less than one with all.
        seeds = {r: sum(rate == r for rate, _ in runs) for r in rates}
        best = min(rates, key=lambda r: (-seeds[r], mean[r]))
        turns = recipe.exchanges(steps)
        found.append(
            Row(
                recipe,
                best,
                {seed: x[-1] for (rate, seed), x in sorted(runs.items()) if rate == best},
                turns * moved[name]["payload"][1],
                [turns * x for x in moved[name]["received"]],
            )
        )
    return found


def above(row: Row, other: Row) -> tuple[float, str]:
    """The mean difference of two recipes on equal seeds, and its spread in words."""
    mean, spread = End(row.rate, row.losses).above(End(other.rate, other.losses))
    return mean, "" if spread is None else f" ± {spread:.3f}"


@functools.cache
def error_of(exchange: str) -> float:
    """The share of the squared norm of normal numbers, equal on all workers, that does not arrive."""
    tx = EXCHANGES[exchange].transformation(is_dense=lambda *_: False)
    x = jax.random.normal(jax.random.key(0), (2**16,))
    one = lambda x: tx.update({"w": x}, tx.init({"w": x}))[0]["w"]
    mean = jax.vmap(one, in_axes=None, axis_name="data", axis_size=WORKERS)(x)[0]
    return round(float(jnp.sum((mean - x) ** 2) / jnp.sum(x**2)), 4)


class Cost(NamedTuple):
    """What an exchange cost in one run, over the dense mean with the same steps, rate and seed."""

    recipe: Recipe
    exchanges: float
    nats: float


def costs(results: Results) -> list[list[Cost]]:
    """All but random coordinates', in two halves, so that seeds of a recipe are not parted."""
    ends = {
        (line["recipe"], line["rate"], line["seed"], line["steps"][-1]): line["held_out"][-1]
        for line in results.lines()
        if "steps" in line
    }
    halves: list[list[Cost]] = [[], []]
    for (name, rate, seed, steps), loss in ends.items():
        recipe = Recipe.parsed(name)
        dense = str(dataclasses.replace(recipe, exchange="dense"))
        if not recipe.is_local or recipe.warm or name == dense or "random" in name:
            continue
        if (dense, rate, seed, steps) in ends:
            cost = Cost(recipe, steps / recipe.every, loss - ends[dense, rate, seed, steps])
            halves[zlib.crc32(f"{name}, {steps}".encode()) % 2].append(cost)
    return halves


def fitted(results: Results) -> Law:
    """The law of what exchanges cost, fitted on half of the runs and tested on the others."""
    halves = costs(results)
    both = [cost for half in halves for cost in half]
    errors = {name: error_of(name) for name in sorted({c.recipe.exchange for c in both})}
    turns = [cost.exchanges for cost in both]
    made = lambda x: Law(math.exp(x[0]), x[1], x[2], 0.0, errors, (min(turns), max(turns)))

    def wrong(x: Any, half: list[Cost]) -> Any:
        law = made(x)
        return np.array([(law.nats(c.recipe.exchange, c.exchanges) or 0.0) - c.nats for c in half])

    found = scipy.optimize.least_squares(wrong, (-3.0, 1.0, 1.0), args=(halves[0],)).x
    spread = float(np.sqrt(np.mean(wrong(found, halves[1]) ** 2)))
    scale, power, decay = (round(float(x), 4) for x in (math.exp(found[0]), *found[1:]))
    print(
        f"law: {scale} * (error / (1 - error)) ** {power} * (100 / exchanges) ** {decay} nats, "
        f"fitted on {len(halves[0])} runs; on {len(halves[1])} others it is off by {spread:.4f}"
    )
    return Law(scale, power, decay, round(spread, 4), errors, (min(turns), max(turns)))


def undominated(points: list[tuple[float, float]]) -> list[int]:
    """The points than which none has both numbers smaller, in the order of the first number."""
    found: list[int] = []
    for i in sorted(range(len(points)), key=lambda i: points[i]):
        if not found or points[i][1] < points[found[-1]][1]:
            found.append(i)
    return found


LINKS = {"10 Mbit/s": 1.25e6, "100 Mbit/s": 1.25e7, "1 Gbit/s": 1.25e8}
STYLES = {
    "dense": ("o", "black"),
    "int8": ("o", "tab:gray"),
    "int4": ("o", "tab:blue"),
    "int2": ("o", "tab:cyan"),
    "ternary": ("o", "tab:green"),
    "sign": ("o", "tab:olive"),
    "top": ("^", "tab:orange"),
    "random": ("x", "tab:red"),
    "SparDL": ("s", "tab:purple"),
}


def draw(found: list[Row], args: argparse.Namespace) -> None:
    """Losses against bytes at equal steps, and against hours over links for a larger model."""
    figure, panels = plt.subplots(2, 2, figsize=(12, 9), sharey=True)
    steps, params, step_seconds = args.steps, args.params, args.step_seconds
    share = params / SIZES[args.size].parameters
    hours = lambda row, link: (
        (steps * step_seconds + share * row.received[COUNTED.index(WORKERS)] / LINKS[link]) / 3600
    )
    abscissas: dict[str, Callable[[Row], float]] = {
        f"bytes that a worker of {WORKERS} receives in {steps} steps": (
            lambda row: row.received[COUNTED.index(WORKERS)]
        )
    }
    for link in LINKS:
        title = (
            f"hours of {steps} steps at {link}, {params:g} parameters, {step_seconds:g} s a step"
        )
        abscissas[title] = functools.partial(hours, link=link)
    for panel, (title, of) in zip(panels.flat, abscissas.items()):
        points = [(of(row), row.loss) for row in found]
        for (x, y), row in zip(points, found):
            marker, color = STYLES[row.recipe.exchange.split()[0]]
            is_muon = row.recipe.optimizer == "muon"
            face = color if is_muon or marker == "x" else "none"
            panel.scatter(x, y, 30, marker=marker, edgecolors=color, facecolors=face)
        best = undominated(points)
        panel.step(*zip(*(points[i] for i in best)), where="post", color="0.6", lw=1, zorder=0)
        for i in best:
            panel.annotate(str(found[i].recipe), points[i], fontsize=6, rotation=20)
        panel.set(xscale="log", xlabel=title)
        panel.grid(alpha=0.3)
    for row_of in panels:
        row_of[0].set(ylabel="held-out loss, nats a byte")
    for name, (marker, color) in STYLES.items():
        panels.flat[0].scatter([], [], marker=marker, color=color, label=name)
    panels.flat[0].legend(fontsize="x-small", title="filled: Muon inside", title_fontsize="x-small")
    figure.tight_layout()
    figure.savefig(args.figure, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--size", choices=SIZES, default="136k", help="number of parameters")
    add("--jsonl", type=Path, help="runs are appended to it; one file a size if not given")
    add("--recipes", nargs="+", default=["first"], help='names, or "first": all of the first pass')
    add("--part", default="1/1", help="2/3: each third recipe, from the second on")
    add("--steps", type=int, default=2000)
    add("--seeds", type=int, nargs="+", default=[0])
    add("--tune-steps", type=int, default=300, help="of the runs that try rates")
    add("--rates", choices=("own", "family"), default="own", help="family: the rate of four bits")
    add("--show", action="store_true", help="the table, and no training")
    add("--export", type=Path, help="with --show: write losses for the planner's recipes here")
    add("--figure", type=Path, help="with --show: draw losses against bytes and hours")
    add("--params", type=float, default=1e9, help="of the model whose hours are drawn")
    add("--step-seconds", type=float, default=1.0, help="of computing, for these hours")
    args = parser.parse_args()
    name = "frontier.jsonl" if args.size == "136k" else f"frontier_{args.size}.jsonl"
    results = Results(args.jsonl or Path(__file__).with_name(name))
    if args.show:
        found = rows(results, args.steps)
        show(found)
        if args.export is not None:
            tuned = [row for row in found if results.is_tuned(row.recipe, row.rate)]
            export(tuned, results, args)
        if args.figure is not None:
            draw(found, args)
        return
    try:
        named = args.recipes != ["first"]
        recipes = list(map(Recipe.parsed, args.recipes)) if named else first_pass()
    except ValueError as error:
        parser.error(str(error))
    part, parts = map(int, args.part.split("/"))
    for recipe in recipes[part - 1 :: parts]:
        train(recipe, results, args)


def dense_of(found: list[Row]) -> Row:
    """The row that all others are compared with."""
    return next(row for row in found if str(row.recipe) == "adamw, gradients, dense")


def export(found: list[Row], results: Results, args: argparse.Namespace) -> None:
    """Writes what the planner prints beside its hours, of recipes whose rates were tuned."""
    base, seeds = dense_of(found).loss, {len(row.losses) for row in found}
    counted = f"{min(seeds)} to {max(seeds)} seeds" if len(seeds) > 1 else f"{max(seeds)} seed"
    setup = (
        "as benchmarks/frontier.py measured them: a byte-level transformer of "
        f"{SIZES[args.size].parameters:,} parameters, {WORKERS} workers, {args.steps:,} steps, "
        f"{counted}. Dense AdamW ends at {base:.3f}. A recipe has the rate that was best for it or "
        "for the one with four bits in its place."
    )
    ends = {str(row.recipe): (row.rate, row.losses) for row in found}
    content = {"setup": setup, "steps": args.steps, "law": fitted(results)._asdict()}
    content["ends"] = dict(sorted(ends.items()))
    args.export.write_text(json.dumps(content, indent=1) + "\n")


def show(found: list[Row]) -> None:
    dense = dense_of(found)
    print("| recipe | loss | above dense | rate | sent | received W = 4, 8, 20 | dominated by |")
    print("|---|---|---|---|---|---|---|")
    for row in sorted(found, key=lambda row: row.received[1]):
        more, spread = above(row, dense)
        better = [
            other
            for other in found
            if other.loss < row.loss and other.received[1] <= row.received[1]
        ]
        by = min(better, key=lambda other: other.loss) if better else None
        fewer = ", ".join(f"{a / b:.0f}x" for a, b in zip(dense.received, row.received))
        print(
            f"| {row.recipe} | {row.loss:.3f} ({len(row.losses)}) | {more:+.3f}{spread} "
            f"| {row.rate:g} | {dense.sent / row.sent:.0f}x | {fewer} | {by.recipe if by else ''} |"
        )


if __name__ == "__main__":
    main()
