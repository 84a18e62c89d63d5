"""What does a round of many islands take, under failures at random?

    python benchmarks/many_islands.py --islands 64 256

Islands run in one process, in virtual time (`tests/simulation.py`). Their parameters,
messages and decisions are real, seconds are not, and CPU seconds are those of this process.
Each island fails `--failures` times an hour on average, at times drawn from `--seed`. Half of the
failures kill an island, a quarter cut it off from the store, and a quarter suspend it, for
`--away` seconds on average. Speeds of islands differ by up to `--unlike`. The parameters of each
island are pulled towards a target of its own, `--params` numbers in all.

A row has the rounds, the share of steps that count, seconds a round, CPU milliseconds of an
island in a round, and requests and bytes of an island in a round, by kind. `equal` says whether
all islands had the same parameters, bit for bit, after each round that they took part in. Steps
since the last message, of each island at the end, have not counted yet.
"""

import argparse
import collections
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxsparse

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from simulation import Event, Told, simulate

STEP = jax.jit(lambda state, batch: ((state[0] - 0.1 * (state[0] - batch),), None))
FAILURES = {"kill": "start", "cut": "mend", "stop": "go"}  # and what ends them
KINDS = ("messages", "decisions", "snapshots")


def failures(names: list[str], args: argparse.Namespace, draw: random.Random) -> Iterator[Event]:
    """What happens to islands. Each is back before it fails again."""
    for name in names:
        now = draw.expovariate(args.failures / 3600) if args.failures else args.seconds
        while now < args.seconds:
            what: Any = draw.choices(list(FAILURES), (2, 1, 1))[0]
            yield Event(now, name, what)
            now += draw.expovariate(1 / args.away)
            back: Any = FAILURES[what]
            yield Event(now, name, back)
            now += draw.expovariate(args.failures / 3600)


def run(count: int, args: argparse.Namespace) -> tuple[dict[str, Told], int, float]:
    """What became of so many islands, how many failures there were, and CPU seconds."""
    draw = random.Random(f"{args.seed} {count}")
    names = [f"island-{i:04d}" for i in range(count)]
    targets = jax.random.normal(jax.random.key(args.seed), (count, args.params))
    batches = {name: lambda t, x=x: x for name, x in zip(names, targets)}
    outer = optax.chain(
        jaxsparse.top_k(args.density, axis_name=None, is_dense=lambda *_: False),
        optax.sgd(0.7, momentum=0.9, nesterov=True),
    )
    events = list(failures(names, args, draw))
    began = time.process_time()
    told = simulate(
        STEP,
        outer,
        (jnp.zeros(args.params),),
        batches,
        seconds=args.seconds,
        step_seconds={name: 1 + args.unlike * (draw.random() - 0.5) for name in names},
        every=args.every,
        events=events,
        quorum=args.quorum,
        grace=args.grace,
        overlap=args.overlap,
        poll=args.poll,
        latency=args.latency,
        bandwidth=args.bandwidth * 1e6 / 8,
    )
    struck = sum(event.what in FAILURES for event in events)
    return told, struck, time.process_time() - began


def row(count: int, args: argparse.Namespace) -> list[tuple[str, str]]:
    told, struck, cpu = run(count, args)
    digests: dict[int, set[str]] = collections.defaultdict(set)
    members: dict[int, int] = {}
    for one in told.values():
        for report in one.rounds:
            digests[report.round].add(report.digest)
            members[report.round] = len(report.members)
    rounds = len(members)
    seen = sum(len(one.rounds) for one in told.values())  # rounds of islands
    asked = sum((collections.Counter(one.requests) for one in told.values()), collections.Counter())
    moved = sum((collections.Counter(one.bytes) for one in told.values()), collections.Counter())
    steps = sum(one.steps for one in told.values())
    per = lambda number: f"{number / seen:,.1f}"
    kb = lambda number: f"{number / seen / 1e3:,.1f}"
    return [
        ("islands", str(count)),
        ("failures", str(struck)),
        ("rounds", str(rounds)),
        ("s a round", f"{args.seconds / rounds:.1f}"),
        ("members, mean", f"{sum(members.values()) / rounds:.1f}"),
        ("numbers of members", str(len(set(members.values())))),
        ("equal", "yes" if all(len(each) == 1 for each in digests.values()) else "NO"),
        ("steps that count", f"{sum(one.counted for one in told.values()) / steps:.1%}"),
        ("waits", f"{sum(one.waited for one in told.values()) / count / args.seconds:.1%}"),
        *((f"gets of {kind}", per(asked["get", kind])) for kind in KINDS),
        ("listings of messages", per(asked["names", "messages"])),
        ("all requests", per(asked.total())),
        *((f"read kB of {kind}", kb(moved["get", kind])) for kind in KINDS),
        ("written kB", kb(sum(n for (what, _), n in moved.items() if what == "create"))),
        ("CPU s", f"{cpu:.0f}"),
        ("CPU ms of an island in a round", f"{1e3 * cpu / seen:.2f}"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--islands", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--seconds", type=float, default=1100.0, help="of the run, virtual ones")
    parser.add_argument("--failures", type=float, default=1.0, help="of an island in an hour")
    parser.add_argument("--away", type=float, default=30.0, help="seconds of a failure, mean")
    parser.add_argument("--unlike", type=float, default=0.1, help="slowest step less fastest, s")
    parser.add_argument("--params", type=int, default=256)
    parser.add_argument("--density", type=float, default=0.125)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--overlap", type=int, default=5)
    parser.add_argument("--quorum", type=int, default=2)
    parser.add_argument("--grace", type=float, default=5.0, help="seconds")
    parser.add_argument("--poll", type=float, default=1.0, help="seconds")
    parser.add_argument("--latency", type=float, default=0.05, help="seconds")
    parser.add_argument("--bandwidth", type=float, default=100.0, help="Mbit/s")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    columns = [row(count, args) for count in args.islands]
    for cells in zip(*columns):
        print("|", " | ".join([cells[0][0], *(value for _, value in cells)]), "|", flush=True)


if __name__ == "__main__":
    main()
