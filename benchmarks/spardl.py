"""SparDL on real gradients: 14 simulated workers train a small MLP on scikit-learn's digits.

    python benchmarks/spardl.py residuals
    python benchmarks/spardl.py codecs --seeds 0 1 2
    python benchmarks/spardl.py teams --workers 3 5 6 7 14 --seeds 0 1 2

`residuals` compares the rules for residuals, by the outcome of training and by what leaks at each
step: |sum_w x_w - W mean - sum_w residual_w| / |sum_w x_w|. "global, cut first" cuts each block
before the first exchange, as "partial" and "local" do. `codecs` compares exact messages with packed
ones. `teams` trains with each number of teams that divides the workers, and with as many words of
coordinates drawn at random as one team sends. Means and standard deviations are over seeds of
initial weights and batches. Each row's rate is tuned by the rule of rates.py, from `--lr` on, by
the mean training loss of all seeds. Words are those of compressed leaves that a worker sends in a
step at most, read from a program traced for as many devices.
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
from jaxsparse.collectives.messages import ladder
from jaxsparse.comm.wire import Group
from jaxsparse.reducers import SparDL
from jaxsparse.reducers.base import Kept, Sums, settle
from jaxsparse.select.top_k import SELECTORS

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
    h: float  # B-SAG's h after the last step, mean over seeds, or 0
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
    losses, accuracies, hs = map(list, zip(*results(best)))
    layout = jaxsparse.arrays.layout.layout_of(init(0, args.hidden))
    words = int(sent.payload) // 4 - layout.dense_size - 1  # 1: the flag of finite gradients
    return Outcome(best, losses, accuracies, statistics.mean(hs), words, sent.rounds - 1)


def leaks(reducer: SparDL, args: argparse.Namespace) -> jax.Array:
    """What leaks at each step of plain SGD through `reducer`, all parameters in one vector."""
    params, unravel = ravel_pytree(init(args.seeds[0], args.hidden))

    def exchange(params: Any, residual: Any, state: Any, batch: Any) -> tuple[Any, ...]:
        x = residual + jax.grad(lambda p: loss_of(unravel(p), batch))(params)
        reduced = reducer.pmean(x, state, "data")
        return x, reduced.kept.whole(x).residual, reduced.mean, reduced.kept.state

    on_workers = jax.vmap(
        exchange, in_axes=(None, 0, None, 0), out_axes=(0, 0, None, None), axis_name="data"
    )

    def step(carry: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, residual, state = carry
        batch = jax.tree.map(lambda x: x.reshape(WORKERS, -1, *x.shape[1:]), batch)
        x, residual, mean, state = on_workers(params, residual, state, batch)
        together = jnp.sum(x, axis=0)
        leak = together - WORKERS * mean - jnp.sum(residual, axis=0)
        share = jnp.linalg.norm(leak) / jnp.linalg.norm(together)
        return (params - args.lr * mean, residual, state), share

    start = params, jnp.zeros((WORKERS, params.size)), reducer.init(params.size)
    steps = batches(args, args.seeds[0])
    return jax.jit(lambda start, steps: jax.lax.scan(step, start, steps)[1])(start, steps)


def spread(values: Any, scale: float = 1, places: int = 4) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{scale * statistics.mean(values):.{places}f} +- {scale * deviation:.{places}f}"


def head(*more: str) -> str:
    return timing.head("method", "train loss", "accuracy, %", "rate", "words", *more)


def show(name: str, outcome: Outcome, *more: object) -> dict[str, Any]:
    loss, accuracy = spread(outcome.train_loss), spread(outcome.accuracy, 100, 2)
    print(timing.row(name, loss, accuracy, f"{outcome.rate:g}", outcome.words, *more), flush=True)
    return {"method": name, **outcome._asdict()}


def residuals(args: argparse.Namespace) -> None:
    """Shows the paper's figure 17 in small."""
    print(head("leak, mean over steps", "max"))
    show("dense", train(jaxsparse.dense(momentum=args.momentum), args), "", "")
    for teams in args.teams:
        gather: Any = "recursive" if teams & (teams - 1) == 0 else "bruck"
        for rule in ("global", "global, cut first", "partial", "local"):
            made, kept = CutFirst if "cut" in rule else SparDL, rule.partition(",")[0]
            reducer = made(DENSITY, teams=teams, gather=gather, residuals=kept)  # type: ignore
            tx = jaxsparse.exchange(reducer, momentum=args.momentum)
            leak = np.asarray(leaks(reducer, args), np.float64)
            name = rule if teams == 1 else f"{rule}, {teams} teams"
            show(name, train(tx, args), f"{leak.mean():.1e}", f"{leak.max():.1e}")


def compare_codecs(args: argparse.Namespace) -> None:
    """Shows what rounding to bfloat16 costs, and what it saves."""
    print(head())
    show("dense", train(jaxsparse.dense(momentum=args.momentum), args))
    choices: dict[str, codecs.Codec] = {"COO": codecs.COO, "Packed": codecs.Packed()}
    for name, codec in choices.items():
        tx = jaxsparse.spardl(DENSITY, codec=codec, momentum=args.momentum)
        show(name, train(tx, args))


def compare_teams(args: argparse.Namespace) -> None:
    """Shows what teams cost and save (the paper's figures 13 and 14), by any number of workers."""
    (size,) = jaxsparse.arrays.layout.layout_of(init(0, args.hidden)).bucket_sizes
    print(f"words: of B-SAG at the h of the last step\n\n{head('rounds')}")
    show("dense", train(jaxsparse.dense(momentum=args.momentum), args), "")
    for workers in args.workers:
        sent = 0
        for teams in (t for t in range(1, workers + 1) if workers % t == 0):
            gathers = ["bruck"] if teams > 1 else []
            if teams & (teams - 1) == 0:
                gathers.append("recursive")
            for each in gathers:
                gather: Any = each
                tx = jaxsparse.spardl(DENSITY, teams=teams, gather=gather, momentum=args.momentum)
                outcome = train(tx, args, workers)
                if gather == "bruck":
                    k, h = entries(DENSITY, size, parts=workers // teams), round(outcome.h)
                    unused = k - min(c for c in ladder(k / teams, k) if c >= h)
                    outcome = outcome._replace(words=outcome.words - 2 * (teams - 1) * unused)
                name = f"W = {workers}, {teams}" + (f" {gather}" if teams > 1 else "")
                show(name, outcome, outcome.rounds)
                sent = outcome.words if teams == 1 else sent
        # What is not drawn is dropped: fed back, it would be stale, and end far higher.
        tx = jaxsparse.random_k(sent / size, momentum=args.momentum, decay=0.0)
        blind = train(tx, args, workers)
        show(f"W = {workers}, random", blind, blind.rounds)


def add_flags(parser: argparse.ArgumentParser, seeds: int = 5) -> None:
    """Flags of all benchmarks that train this model, and what they share besides."""
    add, number = parser.add_argument, digits.number
    add("--seeds", type=number(int, 0), nargs="+", default=[*range(seeds)], metavar="SEED")
    add("--steps", type=number(int, 1), default=400)
    add("--hidden", type=number(int, 32), default=128, help="width of the two hidden layers")
    add("--lr", type=number(float, 0), default=0.1, help="the first rate; it falls to a tenth")
    parser.set_defaults(momentum=0.9, batch_size=140)


def main() -> None:
    experiments = {"residuals": residuals, "codecs": compare_codecs, "teams": compare_teams}
    parser, number = timing.parser_of(__doc__), digits.number
    parser.add_argument("experiment", choices=experiments)
    add_flags(parser)
    add = parser.add_argument
    add("--teams", type=number(int, 1), nargs="+", default=[1, 7])
    add("--workers", type=number(int, 2, WORKERS + 1), nargs="+", default=[3, 5, 6, 7, 14])
    args = parser.parse_args()
    timing.where()
    print(f"{args.steps} steps, batches of {args.batch_size}, seeds {args.seeds}\n")
    experiments[args.experiment](args)


if __name__ == "__main__":
    main()
