"""How should Sketched-SGD divide its words between table and candidates?

    python benchmarks/sketch_sizing.py --json benchmarks/results/sketch_sizing.json
    python benchmarks/sketch_sizing.py --hidden 128 --candidates --dtypes float32 bfloat16 float16
    python benchmarks/sketch_sizing.py --tails

A budget of B = d / ratio words, less those of the biases, is rows * cols of table and P k of
candidates. The grid has P, the candidates' share of B, the rows, the length of the sketch's tiles,
the number of parameters and the ratio. Controls are dense gradients, random-k with B coordinates
(the same payload, drawn blindly), and true top-k with the same k (what a sketch without errors
would deliver). A small MLP learns scikit-learn's digits, with momentum 0.9.

One device plays all workers, and exactly so: sketches are linear, and all workers mask the same
coordinates, so the mean of the workers' residuals and momenta obeys the recursion of one worker
that has the whole batch. Widths of tables and of selections are traced here, so that one program
trains all settings. It has the library's sketch, but selects candidates exactly: the library loses
some to slots. Rows "sketched_sgd" and "by the library" are the library itself; "decay D" keeps D of
the residual in each step. Tables narrower than float32 are those of
`--workers` workers, each rounded by itself.

Rates are tuned by the rule of rates.py for each setting and control, from 0.06 on, by the mean
training loss of all seeds.

`--tails` trains nothing. It prints what share of the squared norm of a vector one exchange
delivers, and after a slash that of the k largest, for 1, 3 and 5 rows, and for each for candidates'
shares of 0.25, 0.5 and 0.75. P is rows + 1, and the sketch is the textbook's.
"""

import argparse
import dataclasses
import importlib
import itertools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import rates
import timing
from jax.flatten_util import ravel_pytree

import jaxsparse
from jaxsparse import error_feedback
from jaxsparse.arrays.hashing import combine, keyed
from jaxsparse.arrays.layout import narrow
from jaxsparse.arrays.platforms import kth_largest, magnitude_bits
from jaxsparse.sketch.tiles import median
from jaxsparse.systems import RandomK, SketchedSGD

sys.path.insert(0, str(Path(__file__).parent))
spardl: Any = importlib.import_module("spardl")
digits = spardl.digits

MOMENTUM = 0.9
RATE = 0.06  # the first to try


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a step sends. The widths are traced, and `kind` and `rows` are static."""

    kind: str  # "dense", "random-k", "true top-k" or "sketch"
    k: int = 0  # number of coordinates of an update
    candidates: int = 0  # P k
    rows: int = 0
    cols: int = 0
    tile: int = 0  # length of a tile
    dtype: str = "float32"  # of the tables on the wire

    @property
    def words(self) -> int:
        return self.rows * self.cols + self.candidates

    def __str__(self) -> str:
        if self.kind == "dense":
            return self.kind
        if self.kind != "sketch":
            return f"{self.kind}, k={self.k}"
        return (
            f"P={self.candidates // self.k}, share {self.candidates / self.words:.2f}, "
            f"{self.rows} x {self.cols} {self.dtype}, k={self.k}, tiles of {self.tile}"
        )


class Budget(NamedTuple):
    """A model and the words that a step may send."""

    hidden: int
    ratio: float
    size: int  # number of compressed elements, d
    dense_size: int

    @classmethod
    def of(cls, hidden: int, ratio: float) -> "Budget":
        layout = jaxsparse.layout.plan(spardl.init(0, hidden))
        whole = sum(x.size for x in jax.tree.leaves(spardl.init(0, hidden)))
        return cls(hidden, ratio, whole - layout.dense_size, layout.dense_size)

    @property
    def words(self) -> int:
        """As `SketchedSGD.sized` counts them: one more word is a flag."""
        return int((self.size + self.dense_size) / self.ratio) - self.dense_size - 1

    def setting(self, P: int, share: float, rows: int, tile: int | None) -> Setting | None:
        k = int(self.words * share) // P
        cols = (self.words - P * k) // rows
        if k < 1 or cols < 1:
            return None
        return Setting("sketch", k, P * k, rows, cols, cols if tile is None else min(tile, cols))


class Run(NamedTuple):
    """Traced arguments of a training run."""

    seed: Any
    rate: Any
    k: Any
    candidates: Any
    cols: Any
    tile: Any


def scores(x: jax.Array, kind: str, rows: int, dtype: str, run: Run, seed: jax.Array) -> jax.Array:
    """What candidates are ranked by: estimates, exact values, or random numbers.

    `x` has a row for each worker. Each narrows its own table.
    """
    workers, size = x.shape
    index = jnp.arange(size, dtype=jnp.uint32)
    if kind == "true top-k":
        return x.sum(axis=0)
    if kind == "random-k":
        return (keyed(index, combine(seed)) >> 8).astype(jnp.float32) + 1
    tile = run.tile.astype(jnp.uint32)
    cols = run.cols.astype(jnp.uint32)
    word = keyed(index, combine(seed, 2**32 - 1))
    estimates = []
    for row in range(rows):
        column = (combine(seed, row, index // tile) % cols + index % tile) % cols
        sign = 1.0 - 2.0 * (word >> row & 1).astype(jnp.float32)
        # As many columns as elements, because the number of columns is traced.
        table = jnp.zeros_like(x).at[:, column].add(sign * x, mode="promise_in_bounds")
        table = narrow(table, dtype, summands=workers).astype(jnp.float32).sum(axis=0)
        estimates.append(sign * table[column])
    return median(estimates)


def largest(x: jax.Array, k: jax.Array) -> jax.Array:
    """A mask of the k largest magnitudes. Ties with the smallest of them are in it, too."""
    bits = magnitude_bits(x)
    return bits >= kth_largest(bits, k, bits=31)


def trainer(
    hidden: int, kind: str, rows: int, dtype: str, args: argparse.Namespace
) -> Callable[[Run], tuple[jax.Array, jax.Array]]:
    """A compiled function of a run: its training loss and test accuracy."""
    params = spardl.init(0, hidden)
    _, unravel = ravel_pytree(params)
    # Biases travel dense.
    dense, _ = ravel_pytree(jax.tree.map(lambda p: jnp.full(p.shape, p.ndim < 2), params))
    train_set, test_set = jax.tree.map(jnp.asarray, digits.load())
    decay = cosine(args.steps)
    workers = 1 if dtype == "float32" else args.workers

    def one(run: Run) -> tuple[jax.Array, jax.Array]:
        key = jax.random.key(run.seed)

        def step(carry: Any, t: jax.Array) -> tuple[Any, None]:
            params, momentum, residual = carry
            loss_of = lambda p, batch: spardl.loss_of(unravel(p), batch)
            gradients = jax.vmap(jax.grad(loss_of), in_axes=(None, 0))(params, draw(key, t))
            momentum = MOMENTUM * momentum + gradients
            residual += momentum
            if kind == "dense":
                sent = jnp.ones_like(dense)
            else:
                x = jnp.where(dense, 0, residual)
                seed = combine(run.seed.astype(jnp.uint32), t)
                asked = largest(scores(x, kind, rows, dtype, run, seed), run.candidates) & ~dense
                mean = jnp.where(asked, x.mean(axis=0), 0)
                sent = largest(mean, run.k) & asked | dense
                momentum = jnp.where(sent & ~dense & (mean != 0), 0, momentum)
            params -= run.rate * decay(t) * jnp.where(sent, residual.mean(axis=0), 0)
            return (params, momentum, jnp.where(sent, 0, residual)), None

        def draw(key: jax.Array, t: jax.Array) -> Any:
            chosen = jax.random.randint(
                *(jax.random.fold_in(key, t), (workers, args.batch_size // workers)),
                *(0, len(train_set.labels)),
            )
            return type(train_set)(train_set.images[chosen], train_set.labels[chosen])

        start, _ = ravel_pytree(spardl.init(run.seed, hidden))
        zeros = jnp.zeros((workers, start.size))
        (params, *_), _ = jax.lax.scan(step, (start, zeros, zeros), jnp.arange(args.steps))
        return outcome(unravel(params), train_set, test_set)

    return jax.jit(one)


def cosine(steps: int) -> Callable[[jax.Array], jax.Array]:
    """The factor of the rate. It does not fall to 0, because residuals still have to arrive."""
    return lambda t: 0.1 + 0.45 * (1 + jnp.cos(jnp.pi * t / steps))


def outcome(params: Any, train_set: Any, test_set: Any) -> tuple[jax.Array, jax.Array]:
    right = spardl.logits_of(params, test_set.images).argmax(axis=-1) == test_set.labels
    return spardl.loss_of(params, train_set), jnp.mean(right)


class Trainers:
    """Compiled trainers, one for each size, kind and number of rows."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.made: dict[Any, Any] = {}

    def __call__(self, budget: Budget, setting: Setting) -> dict[str, Any]:
        """Losses and accuracies by rate and seed, and those at the rate that counts."""
        key = budget.hidden, setting.kind, setting.rows, setting.dtype
        if key not in self.made:
            self.made[key] = trainer(*key, self.args)
        each = [jnp.int32(n) for n in (setting.k, setting.candidates, setting.cols, setting.tile)]
        return tuned(lambda rate, seed: self.made[key](Run(seed, rate, *each)), self.args)


def tuned(
    run: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]], args: argparse.Namespace
) -> dict[str, Any]:
    """Losses and accuracies of all seeds at the best rate, and losses at those that were tried."""
    tried: dict[float, Any] = {}

    def loss(rate: float) -> float:
        found = [run(jnp.float32(rate), jnp.int32(seed)) for seed in args.seeds]
        tried[rate] = np.array(found, float).T
        return float(tried[rate][0].mean())

    best = rates.tuned(loss, RATE)
    losses, right = tried[best]
    return {
        "rate": best,
        "loss": float(losses.mean()),
        "losses": losses.tolist(),
        "right": float(right.mean()),
        "deviation": float(right.std()),
        "tried": {rate: float(losses.mean()) for rate, (losses, _) in sorted(tried.items())},
    }


def by_library(
    budget: Budget, reducer: Any, args: argparse.Namespace, decay_of_residual: float = 1.0
) -> dict[str, Any]:
    """Training by the library's reducer."""
    tx = error_feedback(reducer, axis_name=None, momentum=MOMENTUM, decay=decay_of_residual)
    train_set, test_set = jax.tree.map(jnp.asarray, digits.load())
    decay = cosine(args.steps)

    def one(rate: jax.Array, seed: jax.Array) -> tuple[jax.Array, jax.Array]:
        key = jax.random.key(seed)

        def step(state: Any, t: jax.Array) -> tuple[Any, None]:
            params, opt_state = state
            chosen = jax.random.randint(
                jax.random.fold_in(key, t), (args.batch_size,), 0, len(train_set.labels)
            )
            batch = type(train_set)(train_set.images[chosen], train_set.labels[chosen])
            gradient = jax.grad(spardl.loss_of)(params, batch)
            updates, opt_state = tx.update(gradient, opt_state, params)
            scale = -rate * decay(t)
            return (jax.tree.map(lambda p, u: p + scale * u, params, updates), opt_state), None

        params = spardl.init(seed, budget.hidden)
        (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), jnp.arange(args.steps))
        return outcome(params, train_set, test_set)

    return tuned(jax.jit(one), args)


TAILS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "normal": lambda rng, d: rng.normal(size=d),
    "normal, cubed": lambda rng, d: rng.normal(size=d) ** 3,
    "Student t(2)": lambda rng, d: rng.standard_t(2, size=d),
    "rank ** -0.5": lambda rng, d: rng.permutation(np.arange(1, d + 1) ** -0.5),
    "rank ** -0.75": lambda rng, d: rng.permutation(np.arange(1, d + 1) ** -0.75),
    "rank ** -1": lambda rng, d: rng.permutation(np.arange(1, d + 1) ** -1.0),
}


def delivered(
    x: np.ndarray, ratio: float, rows: int, share: float, rng: np.random.Generator
) -> tuple[float, float]:
    """Shares of the squared norm: delivered by a sketch, and that of the k largest."""
    words = x.size / ratio
    candidates, cols = int(share * words), int((1 - share) * words / rows)
    k = candidates // (rows + 1)
    estimates = []
    for _ in range(rows):
        column, sign = rng.integers(0, cols, x.size), rng.choice([-1.0, 1.0], x.size)
        estimates.append(sign * np.bincount(column, sign * x, cols)[column])
    size = np.abs(np.median(estimates, axis=0))
    chosen = np.argpartition(-size, candidates)[:candidates]
    whole = np.sum(x**2)
    best = lambda values: float(np.sum(np.sort(values**2)[::-1][:k]) / whole)
    return best(x[chosen]), best(x)


def show_tails(size: int = 2**17) -> list[dict[str, Any]]:
    rng, found = np.random.default_rng(0), []
    for ratio, (name, make) in itertools.product((10, 20, 100), TAILS.items()):
        x = make(rng, size)
        for rows, share in itertools.product((1, 3, 5), (0.25, 0.5, 0.75)):
            sketched, best = delivered(x, ratio, rows, share, rng)
            row = {"ratio": ratio, "vector": name, "rows": rows, "share": share}
            found.append({**row, "delivered": sketched, "largest": best})
        shown = " ".join(f"{row['delivered']:.3f}/{row['largest']:.3f}" for row in found[-9:])
        print(f"{ratio:>4}x  {name:<14} random-k {1 / ratio:.3f}  {shown}", flush=True)
    return found


def grid(budget: Budget, args: argparse.Namespace) -> list[Setting]:
    every = itertools.product(args.candidates, args.shares, args.rows, args.tiles)
    made = (budget.setting(P, share, rows, tile or None) for P, share, rows, tile in every)
    return list(dict.fromkeys(setting for setting in made if setting))


def compare(budget: Budget, train: Trainers, args: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """Rows: the grid, tables of narrow types, the library, and controls."""

    def row(name: str, found: dict[str, Any]) -> dict[str, Any]:
        print(
            f"{budget.size + budget.dense_size:>8,} {budget.ratio:>4g}x  {name:<62} "
            f"{found['loss']:.4f}  {100 * found['right']:.1f} ± {100 * found['deviation']:.1f} %  "
            f"{found['rate']:g}",
            flush=True,
        )
        return {**budget._asdict(), "words": budget.words, "name": name, **found}

    def of(setting: Setting) -> dict[str, Any]:
        return {**row(str(setting), train(budget, setting)), **dataclasses.asdict(setting)}

    rows = [of(setting) for setting in grid(budget, args)]
    yield from rows
    usual = SketchedSGD(budget.ratio)
    k, cols = usual.sized(budget.size, budget.dense_size)
    for dtype in args.dtypes:
        yield of(Setting("sketch", k, usual.fetched * k, usual.used_rows, cols, cols, dtype))
    sizes: tuple[dict[str, Any], ...] = {}, {"rows": 5, "oversampling": 4}
    for settings in sizes:
        given = "".join(f", {name}={value}" for name, value in settings.items())
        name = f"sketched_sgd({budget.ratio:g}{given})"
        yield row(name, by_library(budget, SketchedSGD(budget.ratio, **settings), args))
    # What waits long is stale, so that forgetting some of it or all may train better.
    others: tuple[tuple[str, Any], ...] = (
        (f"sketched_sgd({budget.ratio:g})", usual),
        ("random-k by the library", RandomK(budget.words / budget.size)),
    )
    for kept, (name, reducer) in itertools.product((0.0, 0.5, 0.9), others):
        yield row(f"{name}, decay {kept:g}", by_library(budget, reducer, args, kept))
    # What sketches without errors would deliver: as many as the default, and as the best ones.
    ks = {k, *(one["k"] for one in sorted(rows, key=lambda one: one["loss"])[:3])}
    yield of(Setting("dense"))
    yield of(Setting("random-k", budget.words, budget.words))
    yield from (of(Setting("true top-k", k, k)) for k in sorted(ks))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    number, add = digits.number, parser.add_argument
    add("--hidden", type=number(int, 32), nargs="+", default=[128, 256], metavar="N")
    add("--ratios", type=number(float, 1), nargs="+", default=[10.0, 20.0])
    add("--candidates", type=number(int, 1), nargs="*", default=[1, 2, 4, 8, 16], metavar="P")
    add("--shares", type=number(float, 0, 1), nargs="*", default=[0.25, 0.5, 0.75])
    add("--rows", type=number(int, 1), nargs="*", default=[1, 3, 5])
    add("--tiles", type=number(int, 0), nargs="*", default=[0], help="0: as long as a row")
    add("--dtypes", nargs="*", default=[], help="of tables of the default sizes")
    add("--workers", type=number(int, 1), default=8, help="that narrow their tables (default: 8)")
    add("--seeds", type=number(int, 0), nargs="+", default=[0, 1, 2, 3, 4])
    add("--steps", type=number(int, 1), default=300)
    add("--batch-size", type=number(int, 1), default=128, help="of all workers together")
    add("--tails", action="store_true", help="see above")
    add("--json", metavar="FILE", help="also write all results here")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    jax.config.update("jax_platforms", "cpu")
    where, train = timing.where(), Trainers(args)
    if args.tails:
        timing.save({**where, "results": show_tails()}, args.json)
        return
    results = list[dict[str, Any]]()
    for hidden, ratio in itertools.product(args.hidden, args.ratios):
        for row in compare(Budget.of(hidden, ratio), train, args):
            results.append(row)
            timing.save({**where, "arguments": vars(args), "results": results}, args.json)


if __name__ == "__main__":
    main()
