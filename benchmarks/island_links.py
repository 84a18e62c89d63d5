"""What a link of some rate costs an island: its steps beside an exchange, and the time to join.

    pip install '.[examples,islands]' 'moto[server]'
    python benchmarks/island_links.py overlap
    python benchmarks/island_links.py join

Islands meet at moto's S3 server, behind a proxy with a rate each way (proxy.py), as in chaos.py.

`overlap` trains on one island, with one thread for its steps, so that of two cores one is left for
the exchange. Another island is a process that sleeps in its steps, and so has messages to send and
to read. It, the server and the proxies stay on one core, as they would on other machines. In each
round, once the exchange has arrived, the first one makes as many steps by the same compiled program
without islands. The rounds' ratios of both times, of all steps from one message to the next with
what begins and ends an exchange, are the result. So both see the same machine. The goal is 1.05 at
most, if the exchange takes no longer than the steps of a round.

`join` begins a run of several islands, lets it make some rounds past its snapshot, and starts a
process that joins through the proxy. Its time stands beside that of the plan, item by item.
"""

import argparse
import contextlib
import functools
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from chaos import Processes, Server

from jaxsparse.islands.store import Objects, Store
from jaxsparse.planner.units import bytes_per_second, count

LENGTH = 64  # tokens of a window


class Asked(NamedTuple):
    """A request: its operation and object ("get decisions"), and when it began and ended."""

    kind: str
    began: float
    ended: float
    bytes: int


class Timed:
    """A store that notes what it is asked for."""

    def __init__(self, store: Objects) -> None:
        self._store, self.asked = store, list[Asked]()

    def __getattr__(self, operation: str) -> Any:
        do = getattr(self._store, operation)

        def timed(where: Any, *data: bytes) -> Any:
            began = time.perf_counter()
            found = do(where, *data)
            kind = "delete" if operation == "delete" else f"{operation} {where.split('/')[0]}"
            size = sum(map(len, data)) + (len(found) if isinstance(found, bytes) else 0)
            self.asked.append(Asked(kind, began, time.perf_counter(), size))
            return found

        return timed


@contextlib.contextmanager
def processes() -> Iterator[Processes]:
    """Processes that end with the block."""
    group = Processes()
    try:
        yield group
    finally:
        group.end()


@contextlib.contextmanager
def served(rate: float) -> Iterator[Server]:
    """A server with a proxy for two islands."""
    with tempfile.TemporaryDirectory() as folder, processes() as group:
        yield Server(group, Path(folder), 2, rate)


class Trained(NamedTuple):
    """What both islands of `overlap` have in common."""

    step: Callable[[Any, Any], Any]
    start: Any
    batch: Any
    outer: Any
    settings: dict[str, Any]


def trained(args: argparse.Namespace) -> Trained:
    """A transformer, and its islands."""
    import jax
    import numpy as np
    import optax
    from flax import nnx

    import jaxsparse

    sys.path.append(str(Path(__file__).parents[1] / "examples" / "local_updates"))
    model: Any = importlib.import_module("model")
    text = model.corpus()
    graphdef, params = nnx.split(
        model.Transformer(args.width, 2, 4, LENGTH, nnx.Rngs(0)), nnx.Param
    )
    tx = optax.adamw(1e-3)

    def loss_of(params: Any, windows: jax.Array) -> jax.Array:
        return model.loss_of(nnx.merge(graphdef, params), windows)

    @jax.jit
    def step(state: Any, windows: jax.Array) -> tuple[Any, jax.Array]:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_of)(params, windows)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    rng = np.random.default_rng(0)
    batch = jax.numpy.asarray(model.windows(text.train, args.batch, LENGTH, rng))
    # Few bits would pass in the proxy's burst.
    outer = jaxsparse.quantized("bfloat16", gather=True, axis_name=None, is_dense=lambda *_: False)
    settings = {"every": args.every, "overlap": args.every - 1, "quorum": 2, "grace": 0.0}
    return Trained(step, (params, tx.init(params)), batch, outer, settings)


def overlap(args: argparse.Namespace) -> None:
    """Prints ratios of times of steps."""
    os.environ["NPROC"] = "1"  # XLA's threads. It heeds no OMP_NUM_THREADS

    import jax

    from jaxsparse.islands import Islands

    step, start, batch, outer, settings = trained(args)
    usual = statistics.median(list(timed(lambda: step(start, batch), 5))[1:])
    H = args.every
    # A process starts on the cores of the one that starts it.
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    with served(args.rate) as server:
        flags = ["--url", server.url, "--sleep", usual]
        for name in ("width", "batch", "every"):
            flags += [f"--{name}", getattr(args, name)]
        with processes() as group:
            group.start([__file__, "other", *flags], env=os.environ | server.environment(1))
            os.sched_setaffinity(0, cores)
            store = Timed(server.store(0))
            train = Islands(step, outer, store, name="measured", **settings)
            state = train.join(start)
            found, waited = [], 0.0
            for _ in range(2 * H - 1):
                state, _ = train(state, batch)
            for round in range(args.warm + args.rounds):
                # From where the last exchange has arrived to where the next one has.
                plain = sum(timed(functools.partial(step, state.worker, batch), H))
                first, began = len(store.asked), time.perf_counter()
                for _ in range(H):
                    state, loss = train(state, batch)
                    jax.block_until_ready((state.worker, loss))
                beside = time.perf_counter() - began
                if round == args.warm - 1:
                    waited = train.status().waiting
                if round >= args.warm:
                    asked = store.asked[first:]
                    found.append((plain, beside, asked[-1].ended - asked[0].began))
            waiting = train.status().waiting - waited
    told_overlap(args, found, waiting, sum(x.size for x in jax.tree.leaves(start[0])))


def other(args: argparse.Namespace) -> None:
    """The process of the other island, which sleeps in its steps."""
    from jaxsparse.islands import Islands

    _, start, _, outer, settings = trained(args)

    def sleeping(state: Any, _: Any) -> tuple[Any, None]:
        time.sleep(args.sleep)
        return state, None

    train = Islands(sleeping, outer, Store(args.url), name="other", **settings)
    state = train.join(start)
    while True:
        state, _ = train(state, None)


def timed(do: Callable[[], Any], count: int) -> Iterator[float]:
    import jax

    for _ in range(count):
        began = time.perf_counter()
        jax.block_until_ready(do())
        yield time.perf_counter() - began


def told_overlap(
    args: argparse.Namespace, found: list[tuple[float, float, float]], waiting: float, size: int
) -> None:
    plain, beside, exchange = map(list, zip(*found))
    ratios = [b / a for a, b in zip(plain, beside)]
    H = args.every
    print(
        f"{size:,} parameters, {args.rate * 8 / 1e6:g} Mbit/s, {H} steps a round, "
        f"{len(found)} rounds, load {os.getloadavg()[0]:.1f} on {os.cpu_count()}\n"
        f"a step without exchange: median {1e3 * statistics.median(plain) / H:.1f} ms; "
        f"beside one: {1e3 * statistics.median(beside) / H:.1f} ms\n"
        f"an exchange: median {statistics.median(exchange):.2f} s, longest {max(exchange):.2f} s; "
        f"the steps of a round: {statistics.median(plain):.2f} s\n"
        f"waited in these rounds: {waiting:.2f} s\n"
        f"ratio: mean {sum(beside) / sum(plain):.3f}, median of rounds "
        f"{statistics.median(ratios):.3f}, quartiles "
        f"{' to '.join(f'{x:.3f}' for x in statistics.quantiles(ratios, n=4)[::2])}"
    )


def parts(args: argparse.Namespace) -> tuple[Any, Any]:
    """The training state and the outer optimizer of `join`."""
    import jax.numpy as jnp

    import jaxsparse

    outer = jaxsparse.outer.sparse_loco(axis_name=None, is_dense=lambda *_: False)
    return (jnp.zeros(args.params),), outer


def join(args: argparse.Namespace) -> None:
    """Makes a run, and prints what a process took to join it."""
    import jax.numpy as jnp

    from jaxsparse.islands.arithmetic import Arithmetic
    from jaxsparse.islands.member import Member

    start, outer = parts(args)
    arithmetic = Arithmetic(outer, lambda state: state[0])
    with served(args.rate) as server:
        members = [
            Member(arithmetic, server.store(), name, quorum=args.islands, grace=0, snapshots=100)
            for name in [f"island{i}" for i in range(args.islands)]
        ]
        states = [member.join(start) for member in members]
        for round in range(args.past):
            exchanges = []
            for i, member in enumerate(members):
                moved = (states[i].worker[0] + jnp.sin(jnp.arange(args.params) + i + round),)
                states[i], exchange = member.begin(states[i]._replace(worker=moved))
                assert exchange is not None  # parameters are finite
                exchanges.append(exchange)
            while not all([exchange.is_done or exchange.advance() for exchange in exchanges]):
                pass
            states = [one.finish(*each) for one, each in zip(members, zip(states, exchanges))]
        flags = ["--params", args.params, "--url", server.url, "--started", time.time()]
        child = subprocess.run(
            [sys.executable, __file__, "joins", *map(str, flags)],
            env=os.environ | server.environment(0),
            stdout=subprocess.PIPE,
            check=True,
        )
        told = json.loads(child.stdout)
    print(
        f"{args.params:,} parameters, {args.rate * 8 / 1e6:g} Mbit/s, a snapshot and {args.past} "
        f"rounds of {args.islands} islands since, load {os.getloadavg()[0]:.1f} on "
        f"{os.cpu_count()}"
    )
    for what, seconds in told["seconds"].items():
        print(f"{seconds:8.2f} s  {what}")
    print(
        f"{sum(told['seconds'].values()):8.2f} s  from the start of the process to its first step"
    )
    print(f"asked: {told['requests']} requests, {told['bytes'] / 1e6:.2f} MB")


def joins(args: argparse.Namespace) -> None:
    """Joins a run as the process of an island does, and prints what took how long."""
    import jax

    from jaxsparse.islands import Islands

    imported = time.time()
    start, outer = parts(args)
    store = Timed(Store(args.url))
    train = Islands(lambda state, _: (state, None), outer, store, name="new", every=10)
    began = time.time()
    state = train.join(start)
    jax.block_until_ready(state)
    joined = time.time()
    seconds: dict[str, float] = {}
    for each in store.asked:
        seconds[each.kind] = seconds.get(each.kind, 0.0) + each.ended - each.began
    computing = joined - began - sum(seconds.values())
    print(
        json.dumps(
            {
                "seconds": {
                    "starting Python, imports": imported - args.started,
                    "the first state": began - imported,
                    **seconds,
                    "checking, compiling and adding up": computing,
                },
                "requests": len(store.asked),
                "bytes": sum(each.bytes for each in store.asked),
            }
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    kinds = parser.add_subparsers(required=True)
    one = kinds.add_parser("overlap", help="steps beside an exchange")
    one.set_defaults(run=overlap)
    one.add_argument("--rate", default="20mbit", help="of each link, each way")
    one.add_argument("--width", type=int, default=128, help="of the transformer")
    one.add_argument("--batch", type=int, default=16, help="windows in a step")
    one.add_argument("--every", type=int, default=10, help="local steps in a round")
    one.add_argument("--rounds", type=int, default=20)
    one.add_argument("--warm", type=int, default=3, help="rounds before, in which programs compile")
    one = kinds.add_parser("other", help="the other island, which `overlap` starts")
    one.set_defaults(run=other)
    one.add_argument("--url", required=True)
    one.add_argument("--sleep", type=float, required=True, help="seconds of a step")
    for name in ("width", "batch", "every"):
        one.add_argument(f"--{name}", type=int, required=True)
    one = kinds.add_parser("join", help="the time to join")
    one.set_defaults(run=join)
    one.add_argument("--rate", default="100mbit", help="of the link, each way")
    one.add_argument("--params", type=count, default=count("10M"))
    one.add_argument("--islands", type=int, default=4)
    one.add_argument("--past", type=int, default=2, help="rounds since the snapshot")
    one.add_argument("--latency", type=float, default=0.01, help="seconds of a request, planned")
    one = kinds.add_parser("joins", help="the process that `join` starts")
    one.set_defaults(run=joins)
    one.add_argument("--params", type=int, required=True)
    one.add_argument("--url", required=True)
    one.add_argument("--started", type=float, required=True)
    args = parser.parse_args()
    if "rate" in args:
        args.rate = bytes_per_second(args.rate)
    args.run(args)


if __name__ == "__main__":
    main()
