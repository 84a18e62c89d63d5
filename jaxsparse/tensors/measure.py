"""Timing what encoding and decoding cost on this device."""

import datetime
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxsparse import codecs
from jaxsparse.collectives.parcel import Parcel
from jaxsparse.reducers.density import check_density, entries
from jaxsparse.settings import static_int
from jaxsparse.stream import SparseStream, to_dense
from jaxsparse.systems.dragonn import extractor
from jaxsparse.tensors.profiles import Point, Profile

Extract = Callable[[Float[Array, " d"], int], SparseStream]


def profile(
    extract: Extract | None = None,
    *,
    sizes: Sequence[int] = (2**12, 2**14, 2**16, 2**18, 2**20, 2**22, 2**24),
    workers: Sequence[int] = (2, 8, 32),
    density: float = 0.001,
    codec: codecs.Codec = codecs.COO,
    repeats: int = 10,
) -> Profile:
    """Times encoding and decoding, as compiled, on this process's first device.

    Encoding is the selection, the message and the new residual; decoding turns the messages of all
    workers into one dense vector. Both are medians, of normal data. Takes about a minute on a
    CPU, much of it to compile. Leave the device otherwise idle.

    Args:
        extract: of a vector and k its sparse stream of k entries, such as `select.fast_top_k`;
            None takes that of `dragonn`.
        sizes: elements of the tensors, each at least 1. Predictions are best between them.
        workers: numbers of messages to decode, at least two: the time of an entry is their slope.
        density: k as a share of the elements, in (0, 1]; k is rounded up.
        codec: of the messages.
        repeats: timed runs of each program.

    Raises:
        ValueError: settings out of range.
    """
    check_density(density)
    codecs.check_codec(codec)
    repeats = static_int("repeats", repeats)
    if repeats < 1:
        raise ValueError(f"repeats={repeats} must be at least 1")
    sizes, workers = _distinct("sizes", sizes, 1), _distinct("workers", workers, 2)
    if extract is None:
        hashed = extractor("hash")
        extract = lambda x, k: hashed(x, k, jnp.uint32(0))
    points = [
        _measure(size, workers, entries(density, size), extract, codec, repeats) for size in sizes
    ]
    device: Any = jax.devices()[0]
    return Profile(
        tuple(points),
        device=f"{device.platform}: {device.device_kind}",
        jax=jax.__version__,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        settings=f"workers={workers}",
        density=density,
        codec=repr(codec),
    )


def _distinct(name: str, values: Sequence[int], least: int) -> list[int]:
    """In increasing order."""
    try:
        distinct = sorted({static_int(name, value) for value in values})
    except TypeError:  # no sequence
        distinct = []
    if len(distinct) < least or distinct[0] < 1:
        raise ValueError(
            f"{name}={values!r} must be {least} or more distinct ints from 1 on: pass a sequence"
        )
    return distinct


def _measure(
    size: int, workers: list[int], k: int, extract: Extract, codec: codecs.Codec, repeats: int
) -> Point:
    parcel = Parcel(size, k, "sum", jnp.float32, codec)

    @jax.jit
    def encode(x: Array) -> tuple[Array, Array]:
        stream = extract(x, k)
        sent = to_dense(stream, size)
        message = parcel.pack(sent) if parcel.is_dense else codec.encode(stream, size)
        return message, x - sent

    keys = jax.random.split(jax.random.key(0), workers[-1])
    normal = jax.jit(lambda key: jax.random.normal(key, (size,), jnp.float32))
    messages = jnp.stack([encode(normal(key))[0] for key in keys])
    decode = jax.jit(parcel.merge_all)
    runs: list[Callable[[], Any]] = [functools.partial(encode, normal(keys[0]))]
    runs += [functools.partial(decode, messages[:count]) for count in workers]
    encoding, *decoding = _median_seconds(runs, repeats)
    fixed, slope = _line([count * k for count in workers], decoding)
    return Point(size, encoding, fixed, slope)


def _median_seconds(runs: Sequence[Callable[[], Any]], repeats: int) -> list[float]:
    for run in runs:
        jax.block_until_ready(run())  # compiles
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):  # in turn, so that a slow spell of the machine hits all alike
        for run, elapsed in zip(runs, seconds):
            start = time.perf_counter()
            jax.block_until_ready(run())
            elapsed.append(time.perf_counter() - start)
    return list(map(statistics.median, seconds))


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope, neither negative, of the line with the least relative squares."""
    xs, ys = np.asarray(x, float), np.asarray(y, float)
    candidates = [(0.0, float(np.sum(xs / ys) / np.sum((xs / ys) ** 2)))]
    candidates.append((float(np.sum(1 / ys) / np.sum(1 / ys**2)), 0.0))
    slope, fixed = np.polyfit(xs, ys, 1, w=1 / ys)
    if fixed >= 0 and slope >= 0:
        candidates.append((float(fixed), float(slope)))
    error = lambda line: float(np.sum(((line[0] + line[1] * xs) / ys - 1) ** 2))
    return min(candidates, key=error)
