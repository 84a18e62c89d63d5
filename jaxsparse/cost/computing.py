"""Timing what an exchange computes on this device: encoding, decoding, residuals; no network."""

import datetime
import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxsparse.collectives import wire
from jaxsparse.cost.codecs import CodecProfile, Floor, Point
from jaxsparse.reducers.base import Reducer
from jaxsparse.settings import static_int
from jaxsparse.systems import WITH_VARIANTS, Dense, choose


class _Timed(NamedTuple):
    """Medians over the timed steps, in seconds."""

    exchange: float
    floor: float  # a donated x * 2 on as many float32, in between: the least that a pass costs


def exchange_seconds(
    reducer: Reducer, size: int, workers: int, *, repeats: int = 9, warm_up: int = 2
) -> float:
    """Times what one of `workers` workers computes in an exchange, on this process's first device.

    One step adds the residual to a gradient and runs the reducer; nothing is sent (see
    `wire.dry_run`): what would arrive is what this worker sends. State and residual are carried
    from step to step, and donated; `Dense` has no residual. The gradient, normal cubed, is
    the same at each step, and so is the sum, for the residual is scaled by 0: without the other
    workers most of what is selected would never be delivered, and pile up. Steps that do more than
    most, such as those in which Ok-Topk takes new thresholds (one in 32), don't show in a median.

    Args:
        reducer: for `size` elements.
        size: elements of the vector.
        workers: W, any number.
        repeats: timed steps.
        warm_up: steps before these.

    Returns:
        The median, in seconds.

    Raises:
        ValueError: settings out of range, or the reducer can't run with them.
    """
    return _timed(reducer, size, workers, repeats, warm_up).exchange


def _timed(reducer: Reducer, size: int, workers: int, repeats: int, warm_up: int = 2) -> _Timed:
    size, workers = static_int("size", size), static_int("workers", workers)
    repeats, warm_up = static_int("repeats", repeats), static_int("warm_up", warm_up)
    for name, value in (("size", size), ("workers", workers), ("repeats", repeats)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    has_residual = not isinstance(reducer, Dense)

    def step(carried: Any, mean: Array, gradient: Array, scale: Array) -> tuple[Any, Array]:
        del mean  # its memory holds the next one
        state, residual = carried
        x = gradient + scale * residual if has_residual else gradient
        reduced = reducer(x, state, axis_name="data")
        return (reduced.state, reduced.residual if has_residual else residual), reduced.mean

    gradient = jax.jit(lambda key: jax.random.normal(key, (size,)) ** 3)(jax.random.key(size))
    carried = (reducer.init(size), jnp.zeros((size if has_residual else 0,), jnp.float32))
    mean, doubled, scale = jnp.zeros_like(gradient), jnp.zeros_like(gradient), jnp.float32(0)
    # Arguments that are not read would otherwise be dropped, and their memory not be reused.
    jitted = jax.jit(step, donate_argnums=(0, 1), keep_unused=True)
    with wire.dry_run(workers):
        run = jitted.lower(carried, mean, gradient, scale).compile()
    double = jax.jit(lambda x: x * 2, donate_argnums=0).lower(doubled).compile()

    exchanges, floors = [], []
    for i in range(warm_up + repeats):
        start = time.perf_counter()
        carried, mean = jax.block_until_ready(run(carried, mean, gradient, scale))
        middle = time.perf_counter()
        doubled = jax.block_until_ready(double(doubled))
        end = time.perf_counter()
        if i >= warm_up:
            exchanges.append(middle - start)
            floors.append(end - middle)
    return _Timed(statistics.median(exchanges), statistics.median(floors))


def profile_codecs(
    systems: Sequence[str] | None = None,
    *,
    sizes: Sequence[int] = (2**18, 2**22),
    workers: Sequence[int] = (4, 16, 64),
    density: float | Sequence[float] = (0.001, 0.01),
    repeats: int = 9,
    progress: Callable[[str], Any] | None = None,
) -> CodecProfile:
    """Times systems on this process's first device: see `exchange_seconds`.

    All of them, some 220 programs, take about 6 minutes on a CPU with two cores, most of it to
    compile. Leave it otherwise idle. `sparcml` is timed with the algorithm that suits a `Link()`.

    Args:
        systems: names from `jaxsparse.systems.WITH_VARIANTS`; None for all. Dense, which every
            prediction needs, is always among them.
        sizes: elements of the vectors. Beyond the largest times are taken to grow in proportion.
        workers: numbers of workers.
        density: of what a step delivers; one, or several.
        repeats: timed steps of each.
        progress: called with a line for each measurement.

    Returns:
        The profile. What a system can't do, for instance at a density, is left out of it.

    Raises:
        ValueError: a system is unknown, settings are out of range, or no system can run with them.
    """
    names = list(dict.fromkeys(["dense", *(WITH_VARIANTS if systems is None else systems)]))
    for name in names:
        if name not in WITH_VARIANTS:
            raise ValueError(f"system {name!r} is unknown: use one of {', '.join(WITH_VARIANTS)}")
    densities = [float(density)] if isinstance(density, int | float) else sorted(density)
    points: list[Point] = []
    floors: dict[int, list[float]] = {size: [] for size in sizes}
    for name, size, count in itertools.product(names, floors, workers):
        follows = WITH_VARIANTS[name].follows_density
        for share in densities if follows else densities[:1]:
            try:
                reducer = choose(name, share, size=size, workers=count).reducer(size)
                found = _timed(reducer, size, count, repeats)
            except ValueError as error:
                text = f"left out: {error}"
            else:
                passes = found.exchange / found.floor
                points.append(Point(name, size, count, share if follows else None, passes))
                floors[size].append(found.floor)
                text = f"{1e3 * found.exchange:.3f} ms, {passes:.1f} passes"
            if progress is not None:
                where = f"{name}, {size:,} elements, {count} workers"
                progress(f"{where}{f', density {share:g}' if follows else ''}: {text}")
    device: Any = jax.devices()[0]
    return CodecProfile(
        tuple(points),
        tuple(Floor(size, statistics.median(times)) for size, times in floors.items() if times),
        device=f"{device.platform}: {device.device_kind}, {os.cpu_count()} cores",
        jax=jax.__version__,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        settings=f"normal cubed, medians of {repeats} steps",
    )
