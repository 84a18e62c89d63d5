"""How should Sketched-SGD divide its words between table and candidates?

    python benchmarks/sketch_sizing.py --json out/sketch_sizing.json
    python benchmarks/sketch_sizing.py --candidates --library --dtypes float32 bfloat16 float16
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
some to slots. Rows "sketched_sgd", of `--library`, are the library itself. Tables narrower than
float32 are those of `--workers` workers, each rounded by itself.

The rule: each setting first trains with 2 seeds at a rate of 0.06. Those whose mean training loss
is above `--keep` times the best of their size and ratio are dropped, and `--most` are kept. They
and the controls train with all seeds at all rates. The rate with the least mean loss counts.

`--tails` trains nothing. It prints what share of the squared norm of a vector one exchange
delivers, and after a slash that of the k largest, for 1, 3 and 5 rows, and for each for candidates'
shares of 0.25, 0.5 and 0.75. P is rows + 1, and the sketch is the textbook's.
"""

import argparse
import dataclasses
import importlib
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import timing
from jax.flatten_util import ravel_pytree

import jaxsparse
from jaxsparse import error_feedback
from jaxsparse.arrays.hashing import combine, keyed
from jaxsparse.arrays.layout import narrow
from jaxsparse.arrays.platforms import kth_largest, magnitude_bits
from jaxsparse.sketch.tiles import median
from jaxsparse.systems import SketchedSGD

sys.path.insert(0, str(Path(__file__).parent))
spardl: Any = importlib.import_module("spardl")
digits = spardl.digits

MOMENTUM = 0.9
FIRST_RATE, FIRST_SEEDS = 0.06, (0, 1)


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
    """A compiled function of arrays of runs: their training losses and test accuracies."""
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

    return jax.jit(lambda runs: jax.lax.map(one, runs))


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

    def __call__(
        self, budget: Budget, setting: Setting, rates: Sequence[float], seeds: Sequence[int]
    ) -> dict[str, Any]:
        """Losses and accuracies by rate and seed, and those at the rate that counts."""
        each = list(itertools.product(rates, seeds))
        full = np.full(len(each), 1, np.int32)
        runs = Run(
            jnp.asarray([seed for _, seed in each], jnp.int32),
            jnp.asarray([rate for rate, _ in each], jnp.float32),
            *(
                jnp.asarray(full * n)
                for n in (setting.k, setting.candidates, setting.cols, setting.tile)
            ),
        )
        key = budget.hidden, setting.kind, setting.rows, setting.dtype
        if key not in self.made:
            self.made[key] = trainer(*key, self.args)
        # In pairs, so that one program serves any number of seeds and rates.
        pairs = [jax.tree.map(lambda x, i=i: x[i : i + 1], runs) for i in range(len(each))]
        found = [self.made[key](pair) for pair in pairs]
        losses, right = (np.concatenate(x).reshape(len(rates), -1) for x in zip(*found))
        return counted(losses, right, rates)


def counted(losses: np.ndarray, right: np.ndarray, rates: Sequence[float]) -> dict[str, Any]:
    means = np.nan_to_num(losses, nan=np.inf).mean(axis=1)
    best = int(means.argmin())
    return {
        "rate": rates[best],
        "loss": float(means[best]),
        "right": float(right[best].mean()),
        "deviation": float(right[best].std()),
        "losses": dict(zip(map(str, rates), losses.tolist())),
        "rights": dict(zip(map(str, rates), right.tolist())),
    }


def by_library(budget: Budget, reducer: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Training by the library's reducer."""
    tx = error_feedback(reducer, axis_name=None, momentum=MOMENTUM)
    train_set, test_set = jax.tree.map(jnp.asarray, digits.load())
    decay = cosine(args.steps)

    def one(seed: jax.Array, rate: jax.Array) -> tuple[jax.Array, jax.Array]:
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

    run = jax.jit(one)
    found = [[run(jnp.int32(s), jnp.float32(r)) for s in args.seeds] for r in args.rates]
    losses, right = np.moveaxis(np.array(found, float), -1, 0)
    return counted(losses, right, args.rates)


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


def show(budget: Budget, name: str, found: dict[str, Any]) -> dict[str, Any]:
    print(
        f"{budget.size + budget.dense_size:>8,} {budget.ratio:>4g}x  {name:<62} "
        f"{found['loss']:.4f}  {100 * found['right']:.1f} ± {100 * found['deviation']:.1f} %  "
        f"{found['rate']:g}",
        flush=True,
    )
    return {**budget._asdict(), "words": budget.words, "name": name, **found}


def compare(budget: Budget, train: Trainers, args: argparse.Namespace) -> Iterable[dict[str, Any]]:
    first: dict[Setting, float] = {}
    for setting in grid(budget, args):
        first[setting] = train(budget, setting, (FIRST_RATE,), FIRST_SEEDS)["loss"]
        print(f"  first: {setting}: {first[setting]:.4f}", flush=True)
    best = min(first.values(), default=0)
    kept = sorted((s for s in first if first[s] <= args.keep * best), key=lambda s: first[s])
    kept = kept[: args.most]
    usual = SketchedSGD(budget.ratio)
    ks = {usual.sized(budget.size, budget.dense_size)[0], *(s.k for s in kept)}
    controls = [Setting("dense"), Setting("random-k", budget.words, budget.words)]
    controls += [Setting("true top-k", k, k) for k in sorted(ks)]
    for setting in controls + kept:
        row = show(budget, str(setting), train(budget, setting, args.rates, args.seeds))
        yield {**row, **dataclasses.asdict(setting), "first": first.get(setting)}
    k, cols = usual.sized(budget.size, budget.dense_size)
    fetched, rows = usual.fetched * k, usual.used_rows
    for dtype in args.dtypes:
        setting = Setting("sketch", k, fetched, rows, cols, cols, dtype)
        yield show(budget, str(setting), train(budget, setting, args.rates, args.seeds))
    if args.library:
        sizes: tuple[dict[str, Any], ...] = {}, {"rows": 5, "oversampling": 4}
        for settings in sizes:
            given = "".join(f", {name}={value}" for name, value in settings.items())
            reducer = SketchedSGD(budget.ratio, **settings)
            name = f"sketched_sgd({budget.ratio:g}{given})"
            yield show(budget, name, by_library(budget, reducer, args))
    yield {
        **budget._asdict(),
        "name": "first round",
        "first": {str(setting): loss for setting, loss in first.items()},
    }


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
    add("--library", action="store_true", help="also train by the library itself")
    add("--workers", type=number(int, 1), default=8, help="that narrow their tables (default: 8)")
    add("--keep", type=number(float, 1), default=1.3, help="see above (default: 1.3)")
    add("--most", type=number(int, 0), default=6, help="settings to keep at most (default: 6)")
    add("--rates", type=number(float, 0), nargs="+", default=[0.015, 0.03, 0.06, 0.12, 0.24])
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
        results += compare(Budget.of(hidden, ratio), train, args)
    timing.save({**where, "arguments": vars(args), "results": results}, args.json)


if __name__ == "__main__":
    main()
