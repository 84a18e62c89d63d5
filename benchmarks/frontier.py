"""The lowest loss for a number of bytes: what is exchanged, how often, and in how many bits.

Simulated workers train the byte-level transformer of transformer.py on Python's own
library: eight of them, or four with the largest size. recipes.py explains the names of recipes.

All recipes take the same steps and batches. Rates are tuned by one rule for every recipe, dense
included: a factor of two up and down from `--rate`, or from the best rate that the file has, on
seed 0, until the best rate has a worse one on either side. With `--rates family`
a recipe takes the best rate of the one that sends four bits instead. Runs are lines of
`frontier.jsonl`, those of a larger model (`--size`) of a file of its own, and none is done twice,
so that what was cut goes on where it was. Several processes may share the file.
With `--outer`, recipes with DiLoCo's momentum have this rate and momentum in place of 0.7 and 0.6,
and are lines of `frontier_outer.jsonl`.

    python benchmarks/frontier.py --recipes "adamw, gradients, dense"
    python benchmarks/frontier.py --steps 600 --rates family   # all that the file has
    python benchmarks/frontier_map.py --steps 600
    python benchmarks/frontier.py --recipes "muon, diloco 30, int4" --outer 0.7 0.9
"""

import argparse
import dataclasses
import functools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
import timing
import transformer as models
from flax import nnx
from rates import tuned
from recipes import EXCHANGES, NESTEROV, Recipe

import jaxsparse
from jaxsparse import LocalSteps, per_worker
from jaxsparse.outer.parallel import run_on_workers

Transformation: TypeAlias = optax.GradientTransformation


class Size(NamedTuple):
    """A transformer, and the batches that train it."""

    width: int
    layers: int
    heads: int = 4
    length: int = 64  # bytes of a window
    batch: int = 4  # windows of a worker
    workers: int = 8

    def made(self, seed: int) -> Any:
        return models.Transformer(self.width, self.layers, self.heads, self.length, nnx.Rngs(seed))

    @property
    def shapes(self) -> Any:
        return nnx.eval_shape(lambda: nnx.state(self.made(0), nnx.Param))

    @property
    def parameters(self) -> int:
        return sum(math.prod(x.shape) for x in jax.tree.leaves(self.shapes))


SIZES = {"136k": Size(64, 2), "1m": Size(128, 5), "10.9m": Size(384, 6, 6, 256, 8, 4)}


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
    seconds: float  # of all steps, compiling included, without evaluations


class Trainer:
    """Trains one recipe with any rate, seed and number of steps.

    `outer` has the rate and the momentum of DiLoCo.
    """

    def __init__(self, recipe: Recipe, size: Size, outer: tuple[float, float] = NESTEROV):
        self.recipe, self._size, self._outer = recipe, size, outer
        graphdef, _ = nnx.split(size.made(0), nnx.Param)
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

    def _way(self, steps: int) -> Any:
        """The parallel step, or local steps. A warm start depends on the number of steps."""
        recipe = self.recipe
        first = recipe.warm * steps // 100
        if first in self._ways:
            return self._ways[first]
        if not recipe.is_local:
            step = lambda s, x: self._step(s, x)[0]
            self._ways[first] = run_on_workers(step, self._size.workers, donate_argnums=0)
        else:
            every: Any = jaxsparse.Stages((1, recipe.every), (first,)) if first else recipe.every
            optimizer = optax.sgd(1.0)
            if recipe.what == "diloco":
                optimizer = optax.sgd(*self._outer, nesterov=True)
            self._ways[first] = LocalSteps(
                *(self._step, self._exchange, optimizer, self._size.workers),
                every=every,
                params=lambda state: state.params,
            )
        return self._ways[first]

    def run(
        self,
        rate: float,
        seed: int,
        steps: int,
        eval_every: int | None = None,
        stops: Callable[[int, float], bool] = lambda done, held_out: False,
    ) -> Curve:
        """Trains from the start.

        Args:
            rate: the peak of the schedule.
            seed: of the parameters and the batches.
            steps: the schedule's length.
            eval_every: steps between evaluations (default: a tenth of all). Local steps should
                divide it: between exchanges, parameters are a worker's own.
            stops: told the steps done and the held-out loss, it says whether that is enough.
        """
        text, size = models.corpus(), self._size
        test = models.windows(text.held_out, 256, size.length, np.random.default_rng(0))
        # Copies in host memory are not donated with the state.
        params = jax.device_get(nnx.state(size.made(seed), nnx.Param))
        state: Any = State(
            params, self._tx.init(params), jnp.int32(0), jnp.float32(rate), jnp.float32(steps)
        )
        way, is_local = self._way(steps), self.recipe.is_local
        state = way.init(state) if is_local else jaxsparse.shard(state, size.workers)
        rng, points, seconds = np.random.default_rng(seed), [], 0.0
        for t in range(steps):
            batch = models.windows(text.train, size.workers * size.batch, size.length, rng)
            began = time.perf_counter()
            state = jax.block_until_ready(
                way(state, batch, t)[0] if is_local else way(state, batch)
            )
            if t + 1 == steps and is_local:
                state = way.finish(state, steps)
            seconds += time.perf_counter() - began
            if (t + 1) % (eval_every or max(1, steps // 10)) == 0:
                points.append((t + 1, round(float(self._evaluate(state.params, test)), 5)))
                if stops(*points[-1]):
                    break
        done, losses = map(list, zip(*points))
        return Curve(done, losses, round(seconds, 1))


class Results:
    """Runs by recipe. Each is a line of JSON that is appended.

    `outer` is as for `Trainer`. Lines with another one are left out.
    """

    def __init__(self, size: str, outer: tuple[float, float] = NESTEROV):
        self._settings = {} if outer == NESTEROV else {"outer": list(outer)}
        name = "frontier" + (f"_{size}" if size != "136k" else "")
        name += "_outer" if self._settings else ""
        self.path = Path(__file__).with_name(f"{name}.jsonl")

    def lines(self) -> list[dict[str, Any]]:
        outer = self._settings.get("outer")
        return [line for line in timing.lines_in(self.path) if line.get("outer") == outer]

    def add(self, recipe: Recipe, **found: Any) -> None:
        timing.add_line(self.path, recipe=str(recipe), **self._settings, **found)

    def runs(self, recipe: Recipe, steps: int) -> dict[tuple[float, int], list[float]]:
        """Held-out losses by rate and seed."""
        return {
            (line["rate"], line["seed"]): line["held_out"]
            for line in self.lines()
            if line["recipe"] == str(recipe) and line["steps"][-1] == steps
        }

    def tried(self, recipe: Recipe, steps: int) -> dict[float, float]:
        """Losses at the end of runs of seed 0, by rate."""
        runs = self.runs(recipe, steps).items()
        ends = {rate: losses[-1] for (rate, seed), losses in runs if seed == 0}
        return {rate: math.inf if math.isnan(end) else end for rate, end in ends.items()}

    def tuned_rate(self, recipe: Recipe, steps: int) -> float | None:
        """The best rate of runs of so many steps whose half and double were tried and are worse.

        It is the recipe's own, or else its family's. None: neither was tuned.
        """
        for one in (recipe, family(recipe)):
            if tried := self.tried(one, steps):
                best = min(tried, key=tried.__getitem__)
                if {best / 2, best * 2} <= tried.keys():
                    return best
        return None


def family(recipe: Recipe) -> Recipe:
    """The recipe whose best rate others take: with four bits, without a warm start.

    Blind draws that drop the rest want a rate of their own.
    """
    if EXCHANGES[recipe.exchange].system == "random_k":
        return recipe
    return dataclasses.replace(recipe, exchange="int4", warm=0)


def train(recipe: Recipe, results: Results, args: argparse.Namespace) -> None:
    """Tunes the rate, and trains all seeds with it, but for runs that the file has."""
    trainers = functools.cache(functools.partial(Trainer, size=SIZES[args.size], outer=args.outer))

    def loss(rate: float, seed: int, steps: int, of: Recipe = recipe) -> float:
        known = results.runs(of, steps)
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
    tried = results.tried(tunes, args.steps)
    start = min(tried, key=tried.__getitem__, default=args.rate)
    best = tuned(lambda rate: loss(rate, 0, args.steps, tunes), start)
    for seed in args.seeds:
        loss(best, seed, args.steps)


def main() -> None:
    parser = timing.parser_of(__doc__)
    add = parser.add_argument
    add("--size", choices=SIZES, default="136k", help="number of parameters")
    add("--recipes", nargs="+", help="names (default: all that the file has)")
    add("--steps", type=int, default=2000)
    add("--seeds", type=int, nargs="+", default=[0])
    add("--rate", type=float, default=0.01, help="where a search for a rate begins")
    add("--rates", choices=("own", "family"), default="own", help="family: the rate of four bits")
    add(
        "--outer",
        type=float,
        nargs=2,
        default=NESTEROV,
        metavar=("RATE", "MOMENTUM"),
        help="of the optimizer outside, in recipes with DiLoCo's (default: %(default)s)",
    )
    args = parser.parse_args()
    args.outer = tuple(args.outer)
    results = Results(args.size, args.outer)
    try:
        names = args.recipes or dict.fromkeys(line["recipe"] for line in results.lines())
        recipes = list(map(Recipe.parsed, names))
    except ValueError as error:
        parser.error(str(error))
    if args.outer != NESTEROV and any(recipe.what != "diloco" for recipe in recipes):
        parser.error("--outer is for recipes with DiLoCo's momentum: name them in --recipes")
    for recipe in recipes:
        train(recipe, results, args)


if __name__ == "__main__":
    main()
