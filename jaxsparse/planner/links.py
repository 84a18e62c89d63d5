"""Measures latency and bandwidth of a network, by timing a few collectives."""

import datetime
import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jaxsparse.arrays.settings import static_count, static_float, static_int
from jaxsparse.comm import wire
from jaxsparse.planner.network import Link, Network, Timing
from jaxsparse.planner.timing import elapsed
from jaxsparse.training.sharding import count_workers

# Fallbacks for terms that the timings do not determine.
_NO_LATENCY, _NO_LIMIT = 1e-9, 1e15
# Least repetitions at the two smallest sizes. A single slow exchange would otherwise pass for the
# latency.
_LEAST_REPEATS = 3


class _Run(NamedTuple):
    """One way to exchange about n words, written for one worker's row of them."""

    op: str
    shape: Callable[[int], tuple[int, ...]]  # shape of a worker's operand, for about n words
    exchange: Callable[[Array], Array]
    received: Callable[[int], float]  # received bytes, from operand bytes


def measure_network(
    mesh: Mesh,
    axis_name: str = "data",
    *,
    words: Sequence[int] = (1, 2**10, 2**14, 2**18),
    repeats: int = 9,
    seconds: float = 10.0,
) -> Network:
    """Times each kind of collective at some sizes and fits a latency and a bandwidth to each.

    It times sums, all-gathers, all-to-alls, permutations (around the ring, and from one worker to
    another) and reduce-scatters of float32. Each repetition starts after a barrier and ends when
    the last process is done. `fit_link` fits medians over repetitions. The times include the start
    of the compiled program. Times of a busy machine are worth little: look at the result's
    `timings`.

    With several processes, all must call it with equal arguments, and all return the same. Between
    devices of one process, such as emulated ones, it times copies in memory and not a network. The
    result's `settings` say how many processes there were.

    Args:
        mesh: the mesh of the workers, with at least two along `axis_name`.
        axis_name: the mesh axis of the workers.
        words: sizes to exchange, in words of 4 bytes; at least two, in increasing order.
        repeats: largest number of repetitions of each collective at each size.
        seconds: time limit for all exchanges together. Large sizes are repeated less often. A size
            between the first two and the last is left out if one exchange is likely to take more
            than its share of the remaining time, by a link fitted to the times so far. In any case,
            each kind is timed three times (or `repeats`) at the two smallest sizes, and once at the
            largest. Compilation takes some more seconds.

    Returns:
        A `Network` with a link for each kind. Its `link` is that of permutations, which are single
        messages. `Network.seconds` predicts the time of other programs, also among other numbers of
        workers.

    Raises:
        ValueError: the mesh has no such axis or fewer than two workers along it, or a setting is
            out of range.
    """
    workers = count_workers(mesh, axis_name)
    if workers < 2:
        raise ValueError(f"mesh={mesh} has one worker, which exchanges nothing: give two or more")
    repeats, seconds = static_count("repeats", repeats), static_float("seconds", seconds)
    if not 0 < seconds < math.inf:
        raise ValueError(f"seconds={seconds} must be positive and finite")
    sizes = [static_int("words", each) for each in words]
    if len(sizes) < 2 or sizes[0] < 1 or sorted(set(sizes)) != sizes:
        raise ValueError(
            f"words={words!r} must be two or more sizes from 1 on, in increasing order"
        )
    runs = _runs(workers, axis_name)
    timings: list[Timing] = []
    by_run: dict[str, list[Timing]] = {name: [] for name in runs}
    left, programs = seconds, len(sizes) * len(runs)
    # The barrier is a sum, which needs every worker. A permutation waits for one other only.
    barrier = _placed(runs["sum"], 1, mesh, axis_name)
    for i, size in enumerate(sizes):  # small sizes leave their share of the time to large ones
        for name, run in runs.items():
            share, programs = left / programs, programs - 1
            received = run.received(4 * int(np.prod(run.shape(size))))
            # All processes see the same times, so they decide alike.
            if 1 < i < len(sizes) - 1 and _predicted(by_run[name], received) > share:
                continue
            program = _placed(run, size, mesh, axis_name)
            jax.block_until_ready(program())  # compiles, and opens connections
            spent = _elapsed(program, barrier, 1)
            least = _LEAST_REPEATS if i < 2 else 1
            more = min(repeats, max(least, int(share / spent[0]))) - 1
            if more > 0:
                spent += _elapsed(program, barrier, more)
            left = max(left - sum(spent), 0.0)
            timing = Timing(run.op, workers, received, statistics.median(spent))
            timings.append(timing)
            by_run[name].append(timing)
    links = {run.op: fit_link([t for t in timings if t.op == run.op]) for run in runs.values()}
    device: Any = mesh.devices.flat[0]
    processes = len({each.process_index for each in mesh.devices.flat})
    return Network(
        links["collective-permute"],
        **{op.replace("-", "_"): link for op, link in links.items()},
        workers=workers,
        timings=tuple(timings),
        device=f"{device.platform}: {device.device_kind}",
        jax=jax.__version__,
        date=_agreed_date(),
        settings=f"{mesh.devices.size} devices of {processes} processes"
        + (": memory, not a network" if processes == 1 and device.platform == "cpu" else ""),
    )


def fit_link(timings: Sequence[Timing]) -> Link:
    """Fits a link to measured times, by least squares of relative errors.

    Args:
        timings: at least one. Their bytes must differ much to determine both terms.

    Returns:
        A link without a negative term. If latency alone explains the times best, the bandwidth is
        1e15 bytes a second. If bytes alone do, the latency is a nanosecond.

    Raises:
        ValueError: there is no timing, one is out of range, or all are of one worker or no bytes.

    Example:
        >>> link = Link(latency=1e-4, bandwidth=1e8)
        >>> timings = [
        ...     Timing("all-gather", 3, n, 2 * link.latency + n / link.bandwidth)
        ...     for n in (8, 8000, 8e6)
        ... ]
        >>> fitted = fit_link(timings)
        >>> round(fitted.latency, 7), round(fitted.bandwidth)
        (0.0001, 100000000)
    """
    from scipy import optimize  # not at the top, because it takes long to import

    if not timings:
        raise ValueError("timings are empty: give at least one")
    timings = [timing.checked() for timing in timings]
    seconds = np.array([timing.seconds for timing in timings])
    terms = np.array([[timing.rounds, timing.received] for timing in timings], float)
    # Relative errors: each row over its time should be 1.
    rows = terms / seconds[:, None]
    scale = rows.max(axis=0)
    if not scale.all():
        raise ValueError("timings are of nothing: give some of two or more workers and of bytes")
    latency, beta = optimize.nnls(rows / scale, np.ones(len(rows)))[0] / scale
    return Link(max(float(latency), _NO_LATENCY), 1 / max(float(beta), 1 / _NO_LIMIT))


def _predicted(timings: Sequence[Timing], received: float) -> float:
    """Predicted seconds of a collective like the timed ones, with `received` bytes."""
    link = fit_link(timings)
    return link.seconds(timings[0].rounds, received)


def _runs(workers: int, axis_name: str) -> dict[str, _Run]:
    whole = lambda n: (n,)
    rows = lambda n: (workers, -(-n // workers))
    ring = [(i, (i + 1) % workers) for i in range(workers)]
    pair = [(0, workers // 2)]  # in two processes, if there are several
    on = functools.partial
    share = (workers - 1) / workers
    return {
        "permutation": _Run(
            "collective-permute", whole, on(_permute, axis_name, ring), lambda n: n
        ),
        "pair": _Run("collective-permute", whole, on(_permute, axis_name, pair), lambda n: n),
        "sum": _Run(
            "all-reduce", whole, on(wire.psum, axis_name=axis_name), lambda n: 2 * share * n
        ),
        "gather": _Run(
            "all-gather",
            lambda n: rows(n)[1:],
            on(wire.all_gather, axis_name=axis_name),
            lambda n: (workers - 1) * n,
        ),
        "all-to-all": _Run(
            "all-to-all", rows, on(wire.all_to_all, axis_name=axis_name), lambda n: share * n
        ),
        "scatter": _Run(
            "reduce-scatter",
            rows,
            on(wire.reduce_scatter, axis_name=axis_name),
            lambda n: share * n,
        ),
    }


def _permute(axis_name: str, pairs: list[tuple[int, int]], x: Array) -> Array:
    return wire.permute(x, axis_name, pairs)


def _placed(run: _Run, words: int, mesh: Mesh, axis_name: str) -> Callable[[], Any]:
    """The compiled exchange, with its operand placed on the mesh."""
    spec = PartitionSpec(axis_name)
    shape = (mesh.shape[axis_name], *run.shape(words))
    operand = jax.jit(
        lambda: jnp.ones(shape, jnp.float32), out_shardings=NamedSharding(mesh, spec)
    )()
    mapped = jax.shard_map(
        lambda x: run.exchange(x[0])[None],
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    return functools.partial(jax.jit(mapped), operand)


def _elapsed(program: Callable[[], Any], barrier: Callable[[], Any], repeats: int) -> list[float]:
    """Seconds of each repetition on the slowest process; equal on all processes."""
    seconds = []
    for _ in range(repeats):
        jax.block_until_ready(barrier())
        seconds.append(elapsed(program))
    if jax.process_count() == 1:
        return seconds
    everyone = multihost_utils.process_allgather(np.array(seconds, np.float32))
    return np.asarray(everyone, np.float64).max(axis=0).tolist()


def _agreed_date() -> str:
    now = np.uint32(time.time())
    if jax.process_count() > 1:
        now = multihost_utils.broadcast_one_to_all(now)
    return datetime.datetime.fromtimestamp(int(now), datetime.UTC).isoformat(timespec="seconds")
