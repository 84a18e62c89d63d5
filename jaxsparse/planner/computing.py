"""Times the computations of an exchange on this device (encoding, decoding, residuals)."""

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxsparse import codecs
from jaxsparse.arrays.settings import check_density, entries, static_count, static_int
from jaxsparse.arrays.stream import SparseStream, to_dense
from jaxsparse.collectives.messages import MessageFormat
from jaxsparse.comm import wire
from jaxsparse.planner.profiles import Floor, SystemPoint, SystemProfile
from jaxsparse.planner.tensors import TensorPoint, TensorProfile
from jaxsparse.planner.timing import here, interleaved
from jaxsparse.reducers.base import Budget, Reducer
from jaxsparse.systems import WITH_VARIANTS, Dense, SparCML, choose
from jaxsparse.systems.dragonn import extractor
from jaxsparse.systems.sparcml import ALGORITHMS

_LONGEST = 2**31 - 1
Extract = Callable[[Float[Array, " d"], int], SparseStream]


class ExchangeTime(NamedTuple):
    """Computing time of one exchange, in seconds: medians over the timed steps."""

    exchange: float
    floor: float  # a donated x * 2 on as many float32, timed in turn: the least time of a pass


def time_exchange(
    reducer: Reducer, size: int, workers: int, *, repeats: int = 9, warm_up: int = 2
) -> ExchangeTime:
    """Times the computations of one of `workers` workers in an exchange, on this process's device.

    One step adds the residual to a gradient and runs the reducer. Nothing is sent: this worker's
    own messages replace those that would arrive (see `wire.dry_run`). Steps pass on state and
    residual, and donate them; `Dense` has no residual. All steps have the same gradient, cubes of
    normal numbers. The residual is scaled by 0, so all sums are equal, too. Otherwise, without
    other workers, most selected entries would never be delivered, and would pile up. A median does
    not show rare steps that do more, such as Ok-Topk's new thresholds (one in 32).

    Args:
        reducer: reducer for `size` elements.
        size: number of elements of the vector.
        workers: number of workers, W.
        repeats: number of timed steps.
        warm_up: number of steps before these.

    Raises:
        ValueError: settings out of range, or the reducer can't run with them.
    """
    size, workers = static_count("size", size), static_count("workers", workers)
    repeats, warm_up = static_count("repeats", repeats), static_count("warm_up", warm_up, 0)
    has_residual = not isinstance(reducer, Dense)

    def step(carried: Any, mean: Array, gradient: Array, scale: Array) -> tuple[Any, Array]:
        del mean  # its memory holds the next one
        state, residual = carried
        x = gradient + scale * residual if has_residual else gradient
        reduced = reducer(x, state, axis_name="data").whole(x)
        return (reduced.state, reduced.residual if has_residual else residual), reduced.mean

    gradient = jax.jit(lambda key: jax.random.normal(key, (size,)) ** 3)(jax.random.key(size))
    carried = (reducer.init(size), jnp.zeros((size if has_residual else 0,), jnp.float32))
    mean, doubled, scale = jnp.zeros_like(gradient), jnp.zeros_like(gradient), jnp.float32(0)
    # JAX would otherwise drop unread arguments, and not reuse their memory.
    jitted = jax.jit(step, donate_argnums=(0, 1), keep_unused=True)
    with wire.dry_run(workers):
        run = jitted.lower(carried, mean, gradient, scale).compile()
    double = jax.jit(lambda x: x * 2, donate_argnums=0).lower(doubled).compile()

    def exchange() -> Any:
        nonlocal carried, mean
        carried, mean = run(carried, mean, gradient, scale)
        return carried, mean

    def floor() -> Array:
        nonlocal doubled
        doubled = double(doubled)
        return doubled

    seconds = interleaved({"exchange": exchange, "floor": floor}, repeats, warm_up)
    return ExchangeTime(*map(statistics.median, seconds.values()))


def measured_as(system: str, reducer: Reducer, size: int, workers: int) -> str:
    """The name of a system in a `SystemProfile`.

    It is the system's own name. SparCML has a name for each algorithm, because their times differ.
    """
    if isinstance(reducer, SparCML):
        return f"{system}:{reducer.algorithm_for(size, workers)}"
    return system


def profile_systems(
    systems: Sequence[str] | None = None,
    *,
    sizes: Sequence[int] = (2**18, 2**22),
    workers: Sequence[int] = (4, 16, 64),
    density: float | Sequence[float] = (0.001, 0.01),
    repeats: int = 9,
    progress: Callable[[str], Any] | None = None,
) -> SystemProfile:
    """Times systems on this process's first device. See `time_exchange`.

    All systems, some 250 programs, take about 7 minutes on a CPU with two cores, most of it for
    compilation. Leave the machine otherwise idle. `sparcml` is timed with each algorithm that
    "auto" chooses from.

    Args:
        systems: names from `jaxsparse.systems.WITH_VARIANTS`. None: all. Dense is always included,
            because every prediction needs it.
        sizes: sizes of the vectors, in elements. Beyond the largest, predictions assume that times
            grow in proportion.
        workers: numbers of workers.
        density: share of the elements that a step delivers, or several shares.
        repeats: number of timed steps of each system.
        progress: function to call with a line for each measurement.

    Returns:
        The profile. It leaves out combinations that a system can't do, such as some densities, and
        systems of matrices (PowerSGD, DeMo), whose times depend on the shapes of leaves.

    Raises:
        ValueError: a system is unknown, or settings are out of range.
    """
    names = list(dict.fromkeys(["dense", *(WITH_VARIANTS if systems is None else systems)]))
    for name in names:
        if name not in WITH_VARIANTS:
            raise ValueError(f"system {name!r} is unknown: use one of {', '.join(WITH_VARIANTS)}")
    given = density if isinstance(density, Sequence) else [density]
    for share in given:
        check_density(share)
    densities, repeats = sorted(map(float, given)), static_count("repeats", repeats)
    sizes = [static_count("sizes", size) for size in sizes]
    workers = [static_count("workers", each) for each in workers]
    for setting, values in (("sizes", sizes), ("workers", workers), ("density", densities)):
        if not values:
            raise ValueError(f"{setting}={values} is empty: give at least one")
    if max(sizes) > _LONGEST:
        raise ValueError(f"sizes={sizes}: indices are int32, so give at most {_LONGEST}")
    points: list[SystemPoint] = []
    floors: dict[int, list[float]] = {size: [] for size in sizes}
    for name, size, count in itertools.product(names, floors, workers):
        follows = WITH_VARIANTS[name].follows_density
        for share in densities if follows else densities[:1]:
            where = f"{size:,} elements, {count} workers"
            where += f", density {share:g}" if follows else ""
            try:
                reducer = choose(name, share, size=size, workers=count).reducer(size)
                check_shapes(reducer)
                variants = _variants(reducer)
                found = [time_exchange(each, size, count, repeats=repeats) for each in variants]
            except ValueError as error:
                _tell(progress, f"{name}, {where}: left out: {error}")
                continue
            for each, timed in zip(variants, found):
                system = measured_as(name, each, size, count)
                passes = _rounded(timed.exchange / timed.floor)
                known = share if follows else None
                points.append(SystemPoint(system, size, count, known, passes))
                floors[size].append(timed.floor)
                _tell(
                    progress,
                    f"{system}, {where}: {1e3 * timed.exchange:.3f} ms, {passes:.1f} passes",
                )
    return SystemProfile(
        tuple(points),
        tuple(
            Floor(size, _rounded(statistics.median(times)))
            for size, times in floors.items()
            if times
        ),
        **here(),
        settings=f"normal cubed, medians of {repeats} steps",
    )


def check_shapes(budget: Budget) -> None:
    """Raises ValueError if the time for a vector says nothing about the time for a tree."""
    if budget.whole_leaves:
        raise ValueError("its computing depends on the shapes of leaves")


def _variants(reducer: Reducer) -> list[Reducer]:
    """The reducer, or each algorithm that it may choose."""
    if isinstance(reducer, SparCML):
        return [dataclasses.replace(reducer, algorithm=name) for name in ALGORITHMS]
    return [reducer]


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _tell(progress: Callable[[str], Any] | None, line: str) -> None:
    if progress is not None:
        progress(line)


def profile_tensors(
    extract: Extract | None = None,
    *,
    sizes: Sequence[int] = (2**12, 2**14, 2**16, 2**18, 2**20, 2**22, 2**24),
    workers: Sequence[int] = (2, 8, 32),
    density: float = 0.001,
    codec: codecs.Codec = codecs.COO,
    repeats: int = 10,
) -> TensorProfile:
    """Times compiled encoding and decoding on this process's first device.

    Encoding makes the selection, the message and the new residual. Decoding turns the messages of
    all workers into one dense vector. Both times are medians, with normal data. It takes about a
    minute on a CPU, much of it for compilation. Leave the device otherwise idle.

    Args:
        extract: function of a vector and k that returns a stream of k entries, such as
            `select.fast_top_k`. None: that of `dragonn`.
        sizes: sizes of the tensors in elements, at least one. Predictions are best between them.
        workers: numbers of messages to decode, at least two. The slope of the times over the
            messages' entries is the time of an entry.
        density: k as a share of the elements, in (0, 1]; k is rounded up.
        codec: wire format of the messages.
        repeats: number of timed runs of each program.

    Raises:
        ValueError: settings out of range.
    """
    check_density(density)
    codecs.check_codec(codec)
    repeats = static_count("repeats", repeats)
    sizes, workers = _distinct("sizes", sizes, 1), _distinct("workers", workers, 2)
    if extract is None:
        hashed = extractor("hash")
        extract = lambda x, k: hashed(x, k, jnp.uint32(0))
    points = [
        _tensor_point(size, workers, entries(density, size), extract, codec, repeats)
        for size in sizes
    ]
    return TensorProfile(
        tuple(points),
        **here(),
        settings=f"workers={workers}",
        density=density,
        codec=repr(codec),
    )


def _distinct(name: str, values: Sequence[int], least: int) -> list[int]:
    """The distinct values in increasing order."""
    try:
        distinct = sorted({static_int(name, value) for value in values})
    except TypeError:  # no sequence
        distinct = []
    if len(distinct) < least or distinct[0] < 1:
        raise ValueError(
            f"{name}={values!r} must be {least} or more distinct ints from 1 on: pass a sequence"
        )
    return distinct


def _tensor_point(
    size: int, workers: list[int], k: int, extract: Extract, codec: codecs.Codec, repeats: int
) -> TensorPoint:
    message_format = MessageFormat(size, k, "sum", jnp.float32, codec)

    @jax.jit
    def encode(x: Array) -> tuple[Array, Array]:
        stream = extract(x, k)
        sent = to_dense(stream, size)
        is_dense = message_format.is_dense
        message = message_format.pack(sent) if is_dense else codec.encode(stream, size)
        return message, x - sent

    keys = jax.random.split(jax.random.key(0), workers[-1])
    normal = jax.jit(lambda key: jax.random.normal(key, (size,), jnp.float32))
    messages = jnp.stack([encode(normal(key))[0] for key in keys])
    decode = jax.jit(message_format.merge_all)
    runs: dict[str, Callable[[], Any]] = {"encode": functools.partial(encode, normal(keys[0]))}
    for count in workers:
        runs[f"decode {count}"] = functools.partial(decode, messages[:count])
    encoding, *decoding = map(statistics.median, interleaved(runs, repeats).values())
    fixed, slope = _line([count * k for count in workers], decoding)
    return TensorPoint(size, encoding, fixed, slope)


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope, neither negative, of the line with least squares of relative errors."""
    xs, ys = np.asarray(x, float), np.asarray(y, float)
    candidates = [(0.0, float(np.sum(xs / ys) / np.sum((xs / ys) ** 2)))]
    candidates.append((float(np.sum(1 / ys) / np.sum(1 / ys**2)), 0.0))
    slope, fixed = np.polyfit(xs, ys, 1, w=1 / ys)
    if fixed >= 0 and slope >= 0:
        candidates.append((float(fixed), float(slope)))
    error = lambda line: float(np.sum(((line[0] + line[1] * xs) / ys - 1) ** 2))
    return min(candidates, key=error)
