"""Measures a network's latency and bandwidth, and the number of teams that is fastest."""

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jaxsparse.arrays.settings import static_count, static_float
from jaxsparse.comm import wire
from jaxsparse.comm.links import Link, rounds
from jaxsparse.comm.workers import Workers
from jaxsparse.traffic.report import RECEIVED
from jaxsparse.training.sharding import shard

T = TypeVar("T")

# Terms that the times do not determine.
_NO_LATENCY, _NO_LIMIT = 1e-9, 1e15
# Number of exchanges before the timed ones. B-SAG's h crosses its whole range in 12.
_SETTLING = 20
_REPEATS = 9  # of an exchange, at most, where a network is measured


def _elapsed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def interleaved(
    runs: Mapping[Any, Callable[[], Any]], repeats: int, warm_up: int = 1
) -> dict[Any, list[float]]:
    """Seconds of each repeat of each run. They take turns, so that a slow spell hits all alike."""
    seconds: dict[Any, list[float]] = {name: [] for name in runs}
    for i in range(warm_up + repeats):
        for name, run in runs.items():
            spent = _elapsed(run)
            if i >= warm_up:
                seconds[name].append(spent)
    return seconds


def measure_network(
    mesh: Mesh,
    axis_name: str = "data",
    *,
    words: Sequence[int] = (1, 2**10, 2**14, 2**18),
    seconds: float = 10.0,
) -> Link:
    """Times sums, all-gathers, all-to-alls and permutations, and fits a latency and a bandwidth.

    Times go from a barrier to the end of the last process. Those of a busy machine are worth
    little, and those between devices of one process are of copies in memory. With several
    processes, all must call it alike, and all return the same.

    Args:
        mesh: the mesh of the workers, with at least two along `axis_name`.
        axis_name: the mesh axis of the workers.
        words: sizes to exchange, in words of 4 bytes: two or more.
        seconds: time limit for repeating exchanges. Compiling takes some more seconds.
    """
    workers = Workers.on(mesh, axis_name).count
    if workers < 2:
        raise ValueError(f"mesh={mesh} has one worker, which exchanges nothing: give two or more")
    left = static_float("seconds", seconds)
    sizes = sorted({static_count("words", each) for each in words})
    if len(sizes) < 2:
        raise ValueError(f"words={words!r} must be two or more sizes")
    exchanges, timings = _exchanges(workers, axis_name), []
    barrier = _placed(exchanges["all-reduce"], workers, mesh, axis_name)
    programs = len(sizes) * len(exchanges)
    for size in sizes:  # small sizes leave their share of the time to large ones
        for op, exchange in exchanges.items():
            n = -(-size // workers) * workers
            program = _placed(exchange, n, mesh, axis_name)
            jax.block_until_ready(program())  # compiles, and opens connections
            spent = [_slowest(program, barrier)]
            # All processes see the same times, so they decide alike.
            more = min(_REPEATS, int(left / programs / spent[0])) - 1
            spent += [_slowest(program, barrier) for _ in range(more)]
            left, programs = max(0.0, left - sum(spent)), programs - 1
            received = RECEIVED[op](workers) * 4 * n
            timings.append((rounds(op, workers), received, statistics.median(spent)))
    return fit_link(timings)


def fit_link(timings: Sequence[tuple[float, float, float]]) -> Link:
    """Fits a link, by least squares of relative errors, without a negative term.

    `timings` has of each exchange the messages one after the other, the bytes received, and
    seconds. If latency alone explains the times best, the bandwidth is 1e15 bytes a second. If
    bytes alone do, the latency is a nanosecond.

    >>> link = Link(latency=1e-4, bandwidth=1e8)
    >>> fitted = fit_link([(2, n, link.seconds(2, n)) for n in (8, 8000, 8e6)])
    >>> round(fitted.latency, 7), round(fitted.bandwidth)
    (0.0001, 100000000)
    """
    from scipy.optimize import nnls  # not at the top, because it takes long to import

    found = np.array(timings, float)
    rows = found[:, :2] / found[:, 2:]  # the terms of each should add up to 1
    scales = rows.max(axis=0)
    latency, beta = nnls(rows / scales, np.ones(len(rows)))[0] / scales
    return Link(max(latency, _NO_LATENCY), 1 / max(beta, 1 / _NO_LIMIT))


def _exchanges(workers: int, axis_name: str) -> dict[str, Callable[[Array], Array]]:
    """An exchange by XLA's opcode."""
    ring = [(i, (i + 1) % workers) for i in range(workers)]
    return {
        "all-reduce": lambda x: wire.psum(x, axis_name),
        "all-gather": lambda x: wire.all_gather(x, axis_name),
        "all-to-all": lambda x: wire.all_to_all(x.reshape(workers, -1), axis_name),
        "collective-permute": lambda x: wire.permute(x, axis_name, ring),
    }


def _placed(
    exchange: Callable[[Array], Array], words: int, mesh: Mesh, axis_name: str
) -> Callable[[], Any]:
    """The compiled exchange, with its operand placed on the mesh."""
    spec = PartitionSpec(axis_name)
    shape = (mesh.shape[axis_name], words)
    where = NamedSharding(mesh, spec)
    operand = jax.jit(lambda: jnp.ones(shape, jnp.float32), out_shardings=where)()
    mapped = jax.shard_map(
        lambda x: exchange(x[0])[None], mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    return functools.partial(jax.jit(mapped), operand)


def _slowest(program: Callable[[], Any], barrier: Callable[[], Any]) -> float:
    """Seconds of the slowest process; equal on all processes."""
    jax.block_until_ready(barrier())
    spent = _elapsed(program)
    if jax.process_count() == 1:
        return spent
    return float(np.max(multihost_utils.process_allgather(np.float32(spent))))


class Autotuned(NamedTuple):
    """The result of `autotune`."""

    best: Any
    seconds: dict[Any, float]  # median time of one exchange with each candidate


def autotune(
    make: Callable[[T], optax.GradientTransformationExtraArgs],
    candidates: Sequence[T],
    params: Any,
    mesh: Mesh,
    *,
    axis_name: str = "data",
    repeats: int = 10,
) -> Autotuned:
    """Times the exchange of gradients with each candidate, and returns the fastest.

    SparDL (section III-D) chooses its number of teams from an epoch with each. Here exchanges alone
    are timed, of normal gradients, half of whose energy is common to all workers. The first 20 are
    not timed: messages adapt (`spardl`, "bruck").

        teams = [t for t in range(1, workers + 1) if workers % t == 0]
        make = lambda teams: jaxsparse.spardl(0.01, teams=teams, gather="bruck")
        best, seconds = jaxsparse.planner.autotune(make, teams, params, mesh)

    With several processes, all must call it, and all return the first one's choice.

    Args:
        make: function from a candidate to the transformation with this setting.
        candidates: settings to try, distinct and hashable.
        params: tree of arrays or of `jax.ShapeDtypeStruct`s like the gradients.
        mesh: the mesh of the workers.
        axis_name: the mesh axis of the workers.
        repeats: number of timed exchanges with each candidate.
    """
    if not candidates:
        raise ValueError(f"candidates={candidates} is empty: give at least one setting to try")
    repeats, workers = static_count("repeats", repeats), Workers.on(mesh, axis_name).count
    leaves, treedef = jax.tree.flatten(params)

    def draw() -> Any:
        keys = jax.random.split(jax.random.key(0), 2 * len(leaves))
        normal = lambda key, leaf, rows: jax.random.normal(key, (rows, *leaf.shape), leaf.dtype)
        pairs = zip(keys[::2], keys[1::2], leaves)
        rows = [normal(common, x, 1) + normal(own, x, workers) for common, own, x in pairs]
        return jax.tree.unflatten(treedef, rows)

    gradients = jax.jit(draw, out_shardings=NamedSharding(mesh, PartitionSpec(axis_name)))()
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params)

    def exchange(candidate: T) -> Callable[[], Any]:
        tx = make(candidate)
        step, state = jax.jit(tx.update), shard(tx.init(zeros), mesh, axis_name)

        def run() -> Any:
            nonlocal state
            means, state = step(gradients, state, zeros)
            return means, state

        return run

    runs = {candidate: exchange(candidate) for candidate in candidates}
    times = interleaved(runs, repeats, warm_up=_SETTLING)
    medians = np.array([statistics.median(times[candidate]) for candidate in candidates])
    if jax.process_count() > 1:
        medians = multihost_utils.broadcast_one_to_all(medians)
    seconds = dict(zip(candidates, map(float, medians)))
    return Autotuned(min(candidates, key=seconds.__getitem__), seconds)
