"""SparDL on real gradients: 14 simulated workers train a small MLP on scikit-learn's digits.

    python benchmarks/spardl.py residuals
    python benchmarks/spardl.py codecs --seeds 0 1 2
    python benchmarks/spardl.py entries
    python benchmarks/spardl.py teams --workers 3 5 6 7 14 --seeds 0 1 2

`residuals` compares the rules for residuals, by the outcome of training and by what leaks at each
step. "global, cut first" cuts each block before the first exchange, as "partial" and "local" do.
`codecs` compares exact messages with packed ones. `entries` follows B-SAG's h, and the number of
entries after its gather. `teams` trains with each number of teams that divides the workers, and
with as many words of coordinates drawn at random as one team sends. Means and standard deviations
are over seeds of initial weights and batches. Each row's rate is tuned by the rule of rates.py,
from `--lr` on, by the mean training loss of all seeds. Words are those of compressed leaves that a
worker sends in a step at most, read from a program traced for as many devices.
"""

import argparse
import functools
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import rates
import timing
from jax.flatten_util import ravel_pytree

import jaxsparse
from jaxsparse import codecs
from jaxsparse.arrays.settings import entries
from jaxsparse.arrays.stream import to_dense
from jaxsparse.collectives import spardl as collectives
from jaxsparse.collectives.messages import ladder
from jaxsparse.collectives.spardl import spar_reduce_scatter
from jaxsparse.comm.wire import Group
from jaxsparse.reducers.base import Kept, Sums, settle
from jaxsparse.select.top_k import SELECTORS
from jaxsparse.systems import SparDL

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import digits
from digits import logits_of, loss_of

from jaxsparse.outer.parallel import run_on_workers

WORKERS, DENSITY = 14, 0.01


def init(seed: int, hidden: int) -> Any:
    """Parameters of three layers, He-normal."""
    widths = (64, hidden, hidden, 10)
    keys = jax.random.split(jax.random.key(seed), 3)
    return [
        {
            "kernel": jax.random.normal(key, (m, n)) * (2 / m) ** 0.5,
            "bias": jnp.zeros((n,)),
        }
        for key, m, n in zip(keys, widths, widths[1:])
    ]


def batches(args: argparse.Namespace, seed: int, workers: int = WORKERS) -> Any:
    """The batches of all steps, stacked: images[steps, batch, 64], labels[steps, batch]."""
    train_set, _ = digits.load()
    size = digits.shared_batch(args.batch_size, workers)
    return jax.tree.map(lambda *x: np.stack(x), *digits.batches(train_set, size, args.steps, seed))


class CutFirst(SparDL):
    """SparDL with global residuals that cuts blocks first, as its other rules for residuals do."""

    def reduce(self, x: jax.Array, state: Any, axis_name: str | None) -> tuple[Sums, Kept]:
        team, _ = Group.teams(axis_name, self.teams)
        n, size = team.size, -(-x.size // team.size)
        k, pick = entries(self.density, x.size, parts=n), SELECTORS[self.selection]
        rows = jnp.pad(x, (0, n * size - x.size)).reshape(n, size)
        cut = jax.lax.map(lambda row: to_dense(pick(row, k), size), rows).reshape(-1)[: x.size]
        sums, kept = settle(cut, *super().reduce(cut, state, axis_name))
        return sums, kept._replace(residual=kept.residual + (x - cut))


class Outcome(NamedTuple):
    """Results of training at the best rate, by seed."""

    rate: float
    train_loss: list[float]  # over the whole training set
    accuracy: list[float]  # on the test set, in [0, 1]
    h: list[float]  # B-SAG's h after the last step, or 0
    words: int  # most words of compressed leaves that a worker sends in a step
    rounds: int  # number of exchanges, without the one of dense leaves


def train(
    method: optax.GradientTransformation, args: argparse.Namespace, workers: int = WORKERS
) -> Outcome:
    """Trains all seeds at each rate that the rule tries."""
    train_set, test_set = digits.load()
    # The rate does not fall to 0, because entries that wait in residuals still have to arrive.
    schedule = optax.cosine_decay_schedule(1.0, args.steps, alpha=0.1)
    tx = optax.chain(method, optax.sgd(schedule))

    def step(state: Any, batch: Any) -> tuple[Any, None]:
        params, opt_state, rate = state  # one program for all rates
        grads = jax.grad(loss_of)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        updates = jax.tree.map(lambda u: rate * u, updates)
        return (optax.apply_updates(params, updates), opt_state, rate), None

    def create(seed: int, rate: float) -> Any:
        params = init(seed, args.hidden)
        return jaxsparse.shard((params, tx.init(params), jnp.float32(rate)), workers)

    simulated = run_on_workers(step, workers)

    @jax.jit
    def run(state: Any, steps: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        (params, opt_state, _), _ = jax.lax.scan(simulated, state, steps)
        right = logits_of(params, test_set.images).argmax(axis=-1) == test_set.labels
        (state,) = getattr(opt_state[0], "reducers", None) or ((),)
        return loss_of(params, train_set), jnp.mean(right), getattr(state, "h", jnp.float32(0))

    # One device sends nothing. The words are those of a program that is traced for as many.
    sent = jaxsparse.traffic.traced_bytes(method, init(0, args.hidden), workers)

    @functools.cache
    def results(rate: float) -> list[tuple[float, ...]]:
        """Training loss, accuracy and h, by seed."""
        found = [run(create(seed, rate), batches(args, seed, workers)) for seed in args.seeds]
        return [tuple(map(float, one)) for one in found]

    best = rates.tuned(lambda rate: statistics.mean(loss for loss, *_ in results(rate)), args.lr)
    losses, accuracies, h = map(list, zip(*results(best)))
    layout = jaxsparse.layout.plan(init(0, args.hidden))
    words = int(sent.payload) // 4 - layout.dense_size - 1  # 1: the flag of finite gradients
    return Outcome(best, losses, accuracies, h, words, sent.rounds - 1)


class Trace(NamedTuple):
    """Measures of a reducer at each step of training. The arrays have one value a step."""

    leak: jax.Array  # |sum_w x_w - W mean - sum_w residual_w| / |sum_w x_w|
    entries: jax.Array  # number after B-SAG's gather, before the cut; mean over blocks
    unused: jax.Array  # share of L that is not delivered for want of entries; mean over blocks
    h: jax.Array  # the h that B-SAG sent with


def follow(reducer: SparDL, args: argparse.Namespace, seeds: list[int]) -> list[Trace]:
    """Trains by plain SGD through `reducer`, all parameters in one vector, once for each seed."""
    _, unravel = ravel_pytree(init(0, args.hidden))

    def exchange(params: Any, residual: Any, state: Any, batch: Any) -> tuple[Any, ...]:
        x = residual + jax.grad(lambda p: loss_of(unravel(p), batch))(params)
        reduced = reducer(x, state, axis_name="data")
        count = gathered(reducer, x, state) if state != () else jnp.float32(0)
        return x, reduced.kept.whole(x).residual, count, reduced.mean, reduced.kept.state

    on_workers = jax.vmap(
        exchange,
        in_axes=(None, 0, None, 0),
        out_axes=(0, 0, 0, None, None),
        axis_name="data",
        axis_size=WORKERS,
    )

    def step(carry: Any, batch: Any) -> tuple[Any, Trace]:
        params, residual, state = carry
        batch = jax.tree.map(lambda x: x.reshape(WORKERS, -1, *x.shape[1:]), batch)
        x, residual, count, mean, after = on_workers(params, residual, state, batch)
        together = jnp.sum(x, axis=0)
        leak = together - WORKERS * mean - jnp.sum(residual, axis=0)
        size = jnp.linalg.norm(together)
        h = started(reducer, params.size, state).h if state != () else jnp.float32(0)
        short = jnp.maximum(0, 1 - count / wanted(reducer, params.size))
        trace = Trace(jnp.linalg.norm(leak) / size, jnp.mean(count), jnp.mean(short), h)
        return (params - args.lr * mean, residual, after), trace

    @jax.jit
    def run(params: Any, steps: Any) -> Trace:
        start = params, jnp.zeros((WORKERS, params.size)), reducer.init(params.size)
        return jax.lax.scan(step, start, steps)[1]

    return [run(ravel_pytree(init(s, args.hidden))[0], batches(args, s)) for s in seeds]


def wanted(reducer: SparDL, size: int, workers: int = WORKERS) -> int:
    """Number of entries of a block that are delivered, L, for vectors of `size` elements."""
    return entries(reducer.density, size, parts=workers // reducer.teams)


def started(reducer: SparDL, size: int, state: Any) -> collectives.Adaptation:
    """The state, or at the start the one that B-SAG's first exchange works with."""
    first = collectives.Adaptation.start(wanted(reducer, size), reducer.teams)
    return jax.tree.map(lambda now, start: jnp.where(state.h > 0, now, start), state, first)


def gathered(reducer: SparDL, x: jax.Array, state: Any) -> jax.Array:
    """Number of entries of this worker's block after B-SAG's gather, by the reducer's own steps."""
    team, across = Group.teams("data", reducer.teams)
    k, size = wanted(reducer, x.size), -(-x.size // team.size)
    rows = jnp.pad(x, (0, team.size * size - x.size)).reshape(team.size, size)
    pick, codec = SELECTORS[reducer.selection], reducer.codec
    block = spar_reduce_scatter(rows, k, team, select=pick, codec=codec).block
    state = started(reducer, x.size, state)
    _, _, count = collectives.bruck(block, size, k, across, state, select=pick, codec=codec)
    return count.astype(jnp.float32)


def spread(values: Any, scale: float = 1, places: int = 4) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{scale * statistics.mean(values):.{places}f} +- {scale * deviation:.{places}f}"


def show(name: str, outcome: Outcome, more: str = "") -> dict[str, Any]:
    print(
        f"{name:<22} {spread(outcome.train_loss):>18} {spread(outcome.accuracy, 100, 2):>16} "
        f"{outcome.rate:>7g} {outcome.words:>8}{more}",
        flush=True,
    )
    return {"method": name, **outcome._asdict()}


HEADER = f"{'method':<22} {'train loss':>18} {'accuracy, %':>16} {'rate':>7} {'words':>8}"


def residuals(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Shows the paper's figure 17 in small."""
    print(
        "leak: |sum_w x_w - W mean - sum_w residual_w| / |sum_w x_w|, mean and maximum over steps"
    )
    print(f"{HEADER}  leak, mean      max")
    results = [show("dense", train(jaxsparse.dense(momentum=args.momentum), args))]
    for teams in args.teams:
        gather: Any = "recursive" if teams & (teams - 1) == 0 else "bruck"
        for rule in ("global", "global, cut first", "partial", "local"):
            made, kept = CutFirst if "cut" in rule else SparDL, rule.partition(",")[0]
            reducer = made(DENSITY, teams=teams, gather=gather, residuals=kept)  # type: ignore
            tx = jaxsparse.error_feedback(reducer, momentum=args.momentum)
            leak = np.asarray(follow(reducer, args, args.seeds[:1])[0].leak, np.float64)
            name = rule if teams == 1 else f"{rule}, {teams} teams"
            line = show(name, train(tx, args), f"  {leak.mean():>10.1e} {leak.max():>8.1e}")
            results.append(line | {"leak": leak.tolist()})
    return results


def compare_codecs(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Shows what rounding to bfloat16 costs, and what it saves."""
    print(HEADER)
    results = [show("dense", train(jaxsparse.dense(momentum=args.momentum), args))]
    choices: dict[str, codecs.Codec] = {"COO": codecs.COO, "Packed": codecs.Packed()}
    for name, codec in choices.items():
        tx = jaxsparse.spardl(DENSITY, codec=codec, momentum=args.momentum)
        results.append(show(name, train(tx, args)))
    (size,) = jaxsparse.layout.plan(init(0, args.hidden)).bucket_sizes
    k = entries(DENSITY, size, parts=WORKERS)
    formula = [
        2 * (WORKERS - 1) * codec.words(k, -(-size // WORKERS)) for codec in choices.values()
    ]
    print(f"words by the formula 2 (W - 1) codec.words(L, m): {formula}")
    dense, *others = (100 * statistics.mean(result["accuracy"]) for result in results)
    print("points below dense:", ", ".join(f"{dense - other:.2f}" for other in others))
    return results


def follow_entries(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Shows whether B-SAG's adaptation settles."""
    late = args.steps // 2
    print(
        "entries after the gather / L; and their mean and standard deviation, h / L, and the share"
    )
    print(f"of L that blocks with few entries leave unused, after step {late}")
    print(
        f"{'density':>7} {'seed':>4} {'L':>6} {'step 1':>7} {'2':>6} {'5':>6} {'10':>6} "
        f"{'mean':>7} {'sd':>6} {'h / L':>6} {'unused':>6}"
    )
    size = ravel_pytree(init(0, args.hidden))[0].size
    results = []
    for density in (0.01, 0.05, 0.2):
        reducer = SparDL(density, teams=7, gather="bruck")
        for seed, traced in zip(args.seeds, follow(reducer, args, args.seeds)):
            trace = jax.tree.map(lambda x: np.asarray(x, np.float64), traced)
            k = wanted(reducer, size)
            share, h = trace.entries / k, trace.h / k
            some = " ".join(f"{share[i - 1]:>6.2f}" for i in (1, 2, 5, 10))
            print(
                f"{density:>7} {seed:>4} {k:>6}  {some} {share[late:].mean():>7.3f} "
                f"{share[late:].std():>6.3f} {h[late:].mean():>6.3f} "
                f"{trace.unused[late:].mean():>6.3f}",
                flush=True,
            )
            run = {"density": density, "seed": seed, "wanted": k}
            results.append(run | {name: x.tolist() for name, x in trace._asdict().items()})
    return results


def compare_teams(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Shows what teams cost and save (the paper's figures 13 and 14), by any number of workers."""
    (size,) = jaxsparse.layout.plan(init(0, args.hidden)).bucket_sizes
    print("words: of B-SAG at the h of the last step. h / floor: its h in multiples of L / teams")
    print(f"{HEADER} {'most':>6} {'rounds':>6} {'h / floor':>9}")
    dense = train(jaxsparse.dense(momentum=args.momentum), args)
    results = [show("dense", dense, f" {dense.words:>6} {'':>6}")]
    for workers in args.workers:
        sent = 0
        for teams in (t for t in range(1, workers + 1) if workers % t == 0):
            gathers = ["bruck"] if teams > 1 else []
            if teams & (teams - 1) == 0:
                gathers.append("recursive")
            for each in gathers:
                gather: Any = each
                reducer = SparDL(DENSITY, teams=teams, gather=gather)
                tx = jaxsparse.spardl(DENSITY, teams=teams, gather=gather, momentum=args.momentum)
                outcome = train(tx, args, workers)
                most, floor = outcome.words, 0.0
                if gather == "bruck":
                    k, h = wanted(reducer, size, workers), statistics.mean(outcome.h)
                    room = min(c for c in ladder(k / teams, k) if c >= round(h))
                    outcome = outcome._replace(words=most - 2 * (teams - 1) * (k - room))
                    floor = h / max(1, k / teams)
                name = f"W = {workers}, {teams} {'' if teams == 1 else gather}"
                more = f" {most:>6} {outcome.rounds:>6} {floor:>9.2f}"
                results.append(show(name, outcome, more) | {"workers": workers, "teams": teams})
                sent = outcome.words if teams == 1 else sent
        # What is not drawn is dropped: fed back, it would be stale, and end far higher.
        tx = jaxsparse.random_k(sent / size, momentum=args.momentum, decay=0.0)
        blind = train(tx, args, workers)
        more = f" {'':>6} {blind.rounds:>6}"
        results.append(show(f"W = {workers}, random", blind, more) | {"workers": workers})
    return results


def add_flags(parser: argparse.ArgumentParser, seeds: int = 5) -> None:
    """Flags of all benchmarks that train this model, and what they share besides."""
    add, number = parser.add_argument, digits.number
    add("--seeds", type=number(int, 0), nargs="+", default=[*range(seeds)], metavar="SEED")
    add("--steps", type=number(int, 1), default=400)
    add("--hidden", type=number(int, 32), default=128, help="width of the two hidden layers")
    add("--lr", type=number(float, 0), default=0.1, help="the first rate; it falls to a tenth")
    add("--json", metavar="FILE", help="also write all results here")
    parser.set_defaults(momentum=0.9, batch_size=140)


def main() -> None:
    experiments = {
        "residuals": residuals,
        "codecs": compare_codecs,
        "entries": follow_entries,
        "teams": compare_teams,
    }
    parser, number = timing.parser_of(__doc__), digits.number
    parser.add_argument("experiment", choices=experiments)
    add_flags(parser)
    parser.add_argument("--teams", type=number(int, 1), nargs="+", default=[1, 7])
    add = parser.add_argument
    add("--workers", type=number(int, 2, WORKERS + 1), nargs="+", default=[3, 5, 6, 7, 14])
    args = parser.parse_args()
    if args.experiment == "entries":
        # Plain SGD, in which h is followed.
        vars(args).update(lr=0.2, batch_size=560, steps=min(args.steps, 100), seeds=args.seeds[:3])
    where = timing.where()
    print(f"{args.steps} steps, batches of {args.batch_size}, seeds {args.seeds}")
    timing.save({**where, **vars(args), "results": experiments[args.experiment](args)}, args.json)


if __name__ == "__main__":
    main()
